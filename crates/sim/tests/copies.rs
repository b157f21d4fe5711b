//! What must hold of copies between devices and hosts.

use poseidon_core::{Cluster, LayerKind, Servers};
use poseidon_sim::outcome::{Copied, Outcome};
use poseidon_sim::{
    Bottleneck, CopySpeed, Error, LayerTime, Model, ModelLayer, Network, Overlap, Places,
    SchemeRule, Setup, simulate,
};
use std::time::Duration;

fn run(setup: &Setup) -> Outcome {
    let outcome = simulate(setup).unwrap();
    assert_eq!(outcome.halt, None);
    outcome
}

fn at(bytes_per_second: f64) -> Option<CopySpeed> {
    Some(CopySpeed { to_host: bytes_per_second, to_device: bytes_per_second })
}

/// AlexNet with every kind of cluster, scheme and overlap that has a way of its own through the code.
fn jobs() -> Vec<Setup> {
    let model = Model::named("alexnet").unwrap();
    let times = times(&model, 0.05);
    let hosts = Places { ranks_per_host: 2, hosts_per_rack: None };
    let mut jobs = Vec::new();
    for servers in [Servers::Colocated, Servers::Dedicated(3)] {
        let flat = Cluster::new(4, servers, 2).unwrap();
        for cluster in [hosts.place(flat.clone()), flat] {
            for scheme in [SchemeRule::Ps, SchemeRule::Auto] {
                for overlap in [Overlap::None, Overlap::Full] {
                    let network = Network::ethernet(1.25e9);
                    let job = Setup::new(&model, times.clone(), cluster.clone(), 32, network);
                    let rebuild_rate = Some(1e13);
                    jobs.push(Setup { scheme, overlap, rebuild_rate, ..job });
                }
            }
        }
    }
    let job = Setup { scheme: SchemeRule::Adam, ..jobs.last().unwrap().clone() };
    jobs.push(job);
    jobs
}

/// A step of `seconds` shared out by operations.
fn times(model: &Model, seconds: f64) -> Vec<LayerTime> {
    let time = |flops: f64| seconds * flops / model.flops();
    let layers = model.layers.iter();
    layers
        .map(|l| LayerTime { forward: time(l.forward_flops), backward: time(l.backward_flops) })
        .collect()
}

fn named(setup: &Setup) -> String {
    let places = Places::of(&setup.cluster);
    format!("{} {} {} {places:?}", setup.cluster.servers(), setup.scheme, setup.overlap)
}

/// One layer of `len` parameters that takes a second each way, on two nodes that are both, with a
/// link of a megabyte a second.
fn one_layer(len: usize, kind: LayerKind) -> Setup {
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
    let network = Network { efficiency: 1.0, latency, ..Network::ethernet(1e6) };
    let times = vec![LayerTime { forward: 1.0, backward: 1.0 }];
    let setup = Setup::new(&model, times, cluster, 4, network);
    Setup { scheme: SchemeRule::Ps, overlap: Overlap::Backward, ..setup }
}

fn close(a: f64, b: f64) {
    assert!((a / b - 1.0).abs() < 1e-9, "{a} against {b}");
}

/// Chunks that are sent piece by piece meet in another order than chunks that are sent layer by layer.
/// That can also make a step shorter, by less than this share.
const ORDER: f64 = 1e-2;

/// Copies that take no time change nothing: neither bytes nor times.
#[test]
fn copies_that_take_no_time_change_nothing() {
    for job in jobs() {
        let without = run(&job);
        let with = run(&Setup { copies: at(1e24), ..job.clone() });
        assert_eq!(with.bytes_sent, without.bytes_sent, "{}", named(&job));
        assert_eq!(with.bytes_received, without.bytes_received, "{}", named(&job));
        let ratio = with.iteration_seconds / without.iteration_seconds;
        assert!((ratio - 1.0).abs() < ORDER, "{ratio}: {}", named(&job));
    }
}

/// Where every layer is one piece, they do not even change an order.
#[test]
fn copies_of_short_layers_that_take_no_time_change_no_order() {
    let model = Model::named("cifar10-quick").unwrap();
    let times = times(&model, 0.01);
    for overlap in [Overlap::None, Overlap::Backward, Overlap::Full] {
        let cluster = Cluster::new(4, Servers::Colocated, 2).unwrap();
        let network = Network::ethernet(1.25e8);
        let job = Setup::new(&model, times.clone(), cluster, 32, network);
        let job = Setup { overlap, ..job };
        let with = run(&Setup { copies: at(1e24), ..job.clone() });
        close(with.iteration_seconds, run(&job).iteration_seconds);
    }
}

