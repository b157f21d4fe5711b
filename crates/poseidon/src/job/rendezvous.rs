//! How a process gets into a job: finds the others through the coordinator and opens a link per lane to
//! each of them.

use crate::Error;
use crate::job::book::{BOOK_VERSION, Book, Job, NodeFacts, tell_shares};
use crate::job::config::{Carriers, Config};
use crate::job::control::Join;
use crate::job::coordinator::Coordinator;
use crate::job::line::ControlLine;
use crate::job::patience::WatchedPatience;
use crate::job::probe::{Links, Probe, heard_in_rings};
use poseidon_core::port::lone_window;
use poseidon_core::wire::{Hello, Purpose, Status};
use poseidon_core::{Epoch, JobId, LaneId, NodeId, Rate, Tree, Windows};
use poseidon_link::descriptors::{self, Need, Shortage};
use poseidon_link::{
    Address, BindError, Caller, ConnectError, Credentials, Listener, SOCKET_BUFFER, Serving,
    Stream, address, address::Choice, connect, connect_unless, resolve,
};
use poseidon_matrix::Unit;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a process has once it has joined.
pub(crate) struct Joined {
    pub(crate) book: Arc<Book>,
    /// By lane.
    pub(crate) links: Vec<Links>,
    /// The connection to the coordinator, for the life of the job.
    pub(crate) line: Arc<ControlLine>,
    /// Accepts connections and turns strangers away, for as long as this is held.
    pub(crate) serving: Serving,
    /// The coordinator, if this process serves it.
    pub(crate) coordinator: Option<Coordinator>,
    /// By lane: the cores near its interface. None if any core will do.
    pub(crate) near: Vec<Vec<usize>>,
}

/// Joins the job. Workers bring a description of it, servers take what they get.
pub(crate) fn join(config: &Config, job: Option<Job>) -> Result<Joined, Error> {
    config.validate()?;
    let nodes = usize::from(config.workers) + usize::from(config.servers.extra());
    // A number of lanes that is only the most is reserved when it is known what is needed.
    let lanes = if config.lanes_by_rate { 1 } else { config.lanes };
    let need = Need { nodes, lanes: lanes.into() };
    descriptors::reserve(need)?;
    let patience = watch(config.connect_timeout)?;
    let credentials = config.credentials();
    let serve = || serve_coordinator(config, patience.deadline());
    let coordinator = config.serves_coordinator.then(serve).transpose()?;
    let meeting_point = match &coordinator {
        Some(coordinator) => coordinator.address().to_string(),
        None => config.coordinator.clone(),
    };

    let (wanted, until) = (config.address.as_deref(), patience.deadline());
    let choices = address::choose_each(wanted, &meeting_point, until)?;
    for Choice { ip, interface, reason } in &choices {
        let interface = interface.as_deref().unwrap_or("?");
        if ip.is_loopback() {
            tracing::debug!(%interface, "listening at {ip}, {reason}");
        } else {
            tracing::info!(%interface, "listening at {ip}, {reason}");
        }
    }
    let listener = Listener::bind_each(&choices, config.carrier != Carriers::Tcp)
        .map_err(|e| with_need(e.into(), need))?
        .needing(need);
    let facts = own_facts(config, &listener, &choices, Unit::available().contains(&Unit::Tiles));
    let run = Arc::new(Run::default());
    let (serving, arrivals) = receive_callers(listener, config, &credentials, run.clone())?;
    // This is dropped before the listener is. The listener's drop waits for callers, and callers
    // wait for the book.
    let _closing = Closing(run.clone());

    let to = Address::Tcp(meeting_point.clone());
    let reaching = || format!("reaching the coordinator at {meeting_point}");
    let caller = Caller::control(config.node());
    let stream = patience
        .connect(|deadline| connect(&to, caller, &credentials, deadline))
        .map_err(|e| Error::connect(reaching(), e))?;
    let line = ControlLine::start(stream, config.node(), &meeting_point);
    let line = Arc::new(line.map_err(Error::io(reaching()))?);
    let (workers, servers, lanes) = (config.workers, config.servers, config.lanes);
    let (lanes_by_rate, link_rate, version) =
        (config.lanes_by_rate, config.link_rate.within(config.bandwidth_budget), BOOK_VERSION);
    let words =
        Join { facts, workers, servers, lanes, lanes_by_rate, link_rate, book: version, job };
    let joined = line.join(words, patience.left());
    let (mut book, probers) = joined.inspect_err(|error| line.give_up(error.to_string()))?;

    let mut links = Vec::new();
    let open = |book: &Book, probers: &[NodeId], links: &mut Vec<Links>| {
        // Worker 0's number of lanes holds for all.
        let need = Need { lanes: book.cluster.lanes().into(), ..need };
        descriptors::reserve(need)?;
        run.begin(book, !probers.is_empty());
        let (choices, credentials, line) = (&choices[..], &credentials, &*line);
        Opening { config, book, probers, choices, credentials, line }
            .gather_links(&arrivals, links)
            .map_err(|error| with_need(error, need))
    };
    let mut opened = open(&book, &probers, &mut links);
    if !probers.is_empty() {
        let (me, patience) = (config.node(), config.connect_timeout);
        opened = opened.and_then(|()| {
            let probe = Probe { me, book: &book, probers: &probers, line: &line, patience };
            let complete = probe.measure(&mut links[0])?;
            let more = open(&complete, &[], &mut links);
            book = complete;
            more
        });
    }
    opened.inspect_err(|error| line.give_up(error.to_string()))?;
    run.connected();
    tell_ports(&book, config.node());
    let near = spread_lanes(&book, &choices);
    Ok(Joined { book, links, line, serving, coordinator, near })
}

