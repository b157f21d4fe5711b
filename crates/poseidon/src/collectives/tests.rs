//! Groups on engines without threads and sockets, in virtual time.

mod flows;
mod lengths;

use super::channel::GroupChannel;
use super::shared::Shared;
use super::start_order::Start;
use super::work::Completion;
use super::{Members, Request, Tensor};
use crate::engine::{Engine, Links, Next};
use poseidon_core::{ChannelId, Cluster, Dtype, NodeId, ReduceOp, Servers};
use poseidon_link::memory::{Shape, VirtualClock, pair};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

const SILENCE: Duration = Duration::from_secs(15);
/// How long operations may take.
const PATIENCE: Duration = Duration::from_secs(600);

/// A node of a job, and its rank of a group of all nodes.
struct Rank {
    engine: Engine,
    shared: Arc<Shared>,
}

impl Rank {
    /// Adds another group of all nodes, in which they have the same ranks.
    fn attach(&mut self, id: u32, rank: u16, size: u16) -> Arc<Shared> {
        let shared = Arc::new(Shared::new(size, 1));
        let channel = channel(id, rank, size, &shared);
        self.engine.attach(Box::new(channel), Duration::ZERO);
        shared
    }
}

fn channel(id: u32, rank: u16, size: u16, shared: &Arc<Shared>) -> GroupChannel {
    let cluster = Cluster::new(size, Servers::Colocated, 1).unwrap();
    let nodes = (0..size).map(NodeId).collect();
    let names = (0..size).map(|rank| format!("rank {rank}")).collect();
    let members = Members::new(&cluster, rank, nodes, names).unwrap();
    GroupChannel::new(ChannelId(id), 0, members, shared.clone())
}

impl Rank {
    fn begin(&self, request: Request) -> Arc<Completion> {
        begin(&self.shared, request)
    }

    fn turn(&mut self, now: Duration) {
        self.turn_and_say(now);
    }

    fn turn_and_say(&mut self, now: Duration) -> Next {
        (0..8).for_each(|node| self.engine.handle_ready(NodeId(node), true, true, false));
        self.engine.turn(now)
    }
}

fn begin(group: &Shared, request: Request) -> Arc<Completion> {
    let completion = Arc::new(Completion::new(Box::new(())));
    let begun = completion.clone();
    group.begin(Start { request, timeout: PATIENCE, completion });
    begun
}

/// Ranks with a link between any two.
fn ranks(size: u16, clock: &VirtualClock) -> Vec<Rank> {
    // This seed cuts none of the first six reads and writes of an end.
    ranks_with(size, clock, Shape { seed: 1430, ..Shape::default() })
}

fn ranks_with(size: u16, clock: &VirtualClock, shape: Shape) -> Vec<Rank> {
    let mut links: Vec<Links> = (0..size).map(|_| Vec::new()).collect();
    for b in 0..size {
        for a in 0..b {
            let (one, other) = pair(clock.clone(), shape);
            links[usize::from(a)].push((NodeId(b), Box::new(one)));
            links[usize::from(b)].push((NodeId(a), Box::new(other)));
        }
    }
    let rank = |(rank, links): (u16, Links)| {
        let shared = Arc::new(Shared::new(size, 1));
        let channel = channel(2, rank, size, &shared);
        let (me, now) = (NodeId(rank), Duration::ZERO);
        let mut engine = Engine::new(me, usize::from(size), links, SILENCE, now);
        engine.attach(Box::new(channel), now);
        Rank { engine, shared }
    };
    (0..size).zip(links).map(rank).collect()
}

fn tensor(values: &mut [u8]) -> Tensor {
    let start = NonNull::from(&mut *values).cast();
    // SAFETY: tests keep the values until their engines are gone, and look at them when all is done.
    unsafe { Tensor::from_raw(start, values.len(), Dtype::U8) }
}

fn failure(completion: &Completion) -> String {
    completion.failure().map(|error| error.to_string()).unwrap_or_default()
}

/// The last thing that happens to the operation is that a link takes its last bytes. Nothing may come
/// from anybody afterwards, so the engine must not sleep before it has told the program.
#[test]
fn an_operation_that_ends_by_sending_is_reported_at_once() {
    let shape = Shape { capacity: 1000, ..Shape::default() };
    let mut ranks = ranks_with(2, &VirtualClock::new(), shape);
    let now = Duration::ZERO;
    let mut values = vec![7; 50_000];
    let sent = ranks[0].begin(Request::Send { tensor: tensor(&mut values), to: 1, tag: 3 });
    let mut place = vec![0; 50_000];
    let request = Request::Receive { tensor: tensor(&mut place), from: Some(0), tag: 3 };
    let received = ranks[1].begin(request);
    let mut next = Next::Again;
    while !received.is_done() {
        next = ranks[0].turn_and_say(now);
        ranks[1].turn(now);
    }
    // The link has taken all of it, and nothing more happens to it.
    while next == Next::Again {
        next = ranks[0].engine.turn(now);
    }
    assert!(sent.is_done());
}

