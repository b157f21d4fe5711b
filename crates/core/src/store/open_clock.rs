//! One clock of a chunk, from its first contribution to its last.

use super::pool::unshared;
use super::streams::Fold;
use crate::Encoding;
use crate::optim;
use crate::wire::{Header, Kind, Terms};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// What has come for the clock that a slot collects.
#[derive(Debug)]
pub(super) struct OpenClock {
    pub(super) kind: Kind,
    /// The learning rate, and the marks of all contributions so far.
    pub(super) terms: Terms,
    pub(super) opened: Duration,
    /// `None` if the sum is in the memory that this node's worker lent, if there is nothing to add,
    /// and in the order of ranks until all is added.
    pub(super) sum: Option<Arc<[f32]>>,
    /// The sum is in the memory that this node's worker lent.
    pub(super) lent: bool,
    /// Elements of the sum that have a value. The pieces of a contribution come in order, so this is
    /// how far the fastest contribution has come. Pieces are added below it and assigned above it,
    /// so the buffer needs no clearing.
    pub(super) filled: usize,
    pub(super) finished: usize,
    /// With [`Order::Rank`]: contributions that wait for their turn, by stream. Where slow workers may
    /// be dropped: those that came before it was known who counts.
    pub(super) waiting: BTreeMap<usize, Arc<[f32]>>,
    /// With [`Order::Rank`]: sums that have been begun, and the next step of the streams' fold.
    pub(super) stack: Vec<Arc<[f32]>>,
    pub(super) turn: usize,
}

impl OpenClock {
    /// The clock of the contribution that `header` announces.
    pub(super) fn new(header: &Header, now: Duration, sum: Option<Arc<[f32]>>) -> Self {
        Self {
            kind: header.kind,
            terms: header.terms(),
            opened: now,
            sum,
            lent: false,
            filled: 0,
            finished: 0,
            waiting: BTreeMap::new(),
            stack: Vec::new(),
            turn: 0,
        }
    }

    /// Adds up what can be added now in the order of ranks. Returns buffers that are free again.
    pub(super) fn fold(&mut self, steps: &[Fold], done: impl Fn(usize) -> bool) -> Vec<Arc<[f32]>> {
        let mut freed = Vec::new();
        while let Some(step) = steps.get(self.turn) {
            match *step {
                // A contribution without numbers has no buffer: that of a simulation.
                Fold::Take(stream) if done(stream) => {
                    self.stack.extend(self.waiting.remove(&stream))
                }
                Fold::Take(_) => break,
                Fold::Add => {
                    let added = self.stack.pop();
                    if let (Some(sum), Some(added)) = (self.stack.last_mut(), added) {
                        optim::add(unshared(sum), &added);
                        freed.push(added);
                    }
                }
            }
            self.turn += 1;
        }
        freed
    }
}

/// Adds `piece` to the first `known` elements of its part of a sum, which have values, and assigns it
/// to the others.
pub(super) fn add_or_assign(encoding: Encoding, sum: &mut [f32], known: usize, piece: &[u8]) {
    let (old, new) = sum.split_at_mut(known.min(sum.len()));
    let (add, assign) = piece.split_at(encoding.bytes(old.len()));
    encoding.add(old, add);
    encoding.decode(assign, new);
}
