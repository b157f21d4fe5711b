//! The coordinator: nodes join, it writes the information book, anybody may ask it, and nodes
//! gather small facts and open channels through it.
//!
//! The coordinator lives in worker 0's process, or in the launcher's. It has a thread that listens,
//! a thread for each control connection that reads it, and a thread that watches the time.
//! Decisions are made by `Joining`, `Rounds` and `Openings`, which know of no sockets. No gradient
//! ever passes through it.

mod asking;

use crate::Error;
use crate::job::book::{Book, lookup};
use crate::job::control::{Asker, Body, Message, Numbered, Reply, receive};
use crate::job::gather::{self, Post};
use crate::job::joining::Joining;
use crate::job::live::{LIVE, LiveJob, LiveState, Now};
use crate::job::open::{Opening, Openings};
use crate::job::rounds::{Rounds, WAITING, Waiting};
pub use asking::{query, query_live, set_bandwidth_budget};
use poseidon_core::running_time::RunningTime;
use poseidon_core::wire::{Hello, Purpose, Status};
use poseidon_core::{Cluster, JobId, NodeId, Rate};
use poseidon_link::descriptors::{self, Need};
use poseidon_link::handshake::agreement;
use poseidon_link::{Credentials, Half, Listener, Serving, Stream, random_bytes};
use serde_json::value::RawValue;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// Serves rendezvous and questions until it is dropped.
#[derive(Debug)]
pub struct Coordinator {
    address: SocketAddr,
    shared: Arc<Shared>,
    clock: Option<JoinHandle<()>>,
    _serving: Serving,
}

impl Coordinator {
    /// Starts a coordinator on `ip:port` (port 0: any free one). It waits `patience` after the
    /// first node for the last one.
    pub fn bind(
        ip: IpAddr,
        port: u16,
        credentials: Credentials,
        patience: Duration,
    ) -> Result<Self, Error> {
        let listener = Listener::bind(ip, port, false)?;
        let address = listener.tcp();
        let identity = random_bytes().map_err(Error::io("drawing the job's identity"))?;
        let identity = JobId(identity);
        let shared = Arc::new(Shared::new(Joining::new(identity, patience)));
        let (ours, judging) = (credentials.clone(), shared.clone());
        let admit = move |hello: &Hello| match hello.purpose {
            Purpose::Lane => Err(Status::Purpose),
            Purpose::Control if hello.encrypt != ours.encrypt => {
                judging.act(|state, _| state.joining.handle_disagreement(hello));
                agreement(hello, &ours)
            }
            Purpose::Control if hello.identity.is_unknown() || hello.identity == identity => Ok(()),
            Purpose::Control => Err(Status::Run),
        };
        let answering = shared.clone();
        let deliver = move |_hello, stream: Stream| {
            // Every connection has a thread of its own: a node stays connected for as long as it is
            // in the job.
            let spawned = answering.register(stream).and_then(|(id, reader)| {
                let answering = answering.clone();
                std::thread::Builder::new()
                    .name("poseidon-control".into())
                    .spawn(move || answering.converse(id, reader))
            });
            if let Err(error) = spawned {
                tracing::warn!(%error, "no thread for a control connection");
            }
        };
        let serving = listener.serve(credentials, admit, deliver);
        let serving = serving.map_err(Error::io("serving the coordinator"))?;
        let watching = shared.clone();
        let clock = std::thread::Builder::new()
            .name("poseidon-clock".into())
            .spawn(move || watching.watch_time())
            .map_err(Error::io("starting the coordinator's clock"))?;
        Ok(Self { address, shared, clock: Some(clock), _serving: serving })
    }

