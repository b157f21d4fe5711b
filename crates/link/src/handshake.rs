//! Who may speak: the four messages of `docs/wire.md` §1, over any `Read + Write`.
//!
//! The stream keeps the deadlines: a read that fails with `TimedOut` or `WouldBlock` ends the
//! handshake.

use crate::{Credentials, Secret};
use hmac::{Hmac, KeyInit, Mac};
use poseidon_core::wire::{Challenge, Hello, Status, VERSION, Verdict};
use sha2::Sha256;
use std::io::{self, Read, Write};
use std::ops::Range;

/// Size of a proof message.
pub const PROOF_SIZE: usize = 32;

/// A handshake that did not end in a welcome.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The listener refused the caller. Both sides see the same status.
    #[error("{0}")]
    Refused(Status),
    /// The other side speaks another version of the protocol.
    #[error(
        "it speaks protocol version {theirs}, this build speaks {VERSION}: install the same \
         Poseidon on every node"
    )]
    Version {
        /// The other side's version.
        theirs: u16,
    },
    /// Something other than Poseidon listens there.
    #[error("what listens there is not Poseidon")]
    NotPoseidon,
    /// The listener admitted the caller, and does not know the secret.
    #[error(
        "the listener could not prove that it knows the cluster secret: it is not one of this \
         cluster's nodes"
    )]
    Impostor,
    /// The stream ended within a message.
    #[error("the connection ended after {got} of the {size} bytes of its {message}")]
    Cut {
        /// The message that was awaited.
        message: &'static str,
        /// Bytes of it that came.
        got: usize,
        /// Bytes it has.
        size: usize,
    },
    /// A message did not arrive whole in time.
    #[error("only {got} of the {size} bytes of its {message} came in time")]
    Late {
        /// The message that was awaited.
        message: &'static str,
        /// Bytes of it that came.
        got: usize,
        /// Bytes it has.
        size: usize,
    },
    /// The stream failed, or the system had no random bytes.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The caller's side of the whole handshake. On success both ends have proved that they know the secret.
pub fn call(
    stream: &mut (impl Read + Write),
    hello: &Hello,
    secret: &Secret,
) -> Result<(), HandshakeError> {
    let hello = hello.encode();
    stream.write_all(&hello)?;

    let mut bytes = [0; Challenge::SIZE];
    fill(stream, "Challenge", &mut bytes, 0..PREFIX)?;
    Challenge::decode(&bytes).map_err(|_| HandshakeError::NotPoseidon)?;
    fill(stream, "Challenge", &mut bytes, PREFIX..Challenge::SIZE)?;
    let challenge = Challenge::decode(&bytes).map_err(|_| HandshakeError::NotPoseidon)?;
    if challenge.version != VERSION {
        return Err(HandshakeError::Version { theirs: challenge.version });
    }
    if challenge.status != Status::Welcome {
        return Err(HandshakeError::Refused(challenge.status));
    }

    let transcript = Transcript { hello, challenge: bytes };
    stream.write_all(&transcript.mac(secret, CALLER).finalize().into_bytes())?;

    let mut bytes = [0; Verdict::SIZE];
    fill(stream, "Verdict", &mut bytes, 0..Verdict::SIZE)?;
    let verdict = Verdict::decode(&bytes);
    if verdict.status != Status::Welcome {
        return Err(HandshakeError::Refused(verdict.status));
    }
    let proof = transcript.mac(secret, LISTENER).verify_slice(&verdict.proof);
    proof.map_err(|_| HandshakeError::Impostor)
}

