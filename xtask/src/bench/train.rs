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
mod report;
mod traffic;

use super::finding::{self, Finding};
use super::targets::Verdict;
use super::{environment, record};
use anyhow::{Result, bail};
use clap::ValueEnum;
use lab::Lab;
use std::path::PathBuf;

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

    let mut in_cluster = Vec::new();
    let parts = Part::value_variants().iter().copied().filter(|part| wanted(*part));
    let named = parts.map(|part| (part.name(), part));
    let cleaned = |text: &str| lab.without_folders(text);
    finding::measure(&folder, "Training", named, &cleaned, |part| match part {
        Part::Exactness => exactness::run(&lab),
        Part::Convergence => convergence::run(&lab),
        Part::Overhead => overhead::run(&lab),
        Part::Hybrid => hybrid::run(&lab, &mut in_cluster),
        Part::Traffic => traffic::run(&lab, &mut in_cluster),
    })
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
