//! `cargo xtask bench resume`: does training go on bit by bit after a kill, what does a checkpoint cost,
//! and what do slow workers cost.
//!
//! Every part runs the shipped command, or PyTorch with this package, and reads what it reports.

mod cost;
mod equality;
mod slow;

use super::gpu::Device;
use super::{cluster, environment, finding, record};
use crate::command::{command, output_within, target_dir};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use cost::Program;
use serde::Deserialize;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Parts to run [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Nodes of the virtual cluster
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(2..=64))]
    nodes: u16,
    /// Rate of every node's port in Mbit/s, each way
    #[arg(long, default_value_t = 1000)]
    mbit: u64,
    /// Of costs: how many times as slow ports and computing are, for machines with few cores
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
    slower: u16,
    /// Of costs: steps from one checkpoint to the next. Half of them must be enough to write it
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(4..=1000))]
    every: u16,
    /// How often all sides of a part take their turn [default: 3, with --quick 1]
    #[arg(long)]
    rounds: Option<usize>,
    /// Few steps, one round; a try, not a record
    #[arg(long)]
    quick: bool,
    /// Where PyTorch computes in the part `pytorch`
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// A Python that has torch and this checkout's poseidon, built for release [default: one set up in
    /// bench/.env, and the package built into it]
    #[arg(long)]
    python: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-resume; with --quick target/bench]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// A run that was killed and resumed ends as one that was not
    Equality,
    /// The same through PyTorch; --device cuda is for a machine with a GPU, which needs no cargo
    Pytorch,
    /// Steps around checkpoints, to a folder and to a store, on a virtual cluster; needs root
    Cost,
    /// The same through PyTorch; needs root
    PytorchCost,
    /// One worker at a tenth of the others' speed, waited for and dropped
    Dropping,
    /// Workers whose steps vary, by how far apart they may be; the simulator beside it
    Staleness,
}

/// What is read of a report.
#[derive(Debug, Deserialize)]
struct Report {
    steps: u64,
    seconds: f64,
    step_seconds: Quantiles,
    parameter_digest: String,
    test_accuracy: Option<f64>,
    epochs_done: Vec<Epoch>,
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Epoch {
    seconds: f64,
    test_accuracy: Option<f64>,
}

#[derive(Debug, Deserialize)]
struct Node {
    turnout: Option<Turnout>,
}

#[derive(Debug, Deserialize)]
struct Turnout {
    steps_counted: u64,
    steps_late: u64,
    samples_counted: u64,
}

#[derive(Debug, Deserialize)]
struct Quantiles {
    median: f64,
    p90: f64,
}

struct Lab<'a> {
    args: &'a Args,
    folder: PathBuf,
    scratch: PathBuf,
    /// If a part needs it.
    python: Option<String>,
}

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted = |part: &Part| args.only.is_empty() || args.only.contains(part);
    let any = |parts: &[Part]| parts.iter().any(wanted);
    if any(&[Part::Cost, Part::PytorchCost]) {
        cluster::check()?;
    }
    if any(&[Part::Equality, Part::Cost, Part::Dropping, Part::Staleness]) {
        environment::build_poseidon()?;
    }
    let python = any(&[Part::Pytorch, Part::PytorchCost])
        .then(|| environment::python_with_poseidon(args.python.as_deref()))
        .transpose()?;
    let folder = record::create("resume", args.out.as_deref(), args.quick)?;
    if folder.join("summary.md").exists() {
        bail!("{} has a record already", folder.display());
    }
    let machine = record::machine(python.as_deref().unwrap_or_default());
    record::write(&folder, "machine.txt", &machine)?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    let scratch = target_dir().join("bench/resume-scratch");
    let lab = Lab { args, folder: folder.clone(), scratch, python };
    let parts = Part::value_variants().iter().copied().filter(wanted);
    let named = parts.map(|part| (part.name(), part));
    let cleaned = |text: &str| lab.cleaned(text);
    finding::measure(&folder, "Resume", named, &cleaned, |part| match part {
        Part::Equality => equality::built_in(&lab),
        Part::Pytorch => equality::pytorch(&lab),
        Part::Cost => cost::cost(&lab, &[Program::Session]),
        Part::PytorchCost => cost::cost(&lab, &[Program::Pytorch, Program::PytorchServer]),
        Part::Dropping => slow::dropping(&lab),
        Part::Staleness => slow::staleness(&lab),
    })
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Equality => "equality",
            Self::Pytorch => "pytorch",
            Self::Cost => "cost",
            Self::PytorchCost => "pytorch-cost",
            Self::Dropping => "dropping",
            Self::Staleness => "staleness",
        }
    }
}

impl Lab<'_> {
    /// How often all sides of a part take their turn, unless it is a try or told otherwise.
    fn rounds(&self, usual: usize) -> usize {
        self.args.rounds.unwrap_or(if self.args.quick { 1 } else { usual })
    }

    /// Steps of a run of the equality parts.
    fn steps(&self) -> u64 {
        if self.args.quick { 20 } else { 200 }
    }

    /// The Python that has this package.
    fn python(&self) -> Result<&str> {
        self.python.as_deref().context("this part needs a Python")
    }

    /// An empty folder that is not needed later.
    fn fresh(&self, name: &str) -> Result<PathBuf> {
        let path = self.scratch.join(name);
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("removing {}", path.display()))?;
        }
        fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
        fs::canonicalize(&path).with_context(|| format!("finding {}", path.display()))
    }

    fn train(&self, words: &str) -> Result<Report> {
        self.finish(command(&[environment::poseidon().display().to_string()]), words)
    }

    fn finish(&self, mut command: Command, words: &str) -> Result<Report> {
        fs::create_dir_all(&self.scratch)?;
        command.arg("train").args(words.split_whitespace()).arg("--json");
        command.arg("--report").arg(self.scratch.join("report"));
        let printed = output_within(&mut command, LIMIT)?;
        let start = printed.find('{').context("the run printed no report")?;
        let mut values = serde_json::Deserializer::from_str(&printed[start..]).into_iter::<Value>();
        let json = values.next().context("the run printed no report")??;
        let report = Report::deserialize(&json).context("reading a report")?;
        self.record(&json.to_string())?;
        Ok(report)
    }

    /// Adds a line to `raw.jsonl`, without the folders of this machine.
    fn record(&self, line: &str) -> Result<()> {
        let raw = self.folder.join("raw.jsonl");
        let before = fs::read_to_string(&raw).unwrap_or_default();
        record::write(&self.folder, "raw.jsonl", &format!("{before}{}\n", self.cleaned(line)))
    }

    /// `text` without the folders of this machine, which mean nothing elsewhere.
    fn cleaned(&self, text: &str) -> String {
        // Places of checkpoints are named from the root.
        let whole = fs::canonicalize(&self.scratch).unwrap_or_default().display().to_string();
        let text = if whole.len() > 1 { text.replace(&whole, "SCRATCH") } else { text.to_owned() };
        text.replace(&self.scratch.display().to_string(), "SCRATCH")
    }
}

/// No run takes longer.
const LIMIT: Duration = Duration::from_secs(600);
