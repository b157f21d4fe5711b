//! `poseidon train --drop-slowest`: the real command, with a worker that is much slower than the others.

use crate::trial::{Trial, kill};
use rustix::process::Signal;
use std::thread;
use std::time::{Duration, Instant};

const TASK: &str = "--model small.toml --batch 6 --workers 4 --test end --lr 0.01";
/// Worker 2 takes ten times as long as the others.
const SLOW: &str = "--compute 4ms --slow 2:10";

/// The report is made only if all workers end with the same parameters.
#[test]
fn a_slow_worker_is_dropped_and_the_report_says_whose_work_counted() {
    for how in ["--servers 2", "--overlap none", "--optimizer adam --threads-per-worker 2"] {
        let args = format!("{TASK} {SLOW} --drop-slowest 1 --steps 120 {how}");
        let report = Trial::with_small_net().report(&args);
        assert_eq!((&report["steps"], &report["sync"]), (&120.into(), &"drop-slowest:1".into()));
        let accuracy = report["test_accuracy"].as_f64().unwrap();
        assert!(accuracy > 0.4, "{how}: {accuracy}");
        let turnout = |rank: usize, what: &str| {
            report["nodes"][rank]["turnout"][what].as_u64().unwrap_or_else(|| panic!("{report}"))
        };
        assert!(turnout(2, "steps_late") > 0, "{how}: {report}");
        let counted: u64 = (0..4).map(|rank| turnout(rank, "steps_counted")).sum();
        assert!((3 * 120..4 * 120).contains(&counted), "{how}: {counted}");
        for rank in 0..4 {
            let (steps, samples) =
                (turnout(rank, "steps_counted"), turnout(rank, "samples_counted"));
            // Batches of 6; the last one of an epoch may be smaller.
            assert!(samples <= 6 * steps && samples + 60 > 6 * steps, "{how}: {samples}, {steps}");
        }
    }
}

#[test]
fn what_was_saved_without_a_slow_worker_goes_on() {
    let trial = Trial::with_small_net();
    let saving = "--drop-slowest 1 --steps 40 --checkpoint saved --every 16";
    trial.report(&format!("{TASK} {SLOW} {saving}"));
    for step in [16, 32, 40] {
        let manifest = format!("saved/step-{step:012}/manifest.json");
        assert!(trial.path(&manifest).exists(), "step {step}");
    }
    let report = trial.report("--resume saved@16 --steps 44 --workers 3 --checkpoint other");
    assert_eq!((&report["steps"], &report["sync"]), (&44.into(), &"drop-slowest:1".into()));
}

#[test]
fn a_job_that_drops_workers_ends_when_it_is_asked_to() {
    let trial = Trial::with_small_net();
    let endless = "--drop-slowest 1 --steps 1000000 --checkpoint saved";
    let mut job = trial.start(&format!("{TASK} {SLOW} {endless}"));
    job.wait_for("epoch");
    kill(job.pid(), Signal::TERM);
    let run = job.finish();
    assert_eq!(run.status.code(), Some(128 + Signal::TERM.as_raw()), "{run:?}");
    assert!(run.stdout.contains("it was asked to end after step"), "{run:?}");
}

/// An epoch has some 60 steps of at least 200 ms: the end of it is far away.
#[test]
fn a_job_ends_at_the_next_step_that_all_workers_agree_on_and_not_with_the_epoch() {
    for (how, word) in [("--drop-slowest 1", ""), ("--sync asp", "asked to end: with --sync asp")] {
        let trial = Trial::with_small_net();
        let endless = "--steps 1000000 --compute 200ms --checkpoint saved --every 4";
        let mut job = trial.start(&format!("{TASK} {how} {endless}"));
        job.wait_for("small.toml on");
        // Workers that have not begun end without a step.
        let first = trial.path("saved/step-000000000004/manifest.json");
        let deadline = Instant::now() + Duration::from_secs(60);
        while !first.exists() {
            assert!(Instant::now() < deadline, "{how}: no checkpoint after a minute");
            thread::sleep(Duration::from_millis(20));
        }
        kill(job.pid(), Signal::TERM);
        let run = job.finish();
        assert_eq!(run.status.code(), Some(128 + Signal::TERM.as_raw()), "{run:?}");
        let (_, after) = run.stdout.split_once("asked to end after step ").unwrap();
        let step: u64 = after.split_once(' ').unwrap().0.parse().unwrap();
        assert!(step < 50, "{how}: {step}");
        assert!(run.stdout.contains(word), "{how}: {run:?}");
        assert!(trial.path(&format!("saved/step-{step:012}/manifest.json")).exists(), "{run:?}");
        if how.contains("asp") {
            assert_eq!(step % 4, 1, "after the step that all took together: {run:?}");
        }
    }
}

#[test]
fn what_has_no_meaning_is_refused() {
    let trial = Trial::with_small_net();
    for (args, words) in [
        ("--drop-slowest 4 --workers 4", "nobody is left: expected fewer than 4"),
        ("--drop-slowest 1 --deterministic", "deterministic needs sync = \"bsp\""),
        ("--drop-slowest 1 --scheme sfb", "--scheme auto or ps"),
        ("--drop-slowest 1 --lanes 2", "leave out --lanes"),
        ("--drop-slowest 1 --sync asp", "cannot be used with"),
        ("--drop-slowest 0", "0 is not in 1.."),
        ("--slow 1:10", "--compute"),
        ("--compute 1ms --slow 4:10", "there is no worker 4, the last one is 3"),
    ] {
        let run = trial.train(args);
        assert!(!run.status.success(), "{args}");
        assert!(run.stderr.contains(words), "'{words}' is not in: {}", run.stderr);
    }
}
