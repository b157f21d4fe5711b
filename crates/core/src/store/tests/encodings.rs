//! Layers whose numbers do not travel as `f32`.

use super::*;
use crate::{Encoding, Encodings};

/// One shard with one chunk of `len` elements that travel like this.
fn encoded_store(
    workers: u16,
    len: usize,
    (encodings, optimizer): (Encodings, Optimizer),
    order: Order,
) -> Store {
    let cluster = Cluster::new(workers, Servers::Dedicated(1), 1).unwrap();
    let layer = Layer::new("l", len).encoded(encodings);
    let chunk = ChunkSize::at_most(1 << 20);
    let plan = Plan::new(&cluster, &[layer], Rules { chunk, ..Rules::default() });
    let shard = Shard { node: NodeId(workers), lane: LaneId(0) };
    Store::new(&plan, shard, |_| &optimizer, order)
}

fn encode(encoding: Encoding, values: &[f32]) -> Block {
    let mut block = Block::zeroed(encoding, values.len());
    encoding.encode(values, block.bytes_mut().unwrap());
    block
}

fn decode(encoding: Encoding, block: &Block) -> Vec<f32> {
    let mut values = vec![0.0; block.bytes().len() / encoding.width()];
    encoding.decode(block.bytes(), &mut values);
    values
}

fn contribute(
    store: &mut Store,
    header: &Header,
    contribution: &Block,
    piece: usize,
) -> Option<Completed> {
    let mut sum = store.handle_push(header, Duration::ZERO).unwrap();
    let width = sum.encoding().width();
    contribution.bytes().chunks(piece * width).for_each(|p| store.handle_piece(&mut sum, p, None));
    store.handle_contributed(sum, None)
}

fn block(completed: Option<Completed>) -> Block {
    match completed.expect("the chunk is complete").result {
        Outcome::Held(block) => block,
        other => panic!("half precision is never lent: {other:?}"),
    }
}

fn frame(kind: Kind, worker: u16, clock: u64, bytes: usize) -> Header {
    Header { length: bytes as u32, ..header(kind, worker, clock, 0) }
}

proptest! {
    /// The result is the mean in f32 of what the workers sent, rounded once. In any pieces; in rank
    /// order, bit by bit.
    #[test]
    fn a_result_is_rounded_once(
        workers in 1u16..6, len in 1usize..60, piece in 1usize..9, seed: u32,
        up in proptest::sample::select(&Encoding::ALL[..]),
        down in proptest::sample::select(&Encoding::ALL[..]),
        ranked: bool,
    ) {
        let order = if ranked { Order::Rank } else { Order::Arrival };
        let encodings = Encodings { up, down };
        let mut store = encoded_store(workers, len, (encodings, Optimizer::default()), order);
        let value = |worker: u16, i: usize| {
            let mixed = (u32::from(worker) * 977 + i as u32 * 31).wrapping_mul(seed | 1);
            (mixed >> 8) as f32 / 65536.0 - 128.0
        };
        for clock in 1..3 {
            let mut sum = vec![0.0f32; len];
            let mut done = None;
            for worker in 0..workers {
                let values: Vec<f32> = (0..len).map(|i| value(worker, i + clock as usize)).collect();
                let sent = encode(up, &values);
                let header = frame(Kind::Push, worker, clock, sent.bytes().len());
                done = contribute(&mut store, &header, &sent, piece);
                prop_assert_eq!(done.is_some(), worker + 1 == workers);
                sum.iter_mut().zip(decode(up, &sent)).for_each(|(sum, x)| *sum += x);
            }
            let scale = Reduction::Mean.scale(workers.into());
            sum.iter_mut().for_each(|x| *x *= scale);
            let result = block(done);
            let expected = encode(down, &sum);
            prop_assert_eq!(result.bytes(), expected.bytes());
            store.release(result);
        }
        // Sums and results are used again: the second clock has taken no memory.
        let held = if ranked { usize::from(workers) } else { 1 };
        let rounded = if down == Encoding::F32 { 0 } else { down.bytes(len) };
        prop_assert!(store.bytes() <= held * 4 * len + rounded, "{} bytes", store.bytes());
    }
}

