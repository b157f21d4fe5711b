//! Who is in a group, and which of its ranks send to which.
//!
//! A slice of a tensor has a root: the rank that owns the slice, or the rank that the slice comes
//! from. The slice's way is core's [`Tree`] of that root: ranks of one host pass what they have
//! through one of them, the collector, so that it crosses the host's port once. Every group has a
//! tree of its own ranks.

use poseidon_core::cluster::ClusterError;
use poseidon_core::{Cluster, NodeId, Ring, Route, Tree};
use std::ops::Range;
use std::sync::Arc;

/// The ranks of a group, as one of them sees the group.
#[derive(Clone)]
pub(crate) struct Members {
    /// This process's rank.
    pub(super) rank: u16,
    /// By rank: the node that has it.
    pub(super) nodes: Vec<NodeId>,
    /// What ranks are called in errors.
    pub(super) names: Vec<String>,
    pub(super) ways: Arc<Ways>,
}

/// The ways of all slices, as one rank sees them.
pub(super) struct Ways {
    pub(super) me: u16,
    tree: Tree,
    /// Whether they go round the ring of hosts.
    ring: bool,
    /// By root.
    ways: Vec<Way>,
    /// By rank: how much of a tensor the slices of the ranks before it are; and of all ranks.
    before: Vec<u64>,
    /// The same round the ring, if hosts are in one.
    round: Option<Box<Ways>>,
}

/// The way of a slice at one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Way {
    /// Where contributions go. `None` at the root.
    pub(super) parent: Option<u16>,
    /// Where contributions come from. The rank after this one is first, so that not all ranks begin
    /// with rank 0.
    pub(super) children: Vec<u16>,
    /// Where the result comes from: the parent, if it does not go round the ring. `None` at the root.
    pub(super) source: Option<u16>,
    /// Where the result goes: to the children, if it does not go round the ring.
    pub(super) receivers: Vec<u16>,
}

/// Where something comes from, seen from one rank of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Here,
    Child(u16),
    Parent(u16),
}

impl Members {
    /// The group of these nodes of `cluster`, by rank, of which this process has rank `rank`.
    pub(crate) fn new(
        cluster: &Cluster,
        rank: u16,
        nodes: Vec<NodeId>,
        names: Vec<String>,
    ) -> Result<Self, ClusterError> {
        // All hosts have equal slices, so the slowest port is everybody's with a ring and without.
        let group = cluster.among(&nodes)?.of_groups();
        let ways = Arc::new(Ways::new(rank, Tree::new(&group), group.is_ring()));
        Ok(Self { rank, nodes, names, ways })
    }
}

impl Ways {
    /// The straight ways, and those round the ring if there is one.
    fn new(me: u16, tree: Tree, has_ring: bool) -> Self {
        let round = has_ring.then(|| Box::new(Self::along(me, tree.clone(), true)));
        Self { round, ..Self::along(me, tree, false) }
    }

    fn along(me: u16, tree: Tree, ring: bool) -> Self {
        let size = tree.workers() as u16;
        let way = |root: u16| {
            let route = Route { root: NodeId(root), turn: 0, ring: Ring::whole(ring) };
            let ranks = |nodes: Vec<NodeId>| {
                let mut ranks: Vec<u16> = nodes.into_iter().map(|node| node.0).collect();
                ranks.sort_unstable_by_key(|rank| (*rank < me, *rank));
                ranks
            };
            Way {
                parent: tree.parent(NodeId(me), route).map(|parent| parent.0),
                children: ranks(tree.children(NodeId(me), route)),
                source: tree.source(NodeId(me), route).map(|source| source.0),
                receivers: ranks(tree.receivers(NodeId(me), route)),
            }
        };
        let ways = (0..size).map(way).collect();
        let before = shares(&tree);
        Self { me, tree, ring, ways, before, round: None }
    }

    /// The numbers of a tensor of `count` that are `rank`'s slice, where every rank has one. Hosts
    /// have equal parts, so that no port carries more than another, however many ranks share it.
    pub(super) fn slice(&self, rank: u16, count: usize) -> Range<usize> {
        let whole = self.before.last().map_or(1, |whole| u128::from(*whole)).max(1);
        let edge = |rank: u16| {
            (count as u128 * u128::from(self.before[usize::from(rank)]) / whole) as usize
        };
        edge(rank)..edge(rank + 1)
    }

