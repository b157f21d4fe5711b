//! Small facts of all workers, now and then: the accuracy of an epoch, statistics at the end.
//!
//! Every worker posts its value to the coordinator. The coordinator answers all workers when the
//! last one has posted. All values pass through one process, so this is not for tensors.

use crate::GatherError;
use crate::job::control::{Asker, Message, Reply};
use crate::job::line::{ControlLine, JobState, LineError};
use crate::job::rounds::{Posted, Rounds, deadline};
use poseidon_core::{Cluster, NodeId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use std::time::{Duration, Instant};

/// What a worker says to the coordinator.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Post {
    pub(crate) node: NodeId,
    pub(crate) topic: String,
    pub(crate) value: Box<RawValue>,
    /// How long this worker waits for the others, in milliseconds.
    pub(crate) patience_ms: u64,
    /// Dedicated servers that post as well.
    #[serde(default)]
    pub(crate) servers: Vec<NodeId>,
}

impl ControlLine {
    /// Posts this worker's value of `topic` and waits for the others'. `watch` tells what the lanes
    /// know meanwhile.
    pub(crate) fn gather<T: Serialize + DeserializeOwned>(
        &self,
        topic: &str,
        value: &T,
        patience: Duration,
        watch: &dyn Fn() -> JobState,
    ) -> Result<Vec<T>, GatherError> {
        self.gather_with(&[], topic, value, patience, watch)
    }

    /// As [`gather`](Self::gather), among all workers and these dedicated `servers`, whose values come
    /// last.
    pub(crate) fn gather_with<T: Serialize + DeserializeOwned>(
        &self,
        servers: &[NodeId],
        topic: &str,
        value: &T,
        patience: Duration,
        watch: &dyn Fn() -> JobState,
    ) -> Result<Vec<T>, GatherError> {
        let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        let unlike = |error: serde_json::Error| GatherError::Unlike { why: error.to_string() };
        let value = to_raw_value(value).map_err(unlike)?;
        let (node, topic) = (self.me(), topic.into());
        let expected = self.workers() + servers.len();
        let servers = servers.to_vec();
        let post = Message::Gather(Post { node, topic, value, patience_ms, servers });
        let why = match self.ask(&post, patience, watch) {
            Ok(Message::Gathered { values }) if values.len() == expected => {
                let read = |value: Box<RawValue>| serde_json::from_str(value.get());
                return values.into_iter().map(read).collect::<Result<_, _>>().map_err(unlike);
            }
            Ok(Message::Gathered { values }) => {
                format!("expected the values of {expected} nodes, got {}", values.len())
            }
            Ok(Message::Missing { nodes }) => {
                let missing = nodes.into_iter().map(|node| self.name(node)).collect();
                return Err(GatherError::Missing { missing, waited: patience });
            }
            Ok(Message::Refused { reason }) => return Err(GatherError::Refused { reason }),
            Ok(other) => format!("expected the values of all workers, got {}", other.name()),
            Err(LineError::TooLarge(why)) => return Err(GatherError::TooLarge { why }),
            Err(LineError::Departed(node)) => {
                return Err(GatherError::Departed { node: self.name(node) });
            }
            Err(error) => error.to_string(),
        };
        Err(GatherError::Broken { address: self.address().into(), why })
    }
}

