//! The fixed-size messages of the handshake: `docs/wire.md` §1.

use super::{MAGIC, VERSION, u16_at, u32_at};
use crate::{Epoch, JobId, LaneId, NodeId};

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// Gradients and parameters, one lane.
    Lane = 1,
    /// Rendezvous and questions to the coordinator.
    Control = 2,
}

/// The caller's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What the connection is for.
    pub purpose: Purpose,
    /// The caller, or [`NOBODY`](super::NOBODY).
    pub node: NodeId,
    /// The lane it wants to talk to.
    pub lane: LaneId,
    /// Whether the caller wants what follows the handshake encrypted, where it is not within a host.
    pub encrypt: bool,
    /// The cluster it belongs to.
    pub cluster: [u8; 16],
    /// The run of the job it belongs to; zero on a control connection, which does not know it yet.
    pub identity: JobId,
    /// The epoch of that run; zero on a control connection.
    pub epoch: Epoch,
    /// Fresh random bytes. If the caller encrypts, the public half of a key pair that it has just
    /// drawn.
    pub nonce: [u8; 32],
}

impl Hello {
    /// Size of an encoded hello.
    pub const SIZE: usize = 88;

    /// The hello's bytes.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut b = [0; Self::SIZE];
        b[..8].copy_from_slice(&MAGIC);
        b[8..10].copy_from_slice(&VERSION.to_le_bytes());
        b[10] = self.purpose as u8;
        b[11] = u8::from(self.encrypt);
        b[12..14].copy_from_slice(&self.node.0.to_le_bytes());
        b[14..16].copy_from_slice(&self.lane.0.to_le_bytes());
        b[16..32].copy_from_slice(&self.cluster);
        b[32..48].copy_from_slice(&self.identity.0);
        b[48..52].copy_from_slice(&self.epoch.0.to_le_bytes());
        b[56..].copy_from_slice(&self.nonce);
        b
    }

    /// Reads a hello. The error is the status the caller should be sent.
    pub fn decode(b: &[u8; Self::SIZE]) -> Result<Self, Status> {
        if b[..8] != MAGIC {
            return Err(Status::Garbage);
        }
        if u16_at(b, 8) != VERSION {
            return Err(Status::Version);
        }
        let purpose = match b[10] {
            1 => Purpose::Lane,
            2 => Purpose::Control,
            _ => return Err(Status::Purpose),
        };
        let encrypt = match b[11] {
            0 => false,
            1 => true,
            _ => return Err(Status::Features),
        };
        let mut hello = Self {
            purpose,
            node: NodeId(u16_at(b, 12)),
            lane: LaneId(u16_at(b, 14)),
            encrypt,
            cluster: [0; 16],
            identity: JobId::default(),
            epoch: Epoch(u32_at(b, 48)),
            nonce: [0; 32],
        };
        hello.cluster.copy_from_slice(&b[16..32]);
        hello.identity.0.copy_from_slice(&b[32..48]);
        hello.nonce.copy_from_slice(&b[56..]);
        Ok(hello)
    }

    /// The version in a hello's bytes, which may be of any version.
    pub fn version(b: &[u8; Self::SIZE]) -> u16 {
        u16_at(b, 8)
    }
}

/// The listener's answer to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// Whether the conversation goes on.
    pub status: Status,
    /// The version the listener speaks.
    pub version: u16,
    /// Fresh random bytes, as the caller's, or, in a refusal, the proof that it comes from the cluster.
    pub nonce: [u8; 32],
}

impl Challenge {
    /// Size of an encoded challenge.
    pub const SIZE: usize = 48;

    /// The challenge's bytes.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut b = [0; Self::SIZE];
        b[..8].copy_from_slice(&MAGIC);
        b[8..10].copy_from_slice(&self.version.to_le_bytes());
        b[10] = self.status as u8;
        b[16..].copy_from_slice(&self.nonce);
        b
    }

    /// Reads a challenge. Fails with [`Status::Garbage`] if the other end is not Poseidon.
    pub fn decode(b: &[u8; Self::SIZE]) -> Result<Self, Status> {
        if b[..8] != MAGIC {
            return Err(Status::Garbage);
        }
        let mut nonce = [0; 32];
        nonce.copy_from_slice(&b[16..]);
        Ok(Self { status: Status::decode(b[10]), version: u16_at(b, 8), nonce })
    }
}

/// The listener's last word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whether the caller is let in.
    pub status: Status,
    /// The listener's own proof that it knows the secret.
    pub proof: [u8; 32],
}

impl Verdict {
    /// Size of an encoded verdict.
    pub const SIZE: usize = 40;

    /// The verdict's bytes.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut b = [0; Self::SIZE];
        b[0] = self.status as u8;
        b[8..].copy_from_slice(&self.proof);
        b
    }

    /// Reads a verdict.
    pub fn decode(b: &[u8; Self::SIZE]) -> Self {
        let mut proof = [0; 32];
        proof.copy_from_slice(&b[8..]);
        Self { status: Status::decode(b[0]), proof }
    }
}

