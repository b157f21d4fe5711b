use super::*;
use crate::job::book::tests::book;
use poseidon_core::{Cluster, Epoch, Servers};

/// A job of three workers on two ports, which carry 8 Mbit/s: a megabyte in a second.
fn three_workers() -> Book {
    let mut book = book();
    let rate = Rate::new(8_000_000).unwrap();
    let ports = [0, 0, 1].map(|number| Port { number, rate });
    let cluster = Cluster::new(3, Servers::Colocated, 1).unwrap();
    book.cluster = cluster.with_ports(ports.to_vec()).unwrap();
    book
}

/// What a node has counted after so many seconds, if it waits this share of the time.
fn after(node: u16, second: u64, waiting: f64) -> NodeSummary {
    NodeSummary {
        node: NodeId(node),
        at_ms: second * 1000 + 7,
        steps: second * 20,
        operations: second * 3,
        waited_us: (second as f64 * waiting * 1e6) as u64,
        layers: vec![
            ("fc6".into(), (waiting * 0.75e6) as u64),
            ("conv1".into(), (waiting * 0.25e6) as u64),
        ],
        outside: [second * 250_000, second * 125_000],
        inside: [second * 1_000_000, 0],
        queued: 5,
        resent: second * 2,
        failure: None,
    }
}

struct Watching {
    live: LiveState,
    began: Instant,
}

impl Watching {
    fn new() -> Self {
        Self { live: LiveState::default(), began: Instant::now() }
    }

    fn now(&self, second: u64) -> Now {
        let at = self.began + Duration::from_secs(second);
        Now { at, wall_ms: 1_000_000 + second * 1000 }
    }

    /// Three workers tell what they did for so many seconds.
    fn run(&mut self, book: &Book, seconds: std::ops::RangeInclusive<u64>, waiting: [f64; 3]) {
        for second in seconds {
            for (node, waiting) in (0..3).zip(waiting) {
                let now = self.now(second);
                self.live.handle_summary(book, after(node, second, waiting), now);
            }
        }
    }

