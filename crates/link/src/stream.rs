use crate::delivery::PathFacts;
use crate::encrypted::EncryptedLink;
use crate::handshake::Protection;
use crate::shared::{self, SharedLink};
use crate::tags::Tags;
use crate::window::{self, SOCKET_BUFFER};
use crate::{Carrier, Delivery, Link};
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};
use std::ffi::c_int;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes that wait in a socket before they are sent, at most: two batches of a lane.
///
/// An urgent frame cannot overtake bytes that a socket has taken. Eight nodes at 200 Mbit/s that train VGG19
/// by parameter server, an eighth of it, took 6.7 s an iteration without a limit, 6.03 s with this
/// one and 5.95 s with a quarter of it, which costs a tenth more CPU time; 5.63 s is computing.
#[cfg(target_os = "linux")]
const UNSENT: u32 = 256 << 10;

/// A connection whose other end has been authenticated, or is in its handshake. Its reads and writes
/// block, with a deadline.
///
/// [`Stream::into_calling_link`] and [`Stream::into_called_link`] turn it into what a lane's event loop works with.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    carrier: Carrier,
    peer: String,
    deadline: Option<Instant>,
    /// Written by whoever no longer wants what is read here.
    cancelled: Option<Arc<AtomicBool>>,
    /// What protects the bytes, once the handshake is over.
    protection: Option<Protection>,
}

impl Stream {
    /// From now on, reads and writes that are not done by `deadline` fail with
    /// [`ErrorKind::TimedOut`]. Without a deadline they wait for as long as it takes.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// The other end, as logs and errors name it: `10.0.0.2:41234` or `unix:poseidon-123-5f0c…`.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// What carries the bytes.
    pub fn carrier(&self) -> Carrier {
        self.carrier
    }

    /// What frames on this connection are tagged with, if they have tags. Who writes and reads frames
    /// counts them.
    pub fn tags(&mut self) -> Option<&mut Tags> {
        match &mut self.protection {
            Some(Protection::Tags(tags)) => Some(tags),
            _ => None,
        }
    }

    /// From now on, up to `bytes` bytes may be under way to this end, as with a link.
    pub fn widen(&self, bytes: usize) -> io::Result<()> {
        if self.carrier == Carrier::Tcp { window::widen(&self.socket, bytes) } else { Ok(()) }
    }

    /// What the kernel has counted of this connection. `None` if it is not of TCP.
    pub fn path_facts(&self) -> Option<PathFacts> {
        if self.carrier == Carrier::Tcp { window::path_facts(&self.socket) } else { None }
    }

    /// The handshake is over. Bytes are protected where somebody may be in between, which is
    /// everywhere but within a machine: there the kernel carries them from one process to the other.
    pub(crate) fn protect(&mut self, protection: Protection) {
        self.protection = (self.carrier == Carrier::Tcp).then_some(protection);
    }

    /// The connection as a lane wants it: non-blocking, without a deadline. For the side that
    /// called: on a unix socket it offers shared memory, if `shared`, and tells the other side.
    pub fn into_calling_link(self, shared: bool) -> io::Result<Box<dyn Link>> {
        self.socket.set_write_timeout(remaining(self.deadline)?)?;
        self.into_link(|socket| shared::offer(socket, shared))
    }

    /// The connection as a lane wants it, for the side that was called: the caller decides whether
    /// memory is shared.
    pub fn into_called_link(self) -> io::Result<Box<dyn Link>> {
        self.socket.set_read_timeout(remaining(self.deadline)?)?;
        self.into_link(shared::accept)
    }

    /// The socket of a connection that lasts: it notices by itself when the other machine is gone.
    pub(crate) fn into_lasting_socket(self) -> io::Result<(Socket, Option<Protection>)> {
        if self.carrier == Carrier::Tcp {
            let probes = TcpKeepalive::new().with_time(IDLE).with_interval(PROBE);
            self.socket.set_tcp_keepalive(&probes.with_retries(PROBES))?;
            window::widen(&self.socket, SOCKET_BUFFER)?;
        }
        Ok((self.socket, self.protection))
    }

    /// From now on, reads end soon after `cancelled` has become true.
    pub(crate) fn set_cancelled(&mut self, cancelled: Option<Arc<AtomicBool>>) {
        self.cancelled = cancelled;
    }

