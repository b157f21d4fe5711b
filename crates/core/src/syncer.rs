//! The state machine of one layer on one lane of a worker (Poseidon 2017 §4.1, Table 2).
//!
//! A layer's chunks are spread over lanes. Each lane has a syncer for its chunks of the layer, so no
//! two threads share a syncer. The layer is synced when the syncers of all its lanes are synced.

use crate::wire::{Header, Kind};
use crate::{ChunkKey, Clock, Encodings, LaneId, LayerId, NodeId, Plan, Route, Violation};
use std::ops::Range;
use std::sync::Arc;

/// Counts off one layer's chunks on one lane: the bit vector of BSP. A clone counts for itself and
/// shares the list of chunks, because a simulation has a clone for each of a thousand workers.
#[derive(Clone, Debug)]
pub struct Syncer {
    /// The layer's chunks on this lane.
    parts: Arc<[Part]>,
    encodings: Encodings,
    /// A bit for each part, 64 to a word: whether the part has come back.
    arrived: Box<[u64]>,
    /// The clock in flight, or the last one that came back.
    clock: Clock,
    /// Whether a contribution may be answered with the result of a later clock, because it came too
    /// late.
    jumps: bool,
    /// The clock that comes back, once it is known.
    answer: Option<Clock>,
    missing: usize,
}

/// No worker is so slow that it misses more clocks.
const MOST_MISSED: u64 = 1 << 24;

/// One chunk as a worker sees it.
#[derive(Clone, Debug)]
pub struct Part {
    /// The chunk.
    pub key: ChunkKey,
    /// The way to the server node that holds the chunk.
    pub route: Route,
    /// The node that the contribution goes to: the server, or the [collector](crate::tree) of this
    /// worker's host or rack, or of the host before it in the ring. This worker itself if it is the
    /// server.
    pub up: NodeId,
    /// The node that the result comes from: `up`, but in a ring the collector of the host after it.
    pub from: NodeId,
    /// Whether this worker's contribution stays on its node, because the node is the chunk's server or
    /// collects for it. Otherwise the contribution goes to `up`.
    pub collects: bool,
    /// Whether the sum of this worker's host is the first on the way, and workers take every step together, so
    /// that it [waits for its turn](crate::Admission).
    pub begins: bool,
    /// Whether other nodes have the result from this one.
    pub passes_on: bool,
    /// The elements of the layer that the chunk covers.
    pub range: Range<usize>,
}

impl Part {
    /// The server node that holds the chunk.
    pub fn server(&self) -> NodeId {
        self.route.root
    }
}

impl Syncer {
    /// The syncer of worker `me` for the chunks of `layer` that live on `lane`.
    pub fn new(plan: &Plan, me: NodeId, layer: LayerId, lane: LaneId) -> Self {
        let (chunks, tree) = (plan.chunks(layer), plan.tree());
        let parts: Arc<[Part]> = plan
            .layer_chunks(layer)
            .filter(|(_, shard)| shard.lane == lane)
            .filter_map(|(key, _)| {
                let range = chunks?.range(key.index)?;
                let route = plan.route(key)?;
                let up = tree.parent(me, route).unwrap_or(me);
                let from = tree.source(me, route).unwrap_or(me);
                let collects = tree.collects(me, route);
                let begins = plan.consistency().is_bsp() && tree.begins(me, route);
                let passes_on = (collects || route.ring.takes_results())
                    && !tree.receivers(me, route).is_empty();
                Some(Part { key, route, up, from, collects, begins, passes_on, range })
            })
            .collect();
        let arrived = vec![u64::MAX; parts.len().div_ceil(64)].into();
        let (encodings, jumps) = (plan.encodings(layer), plan.consistency().drops() > 0);
        let (clock, answer) = (Clock(0), None);
        Self { parts, encodings, arrived, clock, jumps, answer, missing: 0 }
    }

    /// The layer has come back at `clock`, under another plan: it goes on from there.
    pub fn resume(&mut self, clock: Clock) {
        debug_assert_eq!(self.missing, 0, "plans change between clocks");
        self.clock = clock;
    }

    /// How the layer's numbers travel.
    pub fn encodings(&self) -> Encodings {
        self.encodings
    }

    /// Whether none of the layer's chunks is on this lane.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// The layer goes out at `clock`. Returns the chunks to send, in order.
    ///
    /// The caller makes sure that the layer is not in flight.
    pub fn handle_send(&mut self, clock: Clock) -> &[Part] {
        debug_assert_eq!(self.missing, 0, "layer sent while in flight");
        (self.clock, self.answer) = (clock, None);
        self.missing = self.parts.len();
        self.arrived.fill(0);
        &self.parts
    }

    /// Chunk `index` of the layer. `None` if the chunk is not on this lane.
    pub fn part(&self, index: u32) -> Option<&Part> {
        self.position(index).map(|at| &self.parts[at])
    }

    /// The clock whose result comes back, or came back last. It is later than [`clock`](Self::clock) if the
    /// contribution came too late.
    pub fn answer(&self) -> Clock {
        self.answer.unwrap_or(self.clock)
    }

    /// Whether every chunk that was sent has come back.
    pub fn is_synced(&self) -> bool {
        self.missing == 0
    }

