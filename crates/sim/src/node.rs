//! What one node holds: core's syncers, gatherers and shards, in the place of a session's lanes.

use crate::copies::{Back, LayerCopies};
use crate::flat::{Flat, Push, syncers};
use crate::multicast::{Frame, Multicast, Part};
use crate::outcome::Wait;
use crate::peers::Peers;
use poseidon_core::queue::urgency;
use poseidon_core::store::{Completed, Outcome, Way};
use poseidon_core::wire::{Header, Kind};
use poseidon_core::{
    Admission, ChunkKey, Clock, Cluster, Gather, Layer, LayerId, NodeId, Plan, Route, Shard, Store,
    Syncer, Tree, Violation,
};
use std::rc::Rc;
use std::time::Duration;

/// What all nodes know about the job.
pub(crate) struct JobFacts<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) layers: &'a [Layer],
    pub(crate) plan: Plan,
    pub(crate) workers: Peers,
    /// By layer: rows of factors.
    pub(crate) rows: Vec<usize>,
    /// By layer: what is copied between a worker's device and its host.
    pub(crate) copies: Vec<LayerCopies>,
    /// `None` if contributions are added up inside hosts or racks.
    pub(crate) flat: Option<Flat>,
    /// By host: its nodes. `None` if every node has a host of its own.
    pub(crate) hosts: Option<Vec<Peers>>,
    /// Which hosts nodes are on. The plan has a tree of its own, which knows of no hosts where
    /// workers may be at different clocks: nobody collects for others then.
    pub(crate) places: Tree,
}

pub(crate) struct Node {
    id: NodeId,
    /// By lane; none if the node is not a server and collects for none.
    stores: Vec<Store>,
    /// None if the node is not a worker.
    layers: Vec<Tracked>,
    completed: Vec<Completed>,
    /// By lane: chunks that begin here.
    beginnings: Vec<Admission<Beginning>>,
    /// When the node is looked at again because of them.
    turn: Option<Duration>,
    landed: Vec<Landed>,
}

/// What a node sends of a chunk that begins there.
enum Beginning {
    /// The contribution of its worker, at a clock.
    Own(ChunkKey, Clock),
    /// The sum of its host's workers.
    Sum(Completed),
}

