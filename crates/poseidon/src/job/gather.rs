//! Small facts of all workers, now and then: the accuracy of an epoch, statistics at the end.
//!
//! Every worker posts its value to the coordinator, which answers all when the last one has. This
//! takes one control connection per call and all values pass through one process, so it is not for
//! tensors.

use crate::job::control::{Answer, Message, answer, frame, receive};
use crate::lane::Command;
use crate::lane::board::Board;
use crate::node::Node;
use crate::{Error, Session};
use poseidon_core::wire::Purpose;
use poseidon_core::{Cluster, LaneId, NodeId};
use poseidon_link::{Caller, ConnectError, Stream, connect};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Why the workers' values of a topic did not come together.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatherError {
    /// Some workers never posted theirs.
    #[error("nothing from {} within {waited:?}", .missing.join(", "))]
    Missing {
        /// The workers, by name.
        missing: Vec<String>,
        /// How long the others waited.
        waited: Duration,
    },
    /// A worker has finished, and will not post.
    #[error("{node} finished while others go on")]
    Departed {
        /// The worker, by name.
        node: String,
    },
    /// The value is too large for a control message.
    #[error("{why}; what is large goes through layers")]
    TooLarge {
        /// Its size and the limit.
        why: String,
    },
    /// The coordinator would not have the value.
    #[error("the coordinator refused it: {reason}")]
    Refused {
        /// Its words.
        reason: String,
    },
    /// The coordinator, which was there when the job began, cannot be reached.
    #[error("the coordinator was not reached within {waited:.1?}: {why}")]
    Unreachable {
        /// How long it was tried.
        waited: Duration,
        /// What happened, the last time.
        why: String,
    },
    /// The conversation broke off.
    #[error("talking to the coordinator at {address}: {why}")]
    Broken {
        /// The coordinator's address.
        address: String,
        /// What happened.
        why: String,
    },
}

impl Session {
    /// Gives every worker the values of all workers, in rank order. Every worker calls it with the
    /// same `topic`, and it returns when the last one has. A topic may be gathered again
    /// afterwards, and threads may gather different topics at the same time.
    ///
    /// It is for small facts now and then: values go through the coordinator as JSON (so a float
    /// must be finite), all of a topic's together at most 64 MiB.
    ///
    /// If a worker does not post within the session's time-out, the error names it, and the job
    /// stops. If the job fails meanwhile, the error is why.
    pub fn gather(&self, topic: &str, value: &Value) -> Result<Vec<Value>, Error> {
        self.parts.board.failure().map_or(Ok(()), Err)?;
        let why = match converse(&self.node, &self.parts.board, topic, value, self.timeout) {
            Ok(values) => return Ok(values),
            Err(why) => why,
        };
        let error = Error::Gather { topic: topic.into(), why: why.clone() };
        match why {
            // This program's mistake; nothing is lost.
            GatherError::TooLarge { .. } | GatherError::Refused { .. } => return Err(error),
            GatherError::Missing { .. } | GatherError::Departed { .. } => {}
            // Most likely the coordinator has died with its node: the lanes know which it was.
            GatherError::Unreachable { .. } | GatherError::Broken { .. } => {
                if let Some(failure) = await_failure(&self.parts.board) {
                    return Err(failure);
                }
            }
        }
        // The others would wait for this worker, here or in their next step.
        self.parts.command_all(|| Command::Abort(error.to_string()));
        Err(error)
    }
}

/// What a worker says to the coordinator.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Post {
    pub(crate) node: NodeId,
    pub(crate) topic: String,
    pub(crate) value: Value,
    /// How long this worker waits for the others, in milliseconds.
    pub(crate) patience_ms: u64,
}

/// The coordinator's side: the topics that some workers have posted and others have not. A topic
/// that has been answered is forgotten.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    open: BTreeMap<String, Round>,
    stopped: bool,
}

#[derive(Debug, Default)]
struct Round {
    values: BTreeMap<NodeId, Value>,
    waiting: Vec<Sender<Answer>>,
}

impl Rounds {
    /// Takes a worker's value. The answer comes when the round is over; never, if the coordinator
    /// has stopped. The error is for the worker.
    pub(crate) fn post(
        &mut self,
        cluster: &Cluster,
        post: Post,
    ) -> Result<Receiver<Answer>, String> {
        let Post { node, topic, value, .. } = post;
        let name = cluster.name(node);
        if !cluster.role(node).is_some_and(|role| role.worker) {
            return Err(format!("{name} is not a worker of this job"));
        }
        let (tell, told) = channel();
        if self.stopped {
            return Ok(told);
        }
        let round = self.open.entry(topic.clone()).or_default();
        if round.values.contains_key(&node) {
            return Err(format!("{name} has posted it already, and not all others have"));
        }
        round.values.insert(node, value);
        round.waiting.push(tell);
        if round.values.len() == cluster.workers()
            && let Some(Round { values, waiting }) = self.open.remove(&topic)
        {
            let values = values.into_values().collect();
            answer_all(&waiting, &Message::Gathered { values });
        }
        Ok(told)
    }