/// The listener's side up to its challenge; [`Challenged::judge`] is the rest. Between the two the
/// listener renews its deadline.
pub fn challenge(
    stream: &mut (impl Read + Write),
    credentials: &Credentials,
) -> Result<Challenged, HandshakeError> {
    let mut bytes = [0; Hello::SIZE];
    let decoded = receive_hello(stream, &mut bytes)?.and_then(|hello| {
        if hello.cluster == credentials.cluster { Ok(hello) } else { Err(Status::Cluster) }
    });
    let mut challenge = Challenge { status: Status::Welcome, version: VERSION, nonce: [0; 32] };
    let hello = match decoded {
        Ok(hello) => hello,
        Err(status) => {
            challenge.status = status;
            stream.write_all(&challenge.encode())?;
            return Err(match status {
                Status::Version => HandshakeError::Version { theirs: Hello::version(&bytes) },
                _ => HandshakeError::Refused(status),
            });
        }
    };
    getrandom::fill(&mut challenge.nonce).map_err(io::Error::from)?;
    let transcript = Transcript { hello: bytes, challenge: challenge.encode() };
    stream.write_all(&transcript.challenge)?;
    Ok(Challenged { hello, transcript })
}

/// A caller that has been challenged and has proved nothing yet.
pub struct Challenged {
    hello: Hello,
    transcript: Transcript,
}

impl Challenged {
    /// Reads the caller's proof and gives the verdict. `admit` is asked only about callers that
    /// know the secret, so a stranger learns nothing about the cluster and changes nothing in it.
    pub fn judge(
        self,
        stream: &mut (impl Read + Write),
        secret: &Secret,
        admit: impl FnOnce(&Hello) -> Result<(), Status>,
    ) -> Result<Hello, HandshakeError> {
        let proven = self.prove(stream, secret)?;
        let judged = admit(&proven.hello);
        proven.answer(stream, secret, judged)
    }

    /// Reads the caller's proof. A caller that does not know the secret is refused.
    pub(crate) fn prove(
        self,
        stream: &mut (impl Read + Write),
        secret: &Secret,
    ) -> Result<Proven, HandshakeError> {
        let mut proof = [0; PROOF_SIZE];
        fill(stream, "Proof", &mut proof, 0..PROOF_SIZE)?;
        let known = self.transcript.mac(secret, CALLER).verify_slice(&proof);
        if known.is_err() {
            let verdict = Verdict { status: Status::Secret, proof: [0; 32] };
            stream.write_all(&verdict.encode())?;
            return Err(HandshakeError::Refused(Status::Secret));
        }
        Ok(Proven { hello: self.hello, transcript: self.transcript })
    }
}

/// A caller that knows the secret and awaits its verdict.
pub(crate) struct Proven {
    pub(crate) hello: Hello,
    transcript: Transcript,
}

impl Proven {
    /// Gives the verdict.
    pub(crate) fn answer(
        self,
        stream: &mut impl Write,
        secret: &Secret,
        judged: Result<(), Status>,
    ) -> Result<Hello, HandshakeError> {
        let verdict = match judged {
            Ok(()) => Verdict {
                status: Status::Welcome,
                proof: self.transcript.mac(secret, LISTENER).finalize().into_bytes().into(),
            },
            Err(status) => Verdict { status, proof: [0; 32] },
        };
        stream.write_all(&verdict.encode())?;
        judged.map(|()| self.hello).map_err(HandshakeError::Refused)
    }
}

/// What both proofs cover: the two messages exactly as they crossed the wire.
struct Transcript {
    hello: [u8; Hello::SIZE],
    challenge: [u8; Challenge::SIZE],
}

impl Transcript {
    fn mac(&self, secret: &Secret, label: &[u8]) -> Hmac<Sha256> {
        Hmac::<Sha256>::new_from_slice(secret.expose().as_bytes())
            .expect("HMAC takes keys of any length")
            .chain_update(label)
            .chain_update(self.hello)
            .chain_update(self.challenge)
    }
}

/// The two sides' proofs have different labels, so that neither proof can be sent back as the
/// other's.
const CALLER: &[u8] = b"poseidon caller";
const LISTENER: &[u8] = b"poseidon listener";

/// Magic, version, purpose and status lie within the first bytes of a message. They are judged
/// before the rest is awaited: a stranger, or another version whose messages have other sizes,
/// gets its answer at once.
const PREFIX: usize = 16;

