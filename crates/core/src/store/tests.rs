use super::*;
use crate::plan::Rules;
use crate::{ChunkSize, Cluster, LaneId, Layer, LayerId, Reduction, Servers};
use proptest::prelude::*;

mod encodings;
mod loose;

const KEY: ChunkKey = ChunkKey { layer: LayerId(0), index: 0 };
const SUM: Optimizer = Optimizer::Reduce(Reduction::Sum);

/// One shard with one chunk of `len` elements.
fn store(workers: u16, len: usize, optimizer: Optimizer, order: Order) -> Store {
    let cluster = Cluster::new(workers, Servers::Dedicated(1), 1).unwrap();
    let size = ChunkSize::at_most(1 << 20);
    let plan =
        Plan::new(&cluster, &[Layer::new("l", len)], Rules { chunk: size, ..Rules::default() });
    let shard = Shard { node: NodeId(workers), lane: LaneId(0) };
    Store::new(&plan, shard, |_| &optimizer, order)
}

fn header(kind: Kind, worker: u16, clock: u64, len: usize) -> Header {
    let length = (len * 4) as u32;
    let clock = Clock(clock);
    Header { chunk: KEY, value: 0.5, clock, ..Header::bare(kind, NodeId(worker), length) }
}

fn push(store: &mut Store, worker: u16, clock: u64, values: &[f32]) -> Option<Completed> {
    let header = header(Kind::Push, worker, clock, values.len());
    let mut sum = store.handle_push(&header, Duration::ZERO).unwrap();
    store.handle_piece(&mut sum, bytemuck::cast_slice(values), None);
    store.handle_contributed(sum, None)
}

/// The result of a chunk nobody lent memory for.
fn held(completed: Option<Completed>) -> Arc<[f32]> {
    match completed.expect("the chunk is complete").result {
        Outcome::Held(Block::Whole(result)) => result,
        other => panic!("nobody lent memory, and there are numbers: {other:?}"),
    }
}

#[test]
fn a_chunk_goes_out_when_its_count_equals_the_number_of_workers() {
    let mut store = store(3, 4, SUM, Order::Arrival);
    for clock in 1..5 {
        let c = clock as f32;
        assert!(push(&mut store, 2, clock, &[c; 4]).is_none());
        assert!(push(&mut store, 0, clock, &[10.0 * c; 4]).is_none());
        let done = push(&mut store, 1, clock, &[100.0 * c; 4]).unwrap();
        assert_eq!((done.key, done.clock), (KEY, Clock(clock)));
        let result = held(Some(done));
        assert_eq!(&result[..], [111.0 * c; 4]);
        store.release(Block::Whole(result));
    }
    assert_eq!(store.bytes(), 16, "one recycled buffer serves every clock");
}

#[test]
fn layers_of_one_shard_have_rules_of_their_own() {
    let cluster = Cluster::new(2, Servers::Dedicated(1), 1).unwrap();
    let layers = [Layer::new("stepped", 2), Layer::new("counted", 2)];
    let plan = Plan::new(&cluster, &layers, Rules::default());
    let shard = Shard { node: NodeId(2), lane: LaneId(0) };
    let rules: [Optimizer; 2] = [Optimizer::sgd(), SUM];
    let mut store = Store::new(&plan, shard, |layer| &rules[layer.index()], Order::Arrival);
    let mut contribute = |kind, layer, worker, clock, values: &[f32]| {
        let chunk = ChunkKey { layer: LayerId(layer), index: 0 };
        let header = Header { chunk, ..header(kind, worker, clock, values.len()) };
        let mut sum = store.handle_push(&header, Duration::ZERO)?;
        store.handle_piece(&mut sum, bytemuck::cast_slice(values), None);
        Ok(store.handle_contributed(sum, None))
    };
    // Only the layer that is stepped needs initial values.
    let early = contribute(Kind::Push, 0, 0, 1, &[1.0; 2]);
    assert!(matches!(early, Err(Violation::NotInitialised)), "{early:?}");
    contribute(Kind::Init, 0, 0, 0, &[8.0, 4.0]).unwrap();
    contribute(Kind::Init, 0, 1, 0, &[]).unwrap();
    for layer in 0..2 {
        contribute(Kind::Push, layer, 0, 1, &[1.0, 2.0]).unwrap();
    }
    let stepped = held(contribute(Kind::Push, 0, 1, 1, &[3.0, 2.0]).unwrap());
    let counted = held(contribute(Kind::Push, 1, 1, 1, &[3.0, 2.0]).unwrap());
    assert_eq!(stepped[..], [8.0 - 0.5 * 2.0, 4.0 - 0.5 * 2.0], "a step with the mean");
    assert_eq!(counted[..], [4.0, 4.0], "the sum");
}

