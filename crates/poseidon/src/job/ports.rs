//! What the coordinator makes of the nodes' ports: who measures, and what follows from it. Without
//! sockets.

use crate::job::control::{Asker, Join, Message, Reply};
use crate::job::link_rate::{LANES_IN_DOUBT, LinkRate, Measured, ROUNDS};
use crate::job::rounds::{Posted, Rounds, deadline};
use poseidon_core::cluster::ClusterError;
use poseidon_core::port::{judge_measured, lanes_for, level_measured, merge_rates};
use poseidon_core::{Cluster, NodeId, Port, Rate, Servers};
use std::collections::BTreeMap;
use std::time::Instant;

/// What nodes have said of their ports when they joined.
#[derive(Debug)]
pub(crate) struct Claims {
    /// By node.
    rates: Vec<LinkRate>,
    /// By node: the number of its host.
    hosts: Vec<u16>,
    /// By host: the number of its rack; empty if no node names a rack.
    racks: Vec<u16>,
    /// By node: its interfaces.
    interfaces: Vec<u16>,
    /// Worker 0's number of lanes.
    lanes: u16,
    /// Whether that is only the most.
    lanes_by_rate: bool,
}

/// No machine has more interfaces than this: more lanes would only cost descriptors.
const MOST_INTERFACES: usize = 64;

/// Gives names numbers, in the order in which they come.
#[derive(Default)]
struct Numbers<'a>(BTreeMap<&'a str, u16>);

impl<'a> Numbers<'a> {
    fn number(&mut self, name: &'a str) -> u16 {
        let next = self.0.len() as u16;
        *self.0.entry(name).or_insert(next)
    }
}

