//! Listeners and callers over real sockets of this machine.

use poseidon_core::wire::{Challenge, Hello, Purpose, Status, VERSION, Verdict};
use poseidon_core::{Epoch, JobId, LaneId, NodeId};
use poseidon_link::handshake::{self, PROOF_SIZE, TOKEN_SIZE};
use poseidon_link::{
    Address, BindError, Caller, Carrier, ConnectError, Credentials, HandshakeError, Link, Listener,
    Serving, Stream, connect, connect_unless,
};
use socket2::{Domain, Socket, Type};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

const CLUSTER: [u8; 16] = *b"a test's cluster";

/// Long enough to be reached only when something is broken.
fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Soon enough not to hold up the tests.
fn soon() -> Instant {
    Instant::now() + Duration::from_millis(200)
}

fn credentials(secret: &str) -> Credentials {
    Credentials { cluster: CLUSTER, secret: secret.repeat(3).parse().unwrap(), encrypt: false }
}

fn lane(node: u16, lane: u16) -> Caller {
    let (purpose, node, lane) = (Purpose::Lane, NodeId(node), LaneId(lane));
    Caller { purpose, node, lane, identity: JobId([6; 16]), epoch: Epoch(1) }
}

fn hello(node: u16) -> Hello {
    Hello {
        purpose: Purpose::Lane,
        node: NodeId(node),
        lane: LaneId(0),
        encrypt: false,
        cluster: CLUSTER,
        identity: JobId([6; 16]),
        epoch: Epoch(1),
        nonce: [5; 32],
    }
}

/// A listener that admits lanes 0 and 1 of nodes 0 to 9, and what it delivers.
struct Host {
    serving: Serving,
    delivered: mpsc::Receiver<(Hello, Stream)>,
}

impl Host {
    fn start() -> Self {
        let (sender, delivered) = mpsc::channel();
        let admit = |hello: &Hello| match hello {
            Hello { purpose: Purpose::Control, .. } => Err(Status::Purpose),
            Hello { node: NodeId(10..), .. } => Err(Status::Node),
            Hello { lane: LaneId(2..), .. } => Err(Status::Lane),
            _ => Ok(()),
        };
        let serving = Listener::bind(Ipv4Addr::LOCALHOST.into(), 0, true)
            .unwrap()
            .serve(credentials("sesame"), admit, move |hello, stream| {
                sender.send((hello, stream)).unwrap();
            })
            .unwrap();
        Self { serving, delivered }
    }

    fn tcp(&self) -> Address {
        Address::Tcp(self.serving.tcp().to_string())
    }

    fn stranger(&self) -> TcpStream {
        TcpStream::connect(self.serving.tcp()).unwrap()
    }

    /// Calls as it should be done, and sends a word each way.
    fn serves(&self, node: u16, address: &Address) {
        let mut caller = connect(address, lane(node, 1), &credentials("sesame"), later()).unwrap();
        let (hello, mut served) = self.delivered.recv().unwrap();
        assert_eq!((hello.node, hello.lane, hello.cluster), (NodeId(node), LaneId(1), CLUSTER));
        caller.write_all(b"ping").unwrap();
        let mut word = [0; 4];
        served.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"ping");
        served.write_all(b"pong").unwrap();
        caller.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"pong");
    }

    fn refuses(&self, caller: Caller, credentials: &Credentials, expected: Status) {
        for address in [Some(self.tcp()), unix(&self.serving)].into_iter().flatten() {
            let error = connect(&address, caller, credentials, later()).unwrap_err();
            let (status, proved) = match &error {
                ConnectError::Handshake { reason: HandshakeError::Refused(s), .. } => (s, true),
                ConnectError::Handshake { reason: HandshakeError::Unproved(s), .. } => (s, false),
                other => panic!("{other}"),
            };
            // Who has the same secret gets a refusal that nobody else can make.
            assert_eq!((*status, proved), (expected, expected != Status::Secret), "{error}");
            assert!(error.to_string().contains(&address.to_string()), "{error}");
        }
        self.serves(3, &self.tcp());
    }
}

