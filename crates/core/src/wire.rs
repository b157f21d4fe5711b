//! The bytes two nodes exchange, as specified in `docs/wire.md`.
//!
//! Decoders take fixed-size arrays, never panic, and say what was expected and what came.

use crate::{ChannelId, ChunkKey, Clock, Dtype, Epoch, LayerId, NodeId, ReduceOp};
use serde::{Deserialize, Serialize};

mod handshake;

pub use handshake::{Challenge, Hello, Purpose, Status, Verdict};

/// The version this build speaks.
pub const VERSION: u16 = 12;
/// First bytes of every connection.
pub const MAGIC: [u8; 8] = *b"POSEIDON";
/// Longest reason an `Abort` may carry, in bytes.
pub const MAX_ABORT: usize = 4096;
/// Longest control message, in bytes.
pub const MAX_CONTROL: usize = 64 << 20;
/// The node id of a control caller that is not a node.
pub const NOBODY: NodeId = NodeId(u16::MAX);

/// A frame's header. The payload of `length` bytes follows it on the wire.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Header {
    /// What the frame is.
    pub kind: Kind,
    /// What workers ask of the clock it belongs to.
    pub marks: Marks,
    /// The node that sent it.
    pub sender: NodeId,
    /// The session or group it belongs to.
    pub channel: ChannelId,
    /// The arrangement of that session or group it belongs to.
    pub epoch: Epoch,
    /// The chunk it is about.
    pub chunk: ChunkKey,
    /// The learning rate of a push or of factors; 0 otherwise.
    pub value: f32,
    /// The iteration it belongs to.
    pub clock: Clock,
    /// Payload bytes that follow.
    pub length: u32,
}

/// What workers ask of a clock, beside their numbers. Marks travel with contributions. A sum has the
/// marks of all its contributions, and so has its result: what one worker asks, every node knows at
/// the same clock (ADR 0022).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Marks(u8);

/// What a contribution says beside its numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// The step's learning rate.
    pub rate: f32,
    /// What is asked of the step.
    pub marks: Marks,
}

impl Marks {
    /// Nothing is asked.
    pub const NONE: Self = Self(0);
    /// Every node keeps what it holds of the state after this clock, for a checkpoint.
    pub const KEEP: Self = Self(1);
    /// A worker wants all workers to stop soon, at one clock that all of them agree on.
    pub const STOP: Self = Self(2);
    /// The worker is to be answered when all workers have contributed to this clock, however far apart
    /// their clocks [may be](crate::Consistency).
    pub const TOGETHER: Self = Self(4);

    /// Whether the worker is to be answered only when all workers have contributed. What is kept for a
    /// checkpoint is of one clock, too.
    pub fn wait_for_all(self) -> bool {
        self.contains(Self::TOGETHER) || self.contains(Self::KEEP)
    }

    /// Whether all of `other` is among these.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These, but for `other`.
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    fn from_bits(bits: u8) -> Option<Self> {
        (bits <= Self::KEEP.0 | Self::STOP.0 | Self::TOGETHER.0).then_some(Self(bits))
    }
}

impl std::ops::BitOr for Marks {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl std::ops::BitOrAssign for Marks {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// What a frame is. `docs/wire.md` §2 tells who sends which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Kind {
    /// A worker's contribution to one chunk.
    Push = 1,
    /// A server's result for one chunk.
    Update = 2,
    /// One worker's initial value of one chunk.
    Init = 3,
    /// Rows of one worker's factors, for another worker.
    Factors = 4,
    /// A piece of a collective operation among the ranks of a group.
    Collective = 5,
    /// A piece of a message from one rank of a group to another.
    Message = 6,
    /// A worker begins to send its contribution to a clock, where the slowest workers are dropped.
    Ready = 7,
    /// A worker has sent all of a contribution that does not count.
    Late = 8,
    /// Which workers count at a clock, and which go on with its result.
    Roll = 9,
    /// Nothing to say, still here.
    Heartbeat = 16,
    /// Nothing follows on this connection.
    Bye = 17,
    /// The job has failed; the payload says why.
    Abort = 18,
    /// Bytes that only measure what a port carries, before a job begins.
    Probe = 19,
    /// A message between a node and the coordinator.
    Control = 32,
}

/// Bytes that are not a frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The header was damaged, or the stream is not where we think it is.
    #[error("frame header checksum is {found:#010x}, expected {expected:#010x}")]
    Checksum {
        /// What the header carries.
        found: u32,
        /// What its bytes give.
        expected: u32,
    },
    /// A kind this version does not know.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// Marks this version does not know.
    #[error("unknown marks {0:#04x}")]
    Marks(u8),
}