    /// Starts a coordinator on a free port of this host. It listens at the address that
    /// `POSEIDON_ADDRESS` names or, without that, at the one from which this host reaches `near`
    /// (`host:port`): hosts that can reach `near` can probably reach this address too.
    pub fn beside(near: &str, credentials: Credentials, patience: Duration) -> Result<Self, Error> {
        let (wanted, deadline) = (crate::job::config::wanted_address(), Instant::now() + patience);
        let choice = poseidon_link::address::choose(wanted.as_deref(), near, deadline)?;
        Self::bind(choice.ip, 0, credentials, patience)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Control connections there have been.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> u64 {
        self.shared.lock().next
    }
}

impl Drop for Coordinator {
    /// Nodes that still wait for others are told while there is somebody to tell them: the process
    /// may end next.
    fn drop(&mut self) {
        self.shared.act(|state, _| {
            state.gathers.clear();
            state.openings.rounds.clear();
            state.joining.stop()
        });
        // Answers that are owed are written first, and a caller that is about to say something is
        // heard.
        self.shared.wait_until(|state, waited| {
            let owed = state.owed > 0 && waited < PATIENCE_FOR_WORDS;
            let silent = !state.silent.is_empty() && waited < LAST_WORDS;
            !owed && !silent
        });
        self.shared.act(|state, _| {
            state.stopped = true;
            Reply::to_all(state.joining.everybody(), &Message::Stopping)
        });
        self.shared.lock().connections.values().for_each(|connection| connection.hang_up());
        self.shared.time.notify_all();
        if let Some(clock) = self.clock.take() {
            let _ = clock.join();
        }
        self.shared.wait_until(|state, waited| state.connections.is_empty() || waited > LAST_WORDS);
    }
}

/// What all threads of a coordinator share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// For threads in `wait_until`: an answer was written, or a connection has ended.
    changed: Condvar,
    /// For the thread that watches the time: there may be an earlier deadline than the one it waits
    /// for.
    time: Condvar,
}

/// What the coordinator knows. The connections' threads and the thread that watches the time change
/// it.
#[derive(Debug)]
struct State {
    joining: Joining,
    /// Topics that workers of the job are gathering.
    gathers: Rounds<Box<RawValue>>,
    /// Channels that nodes of the job are opening.
    openings: Openings,
    /// What nodes tell of themselves.
    live: LiveState,
    connections: BTreeMap<u64, Arc<Connection>>,
    /// Connections that have not said anything yet.
    silent: BTreeSet<u64>,
    /// The number of the next connection.
    next: u64,
    /// Answers that have been decided on and are not written yet.
    owed: usize,
    /// Nothing is served any more.
    stopped: bool,
    /// Since when time is counted.
    epoch: Instant,
    /// Counts the time in which this process ran, because nobody can post while it does not. Looked
    /// at by the thread that watches the time, while somebody waits.
    time: RunningTime,
}

/// A control connection, as those who write to it know it.
#[derive(Debug)]
struct Connection {
    peer: String,
    /// A frame is written under this lock, whole.
    writer: Mutex<Half>,
}

impl Shared {
    fn new(joining: Joining) -> Self {
        let state = State {
            joining,
            gathers: Rounds::default(),
            openings: Openings::default(),
            live: LiveState::default(),
            connections: BTreeMap::new(),
            silent: BTreeSet::new(),
            next: 0,
            owed: 0,
            stopped: false,
            epoch: Instant::now(),
            time: RunningTime::default(),
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), time: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self, stream: Stream) -> std::io::Result<(u64, Half)> {
        let peer = stream.peer().to_string();
        let (reader, writer) = stream.split()?;
        let mut state = self.lock();
        state.next += 1;
        let id = state.next;
        state.connections.insert(id, Arc::new(Connection { peer, writer: Mutex::new(writer) }));
        state.silent.insert(id);
        Ok((id, reader))
    }

    /// Handles what comes over a connection until the connection ends.
    fn converse(&self, id: u64, mut reader: Half) {
        let _ending = Ending { shared: self, id };
        reader.set_deadline(Some(Instant::now() + PATIENCE_FOR_WORDS));
        loop {
            match receive(&mut reader) {
                Ok(heard) => self.act(|state, now| state.handle(id, heard, now)),
                Err(error) => return self.lock().log_end(id, &error),
            }
            // Nodes stay connected. Any other connection is closed with its first answer.
            reader.set_deadline(None);
        }
    }

    /// Changes the state, then writes the replies that `change` returns. The lock is not held while
    /// they are written.
    fn act(&self, change: impl FnOnce(&mut State, Instant) -> Vec<Reply>) {
        let mut state = self.lock();
        let now = state.now();
        let replies = change(&mut state, now);
        let addressed = |Reply { to, body }| {
            let connection = state.connections.get(&to.connection)?.clone();
            let last = state.joining.node_of(to.connection).is_none();
            Some((connection, to.request, body, last))
        };
        let outgoing: Vec<_> = replies.into_iter().filter_map(addressed).collect();
        state.owed += outgoing.len();
        drop(state);
        self.time.notify_one();
        for (connection, request, body, last) in outgoing {
            connection.write(&body, request, last);
            self.lock().owed -= 1;
        }
        self.changed.notify_all();
    }

