//! Groups on engines without threads and sockets, in virtual time.

use super::channel::{Command, GroupChannel, Shared};
use super::work::Completion;
use super::{Request, Tensor};
use crate::engine::{Engine, Links};
use poseidon_core::{ChannelId, Dtype, NodeId};
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
    fn begin(&self, request: Request) -> Arc<Completion> {
        let completion = Arc::new(Completion::new(Box::new(())));
        let begun = completion.clone();
        self.shared.command(Command::Begin { request, timeout: PATIENCE, completion });
        begun
    }

    fn turn(&mut self, now: Duration) {
        (0..8).for_each(|node| self.engine.handle_ready(NodeId(node), true, true, false));
        self.engine.turn(now);
    }
}

/// Ranks with a link between any two.
fn ranks(size: u16, clock: &VirtualClock) -> Vec<Rank> {
    let mut links: Vec<Links> = (0..size).map(|_| Vec::new()).collect();
    // This seed cuts none of the first six reads and writes of an end.
    let shape = Shape { seed: 1430, ..Shape::default() };
    for b in 0..size {
        for a in 0..b {
            let (one, other) = pair(clock.clone(), shape);
            links[usize::from(a)].push((NodeId(b), Box::new(one)));
            links[usize::from(b)].push((NodeId(a), Box::new(other)));
        }
    }
    let rank = |(rank, links): (u16, Links)| {
        let nodes = (0..size).map(NodeId).collect();
        let names = (0..size).map(|rank| format!("rank {rank}")).collect();
        let shared = Arc::new(Shared::default());
        let channel = GroupChannel::new(ChannelId(2), rank, nodes, names, shared.clone());
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

#[test]
fn an_abort_does_not_undo_what_others_have_sent_before() {
    let mut ranks = ranks(3, &VirtualClock::new());
    let now = Duration::ZERO;
    let begun: Vec<_> = ranks.iter().map(|rank| rank.begin(Request::Barrier)).collect();
    for rank in [0, 1, 2, 1, 1] {
        ranks[rank].turn(now);
    }
    assert!(begun[1].is_done() && !begun[0].is_done());
    ranks[1].shared.command(Command::Abort("enough".into()));
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
    ranks[0].shared.command(Command::Leave);
    ranks[0].engine.close(now);
    for _ in 0..10 {
        ranks.iter_mut().for_each(|rank| rank.turn(now));
    }
    let words = "it left the group while operations were under way";
    assert!(begun.is_done() && failure(&begun).contains(words), "{}", failure(&begun));
    assert!(other.is_done() && failure(&other).contains(words), "{}", failure(&other));
    drop(ranks);
}
