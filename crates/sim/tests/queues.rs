//! What must hold of every simulation whose ports have queues that drop.

use poseidon_core::{Cluster, LayerKind, NodeId, Servers};
use poseidon_sim::network::{Duplex, Racks};
use poseidon_sim::setup::{Failure, Jitter};
use poseidon_sim::{
    Error, LayerTime, Model, ModelLayer, Network, Outcome, Overlap, SchemeRule, Setup, simulate,
};
use std::time::Duration;

/// One exchange of `megabytes` MB between `nodes` nodes at 1 Gbit/s, with no computing.
fn exchange(nodes: u16, megabytes: usize, queue: Option<u64>) -> Setup {
    let layer = ModelLayer {
        name: "model".into(),
        kind: LayerKind::Other,
        parameters: (megabytes << 20) / 4,
        rows: 1,
        forward_flops: 0.0,
        backward_flops: 0.0,
    };
    let model = Model { name: "exchange".into(), layers: vec![layer] };
    let cluster = Cluster::new(nodes, Servers::Colocated, 1).unwrap();
    let network = Network { queue, ..Network::virtual_cluster(1.25e8) };
    let times = vec![LayerTime::default()];
    let (scheme, overlap) = (SchemeRule::Ps, Overlap::Backward);
    Setup { scheme, overlap, iterations: 1, ..Setup::new(&model, times, cluster, 1, network) }
}

fn run(setup: &Setup) -> Outcome {
    let outcome = simulate(setup).unwrap();
    assert_eq!(outcome.halt, None);
    outcome
}

fn total(bytes: &[u64]) -> u64 {
    bytes.iter().sum()
}

/// What is dropped is sent again, and what is received is what is received where nothing drops.
#[test]
fn nothing_is_lost_in_the_end() {
    for nodes in [2, 3, 8, 16] {
        let lossless = run(&exchange(nodes, 2, None));
        assert_eq!(lossless.drops.segments, 0);
        let wire = lossless.bytes_sent[0] as f64 / Network::virtual_cluster(1.25e8).rate();
        for queue in [20 << 10, 64 << 10, 256 << 10, 2 << 20] {
            for (windows, duplex, hosts_per_rack) in [
                (false, Duplex::Full, None),
                (true, Duplex::Full, None),
                (false, Duplex::Shared, Some(2)),
                (true, Duplex::Shared, Some(2)),
            ] {
                let mut setup = exchange(nodes, 2, Some(queue));
                (setup.windows, setup.network.duplex) = (windows, duplex);
                setup.network.racks = hosts_per_rack
                    .map(|hosts_per_rack| Racks { hosts_per_rack, oversubscription: 2.0 });
                let outcome = run(&setup);
                let case = format!("{nodes} nodes, queue {queue}, windows {windows}, {duplex:?}");
                assert_eq!(outcome.bytes_received, lossless.bytes_received, "{case}");
                let lost = total(&outcome.bytes_sent) - total(&outcome.bytes_received);
                assert_eq!(lost, outcome.drops.bytes, "{case}");
                assert!(outcome.drops.bytes <= outcome.drops.segments * (16 << 10), "{case}");
                assert!(outcome.iteration_seconds > wire, "{case}");
                assert!(outcome.iteration_seconds < 600.0, "{case}: {outcome:?}");
            }
        }
    }
}

/// Chance is where it begins: a seed gives the same again.
#[test]
fn a_seed_gives_the_same_drops_again() {
    let mut setup = exchange(8, 4, Some(128 << 10));
    setup.windows = false;
    let text = |setup: &Setup| format!("{:?}", run(setup));
    let first = text(&setup);
    assert!(run(&setup).drops.segments > 0);
    assert_eq!(first, text(&setup));
    setup.seed = 1;
    assert_ne!(first, text(&setup));
}

/// Incast: everybody sends to one port at once. Some connection loses all that it has under way and
/// waits for its timer of 200 ms. Small windows avoid that, also where nodes do not begin at once.
#[test]
fn long_bursts_cost_timers_and_small_windows_do_not() {
    for nodes in [8, 16, 32] {
        let seconds = |queue, windows| {
            let mut setup = Setup { windows, iterations: 4, ..exchange(nodes, 10, queue) };
            setup.times[0].backward = 0.0005;
            setup.stragglers.jitter = Jitter::LogNormal(0.5);
            let outcome = run(&setup);
            (outcome.iteration_seconds, outcome.drops)
        };
        let (free, _) = seconds(None, true);
        let (bursts, drops) = seconds(Some(256 << 10), false);
        assert!(drops.timeouts > 0, "{nodes}: {drops:?}");
        assert!(bursts > free + 0.1, "{nodes}: {free} s without a queue, {bursts} s with one");
        let (small, fewer) = seconds(Some(256 << 10), true);
        assert!(small < bursts && fewer.bytes < drops.bytes / 4, "{nodes}: {small} s, {fewer:?}");
        let (small, drops) = seconds(Some(2 << 20), true);
        assert_eq!(drops.timeouts, 0, "{nodes}: {drops:?}");
        assert!(small < free * 1.1, "{nodes}: {free} s without a queue, {small} s with windows");
    }
}

/// A queue that holds everything drops nothing, and costs no more than that peers are not taken in
/// order.
#[test]
fn a_long_queue_drops_nothing() {
    let mut setup = exchange(8, 4, Some(1 << 30));
    setup.windows = false;
    let long = run(&setup);
    setup.network.queue = None;
    let none = run(&setup);
    assert_eq!((long.drops.segments, &long.bytes_sent), (0, &none.bytes_sent));
    assert!(long.iteration_seconds < none.iteration_seconds * 2.0, "{long:?}");
}

#[test]
fn a_lost_node_stops_the_job_also_where_ports_drop() {
    for windows in [false, true] {
        let mut setup = exchange(6, 4, Some(64 << 10));
        setup.windows = windows;
        let at = Duration::from_millis(20);
        setup.failures = vec![Failure { node: NodeId(2), at }];
        let halt = simulate(&setup).unwrap().halt.expect("a job does not go on without a node");
        assert_eq!(halt.failed, [NodeId(2)]);
        assert_eq!(halt.waits[0].awaits, NodeId(2), "{:?}", halt.waits);
    }
}

#[test]
fn a_port_without_any_queue_is_refused() {
    let error = simulate(&exchange(2, 1, Some(0))).unwrap_err();
    assert!(matches!(error, Error::Number { .. }), "{error}");
    assert!(error.to_string().contains("the queue of a port is 0"), "{error}");
}
