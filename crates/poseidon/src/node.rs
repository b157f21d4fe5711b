//! One process of a job: joins it and runs the lanes.

use crate::Error;
use crate::job::book::{Book, Job};
use crate::job::config::Config;
use crate::job::coordinator::Coordinator;
use crate::job::line::ControlLine;
use crate::job::rendezvous::{Joined, join};
use crate::lane::board::{Board, Counters};
use crate::lane::holdings::Holdings;
use crate::lane::{self, Command, Lane, Limits, MAILBOX, Parts};
use crate::memory::exchange::Exchange;
use crate::memory::factors::Meeting;
use poseidon_core::{Clock, Cluster, LaneId, Layer, LayerId, NodeId, Plan, Shard, Store};
use poseidon_link::Serving;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Instant;

/// A running node.
pub(crate) struct Node {
    pub(crate) me: NodeId,
    pub(crate) book: Arc<Book>,
    pub(crate) board: Arc<Board>,
    /// To the coordinator.
    pub(crate) line: Arc<ControlLine>,
    counters: Arc<Counters>,
    pub(crate) plan: Plan,
    /// By layer, for those that go by factors: where they meet. Empty on a server.
    pub(crate) meetings: Vec<Option<Arc<Meeting>>>,
    lanes: Vec<LaneHandle>,
    /// Layer → the lanes that hold chunks of it: only they are woken for it.
    lanes_of: Vec<Vec<LaneId>>,
    /// Turns strangers away for as long as the node lives.
    _serving: Serving,
    _coordinator: Option<Coordinator>,
}

/// Bytes and frames a node has exchanged with other nodes, headers included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes handed to links.
    pub bytes_sent: u64,
    /// Bytes taken from links.
    pub bytes_received: u64,
    /// Frames handed to links.
    pub frames_sent: u64,
    /// Frames taken from links.
    pub frames_received: u64,
}

struct LaneHandle {
    mailbox: Sender<Command>,
    waker: mio::Waker,
    thread: Option<JoinHandle<()>>,
}

