//! What a node keeps of the state after a clock, until it is written to a checkpoint.

use poseidon_core::{Clock, LayerId};
use std::ops::Range;
use std::sync::Arc;

/// Some elements of a layer, and what its update rule has of them.
#[derive(Clone, Debug)]
pub(crate) struct KeptPiece {
    pub(crate) layer: LayerId,
    pub(crate) range: Range<usize>,
    pub(crate) clock: Clock,
    /// Steps that the update rule has taken, those before this job included.
    pub(crate) steps: u64,
    pub(crate) parameters: Arc<[f32]>,
    pub(crate) vectors: Vec<Arc<[f32]>>,
}
