//! `poseidon train --sync`: workers at different clocks, the real command.

use crate::trial::{Trial, kill};
use rustix::process::Signal;

/// The learning rate is low: with momentum, gradients of older parameters lead further astray.
const TASK: &str = "--model small.toml --batch 6 --workers 3 --test end --lr 0.001";

/// The report is made only if all workers end with the same parameters.
#[test]
fn workers_that_were_apart_end_alike_and_have_learnt() {
    for how in [
        "--sync ssp:0",
        "--sync ssp:1 --optimizer sgd",
        "--sync ssp:3 --scheme sfb",
        "--sync ssp:2 --scheme ps --servers 2 --optimizer adam",
        "--sync asp --optimizer sgd --threads-per-worker 2",
        "--sync asp --overlap none",
    ] {
        let report = Trial::with_small_net().report(&format!("{TASK} --steps 300 {how}"));
        assert_eq!(report["steps"], 300, "{how}");
        assert_eq!(report["sync"], how.split_whitespace().nth(1).unwrap());
        let accuracy = report["test_accuracy"].as_f64().unwrap();
        assert!(accuracy > 0.4, "{how}: {accuracy}");
    }
}

#[test]
fn what_was_apart_is_saved_together_and_goes_on() {
    for how in ["--sync ssp:2", "--sync asp --optimizer sgd", "--sync ssp:1 --scheme sfb"] {
        let trial = Trial::with_small_net();
        trial.report(&format!("{TASK} {how} --steps 20 --checkpoint saved --every 8"));
        for step in [8, 16, 20] {
            let manifest = format!("saved/step-{step:012}/manifest.json");
            assert!(trial.path(&manifest).exists(), "{how}: step {step}");
        }
        let report = trial.report("--resume saved@8 --steps 24 --workers 2 --checkpoint other");
        assert_eq!(report["steps"], 24, "{how}");
    }
}

#[test]
fn a_job_whose_workers_are_apart_ends_when_it_is_asked_to() {
    for sync in ["ssp:3", "asp"] {
        let trial = Trial::with_small_net();
        let endless = "--steps 1000000 --checkpoint saved";
        let mut job = trial.start(&format!("{TASK} --sync {sync} {endless}"));
        job.wait_for("epoch");
        kill(job.pid(), Signal::TERM);
        let run = job.finish();
        assert_eq!(run.status.code(), Some(128 + Signal::TERM.as_raw()), "{run:?}");
        assert!(run.stdout.contains("it was asked to end after step"), "{run:?}");
        let left = std::fs::read_to_string(trial.path("report/report.json")).unwrap();
        let left: serde_json::Value = serde_json::from_str(&left).unwrap();
        let step = left["steps"].as_u64().unwrap();
        let more = step + 3;
        let report = trial.report(&format!("--resume saved --steps {more} --checkpoint other"));
        assert_eq!(report["steps"], more, "{sync}");
    }
}

#[test]
fn what_needs_equal_clocks_is_refused() {
    let trial = Trial::with_small_net();
    for (args, words) in [
        ("--sync ssp:2 --deterministic", "deterministic needs sync = \"bsp\", not \"ssp:2\""),
        ("--sync asp --verify-replicas", "verify-replicas needs sync = \"bsp\""),
        ("--sync ssp:99", "'ssp:S' with S from 0 to 16"),
    ] {
        let run = trial.train(args);
        assert!(!run.status.success(), "{args}");
        assert!(run.stderr.contains(words), "'{words}' is not in: {}", run.stderr);
    }
}
