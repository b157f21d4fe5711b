//! A check of the network between the nodes of a job, before anything is trained on it.
//!
//! The nodes join the coordinator as they would for a session, but they open no links: a pair that
//! cannot connect is a result here, not an error. What nodes tell each other passes through the
//! coordinator. Every pair is called in the direction in which a job would call it, then pairs are
//! measured in rounds in which no node is in two pairs (`pairs`, `measure`).

mod measure;
mod pairs;

pub use poseidon_link::address::Choice;
pub use poseidon_link::descriptors::Need;
pub use poseidon_link::path::{Reached, Unreached, reach};

use crate::job::book::{BOOK_VERSION, Book, Job, NodeFacts};
use crate::job::config::{Carriers, Config};
use crate::job::control::Join;
use crate::job::coordinator::Coordinator;
use crate::job::line::{ControlLine, JobState};
use crate::job::link_rate::LinkRate;
use crate::job::rendezvous::{own_facts, route, serve_coordinator};
use crate::{Checkpoints, Error};
use measure::{Measurement, measure};
use pairs::{partner, rounds};
use poseidon_core::plan::Placement;
use poseidon_core::wire::{Hello, Purpose, Status};
use poseidon_core::{ChunkSize, LaneId, Layer, NodeId, Optimizer, Policy, Servers};
use poseidon_link::path::PacketEcho;
use poseidon_link::{Caller, Listener, Serving, Stream, address, connect};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// One node that takes part in a check.
pub struct CheckMember {
    config: Config,
    choice: Choice,
    /// Interfaces beyond the first that the node would listen on.
    other_choices: Vec<Choice>,
    book: Arc<Book>,
    arrivals: Receiver<(Hello, Stream)>,
    /// Connections of nodes whose turn has not come.
    arrived: BTreeMap<NodeId, Stream>,
    /// Before the coordinator: it says goodbye to it.
    line: ControlLine,
    _serving: Serving,
    _coordinator: Option<Coordinator>,
}

/// What was seen of the way from one node to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Way {
    /// The node that sent.
    pub from: NodeId,
    /// The node that received.
    pub to: NodeId,
    /// Whether the two are on one host, so that their bytes pass no port.
    pub same_host: bool,
    /// Why it was not measured to the end.
    pub failure: Option<WayFailure>,
    /// The shortest round trip, in microseconds.
    pub round_trip_us: Option<f64>,
    /// How far the clock of `to` is ahead of the clock of `from`, in microseconds.
    pub clock_ahead_us: Option<f64>,
    /// What the way carries.
    pub bits_per_second: Option<u64>,
    /// The largest IP packet that passes without being cut.
    pub packet: Option<u32>,
    /// The largest IP packet that both interfaces take: what should pass.
    pub packet_expected: Option<u32>,
    /// TCP segments that were sent.
    pub segments: Option<u32>,
    /// TCP segments that had to be sent again.
    pub resent: Option<u32>,
}

/// Why a way was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum WayFailure {
    /// There is no connection.
    Unreached {
        /// Where `to` listens.
        address: String,
        /// What happened.
        why: String,
    },
    /// There is a connection, small messages pass, and then bytes stop to come.
    Stalled {
        /// Bytes that were sent without an acknowledgement.
        bytes: usize,
    },
    /// The connection ended.
    Broken {
        /// What happened.
        why: String,
    },
}

