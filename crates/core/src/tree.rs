//! Where nodes are, and how sums pass through hosts and racks (Poseidon 2017 §5.1, PHub §3).
//!
//! The workers of a host reach each other through memory, and share a port. So what they contribute
//! to a chunk is added up inside the host, and one stream of the host goes out. One of the host's
//! workers is the chunk's *collector*: the others give it their contributions, it passes the sum on
//! and hands the result back to them. Every worker of a host collects its part of the chunks, so that
//! none has more work than another. A rack is the same one level up: one of its hosts' collectors
//! collects from the others.
//!
//! So the way of a chunk is a tree. Its root is the server that holds the chunk. Results come back the
//! same way. Factors go as results do, from the worker whose factors they are, which then is the root.
//!
//! Where hosts are in a ring, a chunk of a large layer goes from each host to the one before it
//! instead, and each adds what its workers contribute: a host collects from the host after it. Results
//! go on in the same direction, from the root's host to the one before it, and so on. So a port hears
//! one host only, which cannot send more than the port takes. The ring goes rack after rack. A sum that
//! would be rounded at every host goes straight, and only its result goes round the ring.

use crate::{Cluster, NodeId};

/// The hosts and racks of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// By node: its host.
    host_of: Vec<u16>,
    hosts: Vec<Host>,
    racks: Vec<Rack>,
    /// The hosts in the order of the ring: rack after rack, so that a rack's link is crossed once.
    ring: Vec<u16>,
    /// By host: its place in the ring.
    places: Vec<usize>,
    /// By place in the ring: workers of the hosts before it. One more entry at the end: all workers.
    before: Vec<usize>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Host {
    rack: u16,
    workers: Vec<NodeId>,
    servers: Vec<NodeId>,
}

/// A rack: its hosts, and which of them have workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Rack {
    hosts: Vec<u16>,
    working: Vec<u16>,
}

/// Which tree a chunk takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// Where sums are complete, or where factors come from.
    pub root: NodeId,
    /// Spreads the chunks of a root over the collectors of each host: the number of the chunk among
    /// them.
    pub turn: u32,
    /// What of it goes round the ring of hosts, instead of straight to the root's host and back.
    pub ring: Ring,
}

/// What of a chunk goes round the ring of hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ring {
    /// It goes straight to its root, and straight back.
    #[default]
    Nothing,
    /// Contributions go straight to the root. The result goes from host to host.
    Results,
    /// Each host adds what its workers contribute to what comes from the host after it.
    Everything,
}

/// What a node adds up for a chunk, and in which order if the order counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sum {
    /// What one node sends.
    Stream(Stream),
    /// A sum of sums: of a host, of a rack, or of everybody.
    Group(Vec<Sum>),
}

/// What one node sends: its own contribution, or a sum that it has collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stream {
    /// The node.
    pub node: NodeId,
    /// The lowest rank among the workers that the stream covers. In a ring, where their order does not
    /// count: the lowest rank of the nearest host, or rank 0 if it is covered.
    pub first: NodeId,
    /// Number of workers that the stream covers.
    pub workers: usize,
}

impl Ring {
    /// Everything, if there `is` a ring.
    pub fn whole(is: bool) -> Self {
        if is { Self::Everything } else { Self::Nothing }
    }

    /// Whether sums are made host after host.
    pub fn takes_sums(self) -> bool {
        self == Self::Everything
    }

    /// Whether results go from host to host.
    pub fn takes_results(self) -> bool {
        self != Self::Nothing
    }
}

