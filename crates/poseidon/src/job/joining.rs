//! Which nodes have joined, and whether there is a book: decisions of the coordinator, without
//! sockets and threads.

use crate::job::book::{BOOK_VERSION, Book, Job, lookup, query};
use crate::job::control::{Asker, Join, Message, Reply};
use crate::job::link_rate::Measured;
use crate::job::ports::{Claims, Measuring, Step};
use poseidon_core::wire::{Hello, NOBODY};
use poseidon_core::{Cluster, Epoch, JobId, NodeId};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The nodes of a job, from the first that joins to the last that leaves.
#[derive(Debug)]
pub(crate) struct Joining {
    identity: JobId,
    /// How long nodes wait for each other.
    patience: Duration,
    /// Nodes that have joined and are connected.
    joined: BTreeMap<NodeId, Joined>,
    /// Nodes that had joined and went away before the book was written: their places are free.
    gone: BTreeMap<NodeId, Gone>,
    /// The book, or why there will be none.
    outcome: Option<Result<Arc<Book>, String>>,
    /// What is being measured. While it is, the book is a draft.
    measuring: Option<Measuring>,
    /// Whether nodes have been told that one of them is lost. All nodes stop at the first loss, so
    /// later losses only follow from it and are not told.
    told_of_loss: bool,
    /// When it was last said for whom nodes wait.
    noticed: Option<Instant>,
}

#[derive(Debug)]
struct Joined {
    join: Join,
    asker: Asker,
    /// The address it joined from.
    peer: String,
    since: Instant,
}

#[derive(Debug)]
struct Gone {
    peer: String,
    joined: Instant,
    left: Instant,
    /// The node's own words, if it said any.
    reason: Option<String>,
}

impl Joining {
    pub(crate) fn new(identity: JobId, patience: Duration) -> Self {
        Self {
            identity,
            patience,
            joined: BTreeMap::new(),
            gone: BTreeMap::new(),
            outcome: None,
            measuring: None,
            told_of_loss: false,
            noticed: None,
        }
    }

    /// The book, once it is written.
    pub(crate) fn book(&self) -> Option<&Arc<Book>> {
        self.outcome.as_ref()?.as_ref().ok()
    }

