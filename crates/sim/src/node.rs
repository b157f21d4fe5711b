//! What one node holds: core's syncers, gatherers and shards, in the place of a session's lanes.

use crate::multicast::{Frame, Multicast, Part};
use crate::outcome::Wait;
use crate::peers::Peers;
use poseidon_core::store::{Completed, Outcome};
use poseidon_core::wire::{Header, Kind};
use poseidon_core::{
    ChunkKey, Clock, Cluster, Gather, Layer, LayerId, NodeId, Plan, Shard, Store, Syncer, Violation,
};
use std::rc::Rc;
use std::time::Duration;

/// What all nodes know about the job.
pub(crate) struct JobFacts<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) layers: &'a [Layer],
    pub(crate) plan: Plan,
    pub(crate) workers: Peers,
    /// By layer: the chunks that a worker pushes.
    pub(crate) pushes: Vec<Vec<Push>>,
    /// By layer: rows of factors.
    pub(crate) rows: Vec<usize>,
    /// By layer and lane: the syncer that every worker begins with.
    pub(crate) syncers: Vec<Vec<Syncer>>,
}

/// At most one chunk of a layer for each server.
pub(crate) struct Push {
    servers: Peers,
    /// By server: its chunk.
    parts: Rc<Vec<Part>>,
}

pub(crate) struct Node {
    id: NodeId,
    /// By lane; none if the node is not a server.
    stores: Vec<Store>,
    /// None if the node is not a worker.
    layers: Vec<Tracked>,
    completed: Vec<Completed>,
}

/// One layer of a worker: what is needed at once is in one cache line.
#[repr(align(64))]
struct Tracked {
    /// By lane, if the layer does not go by factors.
    syncers: Vec<Syncer>,
    /// By lane, if the layer goes by factors.
    gathers: Vec<Gather>,
    /// Multicasts that are still read from the worker's memory.
    unsent: u32,
    in_flight: bool,
}

/// Takes the frames that a node has for other nodes.
pub(crate) type FrameSink<'a> = dyn FnMut(Multicast) + 'a;

impl JobFacts<'_> {
    fn workers_but(&self, node: NodeId) -> Peers {
        let mut workers = self.workers.clone();
        workers.remove(node.index());
        workers
    }
}

impl Node {
    pub(crate) fn new(facts: &JobFacts<'_>, id: NodeId) -> Self {
        let role = facts.cluster.role(id);
        let (worker, server) = role.map_or((false, false), |role| (role.worker, role.server));
        let layers = (0..if worker { facts.layers.len() as u32 } else { 0 }).map(LayerId);
        let lanes = || facts.cluster.lane_ids();
        let shard = |lane| Shard { node: id, lane };
        let store = |lane| Store::ghost(&facts.plan, shard(lane));
        let gathers = |layer| match facts.plan.factors(layer) {
            Some(layout) => {
                layout.lanes().map(|lane| Gather::new(layer, layout, id, lane)).collect()
            }
            None => Vec::new(),
        };
        let tracked = |layer: LayerId| Tracked {
            syncers: facts.syncers[layer.index()].clone(),
            gathers: gathers(layer),
            unsent: 0,
            in_flight: false,
        };
        Self {
            id,
            stores: lanes().filter(|_| server).map(store).collect(),
            layers: layers.map(tracked).collect(),
            completed: Vec::new(),
        }
    }

    /// Whether `layer` has been sent and has not come back.
    pub(crate) fn is_in_flight(&self, layer: usize) -> bool {
        self.layers[layer].in_flight
    }

