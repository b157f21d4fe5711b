use crate::Credentials;
use crate::address::Choice;
use crate::descriptors::{self, Need};
use crate::door::Door;
use crate::secret::random_number;
use crate::stream::{Stream, socket_for, unix_address};
use mio::{Poll, Waker};
use poseidon_core::wire::{Hello, Status};
use socket2::{SockAddr, Socket};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

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
    /// One thread hears all callers, so a silent or slow one keeps nobody waiting. A caller that has
    /// proved that it knows the secret gets a thread of its own for the rest: `admit` is asked about
    /// it, and whom `admit` lets in goes to `deliver`. `admit` may wait, and keeps only its own caller
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
        let stop = Arc::new(AtomicBool::new(false));
        let waker = Arc::new(Waker::new(poll.registry(), Door::WAKE)?);
        let door = Door {
            sockets: self.sockets,
            need: self.need,
            credentials,
            message_limit,
            stop: stop.clone(),
        };
        let thread = thread::Builder::new()
            .name("poseidon-accept".to_owned())
            .spawn(move || door.serve(poll, &admit, &deliver))?;
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

/// How long each message of a caller may take, by `docs/wire.md` §1.
const MESSAGE_LIMIT: Duration = Duration::from_secs(5);
/// Callers that the kernel keeps until they are accepted. Every lane of every node may call in the
/// same instant; the kernel may allow fewer.
const BACKLOG: i32 = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::door::MOST_STRANGERS;
    use crate::{Address, Caller, connect};
    use poseidon_core::wire::Purpose;
    use poseidon_core::{Epoch, JobId, LaneId, NodeId};
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpStream};
    use std::sync::mpsc;
    use std::time::Instant;

    const FOREVER: Duration = Duration::from_secs(3600);

    fn credentials() -> Credentials {
        Credentials {
            cluster: [1; 16],
            secret: "open, sesame, open".parse().unwrap(),
            encrypt: false,
        }
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
        let mut crowd: Vec<_> =
            (0..2 * MOST_STRANGERS).map(|_| TcpStream::connect(serving.tcp()).unwrap()).collect();
        let _served = call(&serving, 7);
        assert_eq!(delivered.recv(), Ok(NodeId(7)));
        // Those that came first were hung up on.
        assert!(matches!(crowd[0].read(&mut [0; 1]), Ok(0) | Err(_)));
    }

    /// Callers that have shown a hello of ours take no stranger's place, and no stranger takes theirs.
    #[test]
    fn a_crowd_does_not_push_out_one_whose_hello_has_come() {
        let (serving, delivered) = serve(FOREVER);
        let mut caller = TcpStream::connect(serving.tcp()).unwrap();
        let hello = Hello {
            purpose: Purpose::Lane,
            node: NodeId(5),
            lane: LaneId(0),
            encrypt: false,
            cluster: [1; 16],
            identity: JobId([2; 16]),
            epoch: Epoch(1),
            nonce: [3; 32],
        };
        struct Between<'a>(&'a mut TcpStream, SocketAddr, Vec<TcpStream>);
        impl Read for Between<'_> {
            fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                let count = self.0.read(buf)?;
                // The crowd comes between the challenge and the proof.
                while self.2.len() < 2 * MOST_STRANGERS {
                    self.2.push(TcpStream::connect(self.1)?);
                }
                // When the first of the crowd is hung up on, more have come than there is room for.
                let _ = self.2[0].read(&mut [0; 1]);
                Ok(count)
            }
        }
        impl Write for Between<'_> {
            fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
                self.0.write(buf)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut between = Between(&mut caller, serving.tcp(), Vec::new());
        crate::handshake::call(&mut between, &hello, None, &credentials().secret).unwrap();
        assert_eq!(delivered.recv(), Ok(NodeId(5)));
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