#[test]
fn a_fast_worker_does_not_disturb_a_result_that_is_still_being_sent() {
    let mut store = store(2, 2, SUM, Order::Arrival);
    push(&mut store, 0, 1, &[1.0, 1.0]);
    let first = held(push(&mut store, 1, 1, &[2.0, 2.0]));
    push(&mut store, 0, 2, &[9.0, 9.0]);
    assert_eq!(&first[..], [3.0, 3.0]);
}

#[test]
fn server_side_sgd_starts_from_worker_zeros_values() {
    let mut store = store(2, 2, Optimizer::sgd(), Order::Arrival);
    let early = store.handle_push(&header(Kind::Push, 0, 1, 2), Duration::ZERO);
    assert_eq!(early.unwrap_err(), Violation::NotInitialised);
    let ready = store.handle_push(&header(Kind::Init, 1, 0, 0), Duration::ZERO).unwrap();
    assert!(store.handle_contributed(ready, None).is_none());
    let mut init = store.handle_push(&header(Kind::Init, 0, 0, 2), Duration::ZERO).unwrap();
    store.handle_piece(&mut init, bytemuck::cast_slice(&[1f32, 2.0]), None);
    let initial = store.handle_contributed(init, None).unwrap();
    assert_eq!(initial.clock, Clock(0));
    let initial = held(Some(initial));
    assert_eq!(&initial[..], [1.0, 2.0]);

    push(&mut store, 0, 1, &[1.0, 0.0]);
    let stepped = held(push(&mut store, 1, 1, &[3.0, 4.0]));
    assert_eq!(&stepped[..], [1.0 - 0.5 * 2.0, 2.0 - 0.5 * 2.0]);
    // A link still holds the initial values: the step must not have changed them under it.
    assert_eq!(&initial[..], [1.0, 2.0]);
}

#[test]
fn a_worker_that_is_first_lends_its_memory_for_the_sum() {
    let mut store = store(2, 2, Optimizer::default(), Order::Arrival);
    let mut memory = [1.0, 2.0];
    let own = header(Kind::Push, 1, 1, 2);
    let loan = store.handle_loan(&own, Duration::ZERO).unwrap().expect("nobody was first");
    assert!(loan.is_lent());
    assert!(store.handle_contributed(loan, Some(&mut memory)).is_none());
    let mut sum = store.handle_push(&header(Kind::Push, 0, 1, 2), Duration::ZERO).unwrap();
    assert!(sum.is_lent());
    store.handle_piece(&mut sum, bytemuck::cast_slice(&[10f32]), Some(&mut memory));
    store.handle_piece(&mut sum, bytemuck::cast_slice(&[20f32]), Some(&mut memory));
    let done = store.handle_contributed(sum, Some(&mut memory)).unwrap();
    assert!(matches!(done.result, Outcome::Lent));
    assert_eq!(memory, [5.5, 11.0], "the mean, in place");

    push(&mut store, 0, 2, &[1.0, 1.0]);
    let late = Header { clock: Clock(2), ..own };
    assert!(store.handle_loan(&late, Duration::ZERO).unwrap().is_none(), "others were first");
    assert_eq!(&held(push(&mut store, 1, 2, &[3.0, 3.0]))[..], [2.0, 2.0]);
}

