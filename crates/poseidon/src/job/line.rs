//! A node's end of its control connection: one connection for the life of the job, shared by all
//! threads.

use crate::job::book::{BOOK_VERSION, Book};
use crate::job::control::{Body, Join, Message, Numbered, receive};
use crate::job::link_rate::Measured;
use crate::job::patience::Patience;
use crate::{Error, RendezvousError};
use poseidon_core::{Cluster, NodeId, Rate};
use poseidon_link::{Half, Stream, Tagged};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The connection to the coordinator. Several threads may ask over it at the same time; each of
/// them is handed its own answer.
pub(crate) struct ControlLine {
    me: NodeId,
    /// `host:port` of the coordinator, for errors.
    address: String,
    /// A frame is written under this lock, whole.
    writer: Mutex<Half>,
    shared: Arc<Shared>,
    /// Written once, when the coordinator has answered the join.
    book: OnceLock<Arc<Book>>,
    reader: Option<JoinHandle<()>>,
    /// The process that made the connection. A process that is forked from it has the socket too,
    /// but must not close it.
    owner: u32,
}

/// What the lanes know of the job while somebody waits for the coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobState {
    /// The job goes on.
    Running,
    /// This node has said goodbye and takes part in nothing new.
    Departed(NodeId),
    /// The job has failed: no answer is of use any more.
    Failed,
}

/// Why there is no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum LineError {
    /// The message does not fit into a frame. Nothing was written, and the line can still be used.
    #[error("{0}")]
    TooLarge(String),
    /// A node has left the job, and no answer came soon after.
    #[error("node {0} finished while others go on")]
    Departed(NodeId),
    /// The job has failed meanwhile.
    #[error("the job has failed")]
    Failed,
    /// No answer has come, although the coordinator should have said by now who is missing.
    #[error("no answer within {0:.1?}")]
    Overdue(Duration),
    /// There is no coordinator any more.
    #[error("{0}")]
    Gone(String),
}

/// What the reading thread and those who ask share.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// True once a node is lost or the coordinator has died. Written by the reading thread.
    alarm: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    /// The number of the next request.
    next: u64,
    /// Who waits for which request. Askers add themselves, the reading thread takes them out.
    asking: BTreeMap<u64, Sender<Message>>,
    /// The first node that the coordinator has lost, and its words. Written by the reading thread.
    lost: Option<(NodeId, String)>,
    /// Why nobody reads any more. Written by the reading thread, last.
    gone: Option<Gone>,
    /// Whether this node has said goodbye itself.
    left: bool,
    /// What the coordinator has told of this node's budget, until somebody listens. Written by the
    /// reading thread.
    budget: Option<Option<Rate>>,
    budget_listener: Option<BudgetListener>,
}

/// What changes the node's budget.
type BudgetListener = Box<dyn Fn(Option<Rate>) + Send>;

#[derive(Clone, Debug)]
enum Gone {
    /// The coordinator has stopped on purpose, which harms nobody.
    Stopped,
    Died(String),
}

impl ControlLine {
    /// Takes over a connection to the coordinator at `address`.
    pub(crate) fn start(stream: Stream, me: NodeId, address: &str) -> io::Result<Self> {
        let (reader, writer) = stream.split()?;
        let shared = Arc::<Shared>::default();
        let listening = shared.clone();
        let reader = std::thread::Builder::new()
            .name("poseidon-line".into())
            .spawn(move || listening.listen(reader))?;
        Ok(Self {
            me,
            address: address.into(),
            writer: Mutex::new(writer),
            shared,
            book: OnceLock::new(),
            reader: Some(reader),
            owner: std::process::id(),
        })
    }

