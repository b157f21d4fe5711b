//! `cargo xtask bench torch`: training with PyTorch on Poseidon, beside stock DistributedDataParallel on Gloo.
//!
//! Every part runs scripts of `bench/peers`. Its runs go to a file of JSON lines, its findings to the
//! summary.

pub(super) mod contender;
mod lab;
mod numerics;
mod scaling;
pub(super) mod single;
mod targets;

use super::finding;
use super::{cluster, environment, record};
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
    /// Who takes part in the cluster, beside `alone` [default: all this Python has]
    #[arg(long, value_enum, value_delimiter = ',')]
    contenders: Vec<contender::Contender>,
    /// Numbers of nodes of the parts vgg and layers; the other nets run on the largest
    #[arg(long, value_delimiter = ',', default_value = "2,4,8", value_parser = clap::value_parser!(u64).range(2..=250))]
    nodes: Vec<u64>,
    /// Ranks on every node
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    ranks_per_node: u64,
    /// Rates of every node's port in Mbit/s, each way
    #[arg(long, value_delimiter = ',', default_value = "1000,200")]
    mbit: Vec<u64>,
    /// Timed steps of a run in the cluster [default: 10, with --quick 3]
    #[arg(long)]
    steps: Option<u64>,
    /// How often what is timed is repeated [default: 3, with --quick 1]
    #[arg(long)]
    rounds: Option<usize>,
    /// Few steps, one round; a try, not a record
    #[arg(long)]
    quick: bool,
    /// A Python that has torch and this checkout's poseidon, built for release [default: one set up in
    /// bench/.env, and the package built into it]
    #[arg(long)]
    python: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-torch; with --quick target/bench]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Parameters beside stock DDP's after 50 steps
    Numerics,
    /// One process under Poseidon beside plain PyTorch
    Single,
    /// VGG19 at an eighth of its size, its computing slept, on a virtual cluster; needs root
    Vgg,
    /// A net of fully connected layers on a virtual cluster; needs root
    Fc,
    /// A transformer where factors never pay, on a virtual cluster; needs root
    Transformer,
    /// Many small layers, on a virtual cluster; needs root
    Deep,
    /// ConvNeXt's layers without their computing, on a virtual cluster; needs root
    Layers,
}

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut parts = args.only.clone();
    if parts.is_empty() {
        parts = Part::value_variants().to_vec();
    }
    let in_cluster = [Part::Vgg, Part::Fc, Part::Transformer, Part::Deep, Part::Layers];
    if in_cluster.iter().any(|part| parts.contains(part)) {
        cluster::check()?;
    }
    let python = environment::python_with_poseidon(args.python.as_deref())?;
    let folder = record::create("torch", args.out.as_deref(), args.quick)?;
    if folder.join("summary.md").exists() {
        bail!("{} has a record already", folder.display());
    }
    record::write(&folder, "machine.txt", &record::machine(&python))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    let lab = Lab::new(args, python, folder.clone())?;

    let parts = Part::value_variants().iter().copied().filter(|part| parts.contains(part));
    let named = parts.map(|part| (part.name(), part));
    let cleaned = |text: &str| lab.without_folders(text);
    finding::measure(&folder, "PyTorch", named, &cleaned, |part| match part {
        Part::Numerics => numerics::run(&lab),
        Part::Single => single::run(&lab),
        Part::Vgg => scaling::run(&lab, scaling::VGG, &lab.nodes),
        Part::Fc => scaling::run(&lab, scaling::FC, lab.most_nodes()),
        Part::Transformer => scaling::run(&lab, scaling::TRANSFORMER, lab.most_nodes()),
        Part::Deep => scaling::run(&lab, scaling::DEEP, lab.most_nodes()),
        Part::Layers => scaling::run(&lab, scaling::LAYERS, &lab.nodes),
    })
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Numerics => "numerics",
            Self::Single => "single",
            Self::Vgg => "vgg",
            Self::Fc => "fc",
            Self::Transformer => "transformer",
            Self::Deep => "deep",
            Self::Layers => "layers",
        }
    }
}