    /// The worker's gradient of `layer`, or its factors, go out.
    pub(crate) fn send(
        &mut self,
        facts: &JobFacts<'_>,
        layer: LayerId,
        clock: Clock,
        now: Duration,
        sink: &mut FrameSink<'_>,
    ) {
        let at = layer.index();
        let tracked = &mut self.layers[at];
        tracked.in_flight = true;
        for gather in &mut tracked.gathers {
            let chunks = gather.handle_send(clock, facts.rows[at], 0.0);
            for (chunk, range) in chunks.expect("all workers have the same rate") {
                let payload = (range.len() * size_of::<f32>()) as u32;
                let (kind, clock) = (Kind::Factors, clock.0 as u32);
                let frame = Frame { kind, chunk, clock, payload, lent: true };
                let peers = facts.workers_but(self.id);
                tracked.unsent += u32::from(!peers.is_empty());
                sink(Multicast { frame, parts: None, peers });
            }
        }
        for syncer in &mut tracked.syncers {
            syncer.handle_send(clock);
        }
        let mut own = Vec::new();
        for Push { servers, parts } in &facts.pushes[at] {
            let mut peers = servers.clone();
            let mut chunk = ChunkKey { layer, index: 0 };
            if peers.contains(self.id.index()) {
                peers.remove(self.id.index());
                chunk.index = parts[self.id.index()].index;
                own.push(chunk);
            }
            tracked.unsent += u32::from(!peers.is_empty());
            let (kind, clock) = (Kind::Push, clock.0 as u32);
            let frame = Frame { kind, chunk, clock, payload: 0, lent: true };
            sink(Multicast { frame, parts: Some(Rc::clone(parts)), peers });
        }
        for chunk in own {
            self.contribute(facts, self.id, chunk, clock, now);
        }
        self.poll_completed(facts, sink);
        self.layers[at].finish_if_done();
    }

    /// A frame has come. True if a layer that the worker may wait for is back.
    pub(crate) fn handle_frame(
        &mut self,
        facts: &JobFacts<'_>,
        from: NodeId,
        frame: &Frame,
        now: Duration,
        sink: &mut FrameSink<'_>,
    ) -> bool {
        let chunk = frame.chunk;
        let layer = chunk.layer.index();
        let clock = Clock(frame.clock.into());
        match frame.kind {
            Kind::Factors => {
                let header = header(frame, from, frame.payload);
                let tracked = &mut self.layers[layer];
                let gather = tracked.gathers.iter_mut().find_map(|gather| {
                    match gather.handle_factors(&header, facts.plan.tree()) {
                        Err(Violation::UnknownChunk) => None, // another lane's
                        judged => Some(judged.map(|_| gather)),
                    }
                });
                let gather = lawful(gather.unwrap_or(Err(Violation::UnknownChunk)));
                gather.handle_landed(chunk.index, clock);
                tracked.finish_if_done()
            }
            Kind::Update => {
                let header = header(frame, from, frame.payload);
                let tracked = &mut self.layers[layer];
                let landed = tracked.syncers.iter_mut().find_map(|syncer| {
                    match syncer.handle_update(&header) {
                        Err(Violation::UnknownChunk) => None,
                        judged => Some(judged.map(|_| syncer.handle_landed(chunk.index))),
                    }
                });
                lawful(landed.unwrap_or(Err(Violation::UnknownChunk))) && tracked.finish_if_done()
            }
            _ => {
                self.contribute(facts, from, chunk, clock, now);
                self.poll_completed(facts, sink)
            }
        }
    }

    /// A link has taken the whole of a multicast. True if that was what the worker waited for.
    pub(crate) fn handle_sent(&mut self, frame: &Frame) -> bool {
        if !frame.lent {
            return false;
        }
        let tracked = &mut self.layers[frame.chunk.layer.index()];
        tracked.unsent -= 1;
        tracked.finish_if_done()
    }