impl CheckMember {
    /// Joins the coordinator of the job that `config` describes. Returns when all nodes have joined.
    pub fn join(config: &Config) -> Result<Self, Error> {
        config.validate()?;
        if config.servers != Servers::Colocated {
            return Err(Error::Config(
                "a check runs on workers alone, because dedicated servers run another program: \
                 start as many workers as the job has nodes, without servers"
                    .into(),
            ));
        }
        let deadline = Instant::now() + config.connect_timeout;
        let credentials = config.credentials();
        let coordinator =
            config.serves_coordinator.then(|| serve_coordinator(config, deadline)).transpose()?;
        let meeting_point = match &coordinator {
            Some(coordinator) => coordinator.address().to_string(),
            None => config.coordinator.clone(),
        };
        let mut choices =
            address::choose_each(config.address.as_deref(), &meeting_point, deadline)?;
        let listener = Listener::bind_each(&choices, config.carrier != Carriers::Tcp)?;
        let facts = own_facts(config, &listener, &choices, false);
        // Nobody calls before all nodes have told each other that they have the book.
        let identity = Arc::new(OnceLock::new());
        let (known, me, nodes) = (identity.clone(), config.node(), config.workers);
        let admit = move |hello: &Hello| match known.get() {
            _ if hello.purpose != Purpose::Lane => Err(Status::Purpose),
            _ if hello.node.0 >= nodes || hello.node <= me => Err(Status::Node),
            None => Err(Status::NoBook),
            Some(identity) if *identity != hello.identity => Err(Status::Run),
            Some(_) => Ok(()),
        };
        let (sender, arrivals) = mpsc::channel();
        let deliver = move |hello, stream| {
            // Nobody takes a connection that comes when the check is over.
            let _ = sender.send((hello, stream));
        };
        let serving = listener.serve(credentials.clone(), admit, deliver);
        let serving = serving.map_err(Error::io("receiving other nodes"))?;

        let to = poseidon_link::Address::Tcp(meeting_point.clone());
        let reaching = || format!("reaching the coordinator at {meeting_point}");
        let stream = connect(&to, Caller::control(config.node()), &credentials, deadline)
            .map_err(|e| Error::connect(reaching(), e))?;
        let line = ControlLine::start(stream, config.node(), &meeting_point);
        let line = line.map_err(Error::io(reaching()))?;
        let (workers, servers) = (config.workers, config.servers);
        let words = Join {
            facts,
            workers,
            servers,
            lanes: 1,
            lanes_by_rate: false,
            link_rate: LinkRate::Unknown,
            book: BOOK_VERSION,
            job: Some(nothing_to_train()),
        };
        let patience = deadline.saturating_duration_since(Instant::now());
        let joined = line.join(words, patience);
        let (book, _) = joined.inspect_err(|error| line.give_up(error.to_string()))?;
        let _ = identity.set(book.identity);
        let choice = choices.remove(0);
        Ok(Self {
            config: config.clone(),
            choice,
            other_choices: choices,
            book,
            arrivals,
            arrived: BTreeMap::new(),
            line,
            _serving: serving,
            _coordinator: coordinator,
        })
    }

    /// Which node this is.
    pub fn node(&self) -> NodeId {
        self.config.node()
    }

    /// What all nodes have told of themselves, by node.
    pub fn nodes(&self) -> &[NodeFacts] {
        &self.book.nodes
    }

    /// What a node is called.
    pub fn name(&self, node: NodeId) -> String {
        self.book.cluster.name(node)
    }

    /// Where this node listens, and why there: the first interface, then others if there are any.
    pub fn choices(&self) -> impl Iterator<Item = &Choice> {
        std::iter::once(&self.choice).chain(&self.other_choices)
    }

    /// Tells `value` to all nodes and returns everybody's, by node.
    pub fn gather<T: Serialize + DeserializeOwned>(
        &self,
        topic: &str,
        value: &T,
    ) -> Result<Vec<T>, Error> {
        let watch = || match self.line.trouble() {
            Some(_) => JobState::Failed,
            None => JobState::Running,
        };
        self.line.gather(topic, value, PATIENCE, &watch).map_err(|error| {
            let topic = topic.to_owned();
            self.line.trouble().unwrap_or(Error::Gather { topic, why: error })
        })
    }

    /// Calls the nodes and measures the ways to them. All nodes do so at the same time. `mtu` is of
    /// this node's interface. Returns what this node has seen: the ways from it, and those to it
    /// where a call failed.
    pub fn measure(&mut self, mtu: Option<u32>) -> Result<Vec<Way>, Error> {
        let echo = PacketEcho::start(self.choice.ip, self.book.identity.0);
        let echo_at = echo.as_ref().ok().map(|echo| SocketAddr::new(self.choice.ip, echo.port()));
        let ends: Vec<PacketEnd> = self.gather("check: ends", &PacketEnd { echo_at, mtu })?;

        let (mut streams, mut ways) = self.call_others();
        let reached: Vec<NodeId> = streams.keys().copied().collect();
        let reached: Vec<Vec<NodeId>> = self.gather("check: calls", &reached)?;

        let me = self.node();
        let book = self.book.clone();
        let hosts: Vec<&str> = book.nodes.iter().map(|node| node.host.as_str()).collect();
        let first_of_host = |node: NodeId| {
            hosts.iter().position(|host| *host == hosts[node.index()]) == Some(node.index())
        };
        let one_host = hosts.iter().all(|host| *host == hosts[0]);
        for round in rounds(hosts.len()) {
            self.gather(&format!("check: round {round}"), &())?;
            let Some(other) = partner(me.index(), round, hosts.len()) else { continue };
            let other = NodeId(other as u16);
            let (calls, called) = (me.max(other), me.min(other));
            if !reached[calls.index()].contains(&called) {
                continue;
            }
            let stream = match streams.remove(&other) {
                Some(stream) => Ok(stream),
                None => self.arrival(other),
            };
            let same_host = hosts[me.index()] == hosts[other.index()];
            let (here, there) = (&ends[me.index()], &ends[other.index()]);
            let measurement = Measurement {
                calls: me == calls,
                token: self.book.identity.0,
                from: self.choice.ip,
                echo: there.echo_at.filter(|_| !same_host),
                packet: here.mtu.zip(there.mtu).map(|(here, there)| here.min(there)),
                // Nodes of one host share a port, so one of them measures it.
                bytes: one_host || (!same_host && first_of_host(me) && first_of_host(other)),
            };
            let mut way = Way::new(me, other, same_host);
            match stream {
                Ok(stream) => measure(stream, &measurement, &mut way),
                Err(why) => way.failure = Some(WayFailure::Broken { why }),
            }
            ways.push(way);
        }
        // An echo is awaited by nobody any more.
        self.gather("check: measured", &())?;
        Ok(ways)
    }