/// A step too small for bf16 is lost in none of the steps that the shard takes: it keeps f32.
#[test]
fn shards_keep_parameters_in_f32_and_show_them_rounded() {
    let both = Encodings::both(Encoding::Bf16);
    let mut store = encoded_store(1, 2, (both, Optimizer::sgd()), Order::Arrival);
    let initial = encode(Encoding::Bf16, &[1.0, -2.0]);
    let init = frame(Kind::Init, 0, 0, 4);
    let shown = block(contribute(&mut store, &init, &initial, 1));
    assert_eq!(shown.bytes(), initial.bytes());
    // The rate of `header` is 0.5; between 1.0 and the next bf16 below it lie 2^-8.
    let gradient = encode(Encoding::Bf16, &[1.0 / 512.0, 0.0]);
    let mut values = Vec::new();
    for clock in 1..=8 {
        let push = frame(Kind::Push, 0, clock, 4);
        let shown = block(contribute(&mut store, &push, &gradient, 2));
        values.push(decode(Encoding::Bf16, &shown)[0]);
        store.release(shown);
    }
    let master = |clock: i32| 1.0 - clock as f32 / 1024.0;
    assert_eq!(store.masters(KEY).unwrap(), [master(8), -2.0]);
    let rounded: Vec<f32> = (1..=8).map(|c| half::bf16::from_f32(master(c)).to_f32()).collect();
    assert_eq!(values, rounded);
    assert!(values[0] == 1.0 && values[7] < 1.0, "{values:?}");

    // Another shard goes on from there, though its workers have the rounded values only.
    let mut other = encoded_store(1, 2, (both, Optimizer::sgd()), Order::Arrival);
    contribute(&mut other, &init, &encode(Encoding::Bf16, &[values[7], -2.0]), 2);
    assert!(!other.restore_rule(KEY, 8, &[], Some(&[0.0; 3])), "three masters for two parameters");
    let masters = store.masters(KEY).unwrap().to_vec();
    assert!(other.restore_rule(KEY, 8, &[], Some(&masters)));
    let [next, same] = [(&mut store, 9), (&mut other, 1)].map(|(store, clock)| {
        let push = frame(Kind::Push, 0, clock, 4);
        block(contribute(store, &push, &gradient, 2)).bytes().to_vec()
    });
    assert_eq!(next, same);
    assert_eq!(store.masters(KEY), other.masters(KEY));
}

#[test]
fn parameters_that_nobody_rounds_are_no_masters() {
    let mut store = store(1, 2, Optimizer::sgd(), Order::Arrival);
    let init = frame(Kind::Init, 0, 0, 8);
    contribute(&mut store, &init, &encode(Encoding::F32, &[1.0, 2.0]), 2);
    assert!(store.masters(KEY).is_none() && store.rule_state(KEY).is_some());
}

#[test]
fn a_frame_of_another_encoding_is_refused_and_memory_of_two_bytes_is_not_lent() {
    let encodings = Encodings { up: Encoding::F16, down: Encoding::F32 };
    let mut store = encoded_store(2, 3, (encodings, SUM), Order::Arrival);
    for (kind, bytes, expected) in [(Kind::Push, 12, 6), (Kind::Push, 5, 6), (Kind::Init, 6, 12)] {
        let clock = u64::from(kind == Kind::Push);
        let refused = store.handle_push(&frame(kind, 0, clock, bytes), Duration::ZERO);
        assert_eq!(refused.unwrap_err(), Violation::Length { expected, got: bytes });
    }
    let push = frame(Kind::Push, 0, 1, 6);
    assert!(store.handle_loan(&push, Duration::ZERO).unwrap().is_none());
}

/// A collector's sum leaves its host in two bytes, and is rounded for that.
#[test]
fn a_collected_sum_goes_on_in_the_encoding_of_contributions() {
    let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap();
    let cluster = cluster.with_hosts(vec![0, 0, 1, 1], Vec::new()).unwrap();
    let encodings = Encodings { up: Encoding::Bf16, down: Encoding::F32 };
    let layers = [Layer::new("l", 1 << 14).encoded(encodings)];
    let plan = Plan::new(&cluster, &layers, Rules::default());
    let (key, home) = plan.all_chunks().next().unwrap();
    let shard = Shard { node: NodeId(2), lane: home.lane };
    let mut store = Store::new(&plan, shard, |_| &SUM, Order::Arrival);
    let len = plan.len(key);
    let mut sum = None;
    for (worker, value) in [(2, 1.0), (3, 1.0 / 256.0)] {
        let sent = encode(Encoding::Bf16, &vec![value; len]);
        let header = Header { chunk: key, ..frame(Kind::Push, worker, 1, 2 * len) };
        sum = contribute(&mut store, &header, &sent, len);
    }
    let sum = sum.unwrap();
    assert_eq!(sum.way, Way::Up { kind: Kind::Push, rate: 0.5 });
    // Halfway between 1 and the next number: the even one.
    assert_eq!(block(Some(sum)).bytes(), encode(Encoding::Bf16, &vec![1.0; len]).bytes());
}

