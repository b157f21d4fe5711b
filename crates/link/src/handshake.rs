//! Who may speak: the messages of `docs/wire.md` §1, and the keys that come out of them.
//!
//! The caller's side is [`call`], over any `Read + Write`. The stream keeps the deadlines: a read that
//! fails with `TimedOut` or `WouldBlock` ends the handshake. The listener's side is [`Reception`],
//! which knows no socket: a listener has many of them at a time on one thread.

use crate::records::Records;
use crate::tags::{KEY_SIZE, Tags};
use crate::{Credentials, Secret};
use hmac::{Hmac, KeyInit, Mac};
use poseidon_core::wire::{Challenge, Hello, Status, VERSION, Verdict};
use sha2::Sha256;
use std::fmt;
use std::io::{self, Read, Write};
use std::ops::Range;
use x25519_dalek::{PublicKey, StaticSecret};

/// Size of a proof message.
pub const PROOF_SIZE: usize = 32;
/// Size of what follows a hello: the proof that its sender knows the secret.
pub const TOKEN_SIZE: usize = 32;

/// A handshake that did not end in a welcome.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The listener refused the caller. Both sides see the same status, and the listener has proved
    /// that it knows the secret.
    #[error("{0}")]
    Refused(Status),
    /// A listener refused the caller, and has not proved that it knows the secret. A listener whose
    /// secret is another one cannot prove it, and a stranger that listens there cannot either.
    #[error(
        "{0} (so says what listens there, but it does not prove that it knows this node's secret: \
         it may be of another job, or a stranger)"
    )]
    Unproved(Status),
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

/// What protects what follows a handshake, between hosts.
#[derive(Debug)]
pub enum Protection {
    /// Frames have tags.
    Tags(Tags),
    /// Everything travels in encrypted records.
    Records(Box<Records>),
}

/// The private half of a key pair that is drawn for one handshake, and forgotten with it. So who
/// learns the secret later cannot decrypt what was recorded.
#[derive(Clone)]
pub struct Private(StaticSecret);

impl Private {
    /// A new key pair: the private half, and the public one, which is its owner's nonce.
    pub fn draw() -> io::Result<(Self, [u8; 32])> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)?;
        let private = StaticSecret::from(bytes);
        let public = PublicKey::from(&private).to_bytes();
        Ok((Self(private), public))
    }
}

impl fmt::Debug for Private {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Private(..)")
    }
}

/// The caller's side of the whole handshake. On success both ends have proved that they know the
/// secret. `private`: the private half of the hello's nonce, if the caller encrypts. Returns what
/// protects the caller's end.
pub fn call(
    stream: &mut (impl Read + Write),
    hello: &Hello,
    private: Option<&Private>,
    secret: &Secret,
) -> Result<Protection, HandshakeError> {
    let opening = open(hello, secret);
    stream.write_all(&opening)?;

    let mut bytes = [0; Challenge::SIZE];
    fill(stream, "Challenge", &mut bytes, 0..PREFIX)?;
    Challenge::decode(&bytes).map_err(|_| HandshakeError::NotPoseidon)?;
    fill(stream, "Challenge", &mut bytes, PREFIX..Challenge::SIZE)?;
    let challenge = Challenge::decode(&bytes).map_err(|_| HandshakeError::NotPoseidon)?;
    if challenge.version != VERSION {
        return Err(HandshakeError::Version { theirs: challenge.version });
    }
    if challenge.status != Status::Welcome {
        let proof = mac(secret, &[REFUSAL, &opening, &bytes[..PREFIX]]);
        return Err(refused(challenge.status, proof, &challenge.nonce));
    }

    let transcript = Transcript { opening, challenge: bytes };
    stream.write_all(&transcript.proof(secret))?;

    let mut bytes = [0; Verdict::SIZE];
    fill(stream, "Verdict", &mut bytes, 0..Verdict::SIZE)?;
    let verdict = Verdict::decode(&bytes);
    let proof = transcript.mac(secret, LISTENER).chain_update(&bytes[..VERDICT_PREFIX]);
    if verdict.status != Status::Welcome {
        return Err(refused(verdict.status, proof, &verdict.proof));
    }
    proof.verify_slice(&verdict.proof).map_err(|_| HandshakeError::Impostor)?;
    let agreed = private.map(|private| (private, &challenge.nonce));
    let (ours, theirs) = transcript.keys(secret, agreed);
    Ok(protection(agreed.is_some(), ours, theirs))
}

