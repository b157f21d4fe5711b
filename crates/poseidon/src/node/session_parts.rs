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
use poseidon_core::{ChannelId, Clock, LaneId, Layer, LayerId, Plan, Shard, Store};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};

/// A session's parts on all lanes, and what these parts share with the program.
pub(crate) struct SessionParts {
    pub(crate) id: ChannelId,
    pub(crate) book: Arc<Book>,
    pub(crate) plan: Plan,
    pub(crate) board: Arc<Board>,
    pub(crate) counters: Arc<Counters>,
    /// By layer: where its factors meet, if it goes by factors. No layer has any on a dedicated
    /// server.
    pub(crate) matrices: Matrices,
    lanes: Vec<Mailbox>,
    /// Layer → the lanes that hold chunks of it: only they are woken for it.
    lanes_of: Vec<Vec<LaneId>>,
}

struct Mailbox {
    commands: Sender<Command>,
    driver: Arc<Driver>,
}

/// By layer: where its factors meet, if it goes by factors.
type Matrices = Vec<Option<Arc<FactorMatrices>>>;

/// What a plan makes on one lane.
pub(crate) struct LaneState {
    pub(crate) lane: LaneId,
    pub(crate) state: PlanState,
}

impl SessionParts {
    /// Attaches the session `id`, which `book` describes, to every lane of `node`.
    pub(crate) fn attach(node: &Node, id: ChannelId, book: Arc<Book>) -> Self {
        let plan = book.plan();
        let layers: Arc<[Layer]> = book.job.layers.clone().into();
        let board = Arc::new(Board::new(layers.len()));
        let counters = Arc::new(Counters::new(layers.len()));
        let (lanes_of, lanes) = (lanes_of(&plan), Vec::new());
        let matrices = Vec::new();
        let mut parts = Self { id, book, plan, board, counters, matrices, lanes, lanes_of };
        let (states, matrices) = parts.prepare(node, &parts.book);
        parts.matrices = matrices;
        for LaneState { lane, state } in states {
            let (commands, taken) = mpsc::channel();
            let part = SessionLane::new(Parts {
                id,
                me: node.me,
                cluster: parts.book.cluster.clone(),
                layers: layers.clone(),
                state,
                commands: taken,
                board: parts.board.clone(),
                counters: parts.counters.clone(),
                stall: node.config.timeout,
            });
            let driver = node.lane(lane).clone();
            driver.attach(Box::new(part));
            parts.lanes.push(Mailbox { commands, driver });
        }
        parts
    }

    /// What the plan of `book` makes on every lane of `node`, and the matrices where its factors
    /// meet.
    pub(crate) fn prepare(&self, node: &Node, book: &Book) -> (Vec<LaneState>, Matrices) {
        let plan = book.plan();
        let (cluster, job, me) = (&book.cluster, &book.job, node.me);
        let role = cluster.role(me);
        let matrices: Matrices = (0..plan.layers() as u32)
            .map(|layer| {
                let layout =
                    plan.factors(LayerId(layer)).filter(|_| role.is_some_and(|r| r.worker))?;
                Some(Arc::new(FactorMatrices::new(LayerId(layer), layout.clone())))
            })
            .collect();
        let state = |lane| {
            let shard = Shard { node: me, lane };
            let store = Store::new(&plan, shard, job.optimizer.clone(), job.order());
            let board = self.board.clone();
            LaneState {
                lane,
                state: PlanState::new(shard, cluster, &plan, store, &matrices, board),
            }
        };
        (cluster.lane_ids().map(state).collect(), matrices)
    }

    /// The session follows the plan of `book` from now on. The lanes have got their part of it
    /// already.
    pub(crate) fn replace(&mut self, book: Arc<Book>, matrices: Matrices) {
        self.plan = book.plan();
        self.lanes_of = lanes_of(&self.plan);
        self.book = book;
        self.matrices = matrices;
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

    /// Tells one lane.
    pub(crate) fn command(&self, lane: LaneId, command: Command) {
        self.lanes[lane.index()].send(command);
    }

    /// Tells every lane.
    pub(crate) fn command_all(&self, command: impl Fn() -> Command) {
        self.lanes.iter().for_each(|lane| lane.send(command()));
    }

    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Waits until the session has no part on any lane any more. The parts end on their own
    /// deadlines.
    pub(crate) fn wait_closed(&self) -> Result<(), Error> {
        self.board.wait_closed();
        self.board.failure().map_or(Ok(()), Err)
    }
}

impl Mailbox {
    fn send(&self, command: Command) {
        // If the part has stopped, its reason is on the board.
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
