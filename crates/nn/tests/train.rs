//! Many workers train as one would: the same samples, the same loss, the same parameters.

use poseidon::config::{Config, Member, credentials};
use poseidon::{Coordinator, Policy, Secret, Servers, Session};
use poseidon_nn::data::{
    self, Evaluation, Loader, Partition, Sampler, Samples, Sampling, Source, Split, Transform,
};
use poseidon_nn::train::{Overlap, Task, TrainError, What, Worker};
use poseidon_nn::{Loss, Model};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::thread;

/// Convolution, pooling, dropout, and a fully connected layer that goes by factors if it may.
const MODEL: &str = r#"
name = "small"
input = [1, 28, 28]
classes = 10

[[layer]]
name = "conv"
kind = "conv"
outputs = 4
kernel = 5
stride = 2

[[layer]]
name = "relu"
kind = "relu"

[[layer]]
name = "fc1"
kind = "fc"
outputs = 48

[[layer]]
name = "drop"
kind = "dropout"
ratio = 0.3

[[layer]]
name = "fc2"
kind = "fc"
outputs = 10
"#;

#[derive(Clone, Copy)]
struct Setup {
    workers: u16,
    batch: usize,
    devices: usize,
    policy: Policy,
    overlap: Overlap,
    servers: Servers,
    rule: &'static str,
    steps: u64,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            workers: 1,
            batch: 24,
            devices: 1,
            policy: Policy::Auto,
            overlap: Overlap::Full,
            servers: Servers::Colocated,
            rule: "sgd:momentum=0.9,weight-decay=0.0005",
            steps: 40,
        }
    }
}

/// What a worker saw.
struct Seen {
    losses: Vec<Loss>,
    digests: Vec<String>,
    schemes: Vec<String>,
    test: Loss,
}

fn samples(split: Split) -> Arc<dyn Samples> {
    data::open(&Source::FashionMnistMini, split).unwrap().into()
}

fn task(setup: &Setup) -> Task {
    Task {
        model: Model::parse(MODEL, "small.toml").unwrap(),
        batch: setup.batch,
        devices: setup.devices,
        seed: 5,
        optimizer: setup.rule.parse().unwrap(),
        overlap: setup.overlap,
    }
}

fn drive(setup: &Setup, worker: &mut Worker, rank: usize) -> Result<Seen, TrainError> {
    let train = samples(Split::Train);
    let transform = Transform::from_samples(&*train).unwrap();
    let sampling = Sampling {
        samples: train.len(),
        rank,
        ranks: setup.workers.into(),
        batch: setup.batch,
        seed: 9,
        partition: Partition::Shared,
    };
    let mut loader =
        Loader::new(train, transform.clone(), Sampler::new(sampling).unwrap()).unwrap();
    let (mut losses, mut digests) = (Vec::new(), Vec::new());
    for step in 0..setup.steps {
        let rate = if step < setup.steps / 2 { 0.02 } else { 0.01 };
        losses.push(worker.step(&loader.next()?, rate)?);
        digests.push(worker.digest()?);
    }
    let schemes = worker.session().map_or(Vec::new(), |session| {
        let layers = (0..session.plan().layers() as u32).map(poseidon::LayerId);
        layers.map(|layer| session.scheme(layer).unwrap().to_string()).collect()
    });
    let ranks = setup.workers.into();
    let batch = worker.capacity();
    let mut part = Evaluation::new(samples(Split::Test), transform, rank, ranks, batch).unwrap();
    let test = worker.evaluate(&mut part, |_| {});
    Ok(Seen { losses, digests, schemes, test: test? })
}

