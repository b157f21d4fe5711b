//! What must hold of every simulation.

mod support;

use poseidon_core::wire::Header;
use poseidon_core::{Cluster, LayerId, LayerKind, NodeId, Servers};
use poseidon_sim::network::{Duplex, Racks};
use poseidon_sim::outcome::Outcome;
use poseidon_sim::setup::{Failure, Jitter};
use poseidon_sim::{
    Bottleneck, Error, LayerTime, Model, ModelLayer, Network, Overlap, SchemeRule, Setup, simulate,
};
use std::time::Duration;

fn setup(workers: u16, servers: Servers, scheme: SchemeRule, bandwidth: f64) -> Setup {
    let model = support::vgg19(1000);
    let times = support::times(&model, 32.0 / 35.5);
    let cluster = Cluster::new(workers, servers, 2).unwrap();
    Setup { scheme, ..Setup::new(&model, times, cluster, 32, Network::ethernet(bandwidth)) }
}

fn run(setup: &Setup) -> Outcome {
    let outcome = simulate(setup).unwrap();
    assert_eq!(outcome.halt, None);
    outcome
}

/// One layer of `len` parameters that takes a second each way, on a link of `bandwidth` without loss.
fn one_layer(len: usize, kind: LayerKind, bandwidth: f64) -> Setup {
    let layer = ModelLayer {
        name: "l".into(),
        kind,
        parameters: len,
        rows: 1,
        forward_flops: 1.0,
        backward_flops: 1.0,
    };
    let model = Model { name: "one".into(), layers: vec![layer] };
    let cluster = Cluster::new(2, Servers::Colocated, 1).unwrap();
    let latency = Duration::from_millis(1);
    let network = Network { efficiency: 1.0, latency, ..Network::ethernet(bandwidth) };
    let times = vec![LayerTime { forward: 1.0, backward: 1.0 }];
    Setup { scheme: SchemeRule::Ps, ..Setup::new(&model, times, cluster, 4, network) }
}

fn close(a: f64, b: f64) {
    assert!((a / b - 1.0).abs() < 1e-9, "{a} against {b}");
}

/// Payloads are what the plan says, and every frame has one header: nothing is lost or made up.
#[test]
fn bytes_are_the_plans() {
    for servers in [Servers::Colocated, Servers::Dedicated(2), Servers::Mixed(1)] {
        for scheme in [SchemeRule::Ps, SchemeRule::Auto, SchemeRule::Sfb] {
            let setup = setup(4, servers, scheme, 1e9);
            let (plan, cluster) = (setup.plan(), &setup.cluster);
            let outcome = run(&setup);
            let layers = (0..setup.layers.len() as u32).map(LayerId);
            for node in cluster.node_ids() {
                let payload: usize =
                    layers.clone().map(|layer| plan.bytes_sent(cluster, node, layer)).sum();
                let headers = outcome.bytes_sent[node.index()] - payload as u64;
                assert_eq!(headers % Header::SIZE as u64, 0);
                assert!(headers < payload as u64 / 100, "{headers} of {payload}");
            }
            let total = |bytes: &[u64]| bytes.iter().sum::<u64>();
            assert_eq!(total(&outcome.bytes_sent), total(&outcome.bytes_received));
        }
    }
}

/// Project Adam's traffic (Poseidon 2017, Table 1), summed over the nodes: factors in, matrices out.
#[test]
fn adam_sends_factors_and_gets_matrices() {
    let kind = LayerKind::Fc { m: 1000, n: 4096 };
    let mut setup = one_layer(1000 * 4096, kind, 1e9);
    setup.scheme = SchemeRule::Adam;
    setup.cluster = Cluster::new(4, Servers::Colocated, 1).unwrap();
    let outcome = run(&setup);
    let (factors, matrix) = (4 * 5096 * 4 + 32, 1000 * 4096 * 4 + 32);
    assert_eq!(outcome.bytes_sent, [3 * matrix, factors, factors, factors]);
    assert_eq!(outcome.bytes_received, [3 * factors, matrix, matrix, matrix]);
}

#[test]
fn a_seed_gives_the_same_again_and_another_does_not() {
    let mut setup = setup(5, Servers::Colocated, SchemeRule::Auto, 1e9);
    setup.stragglers.jitter = Jitter::LogNormal(0.2);
    let text = |setup: &Setup| format!("{:?}", run(setup));
    let first = text(&setup);
    assert_eq!(first, text(&setup));
    setup.seed = 1;
    assert_ne!(first, text(&setup));
}

/// Two workers and one dedicated server, one chunk: push, sum, update, one after the other.
///
/// The chunk's bytes b take t = b / bandwidth on a link. Both pushes come at once and pass the
/// server's link one after the other; the update goes to one worker after the other. Step = 2 s of
/// computing, 2 t in, 2 t out, 2 latencies. (The worker that is served first begins its next step
/// earlier, and its next push is in before the other's begins: then it is t in.)
#[test]
fn two_workers_and_a_server_by_hand() {
    let mut setup = one_layer(50_000, LayerKind::Other, 1e6);
    setup.cluster = Cluster::new(2, Servers::Dedicated(1), 1).unwrap();
    setup.iterations = 1;
    let t = 200_032.0 / 1e6;
    close(run(&setup).iteration_seconds, 2.0 + 4.0 * t - t + 0.002 + t / 2.0 * 0.0);
}
