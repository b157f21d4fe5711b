//! The fuzz targets' bodies. `fuzz_targets/` runs them under libFuzzer; `tests/smoke.rs` runs them
//! with a bounded number of seeded inputs on the stable toolchain.
//!
//! A target panics when a decoder breaks its promise, and otherwise tells what became of the input.

mod files;

pub use files::{checkpoint, join};

use poseidon_core::wire::{Challenge, Header, HeaderError, Hello, Purpose, Verdict};
use poseidon_core::{Book, Epoch, JobId, LaneId, NodeId};
use poseidon_link::handshake::{answer, call};
use poseidon_link::{Credentials, HandshakeError};
use std::io::{self, Read, Write};

/// The cluster the fuzzed listener and caller belong to.
pub const CLUSTER: [u8; 16] = [7; 16];

/// What a decoder made of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// It was too short to be a message.
    Short,
    /// It was refused.
    Refused,
    /// It was a message, and encodes to the same message again.
    Accepted,
}

/// A frame header. Arbitrary bytes hardly ever have the right checksum, so an input refused for that
/// alone is given it and tried again.
pub fn header(input: &[u8]) -> Outcome {
    let Some(mut bytes) = input.first_chunk::<{ Header::SIZE }>().copied() else {
        return Outcome::Short;
    };
    let mut decoded = Header::decode(&bytes);
    if let Err(HeaderError::Checksum { expected, .. }) = decoded {
        bytes[Header::SIZE - 4..].copy_from_slice(&expected.to_le_bytes());
        decoded = Header::decode(&bytes);
        assert!(!matches!(decoded, Err(HeaderError::Checksum { .. })), "checksum given, refused");
    }
    let Ok(header) = decoded else { return Outcome::Refused };
    assert_eq!(header.encode(), bytes, "{header:?}");
    Outcome::Accepted
}

/// An information book. What is accepted has a plan, and is written as it was read.
pub fn book(input: &[u8]) -> Outcome {
    match serde_json::from_slice::<Book>(input) {
        Err(error) if error.is_eof() => Outcome::Short,
        Err(_) => Outcome::Refused,
        Ok(book) => {
            assert_eq!(book.plan().layers(), book.job.layers.len());
            let again = serde_json::to_vec(&book).expect("what was read can be written");
            let read = serde_json::from_slice::<Book>(&again).expect("what was written is a book");
            assert_eq!(read, book);
            Outcome::Accepted
        }
    }
}

/// Control messages, one a line, as a coordinator hears them.
pub fn control(input: &[u8]) -> Outcome {
    outcome(poseidon::fuzzing::control(input))
}

/// Frames of a group's other ranks, while an operation is under way.
pub fn router(input: &[u8]) -> Outcome {
    outcome(poseidon::fuzzing::route(input))
}

fn outcome(understood: Option<bool>) -> Outcome {
    match understood {
        None => Outcome::Short,
        Some(false) => Outcome::Refused,
        Some(true) => Outcome::Accepted,
    }
}

/// The messages of the handshake, and both of its sides facing somebody who does not know the
/// secret; the first byte says which.
pub fn handshake(input: &[u8]) -> Outcome {
    let Some((which, rest)) = input.split_first() else { return Outcome::Short };
    match which % 5 {
        0 => hello(rest),
        1 => challenge(rest),
        2 => verdict(rest),
        3 => listener(rest),
        _ => caller(rest),
    }
}

fn hello(input: &[u8]) -> Outcome {
    let Some(bytes) = input.first_chunk() else { return Outcome::Short };
    let Ok(hello) = Hello::decode(bytes) else { return Outcome::Refused };
    let mut again = hello.encode();
    assert_eq!(Hello::decode(&again), Ok(hello));
    // Bytes 52 to 55 are reserved: written as zero, and not looked at.
    again[52..56].copy_from_slice(&bytes[52..56]);
    assert_eq!(&again, bytes);
    Outcome::Accepted
}

fn challenge(input: &[u8]) -> Outcome {
    let Some(bytes) = input.first_chunk() else { return Outcome::Short };
    let Ok(challenge) = Challenge::decode(bytes) else { return Outcome::Refused };
    assert_eq!(Challenge::decode(&challenge.encode()), Ok(challenge));
    Outcome::Accepted
}

/// Every verdict means something: a status nobody knows is a refusal.
fn verdict(input: &[u8]) -> Outcome {
    let Some(bytes) = input.first_chunk() else { return Outcome::Short };
    let verdict = Verdict::decode(bytes);
    assert_eq!(Verdict::decode(&verdict.encode()), verdict);
    Outcome::Accepted
}

/// The listener hears `input`. Nothing that was not made with the secret may let a caller in.
fn listener(input: &[u8]) -> Outcome {
    let credentials = credentials();
    let admit = |hello: &Hello| panic!("a stranger came as far as being admitted: {hello:?}");
    turned_away(answer(&mut Stranger(input), &credentials, admit))
}

/// The caller hears `input`. Nothing that was not made with the secret may pass for its listener.
fn caller(input: &[u8]) -> Outcome {
    let hello = Hello {
        purpose: Purpose::Lane,
        node: NodeId(1),
        lane: LaneId(0),
        encrypt: false,
        cluster: CLUSTER,
        identity: JobId([5; 16]),
        epoch: Epoch(1),
        nonce: [9; 32],
    };
    turned_away(call(&mut Stranger(input), &hello, None, &credentials().secret))
}

fn turned_away<T: std::fmt::Debug>(result: Result<T, HandshakeError>) -> Outcome {
    match result {
        Ok(welcome) => panic!("a stranger was let in: {welcome:?}"),
        Err(HandshakeError::Cut { .. }) => Outcome::Short,
        Err(_) => Outcome::Refused,
    }
}

fn credentials() -> Credentials {
    let secret = "nobody knows what".parse().expect("it is long enough");
    Credentials { cluster: CLUSTER, secret, encrypt: false }
}

/// The other end of a connection: says its bytes whatever it hears.
struct Stranger<'a>(&'a [u8]);

impl Read for Stranger<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Stranger<'_> {
    fn write(&mut self, heard: &[u8]) -> io::Result<usize> {
        Ok(heard.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