impl Node {
    /// Joins the job. Workers bring a description of it, servers take what they get.
    pub(crate) fn start(config: &Config, job: Option<Job>) -> Result<Self, Error> {
        let Joined { book, plan, links, line, serving, coordinator } = join(config, job)?;
        let layers: Arc<[Layer]> = book.job.layers.clone().into();
        let board = Arc::new(Board::new(layers.len()));
        let counters = Arc::new(Counters::new(layers.len()));
        let meetings = meetings(&book.cluster, &plan, config.node());
        let epoch = Instant::now();
        let mut node = Self {
            me: config.node(),
            book: book.clone(),
            board: board.clone(),
            line,
            counters: counters.clone(),
            lanes: Vec::new(),
            lanes_of: lanes_of(&plan),
            plan,
            meetings,
            _serving: serving,
            _coordinator: coordinator,
        };
        let cores = cores_to_share(config, &book);
        for (lane, links) in book.cluster.lane_ids().zip(links) {
            let shard = Shard { node: config.node(), lane };
            let parts = Parts {
                me: config.node(),
                cluster: book.cluster.clone(),
                layers: layers.clone(),
                holdings: holdings(shard, &book, &node.plan, &node.meetings, &board),
                links,
                board: board.clone(),
                counters: counters.clone(),
                limits: Limits { silence: config.silence, stall: config.timeout },
            };
            let core = cores.get(lane.index() % cores.len().max(1)).copied();
            let lane_state = Lane::new(parts, epoch.elapsed());
            node.lanes.push(LaneHandle::start(lane, lane_state, epoch, core)?);
        }
        Ok(node)
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
    pub(crate) fn dispatch_factors(&self, meeting: &Meeting, clock: Clock, rows: usize, rate: f32) {
        let layer = meeting.layer;
        self.board.begin(layer, meeting.layout.lanes().count());
        for lane in meeting.layout.lanes() {
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

    /// Waits until every lane has stopped. They do so on their own deadlines.
    pub(crate) fn join(&mut self) -> Result<(), Error> {
        for lane in &mut self.lanes {
            if let Some(thread) = lane.thread.take() {
                // A lane that panics has a bug; its message is on standard error already.
                let _ = thread.join();
            }
        }
        self.board.failure().map_or(Ok(()), Err)
    }

    /// `host:port` of the coordinator this node joined by.
    pub(crate) fn coordinator_address(&self) -> String {
        self.line.address().to_string()
    }

    /// Bytes sent for `layer`.
    pub(crate) fn sent(&self, layer: LayerId) -> u64 {
        self.counters.layers.get(layer.index()).map_or(0, |sent| sent.load(Ordering::Relaxed))
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let c = &self.counters;
        Traffic {
            bytes_sent: c.bytes_sent.load(Ordering::Relaxed),
            bytes_received: c.bytes_received.load(Ordering::Relaxed),
            frames_sent: c.frames_sent.load(Ordering::Relaxed),
            frames_received: c.frames_received.load(Ordering::Relaxed),
        }
    }
}

impl LaneHandle {
    fn start(id: LaneId, lane: Lane, epoch: Instant, core: Option<usize>) -> Result<Self, Error> {
        let poll = mio::Poll::new().map_err(Error::io("opening an event queue"))?;
        let waker = mio::Waker::new(poll.registry(), MAILBOX);
        let waker = waker.map_err(Error::io("opening a mailbox"))?;
        let (mailbox, commands) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name(format!("poseidon-lane-{id}"))
            .spawn(move || lane::run(lane, poll, &commands, epoch, core))
            .map_err(Error::io("starting a lane"))?;
        Ok(Self { mailbox, waker, thread: Some(thread) })
    }

    fn send(&self, command: Command) {
        // A lane that has stopped has left its reason on the board.
        if self.mailbox.send(command).is_ok() {
            let _ = self.waker.wake();
        }
    }
}

fn lanes_of(plan: &Plan) -> Vec<Vec<LaneId>> {
    let layers = (0..plan.layers() as u32).map(LayerId);
    let lanes =
        |layer| plan.layer_chunks(layer).map(|(_, shard)| shard.lane).collect::<BTreeSet<_>>();
    layers.map(|layer| lanes(layer).into_iter().collect()).collect()
}

/// The cores lanes stay on: with other nodes on the same host, lane k of each of them shares a core,
/// because lane k talks only to lane k. On a host of its own a node leaves that to the scheduler.
fn cores_to_share(config: &Config, book: &Book) -> Vec<usize> {
    let host = &book.nodes[config.node().index()].host;
    let alone = book.nodes.iter().filter(|n| n.host == *host).count() == 1;
    let cores = lane::cores();
    // With fewer lanes than cores, staying put would leave cores idle.
    let spread = usize::from(book.cluster.lanes()) >= cores.len();
    if config.pin && !alone && spread { cores } else { Vec::new() }
}

/// Worker 0's shard and syncers, or a server's shard alone.
fn holdings(
    shard: Shard,
    book: &Book,
    plan: &Plan,
    meetings: &[Option<Arc<Meeting>>],
    board: &Arc<Board>,
) -> Holdings {
    let serves = book.cluster.role(shard.node).is_some_and(|role| role.server);
    let (workers, job) = (book.cluster.workers(), &book.job);
    let store =
        serves.then(|| Store::new(plan, shard, workers, job.optimizer.clone(), job.order()));
    Holdings::new(shard, &book.cluster, plan, store, meetings, board.clone())
}

/// Where the factors of each layer meet on `node`, if it is a worker.
fn meetings(cluster: &Cluster, plan: &Plan, node: NodeId) -> Vec<Option<Arc<Meeting>>> {
    let works = cluster.role(node).is_some_and(|role| role.worker);
    let meeting = |layer| {
        let layout = plan.factors(layer).filter(|_| works)?;
        Some(Arc::new(Meeting::new(layer, layout.clone())))
    };
    (0..plan.layers() as u32).map(LayerId).map(meeting).collect()
}
