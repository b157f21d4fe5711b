//! What a worker beside its shard keeps to itself until others have contributed.

use super::{Order, Store};
use crate::Encoding;
use crate::chunk::ChunkKey;
use crate::wire::Kind;
use std::time::Duration;

impl Store {
    /// Whether this node's worker keeps its contribution to `chunk` where it is, until another one is
    /// complete. If it were decoded at once, a backward pass would fill memory with sums of its own
    /// gradients, and every sum would be out of the cache when the next contribution comes. Memory that
    /// is [lent](Self::handle_loan) needs no decoding, and the order of ranks has its own.
    ///
    /// The chunk [waits](Self::poll_stalled) from now on.
    pub fn holds_back(&mut self, chunk: ChunkKey, kind: Kind, now: Duration) -> bool {
        let adds_as_they_come = self.order == Order::Arrival && self.consistency.is_bsp();
        let Ok(id) = self.slot(chunk) else { return false };
        let slot = &mut self.slots[id as usize];
        let comes_first = slot.encodings.up != Encoding::F32
            && slot.streams.len() > 1
            && slot.rounds.front().is_none_or(|round| round.finished == 0);
        let holds = kind == Kind::Push && adds_as_they_come && comes_first;
        if holds {
            slot.held.get_or_insert(now);
        }
        holds
    }
}
