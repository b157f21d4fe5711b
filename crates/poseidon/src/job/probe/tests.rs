use super::*;
use poseidon_link::memory::{self, Shape, VirtualClock};

/// Both ends send to each other over a link of this rate. Returns what they measured, and how
/// long it took.
fn measure(mbit: u64, delay: Duration, encrypted: bool) -> ([Rate; 2], Duration) {
    let clock = VirtualClock::new();
    let bytes_per_second = Some(mbit * 1_000_000 / 8);
    // All of a train fits, so that it does not go byte by byte as the other end makes room.
    let capacity = 2 * LONGEST;
    let shape = Shape { delay, bytes_per_second, capacity, ..Shape::default() };
    let (mut a, mut b, faults): (Box<dyn Link>, Box<dyn Link>, _) = if encrypted {
        let (a, b, faults) = memory::encrypted_pair(clock.clone(), shape);
        (Box::new(a), Box::new(b), faults)
    } else {
        let (a, b) = memory::tagged_pair(clock.clone(), shape);
        let faults = a.faults();
        (Box::new(a), Box::new(b), faults)
    };
    let base = Instant::now();
    let train = || Some(Train::new(0, base));
    let mut ends = [
        End::new((NodeId(0), NodeId(1)), &mut *a, train(), true),
        End::new((NodeId(1), NodeId(0)), &mut *b, train(), true),
    ];
    let mut steps = 0;
    while ends.iter().any(|end| !end.is_done()) {
        steps += 1;
        assert!(steps < 100_000, "no end after {:?}", clock.now());
        ends.iter_mut().for_each(|end| end.advance(base + clock.now()).unwrap());
        let next = faults.next_event().unwrap_or(clock.now());
        clock.advance(next.saturating_sub(clock.now()));
    }
    let rates = ends.each_ref().map(|end| end.rate.unwrap());
    // Nothing is left of the measurement: the links' engines begin with a clean stream.
    for link in [&mut a, &mut b] {
        let left = link.read(&mut [IoSliceMut::new(&mut [0; 1])]).unwrap_err();
        assert_eq!(left.kind(), ErrorKind::WouldBlock);
    }
    (rates, clock.now())
}

#[test]
fn a_link_is_measured_as_fast_as_it_is() {
    let links = [(100, 0), (1000, 0), (1000, 100), (10_000, 30)];
    for (encrypted, (mbit, delay)) in
        [false, true].into_iter().flat_map(|encrypted| links.map(|link| (encrypted, link)))
    {
        let (rates, took) = measure(mbit, Duration::from_micros(delay), encrypted);
        for rate in rates {
            let ratio = rate.bits() as f64 / (mbit * 1_000_000) as f64;
            assert!((0.75..1.02).contains(&ratio), "{rate} of {mbit} Mbit/s");
        }
        // In virtual time: bytes of all trains, both ways at once.
        assert!(took < Duration::from_millis(50), "{took:?} at {mbit} Mbit/s");
    }
}

/// A machine that computes beside the measurement holds a train up now and then.
#[test]
fn trains_that_are_held_up_do_not_count() {
    let (mut a, _b) = memory::tagged_pair(VirtualClock::new(), Shape::default());
    let mut end = End::new((NodeId(0), NodeId(1)), &mut a, None, false);
    (end.met, end.round_trip) = (true, Some(Duration::ZERO));
    let now = Instant::now();
    // What comes after a train of these bytes that took so long.
    let mut after = |bytes, tenths_of_ms: u64| {
        let took = Duration::from_micros(100 * tenths_of_ms);
        end.judge(Train::new(bytes, now), now + took);
        (end.train.take().map(|train| train.bytes), end.rate)
    };
    let long = 1 << 20;
    // A short train took long enough by chance: the next one of its length says so.
    assert_eq!(after(long / 2, 90), (Some(long / 2), None));
    assert_eq!(after(long / 2, 43), (Some(long), None));
    assert_eq!(after(long, 200), (Some(long), None));
    assert_eq!(after(long, 85), (Some(long), None));
    let fastest = Rate::of(long as u64, 0.0084);
    assert_eq!(after(long, 84), (None, Some(fastest)));
}

