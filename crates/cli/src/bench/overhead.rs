//! `poseidon bench overhead`: what Poseidon costs one worker that has nobody to talk to.

use crate::terminal::say;
use anyhow::Context;
use poseidon::{Config, Optimizer, Secret, Session};
use poseidon_nn::Model;
use poseidon_nn::data::{Batch, Position};
use poseidon_nn::train::{Overlap, Task, Worker};
use serde::Serialize;
use std::fmt;
use std::process::ExitCode;
use std::time::Instant;

/// Train with one worker under Poseidon and with the bare engine, in turns.
///
/// Both train the same net on the same batch in this one process, a few steps at a time, so whatever
/// else the machine does falls on both alike. Each pair of turns gives a ratio of their speeds; the
/// median of these is the answer, with the interval it lies in with 95% confidence.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// A built-in model, or a file (see poseidon train --print-model).
    #[arg(long, default_value = "cifar10-quick")]
    model: String,

    /// Samples a step.
    #[arg(long, value_name = "K", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,

    /// Pairs of turns to measure, after two that are not.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(8..))]
    pairs: u32,

    /// Steps in a turn.
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,

    /// Print one JSON object and nothing else.
    #[arg(long)]
    json: bool,
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Summary {
    model: String,
    batch: u32,
    pairs: u32,
    steps_per_turn: u32,
    /// Medians over the turns.
    images_per_second: Speeds,
    /// Poseidon's speed over the bare engine's.
    ratio: Ratio,
    /// Seconds of every turn, for those who would rather look themselves.
    turns: Vec<Pair>,
}

#[derive(Debug, Serialize)]
struct Speeds {
    poseidon: f64,
    bare: f64,
}

#[derive(Debug, Serialize)]
struct Ratio {
    median: f64,
    /// The median's interval of 95% confidence.
    low: f64,
    high: f64,
}

/// Seconds of two turns, one after the other.
#[derive(Clone, Copy, Debug, Serialize)]
struct Pair {
    poseidon: f64,
    bare: f64,
}

/// So small that the net does not change: one batch over and over is no training.
const RATE: f32 = 1e-6;

/// Turns in which memory and caches come into their usual state.
const WARM_UP: u32 = 2;

/// Runs the measurement.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let model = match Model::builtin(&args.model) {
        Some(model) => model,
        None => Model::read(&args.model)?,
    };
    let task = Task {
        model,
        batch: args.batch as usize,
        devices: 1,
        seed: 1,
        optimizer: "sgd:momentum=0.9".parse::<Optimizer>()?,
        overlap: Overlap::Full,
    };
    let secret = Secret::random().context("the system gave no random bytes")?;
    let builder = Session::builder(Config::alone(secret)).learning_rate(RATE);
    let session = task.describe(builder)?.start()?;
    let mut poseidon = Turns::new(&task, Worker::join(&task, session)?);
    let mut bare = Turns::new(&task, Worker::alone(&task)?);
    let mut turns = Vec::new();
    for pair in 0..WARM_UP + args.pairs {
        // Every other pair in the other order: being first falls on both alike.
        let measured = if pair % 2 == 0 {
            let first = poseidon.take(args.steps)?;
            Pair { poseidon: first, bare: bare.take(args.steps)? }
        } else {
            let first = bare.take(args.steps)?;
            Pair { poseidon: poseidon.take(args.steps)?, bare: first }
        };
        if pair >= WARM_UP {
            turns.push(measured);
        }
    }
    poseidon.worker.finish()?;
    let summary = Summary::new(&args, turns).context("no turn was measured")?;
    let text = if args.json { serde_json::to_string(&summary)? } else { summary.to_string() };
    say(&(text + "\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// A worker and the batch it trains on over and over.
struct Turns {
    worker: Worker,
    images: Vec<f32>,
    labels: Vec<u32>,
}

impl Turns {
    fn new(task: &Task, worker: Worker) -> Self {
        let values = 0..task.batch * task.model.input.len();
        let images = values.map(|i| (i * 7919 % 256) as f32 / 128.0 - 1.0).collect();
        let labels = (0..task.batch).map(|i| (i % task.model.classes) as u32).collect();
        Self { worker, images, labels }
    }

    /// Seconds of `steps` steps, with everything they set going.
    fn take(&mut self, steps: u32) -> anyhow::Result<f64> {
        let start = Instant::now();
        for _ in 0..steps {
            let batch = Batch {
                images: &self.images,
                labels: &self.labels,
                position: Position::default(),
                first: 0,
                total: self.labels.len(),
            };
            self.worker.step(&batch, RATE)?;
        }
        self.worker.settle()?;
        Ok(start.elapsed().as_secs_f64())
    }
}

impl Summary {
    fn new(args: &Args, turns: Vec<Pair>) -> Option<Self> {
        let images = f64::from(args.batch * args.steps);
        let speed = |seconds: fn(&Pair) -> f64| {
            let (seconds, _, _) = median(turns.iter().map(seconds).collect())?;
            Some(images / seconds)
        };
        let images_per_second =
            Speeds { poseidon: speed(|t| t.poseidon)?, bare: speed(|t| t.bare)? };
        let (median, low, high) = median(turns.iter().map(|t| t.bare / t.poseidon).collect())?;
        Some(Self {
            model: args.model.clone(),
            batch: args.batch,
            pairs: args.pairs,
            steps_per_turn: args.steps,
            images_per_second,
            ratio: Ratio { median, low, high },
            turns,
        })
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, batch, pairs, steps_per_turn, images_per_second: speed, ratio, .. } =
            self;
        writeln!(f, "{model}, batch {batch}: {pairs} pairs of turns of {steps_per_turn} steps")?;
        writeln!(f, "  bare engine     {:>9.1} images/s", speed.bare)?;
        writeln!(f, "  under Poseidon  {:>9.1} images/s", speed.poseidon)?;
        let (low, high) = (ratio.low, ratio.high);
        write!(f, "  ratio           {:>9.4}  (95%: {low:.4} to {high:.4})", ratio.median)
    }
}

/// The median, and the interval that has it with 95% confidence: the values as far from the middle
/// as heads are from half in as many throws of a coin.
fn median(mut values: Vec<f64>) -> Option<(f64, f64, f64)> {
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    let middle = (values[last / 2] + values[values.len() / 2]) / 2.0;
    let reach = 0.98 * (values.len() as f64).sqrt();
    let centre = last as f64 / 2.0;
    let at = |position: f64| values[(position.round().max(0.0) as usize).min(last)];
    Some((middle, at(centre - reach), at(centre + reach)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_has_an_interval_that_outliers_do_not_move() {
        let mut values: Vec<f64> = (0..100).map(f64::from).collect();
        values[99] = 1e9;
        assert_eq!(median(values), Some((49.5, 40.0, 59.0)));
        assert_eq!(median(vec![2.0]), Some((2.0, 2.0, 2.0)));
        assert_eq!(median(Vec::new()), None);
    }
}
