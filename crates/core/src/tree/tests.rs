use super::*;
use crate::Servers;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Workers on hosts of these sizes, in racks of these numbers of hosts.
fn tree(hosts: &[usize], racks: &[usize]) -> Tree {
    on(Servers::Colocated, hosts, racks)
}

fn on(servers: Servers, hosts: &[usize], racks: &[usize]) -> Tree {
    placed(servers, hosts, numbers(racks))
}

/// Hosts of these sizes, in racks of these numbers.
fn placed(servers: Servers, hosts: &[usize], racks: Vec<u16>) -> Tree {
    let nodes: usize = hosts.iter().sum();
    let workers = nodes as u16 - servers.extra();
    let cluster = Cluster::new(workers, servers, 1).unwrap();
    Tree::new(&cluster.with_hosts(numbers(hosts), racks).unwrap())
}

fn numbers(sizes: &[usize]) -> Vec<u16> {
    sizes.iter().zip(0..).flat_map(|(size, number)| vec![number; *size]).collect()
}

fn nodes(ids: &[u16]) -> Vec<NodeId> {
    ids.iter().map(|id| NodeId(*id)).collect()
}

fn route(root: u16, turn: u32) -> Route {
    Route { root: NodeId(root), turn, ring: Ring::Nothing }
}

#[test]
fn the_nth_workers_of_all_hosts_exchange_with_each_other() {
    let tree = tree(&[4, 4, 4], &[]);
    assert!(!tree.is_flat());
    for turn in 0..3 {
        // Node 5 is the second of its host: so are nodes 1 and 9.
        assert_eq!(tree.children(NodeId(5), route(5, turn)), nodes(&[1, 4, 6, 7, 9]));
        assert_eq!(tree.children(NodeId(1), route(5, turn)), nodes(&[0, 2, 3]));
        assert_eq!(tree.parent(NodeId(1), route(5, turn)), Some(NodeId(5)));
        assert_eq!(tree.parent(NodeId(3), route(5, turn)), Some(NodeId(1)));
        assert_eq!(tree.parent(NodeId(7), route(5, turn)), Some(NodeId(5)));
        assert_eq!(tree.parent(NodeId(5), route(5, turn)), None);
    }
    assert_eq!(tree.senders(NodeId(5), false), nodes(&[1, 9]));
}

#[test]
fn one_host_and_hosts_of_one_worker_are_flat() {
    let flat = [tree(&[5], &[]), tree(&[1; 4], &[]), tree(&[1; 4], &[1; 4])];
    for tree in flat {
        assert!(tree.is_flat());
        let all = (0..tree.workers() as u16).map(NodeId);
        for (node, root) in all.clone().flat_map(|node| all.clone().map(move |root| (node, root))) {
            let up = (node != root).then_some(root);
            assert_eq!(tree.parent(node, route(root.0, 7)), up);
            assert_eq!(tree.collects(node, route(root.0, 7)), node == root);
        }
    }
}

/// A server that is alone on its host has all its chunks collected by everybody in turn.
#[test]
fn the_chunks_of_a_lonely_server_are_spread_over_a_hosts_workers() {
    let tree = on(Servers::Dedicated(1), &[3, 3, 1], &[]);
    let collector = |turn| {
        tree.parent(NodeId(6), route(6, turn))
            .is_none()
            .then(|| tree.children(NodeId(6), route(6, turn)))
    };
    assert_eq!(collector(0), Some(nodes(&[0, 3])));
    assert_eq!(collector(1), Some(nodes(&[1, 4])));
    assert_eq!(collector(5), Some(nodes(&[2, 5])));
    assert_eq!(tree.senders(NodeId(6), false), nodes(&[0, 1, 2, 3, 4, 5]));
}

#[test]
fn a_rack_sends_one_stream() {
    // Two racks of two hosts of two workers.
    let tree = tree(&[2; 4], &[2; 2]);
    let at = |node| tree.children(NodeId(node), route(2, 0));
    // The root is the first of the second host: so are the collectors.
    assert_eq!(at(2), nodes(&[0, 3, 6]));
    assert_eq!(at(6), nodes(&[4, 7]));
    assert_eq!(at(4), nodes(&[5]));
    assert_eq!(at(0), nodes(&[1]));
    assert_eq!(tree.parent(NodeId(6), route(2, 0)), Some(NodeId(2)));
    assert_eq!(tree.parent(NodeId(4), route(2, 0)), Some(NodeId(6)));
}