/// What protects the end that writes and reads with these keys.
fn protection(encrypted: bool, writing: [u8; KEY_SIZE], reading: [u8; KEY_SIZE]) -> Protection {
    match encrypted {
        true => Protection::Records(Records::new(writing, reading).into()),
        false => Protection::Tags(Tags::new(writing, reading)),
    }
}

/// The first bytes of a connection: the hello, and the proof that its sender knows the secret. The
/// proof is worth nothing to somebody who repeats it: the challenge asks for another one.
pub fn open(hello: &Hello, secret: &Secret) -> [u8; Hello::SIZE + TOKEN_SIZE] {
    let mut bytes = [0; Hello::SIZE + TOKEN_SIZE];
    bytes[..Hello::SIZE].copy_from_slice(&hello.encode());
    let token = mac(secret, &[HELLO, &bytes[..Hello::SIZE]]).finalize().into_bytes();
    bytes[Hello::SIZE..].copy_from_slice(&token);
    bytes
}

/// What a refusal means, with the proof it should have and the one it has.
fn refused(status: Status, expected: Hmac<Sha256>, found: &[u8]) -> HandshakeError {
    match expected.verify_slice(found) {
        Ok(()) => HandshakeError::Refused(status),
        Err(_) => HandshakeError::Unproved(status),
    }
}

/// The listener's side of one handshake, until the caller has proved that it knows the secret: bytes
/// in, bytes out. A caller without the secret gets no further than its hello.
#[derive(Debug)]
pub struct Reception {
    /// What has come of the message that is awaited.
    bytes: [u8; Hello::SIZE + TOKEN_SIZE],
    have: usize,
    /// Set when the caller has been challenged.
    challenged: Option<Proven>,
}

/// What a [`Reception`] makes of the bytes that have come.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one per connection, and it is taken apart at once"
)]
pub enum Heard {
    /// The message is not all there.
    Nothing,
    /// The caller gets this answer, and goes on.
    Challenge([u8; Challenge::SIZE]),
    /// The caller knows the secret.
    Proven(Proven),
    /// The caller gets this answer, and nothing more is heard of it.
    Refused(Refusal, HandshakeError),
}

/// The bytes of a refusal: a challenge or a verdict.
pub type Refusal = Box<[u8]>;

impl Default for Reception {
    fn default() -> Self {
        let bytes = [0; Hello::SIZE + TOKEN_SIZE];
        Self { bytes, have: 0, challenged: None }
    }
}

impl Reception {
    /// Where the next bytes of the caller go. Never empty.
    pub fn room(&mut self) -> &mut [u8] {
        let end = match self.challenged {
            Some(_) => PROOF_SIZE,
            None if self.have < PREFIX => PREFIX,
            None => Hello::SIZE + TOKEN_SIZE,
        };
        &mut self.bytes[self.have..end]
    }

    /// Whether the caller's hello has shown that its sender knew the secret.
    pub fn is_challenged(&self) -> bool {
        self.challenged.is_some()
    }

    /// The error of a caller that says no more: `late`, or that has hung up.
    pub fn cut(&self, late: bool) -> HandshakeError {
        let (message, size) = match self.challenged {
            Some(_) => ("Proof", PROOF_SIZE),
            None => ("Hello", Hello::SIZE + TOKEN_SIZE),
        };
        let got = self.have;
        match late {
            true => HandshakeError::Late { message, got, size },
            false => HandshakeError::Cut { message, got, size },
        }
    }

