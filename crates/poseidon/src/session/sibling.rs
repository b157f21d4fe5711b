//! More sessions among the workers of a job, for another model or another update rule, and groups.

use crate::job::book::{BOOK_VERSION, Book, Job};
use crate::session::Builder;
use crate::session::gather::await_failure;
use crate::{Error, Group, OpenError, Session};
use poseidon_core::{ChannelId, Cluster, Epoch, NodeId};
use std::sync::Arc;

impl Session {
    /// Starts another session among the same workers, on the same links. Every worker calls it with the
    /// same `name`, which no other session of the job has, and describes the same layers.
    ///
    /// The new session's parameters live on the workers: dedicated servers serve the first session
    /// only.
    pub fn sibling(
        &self,
        name: &str,
        describe: impl FnOnce(Builder) -> Builder,
    ) -> Result<Self, Error> {
        let node = self.node.clone();
        let (job, rate, threads) = describe(Self::builder(node.config.clone())).check()?;
        let id = self.open_channel(name, Some(&job))?;
        let cluster = job.arrange(self.sibling_cluster()?);
        let nodes = node.book.nodes[..cluster.workers()].to_vec();
        let (identity, epoch) = (node.book.identity, Epoch::FIRST);
        let book = Arc::new(Book { version: BOOK_VERSION, identity, epoch, cluster, nodes, job });
        Self::open(node, id, book, rate, threads)
    }

    /// The workers of this session as a cluster, in which each of them holds shards: that of its
    /// siblings. It says which of them share hosts and racks, and what ports carry.
    pub fn sibling_cluster(&self) -> Result<Cluster, Error> {
        let cluster = &self.node.book.cluster;
        Ok(cluster.among(&cluster.worker_ids().collect::<Vec<_>>())?)
    }

    /// The same workers as a group. Every worker calls it with the same `name`, which no sibling and no
    /// other group of the job has.
    pub fn group(&self, name: &str) -> Result<Group, Error> {
        let id = self.open_channel(name, None)?;
        self.node.group(id)
    }

    /// Agrees with the other workers on a channel called `name`.
    fn open_channel(&self, name: &str, job: Option<&Job>) -> Result<ChannelId, Error> {
        self.check_running()?;
        let board = &*self.parts.board;
        let members: Vec<NodeId> = self.node.book.cluster.worker_ids().collect();
        let watch = || board.state();
        let opened = self.node.open_channel(name, &members, job, self.timeout, &watch);
        let opened = opened.map_err(|error| {
            let failure = match &error {
                // Most likely a node has died, perhaps with the coordinator: the lanes know which.
                Error::Open { why: OpenError::Broken { .. }, .. }
                | Error::Lost { .. }
                | Error::Rendezvous(_) => await_failure(board),
                _ => board.failure(),
            };
            failure.unwrap_or(error)
        });
        opened.inspect_err(|error| self.node.observed.fail(error))
    }
}
