//! `poseidon train` that is interrupted and goes on: the real command, killed for real.

use crate::trial::{SMALL, Trial, by_hand, eventually, kill};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::process::{Command, Stdio};

/// A folder with [`SMALL`] in it.
const TASK: &str = "--model small.toml --batch 6 --test never --deterministic";

fn digest(report: &Value) -> &str {
    report["parameter_digest"].as_str().unwrap()
}

fn has_checkpoint(trial: &Trial, step: u64) -> bool {
    trial.path(&format!("saved/step-{step:012}/manifest.json")).exists()
}

/// The last report in the folder, whoever wrote it.
fn left(trial: &Trial) -> Value {
    let text = fs::read_to_string(trial.path("report/report.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_job_that_is_killed_goes_on_bit_by_bit() {
    for how in [
        "--workers 3 --scheme ps",
        "--workers 3 --scheme sfb --optimizer adam",
        "--workers 2 --servers 2",
        "--workers 2 --threads-per-worker 2 --servers colocated+1",
    ] {
        let trial = Trial::with_small_net();
        let whole = trial.report(&format!("{TASK} {how} --steps 24"));
        let mut running =
            trial.start(&format!("{TASK} {how} --steps 100000 --checkpoint saved --every 12"));
        running.wait_for("");
        eventually("a checkpoint is made", || has_checkpoint(&trial, 12));
        let worker = *trial.workers().values().next_back().unwrap();
        kill(worker, Signal::KILL);
        assert!(!running.finish().status.success());
        let resumed = trial.report("--resume saved@12 --steps 24 --checkpoint other");
        assert_eq!(digest(&resumed), digest(&whole), "{how}");
        assert_eq!(resumed["steps"], 24);
    }
}

#[test]
fn a_job_that_is_asked_to_end_saves_its_state_and_leaves_a_report() {
    for signal in [Signal::TERM, Signal::INT] {
        let trial = Trial::with_small_net();
        let task = format!("{TASK} --workers 3 --steps 100000 --checkpoint saved");
        let mut running = trial.start(&task);
        running.wait_for("epoch");
        kill(running.pid(), signal);
        let run = running.finish();
        assert_eq!(run.status.code(), Some(128 + signal.as_raw()), "{run:?}");
        let report = left(&trial);
        let step = report["steps"].as_u64().unwrap();
        assert!(has_checkpoint(&trial, step), "{run:?}");
        let why = report["partial"].as_str().unwrap();
        assert!(why.contains(&format!("asked to end after step {step} of 100000")), "{why}");
        assert!(!report["host"].as_str().unwrap().is_empty());

        let (more, whole) = (step + 5, Trial::new());
        whole.write("small.toml", SMALL);
        let whole = whole.report(&format!("{TASK} --workers 3 --steps {more}"));
        let resumed = trial.report(&format!("--resume --checkpoint saved --steps {more}"));
        assert_eq!(digest(&resumed), digest(&whole));
        assert_eq!(resumed["partial"], Value::Null);
        let files = trial.report_files();
        let expected =
            ["previous-report.html", "previous-report.json", "report.html", "report.json"];
        assert_eq!(files, expected);
    }
}

/// One worker of a job whose processes somebody else started gets the signal. All of them stop after
/// the same step.
#[test]
fn all_stop_when_one_worker_is_asked_to_end() {
    let trial = Trial::with_small_net();
    let (flags, secret) = by_hand(3);
    let start = |flags: &String| {
        trial.start_with(&format!("{TASK} --steps 100000 --checkpoint saved {flags}"), &secret)
    };
    let mut workers: Vec<_> = flags.iter().map(start).collect();
    workers[0].wait_for("epoch");
    kill(workers[2].pid(), Signal::TERM);
    for worker in workers {
        let run = worker.finish();
        assert!(run.status.success(), "{run:?}");
    }
    assert!(has_checkpoint(&trial, left(&trial)["steps"].as_u64().unwrap()));
}

/// What is trained and saved is the same whether connections are encrypted or not.
#[test]
fn an_encrypted_job_goes_on_from_a_checkpoint_bit_by_bit() {
    let trial = Trial::with_small_net();
    let how = "--workers 3 --link tcp";
    let whole = trial.report(&format!("{TASK} {how} --steps 16"));
    trial.report(&format!("{TASK} {how} --encrypt --steps 8 --checkpoint saved"));
    let resumed =
        trial.report(&format!("--resume saved {how} --encrypt --steps 16 --checkpoint b"));
    assert_eq!(digest(&resumed), digest(&whole));
    assert_eq!(resumed["steps"], 16);
}

#[test]
fn a_death_leaves_a_report_of_what_there_was() {
    let trial = Trial::with_small_net();
    let mut running = trial.start(&format!("{TASK} --workers 3 --steps 100000"));
    running.wait_for("epoch");
    kill(trial.workers()[&2], Signal::KILL);
    assert!(!running.finish().status.success());
    let why = left(&trial)["partial"].as_str().unwrap().to_owned();
    // Worker 0 may be ended before it has said why.
    assert!(why.contains("it failed: ") || why.contains("written after step"), "{why}");
}

#[test]
fn other_workers_and_servers_go_on_where_the_data_was_left() {
    let trial = Trial::with_small_net();
    trial.report(&format!("{TASK} --workers 3 --steps 10 --checkpoint saved"));
    for how in ["--workers 1", "--workers 4", "--workers 2 --servers 1"] {
        let report = trial.report(&format!("--resume saved {how} --steps 14 --checkpoint {}", "b"));
        assert_eq!(report["steps"], 14, "{how}");
        fs::remove_dir_all(trial.path("b")).unwrap();
    }
}

#[test]
fn what_cannot_go_on_is_refused_in_words() {
    let trial = Trial::with_small_net();
    trial.report(&format!("{TASK} --workers 2 --steps 5 --checkpoint saved"));
    let refused = |args: &str, words: &[&str]| {
        let run = trial.train(args);
        assert!(!run.status.success(), "{args}: {run:?}");
        for words in words {
            assert!(run.stderr.contains(words), "'{words}' is not in: {}", run.stderr);
        }
    };
    refused("--resume saved --steps 9 --seed 5", &["seed 1, not 5"]);
    refused("--resume saved --steps 9 --optimizer adam", &["conv", "adam", "momentum"]);
    refused("--resume saved --steps 9 --model mlp", &["fc1", "401920", "27696"]);
    refused("--resume nowhere", &["no checkpoint in nowhere"]);
    refused("--resume saved@4 --steps 9", &["000000000004"]);
    refused("--resume", &["from where?"]);
    refused("--every 5", &["--checkpoint"]);
    let part = trial.path("saved/step-000000000005/part-00001.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&part, bytes).unwrap();
    refused("--resume saved --steps 9", &["part-00001.safetensors"]);
    fs::remove_file(&part).unwrap();
    refused("--resume saved@5 --steps 9", &["part-00001.safetensors"]);
}

/// A scheduler may start a job again that has ended: that is no failure.
#[test]
fn a_finished_job_that_is_started_again_ends_well() {
    let trial = Trial::with_small_net();
    let args = format!("{TASK} --workers 2 --steps 5 --checkpoint saved --resume");
    trial.report(&args);
    let report = left(&trial);
    let again = trial.train(&args);
    assert!(again.status.success(), "{again:?}");
    assert!(again.stderr.contains("nothing is left to do"), "{again:?}");
    assert_eq!(left(&trial), report);
}

/// What is exported is what was trained, and a folder keeps as many as it was told.
#[test]
fn checkpoints_are_kept_by_count_and_can_be_exported() {
    let trial = Trial::with_small_net();
    trial.report(&format!("{TASK} --workers 2 --steps 30 --checkpoint saved --every 4 --keep 2"));
    let kept: Vec<u64> = (0..40).filter(|step| has_checkpoint(&trial, *step)).collect();
    assert_eq!(kept, [28, 30]);
    let (saved, file) = (trial.path("saved"), trial.path("net.safetensors"));
    let export = Command::new(env!("CARGO_BIN_EXE_poseidon"))
        .args(["checkpoint", "export"])
        .args([&saved, &file])
        .output()
        .unwrap();
    assert!(export.status.success(), "{export:?}");
    let bytes = fs::read(file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    assert_eq!(header["conv.bias"]["dtype"], "F32");
    assert_eq!(header["conv.weight"]["shape"].as_array().unwrap().len(), 4);
}

/// Three workers leave an epoch where no step of two workers ends.
#[test]
fn epochs_are_counted_to_what_was_asked_for() {
    let trial = Trial::with_small_net();
    let task = format!("{TASK} --checkpoint saved");
    trial.report(&format!("{task} --workers 3 --steps 7"));
    let run = trial.train("--resume saved --epochs 3 --workers 2 --checkpoint other");
    assert!(run.status.success(), "{run:?}");
    let epochs = run.stdout.lines().filter_map(|line| line.strip_prefix("epoch "));
    let epochs: Vec<&str> = epochs.filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(epochs, ["1/3", "2/3", "3/3"], "{run:?}");
    assert_eq!(left(&trial)["epochs"], 3.0);
}

/// The place is a disk of its own, with room for one checkpoint and a half.
#[test]
fn a_full_disk_is_a_warning_and_the_checkpoint_before_it_stays() {
    if !may_mount() {
        eprintln!("skipped: to mount a small disk needs root, or CAP_SYS_ADMIN, and 'unshare'");
        return;
    }
    let trial = Trial::with_small_net();
    let task = format!("{TASK} --workers 2 --every 4 --checkpoint");
    trial.report(&format!("{task} roomy --steps 4"));
    let parts = fs::read_dir(trial.path("roomy/step-000000000004")).unwrap();
    // A disk in memory counts in pages of 4 KiB.
    let pages: u64 = parts.map(|part| part.unwrap().metadata().unwrap().len().div_ceil(4096)).sum();
    let poseidon = env!("CARGO_BIN_EXE_poseidon");
    let script = format!(
        "mkdir small && mount -t tmpfs -o size={}k tmpfs small && \
         {poseidon} train {task} small --steps 12 --report report && \
         {poseidon} checkpoint ls small && {poseidon} checkpoint verify small && \
         {poseidon} train --resume small --steps 6 --report report --checkpoint other",
        6 * pages
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
    command.env("HOME", trial.path("")).current_dir(trial.path("")).stdin(Stdio::null());
    let output = command.output().unwrap();
    let (said, errors) =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).into();
    assert!(output.status.success(), "{said}{errors}");
    let warnings: Vec<_> = said.lines().filter(|line| line.starts_with("warning: ")).collect();
    for (warning, step) in warnings.iter().zip([8, 12]) {
        assert!(warning.contains(&format!("step {step}")), "{warning}");
        assert!(warning.contains("no space left: "), "{warning}");
        assert!(warning.contains(" bytes are needed, "), "{warning}");
        assert!(warning.ends_with("training goes on"), "{warning}");
    }
    assert_eq!(warnings.len(), 2, "{said}{errors}");
    assert!(said.contains("12 steps in "), "{said}");
    assert!(said.contains("goes on after step 4"), "{said}");
}

/// Whether this process may have mounts of its own.
fn may_mount() -> bool {
    let mut command = Command::new("unshare");
    let script = "mount -t tmpfs -o size=4k tmpfs /mnt";
    command.args(["--mount", "--propagation", "private", "sh", "-c", script]);
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