    /// Ends waits whose time has come.
    fn watch_time(&self) {
        let mut state = self.lock();
        while !state.stopped {
            let Some(due) = state.deadline() else {
                state = self.time.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.resume();
                continue;
            };
            let left = due.saturating_duration_since(state.now());
            if left.is_zero() {
                drop(state);
                self.act(State::handle_time);
                state = self.lock();
                continue;
            }
            // Short stretches tell time in which the whole process was away from time in which
            // others were silent.
            let woken = self.time.wait_timeout(state, left.min(RunningTime::USUAL));
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
            let real = state.epoch.elapsed();
            if let Some(away) = state.time.handle_running(real) {
                tracing::warn!("the coordinator was away for {away:.1?}, which does not count");
            }
        }
    }

    /// Waits until `done`, which is told how long it has been.
    fn wait_until(&self, done: impl Fn(&State, Duration) -> bool) {
        let began = Instant::now();
        let mut state = self.lock();
        while !done(&state, began.elapsed()) {
            let woken = self.changed.wait_timeout(state, GLANCE);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Handles the end of a connection when the connection's thread ends, by a panic too.
struct Ending<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.shared.act(|state, now| {
            let replies = state.handle_end(self.id, now);
            state.connections.remove(&self.id);
            replies
        });
    }
}

impl State {
    /// The time as the coordinator counts it.
    fn now(&self) -> Instant {
        self.epoch + self.time.at(self.epoch.elapsed())
    }

    /// The thread that watches the time is back. It had nothing to watch, so it was not away.
    fn resume(&mut self) {
        self.time.rest_until(self.epoch.elapsed());
    }

    fn handle(&mut self, id: u64, heard: Numbered, now: Instant) -> Vec<Reply> {
        self.silent.remove(&id);
        let asker = Asker { connection: id, request: heard.request };
        match heard.message {
            Message::Join(join) => {
                let before = self.joining.connection_of(join.facts.node);
                let before = before.and_then(|id| Some((id, self.connections.get(&id)?)));
                let mut replies = Vec::new();
                // A restarted process may be heard before the end of its predecessor is.
                if let Some((id, before)) = before
                    && before.is_hung_up()
                {
                    replies = self.joining.handle_closed(id, now);
                }
                let Some(connection) = self.connections.get(&id) else { return replies };
                if self.joining.is_empty() {
                    let nodes = usize::from(join.workers) + usize::from(join.servers.extra());
                    // Without descriptors for all nodes the last nodes are not accepted, which is
                    // logged too.
                    if let Err(shortage) = descriptors::reserve(Need { nodes, lanes: 1 }) {
                        tracing::warn!("{shortage}");
                    }
                }
                let peer = connection.peer.clone();
                replies.extend(self.joining.handle_join(asker, *join, peer, now));
                replies
            }
            Message::Query { key } => {
                let answer = match &*key {
                    WAITING => Message::answer(&self.waiting()),
                    LIVE => Message::answer(&self.live_job(now)),
                    _ => Message::answer(&match key.split_once('.') {
                        Some((LIVE, rest)) => serde_json::to_value(self.live_job(now))
                            .ok()
                            .and_then(|live| lookup(live, rest)),
                        _ => self.joining.tell(&key),
                    }),
                };
                vec![Reply::new(asker, &answer)]
            }
            Message::Measured(post) => match self.book_for(asker, post.node) {
                Ok(_) => self.joining.handle_measured(asker, post, now),
                Err(reason) => vec![Reply::refusal(asker, reason)],
            },
            Message::Gather(post) => self.handle_gather(asker, post, now),
            Message::Open(opening) => self.handle_open(asker, opening, now),
            Message::Leave { reason } => {
                let left = self.leavers(id);
                self.note_gone(&left, reason.as_deref(), now);
                let mut replies = self.joining.handle_leave(id, reason, now);
                replies.extend(self.forget(left));
                replies
            }
            Message::Summary(summary) => self.handle_news(asker, summary.node, |state, book| {
                state.live.handle_summary(book, *summary, wall(now));
                Ok(())
            }),
            Message::Replanned { epoch, job } => self.handle_news(asker, NodeId(0), |state, _| {
                state.joining.handle_replanned(epoch, *job)
            }),
            Message::Budget { rate, node } => {
                let whose = node.map_or("every node".into(), |node| format!("node {node}"));
                let words = match rate {
                    Some(rate) => format!("{whose} may send {rate} to other hosts"),
                    None => format!("{whose} may send all it can to other hosts"),
                };
                self.live.handle_change(words, wall(now));
                self.tell_budget(asker, rate, node)
            }
            other => {
                let expected =
                    "expected join, measured, query, gather, open, summary, leave or budget";
                vec![Reply::refusal(asker, format!("{expected}, got {}", other.name()))]
            }
        }
    }