    /// Somebody has waited for `topic` long enough: all who wait are told who is missing.
    pub(crate) fn expire(&mut self, cluster: &Cluster, topic: &str) {
        let Some(Round { values, waiting }) = self.open.remove(topic) else { return };
        let nodes = cluster.worker_ids().filter(|node| !values.contains_key(node)).collect();
        answer_all(&waiting, &Message::Missing { nodes });
    }

    /// No round will be over any more.
    pub(crate) fn stop(&mut self) {
        self.stopped = true;
        self.open.clear();
    }
}

/// Encoded once for all of them.
fn answer_all(waiting: &[Sender<Answer>], message: &Message) {
    match answer(message) {
        // Whoever waits does so until it is told: its thread holds the receiver.
        Ok(answer) => waiting.iter().for_each(|tell| drop(tell.send(answer.clone()))),
        Err(error) => tracing::warn!(%error, "no answer for those who gather"),
    }
}

/// Posts the value and waits for the others'.
fn converse(
    node: &Node,
    board: &Board,
    topic: &str,
    value: &Value,
    patience: Duration,
) -> Result<Vec<Value>, GatherError> {
    let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
    let post = Post { node: node.me, topic: topic.into(), value: value.clone(), patience_ms };
    let post = frame(node.me, &Message::Gather(post))
        .map_err(|e| GatherError::TooLarge { why: e.to_string() })?;
    let mut coordinator = reach(node, board, patience)?;
    let heard = coordinator.write_all(&post).and_then(|()| receive(&mut coordinator));
    let workers = node.book.cluster.workers();
    if let (Err(_), Some(departed), None) = (&heard, coordinator.departed, board.failure()) {
        return Err(GatherError::Departed { node: node.book.cluster.name(departed) });
    }
    let why = match heard {
        Ok(Message::Gathered { values }) if values.len() == workers => return Ok(values),
        Ok(Message::Missing { nodes }) => {
            let missing = nodes.into_iter().map(|missing| node.book.cluster.name(missing));
            return Err(GatherError::Missing { missing: missing.collect(), waited: patience });
        }
        Ok(Message::Refused { reason }) => return Err(GatherError::Refused { reason }),
        Ok(Message::Gathered { values }) => {
            format!("expected the values of {workers} workers, got {}", values.len())
        }
        Ok(other) => format!("expected the values of all workers, got {}", other.name()),
        Err(error) => error.to_string(),
    };
    Err(GatherError::Broken { address: node.coordinator.0.to_string(), why })
}

/// Calls the coordinator, again and again if need be, until the job fails or patience ends.
fn reach<'a>(
    node: &'a Node,
    board: &'a Board,
    patience: Duration,
) -> Result<Watched<'a>, GatherError> {
    let start = Instant::now();
    let (address, credentials) = &node.coordinator;
    let caller = Caller { purpose: Purpose::Control, node: node.me, lane: LaneId(0) };
    loop {
        let left = patience.saturating_sub(start.elapsed());
        match connect(address, caller, credentials, Instant::now() + left.min(ATTEMPT)) {
            Ok(stream) => {
                let deadline = Instant::now() + patience + LAST_WORDS;
                return Ok(Watched { stream, board, deadline, departed: None });
            }
            Err(ConnectError::GaveUp { .. }) if left > ATTEMPT && board.failure().is_none() => {}
            Err(error) => {
                let (waited, why) = (start.elapsed(), error.to_string());
                return Err(GatherError::Unreachable { waited, why });
            }
        }
    }
}

/// A control connection that is no use any more once the job has failed.
struct Watched<'a> {
    stream: Stream,
    board: &'a Board,
    deadline: Instant,
    /// A node that has said goodbye: the deadline is a near one since.
    departed: Option<NodeId>,
}

impl Watched<'_> {
    /// Tries in short stretches, and between them looks at the board.
    fn patiently<T>(&mut self, mut act: impl FnMut(&mut Stream) -> io::Result<T>) -> io::Result<T> {
        loop {
            if self.board.failure().is_some() {
                return Err(io::Error::other("the job has failed"));
            }
            let now = Instant::now();
            if self.departed.is_none()
                && let Some(node) = self.board.departed()
            {
                self.departed = Some(node);
                // It may have posted before it left, and the answer be under way.
                self.deadline = self.deadline.min(now + LAST_WORDS);
            }
            self.stream.set_deadline(Some(self.deadline.min(now + GLANCE)));
            match act(&mut self.stream) {
                Err(e) if e.kind() == ErrorKind::TimedOut && now < self.deadline => {}
                done => return done,
            }
        }
    }
}