    /// Calls all nodes of lower ids, as a job would, some at a time.
    fn call_others(&self) -> (BTreeMap<NodeId, Stream>, Vec<Way>) {
        let me = self.node();
        let lower: Vec<NodeId> = (0..me.0).map(NodeId).collect();
        let (mut streams, mut failed) = (BTreeMap::new(), Vec::new());
        for some in lower.chunks(CALLS) {
            let deadline = Instant::now() + CALL;
            let (config, book) = (&self.config, &*self.book);
            let outcomes: Vec<_> = std::thread::scope(|scope| {
                let start = |&to| scope.spawn(move || call(config, book, to, deadline));
                let calls: Vec<_> = some.iter().map(start).collect();
                calls.into_iter().map(|call| call.join()).collect()
            });
            for (&to, outcome) in some.iter().zip(outcomes) {
                let outcome = outcome.unwrap_or_else(|_| Err("the call panicked".into()));
                match outcome {
                    Ok(stream) => drop(streams.insert(to, stream)),
                    Err(why) => {
                        let address = self.nodes()[to.index()].tcp.clone();
                        let same_host = self.nodes()[to.index()].host == self.own().host;
                        let failure = Some(WayFailure::Unreached { address, why });
                        failed.push(Way { failure, ..Way::new(me, to, same_host) });
                    }
                }
            }
        }
        (streams, failed)
    }

    fn own(&self) -> &NodeFacts {
        &self.nodes()[self.node().index()]
    }

    /// The connection that `from` says it has made.
    fn arrival(&mut self, from: NodeId) -> Result<Stream, String> {
        let deadline = Instant::now() + CALL;
        loop {
            if let Some(stream) = self.arrived.remove(&from) {
                return Ok(stream);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((hello, stream)) = self.arrivals.recv_timeout(left) else {
                return Err("its connection did not come through".into());
            };
            self.arrived.insert(hello.node, stream);
        }
    }
}

fn call(config: &Config, book: &Book, to: NodeId, deadline: Instant) -> Result<Stream, String> {
    let Book { identity, epoch, .. } = *book;
    let (purpose, node, lane) = (Purpose::Lane, config.node(), LaneId(0));
    let caller = Caller { purpose, node, lane, identity, epoch };
    let address = route(config, book, to, lane).map_err(|e| e.to_string())?;
    connect(&address, caller, &config.credentials(), deadline).map_err(|e| e.to_string())
}

/// Where a node answers probes of packets, and how large its packets may be.
#[derive(Debug, Serialize, Deserialize)]
struct PacketEnd {
    echo_at: Option<SocketAddr>,
    mtu: Option<u32>,
}

impl Way {
    fn new(from: NodeId, to: NodeId, same_host: bool) -> Self {
        Self {
            from,
            to,
            same_host,
            failure: None,
            round_trip_us: None,
            clock_ahead_us: None,
            bits_per_second: None,
            packet: None,
            packet_expected: None,
            segments: None,
            resent: None,
        }
    }
}

/// What nodes say they train when they train nothing.
fn nothing_to_train() -> Job {
    Job {
        layers: vec![Layer::new("check", 1)],
        optimizer: Optimizer::default(),
        chunk: ChunkSize::default(),
        placement: Placement::default(),
        deterministic: false,
        consistency: Default::default(),
        scheme: Policy::default(),
        batch: None,
        checkpoints: Checkpoints::default(),
    }
}

/// How long nodes wait for each other between two steps: longer than a pair takes at the worst.
const PATIENCE: Duration = Duration::from_secs(90);
/// How long a call may take. All nodes listen already.
const CALL: Duration = Duration::from_secs(5);
/// Calls at a time.
const CALLS: usize = 64;
