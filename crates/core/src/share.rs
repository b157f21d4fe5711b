//! How much of every layer a server holds where ports carry unequal rates.
//!
//! With equal rates every server holds as much as any other, and nothing here is asked.

use crate::{Cluster, NodeId};

/// How much of every layer each server of `cluster` holds, in thousandths, if that is not the same
/// for all. Servers that hold nothing are not listed. The others are listed by their shares, the
/// largest first.
///
/// The busiest port is as little busy as it can be. What stays is a worker's own gradient, which
/// leaves through its port and comes back: no step is shorter than that takes at the slowest worker.
pub fn shares(cluster: &Cluster) -> Option<Vec<(NodeId, u32)>> {
    let traffic = Traffic::new(cluster)?;
    let share = |node: NodeId| {
        let port = traffic.ports.get(usize::from(cluster.ports().get(node.index())?.number))?;
        Some((node, (port.share / port.servers as f64 * 1000.0).round() as u32))
    };
    let mut shares: Vec<_> = cluster.server_ids().filter_map(share).collect();
    let even = shares.iter().all(|(_, share)| *share == shares[0].1);
    shares.retain(|(_, share)| *share > 0);
    shares.sort_by_key(|(_, share)| std::cmp::Reverse(*share));
    (!even && !shares.is_empty()).then_some(shares)
}

/// The traffic of a cluster's ports, each way. The unit is what a layer has.
///
/// Behind a port are `w` of the `W` workers, and servers that hold the part `s` of the layer. Each
/// of the workers sends its gradient, except what is held behind the same port. The servers send
/// their results to the other workers. Together that is `w (1 - s) + s (W - w)`. As much comes in.
pub(crate) struct Traffic {
    /// By number.
    ports: Vec<Behind>,
    workers: f64,
}

/// What is behind a port.
#[derive(Clone, Default)]
struct Behind {
    rate: f64,
    workers: f64,
    servers: usize,
    /// The part of every layer that its servers hold.
    share: f64,
}

impl Traffic {
    /// The traffic with the shares that make the busiest port least busy. `None` if all ports carry
    /// the same.
    pub(crate) fn new(cluster: &Cluster) -> Option<Self> {
        let ports = cluster.ports();
        let first = ports.first()?;
        if ports.iter().all(|port| port.rate == first.rate) {
            return None;
        }
        let mut behind = vec![Behind::default(); ports.len()];
        for (node, port) in cluster.node_ids().zip(ports) {
            let role = cluster.role(node)?;
            let place = &mut behind[usize::from(port.number)];
            place.rate = port.rate.bits() as f64;
            place.workers += f64::from(u8::from(role.worker));
            place.servers += usize::from(role.server);
        }
        behind.retain(|port| port.rate > 0.0);
        let mut traffic = Self { ports: behind, workers: cluster.workers() as f64 };
        traffic.share_out();
        Some(traffic)
    }

    /// What the busiest port carries for a layer by parameter server, in layers. All ports are
    /// counted as if they were as fast as the slowest port of a worker.
    pub(crate) fn matrices(&self) -> f64 {
        let growth = |port: &Behind| self.workers - 2.0 * port.workers;
        self.busiest(|port| port.workers + growth(port) * port.share)
    }

    /// What the busiest port carries for a layer by factors, in factors of one worker. Ports are
    /// counted as in [`matrices`](Self::matrices).
    pub(crate) fn factors(&self) -> f64 {
        self.busiest(|port| port.workers * (self.workers - port.workers))
    }

    fn busiest(&self, load: impl Fn(&Behind) -> f64) -> f64 {
        let of_workers = self.ports.iter().filter(|port| port.workers > 0.0);
        let slowest = of_workers.map(|port| port.rate).fold(f64::INFINITY, f64::min);
        self.ports.iter().map(|port| load(port) * slowest / port.rate).fold(0.0, f64::max)
    }

