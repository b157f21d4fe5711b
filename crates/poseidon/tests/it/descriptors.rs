//! A job that needs more file descriptors than its process may have.

use crate::cluster::{builder, job};
use poseidon::{Config, Secret};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::process::Command;

/// Starts this test program again, as a worker of its own job with 64 lanes, where `hard` files may
/// be open, and returns what it prints.
fn start(hard: Option<u64>) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "descriptors::another_process", "--nocapture"])
        .env("DESCRIPTORS_HARD", hard.map_or_else(String::new, |hard| hard.to_string()))
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Not a test of its own: what [`start`] runs.
#[test]
fn another_process() {
    let Ok(hard) = std::env::var("DESCRIPTORS_HARD") else { return };
    let maximum = hard.parse().ok().or(getrlimit(Resource::Nofile).maximum);
    setrlimit(Resource::Nofile, Rlimit { current: Some(80), maximum }).unwrap();
    let config = Config { lanes: 64, ..Config::alone(Secret::random().unwrap()) };
    match builder(config, &job()).start() {
        Ok(session) => {
            session.finish().unwrap();
            println!("\nSTARTED");
        }
        Err(error) => println!("\nREFUSED {error}"),
    }
}

#[test]
fn a_job_that_cannot_fit_says_so_before_it_opens_anything() {
    let words = start(Some(80));
    let refused = words.lines().find(|line| line.starts_with("REFUSED")).expect(&words);
    let parts = [
        "may have 80 (RLIMIT_NOFILE)",
        "this job needs 204 more (1 nodes x 64 lanes)",
        "ulimit -n",
    ];
    for part in parts {
        assert!(refused.contains(part), "'{part}' is not in: {refused}");
    }
}

#[test]
fn a_job_that_fits_under_the_hard_limit_raises_its_own() {
    let words = start(None);
    assert!(words.contains("STARTED"), "{words}");
}
