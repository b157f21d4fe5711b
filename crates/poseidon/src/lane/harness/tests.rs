//! The runtime under simulated delays, resets, stalls and silence.

use super::*;
use crate::engine::driver::Driver;
use crate::engine::sharing::Place;
use poseidon_core::wire::{Header, Purpose};
use poseidon_core::{ChunkKey, JobId};
use poseidon_link::{
    Address, Caller, Carrier, Credentials, Link, Listener, Secret, Stream, connect,
};
use proptest::prelude::*;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::time::Instant;

fn setups(workers: std::ops::RangeInclusive<u16>) -> impl Strategy<Value = Setup> {
    let servers = prop_oneof![
        Just(Servers::Colocated),
        (1u16..4).prop_map(Servers::Dedicated),
        (1u16..3).prop_map(Servers::Mixed),
    ];
    let layers = proptest::collection::vec(0usize..400, 1..4);
    let encoding = || proptest::sample::select(&Encoding::ALL[..]);
    let encodings = (encoding(), encoding()).prop_map(|(up, down)| Encodings { up, down });
    let encodings = proptest::collection::vec(encodings, 0..3);
    let size = (workers, servers, 1u16..3);
    let places = (numbers(12), numbers(12), any::<bool>());
    (any::<u64>(), size, places, (layers, encodings), 1u64..4, any::<bool>()).prop_map(
        |(seed, size, (hosts, racks, tree), (layers, encodings), clocks, deterministic)| {
            let (workers, servers, lanes) = size;
            let nodes = usize::from(workers + servers.extra());
            let hosts = hosts[..if tree { nodes } else { 0 }].to_vec();
            let count = hosts.iter().max().map_or(0, |last| usize::from(*last) + 1);
            let racks = racks[..count].to_vec();
            Setup {
                seed,
                workers,
                servers,
                lanes,
                hosts,
                racks,
                layers,
                encodings,
                clocks,
                deterministic,
            }
        },
    )
}

/// Numbers of hosts or racks: each new one is the next.
fn numbers(len: usize) -> impl Strategy<Value = Vec<u16>> {
    proptest::collection::vec(any::<u16>(), len).prop_map(|draws| {
        let mut next = 0;
        let number = |draw: u16| {
            let number = draw % (next + 1);
            next += u16::from(number == next);
            number
        };
        draws.into_iter().map(number).collect()
    })
}

/// A moment at which no worker has finished yet.
fn moment(setup: &Setup, part: f64) -> Duration {
    setup.run(None).first_goodbye.expect("an undisturbed run ends").mul_f64(part)
}

/// Everybody has stopped soon after the trouble. If that cost a result, everybody has an error;
/// and nobody's error names anybody but a culprit.
fn check_everybody_knows(setup: &Setup, report: &Report, began: Duration, limit: Duration) {
    let ended = report.ended.unwrap_or_else(|| panic!("some lanes never stopped: {report:?}"));
    // The rest is for ticks, last words and slow links.
    let bound = limit + Duration::from_secs(10);
    assert!(ended - began <= bound, "took {:?}: {report:?}", ended - began);
    for (node, failure) in report.failures.iter().enumerate() {
        match failure {
            Some(words) => {
                let named = report.culprits.iter().any(|culprit| words.contains(culprit));
                assert!(named, "node {node} blames somebody else: {words}\n{report:?}");
            }
            None => assert_eq!(report.delivered, setup.results(), "node {node} knows nothing"),
        }
    }
}

