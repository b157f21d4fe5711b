//! `poseidon query`, the real command, beside a job whose workers are threads of the test.

use poseidon::config::Member;
use poseidon::{Config, Coordinator, Layer, LayerKind, Secret, Session};
use serde_json::Value;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

#[test]
fn a_running_job_answers_with_tables_and_json() {
    let secret = Secret::random().unwrap();
    let mut config = Config::alone(secret.clone());
    (config.workers, config.lanes, config.serves_coordinator) = (2, 1, false);
    config.cluster = "test".into();
    config.connect_timeout = Duration::from_secs(60);
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let coordinator =
        Coordinator::bind(ip, 0, config.credentials(), config.connect_timeout).unwrap();
    config.coordinator = coordinator.address().to_string();
    let sessions: Vec<Session> = thread::scope(|scope| {
        let start = |rank| {
            let config = Config { member: Member::Worker(rank), ..config.clone() };
            let kind = LayerKind::Fc { m: 1000, n: 1000 };
            let fc = Layer { kind, ..Layer::new("fc", 1_000_000) };
            // The name would command a terminal.
            let conv = Layer::new("conv\u{9b}2J\x1b", 100);
            let builder = Session::builder(config).layer(conv).layer(fc);
            scope.spawn(move || builder.batch(8).start().unwrap())
        };
        let workers = [0, 1].map(start);
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });

    let ask = |arguments: &[&str]| -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
        command.arg("query").args(arguments).args(["--patience", "60", "--cluster", "test"]);
        command.args(["--coordinator", &config.coordinator]);
        command.env("POSEIDON_SECRET", secret.expose()).output().unwrap()
    };
    let says = |arguments: &[&str]| {
        let output = ask(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let json = |arguments: &[&str]| -> Value { serde_json::from_str(&says(arguments)).unwrap() };

    let plan = says(&["plan"]);
    let lines: Vec<_> = plan.lines().collect();
    assert_eq!(lines.len(), 4, "{plan}");
    assert!(lines[0].starts_with("layer") && lines[0].ends_with("why"), "{plan}");
    assert!(lines[1].starts_with("conv") && lines[1].ends_with("no factors"), "{plan}");
    assert!(lines[2].starts_with("fc") && lines[2].contains(" sfb "), "{plan}");
    assert_eq!(json(&["plan", "--json"])[1]["bytes_per_node"], 8 * 2000 * 4);
    assert_eq!(json(&["plan.1.scheme"]), "sfb");
    for question in ["plan", "chunks", "job.layers.0.name", "job"] {
        let answer = says(&[question]);
        assert!(answer.contains("conv"), "{answer}");
        assert!(!answer.contains(['\u{9b}', '\x1b']), "{answer:?} commands a terminal");
    }
    assert_eq!(json(&["job.layers.0.name"]), "conv\u{9b}2J\x1b");

    let chunks = json(&["chunks", "--json"]);
    let chunks = chunks.as_array().unwrap();
    assert_eq!(says(&["chunks"]).lines().count(), chunks.len() + 1);
    let elements: u64 = chunks.iter().map(|chunk| chunk["len"].as_u64().unwrap()).sum();
    assert_eq!(elements, 1_000_100);
    let tree = says(&["tree"]);
    let lines: Vec<_> = tree.lines().collect();
    assert_eq!(lines[0], "2 workers on 1 host in 1 rack: nothing leaves the host", "{tree}");
    assert_eq!(lines[1], "rack without a name", "{tree}");
    assert!(lines[2].starts_with("  host ") && lines[2].contains(" at 127.0.0.1"), "{tree}");
    assert_eq!(lines[3..], ["    workers 0, 1, which are servers too"], "{tree}");
    assert_eq!(json(&["tree", "--json"])["racks"][0]["hosts"][0]["nodes"][1]["name"], "worker 1");
    assert_eq!(json(&["tree.racks.0.hosts.0.host"]), sessions[0].book().nodes[0].host);

    assert_eq!(json(&["identity"]), sessions[0].book().identity.to_string());
    assert_eq!(json(&["epoch"]), 1);

    let wrong = ask(&["plan.2"]);
    assert!(!wrong.status.success());
    let words = String::from_utf8(wrong.stderr).unwrap();
    assert!(words.contains("there is nothing under 'plan.2': 'plan' has 0 to 1"), "{words}");
    let words = String::from_utf8(ask(&["jobs"]).stderr).unwrap();
    assert!(
        words.contains(
            "the book has cluster, epoch, identity, job, nodes, version, plan, chunks, ports, tree"
        ),
        "{words}"
    );

    thread::scope(|scope| {
        for session in sessions {
            scope.spawn(move || session.finish().unwrap());
        }
    });
}

/// Nobody has told the command how the job is called: as torchrun calls jobs, or as those are called whose
/// processes were started one by one.
#[test]
fn a_job_without_a_name_is_found_by_its_address() {
    for name in ["torchrun", "none"] {
        let secret = Secret::random().unwrap();
        let mut config = Config::alone(secret.clone());
        config.cluster = name.into();
        let (ip, patience) = (IpAddr::V4(Ipv4Addr::LOCALHOST), Duration::from_secs(60));
        let coordinator = Coordinator::bind(ip, 0, config.credentials(), patience).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
        command.args(["query", "missing", "--patience", "60", "--coordinator"]);
        command.arg(coordinator.address().to_string()).env_clear();
        let output = command.env("POSEIDON_SECRET", secret.expose()).output().unwrap();
        assert!(output.status.success(), "{name}: {output:?}");
    }
}
