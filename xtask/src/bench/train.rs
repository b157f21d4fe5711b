//! `cargo xtask bench train`: is `poseidon train` exact, does it converge, what does it cost, and what is
//! hybrid communication worth on links that are slow.
//!
//! Every part runs the shipped command and reads its report. Its runs go to a file of JSON lines, its
//! findings to the summary.

mod convergence;
mod exactness;
mod formula;
mod hybrid;
mod lab;
mod overhead;
mod plot;
mod report;
mod traffic;

use super::targets::Verdict;
use super::{environment, record};
use anyhow::{Result, bail};
use clap::ValueEnum;
use lab::Lab;
use std::path::PathBuf;
use std::time::Instant;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Parts to run [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// The folder of CIFAR-10's binary version; without it, what needs real images is left out
    #[arg(long, value_name = "DIR")]
    cifar: Option<PathBuf>,
    /// Epochs of the convergence part, for one worker and for four
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// How often what is timed is repeated [default: 5, with --quick 1]
    #[arg(long)]
    rounds: Option<usize>,
    /// Nodes of the virtual cluster
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(2..=250))]
    nodes: u16,
    /// Rate of every node's port in Mbit/s, each way
    #[arg(long, default_value_t = 200)]
    mbit: u64,
    /// Few steps, one round; a try, not a record
    #[arg(long)]
    quick: bool,
    /// Where the record goes [default: bench/runs/DATE-train; with --quick target/bench]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Four workers compute what one computes with the whole batch
    Exactness,
    /// Four workers learn CIFAR-10 in as many epochs as one; needs --cifar
    Convergence,
    /// One worker under Poseidon beside the bare engine
    Overhead,
    /// Schemes and overlap on a virtual cluster; needs root
    Hybrid,
    /// Bytes of every node beside the formula's; needs root
    Traffic,
}

/// What a part has found out.
struct Finding {
    /// Its section of the summary, without the heading.
    text: String,
    verdicts: Vec<Verdict>,
}

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut parts = args.only.clone();
    if parts.is_empty() {
        parts = Part::value_variants().to_vec();
    }
    let wanted = |part| parts.contains(&part);
    if wanted(Part::Hybrid) || wanted(Part::Traffic) {
        crate::bench::cluster::check()?;
    }
    if args.cifar.is_none() && args.only.contains(&Part::Convergence) {
        bail!("convergence needs --cifar DIR (`poseidon data fetch cifar10` downloads it)");
    }
    environment::build_poseidon()?;
    let folder = record::create("train", args.out.as_deref(), args.quick)?;
    if folder.join("summary.md").exists() {
        bail!("{} has a record already", folder.display());
    }
    record::write(&folder, "machine.txt", &record::machine(""))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    let lab = Lab::new(args, folder.clone())?;

    let mut findings = Vec::new();
    let mut in_cluster = Vec::new();
    for part in Part::value_variants().iter().copied().filter(|part| wanted(*part)) {
        println!("\n== {}", part.name());
        let start = Instant::now();
        let finding = match part {
            Part::Exactness => exactness::run(&lab),
            Part::Convergence => convergence::run(&lab),
            Part::Overhead => overhead::run(&lab),
            Part::Hybrid => hybrid::run(&lab, &mut in_cluster),
            Part::Traffic => traffic::run(&lab, &mut in_cluster),
        };
        // The other parts are worth measuring even if this one cannot be.
        if let Err(error) = &finding {
            eprintln!("{} failed: {error:#}", part.name());
        }
        println!("== {}: {} s", part.name(), start.elapsed().as_secs());
        findings.push((part, finding));
        record::write(&folder, "summary.md", &summary(&lab, &findings))?;
    }
    println!("\n{}\nrecorded in {}", summary(&lab, &findings), folder.display());
    let failed = findings.iter().filter(|(_, finding)| finding.is_err());
    let failed: Vec<_> = failed.map(|(part, _)| part.name()).collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Exactness => "exactness",
            Self::Convergence => "convergence",
            Self::Overhead => "overhead",
            Self::Hybrid => "hybrid",
            Self::Traffic => "traffic",
        }
    }
}

fn summary(lab: &Lab, findings: &[(Part, Result<Finding>)]) -> String {
    let mut text = "# Training\n".to_owned();
    let mut targets = String::new();
    for (part, finding) in findings {
        let name = part.name();
        text += &format!("\n## {}{}\n\n", name[..1].to_uppercase(), &name[1..]);
        match finding {
            Ok(Finding { text: section, verdicts }) => {
                text += section;
                for verdict in verdicts {
                    let (target, measured) = (&verdict.target, &verdict.measured);
                    targets +=
                        &format!("| {name} | {target} | {measured} | {} |\n", verdict.word());
                }
            }
            // The last line says what happened; the whole story was on the terminal.
            Err(error) => {
                let story = lab.without_folders(&format!("{error:#}"));
                text += &format!("Failed: {}\n", story.lines().last().unwrap_or_default());
            }
        }
    }
    if !targets.is_empty() {
        text +=
            "\n## Targets\n\n| part | target | measured | verdict |\n| --- | --- | --- | --- |\n";
        text += &targets;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn failed_parts_are_told_without_folders_of_this_machine() {
        let lab = Lab::for_tests(Some("/somewhere/cifar".into()));
        let finding = Finding {
            text: "Everything was fast.\n".to_owned(),
            verdicts: vec![Verdict {
                target: "at least 2x".to_owned(),
                measured: "1.50x".to_owned(),
                met: Some(false),
            }],
        };
        let findings = [
            (Part::Overhead, Ok(finding)),
            (
                Part::Convergence,
                Err(anyhow!("long story\n/somewhere/cifar/test_batch.bin is short")),
            ),
        ];
        let text = summary(&lab, &findings);
        assert!(text.contains("## Overhead\n\nEverything was fast.\n"), "{text}");
        assert!(text.contains("| overhead | at least 2x | 1.50x | **missed** |"), "{text}");
        assert!(text.contains("Failed: CIFAR-10/test_batch.bin is short\n"), "{text}");
    }
}
