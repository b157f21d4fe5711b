use super::*;
use crate::Servers;

const ME: NodeId = NodeId(1);

/// 3 workers, rows of 5 numbers, batches of at most 4 rows in chunks of 2: two chunks each.
fn layout(lanes: u16) -> Layout {
    let cluster = Cluster::new(3, Servers::Colocated, lanes).unwrap();
    Layout::new((2, 3), 4, &cluster, ChunkSize { min: 4, max: 40 }, 0)
}

fn tree() -> Tree {
    Tree::new(&Cluster::new(3, Servers::Colocated, 1).unwrap())
}

/// Chunk `index` of worker `from`, as it is on the wire.
fn frame(from: u16, index: u32, clock: u64, rows: usize) -> Header {
    let chunk = ChunkKey { layer: LayerId(7), index: 2 * u32::from(from) + index };
    let bare = Header::bare(Kind::Factors, NodeId(from), (rows * 20) as u32);
    Header { chunk, value: 0.5, clock: Clock(clock), ..bare }
}

fn gather() -> Gather {
    Gather::new(LayerId(7), &layout(1), ME, LaneId(0))
}

fn send(gather: &mut Gather, clock: u64, rows: usize) -> Vec<(u32, Range<usize>)> {
    let chunks = gather.handle_send(Clock(clock), rows, 0.5, false).unwrap();
    chunks.map(|(key, range)| (key.index, range)).collect()
}

fn land(gather: &mut Gather, header: &Header) -> bool {
    gather.handle_factors(header, &tree()).unwrap();
    gather.handle_landed(header.chunk.index, header.clock)
}

#[test]
fn a_layer_is_gathered_when_everybody_elses_last_chunk_lands() {
    let mut gather = gather();
    let mut awaited = 4;
    for clock in 1..5 {
        assert_eq!(send(&mut gather, clock, 4), [(2, 20..30), (3, 30..40)]);
        assert_eq!(gather.missing().count(), awaited);
        if clock == 1 {
            assert!(!land(&mut gather, &frame(2, 0, clock, 2)));
        }
        assert!(!land(&mut gather, &frame(2, 1, clock, 2)));
        // Worker 2 has all it needs and goes on: its next factors have a place already.
        assert!(!land(&mut gather, &frame(2, 0, clock + 1, 2)));
        assert!(!land(&mut gather, &frame(0, 1, clock, 2)));
        assert_eq!(
            gather.missing().map(|(key, from)| (key.index, from)).collect::<Vec<_>>(),
            [(0, NodeId(0))]
        );
        let last = gather.handle_factors(&frame(0, 0, clock, 2), &tree()).unwrap();
        assert_eq!((last.place, last.range), ((clock % 2) as usize, 0..10));
        assert!(!gather.is_gathered());
        assert!(gather.handle_landed(0, Clock(clock)));
        assert!(gather.is_gathered());
        awaited = 3;
    }
}

/// With a staleness of 2: what may be under way has six places, used in turn.
#[test]
fn workers_that_may_be_apart_have_a_place_for_every_clock_under_way() {
    let layout = Layout { lead: 2, ..layout(1) };
    let mut gather = Gather::new(LayerId(7), &layout, ME, LaneId(0));
    let whole = |gather: &mut Gather, worker, clock| {
        (0..2).for_each(|index| {
            let header = frame(worker, index, clock, 2);
            let arrival = gather.handle_factors(&header, &tree()).unwrap();
            assert_eq!(arrival.place, (clock % 6) as usize);
            gather.handle_landed(header.chunk.index, header.clock);
        });
    };
    for clock in 1..=2 {
        send(&mut gather, clock, 4);
        assert!(gather.is_gathered(), "nothing is needed before clock 3");
    }
    send(&mut gather, 3, 4);
    assert!(!gather.is_gathered());
    assert_eq!(gather.missing().count(), 4);
    // Worker 2 has everything and may be as far ahead as clock 6, and no further.
    (1..=6).for_each(|clock| whole(&mut gather, 2, clock));
    let too_far = gather.handle_factors(&frame(2, 0, 7, 2), &tree()).unwrap_err();
    assert_eq!(too_far, Violation::Clock { expected: Clock(4), got: Clock(7) });
    assert_eq!(gather.gathered(), Clock(0));
    whole(&mut gather, 0, 1);
    assert_eq!((gather.is_gathered(), gather.gathered()), (true, Clock(1)));
    whole(&mut gather, 0, 2);
    assert_eq!(gather.gathered(), Clock(2));
    // A step taken together needs its own clock.
    gather.handle_send(Clock(4), 4, 0.5, true).unwrap().for_each(drop);
    whole(&mut gather, 0, 3);
    assert!(!gather.is_gathered());
    whole(&mut gather, 0, 4);
    assert_eq!((gather.is_gathered(), gather.gathered()), (true, Clock(4)));
    let again = gather.handle_factors(&frame(0, 0, 4, 2), &tree()).unwrap_err();
    assert_eq!(again, Violation::Duplicate(Clock(4)));
}