fn unix(serving: &Serving) -> Option<Address> {
    serving.unix().map(|name| Address::Unix(name.to_owned()))
}

fn read_challenge(stream: &mut TcpStream) -> Challenge {
    let mut bytes = [0; Challenge::SIZE];
    stream.read_exact(&mut bytes).unwrap();
    Challenge::decode(&bytes).unwrap()
}

fn read_verdict(stream: &mut TcpStream) -> Verdict {
    let mut bytes = [0; Verdict::SIZE];
    stream.read_exact(&mut bytes).unwrap();
    Verdict::decode(&bytes)
}

#[test]
fn a_caller_is_served_over_tcp() {
    let host = Host::start();
    let caller = connect(&host.tcp(), lane(3, 1), &credentials("sesame"), later()).unwrap();
    let (_, served) = host.delivered.recv().unwrap();
    assert_eq!((caller.carrier(), served.carrier()), (Carrier::Tcp, Carrier::Tcp));
    assert_eq!(caller.peer(), host.serving.tcp().to_string());
    assert!(served.peer().starts_with("127.0.0.1:"), "{}", served.peer());
    host.serves(4, &host.tcp());
}

#[cfg(target_os = "linux")]
#[test]
fn a_caller_is_served_over_a_unix_socket() {
    let host = Host::start();
    let address = unix(&host.serving).unwrap();
    let caller = connect(&address, lane(3, 1), &credentials("sesame"), later()).unwrap();
    let (_, served) = host.delivered.recv().unwrap();
    assert_eq!((caller.carrier(), served.carrier()), (Carrier::Unix, Carrier::Unix));
    assert_eq!(caller.peer(), address.to_string());
    let pid = format!("unix:poseidon-{}-", std::process::id());
    assert!(served.peer().starts_with(&pid), "{}", served.peer());
    host.serves(4, &address);
}

#[test]
fn host_names_are_resolved() {
    let host = Host::start();
    host.serves(1, &Address::Tcp(format!("localhost:{}", host.serving.tcp().port())));
}

#[test]
fn links_carry_more_than_the_sockets_hold() {
    let host = Host::start();
    for address in [Some(host.tcp()), unix(&host.serving)].into_iter().flatten() {
        let caller = connect(&address, lane(0, 0), &credentials("sesame"), later()).unwrap();
        let (_, served) = host.delivered.recv().unwrap();
        exchange(caller.into_calling_link(false).unwrap(), served.into_called_link().unwrap());
    }
}

/// Moves 16 MiB from one link to the other in one event loop.
fn exchange(mut from: Box<dyn Link>, mut to: Box<dyn Link>) {
    let sent: Vec<u8> = (0..16 << 20).map(|i: u32| (i ^ (i >> 8)) as u8).collect();
    let mut received = vec![0; sent.len() + 1];
    let mut poll = mio::Poll::new().unwrap();
    from.register(poll.registry(), mio::Token(0)).unwrap();
    to.register(poll.registry(), mio::Token(1)).unwrap();
    let mut events = mio::Events::with_capacity(4);
    let (mut written, mut read) = (0, 0);
    loop {
        while written < sent.len() {
            let (front, back) = sent[written..].split_at((sent.len() - written) / 2);
            match from.write(&[IoSlice::new(front), IoSlice::new(back)]) {
                Ok(count) => written += count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => panic!("{e}"),
            }
            if written == sent.len() {
                from.finish().unwrap();
            }
        }
        loop {
            match to.read(&mut [IoSliceMut::new(&mut received[read..])]) {
                Ok(0) => {
                    assert!(received[..read] == sent);
                    return;
                }
                Ok(count) => read += count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => panic!("{e}"),
            }
        }
        poll.poll(&mut events, Some(Duration::from_secs(60))).unwrap();
        assert!(!events.is_empty(), "nothing moved for a minute");
    }
}

#[test]
fn a_wrong_secret_is_refused() {
    Host::start().refuses(lane(3, 1), &credentials("simsim"), Status::Secret);
}

