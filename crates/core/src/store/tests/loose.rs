//! Shards whose workers may be at different clocks, under random schedules.

use super::*;
use crate::Consistency;
use std::collections::VecDeque;

/// One shard with one chunk, a number for every worker.
fn store(workers: u16, consistency: Consistency, rule: &Optimizer) -> Store {
    let cluster = Cluster::new(workers, Servers::Dedicated(1), 1).unwrap();
    let rules = Rules { consistency, ..Rules::default() };
    let plan = Plan::new(&cluster, &[Layer::new("l", workers.into())], rules);
    let shard = Shard { node: NodeId(workers), lane: LaneId(0) };
    Store::new(&plan, shard, |_| rule, Order::Arrival)
}

/// Worker `r` counts its contributions in element `r`: with a rate of `workers`, each adds 1.
fn gradient(workers: u16, worker: u16) -> Vec<f32> {
    (0..workers).map(|element| if element == worker { -1.0 } else { 0.0 }).collect()
}

fn header_of(kind: Kind, workers: u16, worker: u16, clock: u64, marks: Marks) -> Header {
    let header = header(kind, worker, clock, workers.into());
    Header { value: workers.into(), marks, ..header }
}

/// A worker as a shard sees it.
#[derive(Clone, Debug, Default)]
struct Reader {
    /// The last clock that it was answered.
    answered: u64,
    /// The clock that it waits for the answer of.
    waits: Option<u64>,
    /// How many contributions of each worker it has seen.
    seen: Vec<u64>,
}

struct Trial {
    workers: u16,
    /// How far ahead of the slowest a worker may be.
    lead: u64,
    /// Contributions are steps of their own.
    as_they_come: bool,
    store: Store,
    readers: Vec<Reader>,
    /// By worker: how many clocks it has contributed to.
    sent: Vec<u64>,
    stopped: Vec<Option<u64>>,
}

impl Trial {
    fn new(workers: u16, consistency: Consistency, rule: &Optimizer) -> Self {
        let mut store = store(workers, consistency, rule);
        for worker in 0..workers {
            let mut header = header_of(Kind::Init, workers, worker, 0, Marks::NONE);
            header.length = if worker == 0 { header.length } else { 0 };
            let mut init = store.handle_push(&header, Duration::ZERO).unwrap();
            if worker == 0 {
                let zeros = vec![0.0f32; workers.into()];
                store.handle_piece(&mut init, bytemuck::cast_slice(&zeros), None);
            }
            let done = store.handle_contributed(init, None);
            assert_eq!(done.is_some(), worker + 1 == workers, "initial values are everybody's");
        }
        let reader = Reader { seen: vec![0; workers.into()], ..Reader::default() };
        let count = usize::from(workers);
        let (readers, sent, stopped) = (vec![reader; count], vec![0; count], vec![None; count]);
        let as_they_come = rule.state_vectors() == 0;
        let lead = match as_they_come {
            true => consistency.lead_without_memory(),
            false => consistency.lead(),
        };
        Self { workers, lead, as_they_come, store, readers, sent, stopped }
    }

    /// `worker` contributes to its next clock. Everybody who is answered by it is judged.
    fn contribute(&mut self, worker: u16, marks: Marks) {
        let at = usize::from(worker);
        let clock = self.readers[at].answered + 1;
        let header = header_of(Kind::Push, self.workers, worker, clock, marks);
        let mut push = self.store.handle_push(&header, Duration::ZERO).unwrap();
        assert!(self.store.handle_loan(&header, Duration::ZERO).is_ok_and(|loan| loan.is_none()));
        let numbers = gradient(self.workers, worker);
        // In two pieces, as a network might have it.
        let (first, rest) = numbers.split_at(numbers.len() / 2);
        self.store.handle_piece(&mut push, bytemuck::cast_slice(first), None);
        self.store.handle_piece(&mut push, bytemuck::cast_slice(rest), None);
        assert!(self.store.handle_contributed(push, None).is_none());
        (self.sent[at], self.readers[at].waits) = (clock, Some(clock));
        while let Some(answer) = self.store.poll_answer() {
            self.judge(answer);
        }
    }

