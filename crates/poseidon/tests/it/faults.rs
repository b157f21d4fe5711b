//! Nodes that fail: everybody else stops with an error that says who, and what was being waited for.

use crate::cluster::fake::Fake;
use crate::cluster::{Layout, builder, job, step, without_hanging};
use poseidon::config::{Config, Member};
use poseidon::{Buffer, Error, Job, Layer, Servers, Session, serve};
use poseidon_core::ChunkKey;
use poseidon_core::wire::{Header, Kind};
use rustix::process::{Pid, Signal, kill_process};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Four hosts in a ring. Layer 'b' is large enough to go round it.
const RING: Layout = Layout { workers: 4, hosts: &[1; 4], ..Layout::workers(0) };

/// Runs `play` on every worker of `layout`, each with its own thread and session, and returns what
/// they return. Dedicated servers run beside them.
fn perform<T: Send + 'static>(
    layout: Layout,
    limit: impl Fn(&mut Config) + Send + 'static,
    play: impl Fn(Session) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<Result<T, Error>> {
    without_hanging(move || {
        let (_coordinator, mut config) = layout.coordinator();
        limit(&mut config);
        let job = job();
        let describe = |b: poseidon::session::Builder| {
            b.layers(job.layers.clone()).optimizer(job.optimizer.clone()).chunk_size(job.chunk)
        };
        layout.run_with(&config, describe, play)
    })
}

/// Exchanges until something goes wrong.
fn go_on(session: &Session, from: u64) -> Error {
    let workers = session.workers() as u16;
    let mut clocks = from..;
    loop {
        if let Err(error) = step(session, clocks.next().unwrap(), 0..workers) {
            return error;
        }
    }
}

