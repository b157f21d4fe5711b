//! What one node holds: core's syncers, gatherers and shards, in the place of a session's lanes.

use crate::fabric::Frame;
use crate::outcome::Wait;
use poseidon_core::store::{Completed, Outcome};
use poseidon_core::wire::{Header, Kind};
use poseidon_core::{
    ChunkKey, Clock, Cluster, Gather, Layer, LayerId, NodeId, Plan, Shard, Store, Syncer, Violation,
};
use std::time::Duration;

/// What all nodes know.
pub(crate) struct Book<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) layers: &'a [Layer],
    pub(crate) plan: Plan,
    /// By layer: bytes of a push, where that is not the gradient.
    pub(crate) pushes: Vec<Option<u32>>,
    /// By layer: rows of factors.
    pub(crate) rows: Vec<usize>,
    /// By layer and lane: what every worker begins with.
    pub(crate) syncers: Vec<Vec<Syncer>>,
}

pub(crate) struct Node {
    id: NodeId,
    /// By lane; none if the node is not a server.
    stores: Vec<Store>,
    /// By layer and lane; none if the node is not a worker.
    syncers: Vec<Vec<Syncer>>,
    gathers: Vec<Vec<Gather>>,
    /// By layer: frames that are still read from the worker's memory.
    unsent: Vec<u32>,
    in_flight: Vec<bool>,
    completed: Vec<Completed>,
}

/// A frame for another node.
pub(crate) type Post<'a> = dyn FnMut(NodeId, Frame) + 'a;

impl Node {
    pub(crate) fn new(book: &Book<'_>, id: NodeId) -> Self {
        let role = book.cluster.role(id);
        let (worker, server) = role.map_or((false, false), |role| (role.worker, role.server));
        let layers = || (0..if worker { book.layers.len() as u32 } else { 0 }).map(LayerId);
        let lanes = || book.cluster.lane_ids();
        let shard = |lane| Shard { node: id, lane };
        let workers = book.cluster.workers();
        let store = |lane| Store::ghost(&book.plan, shard(lane), workers);
        let gathers = |layer| match book.plan.factors(layer) {
            Some(layout) => {
                layout.lanes().map(|lane| Gather::new(layer, layout, id, lane)).collect()
            }
            None => Vec::new(),
        };
        Self {
            id,
            stores: lanes().filter(|_| server).map(store).collect(),
            syncers: layers().map(|layer| book.syncers[layer.index()].clone()).collect(),
            gathers: layers().map(gathers).collect(),
            unsent: vec![0; book.layers.len()],
            in_flight: vec![false; book.layers.len()],
            completed: Vec::new(),
        }
    }

    /// Whether `layer` has been sent and has not come back.
    pub(crate) fn is_in_flight(&self, layer: usize) -> bool {
        self.in_flight[layer]
    }

    /// The worker's gradient of `layer`, or its factors, go out.
    pub(crate) fn send(
        &mut self,
        book: &Book<'_>,
        layer: LayerId,
        clock: Clock,
        now: Duration,
        post: &mut Post<'_>,
    ) {
        let at = layer.index();
        self.in_flight[at] = true;
        for gather in &mut self.gathers[at] {
            let chunks = gather.handle_send(clock, book.rows[at], 0.0);
            for (chunk, range) in chunks.expect("all workers have the same rate") {
                let payload = (range.len() * size_of::<f32>()) as u32;
                let frame = Frame {
                    kind: Kind::Factors,
                    chunk,
                    clock: clock.0 as u32,
                    payload,
                    lent: true,
                };
                for worker in book.cluster.worker_ids().filter(|w| *w != self.id) {
                    self.unsent[at] += 1;
                    post(worker, frame);
                }
            }
        }
        let mut own = Vec::new();
        for syncer in &mut self.syncers[at] {
            for part in syncer.handle_send(clock) {
                if part.server == self.id {
                    own.push(part.key);
                    continue;
                }
                self.unsent[at] += 1;
                let gradient = (part.range.len() * size_of::<f32>()) as u32;
                let payload = book.pushes[at].unwrap_or(gradient);
                let (kind, chunk) = (Kind::Push, part.key);
                post(
                    part.server,
                    Frame { kind, chunk, clock: clock.0 as u32, payload, lent: true },
                );
            }
        }
        for chunk in own {
            self.contribute(book, self.id, chunk, clock, now);
        }
        self.poll_completed(book, post);
        self.finish_if_done(at);
    }

    /// A frame has come. True if a layer that the worker may wait for is back.
    pub(crate) fn handle_frame(
        &mut self,
        book: &Book<'_>,
        from: NodeId,
        frame: &Frame,
        now: Duration,
        post: &mut Post<'_>,
    ) -> bool {
        let chunk = frame.chunk;
        let layer = chunk.layer.index();
        let clock = Clock(frame.clock.into());
        let before = self.in_flight[layer];
        match frame.kind {
            Kind::Factors => {
                let header = header(frame, from, frame.payload);
                let gather = self.gathers[layer].iter_mut().find_map(|gather| {
                    match gather.handle_factors(&header) {
                        Err(Violation::UnknownChunk) => None, // another lane's
                        judged => Some(judged.map(|_| gather)),
                    }
                });
                let gather = lawful(gather.unwrap_or(Err(Violation::UnknownChunk)));
                gather.handle_landed(from, chunk.index, clock);
                self.finish_if_done(layer);
            }
            Kind::Update => {
                let header = header(frame, from, frame.payload);
                let landed = self.syncers[layer].iter_mut().find_map(|syncer| {
                    match syncer.handle_update(&header) {
                        Err(Violation::UnknownChunk) => None,
                        judged => Some(judged.map(|_| syncer.handle_landed(chunk.index))),
                    }
                });
                if lawful(landed.unwrap_or(Err(Violation::UnknownChunk))) {
                    self.finish_if_done(layer);
                }
            }
            _ => {
                self.contribute(book, from, chunk, clock, now);
                self.poll_completed(book, post);
            }
        }
        before && !self.in_flight[layer]
    }

