//! The loop: workers compute, nodes answer, the fabric carries, time passes.

use crate::Error;
use crate::calendar::{Calendar, Event, Time};
use crate::copies::{CopyOrder, LayerCopies};
use crate::fabric::{Done, Fabric};
use crate::flat::Flat;
use crate::node::{JobFacts, Landed, Node};
use crate::outcome::{Halt, LayerTimeline, Rebuilt};
use crate::peers::Peers;
use crate::rebuild::Sent;
use crate::setup::Setup;
use crate::worker::{Next, Program, Worker};
use poseidon_core::wire::Kind;
use poseidon_core::{Clock, Cluster, LayerId, LayerKind, NodeId, Tree};
use std::time::Duration;

/// A simulation under way, and afterwards what is to be measured.
pub(crate) struct Engine<'a> {
    pub(crate) setup: &'a Setup,
    pub(crate) facts: JobFacts<'a>,
    pub(crate) program: Program,
    pub(crate) fabric: Fabric,
    pub(crate) workers: Vec<Worker>,
    pub(crate) calendar: Calendar,
    nodes: Vec<Node>,
    /// What worker 0 saw of every layer in [`Self::watched`], in seconds since the beginning.
    pub(crate) timeline: Vec<LayerTimeline>,
}

impl<'a> Engine<'a> {
    pub(crate) fn new(setup: &'a Setup) -> Result<Self, Error> {
        let plan = setup.plan();
        let ids = || (0..setup.layers.len() as u32).map(LayerId);
        for (key, _) in plan.all_chunks() {
            let bytes = plan.payload(key, Kind::Push).max(plan.payload(key, Kind::Update));
            if bytes > MAX_PAYLOAD {
                let layer = setup.layers[key.layer.index()].name.clone();
                return Err(Error::FrameTooLong { layer, bytes });
            }
        }
        let payload = |layer| setup.adam_push(layer).map(|bytes| bytes as u32);
        let copies = LayerCopies::of_layers(setup, &plan);
        // Between two hosts chunks begin one after the other.
        let two_hosts = plan.tree().workers_by_host().len() == 2;
        let takes_turns = two_hosts && ids().all(|layer| payload(layer).is_none());
        let is_flat = plan.tree().is_flat() && !setup.cluster.is_ring() && !takes_turns;
        let flat = is_flat.then(|| Flat::new(&plan, &setup.cluster, &copies, payload));
        let mut workers = Peers::none(setup.cluster.nodes());
        setup.cluster.worker_ids().for_each(|worker| workers.insert(worker.index()));
        let facts = JobFacts {
            cluster: &setup.cluster,
            layers: &setup.layers,
            rows: ids().map(|layer| setup.factor_rows(layer)).collect(),
            copies,
            flat,
            hosts: hosts(&setup.cluster),
            places: Tree::new(&setup.cluster),
            workers,
            plan,
        };
        let rebuild = ids().map(|layer| {
            // The worker's own rows are in its backward pass.
            let rows = setup.factor_rows(layer) * (setup.cluster.workers() - 1);
            match (facts.plan.factors(layer), setup.layers[layer.index()].kind, setup.rebuild_rate)
            {
                (Some(_), LayerKind::Fc { m, n }, Some(rate)) => {
                    2.0 * (m * n) as f64 * rows as f64 / rate
                }
                _ => 0.0,
            }
        });
        let program = Program::new(setup, rebuild.collect());
        let nodes = setup.cluster.node_ids().map(|id| Node::new(&facts, id)).collect();
        let stragglers = &setup.stragglers;
        let workers = setup.cluster.worker_ids();
        let workers = workers.map(|rank| Worker::new(&program, rank, stragglers, setup.seed));
        Ok(Self {
            workers: workers.collect(),
            nodes,
            facts,
            program,
            fabric: Fabric::new(setup),
            calendar: Calendar::default(),
            timeline: vec![LayerTimeline::default(); setup.layers.len()],
            setup,
        })
    }

