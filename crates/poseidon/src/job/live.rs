//! What a running job does, as `live` tells it (ADR 0029).
//!
//! Nodes tell the coordinator about once a second what they have counted so far: a
//! `NodeSummary`, which has at most so many bytes. `LiveState` keeps the last few of each node,
//! and makes a [`LiveJob`] of them when somebody asks. A job of weeks takes no more memory than one
//! of minutes. Terminals, pages and metrics show this one answer.

mod summary;
#[cfg(test)]
mod tests;

use crate::job::book::Book;
use crate::job::metrics;
use poseidon_core::printable::printable;
use poseidon_core::{LayerId, NodeId, Port, Rate, Scheme};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};
use summary::Recent;
pub(crate) use summary::{LAYERS, NodeSummary};

/// What a running job does now, and did in the last minutes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveJob {
    /// When this was told, in milliseconds since 1970.
    pub now_ms: u64,
    /// How long the job has been running, in seconds, since its first node has told anything.
    pub seconds: f64,
    /// What is missing before the job can begin, by name; nothing once it has begun.
    pub missing: Vec<String>,
    /// Steps whose results the workers have received; those of the foremost one.
    pub steps: u64,
    /// Steps in a second.
    pub steps_per_second: f64,
    /// Collective operations in a second, on one node.
    pub operations_per_second: f64,
    /// The share of time that workers wait for layers: 0 to 1, their mean. None if nothing is known yet.
    pub waiting: Option<f64>,
    /// Bytes in a second that all nodes send to other hosts.
    pub sent: f64,
    /// Bytes in a second that all nodes send within their hosts.
    pub sent_inside: f64,
    /// The worker that others wait for, if there is one.
    pub slowest: Option<LiveSlowest>,
    /// The layers that workers wait for most, in the last seconds.
    pub layers: Vec<LiveLayer>,
    /// Every node, in the order of their ids.
    pub nodes: Vec<LiveNode>,
    /// How layers are synchronised.
    pub plan: LivePlan,
    /// The last minutes, a moment for about each second.
    pub history: Vec<LiveMoment>,
    /// What has happened last: who left, who failed, what was changed.
    pub events: Vec<LiveEvent>,
}

/// A node of a running job. Rates are those of the last seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LiveNode {
    /// Its id. A worker's id is its rank.
    pub node: NodeId,
    /// Its name, such as `worker 3`.
    pub name: String,
    /// The name that people have given its host, or the host's address.
    pub host: String,
    /// Whether it computes gradients.
    pub worker: bool,
    /// What it is doing.
    pub state: LiveNodeState,
    /// How long nothing has been heard of it, in seconds.
    pub unheard: f64,
    /// Steps whose results it has received.
    pub steps: u64,
    /// Steps in a second.
    pub steps_per_second: f64,
    /// The share of time that it waits for layers: 0 to 1. None if it is no worker, or has not told yet.
    pub waiting: Option<f64>,
    /// Bytes in a second that it sends to other hosts.
    pub sent: f64,
    /// Bytes in a second that it receives from other hosts.
    pub received: f64,
    /// Bytes in a second that it sends within its host.
    pub sent_inside: f64,
    /// What its port carries each way, in bits per second, if that is known.
    pub rate: Option<Rate>,
    /// How much of that is used: 0 to 1, sent and received. Nodes of one host share its port.
    pub port_use: Option<[f64; 2]>,
    /// Messages that links have not taken yet.
    pub queued: u64,
    /// Segments that TCP has sent again on the links that are open.
    pub resent: u64,
    /// Segments that TCP sends again in a second.
    pub resent_per_second: f64,
    /// What went wrong with a session of it.
    pub failure: Option<String>,
}

/// What a node is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LiveNodeState {
    /// It has joined, and has told nothing yet.
    Joined,
    /// It works.
    Running,
    /// It is connected, and has not told anything for more than five seconds.
    Silent,
    /// It has said goodbye.
    Left,
    /// It has gone without a goodbye, or has given up.
    Lost,
}

/// The worker that others wait for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LiveSlowest {
    /// Its id.
    pub node: NodeId,
    /// Its name.
    pub name: String,
    /// How that is known, in words.
    pub why: String,
}

/// A layer that is waited for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LiveLayer {
    /// Its name.
    pub layer: String,
    /// The share of time that workers wait for it: 0 to 1, their mean.
    pub waiting: f64,
}

/// How layers are synchronised now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LivePlan {
    /// The number of the plan: 1 at first, and one more each time it is replaced.
    pub epoch: u32,
    /// Layers that go through shards.
    pub ps: usize,
    /// Layers that go by factors.
    pub sfb: usize,
}

