//! Which nodes there are and what each of them does.

use crate::port::{Port, Rate};
use crate::{LaneId, NodeId};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// The nodes of a job. Workers are nodes `0..workers`, dedicated servers follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Cluster {
    workers: u16,
    servers: Servers,
    lanes: u16,
    /// By node; empty if nothing is known of ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    ports: Vec<Port>,
    /// By node: the number of its host; empty if every node has a host of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    hosts: Vec<u16>,
    /// By host: the number of its rack; empty if all are in one rack.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    racks: Vec<u16>,
    /// What one stream from a rack to the next one carries; `None` if nobody has measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    core: Option<Rate>,
    /// Whether hosts are in a ring.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    ring: bool,
}

/// What a node does. Every node does at least one of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Role {
    /// Computes gradients.
    pub worker: bool,
    /// Holds shards of the store.
    pub server: bool,
}

/// Where the store lives: the same code serves all three, only the placement differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Servers {
    /// Every worker node holds shards (the default).
    Colocated,
    /// This many extra nodes hold all shards, workers none.
    Dedicated(u16),
    /// Every worker node and this many extra nodes hold shards.
    Mixed(u16),
}

/// A cluster that cannot exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// Nobody computes.
    #[error("a cluster needs at least 1 worker, got 0")]
    NoWorkers,
    /// Nobody holds parameters.
    #[error("a cluster with dedicated servers needs at least 1 of them, got 0")]
    NoServers,
    /// Nobody moves bytes.
    #[error("a node needs at least 1 lane, got 0")]
    NoLanes,
    /// Every lane is a thread on every node, and a connection between any two.
    #[error("a node has at most {most} lanes, got {0}", most = Cluster::MOST_LANES)]
    TooManyLanes(u16),
    /// Node ids are 16 bits wide and the last one is reserved.
    #[error("a cluster has at most 65534 nodes, got {0}")]
    TooManyNodes(u32),
    /// Every node has a port, or nothing is known of any.
    #[error("ports of {got} nodes in a cluster of {nodes}")]
    Ports {
        /// Nodes of the cluster.
        nodes: usize,
        /// Nodes whose port is known.
        got: usize,
    },
    /// Everybody has a place, and places are numbered in the order of those who are first in them.
    #[error("{what} {got:?}: expected {of} numbers, each new one the next")]
    Places {
        /// Hosts or racks.
        what: &'static str,
        /// How many numbers there should be.
        of: usize,
        /// Their numbers.
        got: Vec<u16>,
    },
    /// The hosts cannot be in a ring.
    #[error("a ring needs three hosts or more, a server on every worker, equal ports and no racks")]
    Ring,
    /// Ports are numbered in the order of their first nodes, and a port has one rate.
    #[error("node {node} has port {number} of {rate}, which does not follow from the nodes before")]
    Port {
        /// The node.
        node: NodeId,
        /// Its port's number.
        number: u16,
        /// What its port carries.
        rate: Rate,
    },
}

impl Cluster {
    /// Most lanes of a node: several times as many as the fastest ports need.
    pub const MOST_LANES: u16 = 256;

