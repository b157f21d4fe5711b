//! What people can see of a node: its sessions, the file of its trace, and its metrics.

use super::metrics;
use super::scalars::ScalarFile;
use super::summaries::SummaryThread;
use crate::Error;
use crate::collectives::operation_name;
use crate::engine::traffic::{Counters, Traffic};
use crate::job::book::Book;
use crate::job::config::{Config, Member, TRACE};
use crate::job::line::ControlLine;
use crate::job::live::{LAYERS, NodeSummary};
use crate::job::metrics::CONTENT_TYPE;
use crate::job::observation::node_file;
use crate::trace::{self, Facts, KindTotals, Names, Recorder, SessionTrace};
use poseidon_core::{ChannelId, LayerId, NodeId};
use poseidon_link::TextServer;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::{self, BufWriter};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What can be seen of a node, and who is shown it.
pub(crate) struct Observed {
    pub(crate) recorder: Arc<Recorder>,
    shared: Arc<Shared>,
    /// What the node is called in the names of files.
    label: String,
    /// Serves metrics as long as it lives.
    server: Option<TextServer>,
    /// Where scalars go, until the thread that writes them has it.
    scalars: Option<ScalarFile>,
}

/// What the thread that serves metrics sees, too.
pub(super) struct Shared {
    pub(super) recorder: Arc<Recorder>,
    pub(super) node: NodeId,
    /// The node in words.
    pub(super) name: String,
    book: Arc<Book>,
    epoch: Instant,
    /// Where traces go.
    files: Vec<PathBuf>,
    sessions: Mutex<Sessions>,
    /// Held by the thread that writes a file.
    writing: Mutex<()>,
    /// By name: what the program has told since scalars were written last. None if nobody wants them.
    told: Option<Mutex<BTreeMap<String, f64>>>,
}

#[derive(Default)]
struct Sessions {
    open: Vec<Arc<Watched>>,
    /// The last sessions that are over, for the names of their layers.
    ended: VecDeque<Arc<Watched>>,
    /// What all sessions that are over have exchanged.
    exchanged: Traffic,
    /// The most steps of a session that is over, and nanoseconds that programs have waited in all of
    /// them.
    stepped: u64,
    waited: u64,
    failure: Option<String>,
}

/// A session that can be seen.
pub(super) struct Watched {
    pub(super) id: ChannelId,
    pub(super) book: Arc<Book>,
    pub(super) trace: Arc<SessionTrace>,
    pub(super) counters: Arc<Counters>,
}

/// Sessions that are over and whose layers still have names.
const ENDED: usize = 16;
/// Scalars of a program, by name, that are kept at a time.
const NAMES: usize = 64;

impl Observed {
    /// What `config` wants to be seen of its node, which follows `book`. Files are made at once: whether
    /// they can be written is better known before a long job than after it.
    pub(crate) fn start(config: &Config, book: Arc<Book>, epoch: Instant) -> Result<Self, Error> {
        let recorder = Arc::new(Recorder::new(epoch, book.cluster.lanes().into()));
        if config.observation.needs_events() {
            recorder.switch_on();
        }
        let (node, name) = (config.node(), book.cluster.name(config.node()));
        let (recording, sessions, writing) = (recorder.clone(), Mutex::default(), Mutex::default());
        let label = config.node_label();
        // A dedicated server takes no steps.
        let folder = config.observation.tensorboard.as_deref();
        let folder = folder.filter(|_| matches!(config.member, Member::Worker(_)));
        let create = |folder: &Path| {
            let what = format!("writing scalars into {}", folder.display());
            ScalarFile::create(folder, &label).map_err(Error::io(what))
        };
        let scalars = folder.map(create).transpose()?;
        let told = scalars.is_some().then(Mutex::default);
        let files = config.observation.files(&label);
        // A group has no layers. Several groups of a process would have the same port.
        let is_group = book.job.layers.is_empty();
        let shared = Arc::new(Shared {
            recorder: recording,
            node,
            name,
            book,
            epoch,
            files,
            sessions,
            writing,
            told,
        });
        for file in &shared.files {
            shared
                .write_to(file)
                .map_err(|why| Error::io(format!("writing the trace {}", file.display()))(why))?;
        }
        let serve = |address: SocketAddr| {
            let shown = shared.clone();
            TextServer::start(address, CONTENT_TYPE, move || metrics::text(&shown))
                .map_err(Error::io(format!("serving metrics at {address}")))
        };
        let server = match config.observation.metrics.map(serve).transpose() {
            Err(why) if is_group => {
                tracing::warn!("a process group goes on without metrics: {why}");
                None
            }
            server => server?,
        };
        if let Some(server) = &server {
            tracing::info!("{} serves metrics at http://{}/metrics", shared.name, server.address());
        }
        Ok(Self { recorder, shared, label, server, scalars })
    }

