//! How a process gets into a job: finds the others through the coordinator and opens a link per lane to
//! each of them.

use crate::Error;
use crate::job::book::{Book, Job, NodeFacts};
use crate::job::config::{Carriers, Config};
use crate::job::control::Join;
use crate::job::coordinator::{self, Coordinator};
use poseidon_core::wire::{Hello, Purpose, Status};
use poseidon_core::{Cluster, LaneId, NodeId};
use poseidon_link::{
    Address, Caller, Credentials, Link, Listener, Serving, Stream, address, connect,
};
use poseidon_matrix::Unit;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// What a process has once it is in.
pub(crate) struct Joined {
    pub(crate) book: Arc<Book>,
    /// By lane.
    pub(crate) links: Vec<Links>,
    /// Where the coordinator is, and what opens its door.
    pub(crate) meeting_point: (Address, Credentials),
    /// Turns strangers away for as long as it is held.
    pub(crate) serving: Serving,
    /// If it is served here.
    pub(crate) coordinator: Option<Coordinator>,
}

/// One lane's links, by the node at the other end.
pub(crate) type Links = Vec<(NodeId, Box<dyn Link>)>;

/// Joins the job. Workers bring a description of it, servers take what they get.
pub(crate) fn join(config: &Config, job: Option<Job>) -> Result<Joined, Error> {
    config.validate()?;
    let deadline = Instant::now() + config.connect_timeout;
    let credentials = config.credentials();
    let coordinator = config.serves_coordinator.then(|| serve_coordinator(config)).transpose()?;
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
        tiles: Unit::available().contains(&Unit::Tiles),
    };
    let connected = Arc::new(AtomicU16::new(0));
    let (serving, arrivals) = receive_callers(listener, config, &credentials, connected.clone())?;

    let caller = Caller { purpose: Purpose::Control, node: config.node(), lane: LaneId(0) };
    let to = Address::Tcp(meeting_point.clone());
    let mut stream = connect(&to, caller, &credentials, deadline)
        .map_err(|e| Error::connect(format!("reaching the coordinator at {meeting_point}"), e))?;
    // The coordinator gives up a little earlier, and then says who is missing.
    stream.set_deadline(Some(deadline + Duration::from_secs(5)));
    let (workers, servers, lanes) = (config.workers, config.servers, config.lanes);
    let words = Join { facts, workers, servers, lanes, job };
    let book = Arc::new(coordinator::join(&mut stream, words, &meeting_point)?);

    let links = gather_links(config, &book, &credentials, &arrivals)?;
    connected.store(book.cluster.lanes(), Ordering::Relaxed);
    let meeting_point = (to, credentials);
    Ok(Joined { book, links, meeting_point, serving, coordinator })
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

/// One link per lane and node this one exchanges chunks with: to lower ids it calls, from higher
/// ids it is called.
fn gather_links(
    config: &Config,
    book: &Book,
    credentials: &Credentials,
    arrivals: &Receiver<Arrival>,
) -> Result<Vec<Links>, Error> {
    let me = config.node();
    let cluster = &book.cluster;
    let deadline = Instant::now() + config.connect_timeout;
    let mut links: Vec<Links> = cluster.lane_ids().map(|_| Vec::new()).collect();
    let link_to = |node| Error::io(format!("link to {}", cluster.name(node)));
    let share_memory = config.carrier == Carriers::Auto;
    let partners = cluster.node_ids().filter(|&n| n != me && exchange_anything(cluster, me, n));
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

/// Workers exchange chunks with servers, and factors and tensors with workers. Servers exchange
/// nothing and have no link.
fn exchange_anything(cluster: &Cluster, a: NodeId, b: NodeId) -> bool {
    let works = |node| cluster.role(node).is_some_and(|role| role.worker);
    works(a) || works(b)
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