    /// A cluster of `workers` workers with the given servers and `lanes` lanes on every node.
    pub fn new(workers: u16, servers: Servers, lanes: u16) -> Result<Self, ClusterError> {
        if workers == 0 {
            return Err(ClusterError::NoWorkers);
        }
        if servers == Servers::Dedicated(0) {
            return Err(ClusterError::NoServers);
        }
        if lanes == 0 {
            return Err(ClusterError::NoLanes);
        }
        if lanes > Self::MOST_LANES {
            return Err(ClusterError::TooManyLanes(lanes));
        }
        let nodes = u32::from(workers) + u32::from(servers.extra());
        if nodes >= u32::from(u16::MAX) {
            return Err(ClusterError::TooManyNodes(nodes));
        }
        let (ports, hosts, racks) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { workers, servers, lanes, ports, hosts, racks, core: None, ring: false })
    }

    /// The same cluster with another number of lanes.
    pub fn with_lanes(self, lanes: u16) -> Result<Self, ClusterError> {
        Self::new(self.workers, self.servers, lanes)?;
        Ok(Self { lanes, ..self })
    }

    /// The same cluster on these hosts, by node, in these racks, by host. None at all: every node has
    /// a host of its own, and all hosts are in one rack.
    pub fn with_hosts(self, hosts: Vec<u16>, racks: Vec<u16>) -> Result<Self, ClusterError> {
        let nodes = self.nodes();
        let count = match hosts.is_empty() {
            true => nodes,
            false => judge_places("hosts", &hosts, nodes)?,
        };
        if !racks.is_empty() {
            judge_places("racks", &racks, count)?;
        }
        Ok(Self { hosts, racks, ..self })
    }

    /// The same cluster with its hosts in a ring, where that can be.
    ///
    /// The sum of a large layer's chunk then goes from each host to the one before it, round the ring
    /// to the host that holds the chunk, and its result goes on in the same direction. A port carries
    /// as many bytes as without a ring. But it hears one neighbour instead of everybody, which cannot
    /// send more than the port takes, so large layers do not fill a switch's queue (ADR 0034).
    ///
    /// The ring goes rack after rack, so that a rack's link is crossed once each way (ADR 0036).
    ///
    /// There is no ring of fewer than three hosts, where servers are dedicated, and where a port carries
    /// less than two thirds of another: there the slowest port would be everybody's. Smaller differences
    /// may be the measurement's. Nor is there one between racks if less than that goes from one rack to
    /// the next, or if nobody knows: sums that are made inside racks cross their links with fewer bytes.
    pub fn in_a_ring(self) -> Self {
        let hosts = self.hosts.iter().max().map_or(self.nodes(), |last| usize::from(*last) + 1);
        let rates = || self.ports.iter().map(|port| port.rate);
        let differ = rates().min() < rates().max().map(two_thirds);
        let between_racks = self.racks.iter().any(|rack| *rack != 0);
        let narrow = between_racks && !self.has_wide_core();
        let ring = hosts >= 3 && !narrow && !differ && self.servers == Servers::Colocated;
        Self { ring, ..self }
    }

    /// Whether racks' links carry as much as the slowest port, as far as measurements tell.
    fn has_wide_core(&self) -> bool {
        let slowest = self.ports.iter().map(|port| port.rate).min();
        self.core.zip(slowest).is_some_and(|(core, port)| core >= two_thirds(port))
    }

    /// The same cluster with every port as slow as the slowest one.
    pub fn with_level_ports(mut self) -> Self {
        if let Some(slowest) = self.ports.iter().map(|port| port.rate).min() {
            self.ports.iter_mut().for_each(|port| port.rate = slowest);
        }
        self
    }

    /// The same cluster as groups use it: they go round a ring whatever ports carry.
    pub fn of_groups(self) -> Self {
        self.with_level_ports().in_a_ring()
    }

    /// Whether hosts are in a ring.
    pub fn is_ring(&self) -> bool {
        self.ring
    }

    /// These nodes as a cluster of their own, where each of them is a worker and holds shards. Its
    /// hosts, racks and ports are those that the nodes have, numbered in the order of their first
    /// nodes. They are not in a ring.
    pub fn among(&self, nodes: &[NodeId]) -> Result<Self, ClusterError> {
        let host_of = |node: &NodeId| self.hosts.get(node.index()).copied().unwrap_or(node.0);
        let (hosts, first) = numbered(nodes.iter().map(host_of));
        let rack_of = |host: &u16| self.racks.get(usize::from(*host)).copied().unwrap_or(0);
        // Where nobody has named racks there are none, and hosts may be in a ring.
        let racks = match self.racks.is_empty() {
            true => Vec::new(),
            false => numbered(first.iter().map(rack_of)).0,
        };
        let known: Vec<Port> =
            nodes.iter().filter_map(|node| self.ports.get(node.index()).copied()).collect();
        let (numbers, _) = numbered(known.iter().map(|port| port.number));
        let ports = numbers.into_iter().zip(known);
        let ports = ports.map(|(number, port)| Port { number, ..port }).collect();
        Self::new(nodes.len() as u16, Servers::Colocated, self.lanes)?
            .with_hosts(hosts, racks)?
            .with_ports(ports)
            .map(|cluster| cluster.with_core(self.core))
    }

    /// The same nodes as if each had a host of its own.
    pub fn apart(self) -> Self {
        Self { hosts: Vec::new(), racks: Vec::new(), core: None, ring: false, ..self }
    }

    /// The nodes' hosts, by node. Empty if every node has a host of its own.
    pub fn hosts(&self) -> &[u16] {
        &self.hosts
    }

    /// The hosts' racks, by host. Empty if all are in one rack.
    pub fn racks(&self) -> &[u16] {
        &self.racks
    }

    /// The same cluster, where one stream from a rack to the next one carries so much. `None`: nobody
    /// has measured it.
    pub fn with_core(self, core: Option<Rate>) -> Self {
        Self { core, ..self }
    }

    /// What one stream from a rack to the next one carries, if somebody has measured it.
    pub fn core(&self) -> Option<Rate> {
        self.core
    }

    /// The same cluster with these ports, by node. None at all: nothing is known of them.
    pub fn with_ports(self, ports: Vec<Port>) -> Result<Self, ClusterError> {
        let (nodes, got) = (self.nodes(), ports.len());
        if got != 0 && got != nodes {
            return Err(ClusterError::Ports { nodes, got });
        }
        let mut rates: Vec<Rate> = Vec::new();
        for (node, &Port { number, rate }) in self.node_ids().zip(&ports) {
            if usize::from(number) == rates.len() {
                rates.push(rate);
            }
            if rates.get(usize::from(number)) != Some(&rate) {
                return Err(ClusterError::Port { node, number, rate });
            }
        }
        Ok(Self { ports, ..self })
    }

    /// The nodes' ports, by node. Empty if nothing is known of them.
    pub fn ports(&self) -> &[Port] {
        &self.ports
    }

    /// Number of workers: what a complete chunk counts to.
    pub fn workers(&self) -> usize {
        self.workers.into()
    }

    /// Number of nodes, servers included.
    pub fn nodes(&self) -> usize {
        usize::from(self.workers) + usize::from(self.servers.extra())
    }

    /// Number of lanes on every node.
    pub fn lanes(&self) -> u16 {
        self.lanes
    }

    /// Where the store lives.
    pub fn servers(&self) -> Servers {
        self.servers
    }

    /// What `node` does. `None` if there is no such node.
    pub fn role(&self, node: NodeId) -> Option<Role> {
        let worker = node.0 < self.workers;
        let server = !worker || !matches!(self.servers, Servers::Dedicated(_));
        (node.index() < self.nodes()).then_some(Role { worker, server })
    }

    /// All nodes, in order of their ids.
    pub fn node_ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.nodes() as u16).map(NodeId)
    }

    /// The nodes that compute gradients, in order of their ranks.
    pub fn worker_ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.workers).map(NodeId)
    }

    /// The nodes that hold shards, in order of their ids.
    pub fn server_ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.node_ids().filter(|&n| self.role(n).is_some_and(|r| r.server))
    }

    /// The other nodes that `me` exchanges anything with: workers with everybody, servers with workers.
    pub fn partners(&self, me: NodeId) -> Vec<NodeId> {
        let works = |node| self.role(node).is_some_and(|role| role.worker);
        let partner = |&node: &NodeId| node != me && (works(me) || works(node));
        self.node_ids().filter(partner).collect()
    }

    /// All lanes of a node.
    pub fn lane_ids(&self) -> impl Iterator<Item = LaneId> + use<> {
        (0..self.lanes).map(LaneId)
    }

    /// How a person would call `node`: "worker 3" or "server 0 (node 8)".
    pub fn name(&self, node: NodeId) -> String {
        match node.0.checked_sub(self.workers) {
            None => format!("worker {node}"),
            Some(server) => format!("server {server} (node {node})"),
        }
    }
}

