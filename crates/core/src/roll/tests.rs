//! Jobs that drop slow workers, as a whole: who calls the roll, workers and shards exchange frames in
//! random order, as links deliver them.

use super::*;
use crate::encoding::Block;
use crate::plan::Rules;
use crate::store::{Contribution, Order, Outcome, Way};
use crate::wire::{Header, Kind};
use crate::{
    ChunkKey, ChunkSize, Cluster, Consistency, LaneId, Layer, LayerId, Optimizer, Plan, Servers,
    Shard, Store, Syncer,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

const LAYERS: [usize; 3] = [7, 3, 12];
/// Every so many clocks all workers count, and the last one is such a clock.
const TOGETHER: u64 = 6;
const CLOCKS: u64 = 3 * TOGETHER;

/// What one node tells another. Frames between two nodes keep their order.
#[derive(Clone, Debug)]
enum Frame {
    Ready(Clock, Marks),
    Late(Clock),
    Roll(Roll),
    /// The first half of a contribution, and the second one.
    Push(Header),
    Tail,
    Update(Header, Vec<f32>),
}

struct Worker {
    /// The clock that it works at.
    clock: Clock,
    /// Layers that it has not sent, from the last one down.
    unsent: usize,
    syncers: Vec<Syncer>,
    member: Member,
    /// By chunk: what it has.
    values: BTreeMap<ChunkKey, Vec<f32>>,
    jumps: u64,
    is_done: bool,
}

struct Trial {
    workers: u16,
    plan: Plan,
    shards: Vec<Store>,
    caller: RollCall,
    programs: Vec<Worker>,
    /// By sender and receiver, as node numbers: frames on their way.
    links: BTreeMap<(u16, u16), VecDeque<Frame>>,
    now: Duration,
    /// By sender and receiver: what is on its way in.
    arriving: BTreeMap<(u16, u16), Contribution>,
    /// What shards kept.
    kept: usize,
    /// By clock: who counted.
    counted: BTreeMap<u64, Vec<NodeId>>,
    seed: u64,
}

fn marks(clock: Clock) -> Marks {
    match clock.0 {
        CLOCKS => Marks::KEEP,
        clock if clock.is_multiple_of(TOGETHER) => Marks::TOGETHER,
        _ => Marks::NONE,
    }
}

impl Trial {
    fn new(workers: u16, drops: u16, seed: u64) -> Self {
        let servers = 2;
        let cluster = Cluster::new(workers, Servers::Dedicated(servers), 1).unwrap();
        let layers = LAYERS.map(|len| Layer::new(format!("l{len}"), len));
        let consistency = Consistency::DropSlowest(drops);
        let chunk = ChunkSize::at_most(16);
        let plan = Plan::new(&cluster, &layers, Rules { chunk, consistency, ..Rules::default() });
        let sgd = Optimizer::sgd();
        let shard = |index| Shard { node: NodeId(workers + index), lane: LaneId(0) };
        let mut shards: Vec<Store> = (0..servers)
            .map(|index| Store::new(&plan, shard(index), |_| &sgd, Order::Arrival))
            .collect();
        let chunks: Vec<(ChunkKey, Shard)> = plan.all_chunks().collect();
        for worker in 0..workers {
            for &(chunk, at) in &chunks {
                let values = vec![0.0f32; if worker == 0 { plan.len(chunk) } else { 0 }];
                let bare = Header::bare(Kind::Init, NodeId(worker), 4 * values.len() as u32);
                let store = &mut shards[at.node.index() - usize::from(workers)];
                let header = Header { chunk, ..bare };
                let mut init = store.handle_push(&header, Duration::ZERO).unwrap();
                if worker == 0 {
                    store.handle_piece(&mut init, bytemuck::cast_slice(&values), None);
                }
                store.handle_contributed(init, None);
            }
        }
        let program = |worker| Worker {
            clock: Clock(1),
            unsent: LAYERS.len(),
            syncers: (0..LAYERS.len() as u32)
                .map(|layer| Syncer::new(&plan, NodeId(worker), LayerId(layer), LaneId(0)))
                .collect(),
            member: Member::new(NodeId(worker), plan.all_chunks().count()),
            values: BTreeMap::new(),
            jumps: 0,
            is_done: false,
        };
        Self {
            programs: (0..workers).map(program).collect(),
            caller: RollCall::new(workers.into(), drops),
            links: BTreeMap::new(),
            now: Duration::ZERO,
            arriving: BTreeMap::new(),
            kept: 0,
            counted: BTreeMap::new(),
            workers,
            plan,
            shards,
            seed,
        }
    }

    fn dice(&mut self, sides: usize) -> usize {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.seed >> 33) as usize % sides
    }

    fn send(&mut self, from: u16, to: u16, frame: Frame) {
        self.links.entry((from, to)).or_default().push_back(frame);
    }

    /// A worker sends its next layer, or says that it is late.
    fn work(&mut self, worker: u16) {
        let program = &mut self.programs[usize::from(worker)];
        let clock = program.clock;
        if program.is_done {
            return;
        }
        if program.unsent == 0 {
            if let Some(late) = program.member.poll_late(true) {
                assert_eq!(late, clock);
                self.send(worker, CALLER.0, Frame::Late(late));
            }
            return;
        }
        program.unsent -= 1;
        let parts = program.syncers[program.unsent].handle_send(clock).to_vec();
        if program.member.handle_send(clock, parts.len()).unwrap() {
            self.send(worker, CALLER.0, Frame::Ready(clock, marks(clock)));
        }
        for part in parts {
            let bare = Header::bare(Kind::Push, NodeId(worker), 4 * part.range.len() as u32);
            let marks = marks(clock);
            let header = Header { chunk: part.key, value: 1.0, clock, marks, ..bare };
            self.send(worker, part.server().0, Frame::Push(header));
            self.send(worker, part.server().0, Frame::Tail);
        }
    }

    fn deliver(&mut self, from: u16, to: u16) {
        let Some(frame) = self.links.get_mut(&(from, to)).and_then(VecDeque::pop_front) else {
            return;
        };
        let shard = usize::from(to.wrapping_sub(self.workers));
        match frame {
            Frame::Ready(clock, marks) => {
                self.caller.handle_ready(NodeId(from), clock, marks, self.now).unwrap();
            }
            Frame::Late(clock) => self.caller.handle_late(NodeId(from), clock).unwrap(),
            Frame::Roll(roll) if to < self.workers => {
                self.programs[usize::from(to)].member.handle_roll(&roll);
            }
            Frame::Roll(roll) => {
                self.shards[shard].handle_roll(roll).unwrap();
                self.answer(to);
            }
            Frame::Push(header) => {
                let store = &mut self.shards[shard];
                let mut push = store.handle_push(&header, self.now).unwrap();
                // Worker r counts its contributions in all elements, with 1, 2, 4 and so on.
                let values = vec![-((1 << from) as f32); header.length as usize / 8];
                store.handle_piece(&mut push, bytemuck::cast_slice(&values), None);
                self.arriving.insert((from, to), push);
            }
            Frame::Tail => {
                let store = &mut self.shards[shard];
                let mut push = self.arriving.remove(&(from, to)).unwrap();
                let values = vec![-((1 << from) as f32); push.missing()];
                store.handle_piece(&mut push, bytemuck::cast_slice(&values), None);
                assert!(store.handle_contributed(push, None).is_none());
                self.answer(to);
            }
            Frame::Update(header, values) => self.update(to, &header, values),
        }
    }

    fn answer(&mut self, shard: u16) {
        let at = usize::from(shard - self.workers);
        while let Some(done) = self.shards[at].poll_answer() {
            let Way::To(worker) = done.way else { panic!("{:?}", done.way) };
            let Outcome::Held(Block::Whole(values)) = done.result else { panic!("no numbers") };
            let bare = Header::bare(Kind::Update, NodeId(shard), 4 * values.len() as u32);
            let header = Header { chunk: done.key, clock: done.clock, marks: done.marks, ..bare };
            self.send(shard, worker.0, Frame::Update(header, values.to_vec()));
        }
        while let Some(kept) = self.shards[at].poll_kept() {
            assert_eq!(kept.clock.0, CLOCKS);
            self.kept += 1;
        }
    }

    fn update(&mut self, worker: u16, header: &Header, values: Vec<f32>) {
        let program = &mut self.programs[usize::from(worker)];
        let syncer = &mut program.syncers[header.chunk.layer.index()];
        syncer.handle_update(header).unwrap();
        syncer.handle_landed(header.chunk.index);
        let expected = expected(&self.counted, header.clock, self.workers);
        for value in &values {
            assert!((value - expected).abs() < 1e-3, "{value}, {expected} at {}", header.clock);
        }
        program.values.insert(header.chunk, values);
        if program.unsent > 0 || !program.syncers.iter().all(Syncer::is_synced) {
            return;
        }
        let answers: Vec<Clock> = program.syncers.iter().map(Syncer::answer).collect();
        let clock = answers[0];
        assert!(answers.iter().all(|answer| *answer == clock), "layers are apart: {answers:?}");
        assert!(clock >= program.clock);
        assert_eq!(
            program.clock.0.div_ceil(TOGETHER),
            clock.0.div_ceil(TOGETHER),
            "a jump too far"
        );
        program.jumps += clock.0 - program.clock.0;
        program.is_done = clock.0 == CLOCKS;
        (program.clock, program.unsent) = (clock.next(), LAYERS.len());
    }

    fn call(&mut self) {
        while let Some(roll) = self.caller.poll(self.now) {
            if roll.counted() > 0 {
                let counted: Vec<NodeId> = roll.those(Part::Counts).collect();
                assert!(self.counted.insert(roll.clock.0, counted).is_none());
            }
            for node in 0..self.workers + self.shards.len() as u16 {
                self.send(CALLER.0, node, Frame::Roll(roll.clone()));
            }
        }
    }

    /// Until all workers are done. `pace` gives how likely each worker is to go on.
    fn run(&mut self, pace: &[usize]) {
        for _ in 0..2_000_000 {
            if self.programs.iter().all(|program| program.is_done) {
                return;
            }
            let worker = self.dice(self.workers.into());
            if self.dice(100) < pace[worker] {
                self.work(worker as u16);
            }
            let links: Vec<(u16, u16)> =
                self.links.iter().filter(|(_, on)| !on.is_empty()).map(|(ends, _)| *ends).collect();
            if !links.is_empty() {
                let (from, to) = links[self.dice(links.len())];
                self.deliver(from, to);
            }
            self.now += Duration::from_micros(10);
            self.call();
        }
        panic!("stuck: {:?} {:?}", self.caller, self.links);
    }
}