/// Reads the caller's Hello. The outer error is the stream's. The inner error is the status that the
/// listener answers with.
fn receive_hello(
    stream: &mut impl Read,
    bytes: &mut [u8; Hello::SIZE],
) -> Result<Result<Hello, Status>, HandshakeError> {
    fill(stream, "Hello", bytes, 0..PREFIX)?;
    if let Err(status) = Hello::decode(bytes) {
        return Ok(Err(status));
    }
    fill(stream, "Hello", bytes, PREFIX..Hello::SIZE)?;
    Ok(Hello::decode(bytes))
}

/// Reads the `part` of `message` that comes next.
fn fill(
    stream: &mut impl Read,
    message: &'static str,
    bytes: &mut [u8],
    part: Range<usize>,
) -> Result<(), HandshakeError> {
    let size = bytes.len();
    let mut got = part.start;
    while got < part.end {
        match stream.read(&mut bytes[got..part.end]) {
            Ok(0) => return Err(HandshakeError::Cut { message, got, size }),
            Ok(n) => got += n,
            Err(e) => match e.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                    return Err(HandshakeError::Late { message, got, size });
                }
                _ => return Err(e.into()),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::wire::Purpose;
    use poseidon_core::{Epoch, JobId, LaneId, NodeId};
    use proptest::prelude::*;

    /// Reads a script, keeps what is written.
    struct Scripted<'a> {
        input: &'a [u8],
        output: Vec<u8>,
    }

    impl<'a> Scripted<'a> {
        fn new(input: &'a [u8]) -> Self {
            Self { input, output: Vec::new() }
        }
    }

    impl Read for Scripted<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.input.read(buf)
        }
    }

    impl Write for Scripted<'_> {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            self.output.write(buf)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn credentials() -> Credentials {
        Credentials { cluster: [9; 16], secret: "Jefe".parse().unwrap() }
    }

    fn hello() -> Hello {
        Hello {
            purpose: Purpose::Lane,
            node: NodeId(1),
            lane: LaneId(2),
            cluster: [9; 16],
            identity: JobId([4; 16]),
            epoch: Epoch(1),
            nonce: [7; 32],
        }
    }

    /// HMAC-SHA256 written out from RFC 2104, so that the proofs are checked against the
    /// specification and not against the code that makes them.
    fn rfc2104(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
        use sha2::Digest;
        let pad = |x: u8| {
            let mut block = [x; 64];
            block.iter_mut().zip(key).for_each(|(b, k)| *b ^= k);
            block
        };
        let mut inner = Sha256::new_with_prefix(pad(0x36));
        parts.iter().for_each(|part| inner.update(part));
        Sha256::new_with_prefix(pad(0x5c)).chain_update(inner.finalize()).finalize().into()
    }

    #[test]
    fn proofs_are_what_the_specification_says() {
        let challenge = Challenge { status: Status::Welcome, version: VERSION, nonce: [3; 32] };
        let covered: [&[u8]; 2] = [&hello().encode(), &challenge.encode()];
        let listener = rfc2104(b"Jefe", &[b"poseidon listener", covered[0], covered[1]]);
        let verdict = Verdict { status: Status::Welcome, proof: listener };
        let script = [&challenge.encode()[..], &verdict.encode()].concat();
        let mut stream = Scripted::new(&script);
        call(&mut stream, &hello(), &credentials().secret).unwrap();
        let caller = rfc2104(b"Jefe", &[b"poseidon caller", covered[0], covered[1]]);
        assert_eq!(stream.output, [&hello().encode()[..], &caller].concat());
    }

    #[test]
    fn a_caller_is_challenged_afresh_each_time() {
        let mut nonces = [[0; 32]; 2];
        for nonce in &mut nonces {
            let script = hello().encode();
            let mut stream = Scripted::new(&script);
            challenge(&mut stream, &credentials()).unwrap();
            *nonce = Challenge::decode(stream.output[..].try_into().unwrap()).unwrap().nonce;
        }
        assert_ne!(nonces[0], nonces[1]);
        assert_ne!(nonces[0], [0; 32]);
    }

    #[test]
    fn a_stranger_is_not_waited_for() {
        let mut stream = Scripted::new(b"GET / HTTP/1.1\r\n");
        let error = challenge(&mut stream, &credentials()).err().unwrap();
        assert!(matches!(error, HandshakeError::Refused(Status::Garbage)), "{error}");
        let answer = Challenge::decode(stream.output[..].try_into().unwrap()).unwrap();
        assert_eq!((answer.status, answer.nonce), (Status::Garbage, [0; 32]));

        let mut stream = Scripted::new(b"HTTP/1.1 400 Bad Request");
        let error = call(&mut stream, &hello(), &credentials().secret).unwrap_err();
        assert!(matches!(error, HandshakeError::NotPoseidon), "{error}");
    }

    #[test]
    fn a_listener_of_another_version_says_which() {
        let challenge = Challenge { status: Status::Version, version: VERSION + 1, nonce: [0; 32] };
        let script = challenge.encode();
        let error = call(&mut Scripted::new(&script), &hello(), &credentials().secret).unwrap_err();
        assert!(
            matches!(error, HandshakeError::Version { theirs } if theirs == VERSION + 1),
            "{error}"
        );
    }

    #[test]
    fn a_caller_of_another_version_is_told_ours_and_the_log_names_both() {
        // As long as version 4's was: nothing but its beginning is awaited.
        let mut script = hello().encode()[..64].to_vec();
        script[8..10].copy_from_slice(&4u16.to_le_bytes());
        let mut stream = Scripted::new(&script);
        let error = challenge(&mut stream, &credentials()).err().unwrap().to_string();
        assert!(
            error.contains("version 4") && error.contains(&format!("speaks {VERSION}")),
            "{error}"
        );
        let answer = Challenge::decode(stream.output[..].try_into().unwrap()).unwrap();
        assert_eq!((answer.status, answer.version), (Status::Version, VERSION));
    }

    #[test]
    fn a_cut_message_says_how_much_came() {
        let script = hello().encode();
        let error = challenge(&mut Scripted::new(&script[..20]), &credentials()).err().unwrap();
        assert_eq!(error.to_string(), "the connection ended after 20 of the 88 bytes of its Hello");
    }

    #[test]
    fn strangers_are_not_shown_to_admit() {
        let script = [&hello().encode()[..], &[0; PROOF_SIZE]].concat();
        let mut stream = Scripted::new(&script);
        let challenged = challenge(&mut stream, &credentials()).unwrap();
        let admit = |_: &Hello| -> Result<(), Status> { panic!("asked about a stranger") };
        let error = challenged.judge(&mut stream, &credentials().secret, admit).unwrap_err();
        assert!(matches!(error, HandshakeError::Refused(Status::Secret)), "{error}");
        let verdict = Verdict::decode(stream.output[Challenge::SIZE..].try_into().unwrap());
        assert_eq!(verdict, Verdict { status: Status::Secret, proof: [0; 32] });
    }

    proptest! {
        #[test]
        fn no_bytes_get_a_stranger_in(start in 0usize..=48, bytes: Vec<u8>) {
            let script = [&hello().encode()[..start], &bytes].concat();
            let mut stream = Scripted::new(&script);
            if let Ok(challenged) = challenge(&mut stream, &credentials()) {
                let judged = challenged.judge(&mut stream, &credentials().secret, |_| Ok(()));
                prop_assert!(judged.is_err());
            }
        }

        #[test]
        fn no_bytes_pass_for_a_listener(start in 0usize..=48, bytes: Vec<u8>) {
            let welcome = Challenge { status: Status::Welcome, version: VERSION, nonce: [1; 32] };
            let script = [&welcome.encode()[..start], &bytes].concat();
            prop_assert!(
                call(&mut Scripted::new(&script), &hello(), &credentials().secret).is_err()
            );
        }
    }
}
