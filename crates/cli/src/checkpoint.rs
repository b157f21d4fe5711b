//! `poseidon checkpoint`: what checkpoints there are, what is in them, whether they are whole.

use crate::report::units;
use crate::terminal::columns::table;
use crate::terminal::{printable, say};
use anyhow::{Context, anyhow, bail};
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use poseidon_checkpoint::{Checkpoint, Error, LayerFacts, State, Storage, Summary, list, open};
use serde_json::json;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

/// Look into checkpoints, check them, and make plain files of them.
///
/// A checkpoint is the state of a training job at one step: parameters, what the update rules
/// remember, and what the program needs to go on. It is a folder step-... with one safetensors file
/// for each node and a manifest, which is written last. A folder without a manifest is no checkpoint.
///
/// PLACE is where a job keeps its checkpoints:
///
///   PATH                a directory (file:///PATH says the same)
///   s3://BUCKET/PREFIX  a store that speaks S3
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, arg_required_else_help = true, verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List the checkpoints of a place: when they were written, their size, and whether they can be
    /// used.
    ///
    /// Reads manifests and sizes of files. 'verify' reads everything.
    Ls {
        #[command(flatten)]
        place: Place,

        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show what is in a checkpoint: layers, update rules, sizes, and what the program has noted.
    Inspect {
        #[command(flatten)]
        place: Place,

        #[command(flatten)]
        step: Step,

        /// Print the manifest as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Read a checkpoint and compare everything with its checksums; exit status 1 if it is damaged.
    Verify {
        #[command(flatten)]
        place: Place,

        #[command(flatten)]
        step: Step,
    },
    /// Write the parameters of a checkpoint to one safetensors file, which any framework reads.
    ///
    /// Tensors have the names, shapes and types of the model. What the update rules remember is left
    /// out. The file gets its name when it is complete; an older file is replaced.
    Export {
        #[command(flatten)]
        place: Place,

        /// The file to write.
        file: PathBuf,

        #[command(flatten)]
        step: Step,
    },
}

#[derive(clap::Args, Debug)]
struct Place {
    /// A directory, or s3://BUCKET/PREFIX.
    #[arg(value_name = "PLACE")]
    place: String,
}

#[derive(clap::Args, Debug)]
struct Step {
    /// The checkpoint of this step (default: the newest complete one).
    #[arg(long, value_name = "N")]
    step: Option<u64>,
}

/// Does what was asked for.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let text = match args.command {
        Command::Ls { place, json } => {
            let storage = place.open()?;
            let found = list(&*storage).map_err(in_words)?;
            if json { list_json(&found)? } else { list_text(&found, &storage.describe()) }
        }
        Command::Inspect { place, step, json } => {
            let storage = place.open()?;
            let checkpoint = step.find(&storage)?;
            match json {
                true => serde_json::to_string_pretty(checkpoint.manifest())? + "\n",
                false => inspect_text(&checkpoint, &storage.describe())?,
            }
        }
        Command::Verify { place, step } => {
            let storage = place.open()?;
            let checkpoint = match step.step {
                Some(_) => step.find(&storage)?,
                // A damaged one is what was to be found out.
                None => newest(&storage, |step, error| bail!("step {step}: {error}"))?,
            };
            let mut bar = Progress::new("verifying");
            checkpoint.verify(&mut |done, total| bar.show(done, total)).map_err(in_words)?;
            verified_text(&checkpoint, &storage.describe())
        }
        Command::Export { place, file, step } => {
            let checkpoint = step.find(&place.open()?)?;
            let folder = file.parent().unwrap_or(Path::new(""));
            fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
            let mut bar = Progress::new("exporting");
            checkpoint.export(&file, &mut |done, total| bar.show(done, total)).map_err(in_words)?;
            let layers = &checkpoint.manifest().layers;
            let tensors = model(layers).map(|layer| layer.named_tensors().len() as u64).sum();
            format!(
                "{}: {} of step {}, {} parameters\n",
                file.display(),
                units::plural(tensors, "tensor"),
                checkpoint.manifest().step,
                units::count(parameters(layers))
            )
        }
    };
    say(&text)?;
    Ok(ExitCode::SUCCESS)
}

impl Place {
    fn open(&self) -> anyhow::Result<Arc<dyn Storage>> {
        open(&self.place).map_err(in_words)
    }
}

impl Step {
    /// The checkpoint that was asked for.
    fn find(&self, storage: &Arc<dyn Storage>) -> anyhow::Result<Checkpoint> {
        match self.step {
            Some(step) => Checkpoint::open(storage, step).map_err(in_words),
            None => newest(storage, |step, error| {
                tracing::warn!("step {step} is passed over: {error}");
                Ok(())
            }),
        }
    }
}

/// The newest checkpoint that is whole. `passed_over` hears of newer ones that are damaged.
fn newest(
    storage: &Arc<dyn Storage>,
    passed_over: impl Fn(u64, String) -> anyhow::Result<()>,
) -> anyhow::Result<Checkpoint> {
    let latest = Checkpoint::latest(storage).map_err(in_words)?;
    for (step, error) in &latest.damaged {
        passed_over(*step, printable(&error.to_string()))?;
    }
    let place = printable(&storage.describe());
    latest.checkpoint.ok_or_else(|| anyhow!("there is no complete checkpoint in {place}"))
}

/// Words that a terminal can show. Names in them come from files.
fn in_words(error: Error) -> anyhow::Error {
    anyhow!(printable(&error.to_string()))
}