    /// Writes traces of a node that could not join its job: they say why.
    pub(crate) fn never_joined(config: &Config, why: &Error) {
        let host = machine();
        let (label, node) = (config.node_label(), config.node().0);
        let (name, role) = match config.member {
            Member::Worker(rank) => (format!("worker {rank}"), "worker"),
            Member::Server(index) => (format!("server {index}"), "server"),
        };
        let summary = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "node": node,
            "name": name,
            "role": role,
            "host": host,
            "workers": config.workers,
            "seconds": 0.0,
            "failure": why.to_string(),
            "sessions": [],
        });
        let facts = Facts { process: node, name: format!("{name} on {host}"), summary };
        let names = Names { layers: BTreeMap::new(), operation: operation_name };
        let recorder = Recorder::new(Instant::now(), 0);
        for file in config.observation.files(&label) {
            let written =
                write_whole(&file, |out| trace::write(out, &recorder, &[], &names, &facts));
            if let Err(why) = written {
                tracing::error!("cannot write the trace {}: {why}", file.display());
            }
        }
    }

    /// Where metrics are served, if they are.
    pub(crate) fn metrics_address(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(TextServer::address)
    }

    /// Starts telling the coordinator, about once a second, what this node does.
    pub(super) fn tell(&mut self, line: &Arc<ControlLine>) -> Result<SummaryThread, Error> {
        SummaryThread::start(self.shared.clone(), line.clone(), self.scalars.take())
            .map_err(Error::io("starting the thread that tells what this node does"))
    }

    /// The program has found out `value`, which it calls `name`.
    pub(crate) fn scalar(&self, name: &str, value: f64) {
        let Some(told) = &self.shared.told else { return };
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() < NAMES || told.contains_key(name) {
            told.insert(name.into(), value);
        }
    }

    /// A session begins. Returns where it is noted what the session does.
    pub(crate) fn open(
        &self,
        id: ChannelId,
        book: &Arc<Book>,
        counters: &Arc<Counters>,
    ) -> Arc<SessionTrace> {
        let channel = id.index() as u32;
        let trace = SessionTrace::new(self.recorder.clone(), channel, book.job.layers.len());
        let (trace, book, counters) = (Arc::new(trace), book.clone(), counters.clone());
        let watched = Watched { id, book, trace: trace.clone(), counters };
        self.shared.lock().open.push(Arc::new(watched));
        trace
    }

    /// A session follows another book from now on.
    pub(crate) fn replan(&self, id: ChannelId, book: &Arc<Book>) {
        for watched in self.shared.lock().open.iter_mut().filter(|watched| watched.id == id) {
            let (trace, counters) = (watched.trace.clone(), watched.counters.clone());
            *watched = Arc::new(Watched { id, book: book.clone(), trace, counters });
        }
    }

    /// A session is over. The trace is written if it was the node's first one: programs may hold what
    /// else there is until they are killed.
    pub(crate) fn close(&self, id: ChannelId, failure: Option<&Error>) {
        let mut sessions = self.shared.lock();
        if let Some(position) = sessions.open.iter().position(|watched| watched.id == id) {
            let watched = sessions.open.remove(position);
            let traffic = watched.counters.traffic();
            sessions.exchanged = sessions.exchanged.plus(traffic);
            sessions.stepped = sessions.stepped.max(watched.trace.steps());
            sessions.waited += watched.waited();
            sessions.ended.push_back(watched);
            if sessions.ended.len() > ENDED {
                sessions.ended.pop_front();
            }
        }
        if let Some(failure) = failure {
            sessions.failure.get_or_insert_with(|| failure.to_string());
        }
        drop(sessions);
        if id == ChannelId::FIRST || failure.is_some() {
            self.write();
        }
    }

    /// The program is told that a session has failed. The trace is written the first time: the program
    /// may do nothing more than print the error.
    pub(crate) fn fail(&self, failure: &Error) {
        let mut sessions = self.shared.lock();
        let is_first = sessions.failure.is_none();
        sessions.failure.get_or_insert_with(|| failure.to_string());
        drop(sessions);
        if is_first {
            self.write();
        }
    }

    /// Writes what has been noted so far to the files that were asked for.
    pub(crate) fn write(&self) {
        self.shared.write();
    }

    /// Writes what has been noted so far into `folder`, to the file that this node has there.
    pub(crate) fn write_into(&self, folder: &Path) -> Result<PathBuf, Error> {
        let file = node_file(&folder.join(TRACE), &self.label);
        let what = format!("writing the trace {}", file.display());
        self.shared.write_to(&file).map_err(Error::io(what))?;
        Ok(file)
    }
}

