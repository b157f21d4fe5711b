//! How groups are opened on a node's links.

use super::Node;
use crate::collectives::{Group, Members};
use crate::job::book::Job;
use crate::job::config::{Config, Member};
use crate::job::line::JobState;
use crate::job::open::Channel;
use crate::{ChunkSize, Coordinator, Error, Optimizer, Placement, Policy};
use poseidon_core::{ChannelId, Checkpoints, Consistency, JobId, NodeId};
use std::sync::Arc;
use std::time::Duration;

impl Group {
    /// Joins the group that `config` describes: workers only, all of which call this. `names` is what the
    /// ranks are called in errors, such as `rank 3`; it has one for each. Whoever has made the `coordinator` that
    /// they meet at gives it away here: it lives as long as the links.
    pub fn start(
        config: &Config,
        names: Vec<String>,
        coordinator: Option<Coordinator>,
    ) -> Result<Self, Error> {
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
            consistency: Consistency::Bsp,
            scheme: Policy::Auto,
            batch: None,
            checkpoints: Checkpoints::default(),
        };
        let node = Node::start(config, Some(job), coordinator)?;
        let ranks = (0..size).map(NodeId).collect();
        let id = ChannelId::FIRST;
        let drivers = node.lanes_of_group(id);
        let members = Members::new(&node.book.cluster, rank, ranks, names)?;
        let recorder = node.observed.recorder.clone();
        Ok(Self::open(id, members, drivers, recorder, node))
    }

    /// Another group, among some ranks of this one and on the same links. Those that `ranks` names call
    /// it, with the same `name`, which no other group of these links has; this rank is one of them.
    pub fn subgroup(
        &self,
        name: &str,
        ranks: &[u16],
        names: Vec<String>,
        patience: Duration,
    ) -> Result<Self, Error> {
        let node = self.linked_node()?;
        let known = |&rank: &u16| self.nodes().get(usize::from(rank)).copied();
        let nodes: Option<Vec<NodeId>> = ranks.iter().map(known).collect();
        let own = ranks.iter().position(|&rank| rank == self.rank());
        let (Some(nodes), Some(own)) = (nodes, own) else {
            let size = self.size();
            let why = format!(
                "ranks {ranks:?} of {size}: expected some of them, and {} among them",
                self.rank()
            );
            return Err(Error::Config(why));
        };
        if names.len() != ranks.len() {
            let (got, size) = (names.len(), ranks.len());
            return Err(Error::Config(format!("{got} names for {size} ranks")));
        }
        let id = node.open_channel(name, &nodes, None, patience, &|| JobState::Running)?;
        let drivers = node.lanes_of_group(id);
        let members = Members::new(&node.book.cluster, own as u16, nodes, names)?;
        let recorder = node.observed.recorder.clone();
        Ok(Self::open(id, members, drivers, recorder, node))
    }

    /// Tells the links of this group from those of every other job. `None` if no other group can be
    /// opened on them any more, because the coordinator is gone.
    pub fn identity(&self) -> Option<JobId> {
        let node = self.node().filter(|node| node.line.is_connected())?;
        Some(node.book.identity)
    }

    /// The node whose links these are.
    pub(super) fn linked_node(&self) -> Result<Arc<Node>, Error> {
        self.node().ok_or_else(|| Error::Config("the group has no links".into()))
    }

    fn node(&self) -> Option<Arc<Node>> {
        self.links()?.downcast().ok()
    }
}

impl Node {
    /// The workers of the job as the group `id`.
    pub(crate) fn group(self: &Arc<Self>, id: ChannelId) -> Result<Group, Error> {
        let cluster = &self.book.cluster;
        let names = cluster.worker_ids().map(|worker| cluster.name(worker)).collect();
        let ranks = cluster.worker_ids().collect();
        let drivers = self.lanes_of_group(id);
        let members = Members::new(cluster, self.me.0, ranks, names)?;
        let recorder = self.observed.recorder.clone();
        Ok(Group::open(id, members, drivers, recorder, self.clone()))
    }

    /// Agrees with the other members on a channel called `name`. `watch` tells what the lanes know
    /// meanwhile; a member that is lost ends the wait in any case.
    pub(crate) fn open_channel(
        &self,
        name: &str,
        members: &[NodeId],
        job: Option<&Job>,
        patience: Duration,
        watch: &dyn Fn() -> JobState,
    ) -> Result<ChannelId, Error> {
        let mut members = members.to_vec();
        members.sort_unstable();
        let lost_member = || self.line.lost().is_some_and(|node| members.contains(&node));
        let watch = || match watch() {
            JobState::Running if lost_member() => JobState::Failed,
            known => known,
        };
        let channel = Channel { name, members: &members, job };
        self.line.open(channel, patience, &watch).map_err(|why| {
            let lost = self.line.trouble().filter(|_| lost_member());
            lost.unwrap_or_else(|| Error::Open { name: name.into(), why })
        })
    }
}