#[test]
fn frames_that_break_a_rule_are_refused_before_their_payload() {
    let mut store = store(2, 2, SUM, Order::Arrival);
    let mut refused = |header: Header| store.handle_push(&header, Duration::ZERO).unwrap_err();
    let good = header(Kind::Push, 0, 1, 2);
    let other = ChunkKey { layer: LayerId(0), index: 1 };
    assert_eq!(refused(Header { chunk: other, ..good }), Violation::UnknownChunk);
    let other = ChunkKey { layer: LayerId(9), index: 0 };
    assert_eq!(refused(Header { chunk: other, ..good }), Violation::UnknownChunk);
    assert_eq!(refused(header(Kind::Push, 2, 1, 2)), Violation::NotAWorker(NodeId(2)));
    assert_eq!(refused(header(Kind::Push, 0, 1, 3)), Violation::Length { expected: 8, got: 12 });
    let clock = Violation::Clock { expected: Clock(1), got: Clock(2) };
    assert_eq!(refused(header(Kind::Push, 0, 2, 2)), clock);
    assert_eq!(refused(Header { kind: Kind::Update, ..good }), Violation::WrongKind);
    store.handle_push(&good, Duration::ZERO).unwrap();
    let mut refused = |header: Header| store.handle_push(&header, Duration::ZERO).unwrap_err();
    assert_eq!(refused(good), Violation::Duplicate(Clock(1)));
    let rate = Header { value: 0.25, ..header(Kind::Push, 1, 1, 2) };
    assert_eq!(refused(rate), Violation::Rate { expected: 0.5, got: 0.25 });
}

#[test]
fn a_stall_names_the_chunk_the_clock_and_who_is_missing() {
    let mut store = store(3, 2, SUM, Order::Arrival);
    let limit = Duration::from_secs(5);
    assert_eq!(store.poll_stalled(Duration::from_secs(99), limit), None);
    let opened = Duration::from_secs(100);
    let mut sum = store.handle_push(&header(Kind::Push, 1, 1, 2), opened).unwrap();
    store.handle_piece(&mut sum, bytemuck::cast_slice(&[0f32; 2]), None);
    store.handle_contributed(sum, None);
    assert_eq!(store.poll_stalled(Duration::from_secs(104), limit), None);
    let stall = store.poll_stalled(Duration::from_secs(106), limit).unwrap();
    assert_eq!((stall.key, stall.clock), (KEY, Clock(1)));
    assert_eq!(stall.missing, [NodeId(0), NodeId(2)]);
    assert_eq!(stall.waited, Duration::from_secs(6));
}

proptest! {
    /// Contributions interleaved in any order and cut into any pieces give the same sum; in rank
    /// order, the same bits even where rounding would differ.
    #[test]
    fn any_interleaving_gives_the_sum(
        workers in 1u16..6, len in 1usize..60, cuts in proptest::collection::vec(1usize..9, 1..40),
        turns in proptest::collection::vec(0usize..6, 200), ranked: bool,
    ) {
        let order = if ranked { Order::Rank } else { Order::Arrival };
        let mut store = store(workers, len, SUM, order);
        let value = |worker: usize, i: usize| match ranked {
            true => 1e7f32.powi(worker as i32 % 3) + i as f32 * 0.1,
            false => (worker * 100 + i) as f32,
        };
        let values: Vec<Vec<f32>> =
            (0..workers.into()).map(|w| (0..len).map(|i| value(w, i)).collect()).collect();
        let mut open: Vec<_> = values
            .iter()
            .enumerate()
            .map(|(w, v)| {
                let header = header(Kind::Push, w as u16, 1, len);
                (store.handle_push(&header, Duration::ZERO).unwrap(), &v[..])
            })
            .collect();
        let mut result = None;
        let mut turns = turns.into_iter().chain(std::iter::repeat(0));
        let mut cuts = cuts.into_iter().cycle();
        while !open.is_empty() {
            let at = turns.next().unwrap() % open.len();
            let (sum, left) = &mut open[at];
            let (piece, rest) = left.split_at(cuts.next().unwrap().min(left.len()));
            store.handle_piece(sum, bytemuck::cast_slice(piece), None);
            *left = rest;
            if rest.is_empty() {
                let (sum, _) = open.swap_remove(at);
                result = store.handle_contributed(sum, None);
            }
        }
        let expected: Vec<f32> =
            (0..len).map(|i| values[1..].iter().fold(values[0][i], |s, v| s + v[i])).collect();
        prop_assert_eq!(&held(result)[..], &expected[..]);
    }
}

