//! Whole nodes without threads and sockets: every lane of every node in one loop, joined by
//! in-memory links, in virtual time. The same setup gives the same run, byte for byte.

mod tests;

use super::{Command, Parts, SessionLane};
use crate::Buffer;
use crate::Error;
use crate::engine::traffic::Counters;
use crate::engine::{Engine, Links, Next};
use crate::lane::board::Board;
use crate::lane::plan_state::PlanState;
use crate::memory::exchange::Exchange;
use poseidon_core::encoding::Block;
use poseidon_core::plan::Rules;
use poseidon_core::store::Order;
use poseidon_core::wire::{Kind, Terms};
use poseidon_core::{
    ChannelId, ChunkSize, Clock, Cluster, Encoding, Encodings, Epoch, LaneId, Layer, LayerId,
    NodeId, Optimizer, Plan, Reduction, Servers, Shard, Store,
};
use poseidon_link::Link;
use poseidon_link::memory::{Faults, Shape, VirtualClock, encrypted_pair, tagged_pair};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

const SILENCE: Duration = Duration::from_secs(15);
const STALL: Duration = Duration::from_secs(60);
/// Past this a run without faults is taken for stuck: its slowest link needs seconds.
const PATIENCE: Duration = Duration::from_secs(3600);

/// A job, and the seed of everything that is left to chance: links, thinking time, turns.
#[derive(Clone, Debug)]
struct Setup {
    seed: u64,
    workers: u16,
    servers: Servers,
    lanes: u16,
    /// By node, as [`Cluster::with_hosts`] wants it.
    hosts: Vec<u16>,
    /// By host.
    racks: Vec<u16>,
    layers: Vec<usize>,
    /// Layers take them in turn; `f32` if there are none.
    encodings: Vec<Encodings>,
    clocks: u64,
    deterministic: bool,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    /// Both ends of the link drawn by this number fail.
    Reset(u64),
    /// The link drawn by this number delivers nothing for so long.
    Stall(u64, Duration),
    /// The program of this worker is dropped.
    Abort(NodeId),
    /// A lane of this worker has failed, and the program gives up before the other lanes look.
    GiveUp(NodeId),
    /// This worker sends nothing any more.
    Mute(NodeId),
}

/// How a run went.
#[derive(Debug)]
struct Report {
    /// When the last lane stopped. `None`: some never did.
    ended: Option<Duration>,
    /// When the first worker said that it was finished.
    first_goodbye: Option<Duration>,
    /// What each node's board says.
    failures: Vec<Option<String>>,
    /// Names of the nodes at the ends of the link that was broken, or of the worker at fault.
    culprits: Vec<String>,
    /// Layers that came back, over all workers and clocks. Each was checked when it did.
    delivered: u64,
}

struct World {
    setup: Setup,
    clock: VirtualClock,
    cluster: Cluster,
    plan: Plan,
    /// Which lanes have something of a layer.
    holders: Vec<BTreeSet<LaneId>>,
    nodes: Vec<Node>,
    pipes: Vec<Pipe>,
    dice: Dice,
    report: Report,
}

struct Node {
    board: Arc<Board>,
    lanes: Vec<Option<Running>>,
    /// Workers only.
    program: Option<Program>,
}

struct Running {
    engine: Engine,
    commands: Sender<Command>,
    wake: Duration,
    /// The session is over here: the process ends then, whoever is still connected.
    ends: Option<Duration>,
}

struct Pipe {
    ends: [NodeId; 2],
    faults: Faults,
}

/// What a training program does: sends each layer, takes it back, checks it, thinks, sends again.
struct Program {
    layers: Vec<LayerRun>,
    mute: bool,
    finished: bool,
}

struct LayerRun {
    /// Clocks that came back.
    done: u64,
    in_flight: Option<Arc<Exchange>>,
    /// When the next gradient is ready.
    next: Duration,
}

/// A splitmix64 sequence.
struct Dice(u64);

