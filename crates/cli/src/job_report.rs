//! `poseidon report`: a page about a job, of the traces that its nodes have written.

use crate::report::job_page::{self, JobReport};
use crate::report::recorded::NodeTrace;
use crate::report::write_whole;
use crate::terminal::say;
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

/// Make a page about a job of the traces that its nodes have written.
///
/// A job whose environment has POSEIDON_REPORT=DIR writes a trace of every process into DIR, with
/// PyTorch, with Rust, and under any launcher; poseidon.torch.report(DIR) does the same at any time.
/// This command makes two files of them: job.html, a page with waiting by layer, bytes and a timeline
/// of single steps, and trace.json, all processes on one time axis for https://ui.perfetto.dev.
///
/// Process groups of torch.distributed write into the folder c10d of DIR, and get a page of their own
/// there.
///
/// The processes of several machines write to their own disks, unless DIR is on a shared one. Copy
/// their files into one folder first.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The folder with the traces.
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    /// How many of the last steps the page shows.
    #[arg(long, value_name = "N", default_value_t = STEPS)]
    steps: usize,
}

/// Steps on a page: enough to see whether they are alike.
const STEPS: usize = 8;

/// Makes the page and says where it is.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    for folder in folders(&args.folder)? {
        let made = make(&folder, args.steps)?;
        say(&format!("{}\n{}\n", made.page.display(), made.trace.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes the page of a job that this process has started, if its environment asks for one. A job that
/// is over is not made a failure by its report.
pub(crate) fn after_job() {
    let Some(folder) = std::env::var_os("POSEIDON_REPORT").filter(|folder| !folder.is_empty())
    else {
        return;
    };
    let make_all = || -> anyhow::Result<()> {
        for folder in folders(Path::new(&folder))? {
            let Made { page, .. } = make(&folder, STEPS)?;
            tracing::info!("what the job did: {}", page.display());
        }
        Ok(())
    };
    if let Err(error) = make_all() {
        tracing::warn!("no page about the job: {error:#}");
    }
}

/// The folders with traces: `folder` itself, and what process groups have written in it.
fn folders(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let of_groups = folder.join("c10d");
    let of_groups = traces(&of_groups).is_ok().then_some(of_groups);
    match traces(folder) {
        Err(error) if of_groups.is_none() => Err(error),
        Err(_) => Ok(of_groups.into_iter().collect()),
        Ok(_) => Ok(std::iter::once(folder.to_owned()).chain(of_groups).collect()),
    }
}

/// What was written.
struct Made {
    page: PathBuf,
    trace: PathBuf,
}

fn make(folder: &Path, steps: usize) -> anyhow::Result<Made> {
    let mut events = Vec::new();
    let mut nodes = Vec::new();
    for path in traces(folder)? {
        let about = || format!("{} is not a trace of a Poseidon job", path.display());
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut file: Value = serde_json::from_slice(&text).with_context(about)?;
        nodes.push(NodeTrace::read(&file).with_context(about)?);
        if let Value::Array(of_node) = file["traceEvents"].take() {
            events.extend(of_node);
        }
    }
    nodes.sort_by_key(|node| node.node);
    let report = JobReport::of(&nodes, steps);
    let all = json!({ "displayTimeUnit": "ms", "traceEvents": events });
    let trace = write_whole(&folder.join(ALL), &serde_json::to_vec(&all)?)?;
    let page = write_whole(&folder.join("job.html"), job_page::page(&report).as_bytes())?;
    Ok(Made { page, trace })
}

/// The traces of all nodes together.
const ALL: &str = "trace.json";

/// The files that nodes have written into `folder`.
fn traces(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let listed = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let listed = listed.with_context(|| format!("cannot read the folder {}", folder.display()))?;
    let is_trace = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("trace.") && name.ends_with(".json") && name != ALL
    };
    let mut found: Vec<_> = listed.iter().map(fs::DirEntry::path).filter(is_trace).collect();
    if found.is_empty() {
        bail!(
            "no traces in {}: run the job with POSEIDON_REPORT={} in its environment",
            folder.display(),
            folder.display()
        );
    }
    found.sort();
    Ok(found)
}

const EXAMPLES: &str = "\
Examples:
  See what a job with PyTorch does; launch makes the page itself:
    POSEIDON_REPORT=seen poseidon launch -n 4 -- python train.py

  The same under torchrun:
    POSEIDON_REPORT=seen torchrun --nproc-per-node 4 train.py
    poseidon report seen

  Every event of every process: open seen/trace.json at https://ui.perfetto.dev or chrome://tracing";