/// A worker of the shard's own node waits with numbers that have to be decoded, until another
/// worker's contribution is complete. What can be lent does not wait.
#[test]
fn a_worker_beside_its_shard_waits_for_another_contribution() {
    let cluster = Cluster::new(2, Servers::Colocated, 1).unwrap();
    let store = |encoding, order| {
        let layers = [Layer::new("l", 8).encoded(Encodings::both(encoding))];
        let plan = Plan::new(&cluster, &layers, Rules::default());
        let (key, home) = plan.all_chunks().next().unwrap();
        (Store::new(&plan, home, |_| &SUM, order), key)
    };
    const NOW: Duration = Duration::from_secs(7);
    let (mut bf16, chunk) = store(Encoding::Bf16, Order::Arrival);
    let own = |kind| Header { chunk, ..frame(kind, 0, 1, 16) };
    assert_eq!(bf16.poll_stalled(Duration::from_secs(9), Duration::ZERO), None);
    assert!(bf16.holds_back(&own(Kind::Push), NOW));
    assert!(!bf16.holds_back(&own(Kind::Init), NOW));
    let stall = bf16.poll_stalled(Duration::from_secs(9), Duration::ZERO).unwrap();
    assert_eq!((stall.key, stall.waited), (chunk, Duration::from_secs(2)));
    assert_eq!(stall.missing, [NodeId(1)]);
    let values = encode(Encoding::Bf16, &[1.0; 8]);
    let push = |worker| Header { chunk, ..frame(Kind::Push, worker, 1, 16) };
    assert!(contribute(&mut bf16, &push(1), &values, 8).is_none());
    assert!(bf16.lets_go(chunk) && !bf16.lets_go(chunk));
    assert!(!bf16.holds_back(&own(Kind::Push), NOW));
    let sum = block(contribute(&mut bf16, &push(0), &values, 8));
    assert_eq!(decode(Encoding::Bf16, &sum), [2.0; 8]);
    assert!(bf16.holds_back(&own(Kind::Push), NOW), "the next clock begins");
    assert!(!store(Encoding::Bf16, Order::Rank).0.holds_back(&own(Kind::Push), NOW));
    assert!(!store(Encoding::F32, Order::Arrival).0.holds_back(&own(Kind::Push), NOW));
}

/// What is held back is not missing: those who collect know who is.
#[test]
fn a_worker_that_holds_back_awaits_only_others() {
    let hosts = vec![0, 0, 1];
    let cluster = Cluster::new(3, Servers::Colocated, 1).unwrap();
    let cluster = cluster.with_hosts(hosts, Vec::new()).unwrap();
    let layers = [Layer::new("l", 1 << 20).encoded(Encodings::both(Encoding::Bf16))];
    let plan = Plan::new(&cluster, &layers, Rules::default());
    let (chunk, home) = plan.all_chunks().find(|(_, home)| home.node == NodeId(2)).unwrap();
    let mut store = Store::new(&plan, home, |_| &SUM, Order::Arrival);
    let own = Header { chunk, ..frame(Kind::Push, 2, 1, 2 * plan.len(chunk)) };
    assert!(store.holds_back(&own, Duration::ZERO));
    let stall = store.poll_stalled(Duration::from_secs(1), Duration::ZERO).unwrap();
    assert_eq!((stall.key, stall.clock), (chunk, Clock(1)));
    assert!(stall.collected && stall.missing.len() == 1, "{stall:?}");
}

#[test]
fn bytes_sent_are_those_of_the_encodings() {
    let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap();
    let sent = |up, down| {
        let layer = Layer::new("l", 1 << 20).encoded(Encodings { up, down });
        Plan::new(&cluster, &[layer], Rules::default()).bytes_sent(NodeId(1), LayerId(0))
    };
    // Three quarters of the gradient go up, and a quarter comes down three times.
    let quarters = 3 << 18;
    assert_eq!(sent(Encoding::F32, Encoding::F32), (4 + 4) * quarters);
    assert_eq!(sent(Encoding::Bf16, Encoding::Bf16), (2 + 2) * quarters);
    assert_eq!(sent(Encoding::F16, Encoding::F32), (2 + 4) * quarters);
}
