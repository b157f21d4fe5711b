//! Channels: what sessions and groups get from the coordinator, so that they can share the links of
//! a job.
//!
//! Every member posts the channel's name, its members and the job it is for. When the last member
//! has posted, and all agree, they get the channel's number.

use crate::OpenError;
use crate::job::book::Job;
use crate::job::control::{Asker, Message, Reply};
use crate::job::line::{ControlLine, JobState, LineError};
use crate::job::rounds::{Posted, Rounds, deadline};
use poseidon_core::{ChannelId, Cluster, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// A channel that is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Channel<'a> {
    /// Tells the channel from others that are being opened at the same time.
    pub(crate) name: &'a str,
    /// In ascending order.
    pub(crate) members: &'a [NodeId],
    /// What is trained over the channel; none for a group.
    pub(crate) job: Option<&'a Job>,
}

/// What a node says to the coordinator.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Opening {
    pub(crate) node: NodeId,
    pub(crate) name: String,
    pub(crate) members: Vec<NodeId>,
    pub(crate) job: Option<Job>,
    /// How long this node waits for the others, in milliseconds.
    pub(crate) patience_ms: u64,
}

impl ControlLine {
    /// Opens a channel: returns its number when every member has asked for the same. `watch` tells
    /// what the lanes know meanwhile.
    pub(crate) fn open(
        &self,
        channel: Channel<'_>,
        patience: Duration,
        watch: &dyn Fn() -> JobState,
    ) -> Result<ChannelId, OpenError> {
        let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        let opening = Message::Open(Opening {
            node: self.me(),
            name: channel.name.into(),
            members: channel.members.into(),
            job: channel.job.cloned(),
            patience_ms,
        });
        let why = match self.ask(&opening, patience, watch) {
            Ok(Message::Opened { channel }) => return Ok(channel),
            Ok(Message::Missing { nodes }) => {
                let missing = nodes.into_iter().map(|node| self.name(node)).collect();
                return Err(OpenError::Missing { missing, waited: patience });
            }
            Ok(Message::Refused { reason }) => return Err(OpenError::Refused { reason }),
            Ok(other) => format!("expected a channel's number, got {}", other.name()),
            Err(LineError::TooLarge(reason)) => return Err(OpenError::Refused { reason }),
            Err(LineError::Departed(node)) => {
                return Err(OpenError::Departed { node: self.name(node) });
            }
            Err(error) => error.to_string(),
        };
        Err(OpenError::Broken { address: self.address().into(), why })
    }
}

/// The coordinator's side: the channels that are being opened, and the next one's number.
#[derive(Debug)]
pub(crate) struct Openings {
    pub(crate) rounds: Rounds<Option<Job>>,
    next: ChannelId,
    /// Nodes that have left the job.
    left: BTreeSet<NodeId>,
}

impl Default for Openings {
    fn default() -> Self {
        Self { rounds: Rounds::default(), next: FIRST, left: BTreeSet::new() }
    }
}

impl Openings {
    /// Takes one member's post. Answers all members if it was the last post, or if it differs from
    /// the others.
    pub(crate) fn post(
        &mut self,
        cluster: &Cluster,
        asker: Asker,
        opening: Opening,
        now: Instant,
    ) -> Vec<Reply> {
        let Opening { node, name, members, job, patience_ms } = opening;
        let me = cluster.name(node);
        if let Some(reason) = nonsense(cluster, node, &members) {
            return vec![Reply::refusal(asker, reason)];
        }
        if let Some(&left) = members.iter().find(|member| self.left.contains(member)) {
            return vec![Reply::refusal(asker, has_left(cluster, left))];
        }
        if let Some(round) = self.rounds.get(&name)
            && let Some((&other, (_, theirs))) = round.posts.first_key_value()
        {
            if round.posts.contains_key(&node) {
                let reason = format!("{me} is opening '{name}' already, and not all others are");
                return vec![Reply::refusal(asker, reason)];
            }
            let their_name = cluster.name(other);
            let difference = if round.members == members {
                differing_jobs(&me, job.as_ref(), &their_name, theirs.as_ref())
            } else {
                let (ours, theirs) = (list(cluster, &members), list(cluster, &round.members));
                Some(format!("its members are {ours} on {me} but {theirs} on {their_name}"))
            };
            if let Some(difference) = difference {
                // These members would never agree. All who have posted hear why now, not when time
                // is up.
                let reason = format!("'{name}' is not the same on all its members: {difference}");
                let refused = Message::Refused { reason };
                let mut replies = vec![Reply::new(asker, &refused)];
                replies.extend(self.rounds.take(&name).iter().flat_map(|r| r.answer(&refused)));
                return replies;
            }
        }
        let posted = Posted { node, asker, value: job, deadline: deadline(now, patience_ms) };
        match self.rounds.post(&name, members, posted) {
            Ok(Some(round)) => {
                let channel = self.next;
                self.next.0 += 1;
                round.answer(&Message::Opened { channel })
            }
            _ => Vec::new(),
        }
    }