    /// Whoever is answered at clock t has seen all contributions up to t - s, in numbers that never
    /// fall.
    fn judge(&mut self, answer: Completed) {
        let Way::To(node) = answer.way else { panic!("answers are for one: {answer:?}") };
        let Outcome::Held(Block::Whole(values)) = answer.result else { panic!("no numbers") };
        let reader = &mut self.readers[node.index()];
        assert_eq!(reader.waits.take(), Some(answer.clock.0), "an answer to what was sent");
        reader.answered = answer.clock.0;
        let seen: Vec<u64> = values.iter().map(|value| value.round() as u64).collect();
        if self.as_they_come {
            assert_eq!(seen[node.index()], answer.clock.0, "a worker sees its own");
        }
        for (worker, (now, before)) in seen.iter().zip(&reader.seen).enumerate() {
            assert!(now >= before, "reads go backwards: {before}, then {now}");
            assert!(
                *now >= answer.clock.0.saturating_sub(self.lead),
                "{seen:?} at {}",
                answer.clock
            );
            assert!(*now <= self.sent[worker], "nobody has sent that");
        }
        reader.seen = seen;
        if answer.marks.contains(Marks::STOP) {
            self.stopped[node.index()].get_or_insert(answer.clock.0);
        }
        self.store.release(Block::Whole(values));
    }

    /// The workers that may contribute, up to `clocks`.
    fn able(&self, clocks: u64) -> Vec<u16> {
        let able = |worker: &u16| {
            let reader = &self.readers[usize::from(*worker)];
            reader.waits.is_none() && reader.answered < clocks
        };
        (0..self.workers).filter(able).collect()
    }
}

fn rules() -> impl Strategy<Value = Optimizer> {
    // With momentum and dampening alike, equal gradients are equal steps.
    prop_oneof![Just("sgd"), Just("sgd:momentum=0.5,dampening=0.5")]
        .prop_map(|rule| rule.parse().unwrap())
}