    /// Runs until nothing is left to do. Returns why that was too early, if it was.
    pub(crate) fn run(&mut self) -> Option<Halt> {
        for failure in &self.setup.failures {
            let at = Time::from_seconds(failure.at.as_secs_f64());
            self.calendar.enter(at, Event::Failed(failure.node.0));
        }
        for worker in self.setup.cluster.worker_ids() {
            self.go_on(worker);
        }
        while let Some(event) = self.calendar.next() {
            match event {
                Event::Computed(worker) => {
                    self.go_on(NodeId(worker));
                    continue;
                }
                Event::Rebuilt(worker) => {
                    self.handle_rebuilt(NodeId(worker));
                    continue;
                }
                Event::CopiedOut(worker) => {
                    self.handle_copied_out(NodeId(worker));
                    continue;
                }
                Event::CopiedBack(worker) => {
                    self.handle_copied_back(NodeId(worker));
                    continue;
                }
                Event::Turn(node) => {
                    self.take_turn(NodeId(node));
                    continue;
                }
                _ => {}
            }
            match self.fabric.handle(event, &mut self.calendar) {
                Done::Nothing => {}
                Done::Sent { from, frame, last } => {
                    let (layer, clock) = (frame.chunk.layer.index(), frame.clock.into());
                    if self.watches(from, clock) && frame.lent {
                        self.timeline[layer].sent = self.calendar.now().seconds();
                    }
                    let node = &mut self.nodes[from.index()];
                    if last && node.handle_sent(&self.facts, &frame) {
                        self.handle_back(from, layer, clock);
                    }
                    self.copy_back(from);
                    self.fabric.pump(from, &mut self.calendar);
                }
                Done::Landed { from, to, frame } => {
                    let now = self.now();
                    let fabric = &mut self.fabric;
                    let back = self.nodes[to.index()].handle_frame(
                        &self.facts,
                        from,
                        &frame,
                        now,
                        &mut |multicast| fabric.enqueue(to, multicast),
                    );
                    self.fabric.pump(to, &mut self.calendar);
                    self.expect_turn(to);
                    self.copy_back(to);
                    if back {
                        self.handle_back(to, frame.chunk.layer.index(), frame.clock.into());
                    }
                }
            }
        }
        let unfinished = self.workers.iter().any(|worker| !worker.is_done());
        unfinished.then(|| self.halt())
    }

    /// The step of worker 0 that the timeline is about: the last that is followed by another.
    pub(crate) fn watched(&self) -> u64 {
        (self.setup.iterations as u64 - 1).max(1)
    }

    fn watches(&self, node: NodeId, step: u64) -> bool {
        node == NodeId(0) && step == self.watched()
    }

    fn now(&self) -> Duration {
        Duration::from_secs_f64(self.calendar.now().seconds())
    }

    /// A layer is back: it is rebuilt now, or its worker may go on.
    fn handle_back(&mut self, node: NodeId, layer: usize, clock: u64) {
        let now = self.calendar.now();
        let worker = &mut self.workers[node.index()];
        let waited = worker.end_wait(layer, now);
        if let Some(waited) = waited {
            worker.waited[worker.step as usize] += waited;
        }
        if self.watches(node, clock) {
            let seen = &mut self.timeline[layer];
            (seen.landed, seen.applied) = (now.seconds(), now.seconds());
            seen.awaited += waited.unwrap_or(0.0);
        }
        self.rebuild(node);
        if waited.is_some() {
            self.go_on(node); // and wait again, if its second processor has begun with the layer
        }
    }

    /// A worker's second processor has rebuilt a gradient.
    fn handle_rebuilt(&mut self, node: NodeId) {
        let now = self.calendar.now();
        let worker = &mut self.workers[node.index()];
        let rebuilt = worker.rebuilder.handle_rebuilt();
        let waited = rebuilt.and_then(|sent| worker.end_wait(sent.layer, now));
        if let Some(waited) = waited {
            worker.rebuilt[worker.step as usize] += waited;
        }
        self.rebuild(node);
        if waited.is_some() {
            self.go_on(node);
        }
    }

