//! What all parts need: the command to run, images to train on, and the folder of the record.

use super::Args;
use super::report::Report;
use crate::bench::cluster::Cluster;
use crate::bench::environment;
use crate::command::{command, output_within, target_dir};
use anyhow::{Context, Result};
use serde::Serialize;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The settings of the benchmark, and where its outputs go.
pub(super) struct Lab {
    pub(super) quick: bool,
    pub(super) rounds: usize,
    pub(super) epochs: u64,
    pub(super) nodes: u16,
    pub(super) mbit: u64,
    folder: PathBuf,
    cifar: Option<PathBuf>,
    /// Reports and made-up images: needed while a part runs, and by nobody later.
    scratch: PathBuf,
}

/// What to train, and on what.
pub(super) struct Task {
    /// A model's name, or a file.
    pub(super) model: String,
    /// A folder in CIFAR-10's binary format; none for the data that ship with the command.
    folder: Option<PathBuf>,
}

impl Task {
    /// `model` on the bundled data.
    pub(super) fn bundled(model: &str) -> Self {
        Self { model: model.to_owned(), folder: None }
    }
}

impl Lab {
    pub(super) fn new(args: &Args, folder: PathBuf) -> Result<Self> {
        let scratch = target_dir().join("bench/train-scratch");
        fs::create_dir_all(&scratch).with_context(|| format!("creating {}", scratch.display()))?;
        Ok(Self {
            quick: args.quick,
            rounds: args.rounds.unwrap_or(if args.quick { 1 } else { 5 }),
            epochs: args.epochs,
            nodes: args.nodes,
            mbit: args.mbit,
            folder,
            cifar: args.cifar.clone(),
            scratch,
        })
    }

    /// `full`, or with `--quick` `quick`.
    pub(super) fn steps(&self, full: u64, quick: u64) -> u64 {
        if self.quick { quick } else { full }
    }

    /// `model` on CIFAR-10, if that is there.
    pub(super) fn on_cifar(&self, model: &str) -> Option<Task> {
        let folder = self.cifar.clone()?;
        Some(Task { model: model.to_owned(), folder: Some(folder) })
    }

    /// `model` on images of CIFAR-10's shape, for what does not depend on what they show: made up if
    /// need be.
    pub(super) fn on_images(&self, model: &str) -> Result<Task> {
        if let Some(task) = self.on_cifar(model) {
            return Ok(task);
        }
        let folder = self.scratch.join("random-images");
        random_images(&folder)
            .with_context(|| format!("making up images in {}", folder.display()))?;
        Ok(Task { model: model.to_owned(), folder: Some(folder) })
    }

    /// What [`Lab::on_images`] trains on, in words.
    pub(super) fn images_are(&self) -> &'static str {
        if self.cifar.is_some() { "CIFAR-10" } else { "random images of CIFAR-10's size" }
    }

    /// A file for the time of the benchmark.
    pub(super) fn scratch(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.scratch.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// A file of the record.
    pub(super) fn recorded(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Trains with processes of this machine; `words` are arguments of `poseidon train`.
    pub(super) fn train(&self, task: &Task, words: &str) -> Result<Report> {
        self.finish(command(&[environment::poseidon().display().to_string()]), task, words)
    }

    /// Trains with one worker on every node of `cluster`.
    pub(super) fn train_in(&self, cluster: &Cluster, task: &Task, words: &str) -> Result<Report> {
        let poseidon = environment::poseidon().display().to_string();
        // Namespaces of one machine could share memory, which no cluster can.
        let mut all = cluster.on_every_node();
        all.arg(poseidon);
        self.finish(all, task, &format!("{words} --link tcp"))
    }

    fn finish(&self, mut command: Command, task: &Task, words: &str) -> Result<Report> {
        command.args(["train", "--model", &task.model]).args(words.split_whitespace());
        command.arg("--json").arg("--report").arg(self.scratch.join("report"));
        if let Some(folder) = &task.folder {
            command.arg("--data").arg(format!("cifar10:{}", folder.display()));
        }
        let printed = output_within(&mut command, LIMIT);
        printed
            .and_then(|text| Report::parse(&text))
            .with_context(|| format!("{} {words}", task.model))
    }

    /// Adds a run to `PART.jsonl` right away: an interrupted benchmark keeps what it has measured.
    pub(super) fn keep(&self, part: &str, run: &Run<'_>) -> Result<()> {
        let path = self.recorded(&format!("{part}.jsonl"));
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        writeln!(file, "{}", serde_json::to_string(run)?)
            .with_context(|| format!("writing {}", path.display()))
    }

    /// `text` without the folders of this machine, which mean nothing elsewhere.
    pub(super) fn without_folders(&self, text: &str) -> String {
        let mut text = text.to_owned();
        let cifar = self.cifar.iter().map(|folder| (folder.as_path(), "CIFAR-10"));
        for (folder, name) in cifar.chain([(self.scratch.as_path(), "SCRATCH")]) {
            text = text.replace(&folder.display().to_string(), name);
        }
        text
    }
}

/// A line of the raw record.
#[derive(Serialize)]
pub(super) struct Run<'a> {
    pub(super) case: &'a str,
    pub(super) round: usize,
    #[serde(flatten)]
    pub(super) report: &'a Report,
    /// The loss of every step, where that is the point.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) losses: Option<Vec<f64>>,
}

/// Convergence takes tens of minutes; what takes hours hangs.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// Images in each of the five files: enough for the timed steps without an epoch's end between them.
const IMAGES: usize = 2000;

/// Five files in CIFAR-10's binary format: a label, then 3 x 32 x 32 pixels.
fn random_images(folder: &Path) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut byte = || {
        // xorshift64: any sequence without a pattern will do.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    for number in 1..=5 {
        let mut file =
            BufWriter::new(File::create(folder.join(format!("data_batch_{number}.bin")))?);
        for _ in 0..IMAGES {
            let mut record = [0; 1 + 3 * 32 * 32];
            record.fill_with(&mut byte);
            record[0] %= 10;
            file.write_all(&record)?;
        }
        file.flush()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_this_machine_are_left_out() {
        let lab = Lab {
            quick: false,
            rounds: 1,
            epochs: 1,
            nodes: 8,
            mbit: 200,
            folder: "folder".into(),
            cifar: Some("/somewhere/cifar".into()),
            scratch: "/elsewhere".into(),
        };
        let text = lab.without_folders("/somewhere/cifar/test_batch.bin, /elsewhere/report");
        assert_eq!(text, "CIFAR-10/test_batch.bin, SCRATCH/report");
    }

    #[test]
    fn made_up_images_are_whole_records_with_labels_in_range() {
        let folder = std::env::temp_dir().join(format!("images-{}", std::process::id()));
        random_images(&folder).unwrap();
        let bytes = fs::read(folder.join("data_batch_5.bin")).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(bytes.len(), IMAGES * 3073);
        let labels: Vec<_> = bytes.iter().step_by(3073).collect();
        assert!(labels.iter().all(|label| **label < 10));
        assert!((0..10).all(|class| labels.contains(&&class)));
    }
}
