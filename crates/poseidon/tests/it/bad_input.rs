//! What a person can get wrong, and what they are told.

use crate::cluster::fake::register;
use crate::cluster::{Layout, builder, job, step, without_hanging};
use poseidon::config::{Carriers, Config, Member};
use poseidon::{
    Buffer, ChunkSize, Error, Job, Layer, LayerId, LayerKind, Optimizer, Placement, Secret,
    Servers, Session, serve,
};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

/// The only worker of its own job.
fn alone() -> Config {
    Config { lanes: 1, ..Config::alone(Secret::random().unwrap()) }
}

#[track_caller]
fn says(error: impl Into<Option<Error>>, words: &[&str]) {
    let error = error.into().expect("an error").to_string();
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

/// Starts a worker of `job` that is not expected to come into being.
#[track_caller]
fn refused(config: Config, job: &Job) -> Error {
    match builder(config, job).start() {
        Ok(_) => panic!("started"),
        Err(error) => error,
    }
}

#[test]
fn a_layer_that_does_not_exist() {
    let session = builder(alone(), &job()).start().unwrap();
    says(session.layer("fc9").err(), &["no layer 'fc9'", "'a', 'b'"]);
    let nowhere = LayerId(7);
    says(session.clock(nowhere).err(), &["no layer '#7'"]);
    says(session.send(nowhere, Buffer::default()).err(), &["no layer '#7'"]);
    says(session.receive(nowhere).err(), &["no layer '#7'"]);
    says(session.is_ready(nowhere).err(), &["no layer '#7'"]);
    says(session.broadcast(nowhere, Buffer::default()).err(), &["no layer '#7'"]);
    session.finish().unwrap();
}

#[test]
fn a_long_list_of_layers_is_cut_short() {
    let layers = (0..100).map(|n| Layer::new(format!("layer{n}"), 1)).collect();
    let session = builder(alone(), &Job { layers, ..job() }).start().unwrap();
    says(session.layer("x").err(), &["'layer0'", "92 more"]);
    session.finish().unwrap();
}

/// Each of these is refused without harm: the exchange that follows is exact.
#[test]
fn calls_out_of_order_and_buffers_of_the_wrong_length() {
    let session = builder(alone(), &job()).start().unwrap();
    let a = session.layer("a").unwrap();
    let send = |len| session.send(a, Buffer::zeroed(len)).err();
    says(send(99), &["layer 'a' has 100 parameters, the gradient given has 99"]);
    says(send(0), &["the gradient given has 0"]);
    let into = session.send_into(a, Buffer::zeroed(100), Buffer::zeroed(101));
    says(into.err(), &["layer 'a' has 100 parameters, the destination given has 101"]);
    says(session.broadcast(a, Buffer::zeroed(1)).err(), &["the buffer given has 1"]);
    says(session.receive(a).err(), &["layer 'a' is not in flight", "send it before"]);

    session.send(a, Buffer::zeroed(100)).unwrap();
    says(send(100), &["layer 'a' is still in flight at clock 1: receive it before"]);
    says(session.broadcast(a, Buffer::zeroed(100)).err(), &["still in flight"]);
    session.receive(a).unwrap();
    says(session.broadcast(a, Buffer::zeroed(100)).err(), &["'a' is at clock 1", "once"]);
    says(session.receive(a).err(), &["not in flight"]);

    let b = session.layer("b").unwrap();
    session.send(b, vec![3.0; 300].into()).unwrap();
    assert!(session.receive(b).unwrap().result.iter().all(|v| *v == 3.0));
    session.finish().unwrap();
}

#[test]
fn a_layer_in_flight_at_the_end() {
    let session = builder(alone(), &job()).start().unwrap();
    let a = session.layer("a").unwrap();
    session.send(a, Buffer::zeroed(100)).unwrap();
    says(session.finish().err(), &["layer 'a' is still in flight at clock 1"]);
}

#[test]
fn parameters_that_nobody_has_given() {
    let session = builder(alone(), &Job { optimizer: Optimizer::sgd(), ..job() });
    let session = session.learning_rate(0.1).start().unwrap();
    let a = session.layer("a").unwrap();
    let early = session.send(a, Buffer::zeroed(100)).err();
    says(early, &["layer 'a' has no initial parameters", "'sgd", "call broadcast and receive"]);
    session.broadcast(a, vec![1.0; 100].into()).unwrap();
    session.receive(a).unwrap();
    let twice = session.broadcast(a, vec![1.0; 100].into()).err();
    says(twice, &["layer 'a' is at clock 0", "once"]);
    session.send(a, vec![1.0; 100].into()).unwrap();
    let weights = session.receive(a).unwrap().result;
    assert!(weights.iter().all(|w| *w == 1.0 - 0.1), "{:?}", &weights[..3]);
    session.finish().unwrap();
}

#[test]
fn learning_rates_that_are_missing_or_no_numbers() {
    let job = Job { optimizer: Optimizer::adam(), ..job() };
    says(refused(alone(), &job), &["update rule 'adam", "needs a learning rate"]);
    for rate in [f32::NAN, f32::INFINITY] {
        let session = builder(alone(), &job).learning_rate(rate).start();
        says(session.err(), &["learning rate", &rate.to_string()]);
    }
    let session = builder(alone(), &job).learning_rate(0.1).start().unwrap();
    let a = session.layer("a").unwrap();
    session.broadcast(a, Buffer::zeroed(100)).unwrap();
    session.receive(a).unwrap();
    session.set_learning_rate(f32::NAN);
    says(session.send(a, Buffer::zeroed(100)).err(), &["learning rate NaN"]);
    session.set_learning_rate(0.01);
    session.send(a, Buffer::zeroed(100)).unwrap();
    session.receive(a).unwrap();
    session.finish().unwrap();
}

#[test]
fn jobs_that_make_no_sense() {
    let twins = vec![Layer::new("fc", 1), Layer::new("fc", 2)];
    says(refused(alone(), &Job { layers: twins, ..job() }), &["two layers are called 'fc'"]);
    let nothing = Job { chunk: ChunkSize { min: 0, max: 0 }, ..job() };
    says(refused(alone(), &nothing), &["chunks of 0 to 0 bytes: expected at least 4"]);
    let mut optimizer = Optimizer::sgd();
    if let Optimizer::Sgd { momentum, .. } = &mut optimizer {
        *momentum = f32::NAN;
    }
    says(refused(alone(), &Job { optimizer, ..job() }), &["sgd", "momentum", "NaN"]);
}

#[test]
fn clusters_that_make_no_sense() {
    let start = |change: &dyn Fn(&mut Config)| {
        let mut config = alone();
        change(&mut config);
        refused(config, &job())
    };
    says(start(&|c| c.workers = 0), &["at least 1 worker, got 0"]);
    says(start(&|c| c.lanes = 0), &["at least 1 lane, got 0"]);
    says(start(&|c| c.servers = Servers::Dedicated(0)), &["at least 1 of them, got 0"]);
    says(start(&|c| c.member = Member::Worker(3)), &["rank 3 of 1: expected less than 1"]);
    says(start(&|c| c.coordinator = "nowhere".into()), &["nowhere"]);
    let server = Config { member: Member::Server(2), ..alone() };
    says(serve(&server).err(), &["server index 2 of 0"]);
}

#[test]
fn each_calls_what_is_the_others() {
    let servers = Servers::Dedicated(1);
    let server = Config { member: Member::Server(0), servers, ..alone() };
    says(refused(server, &job()), &["this process is server 0", "servers call serve"]);
    let worker = Config { servers, ..alone() };
    says(serve(&worker).err(), &["this process is worker 0, not a server", "POSEIDON_SERVER"]);
}

#[test]
fn a_coordinator_port_that_is_taken() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let config = Config { coordinator: address.clone(), ..alone() };
    says(refused(config, &job()), &[&address, "is in use by another process"]);
}

