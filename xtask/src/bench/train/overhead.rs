//! What Poseidon costs one worker that has nobody to talk to.

use super::lab::{Lab, Run};
use super::report::Report;
use super::{Finding, Verdict};
use crate::bench::measurement::median;
use anyhow::Result;

/// Part of the bare engine's images per second that is left.
const TARGET: f64 = 0.99;

const BATCH: u64 = 100;

/// One round: each twice, in an order in which a drift, or what comes from being first, falls on both alike.
const TURNS: [Who; 4] = [Who::Poseidon, Who::Bare, Who::Bare, Who::Poseidon];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Poseidon,
    Bare,
}

/// Compares `--workers 1` and `--bare`, in turn.
pub(super) fn run(lab: &Lab) -> Result<Finding> {
    let task = lab.on_images("cifar10-quick")?;
    let steps = lab.steps(60, 10);
    let mut rounds = Vec::new();
    for round in 1..=lab.rounds {
        let mut runs = Vec::new();
        for turn in 0..TURNS.len() {
            // Every other round is bare, Poseidon, Poseidon, bare.
            let who = TURNS[(turn + 2 * ((round - 1) % 2)) % TURNS.len()];
            let (case, words) = match who {
                Who::Poseidon => ("poseidon", "--workers 1"),
                Who::Bare => ("bare", "--bare"),
            };
            let words = format!("{words} --batch {BATCH} --steps {steps} --lr 0.001 --test never");
            let report = lab.train(&task, &words)?;
            println!("round {round}  {case:<9} {:.1} images/s", report.images_per_second);
            lab.keep("overhead", &Run { case, round, report: &report, losses: None })?;
            runs.push((who, report));
        }
        rounds.push(runs);
    }
    Ok(finding(lab.images_are(), &rounds))
}

/// `rounds` are the runs of each.
fn finding(images: &str, rounds: &[Vec<(Who, Report)>]) -> Finding {
    let mean = |round: &[(Who, Report)], who: Who, of: fn(&Report) -> f64| {
        let values: Vec<_> =
            round.iter().filter(|run| run.0 == who).map(|run| of(&run.1)).collect();
        values.iter().sum::<f64>() / values.len() as f64
    };
    let middle = |who: Who, of: fn(&Report) -> f64| {
        median(rounds.iter().map(|round| mean(round, who, of)).collect())
    };
    let ratios = |of: fn(&Report) -> f64| -> Vec<f64> {
        let ratio = |round: &Vec<_>| mean(round, Who::Poseidon, of) / mean(round, Who::Bare, of);
        rounds.iter().map(ratio).collect()
    };
    let speed = |report: &Report| report.images_per_second;
    let step = |report: &Report| report.step_seconds.median * 1e3;
    let undisturbed = |report: &Report| report.step_seconds.p10 * 1e3;
    let steps = rounds.iter().flatten().next().map_or(0, |(_, report)| report.steps);
    let mut text = format!(
        "CIFAR-10 quick, batch {BATCH}, {steps} steps on {images}; {} round(s) in which one worker under Poseidon and \
         the bare engine take turns, each twice. Means of a round, and of the rounds the median. A tenth of \
         the steps is as fast as the last column says, or faster: it tells the least of what else the machine does.\n\n\
         | | images/s | median step in ms | 10% quantile in ms |\n| --- | ---: | ---: | ---: |\n",
        rounds.len()
    );
    let shown = |value: Option<f64>, digits: usize| {
        value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
    };
    for (name, who) in [("poseidon", Who::Poseidon), ("bare", Who::Bare)] {
        text += &format!(
            "| {name} | {} | {} | {} |\n",
            shown(middle(who, speed), 1),
            shown(middle(who, step), 2),
            shown(middle(who, undisturbed), 2)
        );
    }
    let speeds = median(ratios(speed));
    text += &format!(
        "| poseidon / bare | {} | {} | {} |\n",
        shown(speeds, 4),
        shown(median(ratios(step)), 4),
        shown(median(ratios(undisturbed)), 4)
    );
    // A hundredth is only seen where rounds differ by less.
    let (least, most) = ratios(speed)
        .into_iter()
        .fold((f64::INFINITY, 0.0_f64), |(least, most), ratio| (least.min(ratio), most.max(ratio)));
    let verdict = Verdict {
        target: format!("one worker: at least {TARGET} of the bare engine's images/s"),
        measured: format!("{}; rounds from {least:.3} to {most:.3}", shown(speeds, 4)),
        met: speeds.map(|ratio| ratio >= TARGET),
    };
    Finding { text, verdicts: vec![verdict] }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    /// A round with these speeds, in the order of [`TURNS`].
    fn round(speeds: [f64; 4]) -> Vec<(Who, Report)> {
        let runs = TURNS.iter().zip(speeds);
        runs.map(|(who, speed)| (*who, Report { images_per_second: speed, ..report() })).collect()
    }

    #[test]
    fn the_median_of_the_rounds_decides() {
        // A slow minute falls on both, a drift through a round cancels out.
        let slow = round([497.0, 500.0, 500.0, 497.0]);
        let drift = round([970.0, 990.0, 1010.0, 1030.0]);
        let disturbed = round([900.0, 1000.0, 1000.0, 1000.0]);
        let finding = finding("images", &[slow, drift, disturbed]);
        assert_eq!(finding.verdicts[0].measured, "0.9940; rounds from 0.950 to 1.000");
        assert_eq!(finding.verdicts[0].met, Some(true));
        assert!(
            finding.text.contains("| poseidon | 950.0 | 500.00 | 400.00 |"),
            "{}",
            finding.text
        );
    }
}
