//! How much may be under way to one end of a TCP connection, and how soon what is lost is sent again.

use crate::delivery::{Delivery, PathFacts};
use socket2::Socket;
use std::io;
use std::time::Duration;

/// Bytes asked for in each socket's send and receive buffer. The kernel may grant less
/// (`net.core.wmem_max`, `net.core.rmem_max`). Links between hosts have smaller receive buffers
/// ([`Link::widen`](crate::Link::widen)).
///
/// It holds four chunks of the default size. From 256 KiB to 2 MiB on loopback, and from 256 KiB to
/// 1 MiB on links of 1 Gbit/s, no size stood out from the noise; 128 KiB was slower on loopback.
pub const SOCKET_BUFFER: usize = 1 << 20;
/// The window that a connection between machines begins with.
const FIRST: usize = 4 << 10;

/// Connections of `socket`, which is new, begin with a small window that may become large.
///
/// When a connection is made, its ends agree on the unit of all later windows. If the program has set a
/// small buffer, Linux agrees on single bytes, and no window is ever above 64 KB. So the buffer is
/// set, and then counts as the system's own choice until there is a connection: see [`keep_small`].
/// Kernels before 5.16 cannot do this. Their windows stay below 64 KB.
pub(crate) fn begin(socket: &Socket) -> io::Result<()> {
    socket.set_recv_buffer_size(FIRST)?;
    #[cfg(target_os = "linux")]
    if let Err(error) = options::leave_receive_buffer_to_the_system(socket) {
        tracing::debug!(%error, "windows stay below 64 KB");
    }
    Ok(())
}

/// The connection has just been made. Its window stays as it is until [`widen`] says otherwise.
pub(crate) fn keep_small(socket: &Socket) -> io::Result<()> {
    resize(socket, FIRST)
}

/// From now on, up to `bytes` bytes may be under way, or two packets if those are more: a window that
/// does not hold them makes TCP wait for timers. It must not be fewer than before.
pub(crate) fn widen(socket: &Socket, bytes: usize) -> io::Result<()> {
    let packet = socket.tcp_mss().unwrap_or(0) as usize;
    resize(socket, bytes.max(2 * packet))
}

/// From now on the system decides how many bytes may be under way, and how many wait to be sent: more, while
/// more is used. A buffer that a program sets is cut to the machine's limit without a word, which is 208 KB
/// unless somebody has raised it. What the system chooses may be 6 MB: on a way of 10 ms at 1 Gbit/s, 20 MB
/// between two nodes took 0.8 s before, and take 0.2 s. Kernels before 5.16 cannot do this.
pub(crate) fn leave_to_the_system(socket: &Socket) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    options::leave_buffers_to_the_system(socket)?;
    let _ = socket;
    Ok(())
}

fn resize(socket: &Socket, bytes: usize) -> io::Result<()> {
    socket.set_recv_buffer_size(bytes)?;
    // Linux also writes down the largest window that an earlier buffer allowed.
    #[cfg(target_os = "linux")]
    options::set_largest_window(socket, bytes)?;
    Ok(())
}

