//! Chunks whose sums begin at this node: they wait until it may begin another one.

use super::PlanState;
use super::message::{about, contribution};
use crate::engine::outbox::{Message, Payload};
use poseidon_core::queue::urgency;
use poseidon_core::store::{Completed, Way};
use poseidon_core::{ChunkKey, NodeId};
use std::time::Duration;

/// What a node sends of a chunk that begins there.
pub(super) enum Beginning {
    /// The contribution of its own worker. It counts as unsent already.
    Own(ChunkKey),
    /// The sum of its host's workers.
    Sum(Box<Completed>),
}

impl PlanState {
    /// Gives `send` what may begin now.
    pub(super) fn poll_beginning(&mut self, now: Duration, send: &mut impl FnMut(NodeId, Message)) {
        while let Some(beginning) = self.beginning.poll_begin(now) {
            match beginning {
                Beginning::Own(chunk) => {
                    let part = self.syncers[chunk.layer.index()].part(chunk.index);
                    let up = part.map(|part| part.up);
                    if let Some((up, message)) = up.zip(self.own_contribution(chunk)) {
                        send(up, message);
                    }
                }
                Beginning::Sum(completed) => self.send_completed(*completed, send),
            }
        }
    }

    /// When to look again whether more may begin.
    pub(crate) fn next_beginning(&self) -> Option<Duration> {
        self.beginning.wake()
    }

    /// How urgent and how large a sum is that begins its way here. `None` for everything else.
    pub(super) fn beginning_of(&self, completed: &Completed) -> Option<(u64, usize)> {
        let Way::Up { kind, .. } = completed.way else { return None };
        Some((urgency(kind, completed.key.layer), self.bytes_begun(completed.key)?))
    }

    /// The result of `chunk` is back: if it has begun here, another one may.
    pub(super) fn note_back(&mut self, chunk: ChunkKey) {
        if let Some(bytes) = self.bytes_begun(chunk) {
            self.beginning.handle_back(bytes);
        }
    }

    /// What this node's worker contributes to `chunk`, while the layer is in flight.
    pub(super) fn own_contribution(&self, chunk: ChunkKey) -> Option<Message> {
        let lent = self.lent(chunk)?;
        let header = contribution(self.me.node, chunk, lent.range(), lent.exchange());
        let payload = match header.length {
            0 => Payload::None,
            _ => Payload::Region(lent.gradient_region()),
        };
        Some(about(header, payload, chunk.layer))
    }

    /// What a chunk that begins here has to send. `None` if it does not.
    fn bytes_begun(&self, chunk: ChunkKey) -> Option<usize> {
        let syncer = self.syncers.get(chunk.layer.index())?;
        let part = syncer.part(chunk.index).filter(|part| part.begins)?;
        Some(syncer.encodings().up.bytes(part.range.len()))
    }
}
