//! What must hold of every simulation where nodes share hosts, and hosts share racks.

mod support;

use poseidon_core::wire::Header;
use poseidon_core::{Cluster, LayerId, LayerKind, NodeId, Servers};
use poseidon_sim::network::{Memory, Racks};
use poseidon_sim::setup::Failure;
use poseidon_sim::{
    Bottleneck, Error, LayerTime, Model, ModelLayer, Network, Outcome, Overlap, Places, SchemeRule,
    Setup, simulate,
};
use std::time::Duration;

/// VGG19 on `workers` workers, `ranks` to a host. Dedicated servers have hosts of their own. With
/// `hosts_per_rack`, sums are made inside racks.
fn setup(
    (workers, servers): (u16, Servers),
    ranks: u16,
    hosts_per_rack: Option<u16>,
    scheme: SchemeRule,
) -> Setup {
    let model = support::vgg19(1000);
    let times = support::times(&model, 32.0 / 35.5);
    let cluster = placed((workers, servers), ranks, hosts_per_rack);
    let network = Network::ethernet(1.25e9);
    Setup { scheme, ..Setup::new(&model, times, cluster, 32, network) }
}

fn placed((workers, servers): (u16, Servers), ranks: u16, hosts_per_rack: Option<u16>) -> Cluster {
    let cluster = Cluster::new(workers, servers, 2).unwrap();
    Places { ranks_per_host: ranks, hosts_per_rack }.place(cluster)
}

/// One layer of `len` numbers that takes no time to compute.
fn exchange(cluster: Cluster, len: usize) -> Setup {
    let layer = ModelLayer {
        name: "model".into(),
        kind: LayerKind::Other,
        parameters: len,
        rows: 1,
        forward_flops: 0.0,
        backward_flops: 0.0,
    };
    let model = Model { name: "exchange".into(), layers: vec![layer] };
    let times = vec![LayerTime::default()];
    let network = Network { efficiency: 1.0, ..Network::ethernet(1.25e8) };
    let (scheme, overlap) = (SchemeRule::Ps, Overlap::Backward);
    Setup { scheme, overlap, ..Setup::new(&model, times, cluster, 1, network) }
}

fn run(setup: &Setup) -> Outcome {
    let outcome = simulate(setup).unwrap();
    assert_eq!(outcome.halt, None);
    outcome
}

fn near(a: f64, b: f64, share: f64) {
    assert!((a / b - 1.0).abs() < share, "{a} against {b}");
}

/// Payloads are what the plan says, on any hosts and in any racks: nothing is lost or made up.
#[test]
fn bytes_are_the_plans() {
    for servers in [Servers::Colocated, Servers::Dedicated(2), Servers::Mixed(1)] {
        for scheme in [SchemeRule::Ps, SchemeRule::Auto, SchemeRule::Sfb] {
            // Also uneven: hosts of 3, 3 and 2 workers; and one host for all.
            for (ranks, hosts_per_rack) in [(4, None), (2, Some(2)), (3, None), (8, None)] {
                let mut setup = setup((8, servers), ranks, hosts_per_rack, scheme);
                setup.iterations = 2;
                let (plan, cluster) = (setup.plan(), &setup.cluster);
                let outcome = run(&setup);
                let layers = (0..setup.layers.len() as u32).map(LayerId);
                for node in cluster.node_ids() {
                    let sent = |layer| plan.bytes_sent(node, layer) as u64;
                    let payload: u64 = layers.clone().map(sent).sum();
                    let headers = outcome.bytes_sent[node.index()] - payload;
                    assert_eq!(headers % Header::SIZE as u64, 0);
                    assert!(headers <= payload / 100, "{headers} of {payload}");
                }
                let total = |bytes: &[u64]| bytes.iter().sum::<u64>();
                assert_eq!(total(&outcome.bytes_sent), total(&outcome.bytes_received));
                let (out, into): (Vec<_>, Vec<_>) =
                    outcome.ports.iter().map(|port| (port.sent, port.received)).unzip();
                assert_eq!(total(&out), total(&into));
                assert!(out.len() > 1 || out == [0], "one host uses no port");
            }
        }
    }
}

/// What leaves a machine does not grow with what is in it.
#[test]
fn a_hosts_port_carries_what_it_carries_for_one_worker() {
    for hosts in [2, 4, 5] {
        let alone = run(&exchange(placed((hosts, Servers::Colocated), 1, None), 10 << 20));
        for ranks in [2, 4, 8] {
            let cluster = placed((hosts * ranks, Servers::Colocated), ranks, None);
            let shared = run(&exchange(cluster, 10 << 20));
            for (one, many) in alone.ports.iter().zip(&shared.ports) {
                // Frames are as many or shorter and more: headers, and chunks that do not come out
                // even.
                near(many.sent as f64, one.sent as f64, 0.01);
                near(many.received as f64, one.received as f64, 0.01);
            }
        }
    }
}

/// A worker per host named one by one is a cluster of which nothing is said.
#[test]
fn hosts_of_one_worker_change_nothing() {
    let mut named = setup((6, Servers::Colocated), 1, None, SchemeRule::Auto);
    let unnamed = named.cluster.clone();
    named.cluster = unnamed.clone().with_hosts((0..6).collect(), vec![0; 6]).unwrap();
    let with = format!("{:?}", run(&named));
    named.cluster = unnamed;
    assert_eq!(with, format!("{:?}", run(&named)));
}