/// Two hosts of two workers: node 2 collects for node 0's chunk, and gives it no parameters.
#[test]
fn a_collector_passes_a_sum_on_and_awaits_its_result_only_then() {
    let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap();
    let cluster = cluster.with_hosts(vec![0, 0, 1, 1], Vec::new()).unwrap();
    let plan = Plan::new(&cluster, &[Layer::new("l", 1 << 12)], Rules::default());
    let (key, home) = plan.all_chunks().next().unwrap();
    assert_eq!(home.node, NodeId(0));
    let shard = Shard { node: NodeId(2), lane: home.lane };
    let adam = "adam".parse().unwrap();
    let mut store = Store::new(&plan, shard, |_| &adam, Order::Arrival);
    assert_eq!(store.contributors(key), [NodeId(2), NodeId(3)]);
    let len = plan.len(key);
    let contribute = |store: &mut Store, kind, worker: u16, clock: u64, len: usize| {
        let header = Header { chunk: key, ..header(kind, worker, clock, len) };
        let mut sum = store.handle_push(&header, Duration::ZERO)?;
        if len > 0 {
            store.handle_piece(&mut sum, bytemuck::cast_slice(&vec![1.5f32; len]), None);
        }
        Ok::<_, Violation>(store.handle_contributed(sum, None))
    };
    // Neither has worker 0's initial values.
    assert!(contribute(&mut store, Kind::Init, 3, 0, 0).unwrap().is_none());
    assert!(!store.has_passed_on(key, Clock(0)));
    let ready = contribute(&mut store, Kind::Init, 2, 0, 0).unwrap().unwrap();
    assert_eq!(ready.way, Way::Up { kind: Kind::Init, rate: 0.5 });
    assert!(matches!(ready.result, Outcome::Nothing));
    assert!(store.has_passed_on(key, Clock(0)));
    assert!(contribute(&mut store, Kind::Push, 2, 1, len).unwrap().is_none());
    assert!(!store.has_passed_on(key, Clock(1)) && !store.has_passed_on(key, Clock(0)));
    let stranger = contribute(&mut store, Kind::Push, 1, 1, len).unwrap_err();
    assert_eq!(stranger, Violation::NotAWorker(NodeId(1)));
    let sum = contribute(&mut store, Kind::Push, 3, 1, len).unwrap().unwrap();
    assert_eq!(sum.way, Way::Up { kind: Kind::Push, rate: 0.5 });
    assert!(held(Some(sum)).iter().all(|v| *v == 3.0));
    assert!(store.has_passed_on(key, Clock(1)));
    assert!(store.rule_state(key).is_none());
}

/// What a simulation relies on: the same verdicts and the same answers, without a number in memory.
#[test]
fn a_ghost_judges_and_counts_like_a_store() {
    let cluster = Cluster::new(2, Servers::Colocated, 1).unwrap();
    let plan = Plan::new(&cluster, &[Layer::new("l", 1 << 13)], Rules::default());
    let shard = Shard { node: NodeId(0), lane: LaneId(0) };
    let mut store = Store::ghost(&plan, shard);
    for clock in 1..4 {
        let own = header(Kind::Push, 0, clock, 1 << 13);
        let other = Header { sender: NodeId(1), ..own };
        let short = store.handle_push(&Header { length: 4, ..other }, Duration::ZERO);
        assert_eq!(short.unwrap_err(), Violation::Length { expected: 4 << 13, got: 4 });
        let lends = clock == 2;
        let (first, second) = if lends { (own, other) } else { (other, own) };
        let begun = match lends {
            true => store.handle_loan(&first, Duration::ZERO).unwrap().unwrap(),
            false => store.handle_push(&first, Duration::ZERO).unwrap(),
        };
        assert!(store.handle_contributed(begun, None).is_none());
        assert!(store.handle_loan(&second, Duration::ZERO).unwrap().is_none());
        let last = store.handle_push(&second, Duration::ZERO).unwrap();
        let done = store.handle_contributed(last, None).unwrap();
        assert_eq!((done.key, done.clock), (KEY, Clock(clock)));
        assert_eq!(matches!(done.result, Outcome::Lent), lends);
    }
    assert_eq!(store.bytes(), 0);
}
