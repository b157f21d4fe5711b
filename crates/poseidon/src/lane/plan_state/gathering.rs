//! Layers that go by factors, on one lane.

use super::message::{about, to_send};
use super::{PlanState, fan_out};
use crate::engine::outbox::Message;
use crate::memory::factors::{FactorMatrices, Rows};
use poseidon_core::wire::{Header, Kind, Terms};
use poseidon_core::{ChunkKey, Clock, Gather, LayerId, NodeId, Violation};
use std::sync::Arc;

/// One lane's part in gathering the factors of one layer.
pub(super) struct Gathering {
    pub(super) gather: Gather,
    pub(super) matrices: Arc<FactorMatrices>,
    /// Sent, and not yet reported to the session.
    pub(super) in_flight: bool,
}

impl PlanState {
    /// The training program's factors of `layer` are in its matrix. Gives `send` a message for
    /// every chunk and every node that has it from this one.
    pub(crate) fn handle_send_factors(
        &mut self,
        layer: LayerId,
        (clock, rows, terms): (Clock, usize, Terms),
        mut send: impl FnMut(NodeId, Message),
    ) -> Result<(), (ChunkKey, Violation)> {
        let Some(gathering) = &mut self.gathers[layer.index()] else { return Ok(()) };
        let Gathering { gather, matrices, in_flight } = gathering;
        let layout = &matrices.layout;
        let chunks = gather
            .handle_send(clock, rows, terms.rate, terms.marks.wait_for_all())
            .map_err(|violation| (ChunkKey { layer, index: 0 }, violation))?;
        *in_flight = true;
        self.noted.iter_mut().for_each(|noted| noted.begun(layer, clock));
        self.board.note_marks(terms.marks, Clock(clock.0 + layout.lead));
        for (chunk, range) in chunks {
            let length = layout.encoding.bytes(range.len()) as u32;
            let bare = Header::bare(Kind::Factors, self.me.node, length);
            let header = Header { chunk, value: terms.rate, marks: terms.marks, clock, ..bare };
            let Some(route) = layout.route(chunk.index) else { continue };
            // SAFETY: the session has written these rows of this lane, and touches them no more.
            let rows = unsafe { Rows::own(matrices.clone(), self.me.node, clock, range.clone()) };
            for &node in &*fan_out(&mut self.fan_outs, &self.tree, self.me.node, route) {
                let payload = to_send(&rows);
                self.unsent[layer.index()] += 1;
                send(node, about(header, payload, layer));
            }
        }
        self.finish_if_gathered(layer);
        Ok(())
    }

    /// A layer by factors is done on this lane when everybody's chunks have come and no link reads
    /// this worker's own any more.
    pub(super) fn finish_if_gathered(&mut self, layer: LayerId) {
        let Some(gathering) = &mut self.gathers[layer.index()] else { return };
        let Gathering { gather, matrices, .. } = gathering;
        if let Some(lane) = matrices.layout.lanes().find(|lane| *lane == self.me.lane) {
            // SAFETY: they have landed, up to that clock, and the gather takes no more of them.
            unsafe { matrices.note_gathered(lane, gather.gathered()) };
        }
        let done = gather.is_gathered() && self.unsent[layer.index()] == 0;
        if done && std::mem::take(&mut gathering.in_flight) {
            self.noted.iter_mut().for_each(|noted| noted.done(layer));
            self.board.finish_part(layer);
        }
    }
}
