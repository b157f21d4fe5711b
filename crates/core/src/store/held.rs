//! What a worker beside its shard keeps to itself until others have contributed.

use super::{Order, Store};
use crate::chunk::ChunkKey;
use crate::wire::{Header, Kind};
use crate::{Clock, Encoding};
use std::time::Duration;

/// A contribution that its worker keeps to itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) since: Duration,
    pub(super) stream: usize,
    pub(super) clock: Clock,
}

impl Store {
    /// Whether this node's worker keeps the contribution of this header where it is, until another one is
    /// complete. If it were decoded at once, a backward pass would fill memory with sums of its own
    /// gradients, and every sum would be out of the cache when the next contribution comes. Memory that
    /// is [lent](Self::handle_loan) needs no decoding, and the order of ranks has its own.
    ///
    /// The chunk [waits](Self::poll_stalled) from now on.
    pub fn holds_back(&mut self, header: &Header, now: Duration) -> bool {
        let adds_as_they_come = self.order == Order::Arrival && self.consistency.is_bsp();
        let Ok(id) = self.slot(header.chunk) else { return false };
        let slot = &mut self.slots[id as usize];
        let Some(stream) = slot.streams.position(header.sender) else { return false };
        let comes_first = slot.encodings.up != Encoding::F32
            && slot.streams.len() > 1
            && slot.rounds.front().is_none_or(|round| round.finished == 0);
        let holds = header.kind == Kind::Push && adds_as_they_come && comes_first;
        if holds {
            slot.held = Some(Held { since: now, stream, clock: header.clock });
        }
        holds
    }

    /// Whether this node's worker has held back its contribution to `chunk`. From now on it does not: another
    /// one is complete.
    pub fn lets_go(&mut self, chunk: ChunkKey) -> bool {
        let slot = self.slot(chunk).ok().map(|id| &mut self.slots[id as usize]);
        slot.is_some_and(|slot| slot.held.take().is_some())
    }
}