impl Read for Watched<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.patiently(|stream| stream.read(buf))
    }
}

impl Write for Watched<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.patiently(|stream| stream.write(buf))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why the job has failed, if that is known now or soon.
fn await_failure(board: &Board) -> Option<Error> {
    let deadline = Instant::now() + ECHO;
    while board.failure().is_none() && Instant::now() < deadline {
        std::thread::sleep(GLANCE);
    }
    board.failure()
}

/// How often a wait looks whether the job has failed.
const GLANCE: Duration = Duration::from_millis(100);
/// How long one call to the coordinator may take: a handshake is two round trips.
const ATTEMPT: Duration = Duration::from_secs(1);
/// The coordinator's patience begins later than ours, and ends with words about who is missing.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How soon a death that cut a control connection is known to every lane: at once where there is a
/// link to the dead node, and through a server elsewhere.
const ECHO: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::Servers;
    use poseidon_core::wire::{Header, MAX_CONTROL};
    use serde_json::json;

    fn cluster() -> Cluster {
        Cluster::new(3, Servers::Dedicated(1), 1).unwrap()
    }

    fn post(node: u16, topic: &str, value: Value) -> Post {
        Post { node: NodeId(node), topic: topic.into(), value, patience_ms: 0 }
    }

    fn decode(answer: &Answer) -> Value {
        serde_json::from_slice(&answer[Header::SIZE..]).unwrap()
    }

    #[test]
    fn all_are_answered_with_the_last_in_rank_order_and_the_round_is_forgotten() {
        let mut rounds = Rounds::default();
        for round in 0..3 {
            let told = [2, 0, 1].map(|node| {
                assert_eq!(rounds.open.len(), usize::from(node != 2));
                rounds.post(&cluster(), post(node, "a", json!(node + round))).unwrap()
            });
            assert!(rounds.open.is_empty());
            for told in told {
                let values = json!([round, round + 1, round + 2]);
                let answer = decode(&told.try_recv().unwrap());
                assert_eq!(answer, json!({ "type": "gathered", "values": values }));
            }
        }
    }

    #[test]
    fn only_workers_post_and_only_once_a_round() {
        let mut rounds = Rounds::default();
        let mut refused = |node| rounds.post(&cluster(), post(node, "a", json!(0))).unwrap_err();
        assert_eq!(refused(3), "server 0 (node 3) is not a worker of this job");
        assert!(refused(4).contains("is not a worker"));
        assert!(rounds.open.is_empty());
        let told = rounds.post(&cluster(), post(1, "a", json!(0))).unwrap();
        let reason = rounds.post(&cluster(), post(1, "a", json!(1))).unwrap_err();
        assert!(reason.contains("worker 1 has posted it already"), "{reason}");
        rounds.post(&cluster(), post(0, "a", json!(0))).unwrap();
        rounds.post(&cluster(), post(2, "a", json!(0))).unwrap();
        assert_eq!(decode(&told.try_recv().unwrap())["values"], json!([0, 0, 0]));
    }

    #[test]
    fn who_waits_is_told_who_is_missing() {
        let mut rounds = Rounds::default();
        let told = rounds.post(&cluster(), post(1, "a", json!(0))).unwrap();
        let other = rounds.post(&cluster(), post(1, "b", json!(0))).unwrap();
        rounds.expire(&cluster(), "a");
        let missing = json!({ "type": "missing", "nodes": [0, 2] });
        assert_eq!(decode(&told.try_recv().unwrap()), missing);
        assert!(other.try_recv().is_err());
        assert_eq!(rounds.open.len(), 1);
    }

    #[test]
    fn values_that_are_too_large_together_are_refused() {
        let mut rounds = Rounds::default();
        let half = json!("x".repeat(MAX_CONTROL / 2));
        let told =
            [0, 1, 2].map(|node| rounds.post(&cluster(), post(node, "a", half.clone())).unwrap());
        for told in told {
            let answer = decode(&told.try_recv().unwrap());
            assert_eq!(answer["type"], "refused");
            let reason = answer["reason"].as_str().unwrap();
            assert!(reason.contains("at most 67108864"), "{reason}");
        }
    }

    #[test]
    fn nobody_is_answered_by_a_coordinator_that_has_stopped() {
        let mut rounds = Rounds::default();
        let before = rounds.post(&cluster(), post(0, "a", json!(0))).unwrap();
        rounds.stop();
        let after = rounds.post(&cluster(), post(1, "a", json!(0))).unwrap();
        assert!(before.recv().is_err() && after.recv().is_err());
    }
}