/// What the job did at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LiveMoment {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// Steps in a second.
    pub steps_per_second: f64,
    /// The share of time that workers waited for layers.
    pub waiting: f64,
    /// Bytes in a second that all nodes sent, to other hosts and within their own.
    pub sent: f64,
}

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LiveEvent {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// How bad it is.
    pub level: LiveLevel,
    /// What it was.
    pub words: String,
}

/// How bad something is that has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LiveLevel {
    /// As it should be.
    Note,
    /// Somebody should look at it.
    Warning,
    /// The job cannot go on, or not as it was.
    Fault,
}

/// The key under which a coordinator tells a [`LiveJob`].
pub(crate) const LIVE: &str = "live";

/// How often a node tells what it has counted.
pub(crate) const PERIOD: Duration = Duration::from_secs(1);
/// So long a node may be silent before that is told.
const SILENT: Duration = Duration::from_secs(5);
/// Moments that are kept: four minutes, which is as much as a terminal or a page shows.
const MOMENTS: usize = 240;
/// Events that are kept.
const EVENTS: usize = 64;
/// Layers of a job that are told.
const SHOWN: usize = 8;
/// A worker that waits so much less of the time than the others is what they wait for. Less than this
/// is noise: workers that are alike differ by one or two hundredths on a busy machine.
const SLOWER: f64 = 0.05;

/// Now, by the two clocks that matter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    pub(crate) at: Instant,
    /// Milliseconds since 1970.
    pub(crate) wall_ms: u64,
}

/// What the coordinator knows of what nodes do. It has no sockets, and no clock.
#[derive(Debug, Default)]
pub(crate) struct LiveState {
    nodes: BTreeMap<NodeId, Known>,
    began: Option<Instant>,
    /// Of the book that was looked at last.
    plan: LivePlan,
    history: VecDeque<LiveMoment>,
    recorded: Option<Instant>,
    events: VecDeque<LiveEvent>,
}

/// What is known of one node.
#[derive(Debug)]
struct Known {
    recent: Recent,
    heard: Instant,
    /// Set when it is gone.
    end: Option<LiveNodeState>,
}

impl LiveState {
    /// A node has told what it has counted.
    pub(crate) fn handle_summary(&mut self, book: &Book, summary: NodeSummary, now: Now) {
        let summary = summary.bounded();
        let name = book.cluster.name(summary.node);
        if self.began.is_none() {
            self.began = Some(now.at);
            let nodes = book.cluster.nodes();
            let words = if nodes == 1 { "1 node".into() } else { format!("{nodes} nodes") };
            self.note(LiveLevel::Note, format!("the job has begun, with {words}"), now);
        }
        self.look_at_plan(book, now);
        let before = self.nodes.get(&summary.node).and_then(|known| known.recent.failure());
        if let Some(failure) = summary.failure.as_deref().filter(|_| before.is_none()) {
            self.note(LiveLevel::Fault, format!("{name}: {failure}"), now);
        }
        let known = self.nodes.entry(summary.node).or_insert_with(|| Known {
            recent: Recent::default(),
            heard: now.at,
            end: None,
        });
        known.heard = now.at;
        known.recent.push(summary);
        // The first summaries have nothing before them, and so no rates.
        let due = self.recorded.is_none_or(|last| now.at >= last + PERIOD);
        if due && self.nodes.values().any(|known| known.recent.seconds() > 0.0) {
            self.recorded = Some(now.at);
            let job = self.rates(book);
            let moment = LiveMoment {
                at_ms: now.wall_ms,
                steps_per_second: job.steps_per_second,
                waiting: job.waiting.unwrap_or(0.0),
                sent: job.sent + job.sent_inside,
            };
            push_bounded(&mut self.history, moment, MOMENTS);
        }
    }

    /// A node is gone: with a goodbye, or if there is a `fault`, because of it.
    pub(crate) fn handle_gone(&mut self, book: &Book, node: NodeId, fault: Option<&str>, now: Now) {
        let name = book.cluster.name(node);
        let (end, level, words) = match fault {
            None => (LiveNodeState::Left, LiveLevel::Note, format!("{name} is done, and has left")),
            Some(why) => {
                let words = format!("{name} is lost: {}", summary::shortened(why));
                (LiveNodeState::Lost, LiveLevel::Fault, words)
            }
        };
        let gone = self.nodes.entry(node).or_insert_with(|| Known {
            recent: Recent::default(),
            heard: now.at,
            end: None,
        });
        // The first end counts: connections close after goodbyes and last words.
        if gone.end.is_none() {
            gone.end = Some(end);
            self.note(level, words, now);
        }
    }

    /// Somebody has changed something.
    pub(crate) fn handle_change(&mut self, words: String, now: Now) {
        self.note(LiveLevel::Note, words, now);
    }

