//! The copiers of a node's devices.

use super::Node;
use crate::{Error, Group};
use poseidon_core::{Cluster, NodeId};
use poseidon_device::{Copier, cuda_copier, pinnable_memory};
use std::sync::Arc;

impl Group {
    /// The copier of CUDA's device `ordinal`, for tensors of this group's operations.
    pub fn cuda_copier(&self, ordinal: usize) -> Result<Arc<Copier>, Error> {
        self.linked_node()?.cuda_copier(ordinal)
    }
}

impl Node {
    /// The copier of CUDA's device `ordinal`, which pins no more than this node's share of memory.
    pub(crate) fn cuda_copier(&self, ordinal: usize) -> Result<Arc<Copier>, Error> {
        let share = || pinnable_memory() / neighbours(&self.book.cluster, self.me);
        let limit = self.config.pinned_memory.unwrap_or_else(share);
        cuda_copier(ordinal, limit).map_err(|fault| {
            let (what, why) = (self.book.cluster.name(self.me), fault.to_string());
            Error::Device { what, why }
        })
    }
}

/// How many nodes are on the host of `me`, itself included.
fn neighbours(cluster: &Cluster, me: NodeId) -> usize {
    let hosts = cluster.hosts();
    // If every node has a host of its own, there is no list.
    let Some(own) = hosts.get(me.index()) else { return 1 };
    hosts.iter().filter(|host| *host == own).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::Servers;

    #[test]
    fn nodes_of_one_host_share_its_memory() {
        let cluster = Cluster::new(3, Servers::Colocated, 1).unwrap();
        assert_eq!(neighbours(&cluster, NodeId(1)), 1);
        let cluster = cluster.with_hosts(vec![0, 1, 0], Vec::new()).unwrap();
        assert_eq!([0, 1, 2].map(|node| neighbours(&cluster, NodeId(node))), [2, 1, 2]);
    }
}
