//! `poseidon profile`: how fast this machine computes, for `poseidon plan`.

use crate::plan::file;
use crate::report::write_whole;
use crate::terminal::say;
use anyhow::{Context, bail};
use poseidon_sim::{Model, Profile, read_text, zoo};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

/// Measure how long this machine takes for the layers of a model, for 'poseidon plan --profile'.
///
/// Times each layer alone, forward and backward, with PyTorch. On a CUDA device it also measures how
/// fast copies to and from pinned memory are. Needs a Python that has torch, and nothing else.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Models of the zoo, or JSON files of your own (see 'poseidon plan --print-model').
    #[arg(required = true, value_name = "NAME|FILE")]
    models: Vec<String>,

    /// Samples per worker and step.
    #[arg(long, short = 'k', value_name = "K", default_value = "32", value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,

    /// What torch calls the device [default: cuda if there is one, otherwise cpu].
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,

    /// What computing is done in.
    #[arg(long, value_name = "float32|tf32|bfloat16", default_value = "float32", value_parser = ["float32", "tf32", "bfloat16"], hide_possible_values = true)]
    precision: String,

    /// The Python that has torch.
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: PathBuf,

    /// Write the profile to FILE instead of standard output.
    #[arg(long, short = 'o', value_name = "FILE.toml")]
    out: Option<PathBuf>,
}

/// Measures and writes the profile.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let folder = tempfile::tempdir().context("cannot make a folder for the models")?;
    let script = folder.path().join("measure.py");
    fs::write(&script, MEASURE)?;
    let mut command = Command::new(&args.python);
    command.arg(&script).args(["--batch", &args.batch.to_string(), "--precision", &args.precision]);
    if let Some(device) = &args.device {
        command.args(["--device", device]);
    }
    for (i, name) in args.models.iter().enumerate() {
        let text = match file(name, "json") {
            Some(path) => read_text(path).with_context(|| format!("cannot read {name}"))?,
            None => {
                Model::named(name)?;
                zoo::text(name).unwrap_or_default().to_owned()
            }
        };
        Model::parse(&text, name)?;
        let path = folder.path().join(format!("{i}.json"));
        fs::write(&path, text)?;
        command.arg(path);
    }
    let python = args.python.display();
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {python}; say which Python with --python"))?;
    if !output.status.success() {
        bail!("{python} could not measure ({}); it needs torch", output.status);
    }
    let text = String::from_utf8(output.stdout).context("the profile is not UTF-8")?;
    // Better found out now than when it is used.
    Profile::parse(&text, "the measured profile")?;
    match &args.out {
        None => say(&text)?,
        Some(path) => {
            write_whole(path, text.as_bytes())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

const MEASURE: &str = include_str!("profile/measure.py");
const EXAMPLES: &str = "\
Examples:
  The first GPU, and what four workers with it would do:
    poseidon profile resnet50 bert-base --batch 32 --device cuda --out mine.toml
    poseidon plan --model resnet50 --batch 32 --profile mine.toml --workers 4";
