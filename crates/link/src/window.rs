//! How much may be under way to one end of a TCP connection, and how soon what is lost is sent again.

use socket2::Socket;
use std::io;
use std::time::Duration;

/// The window that a connection between machines begins with.
pub(crate) const FIRST: usize = 4 << 10;

/// From now on, up to `bytes` bytes may be under way, or two packets if those are more: a window that
/// does not hold them makes TCP wait for timers. It must not be fewer than before.
pub(crate) fn widen(socket: &Socket, bytes: usize) -> io::Result<()> {
    let packet = socket.tcp_mss().unwrap_or(0) as usize;
    let bytes = bytes.max(2 * packet);
    socket.set_recv_buffer_size(bytes)?;
    // When it connects, Linux also writes down the largest window that the first buffer allows.
    #[cfg(target_os = "linux")]
    options::set_largest_window(socket, bytes)?;
    Ok(())
}

/// What is lost is sent again soon: the way is short. True if the system can do it.
pub(crate) fn expect_answers_soon(socket: &Socket) -> bool {
    #[cfg(target_os = "linux")]
    return options::set_timers(socket).is_ok();
    #[cfg(not(target_os = "linux"))]
    {
        let _ = socket;
        false
    }
}

/// The shortest round trip that there was, where the system tells.
pub(crate) fn round_trip(socket: &Socket) -> Option<Duration> {
    #[cfg(target_os = "linux")]
    return options::least_round_trip(socket);
    #[cfg(not(target_os = "linux"))]
    {
        let _ = socket;
        None
    }
}

/// Options of Linux that socket2 does not have.
#[cfg(target_os = "linux")]
mod options {
    use socket2::Socket;
    use std::io;
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    /// Where the shortest round trip is in the kernel's `struct tcp_info`, in bytes: microseconds,
    /// in four bytes. Kernels since 4.6 have it.
    const LEAST_ROUND_TRIP: usize = 148;

    /// The shortest time before something is sent again, and the longest time before something is
    /// acknowledged: options of newer kernels, which libc does not name yet, and microseconds.
    /// Without them both are 200 ms. The first is the longer one, or nothing would be acknowledged
    /// in time. Less than two ticks of the kernel's clock, 8 ms, is refused.
    const LEAST_RESEND: (libc::c_int, libc::c_int) = (45, 16_000);
    const LONGEST_DELAY: (libc::c_int, libc::c_int) = (46, 8000);

    pub(super) fn set_largest_window(socket: &Socket, bytes: usize) -> io::Result<()> {
        let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        set(socket, libc::TCP_WINDOW_CLAMP, value)
    }

    pub(super) fn set_timers(socket: &Socket) -> io::Result<()> {
        set(socket, LONGEST_DELAY.0, LONGEST_DELAY.1)?;
        set(socket, LEAST_RESEND.0, LEAST_RESEND.1)
    }

    fn set(socket: &Socket, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        let (fd, place) = (socket.as_raw_fd(), (&raw const value).cast());
        let size = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the kernel reads `size` bytes from `value`, which has so many.
        let failed = unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, option, place, size) };
        if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    pub(super) fn least_round_trip(socket: &Socket) -> Option<Duration> {
        let mut info = [0u8; LEAST_ROUND_TRIP + 4];
        let mut length = info.len() as libc::socklen_t;
        let (fd, place) = (socket.as_raw_fd(), info.as_mut_ptr().cast());
        // SAFETY: the kernel writes at most `length` bytes to `info`, which has so many, and says in
        // `length` how many it has written.
        let failed = unsafe {
            libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, place, &raw mut length)
        };
        let told = failed == 0 && length as usize == info.len();
        let word = info.last_chunk().filter(|_| told)?;
        let micros = u32::from_ne_bytes(*word);
        // A connection that has measured nothing says the largest number.
        (micros != u32::MAX).then(|| Duration::from_micros(micros.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_window_that_is_widened_takes_more() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = Socket::from(listener.try_clone().unwrap());
        socket.set_recv_buffer_size(FIRST).unwrap();
        let mut caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut called, _) = listener.accept().unwrap();
        let called_socket = Socket::from(called.try_clone().unwrap());
        Socket::from(caller.try_clone().unwrap()).set_send_buffer_size(4 << 10).unwrap();
        caller.set_nonblocking(true).unwrap();

        let narrow = fill(&mut caller);
        called.read_exact(&mut vec![0; narrow]).unwrap();
        widen(&called_socket, 1 << 20).unwrap();
        let wide = fill(&mut caller);
        assert!(wide > 2 * narrow, "{narrow} bytes fit before, {wide} bytes after");
        assert!(round_trip(&called_socket).is_some_and(|time| time > Duration::ZERO));
    }

    /// Writes until nothing more is taken, often enough that an acknowledgement may come late. Returns
    /// how many bytes were taken.
    fn fill(caller: &mut TcpStream) -> usize {
        let (mut taken, mut refused) = (0, 0);
        while refused < 200 {
            match caller.write(&[7; 1000]) {
                Ok(bytes) => (taken, refused) = (taken + bytes, 0),
                Err(_) => {
                    refused += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        taken
    }
}