    fn into_link(
        self,
        share: impl FnOnce(Socket) -> io::Result<Result<SharedLink, Socket>>,
    ) -> io::Result<Box<dyn Link>> {
        let carrier = self.carrier;
        let socket = match carrier {
            Carrier::Unix => match share(self.socket).map_err(timed_out)? {
                Ok(link) => {
                    link.set_nonblocking()?;
                    return Ok(Box::new(link));
                }
                Err(socket) => socket,
            },
            _ => self.socket,
        };
        socket.set_nonblocking(true)?;
        let link = |tags| SocketLink { socket, carrier, window: 0, tags };
        Ok(match self.protection {
            Some(Protection::Records(records)) => {
                Box::new(EncryptedLink::new(link(None), *records))
            }
            Some(Protection::Tags(tags)) => Box::new(link(Some(tags))),
            None => Box::new(link(None)),
        })
    }

    /// Takes over a connected socket, in blocking mode.
    pub(crate) fn new(socket: Socket, peer: &SockAddr) -> io::Result<Self> {
        // On some systems an accepted socket inherits the non-blocking mode of its listener.
        socket.set_nonblocking(false)?;
        let carrier = match peer.as_socket() {
            Some(_) => {
                // A header must not wait for the acknowledgement of the payload before it.
                socket.set_tcp_nodelay(true)?;
                Carrier::Tcp
            }
            None => Carrier::Unix,
        };
        let peer = peer_name(peer);
        Ok(Self { socket, carrier, peer, deadline: None, cancelled: None, protection: None })
    }

    /// Closes the connection so that the peer can still read the last bytes written. Closing a TCP
    /// socket with unread input at once would reset the connection, and the reset would overtake a
    /// refusal that is on its way.
    pub(crate) fn close_gently(mut self) {
        if self.socket.shutdown(Shutdown::Write).is_err() {
            return;
        }
        self.set_deadline(Some(Instant::now() + GENTLE_CLOSE));
        let mut scrap = [0; 4096];
        for _ in 0..GENTLE_CLOSE_READS {
            if matches!(self.read(&mut scrap), Ok(0) | Err(_)) {
                return;
            }
        }
    }
}

/// What is left until `deadline`, as the socket option wants it.
pub(crate) fn remaining(deadline: Option<Instant>) -> io::Result<Option<Duration>> {
    let Some(deadline) = deadline else { return Ok(None) };
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ErrorKind::TimedOut.into());
    }
    // Zero means for ever; a wait that ends early would be reported as one that ended in time.
    Ok(Some(left.max(Duration::from_millis(1))))
}