/// One host in the first rack, three in the second: all three collect for their rack in turn.
#[test]
fn all_collectors_of_a_rack_are_senders() {
    let tree = tree(&[1; 4], &[1, 3]);
    assert_eq!(tree.senders(NodeId(0), false), nodes(&[1, 2, 3]));
    // Servers have nothing to send to each other.
    let tree = on(Servers::Dedicated(2), &[2, 2, 1, 1], &[]);
    assert_eq!(tree.senders(NodeId(4), false), nodes(&[0, 1, 2, 3]));
}

/// A ring costs no port a byte: as many streams come in as straight, but from one host only.
#[test]
fn a_port_carries_as_much_in_a_ring() {
    for hosts in 3..20u16 {
        let tree = tree(&vec![1; hosts.into()], &[]);
        for node in (0..hosts).map(NodeId) {
            let streams = |root| {
                let route = Route { ring: Ring::Everything, ..route(root, 0) };
                tree.children(node, route).len() + usize::from(tree.source(node, route).is_some())
            };
            assert_eq!((0..hosts).map(streams).sum::<usize>(), 2 * usize::from(hosts - 1));
            assert_eq!(tree.senders(node, true), nodes(&[(node.0 + 1) % hosts]));
        }
    }
}

#[test]
fn a_ring_adds_host_after_host() {
    let tree = tree(&[2, 1, 2], &[]);
    let route = Route { ring: Ring::Everything, ..route(3, 0) };
    // The root is the first of the third host. The second host is last in the ring.
    assert_eq!(tree.parent(NodeId(4), route), Some(NodeId(3)));
    assert_eq!(tree.parent(NodeId(0), route), Some(NodeId(3)));
    assert_eq!(tree.parent(NodeId(1), route), Some(NodeId(0)));
    assert_eq!(tree.parent(NodeId(2), route), Some(NodeId(0)));
    assert!(!tree.collects(NodeId(2), route) && tree.collects(NodeId(0), route));
    // Results go on to the second host, and from there to the first.
    assert_eq!(tree.receivers(NodeId(3), route), nodes(&[2, 4]));
    assert_eq!(tree.receivers(NodeId(2), route), nodes(&[0]));
    assert_eq!(tree.receivers(NodeId(0), route), nodes(&[1]));
    let sources = [0, 1, 2, 3, 4].map(|node| tree.source(NodeId(node), route));
    assert_eq!(sources, [Some(2), Some(0), Some(3), None, Some(3)].map(|s| s.map(NodeId)));
    let one = |node| Sum::worker(NodeId(node));
    let stream = |node: u16, first: u16, workers| {
        Sum::Stream(Stream { node: NodeId(node), first: NodeId(first), workers })
    };
    let first = Sum::Group(vec![one(0), one(1)]);
    assert_eq!(tree.sum(NodeId(0), route), Sum::Group(vec![first, stream(2, 2, 1)]));
    let last = Sum::Group(vec![one(3), one(4)]);
    assert_eq!(tree.sum(NodeId(3), route), Sum::Group(vec![stream(0, 0, 3), last]));
}

/// Hosts of three racks in turn: two streams cross a rack's link, one out and one in.
#[test]
fn a_ring_goes_rack_after_rack() {
    let tree = placed(Servers::Colocated, &[1; 9], vec![0, 1, 2, 0, 1, 2, 0, 1, 2]);
    let order = [0, 3, 6, 1, 4, 7, 2, 5, 8];
    for (place, node) in order.into_iter().enumerate() {
        let next = order[(place + 1) % order.len()];
        assert_eq!(tree.senders(NodeId(node), true), nodes(&[next]));
    }
    let rack = |node: NodeId| tree.rack(tree.host(node));
    let crossing = |node: &u16| tree.senders(NodeId(*node), true).into_iter().map(rack).next();
    let out = order.iter().filter(|node| crossing(node) != Some(rack(NodeId(**node)))).count();
    assert_eq!(out, 3, "once for each rack");
}