    /// The caller's next `count` bytes are in the [room](Self::room). Fails if the system has no
    /// random bytes.
    pub fn handle_read(&mut self, count: usize, credentials: &Credentials) -> io::Result<Heard> {
        self.have += count;
        if let Some(caller) = &self.challenged {
            if self.have < PROOF_SIZE {
                return Ok(Heard::Nothing);
            }
            let proof = caller.transcript.mac(&credentials.secret, CALLER);
            if proof.verify_slice(&self.bytes[..PROOF_SIZE]).is_err() {
                let verdict = Verdict { status: Status::Secret, proof: [0; 32] };
                let error = HandshakeError::Refused(Status::Secret);
                return Ok(Heard::Refused(verdict.encode().into(), error));
            }
            return Ok(Heard::Proven(caller.clone()));
        }
        let (hello, token) = self.bytes.split_first_chunk().expect("a hello has room");
        let decoded = match Hello::decode(hello) {
            _ if self.have < PREFIX => return Ok(Heard::Nothing),
            // These are judged by the first bytes: another version's hello may have another length.
            Err(status @ (Status::Garbage | Status::Version)) => Err(status),
            _ if self.have < self.bytes.len() => return Ok(Heard::Nothing),
            decoded => decoded,
        };
        let is_known = || mac(&credentials.secret, &[HELLO, hello]).verify_slice(token).is_ok();
        let judged = match decoded {
            Err(status @ (Status::Garbage | Status::Version)) => Err((status, false)),
            Err(status) => Err((status, is_known())),
            Ok(hello) if hello.cluster != credentials.cluster => Err((Status::Cluster, is_known())),
            Ok(_) if !is_known() => Err((Status::Secret, false)),
            Ok(hello) => Ok(hello),
        };
        let mut challenge = Challenge { status: Status::Welcome, version: VERSION, nonce: [0; 32] };
        match judged {
            Ok(hello) => {
                let mut private = None;
                if hello.encrypt && credentials.encrypt {
                    let drawn = Private::draw()?;
                    (private, challenge.nonce) = (Some(drawn.0), drawn.1);
                } else {
                    getrandom::fill(&mut challenge.nonce)?;
                }
                let transcript = Transcript { opening: self.bytes, challenge: challenge.encode() };
                let bytes = transcript.challenge;
                self.challenged = Some(Proven { hello, transcript, private });
                self.have = 0;
                Ok(Heard::Challenge(bytes))
            }
            Err((status, known)) => {
                challenge.status = status;
                // Only those who know the secret get something that was made with it.
                if known {
                    let parts = [REFUSAL, &self.bytes, &challenge.encode()[..PREFIX]];
                    let proof = mac(&credentials.secret, &parts).finalize();
                    challenge.nonce = proof.into_bytes().into();
                }
                let error = match status {
                    Status::Version => HandshakeError::Version { theirs: Hello::version(hello) },
                    _ => HandshakeError::Refused(status),
                };
                Ok(Heard::Refused(challenge.encode().into(), error))
            }
        }
    }
}

/// A caller that knows the secret and awaits its verdict.
#[derive(Clone, Debug)]
pub struct Proven {
    /// What the caller wants.
    pub hello: Hello,
    transcript: Transcript,
    /// The private half of the challenge's nonce, if both ends encrypt.
    private: Option<Private>,
}

impl Proven {
    /// The verdict on a caller that was `judged`. One that encrypts while the listener does not is
    /// refused, and so is the reverse. If the caller is welcome, also what protects the listener's
    /// end.
    pub fn judge(
        self,
        credentials: &Credentials,
        judged: Result<(), Status>,
    ) -> ([u8; Verdict::SIZE], Result<Protection, HandshakeError>) {
        let secret = &credentials.secret;
        let judged = agreement(&self.hello, credentials).and(judged);
        let status = judged.err().unwrap_or(Status::Welcome);
        let mut verdict = Verdict { status, proof: [0; 32] };
        let proof = self.transcript.mac(secret, LISTENER);
        let proof = proof.chain_update(&verdict.encode()[..VERDICT_PREFIX]).finalize();
        verdict.proof = proof.into_bytes().into();
        let agreed = self.private.as_ref().map(|private| (private, &self.hello.nonce));
        let (theirs, ours) = self.transcript.keys(secret, agreed);
        let welcome = judged.map(|()| protection(agreed.is_some(), ours, theirs));
        (verdict.encode(), welcome.map_err(HandshakeError::Refused))
    }
}