#[test]
fn a_coordinator_that_is_not_there() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let connect_timeout = Duration::from_secs(1);
    let (member, workers) = (Member::Worker(1), 2);
    let coordinator = gone.clone();
    let serves_coordinator = false;
    let config =
        Config { member, workers, coordinator, serves_coordinator, connect_timeout, ..alone() };
    says(refused(config, &job()), &["reaching the coordinator at", &gone, "refused"]);
}

#[test]
fn a_coordinator_of_another_job_or_with_another_secret() {
    let (_coordinator, config) = Layout::workers(2).coordinator();
    let other = Config { cluster: "another".into(), ..config.clone() };
    says(refused(other, &job()), &[&config.coordinator, "another cluster's id"]);
    let wrong = Config { secret: Secret::random().unwrap(), ..config.clone() };
    says(refused(wrong, &job()), &[&config.coordinator, "wrong cluster secret"]);
}

/// Workers 0 and 1 of two, of which worker 1 believes in another job. Both must hear of it, and
/// long before they have waited for each other in vain.
fn disagree(change: impl FnOnce(&mut Job, &mut Config)) -> [Error; 2] {
    let (_coordinator, config) = Layout::workers(2).coordinator();
    let ours = job();
    let mut theirs = (job(), Config { member: Member::Worker(1), ..config.clone() });
    change(&mut theirs.0, &mut theirs.1);
    thread::scope(|scope| {
        let one = scope.spawn(move || refused(theirs.1, &theirs.0));
        [refused(config, &ours), one.join().unwrap()]
    })
}

