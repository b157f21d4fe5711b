//! One process of a job: finds the others, opens a link per lane to each, runs the lanes.

use crate::Error;
use crate::board::{Board, Counters};
use crate::book::{Book, Job, NodeFacts};
use crate::config::{Carriers, Config};
use crate::control::Join;
use crate::coordinator::{self, Coordinator};
use crate::exchange::Exchange;
use crate::factors::Meeting;
use crate::holdings::Holdings;
use crate::lane::{self, Command, Lane, Limits, MAILBOX, Parts};
use poseidon_core::wire::{Hello, Purpose, Status};
use poseidon_core::{Clock, Cluster, LaneId, Layer, LayerId, NodeId, Plan, Shard, Store};
use poseidon_link::{
    Address, Caller, Credentials, Link, Listener, Serving, Stream, address, connect,
};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A running node.
pub(crate) struct Node {
    pub(crate) me: NodeId,
    pub(crate) book: Arc<Book>,
    pub(crate) board: Arc<Board>,
    /// Where the coordinator is, and what opens its door.
    pub(crate) coordinator: (Address, Credentials),
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
        config.validate()?;
        let deadline = Instant::now() + config.connect_timeout;
        let credentials = config.credentials();
        let coordinator =
            config.serves_coordinator.then(|| serve_coordinator(config)).transpose()?;
        let meeting_point = match &coordinator {
            Some(coordinator) => coordinator.address().to_string(),
            None => config.coordinator.clone(),
        };

        let choice = address::choose(config.address.as_deref(), &meeting_point)?;
        let interface = choice.interface.as_deref().unwrap_or("?");
        let (ip, reason) = (choice.ip, &choice.reason);
        if ip.is_loopback() {
            tracing::debug!(%interface, "listening at {ip}, {reason}");
        } else {
            tracing::info!(%interface, "listening at {ip}, {reason}");
        }
        let listener = Listener::bind(choice.ip, 0, config.carrier != Carriers::Tcp)?;
        let facts = NodeFacts {
            node: config.node(),
            host: address::host_id(),
            tcp: listener.tcp().to_string(),
            unix: listener.unix().map(String::from),
            version: env!("CARGO_PKG_VERSION").into(),
        };
        let connected = Arc::new(AtomicU16::new(0));
        let (serving, arrivals) =
            receive_callers(listener, config, &credentials, connected.clone())?;

        let caller = Caller { purpose: Purpose::Control, node: config.node(), lane: LaneId(0) };
        let to = Address::Tcp(meeting_point.clone());
        let mut stream = connect(&to, caller, &credentials, deadline).map_err(|e| {
            Error::connect(format!("reaching the coordinator at {meeting_point}"), e)
        })?;
        // The coordinator gives up a little earlier, and then says who is missing.
        stream.set_deadline(Some(deadline + Duration::from_secs(5)));
        let (workers, servers, lanes) = (config.workers, config.servers, config.lanes);
        let join = Join { facts, workers, servers, lanes, job };
        let book = Arc::new(coordinator::join(&mut stream, join, &meeting_point)?);