    /// Joins the job; returns when all have, and no later than `patience` from now. If there are
    /// nodes that measure their ports, the book is a draft, and [`measured`](Self::measured) gets
    /// the complete one.
    pub(crate) fn join(
        &self,
        join: Join,
        patience: Duration,
    ) -> Result<(Arc<Book>, Vec<NodeId>), RendezvousError> {
        let address = || self.address.clone();
        let answer = self.ask(&Message::Join(Box::new(join)), patience, &|| JobState::Running);
        let broken = |why: String| RendezvousError::Broken { address: address(), why };
        match answer.map_err(|error| broken(error.to_string()))? {
            Message::Book(book) => Ok((self.keep_book(book)?, Vec::new())),
            Message::Draft { book, probers } => {
                let book = self.keep_book(book)?;
                let nodes = book.cluster.nodes();
                match probers.iter().find(|node| node.index() >= nodes) {
                    None => Ok((book, probers)),
                    Some(node) => Err(broken(format!(
                        "expected only nodes below {nodes} to measure ports, got node {node}"
                    ))),
                }
            }
            Message::Refused { reason } => {
                Err(RendezvousError::Refused { address: address(), reason })
            }
            other => Err(broken(format!("expected the book, got {}", other.name()))),
        }
    }

    /// Says what was measured in a round and waits for the others. Returns the complete book when
    /// the last round is over.
    pub(crate) fn measured(
        &self,
        round: u8,
        sent: Option<(NodeId, Rate)>,
        patience: Duration,
    ) -> Result<Option<Arc<Book>>, Error> {
        let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        let post = Message::Measured(Measured { node: self.me, round, sent, patience_ms });
        let watch = || match self.trouble() {
            Some(_) => JobState::Failed,
            None => JobState::Running,
        };
        let address = || self.address.clone();
        let why = match self.ask(&post, patience, &watch) {
            Ok(Message::Proceed) => return Ok(None),
            Ok(Message::Book(book)) => {
                return Ok(Some(Arc::new(read_book(book, &self.address)?)));
            }
            Ok(Message::Missing { nodes }) => {
                let nodes = nodes.into_iter().map(|node| self.name(node)).collect();
                return Err(Error::Unmeasured { nodes, waited: patience });
            }
            Ok(Message::Refused { reason }) => {
                return Err(RendezvousError::Refused { address: address(), reason }.into());
            }
            Ok(other) => format!("expected the book, got {}", other.name()),
            Err(error) => match self.trouble() {
                Some(trouble) => return Err(trouble),
                None => error.to_string(),
            },
        };
        Err(RendezvousError::Broken { address: address(), why }.into())
    }

