//! How what may be under way to a host's port is shared out among the links that end there.

use crate::port::{are_level, holds_what_waits, lone_window, window, window_of_two_queues};
use crate::{Cluster, NodeId, Port, Rate, Role, Tree};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The receive windows of one node's links: a part of the port's budget for each.
///
/// Every other host has an equal part, because it sends as much as any other, by few connections or by
/// many. A server's part may be smaller than this port allows, because it sends to more hosts than this
/// one hears: what waits at the server's port makes acknowledgements late, and so all that comes the
/// other way. In a ring, large layers come from one host, whose port is as fast as this one: its links have
/// as much as the way holds ([`lone_window`]), or as two queues hold ([`Windows::at_ports`]). That is not part
/// of the budget, of which half is for what goes straight. Giving it all of the budget made steps of eight
/// nodes at 1 Gbit/s 6% to 10% longer. Nodes that this one exchanges no sums with have a small window.
#[derive(Debug)]
pub struct Windows {
    tree: Tree,
    host: u16,
    lanes: usize,
    rate: Option<Rate>,
    /// In how many parts the budget is cut, of which one is for what goes straight.
    parts: usize,
    /// Nodes on this host.
    here: usize,
    /// Nodes on other hosts that anything is exchanged with.
    partners: usize,
    /// By node: the hosts that it exchanges sums with, if it is a worker or a server only. Nodes that
    /// are both hear as many hosts as they send to.
    reach: Vec<usize>,
    straight: Senders,
    ring: Senders,
    /// By node, where ports are known to be level: what its own port holds at most, if that is known.
    queues: Vec<Option<u64>>,
}

/// Who sends sums or results to a host.
#[derive(Debug)]
struct Senders {
    /// By host: connections by which these come, to any node of the receiving host.
    connections: BTreeMap<u16, usize>,
    /// Those who send to the one node itself.
    own: Vec<NodeId>,
}

impl Windows {
    /// The windows of node `me`, whose links have `lanes` lanes each, at a port of `rate` if that is
    /// known. `summed`: sums are made inside hosts and racks, where there are any.
    pub fn new(
        cluster: &Cluster,
        me: NodeId,
        lanes: usize,
        rate: Option<Rate>,
        summed: bool,
    ) -> Self {
        let tree = Tree::new(cluster);
        let host = tree.host(me);
        let (here, away): (Vec<NodeId>, Vec<NodeId>) =
            cluster.node_ids().partition(|node| tree.host(*node) == host);
        let partners = |node: NodeId| {
            let mut partners = cluster.partners(node);
            partners.retain(|partner| away.binary_search(partner).is_ok());
            partners
        };
        // Workers and servers: between two workers that hold no shards only factors pass.
        let sums = |a: NodeId, b: NodeId| {
            let roles = cluster.role(a).zip(cluster.role(b));
            roles.is_some_and(|(a, b)| a.worker && b.server || a.server && b.worker)
        };
        let is_flat = tree.is_flat() || !summed;
        let straight = Senders::new(&tree, &here, me, |node| match is_flat {
            true => partners(node).into_iter().filter(|other| sums(node, *other)).collect(),
            false => tree.senders(node, false),
        });
        let ring = Senders::new(&tree, &here, me, |node| match cluster.is_ring() {
            true => tree.senders(node, true),
            false => Vec::new(),
        });
        let parts = 1 + usize::from(cluster.is_ring());
        let (here, partners) = (here.len(), partners(me).len());
        let hosts_of = |wanted: fn(&Role) -> bool| -> BTreeSet<u16> {
            let has = |node: &NodeId| cluster.role(*node).is_some_and(|role| wanted(&role));
            cluster.node_ids().filter(has).map(|node| tree.host(node)).collect()
        };
        let (working, serving) = (hosts_of(|role| role.worker), hosts_of(|role| role.server));
        let reach = cluster.node_ids().map(|node| {
            let hosts = match cluster.role(node) {
                Some(Role { worker: true, server: false }) => &serving,
                Some(Role { worker: false, server: true }) => &working,
                _ => return 0,
            };
            hosts.iter().filter(|host| **host != tree.host(node)).count()
        });
        let reach = reach.collect();
        Self {
            tree,
            host,
            lanes,
            rate,
            parts,
            here,
            partners,
            reach,
            straight,
            ring,
            queues: Vec::new(),
        }
    }