        let plan = book.plan();
        let links = gather_links(config, &book, &plan, &credentials, &arrivals)?;
        connected.store(book.cluster.lanes(), Ordering::Relaxed);
        let layers: Arc<[Layer]> = book.job.layers.clone().into();
        let board = Arc::new(Board::new(layers.len()));
        let counters = Arc::new(Counters::new(layers.len()));
        let meetings = meetings(&book.cluster, &plan, config.node());
        let epoch = Instant::now();
        let mut node = Self {
            me: config.node(),
            book: book.clone(),
            board: board.clone(),
            coordinator: (to, credentials),
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
        self.coordinator.0.to_string()
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

fn serve_coordinator(config: &Config) -> Result<Coordinator, Error> {
    let text = &config.coordinator;
    let resolved =
        text.to_socket_addrs().map_err(Error::io(format!("coordinator address {text}")))?;
    let Some(at) = resolved.into_iter().next() else {
        return Err(Error::Config(format!("coordinator address {text} names no host")));
    };
    // The name others reach this host by need not be an address it has (a proxy, a service name).
    let here = at.ip().is_loopback() || address::is_local(at.ip());
    let ip = if here { at.ip() } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
    Coordinator::bind(ip, at.port(), config.credentials(), config.connect_timeout)
}

type Arrival = (Hello, Stream);

/// Lets nodes of the job in and queues their connections, until every node is `connected` by so
/// many lanes.
fn receive_callers(
    listener: Listener,
    config: &Config,
    credentials: &Credentials,
    connected: Arc<AtomicU16>,
) -> Result<(Serving, Receiver<Arrival>), Error> {
    let nodes = usize::from(config.workers) + usize::from(config.servers.extra());
    let me = config.node();
    let admit = move |hello: &Hello| {
        if hello.purpose != Purpose::Lane {
            return Err(Status::Purpose);
        }
        // The one with the higher id calls.
        if hello.node.index() >= nodes || hello.node <= me {
            return Err(Status::Node);
        }
        match connected.load(Ordering::Relaxed) {
            0 => Ok(()),
            lanes if hello.lane.0 >= lanes => Err(Status::Lane),
            _ => Err(Status::Node),
        }
    };
    let (sender, arrivals) = mpsc::channel();
    let deliver = move |hello, stream| {
        // Nobody listens any more once all links are there: a late caller is hung up on.
        let _ = sender.send((hello, stream));
    };
    let serving = listener.serve(credentials.clone(), admit, deliver);
    Ok((serving.map_err(Error::io("receiving other nodes"))?, arrivals))
}

type Links = Vec<(NodeId, Box<dyn Link>)>;

/// One link per lane and node this one exchanges chunks with: to lower ids it calls, from higher
/// ids it is called.
fn gather_links(
    config: &Config,
    book: &Book,
    plan: &Plan,
    credentials: &Credentials,
    arrivals: &Receiver<Arrival>,
) -> Result<Vec<Links>, Error> {
    let me = config.node();
    let cluster = &book.cluster;
    let deadline = Instant::now() + config.connect_timeout;
    let mut links: Vec<Links> = cluster.lane_ids().map(|_| Vec::new()).collect();
    let link_to = |node| Error::io(format!("link to {}", cluster.name(node)));
    let share_memory = config.carrier == Carriers::Auto;
    let partners =
        cluster.node_ids().filter(|&n| n != me && exchange_anything(cluster, plan, me, n));
    let (lower, higher): (Vec<_>, Vec<_>) = partners.partition(|&n| n < me);
    for &node in &lower {
        let to = route(config, book, node)?;
        for lane in cluster.lane_ids() {
            let caller = Caller { purpose: Purpose::Lane, node: me, lane };
            let stream = connect(&to, caller, credentials, deadline).map_err(|e| {
                Error::connect(format!("reaching {} at {to}", cluster.name(node)), e)
            })?;
            let link = stream.into_calling_link(share_memory).map_err(link_to(node))?;
            links[lane.index()].push((node, link));
        }
    }
    let lanes = || cluster.lane_ids();
    let mut awaited: BTreeSet<(NodeId, LaneId)> =
        higher.iter().flat_map(|&node| lanes().map(move |lane| (node, lane))).collect();
    while !awaited.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        match arrivals.recv_timeout(left) {
            // A second connection for the same lane is a caller that was cut off and tried again.
            Ok((hello, mut stream)) if higher.contains(&hello.node) => {
                let Some(lane) = links.get_mut(hello.lane.index()) else { continue };
                lane.retain(|(node, _)| *node != hello.node);
                stream.set_deadline(Some(deadline));
                let link = stream.into_called_link().map_err(link_to(hello.node))?;
                lane.push((hello.node, link));
                awaited.remove(&(hello.node, hello.lane));
            }
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let nodes: BTreeSet<NodeId> = awaited.iter().map(|(node, _)| *node).collect();
                return Err(Error::NeverConnected {
                    nodes: nodes.into_iter().map(|n| cluster.name(n)).collect(),
                    address: book.nodes[me.index()].tcp.clone(),
                    waited: config.connect_timeout,
                });
            }
        }
    }
    Ok(links)
}

/// Workers exchange chunks with servers, and factors with workers. Nodes that exchange nothing have
/// no link.
fn exchange_anything(cluster: &Cluster, plan: &Plan, a: NodeId, b: NodeId) -> bool {
    let (Some(a), Some(b)) = (cluster.role(a), cluster.role(b)) else { return false };
    let factors = plan.sends_factors() && a.worker && b.worker;
    factors || (a.worker && b.server) || (a.server && b.worker)
}

/// How to reach `node`: a unix socket if it is on this host, unless told otherwise.
fn route(config: &Config, book: &Book, node: NodeId) -> Result<Address, Error> {
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
        _ => Ok(Address::Tcp(theirs.tcp.clone())),
    }
}