    /// What the worker and the shards of this node wait for.
    pub(crate) fn waits(&self, facts: &JobFacts<'_>) -> Vec<Wait> {
        let wait = |chunk: ChunkKey, awaits, clock| {
            let layer = facts.layers[chunk.layer.index()].name.clone();
            Wait { node: self.id, awaits, layer, chunk, clock }
        };
        let mut waits = Vec::new();
        for syncer in self.layers.iter().flat_map(|layer| &layer.syncers) {
            waits.extend(syncer.missing().map(|p| wait(p.key, p.up, syncer.clock())));
        }
        for gather in self.layers.iter().flat_map(|layer| &layer.gathers) {
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
        facts: &JobFacts<'_>,
        from: NodeId,
        chunk: ChunkKey,
        clock: Clock,
        now: Duration,
    ) {
        let length = (facts.plan.len(chunk) * size_of::<f32>()) as u32;
        let header = Header { chunk, clock, ..Header::bare(Kind::Push, from, length) };
        let lane = facts.plan.shard(chunk).map_or(0, |shard| shard.lane.index());
        let store = &mut self.stores[lane];
        let loan = match from == self.id {
            true => lawful(store.handle_loan(&header, now)),
            false => None,
        };
        let contribution = loan.unwrap_or_else(|| lawful(store.handle_push(&header, now)));
        self.completed.extend(store.handle_contributed(contribution, None));
    }

    /// Sends what is complete to everybody. True if a layer of this node's worker is back by it.
    fn poll_completed(&mut self, facts: &JobFacts<'_>, sink: &mut FrameSink<'_>) -> bool {
        let mut back = false;
        while let Some(Completed { key, clock, result, .. }) = self.completed.pop() {
            let payload = (facts.plan.len(key) * size_of::<f32>()) as u32;
            let lent = matches!(result, Outcome::Lent);
            let (kind, clock) = (Kind::Update, clock.0 as u32);
            let frame = Frame { kind, chunk: key, clock, payload, lent };
            let peers = facts.workers_but(self.id);
            // A dedicated server tracks no layers.
            if let Some(tracked) = self.layers.get_mut(key.layer.index()) {
                tracked.unsent += u32::from(lent && !peers.is_empty());
                let mut syncers = tracked.syncers.iter_mut();
                if syncers.any(|syncer| syncer.handle_landed(key.index)) {
                    back |= tracked.finish_if_done();
                }
            }
            sink(Multicast { frame, parts: None, peers });
            if let Outcome::Held(sum) = result {
                let lane = facts.plan.shard(key).map_or(0, |shard| shard.lane.index());
                self.stores[lane].release(sum);
            }
        }
        back
    }
}

impl Tracked {
    /// True if the layer has just come back.
    fn finish_if_done(&mut self) -> bool {
        let done = self.in_flight
            && self.unsent == 0
            && self.syncers.iter().all(Syncer::is_synced)
            && self.gathers.iter().all(Gather::is_gathered);
        if done {
            self.in_flight = false;
        }
        done
    }
}

/// What `syncers`, those of a layer, tell a worker to send; `payload` bytes a chunk, if it is not the
/// gradient.
pub(crate) fn pushes(cluster: &Cluster, syncers: &[Syncer], payload: Option<u32>) -> Vec<Push> {
    let nodes = cluster.nodes();
    let mut pushes: Vec<(Peers, Vec<Part>)> = Vec::new();
    let mut chunks = vec![0; nodes];
    for part in syncers.iter().flat_map(Syncer::parts) {
        let server = part.server().index();
        if chunks[server] == pushes.len() {
            pushes.push((Peers::none(nodes), vec![Part::default(); nodes]));
        }
        let (servers, parts) = &mut pushes[chunks[server]];
        chunks[server] += 1;
        servers.insert(server);
        let gradient = (part.range.len() * size_of::<f32>()) as u32;
        parts[server] = Part { index: part.key.index, payload: payload.unwrap_or(gradient) };
    }
    let push = |(servers, parts): (_, Vec<_>)| Push { servers, parts: Rc::new(parts) };
    pushes.into_iter().map(push).collect()
}

/// By lane: what counts off `layer` on a worker, if it does not go by factors. Every node has a host
/// of its own here, so results come to all workers from the same servers.
pub(crate) fn syncers(cluster: &Cluster, plan: &Plan, layer: LayerId) -> Vec<Syncer> {
    let lanes = cluster.lane_ids().filter(|_| plan.factors(layer).is_none());
    let syncer = |lane| Syncer::new(plan, NodeId(0), layer, lane);
    lanes.map(syncer).filter(|syncer| !syncer.is_empty()).collect()
}

fn header(frame: &Frame, sender: NodeId, length: u32) -> Header {
    let Frame { kind, chunk, clock, .. } = *frame;
    Header { chunk, clock: Clock(clock.into()), ..Header::bare(kind, sender, length) }
}

/// Nodes here run the same code over a network that loses nothing: a violation is a bug of the
/// simulator or of core.
fn lawful<T>(judged: Result<T, Violation>) -> T {
    judged.unwrap_or_else(|violation| panic!("simulated nodes keep the rules: {violation}"))
}