    /// The ways of slices of so many bytes: large ones go round the ring, if there is one.
    pub(super) fn for_slices(&self, bytes: usize) -> &Self {
        self.round.as_deref().filter(|_| bytes >= LEAST_ROUND).unwrap_or(self)
    }

    pub(super) fn size(&self) -> u16 {
        self.ways.len() as u16
    }

    /// The number of hosts that ranks are on.
    pub(super) fn hosts(&self) -> usize {
        self.tree.workers_by_host().len()
    }

    /// All ranks but this one, the next one first.
    pub(super) fn others(&self) -> impl Iterator<Item = u16> + use<> {
        let (me, size) = (self.me, self.size());
        (me + 1..size).chain(0..me)
    }

    /// Whether everything goes straight from the rank that has it to the rank that wants it.
    pub(super) fn is_flat(&self) -> bool {
        self.tree.is_flat() && !self.ring
    }

    /// The way of the slices whose root is `root`, here.
    pub(super) fn of(&self, root: u16) -> &Way {
        &self.ways[usize::from(root)]
    }

    /// Whether `rank` passes on contributions of other ranks to slices of `root`, or is their root.
    pub(super) fn collects(&self, rank: u16, root: u16) -> bool {
        self.tree.collects(NodeId(rank), self.route(root))
    }

    fn route(&self, root: u16) -> Route {
        Route { root: NodeId(root), turn: 0, ring: Ring::whole(self.ring) }
    }

    /// Which neighbour in the tree of `root` something comes from that rank `origin` has.
    pub(super) fn source(&self, root: u16, origin: u16) -> Source {
        let mut at = origin;
        if at == self.me {
            return Source::Here;
        }
        while let Some(parent) = self.tree.parent(NodeId(at), self.route(root)) {
            if parent.0 == self.me {
                return Source::Child(at);
            }
            at = parent.0;
        }
        // The root's tree has all ranks in it, so only the root has no parent, and the root is
        // above every rank.
        self.of(root).parent.map_or(Source::Here, Source::Parent)
    }
}