    /// An update is about to arrive. Returns the elements of the layer that its payload fills.
    pub fn handle_update(&mut self, header: &Header) -> Result<Range<usize>, Violation> {
        if header.kind != Kind::Update {
            return Err(Violation::WrongKind);
        }
        let at = self.position(header.chunk.index).ok_or(Violation::UnknownChunk)?;
        let part = &self.parts[at];
        if header.sender != part.from {
            return Err(Violation::WrongWay { expected: part.from, got: header.sender });
        }
        let expected = self.encodings.down.bytes(part.range.len());
        if header.length as usize != expected {
            return Err(Violation::Length { expected, got: header.length as usize });
        }
        if self.missing == 0 {
            return Err(Violation::NotInFlight);
        }
        let missed = header.clock.0.saturating_sub(self.clock.0);
        let jumps = self.jumps && self.answer.is_none() && (1..=MOST_MISSED).contains(&missed);
        let expected = self.answer.unwrap_or(self.clock);
        if header.clock != expected && !jumps {
            return Err(Violation::Clock { expected, got: header.clock });
        }
        if self.has_arrived(at) {
            return Err(Violation::Duplicate(header.clock));
        }
        self.answer = Some(header.clock);
        Ok(part.range.clone())
    }

    /// A chunk comes back that is held on this node: the result of `clock`.
    pub fn handle_own(&mut self, clock: Clock) {
        self.answer = Some(clock);
    }

    /// The payload of chunk `index`'s update is in place. True if it was the last one that this lane
    /// waited for.
    pub fn handle_landed(&mut self, index: u32) -> bool {
        if let Some(part) = self.position(index)
            && !self.has_arrived(part)
        {
            self.arrived[part / 64] |= 1 << (part % 64);
            self.missing -= 1;
            return self.missing == 0;
        }
        false
    }

    /// The layer's chunks on this lane, in order.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The clock in flight, or the last one that came back.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// The chunks that have not come back yet.
    pub fn missing(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().zip(0..).filter(|(_, at)| !self.has_arrived(*at)).map(|(part, _)| part)
    }

    fn has_arrived(&self, part: usize) -> bool {
        self.arrived[part / 64] >> (part % 64) & 1 == 1
    }

    fn position(&self, index: u32) -> Option<usize> {
        // If the node has one lane, that lane has all chunks, and a chunk's index is its position.
        let at = index as usize;
        if self.parts.get(at).is_some_and(|part| part.key.index == index) {
            return Some(at);
        }
        self.parts.binary_search_by_key(&index, |p| p.key.index).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Rules;
    use crate::{ChunkSize, Cluster, Layer, Servers};

    const LAYER: LayerId = LayerId(0);

    /// 10 elements in chunks of 4 on 2 servers: chunks 0 and 2 on node 1, chunk 1 on node 2.
    fn syncer() -> Syncer {
        let cluster = Cluster::new(1, Servers::Dedicated(2), 1).unwrap();
        let size = ChunkSize::at_most(16);
        let plan =
            Plan::new(&cluster, &[Layer::new("l", 10)], Rules { chunk: size, ..Rules::default() });
        Syncer::new(&plan, NodeId(0), LAYER, LaneId(0))
    }

    fn update(part: &Part, clock: u64) -> Header {
        let length = (part.range.len() * 4) as u32;
        let bare = Header::bare(Kind::Update, part.from, length);
        Header { chunk: part.key, clock: Clock(clock), ..bare }
    }

    #[test]
    fn a_layer_is_synced_when_its_last_chunk_lands() {
        let mut syncer = syncer();
        for clock in 1..4 {
            let parts = syncer.handle_send(Clock(clock)).to_vec();
            assert_eq!(parts.iter().map(|p| p.range.len()).sum::<usize>(), 10);
            for (n, part) in parts.iter().rev().enumerate() {
                assert_eq!(syncer.missing().count(), parts.len() - n);
                assert_eq!(syncer.handle_update(&update(part, clock)), Ok(part.range.clone()));
                assert_eq!(syncer.handle_landed(part.key.index), n + 1 == parts.len());
            }
        }
    }

    #[test]
    fn updates_that_were_not_awaited_are_violations() {
        let mut syncer = syncer();
        let part = syncer.parts[0].clone();
        let good = update(&part, 1);
        assert_eq!(syncer.handle_update(&good), Err(Violation::NotInFlight));
        syncer.handle_send(Clock(1));
        let clock = Violation::Clock { expected: Clock(1), got: Clock(2) };
        assert_eq!(syncer.handle_update(&update(&part, 2)), Err(clock));
        let stranger = Header { sender: NodeId(9), ..good };
        let server = Violation::WrongWay { expected: part.from, got: NodeId(9) };
        assert_eq!(syncer.handle_update(&stranger), Err(server));
        let long = Header { length: 400, ..good };
        let expected = part.range.len() * 4;
        assert_eq!(syncer.handle_update(&long), Err(Violation::Length { expected, got: 400 }));
        let mut unknown = good;
        unknown.chunk.index = 77;
        assert_eq!(syncer.handle_update(&unknown), Err(Violation::UnknownChunk));
        syncer.handle_landed(part.key.index);
        assert_eq!(syncer.handle_update(&good), Err(Violation::Duplicate(Clock(1))));
        assert_eq!(
            syncer.handle_update(&Header { kind: Kind::Push, ..good }),
            Err(Violation::WrongKind)
        );
    }
}