impl Shared {
    /// Sessions that are open, and what all others have exchanged.
    pub(super) fn sessions(&self) -> (Vec<Arc<Watched>>, Traffic) {
        let sessions = self.lock();
        (sessions.open.clone(), sessions.exchanged)
    }

    /// What the node has counted so far. `before` has what each layer was waited for when this was
    /// asked last, by session.
    pub(super) fn count(&self, before: &mut BTreeMap<ChannelId, Vec<u64>>) -> NodeSummary {
        let sessions = self.lock();
        let (open, failure) = (sessions.open.clone(), sessions.failure.clone());
        let failure = failure.or_else(|| self.recorder.failure().map(str::to_owned));
        let (mut steps, mut waited) = (sessions.stepped, sessions.waited);
        drop(sessions);
        before.retain(|id, _| open.iter().any(|watched| watched.id == *id));
        let mut layers: Vec<(String, u64)> = Vec::new();
        for watched in &open {
            steps = steps.max(watched.trace.steps());
            waited += watched.waited();
            let of_layers = &watched.book.job.layers;
            let before = before.entry(watched.id).or_insert_with(|| vec![0; of_layers.len()]);
            for (index, (layer, before)) in of_layers.iter().zip(before).enumerate() {
                let nanos = watched.trace.waited_nanos(index);
                let micros = nanos.saturating_sub(std::mem::replace(before, nanos)) / 1000;
                let least = layers.last().map_or(0, |(_, least)| *least);
                if micros > 0 && (layers.len() < LAYERS || micros > least) {
                    layers.truncate(LAYERS - 1);
                    layers.push((layer.name.clone(), micros));
                    layers.sort_by_key(|(_, micros)| std::cmp::Reverse(*micros));
                }
            }
        }
        let (mut outside, mut inside, mut queued, mut resent) = ([0; 2], [0; 2], 0, 0);
        let value = |total: &AtomicU64| total.load(Ordering::Relaxed);
        for lane in self.recorder.totals() {
            for way in 0..2 {
                outside[way] += value(&lane.outside[way]);
                inside[way] += value(&lane.inside[way]);
            }
            queued += value(&lane.queued);
            resent += value(&lane.retransmitted);
        }
        NodeSummary {
            node: self.node,
            at_ms: self.epoch.elapsed().as_millis() as u64,
            steps,
            operations: self.recorder.operations(),
            waited_us: waited / 1000,
            layers,
            outside,
            inside,
            queued,
            resent,
            failure,
        }
    }

