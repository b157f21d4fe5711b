//! A page of text that anybody may ask for by HTTP, such as a node's metrics.
//!
//! One thread answers one caller after the other, each within a second, and closes the connection. It
//! reads no more than a few kilobytes of a request, and of these only the first line means anything. A
//! library for HTTP servers would bring a runtime with it for the sake of this one line.

use mio::{Events, Interest, Poll, Token, Waker};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Answers `GET /metrics`, or `GET /`, until it is dropped.
#[derive(Debug)]
pub struct TextServer {
    address: SocketAddr,
    stopped: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread.
    owner: u32,
}

/// How long one caller may take, from the first byte of the request to the last of the answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest request. Those of browsers and of Prometheus have less than one kilobyte.
const LONGEST: usize = 8 << 10;
const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);

impl TextServer {
    /// Listens at `address`. Each caller gets what `text` returns then, which is of type
    /// `content_type`.
    pub fn start(
        address: SocketAddr,
        content_type: &'static str,
        text: impl Fn() -> String + Send + 'static,
    ) -> io::Result<Self> {
        let mut listener = mio::net::TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let mut poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let stopped = Arc::new(AtomicBool::new(false));
        let is_stopped = stopped.clone();
        let body = move || {
            let mut events = Events::with_capacity(4);
            while !is_stopped.load(Ordering::Relaxed) {
                let heard = poll.poll(&mut events, None);
                if heard.is_err_and(|error| error.kind() != ErrorKind::Interrupted) {
                    return;
                }
                while !is_stopped.load(Ordering::Relaxed) {
                    match listener.accept() {
                        // What goes wrong with a caller is the caller's trouble.
                        Ok((caller, _)) => drop(answer(caller.into(), content_type, &text)),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        // Perhaps there are too many files open: not at once again.
                        Err(_) => {
                            std::thread::sleep(Duration::from_millis(100));
                            break;
                        }
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("poseidon-metrics".into()).spawn(body)?;
        let owner = std::process::id();
        Ok(Self { address, stopped, waker, thread: Some(thread), owner })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TextServer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if std::process::id() != self.owner {
            // The thread is not there to be waited for.
            return std::mem::forget(thread);
        }
        self.stopped.store(true, Ordering::Relaxed);
        if self.waker.wake().is_ok() {
            // A panic is a bug; its message is on standard error already.
            let _ = thread.join();
        }
    }
}

/// Reads a request and answers it.
fn answer(mut caller: TcpStream, content_type: &str, text: &impl Fn() -> String) -> io::Result<()> {
    caller.set_nonblocking(false)?;
    let deadline = Instant::now() + PATIENCE;
    let left = || match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::Error::from(ErrorKind::TimedOut)),
        left => Ok(Some(left)),
    };
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        if request.len() > LONGEST {
            return Err(ErrorKind::InvalidData.into());
        }
        caller.set_read_timeout(left()?)?;
        match caller.read(&mut piece)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            read => request.extend_from_slice(&piece[..read]),
        }
    }
    let (status, body) = match asked(&request) {
        Asked::Text => ("200 OK", text()),
        Asked::Elsewhere => ("404 Not Found", "There is only /metrics here.\n".into()),
        Asked::Otherwise => ("405 Method Not Allowed", "Only GET is answered here.\n".into()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    let answer = [head.as_bytes(), body.as_bytes()].concat();
    let mut written = 0;
    while written < answer.len() {
        caller.set_write_timeout(left()?)?;
        match caller.write(&answer[written..])? {
            0 => return Err(ErrorKind::WriteZero.into()),
            bytes => written += bytes,
        }
    }
    Ok(())
}

enum Asked {
    Text,
    Elsewhere,
    Otherwise,
}

/// What the first line of a request asks for.
fn asked(request: &[u8]) -> Asked {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    if words.next() != Some(b"GET") {
        return Asked::Otherwise;
    }
    let path = words.next().unwrap_or_default();
    match path.split(|byte| *byte == b'?').next() {
        Some(b"/metrics" | b"/") => Asked::Text,
        _ => Asked::Elsewhere,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn start() -> TextServer {
        let asked = AtomicU32::new(0);
        let text = move || format!("answer {}\n", asked.fetch_add(1, Ordering::Relaxed) + 1);
        TextServer::start("127.0.0.1:0".parse().unwrap(), "text/plain", text).unwrap()
    }

    fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut caller = TcpStream::connect(address).unwrap();
        caller.write_all(request).unwrap();
        let mut answer = String::new();
        // What was not answered is closed, perhaps with a reset.
        let _ = caller.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn callers_get_the_text_of_the_moment_and_others_are_told_what_is_wrong() {
        let server = start();
        let get = |path: &str| {
            ask(server.address(), format!("GET {path} HTTP/1.1\r\nHost: here\r\n\r\n").as_bytes())
        };
        let first = get("/metrics");
        assert!(first.starts_with("HTTP/1.1 200 OK\r\n"), "{first}");
        assert!(first.contains("Content-Length: 9\r\n"), "{first}");
        assert!(first.ends_with("\r\n\r\nanswer 1\n"), "{first}");
        assert!(get("/metrics?x=1").ends_with("answer 2\n"));
        assert!(get("/").ends_with("answer 3\n"));
        assert!(get("/secrets").starts_with("HTTP/1.1 404 "));
        let post = ask(server.address(), b"POST /metrics HTTP/1.1\r\n\r\n");
        assert!(post.starts_with("HTTP/1.1 405 "), "{post}");
    }

    #[test]
    fn those_who_say_nothing_or_too_much_do_not_keep_the_others_out() {
        let server = start();
        let silent = TcpStream::connect(server.address()).unwrap();
        let long = vec![b'x'; 4 * LONGEST];
        assert_eq!(ask(server.address(), &long), "");
        let answer = ask(server.address(), b"GET /metrics HTTP/1.0\r\n\r\n");
        assert!(answer.ends_with("answer 1\n"), "{answer}");
        drop(silent);
    }

    #[test]
    fn a_server_that_is_dropped_listens_no_more() {
        let server = start();
        let address = server.address();
        drop(server);
        assert!(TcpStream::connect(address).is_err());
    }
}
