use crate::Credentials;
use crate::address::Choice;
use crate::descriptors;
use crate::handshake::{self, HandshakeError, Private};
use crate::names;
use crate::secret::random_number;
use crate::stream::{Stream, is_self_connected, socket_for, unix_address};
use crate::window;
use poseidon_core::wire::{Hello, Purpose, Status};
use poseidon_core::{Epoch, JobId, LaneId, NodeId};
use socket2::{SockAddr, Socket};
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The address of a listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// `host:port`; the host may be a name.
    Tcp(String),
    /// The name of an abstract unix socket on this machine.
    Unix(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(name) => write!(f, "unix:{name}"),
        }
    }
}

/// Who calls, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// What the connection is for.
    pub purpose: Purpose,
    /// The calling node, or [`poseidon_core::wire::NOBODY`].
    pub node: NodeId,
    /// The lane that is called; lanes of the same number call each other.
    pub lane: LaneId,
    /// The run of the job it belongs to; zero on a control connection, which does not know it yet.
    pub identity: JobId,
    /// The epoch of that run; zero on a control connection.
    pub epoch: Epoch,
}

impl Caller {
    /// `node` calls the coordinator.
    pub fn control(node: NodeId) -> Self {
        let (identity, epoch) = (JobId::default(), Epoch(0));
        Self { purpose: Purpose::Control, node, lane: LaneId(0), identity, epoch }
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The address is not of the form `host:port`.
    #[error("`{address}` is not an address: it must be host:port, such as 10.0.0.1:7000")]
    NotAnAddress {
        /// What was given.
        address: String,
    },
    /// The listener refused, or could not prove who it is. Trying again would not change that.
    #[error("{address} was reached, but the handshake failed: {reason}")]
    Handshake {
        /// The address that was called.
        address: Address,
        /// What the listener said, or failed to prove.
        reason: HandshakeError,
    },
    /// Nobody answered before the deadline.
    #[error(
        "no answer from {address} within {:.1} s ({attempts} attempts); the last error was: {last}",
        .waited.as_secs_f64()
    )]
    GaveUp {
        /// Whom we called.
        address: Address,
        /// How often a connection was tried.
        attempts: u32,
        /// How long we tried.
        waited: Duration,
        /// How the last attempt ended.
        last: String,
    },
    /// This system cannot make such a connection at all.
    #[error("cannot connect to {address}: {source}")]
    Impossible {
        /// Whom we wanted to call.
        address: Address,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody in this process said that the connection is not wanted any more.
    #[error("the call to {address} was called off")]
    CalledOff {
        /// Whom we called.
        address: Address,
    },
}

/// Calls the listener at `to` until it answers or the deadline passes: the peer may not have started
/// yet, so a refused connection is tried again, and so is one that breaks during the handshake. A
/// listener that answers and says no is not asked twice, if it proves that it knows the secret.
///
/// The stream has no deadline; both ends have proved that they know the secret.
pub fn connect(
    to: &Address,
    caller: Caller,
    credentials: &Credentials,
    deadline: Instant,
) -> Result<Stream, ConnectError> {
    call(None, to, caller, credentials, deadline, None)
}

/// As [`connect`], but ends soon after `cancelled` has become true. A TCP connection is made from the
/// address and the interface `from`, if there is one.
pub fn connect_unless(
    cancelled: &Arc<AtomicBool>,
    from: Option<&Choice>,
    to: &Address,
    caller: Caller,
    credentials: &Credentials,
    deadline: Instant,
) -> Result<Stream, ConnectError> {
    call(from, to, caller, credentials, deadline, Some(cancelled))
}

