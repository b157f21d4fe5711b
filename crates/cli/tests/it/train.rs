//! `poseidon train`, the real command: its processes, over real sockets, on the bundled data.

use crate::trial::{Run, Running, Trial, Variables, by_hand, variables};
use poseidon::Config;
use serde_json::Value;
use std::fs;
use std::net::TcpListener;

/// Three workers and a few steps, in a way that repeats itself.
const STEPS: &str = "--model small.toml --workers 3 --batch 6 --steps 8 --test never \
                     --deterministic";

#[test]
fn the_default_run_leaves_a_report_with_everything_that_is_promised() {
    let trial = Trial::new();
    let report = trial.report("--workers 2 --steps 6");
    assert_eq!(trial.report_files(), ["report.html", "report.json"]);
    let file = fs::read_to_string(trial.path("report/report.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&file).unwrap(), report);

    assert_eq!(
        (&report["model"], &report["workers"], &report["batch"], &report["steps"]),
        (&"fashion-cnn".into(), &2.into(), &32.into(), &6.into())
    );
    for positive in ["seconds", "images_per_second", "final_loss"] {
        assert!(report[positive].as_f64().unwrap() > 0.0, "{positive}: {}", report[positive]);
    }
    for share in ["test_accuracy", "overlap_hidden_fraction"] {
        assert!((0.0..=1.0).contains(&report[share].as_f64().unwrap()), "{}", report[share]);
    }
    assert_eq!(report["parameter_digest"].as_str().unwrap().len(), 32);

    let layers = report["layers"].as_array().unwrap();
    let names: Vec<_> = layers.iter().map(|layer| layer["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["conv1", "conv2", "fc1", "fc2"]);
    for layer in layers {
        assert!(layer["parameters"].as_u64().unwrap() > 0, "{layer}");
        assert!(layer["bytes_sent_per_step"].as_u64().unwrap() > 0, "{layer}");
        assert!(!layer["kind"].as_str().unwrap().is_empty(), "{layer}");
        assert!(!layer["reason"].as_str().unwrap().is_empty(), "{layer}");
        assert!(["ps", "sfb"].contains(&layer["scheme"].as_str().unwrap()), "{layer}");
    }
    let nodes = report["nodes"].as_array().unwrap();
    assert_eq!(nodes.len(), 2);
    for (rank, node) in nodes.iter().enumerate() {
        assert_eq!(node["rank"], rank);
        assert!(node["bytes_sent"].as_u64().unwrap() > 0, "{node}");
        assert!(node["bytes_received"].as_u64().unwrap() > 0, "{node}");
        assert!(node["compute_seconds"].as_f64().unwrap() > 0.0, "{node}");
        assert!(node["stall_seconds"].as_f64().unwrap() >= 0.0, "{node}");
    }
    // What one sends the other receives, but for a heartbeat that is on its way.
    let sum = |of: &str| nodes.iter().map(|node| node[of].as_u64().unwrap()).sum::<u64>();
    assert!(sum("bytes_sent").abs_diff(sum("bytes_received")) < 10_000, "{nodes:?}");

    let page = fs::read_to_string(trial.path("report/report.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("fashion-cnn"));
    for from_elsewhere in ["http://", "https://", "src=", "@import"] {
        assert!(!page.contains(from_elsewhere), "the page loads something: {from_elsewhere}");
    }
    for reference in ["href=\"", "url("].iter().flat_map(|what| page.split(what).skip(1)) {
        let inside = reference.starts_with('#') || reference.starts_with("data:");
        assert!(inside, "the page loads something: {}", &reference[..reference.len().min(80)]);
    }
}

#[test]
fn a_log_has_the_plan_the_epochs_and_where_the_report_is() {
    let trial = Trial::with_small_net();
    let run = trial.train("--model small.toml --workers 2 --batch 500 --epochs 2");
    assert_eq!((run.status.code(), run.stderr.as_str()), (Some(0), ""));
    let lines: Vec<_> = run.stdout.lines().collect();
    assert!(lines[0].starts_with("small.toml on fashion-mnist-mini: 2 workers"), "{}", lines[0]);
    assert!(lines[2].starts_with("layer ") && lines[2].ends_with(" why"), "{}", lines[2]);
    for begins in ["conv ", "fc1 ", "fc2 ", "epoch 1/2 ", "epoch 2/2 ", "test accuracy "] {
        assert!(lines.iter().any(|line| line.starts_with(begins)), "{begins}: {}", run.stdout);
    }
    assert!(lines.last().unwrap().ends_with("report/report.html"), "{}", run.stdout);
    assert!(!run.stdout.contains(['\x1b', '\r']), "{}", run.stdout);
}

#[test]
fn a_run_repeats_itself_and_another_seed_is_another_run() {
    let trial = Trial::with_small_net();
    let digest = |more: &str| digest(&trial.report(&format!("{STEPS} {more}")));
    let first = digest("");
    assert_eq!(digest("--seed 1"), first);
    assert_ne!(digest("--seed 2"), first);
}

/// When and over what bytes travel is not what is computed.
#[test]
fn overlap_lanes_and_links_change_no_bit() {
    let trial = Trial::with_small_net();
    let expected = digest(&trial.report(STEPS));
    for how in ["--overlap none", "--overlap backward", "--lanes 1", "--link tcp", "--link unix"] {
        assert_eq!(digest(&trial.report(&format!("{STEPS} {how}"))), expected, "{how}");
    }
}

#[test]
fn replicas_are_compared_after_every_step() {
    let report = Trial::with_small_net().report(&format!("{STEPS} --verify-replicas"));
    let digests = report["digests"].as_array().unwrap();
    assert_eq!(digests.len(), 8);
    assert_eq!(digests[7], report["parameter_digest"]);
    assert!(digests.windows(2).all(|steps| steps[0] != steps[1]), "a step that changed nothing");
}

/// However the work is divided, it is the same work: one worker's, with the whole batch.
#[test]
fn schemes_servers_and_threads_train_alike() {
    let trial = Trial::with_small_net();
    let alone = "--model small.toml --workers 1 --batch 18 --steps 8 --test never";
    let alone = trial.report(alone);
    let as_told = |report: &Value| {
        let layers = report["layers"].as_array().unwrap();
        let schemes = layers.iter().map(|layer| layer["scheme"].as_str().unwrap().to_owned());
        let reasons = layers.iter().map(|layer| layer["reason"].as_str().unwrap().to_owned());
        (schemes.collect::<Vec<_>>(), reasons.collect::<Vec<_>>())
    };
    for (how, schemes) in [
        ("--scheme auto", ["ps", "sfb", "ps"]),
        ("--scheme ps", ["ps", "ps", "ps"]),
        ("--scheme sfb", ["ps", "sfb", "sfb"]),
        // One server has all the traffic of three workers: fc2's factors are fewer bytes, but save 2.9 KiB only.
        ("--servers 1", ["ps", "sfb", "ps"]),
        ("--servers colocated+1", ["ps", "sfb", "ps"]),
        ("--threads-per-worker 2", ["ps", "sfb", "ps"]),
    ] {
        let report = trial.report(&format!("{STEPS} {how}"));
        let (got, reasons) = as_told(&report);
        assert_eq!(got, schemes, "{how}: {reasons:?}");
        if how.starts_with("--scheme ps") {
            assert_eq!(reasons[1..], ["as told", "as told"]);
        }
        assert_same_curve(&report, &alone, how);
        assert_eq!(report["nodes"].as_array().unwrap().len(), 3, "{how}");
    }
}

/// How layers are cut and where their chunks live changes who adds what, not what comes out: the same bits, for the
/// papers' ablations (2 MB pairs; whole tensors on one shard).
#[test]
fn chunks_and_their_placement_do_not_change_the_result() {
    let trial = Trial::with_small_net();
    let steps = format!("{STEPS} --scheme ps --lanes 2");
    let expected = trial.report(&steps);
    let sent = |report: &Value| -> Vec<u64> {
        let nodes = report["nodes"].as_array().unwrap().iter();
        nodes.map(|node| node["bytes_sent"].as_u64().unwrap()).collect()
    };
    for how in ["--chunk 1k", "--chunk 2MB", "--placement per-tensor", "--placement balanced"] {
        let report = trial.report(&format!("{steps} {how}"));
        assert_eq!(report["parameter_digest"], expected["parameter_digest"], "{how}");
        let (sent, before) = (sent(&report), sent(&expected));
        match how {
            // More chunks, more headers.
            "--chunk 1k" => assert!(sent.iter().sum::<u64>() > before.iter().sum(), "{sent:?}"),
            // The node that has the large layer sends it to both others.
            "--placement per-tensor" => {
                assert!(sent.iter().max() > before.iter().max(), "{sent:?} {before:?}");
            }
            _ => {}
        }
    }
}

/// Nine samples are not shared out among four threads as 3, 2, 2, 2 by dividing and rounding up:
/// that makes three parts. Whoever has no part must not be waited for.
#[test]
fn threads_share_what_does_not_divide_evenly() {
    let trial = Trial::with_small_net();
    let steps = "--model small.toml --workers 2 --batch 9 --steps 8 --test never --deterministic";
    let expected = trial.report(steps);
    for how in ["--threads-per-worker 4", "--threads-per-worker 4 --overlap none"] {
        for scheme in ["ps", "sfb"] {
            let how = format!("{how} --scheme {scheme}");
            assert_same_curve(&trial.report(&format!("{steps} {how}")), &expected, &how);
        }
    }
}

#[test]
fn without_poseidon_one_worker_computes_the_same() {
    let trial = Trial::with_small_net();
    let steps = "--model small.toml --batch 18 --steps 8 --test never --deterministic";
    let bare = trial.report(&format!("{steps} --bare"));
    assert_eq!(bare["layers"][0]["scheme"], "none");
    assert_eq!(bare["nodes"][0]["bytes_sent"], 0);
    assert_same_curve(&bare, &trial.report(&format!("{steps} --workers 1")), "--bare");
}

#[test]
fn the_printed_configuration_is_one_to_read_and_flags_win_over_it() {
    let trial = Trial::with_small_net();
    let print = |args: &str| {
        let run = trial.train(&format!("{args} --print-config"));
        assert_eq!((run.status.code(), run.stderr.as_str()), (Some(0), ""));
        run.stdout
    };
    let text = print(&format!("{STEPS} --servers colocated+2 --lanes 2 --optimizer adam --lr 0.5"));
    for line in ["workers = 3", "servers = \"colocated+2\"", "lr = 0.5", "deterministic = true"] {
        assert!(text.lines().any(|l| l == line), "no '{line}' in:\n{text}");
    }
    trial.write("job.toml", &text);
    assert_eq!(print("--config job.toml"), text);
    assert_eq!(print("--config job.toml --lr 0.25"), text.replace("lr = 0.5", "lr = 0.25"));
    assert_eq!(trial.report_files(), [""; 0]);

    trial.write("job.toml", print(STEPS));
    let report = trial.report("--config job.toml --steps 2");
    assert_eq!((&report["workers"], &report["steps"]), (&3.into(), &2.into()));
}

#[test]
fn processes_started_by_hand_train_together() {
    let trial = Trial::with_small_net();
    let (flags, secret) = by_hand(2);
    let steps = "--model small.toml --batch 9 --steps 8 --deterministic --test end";
    let start = |flags: &String| trial.start_with(&format!("{steps} {flags} --json"), &secret);
    let processes: Vec<_> = flags.iter().map(start).collect();
    let runs: Vec<_> = processes.into_iter().map(Running::finish).collect();
    let report = only_the_first_reports(&runs);
    assert_eq!(report["workers"], 2);
    assert!(report["test_accuracy"].as_f64().unwrap() > 0.0);
    let local = trial.report(&format!("{steps} --workers 2"));
    assert_eq!(digest(&report), digest(&local));
}

#[test]
fn torchrun_is_a_launcher() {
    // torchrun's own store has this port; the coordinator takes the one after it.
    let store = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).ok();
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", port + 1)).is_ok();
    let start = 10_000 + (std::process::id() % 9_000) as u16;
    let ports = (start + 1000..30_000).step_by(2).filter(free);
    let (port, _store) = ports.map(|port| (port, store(&port))).find(|(_, s)| s.is_some()).unwrap();
    let rank = |rank: u16| {
        let (rank, port) = (rank.to_string(), port.to_string());
        variables(&[
            ("RANK", &rank),
            ("LOCAL_RANK", &rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
            ("TORCHELASTIC_RUN_ID", "none"),
        ])
    };
    launched([rank(0), rank(1)]);
}

#[test]
fn mpirun_is_a_launcher() {
    let ranks = |job: u32| {
        [0, 1].map(|rank: u16| {
            let (rank, job) = (rank.to_string(), (job << 16 | 1).to_string());
            variables(&[
                ("OMPI_COMM_WORLD_RANK", &rank),
                ("OMPI_COMM_WORLD_LOCAL_RANK", &rank),
                ("OMPI_COMM_WORLD_SIZE", "2"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
                ("PMIX_NAMESPACE", &job),
                ("PMIX_RANK", &rank),
            ])
        })
    };
    // The job's name decides where its processes meet: one whose port is free.
    let free = |job: &u32| {
        let mut known = ranks(*job)[0].clone();
        known.insert("POSEIDON_SECRET".into(), "known to all of us".into());
        let config = Config::from_variables(&|name| known.get(name).cloned()).unwrap();
        TcpListener::bind(config.coordinator).is_ok()
    };
    let start = std::process::id() * 8;
    launched(ranks((start..start + 8).find(free).unwrap()));
}

#[test]
fn workers_with_partitions_of_their_own_train_together() {
    let trial = Trial::with_small_net();
    trial.write_idx("part/0", 90);
    trial.write_idx("part/1", 70);
    let report = trial.report(
        "--model small.toml --partition private --data idx:part/{rank} --workers 2 --batch 10 \
         --epochs 12",
    );
    // The smaller partition says how long an epoch is.
    assert_eq!(report["steps"], 7 * 12);
    // Both see every class, which a band of bright pixels tells.
    assert!(report["final_loss"].as_f64().unwrap() < 0.1, "{}", report["final_loss"]);
    assert_eq!(report["test_accuracy"], 1.0);
}

/// Two processes whose launcher has set `ranks`, one each, and nothing else.
fn launched(ranks: [Variables; 2]) {
    let trial = Trial::with_small_net();
    let steps = "--model small.toml --batch 9 --steps 4 --test never --json";
    let processes = ranks.map(|variables| trial.start_with(steps, &variables));
    let report = only_the_first_reports(&processes.map(Running::finish));
    assert_eq!(report["nodes"].as_array().unwrap().len(), 2);
}

fn only_the_first_reports(runs: &[Run]) -> Value {
    for run in &runs[1..] {
        assert!(run.complaints().is_empty(), "{run:?}");
        assert_eq!((run.status.code(), run.stdout.as_str()), (Some(0), ""));
    }
    runs[0].report()
}

fn digest(report: &Value) -> String {
    report["parameter_digest"].as_str().unwrap().to_owned()
}

/// The same losses, but for the order in which numbers were added; and something was learned.
fn assert_same_curve(report: &Value, expected: &Value, how: &str) {
    let losses = |report: &Value| -> Vec<f64> {
        let points = report["curve"].as_array().unwrap().iter();
        points.map(|point| point["loss"].as_f64().unwrap()).collect()
    };
    let (got, expected) = (losses(report), losses(expected));
    assert_eq!(got.len(), expected.len(), "{how}");
    for (step, (a, b)) in got.iter().zip(&expected).enumerate() {
        assert!((a - b).abs() <= 2e-4 * b.max(1.0), "{how}, step {step}: {a} and {b}");
    }
    let first = expected[0];
    assert!(expected.iter().any(|loss| (loss - first).abs() > 0.1), "{how}: {expected:?}");
}
