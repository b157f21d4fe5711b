use crate::Credentials;
use crate::address::Choice;
use crate::descriptors::{self, Need};
use crate::handshake::{self, HandshakeError, Proven};
use crate::secret::random_number;
use crate::stream::{Stream, socket_for, unix_address};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use poseidon_core::wire::{Hello, Status};
use socket2::{SockAddr, Socket};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle, Scope};
use std::time::{Duration, Instant};

/// Where a node is called: a TCP port and, on Linux, an abstract unix socket for callers on the
/// same machine. Callers are answered once the listener [serves](Listener::serve); until then
/// they wait.
#[derive(Debug)]
pub struct Listener {
    tcp: Vec<SocketAddr>,
    unix: Option<String>,
    /// The listening sockets: the TCP one and, if there is one, the unix one.
    sockets: Vec<Socket>,
    /// What the job needs, for the words of a process that runs out of descriptors.
    need: Option<Need>,
}

/// Why a node cannot be called at the address it was given.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another process listens there.
    #[error(
        "{address} is in use by another process: stop it (an earlier run?), or choose another \
         port; port 0 lets the system choose"
    )]
    InUse {
        /// The address that was asked for.
        address: SocketAddr,
    },
    /// The address belongs to no interface of this machine.
    #[error("no interface of this machine has the address {}, so nobody can be called there", .address.ip())]
    NotLocal {
        /// The address that was asked for.
        address: SocketAddr,
    },
    /// The port is reserved.
    #[error("this user may not listen on {address}: choose a port above 1023")]
    Forbidden {
        /// The address that was asked for.
        address: SocketAddr,
    },
    /// Anything else the system objects to.
    #[error("cannot listen on {address}: {source}")]
    Other {
        /// The address that was asked for.
        address: String,
        /// What the system said.
        source: io::Error,
    },
}

impl Listener {
    /// Opens `ip` on `port` (0: any that is free) and, where the system has them and `unix` says
    /// so, an abstract unix socket with a random name.
    pub fn bind(ip: IpAddr, port: u16, unix: bool) -> Result<Self, BindError> {
        let mut listener = Self { tcp: Vec::new(), unix: None, sockets: Vec::new(), need: None };
        listener.open(SocketAddr::new(ip, port), None)?;
        if unix && cfg!(target_os = "linux") {
            let (name, listening) = open_unix().map_err(|source| BindError::Other {
                address: "an abstract unix socket".to_owned(),
                source: descriptors::explain(source, None),
            })?;
            listener.unix = Some(name);
            listener.sockets.push(listening);
        }
        Ok(listener)
    }

    /// As [`bind`](Self::bind), on each of `choices`, on any port that is free. If there are several,
    /// connections stay on the interfaces they come in by.
    pub fn bind_each(choices: &[Choice], unix: bool) -> Result<Self, BindError> {
        let (first, others) = choices.split_first().expect("a node listens somewhere");
        if others.is_empty() {
            return Self::bind(first.ip, 0, unix);
        }
        let mut listener = Self::bind(first.ip, 0, unix)?;
        first.keep(&listener.sockets[0]);
        for choice in others {
            listener.open(SocketAddr::new(choice.ip, 0), Some(choice))?;
        }
        Ok(listener)
    }

    fn open(&mut self, address: SocketAddr, on: Option<&Choice>) -> Result<(), BindError> {
        let (tcp, listening) = open_tcp(address).map_err(|source| match source.kind() {
            ErrorKind::AddrInUse => BindError::InUse { address },
            ErrorKind::AddrNotAvailable => BindError::NotLocal { address },
            ErrorKind::PermissionDenied => BindError::Forbidden { address },
            _ => {
                let source = descriptors::explain(source, None);
                BindError::Other { address: address.to_string(), source }
            }
        })?;
        if let Some(choice) = on {
            choice.keep(&listening);
        }
        self.tcp.push(tcp);
        self.sockets.push(listening);
        Ok(())
    }

    /// The TCP address, with the port the system chose. The first, if there are several.
    pub fn tcp(&self) -> SocketAddr {
        self.tcp[0]
    }