    /// `node` has left the job: refuses the openings that wait for it, and all later ones.
    pub(crate) fn handle_left(&mut self, cluster: &Cluster, node: NodeId) -> Vec<Reply> {
        self.left.insert(node);
        let mut replies = Vec::new();
        while let Some(round) = self.rounds.poll_awaiting(node) {
            let reason = has_left(cluster, node);
            replies.extend(round.answer(&Message::Refused { reason }));
        }
        replies
    }
}

/// Why a post makes no sense, whatever the other members post.
fn nonsense(cluster: &Cluster, node: NodeId, members: &[NodeId]) -> Option<String> {
    let unknown = |node: &&NodeId| cluster.role(**node).is_none();
    if !members.is_sorted_by(|a, b| a < b) {
        return Some(format!("the members {} are not in ascending order", list(cluster, members)));
    }
    if let Some(stranger) = members.iter().find(unknown) {
        return Some(format!("there is no node {stranger} among {} nodes", cluster.nodes()));
    }
    let outside = || format!("{} is not among {}", cluster.name(node), list(cluster, members));
    (!members.contains(&node)).then(outside)
}

fn differing_jobs(
    me: &str,
    mine: Option<&Job>,
    other: &str,
    theirs: Option<&Job>,
) -> Option<String> {
    match (theirs, mine) {
        (Some(theirs), Some(mine)) => theirs.difference(other, mine, me),
        (None, None) => None,
        (Some(_), None) => Some(format!("{other} describes layers for it, {me} does not")),
        (None, Some(_)) => Some(format!("{me} describes layers for it, {other} does not")),
    }
}

fn has_left(cluster: &Cluster, node: NodeId) -> String {
    format!("{} has left the job", cluster.name(node))
}

fn list(cluster: &Cluster, nodes: &[NodeId]) -> String {
    let names: Vec<_> = nodes.iter().map(|&node| cluster.name(node)).collect();
    if names.is_empty() { "nobody".into() } else { names.join(", ") }
}