impl Tree {
    /// The tree of `cluster`.
    pub fn new(cluster: &Cluster) -> Self {
        let host_of: Vec<u16> = match cluster.hosts() {
            [] => cluster.node_ids().map(|node| node.0).collect(),
            hosts => hosts.to_vec(),
        };
        let count = host_of.iter().max().map_or(0, |last| usize::from(*last) + 1);
        let mut hosts = vec![Host::default(); count];
        for (node, host) in cluster.node_ids().zip(&host_of) {
            let host = &mut hosts[usize::from(*host)];
            let role = cluster.role(node);
            host.workers.extend(role.filter(|role| role.worker).map(|_| node));
            host.servers.extend(role.filter(|role| role.server).map(|_| node));
        }
        for (host, rack) in hosts.iter_mut().zip(cluster.racks()) {
            host.rack = *rack;
        }
        let count = hosts.iter().map(|host| usize::from(host.rack) + 1).max().unwrap_or(0);
        let mut racks = vec![Rack::default(); count];
        for (host, number) in hosts.iter().zip(0..) {
            let rack = &mut racks[usize::from(host.rack)];
            rack.hosts.push(number);
            rack.working.extend((!host.workers.is_empty()).then_some(number));
        }
        // Host 0 comes first: it is in rack 0, and hosts of a rack are in order.
        let ring: Vec<u16> = racks.iter().flat_map(|rack| rack.hosts.iter().copied()).collect();
        let mut places = vec![0; hosts.len()];
        let mut before = vec![0];
        for (place, host) in ring.iter().map(|host| usize::from(*host)).enumerate() {
            places[host] = place;
            before.push(before[place] + hosts[host].workers.len());
        }
        Self { host_of, hosts, racks, ring, places, before }
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.before[self.hosts.len()]
    }

    /// The workers of every host, by host. A host of servers has none.
    pub fn workers_by_host(&self) -> impl ExactSizeIterator<Item = &[NodeId]> {
        self.hosts.iter().map(|host| &host.workers[..])
    }

    /// The number of `node`'s host.
    pub fn host(&self, node: NodeId) -> u16 {
        self.host_of[node.index()]
    }

    /// The number of `host`'s rack.
    pub fn rack(&self, host: u16) -> u16 {
        self.hosts[usize::from(host)].rack
    }

    /// Whether every contribution goes straight to its root, and every result straight back, but for
    /// those that go round a ring.
    pub fn is_flat(&self) -> bool {
        let one_host = self.hosts.len() == 1;
        let one_rack = self.racks.len() == 1;
        (one_host || self.hosts.iter().all(|host| host.workers.len() <= 1))
            && (one_rack || self.racks.iter().all(|rack| rack.working.len() <= 1))
    }

    /// The node that `node` sends its contribution or its sum to. `None` at the root.
    pub fn parent(&self, node: NodeId, route: Route) -> Option<NodeId> {
        let (host, to) = (self.host(node), self.host(route.root));
        if node == route.root {
            return None;
        }
        let collector = self.collector(host, route).filter(|_| host != to);
        if collector.is_some_and(|collector| collector != node) {
            return collector;
        }
        let above = if host == to { to } else { self.host_above(host, route) };
        match above == to {
            true => Some(route.root),
            false => self.collector(above, route),
        }
    }

    /// The node that `node` has the result from. `None` at the root.
    pub fn source(&self, node: NodeId, route: Route) -> Option<NodeId> {
        let (host, to) = (self.host(node), self.host(route.root));
        if !route.ring.takes_results() || host == to || self.collector(host, route) != Some(node) {
            return self.parent(node, route);
        }
        let after = self.host_after(host);
        if after == to { Some(route.root) } else { self.collector(after, route) }
    }

    /// The nodes that have the result from `node`, in order.
    pub fn receivers(&self, node: NodeId, route: Route) -> Vec<NodeId> {
        if !route.ring.takes_results() {
            return self.children(node, route);
        }
        let (host, to) = (self.host(node), self.host(route.root));
        if node != route.root && (host == to || self.collector(host, route) != Some(node)) {
            return Vec::new();
        }
        let mut nodes = self.hosts[usize::from(host)].workers.clone();
        nodes.retain(|worker| *worker != node);
        let before = self.host_before(host);
        nodes.extend(self.collector(before, route).filter(|_| before != to));
        nodes.sort_unstable();
        nodes
    }

    /// Whether contributions of workers end at `node`, or stop over there: it is the root, or it
    /// collects for others than itself.
    pub fn collects(&self, node: NodeId, route: Route) -> bool {
        let (host, to) = (self.host(node), self.host(route.root));
        let leads = || host != to && self.collector(host, route) == Some(node);
        let alone = || self.hosts[usize::from(host)].workers.len() == 1;
        let last = || match route.ring.takes_sums() {
            true => self.host_after(host) == to,
            false => {
                let rack = self.rack(host);
                let alone = self.racks[usize::from(rack)].working.len() == 1;
                alone || rack == self.rack(to) || self.host_of_rack(rack, route) != Some(host)
            }
        };
        node == route.root || leads() && !(alone() && last())
    }