/// What every element is after `clock`: each clock adds the mean of those who counted.
fn expected(counted: &BTreeMap<u64, Vec<NodeId>>, clock: Clock, workers: u16) -> f32 {
    let mean = |who: &Vec<NodeId>| {
        assert!(who.len() <= usize::from(workers));
        who.iter().map(|worker| (1 << worker.0) as f32).sum::<f32>() / who.len() as f32
    };
    counted.range(..=clock.0).map(|(_, who)| mean(who)).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn whoever_goes_on_has_what_the_others_have(
        workers in 2u16..6, drops in 1u16..3, seed: u64, pace in proptest::collection::vec(1usize..100, 6),
    ) {
        let drops = drops.min(workers - 1);
        let mut trial = Trial::new(workers, drops, seed);
        trial.run(&pace);
        prop_assert_eq!(trial.counted.len() as u64, CLOCKS);
        for (clock, counted) in &trial.counted {
            let needed = if clock.is_multiple_of(TOGETHER) { workers } else { workers - drops };
            prop_assert!(counted.len() >= usize::from(needed), "{} at {}", counted.len(), clock);
        }
        prop_assert_eq!(trial.kept, trial.plan.all_chunks().count());
        let last = &trial.programs[0].values;
        prop_assert!(trial.programs.iter().all(|program| program.values == *last));
        prop_assert_eq!(last.len(), trial.plan.all_chunks().count());
    }
}