    /// All TCP addresses.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.tcp
    }

    /// The name of the abstract unix socket, if there is one.
    pub fn unix(&self) -> Option<&str> {
        self.unix.as_deref()
    }

    /// Says what the job needs, for the words of a process that runs out of descriptors.
    pub fn needing(mut self, need: Need) -> Self {
        self.need = Some(need);
        self
    }

    /// Answers callers in the background until the returned [`Serving`] is dropped.
    ///
    /// Each handshake has a thread of its own, so a silent or slow caller keeps nobody waiting.
    /// `admit` is asked about callers that know the secret; whom it lets in goes to `deliver`. Both
    /// are called from several threads at once. `admit` may wait, and keeps only its own caller
    /// waiting. It decides and does not record: the caller may be gone before its welcome reaches
    /// it, and two callers that claim to be the same node may both be admitted, so `deliver` must
    /// cope with a second one.
    pub fn serve(
        self,
        credentials: Credentials,
        admit: impl Fn(&Hello) -> Result<(), Status> + Send + Sync + 'static,
        deliver: impl Fn(Hello, Stream) + Send + Sync + 'static,
    ) -> io::Result<Serving> {
        self.serve_with_limit(MESSAGE_LIMIT, credentials, admit, deliver)
    }

    fn serve_with_limit(
        self,
        message_limit: Duration,
        credentials: Credentials,
        admit: impl Fn(&Hello) -> Result<(), Status> + Send + Sync + 'static,
        deliver: impl Fn(Hello, Stream) + Send + Sync + 'static,
    ) -> io::Result<Serving> {
        let poll = Poll::new()?;
        for listening in &self.sockets {
            let mut source = SourceFd(&listening.as_raw_fd());
            poll.registry().register(&mut source, CALLER, Interest::READABLE)?;
        }
        let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
        let stop = Arc::new(AtomicBool::new(false));
        let acceptor = Acceptor {
            sockets: self.sockets,
            need: self.need,
            credentials,
            message_limit,
            admit,
            deliver,
            stop: stop.clone(),
            waker: waker.clone(),
            pending: Mutex::default(),
        };
        let thread = thread::Builder::new()
            .name("poseidon-accept".to_owned())
            .spawn(move || acceptor.run(poll))?;
        Ok(Serving { tcp: self.tcp[0], unix: self.unix, stop, waker, thread: Some(thread) })
    }
}

/// A listener at work. Dropping it closes the addresses, hangs up on callers in mid-handshake and
/// returns when the listener's threads have ended. Connections that were delivered live on. It must
/// not be dropped within `admit` or `deliver`, because the drop waits until these return.
#[derive(Debug)]
pub struct Serving {
    tcp: SocketAddr,
    unix: Option<String>,
    /// Set once, when this is dropped; the accepting thread reads it.
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
    /// The TCP address, with the port the system chose.
    pub fn tcp(&self) -> SocketAddr {
        self.tcp
    }

    /// The name of the abstract unix socket, if there is one.
    pub fn unix(&self) -> Option<&str> {
        self.unix.as_deref()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Err(error) = self.waker.wake() {
            // Joining a thread that cannot be woken would wait for ever.
            tracing::error!(address = %self.tcp, %error, "cannot stop listening");
            return;
        }
        if let Some(thread) = self.thread.take() {
            // An error means that `admit` or `deliver` panicked. The panic itself was reported.
            let _ = thread.join();
        }
    }
}

/// What the accepting thread shares with the threads of the handshakes it starts.
struct Acceptor<A, D> {
    sockets: Vec<Socket>,
    need: Option<Need>,
    credentials: Credentials,
    message_limit: Duration,
    admit: A,
    deliver: D,
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    /// Callers that have not proved yet that they know the secret, oldest first. The accepting
    /// thread adds; whoever removes one has the last word on it: its own thread when it has proved
    /// it or the handshake is over, the accepting thread when it hangs up.
    pending: Mutex<BTreeMap<u64, PendingHandshake>>,
}

/// One handshake under way: what is needed to hang up on its caller.
struct PendingHandshake {
    since: Instant,
    peer: String,
    socket: Socket,
}

