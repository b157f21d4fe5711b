use super::*;
use crate::Buffer;
use poseidon_core::plan::Rules;
use poseidon_core::store::Order;
use poseidon_core::wire::Terms;
use poseidon_core::{ChunkSize, LaneId, Layer, Optimizer, Reduction, Servers};

const LAYER: LayerId = LayerId(0);
const LEN: usize = 16;

/// A lane of a worker that is alone: results come back at once.
struct Lane {
    state: PlanState,
    /// The elements of the layer that are its own.
    own: Vec<Range<usize>>,
}

impl Lane {
    fn new(lane: LaneId, board: Arc<Board>) -> Self {
        let cluster = Cluster::new(1, Servers::Colocated, 2).unwrap();
        let rules = Rules { chunk: ChunkSize::at_most(16), ..Rules::default() };
        let plan = Plan::new(&cluster, &[Layer::new("l", LEN)], rules);
        let me = Shard { node: NodeId(0), lane };
        let rule = Optimizer::Reduce(Reduction::Sum);
        let store = Store::new(&plan, me, |_| &rule, Order::Arrival);
        let state = PlanState::new(me, &cluster, &plan, store, &[None], board);
        let own = state.syncers[0].parts().iter().map(|part| part.range.clone()).collect();
        Self { state, own }
    }

    fn send(&mut self, exchange: &Arc<Exchange>, ready: &Range<usize>) {
        let nobody = |_, _| panic!("there are no other nodes");
        self.state.handle_send(exchange.clone(), ready, Duration::ZERO, nobody).unwrap();
        self.state.poll_completed(Duration::ZERO, nobody);
    }
}

fn exchange(clock: u64) -> Arc<Exchange> {
    Arc::new(Exchange {
        layer: LAYER,
        clock: Clock(clock),
        kind: Kind::Push,
        terms: Terms::default(),
        gradient: Buffer::zeroed(LEN).into(),
        destination: None,
        landings: None,
    })
}

#[test]
fn a_piece_that_comes_after_a_lane_has_finished_leaves_the_lane_at_rest() {
    let board = Arc::new(Board::new(1, 2));
    let mut first = Lane::new(LaneId(0), board.clone());
    let mut second = Lane::new(LaneId(1), board.clone());
    assert!(!first.own.is_empty() && !second.own.is_empty(), "both lanes have chunks");
    for clock in 1..4 {
        let sent = exchange(clock);
        board.begin(LAYER, 2);
        for piece in first.own.clone() {
            first.send(&sent, &piece);
        }
        assert!(first.state.is_at_rest());
        // The pieces of the other lane go to all lanes of the layer.
        for piece in second.own.clone() {
            first.send(&sent, &piece);
            second.send(&sent, &piece);
        }
        assert!(first.state.is_at_rest(), "it has finished clock {clock}");
        assert!(board.is_done(LAYER));
        assert_eq!(Arc::strong_count(&sent), 1, "the memory is the program's again");
    }
}
