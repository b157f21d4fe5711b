//! How far training under Poseidon is from stock DDP's.

use super::lab::Lab;
use crate::bench::finding::Finding;
use crate::bench::targets::Verdict;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// Of the norm of the difference by the norm of the parameters, and of losses.
const TARGET: f64 = 1e-5;
const STEPS: u64 = 50;

/// A line of `torch_numerics.py`.
#[derive(Debug, Deserialize, Serialize)]
struct Case {
    model: String,
    optimizer: String,
    scheme: String,
    update: String,
    habit: String,
    steps: u64,
    ranks: u64,
    #[serde(flatten)]
    ended: Ended,
}

/// How a case ended.
#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged)]
enum Ended {
    /// Differences: of parameters by their largest value, of parameters by norm, of losses.
    Trained { difference: f64, norm: f64, loss: f64 },
    /// This machine cannot run it, and why.
    Skipped { skipped: String },
    /// It went wrong, and how.
    Failed { failed: String },
}

/// Trains every case beside stock DDP, several ranks on this machine.
pub(super) fn run(lab: &Lab) -> Result<Finding> {
    let steps = lab.steps.unwrap_or(if lab.quick { 5 } else { STEPS }).to_string();
    let ranks = if lab.quick { "2" } else { "4" };
    let mut cases = Vec::new();
    let words = ["--habits", "--ranks", ranks, "--steps", &steps];
    let ended = lab.script("torch_numerics.py", &words, |line| {
        let case: Case = serde_json::from_str(line).with_context(|| line.to_owned())?;
        lab.keep("numerics", &case)?;
        cases.push(case);
        Ok(())
    });
    if cases.is_empty() {
        ended?;
        bail!("no case was trained");
    }
    let mut finding = finding(&cases);
    if let Err(error) = ended {
        eprintln!("numerics: {error:#}");
        let story = lab.without_folders(&format!("{error:#}"));
        finding.text += &format!("\nCut short: {}\n", story.lines().last().unwrap_or_default());
        finding.verdicts.iter_mut().for_each(|verdict| verdict.met = Some(false));
    }
    Ok(finding)
}

fn finding(cases: &[Case]) -> Finding {
    let (ranks, steps) = cases.first().map_or((0, 0), |case| (case.ranks, case.steps));
    let mut text = format!(
        "{steps} steps on {ranks} ranks beside stock DDP on Gloo, with TF32 off and deterministic algorithms. \
         ‖Δ‖/‖w‖ is the norm of the difference of all parameters by their norm; `loss` is the largest relative \
         difference of a step's loss; both are the largest of any rank.\n\n\
         | model | habit | optimizer | scheme | update | ‖Δ‖/‖w‖ | loss |\n\
         | --- | --- | --- | --- | --- | ---: | ---: |\n"
    );
    for Case { model, optimizer, scheme, update, habit, ended, .. } in cases {
        let (norm, loss) = match ended {
            Ended::Trained { norm, loss, .. } => (format!("{norm:.1e}"), format!("{loss:.1e}")),
            Ended::Skipped { skipped } => (format!("skipped: {skipped}"), "-".to_owned()),
            Ended::Failed { failed } => (format!("**failed**: {failed}"), "-".to_owned()),
        };
        text += &format!(
            "| {model} | {habit} | {optimizer} | {scheme} | {update} | {norm} | {loss} |\n"
        );
    }
    let verdict = |target: &str, wanted: &dyn Fn(&Case) -> bool| {
        let of: Vec<_> = cases.iter().filter(|case| wanted(case)).collect();
        let failed = of.iter().filter(|case| matches!(case.ended, Ended::Failed { .. })).count();
        let worst = of.iter().filter_map(|case| case.ended.worst()).reduce(f64::max);
        let measured = match (worst, failed) {
            (None, 0) => "-".to_owned(),
            (None, failed) => format!("{failed} failed"),
            (Some(worst), 0) => format!("{worst:.1e}"),
            (Some(worst), failed) => format!("{worst:.1e}, {failed} failed"),
        };
        let met = if failed > 0 { Some(false) } else { worst.map(|worst| worst <= TARGET) };
        let target =
            format!("{target}: parameters and losses equal stock DDP's within {TARGET:.0e}");
        Verdict { target, measured, met }
    };
    let mut verdicts = vec![
        verdict("update worker", &|case| case.habit == "plain" && case.update == "worker"),
        verdict("update server", &|case| case.habit == "plain" && case.update == "server"),
    ];
    let mut habits: Vec<&str> = Vec::new();
    for case in cases.iter().filter(|case| case.habit != "plain") {
        if !habits.contains(&case.habit.as_str()) {
            habits.push(&case.habit);
        }
    }
    verdicts.extend(habits.iter().map(|habit| verdict(habit, &|case| case.habit == *habit)));
    Finding { text, verdicts }
}

impl Ended {
    fn worst(&self) -> Option<f64> {
        match self {
            Self::Trained { norm, loss, .. } => Some(norm.max(*loss)),
            Self::Skipped { .. } | Self::Failed { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(update: &str, habit: &str, ended: &str) -> Case {
        let json = format!(
            r#"{{"model": "cnn", "optimizer": "sgd", "scheme": "ps", "update": "{update}", "habit": "{habit}",
               "steps": 50, "ranks": 4, {ended}}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    #[test]
    fn the_worst_case_decides_and_skipped_ones_do_not() {
        let cases = [
            case("worker", "plain", r#""difference": 1, "norm": 1e-7, "loss": 2e-7"#),
            case("worker", "plain", r#""difference": 1, "norm": 1e-7, "loss": 2e-5"#),
            case("worker", "streams", r#""skipped": "needs a GPU""#),
            case("worker", "compile", r#""failed": "rank 0: no""#),
            case("worker", "clipping", r#""difference": 1, "norm": 1e-7, "loss": 0"#),
        ];
        let finding = finding(&cases);
        let judged: Vec<_> = finding.verdicts.iter().map(|verdict| verdict.met).collect();
        assert_eq!(judged, [Some(false), None, None, Some(false), Some(true)]);
        assert_eq!(finding.verdicts[0].measured, "2.0e-5");
        assert!(finding.text.contains("| skipped: needs a GPU | - |"), "{}", finding.text);
    }
}
