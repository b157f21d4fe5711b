//! Where nodes are: the tree of racks, hosts and nodes, as `query tree` tells it.

use poseidon_core::tree::Tree;
use poseidon_core::{Book, Cluster, NodeId, Rate};
use serde::{Deserialize, Serialize};

/// Where all nodes are, as `tree` tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedTree {
    /// What the tree means for sums, in words.
    pub meaning: String,
    /// The racks, in the order of their first nodes.
    pub racks: Vec<PlacedRack>,
}

/// A rack of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedRack {
    /// Its name, if somebody has named it.
    pub name: Option<String>,
    /// Its hosts, in the order of their first nodes.
    pub hosts: Vec<PlacedHost>,
}

/// A host of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedHost {
    /// Its identity: equal on all its nodes, different on all others.
    pub host: String,
    /// Its nodes, in the order of their ids.
    pub nodes: Vec<PlacedNode>,
}

/// A node of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedNode {
    /// Its id. A worker's id is its rank.
    pub node: NodeId,
    /// Its name, such as `worker 3`.
    pub name: String,
    /// Whether it computes gradients.
    pub worker: bool,
    /// Whether it holds shards.
    pub server: bool,
    /// Where it listens, as `address:port`.
    pub tcp: String,
    /// What its port carries each way, in bits per second, if that is known.
    pub rate: Option<Rate>,
}

/// The tree of a book.
pub(crate) fn placed_tree(book: &Book) -> PlacedTree {
    let (cluster, tree) = (&book.cluster, &Tree::new(&book.cluster));
    let hosts = tree.workers_by_host().len() as u16;
    let racks = (0..hosts).map(|host| tree.rack(host) + 1).max().unwrap_or(0);
    let nodes = |host: u16| cluster.node_ids().filter(move |node| tree.host(*node) == host);
    let facts = |node: NodeId| book.nodes.get(node.index());
    let placed_node = |node: NodeId| PlacedNode {
        node,
        name: cluster.name(node),
        worker: cluster.role(node).is_some_and(|role| role.worker),
        server: cluster.role(node).is_some_and(|role| role.server),
        tcp: facts(node).map_or(String::new(), |facts| facts.tcp.clone()),
        rate: cluster.ports().get(node.index()).map(|port| port.rate),
    };
    let first = |host: u16| nodes(host).next().and_then(&facts);
    let placed_host = |host: u16| PlacedHost {
        host: first(host).map_or(String::new(), |facts| facts.host.clone()),
        nodes: nodes(host).map(&placed_node).collect(),
    };
    let placed_rack = |rack: u16| {
        let of_rack = || (0..hosts).filter(|host| tree.rack(*host) == rack);
        PlacedRack {
            name: of_rack().find_map(&first).and_then(|facts| facts.rack.clone()),
            hosts: of_rack().map(&placed_host).collect(),
        }
    };
    PlacedTree {
        meaning: meaning(cluster, tree, usize::from(racks)),
        racks: (0..racks).map(placed_rack).collect(),
    }
}