    /// Fills all ports to the same time, beginning with the one that has the shortest. A port that
    /// takes longer than that for its own workers' gradients gets nothing.
    fn share_out(&mut self) {
        let workers = self.workers;
        // Behind half of the workers or more, shards do not add traffic to any port.
        let central = |port: &Behind| port.servers > 0 && 2.0 * port.workers >= workers;
        let centres = self.ports.iter().filter(|port| central(port)).count();
        if centres > 0 {
            for port in self.ports.iter_mut().filter(|port| central(port)) {
                port.share = 1.0 / centres as f64;
            }
            return;
        }
        // So the traffic of every port with servers grows with its share.
        let growth = |port: &Behind| workers - 2.0 * port.workers;
        let own = |port: &Behind| port.workers / port.rate;
        let mut serving: Vec<_> = self.ports.iter_mut().filter(|port| port.servers > 0).collect();
        serving.sort_by(|a, b| own(a).total_cmp(&own(b)));
        // A port that is filled to `level` has (level * rate - workers) / growth, and all have 1.
        let (mut level, mut base, mut slope) = (f64::INFINITY, 1.0, 0.0);
        for port in &serving {
            if own(port) >= level {
                break;
            }
            base += port.workers / growth(port);
            slope += port.rate / growth(port);
            level = base / slope;
        }
        for port in serving {
            port.share = ((level * port.rate - port.workers) / growth(port)).max(0.0);
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

    /// A cluster whose nodes have ports of these rates and numbers.
    fn on_ports(workers: u16, servers: Servers, ports: &[(u64, u16)]) -> Cluster {
        let port = |&(mbit, number): &(u64, u16)| Port {
            number,
            rate: Rate::new(mbit * 1_000_000).unwrap(),
        };
        let cluster = Cluster::new(workers, servers, 1).unwrap();
        cluster.with_ports(ports.iter().map(port).collect()).unwrap()
    }

    fn by_node(cluster: &Cluster) -> Option<Vec<(u16, u32)>> {
        Some(shares(cluster)?.into_iter().map(|(node, share)| (node.0, share)).collect())
    }

    #[test]
    fn equal_ports_have_no_shares_of_their_own() {
        assert_eq!(shares(&Cluster::new(4, Servers::Colocated, 1).unwrap()), None);
        assert_eq!(shares(&cluster(4, Servers::Colocated, &[1000; 4])), None);
        // Not even where hosts have unequal numbers of nodes.
        let uneven = [(1000, 0), (1000, 0), (1000, 0), (1000, 1)];
        assert_eq!(shares(&on_ports(4, Servers::Colocated, &uneven)), None);
        // Two workers send each other what they do not hold, whoever holds what.
        assert_eq!(shares(&cluster(2, Servers::Colocated, &[1000, 100])), None);
    }

    /// The port of 100 Mbit/s has enough to do with its worker's gradient: ten layers' time, where
    /// the others have one and two thirds. With a quarter of the shards it had fifteen.
    #[test]
    fn a_port_that_is_slower_than_needed_gets_nothing() {
        let one_slow = cluster(4, Servers::Colocated, &[1000, 1000, 100, 1000]);
        assert_eq!(by_node(&one_slow), Some(vec![(0, 333), (1, 333), (3, 333)]));
        let traffic = Traffic::new(&one_slow).unwrap();
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

    #[test]
    fn nodes_of_one_host_share_its_port() {
        // Two hosts of two nodes and one of a single node, at half the rate: its gradient alone
        // takes as long as those of both nodes of another host. It gets a part: the time of all is
        // (2 + a)/2 = (1 + 3c)/1 with 2a + c = 1.
        let ports = [(1000, 0), (1000, 0), (1000, 1), (1000, 1), (500, 2)];
        let cluster = on_ports(5, Servers::Colocated, &ports);
        assert_eq!(by_node(&cluster), Some(vec![(0, 231), (1, 231), (2, 231), (3, 231), (4, 77)]));
        // Most workers are behind the first port: what they hold need not leave it.
        let ports = [(1000, 0), (1000, 0), (1000, 0), (500, 1)];
        let cluster = on_ports(4, Servers::Colocated, &ports);
        assert_eq!(by_node(&cluster), Some(vec![(0, 333), (1, 333), (2, 333)]));
    }

    proptest! {
        #[test]
        fn shares_are_all_there_is_and_no_others_make_the_busiest_port_less_busy(
            mbit in proptest::collection::vec(50u64..2000, 3..12), give: usize, take: usize,
        ) {
            let cluster = cluster(mbit.len() as u16, Servers::Colocated, &mbit);
            if let Some(mut traffic) = Traffic::new(&cluster) {
                let sum: f64 = traffic.ports.iter().map(|port| port.share).sum();
                prop_assert!((sum - 1.0).abs() < 1e-9);
                let best = traffic.matrices();
                // No worker's own gradient can be taken off its port.
                prop_assert!(best >= 1.0 - 1e-9);
                let (give, take) = (give % mbit.len(), take % mbit.len());
                let moved = traffic.ports[give].share.min(0.01);
                traffic.ports[give].share -= moved;
                traffic.ports[take].share += moved;
                prop_assert!(traffic.matrices() >= best - 1e-9);
            }
        }

        #[test]
        fn a_faster_port_never_gets_less(
            mut mbit in proptest::collection::vec(50u64..2000, 3..12), which: usize, more in 1u64..500,
        ) {
            let share = |mbit: &[u64], node: usize| {
                let traffic = Traffic::new(&cluster(mbit.len() as u16, Servers::Colocated, mbit));
                traffic.map_or(1.0 / mbit.len() as f64, |traffic| traffic.ports[node].share)
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