/// Trains that never agree come to an end.
#[test]
fn so_many_trains_are_judged_at_most() {
    let (mut a, _b) = memory::tagged_pair(VirtualClock::new(), Shape::default());
    let mut end = End::new((NodeId(0), NodeId(1)), &mut a, None, false);
    (end.met, end.round_trip) = (true, Some(Duration::ZERO));
    let now = Instant::now();
    let trains = (1..=MOST_TRAINS as u32).take_while(|number| {
        end.judge(Train::new(LONGEST, now), now + LONG_ENOUGH * number.pow(2));
        end.train.take().is_some()
    });
    assert_eq!(trains.count(), MOST_TRAINS - 1);
    assert_eq!(end.rate, Some(Rate::of(LONGEST as u64, LONG_ENOUGH.as_secs_f64())));
}

/// Who sends to whom, in all rounds.
fn rounds(racks: &[u16]) -> Vec<Vec<(usize, usize)>> {
    let round = |round| {
        let mut pairs = Vec::new();
        for place in 0..racks.len() {
            if let Some([to, from]) = partners(place, round, racks) {
                assert_eq!(partners(to, round, racks).map(|back| back[1]), Some(place));
                assert_eq!(partners(from, round, racks).map(|on| on[0]), Some(place));
                pairs.push((place, to));
            }
        }
        pairs
    };
    (0..ROUNDS).map(round).collect()
}

#[test]
fn everybody_sends_and_receives_in_every_round() {
    for count in 2..20 {
        let rounds = rounds(&vec![0; count]);
        assert!(rounds.iter().all(|pairs| pairs.len() == count));
        assert!(rounds.iter().flatten().all(|(from, to)| from != to));
    }
    let four = rounds(&[0; 4]);
    assert_eq!(four[0], [(0, 3), (1, 0), (2, 1), (3, 2)]);
    assert_eq!(four[2], [(0, 2), (1, 3), (2, 0), (3, 1)]);
}

/// Racks of three hosts, one and two.
#[test]
fn one_stream_leaves_a_rack_in_every_other_round_and_then_none() {
    let racks = [0, 0, 0, 1, 2, 2];
    let rounds = rounds(&racks);
    for pairs in [&rounds[0], &rounds[2]] {
        assert_eq!(pairs, &[(0, 5), (1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]);
    }
    for pairs in [&rounds[1], &rounds[3]] {
        // The lonely host has nobody to send to.
        assert_eq!(pairs, &[(0, 2), (1, 0), (2, 1), (4, 5), (5, 4)]);
    }
}

/// Where streams of a ring are measured, they have a ring's windows. Hosts of two racks in turn.
#[test]
fn neighbours_in_rings_are_heard() {
    let cluster = Cluster::new(6, Servers::Colocated, 1).unwrap();
    let cluster = cluster.with_hosts(Vec::new(), vec![0, 1, 0, 1, 0, 1]).unwrap();
    let probers = [0, 2, 4, 1, 3, 5].map(NodeId);
    let tree = Tree::new(&cluster);
    for me in probers {
        let heard = heard_in_rings(&cluster, &probers, me);
        assert!(tree.senders(me, true).iter().all(|node| heard.contains(node)), "{me}: {heard:?}");
        let in_rack = |node: &&NodeId| tree.rack(tree.host(**node)) == tree.rack(tree.host(me));
        assert_eq!(
            heard.iter().filter(in_rack).count(),
            if me.0 == 4 || me.0 == 5 { 2 } else { 4 }
        );
    }
    let flat = cluster.clone().apart();
    assert!(probers.iter().all(|me| heard_in_rings(&flat, &probers, *me).is_empty()));
}

#[test]
fn what_is_not_a_probe_is_refused() {
    let (mut a, mut b) = memory::pair(VirtualClock::new(), Shape::default());
    let mut end = End::new((NodeId(0), NodeId(1)), &mut a, None, true);
    let refused = |end: &mut End<'_>, b: &mut dyn Link, header: Header| {
        let bytes = header.encode();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            rest = &rest[b.write(&[IoSlice::new(rest)]).unwrap()..];
        }
        end.advance(Instant::now()).unwrap_err().to_string()
    };
    let probe = |sender, length| Header::bare(Kind::Probe, NodeId(sender), length);
    for header in [
        Header::bare(Kind::Heartbeat, NodeId(1), 0),
        probe(2, 8),
        probe(1, PIECE as u32 + 1),
        // There is no train to acknowledge.
        Header { chunk: ChunkKey { layer: LayerId(0), index: 2 }, ..probe(1, 0) },
        Header { chunk: ChunkKey { layer: LayerId(0), index: 9 }, ..probe(1, 0) },
    ] {
        let words = refused(&mut end, &mut b, header);
        assert!(words.contains("expected a probe"), "{words}");
    }
}
