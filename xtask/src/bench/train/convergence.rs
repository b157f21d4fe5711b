//! Do four workers learn CIFAR-10 in as many epochs as one?

use super::lab::{Lab, Run};
use super::report::{Epoch, Report};
use super::{Finding, Verdict};
use crate::bench::charts::{self, Panel, Series};
use anyhow::{Context, Result};

/// Test accuracy to reach.
const ACCURACY: f64 = 0.70;

/// How much the number of epochs may differ.
const APART: f64 = 0.10;

/// One worker with the whole batch, and four that share it.
const CASES: [(u64, u64); 2] = [(1, 100), (4, 25)];

const IMAGES: u64 = 50_000;

/// Found by trying: with 0.05 and a warm-up of 100 steps, one worker needs half an epoch more.
const RULE: &str = "--lr 0.02 --optimizer sgd:momentum=0.9,weight-decay=0.001";

/// Trains CIFAR-10 quick with one worker and with four.
pub(super) fn run(lab: &Lab) -> Result<Finding> {
    let Some(task) = lab.on_cifar("cifar10-quick") else {
        let text = "Left out: it needs CIFAR-10, and no folder was given with --cifar.\n";
        return Ok(Finding { text: text.to_owned(), verdicts: Vec::new() });
    };
    let steps_per_epoch = IMAGES / (CASES[0].0 * CASES[0].1);
    let length = match lab.quick {
        true => "--steps 40".to_owned(),
        false => format!("--epochs {}", lab.epochs),
    };
    let settings = format!("{RULE} --schedule cosine:steps={}", lab.epochs * steps_per_epoch);
    let mut reports = Vec::new();
    for (workers, batch) in CASES {
        println!("{} with batch {batch} each, {length}", workers_are(workers));
        let words = format!("--workers {workers} --batch {batch} {settings} {length} --test epoch");
        let report = lab.train(&task, &words)?;
        for epoch in &report.epochs {
            println!(
                "  epoch {:>2}  loss {:.3}  test accuracy {:.2}%",
                epoch.epoch,
                epoch.train_loss,
                accuracy(epoch) * 100.0
            );
        }
        lab.keep(
            "convergence",
            &Run { case: &workers_are(workers), round: 1, report: &report, losses: None },
        )?;
        reports.push(report);
    }
    let csv = lab.recorded("convergence.csv");
    std::fs::write(&csv, csv_of(&reports)).with_context(|| format!("writing {}", csv.display()))?;
    charts::lines(&lab.recorded("convergence.svg"), &panels(&reports))?;
    let mut finding = finding(&reports);
    finding.text = format!(
        "CIFAR-10 quick on all of CIFAR-10, {settings}. Epochs until {:.0}% of the test images are right: the first one, and in \
         brackets where the line between it and the one before crosses.\n\n{}",
        ACCURACY * 100.0,
        finding.text
    );
    Ok(finding)
}

fn finding(reports: &[Report]) -> Finding {
    let mut text = "| | epochs to get there | best test accuracy | last | images/s |\n| --- | ---: | ---: | ---: | ---: |\n".to_owned();
    for report in reports {
        let (first, crossing) = (first(&report.epochs), crossing(&report.epochs));
        let reached = match first.zip(crossing) {
            Some((epoch, crossing)) => format!("{epoch} ({crossing:.2})"),
            None => "never".to_owned(),
        };
        text += &format!(
            "| {} with batch {} | {reached} | {:.2}% | {:.2}% | {:.0} |\n",
            workers_are(report.workers.into()),
            report.batch,
            best(report) * 100.0,
            report.epochs.last().map_or(0.0, accuracy) * 100.0,
            report.images_per_second
        );
    }
    text += "\n![curves](convergence.svg)\n";

    let at = |position: usize| reports.get(position).and_then(|report| crossing(&report.epochs));
    let ratio = at(0).zip(at(1)).map(|(one, four)| four / one);
    let four = reports.get(1).map(best);
    let verdicts = vec![
        Verdict {
            target: format!("four workers reach {:.0}% test accuracy", ACCURACY * 100.0),
            measured: four.map_or("-".to_owned(), |best| format!("{:.2}%", best * 100.0)),
            met: four.map(|best| best >= ACCURACY),
        },
        Verdict {
            target: format!("in as many epochs as one worker, within {:.0}%", APART * 100.0),
            measured: ratio.map_or("never".to_owned(), |ratio| format!("{ratio:.3}x")),
            met: Some(ratio.is_some_and(|ratio| (ratio - 1.0).abs() <= APART)),
        },
    ];
    Finding { text, verdicts }
}