    /// Whether the way of sums begins at `node`: it sends its host's to another host, and all other hosts add
    /// theirs to it. So it does in a ring, and between two hosts.
    pub fn begins(&self, node: NodeId, route: Route) -> bool {
        let (host, to) = (self.host(node), self.host(route.root));
        let is_first = match route.ring.takes_sums() {
            true => self.host_after(host) == to,
            false => self.hosts.len() == 2,
        };
        host != to && is_first && self.collector(host, route) == Some(node)
    }

    /// Whether `node` sends something towards the root: it is a worker, and not the root.
    pub fn contributes(&self, node: NodeId, route: Route) -> bool {
        let workers = &self.hosts[usize::from(self.host(node))].workers;
        node != route.root && workers.binary_search(&node).is_ok()
    }

    /// The nodes whose parent is `node`, in order: those that it has contributions from.
    pub fn children(&self, node: NodeId, route: Route) -> Vec<NodeId> {
        let mut nodes = Vec::new();
        self.sum(node, route).visit(&mut |stream| nodes.push(stream.node));
        nodes.retain(|child| *child != node);
        nodes.sort_unstable();
        nodes
    }

    /// What `node` adds up: streams of its children, and its own contribution if it is a worker.
    pub fn sum(&self, node: NodeId, route: Route) -> Sum {
        let host = self.host(node);
        let to = self.host(route.root);
        let is_root = node == route.root;
        let of_host = host != to && self.collector(host, route) == Some(node);
        if !is_root && !of_host {
            return Sum::worker(node);
        }
        let workers = &self.hosts[usize::from(host)].workers;
        let mut sum = Sum::Group(workers.iter().map(|worker| Sum::worker(*worker)).collect());
        if route.ring.takes_sums() {
            return sum.among(self.stream_round(host, route).into_iter());
        }
        let rack = self.rack(host);
        let of_rack = rack != self.rack(to) && self.host_of_rack(rack, route) == Some(host);
        if is_root || of_rack {
            let others = self.racks[usize::from(rack)].working.iter().filter(|h| **h != host);
            let stream = |other: &u16| {
                let node = self.collector(*other, route)?;
                let workers = &self.hosts[usize::from(*other)].workers;
                Some(Stream { node, first: *workers.first()?, workers: workers.len() })
            };
            sum = sum.among(others.filter_map(stream));
        }
        if is_root {
            let others = (0..self.racks.len() as u16).filter(|other| *other != rack);
            let stream = |other: u16| {
                let node = self.collector(self.host_of_rack(other, route)?, route)?;
                let hosts = self.racks[usize::from(other)].working.iter();
                let workers =
                    || hosts.clone().flat_map(|host| &self.hosts[usize::from(*host)].workers);
                Some(Stream { node, first: *workers().min()?, workers: workers().count() })
            };
            sum = sum.among(others.filter_map(stream));
        }
        sum
    }

    /// The nodes of other hosts that send `node` anything of what goes round the ring, or straight.
    pub fn senders(&self, node: NodeId, ring: bool) -> Vec<NodeId> {
        let mut senders = Vec::new();
        // After so many turns every host, and every rack, has had all its collectors.
        let most = |sizes: &mut dyn Iterator<Item = usize>| sizes.max().unwrap_or(1).max(1) as u32;
        let turns = most(&mut self.hosts.iter().map(|host| host.workers.len()))
            * most(&mut self.racks.iter().map(|rack| if ring { 1 } else { rack.working.len() }));
        for (root, turn) in
            (0..self.host_of.len() as u16).flat_map(|r| (0..turns).map(move |t| (r, t)))
        {
            let route = Route { root: NodeId(root), turn, ring: Ring::whole(ring) };
            senders.extend(self.source(node, route).filter(|_| self.contributes(node, route)));
            senders.extend(self.children(node, route));
        }
        senders.retain(|sender| self.host(*sender) != self.host(node));
        senders.sort_unstable();
        senders.dedup();
        senders
    }

