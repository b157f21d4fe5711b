//! Which host and which rack nodes are in, where all hosts are alike.

use poseidon_core::Cluster;

/// Where nodes are. Workers fill host after host, and hosts fill rack after rack. Dedicated servers
/// have hosts of their own, after those of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Workers of a host; the last may have fewer.
    pub ranks_per_host: u16,
    /// Hosts of a rack in which sums are made; the last may have fewer. `None` if sums are made
    /// inside hosts only.
    pub hosts_per_rack: Option<u16>,
}

impl Places {
    /// Where the nodes of `cluster` are, if all its hosts are alike.
    pub fn of(cluster: &Cluster) -> Self {
        let first = |numbers: &[u16]| numbers.iter().filter(|number| **number == 0).count() as u16;
        let racks = cluster.racks();
        Self {
            ranks_per_host: first(cluster.hosts()).max(1),
            hosts_per_rack: (!racks.is_empty()).then(|| first(racks)),
        }
    }

    /// How many hosts `cluster` takes.
    pub fn hosts(&self, cluster: &Cluster) -> usize {
        let ranks = usize::from(self.ranks_per_host.max(1));
        cluster.workers().div_ceil(ranks) + cluster.nodes() - cluster.workers()
    }

    /// `cluster` on these hosts and in these racks, in a ring where a job would have one.
    pub fn place(&self, cluster: Cluster) -> Cluster {
        let ranks = self.ranks_per_host.max(1);
        let workers = cluster.worker_ids().map(|worker| worker.0 / ranks);
        let servers = (0..).skip(cluster.workers().div_ceil(ranks.into()));
        let hosts: Vec<u16> = workers.chain(servers).take(cluster.nodes()).collect();
        let racks = self.hosts_per_rack.map_or(Vec::new(), |in_rack| {
            (0..self.hosts(&cluster) as u16).map(|host| host / in_rack.max(1)).collect()
        });
        // Nothing said is the same as a host for every node, and shorter.
        let hosts = if ranks == 1 { Vec::new() } else { hosts };
        let placed = cluster.with_hosts(hosts, racks);
        placed
            .expect("every node has a host and every host a rack, and each new number is the next")
            .in_a_ring()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::Servers;

    #[test]
    fn hosts_are_filled_one_after_the_other_and_servers_have_their_own() {
        let cluster = Cluster::new(5, Servers::Mixed(2), 1).unwrap();
        let places = Places { ranks_per_host: 2, hosts_per_rack: Some(3) };
        let placed = places.place(cluster.clone());
        assert_eq!(placed.hosts(), [0, 0, 1, 1, 2, 3, 4]);
        assert_eq!(placed.racks(), [0, 0, 0, 1, 1]);
        assert_eq!((Places::of(&placed), places.hosts(&cluster)), (places, 5));
        let alone = Places { ranks_per_host: 1, hosts_per_rack: None };
        assert_eq!(alone.place(cluster.clone()), cluster, "dedicated servers are in no ring");
        assert_eq!(Places::of(&cluster), alone);
        let three = Cluster::new(3, Servers::Colocated, 1).unwrap();
        assert!(alone.place(three.clone()).is_ring());
        assert!(!Places { hosts_per_rack: Some(2), ..alone }.place(three).is_ring());
    }
}
