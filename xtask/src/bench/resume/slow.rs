//! What slow workers cost: waited for, dropped, or run ahead of.
//!
//! Workers sleep for most of a step, so that the cores of this machine do not decide how fast they are.

use super::{Lab, Report};
use crate::bench::environment;
use crate::bench::finding::Finding;
use crate::bench::measurement::median;
use crate::bench::targets::Verdict;
use crate::command::{command, output_within};
use anyhow::{Context, Result};
use serde::Deserialize;

const WORKERS: u16 = 4;
/// A small net, so that a step is short beside the time that workers pretend to compute.
const NET: &str = "--model mlp --optimizer sgd";

/// One worker at a tenth of the others' speed.
pub(super) fn dropping(lab: &Lab<'_>) -> Result<Finding> {
    let (compute, rounds) = (50, lab.rounds(3));
    let steps = if lab.args.quick { 40 } else { 150 };
    let slow = WORKERS - 1;
    let ways = [
        ("nobody is slow", String::new()),
        ("one is slow, all wait", format!("--slow {slow}:10")),
        ("one is slow, `--drop-slowest 1`", format!("--slow {slow}:10 --drop-slowest 1")),
    ];
    let mut runs: Vec<Vec<Report>> = ways.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for ((name, how), runs) in ways.iter().zip(&mut runs) {
            println!("dropping: {name}, round {} of {rounds}", round + 1);
            let task = format!(
                "{NET} --batch 16 --lr 0.05 --workers {WORKERS} --steps {steps} --test end"
            );
            runs.push(lab.train(&format!("{task} --compute {compute}ms {how}"))?);
        }
    }
    let mut text = format!(
        "{WORKERS} workers on this machine train the built-in net `mlp` for {steps} steps. Every step \
         computes for {compute} ms; worker {slow} computes for ten times as long. Medians of {rounds} \
         rounds in turn. Steps are worker 0's. Samples are those that counted, of all workers.\n\n\
         | | median step, ms | 90% of steps, ms | all steps, s | samples | accuracy |\n\
         | --- | ---: | ---: | ---: | ---: | ---: |\n"
    );
    for ((name, _), runs) in ways.iter().zip(&runs) {
        let of = |read: &dyn Fn(&Report) -> f64| middle(runs, read);
        let samples = |report: &Report| {
            let counted =
                report.nodes.iter().map(|node| Some(node.turnout.as_ref()?.samples_counted));
            counted.sum::<Option<u64>>().map_or(f64::NAN, |sum| sum as f64)
        };
        let samples = of(&samples);
        let samples = if samples.is_nan() { "all".into() } else { format!("{samples:.0}") };
        text += &format!(
            "| {name} | {:.1} | {:.1} | {:.2} | {samples} | {:.1}% |\n",
            1e3 * of(&|report| report.step_seconds.median),
            1e3 * of(&|report| report.step_seconds.p90),
            of(&|report| report.seconds),
            100.0 * of(&|report| report.test_accuracy.unwrap_or(f64::NAN)),
        );
    }
    text += "\nWhose steps counted with `--drop-slowest 1`, in the last round:\n\n\
             | worker | counted | came too late | neither |\n| --- | ---: | ---: | ---: |\n";
    let last = runs[2].last().context("there was a round")?;
    for (rank, node) in last.nodes.iter().enumerate() {
        let turnout = node.turnout.as_ref().context("a report without turnout")?;
        let (counted, late) = (turnout.steps_counted, turnout.steps_late);
        let neither = last.steps.saturating_sub(counted + late);
        text += &format!("| {rank} | {counted} | {late} | {neither} |\n");
    }
    let of_step = |runs: &[Report]| middle(runs, &|report| report.step_seconds.median);
    let ratio = of_step(&runs[2]) / of_step(&runs[0]);
    let verdict = Verdict {
        target: "a dropped worker slows the others down by a twentieth at most".into(),
        measured: format!("a median step takes {ratio:.2} times as long as without it"),
        met: Some(ratio <= 1.05),
    };
    Ok(Finding { text, verdicts: vec![verdict] })
}