impl<A, D> Acceptor<A, D>
where
    A: Fn(&Hello) -> Result<(), Status> + Sync,
    D: Fn(Hello, Stream) + Sync,
{
    fn run(self, mut poll: Poll) {
        let mut events = Events::with_capacity(8);
        // The scope's end joins every handshake.
        thread::scope(|scope| {
            let mut next_id = 0;
            let mut pause = None;
            loop {
                if let Err(error) = poll.poll(&mut events, pause)
                    && error.kind() != ErrorKind::Interrupted
                {
                    tracing::error!(%error, "no longer accepting connections");
                    break;
                }
                if self.stop.load(Ordering::Acquire) {
                    break;
                }
                pause = self.accept_all(scope, &mut next_id);
            }
            for pending in std::mem::take(&mut *self.pending()).into_values() {
                let _ = pending.socket.shutdown(Shutdown::Both);
            }
        });
    }

    /// Accepts until no caller is left, because readiness is edge-triggered. If it has to leave a
    /// caller in the queue, it returns how soon to try again; the end of a handshake wakes the
    /// accepting thread sooner.
    fn accept_all<'s>(&'s self, scope: &'s Scope<'s, '_>, next_id: &mut u64) -> Option<Duration> {
        while !self.stop.load(Ordering::Acquire) {
            let mut idle = true;
            for listening in &self.sockets {
                if let Err(wait) = self.make_room() {
                    return Some(wait);
                }
                match listening.accept() {
                    Ok((socket, address)) => {
                        idle = false;
                        *next_id += 1;
                        if let Err(error) = self.start(scope, *next_id, socket, &address) {
                            tracing::warn!(%error, "dropped a caller");
                        }
                    }
                    Err(e) => match e.kind() {
                        ErrorKind::WouldBlock => {}
                        // This caller failed, which says nothing about the next caller.
                        ErrorKind::Interrupted
                        | ErrorKind::ConnectionAborted
                        | ErrorKind::ConnectionReset => idle = false,
                        _ => {
                            let error = descriptors::explain(e, self.need);
                            tracing::warn!(%error, "cannot accept a caller just now");
                            return Some(SHORTAGE_PAUSE);
                        }
                    },
                }
            }
            if idle {
                break;
            }
        }
        None
    }

    /// Makes sure that one more handshake may start, or says how long to wait. When the most
    /// handshakes are under way, the oldest is cut off if it has lasted far longer than an honest
    /// one.
    fn make_room(&self) -> Result<(), Duration> {
        let mut pending = self.pending();
        if pending.len() < MAX_HANDSHAKES {
            return Ok(());
        }
        let Some(oldest) = pending.first_entry() else { return Ok(()) };
        let age = oldest.get().since.elapsed();
        if age < LONGEST_WHEN_FULL {
            return Err(LONGEST_WHEN_FULL - age);
        }
        let PendingHandshake { peer, socket, .. } = oldest.remove();
        tracing::warn!(peer, "refused a connection: too slow while others wait");
        let _ = socket.shutdown(Shutdown::Both);
        Ok(())
    }

    fn start<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        id: u64,
        socket: Socket,
        address: &SockAddr,
    ) -> io::Result<()> {
        let stream = Stream::new(socket, address)?;
        let socket = stream.try_clone_socket()?;
        let peer = stream.peer().to_owned();
        self.pending().insert(id, PendingHandshake { since: Instant::now(), peer, socket });
        let slot = HandshakeSlot { acceptor: self, id };
        // If the thread cannot be started, the closure is dropped, and `slot` with it.
        thread::Builder::new()
            .name("poseidon-hello".to_owned())
            .spawn_scoped(scope, move || self.answer(stream, slot))?;
        Ok(())
    }

    fn answer(&self, mut stream: Stream, slot: HandshakeSlot<'_, A, D>) {
        let proven = self.prove(&mut stream);
        // A caller that knows the secret is no stranger: while it waits to be admitted it takes no
        // stranger's place.
        if !slot.leave() {
            // The accepting thread hung up, and has said so.
            return;
        }
        let shaken = proven.and_then(|proven| {
            let judged = (self.admit)(&proven.hello);
            stream.set_deadline(Some(Instant::now() + self.message_limit));
            proven.answer(&mut stream, &self.credentials.secret, judged)
        });
        let error = match shaken {
            Ok(hello) => {
                stream.set_deadline(None);
                return (self.deliver)(hello, stream);
            }
            Err(error) => error,
        };
        let peer = stream.peer();
        match &error {
            // Scanners and health checks: they asked for nothing, and nothing was refused.
            HandshakeError::Cut { message: "Hello", got: 0, .. } => {
                tracing::debug!(peer, "a caller left without a word");
            }
            // It will call again.
            HandshakeError::Refused(Status::NoBook) => {
                tracing::debug!(peer, reason = %error, "put off a connection");
            }
            error => tracing::warn!(peer, reason = %error, "refused a connection"),
        }
        if let HandshakeError::Refused(_) | HandshakeError::Version { .. } = error {
            stream.close_gently();
        }
    }

    fn prove(&self, stream: &mut Stream) -> Result<Proven, HandshakeError> {
        stream.set_deadline(Some(Instant::now() + self.message_limit));
        let challenged = handshake::challenge(stream, &self.credentials)?;
        stream.set_deadline(Some(Instant::now() + self.message_limit));
        challenged.prove(stream, &self.credentials.secret)
    }
}

