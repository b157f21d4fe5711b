//! What several nodes post to the coordinator under one name. A round is complete when the last of
//! its members has posted.

use crate::job::control::{Asker, Message, Reply};
use crate::job::line::{ControlLine, JobState};
use poseidon_core::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The names that some nodes have posted and others have not. A name that is complete or has
/// expired is forgotten.
#[derive(Debug)]
pub(crate) struct Rounds<T> {
    open: BTreeMap<String, Round<T>>,
}

/// What has been posted under one name.
#[derive(Debug)]
pub(crate) struct Round<T> {
    /// Who has to post.
    pub(crate) members: Vec<NodeId>,
    pub(crate) posts: BTreeMap<NodeId, (Asker, T)>,
    /// When the least patient of those who have posted has waited long enough. None: all of them
    /// wait for as long as it takes.
    deadline: Option<Instant>,
}

/// An open round, as the coordinator tells it to who asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waiting {
    pub(crate) name: String,
    /// Who has posted and waits.
    pub(crate) waiting: Vec<NodeId>,
    /// Who has not posted.
    pub(crate) missing: Vec<NodeId>,
}

/// The question about open rounds. It is answered with a list of [`Waiting`].
pub(crate) const WAITING: &str = "waiting";

impl ControlLine {
    /// The first round in which others wait for this node. None if there is none, or if the
    /// coordinator does not say within `patience`.
    pub(crate) fn awaited(&self, patience: Duration) -> Option<Waiting> {
        let question = Message::Query { key: WAITING.into() };
        let answer = self.ask(&question, patience, &|| JobState::Running);
        let Ok(Message::Answer { value: Some(value) }) = answer else { return None };
        let open: Vec<Waiting> = serde_json::from_str(value.get()).ok()?;
        let awaits_program =
            |round: &Waiting| round.missing.contains(&self.me()) && !round.name.starts_with(BESIDE);
        open.into_iter().find(awaits_program)
    }
}

/// Names that begin so are posted by threads beside the training programs. No program waits in them.
pub(crate) const BESIDE: &str = "beside: ";

/// One node's post.
#[derive(Debug)]
pub(crate) struct Posted<T> {
    pub(crate) node: NodeId,
    pub(crate) asker: Asker,
    pub(crate) value: T,
    pub(crate) deadline: Option<Instant>,
}

/// The node has posted in this round before.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PostedAlready;

/// When a node that has a patience of `patience_ms` at `now` has none left. None if no clock counts
/// that far.
pub(crate) fn deadline(now: Instant, patience_ms: u64) -> Option<Instant> {
    now.checked_add(Duration::from_millis(patience_ms))
}

impl<T> Default for Rounds<T> {
    fn default() -> Self {
        Self { open: BTreeMap::new() }
    }
}

impl<T> Rounds<T> {
    /// Adds to the round of `name`, or opens one among `members`. Returns the round if it is
    /// complete.
    pub(crate) fn post(
        &mut self,
        name: &str,
        members: Vec<NodeId>,
        posted: Posted<T>,
    ) -> Result<Option<Round<T>>, PostedAlready> {
        let fresh = || Round { members, posts: BTreeMap::new(), deadline: None };
        let round = self.open.entry(name.into()).or_insert_with(fresh);
        if round.posts.contains_key(&posted.node) {
            return Err(PostedAlready);
        }
        round.posts.insert(posted.node, (posted.asker, posted.value));
        round.deadline = [round.deadline, posted.deadline].into_iter().flatten().min();
        let complete = round.posts.len() == round.members.len();
        Ok(if complete { self.open.remove(name) } else { None })
    }

    /// The open round of `name`.
    pub(crate) fn get(&self, name: &str) -> Option<&Round<T>> {
        self.open.get(name)
    }

    /// Ends the round of `name`.
    pub(crate) fn take(&mut self, name: &str) -> Option<Round<T>> {
        self.open.remove(name)
    }

    /// Ends a round in which somebody has waited long enough.
    pub(crate) fn poll_expired(&mut self, now: Instant) -> Option<Round<T>> {
        let due = |round: &Round<T>| round.deadline.is_some_and(|deadline| deadline <= now);
        let name = self.open.iter().find(|(_, round)| due(round)).map(|(name, _)| name.clone())?;
        self.open.remove(&name)
    }

    /// Ends a round that awaits `node`.
    pub(crate) fn poll_awaiting(&mut self, node: NodeId) -> Option<Round<T>> {
        let awaits = |r: &Round<T>| r.members.contains(&node) && !r.posts.contains_key(&node);
        let name = self.open.iter().find(|(_, round)| awaits(round)).map(|(n, _)| n.clone())?;
        self.open.remove(&name)
    }

    /// The open rounds.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Waiting> + '_ {
        self.open.iter().map(|(name, round)| Waiting {
            name: name.clone(),
            waiting: round.posts.keys().copied().collect(),
            missing: round.missing().collect(),
        })
    }

    /// When the next round expires.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.open.values().filter_map(|round| round.deadline).min()
    }

    /// Forgets all rounds.
    pub(crate) fn clear(&mut self) {
        self.open.clear();
    }
}

impl<T> Round<T> {
    /// Says the same to all who wait.
    pub(crate) fn answer(&self, message: &Message) -> Vec<Reply> {
        Reply::to_all(self.posts.values().map(|(asker, _)| *asker), message)
    }

    /// Tells all who wait who has not posted.
    pub(crate) fn tell_missing(&self) -> Vec<Reply> {
        self.answer(&Message::Missing { nodes: self.missing().collect() })
    }

    fn missing(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.members.iter().copied().filter(|node| !self.posts.contains_key(node))
    }
}