    /// A link has taken the whole of a frame. True if that was what the worker waited for.
    pub(crate) fn handle_sent(&mut self, frame: &Frame) -> bool {
        let layer = frame.chunk.layer.index();
        if !frame.lent {
            return false;
        }
        self.unsent[layer] -= 1;
        let before = self.in_flight[layer];
        self.finish_if_done(layer);
        before && !self.in_flight[layer]
    }

    /// What the worker and the shards of this node wait for.
    pub(crate) fn waits(&self, book: &Book<'_>) -> Vec<Wait> {
        let wait = |chunk: ChunkKey, awaits, clock| {
            let layer = book.layers[chunk.layer.index()].name.clone();
            Wait { node: self.id, awaits, layer, chunk, clock }
        };
        let mut waits = Vec::new();
        for syncer in self.syncers.iter().flatten() {
            waits.extend(syncer.missing().map(|p| wait(p.key, p.server, syncer.clock())));
        }
        for gather in self.gathers.iter().flatten() {
            waits.extend(gather.missing().map(|(key, from)| wait(key, from, gather.clock())));
        }
        for store in &self.stores {
            if let Some(stall) = store.poll_stalled(Duration::MAX, Duration::ZERO) {
                waits.extend(stall.missing.iter().map(|&from| wait(stall.key, from, stall.clock)));
            }
        }
        waits
    }

    /// A contribution to a chunk of this node is all there.
    fn contribute(
        &mut self,
        book: &Book<'_>,
        from: NodeId,
        chunk: ChunkKey,
        clock: Clock,
        now: Duration,
    ) {
        let length = (book.plan.len(chunk) * size_of::<f32>()) as u32;
        let header = Header { kind: Kind::Push, sender: from, chunk, value: 0.0, clock, length };
        let lane = book.plan.shard(chunk).map_or(0, |shard| shard.lane.index());
        let store = &mut self.stores[lane];
        let loan = match from == self.id {
            true => lawful(store.handle_loan(&header, now)),
            false => None,
        };
        let contribution = loan.unwrap_or_else(|| lawful(store.handle_push(&header, now)));
        self.completed.extend(store.handle_contributed(contribution, None));
    }

    fn poll_completed(&mut self, book: &Book<'_>, post: &mut Post<'_>) {
        while let Some(Completed { key, clock, result }) = self.completed.pop() {
            let layer = key.layer.index();
            let payload = (book.plan.len(key) * size_of::<f32>()) as u32;
            let lent = matches!(result, Outcome::Lent);
            let (kind, clock) = (Kind::Update, clock.0 as u32);
            let frame = Frame { kind, chunk: key, clock, payload, lent };
            for worker in book.cluster.worker_ids().filter(|w| *w != self.id) {
                self.unsent[layer] += u32::from(lent);
                post(worker, frame);
            }
            if let Outcome::Held(sum) = result {
                let lane = book.plan.shard(key).map_or(0, |shard| shard.lane.index());
                self.stores[lane].release(sum);
            }
            // A dedicated server has no syncers.
            if let Some(syncers) = self.syncers.get_mut(layer)
                && syncers.iter_mut().any(|syncer| syncer.handle_landed(key.index))
            {
                self.finish_if_done(layer);
            }
        }
    }

    fn finish_if_done(&mut self, layer: usize) {
        let Some(syncers) = self.syncers.get(layer) else { return };
        if self.in_flight[layer]
            && self.unsent[layer] == 0
            && syncers.iter().all(Syncer::is_synced)
            && self.gathers[layer].iter().all(Gather::is_gathered)
        {
            self.in_flight[layer] = false;
        }
    }
}

/// By lane: what counts off `layer` on a worker, if it does not go by factors.
pub(crate) fn syncers(cluster: &Cluster, plan: &Plan, layer: LayerId) -> Vec<Syncer> {
    let lanes = cluster.lane_ids().filter(|_| plan.factors(layer).is_none());
    lanes.map(|lane| Syncer::new(plan, layer, lane)).filter(|syncer| !syncer.is_empty()).collect()
}

fn header(frame: &Frame, sender: NodeId, length: u32) -> Header {
    let Frame { kind, chunk, clock, .. } = *frame;
    Header { kind, sender, chunk, value: 0.0, clock: Clock(clock.into()), length }
}

/// Nodes here run the same code over a network that loses nothing: a violation is a bug of the
/// simulator or of core.
fn lawful<T>(judged: Result<T, Violation>) -> T {
    judged.unwrap_or_else(|violation| panic!("simulated nodes keep the rules: {violation}"))
}