/// Two hosts of two workers, one chunk on worker 0. Worker 1 gives it its gradient through memory,
/// worker 3 gives worker 2 its own; worker 2 sends the sum of its host, gets the result, and
/// passes it on. Worker 3 has the longest way, and everybody waits for it in the end. Memory is
/// slower than the network here, so that it counts.
#[test]
fn two_hosts_of_two_by_hand() {
    let mut setup = exchange(placed((4, Servers::Colocated), 2, None), 1000);
    setup.network.memory = Memory { rate: 1e6, latency: Duration::from_millis(5) };
    setup.network.bandwidth = 2e6;
    setup.network.latency = Duration::from_millis(1);
    setup.iterations = 10;
    let outcome = run(&setup);
    let (memory, port) = (4040.0 / 1e6 + 0.005, 4040.0 / 2e6 + 0.001);
    near(outcome.iteration_seconds, memory + port + port + memory, 1e-9);
    assert_eq!(outcome.bytes_sent, [2 * 4040, 4040, 2 * 4040, 4040]);
    assert_eq!(outcome.ports.iter().map(|port| port.sent).collect::<Vec<_>>(), [4040; 2]);
}

/// The workers of a host send as fast as its port, not as four ports.
#[test]
fn workers_of_a_host_share_its_port() {
    let mut setup = exchange(placed((16, Servers::Colocated), 4, None), 4 << 20);
    setup.network.memory.rate = 1e12;
    let outcome = run(&setup);
    let wire = outcome.ports[0].most() as f64 / setup.network.rate();
    assert!(outcome.iteration_seconds > wire);
    assert!(outcome.iteration_seconds < wire * 1.05, "{} {wire}", outcome.iteration_seconds);
    // Through a slow memory everything takes as long as that does.
    setup.network.memory.rate = 1e7;
    let slow = run(&setup);
    assert!(matches!(slow.bottleneck, Bottleneck::Memory(_)), "{}", slow.reason);
    assert_eq!(slow.ports, outcome.ports);
}

/// PHub §3: what leaves a rack does not grow with the hosts in it, and their ports carry no more.
#[test]
fn a_racks_link_carries_what_it_carries_for_one_host() {
    for ranks in [1, 2] {
        let racks = Some(Racks { hosts_per_rack: 4, oversubscription: 4.0 });
        let exchanged = |cluster| {
            let mut setup = exchange(cluster, 10 << 20);
            setup.network.racks = racks;
            run(&setup)
        };
        let workers = (16 * ranks, Servers::Colocated);
        let ring = placed(workers, ranks, None);
        let straight = Cluster::new(workers.0, workers.1, 1).unwrap();
        let straight = straight.with_hosts(ring.hosts().to_vec(), Vec::new()).unwrap();
        let (flat, tree) = (exchanged(straight), exchanged(placed(workers, ranks, Some(4))));
        // A ring passes every link once. Of 16 hosts, 15 / 16 of a layer go each way; between four
        // racks 3 / 4 do.
        let ring = exchanged(ring);
        for (ring, tree) in ring.racks.iter().zip(&tree.racks) {
            near(ring.sent as f64, tree.sent as f64 * (15.0 / 16.0) / (3.0 / 4.0), 0.01);
        }
        assert_eq!((flat.racks.len(), tree.racks.len()), (4, 4));
        for (flat, tree) in flat.racks.iter().zip(&tree.racks) {
            near(flat.sent as f64, 4.0 * tree.sent as f64, 0.01);
            near(flat.received as f64, 4.0 * tree.received as f64, 0.01);
        }
        for (flat, tree) in flat.ports.iter().zip(&tree.ports) {
            near(flat.sent as f64, tree.sent as f64, 0.01);
        }
        assert!(matches!(flat.bottleneck, Bottleneck::Rack(_)), "{}", flat.reason);
        assert!(tree.iteration_seconds < flat.iteration_seconds / 2.0);
    }
}

/// Queues of ports are the hosts', and everything arrives.
#[test]
fn hosts_share_the_queue_of_their_port() {
    let mut setup = exchange(placed((16, Servers::Colocated), 4, Some(2)), 1 << 20);
    let lossless = run(&setup);
    for windows in [true, false] {
        (setup.windows, setup.network.queue) = (windows, Some(64 << 10));
        let outcome = run(&setup);
        assert_eq!(outcome.bytes_received, lossless.bytes_received);
        assert!(outcome.drops.segments > 0 || windows, "bursts of four nodes fit 64 KB?");
    }
}

/// Whoever waits for a host's collector says so.
#[test]
fn a_lost_collector_stops_the_job_and_is_named() {
    let mut setup = setup((8, Servers::Colocated), 4, None, SchemeRule::Auto);
    let node = NodeId(6);
    setup.failures = vec![Failure { node, at: Duration::from_millis(1500) }];
    let halt = simulate(&setup).unwrap().halt.expect("a job does not go on without a node");
    assert_eq!(halt.failed, [node]);
    assert_eq!(halt.waits[0].awaits, node, "{:?}", halt.waits);
}

#[test]
fn factors_that_cannot_be_added_up_are_refused() {
    let refused = setup((4, Servers::Colocated), 2, None, SchemeRule::Adam);
    assert_eq!(simulate(&refused).unwrap_err(), Error::AdamInHosts);
    let mut slow = setup((4, Servers::Colocated), 2, None, SchemeRule::Ps);
    slow.network.memory.rate = 0.0;
    assert!(simulate(&slow).unwrap_err().to_string().contains("the rate of memory is 0"));
}
