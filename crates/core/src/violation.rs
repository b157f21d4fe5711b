use crate::{Clock, Epoch, NodeId};

/// A frame that breaks the rules of `docs/wire.md` §2. The sender is at fault, never the receiver.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// No such chunk on this lane.
    #[error("no such chunk is held or awaited on this lane")]
    UnknownChunk,
    /// Only workers contribute.
    #[error("node {0} is not a worker and cannot contribute")]
    NotAWorker(NodeId),
    /// The update or the factors came from a node that this node does not have them from.
    #[error("this must come from node {expected}, not from node {got}")]
    WrongWay {
        /// The node that holds the chunk, or that passes it on to this node.
        expected: NodeId,
        /// The node that sent it.
        got: NodeId,
    },
    /// The result of a chunk came before this node had collected all contributions to it.
    #[error("a result at clock {0}, though contributions to it have not been collected here")]
    TooEarly(Clock),
    /// The payload is not the chunk.
    #[error("payload of {got} bytes, expected {expected}")]
    Length {
        /// The chunk's size in bytes.
        expected: usize,
        /// The frame's length.
        got: usize,
    },
    /// The payload is not rows of factors, or more of them than a batch has.
    #[error("factors of {got} bytes, expected rows of {row} bytes, at most {most} in all")]
    Rows {
        /// Bytes of one row.
        row: usize,
        /// Bytes of the whole chunk.
        most: usize,
        /// The frame's length.
        got: usize,
    },
    /// The sender is ahead or behind.
    #[error("clock {got}, expected {expected}")]
    Clock {
        /// The clock the chunk is at.
        expected: Clock,
        /// The frame's clock.
        got: Clock,
    },
    /// The sender follows another plan.
    #[error("epoch {got}, expected {expected}: the sender follows another plan")]
    Epoch {
        /// The epoch of the plan followed here.
        expected: Epoch,
        /// The frame's epoch.
        got: Epoch,
    },
    /// The same contribution or update twice.
    #[error("clock {0} of this chunk came twice from the same node")]
    Duplicate(Clock),
    /// A worker goes on only after it was answered.
    #[error("clock {0} came from a worker that still waits for the clock before")]
    Unanswered(Clock),
    /// A worker that may be dropped sends all layers of a clock before it begins the next.
    #[error("clock {0} was begun before all layers had been sent at the clock before")]
    Unsent(Clock),
    /// A word of the roll call that does not follow from the words before.
    #[error("clock {0} out of turn: a worker is ready for a clock once, and late once after that")]
    OutOfTurn(Clock),
    /// Bytes that are no roll.
    #[error("a roll needs 0, 1 or 2 for each worker")]
    NotARoll,
    /// It was said who counts at a clock, but the clock before is not complete here.
    #[error("who counts at clock {0} was said before this shard had completed the clock before")]
    EarlyRoll(Clock),
    /// Workers must agree which steps they take together.
    #[error("some workers take clock {0} together with all others, and some do not")]
    NotTogether(Clock),
    /// Workers must take the same step.
    #[error(
        "learning rate {got}, but the other workers sent {expected}: schedules differ between ranks"
    )]
    Rate {
        /// What the first worker sent.
        expected: f32,
        /// What this one sent.
        got: f32,
    },
    /// A shard that updates parameters needs to have them first.
    #[error("a gradient came before the initial parameters: broadcast the layer first")]
    NotInitialised,
    /// Nothing was asked for.
    #[error("an update came for a layer that is not in flight")]
    NotInFlight,
    /// A kind of frame that has no business on this connection.
    #[error("a frame of this kind is not allowed here")]
    WrongKind,
}
