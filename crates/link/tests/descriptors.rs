//! A process that has no file descriptor left: what it is told.

use poseidon_core::NodeId;
use poseidon_link::descriptors::{Need, reserve};
use poseidon_link::{Address, Caller, Credentials, Listener, connect};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::{Duration, Instant};

/// Runs this test program again, as `role`, and returns what it prints.
fn another_process(role: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", role, "--nocapture"])
        .env("DESCRIPTORS_ROLE", role)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn is_role() -> bool {
    std::env::var("DESCRIPTORS_ROLE").is_ok()
}

fn limit(soft: u64, hard: Option<u64>) {
    let limit = Rlimit { current: Some(soft), maximum: hard };
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// Opens files until there are no more.
fn exhaust() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

#[test]
fn without_descriptors_nobody_listens_or_calls() {
    let words = another_process("a_process_without_descriptors");
    let said: Vec<_> = words.lines().filter(|line| line.starts_with("SAID")).collect();
    assert_eq!(said.len(), 2, "{words}");
    for line in said {
        for part in ["40 open", "may have 40 (RLIMIT_NOFILE)", "ulimit -n"] {
            assert!(line.contains(part), "'{part}' is not in: {line}");
        }
    }
}

/// Not a test of its own.
#[test]
fn a_process_without_descriptors() {
    if !is_role() {
        return;
    }
    limit(40, Some(40));
    let mut files = exhaust();
    let bound = Listener::bind(Ipv4Addr::LOCALHOST.into(), 0, false).unwrap_err();
    println!("\nSAID {bound}");
    let keys = Credentials {
        cluster: [1; 16],
        secret: "open, sesame, open".parse().unwrap(),
        encrypt: false,
    };
    let to = Address::Tcp("127.0.0.1:9".into());
    let deadline = Instant::now() + Duration::from_secs(60);
    let called = connect(&to, Caller::control(NodeId(0)), &keys, deadline).unwrap_err();
    println!("\nSAID {called}");
    files.clear();
}

#[test]
fn a_soft_limit_is_raised_and_a_hard_one_is_named() {
    let words = another_process("a_process_with_limits");
    assert!(words.contains("RAISED"), "{words}");
    let refused = words.lines().find(|line| line.starts_with("REFUSED")).expect(&words);
    for part in
        ["may have 60 (RLIMIT_NOFILE)", "10 nodes x 8 lanes", "needs 108 more", "ulimit -n 512"]
    {
        assert!(refused.contains(part), "'{part}' is not in: {refused}");
    }
}

/// Not a test of its own.
#[test]
fn a_process_with_limits() {
    if !is_role() {
        return;
    }
    let need = Need { nodes: 10, lanes: 8 };
    limit(60, getrlimit(Resource::Nofile).maximum);
    reserve(need).unwrap();
    if getrlimit(Resource::Nofile).current.is_none_or(|soft| soft > 60) {
        println!("\nRAISED");
    }
    limit(60, Some(60));
    println!("\nREFUSED {}", reserve(need).unwrap_err());
}