/// How a handshake ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
#[non_exhaustive]
pub enum Status {
    /// Let in.
    #[error("welcome")]
    Welcome = 0,
    /// The two builds speak different versions.
    #[error(
        "protocol version not spoken here (this build speaks {VERSION}): install the same Poseidon on every node"
    )]
    Version = 1,
    /// The caller belongs to another job.
    #[error(
        "another cluster's id: two jobs use the same address, or the nodes disagree on the job's name"
    )]
    Cluster = 2,
    /// The caller does not know the secret.
    #[error("wrong cluster secret: give every node the same POSEIDON_SECRET")]
    Secret = 3,
    /// There is no such node, or it is here already.
    #[error("node not expected: there is no such rank, or it is connected already")]
    Node = 4,
    /// There is no such lane.
    #[error("lane not expected: every node must run the same number of lanes")]
    Lane = 5,
    /// The listener does not serve that purpose.
    #[error("purpose not served at this address")]
    Purpose = 6,
    /// Not our protocol at all.
    #[error("not a Poseidon message")]
    Garbage = 7,
    /// The caller has the book of another run, or of another epoch.
    #[error(
        "the caller belongs to another run of this job: a process of an earlier run is still alive, \
         or two runs use the same name and address"
    )]
    Run = 8,
    /// The caller wants something of the connection that this version does not know.
    #[error("features not known here: install the same Poseidon on every node")]
    Features = 9,
    /// The listener does not know yet which run it belongs to.
    #[error("the listener has no information book yet: it has not got into the job")]
    NoBook = 10,
    /// The listener encrypts, and the caller does not.
    #[error(
        "the listener encrypts its connections and the caller does not: start every node with \
         --encrypt (POSEIDON_ENCRYPT=1), or none"
    )]
    Plain = 11,
    /// The caller encrypts, and the listener does not.
    #[error(
        "the caller encrypts its connections and the listener does not: start every node with \
         --encrypt (POSEIDON_ENCRYPT=1), or none"
    )]
    Encrypted = 12,
}

impl Status {
    fn decode(b: u8) -> Self {
        match b {
            0 => Self::Welcome,
            1 => Self::Version,
            2 => Self::Cluster,
            3 => Self::Secret,
            4 => Self::Node,
            5 => Self::Lane,
            6 => Self::Purpose,
            8 => Self::Run,
            9 => Self::Features,
            10 => Self::NoBook,
            11 => Self::Plain,
            12 => Self::Encrypted,
            _ => Self::Garbage,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::NOBODY;
    use super::*;

    #[test]
    fn golden_handshake() {
        let hello = Hello {
            purpose: Purpose::Lane,
            node: NodeId(7),
            lane: LaneId(3),
            encrypt: true,
            cluster: [0xaa; 16],
            identity: JobId([0xee; 16]),
            epoch: Epoch(0x01020304),
            nonce: [0xbb; 32],
        };
        let mut bytes = [0; 88];
        bytes[..16].copy_from_slice(b"POSEIDON\x0c\x00\x01\x01\x07\x00\x03\x00");
        bytes[16..32].fill(0xaa);
        bytes[32..48].fill(0xee);
        bytes[48..56].copy_from_slice(&[4, 3, 2, 1, 0, 0, 0, 0]);
        bytes[56..].fill(0xbb);
        assert_eq!(hello.encode(), bytes);
        assert_eq!(Hello::decode(&bytes), Ok(hello));

        let challenge = Challenge { status: Status::Welcome, version: 12, nonce: [0xcc; 32] };
        let mut bytes =
            *b"POSEIDON\x0c\x00\x00\x00\x00\x00\x00\x00cccccccccccccccccccccccccccccccc";
        bytes[16..].fill(0xcc);
        assert_eq!(challenge.encode(), bytes);
        assert_eq!(Challenge::decode(&bytes), Ok(challenge));

        let verdict = Verdict { status: Status::Secret, proof: [0xdd; 32] };
        let mut bytes = [0xdd; 40];
        bytes[..8].copy_from_slice(&[3, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(verdict.encode(), bytes);
        assert_eq!(Verdict::decode(&bytes), verdict);
    }

    #[test]
    fn a_stranger_is_told_apart_from_another_version() {
        let hello = Hello {
            purpose: Purpose::Control,
            node: NOBODY,
            lane: LaneId(0),
            encrypt: false,
            cluster: [0; 16],
            identity: JobId::default(),
            epoch: Epoch(0),
            nonce: [0; 32],
        };
        let mut bytes = hello.encode();
        bytes[11] = 2;
        assert_eq!(Hello::decode(&bytes), Err(Status::Features));
        bytes[8] = 1;
        assert_eq!(Hello::decode(&bytes), Err(Status::Version));
        assert_eq!(Hello::version(&bytes), 1);
        bytes[0] = b'G';
        assert_eq!(Hello::decode(&bytes), Err(Status::Garbage));
    }
}