    /// Lets a worker's second processor begin with what it can.
    fn rebuild(&mut self, id: NodeId) {
        let node = &self.nodes[id.index()];
        let rebuilder = &mut self.workers[id.index()].rebuilder;
        if let Some(sent) = rebuilder.poll_begin(|layer| !node.is_in_flight(layer)) {
            let end = self.note_rebuilding(id, sent, true);
            self.calendar.enter(end, Event::Rebuilt(id.0));
        }
    }

    /// A gradient is being rebuilt from now on. Returns until when.
    fn note_rebuilding(&mut self, node: NodeId, sent: Sent, beside: bool) -> Time {
        let now = self.calendar.now();
        let end = now + Time::from_seconds(self.program.rebuild[sent.layer]);
        if self.watches(node, sent.clock) {
            let seen = &mut self.timeline[sent.layer];
            seen.rebuilt = Some(Rebuilt { start: now.seconds(), beside });
            seen.applied = end.seconds();
        }
        end
    }

    /// Lets a worker compute until it has to wait.
    fn go_on(&mut self, id: NodeId) {
        if !self.fabric.is_alive(id) {
            return;
        }
        loop {
            let now = self.calendar.now();
            let node = &mut self.nodes[id.index()];
            let worker = &mut self.workers[id.index()];
            let step = worker.step;
            match worker.advance(&self.program, now, |layer| node.is_in_flight(layer)) {
                Next::Compute(0.0) => {}
                Next::Compute(seconds) => {
                    let end = now + Time::from_seconds(seconds);
                    self.calendar.enter(end, Event::Computed(id.0));
                    return;
                }
                Next::Rebuild(sent) => {
                    let end = self.note_rebuilding(id, sent, false);
                    self.calendar.enter(end, Event::Computed(id.0));
                    return;
                }
                Next::Wait(layer) => {
                    worker.waiting = Some((now, layer));
                    return;
                }
                Next::Stop => return,
                Next::Send(layer) => {
                    node.begin(&self.facts, LayerId(layer as u32));
                    if self.watches(id, step) {
                        self.timeline[layer].ready = now.seconds();
                    }
                    if self.setup.copies.is_some() {
                        self.copy_out(id, layer, step);
                        continue;
                    }
                    self.send(id, layer, 0, step);
                    if self.watches(id, step) && !self.nodes[id.index()].is_in_flight(layer) {
                        let seen = &mut self.timeline[layer];
                        (seen.sent, seen.landed) = (seen.ready, seen.ready);
                        seen.applied = seen.ready;
                    }
                }
            }
        }
    }

    /// A piece of a worker's layer is in its host's memory and goes out.
    fn send(&mut self, id: NodeId, layer: usize, piece: usize, clock: u64) {
        let (now, fabric) = (self.now(), &mut self.fabric);
        self.nodes[id.index()].send(
            &self.facts,
            (LayerId(layer as u32), piece),
            Clock(clock),
            now,
            &mut |multicast| fabric.enqueue(id, multicast),
        );
        self.fabric.pump(id, &mut self.calendar);
        self.expect_turn(id);
    }

    /// Chunks that wait at a node may begin now.
    fn take_turn(&mut self, id: NodeId) {
        let (now, fabric) = (self.now(), &mut self.fabric);
        if !fabric.is_alive(id) {
            return;
        }
        let sink = &mut |multicast| fabric.enqueue(id, multicast);
        self.nodes[id.index()].handle_turn(&self.facts, now, sink);
        self.fabric.pump(id, &mut self.calendar);
        self.expect_turn(id);
    }

    /// Looks at a node again when more may begin, even if nothing comes.
    fn expect_turn(&mut self, id: NodeId) {
        if let Some(at) = self.nodes[id.index()].poll_turn() {
            let at = Time::from_seconds(at.as_secs_f64()).max(self.calendar.now());
            self.calendar.enter(at, Event::Turn(id.0));
        }
    }

