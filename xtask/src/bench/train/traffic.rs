//! Does every node send and receive as much as every other, and as much as the formula says?

use super::formula::Setting;
use super::hybrid::{self, InCluster};
use super::lab::Lab;
use super::report::{Node, Report};
use super::{Finding, Verdict};
use anyhow::Result;

/// How much more than the idlest the busiest node may send, or receive.
const SPREAD: f64 = 0.02;

/// How far from the formula any node may be: headers are measured, but not in the formula.
const OFF: f64 = 0.03;

/// Looks at `runs`, or if there are none yet makes one of every case.
pub(super) fn run(lab: &Lab, runs: &mut Vec<InCluster>) -> Result<Finding> {
    if runs.is_empty() {
        hybrid::measure(lab, "traffic", 1, runs)?;
    }
    Ok(finding(runs))
}

fn finding(runs: &[InCluster]) -> Finding {
    let mut text = "Bytes of a node per step, headers included, beside those the formula counts for its layers: through \
        servers 8·len·(P-1)/P bytes, as factors 4·(P-1)·K·(M+N). Over all \
        rounds.\n\n\
        | case | formula | least sent | most sent | least received | most received | busiest / idlest | furthest from the formula |\n\
        | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        .to_owned();
    let mut worst = Extremes::default();
    for case in hybrid::cases() {
        let reports: Vec<_> =
            runs.iter().filter(|run| run.case == case).map(|run| &run.report).collect();
        let Some(first) = reports.first() else { continue };
        let extremes = reports.iter().map(|report| Extremes::of(report));
        let extremes = extremes.fold(Extremes::default(), Extremes::worse);
        let per_step = |of: fn(&Node) -> u64| {
            let counts = reports.iter().flat_map(|report| {
                report.nodes.iter().map(move |node| of(node) as f64 / report.steps as f64)
            });
            let (least, most) = range(counts);
            format!("{least:.0} | {most:.0}")
        };
        text += &format!(
            "| {} | {:.0} | {} | {} | {:+.2}% | {:+.2}% |\n",
            case.name(),
            Setting::of(first).total(&first.layers),
            per_step(|node| node.bytes_sent),
            per_step(|node| node.bytes_received),
            extremes.spread * 100.0,
            extremes.off * 100.0
        );
        worst = worst.worse(extremes);
    }
    let measured = !runs.is_empty();
    let verdict = |target: String, value: f64, limit: f64| Verdict {
        target,
        measured: if measured { format!("{:.2}%", value.abs() * 100.0) } else { "-".to_owned() },
        met: measured.then_some(value.abs() <= limit),
    };
    let verdicts = vec![
        verdict(
            format!(
                "every node's traffic within {:.0}% of every other's, in every run",
                SPREAD * 100.0
            ),
            worst.spread,
            SPREAD,
        ),
        verdict(
            format!(
                "every node's traffic within {:.0}% of the formula's, in every run",
                OFF * 100.0
            ),
            worst.off,
            OFF,
        ),
    ];
    Finding { text, verdicts }
}

/// How uneven a run is, and how far from the formula; the worse of both directions.
#[derive(Clone, Copy, Default)]
struct Extremes {
    spread: f64,
    /// Signed.
    off: f64,
}

impl Extremes {
    fn of(report: &Report) -> Self {
        let expected = Setting::of(report).total(&report.layers) * report.steps as f64;
        let sent = report.nodes.iter().map(|node| node.bytes_sent as f64);
        let received = report.nodes.iter().map(|node| node.bytes_received as f64);
        let one = |counts: Vec<f64>| {
            let (least, most) = range(counts.into_iter());
            let (below, above) = (least / expected - 1.0, most / expected - 1.0);
            let off = if below.abs() > above.abs() { below } else { above };
            Self { spread: most / least - 1.0, off }
        };
        one(sent.collect()).worse(one(received.collect()))
    }

    fn worse(self, other: Self) -> Self {
        let off = if other.off.abs() > self.off.abs() { other.off } else { self.off };
        Self { spread: self.spread.max(other.spread), off }
    }
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, 0.0), |(least, most), value| (value.min(least), value.max(most)))
}

#[cfg(test)]
mod tests {
    use super::super::hybrid::tests::round;
    use super::*;

    /// Every node at `share` of the formula, but for one that receives `more` times that.
    fn runs(share: f64, more: f64) -> Vec<InCluster> {
        let mut runs = round(3.0);
        for run in &mut runs {
            let expected = Setting::of(&run.report).total(&run.report.layers);
            let bytes = (expected * run.report.steps as f64 * share) as u64;
            for node in &mut run.report.nodes {
                (node.bytes_sent, node.bytes_received) = (bytes, bytes);
            }
            run.report.nodes[1].bytes_received = (bytes as f64 * more) as u64;
        }
        runs
    }

    fn verdicts(runs: &[InCluster]) -> [Option<bool>; 2] {
        let verdicts = finding(runs).verdicts;
        [verdicts[0].met, verdicts[1].met]
    }

    #[test]
    fn evenness_and_the_formula_are_judged_apart() {
        assert_eq!(verdicts(&runs(1.01, 1.0)), [Some(true), Some(true)]);
        assert_eq!(verdicts(&runs(1.0, 1.025)), [Some(false), Some(true)]);
        assert_eq!(verdicts(&runs(1.04, 1.0)), [Some(true), Some(false)]);
        assert_eq!(verdicts(&runs(0.96, 1.0)), [Some(true), Some(false)]);
        assert_eq!(verdicts(&[]), [None, None]);
    }

    #[test]
    fn every_case_has_a_row() {
        let text = finding(&runs(1.01, 1.0)).text;
        assert_eq!(
            text.lines().filter(|line| line.contains("batch")).count(),
            hybrid::cases().len()
        );
        assert!(text.contains("+0.00% | +1.00% |"), "{text}");
    }
}
