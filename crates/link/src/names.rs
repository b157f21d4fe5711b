//! Finds the addresses that a name means, with a deadline.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// The socket addresses that `host:port` may mean, best first. A name that the system's resolver does
/// not know by `deadline` is an error of kind [`ErrorKind::TimedOut`] that says the name.
pub fn resolve(address: &str, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    resolve_by(address, deadline, |name| name.to_socket_addrs().map(Vec::from_iter))
}

/// The system's resolver takes no deadline, so another thread asks it. If the answer comes too late,
/// that thread ends by itself then.
fn resolve_by(
    address: &str,
    deadline: Instant,
    ask: impl FnOnce(&str) -> io::Result<Vec<SocketAddr>> + Send + 'static,
) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = address.parse::<SocketAddr>() {
        return Ok(vec![address]);
    }
    let began = Instant::now();
    let (sender, answer) = mpsc::channel();
    let name = address.to_owned();
    thread::Builder::new().name("poseidon-resolve".to_owned()).spawn(move || {
        let _ = sender.send(ask(&name));
    })?;
    let left = deadline.saturating_duration_since(began);
    answer.recv_timeout(left).unwrap_or_else(|_| {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let waited = began.elapsed().as_secs_f64();
        let words = format!(
            "the name `{host}` was not resolved within {waited:.1} s: check this machine's name \
             servers (/etc/resolv.conf), or use an address instead of a name"
        );
        Err(io::Error::new(ErrorKind::TimedOut, words))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// The resolver answers when the test is over, which is never as far as the caller knows.
    #[test]
    fn a_name_server_that_does_not_answer_is_not_waited_for() {
        let (end, ended) = mpsc::channel::<()>();
        let deadline = Instant::now() + Duration::from_millis(50);
        let error = resolve_by("far.example:7000", deadline, move |_| {
            let _ = ended.recv();
            Ok(Vec::new())
        })
        .unwrap_err();
        drop(end);
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let words = error.to_string();
        assert!(words.contains("`far.example`") && words.contains("resolv.conf"), "{words}");
    }

    #[test]
    fn an_address_needs_no_resolver() {
        let ask = |_: &str| unreachable!("nobody is asked");
        let found = resolve_by("[::1]:7", Instant::now(), ask).unwrap();
        assert_eq!(found, ["[::1]:7".parse().unwrap()]);
        let later = Instant::now() + Duration::from_secs(60);
        assert!(!resolve("localhost:7", later).unwrap().is_empty());
        assert!(resolve("localhost", later).is_err());
    }
}