#[test]
fn another_cluster_is_refused() {
    let other = Credentials { cluster: [0; 16], ..credentials("sesame") };
    Host::start().refuses(lane(3, 1), &other, Status::Cluster);
}

#[test]
fn callers_that_are_not_admitted_are_told_why() {
    let host = Host::start();
    host.refuses(lane(10, 0), &credentials("sesame"), Status::Node);
    host.refuses(lane(0, 2), &credentials("sesame"), Status::Lane);
    let control = Caller { purpose: Purpose::Control, ..lane(0, 0) };
    host.refuses(control, &credentials("sesame"), Status::Purpose);
    // A stranger is not told that there is no node 10.
    host.refuses(lane(10, 0), &credentials("simsim"), Status::Secret);
}

#[test]
fn another_version_is_refused() {
    let host = Host::start();
    let mut stranger = host.stranger();
    let mut bytes = hello(1).encode();
    bytes[8] = VERSION as u8 + 1;
    stranger.write_all(&bytes).unwrap();
    let answer = read_challenge(&mut stranger);
    assert_eq!((answer.status, answer.version), (Status::Version, VERSION));
    assert_eq!(stranger.read(&mut [0; 1]).unwrap(), 0);
    host.serves(3, &host.tcp());
}

#[test]
fn garbage_is_refused() {
    let host = Host::start();
    let mut stranger = host.stranger();
    // Longer than a Hello: the answer arrives although some of this is never asked for.
    stranger.write_all(&b"GET /metrics HTTP/1.1\r\nHost: here\r\n".repeat(100)).unwrap();
    assert_eq!(read_challenge(&mut stranger).status, Status::Garbage);
    host.serves(3, &host.tcp());
}

#[test]
fn a_truncated_hello_ends_the_connection() {
    let host = Host::start();
    let mut stranger = host.stranger();
    stranger.write_all(&hello(1).encode()[..40]).unwrap();
    stranger.shutdown(Shutdown::Write).unwrap();
    assert_eq!(stranger.read(&mut [0; 1]).unwrap(), 0);
    host.serves(3, &host.tcp());
}

#[test]
fn silent_callers_keep_nobody_waiting() {
    let host = Host::start();
    let silent: Vec<_> = (0..8).map(|_| host.stranger()).collect();
    let mut slow = host.stranger();
    slow.write_all(&hello(1).encode()[..20]).unwrap();
    host.serves(3, &host.tcp());
    if let Some(address) = unix(&host.serving) {
        host.serves(4, &address);
    }
    drop((silent, slow));
}

#[test]
fn many_callers_at_once_are_all_served() {
    let host = Host::start();
    thread::scope(|scope| {
        for i in 0..100 {
            let address = if i % 2 == 0 { Some(host.tcp()) } else { unix(&host.serving) };
            let address = address.unwrap_or_else(|| host.tcp());
            scope.spawn(move || {
                let wrong = credentials("simsim");
                connect(&address, lane(i % 10, 0), &wrong, later()).unwrap_err();
                connect(&address, lane(i % 10, 0), &credentials("sesame"), later()).unwrap();
            });
        }
    });
    let nodes: Vec<u16> = host.delivered.iter().take(100).map(|(hello, _)| hello.node.0).collect();
    for node in 0..10 {
        assert_eq!(nodes.iter().filter(|n| **n == node).count(), 10);
    }
}

/// Keeps what a caller sends.
struct Recorded {
    stream: TcpStream,
    sent: Vec<u8>,
}

impl Read for Recorded {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buf)
    }
}

