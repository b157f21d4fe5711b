use super::*;
use crate::job::book::{Job, NodeFacts};
use crate::job::link_rate::{LinkRate, ROUNDS};
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
        queue: None,
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
    assert_eq!(joining.end_of_patience(), Some(now + PATIENCE), "nobody is missed any more");
    let told = join(&mut joining, 2, 14, now + seconds(20));
    assert_eq!(told.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [10, 13, 14]);
}

#[test]
fn a_place_that_stays_free_ends_the_wait_of_all() {
    let (mut joining, now) = (joining(), Instant::now());
    join(&mut joining, 0, 10, now);
    join(&mut joining, 1, 11, now + seconds(1));
    joining.handle_closed(11, now + seconds(3));
    assert_eq!(joining.end_of_patience(), Some(now + seconds(13)));
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
    assert_eq!(joining.end_of_patience(), Some(now + seconds(110)));
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
    assert_eq!((&drafts[2].1["type"], &drafts[2].1["probers"]), (&json!("draft"), &json!([0, 1])));
    let mut post = |node: u16, round, sent, later| {
        let measured = Measured { node: NodeId(node), round, sent, patience_ms: 1000 };
        let mut replies = joining.handle_measured(asker(node), measured, now);
        replies.extend(joining.handle_time(now + later));
        told(replies)
    };
    let missing = post(1, 0, None, seconds(2));
    assert_eq!(missing, [(1, json!({ "type": "missing", "nodes": [0] }))]);
    let sent = |to, mbit: u64| Some((NodeId(to), Rate::of(mbit * 125_000, 1.0)));
    post(0, ROUNDS, sent(1, 900), seconds(0));
    post(1, ROUNDS, sent(0, 90), seconds(0));
    let books = post(2, ROUNDS, None, seconds(0));
    assert_eq!(books.len(), 3);
    assert_eq!(books[0].1["cluster"]["ports"][2], json!({ "number": 1, "rate": 90_000_000 }));
    assert_eq!(joining.tell("ports.0.rate"), Some(json!(90_000_000)));
}

#[test]
fn waiting_nodes_are_told_for_whom_and_ever_more_rarely() {
    let mut joining = Joining::new(JobId([7; 16]), seconds(1000));
    let now = Instant::now();
    assert_eq!(joining.poll_notice(now + seconds(100)), None, "nobody waits");
    join(&mut joining, 1, 11, now);
    assert_eq!(joining.poll_notice(now + seconds(4)), None);
    let mut notices = Vec::new();
    // As the thread that watches the time does it.
    while let Some(due) = joining.deadline().filter(|due| *due < now + seconds(200)) {
        assert!(joining.handle_time(due).is_empty());
        notices.push(((due - now).as_secs(), joining.poll_notice(due).unwrap()));
        assert_eq!(joining.poll_notice(due), None, "once");
        if notices.len() == 2 {
            join(&mut joining, 0, 10, due);
        }
    }
    let all = "waiting for worker 0, worker 2, 1 of 3 have joined";
    let one = "waiting for worker 2, 2 of 3 have joined";
    let expected = [(5, all), (10, all), (20, one), (40, one), (80, one), (140, one)];
    assert_eq!(notices, expected.map(|(at, words)| (at, words.to_owned())));
    join(&mut joining, 2, 12, now + seconds(200));
    assert_eq!(joining.poll_notice(now + seconds(900)), None, "all are here");
    assert_eq!(joining.deadline(), None);
}

#[test]
fn a_notice_names_a_few_of_many() {
    let (mut joining, now) = (joining(), Instant::now());
    let asker = Asker { connection: 10, request: Some(1) };
    let crowd = Join { workers: 20, servers: Servers::Mixed(1), ..words(0) };
    assert!(joining.handle_join(asker, crowd, String::new(), now).is_empty());
    let notice = joining.poll_notice(now + seconds(5)).unwrap();
    assert!(notice.starts_with("waiting for worker 1, worker 2, "), "{notice}");
    assert!(notice.ends_with("worker 8 and 12 more, 1 of 21 have joined"), "{notice}");
}