/// What is rounded once goes straight to the root. Its result is not rounded again, so it goes round.
#[test]
fn results_alone_go_round_a_ring() {
    let tree = tree(&[2, 1, 2, 1], &[]);
    let route = Route { ring: Ring::Results, ..route(3, 0) };
    let straight = Route { ring: Ring::Nothing, ..route };
    let round = Route { ring: Ring::Everything, ..route };
    for node in (0..6).map(NodeId) {
        assert_eq!(tree.parent(node, route), tree.parent(node, straight));
        assert_eq!(tree.sum(node, route), tree.sum(node, straight));
        assert_eq!(tree.collects(node, route), tree.collects(node, straight));
        assert_eq!(tree.source(node, route), tree.source(node, round));
        assert_eq!(tree.receivers(node, route), tree.receivers(node, round));
    }
    assert_eq!(tree.children(NodeId(3), route), nodes(&[0, 2, 4, 5]));
    assert_eq!(tree.receivers(NodeId(3), route), nodes(&[2, 4]));
}

#[test]
fn sums_are_in_the_order_of_ranks() {
    let tree = tree(&[2, 2, 1], &[]);
    let one = |node| Sum::worker(NodeId(node));
    let stream = |node: u16, first: u16, workers| {
        Sum::Stream(Stream { node: NodeId(node), first: NodeId(first), workers })
    };
    let own = Sum::Group(vec![one(2), one(3)]);
    let all = Sum::Group(vec![Sum::Group(vec![stream(1, 0, 2), own, stream(4, 4, 1)])]);
    assert_eq!(tree.sum(NodeId(3), route(3, 0)), all);
}

proptest! {
    /// Every worker is covered once, on one way without a circle.
    #[test]
    fn every_worker_has_one_way_to_every_root(
        hosts in proptest::collection::vec(1usize..5, 1..7), in_rack in 1usize..4, extra in 0u16..3, turn in 0u32..9,
        ring in prop_oneof![Just(Ring::Nothing), Just(Ring::Results), Just(Ring::Everything)],
        in_turn: bool,
    ) {
        let count: usize = hosts.iter().sum();
        prop_assume!(count > usize::from(extra));
        // In a ring, servers are on the workers.
        prop_assume!(ring == Ring::Nothing || extra == 0);
        let mut racks = vec![in_rack; hosts.len() / in_rack];
        racks.extend((hosts.len() % in_rack > 0).then_some(hosts.len() % in_rack));
        let servers = if extra > 0 { Servers::Mixed(extra) } else { Servers::Colocated };
        let racks = match in_turn {
            true => (0..hosts.len()).map(|host| (host % racks.len()) as u16).collect(),
            false => numbers(&racks),
        };
        let tree = placed(servers, &hosts, racks);
        for root in 0..count as u16 {
            let route = Route { ring, ..route(root, turn) };
            let mut covered = BTreeSet::new();
            let mut next = vec![NodeId(root)];
            while let Some(node) = next.pop() {
                prop_assert!(covered.insert(node) , "{node} twice");
                let children = tree.children(node, route);
                let mut sum = 0;
                tree.sum(node, route).visit(&mut |stream| sum += stream.workers);
                prop_assert!(node != route.root || sum == tree.workers(), "the root has {sum}");
                let mut initial = 0;
                tree.sum(node, route).visit(&mut |stream| initial += usize::from(stream.first.0 == 0));
                prop_assert!(node != route.root || initial == 1, "rank 0 is in {initial} streams");
                prop_assert_eq!(tree.collects(node, route), node == route.root || !children.is_empty());
                for child in children {
                    prop_assert_eq!(tree.parent(child, route), Some(node));
                    next.push(child);
                }
            }
            covered.insert(NodeId(root));
            let workers = (0..tree.workers() as u16).map(NodeId);
            prop_assert!(workers.clone().all(|worker| covered.contains(&worker)));
            // So has every worker the result, once.
            let mut told = BTreeSet::new();
            let mut next = vec![NodeId(root)];
            while let Some(node) = next.pop() {
                prop_assert!(told.insert(node), "{node} is told twice");
                for receiver in tree.receivers(node, route) {
                    prop_assert_eq!(tree.source(receiver, route), Some(node));
                    next.push(receiver);
                }
            }
            prop_assert!(workers.clone().all(|worker| told.contains(&worker)));
            let streams = |host: u16| covered.iter().filter(|node| {
                let up = tree.parent(**node, route);
                tree.host(**node) == host && up.is_some_and(|up| tree.host(up) != host)
            }).count();
            for host in 0..hosts.len() as u16 {
                prop_assert!(streams(host) <= 1, "host {host} sends {} streams", streams(host));
            }
        }
    }
}
