//! What is carried over from one plan, or one job, to the next: parameters and what update rules have.

use super::PlanState;
use crate::memory::kept::KeptPiece;
use crate::memory::rule_state::RuleState;
use poseidon_core::store::{Kept, Restored, Resumption};
use poseidon_core::syncer::Part;
use poseidon_core::{Clock, LayerId};
use std::ops::Range;

/// What the update rule has of one chunk.
pub(crate) struct Piece {
    /// The elements of the layer that it belongs to.
    pub(crate) range: Range<usize>,
    pub(crate) vectors: Vec<Vec<f32>>,
    /// The parameters, if workers get them rounded.
    pub(crate) masters: Option<Vec<f32>>,
}

impl PlanState {
    /// What workers asked to keep, chunk by chunk.
    pub(crate) fn poll_kept(&mut self) -> Option<KeptPiece> {
        let Kept { key, clock, steps, parameters, vectors } = self.store.poll_kept()?;
        let part = self.syncers[key.layer.index()].part(key.index);
        let range = part.expect("a shard has chunks of its lane").range.clone();
        Some(KeptPiece { layer: key.layer, range, clock, steps, parameters, vectors })
    }

    /// The update rule's vectors of the chunks of `layer` that this shard holds.
    pub(crate) fn rule_state(&self, layer: LayerId) -> Vec<Piece> {
        let parts = self.syncers[layer.index()].parts().iter();
        let held = |part: &Part| {
            let vectors = self.store.rule_state(part.key)?;
            let vectors = vectors.iter().map(|vector| vector.to_vec()).collect();
            let masters = self.store.masters(part.key).map(<[f32]>::to_vec);
            Some(Piece { range: part.range.clone(), vectors, masters })
        };
        parts.filter_map(held).collect()
    }

    /// Gives the update rule back what [`Self::rule_state`] of all shards was. False if the vectors
    /// do not fit one of this shard's chunks.
    pub(crate) fn restore_rule(&mut self, layer: LayerId, rule: &RuleState) -> bool {
        let parts = self.syncers[layer.index()].parts().iter();
        parts.filter(|part| part.server() == self.me.node).all(|part| {
            let vectors: Vec<_> = rule.vectors.iter().map(|v| &v[part.range.clone()]).collect();
            let masters = rule.masters.get(part.range.clone()).filter(|_| !rule.masters.is_empty());
            self.store.restore_rule(part.key, rule.steps, &vectors, masters)
        })
    }

    /// Before anything has come: gives the chunks of this shard what `read` gives for their layer and
    /// range.
    pub(crate) fn restore<E>(
        &mut self,
        read: impl Fn(LayerId, &Range<usize>) -> Result<Restored, E>,
    ) -> Result<(), E> {
        for syncer in &self.syncers {
            for part in syncer.parts() {
                if self.store.holds_parameters(part.key) {
                    let fits = self.store.restore(part.key, read(part.key.layer, &part.range)?);
                    debug_assert!(fits, "a checkpoint's layers were compared with the job's");
                }
            }
        }
        Ok(())
    }

    /// Goes on with `layer` where another plan left it: the layer's clock, its steps before this job, its
    /// parameters and the update rule's vectors, all of the whole layer.
    pub(crate) fn resume(
        &mut self,
        layer: LayerId,
        (clock, steps_before): (Clock, u64),
        parameters: &[f32],
        vectors: &[Vec<f32>],
    ) {
        self.syncers[layer.index()].resume(clock);
        if let Some(gathering) = &mut self.gathers[layer.index()] {
            gathering.gather.resume(clock);
        }
        for part in self.syncers[layer.index()].parts().iter().filter(|part| part.collects) {
            let range = part.range.clone();
            let vectors: Vec<&[f32]> = vectors.iter().map(|v| &v[range.clone()]).collect();
            let parameters = parameters.get(range).unwrap_or_default();
            let from = Resumption { clock, steps_before, parameters, vectors: &vectors };
            let resumed = self.store.resume(part.key, &from);
            debug_assert!(resumed, "a new store has all of its plan's chunks, and nothing in them");
        }
    }
}
