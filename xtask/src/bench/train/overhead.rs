//! What Poseidon costs one worker that has nobody to talk to.

use super::lab::{Lab, Run};
use super::report::Report;
use super::{Finding, Verdict};
use crate::bench::measurement::median;
use anyhow::Result;

/// Part of the bare engine's images per second that is left.
const TARGET: f64 = 0.99;

const BATCH: u64 = 100;

/// For every round of the other parts: a hundredth is hard to see on a machine that does other things.
const ROUNDS: usize = 2;

/// Compares `--workers 1` and `--bare`, in turn.
pub(super) fn run(lab: &Lab) -> Result<Finding> {
    let task = lab.on_images("cifar10-quick")?;
    let steps = lab.steps(60, 10);
    let train = |case: &str, round: usize, words: &str| -> Result<Report> {
        let words = format!("{words} --batch {BATCH} --steps {steps} --lr 0.001 --test never");
        let report = lab.train(&task, &words)?;
        println!("round {round}  {case:<9} {:.1} images/s", report.images_per_second);
        lab.keep("overhead", &Run { case, round, report: &report, losses: None })?;
        Ok(report)
    };
    let mut rounds = Vec::new();
    for round in 1..=ROUNDS * lab.rounds {
        let poseidon = || train("poseidon", round, "--workers 1");
        let bare = || train("bare", round, "--bare");
        // Each is first as often as the other, for the one that follows a warm machine.
        rounds.push(if round % 2 == 1 {
            let poseidon = poseidon()?;
            (poseidon, bare()?)
        } else {
            let bare = bare()?;
            (poseidon()?, bare)
        });
    }
    Ok(finding(lab.images_are(), &rounds))
}

/// `rounds` are pairs of Poseidon and the bare engine.
fn finding(images: &str, rounds: &[(Report, Report)]) -> Finding {
    let speed = |report: &Report| report.images_per_second;
    let step = |report: &Report| report.step_seconds.median * 1e3;
    let ratio = |of: fn(&Report) -> f64| {
        median(rounds.iter().map(|(poseidon, bare)| of(poseidon) / of(bare)).collect())
    };
    let steps = rounds.first().map_or(0, |(poseidon, _)| poseidon.steps);
    let mut text = format!(
        "CIFAR-10 quick, batch {BATCH}, {steps} steps on {images}; {} round(s) in which one worker under Poseidon and \
         the bare engine alternate. Ratios are those of the rounds, and of these the median.\n\n\
         | | images/s | median step in ms |\n| --- | ---: | ---: |\n",
        rounds.len()
    );
    let shown = |value: Option<f64>, digits: usize| {
        value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
    };
    let who = [
        ("poseidon", rounds.iter().map(|round| &round.0).collect::<Vec<_>>()),
        ("bare", rounds.iter().map(|round| &round.1).collect()),
    ];
    for (name, runs) in &who {
        let middle = |of: fn(&Report) -> f64| median(runs.iter().map(|run| of(run)).collect());
        text += &format!("| {name} | {} | {} |\n", shown(middle(speed), 1), shown(middle(step), 2));
    }
    let speeds = ratio(speed);
    text += &format!("| poseidon / bare | {} | {} |\n", shown(speeds, 4), shown(ratio(step), 4));
    let verdict = Verdict {
        target: format!("one worker: at least {TARGET} of the bare engine's images/s"),
        measured: shown(speeds, 4),
        met: speeds.map(|ratio| ratio >= TARGET),
    };
    Finding { text, verdicts: vec![verdict] }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    fn at(images_per_second: f64) -> Report {
        Report { images_per_second, ..report() }
    }

    #[test]
    fn the_median_of_the_rounds_ratios_decides() {
        // A slow minute falls on both of a round.
        let rounds = [(at(995.0), at(1000.0)), (at(497.0), at(500.0)), (at(900.0), at(1000.0))];
        let finding = finding("images", &rounds);
        assert_eq!(finding.verdicts[0].measured, "0.9940");
        assert_eq!(finding.verdicts[0].met, Some(true));
        assert!(finding.text.contains("| poseidon | 900.0 | 500.00 |"), "{}", finding.text);
    }
}
