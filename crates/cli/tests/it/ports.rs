//! Nodes that say what their ports carry: real processes on this host.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

#[test]
fn given_rates_size_the_shards_of_processes() {
    let outputs = exchange(&["1gbit", "1gbit", "100mbit", "1gbit"]);
    let told = String::from_utf8_lossy(&outputs[0].stderr);
    let words = "ports differ: worker 2 carries 100 Mbit/s and holds 0.0% of the parameters; \
                 others hold 33.3%";
    assert!(told.contains(words), "{told}");
}

#[test]
fn equal_rates_change_nothing() {
    let outputs = exchange(&["10gbit"; 4]);
    let told = String::from_utf8_lossy(&outputs[0].stderr);
    assert!(!told.contains("ports differ"), "{told}");
    let summary: serde_json::Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!(summary["workers"], 4);
}

/// An exchange of 1 MB between processes whose ports carry `rates`.
fn exchange(rates: &[&str]) -> Vec<Output> {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let coordinator = free.local_addr().unwrap().to_string();
    drop(free);
    let start = |(rank, rate): (usize, &&str)| -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
        command.args(["bench", "exchange", "--in-cluster", "--bytes", "1MB", "--iters", "2"]);
        command.args(["--json", "--link-rate", rate]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", rates.len().to_string());
        command
            .env("POSEIDON_COORDINATOR", &coordinator)
            .env("POSEIDON_SECRET", "known to all of us");
        // Nodes of one host share its port: here each counts as a host.
        command.env("POSEIDON_HOST", format!("host {rank}"));
        command.env_remove("POSEIDON_LOG").env_remove("POSEIDON_LINK_RATE");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let processes: Vec<_> = rates.iter().enumerate().map(start).collect();
    let outputs = processes.into_iter().map(|process| process.wait_with_output().unwrap());
    let outputs: Vec<_> = outputs.collect();
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    outputs
}
