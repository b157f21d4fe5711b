//! The coordinator: nodes join, it writes the information book, anybody may ask it, and workers
//! gather small facts through it.
//!
//! It lives in worker 0's process, or in the launcher's; either way it is a listener and one short
//! thread per control connection. No gradient ever passes through it.

use crate::Error;
use crate::job::book::{self, Book, lookup};
use crate::job::control::{Answer, Join, Message, answer, frame, receive};
use crate::job::gather::{Post, Rounds};
use poseidon_core::wire::{NOBODY, Purpose, Status};
use poseidon_core::{Cluster, Epoch, JobId, LaneId, NodeId};
use poseidon_link::{
    Address, Caller, Credentials, Listener, Serving, Stream, connect, random_bytes,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Serves rendezvous and questions until it is dropped.
#[derive(Debug)]
pub struct Coordinator {
    address: SocketAddr,
    shared: Arc<Shared>,
    _serving: Serving,
}

/// Why the nodes did not find together.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// The coordinator would not have this node.
    #[error("the coordinator at {address} refused this node: {reason}")]
    Refused {
        /// The coordinator's address.
        address: String,
        /// Its words.
        reason: String,
    },
    /// The conversation broke off.
    #[error("talking to the coordinator at {address}: {why}")]
    Broken {
        /// The coordinator's address.
        address: String,
        /// What happened.
        why: String,
    },
}

/// Who has joined so far. Control threads write it, each for its own node, and wait on `changed`.
#[derive(Debug, Default)]
struct Gathering {
    joined: BTreeMap<NodeId, (Join, String)>,
    outcome: Option<Result<Arc<Book>, String>>,
    /// Topics that workers of the job are gathering.
    rounds: Rounds,
    /// Control connections that are open.
    conversations: usize,
    /// Those of them that have said what they want and have not been answered.
    owed: usize,
}