    /// Writes `summary`, and what the program has told, to the file of scalars. A file that cannot be
    /// written is given up.
    pub(super) fn write_scalars(&self, file: &mut Option<ScalarFile>, summary: &NodeSummary) {
        let (Some(out), Some(told)) = (file.as_mut(), &self.told) else { return };
        let told = std::mem::take(&mut *told.lock().unwrap_or_else(PoisonError::into_inner));
        if let Err(why) = out.add(summary, &told) {
            tracing::error!("cannot write scalars any more: {why}");
            *file = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what has been noted so far to the files that were asked for. If that fails, the program
    /// goes on.
    pub(super) fn write(&self) {
        for file in &self.files {
            if let Err(why) = self.write_to(file) {
                tracing::error!("cannot write the trace {}: {why}", file.display());
            }
        }
    }

    fn write_to(&self, file: &Path) -> io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut records = self.recorder.on().map(|rings| rings.read()).unwrap_or_default();
        let now = self.recorder.now().unwrap_or(0);
        let sessions = self.lock();
        let all = || sessions.open.iter().chain(&sessions.ended);
        records.extend(sessions.open.iter().flat_map(|watched| watched.trace.in_flight(now)));
        let layers = |watched: &Watched| {
            let names = watched.book.job.layers.iter().map(|layer| layer.name.clone());
            (watched.id.index() as u32, names.collect())
        };
        let names = Names {
            layers: all().map(|watched| layers(watched)).collect(),
            operation: operation_name,
        };
        let failure = sessions.failure.as_deref().or_else(|| self.recorder.failure());
        let summary = self.summary(all(), failure);
        drop(sessions);
        let name = format!("{} on {}", self.name, machine());
        let facts = Facts { process: self.node.0, name, summary };
        // Viewers want what is on a thread in the order in which it began.
        records.sort_by_key(|record| (record.begin, std::cmp::Reverse(record.end)));
        write_whole(file, |out| trace::write(out, &self.recorder, &records, &names, &facts))
    }

    fn host(&self) -> &str {
        &self.book.nodes[self.node.index()].host
    }

    /// What `poseidon report` needs to know besides the events.
    fn summary<'a>(
        &self,
        sessions: impl Iterator<Item = &'a Arc<Watched>>,
        failure: Option<&str>,
    ) -> Value {
        let nanos = |nanos: u64| nanos as f64 / 1e9;
        let role = self.book.cluster.role(self.node);
        let totals = self.recorder.totals().iter();
        let lanes: Vec<Value> = totals
            .map(|lane| json!({"busy_seconds": nanos(lane.busy()), "bytes": lane.bytes()}))
            .collect();
        let counted = |total: &AtomicU64| total.load(Ordering::Relaxed);
        let moved = |way: usize| -> u64 {
            let lanes = self.recorder.totals().iter();
            lanes.map(|lane| counted(&lane.outside[way]) + counted(&lane.inside[way])).sum()
        };
        let of_kind = |(number, kind): (u32, &KindTotals)| {
            let (count, seconds) = (counted(&kind.count), nanos(counted(&kind.nanos)));
            json!({"name": operation_name(number), "count": count, "seconds": seconds})
        };
        let operations: Vec<Value> = self.recorder.kinds().map(of_kind).collect();
        let sessions: Vec<Value> = sessions.map(|watched| watched.summary()).collect();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "node": self.node.0,
            "name": self.name,
            "role": if role.is_some_and(|role| role.worker) { "worker" } else { "server" },
            "host": self.host(),
            "workers": self.book.cluster.workers(),
            "seconds": self.epoch.elapsed().as_secs_f64(),
            "failure": failure,
            "lanes": lanes,
            "link_bytes": [moved(0), moved(1)],
            "operations": operations,
            "sessions": sessions,
        })
    }
}

/// What people call this machine.
fn machine() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Makes `file` of what `write` writes. The file appears whole or not at all.
fn write_whole(
    file: &Path,
    write: impl FnOnce(BufWriter<fs::File>) -> io::Result<()>,
) -> io::Result<()> {
    if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder)?;
    }
    let mut unfinished = file.as_os_str().to_owned();
    unfinished.push(format!(".{}.part", std::process::id()));
    write(BufWriter::new(fs::File::create(&unfinished)?))?;
    fs::rename(unfinished, file)
}

impl Watched {
    /// Nanoseconds that the program has waited for all layers.
    fn waited(&self) -> u64 {
        let layers = 0..self.book.job.layers.len();
        layers.map(|layer| self.trace.waited_nanos(layer)).sum()
    }

    fn summary(&self) -> Value {
        let plan = self.book.plan();
        let of_layer = |(index, layer): (usize, &poseidon_core::Layer)| {
            let choice = plan.choice(LayerId(index as u32));
            json!({
                "name": layer.name,
                "parameters": layer.len,
                "scheme": choice.map(|choice| choice.scheme.to_string()),
                "reason": choice.map(|choice| choice.reason.clone()),
                "bytes_sent": self.counters.sent(index),
                "wait_seconds": self.trace.waited_nanos(index) as f64 / 1e9,
            })
        };
        let Traffic { bytes_sent, bytes_received, .. } = self.counters.traffic();
        json!({
            "session": self.id.index(),
            "steps": self.trace.steps(),
            "bytes_sent": bytes_sent,
            "bytes_received": bytes_received,
            "compute_seconds": self.trace.computed_nanos().map(|nanos| nanos as f64 / 1e9),
            "layers": self.book.job.layers.iter().enumerate().map(of_layer).collect::<Vec<_>>(),
        })
    }
}
