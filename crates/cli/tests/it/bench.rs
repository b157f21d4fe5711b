//! `poseidon bench exchange` and what it needs, the real command.

use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn a_report_for_every_size() {
    let reports = exchange(&["--bytes", "3MB,4096", "--workers", "3"]);
    let facts = |r: &Value| (r["bytes"].as_u64(), r["iters"].as_u64(), r["workers"].as_u64());
    assert_eq!(facts(&reports[0]), (Some(3 << 20), Some(2), Some(3)), "{reports:?}");
    assert_eq!(facts(&reports[1]), (Some(4096), Some(2), Some(3)), "{reports:?}");
    assert_eq!(reports.len(), 2);
    let (what, cpu_of) = (&reports[0]["what"], &reports[0]["cpu_of"]);
    assert_eq!((what.as_str(), cpu_of.as_str()), (Some("push"), Some("all")));
    // Two thirds of the gradients to the others, and two thirds of the sums.
    let sent = reports[0]["bytes_sent_per_node"].as_f64().unwrap();
    let payload = 4.0 / 3.0 * f64::from(3 << 20);
    // Results of the exchange before the first may be counted: they are a quarter more at most.
    assert!(sent > payload && sent < 1.3 * payload, "{sent}");
}

/// Workers check every result, so a run that ends well has exchanged the right sums.
#[test]
fn layers_by_factors_and_tensors_of_a_group() {
    let factors =
        exchange(&["--bytes", "256KB", "--workers", "3", "--scheme", "sfb", "--rows", "5"]);
    assert_eq!(factors[0]["what"], "factors");
    // 256 x 256 numbers: 5 rows of both factors to each of the two others.
    let sent = factors[0]["bytes_sent_per_node"].as_f64().unwrap();
    let payload = 2.0 * 5.0 * 512.0 * 4.0;
    assert!(sent > payload && sent < 1.1 * payload, "{sent}");

    let tensors = exchange(&["--bytes", "2MB,4KB", "--workers", "3", "--collective", "all_reduce"]);
    assert_eq!(tensors[0]["what"], "all_reduce");
    assert_eq!((tensors.len(), &tensors[0]["bytes_sent_per_node"]), (2, &Value::Null));
}

#[test]
fn what_cannot_be_checked_is_refused() {
    for (flags, words) in [
        (&["--scheme", "sfb", "--optimizer", "adam"][..], "expected --optimizer sum"),
        (&["--scheme", "sfb", "--workers", "1"], "expected at least 2 workers"),
        (&["--scheme", "sfb", "--collective", "all_reduce"], "cannot be used with"),
        (&["--turns"], "--in-cluster"),
    ] {
        let output = bench().args(flags).args(["--bytes", "4KB"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{flags:?}: {said}");
    }
}

/// The worker that counts a server's CPU time fails if it does not find the server's process.
#[test]
fn dedicated_servers_are_found_and_counted() {
    let reports = exchange(&["--bytes", "64KB", "--workers", "2", "--servers", "2"]);
    assert_eq!(reports[0]["cpu_of"], "all");
}

#[test]
fn an_exchange_beside_busy_threads() {
    let reports = exchange(&["--bytes", "64KB", "--workers", "2", "--busy", "1"]);
    assert_eq!(reports[0]["busy"], 1);
}

#[test]
fn busy_threads_compute_until_their_input_closes() {
    let mut busy = Command::new(env!("CARGO_BIN_EXE_poseidon"))
        .args(["bench", "busy", "--threads", "2"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + PATIENCE;
    // Others of this machine may have the lock for a while.
    while cpu(&busy) < Duration::from_millis(50) {
        assert!(Instant::now() < end, "it does not compute");
        thread::sleep(Duration::from_millis(10));
    }
    drop(busy.stdin.take());
    assert!(busy.wait().unwrap().success());
}

#[test]
fn ranks_take_turns_as_they_are_asked_to() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rank = |rank: &str| {
        bench()
            .args(["--in-cluster", "--turns", "--bytes", "4KB,64KB", "--link", "tcp"])
            .env("POSEIDON_COORDINATOR", format!("127.0.0.1:{port}"))
            .env("POSEIDON_SECRET", "known to both turns")
            .envs([("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let (mut first, second) = (rank("0"), rank("1"));
    let mut input = first.stdin.take().unwrap();
    let mut lines = BufReader::new(first.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    for (bytes, iters) in [(65_536, 2), (4096, 3), (65_536, 1)] {
        writeln!(input, "{bytes} {iters}").unwrap();
        let report: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!((&report["bytes"], &report["iters"]), (&bytes.into(), &iters.into()));
    }
    drop(input);
    assert!(lines.next().is_none());
    for mut rank in [first, second] {
        assert!(rank.wait().unwrap().success());
    }
}

fn bench() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
    command.args(["bench", "exchange"]);
    command
}

/// The reports of two iterations.
fn exchange(flags: &[&str]) -> Vec<Value> {
    let output = bench().args(["--json", "--iters", "2"]).args(flags).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{flags:?}: {said}");
    let lines = output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).unwrap()).collect()
}

/// What all threads of a process have used.
fn cpu(process: &Child) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{}/task", process.id())).unwrap().flatten();
    let text = |task: fs::DirEntry| fs::read_to_string(task.path().join("schedstat")).unwrap();
    let nanoseconds =
        tasks.map(|task| text(task).split(' ').next().unwrap().parse::<u64>().unwrap());
    Duration::from_nanos(nanoseconds.sum())
}

/// Far more than anything here takes: a test that reaches it has found a hang.
const PATIENCE: Duration = Duration::from_secs(90);

/// A job that a launcher has described, with servers that the launcher has started.
#[test]
fn an_exchange_inside_a_job_uses_the_jobs_servers() {
    let poseidon = env!("CARGO_BIN_EXE_poseidon");
    let launch = ["launch", "-n", "2", "--servers", "1", "--", poseidon];
    let exchange =
        ["bench", "exchange", "--in-cluster", "--bytes", "64KB", "--iters", "1", "--json"];
    let output = Command::new(poseidon).args(launch).args(exchange).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(r#"{"workers":2"#), "{text}");
}