impl<A, D> Acceptor<A, D> {
    fn pending(&self) -> MutexGuard<'_, BTreeMap<u64, PendingHandshake>> {
        self.pending.lock().expect("nothing panics while it holds this lock")
    }
}

/// One of the [`MAX_HANDSHAKES`] slots. It is given up when the handshake's thread ends, also by a
/// panic.
struct HandshakeSlot<'a, A, D> {
    acceptor: &'a Acceptor<A, D>,
    id: u64,
}

impl<A, D> HandshakeSlot<'_, A, D> {
    /// Gives the slot up. False if the accepting thread has taken it away before.
    fn leave(&self) -> bool {
        let mut pending = self.acceptor.pending();
        let was_full = pending.len() >= MAX_HANDSHAKES;
        let held = pending.remove(&self.id).is_some();
        if held && was_full {
            // If the accepting thread cannot be woken, the next caller waits for its pause.
            let _ = self.acceptor.waker.wake();
        }
        held
    }
}

impl<A, D> Drop for HandshakeSlot<'_, A, D> {
    fn drop(&mut self) {
        self.leave();
    }
}

fn open_tcp(address: SocketAddr) -> io::Result<(SocketAddr, Socket)> {
    let address = SockAddr::from(address);
    let socket = socket_for(&address)?;
    // Connections of an earlier run that linger in TIME_WAIT must not keep the port.
    socket.set_reuse_address(true)?;
    socket.bind(&address)?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    let bound = socket.local_addr()?.as_socket().ok_or(ErrorKind::AddrNotAvailable)?;
    Ok((bound, socket))
}

fn open_unix() -> io::Result<(String, Socket)> {
    let name = format!("poseidon-{:032x}", random_number()?);
    let address = unix_address(&name)?;
    let socket = socket_for(&address)?;
    socket.bind(&address)?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok((name, socket))
}

const CALLER: Token = Token(0);
const WAKE: Token = Token(1);

