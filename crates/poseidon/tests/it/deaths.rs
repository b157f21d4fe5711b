//! Nodes that die while a job starts: everybody else hears of it at once, and a restarted process
//! is welcome.

use crate::cluster::{Layout, builder, fake, job, step, without_hanging};
use poseidon::config::{Carriers, Config, Member};
use poseidon::coordinator::query;
use poseidon::{BOOK_VERSION, Error, Session};
use poseidon_core::wire::{Header, Kind};
use poseidon_link::Stream;
use serde_json::json;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);

#[track_caller]
fn says(error: &Error, words: &[&str]) {
    let error = error.to_string();
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

fn worker(config: &Config, rank: u16) -> Config {
    Config { member: Member::Worker(rank), ..config.clone() }
}

/// What the coordinator says of `key`.
fn told(config: &Config, key: &str) -> serde_json::Value {
    let told = query(&config.coordinator, &config.credentials(), key, LONG).unwrap();
    told.unwrap_or_default()
}

/// Waits until so many nodes have joined, or have not, before the book is written.
fn await_joined(config: &Config, count: usize) {
    while told(config, "joined").as_array().is_none_or(|joined| joined.len() != count) {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Takes part in one clock and finishes.
fn work(config: Config) -> Result<(), Error> {
    let workers = config.workers;
    let session = builder(config, &job()).start()?;
    step(&session, 1, 0..workers)?;
    session.finish()
}

/// A worker that has said that it joins, and does not wait for an answer.
fn apply(config: &Config) -> Stream {
    let node = config.node();
    let mut stream = fake::control(config, node);
    let facts = json!({ "node": node, "host": "there", "tcp": "127.0.0.1:9", "unix": null, "version": "0" });
    let join = json!({
        "type": "join", "facts": facts, "workers": config.workers, "servers": "colocated",
        "lanes": config.lanes, "book": BOOK_VERSION, "job": job(),
    });
    let body = join.to_string();
    let header = Header::bare(Kind::Control, node, body.len() as u32);
    fake::write_frame(&mut stream, &[&header.encode(), body.as_bytes()].concat()).unwrap();
    stream
}

/// A worker in a process of its own, to be killed.
struct Process(Child);

impl Process {
    /// Starts this test program again, as the worker of this rank.
    fn start(config: &Config, rank: u16) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "deaths::another_process", "--nocapture"])
            .env("DEATHS_ROLE", "worker")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", config.workers.to_string())
            .env("POSEIDON_COORDINATOR", &config.coordinator)
            .env("POSEIDON_COORDINATOR_SERVED", "1")
            .env("POSEIDON_SECRET", config.secret.expose())
            .env("POSEIDON_CLUSTER", &config.cluster)
            .env("POSEIDON_LANES", config.lanes.to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test of its own: what [`Process`] runs. Without a role there is nothing to do.
#[test]
fn another_process() {
    if std::env::var("DEATHS_ROLE").is_ok() {
        work(Config::from_env().unwrap()).unwrap();
    }
}

#[test]
fn a_restarted_process_takes_the_place_of_one_that_was_killed() {
    without_hanging(|| {
        let (_coordinator, config) = Layout::workers(3).coordinator();
        thread::scope(|scope| {
            let killed = Process::start(&config, 1);
            let zero = scope.spawn(|| work(worker(&config, 0)));
            await_joined(&config, 2);
            drop(killed);
            // At once: its predecessor may not have been missed yet.
            let mut restarted = Process::start(&config, 1);
            let two = scope.spawn(|| work(worker(&config, 2)));
            zero.join().unwrap().unwrap();
            two.join().unwrap().unwrap();
            assert!(restarted.0.wait().unwrap().success());
        });
    });
}

#[test]
fn a_worker_that_dies_before_the_job_begins_is_named_with_its_address() {
    without_hanging(|| {
        // The place is free for as long as nodes wait for each other, which is long enough for
        // worker 0 only.
        let (_coordinator, config) = Layout::workers(3).coordinator_within(Duration::from_secs(3));
        let dead = apply(&worker(&config, 1));
        thread::scope(|scope| {
            let zero = scope.spawn(|| work(worker(&config, 0)));
            await_joined(&config, 2);
            drop(dead);
            await_joined(&config, 1);
            assert_eq!(told(&config, "missing"), json!(["worker 1", "worker 2"]));
            let error = zero.join().unwrap().unwrap_err();
            let words =
                ["worker 1 went away before the job began", "it had joined from 127.0.0.1:"];
            says(&error, &words);
            says(&error, &["its connection closed", "no other process took its place"]);
        });
    });
}

/// Two workers of which one gets its book and then dies. Returns what the other, of rank `rank`,
/// makes of it: long before it would have waited in vain.
fn die_after_the_book(rank: u16) -> Error {
    without_hanging(move || {
        let (_coordinator, config) = Layout::workers(2).coordinator();
        thread::scope(|scope| {
            let survivor = scope.spawn(|| builder(worker(&config, rank), &job()).start());
            let ghost = worker(&config, 1 - rank);
            // There and gone: nobody listens at its address, and it calls nobody.
            drop(fake::register(&ghost, Some(&job()), "elsewhere").unwrap());
            survivor.join().unwrap().err().expect("there is nobody to work with")
        })
    })
}

#[test]
fn a_node_that_dies_while_others_wait_for_its_call_is_named() {
    let error = die_after_the_book(0);
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    says(&error, &["lost worker 1: its process ended", "the connection from 127.0.0.1:"]);
}

#[test]
fn a_node_that_dies_while_others_call_it_is_named() {
    let error = die_after_the_book(1);
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    says(&error, &["lost worker 0: its process ended"]);
}

#[test]
fn a_node_that_cannot_open_its_links_tells_the_others_why() {
    without_hanging(|| {
        let (_coordinator, config) = Layout::workers(2).coordinator();
        thread::scope(|scope| {
            let start = |rank, carrier| {
                let config = Config { carrier, ..worker(&config, rank) };
                scope.spawn(move || builder(config, &job()).start().err())
            };
            let zero = start(0, Carriers::Tcp);
            let one = start(1, Carriers::Unix);
            let reason = "limited to unix sockets";
            says(&one.join().unwrap().unwrap(), &[reason]);
            says(&zero.join().unwrap().unwrap(), &["lost worker 1: it gave up", reason]);
        });
    });
}

/// The process with the coordinator in it dies: nobody is left who could say so.
#[test]
fn a_coordinator_that_dies_while_links_are_opened_is_noticed() {
    without_hanging(|| {
        let mut config = Layout::workers(2).coordinator().1;
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        config.coordinator = free.to_string();
        let zero = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "deaths::a_coordinator_alone", "--nocapture"])
            .env("DEATHS_COORDINATOR", &config.coordinator)
            .env("POSEIDON_SECRET", config.secret.expose())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let zero = Process(zero);
        thread::scope(|scope| {
            let one = scope.spawn(|| builder(worker(&config, 1), &job()).start());
            let ghost = fake::register(&worker(&config, 0), Some(&job()), "elsewhere").unwrap();
            drop(zero);
            let error = one.join().unwrap().err().expect("the coordinator is gone");
            says(&error, &[&config.coordinator, "it has died"]);
            drop(ghost);
        });
    });
}

/// Not a test of its own: a coordinator to be killed.
#[test]
fn a_coordinator_alone() {
    let Ok(address) = std::env::var("DEATHS_COORDINATOR") else { return };
    let address: std::net::SocketAddr = address.parse().unwrap();
    let secret = std::env::var("POSEIDON_SECRET").unwrap().parse().unwrap();
    let keys = poseidon::config::credentials("test", secret, false);
    let _coordinator =
        poseidon::Coordinator::bind(address.ip(), address.port(), keys, LONG).unwrap();
    loop {
        thread::park();
    }
}

/// Sessions gather over the connection by which they joined, and a job that ends leaves it with a
/// goodbye.
#[test]
fn a_job_that_ends_well_is_no_death() {
    let results = Layout::workers(3).run(
        |builder| builder,
        |session: &Session| {
            for round in 0..3 {
                session.gather("a", &json!(round))?;
            }
            Ok(session.query("epoch"))
        },
    );
    for result in results {
        assert_eq!(result.unwrap(), Some(json!(1)));
    }
}