fn check_all_well(setup: &Setup, report: &Report) {
    assert!(report.failures.iter().all(Option::is_none), "{report:?}");
    assert!(report.ended.is_some(), "some lanes never stopped: {report:?}");
    assert_eq!(report.delivered, setup.results());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() })]

    #[test]
    fn sums_are_exact_over_any_links(setup in setups(1..=9)) {
        check_all_well(&setup, &setup.run(None));
    }

    #[test]
    fn a_reset_stops_everybody(setup in setups(2..=5), part in 0.0..1.0, link: u64) {
        let at = moment(&setup, part);
        let report = setup.run(Some((at, Trouble::Reset(link))));
        check_everybody_knows(&setup, &report, at, Duration::ZERO);
    }

    #[test]
    fn a_link_that_goes_dead_stops_everybody(
        setup in setups(2..=5), part in 0.0..1.0, link: u64, longer in 1u64..100,
    ) {
        let at = moment(&setup, part);
        let time = SILENCE + Duration::from_secs(longer);
        let report = setup.run(Some((at, Trouble::Stall(link, time))));
        check_everybody_knows(&setup, &report, at, SILENCE);
    }

    #[test]
    fn a_link_that_comes_back_in_time_does_no_harm(
        setup in setups(2..=5), part in 0.0..1.0, link: u64, ms in 1u64..12_000,
    ) {
        let at = moment(&setup, part);
        let report = setup.run(Some((at, Trouble::Stall(link, Duration::from_millis(ms)))));
        check_all_well(&setup, &report);
    }

    #[test]
    fn everybody_learns_who_gave_up(setup in setups(2..=5), part in 0.0..1.0, worker: u16) {
        let at = moment(&setup, part);
        let worker = NodeId(worker % setup.workers);
        let report = setup.run(Some((at, Trouble::Abort(worker))));
        check_everybody_knows(&setup, &report, at, Duration::ZERO);
        prop_assert!(report.failures.iter().all(Option::is_some));
        for words in report.failures.into_iter().flatten() {
            prop_assert!(words.contains("enough"), "the reason is lost: {}", words);
            // Whoever passes it on does not put itself before it.
            let said = words.matches(" stopped the job: ").count();
            prop_assert!(said <= 1, "said {} times: {}", said, words);
            prop_assert!(words.contains(report.culprits[0].as_str()), "{}", words);
        }
    }

    #[test]
    fn a_program_that_gives_up_does_not_hide_the_first_reason(
        setup in setups(2..=5), part in 0.0..1.0, worker: u16,
    ) {
        let at = moment(&setup, part);
        let worker = NodeId(worker % setup.workers);
        let report = setup.run(Some((at, Trouble::GiveUp(worker))));
        check_everybody_knows(&setup, &report, at, Duration::ZERO);
        for words in report.failures.into_iter().flatten() {
            prop_assert!(words.contains("the first reason"), "it is hidden: {}", words);
        }
    }

    #[test]
    fn everybody_learns_who_stopped_sending(setup in setups(2..=5), worker: u16) {
        // Only layers with parameters are waited for.
        let setup = Setup { layers: setup.layers.iter().map(|len| len + 1).collect(), ..setup };
        let worker = NodeId(worker % setup.workers);
        let report = setup.run(Some((Duration::ZERO, Trouble::Mute(worker))));
        check_everybody_knows(&setup, &report, Duration::ZERO, STALL);
        for words in report.failures.into_iter().flatten() {
            let facts = ["chunk ", " of layer 'layer", " at clock 1 "];
            prop_assert!(facts.iter().all(|f| words.contains(f)), "{}", words);
        }
    }
}

/// A worker that held its own gradient back blamed a collector, in the moment in which the collector
/// found out who was missing.
#[test]
fn those_who_collect_speak_first_beside_a_gradient_that_is_held_back() {
    let setup = Setup {
        seed: 0,
        workers: 5,
        servers: Servers::Colocated,
        lanes: 1,
        hosts: vec![0, 0, 0, 0, 1],
        racks: vec![],
        layers: vec![64],
        encodings: vec![Encodings { up: Encoding::Bf16, down: Encoding::F32 }],
        clocks: 1,
        deterministic: false,
    };
    let report = setup.run(Some((Duration::ZERO, Trouble::Mute(NodeId(1)))));
    check_everybody_knows(&setup, &report, Duration::ZERO, STALL);
}