/// 0 is the link itself, 1 the job's first session.
const FIRST: ChannelId = ChannelId(2);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Coordinator;
    use crate::job::book::{BOOK_VERSION, NodeFacts};
    use crate::job::config::credentials;
    use crate::job::control::Join;
    use crate::job::link_rate::LinkRate;
    use crate::job::rounds::Waiting;
    use poseidon_core::plan::Placement;
    use poseidon_core::{ChunkSize, Layer, Optimizer, Policy, Servers};
    use poseidon_link::{Address, Caller, Secret, connect};
    use std::net::{IpAddr, Ipv4Addr};
    use std::thread;

    const LONG: Duration = Duration::from_secs(60);

    fn job(len: usize) -> Job {
        Job {
            layers: vec![Layer::new("a", len)],
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

    /// A job of so many workers: its coordinator, and everybody's line to it.
    fn start(workers: u16) -> (Coordinator, Vec<ControlLine>) {
        let keys = credentials("test", Secret::random().unwrap(), false);
        let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let coordinator = Coordinator::bind(ip, 0, keys.clone(), LONG).unwrap();
        let address = coordinator.address().to_string();
        let join = |node| {
            let to = Address::Tcp(address.clone());
            let deadline = Instant::now() + LONG;
            let stream = connect(&to, Caller::control(node), &keys, deadline).unwrap();
            let line = ControlLine::start(stream, node, &address).unwrap();
            let facts = NodeFacts {
                node,
                host: "here".into(),
                rack: None,
                tcp: "127.0.0.1:9".into(),
                other_tcp: Vec::new(),
                unix: None,
                version: "0".into(),
                tiles: false,
                queue: None,
            };
            let (servers, lanes, book) = (Servers::Colocated, 1, BOOK_VERSION);
            let (lanes_by_rate, link_rate, job) = (false, LinkRate::Unknown, Some(job(10)));
            let words =
                Join { facts, workers, servers, lanes, lanes_by_rate, link_rate, book, job };
            line.join(words, LONG).unwrap();
            line
        };
        let lines = thread::scope(|scope| {
            let nodes: Vec<_> =
                (0..workers).map(|node| scope.spawn(move || join(NodeId(node)))).collect();
            nodes.into_iter().map(|node| node.join().unwrap()).collect()
        });
        (coordinator, lines)
    }

    fn open(
        line: &ControlLine,
        name: &str,
        members: &[u16],
        job: Option<&Job>,
    ) -> Result<ChannelId, OpenError> {
        let members: Vec<_> = members.iter().map(|&node| NodeId(node)).collect();
        line.open(Channel { name, members: &members, job }, LONG, &|| JobState::Running)
    }

    /// What `ask` makes of every line, all at the same time.
    fn all<T: Send>(lines: &[ControlLine], ask: impl Fn(&ControlLine) -> T + Sync) -> Vec<T> {
        let ask = &ask;
        thread::scope(|scope| {
            let asking: Vec<_> = lines.iter().map(|line| scope.spawn(move || ask(line))).collect();
            asking.into_iter().map(|asker| asker.join().unwrap()).collect()
        })
    }

    fn refusal(result: &Result<ChannelId, OpenError>) -> &str {
        match result {
            Err(OpenError::Refused { reason }) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_members_get_the_same_number_and_no_number_is_given_twice() {
        let (_coordinator, lines) = start(3);
        let mut given = Vec::new();
        for job in [Some(&job(7)), None] {
            let numbers = all(&lines, |line| open(line, "model", &[0, 1, 2], job).unwrap());
            assert!(numbers.iter().all(|number| *number == numbers[0]), "{numbers:?}");
            given.push(numbers[0].0);
        }
        given.push(open(&lines[2], "alone", &[2], None).unwrap().0);
        assert_eq!(given, [2, 3, 4]);
    }

    #[test]
    fn many_are_opened_at_the_same_time_over_one_line_each() {
        let (_coordinator, lines) = start(3);
        let numbers = all(&lines, |line| {
            thread::scope(|scope| {
                let names = (0..8).map(|n| format!("channel {}", (n + line.me().0) % 8));
                let asking = names.map(|name| {
                    scope.spawn(move || {
                        let number = open(line, &name, &[0, 1, 2], None).unwrap();
                        (name, number)
                    })
                });
                let asking: Vec<_> = asking.collect();
                let mut all: Vec<_> = asking.into_iter().map(|a| a.join().unwrap()).collect();
                all.sort();
                all
            })
        });
        assert!(numbers.iter().all(|theirs| *theirs == numbers[0]), "{numbers:?}");
        let mut given: Vec<_> = numbers[0].iter().map(|(_, number)| number.0).collect();
        given.sort();
        assert_eq!(given, (2..10).collect::<Vec<_>>());
    }

    #[test]
    fn everything_goes_over_the_connection_by_which_a_node_joined() {
        let (coordinator, lines) = start(2);
        for round in 0..5 {
            let rank = |line: &ControlLine| serde_json::json!([line.me(), round]);
            let gathered = all(&lines, |line| {
                line.gather("rank", &rank(line), LONG, &|| JobState::Running).unwrap()
            });
            assert_eq!(gathered[0], [rank(&lines[0]), rank(&lines[1])]);
            assert_eq!(gathered[0], gathered[1]);
            all(&lines, |line| open(line, "model", &[0, 1], None).unwrap());
        }
        assert_eq!(coordinator.connections(), 2);
    }

    #[test]
    fn members_that_describe_different_jobs_are_all_told_the_first_difference() {
        let (_coordinator, lines) = start(2);
        let asked = all(&lines, |line| {
            let job = job(10 + usize::from(line.me().0));
            open(line, "model", &[0, 1], Some(&job))
        });
        for result in &asked {
            let words = refusal(result);
            for part in ["'a' of 10", "on worker 0", "'a' of 11", "on worker 1"] {
                assert!(words.contains(part), "{words}");
            }
        }
        let asked = all(&lines, |line| {
            let job = job(10);
            open(line, "model", &[0, 1], (line.me().0 == 0).then_some(&job))
        });
        for result in &asked {
            let words = refusal(result);
            assert!(
                words.contains("worker 0 describes layers for it, worker 1 does not"),
                "{words}"
            );
        }
        let again = all(&lines, |line| open(line, "model", &[0, 1], None).unwrap());
        assert_eq!(again, [FIRST; 2]);
    }

    #[test]
    fn members_that_do_not_agree_on_who_they_are_are_all_told() {
        let (_coordinator, lines) = start(3);
        let asked = all(&lines[..2], |line| {
            let members: &[u16] = if line.me().0 == 0 { &[0, 1] } else { &[0, 1, 2] };
            open(line, "model", members, None)
        });
        for result in &asked {
            let words = refusal(result);
            assert!(words.contains("worker 0, worker 1 on worker 0"), "{words}");
            assert!(words.contains("worker 0, worker 1, worker 2 on worker 1"), "{words}");
        }
    }

    #[test]
    fn wishes_that_make_no_sense_are_refused_at_once() {
        let (_coordinator, lines) = start(2);
        let refused =
            |members: &[u16]| refusal(&open(&lines[0], "model", members, None)).to_string();
        assert!(refused(&[1]).contains("worker 0 is not among worker 1"));
        assert!(refused(&[]).contains("not among nobody"));
        assert!(refused(&[1, 0]).contains("ascending"));
        assert!(refused(&[0, 0]).contains("ascending"));
        assert!(refused(&[0, 7]).contains("there is no node 7 among 2 nodes"));
    }

    #[test]
    fn a_second_wish_is_refused_and_leaves_the_first_waiting() {
        let (_coordinator, lines) = start(2);
        thread::scope(|scope| {
            let twice = [(); 2].map(|()| scope.spawn(|| open(&lines[0], "model", &[0, 1], None)));
            let early = loop {
                if let Some(at) = twice.iter().position(|asker| asker.is_finished()) {
                    break at;
                }
                thread::yield_now();
            };
            assert_eq!(open(&lines[1], "model", &[0, 1], None).unwrap(), FIRST);
            for (at, asker) in twice.into_iter().enumerate() {
                let result = asker.join().unwrap();
                match at == early {
                    true => {
                        assert!(refusal(&result).contains("worker 0 is opening 'model' already"))
                    }
                    false => assert_eq!(result.unwrap(), FIRST),
                }
            }
        });
    }

    #[test]
    fn who_waits_is_told_who_has_not_asked() {
        let (_coordinator, lines) = start(3);
        let members = [0, 1, 2].map(NodeId);
        let channel = Channel { name: "model", members: &members, job: None };
        let patience = Duration::from_millis(100);
        let error = lines[1].open(channel, patience, &|| JobState::Running).unwrap_err();
        let OpenError::Missing { missing, waited } = error else { panic!("{error}") };
        assert_eq!((missing, waited), (vec!["worker 0".into(), "worker 2".into()], patience));
    }

    #[test]
    fn who_asks_learns_who_waits_for_it_in_which_call() {
        let (_coordinator, lines) = start(3);
        assert_eq!(lines[2].awaited(LONG), None);
        thread::scope(|scope| {
            let opening = scope.spawn(|| open(&lines[0], "model", &[0, 2], None));
            let awaited = loop {
                if let Some(awaited) = lines[2].awaited(LONG) {
                    break awaited;
                }
                thread::yield_now();
            };
            let (waiting, missing) = (vec![NodeId(0)], vec![NodeId(2)]);
            assert_eq!(awaited, Waiting { name: "model".into(), waiting, missing });
            // Neither who waits nor who is not a member is awaited.
            assert_eq!((lines[0].awaited(LONG), lines[1].awaited(LONG)), (None, None));
            open(&lines[2], "model", &[0, 2], None).unwrap();
            opening.join().unwrap().unwrap();
        });
        assert_eq!(lines[2].awaited(LONG), None);
    }

    #[test]
    fn nobody_waits_for_a_member_that_has_left() {
        let (_coordinator, mut lines) = start(2);
        let leaver = lines.pop().unwrap();
        thread::scope(|scope| {
            let asking = scope.spawn(|| open(&lines[0], "model", &[0, 1], None));
            // Whether the wish or the goodbye comes first, the answer is the same.
            drop(leaver);
            assert!(refusal(&asking.join().unwrap()).contains("worker 1 has left the job"));
        });
    }

    #[test]
    fn a_line_whose_coordinator_has_stopped_says_so_at_once() {
        let (coordinator, lines) = start(2);
        thread::scope(|scope| {
            let asking = scope.spawn(|| open(&lines[0], "model", &[0, 1], None));
            drop(coordinator);
            let error = asking.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("has stopped"), "{error}");
        });
        assert!(lines[1].trouble().is_none(), "it stopped on purpose");
        let error = open(&lines[1], "model", &[1], None).unwrap_err().to_string();
        assert!(error.contains("has stopped") && error.contains(lines[1].address()), "{error}");
    }
}