fn call(
    from: Option<&Choice>,
    to: &Address,
    caller: Caller,
    credentials: &Credentials,
    deadline: Instant,
    cancelled: Option<&Arc<AtomicBool>>,
) -> Result<Stream, ConnectError> {
    let is_cancelled = || cancelled.is_some_and(|cancelled| cancelled.load(Ordering::Acquire));
    let start = Instant::now();
    let (mut attempts, mut doubtful) = (0, 0);
    let mut last = "the deadline had passed before the first attempt".to_owned();
    let mut pause = FIRST_PAUSE;
    let mut notice = FIRST_NOTICE;
    while Instant::now() < deadline {
        let targets = match resolve(to, deadline) {
            Ok(targets) => targets,
            Err(Unresolved::Never(error)) => return Err(error),
            Err(Unresolved::NotYet(error)) => {
                last = error.to_string();
                Vec::new()
            }
        };
        for target in targets {
            attempts += 1;
            match attempt(from, &target, caller, credentials, deadline, cancelled) {
                Ok(stream) => return Ok(stream),
                Err(_) if is_cancelled() => {
                    return Err(ConnectError::CalledOff { address: to.clone() });
                }
                // Waiting frees no descriptor of ours.
                Err(HandshakeError::Io(e)) if descriptors::is_shortage(&e) => {
                    let source = descriptors::explain(e, None);
                    return Err(ConnectError::Impossible { address: to.clone(), source });
                }
                Err(reason) if is_final(&reason, &mut doubtful) => {
                    return Err(ConnectError::Handshake { address: to.clone(), reason });
                }
                Err(reason) => last = describe(to, &target, &reason),
            }
        }
        if start.elapsed() >= notice {
            notice = start.elapsed() + start.elapsed().min(RAREST_NOTICE);
            tracing::warn!("waiting for an answer from {to}: {last}");
        }
        let until = deadline.min(Instant::now() + pause);
        while let left = until.saturating_duration_since(Instant::now())
            && !left.is_zero()
        {
            if is_cancelled() {
                return Err(ConnectError::CalledOff { address: to.clone() });
            }
            thread::sleep(left.min(GLANCE));
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    Err(ConnectError::GaveUp { address: to.clone(), attempts, waited: start.elapsed(), last })
}

/// One connection and one handshake.
fn attempt(
    from: Option<&Choice>,
    target: &SockAddr,
    caller: Caller,
    credentials: &Credentials,
    deadline: Instant,
    cancelled: Option<&Arc<AtomicBool>>,
) -> Result<Stream, HandshakeError> {
    let socket = open(from, target, deadline)?;
    let mut stream = Stream::new(socket, target)?;
    stream.set_deadline(Some(deadline));
    stream.set_cancelled(cancelled.cloned());
    let Caller { purpose, node, lane, identity, epoch } = caller;
    let Credentials { cluster, encrypt, ref secret } = *credentials;
    let mut hello =
        Hello { purpose, node, lane, encrypt, cluster, identity, epoch, nonce: [0; 32] };
    let mut private = None;
    if encrypt {
        let drawn = Private::draw()?;
        (private, hello.nonce) = (Some(drawn.0), drawn.1);
    } else {
        getrandom::fill(&mut hello.nonce).map_err(io::Error::from)?;
    }
    let protection = handshake::call(&mut stream, &hello, private.as_ref(), secret)?;
    stream.protect(protection);
    stream.set_deadline(None);
    stream.set_cancelled(None);
    Ok(stream)
}

fn open(from: Option<&Choice>, target: &SockAddr, deadline: Instant) -> io::Result<Socket> {
    let socket = socket_for(target)?;
    if let Some(from) = from.filter(|_| !target.is_unix()) {
        from.keep(&socket);
        socket.bind(&SocketAddr::new(from.ip, 0).into())?;
    }
    if target.is_unix() {
        // This socket gets a name of its own, so that the listener's log can say who called.
        let name = format!("poseidon-{}-{:016x}", std::process::id(), random_number()? as u64);
        socket.bind(&unix_address(&name)?)?;
    }
    let left = deadline.saturating_duration_since(Instant::now());
    // The kernel waits ever longer between its own attempts. A short limit starts them afresh.
    socket.connect_timeout(target, left.clamp(Duration::from_millis(1), LONGEST_ATTEMPT))?;
    if target.as_socket().is_some_and(|to| is_self_connected(&socket, to)) {
        return Err(ErrorKind::ConnectionRefused.into());
    }
    if target.as_socket().is_some_and(|to| !to.ip().is_loopback()) {
        window::keep_small(&socket)?;
    }
    Ok(socket)
}

/// Why an address has no sockets.
pub(crate) enum Unresolved {
    /// Asking again will not help.
    Never(ConnectError),
    /// Asking again may help.
    NotYet(io::Error),
}

/// The socket addresses that `to` may mean, best first. A name that is not known yet may become
/// known: the machine with this name may still be starting.
pub(crate) fn resolve(to: &Address, deadline: Instant) -> Result<Vec<SockAddr>, Unresolved> {
    let address = match to {
        Address::Unix(name) => {
            return unix_address(name).map(|address| vec![address]).map_err(|source| {
                Unresolved::Never(ConnectError::Impossible { address: to.clone(), source })
            });
        }
        Address::Tcp(address) => address,
    };
    if let Ok(address) = address.parse::<SocketAddr>() {
        return Ok(vec![address.into()]);
    }
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
    if port.is_none_or(|port| port.parse::<u16>().is_err()) {
        return Err(Unresolved::Never(ConnectError::NotAnAddress { address: address.clone() }));
    }
    let found = names::resolve(address, deadline).map_err(Unresolved::NotYet)?;
    Ok(found.into_iter().map(SockAddr::from).collect())
}

/// Whether the listener's answer is final, so that calling again would not change it. An answer that
/// anybody may have given is final when it has come [`DOUBTFUL`] times.
fn is_final(reason: &HandshakeError, doubtful: &mut u32) -> bool {
    use HandshakeError::*;
    match reason {
        // It is on its way into the job.
        Refused(Status::NoBook) => false,
        Refused(_) => true,
        Unproved(_) | Version { .. } | NotPoseidon | Impostor => {
            *doubtful += 1;
            *doubtful >= DOUBTFUL
        }
        Cut { .. } | Late { .. } | Io(_) => false,
    }
}

/// The error, with the address that was tried if `to` is a name.
fn describe(to: &Address, target: &SockAddr, reason: &HandshakeError) -> String {
    match target.as_socket().map(|address| address.to_string()) {
        Some(address) if address != to.to_string() => format!("{address}: {reason}"),
        _ => reason.to_string(),
    }
}

/// How often a listener that does not prove that it knows the secret is asked. Once would let a
/// single packet of somebody in between stop a node. Five take 150 ms.
const DOUBTFUL: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How often a pause looks whether the call is still wanted.
const GLANCE: Duration = Duration::from_millis(100);
const LONGEST_ATTEMPT: Duration = Duration::from_secs(5);
/// After so long it is said whom this process waits for, and then each time it has waited twice as
/// long, but at least every [`RAREST_NOTICE`].
const FIRST_NOTICE: Duration = Duration::from_secs(5);
const RAREST_NOTICE: Duration = Duration::from_secs(60);
