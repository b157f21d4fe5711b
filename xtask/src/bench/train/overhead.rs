//! What Poseidon costs one worker that has nobody to talk to.

use super::lab::Lab;
use super::{Finding, Verdict};
use crate::bench::environment;
use crate::command::{command, output_within};
use anyhow::{Context, Result};
use serde::Deserialize;
use std::fs;
use std::time::Duration;

/// Part of the bare engine's images per second that is left.
const TARGET: f64 = 0.99;

const LIMIT: Duration = Duration::from_secs(1800);

/// What `poseidon bench overhead` prints.
#[derive(Debug, Deserialize)]
struct Overhead {
    model: String,
    batch: u32,
    pairs: u32,
    steps_per_turn: u32,
    images_per_second: Speeds,
    ratio: Ratio,
}

#[derive(Debug, Deserialize)]
struct Speeds {
    poseidon: f64,
    bare: f64,
}

#[derive(Debug, Deserialize)]
struct Ratio {
    median: f64,
    low: f64,
    high: f64,
}

/// Trains under Poseidon and bare in turns, in one process.
pub(super) fn run(lab: &Lab) -> Result<Finding> {
    let pairs = lab.steps(200, 10).to_string();
    let poseidon = environment::poseidon().display().to_string();
    let mut command = command(&[poseidon]);
    command.args(["bench", "overhead", "--model", "cifar10-quick", "--json", "--pairs", &pairs]);
    let printed = output_within(&mut command, LIMIT)?;
    let overhead = serde_json::from_str(&printed).context("poseidon bench overhead")?;
    fs::write(lab.recorded("overhead.json"), &printed)?;
    Ok(finding(&overhead))
}

fn finding(overhead: &Overhead) -> Finding {
    let Overhead { model, batch, pairs, steps_per_turn, images_per_second, ratio } = overhead;
    let Ratio { median, low, high } = ratio;
    let text = format!(
        "{model}, batch {batch}: one process trains under Poseidon and with the bare engine in turns of \
         {steps_per_turn} steps, {pairs} pairs of turns. Whatever else the machine does falls on both \
         alike; the ratio is the median over the pairs.\n\n\
         | | images/s |\n| --- | ---: |\n\
         | poseidon | {:.1} |\n| bare | {:.1} |\n\
         | poseidon / bare | {median:.4} (95%: {low:.4} to {high:.4}) |\n",
        images_per_second.poseidon, images_per_second.bare
    );
    let verdict = Verdict {
        target: format!("one worker: at least {TARGET} of the bare engine's images/s"),
        measured: format!("{median:.4} (95%: {low:.4} to {high:.4})"),
        met: Some(*median >= TARGET),
    };
    Finding { text, verdicts: vec![verdict] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_decides_and_the_interval_is_told() {
        let json = r#"{"model":"m","batch":10,"pairs":8,"steps_per_turn":5,"turns":[],
            "images_per_second":{"poseidon":99.0,"bare":100.0},
            "ratio":{"median":0.985,"low":0.98,"high":0.995}}"#;
        let finding = finding(&serde_json::from_str(json).unwrap());
        assert_eq!(finding.verdicts[0].measured, "0.9850 (95%: 0.9800 to 0.9950)");
        assert_eq!(finding.verdicts[0].met, Some(false));
        assert!(finding.text.contains("| bare | 100.0 |"), "{}", finding.text);
    }
}