/// A whole job in this process, over real sockets. Returns what each worker saw.
fn train(setup: Setup) -> Vec<Seen> {
    let secret = Secret::random().unwrap();
    let mut config = Config::alone(secret.clone());
    config.workers = setup.workers;
    config.servers = setup.servers;
    config.lanes = 2;
    config.cluster = "test".into();
    config.serves_coordinator = false;
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let door = credentials("test", secret, false);
    let coordinator = Coordinator::bind(ip, 0, door, config.connect_timeout).unwrap();
    config.coordinator = coordinator.address().to_string();
    let task = task(&setup);
    thread::scope(|scope| {
        for index in 0..setup.servers.extra() {
            let config = Config { member: Member::Server(index), ..config.clone() };
            scope.spawn(move || poseidon::serve(&config).unwrap());
        }
        let threads: Vec<_> = (0..setup.workers)
            .map(|rank| {
                let config = Config { member: Member::Worker(rank), ..config.clone() };
                let (task, setup) = (&task, &setup);
                scope.spawn(move || {
                    let builder = Session::builder(config)
                        .learning_rate(0.02)
                        .deterministic(true)
                        .scheme(setup.policy);
                    let session = task.describe(builder).unwrap().start().unwrap();
                    let mut worker = Worker::join(task, session).unwrap();
                    let seen = drive(setup, &mut worker, rank.into()).unwrap();
                    worker.finish().unwrap();
                    seen
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The mean loss of each step over all workers' samples.
fn curve(workers: &[Seen]) -> Vec<f64> {
    let step = |step: usize| {
        let mut all = Loss::default();
        workers.iter().for_each(|worker| all += worker.losses[step]);
        all.mean()
    };
    (0..workers[0].losses.len()).map(step).collect()
}

fn assert_close(a: &[f64], b: &[f64], what: &str) {
    for (step, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 2e-4 * a.abs().max(1.0), "{what}, step {step}: {a} and {b}");
    }
}

fn assert_replicas_equal(workers: &[Seen]) {
    for (rank, worker) in workers.iter().enumerate() {
        for (step, (mine, first)) in worker.digests.iter().zip(&workers[0].digests).enumerate() {
            assert_eq!(mine, first, "worker {rank} after step {step}");
        }
    }
}

#[test]
fn four_workers_train_as_one_with_a_batch_four_times_as_large() {
    let mut alone = Worker::alone(&task(&Setup::default())).unwrap();
    let alone = drive(&Setup::default(), &mut alone, 0).unwrap();
    assert!(curve(std::slice::from_ref(&alone)).last().unwrap() < &1.5, "nothing was learned");
    let reference = curve(&[alone]);
    for (policy, schemes) in [
        (Policy::Ps, ["ps", "ps", "ps"]),
        (Policy::Sfb, ["ps", "sfb", "sfb"]),
        (Policy::Auto, ["ps", "sfb", "ps"]),
    ] {
        let workers = train(Setup { workers: 4, batch: 6, policy, ..Setup::default() });
        assert_eq!(workers[0].schemes, schemes);
        assert_replicas_equal(&workers);
        assert_close(&reference, &curve(&workers), &policy.to_string());
    }
}

/// With dropout's masks drawn per sample and devices summed in order, several devices in a worker
/// are one worker with their samples.
#[test]
fn devices_of_a_worker_are_one_worker() {
    let reference = curve(&train(Setup { workers: 2, batch: 12, ..Setup::default() }));
    for policy in [Policy::Ps, Policy::Sfb] {
        let setup = Setup { workers: 2, batch: 12, devices: 3, policy, ..Setup::default() };
        let workers = train(setup);
        assert_replicas_equal(&workers);
        assert_close(&reference, &curve(&workers), &policy.to_string());
        let again = train(setup);
        assert_eq!(workers[0].digests, again[0].digests, "{policy}: a run does not repeat itself");
    }
}

#[test]
fn overlap_changes_when_things_happen_and_nothing_else() {
    let digests = |overlap| {
        let setup = Setup { workers: 3, batch: 8, overlap, ..Setup::default() };
        train(setup).swap_remove(0).digests
    };
    let full = digests(Overlap::Full);
    assert_eq!(digests(Overlap::Backward), full);
    assert_eq!(digests(Overlap::None), full);
}

#[test]
fn dedicated_servers_and_other_rules_train_the_same_way() {
    for rule in ["adam", "caffe-sgd:momentum=0.9"] {
        let setup = Setup { rule, steps: 20, ..Setup::default() };
        let reference = curve(&train(setup));
        for servers in [Servers::Dedicated(2), Servers::Mixed(1)] {
            let workers = train(Setup { workers: 2, batch: 12, servers, ..setup });
            assert_replicas_equal(&workers);
            assert_close(&reference, &curve(&workers), rule);
        }
    }
}

/// An epoch of 4600 samples in steps of 3 x 300: the sixth has 100 left, 34, 33 and 33 of them.
#[test]
fn the_last_batch_of_an_epoch_may_be_short_and_uneven() {
    let setup = Setup { steps: 8, ..Setup::default() };
    let reference = curve(&train(Setup { batch: 900, ..setup }));
    for policy in [Policy::Ps, Policy::Sfb] {
        let workers = train(Setup { workers: 3, batch: 300, policy, ..setup });
        assert_eq!([0, 1, 2].map(|w: usize| workers[w].losses[5].count), [34, 33, 33]);
        assert_replicas_equal(&workers);
        assert_close(&reference, &curve(&workers), &policy.to_string());
    }
}

#[test]
fn everybody_tests_a_part_and_nobody_twice() {
    let one = train(Setup { steps: 3, ..Setup::default() });
    let three = train(Setup { steps: 3, workers: 3, batch: 8, ..Setup::default() });
    let mut all = Loss::default();
    three.iter().for_each(|worker| all += worker.test);
    assert_eq!((all.count, one[0].test.count), (1000, 1000));
    // Parameters differ by rounding, so a sample on the edge may fall to the other side.
    assert!(all.correct.abs_diff(one[0].test.correct) <= 5);
}

#[test]
fn a_loss_that_is_not_a_number_stops_training_and_says_where() {
    let setup = Setup { steps: 1, ..Setup::default() };
    let mut worker = Worker::alone(&task(&setup)).unwrap();
    let train = samples(Split::Train);
    let transform = Transform::from_samples(&*train).unwrap();
    let sampling = Sampling {
        samples: train.len(),
        rank: 0,
        ranks: 1,
        batch: 24,
        seed: 9,
        partition: Partition::Shared,
    };
    let mut loader = Loader::new(train, transform, Sampler::new(sampling).unwrap()).unwrap();
    let error = loop {
        if let Err(error) = worker.step(&loader.next().unwrap(), 1e30) {
            break error.to_string();
        }
    };
    for words in ["the loss became NaN at step", "layer 'fc1'", "learning rate"] {
        assert!(error.contains(words), "'{words}' is not in: {error}");
    }
}

#[test]
fn the_log_knows_what_was_computed_and_what_travelled() {
    let mut worker = Worker::alone(&task(&Setup::default())).unwrap();
    drive(&Setup { steps: 3, ..Setup::default() }, &mut worker, 0).unwrap();
    let iteration = worker.last_iteration().unwrap();
    assert_eq!(iteration.step, 1);
    let count = |what| iteration.spans.iter().filter(|span| span.what == what).count();
    assert_eq!([What::Forward, What::Backward].map(count), [5, 5]);
    assert_eq!([What::Sync, What::Wait].map(count), [0, 0]);
    assert_eq!(worker.stats().hidden_fraction(), 1.0);
}