/// A worker that had finished was not told that the others live: its servers looked dead to it.
#[test]
fn those_who_have_finished_hear_that_the_others_live() {
    let setup = Setup {
        seed: 11617450785165941229,
        workers: 5,
        servers: Servers::Dedicated(3),
        lanes: 2,
        hosts: vec![],
        racks: vec![],
        layers: vec![364, 192],
        encodings: vec![],
        clocks: 3,
        deterministic: false,
    };
    let at = moment(&setup, 0.9048830367956459);
    let time = SILENCE + Duration::from_secs(60);
    let report = setup.run(Some((at, Trouble::Stall(16970806467425619688, time))));
    check_everybody_knows(&setup, &report, at, SILENCE);
}

/// A link that, after its first write, holds the lane until it is told to go on.
struct Gate {
    link: Box<dyn Link>,
    held: Option<SyncSender<()>>,
    go_on: Receiver<()>,
}

impl Link for Gate {
    fn read(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.link.read(bufs)
    }

    fn write(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let wrote = self.link.write(bufs);
        if let Some(held) = self.held.take() {
            let _ = held.send(());
            let _ = self.go_on.recv_timeout(Duration::from_secs(60));
        }
        wrote
    }

    fn finish(&mut self) -> io::Result<()> {
        self.link.finish()
    }

    fn register(&mut self, registry: &mio::Registry, token: mio::Token) -> io::Result<()> {
        self.link.register(registry, token)
    }

    fn carrier(&self) -> Carrier {
        self.link.carrier()
    }
}

/// Readiness is reported once for bytes and end together, and a short read is not the end.
#[test]
fn a_close_that_arrives_with_the_last_bytes_is_noticed_at_once() {
    let (link, mut far) = connected();
    let (held, is_held) = sync_channel(1);
    let (release, go_on) = channel();
    let link = Box::new(Gate { link, held: Some(held), go_on });
    let setup = Setup {
        seed: 0,
        workers: 2,
        servers: Servers::Colocated,
        lanes: 1,
        hosts: vec![],
        racks: vec![],
        layers: vec![1],
        encodings: vec![],
        clocks: 1,
        deterministic: false,
    };
    let node = World::new(&setup).start(NodeId(0), vec![vec![(NodeId(1), link)]]);
    let Node { board, mut lanes, .. } = node;
    let Running { engine, commands, .. } = lanes.remove(0).unwrap();

    // Both workers contribute, the lane answers and is held there: it has read everything.
    let (layer, clock, kind) = (LayerId(0), Clock(1), Kind::Push);
    let (gradient, destination) = (Buffer::from(vec![1.0]).into(), None);
    board.begin(layer, 1);
    let (terms, landings) = (Terms::default(), None);
    let exchange = Exchange { layer, clock, kind, terms, gradient, destination, landings };
    assert!(commands.send(Command::Send(Arc::new(exchange), 0..1)).is_ok());
    let driver =
        Driver::start(engine, Instant::now(), "worker 0".into(), Place::Anywhere, false).unwrap();
    driver.kick();
    let (sender, chunk) = (NodeId(1), ChunkKey { layer, index: 0 });
    let (channel, epoch) = (ChannelId::FIRST, Epoch::FIRST);
    let push = Header { channel, epoch, chunk, clock, ..Header::bare(kind, sender, 4) };
    far.write_all(&push.encode()).unwrap();
    far.write_all(&2f32.to_le_bytes()).unwrap();
    is_held.recv_timeout(Duration::from_secs(60)).expect("the lane answers");
    let mut update = [0; Header::SIZE + 4];
    far.read_exact(&mut update).unwrap();
    assert_eq!(update[Header::SIZE..], 3f32.to_le_bytes());

    // Half a header and the end arrive before it looks again. Only the end of this direction: a
    // heartbeat into a connection that is closed both ways would be told at once.
    far.write_all(&[0; 10]).unwrap();
    let mut far = far.into_calling_link(false).unwrap();
    far.finish().unwrap();
    release.send(()).unwrap();

    assert!(board.wait_closed(|| PATIENCE));
    driver.close();
    let words = board.failure().expect("the peer is gone").to_string();
    assert!(words.contains("worker 1") && words.contains("closed the connection"), "{words}");
}

