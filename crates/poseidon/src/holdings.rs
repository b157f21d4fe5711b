//! What one lane of one node holds: its shard of the store, and its part of every layer's syncer.
//!
//! Knows nothing of links: frames come in through `open` and `handle_*`, and go out through the
//! closures given to `handle_send` and `poll_completed`.

use crate::board::{Board, Exchange};
use crate::outbox::Payload;
use poseidon_core::store::{Completed, Contribution, Stall};
use poseidon_core::wire::{Header, Kind};
use poseidon_core::{ChunkKey, Cluster, LayerId, NodeId, Plan, Shard, Store, Syncer, Violation};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub(crate) struct Holdings {
    me: NodeId,
    workers: Vec<NodeId>,
    store: Option<Store>,
    syncers: Vec<Syncer>,
    exchanges: Vec<Option<Arc<Exchange>>>,
    /// Chunks of this node's own worker for this node's own shard, in the order they were sent.
    /// They are added when the first frame for the chunk arrives, or when there is nothing else to
    /// do: adding all of a large layer at once would push everything else out of the cache.
    own: VecDeque<ChunkKey>,
    completed: Vec<Completed>,
    board: Arc<Board>,
}

/// Where the payload of a frame goes.
#[derive(Debug)]
pub(crate) enum Landing {
    /// Piece by piece into a sum.
    Sum(Contribution),
    /// Straight into the training program's memory.
    Result { exchange: Arc<Exchange>, range: Range<usize> },
}

impl Holdings {
    pub(crate) fn new(
        me: Shard,
        cluster: &Cluster,
        plan: &Plan,
        store: Option<Store>,
        board: Arc<Board>,
    ) -> Self {
        let layers = (0..plan.layers() as u32).map(LayerId);
        Self {
            me: me.node,
            workers: cluster.worker_ids().collect(),
            store,
            syncers: layers.map(|layer| Syncer::new(plan, layer, me.lane)).collect(),
            exchanges: vec![None; plan.layers()],
            own: VecDeque::new(),
            completed: Vec::new(),
            board,
        }
    }

    /// The training program lends a layer. Gives `send` a frame for every chunk that lives on
    /// another node.
    pub(crate) fn handle_send(
        &mut self,
        exchange: Arc<Exchange>,
        mut send: impl FnMut(NodeId, Header, Payload),
    ) {
        let layer = exchange.layer;
        let parts = self.syncers[layer.index()].handle_send(exchange.clock);
        if parts.is_empty() {
            drop(exchange);
            self.board.finish_part(layer);
            return;
        }
        for part in parts {
            if part.server == self.me {
                self.own.push_back(part.key);
            } else {
                let header = contribution(self.me, part.key, &part.range, &exchange);
                let payload = match header.length {
                    0 => Payload::None,
                    _ => Payload::Gradient(exchange.clone(), part.range.clone()),
                };
                send(part.server, header, payload);
            }
        }
        self.exchanges[layer.index()] = Some(exchange);
    }

    /// Checks a frame that carries a chunk and says where its payload goes.
    pub(crate) fn open(&mut self, header: &Header, now: Duration) -> Result<Landing, Violation> {
        match header.kind {
            Kind::Push | Kind::Init => {
                let store = self.store.as_mut().ok_or(Violation::UnknownChunk)?;
                let sum = store.handle_push(header, now)?;
                self.contribute_own(header.chunk, now)?;
                Ok(Landing::Sum(sum))
            }
            Kind::Update => {
                let layer = header.chunk.layer.index();
                let syncer = self.syncers.get(layer).ok_or(Violation::UnknownChunk)?;
                let range = syncer.handle_update(header)?;
                let exchange = self.exchanges[layer].clone().ok_or(Violation::NotInFlight)?;
                Ok(Landing::Result { exchange, range })
            }
            _ => Err(Violation::WrongKind),
        }
    }

    /// The next piece of a contribution that `open` let in.
    pub(crate) fn handle_piece(&mut self, sum: &mut Contribution, piece: &[f32]) {
        let store = self.store.as_mut().expect("only a store opens a sum");
        store.handle_piece(sum, piece);
    }

    /// A contribution that `open` let in is all there.
    pub(crate) fn handle_contributed(&mut self, sum: Contribution) {
        let store = self.store.as_mut().expect("only a store opens a sum");
        self.completed.extend(store.handle_contributed(sum));
    }

