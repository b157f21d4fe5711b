//! What all parts need: the Python to run, what to run, and the folder of the record.

use super::{Args, Device, Precision};
use crate::bench::cluster::Cluster;
use crate::bench::torch::contender::Contender;
use crate::command::{command, lines_within};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::Serialize;
use std::env;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The settings of the benchmark, and where its outputs go.
pub(super) struct Lab {
    pub(super) quick: bool,
    pub(super) device: Device,
    /// As asked for; empty for the default.
    pub(super) nets: Vec<String>,
    pub(super) precisions: Vec<Precision>,
    /// In the order of tables.
    pub(super) contenders: Vec<Contender>,
    pub(super) nodes: Vec<u64>,
    pub(super) ranks_per_node: u64,
    pub(super) mbit: Vec<u64>,
    pub(super) rounds: u64,
    pub(super) steps: Option<u64>,
    pub(super) turn_seconds: f64,
    python: String,
    folder: PathBuf,
}

/// The processes of one cluster train all nets, which takes minutes; what takes longer hangs.
const LIMIT: Duration = Duration::from_secs(3600);

/// Nets that people train.
const NETS: [&str; 4] = ["resnet50", "convnext_tiny", "vgg19", "gpt2"];

const CONTENDERS: [Contender; 6] = [
    Contender::Apart,
    Contender::Ddp,
    Contender::DdpNccl,
    Contender::DdpPoseidon,
    Contender::Poseidon,
    Contender::PoseidonServer,
];

impl Lab {
    pub(super) fn new(args: &Args, python: String, folder: PathBuf) -> Result<Self> {
        let or = |given: &[u64], quick: &[u64], usual: &[u64]| match (given.is_empty(), args.quick)
        {
            (false, _) => given.to_vec(),
            (true, true) => quick.to_vec(),
            (true, false) => usual.to_vec(),
        };
        let mut contenders = args.contenders.clone();
        if contenders.is_empty() {
            contenders = CONTENDERS.to_vec();
        }
        for missing in [Contender::Alone, Contender::DdpFp16] {
            ensure!(!contenders.contains(&missing), "`{}` is in bench torch alone", missing.name());
        }
        contenders.sort();
        let precisions = match (args.precision.is_empty(), args.quick) {
            (false, _) => args.precision.clone(),
            (true, true) => vec![Precision::Fp32],
            (true, false) => Precision::value_variants().to_vec(),
        };
        let mbit: Vec<u64> = args.gbit.iter().map(|gbit| (gbit * 1000.0).round() as u64).collect();
        ensure!(!mbit.contains(&0), "--gbit: a port carries at least 0.001 Gbit/s");
        Ok(Self {
            quick: args.quick,
            device: args.device,
            nets: args.nets.clone(),
            precisions,
            contenders,
            nodes: or(&args.nodes, &[2], &[2, 4]),
            ranks_per_node: args.ranks_per_node,
            mbit: or(&mbit, &[10_000], &[1000, 10_000, 25_000]),
            rounds: args.rounds.unwrap_or(if args.quick { 3 } else { 6 }),
            steps: args.steps,
            turn_seconds: args.turn_seconds,
            python,
            folder,
        })
    }

    /// Nets of the training part.
    pub(super) fn trained_nets(&self) -> Vec<String> {
        if self.nets.is_empty() { NETS.map(str::to_owned).to_vec() } else { self.nets.clone() }
    }

    /// Timed steps of a turn.
    pub(super) fn turn_steps(&self) -> u64 {
        self.steps.unwrap_or(if self.quick { 5 } else { 10 })
    }

    /// A file of the record.
    pub(super) fn recorded(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Runs a script of `bench/peers` on this machine, and hands over the lines of JSON it prints.
    pub(super) fn script(
        &self,
        name: &str,
        words: &[&str],
        take: impl FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        self.lines(command(&["env"]), name, words, take)
    }

    /// The same on every node of a cluster.
    pub(super) fn on_cluster(
        &self,
        cluster: &Cluster,
        name: &str,
        words: &[&str],
        take: impl FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let mut all = cluster.on_every_node();
        all.env("RANKS", self.ranks_per_node.to_string());
        self.lines(all, name, words, take)
    }

    fn lines(
        &self,
        mut run: Command,
        name: &str,
        words: &[&str],
        mut take: impl FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        run.arg(&self.python).arg(format!("bench/peers/{name}")).args(words);
        run.args(["--device", self.device.name()]);
        let json = |line: &str| if line.starts_with('{') { take(line) } else { Ok(()) };
        lines_within(&mut run, LIMIT, json).with_context(|| format!("{name} {}", words.join(" ")))
    }

    /// The Python of the peers.
    pub(super) fn python(&self) -> &str {
        &self.python
    }

    /// Adds a result to `raw.jsonl` right away, with the part it is of.
    pub(super) fn keep(&self, part: &str, result: &impl Serialize) -> Result<()> {
        #[derive(Serialize)]
        struct Kept<'a, T> {
            part: &'a str,
            #[serde(flatten)]
            result: &'a T,
        }
        let path = self.recorded("raw.jsonl");
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        writeln!(file, "{}", serde_json::to_string(&Kept { part, result })?)
            .with_context(|| format!("writing {}", path.display()))
    }

    /// `text` without the folders of this machine, which mean nothing elsewhere.
    pub(super) fn without_folders(&self, text: &str) -> String {
        let here = env::current_dir().unwrap_or_default().display().to_string();
        let text = text.replace(&self.python, "python");
        if here.len() > 1 { text.replace(&here, ".") } else { text }
    }
}
