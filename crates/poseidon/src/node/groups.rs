//! How groups are opened on a node's links.

use super::Node;
use crate::collectives::Group;
use crate::job::book::Job;
use crate::job::config::{Config, Member};
use crate::{ChunkSize, Error, Optimizer, Placement, Policy};
use poseidon_core::{ChannelId, NodeId};
use std::sync::Arc;

impl Group {
    /// Joins the group that `config` describes: workers only, all of which call this, with one lane. `names` is what
    /// the ranks are called in errors, such as `rank 3`; it has one for each.
    pub fn start(config: &Config, names: Vec<String>) -> Result<Self, Error> {
        let Member::Worker(rank) = config.member else {
            return Err(Error::Config("a group is among workers".into()));
        };
        let size = config.workers;
        if names.len() != usize::from(size) {
            let got = names.len();
            return Err(Error::Config(format!("{got} names for {size} ranks")));
        }
        let job = Job {
            layers: Vec::new(),
            optimizer: Optimizer::default(),
            chunk: ChunkSize::default(),
            placement: Placement::Balanced,
            deterministic: false,
            scheme: Policy::Auto,
            batch: None,
        };
        let node = Node::start(&Config { lanes: 1, ..config.clone() }, Some(job))?;
        let ranks = (0..size).map(NodeId).collect();
        let id = ChannelId::FIRST;
        let driver = node.lane_of_group(id).clone();
        Ok(Self::open(id, rank, ranks, names, driver, node))
    }
}

impl Node {
    /// The workers of the job as the group `id`.
    pub(crate) fn group(self: &Arc<Self>, id: ChannelId) -> Group {
        let cluster = &self.book.cluster;
        let names = cluster.worker_ids().map(|worker| cluster.name(worker)).collect();
        let ranks = cluster.worker_ids().collect();
        let driver = self.lane_of_group(id).clone();
        Group::open(id, self.me.0, ranks, names, driver, self.clone())
    }
}