    /// A chunk's result is in place.
    pub(crate) fn handle_landed(&mut self, chunk: ChunkKey) {
        if self.syncers[chunk.layer.index()].handle_landed(chunk.index) {
            // Let go of the memory before saying so: the session takes it back at once.
            self.exchanges[chunk.layer.index()] = None;
            self.board.finish_part(chunk.layer);
        }
    }

    /// Adds one of this node's own chunks to its shard. False when there is none left.
    pub(crate) fn work(&mut self, now: Duration) -> Result<bool, (ChunkKey, Violation)> {
        let Some(chunk) = self.own.pop_front() else { return Ok(false) };
        self.contribute_own(chunk, now).map_err(|violation| (chunk, violation))?;
        Ok(true)
    }

    /// Gives `send` an update for every other worker, for every chunk that has become complete.
    pub(crate) fn poll_completed(&mut self, mut send: impl FnMut(NodeId, Header, Payload)) -> bool {
        let any = !self.completed.is_empty();
        while let Some(Completed { key, clock, result }) = self.completed.pop() {
            let length = size_of_val(&*result) as u32;
            let header = Header {
                kind: Kind::Update,
                sender: self.me,
                chunk: key,
                value: 0.0,
                clock,
                length,
            };
            for &worker in self.workers.iter().filter(|&&w| w != self.me) {
                send(worker, header, Payload::Result(result.clone()));
            }
            let layer = key.layer.index();
            // On a dedicated server no layer is ever in flight.
            if let Some(exchange) = &self.exchanges[layer]
                && let Ok(range) = self.syncers[layer].handle_update(&header)
            {
                // SAFETY: the chunk belongs to this lane, and its contribution has been added.
                unsafe { exchange.result().chunk_mut(range) }.copy_from_slice(&result);
                self.handle_landed(key);
            }
            self.release(result);
        }
        any
    }

    /// A link has taken the whole of a frame.
    pub(crate) fn sent(&mut self, payload: Payload) {
        if let Payload::Result(result) = payload {
            self.release(result);
        }
    }

    pub(crate) fn has_own_work(&self) -> bool {
        !self.own.is_empty()
    }

    pub(crate) fn poll_stalled(&self, now: Duration, limit: Duration) -> Option<Stall> {
        self.store.as_ref()?.poll_stalled(now, limit)
    }

    /// The chunks this node's worker awaits.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = (ChunkKey, NodeId)> {
        self.syncers.iter().flat_map(|s| s.missing().map(|p| (p.key, p.server)))
    }

    /// The clock `layer` is at on this lane.
    pub(crate) fn clock(&self, layer: LayerId) -> poseidon_core::Clock {
        self.syncers[layer.index()].clock()
    }

    fn contribute_own(&mut self, chunk: ChunkKey, now: Duration) -> Result<(), Violation> {
        let layer = chunk.layer.index();
        let Some(exchange) = &self.exchanges[layer] else { return Ok(()) };
        let Some(range) = self.syncers[layer].take(chunk.index) else { return Ok(()) };
        let header = contribution(self.me, chunk, &range, exchange);
        let store = self.store.as_mut().ok_or(Violation::UnknownChunk)?;
        let mut sum = store.handle_push(&header, now)?;
        if header.length > 0 {
            // SAFETY: the chunk belongs to this lane, which writes its result only later.
            store.handle_piece(&mut sum, unsafe { exchange.gradient.chunk(range) });
        }
        self.completed.extend(store.handle_contributed(sum));
        Ok(())
    }

    fn release(&mut self, result: Arc<[f32]>) {
        if let Some(store) = &mut self.store {
            store.release(result);
        }
    }
}

fn contribution(me: NodeId, chunk: ChunkKey, range: &Range<usize>, exchange: &Exchange) -> Header {
    // Worker 0's initial values are everybody's.
    let carries = exchange.kind == Kind::Push || me == NodeId(0);
    let length = if carries { (range.len() * size_of::<f32>()) as u32 } else { 0 };
    let (kind, value, clock) = (exchange.kind, exchange.rate, exchange.clock);
    Header { kind, sender: me, chunk, value, clock, length }
}
