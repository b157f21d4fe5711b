//! How far parameters are from stock DDP's.

use super::lab::Lab;
use crate::bench::finding::Finding;
use crate::bench::targets::Verdict;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Relative to the largest value of a parameter.
const TARGET: f64 = 1e-5;
const STEPS: u32 = 50;
/// Where state is; `server` is only measured where the package knows it.
const UPDATES: [&str; 2] = ["worker", "server"];

/// A line of `torch_numerics.py`.
#[derive(Debug, Deserialize, Serialize)]
struct Case {
    model: String,
    optimizer: String,
    scheme: String,
    update: String,
    steps: u32,
    ranks: u32,
    difference: f64,
}

/// Trains every case beside stock DDP on this machine.
pub(super) fn run(lab: &Lab) -> Result<Finding> {
    let steps = if lab.quick { 5 } else { STEPS }.to_string();
    let printed = lab.script("torch_numerics.py", &["--ranks", "4", "--steps", &steps])?;
    let mut cases = Vec::new();
    for line in printed.lines().filter(|line| line.starts_with('{')) {
        let case: Case = serde_json::from_str(line).with_context(|| line.to_owned())?;
        lab.keep("numerics", &case)?;
        cases.push(case);
    }
    Ok(finding(&cases))
}

fn finding(cases: &[Case]) -> Finding {
    let (ranks, steps) = cases.first().map_or((0, 0), |case| (case.ranks, case.steps));
    let mut text = format!(
        "Parameters after {steps} steps on {ranks} ranks: the largest difference to stock DDP's on Gloo, relative to the \
         largest value of each parameter, over all ranks.\n\n\
         | model | optimizer | scheme | update | difference |\n| --- | --- | --- | --- | ---: |\n"
    );
    for Case { model, optimizer, scheme, update, difference, .. } in cases {
        text += &format!("| {model} | {optimizer} | {scheme} | {update} | {difference:.1e} |\n");
    }
    let verdict = |update: &str| {
        let of = cases.iter().filter(|case| case.update == update);
        let worst = of.map(|case| case.difference).reduce(f64::max);
        Verdict {
            target: format!(
                "update {update}: parameters equal stock DDP's within {TARGET:.0e} in every case"
            ),
            measured: worst.map_or("-".to_owned(), |worst| format!("{worst:.1e}")),
            met: worst.map(|worst| worst <= TARGET),
        }
    };
    Finding { text, verdicts: UPDATES.iter().map(|update| verdict(update)).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_case_of_each_update_decides() {
        let case = |scheme: &str, difference| Case {
            model: "cnn".to_owned(),
            optimizer: "sgd".to_owned(),
            scheme: scheme.to_owned(),
            update: "worker".to_owned(),
            steps: 50,
            ranks: 4,
            difference,
        };
        let verdicts = finding(&[case("ps", 2e-7), case("sfb", 2e-5)]).verdicts;
        assert_eq!((verdicts[0].met, verdicts[0].measured.as_str()), (Some(false), "2.0e-5"));
        assert_eq!(verdicts[1].met, None);
        assert_eq!(finding(&[case("ps", 2e-7)]).verdicts[0].met, Some(true));
    }
}