    /// The same where all nodes have these `ports`, and their own ports hold so much at most (`queues`, by
    /// node; `None` if it is not known). That decides about the window of a neighbour in a ring
    /// ([`window_of_two_queues`]).
    pub fn at_ports(mut self, ports: &[Port], queues: Vec<Option<u64>>) -> Self {
        let is_level = self.rate.is_some_and(|own| are_level(own, ports));
        self.queues = if is_level { queues } else { Vec::new() };
        self
    }

    /// The receive window of the link from `node`, over a way that takes `round_trip`, in bytes. The links
    /// of `node` have so many `lanes` for each of its ports.
    ///
    /// `None` if nothing bounds it. So it is for a node on this host. So it is for the only node elsewhere, if
    /// it has one lane, or if its port is level with this one and holds what waits there: one sender does
    /// not overflow a port that is as fast as its own. All its lanes have the same window then, because
    /// connections share a port in proportion to their windows.
    pub fn of(&self, node: NodeId, lanes: usize, round_trip: Option<Duration>) -> Option<usize> {
        let host = self.tree.host(node);
        if host == self.host {
            return None;
        }
        let connections = |senders: &Senders| {
            senders.connections.get(&host).copied().filter(|_| senders.own.contains(&node))
        };
        if let Some(links) = connections(&self.ring) {
            let (rate, links) = (self.rate, links * self.lanes.max(lanes));
            let queue = self.queues.get(node.index());
            let window = rate.zip(queue).and_then(|(r, q)| window_of_two_queues(r, links, *q));
            return Some(
                window.unwrap_or_else(|| lone_window(self.lanes, links, rate, round_trip)),
            );
        }
        let (count, shares, is_alone) = match connections(&self.straight) {
            Some(of_host) => {
                // The part of this port, or that of the sender's, whichever is smaller.
                let (hosts, reach) = (self.straight.connections.len(), self.reach[node.index()]);
                let count = self.parts * (hosts * self.lanes).max(reach * lanes);
                (count, of_host, self.parts * hosts.max(reach) * of_host == 1)
            }
            None => {
                let (parts, partners) = (self.parts, self.partners);
                (parts * partners * self.lanes, self.here, parts * partners * self.here == 1)
            }
        };
        let port = self.rate.zip(self.queues.get(node.index()));
        let holds = port.is_some_and(|(rate, queue)| holds_what_waits(rate, *queue));
        let is_free = is_alone && (count * shares == 1 || holds);
        (!is_free).then(|| window(count, shares, self.rate))
    }
}