    /// What the job of `book` does. `missing` is who has not joined; there is no book before that.
    pub(crate) fn tell(&self, book: Option<&Book>, missing: Vec<String>, now: Now) -> LiveJob {
        let mut job = book.map_or_else(LiveJob::default, |book| self.rates(book));
        job.now_ms = now.wall_ms;
        job.missing = missing;
        job.seconds = self.began.map_or(0.0, |began| now.at.duration_since(began).as_secs_f64());
        for node in &mut job.nodes {
            let Some(known) = self.nodes.get(&node.node) else { continue };
            let unheard = now.at.saturating_duration_since(known.heard);
            node.unheard = unheard.as_secs_f64();
            node.state = match known.end {
                Some(end) => end,
                None if unheard > SILENT => LiveNodeState::Silent,
                None => LiveNodeState::Running,
            };
        }
        job.plan = self.plan.clone();
        job.history = self.history.iter().cloned().collect();
        job.events = self.events.iter().cloned().collect();
        job
    }

    /// Everything that follows from the last summaries.
    fn rates(&self, book: &Book) -> LiveJob {
        let cluster = &book.cluster;
        let mut nodes: Vec<LiveNode> = cluster.node_ids().map(|id| self.node(book, id)).collect();
        share_ports(&mut nodes, cluster.ports());
        let active = |node: &&LiveNode| self.is_active(node.node);
        let workers: Vec<&LiveNode> = nodes.iter().filter(active).filter(|n| n.worker).collect();
        let waits: Vec<f64> = workers.iter().filter_map(|node| node.waiting).collect();
        let sum = |of: fn(&LiveNode) -> f64| nodes.iter().filter(active).map(of).sum();
        let operations = self.nodes.values().filter(|known| known.end.is_none());
        LiveJob {
            steps: nodes.iter().map(|node| node.steps).max().unwrap_or(0),
            steps_per_second: largest(workers.iter().map(|node| node.steps_per_second)),
            operations_per_second: largest(
                operations.map(|k| k.recent.per_second(|c| c.operations)),
            ),
            waiting: mean(&waits),
            sent: sum(|node| node.sent),
            sent_inside: sum(|node| node.sent_inside),
            slowest: slowest(&workers),
            layers: self.layers(&workers),
            nodes,
            ..LiveJob::default()
        }
    }

    fn is_active(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|known| known.end.is_none())
    }

    fn node(&self, book: &Book, id: NodeId) -> LiveNode {
        let none = Recent::default();
        let known = self.nodes.get(&id);
        let recent = known.map_or(&none, |known| &known.recent);
        let worker = book.cluster.role(id).is_some_and(|role| role.worker);
        // A machine's own identity is a long number, which says nothing to people.
        let host = book.nodes.get(id.index()).map(|facts| match facts.host.len() {
            ..=32 => &*facts.host,
            _ => facts.tcp.rsplit_once(':').map_or(&*facts.tcp, |(address, _)| address),
        });
        let (last, known_rates) = (recent.last(), recent.seconds() > 0.0);
        LiveNode {
            node: id,
            name: book.cluster.name(id),
            host: host.map_or_else(String::new, |host| printable(host).into()),
            worker,
            state: LiveNodeState::Joined,
            unheard: 0.0,
            steps: last.map_or(0, |last| last.steps),
            steps_per_second: recent.per_second(|c| c.steps),
            waiting: (worker && known_rates)
                .then(|| (recent.per_second(|c| c.waited_us) / 1e6).clamp(0.0, 1.0)),
            sent: recent.per_second(|c| c.outside[0]),
            received: recent.per_second(|c| c.outside[1]),
            sent_inside: recent.per_second(|c| c.inside[0]),
            rate: book.cluster.ports().get(id.index()).map(|port| port.rate),
            port_use: None,
            queued: last.map_or(0, |last| last.queued),
            resent: last.map_or(0, |last| last.resent),
            resent_per_second: recent.per_second(|c| c.resent),
            failure: recent.failure().map(String::from),
        }
    }

    /// The layers that `workers` wait for most.
    fn layers(&self, workers: &[&LiveNode]) -> Vec<LiveLayer> {
        let mut shares: BTreeMap<&str, f64> = BTreeMap::new();
        for known in workers.iter().filter_map(|worker| self.nodes.get(&worker.node)) {
            let seconds = known.recent.seconds();
            for (layer, micros) in known.recent.layers().filter(|_| seconds > 0.0) {
                *shares.entry(layer).or_default() += micros as f64 / 1e6 / seconds;
            }
        }
        let share = |(layer, sum): (&str, f64)| LiveLayer {
            layer: layer.into(),
            waiting: (sum / workers.len() as f64).min(1.0),
        };
        let mut layers: Vec<LiveLayer> = shares.into_iter().map(share).collect();
        layers.sort_by(|a, b| b.waiting.total_cmp(&a.waiting));
        layers.truncate(SHOWN);
        layers
    }

    /// Notices that the book has another plan.
    fn look_at_plan(&mut self, book: &Book, now: Now) {
        if self.plan.epoch == book.epoch.0 {
            return;
        }
        let plan = book.plan();
        let scheme = |index: usize| plan.choice(LayerId(index as u32)).map(|choice| choice.scheme);
        let schemes = || (0..book.job.layers.len()).filter_map(scheme);
        let sfb = schemes().filter(|scheme| *scheme == Scheme::Sfb).count();
        let ps = schemes().count() - sfb;
        let is_first = self.plan.epoch == 0;
        self.plan = LivePlan { epoch: book.epoch.0, ps, sfb };
        let counts = format!("{ps} layers through shards, {sfb} by factors");
        let words = match (is_first, ps + sfb) {
            (_, 0) => return,
            (true, _) => format!("the plan: {counts}"),
            (false, _) => format!("the plan was replaced, epoch {}: {counts}", book.epoch),
        };
        self.note(LiveLevel::Note, words, now);
    }

    fn note(&mut self, level: LiveLevel, words: String, now: Now) {
        let words = printable(&words).into_owned();
        push_bounded(&mut self.events, LiveEvent { at_ms: now.wall_ms, level, words }, EVENTS);
    }
}