impl Setup {
    /// Runs the job to its end, with `trouble` at the given time.
    fn run(&self, trouble: Option<(Duration, Trouble)>) -> Report {
        let mut world = World::new(self);
        let deadline = match trouble {
            Some((at, _)) => at + 2 * (SILENCE + STALL),
            None => PATIENCE,
        };
        let mut begins = trouble;
        let mut resumes: Option<(Duration, Faults)> = None;
        loop {
            let now = world.clock.now();
            if let Some((_, trouble)) = begins.take_if(|(at, _)| *at <= now) {
                resumes = world.break_something(trouble);
            }
            if let Some((_, link)) = resumes.take_if(|(at, _)| *at <= now) {
                link.resume();
            }
            world.settle();
            let timers = [begins.map(|(at, _)| at), resumes.as_ref().map(|(at, _)| *at)];
            let Some(next) = world.next_event(timers) else { break };
            if next > deadline {
                return world.into_report(None);
            }
            world.clock.advance(next - now);
        }
        let ended = world.clock.now();
        world.into_report(Some(ended))
    }

    /// Layers that come back in an undisturbed run, over all workers and clocks.
    fn results(&self) -> u64 {
        u64::from(self.workers) * self.clocks * self.layers.len() as u64
    }

    fn layers(&self) -> Arc<[Layer]> {
        let layers = self.layers.iter().enumerate();
        let layer = |(n, &len)| Layer::new(format!("layer{n}"), len).encoded(self.encodings(n));
        layers.map(layer).collect()
    }

    fn encodings(&self, layer: usize) -> Encodings {
        let count = self.encodings.len().max(1);
        self.encodings.get(layer % count).copied().unwrap_or_default()
    }

    /// What `rank` contributes. In rank order sums are checked bit by bit, so there they may depend
    /// on the order; otherwise they are exact whatever the order. Where numbers travel in two bytes,
    /// every sum of them is small enough for that.
    fn gradient(&self, rank: u16, layer: usize, clock: u64) -> impl Iterator<Item = f32> {
        let deterministic = self.deterministic;
        let whole = self.encodings(layer) == Encodings::default();
        (0..self.layers[layer]).map(move |i| {
            let plain = usize::from(rank) * 7 + layer * 3 + i % 101 + clock as usize;
            match (whole, deterministic) {
                (true, true) => 10f32.powi(i32::from(rank) * 3) / (plain + 1) as f32,
                (true, false) => plain as f32,
                (false, _) => (plain % 16) as f32,
            }
        })
    }

    /// The sum of a layer: rack by rack, in each rack host by host, on each host rank by rank.
    fn sum(&self, layer: usize, clock: u64) -> Vec<f32> {
        let host = |rank: u16| self.hosts.get(usize::from(rank)).copied().unwrap_or(rank);
        let rack = |rank: u16| self.racks.get(usize::from(host(rank))).copied().unwrap_or(0);
        let gradient = |rank: u16| self.gradient(rank, layer, clock).collect();
        let ranks = |of_host: u16| (0..self.workers).filter(move |rank| host(*rank) == of_host);
        let in_order = |of: &dyn Fn(u16) -> u16, mut ranks: Vec<u16>| {
            let mut seen = BTreeSet::new();
            ranks.retain(|rank| seen.insert(of(*rank)));
            ranks
        };
        let all = (0..self.workers).collect();
        let racks = in_order(&rack, all).into_iter().map(|first| {
            let ranks_here = (0..self.workers).filter(|rank| rack(*rank) == rack(first)).collect();
            let hosts = in_order(&host, ranks_here).into_iter();
            total(hosts.map(|first| total(ranks(host(first)).map(gradient))))
        });
        total(racks)
    }
}

/// `values` in memory of that type.
fn encoded(encoding: Encoding, values: &[f32]) -> Buffer {
    let mut block = Block::zeroed(encoding, values.len());
    encoding.encode(values, block.bytes_mut().unwrap());
    match block {
        Block::Whole(values) => values.to_vec().into(),
        Block::Half(bits) => Buffer::from_bits(encoding, bits.to_vec()),
    }
}

/// One after the other, the first one first.
fn total(sums: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
    let add = |mut sum: Vec<f32>, more: Vec<f32>| {
        sum.iter_mut().zip(more).for_each(|(s, g)| *s += g);
        sum
    };
    sums.reduce(add).unwrap_or_default()
}

