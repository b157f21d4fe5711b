//! What a shard's chunks have: taken out for checkpoints and other plans, and put back.

use super::open_clock::OpenClock;
use super::{Restored, Resumption, Store};
use crate::{ChunkKey, Encoding};
use std::sync::Arc;

impl Store {
    /// The update rule's state vectors of a chunk. `None` before the chunk has its initial
    /// parameters, and for rules that keep no parameters.
    pub fn rule_state(&self, chunk: ChunkKey) -> Option<&[Arc<[f32]>]> {
        let slot = &self.slots[self.slot(chunk).ok()? as usize];
        slot.parameters.is_some().then_some(&slot.state)
    }

    /// The parameters of a chunk as the update rule has them, if workers get them rounded.
    pub fn masters(&self, chunk: ChunkKey) -> Option<&[f32]> {
        let slot = &self.slots[self.slot(chunk).ok()? as usize];
        let rounded = slot.encodings.down != Encoding::F32;
        slot.parameters.as_deref().filter(|_| rounded)
    }

    /// Sets a chunk's update rule to its state after `steps` steps, and the chunk's parameters to its
    /// [`masters`](Self::masters), if there are any. False if this shard does not have the chunk, if
    /// the chunk has no initial parameters yet, or if the vectors differ in number or length from the
    /// rule's.
    pub fn restore_rule(
        &mut self,
        chunk: ChunkKey,
        steps: u64,
        vectors: &[&[f32]],
        masters: Option<&[f32]>,
    ) -> bool {
        let Ok(id) = self.slot(chunk) else { return false };
        let slot = &mut self.slots[id as usize];
        let fits = slot.state.len() == vectors.len()
            && slot.state.iter().zip(vectors).all(|(own, new)| own.len() == new.len())
            && masters.is_none_or(|masters| masters.len() == slot.room);
        if slot.parameters.is_none() || !fits {
            return false;
        }
        slot.steps_before = steps;
        if let Some(masters) = masters {
            slot.parameters = Some(masters.into());
        }
        slot.state = vectors.iter().map(|&vector| vector.into()).collect();
        true
    }

    /// Whether the update rule of `chunk` runs here, on parameters that are here.
    pub fn holds_parameters(&self, chunk: ChunkKey) -> bool {
        self.slot(chunk).is_ok_and(|id| self.slots[id as usize].holds_parameters())
    }

    /// Before anything has come for a chunk: gives it what a checkpoint has of it. It begins to count
    /// with the chunk's initial values. False if the chunk's parameters are not here, if something has
    /// come already, or if a length or the number of vectors is not the rule's.
    pub fn restore(&mut self, chunk: ChunkKey, restored: Restored) -> bool {
        let Ok(id) = self.slot(chunk) else { return false };
        let slot = &mut self.slots[id as usize];
        let fits = restored.vectors.len() == slot.optimizer.state_vectors()
            && restored.parameters.len() == slot.room
            && restored.vectors.iter().all(|vector| vector.len() == slot.room);
        if !slot.holds_parameters() || !slot.is_untouched() || !fits {
            return false;
        }
        slot.restored = Some(restored);
        true
    }

    /// Puts a chunk where its elements were left under another plan. False if the chunk is not here, or
    /// if something has come for it already.
    pub fn resume(&mut self, chunk: ChunkKey, from: &Resumption<'_>) -> bool {
        let Ok(id) = self.slot(chunk) else { return false };
        let slot = &mut self.slots[id as usize];
        if !slot.is_untouched() {
            return false;
        }
        slot.begin_at(from.clock.next());
        slot.steps_before = from.steps_before;
        if slot.holds_parameters() {
            slot.parameters = Some(from.parameters.into());
            slot.state = match from.vectors {
                [] => slot.fresh_state(),
                vectors => vectors.iter().map(|&vector| vector.into()).collect(),
            };
        }
        true
    }

    /// Bytes of sums, parameters and optimizer state that this shard holds, with free buffers.
    pub fn bytes(&self) -> usize {
        let held = self.slots.iter().map(|s| {
            let sums =
                |r: &OpenClock| usize::from(r.sum.is_some()) + r.waiting.len() + r.stack.len();
            let round = s.rounds.iter().map(|r| s.room * sums(r)).sum::<usize>();
            let parameters = s.parameters.as_ref().map_or(0, |p| p.len());
            round + parameters + s.state.iter().map(|vector| vector.len()).sum::<usize>()
        });
        self.pool.bytes() + held.sum::<usize>() * size_of::<f32>()
    }
}