    fn tell(&self, book: &Book, second: u64) -> LiveJob {
        self.live.tell(Some(book), Vec::new(), self.now(second))
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-3
}

#[test]
fn rates_are_of_the_last_seconds_and_nodes_of_a_host_share_its_port() {
    let (book, mut watching) = (three_workers(), Watching::new());
    watching.run(&book, 0..=20, [0.5, 0.4, 0.1]);
    let job = watching.tell(&book, 20);
    assert_eq!((job.steps, job.seconds), (400, 20.0));
    assert!(close(job.steps_per_second, 20.0) && close(job.operations_per_second, 3.0), "{job:?}");
    assert!(close(job.waiting.unwrap(), 1.0 / 3.0), "{job:?}");
    assert!(close(job.sent, 750_000.0) && close(job.sent_inside, 3e6), "{job:?}");
    let [first, second, third] = &job.nodes[..] else { panic!("{job:?}") };
    assert!(close(first.sent, 250_000.0) && close(first.received, 125_000.0), "{first:?}");
    // Two nodes share the first port, and the third has its own.
    for (node, [sent, received]) in
        [(first, [0.5, 0.25]), (second, [0.5, 0.25]), (third, [0.25, 0.125])]
    {
        let [s, r] = node.port_use.unwrap();
        assert!(close(s, sent) && close(r, received), "{node:?}");
    }
    assert_eq!((first.queued, first.resent, first.state), (5, 40, LiveNodeState::Running));
    assert!(close(first.resent_per_second, 2.0), "{first:?}");
    let slowest = job.slowest.unwrap();
    assert_eq!((slowest.node, &*slowest.name), (NodeId(2), "worker 2"));
    assert_eq!(slowest.why, "it waits 10% of the time, the others 45%: they wait for it");
    let layers: Vec<_> = job.layers.iter().map(|layer| &*layer.layer).collect();
    assert_eq!(layers, ["fc6", "conv1"]);
    assert!(close(job.layers[0].waiting, 0.25), "{:?}", job.layers);
}

#[test]
fn workers_that_are_alike_have_no_slowest_and_one_alone_has_none_to_wait_for_it() {
    let (mut book, mut watching) = (three_workers(), Watching::new());
    watching.run(&book, 0..=5, [0.30, 0.33, 0.31]);
    assert_eq!(watching.tell(&book, 5).slowest, None);
    book.cluster = Cluster::new(1, Servers::Colocated, 1).unwrap();
    assert_eq!(watching.tell(&book, 5).slowest, None);
    // Before anybody has told anything, and before there is a book.
    let nothing = Watching::new().live.tell(None, vec!["worker 1".into()], watching.now(0));
    assert_eq!((nothing.waiting, nothing.missing.len()), (None, 1));
    assert_eq!(nothing.nodes, []);
}

#[test]
fn a_node_that_says_nothing_is_silent_and_one_that_goes_is_done_or_lost() {
    let (book, mut watching) = (three_workers(), Watching::new());
    watching.run(&book, 0..=2, [0.1; 3]);
    let states = |watching: &Watching, second| {
        let job = watching.tell(&book, second);
        (job.nodes.iter().map(|node| node.state).collect::<Vec<_>>(), job.concerns())
    };
    use LiveNodeState::{Left, Lost, Running, Silent};
    assert_eq!(states(&watching, 4), (vec![Running; 3], Vec::new()));
    let now = watching.now(9);
    watching.live.handle_summary(&book, after(0, 9, 0.1), now);
    watching.live.handle_gone(&book, NodeId(1), None, now);
    let (found, concerns) = states(&watching, 9);
    assert_eq!(found, [Running, Left, Silent]);
    assert_eq!(concerns, [(LiveLevel::Warning, "worker 2 has not been heard for 7 s".into())]);
    watching.live.handle_gone(&book, NodeId(2), Some("out of \x1b[2J memory"), now);
    // Its connection closes after its last words, which changes nothing.
    watching.live.handle_gone(&book, NodeId(2), Some("closed"), now);
    watching.live.handle_gone(&book, NodeId(1), Some("closed"), now);
    let (found, concerns) = states(&watching, 9);
    assert_eq!(found, [Running, Left, Lost]);
    assert_eq!(concerns, [(LiveLevel::Fault, "worker 2 is lost".into())]);
    let job = watching.tell(&book, 9);
    let words: Vec<_> = job.events.iter().map(|event| &*event.words).collect();
    let last = ["worker 1 is done, and has left", "worker 2 is lost: out of \u{fffd}[2J memory"];
    assert!(words.ends_with(&last), "{words:?}");
}

#[test]
fn a_plan_that_is_replaced_is_told_with_what_it_does() {
    let (mut book, mut watching) = (three_workers(), Watching::new());
    watching.run(&book, 0..=1, [0.1; 3]);
    let before = watching.tell(&book, 1).plan;
    assert_eq!((before.epoch, before.ps + before.sfb), (1, book.job.layers.len()));
    book.epoch = Epoch(2);
    watching.run(&book, 2..=3, [0.1; 3]);
    let job = watching.tell(&book, 3);
    assert_eq!(job.plan.epoch, 2);
    let told = job.events.iter().filter(|event| event.words.contains("replaced, epoch 2")).count();
    assert_eq!(told, 1, "{:?}", job.events);
}

/// Memory does not grow with the length of the job, and not with what a node says.
#[test]
fn what_is_kept_has_a_bound_whatever_nodes_say() {
    let (book, mut watching) = (three_workers(), Watching::new());
    watching.run(&book, 0..=1000, [0.5, 0.4, 0.1]);
    let size = |watching: &Watching, second| {
        serde_json::to_vec(&watching.tell(&book, second)).unwrap().len()
    };
    let before = size(&watching, 1000);
    watching.run(&book, 1001..=9000, [0.5, 0.4, 0.1]);
    let job = watching.tell(&book, 9000);
    assert_eq!(job.history.len(), MOMENTS);
    assert!(size(&watching, 9000) < before + 2000, "{} {before}", size(&watching, 9000));
    let long = NodeSummary {
        layers: vec![("n".repeat(1000), 1); 1000],
        failure: Some("w".repeat(100_000)),
        ..after(0, 9001, 0.5)
    };
    let now = watching.now(9001);
    watching.live.handle_summary(&book, long, now);
    assert!(size(&watching, 9001) < before + 4000);
    for second in 0..1000 {
        watching.live.handle_change(format!("change {second}"), now);
    }
    assert_eq!(watching.tell(&book, 9001).events.len(), EVENTS);
    // A process that was started again counts from the beginning, and has no rates of before.
    watching.live.handle_summary(&book, after(0, 1, 0.5), now);
    let job = watching.tell(&book, 9001);
    assert_eq!((job.nodes[0].steps, job.nodes[0].sent), (20, 0.0));
}

#[test]
fn metrics_have_every_node_and_prometheus_can_read_their_labels() {
    let (book, mut watching) = (three_workers(), Watching::new());
    watching.run(&book, 0..=3, [0.5, 0.4, 0.1]);
    let mut job = watching.tell(&book, 3);
    job.layers[0].layer = "a \"b\" \\ c".into();
    let text = job.metrics();
    for line in [
        "poseidon_job_steps_total 60",
        "poseidon_job_straggler 2",
        "poseidon_node_queued_messages{node=\"worker 1\",host=\"",
        "poseidon_node_port_use_ratio{node=\"worker 2\",way=\"sent\"} 0.25",
        "poseidon_job_layer_waiting_ratio{layer=\"a \\\"b\\\" \\\\ c\"} 0.2",
    ] {
        assert!(text.lines().any(|l| l.starts_with(line)), "{line}:\n{text}");
    }
}