#[derive(Debug)]
struct Shared {
    gathering: Mutex<Gathering>,
    changed: Condvar,
    patience: Duration,
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
        let shared =
            Arc::new(Shared { gathering: Mutex::default(), changed: Condvar::new(), patience });
        let admit = |hello: &poseidon_core::wire::Hello| match hello.purpose {
            Purpose::Control => Ok(()),
            Purpose::Lane => Err(Status::Purpose),
        };
        let answering = shared.clone();
        let deliver = move |_hello, stream| {
            let conversation = Conversation::begin(answering.clone());
            // Its own thread: a node may wait here for a minute until the last one joins.
            let spawned = std::thread::Builder::new()
                .name("poseidon-control".into())
                .spawn(move || converse(conversation, stream));
            if let Err(error) = spawned {
                tracing::warn!(%error, "no thread for a control connection");
            }
        };
        let serving = listener.serve(credentials, admit, deliver);
        let serving = serving.map_err(Error::io("serving the coordinator"))?;
        Ok(Self { address, shared, _serving: serving })
    }

    /// Starts a coordinator on a free port of this host, at the address by which it reaches `near` (`host:port`), or
    /// the one `POSEIDON_ADDRESS` names: there, others that can reach `near` can probably reach it too.
    pub fn beside(near: &str, credentials: Credentials, patience: Duration) -> Result<Self, Error> {
        let wanted = crate::job::config::wanted_address();
        let choice = poseidon_link::address::choose(wanted.as_deref(), near)?;
        Self::bind(choice.ip, 0, credentials, patience)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Coordinator {
    /// Whoever still waits for the others is told, while there is somebody to tell it: the process
    /// may end next.
    fn drop(&mut self) {
        let mut gathering = self.shared.lock();
        gathering.outcome.get_or_insert_with(|| Err("the coordinator has stopped".into()));
        gathering.rounds.stop();
        self.shared.changed.notify_all();
        let now = Instant::now();
        while gathering.conversations > 0 {
            let patience = if gathering.owed > 0 { PATIENCE_FOR_WORDS } else { LAST_WORDS };
            let left = (now + patience).saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let woken = self.shared.changed.wait_timeout(gathering, left);
            gathering = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Counted from its beginning to its end, however it ends.
struct Conversation {
    shared: Arc<Shared>,
    /// Whether it is among those an answer is owed to.
    heard: bool,
}

impl Conversation {
    fn begin(shared: Arc<Shared>) -> Self {
        shared.lock().conversations += 1;
        Self { shared, heard: false }
    }

    fn hear(&mut self) {
        self.heard = true;
        self.shared.lock().owed += 1;
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        let mut gathering = self.shared.lock();
        gathering.conversations -= 1;
        gathering.owed -= usize::from(self.heard);
        drop(gathering);
        self.shared.changed.notify_all();
    }
}

/// Asks the coordinator at `address` for `key` of the information book: a dotted path, empty for all
/// of it. `plan` is a list of [`PlannedLayer`](crate::PlannedLayer)s, `chunks` one of
/// [`PlacedChunk`](crate::PlacedChunk)s. `None` if the key names nothing.
pub fn query(
    address: &str,
    credentials: &Credentials,
    key: &str,
    patience: Duration,
) -> Result<Option<Value>, Error> {
    let deadline = Instant::now() + patience;
    let caller = Caller { purpose: Purpose::Control, node: NOBODY, lane: LaneId(0) };
    let mut stream = connect(&Address::Tcp(address.into()), caller, credentials, deadline)
        .map_err(|e| Error::connect(format!("reaching the coordinator at {address}"), e))?;
    stream.set_deadline(Some(deadline));
    match converse_once(&mut stream, NOBODY, &Message::Query { key: key.into() }, address)? {
        Message::Answer { value } => Ok(value),
        other => Err(unexpected(address, "an answer", &other).into()),
    }
}

/// Joins the job through the coordinator at the other end of `stream`; returns when all have.
pub(crate) fn join(
    stream: &mut Stream,
    join: Join,
    address: &str,
) -> Result<Book, RendezvousError> {
    let node = join.facts.node;
    match converse_once(stream, node, &Message::Join(Box::new(join)), address)? {
        Message::Book(book) => Ok(*book),
        other => Err(unexpected(address, "the book", &other)),
    }
}

/// Says one thing and hears one back.
fn converse_once(
    stream: &mut Stream,
    me: NodeId,
    message: &Message,
    address: &str,
) -> Result<Message, RendezvousError> {
    let address = address.to_string();
    let frame = frame(me, message);
    match frame.and_then(|frame| stream.write_all(&frame)).and_then(|()| receive(stream)) {
        Ok(Message::Refused { reason }) => Err(RendezvousError::Refused { address, reason }),
        Ok(answer) => Ok(answer),
        Err(e) => Err(RendezvousError::Broken { address, why: e.to_string() }),
    }
}

fn unexpected(address: &str, expected: &str, got: &Message) -> RendezvousError {
    RendezvousError::Broken {
        address: address.into(),
        why: format!("expected {expected}, got {}", got.name()),
    }
}

/// How long a caller may take to say what it wants, and to take its answer.
const PATIENCE_FOR_WORDS: Duration = Duration::from_secs(10);
/// How long a coordinator that stops waits for what a caller is saying: a round trip, and time to
/// spare.
const LAST_WORDS: Duration = Duration::from_secs(1);

fn converse(mut conversation: Conversation, mut stream: Stream) {
    stream.set_deadline(Some(Instant::now() + PATIENCE_FOR_WORDS));
    let peer = stream.peer().to_string();
    let message = match receive(&mut stream) {
        Ok(message) => message,
        Err(error) => {
            tracing::warn!(%peer, %error, "a control connection said nothing sensible");
            return;
        }
    };
    conversation.hear();
    let shared = &conversation.shared;
    let answer = match message {
        Message::Join(join) => answer(&shared.join(*join, peer.clone())),
        Message::Query { key } => answer(&Message::Answer { value: shared.tell(&key) }),
        Message::Gather(post) => shared.gather(post),
        other => {
            let reason = format!("expected join, query or gather, got {}", other.name());
            answer(&Message::Refused { reason })
        }
    };
    stream.set_deadline(Some(Instant::now() + PATIENCE_FOR_WORDS));
    if let Err(error) = answer.and_then(|answer| stream.write_all(&answer)) {
        tracing::warn!(%peer, %error, "a control connection got no answer");
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Gathering> {
        self.gathering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a node and waits until the book is written, or the attempt has failed.
    fn join(&self, join: Join, peer: String) -> Message {
        let mut gathering = self.lock();
        let admitted = gathering.admit(join, peer);
        self.changed.notify_all();
        if let Err(reason) = admitted {
            return Message::Refused { reason };
        }
        let deadline = Instant::now() + self.patience;
        while gathering.outcome.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = gathering.missing().join(", ");
                let reason = format!("{missing} did not join within {:?}", self.patience);
                gathering.outcome = Some(Err(reason));
                self.changed.notify_all();
                break;
            }
            let woken = self.changed.wait_timeout(gathering, left);
            gathering = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        match gathering.outcome.as_ref() {
            Some(Ok(book)) => Message::Book(Box::new(Book::clone(book))),
            Some(Err(reason)) => Message::Refused { reason: reason.clone() },
            None => Message::Refused { reason: "the coordinator has no outcome".into() },
        }
    }

    /// Takes a worker's value of a topic and waits until all have posted theirs, or one has waited
    /// long enough. No answer if the coordinator stops: the lanes know why better.
    fn gather(&self, post: Post) -> io::Result<Answer> {
        let refuse = |reason| answer(&Message::Refused { reason });
        let (topic, patience) = (post.topic.clone(), Duration::from_millis(post.patience_ms));
        let mut gathering = self.lock();
        let Some(Ok(book)) = gathering.outcome.clone() else {
            return refuse("the job has not started".into());
        };
        let told = match gathering.rounds.post(&book.cluster, post) {
            Ok(told) => told,
            Err(reason) => return refuse(reason),
        };
        drop(gathering);
        match told.recv_timeout(patience) {
            Err(RecvTimeoutError::Timeout) => {
                let mut gathering = self.lock();
                // If it was answered just now, an open round of this topic is the next one.
                let told_late = told.try_recv().or_else(|_| {
                    gathering.rounds.expire(&book.cluster, &topic);
                    told.try_recv()
                });
                told_late.map_err(|_| stopped())
            }
            in_time => in_time.map_err(|_| stopped()),
        }
    }

    /// What there is to know right now under `key`.
    fn tell(&self, key: &str) -> Option<Value> {
        let gathering = self.lock();
        let known = match &gathering.outcome {
            Some(Ok(book)) => {
                let book = book.clone();
                // A large model's plan takes a while.
                drop(gathering);
                return book::query(&book, key);
            }
            Some(Err(reason)) => json!({ "failed": reason }),
            None => json!({
                "joined": gathering.joined.values().map(|(j, _)| &j.facts).collect::<Vec<_>>(),
                "missing": gathering.missing(),
            }),
        };
        lookup(known, key)
    }
}

impl Gathering {
    fn admit(&mut self, join: Join, peer: String) -> Result<(), String> {
        if let Some(outcome) = &self.outcome {
            return Err(match outcome {
                Ok(_) => "the job has started already".into(),
                Err(reason) => reason.clone(),
            });
        }
        let cluster = Cluster::new(join.workers, join.servers, 1).map_err(|e| e.to_string())?;
        let node = join.facts.node;
        let name = cluster.name(node);
        let Some(role) = cluster.role(node) else {
            return Err(format!("there is no node {node} among {} nodes", cluster.nodes()));
        };
        if role.worker != join.job.is_some() {
            return Err(format!("{name} must describe a job exactly if it is a worker"));
        }
        if let Some((_, before)) = self.joined.get(&node) {
            return Err(format!(
                "{name} joined already, from {before}: two processes have the same rank"
            ));
        }
        if let Some((other, (first, _))) = self.joined.iter().next() {
            let other = cluster.name(*other);
            let size = |j: &Join| format!("{} workers and servers '{}'", j.workers, j.servers);
            if size(first) != size(&join) {
                let words =
                    format!("{name} expects {}, {other} expects {}", size(&join), size(first));
                return Err(self.call_off(words));
            }
        }
        if let Some(job) = &join.job {
            job.validate().map_err(|e| format!("the job of {name} makes no sense: {e}"))?;
            let first =
                self.joined.values().find_map(|(j, _)| Some((j.facts.node, j.job.as_ref()?)));
            if let Some((other, theirs)) = first
                && let Some(words) = theirs.difference(&cluster.name(other), job, &name)
            {
                let words = format!("the workers do not train the same thing: {words}");
                return Err(self.call_off(words));
            }
        }
        tracing::debug!(%name, %peer, "joined");
        self.joined.insert(node, (join, peer));
        if self.joined.len() == cluster.nodes() {
            self.outcome = Some(self.write_book());
        }
        Ok(())
    }

    /// Nodes that disagree never become a job: everybody hears why now, not when time is up.
    fn call_off(&mut self, reason: String) -> String {
        self.outcome = Some(Err(reason.clone()));
        reason
    }

    /// All are here. Worker 0's number of lanes holds for everybody.
    fn write_book(&self) -> Result<Arc<Book>, String> {
        let (first, _) = &self.joined[&NodeId(0)];
        let cluster =
            Cluster::new(first.workers, first.servers, first.lanes).map_err(|e| e.to_string())?;
        let job = first.job.clone().ok_or("worker 0 described no job")?;
        let nodes = self.joined.values().map(|(join, _)| join.facts.clone()).collect();
        let identity = random_bytes().map_err(|e| format!("no random numbers: {e}"))?;
        let identity = JobId::from_bytes(identity);
        Ok(Arc::new(Book { identity, epoch: Epoch::FIRST, cluster, nodes, job }))
    }

    fn missing(&self) -> Vec<String> {
        let Some((first, _)) = self.joined.values().next() else { return Vec::new() };
        let cluster = Cluster::new(first.workers, first.servers, 1);
        let Ok(cluster) = cluster else { return Vec::new() };
        let missing = cluster.node_ids().filter(|n| !self.joined.contains_key(n));
        missing.map(|n| cluster.name(n)).collect()
    }
}

fn stopped() -> io::Error {
    io::Error::other("the coordinator has stopped")
}