#[track_caller]
fn says(error: &Error, words: &[&str]) {
    let error = error.to_string();
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

#[test]
fn a_worker_that_drops_its_session_is_named() {
    let hosts = [&[][..], &[2, 2], &[1, 1, 1]];
    for (servers, hosts) in [Servers::Colocated, Servers::Dedicated(1)]
        .into_iter()
        .flat_map(|servers| hosts.map(|hosts| (servers, hosts)))
    {
        let layout = Layout { servers, hosts, ..Layout::workers(3) };
        let results = perform(
            layout,
            |_| {},
            |session| {
                step(&session, 1, 0..3)?;
                if session.rank() == 1 { Ok(()) } else { Err(go_on(&session, 2)) }
            },
        );
        for rank in [0, 2] {
            let error = results[rank].as_ref().unwrap_err();
            says(error, &["worker 1 dropped its session before it was finished"]);
        }
    }
}

#[test]
fn a_worker_that_panics_is_named() {
    let results = perform(
        Layout::workers(3),
        |_| {},
        |session| {
            step(&session, 1, 0..3)?;
            if session.rank() != 1 {
                return Err(go_on(&session, 2));
            }
            let unwound = catch_unwind(AssertUnwindSafe(move || {
                let _session = session;
                std::panic::resume_unwind(Box::new("a bug in the training program"));
            }));
            assert!(unwound.is_err());
            Ok(())
        },
    );
    for rank in [0, 2] {
        says(results[rank].as_ref().unwrap_err(), &["worker 1 panicked before it was finished"]);
    }
}

#[test]
fn a_worker_that_finishes_too_early_is_named() {
    let hosts = [&[][..], &[2, 3], &[1, 4], &[1, 1, 1, 2]];
    for (servers, hosts) in [Servers::Colocated, Servers::Dedicated(2), Servers::Mixed(1)]
        .into_iter()
        .flat_map(|servers| hosts.map(|hosts| (servers, hosts)))
    {
        let layout = Layout { servers, hosts, ..Layout::workers(3) };
        let results = perform(
            layout,
            |_| {},
            |session| {
                step(&session, 1, 0..3)?;
                if session.rank() == 1 { session.finish() } else { Err(go_on(&session, 2)) }
            },
        );
        for result in results {
            let error = result.unwrap_err();
            says(&error, &["worker 1", "it finished while others go on", "of layer", "at clock 2"]);
        }
    }
}

/// As above, when the chunk that is waited for lives on the worker that has finished: nobody else
/// holds one whose contributors could be counted.
#[test]
fn a_worker_that_finishes_too_early_notices_it_itself() {
    without_hanging(|| {
        let layout = Layout::workers(2);
        let (_coordinator, mut config) = layout.coordinator();
        config.timeout = Duration::from_secs(20);
        let describe = |b: poseidon::session::Builder| b.layer(Layer::new("only", 1));
        let results = layout.run_with(&config, describe, |session| {
            let home = session.book().plan().layer_chunks(session.layer("only")?).next().unwrap();
            if home.1.node.0 == session.rank() {
                return session.finish();
            }
            let layer = session.layer("only")?;
            session.send(layer, Buffer::zeroed(1))?;
            session.receive(layer).map(drop)
        });
        for result in results {
            let words = ["worker 0", "it finished while others go on", "chunk 0 of layer 'only'"];
            says(&result.unwrap_err(), &words);
        }
    });
}

/// The last worker to say goodbye may take its time: the others wait for it and hear that it lives.
#[test]
fn workers_that_have_finished_wait_for_the_slowest() {
    for servers in [Servers::Colocated, Servers::Dedicated(1)] {
        let layout = Layout { servers, ..Layout::workers(3) };
        let patience = Duration::from_secs(4);
        let results = perform(
            layout,
            move |config| config.silence = patience,
            move |session| {
                step(&session, 1, 0..3)?;
                if session.rank() == 1 {
                    thread::sleep(patience + Duration::from_secs(3)); // writes a checkpoint, say
                }
                session.finish()
            },
        );
        for (rank, result) in results.into_iter().enumerate() {
            result.unwrap_or_else(|error| panic!("{servers}: worker {rank}: {error}"));
        }
    }
}

/// Whatever the limit on silence: a worker that computes for longer is not a dead one.
#[test]
fn a_worker_that_thinks_for_longer_than_the_silence_limit_is_not_lost() {
    let silence = Duration::from_secs(1);
    let results = perform(
        Layout::workers(2),
        move |config| config.silence = silence,
        move |session| {
            step(&session, 1, 0..2)?;
            thread::sleep(3 * silence);
            step(&session, 2, 0..2)?;
            session.finish()
        },
    );
    for result in results {
        result.unwrap();
    }
}

#[test]
fn a_worker_that_never_sends_is_named_with_what_waits_for_it() {
    let dedicated = Layout { servers: Servers::Dedicated(1), ..Layout::workers(3) };
    for layout in [Layout::workers(3), dedicated, RING] {
        let results = perform(
            layout,
            |config| config.timeout = Duration::from_secs(2),
            |session| {
                for clock in 1..=2 {
                    step(&session, clock, 0..session.workers() as u16)?;
                }
                let layer = session.layer("b")?;
                let chunk = ChunkKey { layer, index: 0 };
                let route = session.book().plan().route(chunk).unwrap();
                assert_eq!(route.ring.takes_sums(), session.workers() == 4);
                if session.rank() != 1 {
                    return Err(go_on(&session, 3));
                }
                loop {
                    session.is_ready(layer)?;
                    thread::sleep(Duration::from_millis(10));
                }
                #[allow(unreachable_code, reason = "gives the closure its type")]
                Ok(())
            },
        );
        for result in results {
            let words = ["chunk ", " of layer '", "' at clock 3 has waited ", " for worker 1"];
            says(&result.unwrap_err(), &words);
        }
    }
}

/// A server that is alive and takes everything, and never answers.
#[test]
fn a_wait_that_ends_names_chunks_and_servers() {
    let error = without_hanging(|| {
        let layout = Layout { servers: Servers::Dedicated(1), ..Layout::workers(1) };
        let (_coordinator, mut config) = layout.coordinator();
        config.timeout = Duration::from_secs(1);
        let job = Job { layers: vec![Layer::new("w", 400)], ..job() };
        thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let session = builder(config.clone(), &job).start()?;
                let layer = session.layer("w")?;
                session.send(layer, Buffer::zeroed(400))?;
                session.receive(layer).map(drop)
            });
            let server = Config { member: Member::Server(0), ..config.clone() };
            let mut fake = Fake::join(&server, None);
            fake.collect(1);
            while !worker.is_finished() {
                fake.write(
                    poseidon::NodeId(0),
                    &Header::bare(Kind::Heartbeat, fake.me, 0).encode(),
                );
                thread::sleep(Duration::from_millis(50));
            }
            worker.join().unwrap().unwrap_err()
        })
    });
    says(&error, &["layer 'w' did not come back within", "at clock 1"]);
    says(&error, &["awaiting chunk 0 from server 0 (node 1), chunk 1 from server 0 (node 1)"]);
}

/// A node in a process of its own, to be killed.
struct Process(Child);