#[test]
fn an_abort_does_not_undo_what_others_have_sent_before() {
    let mut ranks = ranks(3, &VirtualClock::new());
    let now = Duration::ZERO;
    let begun: Vec<_> = ranks.iter().map(|rank| rank.begin(Request::Barrier)).collect();
    for rank in [0, 1, 2, 1, 1] {
        ranks[rank].turn(now);
    }
    assert!(begun[1].is_done() && !begun[0].is_done());
    ranks[1].shared.abort("enough".into());
    [1, 1, 0].iter().for_each(|&rank: &usize| ranks[rank].turn(now));
    assert!(begun[0].is_done());
    assert_eq!(failure(&begun[0]), "");
    let next = ranks[0].begin(Request::Barrier);
    assert_eq!(failure(&next), "rank 1 stopped the job: enough");
}

/// It computes; its links are full meanwhile, because frames of an operation that it has not begun
/// stay there.
#[test]
fn a_rank_that_begins_late_is_not_taken_for_dead() {
    let clock = VirtualClock::new();
    let mut ranks = ranks(2, &clock);
    let (mut sent, mut received) = (vec![7; 2 << 20], vec![0; 2 << 20]);
    let first = ranks[0].begin(Request::Broadcast { tensor: tensor(&mut sent), root: 0 });
    while clock.now() < 4 * SILENCE {
        ranks.iter_mut().for_each(|rank| rank.turn(clock.now()));
        clock.advance(Duration::from_millis(100));
    }
    assert_eq!((first.is_done(), failure(&first)), (false, String::new()));
    let second = ranks[1].begin(Request::Broadcast { tensor: tensor(&mut received), root: 0 });
    for _ in 0..1000 {
        ranks.iter_mut().for_each(|rank| rank.turn(clock.now()));
        clock.advance(Duration::from_millis(1));
    }
    assert!(first.is_done() && second.is_done());
    assert_eq!(failure(&first) + &failure(&second), "");
    drop(ranks);
    assert_eq!(received, sent);
}

/// The group's handle is dropped, and with it the last hold on the node: the engine hears of both at
/// once.
#[test]
fn operations_end_when_their_group_leaves_together_with_its_node() {
    let mut ranks = ranks(2, &VirtualClock::new());
    let now = Duration::ZERO;
    let mut values = vec![7; 10];
    let begun = ranks[0].begin(Request::Broadcast { tensor: tensor(&mut values), root: 1 });
    ranks[0].turn(now);
    let other = ranks[1].begin(Request::Barrier);
    ranks[0].shared.leave();
    ranks[0].engine.close(now);
    for _ in 0..10 {
        ranks.iter_mut().for_each(|rank| rank.turn(now));
    }
    let words = "it left the group while operations were under way";
    assert!(begun.is_done() && failure(&begun).contains(words), "{}", failure(&begun));
    assert!(other.is_done() && failure(&other).contains(words), "{}", failure(&other));
    drop(ranks);
}

/// Frames of one group come before the other's are wanted, and before its rank is there: they are kept
/// aside, or stay in the link, and each operation gets its own.
#[test]
fn two_groups_in_any_order_get_what_is_theirs() {
    const SIZE: u16 = 3;
    const OPERATIONS: usize = 6;
    for seed in 0..40u64 {
        let mut dice = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut below = move |end: usize| {
            dice = dice
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) as usize % end
        };
        let shape = Shape { seed, capacity: [100, 5000, 64 << 10][below(3)], ..Shape::default() };
        let mut ranks = ranks_with(SIZE, &VirtualClock::new(), shape);
        // The second group is opened at another time on each rank.
        let mut groups: Vec<_> = ranks.iter().map(|rank| vec![rank.shared.clone()]).collect();
        // By group and operation: bytes of the tensor. Every rank contributes its number plus one.
        let sizes: [Vec<usize>; 2] =
            [(); 2].map(|()| (0..OPERATIONS).map(|_| below(40_000)).collect());
        let mut next = vec![[0; 2]; usize::from(SIZE)];
        let mut begun = Vec::new();
        let mut tensors = Vec::new();
        for turn in 0.. {
            assert!(turn < 1_000_000, "seed {seed}: stuck at {next:?}");
            let rank = below(usize::from(SIZE));
            if below(20) == 0 {
                let group = below(2);
                if group == groups[rank].len() {
                    groups[rank].push(ranks[rank].attach(3, rank as u16, SIZE));
                } else if next[rank][group] < OPERATIONS {
                    let len = sizes[group][next[rank][group]];
                    next[rank][group] += 1;
                    let mut values = vec![rank as u8 + 1; len];
                    let (tensor, op) = (tensor(&mut values), ReduceOp::Sum);
                    let shared = &groups[rank][group];
                    begun.push(begin(shared, Request::AllReduce { tensor, op }));
                    tensors.push(values);
                }
            }
            ranks[rank].turn(Duration::ZERO);
            let all = begun.len() == 2 * OPERATIONS * usize::from(SIZE);
            if all && begun.iter().all(|operation| operation.is_done()) {
                break;
            }
        }
        drop(ranks);
        assert!(begun.iter().all(|operation| failure(operation).is_empty()));
        assert!(tensors.iter().flatten().all(|&value| value == 6), "seed {seed}");
    }
}