#[test]
fn short_batches_leave_blanks() {
    let mut gather = gather();
    assert_eq!(send(&mut gather, 1, 3), [(2, 20..30), (3, 30..35)]);
    let arrival = gather.handle_factors(&frame(2, 1, 1, 1), &tree()).unwrap();
    assert_eq!(arrival, Arrival { worker: NodeId(2), place: 1, range: 50..55, blank: 55..60 });
    let arrival = gather.handle_factors(&frame(2, 0, 1, 0), &tree()).unwrap();
    assert_eq!((arrival.range, arrival.blank), (40..40, 40..50));
}

#[test]
fn only_a_last_chunk_may_be_longer_than_its_place() {
    let mut gather = gather();
    assert_eq!(send(&mut gather, 1, 7), [(2, 20..30), (3, 30..55)]);
    let layout = layout(1);
    assert_eq!(layout.placed(ME, &(30..55)), 30..40);
    let arrival = gather.handle_factors(&frame(2, 1, 1, 5), &tree()).unwrap();
    assert_eq!(arrival, Arrival { worker: NodeId(2), place: 1, range: 50..75, blank: 75..75 });
    assert_eq!(layout.placed(NodeId(2), &arrival.range), 50..60);
    let most = layout.most_rows() - 2;
    let too_long = gather.handle_factors(&frame(0, 1, 1, most + 1), &tree()).unwrap_err();
    let (most, got) = (20 * most, 20 * most + 20);
    assert_eq!(too_long, Violation::Rows { row: 20, most, got });
}

#[test]
fn a_whole_gradient_fits_beside_a_batch() {
    let cluster = Cluster::new(2, Servers::Colocated, 2).unwrap();
    for (m, n) in [(4096, 25088), (25088, 4096), (10, 7)] {
        let layout = Layout::new((m, n), 32, &cluster, ChunkSize::default(), 0);
        assert!(layout.most_rows() > 32 + 2 * m.min(n), "{m} x {n}: {}", layout.most_rows());
    }
}

#[test]
fn every_chunk_has_a_lane_and_lanes_share_evenly() {
    let layout = layout(2);
    assert_eq!(layout.chunks(), 2);
    assert_eq!(layout.lanes().collect::<Vec<_>>(), [LaneId(0), LaneId(1)]);
    let mut second = Gather::new(LayerId(7), &layout, ME, LaneId(1));
    assert_eq!(send(&mut second, 1, 4), [(3, 30..40)]);
    assert_eq!(second.handle_factors(&frame(0, 0, 1, 2), &tree()), Err(Violation::UnknownChunk));
}

#[test]
fn factors_that_have_no_place_are_violations() {
    let mut gather = gather();
    let mut refused = |header: Header| gather.handle_factors(&header, &tree()).unwrap_err();
    let clock = |expected, got| Violation::Clock { expected: Clock(expected), got: Clock(got) };
    assert_eq!(refused(frame(0, 0, 2, 2)), clock(1, 2));
    assert_eq!(refused(frame(0, 0, 0, 2)), clock(1, 0));
    assert_eq!(refused(frame(0, 9, 1, 2)), Violation::UnknownChunk);
    assert_eq!(refused(frame(1, 0, 1, 2)), Violation::NotAWorker(ME));
    assert_eq!(refused(frame(3, 0, 1, 2)), Violation::UnknownChunk);
    let wrong = Violation::WrongWay { expected: NodeId(0), got: NodeId(2) };
    assert_eq!(refused(Header { sender: NodeId(2), ..frame(0, 0, 1, 2) }), wrong);
    assert_eq!(refused(frame(0, 0, 1, 3)), Violation::Rows { row: 20, most: 40, got: 60 });
    let odd = Header { length: 21, ..frame(0, 0, 1, 2) };
    assert_eq!(refused(odd), Violation::Rows { row: 20, most: 40, got: 21 });
    assert_eq!(refused(Header { kind: Kind::Push, ..odd }), Violation::WrongKind);
    land(&mut gather, &frame(0, 0, 1, 2));
    let again = gather.handle_factors(&frame(0, 0, 1, 2), &tree());
    assert_eq!(again, Err(Violation::Duplicate(Clock(1))));
    // Two clocks ahead: the place is still in use.
    send(&mut gather, 1, 4);
    assert_eq!(gather.handle_factors(&frame(0, 0, 3, 2), &tree()), Err(clock(2, 3)));
    let other_rate = Header { value: 0.25, ..frame(0, 1, 1, 2) };
    let rate = Violation::Rate { expected: 0.5, got: 0.25 };
    assert_eq!(gather.handle_factors(&other_rate, &tree()), Err(rate));
}