#[track_caller]
fn both_say(errors: [Error; 2], words: &[&str]) {
    for error in errors {
        says(error, words);
    }
}

#[test]
fn workers_that_do_not_train_the_same_thing() {
    without_hanging(|| {
        let sides = ["on worker 0", "on worker 1"];
        let differ = |change: fn(&mut Job), words: &[&str]| {
            both_say(disagree(|job, _| change(job)), &[&sides, words].concat());
        };
        differ(|j| j.layers[1].name = "c".into(), &["layer 1 is", "'b' of 300", "'c' of 300"]);
        differ(|j| j.layers[0].len = 101, &["layer 0 is", "'a' of 100", "'a' of 101"]);
        differ(|j| j.layers[0].kind = LayerKind::Conv, &["layer 0 is", "a convolution"]);
        differ(|j| j.layers.truncate(1), &["the number of layers is", "2 on", "1 on"]);
        differ(|j| j.layers.swap(0, 1), &["layer 0 is", "'a' of 100", "'b' of 300"]);
        differ(
            |j| j.optimizer = Optimizer::default(),
            &["the update rule is", "sum on", "mean on"],
        );
        differ(|j| j.chunk.max = 512, &["the chunk size is", "256 to 256", "256 to 512"]);
        differ(|j| j.placement = Placement::PerTensor, &["the placement is", "PerTensor"]);
        differ(|j| j.deterministic = true, &["deterministic is", "true", "false"]);
    });
}

#[test]
fn workers_that_do_not_agree_on_how_many_they_are() {
    without_hanging(|| {
        let more = disagree(|_, config| config.workers = 3);
        both_say(more, &["worker 0 expects 2 workers", "worker 1 expects 3 workers"]);
        let mixed = disagree(|_, config| config.servers = Servers::Mixed(1));
        both_say(mixed, &["servers 'colocated'", "servers 'colocated+1'"]);
    });
}

