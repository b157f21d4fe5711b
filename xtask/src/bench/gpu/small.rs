//! The parts that are one script each.

use super::Device;
use super::lab::Lab;
use crate::bench::finding::Finding;
use crate::bench::targets::Verdict;
use crate::bench::torch::single::{self, Turns};
use crate::command::{command, lines_within, works};
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::env;
use std::path::Path;
use std::time::Duration;

/// Nets of the single part. A turn has five steps: about 0.1 s on a fast GPU. The interval of 60 pairs was
/// 6% wide there, which cannot tell 1%.
const SINGLE: [&str; 2] = ["resnet50", "gpt2"];
const STEPS: &str = "5";
const PAIRS: u64 = 300;
const QUICK_PAIRS: u64 = 10;

/// Part of the speed of torch's pinned copies that ours have to reach.
const COPIES: f64 = 0.9;

/// What needs a GPU, and takes a minute or two.
const TESTS: &str = "bindings/python/tests/test_gpu.py";
const TESTS_LIMIT: Duration = Duration::from_secs(600);
/// What stands in for pytest where there is none.
const PLAIN: &str = "bench/peers/plain";

/// One process under Poseidon beside plain PyTorch.
pub(super) fn single(lab: &Lab) -> Result<Finding> {
    let nets =
        if lab.nets.is_empty() { SINGLE.map(str::to_owned).to_vec() } else { lab.nets.clone() };
    let pairs = if lab.quick { QUICK_PAIRS } else { PAIRS }.to_string();
    let mut all = Vec::new();
    for net in &nets {
        let words = ["--net", net, "--steps", STEPS, "--pairs", &pairs];
        lab.script("torch_single.py", &words, |line| {
            let turns = Turns::parse(line)?;
            lab.keep("single", &turns)?;
            all.push(turns);
            Ok(())
        })?;
    }
    if all.len() != nets.len() {
        bail!("{} of {} nets were measured", all.len(), nets.len());
    }
    Ok(single::finding(&all))
}

/// A line of `torch_copies.py`: bytes per second.
#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged)]
enum Copies {
    Skipped { skipped: String },
    Measured { direction: String, bytes: u64, pinned: f64, pageable: f64, ours: Option<f64> },
}

/// Copies between the host's memory and the GPU's.
pub(super) fn copies(lab: &Lab) -> Result<Finding> {
    let mut all = Vec::new();
    lab.script("torch_copies.py", &[], |line| {
        let copies: Copies = serde_json::from_str(line)?;
        lab.keep("copies", &copies)?;
        all.push(copies);
        Ok(())
    })?;
    Ok(copies_finding(&all))
}

fn copies_finding(all: &[Copies]) -> Finding {
    let mut text = "GB/s of copies between the host's memory and the GPU's, 256 MiB at a time. Torch copies from and to \
        pinned and pageable memory; ours is the copier of sessions.\n\n\
        | direction | torch, pinned | torch, pageable | ours |\n| --- | ---: | ---: | ---: |\n"
        .to_owned();
    let mut verdicts = Vec::new();
    for copies in all {
        let (direction, pinned, pageable, ours) = match copies {
            Copies::Skipped { skipped } => {
                return Finding { text: format!("Not measured: {skipped}.\n"), verdicts };
            }
            Copies::Measured { direction, pinned, pageable, ours, .. } => {
                (direction, pinned, pageable, ours)
            }
        };
        let shown = ours.map_or("not timed".to_owned(), |ours| format!("{:.1}", ours / 1e9));
        text +=
            &format!("| {direction} | {:.1} | {:.1} | {shown} |\n", pinned / 1e9, pageable / 1e9);
        let part = ours.map(|ours| ours / pinned);
        verdicts.push(Verdict {
            target: format!("copies {direction}: at least {COPIES} of torch's pinned speed"),
            measured: part.map_or("-".to_owned(), |part| format!("{part:.2}")),
            met: part.map(|part| part >= COPIES),
        });
    }
    Finding { text, verdicts }
}

/// Tests that need a GPU.
pub(super) fn tests(lab: &Lab) -> Result<Finding> {
    let mut run = command(&[lab.python(), "-m", "pytest", "-q", "-rs", TESTS]);
    if !works(&[lab.python(), "-c", "import pytest"]) {
        let path = env::var_os("PYTHONPATH").unwrap_or_default();
        let plain = Path::new(PLAIN).canonicalize()?;
        let folders = [plain].into_iter().chain(env::split_paths(&path));
        run.env("PYTHONPATH", env::join_paths(folders)?);
    }
    let mut lines = Vec::new();
    let ended = lines_within(&mut run, TESTS_LIMIT, |line| {
        println!("{line}");
        lines.push(lab.without_folders(line));
        Ok(())
    });
    let last = lines.iter().rfind(|line| !line.trim().is_empty()).cloned().unwrap_or_default();
    if lines.is_empty() {
        ended?;
        bail!("the tests said nothing");
    }
    lab.keep("tests", &serde_json::json!({ "lines": lines }))?;
    Ok(tests_finding(&last, ended.is_ok(), lab.device))
}

fn tests_finding(last: &str, passed: bool, device: Device) -> Finding {
    let verdict = Verdict {
        target: format!("{TESTS} passes"),
        measured: last.trim_matches(['=', ' ']).to_owned(),
        // Without a GPU they are skipped, which shows nothing.
        met: if passed && device == Device::Cpu { None } else { Some(passed) },
    };
    let text = format!("`{TESTS}`: {}. What was printed is in raw.jsonl.\n", verdict.measured);
    Finding { text, verdicts: vec![verdict] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_are_not_timed_are_not_judged() {
        let line = |ours: &str| {
            let json = format!(
                r#"{{"direction": "to host", "bytes": 9, "pinned": 5e10, "pageable": 1e10, "ours": {ours}}}"#
            );
            [serde_json::from_str::<Copies>(&json).unwrap()]
        };
        assert_eq!(copies_finding(&line("null")).verdicts[0].met, None);
        assert_eq!(copies_finding(&line("4.4e10")).verdicts[0].met, Some(false));
        let finding = copies_finding(&line("4.6e10"));
        assert_eq!(finding.verdicts[0].met, Some(true));
        assert!(finding.text.contains("| to host | 50.0 | 10.0 | 46.0 |"), "{}", finding.text);
        let skipped = serde_json::from_str(r#"{"skipped": "no GPU"}"#).unwrap();
        assert!(copies_finding(&[skipped]).verdicts.is_empty());
    }

    #[test]
    fn tests_that_were_skipped_show_nothing() {
        let judged =
            |passed, device| tests_finding("== 3 passed ==", passed, device).verdicts[0].met;
        assert_eq!(judged(true, Device::Cuda), Some(true));
        assert_eq!(judged(false, Device::Cuda), Some(false));
        assert_eq!(judged(true, Device::Cpu), None);
    }
}