fn consistencies() -> impl Strategy<Value = Consistency> {
    prop_oneof![(1u16..6).prop_map(Consistency::Ssp), Just(Consistency::Asp)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever the order in which workers get on: nobody is stuck, everybody sees what is promised,
    /// and after a step that is taken together all have the same.
    #[test]
    fn readers_see_what_is_promised_and_never_go_back(
        workers in 1u16..6,
        consistency in consistencies(),
        rule in rules(),
        choices in prop::collection::vec(any::<prop::sample::Index>(), 1..40),
        stop in 1u64..12,
    ) {
        let clocks = 24;
        let mut trial = Trial::new(workers, consistency, &rule);
        let mut choices: VecDeque<_> = choices.into();
        loop {
            let able = trial.able(clocks);
            if able.is_empty() {
                break;
            }
            // The same few choices again and again: some workers are far slower than others.
            choices.rotate_left(1);
            let worker = able[choices[0].index(able.len())];
            let next = trial.readers[usize::from(worker)].answered + 1;
            let mut marks = if next == clocks { Marks::TOGETHER } else { Marks::NONE };
            if worker == 0 && next == stop {
                marks |= Marks::STOP;
            }
            trial.contribute(worker, marks);
            // Nobody who is waiting could be a deadlock: somebody can always go on.
            let all_done = trial.sent.iter().all(|sent| *sent == clocks);
            prop_assert!(all_done || !trial.able(clocks).is_empty());
        }
        for reader in &trial.readers {
            prop_assert_eq!(reader.answered, clocks);
            prop_assert_eq!(&reader.seen, &vec![clocks; usize::from(workers)]);
        }
        // All hear of the mark, and at one clock where clocks are bound.
        prop_assert!(trial.stopped.iter().all(Option::is_some), "{:?}", trial.stopped);
        if trial.lead != u64::MAX {
            let heard = Some((stop + trial.lead).min(clocks));
            prop_assert!(trial.stopped.iter().all(|at| *at == heard), "{:?}", trial.stopped);
        }
    }
}

#[test]
fn nobody_is_further_ahead_than_allowed_and_everybody_sees_its_own() {
    let mut trial = Trial::new(2, Consistency::Ssp(2), &"sgd".parse().unwrap());
    for clock in 1..=2 {
        trial.contribute(0, Marks::NONE);
        assert_eq!(trial.readers[0].seen, [clock, 0]);
    }
    trial.contribute(0, Marks::NONE);
    assert_eq!(trial.readers[0].waits, Some(3), "the other one has not begun");
    let too_far = header_of(Kind::Push, 2, 0, 4, Marks::NONE);
    let clock = Violation::Clock { expected: Clock(3), got: Clock(4) };
    assert_eq!(trial.store.handle_push(&too_far, Duration::ZERO).unwrap_err(), clock);
    let mut other = Trial::new(2, Consistency::Asp, &"sgd".parse().unwrap());
    other.contribute(0, Marks::TOGETHER);
    let unanswered = header_of(Kind::Push, 2, 0, 2, Marks::NONE);
    let violation = other.store.handle_push(&unanswered, Duration::ZERO).unwrap_err();
    assert_eq!(violation, Violation::Unanswered(Clock(2)));
    let twice = header_of(Kind::Push, 2, 0, 3, Marks::NONE);
    let violation = trial.store.handle_push(&twice, Duration::ZERO).unwrap_err();
    assert_eq!(violation, Violation::Duplicate(Clock(3)));
    let stall = trial.store.poll_stalled(Duration::from_secs(9), Duration::from_secs(1)).unwrap();
    assert_eq!((stall.missing, stall.clock), (vec![NodeId(1)], Clock(1)));
    trial.contribute(1, Marks::NONE);
    assert_eq!((trial.readers[0].answered, &trial.readers[0].seen[..]), (3, &[3, 1][..]));
    assert_eq!(trial.readers[1].seen, [3, 1]);
}

#[test]
fn what_is_kept_is_of_one_clock() {
    for rule in ["sgd", "sgd:momentum=0.5,dampening=0.5"] {
        let mut trial = Trial::new(2, Consistency::Asp, &rule.parse().unwrap());
        trial.contribute(0, Marks::NONE);
        trial.contribute(0, Marks::KEEP);
        assert_eq!(trial.readers[0].waits, Some(2), "{rule}");
        trial.contribute(1, Marks::NONE);
        assert!(trial.store.poll_kept().is_none());
        trial.contribute(1, Marks::KEEP);
        let kept = trial.store.poll_kept().unwrap();
        assert_eq!((kept.clock, kept.steps, &kept.parameters[..]), (Clock(2), 2, &[2.0, 2.0][..]));
        assert!(trial.store.poll_kept().is_none());
    }
}

#[test]
fn memory_does_not_grow_with_the_clocks() {
    let mut trial = Trial::new(3, Consistency::Ssp(3), &Optimizer::adam());
    let mut settled = 0;
    for round in 0..50 {
        for worker in [0, 0, 1, 2, 1, 2, 0] {
            if trial.able(u64::MAX).contains(&worker) {
                trial.contribute_unjudged(worker);
            }
        }
        if round == 10 {
            settled = trial.store.bytes();
        }
        assert!(round <= 10 || trial.store.bytes() <= settled);
    }
}

impl Trial {
    /// As [`contribute`](Self::contribute), for rules whose numbers say nothing.
    fn contribute_unjudged(&mut self, worker: u16) {
        let at = usize::from(worker);
        let clock = self.readers[at].answered + 1;
        let header = header_of(Kind::Push, self.workers, worker, clock, Marks::NONE);
        let mut push = self.store.handle_push(&header, Duration::ZERO).unwrap();
        let numbers = gradient(self.workers, worker);
        self.store.handle_piece(&mut push, bytemuck::cast_slice(&numbers), None);
        self.store.handle_contributed(push, None);
        self.readers[at].waits = Some(clock);
        while let Some(answer) = self.store.poll_answer() {
            let (Way::To(node), Outcome::Held(block)) = (answer.way, answer.result) else {
                panic!("answers are for one, and have numbers");
            };
            let reader = &mut self.readers[node.index()];
            (reader.answered, reader.waits) = (answer.clock.0, None);
            self.store.release(block);
        }
    }
}