#[test]
fn two_processes_of_one_rank() {
    without_hanging(|| {
        let (_coordinator, config) = Layout::workers(3).coordinator();
        let work = |rank| {
            let config = Config { member: Member::Worker(rank), ..config.clone() };
            let session = builder(config, &job()).start()?;
            step(&session, 1, 0..3)?;
            session.finish()
        };
        thread::scope(|scope| {
            let mut twins: Vec<_> = (0..2).map(|_| scope.spawn(|| work(1))).collect();
            let double = loop {
                // Only one of them can be refused: the job cannot start without the other ranks.
                if let Some(position) = twins.iter().position(|t| t.is_finished()) {
                    break twins.remove(position);
                }
                thread::yield_now();
            };
            let words = ["worker 1 joined already, from 127.0.0.1:", "have the same rank"];
            says(double.join().unwrap().err(), &words);
            let others = [0, 2].map(|rank| scope.spawn(move || work(rank)));
            for worker in others.into_iter().chain(twins) {
                worker.join().unwrap().expect("the job starts with the one that was first");
            }
        });
    });
}

#[test]
fn a_node_that_never_joins_is_named_on_every_other() {
    without_hanging(|| {
        let layout = Layout { servers: Servers::Dedicated(2), ..Layout::workers(3) };
        let (_coordinator, config) = layout.coordinator_within(Duration::from_secs(2));
        thread::scope(|scope| {
            let members = [Member::Worker(0), Member::Worker(2), Member::Server(0)];
            let nodes = members.map(|member| {
                let config = Config { member, ..config.clone() };
                scope.spawn(move || match member {
                    Member::Worker(_) => builder(config, &job()).start().err(),
                    Member::Server(_) => serve(&config).err(),
                })
            });
            for node in nodes {
                let words = ["worker 1, server 1 (node 4) did not join within 2s"];
                says(node.join().unwrap(), &words);
            }
        });
    });
}

#[test]
fn a_node_that_joins_and_never_connects_is_named() {
    without_hanging(|| {
        let (_coordinator, config) = Layout::workers(2).coordinator();
        thread::scope(|scope| {
            let config = &config;
            let worker = scope.spawn(move || {
                let connect_timeout = Duration::from_secs(2);
                refused(Config { connect_timeout, ..config.clone() }, &job())
            });
            let ghost = Config { member: Member::Worker(1), ..config.clone() };
            // It stays connected to the coordinator, so it is not taken for dead.
            let _alive = register(&ghost, Some(&job()), "elsewhere").unwrap();
            says(worker.join().unwrap(), &["no connection from worker 1 within 2s", "127.0.0.1:"]);
        });
    });
}

/// A session checks its job before it joins. Another program may not, and the coordinator refuses its job.
#[test]
fn the_coordinator_refuses_a_job_that_makes_no_sense() {
    without_hanging(|| {
        let (_coordinator, config) = Layout::workers(2).coordinator();
        let kind = LayerKind::Fc { m: 4, n: 5 };
        let layers = vec![Layer { kind, ..Layer::new("fc", 7) }];
        let reason = register(&config, Some(&Job { layers, ..job() }), "elsewhere").unwrap_err();
        assert!(reason.contains("worker 0") && reason.contains("layer 'fc'"), "{reason}");
        assert!(reason.contains("expected at least 1 of each, and 20 parameters"), "{reason}");
    });
}

#[test]
fn unix_sockets_only_and_a_node_on_another_host() {
    without_hanging(|| {
        let layout = Layout { carrier: Carriers::Unix, ..Layout::workers(2) };
        let (_coordinator, config) = layout.coordinator();
        thread::scope(|scope| {
            let one = Config { member: Member::Worker(1), ..config.clone() };
            let worker = scope.spawn(move || refused(one, &job()));
            let _alive = register(&config, Some(&job()), "elsewhere").unwrap();
            let words = ["limited to unix sockets", "worker 0 at 127.0.0.1:9 cannot be reached"];
            says(worker.join().unwrap(), &words);
        });
    });
}

/// A job that has no layers is a strange thing to start, but no reason to hang or panic.
#[test]
fn a_job_without_layers() {
    let results = Layout::workers(2).run(|builder| builder, |session: &Session| session.layer("a"));
    for result in results {
        says(result.err(), &["no layer 'a'", "none"]);
    }
}