/// "16 workers on 4 hosts in 1 rack: sums leave a host once". Hosts and racks that have no workers
/// are not counted.
fn meaning(cluster: &Cluster, tree: &Tree, racks: usize) -> String {
    let mut hosts_of_rack = vec![0; racks];
    let mut several_workers = false;
    for (host, workers) in (0..).zip(tree.workers_by_host()) {
        hosts_of_rack[usize::from(tree.rack(host))] += usize::from(!workers.is_empty());
        several_workers |= workers.len() > 1;
    }
    let hosts: usize = hosts_of_rack.iter().sum();
    let working_racks = hosts_of_rack.iter().filter(|hosts| **hosts > 0).count();
    let several_hosts = hosts_of_rack.iter().any(|hosts| *hosts > 1);
    // A sum leaves a place if its server is elsewhere.
    let leaves_host = tree.workers_by_host().len() > 1;
    let words = match (leaves_host && several_workers, racks > 1 && several_hosts) {
        (_, true) if cluster.is_ring() => {
            "sums go from host to host, rack after rack, and small ones leave a rack once"
        }
        _ if cluster.is_ring() => {
            "sums go from host to host, and small ones straight to the servers"
        }
        (true, true) => "sums leave a host once, and a rack once",
        (true, false) => "sums leave a host once",
        (false, true) => "sums leave a rack once",
        (false, false) if leaves_host => "every worker sends its gradients straight to the servers",
        (false, false) => "nothing leaves the host",
    };
    let count = |number: usize, what: &str| match number {
        1 => format!("1 {what}"),
        _ => format!("{number} {what}s"),
    };
    // Why sums are made inside racks, or why not.
    let between = cluster.core().filter(|_| racks > 1 && several_hosts);
    let between = between.map_or(String::new(), |core| format!(" ({core} from rack to rack)"));
    format!(
        "{} on {} in {}: {words}{between}",
        count(cluster.workers(), "worker"),
        count(hosts, "host"),
        count(working_racks, "rack")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::{Port, Servers};

    /// What it means that nodes are on these hosts, in these racks.
    fn words(servers: Servers, hosts: &[u16], racks: &[u16]) -> String {
        let workers = hosts.len() as u16 - servers.extra();
        let cluster = Cluster::new(workers, servers, 1).unwrap();
        let cluster = cluster.with_hosts(hosts.to_vec(), racks.to_vec()).unwrap();
        let count = racks.iter().max().map_or(1, |last| usize::from(*last) + 1);
        meaning(&cluster, &Tree::new(&cluster), count)
    }

    #[test]
    fn the_meaning_says_what_sums_leave_once() {
        let colocated = |hosts: &[u16], racks: &[u16]| words(Servers::Colocated, hosts, racks);
        assert_eq!(
            colocated(&[0, 0, 0, 1, 2, 2, 2, 2], &[]),
            "8 workers on 3 hosts in 1 rack: sums leave a host once"
        );
        assert_eq!(
            colocated(&[0, 0, 1, 1, 2, 2], &[0, 0, 1]),
            "6 workers on 3 hosts in 2 racks: sums leave a host once, and a rack once"
        );
        assert_eq!(
            colocated(&[0, 1, 2, 3], &[0, 0, 1, 1]),
            "4 workers on 4 hosts in 2 racks: sums leave a rack once"
        );
        let ring = Cluster::new(4, Servers::Colocated, 1).unwrap().in_a_ring();
        assert_eq!(
            meaning(&ring, &Tree::new(&ring), 1),
            "4 workers on 4 hosts in 1 rack: sums go from host to host, and small ones straight to \
             the servers"
        );
        let port = |number| Port { number, rate: "1gbit".parse().unwrap() };
        let ports = (0..4).map(port).collect();
        let racks = Cluster::new(4, Servers::Colocated, 1).unwrap().with_ports(ports).unwrap();
        let racks = racks.with_hosts(Vec::new(), vec![0, 1, 0, 1]).unwrap();
        let between = |rate: &str| {
            let cluster = racks.clone().with_core(rate.parse().ok()).in_a_ring();
            meaning(&cluster, &Tree::new(&cluster), 2)
        };
        assert_eq!(
            between("900mbit"),
            "4 workers on 4 hosts in 2 racks: sums go from host to host, rack after rack, and small \
             ones leave a rack once (900 Mbit/s from rack to rack)"
        );
        assert_eq!(
            between("100mbit"),
            "4 workers on 4 hosts in 2 racks: sums leave a rack once (100 Mbit/s from rack to rack)"
        );
        assert_eq!(
            colocated(&[0, 1], &[]),
            "2 workers on 2 hosts in 1 rack: every worker sends its gradients straight to the servers"
        );
        assert_eq!(
            colocated(&[0, 0], &[]),
            "2 workers on 1 host in 1 rack: nothing leaves the host"
        );
        // The host and the rack of a server count for what leaves, and not for where workers are.
        assert_eq!(
            words(Servers::Dedicated(1), &[0, 0, 1], &[0, 1]),
            "2 workers on 1 host in 1 rack: sums leave a host once"
        );
    }

    #[test]
    fn nodes_are_in_their_hosts_and_hosts_in_their_racks() {
        let mut book = crate::job::book::tests::book();
        let port = |(number, mbit): (u16, u64)| Port {
            number,
            rate: Rate::new(mbit * 1_000_000).unwrap(),
        };
        let ports = [(0, 1000), (1, 100), (0, 1000), (2, 1000)].map(port).to_vec();
        let cluster = Cluster::new(3, Servers::Dedicated(1), 1).unwrap();
        let cluster = cluster.with_ports(ports).unwrap();
        book.cluster = cluster.with_hosts(vec![0, 1, 0, 2], vec![0, 1, 0]).unwrap();
        let facts =
            |(node, host, rack): (u16, &str, Option<&str>)| poseidon_core::book::NodeFacts {
                node: NodeId(node),
                host: host.into(),
                rack: rack.map(String::from),
                tcp: format!("10.0.0.{node}:9"),
                other_tcp: Vec::new(),
                unix: None,
                version: String::new(),
                tiles: false,
                queue: None,
            };
        let all = [(0, "a", Some("left")), (1, "b", None), (2, "a", Some("left")), (3, "c", None)];
        book.nodes = all.map(facts).to_vec();
        let tree = placed_tree(&book);
        let ids = |rack: &PlacedRack| -> Vec<Vec<u16>> {
            let ids = |host: &PlacedHost| host.nodes.iter().map(|node| node.node.0).collect();
            rack.hosts.iter().map(ids).collect()
        };
        assert_eq!(
            tree.racks.iter().map(ids).collect::<Vec<_>>(),
            [vec![vec![0, 2], vec![3]], vec![vec![1]]]
        );
        let names: Vec<_> = tree.racks.iter().map(|rack| rack.name.as_deref()).collect();
        assert_eq!(names, [Some("left"), None]);
        let server = &tree.racks[0].hosts[1].nodes[0];
        let expected = PlacedNode {
            node: NodeId(3),
            name: "server 0 (node 3)".into(),
            worker: false,
            server: true,
            tcp: "10.0.0.3:9".into(),
            rate: Some(Rate::new(1_000_000_000).unwrap()),
        };
        assert_eq!((&*tree.racks[0].hosts[1].host, server), ("c", &expected));
    }
}