/// By rank: the parts of all ranks before it. The last is the sum of all parts.
fn shares(tree: &Tree) -> Vec<u64> {
    let ranks = tree.workers_by_host().map(<[NodeId]>::len);
    let part = ranks.map(|ranks| (1 << 32) / ranks.max(1) as u64).collect::<Vec<_>>();
    let parts = (0..tree.workers() as u16).map(|rank| part[usize::from(tree.host(NodeId(rank)))]);
    let sums = parts.scan(0, |sum, part| {
        *sum += part;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

/// Slices with fewer bytes go straight: a way round the ring would take longer than the bytes.
pub(super) const LEAST_ROUND: usize = 32 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::Servers;

    fn members(hosts: &[u16], racks: &[u16], nodes: &[u16], rank: u16) -> Members {
        let cluster = Cluster::new(hosts.len() as u16, Servers::Colocated, 1).unwrap();
        let cluster = cluster.with_hosts(hosts.to_vec(), racks.to_vec()).unwrap();
        let nodes = nodes.iter().map(|node| NodeId(*node)).collect();
        Members::new(&cluster, rank, nodes, Vec::new()).unwrap()
    }

    /// A way there and back.
    fn way(parent: Option<u16>, children: &[u16]) -> Way {
        let (children, receivers) = (children.to_vec(), children.to_vec());
        Way { parent, children, source: parent, receivers }
    }

    /// Two hosts of four nodes. A group has three nodes of the second host and one of the first.
    #[test]
    fn a_subgroup_has_a_tree_of_its_own_ranks() {
        let hosts = [0, 0, 0, 0, 1, 1, 1, 1];
        let nodes = [6, 4, 2, 7];
        let ways = |rank| members(&hosts, &[], &nodes, rank).ways;
        // Rank 2 is alone on its host. Its slice is collected by the first rank of the other host.
        assert_eq!(*ways(2).of(2), way(None, &[0]));
        assert_eq!(*ways(0).of(2), way(Some(2), &[1, 3]));
        assert_eq!(*ways(3).of(2), way(Some(0), &[]));
        assert_eq!(*ways(1).of(1), way(None, &[2, 3, 0]));
        assert!(!ways(0).is_flat());
        assert!(ways(1).collects(0, 2) && !ways(1).collects(3, 2));
        // Two of one host, and one node of each host, are flat.
        assert!(members(&hosts, &[], &[5, 4], 0).ways.is_flat());
        assert!(members(&hosts, &[], &[5, 1], 0).ways.is_flat());
    }

    /// Large slices of a group go round the ring of its own hosts; small ones go straight.
    #[test]
    fn large_slices_of_a_group_go_round_the_ring() {
        let cluster = Cluster::new(5, Servers::Colocated, 1).unwrap().in_a_ring();
        let nodes = [0, 1, 3, 4].map(NodeId).to_vec();
        let ways = Members::new(&cluster, 1, nodes, Vec::new()).unwrap().ways;
        // The result goes on in the direction of the sum.
        let (parent, source) = (Some(0), Some(2));
        let round = Way { parent, children: vec![2], source, receivers: vec![] };
        assert_eq!(*ways.for_slices(LEAST_ROUND).of(0), round);
        let round = Way { parent: None, children: vec![2], source: None, receivers: vec![0] };
        assert_eq!(*ways.for_slices(LEAST_ROUND).of(1), round);
        assert_eq!(*ways.for_slices(LEAST_ROUND - 1).of(1), way(None, &[2, 3, 0]));
        // Two hosts are no ring.
        let pair = [0, 3].map(NodeId).to_vec();
        let ways = Members::new(&cluster, 0, pair, Vec::new()).unwrap().ways;
        assert_eq!(*ways.for_slices(LEAST_ROUND).of(0), way(None, &[1]));
    }

    #[test]
    fn hosts_have_equal_parts_of_a_tensor() {
        let hosts = [0, 0, 0, 1, 2, 2, 2, 2];
        let nodes: Vec<u16> = (0..8).collect();
        let ways = members(&hosts, &[], &nodes, 0).ways;
        let count = 1_200_000;
        let slices: Vec<Range<usize>> = (0..8).map(|rank| ways.slice(rank, count)).collect();
        let lengths: Vec<usize> = slices.iter().map(ExactSizeIterator::len).collect();
        let (third, fourth) = (133_333, 100_000);
        for (length, expected) in
            lengths.iter().zip([[third; 3].as_slice(), &[400_000], &[fourth; 4]].concat())
        {
            assert!(length.abs_diff(expected) <= 1, "{lengths:?}");
        }
        assert_eq!((slices[0].start, slices[7].end), (0, count));
        assert!(slices.windows(2).all(|pair| pair[0].end == pair[1].start));
        // Fewer numbers than ranks: some slices are empty.
        assert_eq!((0..8).map(|rank| ways.slice(rank, 3).len()).sum::<usize>(), 3);
    }

    #[test]
    fn racks_are_numbered_by_the_groups_own_hosts() {
        let hosts = [0, 1, 2, 3, 4];
        let racks = [0, 1, 1, 2, 2];
        // Ranks 0 and 1 are in one rack, rank 2 in another.
        let ways = members(&hosts, &racks, &[4, 3, 1], 1).ways;
        assert!(!ways.is_flat());
        assert_eq!(*ways.of(2), way(Some(0), &[]));
    }

    /// Whatever comes from a rank reaches every rank, from one neighbour each.
    #[test]
    fn the_sources_of_something_make_a_tree_of_its_own() {
        let hosts = [0, 0, 0, 1, 2, 2, 2, 2];
        let nodes: Vec<u16> = (0..8).collect();
        let all: Vec<Arc<Ways>> =
            (0..8).map(|rank| members(&hosts, &[], &nodes, rank).ways).collect();
        for (root, origin) in (0..8).flat_map(|root| (0..8).map(move |origin| (root, origin))) {
            for ways in &all {
                let (mut at, mut steps) = (ways.me, 0);
                while let Source::Child(next) | Source::Parent(next) =
                    all[usize::from(at)].source(root, origin)
                {
                    at = next;
                    steps += 1;
                    assert!(steps <= 4, "from {} to {origin} by {root}", ways.me);
                }
                assert_eq!(at, origin);
            }
        }
    }
}