impl Claims {
    /// `joins` are of all nodes, in the order of their ids.
    pub(crate) fn new<'a>(joins: impl Iterator<Item = &'a Join> + Clone) -> Self {
        let (mut hosts, mut racks) = (Numbers::default(), Numbers::default());
        let mut rack_of = Vec::new();
        let mut host_of = Vec::new();
        for facts in joins.clone().map(|join| &join.facts) {
            let host = hosts.number(&facts.host);
            if usize::from(host) == rack_of.len() {
                // A host that names no rack is in a rack with all others that name none.
                rack_of.push(racks.number(facts.rack.as_deref().unwrap_or_default()));
            }
            host_of.push(host);
        }
        let first = joins.clone().next();
        let named = joins.clone().any(|join| join.facts.rack.is_some());
        Self {
            rates: joins.clone().map(|join| join.link_rate).collect(),
            interfaces: joins
                .map(|join| join.facts.interfaces().min(MOST_INTERFACES) as u16)
                .collect(),
            hosts: host_of,
            racks: if named { rack_of } else { Vec::new() },
            lanes: first.map_or(1, |join| join.lanes),
            lanes_by_rate: first.is_some_and(|join| join.lanes_by_rate),
        }
    }

    /// Nodes on the host that has the fewest.
    fn fewest_on_a_host(&self) -> u16 {
        let on = |host: u16| self.hosts.iter().filter(|of| **of == host).count() as u16;
        self.hosts.iter().map(|host| on(*host)).min().unwrap_or(1)
    }

    /// The lanes of a node whose host has a port of `rate`, if the rate decides.
    ///
    /// All nodes of a host share its port, and yet each of them needs about as many lanes as a node
    /// alone: what it gives and takes inside the host is as much work as what passes the port less
    /// (ADR 0016). That many it has if they keep half of its cores for computing. Together a host's nodes
    /// have at least as many as the port needs.
    fn lanes_at(&self, rate: Rate) -> u16 {
        let (needed, nodes) = (lanes_for(rate, u16::MAX), self.fewest_on_a_host());
        let most = if nodes > 1 { self.lanes / 2 } else { self.lanes };
        needed.min(most.max(needed.div_ceil(nodes))).min(self.lanes.max(1))
    }

    /// The nodes that measure, one for each host: its first worker, or its first server. They come rack
    /// after rack. Empty if nothing is to be measured.
    pub(crate) fn probers(&self) -> Vec<NodeId> {
        let unknown = self.rates.contains(&LinkRate::Unknown);
        let all_given = self.rates.iter().all(|rate| matches!(rate, LinkRate::Given(_)));
        let hosts = self.hosts.iter().max().map_or(0, |last| last + 1);
        if unknown || all_given || hosts < 2 {
            return Vec::new();
        }
        // Workers have the lower ids.
        let first = |host| self.hosts.iter().position(|of| *of == host);
        let mut by_rack: Vec<u16> = (0..hosts).collect();
        by_rack.sort_by_key(|host| self.rack(*host));
        by_rack.into_iter().filter_map(first).map(|node| NodeId(node as u16)).collect()
    }

    /// The number of a host's rack.
    fn rack(&self, host: u16) -> u16 {
        self.racks.get(usize::from(host)).copied().unwrap_or(0)
    }

    /// What one interface's stream from a rack to the next one carries, as far as it was measured. Of
    /// several rounds the fastest counts.
    fn core(&self, seen: &[(NodeId, NodeId, Rate)]) -> Option<Rate> {
        let rack = |node: NodeId| self.hosts.get(node.index()).map(|host| self.rack(*host));
        let mut pairs: BTreeMap<(NodeId, NodeId), Rate> = BTreeMap::new();
        for &(from, to, rate) in seen.iter().filter(|(from, to, _)| rack(*from) != rack(*to)) {
            let fastest = pairs.entry((from, to)).or_insert(rate);
            *fastest = rate.max(*fastest);
        }
        pairs.into_values().min()
    }

    /// `cluster` as it is while ports are measured: with the lanes that it has in any case.
    pub(crate) fn draft(&self, cluster: Cluster) -> Result<Cluster, ClusterError> {
        let lanes = if self.lanes_by_rate { 1 } else { self.lanes };
        cluster.with_lanes(lanes)?.with_hosts(self.hosts.clone(), self.racks.clone())
    }

    /// What one interface of a host carries, as far as it was measured.
    fn measured(&self, host: u16, seen: &[(NodeId, NodeId, Rate)]) -> Option<Rate> {
        let here = |end: NodeId| self.hosts.get(end.index()) == Some(&host);
        let out = seen.iter().filter(|(from, ..)| here(*from)).map(|seen| seen.2).max();
        let back = seen.iter().filter(|(_, to, _)| here(*to)).map(|seen| seen.2).max();
        out.into_iter().chain(back).min()
    }

    /// `cluster` with its ports and lanes, when `seen` has what was measured: who sent to whom, and
    /// how fast.
    ///
    /// Of each way through a port the fastest counts, and of the two ways the slower one: layers
    /// need both alike. Measured ports that are not far from the fastest count as equal. Nodes of one host
    /// that give the same rate share a port of it. A node whose budget is smaller than its part of its
    /// host's port has a port of its own. A port that was not measured counts as the fastest one.
    pub(crate) fn settle(
        &self,
        cluster: Cluster,
        seen: &[(NodeId, NodeId, Rate)],
    ) -> Result<Cluster, ClusterError> {
        let cluster = cluster.with_hosts(self.hosts.clone(), self.racks.clone())?;
        // Ports are numbered in the order of their first nodes.
        let mut numbers: BTreeMap<(u16, Option<usize>, Option<Rate>), u16> = BTreeMap::new();
        let mut rates: Vec<Option<Rate>> = Vec::new();
        let mut ports = Vec::new();
        let hosts = self.hosts.iter().max().map_or(0, |last| last + 1);
        let mut by_host: Vec<Option<Rate>> =
            (0..hosts).map(|host| self.measured(host, seen)).collect();
        // Where servers are on no worker, no stream goes from rack to rack as in a ring.
        let is_colocated = cluster.servers() == Servers::Colocated;
        let mut core = if is_colocated { self.core(seen) } else { None };
        level_measured(by_host.iter_mut().flatten(), core.as_mut());
        by_host.iter_mut().chain([&mut core]).flatten().for_each(|r| *r = judge_measured(*r));
        let measured = |host: u16| {
            let rate = by_host[usize::from(host)]?;
            // Lane 0 is measured, which uses one of the interfaces. Those without a lane do not count.
            let first = self.hosts.iter().position(|of| *of == host)?;
            let lanes = if self.lanes_by_rate { u16::MAX } else { self.lanes };
            let interfaces = self.interfaces[first].min(lanes);
            Some(Rate::nearest(rate.bits() as f64 * f64::from(interfaces)))
        };
        // A ring uses as many interfaces as the host has that has the fewest.
        let fewest = self.interfaces.iter().copied().min().unwrap_or(1);
        let fewest = if self.lanes_by_rate { fewest } else { fewest.min(self.lanes) };
        let core = core.map(|core| Rate::nearest(core.bits() as f64 * f64::from(fewest)));
        let on = |host: u16| self.hosts.iter().filter(|of| **of == host).count() as u64;
        for (node, (claim, &host)) in self.rates.iter().zip(&self.hosts).enumerate() {
            let (own, rate) = match (claim, measured(host)) {
                (LinkRate::Given(rate), _) => ((None, Some(*rate)), Some(*rate)),
                (LinkRate::AtMost(budget), Some(rate))
                    if rate.bits() / on(host) > budget.bits() =>
                {
                    ((Some(node), None), Some(*budget))
                }
                (LinkRate::AtMost(_) | LinkRate::Measured | LinkRate::Unknown, rate) => {
                    ((None, None), rate)
                }
            };
            let next = rates.len() as u16;
            let number = *numbers.entry((host, own.0, own.1)).or_insert(next);
            if number == next {
                rates.push(rate);
            }
            ports.push(number);
        }
        // Nothing goes over a port.
        let one_host = self.hosts.iter().all(|host| *host == 0);
        // Every interface has a lane, or it would carry nothing.
        let most_interfaces = self.interfaces.iter().copied().max().unwrap_or(1);
        let Some(fastest) = rates.iter().flatten().copied().max() else {
            let cluster = cluster.with_lanes(match self.lanes_by_rate {
                true if one_host => 1,
                true => self.lanes.min(LANES_IN_DOUBT).max(most_interfaces),
                false => self.lanes,
            })?;
            return Ok(cluster);
        };
        let mut rates: Vec<Rate> = rates.into_iter().map(|rate| rate.unwrap_or(fastest)).collect();
        merge_rates(&mut rates);
        // The slowest port is everybody's bound: more lanes than it needs gain nothing.
        let slowest = rates.iter().copied().min().unwrap_or(fastest);
        let by_rate = if one_host { 1 } else { self.lanes_at(slowest) };
        let lanes = if self.lanes_by_rate { by_rate.max(most_interfaces) } else { self.lanes };
        let port = |number: u16| Port { number, rate: rates[usize::from(number)] };
        let ports = ports.into_iter().map(port).collect();
        cluster.with_lanes(lanes)?.with_ports(ports).map(|cluster| cluster.with_core(core))
    }
}