impl Senders {
    fn new(
        tree: &Tree,
        here: &[NodeId],
        me: NodeId,
        senders: impl Fn(NodeId) -> Vec<NodeId>,
    ) -> Self {
        let mut connections = BTreeMap::new();
        for sender in here.iter().flat_map(|node| senders(*node)) {
            *connections.entry(tree.host(sender)).or_default() += 1;
        }
        Self { connections, own: senders(me) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Servers;

    const BUDGET: usize = 192 << 10;

    fn cluster(hosts: &[u16]) -> Cluster {
        let cluster = Cluster::new(hosts.len() as u16, Servers::Colocated, 1).unwrap();
        cluster.with_hosts(hosts.to_vec(), Vec::new()).unwrap()
    }

    fn of(cluster: &Cluster, me: u16, lanes: usize, from: u16) -> Option<usize> {
        Windows::new(cluster, NodeId(me), lanes, None, true).of(NodeId(from), lanes, None)
    }

    #[test]
    fn the_only_sender_and_neighbours_on_the_host_are_not_bounded() {
        let two = cluster(&[0, 1]);
        assert_eq!(of(&two, 0, 1, 1), None);
        let lanes_at = |rate: &str, queue| {
            let rate: Rate = rate.parse().unwrap();
            let ports = [0, 1].map(|number| Port { number, rate });
            let windows = Windows::new(&two, NodeId(0), 2, Some(rate), true);
            windows.at_ports(&ports, vec![queue; 2]).of(NodeId(1), 2, None)
        };
        let (short, long) = (Some(256 << 10), Some(2 << 20));
        assert_eq!([lanes_at("1gbit", short), lanes_at("10gbit", long)], [None; 2]);
        assert_eq!([lanes_at("10gbit", short), lanes_at("10gbit", None)], [Some(374_999); 2]);
        assert_eq!(of(&two, 0, 2, 1), Some(BUDGET / 2), "nothing is known of the port");
        assert_eq!(of(&cluster(&[0, 0, 1]), 0, 1, 1), None);
        assert_eq!(of(&cluster(&[0, 1, 1]), 0, 2, 1), Some(BUDGET / 4), "its host has two ranks");
    }

    #[test]
    fn all_hosts_have_equal_parts_without_a_ring() {
        let four = cluster(&[0, 1, 2, 3]);
        for from in 1..4 {
            assert_eq!(of(&four, 0, 1, from), Some(BUDGET / 3));
        }
        // Two connections of one host share what its neighbour with one connection has.
        let uneven = cluster(&[0, 1, 1, 2]);
        let apart = Windows::new(&uneven, NodeId(0), 1, None, false);
        let windows = [1, 2, 3].map(|from| apart.of(NodeId(from), 1, None));
        assert_eq!(windows, [BUDGET / 4, BUDGET / 4, BUDGET / 2].map(Some));
    }

    /// Eight workers and a box with four lanes. Each lane of the box has an interface, and all lanes of a
    /// worker have one. Results come from the box alone.
    #[test]
    fn what_waits_at_a_box_is_as_much_as_what_is_under_way_to_it() {
        let cluster = Cluster::new(8, Servers::Dedicated(1), 4).unwrap();
        let windows = |me, lanes| Windows::new(&cluster, NodeId(me), lanes, None, true);
        assert_eq!(windows(8, 1).of(NodeId(3), 4, None), Some(BUDGET / 8));
        assert_eq!(windows(0, 4).of(NodeId(8), 1, None), Some(BUDGET / 8));
        assert_eq!(
            windows(0, 4).of(NodeId(3), 4, None),
            Some(BUDGET / 32),
            "factors from a worker"
        );
        // One interface of it is that of a dedicated server like any other.
        let cluster = cluster.with_lanes(1).unwrap();
        assert_eq!([of(&cluster, 8, 1, 3), of(&cluster, 0, 1, 8)], [Some(BUDGET / 8); 2]);
        // A server beside each of two workers exchanges sums with one other host.
        let beside = Cluster::new(2, Servers::Dedicated(2), 1).unwrap();
        let beside = beside.with_hosts(vec![0, 1, 0, 1], Vec::new()).unwrap();
        assert_eq!(of(&beside, 0, 1, 3), Some(BUDGET / 2));
        // With two servers and three workers it is the ports of servers that have the most to send.
        let cluster = Cluster::new(3, Servers::Dedicated(2), 1).unwrap();
        assert_eq!([of(&cluster, 4, 1, 0), of(&cluster, 0, 1, 4)], [Some(BUDGET / 3); 2]);
    }

    #[test]
    fn the_neighbour_in_a_ring_has_a_window_of_its_own_and_all_others_share_half() {
        let ring = cluster(&[0, 1, 2, 3, 4, 5]).in_a_ring();
        let windows: Vec<_> = (1..6).filter_map(|from| of(&ring, 0, 1, from)).collect();
        let other = BUDGET / 10;
        assert_eq!(windows, [64 << 10, other, other, other, other]);
        // 10 Gbit/s for two round trips of 0.2 ms are 500 KB, for two lanes.
        let rate = "10gbit".parse().ok();
        let fast = Windows::new(&ring, NodeId(0), 2, rate, true);
        let far = Some(Duration::from_micros(200));
        assert_eq!(fast.of(NodeId(1), 2, far), Some(250_000));
        assert_eq!(fast.of(NodeId(1), 2, Some(Duration::from_micros(40))), Some(64 << 10));
        assert_eq!(fast.of(NodeId(1), 2, Some(Duration::from_millis(1))), Some(375_000));
    }

    /// What four links may have was measured with a host of four ranks. Lanes that are added to ranks must not
    /// add to it, or a short queue loses packets.
    #[test]
    fn lanes_of_several_ranks_have_no_more_together_than_ranks_with_one_lane() {
        let of_ring = |ranks: u16, lanes| {
            let hosts: Vec<u16> = (0..4).flat_map(|host| vec![host; ranks.into()]).collect();
            let ring = cluster(&hosts).in_a_ring();
            let windows = Windows::new(&ring, NodeId(0), lanes, "10gbit".parse().ok(), true);
            let near = Some(Duration::from_micros(40));
            let window = windows.of(NodeId(ranks), lanes, near).unwrap();
            window * lanes * usize::from(ranks)
        };
        let together: Vec<_> =
            [1, 2, 4, 8].map(|ranks| [1, 2, 4].map(|l| of_ring(ranks, l))).into();
        let four = 4 * (64 << 10);
        for [one, two, more] in together {
            assert!(two.max(more) <= one.max(four), "{one}, {two}, {more}");
        }
    }

    #[test]
    fn the_window_of_a_neighbour_covers_two_queues_where_ports_are_known_to_be_equal() {
        let far = Some(Duration::from_micros(200));
        let ports = |rates: [&str; 6]| -> Vec<Port> {
            let port = |(number, rate): (u16, &str)| Port { number, rate: rate.parse().unwrap() };
            (0..).zip(rates).map(port).collect()
        };
        let at = |hosts: &[u16], lanes, own: &str, others: &str, queue, from| {
            let ring = cluster(hosts).in_a_ring();
            let windows = Windows::new(&ring, NodeId(0), lanes, own.parse().ok(), true);
            let ports = ports([own, own, own, own, own, others]);
            windows.at_ports(&ports, vec![queue; 6]).of(NodeId(from), lanes, far)
        };
        let of = |hosts: &[u16], lanes, own: &str, others: &str, from| {
            at(hosts, lanes, own, others, None, from)
        };
        let six = [0, 1, 2, 3, 4, 5];
        assert_eq!(of(&six, 1, "940mbit", "1gbit", 1), Some(512 << 10));
        assert_eq!(of(&six, 1, "200mbit", "200mbit", 1), Some(512 << 10));
        assert_eq!(of(&six, 1, "1gbit", "1gbit", 2), Some(BUDGET / 10), "what goes straight");
        for (own, others) in [("1gbit", "10gbit"), ("200mbit", "1gbit"), ("100mbit", "100mbit")] {
            assert_eq!(of(&six, 1, own, others, 1), Some(64 << 10), "{own}, {others}");
        }
        assert_eq!(of(&six, 2, "1gbit", "1gbit", 1), Some(64 << 10), "two lanes are two links");
        let pairs = [0, 0, 1, 1, 2, 2];
        let near = [2, 3, 4, 5].map(|from| of(&pairs, 1, "1gbit", "1gbit", from));
        assert!(!near.contains(&Some(512 << 10)), "two ranks are two links: {near:?}");
        // A faster port has to hold 1.2 ms: then its links have 1.7 ms together.
        let fast = |queue, lanes, others| at(&six, lanes, "10gbit", others, queue, 1);
        assert_eq!(fast(Some(2 << 20), 4, "10gbit"), Some(531_250));
        assert_eq!(fast(Some(2 << 20), 2, "9.4gbit"), Some(1 << 20), "no window is larger");
        let small = fast(Some(1 << 20), 2, "10gbit");
        assert_eq!([small, fast(None, 2, "10gbit")], [Some(250_000); 2]);
        assert_eq!(fast(Some(2 << 20), 2, "25gbit"), small, "a neighbour is faster");
        // A queue that does not hold 1.2 ms of 25 Gbit/s, but three quarters of which are much.
        let faster = |queue, lanes| at(&six, lanes, "25gbit", "25gbit", queue, 1);
        assert_eq!(faster(Some(4 << 20), 6), Some(885_416));
        assert_eq!(faster(Some(2 << 20), 4), Some(384 << 10));
        assert_eq!(faster(Some(2 << 20), 8), faster(None, 8), "too many share it");
        assert_eq!(faster(Some(256 << 10), 1), faster(None, 1), "too short for one");
        assert_eq!(at(&six, 1, "100mbit", "100mbit", Some(2 << 20), 1), Some(64 << 10));
    }

    /// Ranks of one host share its port: the windows of all that goes straight to any of them fit the
    /// budget.
    #[test]
    fn what_goes_straight_to_a_host_fits_its_ports_budget() {
        for hosts in [&[0, 0, 1, 1, 2, 2][..], &[0, 0, 0, 1, 2, 2, 2, 2], &[0, 1, 1, 2, 3, 3]] {
            for cluster in [cluster(hosts), cluster(hosts).in_a_ring()] {
                let tree = Tree::new(&cluster);
                let mut sums = [0; 4];
                for me in cluster.node_ids() {
                    let round = tree.senders(me, true);
                    let goes_round = |from: &NodeId| cluster.is_ring() && round.contains(from);
                    let senders = tree.senders(me, false).into_iter();
                    for from in senders.filter(|from| !goes_round(from)) {
                        let window = of(&cluster, me.0, 1, from.0).unwrap();
                        sums[usize::from(tree.host(me))] += window;
                    }
                }
                assert!(sums.iter().all(|sum| *sum <= BUDGET), "{hosts:?}: {sums:?}");
            }
        }
    }
}