    /// What some nodes have posted and others have not.
    fn waiting(&self) -> Vec<Waiting> {
        self.gathers.waiting().chain(self.openings.rounds.waiting()).collect()
    }

    /// What the job does.
    fn live_job(&self, now: Instant) -> LiveJob {
        let (book, missing) = (self.joining.book(), self.joining.missing());
        let missing = missing.into_iter().map(|(_, name)| name).collect();
        self.live.tell(book.map(|book| &**book), missing, wall(now))
    }

    /// Takes up what `node` says of itself, and acknowledges it.
    fn handle_news(
        &mut self,
        asker: Asker,
        node: NodeId,
        take: impl FnOnce(&mut Self, &Book) -> Result<(), String>,
    ) -> Vec<Reply> {
        let taken = match self.joining.book().cloned() {
            Some(book) if self.joining.node_of(asker.connection) == Some(node) => take(self, &book),
            _ => Err(format!("only node {node} of a job that has started may say this")),
        };
        vec![match taken {
            Ok(()) => Reply::new(asker, &Message::Answer { value: None }),
            Err(reason) => Reply::refusal(asker, reason),
        }]
    }

    /// Remembers that a node has left a running job, and why if it did not mean to.
    fn note_gone(&mut self, left: &Option<(NodeId, Cluster)>, why: Option<&str>, now: Instant) {
        if let (Some((node, _)), Some(book)) = (left, self.joining.book().cloned()) {
            self.live.handle_gone(&book, *node, why, wall(now));
        }
    }

    fn handle_gather(&mut self, asker: Asker, post: Post, now: Instant) -> Vec<Reply> {
        match self.book_for(asker, post.node) {
            Ok(cluster) => gather::post(&mut self.gathers, &cluster, asker, post, now),
            Err(reason) => vec![Reply::refusal(asker, reason)],
        }
    }

    fn handle_open(&mut self, asker: Asker, opening: Opening, now: Instant) -> Vec<Reply> {
        match self.book_for(asker, opening.node) {
            Ok(cluster) => self.openings.post(&cluster, asker, opening, now),
            Err(reason) => vec![Reply::refusal(asker, reason)],
        }
    }

    /// Tells `node`, or every node, its new budget.
    fn tell_budget(&self, asker: Asker, rate: Option<Rate>, node: Option<NodeId>) -> Vec<Reply> {
        let Some(book) = self.joining.book() else {
            return vec![Reply::refusal(asker, "the job has not started".into())];
        };
        let nodes = book.cluster.nodes();
        if let Some(node) = node.filter(|node| node.index() >= nodes) {
            let reason = format!("there is no node {node}: expected less than {nodes}");
            return vec![Reply::refusal(asker, reason)];
        }
        let meant = |id: &NodeId| node.is_none_or(|node| node == *id);
        let connected = |id: NodeId| {
            let connection = self.joining.connection_of(id)?;
            self.connections.contains_key(&connection).then_some((id, connection))
        };
        let told: Vec<_> = book.cluster.node_ids().filter(meant).filter_map(connected).collect();
        let askers = told.iter().map(|&(_, connection)| Asker { connection, request: None });
        let mut replies = Reply::to_all(askers, &Message::Budget { rate, node });
        let ids: Vec<NodeId> = told.iter().map(|(id, _)| *id).collect();
        replies.push(Reply::new(asker, &Message::answer(&ids)));
        replies
    }