/// Begins a wait for other nodes.
fn watch(total: Duration) -> Result<WatchedPatience, Error> {
    WatchedPatience::start(total).map_err(Error::io("starting a thread that watches the time"))
}

/// Says which lane uses which interface, if there are several. Returns the cores near it, by lane.
fn spread_lanes(book: &Book, choices: &[Choice]) -> Vec<Vec<usize>> {
    let mut near = Vec::new();
    for lane in book.cluster.lane_ids().filter(|_| choices.len() > 1) {
        let choice = &choices[lane.index() % choices.len()];
        let interface = choice.interface.as_deref().unwrap_or("?");
        let numa = choice.numa_node();
        let words = numa.as_ref().map(|numa| format!(", NUMA node {}", numa.number));
        tracing::info!("lane {lane} uses {interface}, {}{}", choice.ip, words.unwrap_or_default());
        near.push(numa.map_or(Vec::new(), |numa| numa.cores));
    }
    near
}

/// What this node says about itself when it joins.
pub(crate) fn own_facts(
    config: &Config,
    listener: &Listener,
    choices: &[Choice],
    tiles: bool,
) -> NodeFacts {
    // The smallest counts, and nothing if one is not known.
    let queues: Option<Vec<u64>> = choices.iter().map(Choice::queue).collect();
    NodeFacts {
        node: config.node(),
        host: config.host.clone().unwrap_or_else(address::host_id),
        rack: config.rack.clone(),
        tcp: listener.tcp().to_string(),
        other_tcp: listener.addresses()[1..].iter().map(ToString::to_string).collect(),
        unix: listener.unix().map(String::from),
        version: env!("CARGO_PKG_VERSION").into(),
        tiles,
        queue: queues.and_then(|queues| queues.into_iter().min()),
    }
}

pub(crate) fn serve_coordinator(config: &Config, deadline: Instant) -> Result<Coordinator, Error> {
    let text = &config.coordinator;
    let resolved =
        resolve(text, deadline).map_err(Error::io(format!("coordinator address {text}")))?;
    let Some(at) = resolved.into_iter().next() else {
        return Err(Error::Config(format!("coordinator address {text} names no host")));
    };
    // The name others reach this host by need not be an address it has (a proxy, a service name).
    let here = at.ip().is_loopback() || address::is_local(at.ip());
    let ip = if here { at.ip() } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
    Coordinator::bind(ip, at.port(), config.credentials(), config.connect_timeout)
}

type Arrival = (Hello, Stream);

/// Which run of the job this node is in, once the book has come. Callers that have their book
/// earlier wait here.
#[derive(Default)]
struct Run {
    progress: Mutex<RunState>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
enum RunState {
    /// The book has not come yet.
    #[default]
    Joining,
    /// Links are being opened, or measured.
    Opening(RunFacts),
    /// All links are there.
    Connected(RunFacts),
    /// There will be no book.
    Failed,
}

/// What a caller must know of the book.
#[derive(Clone, Copy)]
struct RunFacts {
    identity: JobId,
    epoch: Epoch,
    lanes: u16,
    /// Whether there may be more lanes in the complete book.
    draft: bool,
}

impl Run {
    fn begin(&self, book: &Book, draft: bool) {
        let Book { identity, epoch, .. } = *book;
        let lanes = book.cluster.lanes();
        self.set(RunState::Opening(RunFacts { identity, epoch, lanes, draft }));
    }