fn list_text(found: &[Summary], place: &str) -> String {
    if found.is_empty() {
        return format!("there are no checkpoints in {}\n", printable(place));
    }
    let header = ["step", "created", "size", "files", "state"];
    let row = |one: &Summary| {
        [
            one.step.to_string(),
            one.created.map_or("unknown".into(), time),
            units::bytes(one.bytes),
            one.parts.to_string(),
            match &one.state {
                State::Complete => "complete".into(),
                State::Unfinished => "unfinished: it has no manifest".into(),
                State::Unreadable(why) => printable(why),
            },
        ]
    };
    table(header, [true, false, true, true, false], found.iter().map(row))
}

/// The names are a contract with those who read it.
fn list_json(found: &[Summary]) -> anyhow::Result<String> {
    let row = |one: &Summary| {
        let (state, why) = match &one.state {
            State::Complete => ("complete", None),
            State::Unfinished => ("unfinished", None),
            State::Unreadable(why) => ("unreadable", Some(why)),
        };
        json!({
            "step": one.step,
            "created": one.created.map(time),
            "bytes": one.bytes,
            "parts": one.parts,
            "state": state,
            "why": why,
        })
    };
    let rows: Vec<_> = found.iter().map(row).collect();
    Ok(serde_json::to_string_pretty(&rows)? + "\n")
}

fn inspect_text(checkpoint: &Checkpoint, place: &str) -> anyhow::Result<String> {
    let manifest = checkpoint.manifest();
    let mut text = String::new();
    writeln!(text, "step     {}", manifest.step)?;
    writeln!(text, "place    {}", printable(place))?;
    let (created, by) = (time(manifest.created), printable(&manifest.poseidon));
    writeln!(text, "created  {created}, by poseidon {by}")?;
    writeln!(text, "job      {}", units::plural(manifest.workers as u64, "worker"))?;
    let files = units::plural(manifest.parts.len() as u64, "file");
    writeln!(text, "size     {} in {files}\n", units::bytes(checkpoint.bytes()))?;

    let header = ["layer", "parameters", "tensors", "rule", "steps", "vectors", "bytes"];
    let row = |layer: &LayerFacts| {
        [
            printable(&layer.name),
            if layer.private { String::new() } else { units::count(layer.len as u64) },
            layer.named_tensors().len().to_string(),
            printable(&layer.rule),
            layer.steps.to_string(),
            layer.vectors.to_string(),
            units::bytes(checkpoint.layer_bytes(&layer.name)),
        ]
    };
    let bytes = manifest.layers.iter().map(|layer| checkpoint.layer_bytes(&layer.name));
    let total = [
        units::plural(manifest.layers.len() as u64, "layer"),
        units::count(parameters(&manifest.layers)),
        String::new(),
        String::new(),
        String::new(),
        String::new(),
        units::bytes(bytes.fold(0, u64::saturating_add)),
    ];
    let rows = manifest.layers.iter().map(row).chain([total]);
    text += &table(header, [false, true, true, false, true, true, true], rows);

    if !manifest.program.is_null() {
        text += "\nwhat the program has noted\n";
        for line in serde_json::to_string_pretty(&manifest.program)?.lines() {
            writeln!(text, "  {}", printable(line))?;
        }
    }
    Ok(text)
}

fn verified_text(checkpoint: &Checkpoint, place: &str) -> String {
    format!(
        "step {} in {} is whole: {}, {}, every checksum is right\n",
        checkpoint.manifest().step,
        printable(place),
        units::plural(checkpoint.manifest().layers.len() as u64, "layer"),
        units::bytes(checkpoint.bytes()),
    )
}

/// The layers without those that are the program's own.
fn model(layers: &[LayerFacts]) -> impl Iterator<Item = &LayerFacts> {
    layers.iter().filter(|layer| !layer.private)
}

fn parameters(layers: &[LayerFacts]) -> u64 {
    model(layers).map(|layer| layer.len as u64).fold(0, u64::saturating_add)
}

fn time(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

/// A bar for people. A log gets the result alone.
struct Progress {
    /// `None`: stderr is not a terminal.
    bar: Option<ProgressBar>,
}

impl Progress {
    fn new(what: &'static str) -> Self {
        let style = "{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(style).expect("a template that was tried");
            ProgressBar::new(0).with_style(style).with_message(what)
        });
        Self { bar }
    }

    fn show(&mut self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  Which checkpoints has this job? Which is the newest that can be used?
    poseidon checkpoint ls runs/vgg19
    poseidon checkpoint ls runs/vgg19 --json | jq 'map(select(.state == \"complete\")) | last.step'

  What is in the newest one? What was the learning rate's schedule?
    poseidon checkpoint inspect runs/vgg19
    poseidon checkpoint inspect runs/vgg19 --json | jq .program

  Is the checkpoint of step 2000 undamaged, before the job that wrote it is deleted?
    poseidon checkpoint verify runs/vgg19 --step 2000

  Use the model in PyTorch: model.load_state_dict(safetensors.torch.load_file('vgg19.safetensors'))
    poseidon checkpoint export runs/vgg19 vgg19.safetensors

  The same from a store of your own that speaks S3:
    AWS_ENDPOINT_URL=http://store:9000 poseidon checkpoint ls s3://training/vgg19

Environment:
  AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY  who asks an S3 store
  AWS_REGION                                where the bucket is (default: us-east-1)
  AWS_ENDPOINT_URL                          the store, if it is not Amazon's; http:// if it is not encrypted";
