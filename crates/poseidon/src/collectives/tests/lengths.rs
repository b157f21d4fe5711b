//! Ranks that do not agree about lengths, and frames that nobody asks for.

use super::*;
use poseidon_link::memory::VirtualClock;

/// Two pieces and one piece: what comes first fits both.
const LONG: usize = 512 << 10;
const SHORT: usize = 256 << 10;

/// Begins `requests`, one on each rank, and a barrier after them. Returns how the first of them failed
/// on each rank. A rank that had its part before the other one looked hears of it in the barrier.
fn both_fail(requests: [Request; 2]) -> [String; 2] {
    let shape = Shape { capacity: 16 << 10, ..Shape::default() };
    let mut ranks = ranks_with(2, &VirtualClock::new(), shape);
    let mut begun = Vec::new();
    for (rank, request) in ranks.iter().zip(requests) {
        begun.push([rank.begin(request), rank.begin(Request::Barrier)]);
    }
    for _ in 0..1000 {
        ranks.iter_mut().for_each(|rank| rank.turn(Duration::ZERO));
    }
    assert!(begun.iter().flatten().all(|operation| operation.is_done()), "an operation waits on");
    assert!(failure(&begun[1][0]).contains("are awaited"), "rank 1 takes another length");
    let first = |of: &[Arc<Completion>; 2]| of.iter().map(|o| failure(o)).find(|w| !w.is_empty());
    [0, 1].map(|rank: usize| first(&begun[rank]).unwrap_or_default())
}

fn assert_both_lengths(words: &[String; 2], operation: &str) {
    for (rank, words) in words.iter().enumerate() {
        let facts = [&LONG.to_string(), &SHORT.to_string(), "rank 0", "rank 1", operation];
        assert!(
            facts.iter().all(|fact| words.contains(fact)),
            "{operation} on rank {rank}: {words}"
        );
    }
}

#[test]
fn a_message_of_another_length_is_an_error_on_both_ends() {
    for (sent, received) in [(LONG, SHORT), (SHORT, LONG)] {
        let (mut values, mut place) = (vec![7; sent], vec![0; received]);
        let send = Request::Send { tensor: tensor(&mut values), to: 1, tag: 3 };
        let receive = Request::Receive { tensor: tensor(&mut place), from: Some(0), tag: 3 };
        let words = both_fail([send, receive]);
        assert_both_lengths(&words, "receive from rank 0 with tag 3");
    }
}

#[test]
fn a_part_of_another_length_is_an_error_on_both_ends() {
    for (given, taken) in [(LONG, SHORT), (SHORT, LONG)] {
        for operation in ["all_gather", "gather", "scatter", "all_to_all", "reduce_scatter"] {
            // What rank 0 gives, what rank 1 takes from it, and what is of the same length.
            let [mut own, mut copy] = [(); 2].map(|()| vec![7; given]);
            let [mut place, mut sum] = [(); 2].map(|()| vec![0; taken]);
            let mut rest = [(); 6].map(|()| vec![1; SHORT]);
            let [own, copy] = [&mut own, &mut copy].map(|values| tensor(values));
            let [place, sum] = [&mut place, &mut sum].map(|values| tensor(values));
            let [a, b, c, d, e, f] = rest.each_mut().map(|values| tensor(values));
            let op = ReduceOp::Sum;
            let requests = match operation {
                "all_gather" => [
                    Request::AllGather { input: own, outputs: vec![copy, a] },
                    Request::AllGather { input: b, outputs: vec![place, c] },
                ],
                "gather" => [
                    Request::Gather { input: own, outputs: Vec::new(), root: 1 },
                    Request::Gather { input: b, outputs: vec![place, c], root: 1 },
                ],
                "scatter" => [
                    Request::Scatter { inputs: vec![a, own], output: b, root: 0 },
                    Request::Scatter { inputs: Vec::new(), output: place, root: 0 },
                ],
                "all_to_all" => [
                    Request::AllToAll { inputs: vec![a, own], outputs: vec![b, c] },
                    Request::AllToAll { inputs: vec![d, e], outputs: vec![place, f] },
                ],
                _ => [
                    Request::ReduceScatter { inputs: vec![a, own], output: b, op },
                    Request::ReduceScatter { inputs: vec![d, place], output: sum, op },
                ],
            };
            assert_both_lengths(&both_fail(requests), operation);
        }
    }
}

/// Rank 0 sends more than is kept aside, and then what rank 1 asks for.
fn behind_many(ranks: &[Rank], values: &mut [u8], place: &mut [u8]) -> Arc<Completion> {
    for part in values.chunks_mut(1 << 20) {
        ranks[0].begin(Request::Send { tensor: tensor(part), to: 1, tag: 1 });
    }
    ranks[0].begin(Request::Send { tensor: tensor(&mut values[..10]), to: 1, tag: 2 });
    ranks[1].begin(Request::Receive { tensor: tensor(place), from: Some(0), tag: 2 })
}

/// The most that is kept aside for one link.
const MOST: usize = 64 << 20;

#[test]
fn what_is_kept_for_a_later_receive_has_a_bound_and_the_error_says_what_is_in_the_way() {
    let clock = VirtualClock::new();
    let mut ranks = ranks(2, &clock);
    let (mut values, mut place) = (vec![7; 2 * MOST], vec![0; 10]);
    let received = behind_many(&ranks, &mut values, &mut place);
    for _ in 0..3000 {
        ranks.iter_mut().for_each(|rank| rank.turn(clock.now()));
    }
    let moved = ranks[1].engine.moved() as usize;
    assert!((MOST - (1 << 20)..MOST + (1 << 20)).contains(&moved), "{moved} bytes were read");
    assert!(!received.is_done());
    while clock.now() < PATIENCE {
        clock.advance(Duration::from_millis(500));
        ranks.iter_mut().for_each(|rank| rank.turn(clock.now()));
    }
    let words = failure(&received);
    assert!(words.contains("receive from rank 0 with tag 2"), "{words}");
    assert!(words.contains("a message with tag 1, which nothing here has asked for"), "{words}");
    drop(ranks);
}

#[test]
fn what_is_kept_goes_on_when_it_is_asked_for() {
    let mut ranks = ranks(2, &VirtualClock::new());
    let (mut values, mut place) = (vec![7; MOST + (8 << 20)], vec![0; 10]);
    let received = behind_many(&ranks, &mut values, &mut place);
    for _ in 0..3000 {
        ranks.iter_mut().for_each(|rank| rank.turn(Duration::ZERO));
    }
    assert!(!received.is_done());
    let mut kept = vec![0; values.len()];
    for part in kept.chunks_mut(1 << 20) {
        ranks[1].begin(Request::Receive { tensor: tensor(part), from: Some(0), tag: 1 });
    }
    for _ in 0..3000 {
        ranks.iter_mut().for_each(|rank| rank.turn(Duration::ZERO));
    }
    assert!(received.is_done() && failure(&received).is_empty(), "{}", failure(&received));
    drop(ranks);
    assert!(place == [7; 10] && kept == values);
}