    fn connected(&self) {
        let progress = *self.lock();
        if let RunState::Opening(facts) = progress {
            self.set(RunState::Connected(facts));
        }
    }

    fn set(&self, progress: RunState) {
        *self.lock() = progress;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, RunState> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a node that may call gets the lane it asks for.
    fn admit(&self, hello: &Hello) -> Result<(), Status> {
        let undecided = |progress: &mut RunState| match progress {
            RunState::Joining => true,
            RunState::Opening(facts) => facts.draft && hello.lane.0 >= facts.lanes,
            RunState::Connected(_) | RunState::Failed => false,
        };
        let waited = self.changed.wait_timeout_while(self.lock(), BOOK, undecided);
        let progress = *waited.unwrap_or_else(PoisonError::into_inner).0;
        let (facts, taken) = match progress {
            RunState::Joining | RunState::Failed => return Err(Status::NoBook),
            RunState::Opening(facts) => (facts, false),
            RunState::Connected(facts) => (facts, true),
        };
        if (hello.identity, hello.epoch) != (facts.identity, facts.epoch) {
            return Err(Status::Run);
        }
        match hello.lane.0 {
            lane if lane >= facts.lanes && facts.draft => Err(Status::NoBook),
            lane if lane >= facts.lanes => Err(Status::Lane),
            _ if taken => Err(Status::Node),
            _ => Ok(()),
        }
    }
}

/// Ends the waits of callers when it is dropped, if there is no complete book by then.
struct Closing(Arc<Run>);

impl Drop for Closing {
    fn drop(&mut self) {
        let waits = match *self.0.lock() {
            RunState::Joining => true,
            RunState::Opening(facts) => facts.draft,
            RunState::Connected(_) | RunState::Failed => false,
        };
        if waits {
            self.0.set(RunState::Failed);
        }
    }
}

/// Lets nodes of the job in and queues their connections, until all links are there.
fn receive_callers(
    listener: Listener,
    config: &Config,
    credentials: &Credentials,
    run: Arc<Run>,
) -> Result<(Serving, Receiver<Arrival>), Error> {
    let nodes = usize::from(config.workers) + usize::from(config.servers.extra());
    let me = config.node();
    let admit = move |hello: &Hello| {
        if hello.purpose != Purpose::Lane {
            return Err(Status::Purpose);
        }
        // Of two nodes, the one with the higher id calls.
        if hello.node.index() >= nodes || hello.node <= me {
            return Err(Status::Node);
        }
        run.admit(hello)
    };
    let (sender, arrivals) = mpsc::channel();
    let deliver = move |hello, stream| {
        // Once all links are there nobody takes new connections, and a late caller is hung up on.
        let _ = sender.send((hello, stream));
    };
    let serving = listener.serve(credentials.clone(), admit, deliver);
    Ok((serving.map_err(Error::io("receiving other nodes"))?, arrivals))
}

/// What it takes to open the links.
struct Opening<'a> {
    config: &'a Config,
    book: &'a Book,
    /// The nodes that measure. None if nothing is measured, or if it is over.
    probers: &'a [NodeId],
    /// This node's interfaces, one or several.
    choices: &'a [Choice],
    credentials: &'a Credentials,
    line: &'a ControlLine,
}

impl Opening<'_> {
    /// Opens one link per lane to each node that this one exchanges anything with, of those lanes
    /// that `links` has none of. This node calls the nodes of lower ids, and is called by those of
    /// higher ids. Fails as soon as the coordinator says that a node is lost.
    fn gather_links(
        &self,
        arrivals: &Receiver<Arrival>,
        links: &mut Vec<Links>,
    ) -> Result<(), Error> {
        let Self { config, book, .. } = *self;
        let me = config.node();
        let cluster = &book.cluster;
        let patience = watch(config.connect_timeout)?;
        let partners = cluster.partners(me).into_iter();
        let (lower, higher): (Vec<_>, Vec<_>) = partners.partition(|&n| n < me);
        let lanes: Vec<LaneId> = cluster.lane_ids().skip(links.len()).collect();
        links.resize_with(cluster.lanes().into(), Vec::new);
        let opened = self
            .call(&lower, &lanes, &patience, links)
            .and_then(|()| self.await_callers(&higher, &lanes, arrivals, &patience, links));
        let Err(error) = opened else {
            self.widen(links);
            return Ok(());
        };
        // A link that breaks is most likely a node that has died: the coordinator is about to say
        // which.
        let until =
            Instant::now() + if matches!(error, Error::Io { .. }) { NEWS } else { Duration::ZERO };
        while self.line.trouble().is_none() && Instant::now() < until {
            std::thread::sleep(GLANCE);
        }
        Err(self.line.trouble().unwrap_or(error))
    }

