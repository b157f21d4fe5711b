//! What one session has on the lanes of its node.

use super::{Node, checkpoint};
use crate::Error;
use crate::engine::driver::Driver;
use crate::engine::traffic::Counters;
use crate::job::book::Book;
use crate::job::patience::Patience;
use crate::lane::board::Board;
use crate::lane::plan_state::PlanState;
use crate::lane::{Command, Parts, SessionLane};
use crate::memory::available::{Available, available};
use crate::memory::exchange::Exchange;
use crate::memory::factors::FactorMatrices;
use crate::memory::kept::KeptPiece;
use crate::trace::{SessionTrace, What};
use poseidon_checkpoint::Checkpoint;
use poseidon_core::wire::Terms;
use poseidon_core::{ChannelId, Clock, LaneId, Layer, LayerId, NodeId, Plan, Shard, Store};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A session's parts on all lanes, and what these parts share with the program.
pub(crate) struct SessionParts {
    pub(crate) id: ChannelId,
    pub(crate) book: Arc<Book>,
    pub(crate) plan: Plan,
    pub(crate) board: Arc<Board>,
    pub(crate) counters: Arc<Counters>,
    /// What is noted of the session.
    pub(crate) trace: Arc<SessionTrace>,
    /// By layer: where its factors meet, if it goes by factors. No layer has any on a dedicated
    /// server.
    pub(crate) matrices: Matrices,
    /// Where what workers asked to keep goes, and where it comes out. Whoever writes it to storage
    /// holds the other end meanwhile.
    pub(crate) keeper: Sender<KeptPiece>,
    pub(crate) kept: Arc<Mutex<Option<Receiver<KeptPiece>>>>,
    /// By lane. Shared with consignments.
    lanes: Arc<[Mailbox]>,
    /// Layer → the lanes that hold chunks of it: only they are woken for it.
    lanes_of: Vec<Arc<[LaneId]>>,
}

