//! `poseidon bench simulate`, the real command.

use serde_json::Value;
use std::process::{Command, Output};

fn simulate(arguments: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_poseidon"))
        .args(["bench", "simulate"])
        .args(arguments.split(' '))
        .output()
        .unwrap()
}

fn json(arguments: &str) -> Value {
    let output = simulate(&format!("{arguments} --json"));
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Every node sends seven eighths of the model to its servers and as much of its sums to the others,
/// over a link of which 1448 of 1514 bytes are payload.
#[test]
fn without_a_queue_an_exchange_takes_what_its_bytes_take() {
    let answer = json("--nodes 8 --rate 1gbit --bytes 4MB");
    let wire = 2.0 * 7.0 / 8.0 * f64::from(4 << 20) * 8.0 / 1e9 * 1514.0 / 1448.0;
    let seconds = answer["seconds"]["median"].as_f64().unwrap();
    assert!(seconds > wire && seconds < wire * 1.02, "{seconds} s, {wire} s by its bytes");
    assert_eq!(answer["drops"]["segments"], 0);
    assert_eq!((&answer["workers"], &answer["queue"]), (&8.into(), &Value::Null));
}

#[test]
fn a_short_queue_drops_long_bursts() {
    let bursts = json("--nodes 8 --bytes 4MB --queue 128kb --bursts");
    assert!(bursts["drops"]["bytes"].as_u64().unwrap() > 0, "{bursts}");
    assert_eq!((&bursts["queue"], &bursts["bursts"]), (&131_072.into(), &true.into()));
    let turns = json("--nodes 8 --bytes 4MB --queue 2mb");
    assert_eq!(turns["drops"]["bytes"], 0, "{turns}");
    assert_eq!(turns["bursts"], false);
    let text = simulate("--nodes 8 --bytes 4MB --queue 2mb");
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("ms median, simulated") && text.contains("0 segments"), "{text}");
}

#[test]
fn nonsense_is_refused() {
    for (arguments, words) in [
        ("--bursts", "--queue"),
        ("--queue 1kb", "expected a size from 2kb"),
        ("--rate 1", "no unit"),
        ("--sync ssp:17", "'ssp:S' with S from 0 to 16"),
        ("--slow 1:2", "--compute"),
        ("--compute 1ms --slow 1", "such as 3:2.5"),
        ("--compute 1ms --jitter tail:2:3", "tail:PROBABILITY:FACTOR"),
    ] {
        let output = simulate(arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{arguments}: {output:?}");
    }
}

/// Four nodes of a host contribute together: its port carries what it carries for one.
#[test]
fn nodes_of_a_host_share_its_port() {
    let shared = json("--nodes 16 --ranks-per-host 4 --bytes 4MB");
    let alone = json("--nodes 4 --bytes 4MB");
    let port = |answer: &Value| answer["bytes_sent_per_host"].as_f64().unwrap();
    assert!((port(&shared) / port(&alone) - 1.0).abs() < 0.01, "{shared} {alone}");
    assert_eq!(alone["bytes_sent_per_host"], alone["bytes_sent_per_node"]);
    let seconds = |answer: &Value| answer["seconds"]["median"].as_f64().unwrap();
    assert!(seconds(&shared) > seconds(&alone) && seconds(&shared) < 1.5 * seconds(&alone));
    assert_eq!((&shared["workers"], &shared["ranks_per_host"]), (&16.into(), &4.into()));
}

/// Poseidon 2015 §5.2.2: where steps vary, workers that may be apart wait less. The same chance for
/// all: a seed gives a worker the same steps.
#[test]
fn workers_that_may_be_apart_wait_less_for_each_other() {
    let rate = |sync: &str| {
        let job = "--nodes 4 --bytes 1MB --iters 200 --compute 100ms --jitter lognormal:0.5";
        let answer = json(&format!("{job} --sync {sync}"));
        assert_eq!(answer["sync"], sync);
        answer["steps_per_second"].as_f64().unwrap()
    };
    assert_eq!(rate("bsp"), rate("ssp:0"));
    let rates = ["bsp", "ssp:1", "ssp:4", "asp"].map(rate);
    assert!(rates.is_sorted_by(|few, many| few * 1.02 < *many), "{rates:?}");
}

/// Where nobody waits for anybody, one slow worker costs its own steps only: 3 workers of 10 steps
/// per second and one of 1, less what exchanging takes.
#[test]
fn a_slow_worker_holds_up_only_those_who_wait_for_it() {
    let rate = |sync: &str| {
        let job = "--nodes 4 --bytes 64KB --iters 50 --compute 100ms --slow 2:10";
        json(&format!("{job} --sync {sync}"))["steps_per_second"].as_f64().unwrap()
    };
    let (together, apart) = (rate("bsp"), rate("asp"));
    assert!(together > 3.9 && together <= 4.0, "{together}");
    assert!(apart > 30.0 && apart <= 31.0, "{apart}");
    let output = simulate("--nodes 4 --compute 1ms --slow 4:2");
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && words.contains("there is no node 4"), "{words}");
}