    /// Gives every link its window: a part of this host's port for links to other hosts.
    fn widen(&self, links: &mut [Links]) {
        let Self { config, book, .. } = *self;
        let (me, cluster) = (config.node(), &book.cluster);
        // Lanes share the interfaces, and so the port's rate.
        let interfaces = self.choices.len();
        let lanes = links.len().div_ceil(interfaces);
        let all_lanes = links.len();
        let rate = cluster.ports().get(me.index()).map(|port| port.rate);
        let rate = rate.map(|rate| Rate::nearest(rate.bits() as f64 / interfaces as f64));
        // Where workers may be at different clocks, nothing is added up inside hosts.
        let is_bsp = book.job.consistency.is_bsp();
        let windows = Windows::new(&book.cluster_of_links(), me, lanes, rate, is_bsp);
        // What the nodes have, not what groups make of it.
        let queues = book.nodes.iter().map(|facts| facts.queue).collect();
        let windows = windows.at_ports(cluster.ports(), queues);
        let tree = Tree::new(cluster);
        let heard = heard_in_rings(cluster, self.probers, me);
        // On a long way, queues are not what takes time, and a small window would.
        let is_long = |time: Option<Duration>| time.is_some_and(|time| time > LONG_WAY);
        let window = |node: NodeId, round_trip: Option<Duration>| {
            let interfaces = book.nodes.get(node.index()).map_or(1, NodeFacts::interfaces);
            let their_lanes = all_lanes.div_ceil(interfaces);
            let window = windows.of(node, their_lanes, round_trip);
            let window = match heard.contains(&node) {
                true => {
                    window.map(|window| window.max(lone_window(lanes, lanes, rate, round_trip)))
                }
                false => window,
            };
            match is_long(round_trip) {
                // Before ports are measured, a busy start may look like a long way.
                true if self.probers.is_empty() && tree.host(node) != tree.host(me) => None,
                true => Some(SOCKET_BUFFER),
                false => Some(window.unwrap_or(SOCKET_BUFFER)),
            }
        };
        // A neighbour in the ring that hears this host has as large a window for it as this host has for
        // the neighbour that it hears.
        let is_ring = book.cluster_of_links().is_ring();
        let hears = |a: NodeId, b: NodeId| is_ring && tree.senders(a, true).contains(&b);
        let heard_in_ring = links.iter().flatten().filter(|(node, _)| hears(me, *node));
        let of_ring = heard_in_ring.map(|(node, link)| window(*node, link.round_trip()));
        let of_ring = of_ring.min_by_key(|bytes| bytes.unwrap_or(usize::MAX));
        for (node, link) in links.iter_mut().flatten() {
            let round_trip = link.round_trip();
            let bytes = window(*node, round_trip);
            let is_away = tree.host(*node) != tree.host(me);
            let theirs = of_ring.filter(|_| hears(*node, me)).unwrap_or(bytes);
            let soon = theirs.is_some_and(|bytes| bytes < LARGE_WINDOW);
            if is_away && !is_long(round_trip) && !link.expect_answers(soon) && soon {
                tracing::debug!(%node, "what is lost is sent again after the system's 200 ms");
            }
            if let Err(error) = link.widen(bytes) {
                tracing::debug!(%node, %error, "a receive window stays as it is");
            }
        }
    }

    fn call(
        &self,
        nodes: &[NodeId],
        lanes: &[LaneId],
        patience: &WatchedPatience,
        links: &mut [Links],
    ) -> Result<(), Error> {
        let Self { config, book, credentials, line, .. } = *self;
        let Book { identity, epoch, .. } = *book;
        let (purpose, me) = (Purpose::Lane, config.node());
        let share_memory = config.carrier == Carriers::Auto;
        for &node in nodes {
            for &lane in lanes {
                let to = route(config, book, node, lane)?;
                let caller = Caller { purpose, node: me, lane, identity, epoch };
                // A node with one interface leaves the way to the system's routes.
                let from = self.choices.get(lane.index() % self.choices.len());
                let from = from.filter(|_| self.choices.len() > 1);
                let stream = patience.connect(|deadline| {
                    connect_unless(line.alarm(), from, &to, caller, credentials, deadline)
                });
                let stream = stream.map_err(|e| {
                    Error::connect(format!("reaching {} at {to}", book.cluster.name(node)), e)
                })?;
                let link = stream.into_calling_link(share_memory).map_err(self.link_to(node))?;
                links[lane.index()].push((node, link));
            }
        }
        Ok(())
    }

