//! Somebody between two nodes.

use super::fake::{read_frame, write_frame};
use poseidon::config::Config;
use poseidon_core::wire::{Challenge, Header, Hello, Verdict};
use poseidon_link::handshake::{PROOF_SIZE, TOKEN_SIZE};
use poseidon_link::{Address, Caller, Listener, Serving, Stream, connect};
use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Listens somewhere, and calls `to` for everybody who calls there. `pass` carries the bytes of one
/// direction: whether they are the caller's, where they come from, where they go.
pub(crate) fn proxy(
    to: String,
    pass: impl Fn(bool, TcpStream, TcpStream) + Clone + Send + 'static,
) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for near in listener.incoming() {
            let (near, far) = (near.unwrap(), TcpStream::connect(&to).unwrap());
            let (asking, asked) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            let (up, down) = (pass.clone(), pass.clone());
            thread::spawn(move || up(true, asking, asked));
            thread::spawn(move || down(false, far, near));
        }
    });
    address
}

/// Passes on what one end says in a handshake.
pub(crate) fn pass_handshake(
    from: &TcpStream,
    to: &mut TcpStream,
    from_caller: bool,
) -> io::Result<()> {
    let bytes = match from_caller {
        true => Hello::SIZE + TOKEN_SIZE + PROOF_SIZE,
        false => Challenge::SIZE + Verdict::SIZE,
    };
    io::copy(&mut from.take(bytes as u64), to).map(drop)
}

/// A coordinator in front of the real one, which tells a node that node 0 is at `instead`. It knows
/// the secret: that is how a test gets in between two nodes, who would notice it otherwise.
pub(crate) fn misdirect(
    config: &Config,
    instead: impl Fn(String) -> String + Send + Sync + 'static,
) -> Serving {
    let listener = Listener::bind(Ipv4Addr::LOCALHOST.into(), 0, false).unwrap();
    let (to, credentials) = (Address::Tcp(config.coordinator.clone()), config.credentials());
    let ours = credentials.clone();
    let deliver = move |hello: Hello, near: Stream| {
        let far = connect(&to, Caller::control(hello.node), &credentials, later()).unwrap();
        let (mut near, mut far) = (near, far);
        // A node asks one thing when it joins, and nothing more in these tests.
        let exchange = |near: &mut Stream, far: &mut Stream| -> io::Result<()> {
            let (header, body) = read_frame(near)?;
            write_frame(far, &[&header.encode()[..], &body].concat())?;
            let (header, body) = read_frame(far)?;
            let mut book: serde_json::Value = serde_json::from_slice(&body)?;
            let place = &mut book["nodes"][0]["tcp"];
            *place = instead(place.as_str().unwrap().to_owned()).into();
            let body = serde_json::to_vec(&book)?;
            let header = Header { length: body.len() as u32, ..header };
            write_frame(near, &[&header.encode()[..], &body].concat())
        };
        exchange(&mut near, &mut far).unwrap();
        thread::spawn(move || {
            // The connections live until the node hangs up.
            let _ = read_frame(&mut near);
            drop(far);
        });
    };
    listener.serve(ours, |_| Ok(()), deliver).unwrap()
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}
