//! Processes that are stopped for longer than a node may be silent, and go on.

use crate::cluster::{Layout, builder, job, step, without_hanging};
use poseidon::config::Config;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

const WORKERS: u16 = 3;
const SILENCE: Duration = Duration::from_secs(2);
/// Steps of a job that ends by itself.
const STEPS: u64 = 60;

/// A worker in a process of its own.
struct Process {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Process {
    /// Starts this test program again, as the worker of this rank. Worker 0 serves the coordinator.
    fn start(config: &Config, rank: u16, link: &str) -> Self {
        let connect = config.connect_timeout.as_secs().to_string();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "pauses::another_process", "--nocapture"])
            .env("PAUSES_ROLE", "worker")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", WORKERS.to_string())
            .env("POSEIDON_COORDINATOR", &config.coordinator)
            .env("POSEIDON_SECRET", config.secret.expose())
            .env("POSEIDON_CLUSTER", &config.cluster)
            .env("POSEIDON_LANES", "2")
            .env("POSEIDON_LINK", link)
            .env("POSEIDON_CONNECT_TIMEOUT", connect)
            .env("POSEIDON_SILENCE", SILENCE.as_secs().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The next line that begins with `word`. Empty at the end.
    fn line(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if line.starts_with(word) {
                return line;
            }
            line.clear();
        }
        line
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test of its own: what [`Process`] runs. Without a role there is nothing to do.
#[test]
fn another_process() {
    if std::env::var("PAUSES_ROLE").is_err() {
        return;
    }
    let session = builder(Config::from_env().unwrap(), &job()).start().unwrap();
    for clock in 1..=STEPS {
        if let Err(error) = step(&session, clock, 0..WORKERS) {
            println!("\nerror: {error}");
            return;
        }
        println!("\nclock {clock}");
        thread::sleep(Duration::from_millis(20));
    }
    match session.finish() {
        Ok(()) => println!("\nfinished"),
        Err(error) => println!("\nerror: {error}"),
    }
}

/// A job whose coordinator will listen where `place` does now.
fn job_at(place: &TcpListener) -> Config {
    let mut config = Layout::workers(WORKERS).coordinator().1;
    config.coordinator = place.local_addr().unwrap().to_string();
    config
}

/// Three workers that are in the middle of their job.
fn start(link: &str) -> Vec<Process> {
    let config = job_at(&TcpListener::bind("127.0.0.1:0").unwrap());
    let mut all: Vec<_> = (0..WORKERS).map(|rank| Process::start(&config, rank, link)).collect();
    for process in &mut all {
        assert_eq!(process.line("clock 5"), "clock 5\n");
    }
    all
}

fn all_pause(link: &'static str) {
    without_hanging(move || {
        let mut all = start(link);
        all.iter().for_each(|process| process.signal(Signal::STOP));
        thread::sleep(3 * SILENCE);
        // Not all at once: one is back before the others are.
        for process in &all {
            process.signal(Signal::CONT);
            thread::sleep(SILENCE / 10);
        }
        for (rank, process) in all.iter_mut().enumerate() {
            let mut end = process.line("error");
            end.push_str(&process.child.wait().unwrap().to_string());
            assert_eq!(end, "exit status: 0", "worker {rank}");
        }
    });
}

#[test]
fn a_job_outlives_a_pause_of_all_its_processes() {
    all_pause("auto");
}

#[test]
fn a_job_over_tcp_outlives_a_pause_of_all_its_processes() {
    all_pause("tcp");
}

/// Workers that call a coordinator which is not there yet pause for longer than they would wait.
#[test]
fn a_pause_while_workers_join_does_not_count() {
    without_hanging(|| {
        let place = TcpListener::bind("127.0.0.1:0").unwrap();
        let config = Config { connect_timeout: 2 * SILENCE, ..job_at(&place) };
        let mut all = Vec::new();
        for rank in [1, 2] {
            all.push(Process::start(&config, rank, "tcp"));
            // It has called: its time runs.
            place.accept().unwrap();
        }
        all.iter().for_each(|process| process.signal(Signal::STOP));
        thread::sleep(2 * config.connect_timeout);
        drop(place);
        all.push(Process::start(&config, 0, "tcp"));
        all.iter().for_each(|process| process.signal(Signal::CONT));
        for process in &mut all {
            assert_eq!(process.line("clock 5"), "clock 5\n");
        }
    });
}

fn one_pauses(link: &'static str) {
    without_hanging(move || {
        let mut all = start(link);
        all[1].signal(Signal::STOP);
        for rank in [0, 2] {
            let error = all[rank].line("error");
            assert!(error.contains("worker 1") && error.contains("not heard for 2s"), "{error}");
            // Its system answers, so it is not the network.
            let told = error.contains("its system") && !error.contains("losing packets");
            assert_eq!(told, link == "tcp", "{error}");
        }
        all[1].signal(Signal::CONT);
        let error = all[1].line("error");
        for fact in ["worker 1 was away for ", "POSEIDON_SILENCE", "What it found"] {
            assert!(error.contains(fact), "'{fact}' is not in: {error}");
        }
    });
}

#[test]
fn a_process_that_was_stopped_alone_says_so_and_the_others_name_it() {
    one_pauses("auto");
}

#[test]
fn a_process_that_was_stopped_alone_says_so_and_the_others_name_it_over_tcp() {
    one_pauses("tcp");
}