    fn await_callers(
        &self,
        nodes: &[NodeId],
        lanes: &[LaneId],
        arrivals: &Receiver<Arrival>,
        patience: &WatchedPatience,
        links: &mut [Links],
    ) -> Result<(), Error> {
        let cluster = &self.book.cluster;
        let mut awaited: BTreeSet<(NodeId, LaneId)> =
            nodes.iter().flat_map(|&node| lanes.iter().map(move |&lane| (node, lane))).collect();
        while !awaited.is_empty() {
            if let Some(trouble) = self.line.trouble() {
                return Err(trouble);
            }
            let left = patience.left();
            match arrivals.recv_timeout(left.min(GLANCE)) {
                // A second connection for the same lane is a caller that was cut off and tried
                // again.
                Ok((hello, mut stream))
                    if nodes.contains(&hello.node) && lanes.contains(&hello.lane) =>
                {
                    let Some(lane) = links.get_mut(hello.lane.index()) else { continue };
                    lane.retain(|(node, _)| *node != hello.node);
                    stream.set_deadline(Some(patience.deadline()));
                    let link = stream.into_called_link().map_err(self.link_to(hello.node))?;
                    lane.push((hello.node, link));
                    awaited.remove(&(hello.node, hello.lane));
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) if left > GLANCE => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    let nodes: BTreeSet<NodeId> = awaited.iter().map(|(node, _)| *node).collect();
                    return Err(Error::NeverConnected {
                        nodes: nodes.into_iter().map(|n| cluster.name(n)).collect(),
                        address: self.book.nodes[self.config.node().index()].tcp.clone(),
                        waited: self.config.connect_timeout,
                    });
                }
            }
        }
        Ok(())
    }

    fn link_to(&self, node: NodeId) -> impl FnOnce(std::io::Error) -> Error + use<> {
        Error::io(format!("link to {}", self.book.cluster.name(node)))
    }
}

/// Says what ports carry: on worker 0 for all nodes, if they hold unequal shards.
fn tell_ports(book: &Book, me: NodeId) {
    let (cluster, lanes) = (&book.cluster, book.cluster.lanes());
    let Some(port) = cluster.ports().get(me.index()) else { return };
    tracing::debug!(rate = %port.rate, lanes, "what this node's port carries");
    if me == NodeId(0)
        && let Some(words) = tell_shares(cluster)
    {
        tracing::info!("{words}");
    }
}

/// Adds what the job needs to the error of a process that has run out of descriptors.
fn with_need(error: Error, need: Need) -> Error {
    let short = match &error {
        Error::Bind(why) => match &**why {
            BindError::Other { source, .. } => descriptors::shortage(source),
            _ => None,
        },
        Error::Connect { why, .. } => match &**why {
            ConnectError::Impossible { source, .. } => descriptors::shortage(source),
            _ => None,
        },
        _ => None,
    };
    let Some(short) = short else { return error };
    Error::Descriptors(Shortage { need: Some(need), ..short.clone() })
}

/// How to reach `node`: a unix socket if it is on this host, unless told otherwise.
pub(crate) fn route(
    config: &Config,
    book: &Book,
    node: NodeId,
    lane: LaneId,
) -> Result<Address, Error> {
    let (mine, theirs) = (&book.nodes[config.node().index()], &book.nodes[node.index()]);
    let same_host = mine.host == theirs.host;
    match (&theirs.unix, config.carrier) {
        (Some(name), Carriers::Auto | Carriers::Unix) if same_host => {
            Ok(Address::Unix(name.clone()))
        }
        (_, Carriers::Unix) => Err(Error::Config(format!(
            "links are limited to unix sockets, but {} at {} cannot be reached by one",
            book.cluster.name(node),
            theirs.tcp
        ))),
        _ => Ok(Address::Tcp(theirs.address(lane).into())),
    }
}

/// How long a caller waits at most for this node's book before it is sent away to try again.
const BOOK: Duration = Duration::from_secs(10);
/// A window with packets enough for TCP to see from acknowledgements what is lost, without a timer. The
/// timer is the usual one then: after a pause of a timer's length TCP begins slowly again, and training
/// pauses in every step (ADR 0017).
const LARGE_WINDOW: usize = 512 << 10;
/// A round trip that no queue of a switch explains.
const LONG_WAY: Duration = Duration::from_millis(3);
/// How often a wait looks for bad news.
const GLANCE: Duration = Duration::from_millis(100);
/// How soon a death that broke a link is known to the coordinator.
const NEWS: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