    /// Says `message` and waits for its answer. The coordinator has `patience`, and a little more
    /// for its words about who is missing. `watch` is asked ten times a second what the lanes know.
    pub(crate) fn ask(
        &self,
        message: &Message,
        patience: Duration,
        watch: &dyn Fn() -> JobState,
    ) -> Result<Message, LineError> {
        let body = Body::new(message).map_err(|e| LineError::TooLarge(e.to_string()))?;
        let mut wait = Wait::new(patience, watch);
        let (tell, told) = channel();
        let request = {
            let mut state = self.shared.lock();
            if let Some(gone) = &state.gone {
                return Err(gone.words());
            }
            state.next += 1;
            let request = state.next;
            state.asking.insert(request, tell);
            request
        };
        let _asking = Asking { shared: &self.shared, request };
        match self.write(&body, Some(request), &mut wait) {
            // If the connection has broken, the reading thread knows best why. It is about to wake
            // this thread.
            Ok(()) | Err(LineError::Gone(_)) => {}
            Err(error) => return Err(error),
        }
        loop {
            match told.recv_timeout(wait.stretch()?) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let gone = self.shared.lock().gone.clone();
                    return Err(wait.instead_of(gone.unwrap_or(Gone::Stopped).words()));
                }
            }
        }
    }

    /// What ends the wait for other nodes: one of them is lost, or the coordinator has died.
    pub(crate) fn trouble(&self) -> Option<Error> {
        let state = self.shared.lock();
        if let Some((node, how)) = &state.lost {
            let (node, how) = (self.name(*node), how.clone());
            return Some(Error::Lost { node, how, awaited: None });
        }
        match &state.gone {
            Some(died @ Gone::Died(_)) => {
                let (address, why) = (self.address.clone(), died.words().to_string());
                Some(RendezvousError::Broken { address, why }.into())
            }
            Some(Gone::Stopped) | None => None,
        }
    }

    /// The node that the coordinator has lost, if it has lost one.
    pub(crate) fn lost(&self) -> Option<NodeId> {
        self.shared.lock().lost.as_ref().map(|(node, _)| *node)
    }

    /// From now on `listener` is told when somebody changes this node's budget from outside. It must
    /// not wait, and not use this line.
    pub(crate) fn on_budget(&self, listener: impl Fn(Option<Rate>) + Send + 'static) {
        let mut state = self.shared.lock();
        if let Some(rate) = state.budget.take() {
            listener(rate);
        }
        state.budget_listener = Some(Box::new(listener));
    }

    /// Whether the coordinator is there.
    pub(crate) fn is_connected(&self) -> bool {
        self.shared.lock().gone.is_none()
    }

    /// Becomes true when there is [trouble](Self::trouble).
    pub(crate) fn alarm(&self) -> &Arc<AtomicBool> {
        &self.shared.alarm
    }

    /// Tells the coordinator that the job's first session follows another plan. Nothing depends on
    /// that, so nobody waits for an answer.
    pub(crate) fn tell_plan(&self, book: &Book) {
        let (epoch, job) = (book.epoch, Box::new(book.job.clone()));
        let Ok(body) = Body::new(&Message::Replanned { epoch, job }) else { return };
        let _ = self.write(&body, None, &mut Wait::new(Duration::ZERO, &|| JobState::Running));
    }

    /// Leaves the job because of `reason`, which the coordinator passes on to everybody.
    pub(crate) fn give_up(&self, reason: String) {
        self.leave(Some(reason));
    }

    pub(crate) fn me(&self) -> NodeId {
        self.me
    }

    /// `host:port` of the coordinator.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// What `node` is called, once the book is there.
    pub(crate) fn name(&self, node: NodeId) -> String {
        self.cluster().map_or_else(|| format!("node {node}"), |cluster| cluster.name(node))
    }

    /// Number of workers, once the book is there.
    pub(crate) fn workers(&self) -> usize {
        self.cluster().map_or(0, Cluster::workers)
    }

    /// Reads a book, or the draft of one: names and roles of nodes are the same in both.
    fn keep_book(&self, book: Value) -> Result<Arc<Book>, RendezvousError> {
        let book = Arc::new(read_book(book, &self.address)?);
        let _ = self.book.set(book.clone());
        Ok(book)
    }

    fn cluster(&self) -> Option<&Cluster> {
        self.book.get().map(|book| &book.cluster)
    }

    /// Writes a whole frame. If it is given up half-way, the connection is closed: nothing can
    /// follow half a frame.
    fn write(
        &self,
        body: &Body,
        request: Option<u64>,
        wait: &mut Wait<'_>,
    ) -> Result<(), LineError> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let unused = writer.sealer().cloned();
        let frame = body.frame(self.me, request, writer.sealer());
        let mut begun = false;
        for mut bytes in [&frame.head[..], frame.rest, &frame.foot] {
            while !bytes.is_empty() {
                let stretch = wait.stretch().inspect_err(|_| {
                    if begun {
                        writer.hang_up();
                    } else if let (Some(sealer), Some(unused)) = (writer.sealer(), &unused) {
                        // The next frame gets the tags that this one would have had.
                        *sealer = unused.clone();
                    }
                })?;
                writer.set_deadline(Some(Instant::now() + stretch));
                match writer.write(bytes) {
                    Ok(count) => (begun, bytes) = (true, &bytes[count..]),
                    Err(e) if matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::Interrupted) => {
                        begun |= writer.has_unsent();
                    }
                    Err(e) => {
                        writer.hang_up();
                        return Err(LineError::Gone(e.to_string()));
                    }
                }
            }
        }
        Ok(())
    }

    fn leave(&self, reason: Option<String>) {
        let mut state = self.shared.lock();
        if std::mem::replace(&mut state.left, true) || state.gone.is_some() {
            return;
        }
        drop(state);
        let Ok(body) = Body::new(&Message::Leave { reason }) else { return };
        // If the coordinator does not hear this, it sees the connection end.
        let _ = self.write(&body, None, &mut Wait::new(Duration::ZERO, &|| JobState::Running));
    }
}

impl Drop for ControlLine {
    fn drop(&mut self) {
        if std::process::id() != self.owner {
            return;
        }
        self.leave(None);
        self.writer.get_mut().unwrap_or_else(PoisonError::into_inner).hang_up();
        if let Some(reader) = self.reader.take() {
            // The connection is closed, so the reading thread ends.
            let _ = reader.join();
        }
    }
}