    /// The host that `host` sends its sum to, on its way to the root's host.
    fn host_above(&self, host: u16, route: Route) -> u16 {
        if route.ring.takes_sums() {
            return self.host_before(host);
        }
        let (rack, to) = (self.rack(host), self.host(route.root));
        let above = self.host_of_rack(rack, route).filter(|above| *above != host);
        above.filter(|_| rack != self.rack(to)).unwrap_or(to)
    }

    /// The host before `host` in the ring.
    fn host_before(&self, host: u16) -> u16 {
        let hosts = self.ring.len();
        self.ring[(self.places[usize::from(host)] + hosts - 1) % hosts]
    }

    /// The host after `host` in the ring.
    fn host_after(&self, host: u16) -> u16 {
        self.ring[(self.places[usize::from(host)] + 1) % self.ring.len()]
    }

    /// What comes to `host` round the ring: the sum of all hosts after it, up to the one before the
    /// root's. `None` if there are none.
    fn stream_round(&self, host: u16, route: Route) -> Option<Stream> {
        let (next, to) = (self.host_after(host), self.host(route.root));
        if next == to {
            return None;
        }
        let before = |host: u16| self.before[self.places[usize::from(host)]];
        let (from, to) = (before(next), before(to));
        // Host 0 is the first in the ring: what passes the end of the ring has come from it, too.
        let (first, workers) = match from < to {
            true => (next, to - from),
            false if to == 0 => (next, self.workers() - from),
            false => (0, self.workers() - from + to),
        };
        let first = *self.hosts[usize::from(first)].workers.first()?;
        Some(Stream { node: self.collector(next, route)?, first, workers })
    }

    /// The worker of `host` that collects what goes along `route`. `None` if the host has no workers.
    fn collector(&self, host: u16, route: Route) -> Option<NodeId> {
        let workers = &self.hosts[usize::from(host)].workers;
        let at = &self.hosts[usize::from(self.host(route.root))];
        // The root's neighbours have the next collectors: so the n-th of each host exchange with
        // each other, and not everybody with everybody.
        let (place, of) = match at.servers.iter().position(|server| *server == route.root) {
            Some(place) => (place, at.servers.len()),
            None => (at.workers.iter().position(|w| *w == route.root)?, at.workers.len()),
        };
        let spread = place + of * route.turn as usize;
        workers.get(spread % workers.len().max(1)).copied()
    }

    /// The host of `rack` that collects what goes along `route`. `None` if the rack has no workers.
    fn host_of_rack(&self, rack: u16, route: Route) -> Option<u16> {
        let hosts = &self.racks[usize::from(rack)].working;
        let host = self.host(route.root);
        let neighbours = &self.racks[usize::from(self.rack(host))].hosts;
        let place = neighbours.iter().position(|neighbour| *neighbour == host)?;
        let spread = place + neighbours.len() * route.turn as usize;
        hosts.get(spread % hosts.len().max(1)).copied()
    }
}

impl Sum {
    fn worker(node: NodeId) -> Self {
        Self::Stream(Stream { node, first: node, workers: 1 })
    }

    /// The sum of this and of `others`, in the order of the lowest ranks.
    fn among(self, others: impl Iterator<Item = Stream>) -> Self {
        let mut all: Vec<Self> = others.map(Self::Stream).collect();
        all.push(self);
        all.sort_by_key(Self::first);
        Self::Group(all)
    }

    /// The lowest rank that is covered.
    fn first(&self) -> Option<NodeId> {
        match self {
            Self::Stream(stream) => Some(stream.first),
            Self::Group(sums) => sums.iter().filter_map(Self::first).min(),
        }
    }

    /// Calls `see` with each stream.
    pub fn visit(&self, see: &mut impl FnMut(&Stream)) {
        match self {
            Self::Stream(stream) => see(stream),
            Self::Group(sums) => sums.iter().for_each(|sum| sum.visit(see)),
        }
    }
}

#[cfg(test)]
mod tests;