    /// Tells a worker's copy engine to bring a layer to the host.
    fn copy_out(&mut self, id: NodeId, layer: usize, clock: u64) {
        let Some([out, _]) = &mut self.workers[id.index()].copies else { return };
        for (piece, number) in self.facts.copies[layer].pieces.iter().zip(0..) {
            out.handle_order(CopyOrder { layer, clock, piece: number, bytes: piece.bytes });
        }
        if self.watches(id, clock) {
            // For a layer that is sent to nobody.
            self.timeline[layer].sent = self.calendar.now().seconds();
        }
        self.begin_copies(id);
    }

    /// Tells a worker's copy engine to bring to the device what has come.
    fn copy_back(&mut self, id: NodeId) {
        if self.setup.copies.is_none() {
            return;
        }
        let landed = self.nodes[id.index()].poll_landed();
        // Servers without a worker have no device, and nothing lands for them.
        let Some(Some([_, back])) = self.workers.get_mut(id.index()).map(|w| &mut w.copies) else {
            return;
        };
        for Landed { layer, clock, bytes } in landed {
            back.handle_order(CopyOrder { layer, clock, piece: 0, bytes });
        }
        self.begin_copies(id);
    }

    fn begin_copies(&mut self, id: NodeId) {
        let Some(engines) = &mut self.workers[id.index()].copies else { return };
        let events = [Event::CopiedOut(id.0), Event::CopiedBack(id.0)];
        for (engine, event) in engines.iter_mut().zip(events) {
            if let Some(duration) = engine.poll_begin() {
                self.calendar.enter(self.calendar.now() + duration, event);
            }
        }
    }

    /// A piece of a worker's layer is in its host's memory.
    fn handle_copied_out(&mut self, id: NodeId) {
        let Some([out, _]) = &mut self.workers[id.index()].copies else { return };
        let CopyOrder { layer, piece, clock, .. } = out.handle_copied();
        if self.fabric.is_alive(id) {
            self.send(id, layer, piece, clock);
            self.begin_copies(id);
            self.copy_back(id);
        }
    }

    /// A result is on a worker's device.
    fn handle_copied_back(&mut self, id: NodeId) {
        let Some([_, back]) = &mut self.workers[id.index()].copies else { return };
        let CopyOrder { layer, clock, .. } = back.handle_copied();
        self.begin_copies(id);
        let node = &mut self.nodes[id.index()];
        if node.handle_copied(&self.facts, LayerId(layer as u32)) {
            self.handle_back(id, layer, clock);
        }
    }

    /// Who waits for whom, first those who wait for a node that is silent.
    fn halt(&self) -> Halt {
        let alive = |node: NodeId| self.fabric.is_alive(node);
        let failed: Vec<_> = self.setup.cluster.node_ids().filter(|node| !alive(*node)).collect();
        let living = self.nodes.iter().zip(self.setup.cluster.node_ids());
        let mut waits = Vec::new();
        for (node, _) in living.filter(|(_, id)| alive(*id)) {
            let mut own = node.waits(&self.facts);
            own.sort_by_key(|wait| alive(wait.awaits));
            waits.extend(own.into_iter().take(1));
        }
        waits.sort_by_key(|wait| (alive(wait.awaits), wait.node));
        waits.truncate(MAX_WAITS);
        Halt { at: self.calendar.now().seconds(), failed, waits }
    }
}

/// By host: its nodes. `None` if every node has a host of its own.
fn hosts(cluster: &Cluster) -> Option<Vec<Peers>> {
    let last =
        cluster.hosts().iter().max().filter(|last| usize::from(**last) + 1 < cluster.nodes())?;
    let mut hosts = vec![Peers::none(cluster.nodes()); usize::from(*last) + 1];
    for (node, host) in cluster.hosts().iter().enumerate() {
        hosts[usize::from(*host)].insert(node);
    }
    Some(hosts)
}

/// Who waits in vain is named, but not 1,024 times.
const MAX_WAITS: usize = 32;
/// What the length of a frame can say.
const MAX_PAYLOAD: usize = u32::MAX as usize - 64;
