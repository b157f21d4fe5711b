//! Workers that do not have the same: they hear of it, and of who it is.

use crate::cluster::fake::{Fake, chunk};
use crate::cluster::{Layout, builder, job, step, without_hanging};
use poseidon::config::{Config, Member};
use poseidon::{Buffer, Clock, NodeId, Servers, Session};
use poseidon_core::wire::{Header, Kind};
use std::thread;

fn describe(b: poseidon::session::Builder) -> poseidon::session::Builder {
    let job = job();
    b.layers(job.layers).optimizer(job.optimizer).chunk_size(job.chunk)
}

#[test]
fn workers_that_have_the_same_are_compared_and_go_on() {
    let compared = without_hanging(|| {
        let layout = Layout { lanes: 2, ..Layout::workers(3) };
        let (_coordinator, mut config) = layout.coordinator();
        config.compare_every = 2;
        layout.run_with(&config, describe, |session: Session| {
            for clock in 1..=12 {
                step(&session, clock, 0..3)?;
                if clock == 7 {
                    session.compare_replicas("what the program holds", Clock(7), 42)?;
                }
            }
            session.say_goodbye()?;
            let compared = session.compared();
            session.finish().map(|()| compared)
        })
    });
    for compared in compared {
        assert_eq!(compared.unwrap(), 7);
    }
}

/// A server sends one worker something else than the other.
#[test]
fn a_layer_that_differs_is_named_with_the_workers() {
    let errors = without_hanging(|| {
        // Each worker is alone on its host, and hears from the server itself.
        let hosts = &[1, 1, 1];
        let layout = Layout { servers: Servers::Dedicated(1), hosts, ..Layout::workers(2) };
        let (_coordinator, mut config) = layout.coordinator();
        config.compare_every = 1;
        let config = &config;
        thread::scope(|scope| {
            let workers = [0, 1].map(|rank| {
                scope.spawn(move || {
                    let config = layout.member(config, Member::Worker(rank));
                    let session = builder(config, &job()).start()?;
                    for layer in job().layers {
                        session.send(session.layer(&layer.name)?, Buffer::zeroed(layer.len))?;
                    }
                    for layer in job().layers {
                        session.receive(session.layer(&layer.name)?)?;
                    }
                    session.finish()
                })
            });
            let server = Config { member: Member::Server(0), ..config.clone() };
            let mut fake = Fake::join(&server, None);
            let sums = fake.collect(1);
            for rank in [0, 1] {
                for (&key, sum) in &sums {
                    let header = Header { kind: Kind::Update, ..fake.push(key, 1) };
                    let header = Header { length: (sum.len() * 4) as u32, ..header };
                    let mut frame = header.encode().to_vec();
                    let odd = rank == 1 && key == chunk(0, 0);
                    let values = sum.iter().enumerate();
                    frame.extend(values.flat_map(|(i, value)| match odd && i == 17 {
                        true => 1e-30f32.to_le_bytes(),
                        false => value.to_le_bytes(),
                    }));
                    fake.write(NodeId(rank), &frame);
                }
            }
            workers.map(|worker| worker.join().unwrap().unwrap_err())
        })
    });
    for error in errors {
        // Of its own comparison, or of the other worker's.
        let words = error.to_string();
        for fact in ["layer 'a' (elements 0 to 99)", "after clock 1", "worker 0", "worker 1"] {
            assert!(words.contains(fact), "'{fact}' is not in: {words}");
        }
    }
}

/// What a program steps by itself.
#[test]
fn a_program_that_holds_something_else_is_named() {
    let results = without_hanging(|| {
        let layout = Layout::workers(4);
        let (_coordinator, config) = layout.coordinator();
        layout.run_with(&config, describe, |session: Session| {
            step(&session, 1, 0..4)?;
            let digest = if session.rank() == 2 { 1 } else { 0 };
            session.compare_replicas("parameter 'fc1.weight'", Clock(1), digest)?;
            session.finish()
        })
    });
    for result in results {
        let words = result.unwrap_err().to_string();
        let told = "parameter 'fc1.weight' differs after clock 1: \
                    worker 0, worker 1, worker 3 have one value, worker 2 another";
        assert!(words.contains(told), "{words}");
    }
}

/// What a program may change on purpose: it is told, once, and the job goes on.
#[test]
fn what_is_only_watched_is_told_and_the_job_goes_on() {
    let results = without_hanging(|| {
        let layout = Layout::workers(3);
        let (_coordinator, config) = layout.coordinator();
        layout.run_with(&config, describe, |session: Session| {
            step(&session, 1, 0..3)?;
            let digest = u64::from(session.rank() == 1);
            for clock in [1, 2] {
                let pieces = vec![("parameter 'a'".into(), 7), ("parameter 'b'".into(), digest)];
                session.watch_replicas(Clock(clock), pieces)?;
            }
            session.say_goodbye()?;
            let told = [session.take_difference(), session.take_difference()];
            session.finish().map(|()| told)
        })
    });
    for result in results {
        let [told, again] = result.unwrap();
        let words = "parameter 'b' differs after clock 1: worker 0, worker 2 have one value, \
                     worker 1 another";
        assert_eq!(told.unwrap().to_string(), words);
        assert_eq!(again, None);
    }
}
