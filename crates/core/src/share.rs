//! How much of every layer a server holds where hosts are unequal: their ports carry unequal rates,
//! or they have unequal numbers of servers.
//!
//! With equal hosts every server holds as much as any other, and nothing here is asked.

use crate::{Cluster, NodeId, Tree};
use std::collections::BTreeMap;

/// How much of every layer each server of `cluster` holds, in thousandths, if that is not the same
/// for all. Servers that hold nothing are not listed. The others are listed by their shares, the
/// largest first.
///
/// The busiest port is as little busy as it can be. What stays is a host's own sum, which leaves
/// through its port and comes back: no step is shorter than that takes at the slowest host. In a ring
/// every port carries about as much as any other, whatever its host holds, so hosts hold equal parts.
pub fn shares(cluster: &Cluster) -> Option<Vec<(NodeId, u32)>> {
    let level = cluster.is_ring().then(|| cluster.clone().with_level_ports());
    let cluster = level.as_ref().unwrap_or(cluster);
    let tree = Tree::new(cluster);
    let traffic = Traffic::new(cluster, &tree);
    let share = |node: NodeId| {
        let host = traffic.hosts.get(usize::from(tree.host(node)))?;
        Some((node, (host.share / host.servers as f64 * 1000.0).round() as u32))
    };
    let mut shares: Vec<_> = cluster.server_ids().filter_map(share).collect();
    let even = shares.iter().all(|(_, share)| *share == shares[0].1);
    shares.retain(|(_, share)| *share > 0);
    shares.sort_by_key(|(_, share)| std::cmp::Reverse(*share));
    (!even && !shares.is_empty()).then_some(shares)
}

/// The traffic of the hosts' ports, each way. The unit is what a layer has.
///
/// The workers of a host send one stream. There are `W` hosts with workers. A host has `w` streams,
/// which is 1 or 0, and servers that hold the part `s` of the layer. It sends its stream, except what
/// its own servers hold. Its servers send their results to the other hosts. Together that is
/// `w (1 - s) + s (W - w)`. As much comes in.
pub(crate) struct Traffic {
    /// By number.
    hosts: Vec<Behind>,
    /// Hosts with workers.
    streams: f64,
    workers: f64,
}

/// What is behind a host's port.
#[derive(Clone, Default)]
struct Behind {
    /// In any unit, if all ports carry the same.
    rate: f64,
    workers: f64,
    servers: usize,
    /// The part of every layer that its servers hold.
    share: f64,
}

impl Behind {
    /// 1 if the host has workers.
    fn streams(&self) -> f64 {
        self.workers.min(1.0)
    }
}

impl Traffic {
    /// The traffic with the shares that make the busiest port least busy.
    pub(crate) fn new(cluster: &Cluster, tree: &Tree) -> Self {
        let count = tree.workers_by_host().len();
        let mut hosts = vec![Behind::default(); count];
        let mut rates: Vec<BTreeMap<u16, f64>> = vec![BTreeMap::new(); count];
        for node in cluster.node_ids() {
            let at = usize::from(tree.host(node));
            let role = cluster.role(node);
            hosts[at].workers += f64::from(u8::from(role.is_some_and(|role| role.worker)));
            hosts[at].servers += usize::from(role.is_some_and(|role| role.server));
            let port = cluster.ports().get(node.index());
            rates[at].extend(port.map(|port| (port.number, port.rate.bits() as f64)));
        }
        for (host, ports) in hosts.iter_mut().zip(rates) {
            // A host has the sum of its ports. Where nothing is known, all have the same.
            host.rate = if ports.is_empty() { 1.0 } else { ports.values().sum() };
        }
        let streams = hosts.iter().map(Behind::streams).sum();
        let mut traffic = Self { hosts, streams, workers: cluster.workers() as f64 };
        traffic.share_out();
        traffic
    }

    /// Whether all ports carry the same.
    pub(crate) fn has_equal_ports(&self) -> bool {
        self.hosts.iter().all(|host| host.rate == self.hosts[0].rate)
    }

    /// What the busiest port carries for a layer by parameter server, in layers. All ports are
    /// counted as if they were as fast as the slowest port of a worker.
    pub(crate) fn matrices(&self) -> f64 {
        let growth = |host: &Behind| self.streams - 2.0 * host.streams();
        self.busiest(|host| host.streams() + growth(host) * host.share)
    }