/// A link and the stream at its other end.
fn connected() -> (Box<dyn Link>, Stream) {
    let credentials =
        Credentials { cluster: [0; 16], secret: Secret::random().unwrap(), encrypt: false };
    let listener = Listener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0, false).unwrap();
    let (deliver, arrivals) = channel();
    let deliver = move |_, stream: Stream| deliver.send(stream).unwrap();
    let serving = listener.serve(credentials.clone(), |_| Ok(()), deliver).unwrap();
    let address = Address::Tcp(serving.tcp().to_string());
    let (identity, epoch) = (JobId::default(), Epoch(1));
    let (purpose, node, lane) = (Purpose::Lane, NodeId(1), LaneId(0));
    let caller = Caller { purpose, node, lane, identity, epoch };
    let deadline = Instant::now() + Duration::from_secs(60);
    let far = connect(&address, caller, &credentials, deadline).unwrap();
    let near = arrivals.recv_timeout(Duration::from_secs(60)).unwrap();
    (near.into_called_link().unwrap(), far)
}

/// The link may be writing to memory of the old plan. Only a worker that has not agreed to the new
/// one sends by the old one then.
#[test]
fn a_frame_of_the_old_plan_that_is_half_there_stops_the_session() {
    let setup = Setup {
        seed: 0,
        workers: 2,
        servers: Servers::Colocated,
        lanes: 1,
        hosts: vec![],
        racks: vec![],
        layers: vec![400],
        encodings: vec![],
        clocks: 1,
        deterministic: false,
    };
    let mut world = World::new(&setup);
    let (near, mut far) = poseidon_link::memory::pair(world.clock.clone(), Shape::default());
    let node = world.start(NodeId(0), vec![vec![(NodeId(1), Box::new(near))]]);
    let Node { board, mut lanes, .. } = node;
    let Running { mut engine, commands, .. } = lanes.remove(0).unwrap();
    let mut turn = || {
        for _ in 0..20 {
            engine.handle_ready(NodeId(1), true, true, false);
            engine.turn(Duration::ZERO);
        }
    };

    let shard = Shard { node: NodeId(0), lane: LaneId(0) };
    let (chunk, _) = world.plan.all_chunks().find(|(_, at)| *at == shard).unwrap();
    let length = (world.plan.len(chunk) * size_of::<f32>()) as u32;
    let bare = Header::bare(Kind::Push, NodeId(1), length);
    let (channel, epoch) = (ChannelId::FIRST, Epoch::FIRST);
    let push = Header { channel, epoch, chunk, clock: Clock(1), ..bare };
    let mut half = &[&push.encode()[..], &[0; 10]].concat()[..];
    while !half.is_empty() {
        half = &half[far.write(&[IoSlice::new(half)]).unwrap()..];
    }
    turn();
    assert!(board.failure().is_none());

    let mut plan = world.plan.clone();
    plan.epoch = Epoch(2);
    let rule = Optimizer::Reduce(Reduction::Sum);
    let store = Store::new(&plan, shard, |_| &rule, Order::Arrival);
    let state = PlanState::new(shard, &world.cluster, &plan, store, &[None], board.clone());
    commands.send(Command::Replan(Box::new(state))).ok().unwrap();
    turn();
    let words = board.failure().expect("worker 1 follows the old plan").to_string();
    let facts = ["worker 1", "layer0", "clock 1", "epoch 1, expected 2"];
    assert!(facts.iter().all(|fact| words.contains(fact)), "{words}");
}