impl World {
    fn new(setup: &Setup) -> Self {
        let cluster = Cluster::new(setup.workers, setup.servers, setup.lanes).unwrap();
        let cluster = cluster.with_hosts(setup.hosts.clone(), setup.racks.clone()).unwrap();
        let size = ChunkSize { min: 4, max: 256 };
        let plan = Plan::new(&cluster, &setup.layers(), Rules { chunk: size, ..Rules::default() });
        let ids = (0..setup.layers.len() as u32).map(LayerId);
        let lanes_of = |layer| plan.layer_chunks(layer).map(|(_, shard)| shard.lane).collect();
        let holders = ids.map(lanes_of).collect();
        let mut world = Self {
            setup: setup.clone(),
            clock: VirtualClock::new(),
            nodes: Vec::new(),
            pipes: Vec::new(),
            dice: Dice(setup.seed),
            report: Report {
                ended: None,
                first_goodbye: None,
                failures: Vec::new(),
                culprits: Vec::new(),
                delivered: 0,
            },
            cluster,
            plan,
            holders,
        };
        let nodes: Vec<NodeId> = world.cluster.node_ids().collect();
        let lanes = usize::from(setup.lanes);
        let mut links: Vec<Vec<Links>> =
            nodes.iter().map(|_| (0..lanes).map(|_| Vec::new()).collect()).collect();
        for &a in &nodes {
            for &b in nodes.iter().filter(|&&b| b > a) {
                if !world.cluster.partners(a).contains(&b) {
                    continue;
                }
                for lane in world.cluster.lane_ids() {
                    let (clock, shape) = (world.clock.clone(), world.dice.shape());
                    let (to_b, to_a, faults): (Box<dyn Link>, Box<dyn Link>, _) =
                        if setup.seed.is_multiple_of(2) {
                            let (to_b, to_a) = tagged_pair(clock, shape);
                            let faults = to_b.faults();
                            (Box::new(to_b), Box::new(to_a), faults)
                        } else {
                            let (to_b, to_a, faults) = encrypted_pair(clock, shape);
                            (Box::new(to_b), Box::new(to_a), faults)
                        };
                    world.pipes.push(Pipe { ends: [a, b], faults });
                    links[a.index()][lane.index()].push((b, to_b));
                    links[b.index()][lane.index()].push((a, to_a));
                }
            }
        }
        for (&node, links) in nodes.iter().zip(links) {
            let started = world.start(node, links);
            world.nodes.push(started);
        }
        world
    }

    /// The one place that knows what nodes and lanes are made of.
    fn start(&mut self, me: NodeId, links: Vec<Links>) -> Node {
        let layers = self.setup.layers();
        let order = if self.setup.deterministic { Order::Rank } else { Order::Arrival };
        let role = self.cluster.role(me).unwrap();
        let board = Arc::new(Board::new(layers.len(), self.cluster.workers()));
        let counters = Arc::new(Counters::new(self.cluster.lanes().into(), layers.len()));
        let matrices = vec![None; layers.len()];
        let lane = |(lane, links): (LaneId, Links)| {
            let shard = Shard { node: me, lane };
            let optimizer = Optimizer::Reduce(Reduction::Sum);
            let store = Store::new(&self.plan, shard, |_| &optimizer, order);
            let (commands, taken) = channel();
            let (cluster, plan) = (&self.cluster, &self.plan);
            let part = SessionLane::new(Parts {
                id: ChannelId::FIRST,
                me,
                cluster: self.cluster.clone(),
                layers: layers.clone(),
                state: PlanState::new(shard, cluster, plan, store, &matrices, board.clone()),
                commands: taken,
                board: board.clone(),
                counters: counters.clone(),
                keeper: channel().0,
                stall: STALL,
                idle: PATIENCE,
            });
            let mut engine = Engine::new(me, self.cluster.nodes(), links, SILENCE, Duration::ZERO);
            engine.attach(Box::new(part), Duration::ZERO);
            Some(Running { engine, commands, wake: Duration::ZERO, ends: None })
        };
        let lanes = self.cluster.lane_ids().zip(links).map(lane).collect();
        let idle = |_: &usize| LayerRun { done: 0, in_flight: None, next: self.dice.pause() };
        let program = role.worker.then(|| Program {
            layers: self.setup.layers.iter().map(idle).collect(),
            mute: false,
            finished: false,
        });
        Node { board, lanes, program }
    }