impl Write for Recorded {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let count = self.stream.write(buf)?;
        self.sent.extend(&buf[..count]);
        Ok(count)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_replayed_proof_is_refused() {
    let host = Host::start();
    let mut good = Recorded { stream: host.stranger(), sent: Vec::new() };
    handshake::call(&mut good, &hello(1), None, &credentials("sesame").secret).unwrap();
    assert_eq!(good.sent.len(), Hello::SIZE + TOKEN_SIZE + PROOF_SIZE);
    host.delivered.recv().unwrap();

    let mut replay = host.stranger();
    replay.write_all(&good.sent).unwrap();
    assert_eq!(read_challenge(&mut replay).status, Status::Welcome);
    let verdict = read_verdict(&mut replay);
    assert_eq!((verdict.status, verdict.proof), (Status::Secret, [0; 32]));
    host.serves(3, &host.tcp());
}

/// A listener that says yes to everybody and knows nothing.
fn impostor(echo: bool) -> Address {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap().to_string());
    thread::spawn(move || {
        // It is not believed at once.
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.read_exact(&mut [0; Hello::SIZE + TOKEN_SIZE]).unwrap();
            let challenge = Challenge { status: Status::Welcome, version: VERSION, nonce: [1; 32] };
            stream.write_all(&challenge.encode()).unwrap();
            let mut proof = [0; PROOF_SIZE];
            stream.read_exact(&mut proof).unwrap();
            let proof = if echo { proof } else { [2; 32] };
            let verdict = Verdict { status: Status::Welcome, proof };
            stream.write_all(&verdict.encode()).unwrap();
        }
    });
    address
}

#[test]
fn a_listener_that_does_not_know_the_secret_is_found_out() {
    for echo in [false, true] {
        let address = impostor(echo);
        let error = connect(&address, lane(0, 0), &credentials("sesame"), later()).unwrap_err();
        let expected =
            matches!(error, ConnectError::Handshake { reason: HandshakeError::Impostor, .. });
        assert!(expected, "{error}");
    }
}

#[test]
fn a_listener_that_is_not_poseidon_is_found_out() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap().to_string());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.write_all(b"SSH-2.0-something\r\n").unwrap();
            // Stays open, as such servers do, until the caller has had enough.
            let _ = io::copy(&mut stream, &mut io::sink());
        }
    });
    let error = connect(&address, lane(0, 0), &credentials("sesame"), later()).unwrap_err();
    let expected =
        matches!(error, ConnectError::Handshake { reason: HandshakeError::NotPoseidon, .. });
    assert!(expected, "{error}");
}

#[test]
fn a_connection_that_breaks_in_the_handshake_is_tried_again() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let to = Address::Tcp(listener.local_addr().unwrap().to_string());
    let caller = thread::spawn(move || connect(&to, lane(1, 0), &credentials("sesame"), later()));
    drop(listener.accept().unwrap());
    let (mut stream, _) = listener.accept().unwrap();
    let ours = credentials("sesame");
    let (hello, _) = handshake::answer(&mut stream, &ours, |_| Ok(())).unwrap();
    assert_eq!(hello.node, NodeId(1));
    caller.join().unwrap().unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn a_caller_waits_for_a_listener_that_starts_later() {
    // Another loopback address than the other tests', lest they take the port meanwhile.
    let listener = Listener::bind([127, 0, 0, 77].into(), 0, false).unwrap();
    let address = listener.tcp();
    drop(listener);
    let to = Address::Tcp(address.to_string());
    let caller = thread::spawn(move || connect(&to, lane(1, 0), &credentials("sesame"), later()));
    let listener = Listener::bind(address.ip(), address.port(), false).unwrap();
    let serving = listener.serve(credentials("sesame"), |_| Ok(()), |_, _| ()).unwrap();
    caller.join().unwrap().unwrap();
    drop(serving);
}

#[test]
fn giving_up_says_whom_how_often_and_why() {
    // Bound, so that nobody else gets the port, but not listening.
    let bound = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    bound.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    let address = bound.local_addr().unwrap().as_socket().unwrap();
    let to = Address::Tcp(address.to_string());
    let error = connect(&to, lane(0, 0), &credentials("sesame"), soon()).unwrap_err();
    let ConnectError::GaveUp { attempts, .. } = &error else { panic!("{error}") };
    assert!(*attempts > 1);
    let text = error.to_string();
    assert!(text.contains(&address.to_string()), "{text}");
    assert!(text.contains(&format!("{attempts} attempts")), "{text}");
    assert!(text.contains("refused"), "{text}");
}