/// A step with copies is never shorter than without, nor with slower copies than with faster ones; and
/// never shorter than its copies in either direction.
#[test]
fn a_step_is_never_shorter_by_copies_and_never_shorter_than_its_copies() {
    for job in jobs() {
        let mut before = run(&job).iteration_seconds;
        for speed in [1e11, 1e10, 1e9, 1e8] {
            let outcome = run(&Setup { copies: at(speed), ..job.clone() });
            let now = outcome.iteration_seconds;
            assert!(now >= before * (1.0 - ORDER), "{now} < {before} at {speed}: {}", named(&job));
            assert_eq!(outcome.copies.len(), 4);
            for copied in outcome.copies {
                let bound = copied.seconds(at(speed).unwrap());
                assert!(now >= bound * (1.0 - 1e-6), "{now} < {bound}: {}", named(&job));
            }
            before = now;
        }
    }
}

/// Two nodes that are both, half a layer on each. The gradient is copied whole, as it is shorter than
/// a piece; then half of it crosses each way, and the other half's result comes and is copied.
#[test]
fn two_nodes_by_hand() {
    let mut setup = one_layer(100_000, LayerKind::Other);
    setup.copies = Some(CopySpeed { to_host: 1e6, to_device: 2e6 });
    let (out, t, back) = (0.4, 200_040.0 / 1e6, 0.1);
    let outcome = run(&setup);
    close(outcome.iteration_seconds, 2.0 + out + 2.0 * t + 0.002 + back);
    assert_eq!(outcome.copies, [Copied { to_host: 400_000, to_device: 400_000 }; 2]);
    let seen = outcome.timeline[0];
    close(seen.ready, 2.0);
    close(seen.landed, outcome.iteration_seconds);
    close(seen.awaited, outcome.iteration_seconds - 2.0);
}

/// Factors: the worker's own rows are copied to the host, all rows to the device, and the gradient is
/// rebuilt when they are there.
#[test]
fn only_rows_of_factors_are_copied() {
    let mut setup = one_layer(1000 * 4096, LayerKind::Fc { m: 1000, n: 4096 });
    setup.scheme = SchemeRule::Sfb;
    setup.rebuild_rate = Some(1e8);
    setup.copies = Some(CopySpeed { to_host: 1e6, to_device: 2e6 });
    let rows = 4 * 5096 * 4;
    let t = (rows as f64 + 40.0) / 1e6;
    let rebuild = 2.0 * 1000.0 * 4096.0 * 4.0 / 1e8;
    let outcome = run(&setup);
    assert_eq!(outcome.copies, [Copied { to_host: rows, to_device: 2 * rows }; 2]);
    let (out, back) = (rows as f64 / 1e6, 2.0 * rows as f64 / 2e6);
    close(outcome.iteration_seconds, 2.0 + out + t + 0.001 + back + rebuild);
    close(outcome.timeline[0].rebuilt.unwrap().start, 2.0 + out + t + 0.001 + back);
}

/// A chunk is on the wire while the next piece is copied: of the copies of a long layer, only the first
/// piece and the last chunks add to a step that the wire keeps busy.
#[test]
fn pieces_are_sent_while_others_are_copied() {
    let len = 8 << 20;
    let mut setup = one_layer(len, LayerKind::Other);
    let without = run(&setup).iteration_seconds;
    setup.copies = at(1e7);
    let longer = run(&setup).iteration_seconds - without;
    let all = len as f64 * 4.0 / 1e7;
    let first = (2 << 20) as f64 / 1e7;
    assert!((first..all / 4.0).contains(&longer), "{longer}, all copies of a way take {all}");
}

/// Ranks of one host have a device each: a copy of one does not delay a copy of another.
#[test]
fn ranks_of_a_host_do_not_share_copy_engines() {
    let places = |ranks_per_host| Places { ranks_per_host, hosts_per_rack: None };
    // 16 pieces.
    let (len, speed) = (8 << 20, 1e5);
    for ranks in [1, 4] {
        let mut setup = one_layer(len, LayerKind::Other);
        setup.cluster = places(ranks).place(Cluster::new(4, Servers::Colocated, 1).unwrap());
        let without = run(&setup).iteration_seconds;
        setup.copies = at(speed);
        let outcome = run(&setup);
        let bytes = 4 * len as u64;
        assert_eq!(outcome.copies, [Copied { to_host: bytes, to_device: bytes }; 4]);
        let one_way = bytes as f64 / speed;
        let step = outcome.iteration_seconds;
        assert!(step >= without, "{step} against {without} with {ranks} ranks");
        assert!((one_way..1.5 * one_way).contains(&step), "{step} with {ranks} ranks");
        assert!(matches!(outcome.bottleneck, Bottleneck::Copies(_)), "{}", outcome.reason);
        assert!(outcome.reason.contains("between its device and its host"), "{}", outcome.reason);
    }
}

#[test]
fn speeds_that_are_none_are_refused() {
    for (to_host, to_device, words) in [(0.0, 1.0, "to the host"), (1.0, f64::NAN, "to the device")]
    {
        let copies = Some(CopySpeed { to_host, to_device });
        let error = simulate(&Setup { copies, ..one_layer(100, LayerKind::Other) }).unwrap_err();
        assert!(matches!(error, Error::Number { .. }) && error.to_string().contains(words));
    }
}