impl Header {
    /// Size of an encoded header.
    pub const SIZE: usize = 40;

    /// A frame that is about the connection, or about a whole session or group, and not about a chunk.
    pub fn bare(kind: Kind, sender: NodeId, length: u32) -> Self {
        let chunk = ChunkKey { layer: LayerId(0), index: 0 };
        let (channel, epoch) = (ChannelId::LINK, Epoch(0));
        let marks = Marks::NONE;
        Self { kind, marks, sender, channel, epoch, chunk, value: 0.0, clock: Clock(0), length }
    }

    /// What a contribution says beside its numbers.
    pub fn terms(&self) -> Terms {
        Terms { rate: self.value, marks: self.marks }
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut b = [0; Self::SIZE];
        b[0] = self.kind as u8;
        b[1] = self.marks.0;
        b[2..4].copy_from_slice(&self.sender.0.to_le_bytes());
        b[4..8].copy_from_slice(&self.channel.0.to_le_bytes());
        b[8..12].copy_from_slice(&self.epoch.0.to_le_bytes());
        b[12..16].copy_from_slice(&self.chunk.layer.0.to_le_bytes());
        b[16..20].copy_from_slice(&self.chunk.index.to_le_bytes());
        b[20..24].copy_from_slice(&self.value.to_le_bytes());
        b[24..32].copy_from_slice(&self.clock.0.to_le_bytes());
        b[32..36].copy_from_slice(&self.length.to_le_bytes());
        let sum = crc32fast::hash(&b[..CHECKED]);
        b[CHECKED..].copy_from_slice(&sum.to_le_bytes());
        b
    }

    /// Reads a header back. Checks the checksum first: nothing else means anything without it.
    pub fn decode(b: &[u8; Self::SIZE]) -> Result<Self, HeaderError> {
        let found = u32_at(b, CHECKED);
        let expected = crc32fast::hash(&b[..CHECKED]);
        if found != expected {
            return Err(HeaderError::Checksum { found, expected });
        }
        let kind = match b[0] {
            1 => Kind::Push,
            2 => Kind::Update,
            3 => Kind::Init,
            4 => Kind::Factors,
            5 => Kind::Collective,
            6 => Kind::Message,
            7 => Kind::Ready,
            8 => Kind::Late,
            9 => Kind::Roll,
            16 => Kind::Heartbeat,
            17 => Kind::Bye,
            18 => Kind::Abort,
            19 => Kind::Probe,
            32 => Kind::Control,
            other => return Err(HeaderError::Kind(other)),
        };
        let marks = Marks::from_bits(b[1]).ok_or(HeaderError::Marks(b[1]))?;
        Ok(Self {
            kind,
            marks,
            sender: NodeId(u16_at(b, 2)),
            channel: ChannelId(u32_at(b, 4)),
            epoch: Epoch(u32_at(b, 8)),
            chunk: ChunkKey { layer: LayerId(u32_at(b, 12)), index: u32_at(b, 16) },
            value: f32::from_bits(u32_at(b, 20)),
            clock: Clock(u64::from(u32_at(b, 24)) | u64::from(u32_at(b, 28)) << 32),
            length: u32_at(b, 32),
        })
    }
}