/// The first epoch with enough accuracy, counted from 1.
fn first(epochs: &[Epoch]) -> Option<u64> {
    epochs.iter().find(|epoch| accuracy(epoch) >= ACCURACY).map(|epoch| epoch.epoch)
}

/// Where the curve crosses: between the last epoch without and the first with enough accuracy.
fn crossing(epochs: &[Epoch]) -> Option<f64> {
    let at = epochs.iter().position(|epoch| accuracy(epoch) >= ACCURACY)?;
    let Some(before) = at.checked_sub(1) else { return Some(epochs[0].epoch as f64) };
    let (low, high) = (accuracy(&epochs[before]), accuracy(&epochs[at]));
    Some(epochs[before].epoch as f64 + (ACCURACY - low) / (high - low))
}

fn accuracy(epoch: &Epoch) -> f64 {
    epoch.test_accuracy.unwrap_or(0.0)
}

fn best(report: &Report) -> f64 {
    report.epochs.iter().map(accuracy).fold(0.0, f64::max)
}

fn workers_are(workers: u64) -> String {
    if workers == 1 { "1 worker".to_owned() } else { format!("{workers} workers") }
}

fn csv_of(reports: &[Report]) -> String {
    let mut csv =
        "workers,batch,epoch,train_loss,train_accuracy,test_accuracy,seconds\n".to_owned();
    for report in reports {
        for epoch in &report.epochs {
            csv += &format!(
                "{},{},{},{:.6},{:.6},{:.4},{:.3}\n",
                report.workers,
                report.batch,
                epoch.epoch,
                epoch.train_loss,
                epoch.train_accuracy,
                accuracy(epoch),
                epoch.seconds
            );
        }
    }
    csv
}

fn panels(reports: &[Report]) -> [Panel; 2] {
    let panel = |title: &str, y: &str, of: fn(&Epoch) -> f64| Panel {
        title: title.to_owned(),
        x: "epoch".to_owned(),
        y: y.to_owned(),
        logarithmic: false,
        series: reports
            .iter()
            .zip([charts::ORANGE, charts::BLUE])
            .map(|(report, colour)| Series {
                label: format!(
                    "{} with batch {}",
                    workers_are(report.workers.into()),
                    report.batch
                ),
                colour,
                points: report.epochs.iter().map(|epoch| (epoch.epoch as f64, of(epoch))).collect(),
            })
            .collect(),
    };
    [
        panel("Training", "mean loss of the epoch", |epoch| epoch.train_loss),
        panel("Test", "accuracy in %", |epoch| accuracy(epoch) * 100.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    fn run(workers: u16, accuracies: &[f64]) -> Report {
        let epochs = accuracies.iter().zip(1..).map(|(&accuracy, epoch)| Epoch {
            epoch,
            seconds: 1.0,
            train_loss: 1.0,
            train_accuracy: accuracy,
            test_accuracy: Some(accuracy),
        });
        Report { workers, epochs: epochs.collect(), ..report() }
    }

    fn met(one: &[f64], four: &[f64]) -> [Option<bool>; 2] {
        let verdicts = finding(&[run(1, one), run(4, four)]).verdicts;
        [verdicts[0].met, verdicts[1].met]
    }

    #[test]
    fn curves_cross_between_epochs() {
        let epochs = run(1, &[0.5, 0.6, 0.8]).epochs;
        assert_eq!(first(&epochs), Some(3));
        assert!((crossing(&epochs).unwrap() - 2.5).abs() < 1e-9);
        assert_eq!(crossing(&run(1, &[0.9]).epochs), Some(1.0));
        assert_eq!(crossing(&run(1, &[0.5, 0.69]).epochs), None);
    }

    #[test]
    fn four_workers_have_to_get_there_and_in_time() {
        assert_eq!(met(&[0.5, 0.6, 0.8], &[0.5, 0.62, 0.8]), [Some(true), Some(true)]);
        assert_eq!(met(&[0.5, 0.71, 0.8], &[0.5, 0.6, 0.8]), [Some(true), Some(false)]);
        assert_eq!(met(&[0.5, 0.6, 0.8], &[0.5, 0.6, 0.69]), [Some(false), Some(false)]);
    }

    #[test]
    fn csv_has_a_line_per_epoch_and_case() {
        let csv = csv_of(&[run(1, &[0.5, 0.6]), run(4, &[0.4, 0.7])]);
        assert_eq!(csv.lines().count(), 5);
        assert_eq!(csv.lines().last().unwrap(), "4,8,2,1.000000,0.700000,0.7000,1.000");
    }
}
