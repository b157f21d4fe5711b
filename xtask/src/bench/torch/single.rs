//! What poseidon.torch costs a single process.

use super::lab::Lab;
use crate::bench::finding::Finding;
use crate::bench::targets::Verdict;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Part of plain PyTorch's speed that is left.
const TARGET: f64 = 0.99;

/// Nets, how many steps a turn has, and how many pairs of turns there are: a turn takes about 0.2 s.
const NETS: [(&str, u32, u32); 2] = [("cnn", 6, 100), ("fc", 1, 100)];

/// What `torch_single.py` prints.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Turns {
    net: String,
    batch: u32,
    pairs: u32,
    steps_per_turn: u32,
    samples_per_second: Speeds,
    ratio: Ratio,
    turns: Vec<Pair>,
}

#[derive(Debug, Deserialize, Serialize)]
struct Speeds {
    plain: f64,
    poseidon: f64,
}

#[derive(Debug, Deserialize, Serialize)]
struct Ratio {
    median: f64,
    low: f64,
    high: f64,
}

/// Seconds of two turns, one after the other.
#[derive(Debug, Deserialize, Serialize)]
struct Pair {
    plain: f64,
    poseidon: f64,
}

/// Trains under Poseidon and plainly in turns, in one process.
pub(super) fn run(lab: &Lab) -> Result<Finding> {
    let mut all = Vec::new();
    for (net, steps, pairs) in NETS {
        let pairs = if lab.quick { 10 } else { pairs };
        let (steps, pairs) = (steps.to_string(), pairs.to_string());
        let words = ["--net", net, "--steps", &steps, "--pairs", &pairs];
        let turns = Turns::parse(&lab.script("torch_single.py", &words)?)?;
        lab.keep("single", &turns)?;
        all.push(turns);
    }
    Ok(finding(&all))
}

impl Turns {
    /// Reads what `torch_single.py` has printed.
    pub(crate) fn parse(printed: &str) -> Result<Self> {
        let turns: Self = serde_json::from_str(printed).context("torch_single.py")?;
        println!("{}: {}", turns.net, shown(&turns.ratio));
        Ok(turns)
    }
}

pub(crate) fn finding(all: &[Turns]) -> Finding {
    let mut text = "One process on one thread trains a net under poseidon.torch and plainly, in turns. \
        Whatever else the machine does falls on both alike; the ratio is the median over the pairs of turns, with the \
        interval that has it with 95% confidence.\n\n\
        | net | batch | pairs of turns | steps in a turn | plain, samples/s | poseidon.torch, samples/s | ratio |\n\
        | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        .to_owned();
    let mut verdicts = Vec::new();
    for turns in all {
        let Turns { net, batch, pairs, steps_per_turn, samples_per_second, ratio, .. } = turns;
        let Speeds { plain, poseidon } = samples_per_second;
        text += &format!(
            "| {net} | {batch} | {pairs} | {steps_per_turn} | {plain:.1} | {poseidon:.1} | {} |\n",
            shown(ratio)
        );
        verdicts.push(Verdict {
            target: format!("{net}, single process: at least {TARGET} of plain PyTorch's speed"),
            measured: shown(ratio),
            met: Some(ratio.median >= TARGET),
        });
    }
    Finding { text, verdicts }
}

fn shown(Ratio { median, low, high }: &Ratio) -> String {
    format!("{median:.4} (95%: {low:.4} to {high:.4})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_decides_and_the_interval_is_told() {
        let json = r#"{"net": "cnn", "batch": 32, "pairs": 8, "steps_per_turn": 3, "turns": [],
            "samples_per_second": {"plain": 100.0, "poseidon": 99.0},
            "ratio": {"median": 0.985, "low": 0.98, "high": 0.995}}"#;
        let finding = finding(&[serde_json::from_str(json).unwrap()]);
        assert_eq!(finding.verdicts[0].measured, "0.9850 (95%: 0.9800 to 0.9950)");
        assert_eq!(finding.verdicts[0].met, Some(false));
        assert!(finding.text.contains("| cnn | 32 | 8 | 3 | 100.0 | 99.0 |"), "{}", finding.text);
    }
}