/// A book of another version need not have the same fields: its version is read first.
fn read_book(book: Value, address: &str) -> Result<Book, RendezvousError> {
    let address = address.to_string();
    let theirs = book.get("version").and_then(Value::as_u64).unwrap_or(0);
    if theirs != u64::from(BOOK_VERSION) {
        return Err(RendezvousError::Book { address, theirs, ours: BOOK_VERSION });
    }
    serde_json::from_value(book).map_err(|e| RendezvousError::Broken {
        address,
        why: format!("the book cannot be read: {e}"),
    })
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out what the coordinator says, until the connection ends.
    fn listen(&self, mut reader: Half) {
        let mut stopping = false;
        let why = loop {
            let Numbered { request, message } = match receive(&mut reader) {
                Ok(heard) => heard,
                Err(error) => break error.to_string(),
            };
            let mut state = self.lock();
            match (request, message) {
                (Some(request), answer) => {
                    // A thread that has given up waiting has taken itself off the list. Its answer
                    // is dropped.
                    if let Some(asker) = state.asking.remove(&request) {
                        let _ = asker.send(answer);
                    }
                }
                (None, Message::Lost { node, why }) => {
                    state.lost.get_or_insert((node, why));
                    self.alarm.store(true, Ordering::Release);
                }
                (None, Message::Stopping) => stopping = true,
                (None, Message::Budget { rate, .. }) => match &state.budget_listener {
                    Some(listener) => listener(rate),
                    None => state.budget = Some(rate),
                },
                (None, other) => {
                    tracing::debug!(
                        "the coordinator said {}, which nobody asked for",
                        other.name()
                    );
                }
            }
        };
        let mut state = self.lock();
        state.gone = Some(if stopping { Gone::Stopped } else { Gone::Died(why) });
        if !stopping {
            self.alarm.store(true, Ordering::Release);
        }
        // This wakes the threads that wait for an answer: none will come.
        state.asking.clear();
    }
}

impl Gone {
    fn words(&self) -> LineError {
        LineError::Gone(match self {
            Self::Stopped => "the coordinator has stopped".into(),
            Self::Died(why) => format!("it has died: {why}"),
        })
    }
}

/// A request under way. When its asker stops waiting, the drop takes it off the list.
struct Asking<'a> {
    shared: &'a Shared,
    request: u64,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.shared.lock().asking.remove(&self.request);
    }
}

/// A thread's wait for the coordinator: how long still, and whether the job still goes on.
struct Wait<'a> {
    patience: Patience,
    watch: &'a dyn Fn() -> JobState,
    /// A node that has said goodbye. When it was noticed, the patience became a few seconds.
    departed: Option<NodeId>,
}

impl<'a> Wait<'a> {
    fn new(patience: Duration, watch: &'a dyn Fn() -> JobState) -> Self {
        let patience = Patience::new(patience.saturating_add(LAST_WORDS));
        Self { patience, watch, departed: None }
    }

    /// How long to wait before the next look at the job's state. An error if there is nothing left
    /// to wait for.
    fn stretch(&mut self) -> Result<Duration, LineError> {
        match (self.watch)() {
            JobState::Failed => return Err(LineError::Failed),
            JobState::Departed(node) if self.departed.is_none() => {
                self.departed = Some(node);
                // The node may have posted before it left. Then the answer is under way.
                self.patience.shorten(LAST_WORDS);
            }
            JobState::Departed(_) | JobState::Running => {}
        }
        let left = self.patience.stretch();
        if left.is_zero() {
            return Err(self.instead_of(LineError::Overdue(self.patience.elapsed())));
        }
        Ok(left.min(GLANCE))
    }

    /// If a node has left, its leaving is the cause of `error`, and is told instead.
    fn instead_of(&self, error: LineError) -> LineError {
        match self.departed {
            Some(node) if (self.watch)() != JobState::Failed => LineError::Departed(node),
            _ => error,
        }
    }
}

/// How often a wait looks whether the job has failed.
const GLANCE: Duration = Duration::from_millis(100);
/// What a node waits beyond its patience: the coordinator's patience begins later than the node's,
/// and ends with words about who is missing.
const LAST_WORDS: Duration = Duration::from_secs(5);