    /// Runs everybody until nothing more can happen at this time.
    fn settle(&mut self) {
        let everybody: Vec<NodeId> = self.cluster.node_ids().collect();
        for turns in 0.. {
            assert!(turns < 1_000_000, "the lanes are busy without getting anywhere");
            let before = self.bytes();
            let first = self.dice.below(everybody.len() as u64) as usize;
            let mut busy = false;
            for k in 0..everybody.len() {
                let node = (first + k) % everybody.len();
                busy |= self.run_program(node);
                busy |= self.run_lanes(node, &everybody);
            }
            if !busy && self.bytes() == before {
                return;
            }
        }
    }

    /// True if a lane has more to do, or has stopped.
    fn run_lanes(&mut self, node: usize, everybody: &[NodeId]) -> bool {
        let now = self.clock.now();
        let mut busy = false;
        let Node { board, lanes, .. } = &mut self.nodes[node];
        for slot in lanes {
            let Some(running) = slot else { continue };
            if board.is_closed() && running.ends.is_none() {
                running.engine.close(now);
                running.ends = Some(now + crate::node::LAST_WORDS);
            }
            // An in-memory read may be short though more is there, so readiness is not an edge.
            let engine = &mut running.engine;
            everybody.iter().for_each(|&peer| engine.handle_ready(peer, true, true, false));
            match running.engine.turn(now) {
                Next::Again => busy = true,
                Next::Sleep(_) if running.ends.is_some_and(|end| end <= now) => {
                    *slot = None;
                    busy = true;
                }
                Next::Sleep(until) => {
                    running.wake = running.ends.map_or(until, |end| until.min(end));
                }
                Next::Stop => {
                    *slot = None; // which closes its links
                    busy = true;
                }
            }
        }
        busy
    }

    /// What the training program of `node` does now. True if it did anything.
    fn run_program(&mut self, node: usize) -> bool {
        let Self { setup, nodes, dice, report, clock, holders, .. } = self;
        let now = clock.now();
        let everywhere = &self.cluster.lane_ids().collect();
        let Node { board, lanes, program: Some(program), .. } = &mut nodes[node] else {
            return false;
        };
        let mut command = |to: &BTreeSet<LaneId>, command: &dyn Fn() -> Command| {
            for lane in to {
                if let Some(running) = &mut lanes[lane.index()] {
                    // A lane that has stopped takes no commands.
                    let _ = running.commands.send(command());
                }
            }
        };
        let mut busy = false;
        for (position, layer) in program.layers.iter_mut().enumerate().rev() {
            let id = LayerId(position as u32);
            if let Some(exchange) = layer.in_flight.take_if(|_| board.is_done(id)) {
                let exchange = Arc::into_inner(exchange).expect("a lane kept what it had finished");
                layer.done += 1;
                layer.next = now + dice.pause();
                let sum = setup.sum(position, layer.done);
                let down = setup.encodings(position).down;
                let result = exchange.destination.unwrap_or(exchange.gradient).into_buffer();
                let right = result.bytes() == encoded(down, &sum).bytes();
                assert!(right, "{id} of node {node}: wrong sum");
                report.delivered += 1;
                busy = true;
            }
            let due = layer.in_flight.is_none() && layer.done < setup.clocks && layer.next <= now;
            if due && !program.mute && board.failure().is_none() {
                let values: Vec<f32> =
                    setup.gradient(node as u16, position, layer.done + 1).collect();
                let Encodings { up, down } = setup.encodings(position);
                let elsewhere = || encoded(down, &vec![0.0; values.len()]).into();
                let exchange = Arc::new(Exchange {
                    layer: id,
                    clock: Clock(layer.done + 1),
                    kind: Kind::Push,
                    terms: Terms::default(),
                    gradient: encoded(up, &values).into(),
                    destination: (up != down).then(elsewhere),
                    landings: None,
                });
                let holders = &holders[position];
                board.begin(id, holders.len());
                let all = 0..exchange.gradient.len();
                command(holders, &|| Command::Send(exchange.clone(), all.clone()));
                layer.in_flight = Some(exchange);
                busy = true;
            }
        }
        if !program.finished && program.layers.iter().all(|l| l.done == setup.clocks) {
            program.finished = true;
            report.first_goodbye.get_or_insert(now);
            command(everywhere, &|| Command::Finish);
            busy = true;
        }
        busy
    }

