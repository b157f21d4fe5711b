//! What the way to another machine is like: how large a packet may be, what was sent again, whether
//! a port answers.

use crate::connect::{Unresolved, resolve};
use crate::{Address, window};
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Answers the packets of [`largest_packet`] until it is dropped. An answer is shorter than what it
/// answers, and what does not begin with the token is not answered.
#[derive(Debug)]
pub struct PacketEcho {
    port: u16,
    /// Set once, by the drop; the thread reads it.
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What both ends of a probe know: 16 bytes.
pub type Token = [u8; 16];

impl PacketEcho {
    /// Listens at `ip`, on any UDP port that is free.
    pub fn start(ip: IpAddr, token: Token) -> io::Result<Self> {
        let socket = UdpSocket::bind((ip, 0))?;
        socket.set_read_timeout(Some(GLANCE))?;
        let port = socket.local_addr()?.port();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let answer = move || {
            let mut packet = vec![0; MOST];
            while !stopped.load(Ordering::Acquire) {
                let Ok((length, from)) = socket.recv_from(&mut packet) else { continue };
                if length >= LEAST && packet.starts_with(&token) {
                    // Who gets no answer asks again.
                    let _ = socket.send_to(&packet[..ANSWER], from);
                }
            }
        };
        let thread = thread::Builder::new().name("poseidon-echo".to_owned()).spawn(answer)?;
        Ok(Self { port, stop, thread: Some(thread) })
    }

    /// The UDP port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for PacketEcho {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // It ends within a glance. A panic was reported.
            let _ = thread.join();
        }
    }
}

/// The largest IP packet, of at most `most` bytes, that gets from `from` to the echo at `to` without
/// being cut. Each size is tried three times, and an answer is awaited for `patience`. `None` if not
/// even a small packet is answered: a firewall may drop datagrams, and then nothing is known.
pub fn largest_packet(
    from: IpAddr,
    to: SocketAddr,
    token: Token,
    most: usize,
    patience: Duration,
) -> io::Result<Option<usize>> {
    let domain = Domain::for_address(to);
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    window::do_not_fragment(&socket, to.is_ipv6())?;
    socket.bind(&SocketAddr::new(from, 0).into())?;
    socket.connect(&to.into())?;
    let socket = UdpSocket::from(socket);
    let headers = if to.is_ipv6() { 48 } else { 28 };
    let mut number = 0u64;
    let mut passes = |size: usize| -> io::Result<bool> {
        for _ in 0..TRIES {
            number += 1;
            let mut packet = vec![0; size - headers];
            packet[..token.len()].copy_from_slice(&token);
            packet[token.len()..ANSWER].copy_from_slice(&number.to_le_bytes());
            match socket.send(&packet) {
                Err(e) if is_too_large(&e) => return Ok(false),
                // The news of an earlier packet that found nobody.
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => continue,
                sent => sent?,
            };
            let deadline = Instant::now() + patience;
            while let left = deadline.saturating_duration_since(Instant::now())
                && !left.is_zero()
            {
                socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
                let mut answer = [0; MOST_ANSWER];
                match socket.recv(&mut answer) {
                    Ok(ANSWER) if answer[..ANSWER] == packet[..ANSWER] => return Ok(true),
                    _ => {}
                }
            }
        }
        Ok(false)
    };
    let smallest = LEAST + headers;
    let most = most.clamp(smallest, MOST);
    if !passes(smallest)? {
        return Ok(None);
    }
    if passes(most)? {
        return Ok(Some(most));
    }
    let (mut good, mut bad) = (smallest, most);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if passes(middle)? { good = middle } else { bad = middle }
    }
    Ok(Some(good))
}

/// A port that took a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// The address that the name stands for.
    pub to: SocketAddr,
    /// The address of this machine that was called from.
    pub from: IpAddr,
    /// How long the call took: about a round trip.
    pub took: Duration,
}

