//! One process of a job: its links, shared by all its sessions and groups.
//!
//! * `session_parts`: what one session has on all lanes. `groups`: how groups are opened. `budget`:
//!   how the node's budget is changed. `devices`: the copiers of its devices. `observed`: what people
//!   can see of the node. `metrics`: the same as Prometheus reads it. `summaries`: the same in short,
//!   as the coordinator is told it. `scalars`: a few numbers over time, as TensorBoard reads them.

mod budget;
pub(crate) mod checkpoint;
mod devices;
mod groups;
mod metrics;
mod observed;
mod scalars;
pub(crate) mod session_parts;
mod summaries;

use crate::Error;
use crate::engine::Engine;
use crate::engine::driver::Driver;
use crate::engine::sharing::{self, Place};
use crate::job::book::{Book, Job};
use crate::job::config::Config;
use crate::job::coordinator::Coordinator;
use crate::job::line::ControlLine;
use crate::job::rendezvous::{Joined, join};
use budget::NodeBudget;
use observed::Observed;
use poseidon_core::{Budget, ChannelId, LaneId, NodeId};
use poseidon_link::Serving;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use summaries::SummaryThread;

/// A process of a job. It stays connected until its last session or group is dropped.
pub(crate) struct Node {
    pub(crate) me: NodeId,
    pub(crate) config: Config,
    /// The book that the job began with.
    pub(crate) book: Arc<Book>,
    /// The connection to the coordinator.
    pub(crate) line: Arc<ControlLine>,
    /// By lane: what drives the lane's engine.
    lanes: Vec<Arc<Driver>>,
    /// What the lanes together may send to other hosts.
    budget: Arc<NodeBudget>,
    /// What people can see of the node.
    pub(crate) observed: Observed,
    /// Tells the coordinator what the node does, as long as it lives.
    summaries: Option<SummaryThread>,
    /// What turns strangers away, and the coordinator if this process serves it.
    listeners: Option<(Serving, Option<Coordinator>)>,
    /// Whether the connection to the coordinator outlives the node. Written once, by the program.
    pub(crate) stays: AtomicBool,
}

/// How long a node that leaves waits for the others to hear its last words.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(1);

impl Node {
    /// Joins the job. Workers bring a description of it, servers take what they get. Whoever has made
    /// the job's `coordinator` gives it away here.
    pub(crate) fn start(
        config: &Config,
        job: Option<Job>,
        coordinator: Option<Coordinator>,
    ) -> Result<Arc<Self>, Error> {
        let Joined { book, links, line, serving, coordinator: own, near } =
            join(config, job).inspect_err(|why| Observed::never_joined(config, why))?;
        let (me, nodes) = (config.node(), book.cluster.nodes());
        let (cores, crowded) = (cores_to_share(config, &book), is_crowded(config, &book));
        let mut lanes = Vec::new();
        let epoch = Instant::now();
        let budget = Arc::new(Budget::new(config.bandwidth_budget, links.len()));
        let mut observed = Observed::start(config, book.clone(), epoch)?;
        for (lane, links) in links.into_iter().enumerate() {
            let engine = Engine::new(me, nodes, links, config.silence, epoch.elapsed())
                .within(budget.clone())
                .called(book.cluster.name(me))
                .recorded(observed.recorder.clone(), lane as u32);
            let place = match (cores.get(lane % cores.len().max(1)), near.get(lane)) {
                (Some(core), _) => Place::Core(*core),
                (None, Some(near)) if config.pin => Place::Near(near.clone()),
                (None, _) => Place::Anywhere,
            };
            let name = book.cluster.name(me);
            lanes.push(Driver::start(engine, epoch, name, place, crowded)?);
        }
        let budget = Arc::new(NodeBudget { budget, epoch, lanes: lanes.clone() });
        let told = budget.clone();
        line.on_budget(move |rate| told.set(rate));
        let config = config.clone();
        let listeners = Some((serving, coordinator.or(own)));
        let (stays, summaries) = (AtomicBool::new(false), Some(observed.tell(&line)?));
        Ok(Arc::new(Self {
            me,
            config,
            book,
            line,
            lanes,
            budget,
            observed,
            summaries,
            listeners,
            stays,
        }))
    }

    /// Fails in a process that was forked from the node's: it has none of the node's threads, and the
    /// connections are not its own.
    pub(crate) fn check_owner(&self) -> Result<(), Error> {
        self.lanes.first().map_or(Ok(()), |lane| lane.check_owner())
    }

    /// What drives `lane`.
    pub(crate) fn lane(&self, lane: LaneId) -> &Arc<Driver> {
        &self.lanes[lane.index()]
    }

    /// What drives the lanes of the group `id`, its home lane first. Groups have different home lanes.
    pub(crate) fn lanes_of_group(&self, id: ChannelId) -> Vec<Arc<Driver>> {
        let mut lanes = self.lanes.clone();
        lanes.rotate_left(id.index() % self.lanes.len());
        lanes
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.check_owner().is_err() {
            std::mem::forget((self.listeners.take(), self.summaries.take()));
            return;
        }
        self.summaries = None;
        self.lanes.iter().for_each(|lane| lane.close());
        let deadline = Instant::now() + LAST_WORDS;
        let left = || deadline.saturating_duration_since(Instant::now());
        self.lanes.iter().for_each(|lane| lane.wait_stopped(left()));
        self.observed.write();
        if self.stays.load(Ordering::Relaxed) {
            // The system closes them when the process ends, and not before.
            std::mem::forget((self.listeners.take(), self.line.clone()));
        }
    }
}

/// The cores lanes stay on: with other nodes on the same host, lane k of each of them shares a
/// core, because lane k talks only to lane k. A node that has a host for itself leaves this to the
/// scheduler.
fn cores_to_share(config: &Config, book: &Book) -> Vec<usize> {
    let cores = sharing::cores();
    // With fewer lanes than cores, staying put would leave cores idle.
    let spread = usize::from(book.cluster.lanes()) >= cores.len();
    if config.pin && neighbours(config, book) > 1 && spread { cores } else { Vec::new() }
}

/// Whether a node without layers shares this host with as many nodes as there are cores, or more.
/// Such nodes have to let each other run.
fn is_crowded(config: &Config, book: &Book) -> bool {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    config.workers > 1 && neighbours(config, book) >= cores && book.job.layers.is_empty()
}

/// Nodes on this host, this one among them.
fn neighbours(config: &Config, book: &Book) -> usize {
    let host = &book.nodes[config.node().index()].host;
    book.nodes.iter().filter(|n| n.host == *host).count()
}
