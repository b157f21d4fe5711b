//! The fuzz targets' bodies. `fuzz_targets/` runs them under libFuzzer; `tests/smoke.rs` runs them
//! with a bounded number of seeded inputs on the stable toolchain.
//!
//! A target panics when a decoder breaks its promise, and otherwise tells what became of the input.

use poseidon_core::wire::{Challenge, Header, HeaderError, Hello, Verdict};

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
        bytes[28..].copy_from_slice(&expected.to_le_bytes());
        decoded = Header::decode(&bytes);
        assert!(!matches!(decoded, Err(HeaderError::Checksum { .. })), "checksum given, refused");
    }
    let Ok(header) = decoded else { return Outcome::Refused };
    assert_eq!(header.encode(), bytes, "{header:?}");
    Outcome::Accepted
}

/// The three messages of the handshake that have a structure; the first byte says which.
pub fn handshake(input: &[u8]) -> Outcome {
    let Some((which, rest)) = input.split_first() else { return Outcome::Short };
    match which % 3 {
        0 => hello(rest),
        1 => challenge(rest),
        _ => verdict(rest),
    }
}

fn hello(input: &[u8]) -> Outcome {
    let Some(bytes) = input.first_chunk() else { return Outcome::Short };
    let Ok(hello) = Hello::decode(bytes) else { return Outcome::Refused };
    let mut again = hello.encode();
    assert_eq!(Hello::decode(&again), Ok(hello));
    // Byte 11 is reserved: written as zero, and not looked at.
    again[11] = bytes[11];
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
