//! Nodes that do not come to an end: the others do, with an error that names them.

use crate::cluster::fake::Fake;
use crate::cluster::{Layout, builder, job, step, without_hanging};
use poseidon::config::{Config, Member};
use poseidon::{Error, NodeId, Servers, Session, serve};
use poseidon_core::wire::{Header, Kind};
use std::thread;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(1);

#[track_caller]
fn says(error: &Error, words: &[&str]) {
    let error = error.to_string();
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

/// Does nothing, alive, until the session has failed.
fn linger(session: &Session) -> Error {
    let layer = session.layer("a").unwrap();
    loop {
        if let Err(error) = session.is_ready(layer) {
            return error;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_worker_that_never_finishes_is_named() {
    let errors = without_hanging(|| {
        let layout = Layout::workers(3);
        let (_coordinator, mut config) = layout.coordinator();
        config.timeout = Duration::from_secs(3);
        let describe = |b: poseidon::session::Builder| {
            let job = job();
            b.layers(job.layers).optimizer(job.optimizer).chunk_size(job.chunk)
        };
        layout.run_with(&config, describe, |session| {
            step(&session, 1, 0..3)?;
            if session.rank() == 1 { Err(linger(&session)) } else { session.finish() }
        })
    });
    for error in errors {
        let error = error.unwrap_err();
        says(&error, &["did not end within 3.", "the goodbye of worker 1 (the last of it: chunk"]);
        says(&error, &["of layer '", "at clock 1)"]);
    }
}

/// It says one thing after the other, and never goodbye.
#[test]
fn a_worker_that_keeps_talking_does_not_keep_the_others() {
    let error = without_hanging(|| {
        let (_coordinator, mut config) = Layout::workers(2).coordinator();
        config.timeout = Duration::from_secs(2);
        thread::scope(|scope| {
            let zero = scope.spawn(|| {
                let session = builder(config.clone(), &job()).start()?;
                step(&session, 1, 0..1)?;
                session.finish()
            });
            let mut fake =
                Fake::join(&Config { member: Member::Worker(1), ..config.clone() }, Some(&job()));
            fake.take_part(1);
            let beat = Header::bare(Kind::Heartbeat, fake.me, 0).encode();
            while !zero.is_finished() {
                fake.write(NodeId(0), &beat);
            }
            zero.join().unwrap().unwrap_err()
        })
    });
    says(&error, &["did not end within 2.", "awaiting the goodbye of worker 1"]);
}

/// What a dedicated server says, while worker 0 finishes if it `finishes` and worker 1 does nothing.
fn server_says(limits: impl Fn(&mut Config) + Send + 'static, finishes: bool) -> Error {
    without_hanging(move || {
        let layout = Layout { servers: Servers::Dedicated(1), ..Layout::workers(2) };
        let (_coordinator, config) = layout.coordinator();
        let mut server = Config { member: Member::Server(0), ..config.clone() };
        limits(&mut server);
        thread::scope(|scope| {
            let server = scope.spawn(move || serve(&server));
            for rank in 0..2 {
                let config = Config { member: Member::Worker(rank), ..config.clone() };
                scope.spawn(move || {
                    let session = builder(config, &job()).start().unwrap();
                    step(&session, 1, 0..2).unwrap();
                    let error = match rank {
                        0 if finishes => session.finish().unwrap_err(),
                        _ => linger(&session),
                    };
                    says(&error, &["server 0 (node 2) stopped the job"]);
                });
            }
            server.join().unwrap().unwrap_err()
        })
    })
}

#[test]
fn a_server_does_not_wait_for_ever_for_the_last_goodbye() {
    let error = server_says(|config| config.timeout = SHORT, true);
    says(&error, &["did not end within 1.", "goodbye of worker 1 (the last of it: chunk"]);
    says(&error, &["at clock 1)"]);
}

#[test]
fn a_server_does_not_wait_for_ever_for_workers_that_do_nothing() {
    let limits = |config: &mut Config| (config.timeout, config.idle) = (LONG, SHORT);
    let error = server_says(limits, false);
    says(&error, &["nothing about any layer came for 1.", "worker 0 (the last of it: chunk"]);
    says(&error, &["worker 1 (the last of it: chunk", "POSEIDON_IDLE"]);
}