/// What is in the host's memory and has to be copied to the worker's device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Landed {
    pub(crate) layer: usize,
    pub(crate) clock: u64,
    pub(crate) bytes: usize,
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
    /// Pieces that are not in the host's memory yet.
    leaving: u32,
    /// Copies to the device that are not done.
    returning: u32,
    /// Whether all workers' rows are still to be given to the copy engine.
    awaits_rows: bool,
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

    fn peers<'n>(&self, nodes: impl IntoIterator<Item = &'n NodeId>) -> Peers {
        let mut peers = Peers::none(self.cluster.nodes());
        nodes.into_iter().for_each(|node| peers.insert(node.index()));
        peers
    }

    /// The nodes that have what goes along `route` from `node`.
    fn receivers(&self, node: NodeId, route: Route) -> Peers {
        match &self.flat {
            // Only the root sends.
            Some(_) => self.workers_but(node),
            None => self.peers(&self.plan.tree().receivers(node, route)),
        }
    }

    /// The lane that has `chunk`.
    fn lane(&self, chunk: ChunkKey) -> usize {
        self.plan.shard(chunk).map_or(0, |shard| shard.lane.index())
    }

    /// The way of a frame of factors.
    fn route(&self, frame: &Frame) -> Option<Route> {
        self.plan.factors(frame.chunk.layer)?.route(frame.chunk.index)
    }

    /// What has come to `node` goes on along `route` to the nodes that have it from this one.
    /// Returns the number of multicasts. Links read them from the worker's memory.
    fn pass_on(
        &self,
        node: NodeId,
        frame: &Frame,
        route: Option<Route>,
        sink: &mut FrameSink<'_>,
    ) -> u32 {
        let Some(route) = route.filter(|_| self.flat.is_none()) else { return 0 };
        let frame = Frame { lent: true, ..*frame };
        self.multicast(node, (frame, None), self.receivers(node, route), sink)
    }

    /// Gives `sink` what `from` sends to `peers`: a multicast for the peers on other hosts, and one
    /// for those on its own, whom it reaches through memory. Returns the number of multicasts.
    fn multicast(
        &self,
        from: NodeId,
        (frame, parts): (Frame, Option<&Rc<Vec<Part>>>),
        mut peers: Peers,
        sink: &mut FrameSink<'_>,
    ) -> u32 {
        let host = self.hosts.as_ref().map(|hosts| &hosts[usize::from(self.places.host(from))]);
        let near = host.map(|host| peers.take(host));
        let mut count = 0;
        for peers in [Some(peers), near].into_iter().flatten().filter(|peers| !peers.is_empty()) {
            sink(Multicast { frame, parts: parts.cloned(), peers });
            count += 1;
        }
        count
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
        let syncers = |layer: LayerId| match &facts.flat {
            Some(flat) => flat.syncers[layer.index()].clone(),
            None => syncers(&facts.plan, facts.cluster, id, layer),
        };
        let tracked = |layer: LayerId| Tracked {
            syncers: syncers(layer),
            gathers: gathers(layer),
            unsent: 0,
            leaving: 0,
            returning: 0,
            awaits_rows: false,
            in_flight: false,
        };
        Self {
            id,
            stores: lanes().filter(|_| server || facts.flat.is_none()).map(store).collect(),
            layers: layers.map(tracked).collect(),
            completed: Vec::new(),
            beginnings: lanes().map(|_| Admission::new(facts.cluster, id)).collect(),
            turn: None,
            landed: Vec::new(),
        }
    }

    /// Whether `layer` has been sent and has not come back.
    pub(crate) fn is_in_flight(&self, layer: usize) -> bool {
        self.layers[layer].in_flight
    }

    /// The worker's gradient of `layer`, or its factors, are there: on its device, if it has one.
    pub(crate) fn begin(&mut self, facts: &JobFacts<'_>, layer: LayerId) {
        let LayerCopies { pieces, back } = &facts.copies[layer.index()];
        let tracked = &mut self.layers[layer.index()];
        tracked.in_flight = true;
        tracked.leaving = pieces.len() as u32;
        (tracked.returning, tracked.awaits_rows) = match back {
            Back::Nothing => (0, false),
            Back::Chunks(count) => (*count, false),
            Back::Rows(_) => (1, true),
        };
    }

    /// The next piece of the worker's gradient of `layer`, or its factors, is in the host's memory and
    /// goes out.
    pub(crate) fn send(
        &mut self,
        facts: &JobFacts<'_>,
        (layer, piece): (LayerId, usize),
        clock: Clock,
        now: Duration,
        sink: &mut FrameSink<'_>,
    ) {
        let at = layer.index();
        let (me, clocked) = (self.id, clock.0 as u32);
        let chunks = &facts.copies[at].pieces[piece].chunks;
        let tracked = &mut self.layers[at];
        tracked.leaving -= 1;
        for gather in &mut tracked.gathers {
            let chunks = gather.handle_send(clock, facts.rows[at], 0.0, false);
            for (chunk, range) in chunks.expect("all workers have the same rate") {
                let payload = facts.plan.encodings(layer).up.bytes(range.len()) as u32;
                let frame =
                    Frame { kind: Kind::Factors, chunk, clock: clocked, payload, lent: true };
                let Some(route) = facts.route(&frame) else { continue };
                let peers = facts.receivers(me, route);
                tracked.unsent += facts.multicast(me, (frame, None), peers, sink);
            }
        }
        let mut own = Vec::new();
        let push =
            |chunk, payload| Frame { kind: Kind::Push, chunk, clock: clocked, payload, lent: true };
        for syncer in &mut tracked.syncers {
            if piece == 0 {
                syncer.handle_send(clock);
            }
            let parts = syncer.parts().iter().filter(|_| facts.flat.is_none());
            for part in parts.filter(|part| chunks.contains(&part.key.index)) {
                if part.collects {
                    own.push(part.key);
                    continue;
                }
                let payload = facts.plan.payload(part.key, Kind::Push);
                if part.begins {
                    let lane = facts.lane(part.key);
                    let order = urgency(Kind::Push, layer);
                    let beginning = Beginning::Own(part.key, clock);
                    self.beginnings[lane].handle_ready(order, payload, beginning);
                    continue;
                }
                let frame = push(part.key, payload as u32);
                let peers = facts.peers([&part.up]);
                tracked.unsent += facts.multicast(me, (frame, None), peers, sink);
            }
        }
        for Push { servers, parts } in facts.flat.iter().flat_map(|flat| &flat.pushes[at][piece]) {
            let mut peers = servers.clone();
            let mut chunk = ChunkKey { layer, index: 0 };
            if peers.contains(me.index()) {
                peers.remove(me.index());
                chunk.index = parts[me.index()].index;
                own.push(chunk);
            }
            tracked.unsent += facts.multicast(me, (push(chunk, 0), Some(parts)), peers, sink);
        }
        for chunk in own {
            self.contribute(facts, self.id, chunk, clock, now);
        }
        self.poll_completed(facts, now, sink);
        self.finish_if_done(facts, layer);
    }

    /// Chunks that wait here may begin now.
    pub(crate) fn handle_turn(
        &mut self,
        facts: &JobFacts<'_>,
        now: Duration,
        sink: &mut FrameSink<'_>,
    ) {
        self.turn = None;
        self.poll_beginnings(facts, now, sink);
    }

    /// When the node is to be [looked at](Self::handle_turn) again, if that was not said before.
    pub(crate) fn poll_turn(&mut self) -> Option<Duration> {
        let next = self.beginnings.iter().filter_map(Admission::wake).min();
        let next = next.filter(|next| self.turn.is_none_or(|turn| *next < turn))?;
        self.turn = Some(next);
        Some(next)
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
                let route = facts.route(frame);
                tracked.unsent += facts.pass_on(self.id, frame, route, sink);
                self.finish_if_done(facts, chunk.layer)
            }
            Kind::Update => {
                let header = header(frame, from, frame.payload);
                let tracked = &mut self.layers[layer];
                let syncer = tracked.syncers.iter_mut().find_map(|syncer| {
                    match syncer.handle_update(&header) {
                        Err(Violation::UnknownChunk) => None,
                        judged => Some(judged.map(|_| syncer)),
                    }
                });
                let syncer = lawful(syncer.unwrap_or(Err(Violation::UnknownChunk)));
                let part = syncer.part(chunk.index).filter(|part| part.passes_on);
                tracked.unsent += facts.pass_on(self.id, frame, part.map(|part| part.route), sink);
                let last = syncer.handle_landed(chunk.index);
                self.note_landed(facts, chunk, clock);
                self.note_back(facts, chunk);
                self.poll_beginnings(facts, now, sink);
                last && self.finish_if_done(facts, chunk.layer)
            }
            _ => {
                self.contribute(facts, from, chunk, clock, now);
                self.poll_completed(facts, now, sink)
            }
        }
    }

    /// A link has taken the whole of a multicast. True if that was what the worker waited for.
    pub(crate) fn handle_sent(&mut self, facts: &JobFacts<'_>, frame: &Frame) -> bool {
        if !frame.lent {
            return false;
        }
        let tracked = &mut self.layers[frame.chunk.layer.index()];
        tracked.unsent -= 1;
        self.finish_if_done(facts, frame.chunk.layer)
    }

    /// A result of `layer` is on the worker's device. True if that was what the worker waited for.
    pub(crate) fn handle_copied(&mut self, facts: &JobFacts<'_>, layer: LayerId) -> bool {
        self.layers[layer.index()].returning -= 1;
        self.finish_if_done(facts, layer)
    }

    /// What has to be copied to the worker's device, first come first. To be asked after every call
    /// that may change it.
    pub(crate) fn poll_landed(&mut self) -> impl Iterator<Item = Landed> + '_ {
        self.landed.drain(..)
    }

    /// What the worker and the shards of this node wait for.
    pub(crate) fn waits(&self, facts: &JobFacts<'_>) -> Vec<Wait> {
        let wait = |chunk: ChunkKey, awaits, clock| {
            let layer = facts.layers[chunk.layer.index()].name.clone();
            Wait { node: self.id, awaits, layer, chunk, clock }
        };
        let mut waits = Vec::new();
        for syncer in self.layers.iter().flat_map(|layer| &layer.syncers) {
            waits.extend(syncer.missing().map(|p| wait(p.key, p.from, syncer.clock())));
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

    /// A contribution to a chunk that this node holds or collects is all there.
    fn contribute(
        &mut self,
        facts: &JobFacts<'_>,
        from: NodeId,
        chunk: ChunkKey,
        clock: Clock,
        now: Duration,
    ) {
        let length = facts.plan.payload(chunk, Kind::Push) as u32;
        let header = Header { chunk, clock, ..Header::bare(Kind::Push, from, length) };
        let store = &mut self.stores[facts.lane(chunk)];
        let loan = match from == self.id {
            true => lawful(store.handle_loan(&header, now)),
            false => None,
        };
        let contribution = loan.unwrap_or_else(|| lawful(store.handle_push(&header, now)));
        self.completed.extend(store.handle_contributed(contribution, None));
    }

    /// Sends on what is complete: sums to the node above, results to those who have contributed.
    /// True if a layer of this node's worker is back by it.
    fn poll_completed(
        &mut self,
        facts: &JobFacts<'_>,
        now: Duration,
        sink: &mut FrameSink<'_>,
    ) -> bool {
        let mut back = false;
        let stores = self.stores.iter_mut();
        self.completed.extend(stores.flat_map(|store| std::iter::from_fn(|| store.poll_answer())));
        while let Some(completed) = self.completed.pop() {
            let key = completed.key;
            match (completed.way, self.bytes_begun(facts, key)) {
                (Way::Up { kind, .. }, Some(bytes)) => {
                    let (order, sum) = (urgency(kind, key.layer), Beginning::Sum(completed));
                    self.beginnings[facts.lane(key)].handle_ready(order, bytes, sum);
                }
                _ => back |= self.send_completed(facts, completed, sink),
            }
        }
        self.poll_beginnings(facts, now, sink);
        back
    }

    /// Sends what may begin now.
    fn poll_beginnings(&mut self, facts: &JobFacts<'_>, now: Duration, sink: &mut FrameSink<'_>) {
        for lane in 0..self.beginnings.len() {
            while let Some(beginning) = self.beginnings[lane].poll_begin(now) {
                match beginning {
                    Beginning::Own(chunk, clock) => {
                        let tracked = &mut self.layers[chunk.layer.index()];
                        let part = tracked.syncers.iter().find_map(|s| s.part(chunk.index));
                        let peers = facts.peers(part.map(|part| &part.up));
                        let payload = facts.plan.payload(chunk, Kind::Push) as u32;
                        let clock = clock.0 as u32;
                        let frame = Frame { kind: Kind::Push, chunk, clock, payload, lent: true };
                        tracked.unsent += facts.multicast(self.id, (frame, None), peers, sink);
                    }
                    Beginning::Sum(completed) => drop(self.send_completed(facts, completed, sink)),
                }
            }
        }
    }

    /// What a chunk that begins here has to send. `None` if it does not.
    fn bytes_begun(&self, facts: &JobFacts<'_>, chunk: ChunkKey) -> Option<usize> {
        let tracked = self.layers.get(chunk.layer.index()).filter(|_| facts.flat.is_none())?;
        let part = tracked.syncers.iter().find_map(|syncer| syncer.part(chunk.index))?;
        part.begins.then(|| facts.plan.payload(chunk, Kind::Push))
    }

    /// The result of `chunk` is back: if it has begun here, another one may.
    fn note_back(&mut self, facts: &JobFacts<'_>, chunk: ChunkKey) {
        if let Some(bytes) = self.bytes_begun(facts, chunk) {
            self.beginnings[facts.lane(chunk)].handle_back(bytes);
        }
    }

    /// True if a layer of this node's worker is back by it.
    fn send_completed(
        &mut self,
        facts: &JobFacts<'_>,
        Completed { key, clock, way, result, .. }: Completed,
        sink: &mut FrameSink<'_>,
    ) -> bool {
        let lent = matches!(result, Outcome::Lent);
        let (mut back, lane) = (false, facts.lane(key));
        // A dedicated server tracks no layers.
        let tracked = self.layers.get_mut(key.layer.index());
        let (kind, peers) = match (way, &tracked) {
            (Way::Up { kind, .. }, Some(tracked)) => {
                let part = tracked.syncers.iter().find_map(|syncer| syncer.part(key.index));
                (kind, facts.peers(part.map(|part| &part.up)))
            }
            (Way::Up { .. }, None) => {
                unreachable!("workers collect for others, servers do not")
            }
            (Way::To(worker), _) => {
                let mut peers = facts.peers([&worker]);
                peers.remove(self.id.index());
                (Kind::Update, peers)
            }
            (Way::Down, _) if facts.flat.is_some() => (Kind::Update, facts.workers_but(self.id)),
            (Way::Down, _) => {
                let round = facts.plan.route(key).filter(|route| route.ring.takes_results());
                let peers = round.map(|route| facts.receivers(self.id, route));
                let mut peers =
                    peers.unwrap_or_else(|| facts.peers(self.stores[lane].contributors(key)));
                peers.remove(self.id.index());
                (Kind::Update, peers)
            }
        };
        let payload = facts.plan.payload(key, kind) as u32;
        let frame = Frame { kind, chunk: key, clock: clock.0 as u32, payload, lent };
        let multicasts = facts.multicast(self.id, (frame, None), peers, sink);
        if let Some(tracked) = tracked {
            tracked.unsent += if lent { multicasts } else { 0 };
            let mut syncers = tracked.syncers.iter_mut();
            let to_me = way == Way::Down || way == Way::To(self.id);
            let last = to_me && syncers.any(|s| s.handle_landed(key.index));
            if to_me {
                self.note_landed(facts, key, clock);
            }
            back |= last && self.finish_if_done(facts, key.layer);
        }
        if let Outcome::Held(sum) = result {
            self.stores[lane].release(sum);
        }
        back
    }

    /// A chunk's result is in the host's memory.
    fn note_landed(&mut self, facts: &JobFacts<'_>, chunk: ChunkKey, clock: Clock) {
        let layer = chunk.layer.index();
        if let Back::Chunks(_) = facts.copies[layer].back {
            let bytes = facts.plan.payload(chunk, Kind::Update);
            self.landed.push(Landed { layer, clock: clock.0, bytes });
        }
    }

    /// True if the layer has just come back: to the device, if the worker has one.
    fn finish_if_done(&mut self, facts: &JobFacts<'_>, layer: LayerId) -> bool {
        let at = layer.index();
        let tracked = &mut self.layers[at];
        if !tracked.has_landed() {
            return false;
        }
        if let Back::Rows(bytes) = facts.copies[at].back
            && std::mem::take(&mut tracked.awaits_rows)
        {
            let clock = tracked.gathers.first().map_or(0, |gather| gather.clock().0);
            self.landed.push(Landed { layer: at, clock, bytes });
        }
        tracked.in_flight = tracked.returning > 0;
        !tracked.in_flight
    }
}

impl Tracked {
    /// Whether all that is sent and received of the layer was.
    fn has_landed(&self) -> bool {
        self.in_flight
            && self.leaving == 0
            && self.unsent == 0
            && self.syncers.iter().all(Syncer::is_synced)
            && self.gathers.iter().all(Gather::is_gathered)
    }
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