/// How long each message of a caller may take, by `docs/wire.md` §1.
const MESSAGE_LIMIT: Duration = Duration::from_secs(5);
/// The most handshakes at a time. Each has a thread, so it limits the threads that strangers can
/// make this process start.
const MAX_HANDSHAKES: usize = 64;
/// How long a handshake may last while others wait to start. An honest one takes two round trips.
const LONGEST_WHEN_FULL: Duration = Duration::from_secs(1);
/// How long to wait when the system is out of descriptors or memory.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);
/// Callers that the kernel keeps until they are accepted. Every lane of every node may call in the
/// same instant; the kernel may allow fewer.
const BACKLOG: i32 = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Address, Caller, connect};
    use poseidon_core::wire::Purpose;
    use poseidon_core::{Epoch, JobId, LaneId, NodeId};
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpStream};
    use std::sync::mpsc;

    const FOREVER: Duration = Duration::from_secs(3600);

    fn credentials() -> Credentials {
        Credentials { cluster: [1; 16], secret: "sesame".parse().unwrap() }
    }

    fn serve(limit: Duration) -> (Serving, mpsc::Receiver<NodeId>) {
        let (sender, delivered) = mpsc::channel();
        let listener = Listener::bind(Ipv4Addr::LOCALHOST.into(), 0, true).unwrap();
        let deliver = move |hello: Hello, _: Stream| sender.send(hello.node).unwrap();
        (listener.serve_with_limit(limit, credentials(), |_| Ok(()), deliver).unwrap(), delivered)
    }

    fn call(serving: &Serving, node: u16) -> Stream {
        let (purpose, node, lane) = (Purpose::Lane, NodeId(node), LaneId(0));
        let caller = Caller { purpose, node, lane, identity: JobId([2; 16]), epoch: Epoch(1) };
        let to = Address::Tcp(serving.tcp().to_string());
        connect(&to, caller, &credentials(), Instant::now() + FOREVER).unwrap()
    }

    #[test]
    fn silent_and_slow_callers_are_hung_up_on() {
        let (serving, _delivered) = serve(Duration::from_millis(50));
        let mut silent = TcpStream::connect(serving.tcp()).unwrap();
        let mut slow = TcpStream::connect(serving.tcp()).unwrap();
        slow.write_all(b"POSEIDON\x01\x00\x01\x00").unwrap();
        for stream in [&mut silent, &mut slow] {
            // Ends, with or without a reset, or the test does not.
            assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)));
        }
    }

    #[test]
    fn dropping_does_not_wait_for_silent_callers() {
        let (serving, delivered) = serve(FOREVER);
        let mut silent = TcpStream::connect(serving.tcp()).unwrap();
        // Callers are taken in order, so the silent one is in its handshake now.
        let _served = call(&serving, 1);
        assert_eq!(delivered.recv(), Ok(NodeId(1)));
        drop(serving);
        assert!(matches!(silent.read(&mut [0; 1]), Ok(0) | Err(_)));
        // The sender lived in the listener's threads, which are gone.
        assert_eq!(delivered.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn dropping_frees_the_port() {
        // Another loopback address than the other tests', lest they take the port meanwhile.
        let listener = Listener::bind([127, 0, 0, 78].into(), 0, true).unwrap();
        let serving = listener.serve(credentials(), |_| Ok(()), |_, _| ()).unwrap();
        let address = serving.tcp();
        let _served = call(&serving, 1);
        Listener::bind(address.ip(), address.port(), false).unwrap_err();
        drop(serving);
        Listener::bind(address.ip(), address.port(), false).unwrap();
    }

    #[test]
    fn a_delivered_connection_outlives_its_listener() {
        let (sender, delivered) = mpsc::channel();
        let listener = Listener::bind(Ipv4Addr::LOCALHOST.into(), 0, false).unwrap();
        let deliver = move |_: Hello, stream: Stream| sender.send(stream).unwrap();
        let serving = listener.serve(credentials(), |_| Ok(()), deliver).unwrap();
        let mut caller = call(&serving, 1);
        let mut served = delivered.recv().unwrap();
        drop(serving);
        caller.write_all(b"still here").unwrap();
        let mut heard = [0; 10];
        served.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"still here");
    }

    #[test]
    fn a_crowd_of_silent_callers_gives_way() {
        let (serving, delivered) = serve(FOREVER);
        let crowd: Vec<_> =
            (0..MAX_HANDSHAKES + 10).map(|_| TcpStream::connect(serving.tcp()).unwrap()).collect();
        let _served = call(&serving, 7);
        assert_eq!(delivered.recv(), Ok(NodeId(7)));
        drop(crowd);
    }

    #[test]
    fn a_panic_in_deliver_costs_that_connection_only() {
        let (sender, delivered) = mpsc::channel();
        let listener = Listener::bind(Ipv4Addr::LOCALHOST.into(), 0, false).unwrap();
        let deliver = move |hello: Hello, _: Stream| {
            assert_ne!(hello.node, NodeId(13), "expected by this test");
            sender.send(hello.node).unwrap();
        };
        let serving = listener.serve(credentials(), |_| Ok(()), deliver).unwrap();
        let _unlucky = call(&serving, 13);
        let _served = call(&serving, 2);
        assert_eq!(delivered.recv(), Ok(NodeId(2)));
    }
}