impl Process {
    /// Starts this test program again, as the member that `role` names.
    fn start(config: &Config, role: &str) -> Self {
        let host = config.host.iter().map(|host| ("POSEIDON_HOST", host));
        let rack = config.rack.iter().map(|rack| ("POSEIDON_RACK", rack));
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "faults::another_process", "--nocapture"])
            .env("FAULTS_ROLE", role)
            .env("RANK", "1")
            .env("WORLD_SIZE", config.workers.to_string())
            .env("POSEIDON_COORDINATOR", &config.coordinator)
            .env("POSEIDON_SECRET", config.secret.expose())
            .env("POSEIDON_CLUSTER", &config.cluster)
            .env("POSEIDON_LANES", config.lanes.to_string())
            .env("POSEIDON_SERVERS", config.servers.to_string())
            .envs((role == "server").then_some(("POSEIDON_SERVER", "0")))
            .envs(host.chain(rack))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
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
    match std::env::var("FAULTS_ROLE").as_deref() {
        Ok("server") => {
            let _ = serve(&Config::from_env().unwrap());
        }
        Ok("worker") => {
            let session = builder(Config::from_env().unwrap(), &job()).start().unwrap();
            go_on(&session, 1);
        }
        _ => {}
    }
}

/// Runs the workers of `layout` that are not `role`, and the other servers. Sends the process that is
/// `signal` in the middle of the exchange. Returns the workers' errors.
fn strike(layout: Layout, role: &'static str, signal: Signal) -> Vec<Error> {
    without_hanging(move || {
        let (_coordinator, mut config) = layout.coordinator();
        config.silence = Duration::from_secs(5);
        let struck = match role {
            "server" => layout.member(&config, Member::Server(0)),
            _ => layout.member(&config, Member::Worker(1)),
        };
        let process = Process::start(&struck, role);
        thread::scope(|scope| {
            for server in 1..layout.servers.extra() {
                let config = layout.member(&config, Member::Server(server));
                // Workers see what goes wrong; a server's own error is only the echo of it.
                scope.spawn(move || serve(&config));
            }
            let here = (0..layout.workers).filter(|&rank| role == "server" || rank != 1);
            let workers: Vec<_> = here
                .map(|rank| {
                    let config = layout.member(&config, Member::Worker(rank));
                    let process = &process;
                    scope.spawn(move || {
                        let session = builder(config, &job()).start().unwrap();
                        let workers = session.workers() as u16;
                        let begun = Instant::now();
                        let mut clock = 0;
                        let mut struck = false;
                        loop {
                            clock += 1;
                            if let Err(error) = step(&session, clock, 0..workers) {
                                break error;
                            }
                            let well_begun = begun.elapsed() > Duration::from_millis(200);
                            if rank == 0 && well_begun && !struck {
                                process.signal(signal);
                                struck = true;
                            }
                        }
                    })
                })
                .collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).collect()
        })
    })
}

#[test]
fn a_server_that_is_killed_is_named() {
    let layout = Layout { servers: Servers::Dedicated(1), ..Layout::workers(2) };
    for error in strike(layout, "server", Signal::KILL) {
        says(&error, &["lost server 0 (node 2)"]);
    }
}

/// Two racks with a box each: a server that has no worker.
#[test]
fn a_box_of_a_rack_that_is_killed_is_named() {
    let servers = Servers::Dedicated(2);
    let hosts = &[2, 2, 1, 1, 1, 1];
    let layout = Layout { servers, hosts, racks: &[0, 0, 1, 1, 0, 1], ..Layout::workers(6) };
    for error in strike(layout, "server", Signal::KILL) {
        says(&error, &["lost server 0 (node 6)"]);
    }
}

/// Also one of several on its host, and one that collects for its rack.
#[test]
fn a_worker_that_is_killed_is_named() {
    let racks = Layout { racks: &[0, 0, 1, 1], ..Layout::hosts(&[1; 4]) };
    for layout in [Layout::workers(3), RING, Layout::hosts(&[3, 2]), racks] {
        for error in strike(layout, "worker", Signal::KILL) {
            says(&error, &["lost worker 1"]);
        }
    }
}

/// Its neighbours in the ring await it, and everybody else awaits somebody who does.
#[test]
fn a_worker_that_hangs_in_a_ring_is_named_with_what_was_awaited_from_it() {
    for error in strike(RING, "worker", Signal::STOP) {
        says(&error, &["lost worker 1: not heard for 5s", "of layer '", "at clock "]);
    }
}

#[test]
fn a_server_that_hangs_is_named_with_what_was_awaited_from_it() {
    let layout = Layout { servers: Servers::Dedicated(1), ..Layout::workers(2) };
    for error in strike(layout, "server", Signal::STOP) {
        says(&error, &["lost server 0 (node 2): not heard for 5s", "awaited from it: chunk"]);
        says(&error, &["of layer '", "at clock "]);
    }
}