    /// Whether nobody has joined yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.joined.is_empty() && self.gone.is_empty() && self.outcome.is_none()
    }

    /// The node that has joined by this connection.
    pub(crate) fn node_of(&self, connection: u64) -> Option<NodeId> {
        let mut joined = self.joined.iter();
        joined.find(|(_, j)| j.asker.connection == connection).map(|(node, _)| *node)
    }

    /// The connection by which `node` has joined.
    pub(crate) fn connection_of(&self, node: NodeId) -> Option<u64> {
        self.joined.get(&node).map(|joined| joined.asker.connection)
    }

    /// A node wants to join. If it is refused it is answered now, and otherwise together with all
    /// other nodes.
    pub(crate) fn handle_join(
        &mut self,
        asker: Asker,
        join: Join,
        peer: String,
        now: Instant,
    ) -> Vec<Reply> {
        let undecided = self.outcome.is_none();
        let mut replies = Vec::new();
        if let Err(reason) = self.admit(asker, join, peer, now) {
            replies.push(Reply::refusal(asker, reason));
        }
        if undecided {
            replies.extend(self.announce());
        }
        replies
    }

    /// A node has called that knows the secret, and that encrypts while the coordinator does not, or the
    /// reverse. Its connection is refused, and everybody else hears why.
    pub(crate) fn handle_disagreement(&mut self, hello: &Hello) -> Vec<Reply> {
        if self.outcome.is_some() || hello.node == NOBODY {
            return Vec::new();
        }
        let (it, coordinator) = match hello.encrypt {
            true => ("encrypts", "does not"),
            false => ("does not encrypt", "does"),
        };
        let name = self.name(hello.node);
        self.call_off(format!(
            "{name} {it} its connections and the coordinator {coordinator}: start every node with \
             --encrypt (POSEIDON_ENCRYPT=1), or none"
        ));
        self.announce()
    }

    /// A connection has ended. If it was a node's, the node had not said goodbye.
    pub(crate) fn handle_closed(&mut self, connection: u64, now: Instant) -> Vec<Reply> {
        self.remove(connection, None, now)
    }

    /// A node says goodbye. If it has a reason, it gives up.
    pub(crate) fn handle_leave(
        &mut self,
        connection: u64,
        reason: Option<String>,
        now: Instant,
    ) -> Vec<Reply> {
        match reason {
            None if self.book().is_some() => {
                let node = self.node_of(connection);
                node.map(|node| self.joined.remove(&node));
                Vec::new()
            }
            reason => self.remove(connection, reason, now),
        }
    }

    /// A node is ready for a round of measuring. When the last round is over, the book is complete
    /// and all nodes get it.
    pub(crate) fn handle_measured(
        &mut self,
        asker: Asker,
        post: Measured,
        now: Instant,
    ) -> Vec<Reply> {
        let refuse = |why: &str| vec![Reply::refusal(asker, why.into())];
        let Some(Ok(draft)) = &self.outcome else { return refuse("the job has not started") };
        let Some(measuring) = &mut self.measuring else { return refuse("nothing is measured") };
        let askers = match measuring.handle_post(&draft.cluster, asker, post, now) {
            Step::Tell(replies) => return replies,
            Step::Settled(askers) => askers,
        };
        let settled = measuring.claims.settle(draft.cluster.clone(), measuring.seen());
        let answer = match settled {
            Ok(cluster) => {
                let cluster = draft.job.arrange(cluster);
                let book = Book { cluster, ..Book::clone(draft) };
                let value = serde_json::to_value(&book).unwrap_or(Value::Null);
                self.outcome = Some(Ok(Arc::new(book)));
                Message::Book(value)
            }
            Err(error) => Message::Refused { reason: error.to_string() },
        };
        self.measuring = None;
        Reply::to_all(askers, &answer)
    }

    /// Calls the job off if a node has waited long enough for the others, and ends a round of
    /// measuring in which one has.
    pub(crate) fn handle_time(&mut self, now: Instant) -> Vec<Reply> {
        if let Some(measuring) = &mut self.measuring {
            let expired = measuring.rounds.poll_expired(now);
            return expired.map_or_else(Vec::new, |round| round.tell_missing());
        }
        if self.end_of_patience().is_none_or(|end| now < end) {
            return Vec::new();
        }
        let oldest = self.joined.values().map(|joined| joined.since).min();
        let mut words: Vec<_> =
            self.gone.iter().map(|(&node, gone)| gone.words(&self.name(node), now)).collect();
        let patience = self.patience;
        let never = self.missing().into_iter().filter(|(node, _)| !self.gone.contains_key(node));
        let never: Vec<_> = never.map(|(_, name)| name).collect();
        if oldest.is_some_and(|oldest| oldest + patience <= now) && !never.is_empty() {
            words.insert(0, format!("{} did not join within {patience:?}", never.join(", ")));
        }
        self.call_off(words.join("; "));
        self.announce()
    }

    /// Words about whom nodes wait for, if they have waited for a while and it was not said lately.
    pub(crate) fn poll_notice(&mut self, now: Instant) -> Option<String> {
        if self.notice_due().is_none_or(|due| now < due) {
            return None;
        }
        self.noticed = Some(now);
        let missing: Vec<_> = self.missing().into_iter().map(|(_, name)| name).collect();
        let (joined, all) = (self.joined.len(), self.joined.len() + missing.len());
        let shown = missing[..missing.len().min(SHOWN)].join(", ");
        let rest = match missing.len() - missing.len().min(SHOWN) {
            0 => String::new(),
            rest => format!(" and {rest} more"),
        };
        Some(format!("waiting for {shown}{rest}, {joined} of {all} have joined"))
    }

    /// When [`handle_time`](Self::handle_time) or [`poll_notice`](Self::poll_notice) has something
    /// to do next.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.outcome.is_some() {
            return self.measuring.as_ref().and_then(|measuring| measuring.rounds.deadline());
        }
        self.end_of_patience().into_iter().chain(self.notice_due()).min()
    }

    /// When it is to be said for whom nodes wait. The pauses grow from [`FIRST_NOTICE`] to
    /// [`RAREST_NOTICE`].
    fn notice_due(&self) -> Option<Instant> {
        if self.outcome.is_some() {
            return None;
        }
        let oldest = self.joined.values().map(|joined| joined.since).min()?;
        Some(match self.noticed {
            None => oldest + FIRST_NOTICE,
            Some(last) => {
                let waited = last.saturating_duration_since(oldest);
                last + waited.clamp(FIRST_NOTICE, RAREST_NOTICE)
            }
        })
    }

    /// When the job is called off, if it has not begun by then.
    fn end_of_patience(&self) -> Option<Instant> {
        // Without anybody who waits there is nobody to tell.
        let oldest = self.joined.values().map(|joined| joined.since).min()?;
        let free = self.patience.min(FREE);
        // A free place waits for a restarted process from when its node went or, if that is later,
        // from when the first node that still waits had joined.
        let gone = self.gone.values().map(|gone| gone.left.max(oldest) + free);
        gone.chain([oldest + self.patience]).min()
    }

    /// There will be no book any more, if there is none yet.
    pub(crate) fn stop(&mut self) -> Vec<Reply> {
        if self.outcome.is_some() {
            return Vec::new();
        }
        self.call_off("the coordinator has stopped".into());
        self.announce()
    }

    /// Worker 0 follows the plan of another `job` from now on, and so do all others.
    pub(crate) fn handle_replanned(&mut self, epoch: Epoch, job: Job) -> Result<(), String> {
        let Some(Ok(book)) = &self.outcome else { return Err("the job has not started".into()) };
        if epoch <= book.epoch {
            return Err(format!("epoch {epoch} does not follow epoch {}", book.epoch));
        }
        job.fits(&book.cluster).map_err(|e| e.to_string())?;
        self.outcome = Some(Ok(Arc::new(Book { epoch, job, ..Book::clone(book) })));
        Ok(())
    }

    /// All nodes that have joined, to be told something they did not ask for.
    pub(crate) fn everybody(&self) -> impl Iterator<Item = Asker> {
        self.joined.values().map(|joined| Asker { request: None, ..joined.asker })
    }

    /// What there is to know right now under `key`.
    pub(crate) fn tell(&self, key: &str) -> Option<Value> {
        let known = match &self.outcome {
            Some(Ok(book)) => return query(book, key),
            Some(Err(reason)) => json!({ "failed": reason }),
            None => json!({
                "joined": self.joined.values().map(|j| &j.join.facts).collect::<Vec<_>>(),
                "missing": self.missing().into_iter().map(|(_, name)| name).collect::<Vec<_>>(),
            }),
        };
        lookup(known, key)
    }

    fn admit(
        &mut self,
        asker: Asker,
        join: Join,
        peer: String,
        now: Instant,
    ) -> Result<(), String> {
        if let Some(outcome) = &self.outcome {
            return Err(match outcome {
                Ok(_) => "the job has started already".into(),
                Err(reason) => reason.clone(),
            });
        }
        let cluster = Cluster::new(join.workers, join.servers, 1).map_err(|e| e.to_string())?;
        let node = join.facts.node;
        let name = cluster.name(node);
        let Some(role) = cluster.role(node) else {
            return Err(format!("there is no node {node} among {} nodes", cluster.nodes()));
        };
        if role.worker != join.job.is_some() {
            return Err(format!("{name} must describe a job exactly if it is a worker"));
        }
        if let Some(before) = self.joined.get(&node) {
            let before = &before.peer;
            return Err(format!(
                "{name} joined already, from {before}: two processes have the same rank"
            ));
        }
        if join.book != BOOK_VERSION {
            let theirs = join.book;
            return Err(self.call_off(format!(
                "{name} reads version {theirs} of the information book, the coordinator writes version {BOOK_VERSION}: \
                 install the same Poseidon on every node"
            )));
        }
        if let Some((&other, first)) = self.joined.iter().next() {
            let other = cluster.name(other);
            let size = |j: &Join| format!("{} workers and servers '{}'", j.workers, j.servers);
            let (mine, theirs) = (size(&join), size(&first.join));
            if mine != theirs {
                let words = format!("{name} expects {mine}, {other} expects {theirs}");
                return Err(self.call_off(words));
            }
        }
        if let Some(job) = &join.job {
            job.validate()
                .map_err(|e| format!("{name} describes a job that makes no sense: {e}"))?;
            let mut others = self.joined.iter();
            let first = others.find_map(|(&node, j)| Some((node, j.join.job.as_ref()?)));
            if let Some((other, theirs)) = first
                && let Some(words) = theirs.difference(&cluster.name(other), job, &name)
            {
                let words = format!("the workers do not train the same thing: {words}");
                return Err(self.call_off(words));
            }
        }
        match self.gone.remove(&node) {
            Some(before) => {
                tracing::info!(%name, %peer, before = %before.peer, "took a place that was free");
            }
            None => tracing::debug!(%name, %peer, "joined"),
        }
        self.joined.insert(node, Joined { join, asker, peer, since: now });
        if self.joined.len() == cluster.nodes() {
            if self.noticed.is_some() {
                tracing::info!("all {} have joined", cluster.nodes());
            }
            self.outcome = Some(self.write_book());
        }
        Ok(())
    }

    /// Nodes that disagree never become a job: everybody hears why now, not when time is up.
    fn call_off(&mut self, reason: String) -> String {
        self.outcome = Some(Err(reason.clone()));
        reason
    }

    /// Tells all nodes that have joined whether there is a book. Called while that is undecided,
    /// and once after it has been decided.
    fn announce(&mut self) -> Vec<Reply> {
        match &self.outcome {
            None => Vec::new(),
            Some(Ok(book)) => {
                let book = serde_json::to_value(&**book).unwrap_or(Value::Null);
                let askers = self.joined.values().map(|joined| joined.asker);
                let message = match &self.measuring {
                    None => Message::Book(book),
                    Some(measuring) => Message::Draft { book, probers: measuring.probers.clone() },
                };
                Reply::to_all(askers, &message)
            }
            Some(Err(reason)) => {
                let refused = Message::Refused { reason: reason.clone() };
                let joined = std::mem::take(&mut self.joined);
                Reply::to_all(joined.into_values().map(|joined| joined.asker), &refused)
            }
        }
    }

    /// A node is gone: before the book is written its place is free, afterwards the others are
    /// told.
    fn remove(&mut self, connection: u64, reason: Option<String>, now: Instant) -> Vec<Reply> {
        let Some(node) = self.node_of(connection) else { return Vec::new() };
        let name = self.name(node);
        let Some(Joined { peer, since, .. }) = self.joined.remove(&node) else { return Vec::new() };
        let gone = Gone { peer, joined: since, left: now, reason };
        if self.outcome.is_none() {
            let (peer, after) = (&gone.peer, now.duration_since(since));
            let reason = gone.reason.as_deref().unwrap_or("its connection closed");
            tracing::warn!(
                %peer, %reason,
                "{name} went away {after:.1?} after it had joined: its place is free"
            );
            self.gone.insert(node, gone);
            return Vec::new();
        }
        tracing::debug!(peer = %gone.peer, reason = gone.reason, "{name} is gone");
        if std::mem::replace(&mut self.told_of_loss, true) {
            return Vec::new();
        }
        let (peer, ago) = (&gone.peer, now.duration_since(since));
        let why = match &gone.reason {
            Some(reason) => format!("it gave up: {reason}"),
            None => format!(
                "its process ended: the connection from {peer}, by which it had joined {ago:.1?} before, closed"
            ),
        };
        Reply::to_all(self.everybody(), &Message::Lost { node, why })
    }

    /// Writes the book: all nodes are here. Worker 0's number of lanes holds for all nodes. If
    /// ports are to be measured, it is a draft.
    fn write_book(&mut self) -> Result<Arc<Book>, String> {
        let first = &self.joined[&NodeId(0)].join;
        let claims = Claims::new(self.joined.values().map(|joined| &joined.join));
        let probers = claims.probers();
        let job = first.job.clone().ok_or("worker 0 described no job")?;
        let cluster = Cluster::new(first.workers, first.servers, first.lanes);
        let cluster = cluster.and_then(|cluster| match probers.is_empty() {
            true => Ok(job.arrange(claims.settle(cluster, &[])?)),
            false => claims.draft(cluster),
        });
        let cluster = cluster.map_err(|e| e.to_string())?;
        job.fits(&cluster).map_err(|e| e.to_string())?;
        let nodes = self.joined.values().map(|joined| joined.join.facts.clone()).collect();
        let (version, identity, epoch) = (BOOK_VERSION, self.identity, Epoch(1));
        if !probers.is_empty() {
            self.measuring = Some(Measuring::new(claims, probers));
        }
        Ok(Arc::new(Book { version, identity, epoch, cluster, nodes, job }))
    }

    /// Nodes that have not joined, and their names.
    pub(crate) fn missing(&self) -> Vec<(NodeId, String)> {
        let Some(cluster) = self.cluster() else { return Vec::new() };
        let missing = cluster.node_ids().filter(|n| !self.joined.contains_key(n));
        missing.map(|n| (n, cluster.name(n))).collect()
    }

    fn name(&self, node: NodeId) -> String {
        self.cluster().map_or_else(|| format!("node {node}"), |cluster| cluster.name(node))
    }

    /// The cluster, as the nodes that have joined describe it.
    fn cluster(&self) -> Option<Cluster> {
        let first = &self.joined.values().next()?.join;
        Cluster::new(first.workers, first.servers, 1).ok()
    }
}

impl Gone {
    fn words(&self, name: &str, now: Instant) -> String {
        let ago = |then: Instant| format!("{:.1?} ago", now.duration_since(then));
        let (peer, joined, left) = (&self.peer, ago(self.joined), ago(self.left));
        let how = match &self.reason {
            Some(reason) => format!("it gave up {left}: {reason}"),
            None => format!("its connection closed {left}"),
        };
        format!(
            "{name} went away before the job began: it had joined from {peer} {joined}, {how}, and no other process \
             took its place"
        )
    }
}

/// How long the place of a node that went away is kept for a process that is started in its stead.
const FREE: Duration = Duration::from_secs(10);
/// After so long it is said for whom nodes wait. Processes that are started together join within a
/// second or two, also in Python.
const FIRST_NOTICE: Duration = Duration::from_secs(5);
/// The longest pause between two such notices.
const RAREST_NOTICE: Duration = Duration::from_secs(60);
/// So many missing nodes are named. More do not fit into a line.
const SHOWN: usize = 8;

#[cfg(test)]
mod tests;