/// Tries until it is done or `deadline` has passed. A socket's time-out shows as `WouldBlock`, and it
/// may come early where a machine stood still: the deadline decides.
pub(crate) fn until<T>(
    deadline: Option<Instant>,
    mut attempt: impl FnMut(Option<Duration>) -> io::Result<T>,
) -> io::Result<T> {
    loop {
        match attempt(remaining(deadline)?) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            done => return done,
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let Self { socket, deadline, cancelled, protection, .. } = self;
        let read = |buf: &mut [u8]| {
            until(*deadline, |left| {
                let left = match &*cancelled {
                    Some(cancelled) if cancelled.load(Ordering::Acquire) => {
                        return Err(io::Error::new(ErrorKind::ConnectionAborted, "called off"));
                    }
                    Some(_) => Some(left.map_or(GLANCE, |left| left.min(GLANCE))),
                    None => left,
                };
                socket.set_read_timeout(left)?;
                (&*socket).read(buf)
            })
        };
        match protection {
            Some(Protection::Records(records)) => records.reader.read_with(buf, read),
            _ => read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let Self { socket, deadline, protection, .. } = self;
        let write = |buf: &[u8]| {
            until(*deadline, |left| {
                socket.set_write_timeout(left)?;
                socket.send_with_flags(buf, NO_SIGNAL)
            })
        };
        match protection {
            Some(Protection::Records(records)) => records.writer.write_with(buf, write),
            _ => write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A new socket for `address`, with the options that every connection has. Buffers are set before
/// the socket connects or listens: what TCP has once offered to the other end cannot be taken back.
pub(crate) fn socket_for(address: &SockAddr) -> io::Result<Socket> {
    let socket = match address.as_socket() {
        Some(ip) => {
            let socket = Socket::new(Domain::for_address(ip), Type::STREAM, Some(Protocol::TCP))?;
            socket.set_tcp_nodelay(true)?;
            if !ip.ip().is_loopback() {
                share_the_wire(&socket);
                socket.set_send_buffer_size(SOCKET_BUFFER)?;
                window::begin(&socket)?;
                return Ok(socket);
            }
            socket
        }
        None => Socket::new(Domain::UNIX, Type::STREAM, None)?,
    };
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    Ok(socket)
}

/// Options of a socket whose link is shared with other connections.
///
/// The kernel takes few bytes that it cannot send yet. The other frames stay with the lane, which may
/// still reorder them.
///
/// The congestion control is cubic, whatever the machine's default is. When every node sends to every
/// other, eight at 1 Gbit/s used 94-97% of their links with cubic, 92-95% with reno and 86-91% with
/// bbr. Within a machine bbr took 5-20% less CPU time than cubic, and there the default stays.
fn share_the_wire(socket: &Socket) {
    #[cfg(target_os = "linux")]
    if let Err(error) = socket.set_tcp_congestion(b"cubic") {
        tracing::debug!(%error, "the machine's congestion control stays as it is");
    }
    #[cfg(target_os = "linux")]
    if let Err(error) = socket.set_tcp_notsent_lowat(UNSENT) {
        tracing::debug!(%error, "urgent frames may wait for a full socket");
    }
    let _ = socket;
}

/// The address of the abstract unix socket `name`, where there are such sockets.
pub(crate) fn unix_address(name: &str) -> io::Result<SockAddr> {
    if cfg!(target_os = "linux") {
        SockAddr::unix(format!("\0{name}"))
    } else {
        Err(io::Error::new(ErrorKind::Unsupported, "abstract unix sockets exist on Linux only"))
    }
}

/// Whether a TCP socket was connected to itself, which the kernel allows when the port nobody
/// listens on happens to be the one it picks for the caller.
pub(crate) fn is_self_connected(socket: &Socket, to: SocketAddr) -> bool {
    socket.local_addr().ok().and_then(|local| local.as_socket()) == Some(to)
}

struct SocketLink {
    socket: Socket,
    carrier: Carrier,
    /// What the window was widened to.
    window: usize,
    tags: Option<Tags>,
}

impl Link for SocketLink {
    fn read(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let count = bufs.len().min(MAX_BUFFERS);
        (&self.socket).read_vectored(&mut bufs[..count])
    }

    fn write(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let count = bufs.len().min(MAX_BUFFERS);
        self.socket.send_vectored_with_flags(&bufs[..count], NO_SIGNAL)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        registry.register(&mut SourceFd(&self.socket.as_raw_fd()), token, interest)
    }

    fn carrier(&self) -> Carrier {
        self.carrier
    }

    fn tags(&mut self) -> Option<&mut Tags> {
        self.tags.as_mut()
    }

    fn widen(&mut self, bytes: Option<usize>) -> io::Result<()> {
        let size = bytes.unwrap_or(usize::MAX);
        if self.carrier != Carrier::Tcp || size <= self.window {
            return Ok(());
        }
        if self.window < SOCKET_BUFFER || bytes.is_some() {
            window::widen(&self.socket, bytes.unwrap_or(SOCKET_BUFFER))?;
        }
        self.window = size;
        if bytes.is_none() { window::leave_to_the_system(&self.socket) } else { Ok(()) }
    }

    fn expect_answers(&mut self, resend_soon: bool) -> bool {
        self.carrier == Carrier::Tcp && window::expect_answers(&self.socket, resend_soon)
    }

    fn round_trip(&self) -> Option<Duration> {
        (self.carrier == Carrier::Tcp).then(|| window::round_trip(&self.socket)).flatten()
    }

    fn delivery(&self) -> Option<Delivery> {
        (self.carrier == Carrier::Tcp).then(|| window::delivery(&self.socket)).flatten()
    }
}

/// How logs and errors name the other end.
pub(crate) fn peer_name(address: &SockAddr) -> String {
    if let Some(address) = address.as_socket() {
        return address.to_string();
    }
    #[cfg(target_os = "linux")]
    if let Some(name) = address.as_abstract_namespace() {
        return format!("unix:{}", name.escape_ascii());
    }
    let _ = address;
    "unix:unnamed".to_owned()
}

/// A socket's time-out shows as `WouldBlock`.
pub(crate) fn timed_out(e: io::Error) -> io::Error {
    if e.kind() == ErrorKind::WouldBlock { ErrorKind::TimedOut.into() } else { e }
}

/// The most buffers one call takes (`IOV_MAX`); more would fail it.
const MAX_BUFFERS: usize = 1024;

/// A program that hosts us may have SIGPIPE at its default, and a dead peer must not kill it.
/// Apple has an option of the socket for that instead, which socket2 sets.
#[cfg(not(target_vendor = "apple"))]
pub(crate) const NO_SIGNAL: c_int = rustix::net::SendFlags::NOSIGNAL.bits() as c_int;
#[cfg(target_vendor = "apple")]
pub(crate) const NO_SIGNAL: c_int = 0;

/// How often a read that may be called off looks whether it is.
const GLANCE: Duration = Duration::from_millis(100);

/// How long a connection that lasts is silent before the kernel asks whether the other machine is
/// there, how often it asks, and how many times: a machine that is gone is noticed after a minute.
const IDLE: Duration = Duration::from_secs(30);
const PROBE: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;

/// How long, and for how many reads, a refused caller may still talk: a caller of ours is gone
/// after a round trip.
const GENTLE_CLOSE: Duration = Duration::from_secs(1);
const GENTLE_CLOSE_READS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Stream, Stream) {
        let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let nobody = a.peer_addr().unwrap();
        (Stream::new(a, &nobody).unwrap(), Stream::new(b, &nobody).unwrap())
    }

    #[test]
    fn a_read_ends_at_its_deadline() {
        let (mut a, mut b) = pair();
        a.set_deadline(Some(Instant::now() + Duration::from_millis(20)));
        assert_eq!(a.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::TimedOut);
        // Also when there would be something to read: the deadline has passed.
        b.write_all(b"x").unwrap();
        assert_eq!(a.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::TimedOut);
        a.set_deadline(None);
        assert_eq!(a.read(&mut [0; 8]).unwrap(), 1);
    }

    #[test]
    fn a_write_nobody_reads_ends_at_its_deadline() {
        let (mut a, _b) = pair();
        a.set_deadline(Some(Instant::now() + Duration::from_millis(20)));
        let error = a.write_all(&vec![0; 64 << 20]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn a_link_takes_more_buffers_than_the_kernel_does() {
        let (a, b) = pair();
        let (mut a, mut b) = (a.into_calling_link(false).unwrap(), b.into_called_link().unwrap());
        let sent = a.write(&vec![IoSlice::new(b"ab"); 3000]).unwrap();
        assert_eq!(sent, 2 * MAX_BUFFERS);
        let mut bytes = vec![[0; 1]; 3000];
        let mut bufs: Vec<_> = bytes.iter_mut().map(|b| IoSliceMut::new(b)).collect();
        assert_eq!(b.read(&mut bufs).unwrap(), MAX_BUFFERS);
        assert_eq!(bytes[MAX_BUFFERS - 1], *b"b");
    }

    #[test]
    fn a_finished_link_can_still_be_read() {
        let (a, b) = pair();
        let (mut a, mut b) = (a.into_calling_link(false).unwrap(), b.into_called_link().unwrap());
        a.write(&[IoSlice::new(b"last")]).unwrap();
        a.finish().unwrap();
        let mut word = [0; 8];
        assert_eq!(b.read(&mut [IoSliceMut::new(&mut word)]).unwrap(), 4);
        assert_eq!(b.read(&mut [IoSliceMut::new(&mut word)]).unwrap(), 0);
        b.write(&[IoSlice::new(b"ok")]).unwrap();
        assert_eq!(a.read(&mut [IoSliceMut::new(&mut word)]).unwrap(), 2);
        drop(a);
        assert_eq!(b.write(&[IoSlice::new(b"x")]).unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