    /// The job's cluster, if the job has started and the connection of `asker` is not another
    /// node's than `node`.
    fn book_for(&self, asker: Asker, node: NodeId) -> Result<Cluster, String> {
        let book = self.joining.book().ok_or("the job has not started")?;
        match self.joining.node_of(asker.connection) {
            Some(speaker) if speaker != node => {
                let cluster = &book.cluster;
                let (speaker, node) = (cluster.name(speaker), cluster.name(node));
                Err(format!("{speaker} cannot speak for {node}"))
            }
            _ => Ok(book.cluster.clone()),
        }
    }

    fn handle_time(&mut self, now: Instant) -> Vec<Reply> {
        let mut replies = self.joining.handle_time(now);
        if let Some(notice) = self.joining.poll_notice(now) {
            tracing::warn!("{notice}");
        }
        while let Some(round) = self.gathers.poll_expired(now) {
            replies.extend(round.tell_missing());
        }
        while let Some(round) = self.openings.rounds.poll_expired(now) {
            replies.extend(round.tell_missing());
        }
        replies
    }

    /// When [`handle_time`](Self::handle_time) has something to do next.
    fn deadline(&self) -> Option<Instant> {
        let rounds = [self.gathers.deadline(), self.openings.rounds.deadline()];
        rounds.into_iter().chain([self.joining.deadline()]).flatten().min()
    }

    /// A connection has ended.
    fn handle_end(&mut self, id: u64, now: Instant) -> Vec<Reply> {
        self.silent.remove(&id);
        let left = self.leavers(id);
        self.note_gone(&left, Some("its connection closed without a goodbye"), now);
        let mut replies = self.joining.handle_closed(id, now);
        replies.extend(self.forget(left));
        replies
    }

    /// The node that leaves a running job if this connection ends.
    fn leavers(&self, id: u64) -> Option<(NodeId, Cluster)> {
        let book = self.joining.book()?;
        self.joining.node_of(id).map(|node| (node, book.cluster.clone()))
    }

    /// Ends the openings that wait for a node that has left.
    fn forget(&mut self, left: Option<(NodeId, Cluster)>) -> Vec<Reply> {
        left.map_or_else(Vec::new, |(node, cluster)| self.openings.handle_left(&cluster, node))
    }

    /// A node says goodbye before it hangs up, and the lanes report a node that does not. So only
    /// strangers are worth a warning.
    fn log_end(&self, id: u64, error: &std::io::Error) {
        let Some(Connection { peer, .. }) = self.connections.get(&id).map(|c| &**c) else { return };
        let nonsense = error.kind() == ErrorKind::InvalidData;
        if self.silent.contains(&id) || nonsense {
            tracing::warn!(%peer, %error, "a control connection said nothing sensible");
        } else {
            tracing::debug!(%peer, %error, "a control connection ended");
        }
    }
}

impl Connection {
    /// Writes `body`, and hangs up if it is the `last` thing to say.
    fn write(&self, body: &Body, request: Option<u64>, last: bool) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.set_deadline(Some(Instant::now() + PATIENCE_FOR_WORDS));
        let written = body.write(request, &mut *writer).and_then(|()| writer.flush());
        if let Err(error) = &written {
            let peer = &self.peer;
            match error.kind() {
                // The other end is gone. The connection's own thread notices that.
                ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                    tracing::debug!(%peer, %error, "a control connection got no answer");
                }
                _ => tracing::warn!(%peer, %error, "a control connection got no answer"),
            }
        }
        if last || written.is_err() {
            writer.hang_up();
        }
    }

    fn hang_up(&self) {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner).hang_up();
    }

    fn is_hung_up(&self) -> bool {
        // While a thread writes to the connection, the connection is taken for alive.
        self.writer.try_lock().is_ok_and(|writer| writer.is_hung_up())
    }
}

/// Now, by both clocks.
fn wall(at: Instant) -> Now {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Now { at, wall_ms: since_1970.as_millis() as u64 }
}

/// How long a caller may take to say what it wants, and to take its answer.
const PATIENCE_FOR_WORDS: Duration = Duration::from_secs(10);
/// How long a coordinator that stops waits for a caller's first message: a round trip, and time to
/// spare.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How often a wait that ends by the clock looks at it.
const GLANCE: Duration = Duration::from_millis(50);