/// What comes is acknowledged soon: the way is short. What is lost is sent again soon, too, if so wished.
/// True if the system can do it.
pub(crate) fn expect_answers(socket: &Socket, resend_soon: bool) -> bool {
    #[cfg(target_os = "linux")]
    return options::set_timers(socket, resend_soon).is_ok();
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (socket, resend_soon);
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

/// What becomes of what is sent, where the system tells.
pub(crate) fn delivery(socket: &Socket) -> Option<Delivery> {
    #[cfg(target_os = "linux")]
    return options::info(socket).map(|info| Delivery::from_info(&info));
    #[cfg(not(target_os = "linux"))]
    {
        let _ = socket;
        None
    }
}

/// What the kernel has counted of a connection, where the system tells.
pub(crate) fn path_facts(socket: &Socket) -> Option<PathFacts> {
    #[cfg(target_os = "linux")]
    return options::path_facts(socket);
    #[cfg(not(target_os = "linux"))]
    {
        let _ = socket;
        None
    }
}

/// From now on packets of `socket`, which is one for datagrams, are not cut on their way: one that is
/// too large is lost, or refused here.
pub(crate) fn do_not_fragment(socket: &Socket, is_ipv6: bool) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    return options::do_not_fragment(socket, is_ipv6);
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (socket, is_ipv6);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The MTU of this machine's interface `name`, as this process's network namespace has it. Files
/// under `/sys` may be of another namespace.
pub(crate) fn interface_mtu(name: &str) -> Option<u32> {
    #[cfg(target_os = "linux")]
    return options::interface_mtu(name);
    #[cfg(not(target_os = "linux"))]
    {
        let _ = name;
        None
    }
}

/// The kernel's number of this machine's interface `name`.
#[cfg(target_os = "linux")]
pub(crate) fn interface_number(name: &str) -> Option<u32> {
    options::interface_number(name)
}

/// Options of Linux that socket2 does not have.
#[cfg(target_os = "linux")]
mod options {
    use crate::delivery::PathFacts;
    use socket2::Socket;
    use std::io;
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    /// Where the shortest round trip is in the kernel's `struct tcp_info`, in bytes: microseconds,
    /// in four bytes. Kernels since 4.6 have it.
    const LEAST_ROUND_TRIP: usize = 148;
    /// The same of the size of segments that are sent, of the path's MTU, of segments that were sent
    /// again, and of segments with data that were sent.
    const SEGMENT: usize = 16;
    const PATH_MTU: usize = 60;
    const RESENT: usize = 100;
    const SENT: usize = 156;

    /// The shortest time before something is sent again, and the longest time before something is
    /// acknowledged: options of newer kernels, which libc does not name yet, and microseconds.
    /// Without them both are 200 ms. The first is the longer one, or nothing would be acknowledged
    /// in time. Less than two ticks of the kernel's clock, 8 ms, is refused.
    const LEAST_RESEND: libc::c_int = 45;
    const LONGEST_DELAY: (libc::c_int, libc::c_int) = (46, 8000);
    const SOON: libc::c_int = 16_000;
    const USUAL: libc::c_int = 200_000;

    /// Which buffers are as the program has set them: bits, one for the one that is sent from.
    const BUFFER_LOCK: libc::c_int = 72;
    const SEND_BUFFER: libc::c_int = 1;

    pub(super) fn leave_receive_buffer_to_the_system(socket: &Socket) -> io::Result<()> {
        set_at(libc::SOL_SOCKET, socket, BUFFER_LOCK, SEND_BUFFER)
    }

    pub(super) fn leave_buffers_to_the_system(socket: &Socket) -> io::Result<()> {
        set_at(libc::SOL_SOCKET, socket, BUFFER_LOCK, 0)
    }

    #[cfg(test)]
    pub(super) fn buffers_set_by_the_program(socket: &Socket) -> io::Result<libc::c_int> {
        let (mut value, mut size) = (0, size_of::<libc::c_int>() as libc::socklen_t);
        let (fd, place) = (socket.as_raw_fd(), (&raw mut value).cast());
        // SAFETY: the kernel writes at most `size` bytes to `value`, which has so many.
        let failed =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, BUFFER_LOCK, place, &raw mut size) };
        if failed == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
    }

    pub(super) fn set_largest_window(socket: &Socket, bytes: usize) -> io::Result<()> {
        let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        set(socket, libc::TCP_WINDOW_CLAMP, value)
    }

    pub(super) fn set_timers(socket: &Socket, resend_soon: bool) -> io::Result<()> {
        set(socket, LONGEST_DELAY.0, LONGEST_DELAY.1)?;
        set(socket, LEAST_RESEND, if resend_soon { SOON } else { USUAL })
    }

    pub(super) fn do_not_fragment(socket: &Socket, is_ipv6: bool) -> io::Result<()> {
        match is_ipv6 {
            true => {
                let option = libc::IPV6_MTU_DISCOVER;
                set_at(libc::IPPROTO_IPV6, socket, option, libc::IPV6_PMTUDISC_PROBE)
            }
            false => {
                let option = libc::IP_MTU_DISCOVER;
                set_at(libc::IPPROTO_IP, socket, option, libc::IP_PMTUDISC_PROBE)
            }
        }
    }

    fn set(socket: &Socket, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        set_at(libc::IPPROTO_TCP, socket, option, value)
    }

    fn set_at(
        level: libc::c_int,
        socket: &Socket,
        option: libc::c_int,
        value: libc::c_int,
    ) -> io::Result<()> {
        let (fd, place) = (socket.as_raw_fd(), (&raw const value).cast());
        let size = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the kernel reads `size` bytes from `value`, which has so many.
        let failed = unsafe { libc::setsockopt(fd, level, option, place, size) };
        if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    pub(super) fn least_round_trip(socket: &Socket) -> Option<Duration> {
        let micros = word(&info::<{ LEAST_ROUND_TRIP + 4 }>(socket)?, LEAST_ROUND_TRIP)?;
        // A connection that has measured nothing says the largest number.
        (micros != u32::MAX).then(|| Duration::from_micros(micros.into()))
    }

    pub(super) fn path_facts(socket: &Socket) -> Option<PathFacts> {
        let info = info::<{ SENT + 4 }>(socket)?;
        Some(PathFacts {
            segment: word(&info, SEGMENT)?,
            mtu: word(&info, PATH_MTU)?,
            sent: word(&info, SENT)?,
            resent: word(&info, RESENT)?,
        })
    }

    pub(super) fn interface_mtu(name: &str) -> Option<u32> {
        let request = ask_interface(name, libc::SIOCGIFMTU as _)?;
        // SAFETY: the kernel has written this member of the union, and any bits are a number.
        let mtu = unsafe { request.ifr_ifru.ifru_mtu };
        u32::try_from(mtu).ok()
    }

    pub(super) fn interface_number(name: &str) -> Option<u32> {
        let request = ask_interface(name, libc::SIOCGIFINDEX as _)?;
        // SAFETY: the kernel has written this member of the union, and any bits are a number.
        let number = unsafe { request.ifr_ifru.ifru_ifindex };
        u32::try_from(number).ok()
    }

    /// What the kernel says of the interface `name`.
    fn ask_interface(name: &str, question: libc::Ioctl) -> Option<libc::ifreq> {
        // Any socket will do.
        let socket = Socket::new(socket2::Domain::UNIX, socket2::Type::DGRAM, None).ok()?;
        // SAFETY: all bits zero are valid numbers, and a null pointer, in this structure.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // The last byte stays zero.
        if name.len() >= request.ifr_name.len() {
            return None;
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        let place = &raw mut request;
        // SAFETY: for these questions the kernel reads the name from `request` and writes a number to it.
        let failed = unsafe { libc::ioctl(socket.as_raw_fd(), question, place) };
        (failed == 0).then_some(request)
    }

    /// The number of four bytes that begins at byte `at`.
    fn word(info: &[u8], at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(*info.get(at..)?.first_chunk()?))
    }

    /// The first bytes of the kernel's `struct tcp_info`, if it has so many.
    pub(super) fn info<const SIZE: usize>(socket: &Socket) -> Option<[u8; SIZE]> {
        let mut info = [0u8; SIZE];
        let mut length = info.len() as libc::socklen_t;
        let (fd, place) = (socket.as_raw_fd(), info.as_mut_ptr().cast());
        // SAFETY: the kernel writes at most `length` bytes to `info`, which has so many, and says in
        // `length` how many it has written.
        let failed = unsafe {
            libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, place, &raw mut length)
        };
        (failed == 0 && length as usize == SIZE).then_some(info)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[cfg(target_os = "linux")]
    #[test]
    fn a_window_that_is_widened_takes_more() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = Socket::from(listener.try_clone().unwrap());
        begin(&socket).unwrap();
        let mut caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut called, _) = listener.accept().unwrap();
        let called_socket = Socket::from(called.try_clone().unwrap());
        Socket::from(caller.try_clone().unwrap()).set_send_buffer_size(4 << 10).unwrap();
        caller.set_nonblocking(true).unwrap();

        keep_small(&called_socket).unwrap();
        let narrow = fill(&mut caller);
        called.read_exact(&mut vec![0; narrow]).unwrap();
        widen(&called_socket, 1 << 20).unwrap();
        // TCP opens a window as far as it is used.
        let mut wide = 0;
        for _ in 0..20 {
            let taken = fill(&mut caller);
            called.read_exact(&mut vec![0; taken]).unwrap();
            wide = taken.max(wide);
        }
        // More than a window in single bytes, which is 64 KB at most, and than all other buffers.
        assert!(wide > 200 << 10 && wide > 2 * narrow, "{narrow} bytes fit before, {wide} after");
        assert!(round_trip(&called_socket).is_some_and(|time| time > Duration::ZERO));
        let facts = path_facts(&Socket::from(caller.try_clone().unwrap())).unwrap();
        assert!(facts.sent > 0 && facts.resent <= facts.sent, "{facts:?}");
        assert!(facts.segment > 500 && facts.mtu > facts.segment, "{facts:?}");
    }

    /// A buffer that a program has set stays as it is. One that the system chooses grows while it is used.
    #[cfg(target_os = "linux")]
    #[test]
    fn buffers_that_are_left_to_the_system_grow() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut called, _) = listener.accept().unwrap();
        let socket = Socket::from(called.try_clone().unwrap());
        keep_small(&socket).unwrap();
        let before = socket.recv_buffer_size().unwrap();
        assert_ne!(options::buffers_set_by_the_program(&socket).unwrap(), 0);
        leave_to_the_system(&socket).unwrap();
        assert_eq!(options::buffers_set_by_the_program(&socket).unwrap(), 0);
        let sending = std::thread::spawn(move || {
            let piece = vec![7; 1 << 20];
            (0..100).try_for_each(|_| caller.write_all(&piece))
        });
        let mut piece = vec![0; 1 << 20];
        (0..100).for_each(|_| called.read_exact(&mut piece).unwrap());
        sending.join().unwrap().unwrap();
        let after = socket.recv_buffer_size().unwrap();
        assert!(after > before, "{before} became {after}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn interfaces_have_an_mtu_if_there_are_such() {
        assert!(interface_mtu("lo").is_some_and(|mtu| mtu >= 1500));
        assert_eq!(interface_mtu("nonesuch0"), None);
        assert_eq!(interface_mtu("a name that no interface can have"), None);
    }

    /// The same connection, when the other end reads and when it does not.
    #[test]
    fn the_system_says_what_becomes_of_what_is_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut called, _) = listener.accept().unwrap();
        let socket = Socket::from(caller.try_clone().unwrap());
        caller.write_all(b"words").unwrap();
        called.read_exact(&mut [0; 5]).unwrap();
        let read = delivery(&socket).unwrap();
        assert_eq!((read.resent, read.probes), (0, 0), "{read:?}");
        assert!(read.round_trip > Duration::ZERO, "{read:?}");
        caller.set_nonblocking(true).unwrap();
        // The first question whether there is room again is asked after 200 ms, and later ones ever more
        // rarely. On a machine that stands still, answers may be late.
        let mut told = Vec::new();
        let says_why = (0..50).any(|_| {
            fill(&mut caller);
            told.push(delivery(&socket).unwrap().to_string());
            told.last().is_some_and(|words| words.contains("its process does not read"))
        });
        assert!(says_why, "{told:#?}");
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