#[test]
fn a_listener_that_never_answers_is_given_up_at_the_deadline() {
    // The kernel accepts on its behalf.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let to = Address::Tcp(listener.local_addr().unwrap().to_string());
    let error = connect(&to, lane(0, 0), &credentials("sesame"), soon()).unwrap_err();
    assert!(matches!(error, ConnectError::GaveUp { attempts: 1, .. }), "{error}");
    assert!(error.to_string().contains("0 of the 48 bytes of its Challenge"), "{error}");
}

#[test]
fn what_is_not_an_address_is_not_tried() {
    for text in ["localhost", "10.0.0.1", ":7000", "localhost:http", "localhost:70000"] {
        let to = Address::Tcp(text.to_owned());
        let error = connect(&to, lane(0, 0), &credentials("sesame"), later()).unwrap_err();
        assert!(matches!(error, ConnectError::NotAnAddress { .. }), "{text}: {error}");
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn a_port_in_use_is_named() {
    let first = Listener::bind(Ipv4Addr::LOCALHOST.into(), 0, true).unwrap();
    let error = Listener::bind(Ipv4Addr::LOCALHOST.into(), first.tcp().port(), true).unwrap_err();
    assert!(matches!(error, BindError::InUse { address } if address == first.tcp()), "{error}");
    assert!(error.to_string().contains(&first.tcp().to_string()), "{error}");
}

#[test]
fn another_machines_address_is_named() {
    // Set aside for documentation (RFC 5737), so nobody's.
    let error = Listener::bind("198.51.100.7".parse().unwrap(), 0, false).unwrap_err();
    assert!(matches!(error, BindError::NotLocal { .. }), "{error}");
    assert!(error.to_string().contains("198.51.100.7"), "{error}");
}

/// A node that has no book yet lets its callers wait, and there may be more of them than strangers
/// may be.
#[test]
fn callers_that_wait_to_be_admitted_keep_nobody_else_waiting() {
    let (open, closed) = mpsc::channel::<()>();
    let closed = std::sync::Mutex::new(closed);
    let admit = move |hello: &Hello| {
        if hello.node != NodeId(0) {
            // Ends when the sender is gone.
            let _ = closed.lock().unwrap().recv();
        }
        Ok(())
    };
    let listener = Listener::bind(Ipv4Addr::LOCALHOST.into(), 0, false).unwrap();
    let serving = listener.serve(credentials("sesame"), admit, |_, _| ()).unwrap();
    let to = Address::Tcp(serving.tcp().to_string());
    thread::scope(|scope| {
        let call = |node| connect(&to, lane(node, 0), &credentials("sesame"), later()).unwrap();
        let waiting: Vec<_> = (1..=80).map(|node| scope.spawn(move || call(node))).collect();
        call(0);
        drop(open);
        waiting.into_iter().for_each(|caller| drop(caller.join().unwrap()));
    });
}

#[test]
fn a_call_that_is_not_wanted_any_more_ends() {
    let cancelled = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    // Accepts nobody, so the handshake never begins.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let silent = listener.local_addr().unwrap().to_string();
    let nobody = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    nobody.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    let refusing = nobody.local_addr().unwrap().as_socket().unwrap().to_string();
    thread::scope(|scope| {
        let cancelled = &cancelled;
        let calls = [silent, refusing].map(|to| {
            let to = Address::Tcp(to);
            let ours = credentials("sesame");
            let call = move || connect_unless(cancelled, None, &to, lane(1, 0), &ours, later());
            scope.spawn(call)
        });
        thread::sleep(Duration::from_millis(50));
        cancelled.store(true, std::sync::atomic::Ordering::Release);
        for call in calls {
            let error = call.join().unwrap().unwrap_err();
            assert!(matches!(error, ConnectError::CalledOff { .. }), "{error}");
        }
    });
}