    /// Returns what has to be resumed, and when.
    fn break_something(&mut self, trouble: Trouble) -> Option<(Duration, Faults)> {
        let now = self.clock.now();
        let (culprits, resumes) = match trouble {
            Trouble::Reset(draw) => {
                let pipe = &self.pipes[draw as usize % self.pipes.len()];
                pipe.faults.reset();
                (pipe.ends.to_vec(), None)
            }
            Trouble::Stall(draw, time) => {
                let pipe = &self.pipes[draw as usize % self.pipes.len()];
                pipe.faults.stall();
                (pipe.ends.to_vec(), Some((now + time, pipe.faults.clone())))
            }
            Trouble::Abort(node) => {
                self.abort(node);
                (vec![node], None)
            }
            Trouble::GiveUp(node) => {
                let (name, how) = (self.cluster.name(node), "the first reason".into());
                self.nodes[node.index()].board.fail(Error::Lost { node: name, how, awaited: None });
                self.abort(node);
                (vec![node], None)
            }
            Trouble::Mute(node) => {
                self.nodes[node.index()].program.as_mut().expect("only workers speak").mute = true;
                (vec![node], None)
            }
        };
        self.report.culprits = culprits.into_iter().map(|n| self.cluster.name(n)).collect();
        resumes
    }

    fn abort(&mut self, node: NodeId) {
        for running in self.nodes[node.index()].lanes.iter_mut().flatten() {
            let _ = running.commands.send(Command::Abort("enough".into()));
        }
    }

    /// When something happens next. `None` when every lane has stopped.
    fn next_event(&self, timers: [Option<Duration>; 2]) -> Option<Duration> {
        let now = self.clock.now();
        let lanes = self.nodes.iter().flat_map(|n| n.lanes.iter().flatten());
        let wakes: Vec<Duration> = lanes.map(|running| running.wake).collect();
        if wakes.is_empty() {
            return None;
        }
        let programs = self.nodes.iter().filter_map(|n| n.program.as_ref());
        let ready = programs.flat_map(|p| p.layers.iter().map(|l| l.next));
        let arrivals = self.pipes.iter().filter_map(|p| p.faults.next_event());
        let timers = timers.into_iter().flatten();
        wakes.into_iter().chain(ready).chain(arrivals).chain(timers).filter(|at| *at > now).min()
    }

    fn bytes(&self) -> u64 {
        self.pipes.iter().map(|pipe| pipe.faults.moved()).sum()
    }

    fn into_report(self, ended: Option<Duration>) -> Report {
        let failures = self.nodes.iter().map(|n| n.board.failure().map(|e| e.to_string()));
        Report { ended, failures: failures.collect(), ..self.report }
    }
}

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    /// How long a backward pass takes.
    fn pause(&mut self) -> Duration {
        Duration::from_micros(self.below(50_000))
    }

    /// From a loopback interface to a bad line; never so slow that it looks dead.
    fn shape(&mut self) -> Shape {
        let rates = [None, Some(100_000), Some(1_000_000), Some(100_000_000)];
        // What a link holds and how long it holds it is a rate, too.
        let (capacity, longest) =
            [(7, 2), (100, 3), (1000, 4), (64 << 10, 4)][self.below(4) as usize];
        Shape {
            delay: Duration::from_micros([0, 10, 1000, 40_000][self.below(longest) as usize]),
            bytes_per_second: rates[self.below(4) as usize],
            capacity,
            seed: self.below(u64::MAX),
        }
    }
}
