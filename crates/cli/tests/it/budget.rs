//! Bandwidth budgets, with the real command.

use poseidon::config::{Carriers, Member};
use poseidon::{Config, Coordinator, Rate, Secret, Session};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn a_running_job_is_told_its_budget() {
    let secret = Secret::random().unwrap();
    let mut config = Config::alone(secret.clone());
    (config.workers, config.lanes, config.serves_coordinator) = (2, 1, false);
    (config.carrier, config.cluster) = (Carriers::Tcp, "test".into());
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let coordinator =
        Coordinator::bind(ip, 0, config.credentials(), config.connect_timeout).unwrap();
    config.coordinator = coordinator.address().to_string();
    let sessions: Vec<Session> = thread::scope(|scope| {
        let start = |rank| {
            let config = Config { member: Member::Worker(rank), ..config.clone() };
            scope.spawn(move || Session::builder(config).start().unwrap())
        };
        [0, 1].map(start).into_iter().map(|worker| worker.join().unwrap()).collect()
    });

    let tell = |arguments: &[&str]| -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
        command.arg("budget").args(arguments).args(["--patience", "60", "--cluster", "test"]);
        command.args(["--coordinator", &config.coordinator]);
        command.env("POSEIDON_SECRET", secret.expose()).output().unwrap()
    };
    // A node hears it a moment after the command has been answered.
    let until = |expected: [Option<Rate>; 2]| {
        let began = Instant::now();
        while [0, 1].map(|rank: usize| sessions[rank].bandwidth_budget()) != expected {
            assert!(began.elapsed() < Duration::from_secs(60), "expected {expected:?}");
            thread::yield_now();
        }
    };
    let rate = |mbit: u64| Rate::new(mbit * 1_000_000);
    for (arguments, answer, expected) in [
        (&["400mbit"][..], "nodes 0, 1: 400 Mbit/s\n", [rate(400); 2]),
        (&["1gbit", "--node", "1"], "nodes 1: 1 Gbit/s\n", [rate(400), rate(1000)]),
        (&["none"], "nodes 0, 1: none\n", [None; 2]),
    ] {
        let output = tell(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        assert_eq!(String::from_utf8(output.stdout).unwrap(), answer);
        until(expected);
    }
    for (arguments, words) in [
        (&["1gbit", "--node", "2"][..], "there is no node 2: expected less than 2"),
        (&["fast"], "expected 'none' or a rate"),
    ] {
        let output = tell(arguments);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && told.contains(words), "{told}");
    }
    thread::scope(|scope| {
        for session in sessions {
            scope.spawn(move || session.finish().unwrap());
        }
    });
}

/// Results are checked on every iteration.
#[test]
fn processes_exchange_within_a_budget() {
    for servers in ["colocated", "1"] {
        let output = Command::new(env!("CARGO_BIN_EXE_poseidon"))
            .args(["bench", "exchange", "--workers", "2", "--bytes", "256KB", "--iters", "2"])
            .args(["--link", "tcp", "--json", "--bandwidth-budget", "100mbit"])
            .args(["--servers", servers])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(summary["workers"], 2);
    }
}
