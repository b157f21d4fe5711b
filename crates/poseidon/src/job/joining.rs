//! Which nodes have joined, and whether there is a book: decisions of the coordinator, without
//! sockets and threads.

use crate::job::book::{BOOK_VERSION, Book, lookup, query};
use crate::job::control::{Asker, Join, Message, Reply};
use crate::job::link_rate::Measured;
use crate::job::ports::{Claims, Measuring, Step};
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
        if self.deadline().is_none_or(|deadline| now < deadline) {
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

    /// When [`handle_time`](Self::handle_time) has something to do next.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.outcome.is_some() {
            return self.measuring.as_ref().and_then(|measuring| measuring.rounds.deadline());
        }
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

    /// Writes the book: all nodes are here. Worker 0's number of lanes holds for all nodes. If ports
    /// are to be measured, it is a draft.
    fn write_book(&mut self) -> Result<Arc<Book>, String> {
        let first = &self.joined[&NodeId(0)].join;
        let claims = Claims::new(self.joined.values().map(|joined| &joined.join));
        let probers = claims.probers();
        let cluster = Cluster::new(first.workers, first.servers, first.lanes);
        let cluster = cluster.and_then(|cluster| match probers.is_empty() {
            true => claims.settle(cluster, &[]),
            false => claims.draft(cluster),
        });
        let cluster = cluster.map_err(|e| e.to_string())?;
        let job = first.job.clone().ok_or("worker 0 described no job")?;
        let nodes = self.joined.values().map(|joined| joined.join.facts.clone()).collect();
        let (version, identity, epoch) = (BOOK_VERSION, self.identity, Epoch(1));
        if !probers.is_empty() {
            self.measuring = Some(Measuring::new(claims, probers));
        }
        Ok(Arc::new(Book { version, identity, epoch, cluster, nodes, job }))
    }

    fn missing(&self) -> Vec<(NodeId, String)> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::book::{Job, NodeFacts};
    use crate::job::link_rate::LinkRate;
    use poseidon_core::plan::Placement;
    use poseidon_core::{ChunkSize, Layer, Optimizer, Policy, Rate, Servers};

    const PATIENCE: Duration = Duration::from_secs(60);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn joining() -> Joining {
        Joining::new(JobId([7; 16]), PATIENCE)
    }

    fn job() -> Job {
        Job {
            layers: vec![Layer::new("a", 10)],
            optimizer: Optimizer::default(),
            chunk: ChunkSize::default(),
            placement: Placement::Balanced,
            deterministic: false,
            consistency: Default::default(),
            scheme: Policy::Auto,
            batch: None,
            checkpoints: crate::Checkpoints::default(),
        }
    }

    /// Worker `node` of three.
    fn words(node: u16) -> Join {
        let facts = NodeFacts {
            node: NodeId(node),
            host: String::new(),
            rack: None,
            tcp: String::new(),
            other_tcp: Vec::new(),
            unix: None,
            version: String::new(),
            tiles: false,
        };
        let (workers, servers, lanes, book) = (3, Servers::Colocated, 2, BOOK_VERSION);
        let (lanes_by_rate, link_rate, job) = (false, LinkRate::Unknown, Some(job()));
        Join { facts, workers, servers, lanes, lanes_by_rate, link_rate, book, job }
    }

    /// `node` joins by the connection `connection`, whose address is called after it.
    fn join(joining: &mut Joining, node: u16, connection: u64, now: Instant) -> Vec<(u64, Value)> {
        let asker = Asker { connection, request: Some(1) };
        told(joining.handle_join(asker, words(node), format!("address {connection}"), now))
    }

    fn told(replies: Vec<Reply>) -> Vec<(u64, Value)> {
        replies.into_iter().map(|reply| (reply.to.connection, reply.body.value())).collect()
    }

    fn reason((_, answer): &(u64, Value)) -> &str {
        answer["reason"].as_str().unwrap_or_else(|| panic!("not a refusal: {answer}"))
    }

    #[test]
    fn the_last_node_brings_the_book_to_all() {
        let (mut joining, now) = (joining(), Instant::now());
        assert_eq!(join(&mut joining, 2, 12, now), []);
        assert_eq!(join(&mut joining, 0, 10, now), []);
        let told = join(&mut joining, 1, 11, now);
        assert_eq!(told.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [10, 11, 12]);
        for (_, book) in &told {
            assert_eq!(book["type"], "book");
            assert_eq!((&book["epoch"], &book["version"]), (&json!(1), &json!(BOOK_VERSION)));
            assert_eq!(book["identity"], "07".repeat(16));
        }
        let late = join(&mut joining, 1, 13, now);
        assert_eq!(reason(&late[0]), "the job has started already");
    }

    #[test]
    fn a_restarted_process_takes_the_place_of_the_dead_one() {
        let (mut joining, now) = (joining(), Instant::now());
        join(&mut joining, 0, 10, now);
        join(&mut joining, 1, 11, now);
        let twin = join(&mut joining, 1, 12, now);
        assert!(reason(&twin[0]).contains("joined already, from address 11"), "{twin:?}");
        assert!(joining.handle_closed(12, now).is_empty(), "the twin was never in");
        assert!(joining.handle_closed(11, now).is_empty());
        assert_eq!(joining.tell("missing"), Some(json!(["worker 1", "worker 2"])));
        assert_eq!(join(&mut joining, 1, 13, now + seconds(9)), []);
        assert_eq!(joining.deadline(), Some(now + PATIENCE), "nobody is missed any more");
        let told = join(&mut joining, 2, 14, now + seconds(20));
        assert_eq!(told.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [10, 13, 14]);
    }

    #[test]
    fn a_place_that_stays_free_ends_the_wait_of_all() {
        let (mut joining, now) = (joining(), Instant::now());
        join(&mut joining, 0, 10, now);
        join(&mut joining, 1, 11, now + seconds(1));
        joining.handle_closed(11, now + seconds(3));
        assert_eq!(joining.deadline(), Some(now + seconds(13)));
        assert!(joining.handle_time(now + seconds(12)).is_empty());
        let told = told(joining.handle_time(now + seconds(13)));
        assert_eq!(told.len(), 1);
        let words = reason(&told[0]);
        for part in ["worker 1 went away before", "from address 11 12.0s ago", "closed 10.0s ago"] {
            assert!(words.contains(part), "{words}");
        }
        assert!(!words.contains("worker 2"), "it has time left: {words}");
        assert_eq!(reason(&join(&mut joining, 2, 12, now + seconds(14))[0]), words);
    }

    #[test]
    fn a_death_that_nobody_saw_waits_for_somebody_who_does() {
        let (mut joining, now) = (joining(), Instant::now());
        join(&mut joining, 1, 11, now);
        joining.handle_closed(11, now);
        assert_eq!(joining.deadline(), None);
        join(&mut joining, 0, 10, now + seconds(100));
        assert_eq!(joining.deadline(), Some(now + seconds(110)));
        assert_eq!(join(&mut joining, 1, 12, now + seconds(101)), []);
    }

    #[test]
    fn after_the_book_the_first_loss_is_told_to_all_and_a_goodbye_to_nobody() {
        let (mut joining, now) = (joining(), Instant::now());
        (0..3).for_each(|node| drop(join(&mut joining, node, 10 + u64::from(node), now)));
        assert!(joining.handle_leave(12, None, now).is_empty());
        assert!(joining.handle_closed(12, now).is_empty());
        let told = told(joining.handle_closed(11, now + seconds(2)));
        assert_eq!(told.len(), 1);
        assert_eq!((told[0].0, &told[0].1["node"]), (10, &json!(1)));
        let why = told[0].1["why"].as_str().unwrap();
        assert!(why.contains("address 11") && why.contains("2.0s before"), "{why}");
        assert!(joining.handle_leave(10, Some("lost worker 1".into()), now).is_empty());
    }

    #[test]
    fn a_node_that_gives_up_says_why() {
        let (mut joining, now) = (joining(), Instant::now());
        (0..3).for_each(|node| drop(join(&mut joining, node, 10 + u64::from(node), now)));
        let told = told(joining.handle_leave(11, Some("no route".into()), now));
        assert_eq!(told.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [10, 12]);
        assert_eq!(told[0].1["why"], "it gave up: no route");
    }

    #[test]
    fn a_node_that_reads_another_book_is_refused_with_both_versions() {
        let (mut joining, now) = (joining(), Instant::now());
        join(&mut joining, 0, 10, now);
        let asker = Asker { connection: 11, request: None };
        let other = Join { book: BOOK_VERSION + 1, ..words(1) };
        let told = told(joining.handle_join(asker, other, "there".into(), now));
        assert_eq!(told.len(), 2);
        for refusal in &told {
            let words = reason(refusal);
            let theirs = format!("worker 1 reads version {}", BOOK_VERSION + 1);
            assert!(words.contains(&theirs), "{words}");
            assert!(words.contains(&format!("writes version {BOOK_VERSION}")), "{words}");
        }
    }

    #[test]
    fn nodes_of_several_hosts_measure_before_they_have_the_book() {
        let (mut joining, now) = (joining(), Instant::now());
        let asker = |node: u16| Asker { connection: node.into(), request: Some(1) };
        let mut drafts = Vec::new();
        for node in 0..3 {
            let mut words = Join { link_rate: LinkRate::Measured, ..words(node) };
            words.facts.host = format!("host {}", node.min(1));
            drafts = told(joining.handle_join(asker(node), words, String::new(), now));
        }
        assert_eq!(drafts.len(), 3);
        assert_eq!(
            (&drafts[2].1["type"], &drafts[2].1["probers"]),
            (&json!("draft"), &json!([0, 1]))
        );
        let mut post = |node: u16, round, sent, later| {
            let measured = Measured { node: NodeId(node), round, sent, patience_ms: 1000 };
            let mut replies = joining.handle_measured(asker(node), measured, now);
            replies.extend(joining.handle_time(now + later));
            told(replies)
        };
        let missing = post(1, 0, None, seconds(2));
        assert_eq!(missing, [(1, json!({ "type": "missing", "nodes": [0] }))]);
        let sent = |to, mbit: u64| Some((NodeId(to), Rate::of(mbit * 125_000, 1.0)));
        post(0, 3, sent(1, 900), seconds(0));
        post(1, 3, sent(0, 90), seconds(0));
        let books = post(2, 3, None, seconds(0));
        assert_eq!(books.len(), 3);
        assert_eq!(books[0].1["cluster"]["ports"][2], json!({ "number": 1, "rate": 90_000_000 }));
        assert_eq!(joining.tell("ports.0.rate"), Some(json!(90_000_000)));
    }
}