/// A cluster as it comes from another process.
#[derive(Deserialize)]
struct Unchecked {
    workers: u16,
    servers: Servers,
    lanes: u16,
    #[serde(default)]
    ports: Vec<Port>,
    #[serde(default)]
    hosts: Vec<u16>,
    #[serde(default)]
    racks: Vec<u16>,
    #[serde(default)]
    core: Option<Rate>,
    #[serde(default)]
    ring: bool,
}

impl TryFrom<Unchecked> for Cluster {
    type Error = ClusterError;

    fn try_from(cluster: Unchecked) -> Result<Self, ClusterError> {
        let Unchecked { workers, servers, lanes, ports, hosts, racks, core, ring } = cluster;
        let cluster = Self::new(workers, servers, lanes)?.with_ports(ports)?;
        let cluster = cluster.with_hosts(hosts, racks)?.with_core(core);
        match ring {
            true => Some(cluster.in_a_ring()).filter(Self::is_ring).ok_or(ClusterError::Ring),
            false => Ok(cluster),
        }
    }
}

/// Less than this of a rate is less for sure, and not only the measurement's chance.
fn two_thirds(rate: Rate) -> Rate {
    Rate::nearest(rate.bits() as f64 * 2.0 / 3.0)
}

/// How many different `numbers` there are. An error unless there are `of` numbers, and each new one
/// is the next.
fn judge_places(what: &'static str, numbers: &[u16], of: usize) -> Result<usize, ClusterError> {
    let mut seen = 0;
    let in_order = numbers.iter().all(|&number| {
        let is_next = usize::from(number) <= seen;
        seen = seen.max(usize::from(number) + 1);
        is_next
    });
    if numbers.len() != of || !in_order {
        return Err(ClusterError::Places { what, of, got: numbers.to_vec() });
    }
    Ok(seen)
}