    /// What the busiest port carries for a layer by factors, in factors of one worker: those of its
    /// own workers to every other host, or those of all others. Ports are counted as in
    /// [`matrices`](Self::matrices).
    pub(crate) fn factors(&self) -> f64 {
        self.busiest(|host| match host.workers > 0.0 {
            true => (host.workers * (self.streams - 1.0)).max(self.workers - host.workers),
            false => 0.0,
        })
    }

    fn busiest(&self, load: impl Fn(&Behind) -> f64) -> f64 {
        let of_workers = self.hosts.iter().filter(|host| host.workers > 0.0);
        let slowest = of_workers.map(|host| host.rate).fold(f64::INFINITY, f64::min);
        self.hosts.iter().map(|host| load(host) * slowest / host.rate).fold(0.0, f64::max)
    }

    /// Fills all ports to the same time, beginning with the one that has the shortest. A port that
    /// takes longer than that for its own stream gets nothing.
    fn share_out(&mut self) {
        let streams = self.streams;
        // Behind half of the streams or more, shards do not add traffic to any port.
        let central = |host: &Behind| host.servers > 0 && 2.0 * host.streams() >= streams;
        let centre: usize = self.hosts.iter().filter(|h| central(h)).map(|h| h.servers).sum();
        if centre > 0 {
            for host in self.hosts.iter_mut().filter(|host| central(host)) {
                host.share = host.servers as f64 / centre as f64;
            }
            return;
        }
        // So the traffic of every port with servers grows with its share.
        let growth = |host: &Behind| streams - 2.0 * host.streams();
        let own = |host: &Behind| host.streams() / host.rate;
        let mut serving: Vec<_> = self.hosts.iter_mut().filter(|host| host.servers > 0).collect();
        serving.sort_by(|a, b| own(a).total_cmp(&own(b)));
        // A port that is filled to `level` has (level * rate - streams) / growth, and all have 1.
        let (mut level, mut base, mut slope) = (f64::INFINITY, 1.0, 0.0);
        for host in &serving {
            if own(host) >= level {
                break;
            }
            base += host.streams() / growth(host);
            slope += host.rate / growth(host);
            level = base / slope;
        }
        for host in serving {
            host.share = ((level * host.rate - host.streams()) / growth(host)).max(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Servers;
    use crate::port::{Port, Rate};
    use proptest::prelude::*;

    /// A cluster whose nodes have a port each, of these rates in Mbit/s.
    fn cluster(workers: u16, servers: Servers, mbit: &[u64]) -> Cluster {
        on_ports(workers, servers, &mbit.iter().copied().zip(0..).collect::<Vec<_>>())
    }

    /// A cluster on hosts of these numbers, with ports of these rates.
    fn on_ports(workers: u16, servers: Servers, ports: &[(u64, u16)]) -> Cluster {
        let port = |&(mbit, number): &(u64, u16)| Port {
            number,
            rate: Rate::new(mbit * 1_000_000).unwrap(),
        };
        let cluster = Cluster::new(workers, servers, 1).unwrap();
        let cluster = cluster.with_ports(ports.iter().map(port).collect()).unwrap();
        cluster.with_hosts(ports.iter().map(|(_, host)| *host).collect(), Vec::new()).unwrap()
    }

    fn traffic(cluster: &Cluster) -> Traffic {
        Traffic::new(cluster, &Tree::new(cluster))
    }

    fn by_node(cluster: &Cluster) -> Option<Vec<(u16, u32)>> {
        Some(shares(cluster)?.into_iter().map(|(node, share)| (node.0, share)).collect())
    }

    #[test]
    fn equal_ports_have_no_shares_of_their_own() {
        assert_eq!(shares(&Cluster::new(4, Servers::Colocated, 1).unwrap()), None);
        assert_eq!(shares(&cluster(4, Servers::Colocated, &[1000; 4])), None);
        assert_eq!(
            shares(&on_ports(4, Servers::Colocated, &[(1000, 0), (1000, 0), (1000, 1), (1000, 1)])),
            None
        );
        // Two hosts send each other what they do not hold, whoever holds what.
        let uneven = [(1000, 0), (1000, 0), (1000, 0), (1000, 1)];
        assert_eq!(shares(&on_ports(4, Servers::Colocated, &uneven)), None);
        assert_eq!(shares(&cluster(2, Servers::Colocated, &[1000, 100])), None);
    }

    /// The port of 100 Mbit/s has enough to do with its worker's gradient: ten layers' time, where
    /// the others have one and two thirds. With a quarter of the shards it had fifteen.
    #[test]
    fn a_port_that_is_slower_than_needed_gets_nothing() {
        let one_slow = cluster(4, Servers::Colocated, &[1000, 1000, 100, 1000]);
        assert_eq!(by_node(&one_slow), Some(vec![(0, 333), (1, 333), (3, 333)]));
        let traffic = traffic(&one_slow);
        assert_eq!((traffic.matrices(), traffic.factors()), (1.0, 3.0));
    }

    /// b + c = 1 with (1 + 2b)/4 = (1 + 2c)/3 for a pair of each.
    #[test]
    fn ports_that_are_a_little_slower_get_less() {
        let cluster = cluster(4, Servers::Colocated, &[4000, 3000, 4000, 3000]);
        assert_eq!(by_node(&cluster), Some(vec![(0, 357), (2, 357), (1, 143), (3, 143)]));
    }

    #[test]
    fn dedicated_servers_hold_shares_by_their_rates() {
        let some = cluster(2, Servers::Dedicated(3), &[1000, 1000, 2500, 5000, 2500]);
        assert_eq!(by_node(&some), Some(vec![(3, 500), (2, 250), (4, 250)]));
    }

    /// A host sends one stream, however many workers it has: hosts hold equal parts.
    #[test]
    fn nodes_of_one_host_share_its_part() {
        let ports = [0, 0, 0, 1, 2, 2].map(|host| (1000, host));
        let cluster = on_ports(6, Servers::Colocated, &ports);
        let shares = vec![(3, 333), (4, 167), (5, 167), (0, 111), (1, 111), (2, 111)];
        assert_eq!(by_node(&cluster), Some(shares));
        let traffic = traffic(&cluster);
        assert!((traffic.matrices() - 4.0 / 3.0).abs() < 1e-9, "{}", traffic.matrices());
        // The first host sends three workers' factors to two hosts.
        assert_eq!(traffic.factors(), 6.0);
        // Two hosts of two nodes, and one at half their rate: its own stream takes longer than all
        // that the others have to do.
        let ports = [(1000, 0), (1000, 0), (1000, 1), (1000, 1), (500, 2)];
        let cluster = on_ports(5, Servers::Colocated, &ports);
        assert_eq!(by_node(&cluster), Some(vec![(0, 250), (1, 250), (2, 250), (3, 250)]));
    }

    proptest! {
        #[test]
        fn shares_are_all_there_is_and_no_others_make_the_busiest_port_less_busy(
            mbit in proptest::collection::vec(50u64..2000, 3..12), give: usize, take: usize,
        ) {
            let cluster = cluster(mbit.len() as u16, Servers::Colocated, &mbit);
            {
                let mut traffic = traffic(&cluster);
                let sum: f64 = traffic.hosts.iter().map(|port| port.share).sum();
                prop_assert!((sum - 1.0).abs() < 1e-9);
                let best = traffic.matrices();
                // No worker's own gradient can be taken off its port.
                prop_assert!(best >= 1.0 - 1e-9);
                let (give, take) = (give % mbit.len(), take % mbit.len());
                let moved = traffic.hosts[give].share.min(0.01);
                traffic.hosts[give].share -= moved;
                traffic.hosts[take].share += moved;
                prop_assert!(traffic.matrices() >= best - 1e-9);
            }
        }

        #[test]
        fn a_faster_port_never_gets_less(
            mut mbit in proptest::collection::vec(50u64..2000, 3..12), which: usize, more in 1u64..500,
        ) {
            let share = |mbit: &[u64], node: usize| {
                traffic(&cluster(mbit.len() as u16, Servers::Colocated, mbit)).hosts[node].share
            };
            let which = which % mbit.len();
            let before = share(&mbit, which);
            for other in 0..mbit.len() {
                if mbit[other] > mbit[which] {
                    prop_assert!(share(&mbit, other) >= before - 1e-9);
                }
            }
            mbit[which] += more;
            prop_assert!(share(&mbit, which) >= before - 1e-9);
        }
    }
}