/// Why a port took no connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unreached {
    /// The name stands for no address.
    #[error("the name '{host}' cannot be resolved: {why}")]
    Name {
        /// The name.
        host: String,
        /// What the resolver said.
        why: String,
    },
    /// The machine answers, and nobody listens.
    #[error("{to} refused the connection: the machine is there, and nobody listens on that port")]
    Refused {
        /// Where.
        to: SocketAddr,
    },
    /// Nothing came back.
    #[error("{to} did not answer within {waited:.1?}")]
    Silent {
        /// Where.
        to: SocketAddr,
        /// How long it was awaited.
        waited: Duration,
    },
    /// Anything else.
    #[error("{to}: {source}")]
    Other {
        /// Where.
        to: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
}

/// Whether `port` of `host` takes connections. The connection is closed at once.
pub fn reach(host: &str, port: u16, patience: Duration) -> Result<Reached, Unreached> {
    let deadline = Instant::now() + patience;
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = match bare.parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, port).to_string(),
        Err(_) => format!("{host}:{port}"),
    };
    let unknown = |why: String| Unreached::Name { host: host.to_owned(), why };
    let found =
        resolve(&Address::Tcp(address), deadline).map_err(|unresolved| match unresolved {
            Unresolved::Never(error) => unknown(error.to_string()),
            Unresolved::NotYet(error) => unknown(error.to_string()),
        })?;
    let to = found.iter().find_map(|address| address.as_socket());
    let to = to.ok_or_else(|| unknown("it stands for no address".to_owned()))?;
    let (began, left) = (Instant::now(), deadline.saturating_duration_since(Instant::now()));
    let connected = TcpStream::connect_timeout(&to, left.max(Duration::from_millis(1)));
    let took = began.elapsed();
    match connected.and_then(|stream| Ok(stream.local_addr()?.ip())) {
        Ok(from) => Ok(Reached { to, from, took }),
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => Err(Unreached::Refused { to }),
        Err(e) if e.kind() == ErrorKind::TimedOut => Err(Unreached::Silent { to, waited: took }),
        Err(source) => Err(Unreached::Other { to, source }),
    }
}

fn is_too_large(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error())
}

/// Bytes of an answer: the token and a number.
const ANSWER: usize = 24;
/// Room for an answer, and to see that one is too long.
const MOST_ANSWER: usize = ANSWER + 1;
/// Bytes of a packet's data at least. Answers are shorter.
const LEAST: usize = 100;
/// No IP packet is larger.
const MOST: usize = 65_535;
/// How often a size is tried: a packet may be lost by chance.
const TRIES: usize = 3;
/// How soon an echo notices that it is dropped.
const GLANCE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};

    const PATIENCE: Duration = Duration::from_secs(5);

    #[test]
    fn the_largest_packet_is_as_large_as_was_asked_for_where_it_passes() {
        for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)] {
            let Ok(echo) = PacketEcho::start(ip, [7; 16]) else {
                assert!(ip.is_ipv6(), "every machine has {ip}");
                println!("skipped: this machine has no {ip}");
                continue;
            };
            let to = SocketAddr::new(ip, echo.port());
            for most in [1500, 9000] {
                let found = largest_packet(ip, to, [7; 16], most, PATIENCE).unwrap();
                assert_eq!(found, Some(most), "{ip}");
            }
        }
    }

    #[test]
    fn who_does_not_know_the_token_is_not_answered() {
        let ip = IpAddr::from(Ipv4Addr::LOCALHOST);
        let echo = PacketEcho::start(ip, [7; 16]).unwrap();
        let to = SocketAddr::new(ip, echo.port());
        let patience = Duration::from_millis(20);
        assert_eq!(largest_packet(ip, to, [8; 16], 1500, patience).unwrap(), None);
        drop(echo);
        assert_eq!(largest_packet(ip, to, [7; 16], 1500, patience).unwrap(), None);
    }

    #[test]
    fn a_port_answers_or_refuses_and_a_name_must_exist() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let reached = reach("127.0.0.1", port, PATIENCE).unwrap();
        assert_eq!((reached.to.port(), reached.from), (port, Ipv4Addr::LOCALHOST.into()));
        drop(listener);
        let error = reach("127.0.0.1", port, PATIENCE).unwrap_err();
        assert!(matches!(error, Unreached::Refused { .. }), "{error}");
        let error = reach("no-such-host.invalid", port, PATIENCE).unwrap_err();
        assert!(error.to_string().contains("'no-such-host.invalid'"), "{error}");
    }
}
