//! What all parts need: the Python to run, who takes part, and the folder of the record.

use super::Args;
use super::contender::Contender;
use crate::command::{command, output, output_within};
use anyhow::{Context, Result};
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
    pub(super) rounds: usize,
    pub(super) steps: u64,
    /// Ascending.
    pub(super) nodes: Vec<u64>,
    pub(super) ranks_per_node: u64,
    pub(super) mbit: Vec<u64>,
    /// In the order of tables, `alone` first.
    pub(super) contenders: Vec<Contender>,
    python: String,
    folder: PathBuf,
}

/// A run takes seconds to a few minutes; what takes longer hangs.
const LIMIT: Duration = Duration::from_secs(900);

const TRAIN: &str = "bench/peers/torch_train.py";

impl Lab {
    pub(super) fn new(args: &Args, python: String, folder: PathBuf) -> Result<Self> {
        let printed = output(&[&python, TRAIN, "--available"])?;
        let mut contenders: Vec<Contender> = serde_json::from_str(&printed)
            .with_context(|| format!("{TRAIN} --available printed {printed}"))?;
        if !args.contenders.is_empty() {
            contenders.retain(|one| *one == Contender::Alone || args.contenders.contains(one));
        }
        contenders.sort();
        let mut nodes = args.nodes.clone();
        nodes.sort_unstable();
        Ok(Self {
            quick: args.quick,
            rounds: args.rounds.unwrap_or(if args.quick { 1 } else { 3 }),
            steps: args.steps.unwrap_or(if args.quick { 3 } else { 10 }),
            nodes,
            ranks_per_node: args.ranks_per_node,
            mbit: args.mbit.clone(),
            contenders,
            python,
            folder,
        })
    }

    /// The largest number of nodes, and no other.
    pub(super) fn most_nodes(&self) -> &[u64] {
        &self.nodes[self.nodes.len().saturating_sub(1)..]
    }

    /// A file of the record.
    pub(super) fn recorded(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// What a script of `bench/peers` prints.
    pub(super) fn script(&self, name: &str, words: &[&str]) -> Result<String> {
        let mut script = command(&[self.python.as_str(), &format!("bench/peers/{name}")]);
        output_within(script.args(words), LIMIT).with_context(|| format!("{name} {words:?}"))
    }

    /// What the ranks of a training job print: `run` starts a command on each of them.
    pub(super) fn train(&self, mut run: Command, words: &[&str]) -> Result<String> {
        run.env("RANKS", self.ranks_per_node.to_string());
        run.args([self.python.as_str(), TRAIN]).args(words);
        output_within(&mut run, LIMIT).with_context(|| format!("{TRAIN} {words:?}"))
    }

    /// Adds a run to `PART.jsonl` right away: an interrupted benchmark keeps what it has measured.
    pub(super) fn keep(&self, part: &str, run: &impl Serialize) -> Result<()> {
        let path = self.recorded(&format!("{part}.jsonl"));
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        writeln!(file, "{}", serde_json::to_string(run)?)
            .with_context(|| format!("writing {}", path.display()))
    }

    /// `text` without the folders of this machine, which mean nothing elsewhere.
    pub(super) fn without_folders(&self, text: &str) -> String {
        let here = env::current_dir().unwrap_or_default().display().to_string();
        let text = text.replace(&self.python, "python");
        if here.len() > 1 { text.replace(&here, ".") } else { text }
    }
}