/// Whether caller and listener both encrypt, or neither does.
pub fn agreement(hello: &Hello, credentials: &Credentials) -> Result<(), Status> {
    match (hello.encrypt, credentials.encrypt) {
        (false, true) => Err(Status::Plain),
        (true, false) => Err(Status::Encrypted),
        _ => Ok(()),
    }
}

/// The listener's side of the whole handshake, over a stream that blocks. `admit` is asked only about
/// callers that know the secret, so a stranger learns nothing about the cluster and changes nothing in
/// it.
pub fn answer(
    stream: &mut (impl Read + Write),
    credentials: &Credentials,
    admit: impl FnOnce(&Hello) -> Result<(), Status>,
) -> Result<(Hello, Protection), HandshakeError> {
    let mut reception = Reception::default();
    loop {
        let count = match stream.read(reception.room()) {
            Ok(0) => return Err(reception.cut(false)),
            Ok(count) => count,
            Err(e) => match e.kind() {
                io::ErrorKind::Interrupted => continue,
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                    return Err(reception.cut(true));
                }
                _ => return Err(e.into()),
            },
        };
        match reception.handle_read(count, credentials)? {
            Heard::Nothing => {}
            Heard::Challenge(bytes) => stream.write_all(&bytes)?,
            Heard::Refused(bytes, error) => {
                stream.write_all(&bytes)?;
                return Err(error);
            }
            Heard::Proven(proven) => {
                let hello = proven.hello;
                let judged = admit(&hello);
                let (verdict, protection) = proven.judge(credentials, judged);
                stream.write_all(&verdict)?;
                return protection.map(|protection| (hello, protection));
            }
        }
    }
}

/// What both proofs and the keys cover: the first two messages exactly as they crossed the wire.
#[derive(Clone, Debug)]
struct Transcript {
    opening: [u8; Hello::SIZE + TOKEN_SIZE],
    challenge: [u8; Challenge::SIZE],
}

impl Transcript {
    fn mac(&self, secret: &Secret, label: &[u8]) -> Hmac<Sha256> {
        mac(secret, &[label, &self.opening, &self.challenge])
    }

    /// The caller's proof.
    fn proof(&self, secret: &Secret) -> [u8; PROOF_SIZE] {
        self.mac(secret, CALLER).finalize().into_bytes().into()
    }

    /// The keys of what the caller writes and of what the listener writes. Both nonces are in them,
    /// so no two connections have the same. On an encrypted connection they also have in them what
    /// only the two ends can compute, each of its own private half and the other's public one.
    fn keys(
        &self,
        secret: &Secret,
        agreed: Option<(&Private, &[u8; 32])>,
    ) -> ([u8; KEY_SIZE], [u8; KEY_SIZE]) {
        let mac = match agreed {
            None => self.mac(secret, KEYS),
            Some((private, public)) => {
                let shared = private.0.diffie_hellman(&PublicKey::from(*public));
                self.mac(secret, ENCRYPTION).chain_update(shared.as_bytes())
            }
        };
        let both: [u8; 2 * KEY_SIZE] = mac.finalize().into_bytes().into();
        let (caller, listener) = both.split_at(KEY_SIZE);
        (caller.try_into().expect("a half"), listener.try_into().expect("a half"))
    }
}

fn mac(secret: &Secret, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.expose().as_bytes())
        .expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// What is made with the secret has different labels, so that nothing can be sent back as something
/// else.
const HELLO: &[u8] = b"poseidon hello";
const REFUSAL: &[u8] = b"poseidon refusal";
const CALLER: &[u8] = b"poseidon caller";
const LISTENER: &[u8] = b"poseidon listener";
const KEYS: &[u8] = b"poseidon keys";
const ENCRYPTION: &[u8] = b"poseidon encryption";

/// Magic, version, purpose and status lie within the first bytes of a message. They are judged
/// before the rest is awaited: a stranger, or another version whose messages have other sizes,
/// gets its answer at once.
const PREFIX: usize = 16;
/// Bytes of a verdict before its proof.
const VERDICT_PREFIX: usize = 8;

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
mod tests;