/// A measurement under way.
#[derive(Debug)]
pub(crate) struct Measuring {
    pub(crate) claims: Claims,
    pub(crate) probers: Vec<NodeId>,
    pub(crate) rounds: Rounds<Option<(NodeId, Rate)>>,
    /// What has been measured.
    seen: Vec<(NodeId, NodeId, Rate)>,
}

/// What follows from a node's post.
#[derive(Debug)]
pub(crate) enum Step {
    /// Somebody has to be told something, or nobody.
    Tell(Vec<Reply>),
    /// The measurement is over. These nodes wait for the book.
    Settled(Vec<Asker>),
}

impl Measuring {
    pub(crate) fn new(claims: Claims, probers: Vec<NodeId>) -> Self {
        Self { claims, probers, rounds: Rounds::default(), seen: Vec::new() }
    }

    /// What has been measured.
    pub(crate) fn seen(&self) -> &[(NodeId, NodeId, Rate)] {
        &self.seen
    }

    /// A node has posted. Those that measure post every round, and the others the last one.
    pub(crate) fn handle_post(
        &mut self,
        cluster: &Cluster,
        asker: Asker,
        post: Measured,
        now: Instant,
    ) -> Step {
        let Measured { node, round, sent, patience_ms } = post;
        let members = match round {
            ROUNDS => cluster.node_ids().collect(),
            _ => self.probers.clone(),
        };
        let refuse = |why: String| Step::Tell(vec![Reply::refusal(asker, why)]);
        if round > ROUNDS || !members.contains(&node) {
            let name = cluster.name(node);
            return refuse(format!("{name} has no part in round {round} of measuring"));
        }
        let posted = Posted { node, asker, value: sent, deadline: deadline(now, patience_ms) };
        match self.rounds.post(&round.to_string(), members, posted) {
            Err(_) => refuse(format!("{} has measured round {round} already", cluster.name(node))),
            Ok(None) => Step::Tell(Vec::new()),
            Ok(Some(complete)) => {
                let sent = complete
                    .posts
                    .iter()
                    .filter_map(|(from, (_, sent))| sent.map(|(to, rate)| (*from, to, rate)));
                for (from, to, rate) in sent {
                    tracing::debug!(round, %from, %to, %rate, "measured a port");
                    self.seen.push((from, to, rate));
                }
                match round {
                    ROUNDS => Step::Settled(complete.posts.values().map(|(a, _)| *a).collect()),
                    _ => Step::Tell(complete.answer(&Message::Proceed)),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::Servers;

    fn rate(mbit: u64) -> Rate {
        Rate::new(mbit * 1_000_000).unwrap()
    }

    fn claims(rates: &[LinkRate], hosts: &[u16]) -> Claims {
        let interfaces = vec![1; hosts.len()];
        let (rates, hosts, racks) = (rates.to_vec(), hosts.to_vec(), Vec::new());
        Claims { rates, hosts, racks, interfaces, lanes: 8, lanes_by_rate: true }
    }

    fn settled(claims: &Claims, seen: &[(u16, u16, u64)]) -> Cluster {
        let seen: Vec<_> =
            seen.iter().map(|&(from, to, mbit)| (NodeId(from), NodeId(to), rate(mbit))).collect();
        let workers = claims.rates.len() as u16;
        claims.settle(Cluster::new(workers, Servers::Colocated, 1).unwrap(), &seen).unwrap()
    }

    fn ports(cluster: &Cluster) -> Vec<(u16, u64)> {
        cluster.ports().iter().map(|port| (port.number, port.rate.bits() / 1_000_000)).collect()
    }

    #[test]
    fn one_node_of_each_host_measures_if_there_is_something_to_measure() {
        use LinkRate::{Given, Measured, Unknown};
        let probers = |rates: &[LinkRate], hosts: &[u16]| -> Vec<u16> {
            claims(rates, hosts).probers().into_iter().map(|node| node.0).collect()
        };
        assert_eq!(probers(&[Measured; 4], &[0, 1, 0, 2]), [0, 1, 3]);
        assert_eq!(probers(&[Measured; 3], &[0, 0, 0]), [0u16; 0]);
        assert_eq!(probers(&[Measured, Unknown], &[0, 1]), [0u16; 0]);
        assert_eq!(probers(&[Given(rate(10)); 2], &[0, 1]), [0u16; 0]);
        assert_eq!(probers(&[Given(rate(10)), Measured], &[0, 1]), [0, 1]);
    }

    /// Hosts of two racks in turn, whose links carry less than a port, or as much.
    #[test]
    fn racks_are_measured_apart_from_ports() {
        let racks = vec![0, 1, 0, 1];
        let claims = Claims { racks, ..claims(&[LinkRate::Measured; 4], &[0, 1, 2, 3]) };
        assert_eq!(claims.probers(), [0, 2, 1, 3].map(NodeId));
        let measured = |between| {
            let first = [(0, 2, 930), (2, 1, between), (1, 3, 930), (3, 0, between)];
            let later = [(0, 2, 930), (2, 0, 930), (1, 3, 930), (3, 1, 930)];
            let cluster = settled(&claims, &[first, later].concat());
            assert_eq!(ports(&cluster), [(0, 930), (1, 930), (2, 930), (3, 930)]);
            assert_eq!(cluster.core(), Some(rate(between)));
            cluster.in_a_ring().is_ring()
        };
        assert!(!measured(240), "sums are made inside racks");
        assert!(measured(900));
        // Of two rounds the faster one counts, and of two links the slower one.
        let twice = [(0, 2, 930), (2, 1, 300), (2, 1, 900), (3, 0, 850), (3, 0, 100), (1, 3, 930)];
        assert_eq!(settled(&claims, &twice).core(), Some(rate(850)));
        // Two interfaces carry twice as much, through ports and between racks.
        let two = Claims { interfaces: vec![2; 4], ..claims };
        let cluster = settled(&two, &twice);
        assert_eq!(cluster.core(), Some(rate(1700)));
        assert_eq!(ports(&cluster)[0], (0, 1800));
    }

    /// Node 2 has the slow port: all that it sends and receives is slow. Its partners are fast with
    /// others.
    #[test]
    fn a_port_carries_the_fastest_that_came_through_it() {
        let claims = claims(&[LinkRate::Measured; 4], &[0, 1, 2, 3]);
        let first = [(0, 1, 938), (1, 2, 95), (2, 3, 96), (3, 0, 890)];
        let second = [(0, 2, 91), (2, 0, 94), (1, 3, 902), (3, 1, 912)];
        let cluster = settled(&claims, &[first, second].concat());
        assert_eq!(ports(&cluster), [(0, 900), (1, 900), (2, 95), (3, 900)]);
        assert_eq!(cluster.lanes(), 1);
        // What comes in as fast as anywhere and leaves slowly is slow.
        let cluster = settled(&claims, &[(0, 1, 900), (1, 2, 900), (2, 3, 90), (3, 0, 900)]);
        assert_eq!(ports(&cluster), [(0, 900), (1, 900), (2, 90), (3, 90)]);
    }

    /// The cores were busy while ports of 10 Gbit/s were measured.
    #[test]
    fn fast_ports_that_were_measured_count_as_equal() {
        let claims = claims(&[LinkRate::Measured; 4], &[0, 1, 2, 3]);
        let noisy = [(0, 1, 8_800), (1, 2, 8_700), (2, 3, 5_600), (3, 0, 9_100)];
        let equal: Vec<_> = (0..4).map(|port| (port, 8_700)).collect();
        assert_eq!(ports(&settled(&claims, &noisy)), equal);
        assert!(settled(&claims, &noisy).in_a_ring().is_ring());
        let noisier = [(0, 1, 6_200), (1, 2, 6_200), (2, 3, 2_400), (3, 0, 6_200)];
        assert!(settled(&claims, &noisier).in_a_ring().is_ring());
        // Above 11 Gbit/s a port counts as one of 40: so do its equals that were measured below that.
        let threshold = [(0, 1, 12_000), (1, 2, 12_000), (2, 3, 9_900), (3, 0, 12_000)];
        assert!(settled(&claims, &threshold).in_a_ring().is_ring());
        let of_cores = [(0, 1, 24_000), (1, 2, 24_000), (2, 3, 3_500), (3, 0, 24_000)];
        assert!(settled(&claims, &of_cores).in_a_ring().is_ring());
        // Slow ones are told apart.
        let slow = [(0, 1, 9_000), (1, 0, 9_000), (2, 3, 940), (3, 2, 940)];
        assert_eq!(ports(&settled(&claims, &slow)), [(0, 9_000), (1, 9_000), (2, 940), (3, 940)]);
    }

    /// The same at 1 Gbit/s. What racks exchange is told apart: sums inside racks cross their links with fewer
    /// bytes.
    #[test]
    fn ports_that_are_measured_beside_load_count_as_equal() {
        let claims = claims(&[LinkRate::Measured; 4], &[0, 1, 2, 3]);
        let busy = [(0, 1, 970), (1, 2, 560), (2, 3, 940), (3, 0, 960)];
        let cluster = settled(&claims, &busy);
        assert_eq!(ports(&cluster), [(0, 940), (1, 940), (2, 940), (3, 940)]);
        assert!(cluster.in_a_ring().is_ring());
        let other = [(0, 1, 2_350), (1, 0, 2_350), (2, 3, 940), (3, 2, 940)];
        assert_eq!(ports(&settled(&claims, &other)), [(0, 2_400), (1, 2_400), (2, 940), (3, 940)]);
        let claims = Claims { racks: vec![0, 0, 1, 1], ..claims };
        let halves = [(0, 1, 940), (1, 2, 470), (2, 3, 940), (3, 0, 470), (1, 0, 940), (3, 2, 940)];
        let cluster = settled(&claims, &halves);
        assert_eq!((cluster.core(), cluster.in_a_ring().is_ring()), (Some(rate(470)), false));
        // Racks that are joined as well as their hosts keep the ring beside load, too.
        let busy = [(0, 1, 960), (1, 2, 630), (2, 3, 960), (3, 0, 630), (1, 0, 700), (3, 2, 700)];
        assert!(settled(&claims, &busy).in_a_ring().is_ring());
    }

    #[test]
    fn nodes_of_one_host_share_a_port_unless_a_rate_is_given() {
        use LinkRate::{Given, Measured};
        let given = Given(rate(100));
        let claims = claims(&[Measured, Measured, given, Measured], &[0, 1, 0, 0]);
        let cluster = settled(&claims, &[(0, 1, 10_000), (1, 0, 9_000)]);
        assert_eq!(ports(&cluster), [(0, 9_000), (1, 9_000), (2, 100), (0, 9_000)]);
    }

    #[test]
    fn a_node_with_a_budget_smaller_than_its_port_has_a_port_of_that_rate() {
        use LinkRate::{AtMost, Measured};
        let (narrow, wide) = (AtMost(rate(100)), AtMost(rate(2_000)));
        let claims = claims(&[Measured, narrow, wide, Measured], &[0, 0, 1, 1]);
        assert_eq!(claims.probers().len(), 2);
        let cluster = settled(&claims, &[(0, 2, 940), (2, 0, 940)]);
        assert_eq!(ports(&cluster), [(0, 940), (1, 100), (2, 940), (2, 940)]);
    }

    #[test]
    fn nodes_of_a_host_that_give_the_same_rate_share_a_port() {
        let given = claims(&[LinkRate::Given(rate(1000)); 4], &[0, 0, 0, 1]);
        assert_eq!(ports(&settled(&given, &[])), [(0, 1000), (0, 1000), (0, 1000), (1, 1000)]);
        // Two budgets of 400 Mbit/s are more than half of a port of 700.
        let budgets = claims(&[LinkRate::AtMost(rate(400)); 4], &[0, 0, 1, 1]);
        let seen = [(0, 2, 700), (2, 0, 700)];
        assert_eq!(ports(&settled(&budgets, &seen)), [(0, 700), (0, 700), (1, 700), (1, 700)]);
    }

    #[test]
    fn nodes_of_a_host_have_the_lanes_of_one_alone_if_there_are_cores_for_them() {
        let lanes = |most, mbit| {
            let claims = claims(&[LinkRate::Measured; 6], &[0, 0, 0, 1, 1, 1]);
            settled(&Claims { lanes: most, ..claims }, &[(0, 3, mbit), (3, 0, mbit)]).lanes()
        };
        assert_eq!([8, 4, 2, 1].map(|most| lanes(most, 1_000)), [1; 4]);
        assert_eq!([8, 4, 2, 1].map(|most| lanes(most, 10_000)), [2, 2, 1, 1]);
        assert_eq!([8, 4, 2, 1].map(|most| lanes(most, 40_000)), [4, 2, 2, 1]);
    }

    #[test]
    fn lanes_are_by_the_slowest_port_unless_they_are_told() {
        let mut claims = claims(&[LinkRate::Measured; 2], &[0, 1]);
        let lanes = |claims: &Claims, mbit| settled(claims, &[(0, 1, mbit)]).lanes();
        assert_eq!([940, 9_400, 23_000].map(|mbit| lanes(&claims, mbit)), [1, 2, 3]);
        assert_eq!(claims.draft(settled(&claims, &[])).unwrap().lanes(), 1);
        claims.lanes = 2;
        assert_eq!([940, 9_400, 23_000].map(|mbit| lanes(&claims, mbit)), [1, 2, 2]);
        claims.lanes = 4;
        // Nothing is known.
        assert_eq!(settled(&claims, &[]).lanes(), 2);
        assert_eq!(ports(&settled(&claims, &[])), []);
        let mut here = self::claims(&[LinkRate::Measured; 2], &[0, 0]);
        assert_eq!(settled(&here, &[]).lanes(), 1);
        here.lanes_by_rate = false;
        assert_eq!(settled(&here, &[]).lanes(), 8);
        claims.lanes_by_rate = false;
        assert_eq!(lanes(&claims, 940), 4);
        assert_eq!(claims.draft(settled(&claims, &[])).unwrap().lanes(), 4);
    }

    #[test]
    fn the_book_waits_for_all_nodes_and_a_round_for_those_that_measure() {
        let claims = claims(&[LinkRate::Measured; 3], &[0, 1, 1]);
        let cluster = Cluster::new(3, Servers::Colocated, 1).unwrap();
        let probers = claims.probers();
        let mut measuring = Measuring::new(claims, probers);
        let mut post = |node: u16, round: u8, sent: Option<(NodeId, Rate)>| {
            let asker = Asker { connection: node.into(), request: None };
            let post = Measured { node: NodeId(node), round, sent, patience_ms: 1000 };
            match measuring.handle_post(&cluster, asker, post, Instant::now()) {
                Step::Tell(replies) => replies
                    .into_iter()
                    .map(|reply| reply.body.value()["type"].as_str().unwrap().to_owned())
                    .collect(),
                Step::Settled(askers) => vec![format!("settled for {}", askers.len())],
            }
        };
        assert_eq!(post(0, 0, None), [""; 0]);
        assert_eq!(post(2, 0, None), ["refused"]);
        assert_eq!(post(0, 0, None), ["refused"]);
        assert_eq!(post(1, 0, None), ["proceed"; 2]);
        assert_eq!(post(2, ROUNDS, None), [""; 0]);
        assert_eq!(post(0, 1, Some((NodeId(1), rate(7)))), [""; 0]);
        assert_eq!(post(1, 1, None), ["proceed"; 2]);
        assert_eq!(post(1, ROUNDS + 1, None), ["refused"]);
        assert_eq!(post(1, ROUNDS, None), [""; 0]);
        assert_eq!(post(0, ROUNDS, None), ["settled for 3"]);
        assert_eq!(measuring.seen(), [(NodeId(0), NodeId(1), rate(7))]);
    }
}