/// The coordinator's side: takes a worker's value, and answers all workers if it was the last
/// value.
pub(crate) fn post(
    rounds: &mut Rounds<Box<RawValue>>,
    cluster: &Cluster,
    asker: Asker,
    post: Post,
    now: Instant,
) -> Vec<Reply> {
    let Post { node, topic, value, patience_ms, servers } = post;
    let name = cluster.name(node);
    let is_server = |node: &NodeId| cluster.role(*node).is_some_and(|role| !role.worker);
    if !servers.iter().all(is_server) {
        let reason = "it names dedicated servers that the job does not have";
        return vec![Reply::refusal(asker, reason.into())];
    }
    let members: Vec<NodeId> = cluster.worker_ids().chain(servers).collect();
    if !members.contains(&node) {
        return vec![Reply::refusal(asker, format!("{name} is not a worker of this job"))];
    }
    let posted = Posted { node, asker, value, deadline: deadline(now, patience_ms) };
    match rounds.post(&topic, members, posted) {
        Err(_) => {
            let reason = format!("{name} has posted it already, and not all others have");
            vec![Reply::refusal(asker, reason)]
        }
        Ok(None) => Vec::new(),
        Ok(Some(mut round)) => {
            let values = round.posts.values_mut().map(|(_, value)| std::mem::take(value)).collect();
            round.answer(&Message::Gathered { values })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::control::Numbered;
    use poseidon_core::Servers;
    use poseidon_core::wire::MAX_CONTROL;
    use serde_json::{Value, json};

    fn cluster() -> Cluster {
        Cluster::new(3, Servers::Dedicated(1), 1).unwrap()
    }

    /// Posts `value` as `node`, whose connection has its number, and returns who is told what.
    fn say(
        rounds: &mut Rounds<Box<RawValue>>,
        node: u16,
        topic: &str,
        value: Value,
    ) -> Vec<(u64, Value)> {
        let asker = Asker { connection: node.into(), request: None };
        let (node, topic, servers) = (NodeId(node), topic.into(), Vec::new());
        let value = to_raw_value(&value).unwrap();
        let said = Post { node, topic, value, patience_ms: 1000, servers };
        told(post(rounds, &cluster(), asker, said, Instant::now()))
    }

    fn told(replies: Vec<Reply>) -> Vec<(u64, Value)> {
        replies.into_iter().map(|reply| (reply.to.connection, reply.body.value())).collect()
    }

    #[test]
    fn all_are_answered_with_the_last_in_rank_order_and_the_round_is_forgotten() {
        let mut rounds = Rounds::default();
        for round in 0..3 {
            assert_eq!(say(&mut rounds, 2, "a", json!(2 + round)), []);
            assert_eq!(say(&mut rounds, 0, "a", json!(round)), []);
            let told = say(&mut rounds, 1, "a", json!(1 + round));
            let values = json!([round, round + 1, round + 2]);
            let answer = json!({ "type": "gathered", "values": values });
            assert_eq!(told, [0, 1, 2].map(|node| (node, answer.clone())));
            assert!(rounds.get("a").is_none());
        }
    }

    #[test]
    fn values_are_passed_on_as_they_were_posted() {
        let mut rounds = Rounds::default();
        let text = r#"{"b":1.50,"a":[1e2, 0.30000000000000000001]}"#;
        let mut replies = Vec::new();
        for node in 0..3 {
            let body = format!(
                r#"{{"value":{text},"type":"gather","node":{node},"topic":"a","patience_ms":1000}}"#
            );
            let Message::Gather(said) = Numbered::parse(body.as_bytes()).unwrap().message else {
                panic!("{body}")
            };
            let asker = Asker { connection: node, request: None };
            replies = post(&mut rounds, &cluster(), asker, said, Instant::now());
        }
        let expected = format!(r#"{{"type":"gathered","values":[{text},{text},{text}]}}"#);
        assert_eq!(replies[0].body.text(), expected);
    }

    #[test]
    fn only_workers_post_and_only_once_a_round() {
        let mut rounds = Rounds::default();
        let mut refused = |node| {
            let told = say(&mut rounds, node, "a", json!(0));
            told[0].1["reason"].as_str().unwrap().to_string()
        };
        assert_eq!(refused(3), "server 0 (node 3) is not a worker of this job");
        assert!(refused(4).contains("is not a worker"));
        assert!(rounds.get("a").is_none());
        say(&mut rounds, 1, "a", json!(0));
        let told = say(&mut rounds, 1, "a", json!(1));
        assert!(told[0].1["reason"].as_str().unwrap().contains("worker 1 has posted it already"));
        say(&mut rounds, 0, "a", json!(0));
        let told = say(&mut rounds, 2, "a", json!(0));
        assert_eq!(told[1].1["values"], json!([0, 0, 0]));
    }

    #[test]
    fn who_waits_is_told_who_is_missing() {
        let mut rounds = Rounds::default();
        say(&mut rounds, 1, "a", json!(0));
        let now = Instant::now();
        let due = rounds.deadline().unwrap();
        assert!(now < due && rounds.poll_expired(now).is_none());
        say(&mut rounds, 1, "b", json!(0));
        let expired = rounds.poll_expired(due).expect("its time has come");
        let missing = json!({ "type": "missing", "nodes": [0, 2] });
        assert_eq!(told(expired.tell_missing()), [(1, missing)]);
        assert!(rounds.get("a").is_none() && rounds.get("b").is_some());
    }

    #[test]
    fn values_that_are_too_large_together_are_refused() {
        let mut rounds = Rounds::default();
        let half = json!("x".repeat(MAX_CONTROL / 2));
        say(&mut rounds, 0, "a", half.clone());
        say(&mut rounds, 1, "a", half.clone());
        for (_, answer) in say(&mut rounds, 2, "a", half) {
            assert_eq!(answer["type"], "refused");
            let reason = answer["reason"].as_str().unwrap();
            assert!(reason.contains("at most 67108864"), "{reason}");
        }
    }
}