/// Bytes of a header that its checksum covers: all before the checksum.
const CHECKED: usize = Header::SIZE - size_of::<u32>();

/// What every frame of a collective says about the operation, so that ranks that do different things
/// find out. Travels in the header: `docs/wire.md` §2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Which operation; the numbers are the group's own.
    pub operation: u8,
    /// The elements.
    pub dtype: Dtype,
    /// How they are combined, where they are.
    pub op: ReduceOp,
    /// The rank everything comes from or goes to, where there is one.
    pub root: u16,
    /// Elements of this rank's tensor, or `u32::MAX` if there are more. Where ranks may differ, the
    /// length of the slice that the frame is of, as the group states lengths.
    pub count: u32,
}

/// Where in its operation a frame belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The operation's number: among the collectives of the group, or the messages of this pair.
    /// Below 2⁴⁸.
    pub sequence: u64,
    /// 0: contributions. 1: results.
    pub step: u8,
    /// Which slice of a collective the piece is of.
    pub slice: u16,
    /// The piece's index, below 2²⁴.
    pub piece: u32,
}

impl Signature {
    /// The header of a frame of `length` bytes.
    pub fn header(&self, sender: NodeId, place: Place, length: u32) -> Header {
        let layer = u32::from(self.operation)
            | (self.dtype as u32) << 8
            | (self.op as u32) << 12
            | u32::from(self.root) << 16;
        Header {
            chunk: ChunkKey { layer: LayerId(layer), index: place.index() },
            value: f32::from_bits(self.count),
            clock: place.clock(),
            ..Header::bare(Kind::Collective, sender, length)
        }
    }

    /// Reads the header of a collective. `None` if it names a type or an operation there is not.
    pub fn read(header: &Header) -> Option<(Self, Place)> {
        let layer = header.chunk.layer.0;
        let signature = Self {
            operation: layer as u8,
            dtype: *Dtype::ALL.get((layer >> 8 & 0xf) as usize)?,
            op: *ReduceOp::ALL.get((layer >> 12 & 0xf) as usize)?,
            root: (layer >> 16) as u16,
            count: header.value.to_bits(),
        };
        Some((signature, Place::read(header)))
    }
}

impl Place {
    /// The header of a frame of `length` bytes of a message with `tag`. `total` states the length of
    /// the whole message.
    pub fn message(&self, sender: NodeId, tag: u32, total: u32, length: u32) -> Header {
        Header {
            chunk: ChunkKey { layer: LayerId(tag), index: self.index() },
            value: f32::from_bits(total),
            clock: self.clock(),
            ..Header::bare(Kind::Message, sender, length)
        }
    }

    /// The place of a collective's or a message's frame.
    pub fn read(header: &Header) -> Self {
        let (index, clock) = (header.chunk.index, header.clock.0);
        Self {
            sequence: clock & ((1 << SEQUENCE_BITS) - 1),
            step: (index >> 24) as u8,
            slice: (clock >> SEQUENCE_BITS) as u16,
            piece: index & 0xff_ffff,
        }
    }

    fn clock(&self) -> Clock {
        Clock(u64::from(self.slice) << SEQUENCE_BITS | self.sequence)
    }

    fn index(&self) -> u32 {
        u32::from(self.step) << 24 | self.piece
    }
}

/// Bits of a clock that count operations. The slice is in the bits above.
const SEQUENCE_BITS: u32 = 48;

fn u16_at(b: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([b[i], b[i + 1]])
}