/// A layer that goes out piece by piece, from a thread beside the program.
pub(crate) struct Consignment {
    pub(crate) board: Arc<Board>,
    trace: Arc<SessionTrace>,
    layer: LayerId,
    /// By lane.
    mailboxes: Arc<[Mailbox]>,
    /// The lanes that have a part in it.
    lanes: Arc<[LaneId]>,
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
    /// Attaches the session `id`, which `book` describes, to every lane of `node`. Its shards go on
    /// where `checkpoint` left them.
    pub(crate) fn attach(
        node: &Node,
        id: ChannelId,
        book: Arc<Book>,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Self, Error> {
        let plan = book.plan();
        if let Some(available) = available() {
            check_memory(&book, &plan, node.me, &available)?;
        }
        let layers: Arc<[Layer]> = book.job.layers.clone().into();
        let board = Arc::new(Board::new(layers.len(), book.cluster.workers()));
        let counters = Arc::new(Counters::new(book.cluster.lanes().into(), layers.len()));
        let trace = node.observed.open(id, &book, &counters);
        let (lanes_of, lanes) = (lanes_of(&plan), Arc::default());
        let matrices = Vec::new();
        let (keeper, kept) = mpsc::channel();
        let kept = Arc::new(Mutex::new(Some(kept)));
        let mut parts = Self {
            id,
            book,
            plan,
            board,
            counters,
            trace,
            matrices,
            keeper,
            kept,
            lanes,
            lanes_of,
        };
        let (mut states, matrices) = parts.prepare(node, &parts.book);
        parts.matrices = matrices;
        if let Some(checkpoint) = checkpoint {
            let read = |layer: LayerId, range: &Range<usize>| {
                checkpoint::read(checkpoint, &layers[layer.index()].name, range)
            };
            states.iter_mut().try_for_each(|lane| lane.state.restore(read))?;
        }
        let mut mailboxes = Vec::new();
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
                keeper: parts.keeper.clone(),
                stall: node.config.timeout,
                idle: node.config.idle,
            });
            let driver = node.lane(lane).clone();
            driver.attach(Box::new(part));
            mailboxes.push(Mailbox { commands, driver });
        }
        parts.lanes = mailboxes.into();
        Ok(parts)
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
            let store = Store::new(&plan, shard, |layer| job.rule(layer), job.order());
            let board = self.board.clone();
            LaneState {
                lane,
                state: PlanState::new(shard, cluster, &plan, store, &matrices, board)
                    .recorded(self.trace.clone()),
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
        let all = 0..exchange.gradient.len();
        for lane in &**lanes {
            self.lanes[lane.index()].send(Command::Send(exchange.clone(), all.clone()));
        }
    }

    /// Has the board expect `layer` from the lanes that hold chunks of it, and from whoever gets the
    /// consignment.
    pub(crate) fn consign(&self, layer: LayerId) -> Consignment {
        self.consign_to(layer, self.lanes_of[layer.index()].clone())
    }

    /// As [`consign`](Self::consign), from the lanes that have factors of the layer.
    pub(crate) fn consign_to(&self, layer: LayerId, lanes: Arc<[LaneId]>) -> Consignment {
        self.board.begin(layer, lanes.len() + 1);
        let (board, mailboxes) = (self.board.clone(), self.lanes.clone());
        Consignment { board, trace: self.trace.clone(), layer, mailboxes, lanes }
    }

    /// Has the lanes send this worker's factors, which are in their place.
    pub(crate) fn dispatch_factors(
        &self,
        matrices: &FactorMatrices,
        clock: Clock,
        rows: usize,
        terms: Terms,
    ) {
        let layer = matrices.layer;
        self.board.begin(layer, matrices.layout.lanes().count());
        for lane in matrices.layout.lanes() {
            self.lanes[lane.index()].send(Command::SendFactors { layer, clock, rows, terms });
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
    /// deadlines, `patience` is for parts that do not. Without it, the parts decide alone.
    pub(crate) fn wait_closed(&self, patience: Option<Duration>) -> Result<(), Error> {
        let mut left = patience.map(Patience::new);
        let stretch = || left.as_mut().map_or(Patience::LONGEST, Patience::stretch);
        if !self.board.wait_closed(stretch) {
            let (nodes, waited) = (vec!["this node's own lanes".into()], patience);
            return Err(Error::Unfinished { nodes, waited: waited.unwrap_or_default() });
        }
        self.board.failure().map_or(Ok(()), Err)
    }
}

impl Consignment {
    /// The elements `ready` of the layer, whole chunks, may go out: `lanes` have chunks of them.
    pub(crate) fn send(&self, exchange: &Arc<Exchange>, ready: &Range<usize>, lanes: &[LaneId]) {
        for lane in lanes {
            self.mailboxes[lane.index()].send(Command::Send(exchange.clone(), ready.clone()));
        }
    }

    /// This worker's factors are in their place.
    pub(crate) fn send_factors(&self, clock: Clock, rows: usize, terms: Terms) {
        for lane in &*self.lanes {
            let command = Command::SendFactors { layer: self.layer, clock, rows, terms };
            self.mailboxes[lane.index()].send(command);
        }
    }

    /// The layer, which is at `clock`, was copied from or to its device. The copies began at `begin`; if that
    /// is not known, when the layer was sent.
    pub(crate) fn note_copied(&self, what: What, clock: Clock, begin: Option<u64>) {
        self.trace.copied(what, self.layer.index(), clock.0, begin);
    }

    /// The time, if it is needed because something is noted.
    pub(crate) fn now(&self) -> Option<u64> {
        self.trace.now()
    }

    /// Whether all lanes have finished their part.
    pub(crate) fn is_back(&self) -> bool {
        self.board.is_last_part(self.layer)
    }

    /// The thread beside the program has finished its part, too.
    pub(crate) fn finish(&self) {
        self.board.finish_part(self.layer);
    }

    /// The session cannot go on: the others are told why.
    pub(crate) fn fail(&self, error: Error) {
        self.board.fail(error.clone());
        let reason = error.to_string();
        self.mailboxes.iter().for_each(|lane| lane.send(Command::Abort(reason.clone())));
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

fn lanes_of(plan: &Plan) -> Vec<Arc<[LaneId]>> {
    let layers = (0..plan.layers() as u32).map(LayerId);
    let lanes =
        |layer| plan.layer_chunks(layer).map(|(_, shard)| shard.lane).collect::<BTreeSet<_>>();
    layers.map(|layer| lanes(layer).into_iter().collect()).collect()
}

/// Refuses a job whose parameters, update rules and factors surely do not fit into this node's memory,
/// before any of it is taken.
fn check_memory(book: &Book, plan: &Plan, me: NodeId, available: &Available) -> Result<(), Error> {
    let works = book.cluster.role(me).is_some_and(|role| role.worker);
    let mut need: u64 = 0;
    for (layer, id) in book.job.layers.iter().zip((0..).map(LayerId)) {
        let held = plan.layer_chunks(id).filter(|(_, shard)| shard.node == me);
        let held: usize = held.map(|(key, _)| plan.len(key)).sum();
        let rule = book.job.rule(id);
        let vectors = if rule.is_stateless() { 0 } else { 1 + rule.state_vectors() };
        let factors = plan.factors(id).filter(|_| works);
        let factors = factors.map_or(0, |layout| layout.encoding.bytes(layout.len()));
        let bytes = (held * size_of::<f32>()).saturating_mul(vectors).saturating_add(factors);
        need = need.saturating_add(bytes as u64);
        if need > available.bytes {
            let Available { bytes: most, by } = available.clone();
            let (layer, bytes) = (layer.name.clone(), bytes as u64);
            return Err(Error::Memory { layer, bytes, need, most, by });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::book::tests::book;
    use poseidon_core::Optimizer;

    #[test]
    fn a_job_that_cannot_fit_is_refused_with_its_layer() {
        let mut book = book();
        book.job.optimizer = "sgd:momentum=0.9".parse::<Optimizer>().unwrap();
        book.job.layers = vec![Layer::new("small", 1000), Layer::new("large", 1 << 20)];
        let plan = book.plan();
        let check = |bytes| {
            let by = "a test".to_owned();
            check_memory(&book, &plan, NodeId(0), &Available { bytes, by })
        };
        // Half of the parameters is here, and of what the rule remembers.
        let need = ((1 << 20) + 1000) / 2 * 8;
        assert!(check(need + 8000).is_ok());
        let words = check(need - 8000).unwrap_err().to_string();
        for fact in ["'large'", "a test", "4194304 bytes"] {
            assert!(words.contains(fact), "{words}");
        }
    }
}