#[test]
fn a_slow_worker_holds_nobody_up_and_workers_that_keep_pace_count() {
    let mut trial = Trial::new(4, 1, 7);
    trial.run(&[90, 1, 90, 90]);
    let counts =
        |worker| trial.counted.values().filter(|who| who.contains(&NodeId(worker))).count();
    let together = (CLOCKS / TOGETHER) as usize;
    assert!(counts(1) < together + 4, "{}", counts(1));
    assert!(trial.programs[1].jumps > 0);
    for worker in [0, 2, 3] {
        assert!(counts(worker) > CLOCKS as usize * 3 / 4, "{worker}: {}", counts(worker));
    }
}

fn ready(caller: &mut RollCall, worker: u16, clock: u64, at: u64) -> Result<(), Violation> {
    let clock = Clock(clock);
    caller.handle_ready(NodeId(worker), clock, marks(clock), Duration::from_millis(at))
}

#[test]
fn the_roll_waits_a_little_for_the_last_and_not_for_those_who_are_behind() {
    let mut caller = RollCall::new(3, 1);
    let at = Duration::from_millis;
    for worker in [0, 2] {
        ready(&mut caller, worker, 1, 80).unwrap();
    }
    assert_eq!((caller.poll(at(80)), caller.wake()), (None, Some(at(1080))));
    let roll = caller.poll(at(1080)).unwrap();
    let parts = [0, 1, 2].map(|worker| roll.part(NodeId(worker)));
    assert_eq!(parts, [Part::Counts, Part::Absent, Part::Counts]);
    assert_eq!(Roll::read(roll.clock, roll.marks, &roll.bytes(), 3), Some(roll.clone()));
    // Worker 1 is not expected at clock 2: nobody waits for it.
    for worker in [0, 2] {
        ready(&mut caller, worker, 2, 1200).unwrap();
    }
    assert_eq!(caller.poll(at(1200)).unwrap().part(NodeId(1)), Part::Absent);
    // It joins once all of its contribution has been sent.
    ready(&mut caller, 1, 1, 1210).unwrap();
    caller.handle_late(NodeId(1), Clock(1)).unwrap();
    for worker in [0, 2] {
        ready(&mut caller, worker, 3, 1280).unwrap();
    }
    assert_eq!(caller.poll(at(1280)).unwrap().part(NodeId(1)), Part::Joins);
    // Worker 1 is expected again. The grace is no part of the pause before clock 4, but of clock 3.
    for worker in [0, 2] {
        ready(&mut caller, worker, 4, 5000).unwrap();
    }
    assert_eq!((caller.poll(at(5000)), caller.wake()), (None, Some(at(5010))));
    assert_eq!(ready(&mut caller, 1, 4, 5005), Ok(()));
    assert_eq!(caller.poll(at(5005)).unwrap().counted(), 3);
}

#[test]
fn what_breaks_the_order_of_a_roll_call_is_a_violation() {
    let mut caller = RollCall::new(2, 1);
    let clock = |expected, got| Violation::Clock { expected: Clock(expected), got: Clock(got) };
    assert_eq!(ready(&mut caller, 0, 2, 0), Err(clock(1, 2)));
    assert_eq!(ready(&mut caller, 7, 1, 0), Err(Violation::NotAWorker(NodeId(7))));
    ready(&mut caller, 0, 1, 0).unwrap();
    assert_eq!(ready(&mut caller, 0, 1, 0), Err(Violation::OutOfTurn(Clock(1))));
    assert_eq!(caller.handle_late(NodeId(0), Clock(1)), Err(clock(1, 1)));
    assert_eq!(caller.handle_late(NodeId(1), Clock(1)), Err(Violation::OutOfTurn(Clock(1))));
    let together = caller.handle_ready(NodeId(1), Clock(1), Marks::KEEP, Duration::ZERO);
    assert_eq!(together, Err(Violation::NotTogether(Clock(1))));
    assert_eq!(Roll::read(Clock(1), Marks::NONE, &[1, 3], 2), None);
    assert_eq!(Roll::read(Clock(1), Marks::NONE, &[1], 2), None);
}