fn u32_at(b: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [Kind; 14] = [
        Kind::Push,
        Kind::Update,
        Kind::Init,
        Kind::Factors,
        Kind::Collective,
        Kind::Message,
        Kind::Ready,
        Kind::Late,
        Kind::Roll,
        Kind::Heartbeat,
        Kind::Bye,
        Kind::Abort,
        Kind::Probe,
        Kind::Control,
    ];

    fn key(layer: u32, index: u32) -> ChunkKey {
        ChunkKey { layer: LayerId(layer), index }
    }

    #[test]
    fn golden_header() {
        let header = Header {
            kind: Kind::Push,
            marks: Marks::STOP,
            sender: NodeId(0x0102),
            channel: ChannelId(0x21222324),
            epoch: Epoch(0x31323334),
            chunk: key(0x03040506, 0x0708090a),
            value: 0.1,
            clock: Clock(0x1112131415161718),
            length: 0x00040000,
        };
        let bytes = [
            0x01, 0x02, 0x02, 0x01, 0x24, 0x23, 0x22, 0x21, 0x34, 0x33, 0x32, 0x31, 0x06, 0x05,
            0x04, 0x03, 0x0a, 0x09, 0x08, 0x07, 0xcd, 0xcc, 0xcc, 0x3d, 0x18, 0x17, 0x16, 0x15,
            0x14, 0x13, 0x12, 0x11, 0x00, 0x00, 0x04, 0x00, 0x08, 0xae, 0x47, 0x88,
        ];
        assert_eq!(header.encode(), bytes);
        assert_eq!(Header::decode(&bytes), Ok(header));
    }

    #[test]
    fn golden_collective() {
        let signature = Signature {
            operation: 1,
            dtype: Dtype::Bf16,
            op: ReduceOp::Max,
            root: 0x0102,
            count: 0xfff0_0001,
        };
        let place = Place { sequence: 7, step: 1, slice: 0x0607, piece: 0x030405 };
        let header = Header {
            channel: ChannelId(3),
            epoch: Epoch(1),
            ..signature.header(NodeId(2), place, 0x40000)
        };
        let bytes = [
            0x05, 0x00, 0x02, 0x00, 0x03, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x01, 0x44,
            0x02, 0x01, 0x05, 0x04, 0x03, 0x01, 0x01, 0x00, 0xf0, 0xff, 0x07, 0x00, 0x00, 0x00,
            0x00, 0x00, 0x07, 0x06, 0x00, 0x00, 0x04, 0x00,
        ];
        assert_eq!(header.encode()[..36], bytes);
        let read = Header::decode(&header.encode()).unwrap();
        assert_eq!(Signature::read(&read), Some((signature, place)));

        let header = place.message(NodeId(2), 9, u32::MAX, 3);
        let read = Header::decode(&header.encode()).unwrap();
        assert_eq!((read.kind, read.chunk.layer.0, Place::read(&read)), (Kind::Message, 9, place));
        assert_eq!(read.value.to_bits(), u32::MAX);
        let unknown = Header { chunk: key(0xff << 8, 0), ..header };
        assert_eq!(Signature::read(&unknown), None);
    }

    proptest! {
        #[test]
        fn headers_round_trip(
            kind in 0usize..KINDS.len(), marks in 0u8..4, sender: u16, channel: u32, epoch: u32, layer: u32, index: u32,
            value in -1e30f32..1e30, clock: u64, length: u32,
        ) {
            let header = Header {
                kind: KINDS[kind], marks: Marks(marks), sender: NodeId(sender), channel: ChannelId(channel),
                epoch: Epoch(epoch), chunk: key(layer, index), value, clock: Clock(clock), length,
            };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn unknown_marks_are_refused(bits in 8u8..) {
            let header = Header { marks: Marks(bits), ..Header::bare(Kind::Push, NodeId(1), 0) };
            prop_assert_eq!(Header::decode(&header.encode()), Err(HeaderError::Marks(bits)));
        }

        #[test]
        fn one_flipped_bit_is_noticed(bit in 0usize..8 * Header::SIZE, clock: u64) {
            let header = Header { clock: Clock(clock), ..Header::bare(Kind::Heartbeat, NodeId(1), 0) };
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        #[test]
        fn any_bytes_decode_without_panic(b in proptest::collection::vec(any::<u8>(), Header::SIZE)) {
            let _ = Header::decode(b[..].try_into().unwrap());
        }
    }
}
