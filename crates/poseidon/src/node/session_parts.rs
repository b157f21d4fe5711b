//! What one session has on the lanes of its node.

use super::Node;
use crate::Error;
use crate::engine::driver::Driver;
use crate::engine::traffic::Counters;
use crate::job::book::Book;
use crate::lane::board::Board;
use crate::lane::plan_state::PlanState;
use crate::lane::{Command, Parts, SessionLane};
use crate::memory::exchange::Exchange;
use crate::memory::factors::FactorMatrices;
use poseidon_core::{
    ChannelId, Clock, Cluster, Epoch, LaneId, Layer, LayerId, NodeId, Plan, Shard, Store,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};

/// A session's parts on all lanes, and what they share with the program.
pub(crate) struct SessionParts {
    pub(crate) book: Arc<Book>,
    pub(crate) plan: Plan,
    pub(crate) board: Arc<Board>,
    pub(crate) counters: Arc<Counters>,
    /// By layer, for those that go by factors: where they meet. Empty on a server.
    pub(crate) matrices: Vec<Option<Arc<FactorMatrices>>>,
    lanes: Vec<Mailbox>,
    /// Layer → the lanes that hold chunks of it: only they are woken for it.
    lanes_of: Vec<Vec<LaneId>>,
}

struct Mailbox {
    commands: Sender<Command>,
    driver: Arc<Driver>,
}

impl SessionParts {
    /// Attaches the session `id`, which `book` describes, to every lane of `node`.
    pub(crate) fn attach(node: &Node, id: ChannelId, book: Arc<Book>) -> Self {
        let plan = book.plan();
        let layers: Arc<[Layer]> = book.job.layers.clone().into();
        let board = Arc::new(Board::new(layers.len()));
        let counters = Arc::new(Counters::new(layers.len()));
        let matrices = matrices(&book.cluster, &plan, node.me);
        let mut lanes = Vec::new();
        for lane in book.cluster.lane_ids() {
            let (commands, taken) = mpsc::channel();
            let shard = Shard { node: node.me, lane };
            let state = plan_state(shard, &book, &plan, &matrices, &board);
            let part = SessionLane::new(Parts {
                id,
                me: node.me,
                cluster: book.cluster.clone(),
                layers: layers.clone(),
                state,
                commands: taken,
                board: board.clone(),
                counters: counters.clone(),
                stall: node.config.timeout,
            });
            let driver = node.lane(lane).clone();
            driver.attach(Box::new(part));
            lanes.push(Mailbox { commands, driver });
        }
        let lanes_of = lanes_of(&plan);
        Self { book, plan, board, counters, matrices, lanes, lanes_of }
    }

    /// Hands a layer to the lanes that hold chunks of it.
    pub(crate) fn dispatch(&self, exchange: &Arc<Exchange>) {
        let lanes = &self.lanes_of[exchange.layer.index()];
        self.board.begin(exchange.layer, lanes.len());
        for lane in lanes {
            self.lanes[lane.index()].send(Command::Send(exchange.clone()));
        }
    }

    /// Has the lanes send this worker's factors, which are in their place.
    pub(crate) fn dispatch_factors(
        &self,
        matrices: &FactorMatrices,
        clock: Clock,
        rows: usize,
        rate: f32,
    ) {
        let layer = matrices.layer;
        self.board.begin(layer, matrices.layout.lanes().count());
        for lane in matrices.layout.lanes() {
            self.lanes[lane.index()].send(Command::SendFactors { layer, clock, rows, rate });
        }
    }

    /// Tells every lane.
    pub(crate) fn command_all(&self, command: impl Fn() -> Command) {
        self.lanes.iter().for_each(|lane| lane.send(command()));
    }

    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Waits until the session has no part on any lane any more. They end on their own deadlines.
    pub(crate) fn wait_closed(&self) -> Result<(), Error> {
        self.board.wait_closed();
        self.board.failure().map_or(Ok(()), Err)
    }
}

impl Mailbox {
    fn send(&self, command: Command) {
        // A lane that has stopped has left its reason on the board.
        if self.commands.send(command).is_ok() {
            self.driver.wake();
        }
    }
}

fn lanes_of(plan: &Plan) -> Vec<Vec<LaneId>> {
    let layers = (0..plan.layers() as u32).map(LayerId);
    let lanes =
        |layer| plan.layer_chunks(layer).map(|(_, shard)| shard.lane).collect::<BTreeSet<_>>();
    layers.map(|layer| lanes(layer).into_iter().collect()).collect()
}

/// A worker's shard and syncers, or a server's shard alone.
fn plan_state(
    shard: Shard,
    book: &Book,
    plan: &Plan,
    matrices: &[Option<Arc<FactorMatrices>>],
    board: &Arc<Board>,
) -> PlanState {
    let serves = book.cluster.role(shard.node).is_some_and(|role| role.server);
    let (workers, job) = (book.cluster.workers(), &book.job);
    let store =
        serves.then(|| Store::new(plan, shard, workers, job.optimizer.clone(), job.order()));
    PlanState::new(shard, &book.cluster, plan, Epoch::FIRST, store, matrices, board.clone())
}

/// Where the factors of each layer meet on `node`, if it is a worker.
fn matrices(cluster: &Cluster, plan: &Plan, node: NodeId) -> Vec<Option<Arc<FactorMatrices>>> {
    let works = cluster.role(node).is_some_and(|role| role.worker);
    let matrices = |layer| {
        let layout = plan.factors(layer).filter(|_| works)?;
        Some(Arc::new(FactorMatrices::new(layer, layout.clone())))
    };
    (0..plan.layers() as u32).map(LayerId).map(matrices).collect()
}
