//! What a lane tells other nodes about its plan's chunks.

use crate::engine::outbox::{Message, Payload};
use crate::memory::exchange::Exchange;
use crate::memory::factors::Rows;
use poseidon_core::queue::urgency;
use poseidon_core::wire::{Header, Kind, Terms};
use poseidon_core::{ChunkKey, LayerId, NodeId};
use std::ops::Range;

/// How rows of factors are sent.
pub(super) fn to_send(rows: &Rows) -> Payload {
    match rows.to_send() {
        _ if rows.is_empty() => Payload::None,
        Ok(region) => Payload::Region(region),
        Err(apart) => Payload::Shared(apart),
    }
}

/// A message about `layer`. The layer stays in flight until a link has taken the message.
pub(super) fn about(header: Header, payload: Payload, layer: LayerId) -> Message {
    Message::new(header, payload, urgency(header.kind, layer), u64::from(layer.0))
}

/// What says that this node's worker contributes `range` of a layer.
pub(super) fn contribution(
    me: NodeId,
    chunk: ChunkKey,
    range: &Range<usize>,
    exchange: &Exchange,
) -> Header {
    // Worker 0's initial values are everybody's.
    let carries = exchange.kind == Kind::Push || me == NodeId(0);
    let length = if carries { exchange.gradient.encoding().bytes(range.len()) as u32 } else { 0 };
    let (Terms { rate: value, marks }, clock) = (exchange.terms, exchange.clock);
    Header { chunk, value, marks, clock, ..Header::bare(exchange.kind, me, length) }
}