/// Workers whose steps vary (Poseidon 2015, Figure 8).
pub(super) fn staleness(lab: &Lab<'_>) -> Result<Finding> {
    let (compute, jitter, rounds) = (40, "lognormal:0.5", lab.rounds(3));
    let epochs = if lab.args.quick { 1 } else { 2 };
    let accuracy = if lab.args.quick { 0.5 } else { 0.8 };
    let ways = [0, 1, 2, 4, 8];
    let mut runs: Vec<Vec<Report>> = ways.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for (staleness, runs) in ways.iter().zip(&mut runs) {
            println!("staleness {staleness}: round {} of {rounds}", round + 1);
            // Small batches, so that workers seldom meet at the end of an epoch.
            let net = format!("{NET} --batch 4 --lr 0.02 --seed {}", round + 1);
            let task = format!("{net} --workers {WORKERS} --epochs {epochs}");
            let pace = format!("--compute {compute}ms --jitter {jitter}");
            runs.push(lab.train(&format!("{task} {pace} --sync ssp:{staleness}"))?);
        }
    }
    let steps = runs[0].first().context("there was a round")?.steps;
    let mut text = format!(
        "{WORKERS} workers on this machine train the built-in net `mlp` for {epochs} epochs of {} steps. \
         A step computes for {compute} ms, times a factor that is drawn for every worker and step \
         ({jitter}). Medians of {rounds} rounds in turn. The simulator is told the same, and nothing \
         of this machine. Time to {:.0}% is that of the first epoch that reaches it, without tests.\n\n\
         | staleness | steps per second | to staleness 0 | simulated | time to {:.0}%, s | accuracy |\n\
         | ---: | ---: | ---: | ---: | ---: | ---: |\n",
        steps / epochs,
        100.0 * accuracy,
        100.0 * accuracy,
    );
    let speed = |report: &Report| {
        report.steps as f64 / report.epochs_done.iter().map(|epoch| epoch.seconds).sum::<f64>()
    };
    let mut simulated = Vec::new();
    for staleness in ways {
        simulated.push(simulate(compute, jitter, staleness, steps)?);
    }
    let mut worst: f64 = 0.0;
    for ((staleness, runs_of), simulated_here) in ways.iter().zip(&runs).zip(&simulated) {
        let here = middle(runs_of, &speed);
        let gain = here / middle(&runs[0], &speed);
        let gain_simulated = simulated_here / simulated[0];
        worst = worst.max((gain_simulated / gain - 1.0).abs());
        let reached = |report: &Report| {
            let mut seconds = 0.0;
            for epoch in &report.epochs_done {
                seconds += epoch.seconds;
                if epoch.test_accuracy.is_some_and(|reached| reached >= accuracy) {
                    return seconds;
                }
            }
            f64::NAN
        };
        let reached = middle(runs_of, &reached);
        let reached = if reached.is_nan() { "not reached".into() } else { format!("{reached:.1}") };
        let accuracy = middle(runs_of, &|report| report.test_accuracy.unwrap_or(f64::NAN));
        text += &format!(
            "| {staleness} | {here:.2} | {gain:.2} | {gain_simulated:.2} | {reached} | {:.1}% |\n",
            100.0 * accuracy
        );
    }
    let verdict = Verdict {
        target: "the simulator is within 10%".into(),
        measured: format!("its gains differ by {:.1}% at most", 100.0 * worst),
        met: Some(worst <= 0.1),
    };
    Ok(Finding { text, verdicts: vec![verdict] })
}

/// Steps per second, as the simulator has it.
fn simulate(compute: u64, jitter: &str, staleness: u16, steps: u64) -> Result<f64> {
    #[derive(Deserialize)]
    struct Simulated {
        /// Of all workers together.
        steps_per_second: f64,
    }
    let words = format!(
        "bench simulate --nodes {WORKERS} --bytes {BYTES} --compute {compute}ms --jitter {jitter} \
         --sync ssp:{staleness} --iters {steps} --json"
    );
    let mut command = command(&[environment::poseidon().display().to_string()]);
    command.args(words.split_whitespace());
    let printed = output_within(&mut command, super::LIMIT)?;
    let found: Simulated = serde_json::from_str(&printed).context("reading a simulation")?;
    Ok(found.steps_per_second / f64::from(WORKERS))
}

/// Of the net.
const BYTES: &str = "400KB";

fn middle(runs: &[Report], of: &dyn Fn(&Report) -> f64) -> f64 {
    median(runs.iter().map(of).collect()).unwrap_or(f64::NAN)
}
