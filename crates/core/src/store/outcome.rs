//! What comes out of a shard: results, what is kept of them, and who is late; what goes into a new one.

use crate::encoding::Block;
use crate::wire::{Kind, Marks};
use crate::{ChunkKey, Clock, NodeId};
use std::sync::Arc;
use std::time::Duration;

/// A chunk that has all contributions to a clock.
#[derive(Debug)]
pub struct Completed {
    /// The chunk.
    pub key: ChunkKey,
    /// The clock that is complete.
    pub clock: Clock,
    /// Where `result` goes.
    pub way: Way,
    /// What workers ask of this clock.
    pub marks: Marks,
    /// Where the sum, the reduced gradient or the new parameters are.
    pub result: Outcome,
}

/// What a shard has of a chunk after a clock that workers asked to keep. The memory is shared with
/// the shard: a later step that finds it still held here makes a copy first.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The chunk.
    pub key: ChunkKey,
    /// The clock.
    pub clock: Clock,
    /// Steps that the update rule has taken, those before this job included.
    pub steps: u64,
    /// The parameters as the update rule has them.
    pub parameters: Arc<[f32]>,
    /// The update rule's vectors.
    pub vectors: Vec<Arc<[f32]>>,
}

/// What a checkpoint has of a chunk.
#[derive(Clone, Debug)]
pub struct Restored {
    /// Steps that the update rule had taken.
    pub steps: u64,
    /// The parameters as the update rule had them.
    pub parameters: Arc<[f32]>,
    /// The update rule's vectors.
    pub vectors: Vec<Arc<[f32]>>,
}

/// Where the outcome of a complete clock goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    /// Towards the chunk's server: it is a sum that this node has collected.
    Up {
        /// A push, or initial values.
        kind: Kind,
        /// The learning rate that the contributions came with.
        rate: f32,
    },
    /// To those who have contributed: it is the result.
    Down,
    /// To one worker: it is the answer to its contribution, where workers may be apart.
    To(NodeId),
}

/// Where a result is.
#[derive(Debug)]
pub enum Outcome {
    /// In this buffer. It is handed back with [`Store::release`](crate::Store::release).
    Held(Block),
    /// In the memory that this node's worker lent.
    Lent,
    /// There are no numbers: none of those collected from has initial values to give.
    Nothing,
}

/// Where a chunk's elements were left when their plan was replaced.
#[derive(Clone, Copy, Debug)]
pub struct Resumption<'a> {
    /// The last clock that is complete.
    pub clock: Clock,
    /// Steps the rule took before the job's first clock: its state came from a checkpoint.
    pub steps_before: u64,
    /// The parameters after that clock. Empty if the shards keep none.
    pub parameters: &'a [f32],
    /// The update rule's vectors after that clock. Empty before its first step.
    pub vectors: &'a [&'a [f32]],
}

/// A chunk that has waited too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The chunk.
    pub key: ChunkKey,
    /// The clock that the chunk is collecting.
    pub clock: Clock,
    /// The nodes whose contribution is not complete.
    pub missing: Vec<NodeId>,
    /// Whether all of them collect from others, and so know better who is missing.
    pub collected: bool,
    /// How long ago the first contribution to this clock began.
    pub waited: Duration,
}