impl LiveJob {
    /// What Prometheus reads: the job as one place sees it.
    pub fn metrics(&self) -> String {
        metrics::of_job(self)
    }

    /// What is worth a look right now, in words: the worst first.
    pub fn concerns(&self) -> Vec<(LiveLevel, String)> {
        let mut concerns = Vec::new();
        for node in &self.nodes {
            let name = &node.name;
            match (node.state, &node.failure) {
                (LiveNodeState::Lost, _) => {
                    concerns.push((LiveLevel::Fault, format!("{name} is lost")));
                }
                (_, Some(failure)) => {
                    concerns.push((LiveLevel::Fault, format!("{name}: {failure}")))
                }
                (LiveNodeState::Silent, _) => {
                    let words = format!("{name} has not been heard for {:.0} s", node.unheard);
                    concerns.push((LiveLevel::Warning, words));
                }
                _ => {}
            }
            if node.resent_per_second >= RESENT {
                let words =
                    format!("{name} sends {:.0} segments a second again", node.resent_per_second);
                concerns.push((LiveLevel::Warning, words));
            }
        }
        concerns.sort_by_key(|(level, _)| std::cmp::Reverse(*level as u8));
        concerns
    }
}

/// Segments sent again in a second that are worth a word: a link that loses one packet in ten thousand
/// at 1 Gbit/s loses eight a second.
const RESENT: f64 = 10.0;

/// Gives every node its port's use: nodes with the same number share a port.
fn share_ports(nodes: &mut [LiveNode], ports: &[Port]) {
    let mut moved: BTreeMap<u16, [f64; 2]> = BTreeMap::new();
    for (node, port) in nodes.iter().zip(ports) {
        let [sent, received] = moved.entry(port.number).or_default();
        *sent += node.sent;
        *received += node.received;
    }
    for (node, port) in nodes.iter_mut().zip(ports) {
        let bytes = port.rate.bits() as f64 / 8.0;
        node.port_use = moved.get(&port.number).map(|moved| moved.map(|part| part / bytes));
    }
}

/// The worker that the others wait for: it waits least, by far.
fn slowest(workers: &[&LiveNode]) -> Option<LiveSlowest> {
    let waits = || workers.iter().filter_map(|node| Some((*node, node.waiting?)));
    let (node, least) = waits().min_by(|(_, a), (_, b)| a.total_cmp(b))?;
    let others: Vec<f64> = waits().filter(|(n, _)| n.node != node.node).map(|(_, w)| w).collect();
    let others = mean(&others).filter(|others| others - least >= SLOWER)?;
    let percent = |share: f64| (share * 100.0).round();
    let why = format!(
        "it waits {}% of the time, the others {}%: they wait for it",
        percent(least),
        percent(others)
    );
    Some(LiveSlowest { node: node.node, name: node.name.clone(), why })
}

fn mean(numbers: &[f64]) -> Option<f64> {
    (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / numbers.len() as f64)
}

fn largest(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, f64::max)
}

fn push_bounded<T>(queue: &mut VecDeque<T>, item: T, most: usize) {
    if queue.len() >= most {
        queue.pop_front();
    }
    queue.push_back(item);
}
