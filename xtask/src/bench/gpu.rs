//! `cargo xtask bench gpu`: training on a GPU with PyTorch, beside stock DistributedDataParallel.
//!
//! Ranks are in network namespaces with rate-limited ports and share the one GPU of this machine.
//! Every part runs a script of `bench/peers`. Its raw results go to `raw.jsonl`, its findings to the
//! summary. Both are written as they come: a benchmark that is cut short keeps what it has.

mod lab;
mod numerics;
mod small;
mod table;
mod training;

use super::finding::{self, Finding};
use super::torch::contender::Contender;
use super::{cluster, environment, record};
use crate::command::output;
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
    /// Nets to train: resnet50, convnext_tiny, vgg19, gpt2, or another of bench/peers/torch_nets.py,
    /// such as tiny for a try on a CPU [default: the first four; of the single part: resnet50, gpt2]
    #[arg(long, value_delimiter = ',')]
    nets: Vec<String>,
    /// Who takes part [default: apart, ddp, ddp-nccl, ddp-poseidon, poseidon, poseidon-server]
    #[arg(long, value_enum, value_delimiter = ',')]
    contenders: Vec<Contender>,
    /// Numbers of nodes, each a network namespace [default: 2,4; with --quick 2]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(2..=16))]
    nodes: Vec<u64>,
    /// Ranks on every node, which share its port
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=16))]
    ranks_per_node: u64,
    /// Rates of every port in Gbit/s, each way [default: 1,10,25; with --quick 10]
    #[arg(long, value_delimiter = ',')]
    gbit: Vec<f64>,
    /// Types that gradients and products have [default: all; with --quick fp32]
    #[arg(long, value_enum, value_delimiter = ',')]
    precision: Vec<Precision>,
    /// How often every contender has its turn [default: 6, with --quick 3]
    #[arg(long)]
    rounds: Option<u64>,
    /// Timed steps of a turn, at most [default: 10, with --quick 5]; of the numerics part: steps that
    /// are compared [default: 50, with --quick 5]
    #[arg(long)]
    steps: Option<u64>,
    /// A turn has fewer steps, but at least one, if they would take longer than this
    #[arg(long, default_value_t = 1.0)]
    turn_seconds: f64,
    /// Few steps and rounds; a try, not a record
    #[arg(long)]
    quick: bool,
    /// Where to train: cpu is for trying this benchmark out
    #[arg(long, value_enum, default_value_t = Device::Cuda)]
    device: Device,
    /// A Python that has torch, torchvision, transformers and this checkout's poseidon, built for
    /// release [default: one set up in bench/.env, and the package built into it]
    #[arg(long)]
    python: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-gpu; with --quick target/bench]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Nets on a virtual cluster, every contender in turn; needs root
    Training,
    /// One process under Poseidon beside plain PyTorch
    Single,
    /// Parameters and losses beside stock DDP's after 50 steps
    Numerics,
    /// A profiler's trace of one step on a virtual cluster; needs root
    Trace,
    /// Speed of copies between the host's memory and the GPU's
    Copies,
    /// The tests of the Python package that need a GPU
    Tests,
}

/// What numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Precision {
    /// Everything in float32
    Fp32,
    /// Parameters and gradients in float32, products in bfloat16 by torch.autocast
    Autocast,
    /// Everything in bfloat16
    Bf16,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The first NVIDIA GPU
    Cuda,
    /// The host itself
    Cpu,
}

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut parts = args.only.clone();
    if parts.is_empty() {
        parts = Part::value_variants().to_vec();
    }
    if parts.contains(&Part::Training) || parts.contains(&Part::Trace) {
        cluster::check()?;
    }
    let python = environment::python_with_poseidon(args.python.as_deref())?;
    let folder = record::create("gpu", args.out.as_deref(), args.quick)?;
    if folder.join("summary.md").exists() {
        bail!("{} has a record already", folder.display());
    }
    record::write(&folder, "machine.txt", &machine(&python))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    let lab = Lab::new(args, python, folder.clone())?;

    let parts = Part::value_variants().iter().copied().filter(|part| parts.contains(part));
    let named = parts.map(|part| (part.name(), part));
    let cleaned = |text: &str| lab.without_folders(text);
    let title = match args.device {
        Device::Cuda => "PyTorch on a GPU",
        Device::Cpu => "PyTorch on the CPU: a try of the benchmark, no record of a GPU",
    };
    finding::measure(&folder, title, named, &cleaned, |part| match part {
        Part::Training => {
            // What has been measured so far is worth having if the rest is cut short.
            let mut write = |so_far: Finding| {
                let text = finding::summary(title, &[(part.name(), Ok(so_far))], &cleaned);
                record::write(&folder, "summary.md", &text)
            };
            training::run(&lab, &mut write)
        }
        Part::Single => small::single(&lab),
        Part::Numerics => numerics::run(&lab),
        Part::Trace => training::trace(&lab),
        Part::Copies => small::copies(&lab),
        Part::Tests => small::tests(&lab),
    })
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::Single => "single",
            Self::Numerics => "numerics",
            Self::Trace => "trace",
            Self::Copies => "copies",
            Self::Tests => "tests",
        }
    }
}

impl Precision {
    /// As `bench/peers/torch_turns.py` calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Autocast => "autocast",
            Self::Bf16 => "bf16",
        }
    }
}

impl Device {
    /// As torch calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Cpu => "cpu",
        }
    }
}

/// What has to be known of this machine and its GPU.
fn machine(python: &str) -> String {
    let query =
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"];
    let gpu = output(&query).unwrap_or_else(|_| "none that nvidia-smi knows".to_owned());
    let versions = "import importlib.metadata as m, torch\nhave = {d.name.lower(): d.version for d in \
        m.distributions() if d.name}\nnccl = '.'.join(map(str, torch.cuda.nccl.version())) if \
        torch.cuda.is_available() else 'none'\nprint('cuda', torch.version.cuda, 'nccl', nccl, \
        *(f'{n} {have[n]}' for n in ('torchvision', 'transformers') if n in have))";
    let versions = output(&[python, "-c", versions]).unwrap_or_else(|_| "unknown".to_owned());
    format!("{}gpu: {gpu}\nlibraries: {versions}\n", record::machine(python))
}