impl Servers {
    /// Nodes that are servers only.
    pub fn extra(self) -> u16 {
        match self {
            Self::Colocated => 0,
            Self::Dedicated(n) | Self::Mixed(n) => n,
        }
    }
}

impl fmt::Display for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Colocated => f.write_str("colocated"),
            Self::Dedicated(n) => write!(f, "{n}"),
            Self::Mixed(n) => write!(f, "colocated+{n}"),
        }
    }
}

impl FromStr for Servers {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let count = |n: &str| {
            n.parse::<u16>().map_err(|_| {
                format!("expected 'colocated', a number of dedicated servers, or 'colocated+N', got '{s}'")
            })
        };
        match s.strip_prefix("colocated") {
            Some("") => Ok(Self::Colocated),
            Some(rest) => Ok(Self::Mixed(count(rest.strip_prefix('+').unwrap_or(rest))?)),
            None => Ok(Self::Dedicated(count(s)?)),
        }
    }
}

impl From<Servers> for String {
    fn from(servers: Servers) -> Self {
        servers.to_string()
    }
}

impl TryFrom<String> for Servers {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

/// The places with new numbers, each new one the next; and by new number, the place's old one.
fn numbered(places: impl Iterator<Item = u16>) -> (Vec<u16>, Vec<u16>) {
    let mut known = Vec::new();
    let mut number = |place: u16| {
        let at = known.iter().position(|other| *other == place);
        at.unwrap_or_else(|| {
            known.push(place);
            known.len() - 1
        }) as u16
    };
    let numbers = places.map(&mut number).collect();
    (numbers, known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_equal_hosts_or_more_are_in_a_ring() {
        let ring = |cluster: Cluster| cluster.in_a_ring().is_ring();
        let of = |hosts| Cluster::new(hosts, Servers::Colocated, 1).unwrap();
        assert_eq!([1, 2, 3, 32].map(|hosts| ring(of(hosts))), [false, false, true, true]);
        // Four workers on two hosts.
        assert!(!ring(of(4).with_hosts(vec![0, 0, 1, 1], Vec::new()).unwrap()));
        let racks = |racks: [u16; 4]| of(4).with_hosts(Vec::new(), racks.to_vec()).unwrap();
        assert!(!ring(racks([0, 0, 1, 1])), "nobody knows what passes between racks");
        assert!(ring(racks([0; 4])), "nothing passes between racks");
        let gigabit = |number| Port { number, rate: Rate::new(1_000_000_000).unwrap() };
        let between_racks = |mbit: u64| {
            let known = racks([0, 1, 0, 1]).with_ports((0..4).map(gigabit).collect()).unwrap();
            ring(known.with_core(Some(Rate::new(mbit * 1_000_000).unwrap())))
        };
        assert!(between_racks(1000) && between_racks(700) && !between_racks(600));
        assert!(!ring(Cluster::new(4, Servers::Dedicated(4), 1).unwrap()));
        let port = |number| {
            let mbit = if number == 3 { 100 } else { 1000 };
            Port { number, rate: Rate::new(mbit * 1_000_000).unwrap() }
        };
        let differing = || of(4).with_ports((0..4).map(port).collect()).unwrap();
        assert!(!ring(differing()));
        assert!(ring(differing().with_level_ports()));
        let noisy = (0..4).map(|number| Port {
            number,
            rate: Rate::new(1_000_000_000 - u64::from(number) * 100_000_000).unwrap(),
        });
        assert!(ring(of(4).with_ports(noisy.collect()).unwrap()));
        let equal = (0..4).map(|number| Port { number, ..port(0) }).collect();
        assert!(ring(of(4).with_ports(equal).unwrap()));
    }

    /// Two hosts of two nodes, a third host with one, and one with a node that is not asked for.
    #[test]
    fn some_nodes_are_a_cluster_with_their_hosts_racks_and_ports() {
        let port = |number, mbit: u64| Port { number, rate: Rate::new(mbit * 1_000_000).unwrap() };
        let (slow, fast) = (port(0, 100), port(1, 1000));
        let whole = Cluster::new(5, Servers::Dedicated(1), 3).unwrap();
        let whole = whole.with_hosts(vec![0, 1, 1, 2, 3, 3], vec![0, 1, 2, 1]).unwrap();
        let ports = vec![slow, fast, fast, port(2, 1000), port(3, 500), port(3, 500)];
        let whole = whole.with_ports(ports).unwrap();
        let some = whole.among(&[4, 1, 3, 2].map(NodeId)).unwrap();
        assert_eq!((some.workers(), some.servers(), some.lanes()), (4, Servers::Colocated, 3));
        assert_eq!((some.hosts(), some.racks()), ([0, 1, 2, 1].as_slice(), [0, 0, 1].as_slice()));
        let expected = [port(0, 500), port(1, 1000), port(2, 1000), port(1, 1000)];
        assert_eq!(some.ports(), expected);
        assert!(!some.is_ring());
        // Nothing is known of places and ports.
        let plain = Cluster::new(4, Servers::Colocated, 1).unwrap().in_a_ring();
        let three = plain.among(&[3, 0, 1].map(NodeId)).unwrap();
        let apart = Cluster::new(3, Servers::Colocated, 1).unwrap();
        assert_eq!(three, apart.with_hosts(vec![0, 1, 2], Vec::new()).unwrap());
    }

    #[test]
    fn a_ring_that_cannot_be_is_refused() {
        let ring = Cluster::new(3, Servers::Colocated, 1).unwrap().in_a_ring();
        let text = serde_json::to_string(&ring).unwrap();
        assert_eq!(serde_json::from_str::<Cluster>(&text).unwrap(), ring);
        let two = serde_json::from_str::<Cluster>(&text.replace("3", "2"));
        assert!(two.unwrap_err().to_string().contains("three hosts"));
    }

    #[test]
    fn roles_follow_the_servers() {
        let role = |servers, node| Cluster::new(2, servers, 1).unwrap().role(NodeId(node));
        let both = Some(Role { worker: true, server: true });
        let worker = Some(Role { worker: true, server: false });
        let server = Some(Role { worker: false, server: true });
        assert_eq!([0, 1, 2].map(|n| role(Servers::Colocated, n)), [both, both, None]);
        assert_eq!([0, 1, 2].map(|n| role(Servers::Dedicated(1), n)), [worker, worker, server]);
        assert_eq!([0, 1, 2].map(|n| role(Servers::Mixed(1), n)), [both, both, server]);
    }

    #[test]
    fn impossible_clusters_say_what_is_missing() {
        assert_eq!(Cluster::new(0, Servers::Colocated, 1), Err(ClusterError::NoWorkers));
        assert_eq!(Cluster::new(1, Servers::Dedicated(0), 1), Err(ClusterError::NoServers));
        assert_eq!(Cluster::new(1, Servers::Colocated, 0), Err(ClusterError::NoLanes));
        let crowd = Cluster::new(u16::MAX, Servers::Colocated, 1);
        assert_eq!(crowd, Err(ClusterError::TooManyNodes(65535)));
    }

    #[test]
    fn ports_are_of_all_nodes_and_have_one_rate_each() {
        let rate = |mbit: u64| Rate::new(mbit * 1_000_000).unwrap();
        let with = |ports: &[(u16, u64)]| {
            let port = |&(number, mbit): &(u16, u64)| Port { number, rate: rate(mbit) };
            let cluster = Cluster::new(3, Servers::Colocated, 2).unwrap();
            cluster.with_ports(ports.iter().map(port).collect())
        };
        let shared = with(&[(0, 100), (1, 200), (0, 100)]).unwrap();
        let text = serde_json::to_string(&shared).unwrap();
        assert_eq!(serde_json::from_str::<Cluster>(&text).unwrap(), shared);
        assert_eq!(shared.clone().with_lanes(4).unwrap().ports(), shared.ports());
        assert_eq!(with(&[]).unwrap(), Cluster::new(3, Servers::Colocated, 2).unwrap());
        assert_eq!(with(&[(0, 100)]), Err(ClusterError::Ports { nodes: 3, got: 1 }));
        for (ports, node) in [
            ([(0, 100), (0, 200), (1, 100)], 1),
            ([(0, 100), (2, 100), (1, 100)], 1),
            ([(1, 100), (0, 100), (2, 100)], 0),
        ] {
            let (number, mbit) = ports[usize::from(node)];
            let wrong = ClusterError::Port { node: NodeId(node), number, rate: rate(mbit) };
            assert_eq!(with(&ports), Err(wrong));
        }
    }

    #[test]
    fn impossible_clusters_are_not_read() {
        let read = |text: &str| serde_json::from_str::<Cluster>(text).map_err(|e| e.to_string());
        let cluster = Cluster::new(2, Servers::Mixed(1), 4).unwrap();
        assert_eq!(read(&serde_json::to_string(&cluster).unwrap()), Ok(cluster));
        let refused = |text| read(text).unwrap_err();
        let words = refused(r#"{"workers": 2, "servers": "colocated", "lanes": 0}"#);
        assert!(words.contains("at least 1 lane, got 0"), "{words}");
        let words = refused(r#"{"workers": 0, "servers": "colocated", "lanes": 1}"#);
        assert!(words.contains("at least 1 worker, got 0"), "{words}");
        let words = refused(r#"{"workers": 2, "servers": "0", "lanes": 1}"#);
        assert!(words.contains("at least 1 of them, got 0"), "{words}");
    }

    #[test]
    fn servers_round_trip_through_text() {
        for s in [Servers::Colocated, Servers::Dedicated(3), Servers::Mixed(2)] {
            assert_eq!(s.to_string().parse(), Ok(s));
        }
        assert!("colo".parse::<Servers>().unwrap_err().contains("'colo'"));
        assert!("-1".parse::<Servers>().is_err());
    }
}
