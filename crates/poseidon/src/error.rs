//! What can go wrong, said so that a person knows which node to look at.

use poseidon_core::book::JobError;
use poseidon_core::cluster::ClusterError;
use poseidon_core::optim::OptimizerError;
use poseidon_core::{Clock, Encoding, Scheme, Violation};
use poseidon_link::address::AddressError;
use poseidon_link::descriptors::Shortage;
use poseidon_link::{BindError, ConnectError};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Why a session could not start, or why it stopped.
///
/// A session that has failed stays failed: every later call returns the first reason again.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration or the environment makes no sense.
    #[error("configuration: {0}")]
    Config(String),
    /// The cluster described cannot exist.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The update rule described cannot work.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// No address to listen on.
    #[error(transparent)]
    Address(Arc<AddressError>),
    /// The address is taken.
    #[error(transparent)]
    Bind(Arc<BindError>),
    /// The process may not open as many files as the job needs.
    #[error("{0}")]
    Descriptors(Shortage),
    /// The node cannot hold its part of the job.
    #[error(
        "this node cannot hold its part of the job: with layer '{layer}', of which {bytes} bytes are \
         here, parameters, update rules and factors take {need} bytes, and at most {most} can be had \
         ({by}); take more nodes or servers, or nodes with more memory"
    )]
    Memory {
        /// The layer that does not fit any more.
        layer: String,
        /// Bytes of it on this node.
        bytes: u64,
        /// Bytes of all layers up to this one.
        need: u64,
        /// What there is.
        most: u64,
        /// What says so.
        by: String,
    },
    /// Another node could not be reached, or would not let us in.
    #[error("{what}: {why}")]
    Connect {
        /// Who was called and why.
        what: String,
        /// What happened.
        why: Arc<ConnectError>,
    },
    /// The nodes did not become a job.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// Nodes that should have opened a connection to this one did not.
    #[error("no connection from {} within {waited:?}: they joined the job but did not reach {address}", .nodes.join(", "))]
    NeverConnected {
        /// The nodes, by name.
        nodes: Vec<String>,
        /// Where this node listens.
        address: String,
        /// How long it waited.
        waited: Duration,
    },
    /// Nodes did not take part in measuring what ports carry.
    #[error("{} did not measure the rate of their ports within {waited:?}", .nodes.join(", "))]
    Unmeasured {
        /// The nodes, by name.
        nodes: Vec<String>,
        /// How long this node waited.
        waited: Duration,
    },
    /// The job has no such layer.
    #[error("no layer '{name}'; the job has {known}")]
    UnknownLayer {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// A buffer that does not fit its layer.
    #[error("layer '{layer}' has {expected} parameters, the {what} given has {got}")]
    Length {
        /// The layer.
        layer: String,
        /// Which buffer.
        what: &'static str,
        /// The layer's length.
        expected: usize,
        /// The buffer's length.
        got: usize,
    },
    /// A buffer of another type than its layer's numbers travel as.
    #[error("the numbers of layer '{layer}' are {expected} here, the {what} given has {got}")]
    Encoding {
        /// The layer.
        layer: String,
        /// Which buffer.
        what: &'static str,
        /// What the layer says.
        expected: Encoding,
        /// What the buffer has.
        got: Encoding,
    },
    /// Factors that do not fit their layer.
    #[error("layer '{layer}': {why}")]
    Factors {
        /// The layer.
        layer: String,
        /// What was expected and what came.
        why: String,
    },
    /// What an update rule remembers of a layer cannot be taken or put back.
    #[error("the update rule's state of layer '{layer}': {why}")]
    RuleState {
        /// The layer.
        layer: String,
        /// What was expected and what came.
        why: String,
    },
    /// A checkpoint was not made. The job can go on.
    #[error("the checkpoint of step {step} was not made: {why}")]
    Checkpoint {
        /// The step.
        step: u64,
        /// Who failed, and why.
        why: String,
    },
    /// The job cannot go on from a checkpoint, or cannot have any there.
    #[error("checkpoints: {0}")]
    Restore(Arc<poseidon_checkpoint::Error>),
    /// A layer was sent in another form than the plan says.
    #[error("layer '{layer}' goes by {scheme}: {instead}")]
    Scheme {
        /// The layer.
        layer: String,
        /// What the plan says.
        scheme: Scheme,
        /// What to call instead.
        instead: &'static str,
    },
    /// A device, or a copy from or to it, has failed.
    #[error("the device of {what}: {why}")]
    Device {
        /// What was to be copied.
        what: String,
        /// What the device says.
        why: String,
    },
    /// A layer was sent again before it came back.
    #[error(
        "layer '{layer}' is still in flight at clock {clock}: receive it before sending it again"
    )]
    InFlight {
        /// The layer.
        layer: String,
        /// The clock in flight.
        clock: Clock,
    },
    /// A layer was awaited that had not been sent.
    #[error("layer '{layer}' is not in flight: send it before receiving it")]
    NotInFlight {
        /// The layer.
        layer: String,
    },
    /// Parameters live on the shards, and nobody has put them there.
    #[error(
        "layer '{layer}' has no initial parameters yet: with the update rule '{optimizer}' call broadcast and receive first"
    )]
    NotInitialised {
        /// The layer.
        layer: String,
        /// The update rule.
        optimizer: String,
    },
    /// A layer can be initialised only once.
    #[error("layer '{layer}' is at clock {clock}: broadcast comes before the first send, once")]
    AlreadyInitialised {
        /// The layer.
        layer: String,
        /// Its clock.
        clock: Clock,
    },
    /// A wait came to its deadline.
    #[error("layer '{layer}' did not come back within {waited:?} at clock {clock}: {missing}")]
    Timeout {
        /// The layer awaited.
        layer: String,
        /// Its clock.
        clock: Clock,
        /// How long.
        waited: Duration,
        /// Which chunks from which nodes.
        missing: String,
    },
    /// A chunk waits for workers that do not come.
    #[error("chunk {chunk} of layer '{layer}' at clock {clock} has waited {waited:?} for {}", .missing.join(", "))]
    Stalled {
        /// The layer.
        layer: String,
        /// The chunk.
        chunk: u32,
        /// The clock.
        clock: Clock,
        /// The workers that have not contributed, by name.
        missing: Vec<String>,
        /// Since the first contribution.
        waited: Duration,
    },
    /// The workers' values of a topic did not come together.
    #[error("gathering '{topic}': {why}")]
    Gather {
        /// What was to be gathered.
        topic: String,
        /// What happened.
        why: GatherError,
    },
    /// The members of a channel did not come together.
    #[error("opening '{name}': {why}")]
    Open {
        /// The channel's name.
        name: String,
        /// What happened.
        why: OpenError,
    },
    /// A program asked a group for an operation that cannot be right. Nothing was sent.
    #[error("{operation}: {why}")]
    Request {
        /// Which.
        operation: &'static str,
        /// What is wrong with the request.
        why: String,
    },
    /// Ranks of a group began different operations.
    #[error("collective {sequence} of the group is {mine} but {theirs}")]
    Mismatch {
        /// The operation's number.
        sequence: u64,
        /// What the operation is on this rank, with the rank's name.
        mine: String,
        /// What the operation is on the other rank, with the rank's name.
        theirs: String,
    },
    /// An operation of a group was not done in time.
    #[error("{operation}: its timeout passed after {waited:.1?}: {}", awaited(.missing))]
    Overdue {
        /// The operation, in words.
        operation: String,
        /// How long ago the operation was begun on this rank.
        waited: Duration,
        /// The ranks that the operation waits for, by name. Empty if everything has come, and links
        /// have not taken all that is to be sent.
        missing: Vec<String>,
    },
    /// A message of another length than is received here.
    #[error("{node} sent {sent} with tag {tag}, which is not what is received here: {why}")]
    Message {
        /// The sender, by name.
        node: String,
        /// The message's tag.
        tag: u32,
        /// Its length, in words.
        sent: String,
        /// What does not fit: both lengths, the operation and the receiver.
        why: String,
    },
    /// The session or the group was made by another process, which this one was forked from.
    #[error(
        "this session or process group belongs to process {owner}, of which this one is a fork: leave it \
         to that process, or make a new one here"
    )]
    Forked {
        /// The process that made it.
        owner: u32,
    },
    /// A node is gone.
    #[error("lost {node}: {how}{}", .awaited.as_ref().map(|a| format!("; awaited from it: {a}")).unwrap_or_default())]
    Lost {
        /// The node, by name.
        node: String,
        /// How we know.
        how: String,
        /// What we were waiting for from it, if anything.
        awaited: Option<String>,
    },
    /// This node was away for so long that others may have given it up.
    #[error(
        "{node} was away for {away:.1?}: it was stopped, frozen or suspended, or had no processor. \
         Others take a node that is silent for {silence:?} (POSEIDON_SILENCE) for dead. What it \
         found when it came back: {found}"
    )]
    Away {
        /// This node, by name.
        node: String,
        /// How long it did not run.
        away: Duration,
        /// How long a node may be silent.
        silence: Duration,
        /// What has become of the others' side of the job, in words.
        found: String,
    },
    /// Workers do not have the same, though they should.
    #[error(
        "{0}. Is the memory of a machine faulty, or do processors round differently? Layers by factors \
         need the same kind on all workers, or the scheme 'ps'. POSEIDON_COMPARE_EVERY=0 compares \
         nothing"
    )]
    Replicas(Difference),
    /// Nodes did not say goodbye, or did not take this node's goodbye.
    #[error(
        "the job did not end within {waited:.1?} after the first goodbye (POSEIDON_TIMEOUT): \
         awaiting the goodbye of {}",
        .nodes.join(", ")
    )]
    Unfinished {
        /// The nodes, by name, each with the last that came from it.
        nodes: Vec<String>,
        /// How long this node waited for them.
        waited: Duration,
    },
    /// A dedicated server has heard nothing about any layer for very long.
    #[error(
        "nothing about any layer came for {waited:.1?} (POSEIDON_IDLE), though these nodes are \
         connected: {}",
        .nodes.join(", ")
    )]
    Idle {
        /// The workers, by name, each with the last that came from it.
        nodes: Vec<String>,
        /// How long it waited.
        waited: Duration,
    },
    /// A node broke the protocol.
    #[error(
        "{node} broke the protocol with chunk {chunk} of layer '{layer}' at clock {clock}: {violation}"
    )]
    Violation {
        /// The node, by name.
        node: String,
        /// The layer.
        layer: String,
        /// The chunk.
        chunk: u32,
        /// The frame's clock.
        clock: Clock,
        /// What was wrong.
        violation: Violation,
    },
    /// A node broke a rule of the roll call that says which workers count.
    #[error("{node} breaks a rule of the roll call at clock {clock}: {violation}")]
    RollCall {
        /// The node, by name.
        node: String,
        /// The clock.
        clock: Clock,
        /// What was wrong.
        violation: Violation,
    },
    /// A node sent bytes that are not a frame.
    #[error("{node} sent something that is not a frame: {why}")]
    Garbage {
        /// The node, by name.
        node: String,
        /// What was wrong.
        why: String,
    },
    /// A frame did not come as it was sent.
    #[error(
        "a frame from {node} was changed on its way ({frame}): bad memory, a faulty card or switch, \
         somebody between the hosts, or a program that wrote into memory it had lent. Nothing was \
         done with it"
    )]
    Changed {
        /// The node that sent it, by name.
        node: String,
        /// What the frame was about.
        frame: String,
    },
    /// Another node failed and said why.
    #[error("{node} stopped the job: {reason}")]
    Aborted {
        /// The node, by name.
        node: String,
        /// Its words.
        reason: String,
    },
    /// The operating system refused something a node cannot do without.
    #[error("{what}: {why}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        why: Arc<std::io::Error>,
    },
    /// A bug in Poseidon: the panic's message is on standard error.
    #[error("a lane of {node} panicked; please report what it said")]
    Panicked {
        /// The node, by name.
        node: String,
    },
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
    /// The coordinator writes another version of the information book.
    #[error(
        "the coordinator at {address} writes version {theirs} of the information book, this node reads version {ours}: \
         install the same Poseidon on every node"
    )]
    Book {
        /// The coordinator's address.
        address: String,
        /// The version of the book that came.
        theirs: u64,
        /// The version this build reads.
        ours: u16,
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

/// Why the workers' values of a topic did not come together.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatherError {
    /// Some workers never posted theirs.
    #[error("nothing from {} within {waited:?}", .missing.join(", "))]
    Missing {
        /// The workers, by name.
        missing: Vec<String>,
        /// How long the others waited.
        waited: Duration,
    },
    /// A worker has finished, and will not post.
    #[error("{node} finished while others go on")]
    Departed {
        /// The worker, by name.
        node: String,
    },
    /// The value is too large for a control message.
    #[error("{why}; what is large goes through layers")]
    TooLarge {
        /// Its size and the limit.
        why: String,
    },
    /// The coordinator would not have the value.
    #[error("the coordinator refused it: {reason}")]
    Refused {
        /// Its words.
        reason: String,
    },
    /// A value is not of the type that this worker gathers.
    #[error("a value is not what was asked for: {why}")]
    Unlike {
        /// The first difference.
        why: String,
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

/// Why a channel was not opened.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Some members never asked for it.
    #[error("nothing from {} within {waited:.1?}", .missing.join(", "))]
    Missing {
        /// The members, by name.
        missing: Vec<String>,
        /// How long the others waited.
        waited: Duration,
    },
    /// A node has finished, and will not ask for it.
    #[error("{node} finished while others go on")]
    Departed {
        /// The node, by name.
        node: String,
    },
    /// The coordinator would not open it: the members do not agree, or it makes no sense.
    #[error("the coordinator refused it: {reason}")]
    Refused {
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

/// Who has which value.
fn awaited(missing: &[String]) -> String {
    if missing.is_empty() {
        return "others did not take what it sends".into();
    }
    format!("nothing came from {}", missing.join(", "))
}

/// Something that workers do not have in common, though they should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// What differs.
    pub what: String,
    /// The clock it is of.
    pub clock: Clock,
    /// Workers that have the same, by name, the largest group first.
    pub groups: Vec<String>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, clock, groups } = self;
        write!(f, "{what} differs after clock {clock}: ")?;
        let Some((first, others)) = groups.split_first() else { return Ok(()) };
        let have = if first.contains(", ") { "have" } else { "has" };
        write!(f, "{first} {have} one value")?;
        others.iter().try_for_each(|group| write!(f, ", {group} another"))
    }
}

impl Error {
    pub(crate) fn connect(what: String, why: ConnectError) -> Self {
        Self::Connect { what, why: Arc::new(why) }
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |why| Self::Io { what, why: Arc::new(why) }
    }
}

impl From<JobError> for Error {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Optimizer(error) => Self::Optimizer(error),
            other => Self::Config(other.to_string()),
        }
    }
}

impl From<AddressError> for Error {
    fn from(error: AddressError) -> Self {
        Self::Address(Arc::new(error))
    }
}

impl From<Shortage> for Error {
    fn from(shortage: Shortage) -> Self {
        Self::Descriptors(shortage)
    }
}

impl From<BindError> for Error {
    fn from(error: BindError) -> Self {
        Self::Bind(Arc::new(error))
    }
}
