//! `cargo xtask bench resume`: does training go on bit by bit after a kill, what does a checkpoint cost,
//! and what do slow workers cost.
//!
//! Every part runs the shipped command and reads its report.

mod slow;

use super::cluster::{self, Cluster};
use super::finding::{self, Finding};
use super::measurement::median;
use super::targets::Verdict;
use super::{environment, record};
use crate::command::{command, output_within, target_dir, wait_until};
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde::Deserialize;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Parts to run [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Nodes of the virtual cluster
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=64))]
    nodes: u16,
    /// Rate of every node's port in Mbit/s, each way
    #[arg(long, default_value_t = 1000)]
    mbit: u64,
    /// How often all sides of a part take their turn [default: 5 for costs, 3 for slow workers, with
    /// --quick 1]
    #[arg(long)]
    rounds: Option<usize>,
    /// Few steps, one round; a try, not a record
    #[arg(long)]
    quick: bool,
    /// Where the record goes [default: bench/runs/DATE-resume; with --quick target/bench]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// A run that was killed and resumed ends as one that was not
    Equality,
    /// Steps with checkpoints beside steps without, on a virtual cluster; needs root
    Cost,
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
}

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted = |part: &Part| args.only.is_empty() || args.only.contains(part);
    if wanted(&Part::Cost) {
        cluster::check()?;
    }
    environment::build_poseidon()?;
    let folder = record::create("resume", args.out.as_deref(), args.quick)?;
    if folder.join("summary.md").exists() {
        bail!("{} has a record already", folder.display());
    }
    record::write(&folder, "machine.txt", &record::machine(""))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    let scratch = target_dir().join("bench/resume-scratch");
    let lab = Lab { args, folder: folder.clone(), scratch };
    let parts = Part::value_variants().iter().copied().filter(wanted);
    let named = parts.map(|part| (part.name(), part));
    let cleaned = |text: &str| text.replace(&lab.scratch.display().to_string(), "SCRATCH");
    finding::measure(&folder, "Resume", named, &cleaned, |part| match part {
        Part::Equality => equality(&lab),
        Part::Cost => cost(&lab),
        Part::Dropping => slow::dropping(&lab),
        Part::Staleness => slow::staleness(&lab),
    })
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Equality => "equality",
            Self::Cost => "cost",
            Self::Dropping => "dropping",
            Self::Staleness => "staleness",
        }
    }
}

/// How jobs of the equality part are trained.
const WAYS: [(&str, &str); 6] = [
    ("parameter server, momentum", "--scheme ps"),
    ("factors, momentum", "--scheme sfb"),
    ("auto, momentum", "--scheme auto"),
    ("auto, Adam", "--scheme auto --optimizer adam --lr 0.001"),
    ("dedicated servers, Adam", "--servers 2 --optimizer adam --lr 0.001"),
    ("two threads per worker", "--threads-per-worker 2"),
];

fn equality(lab: &Lab<'_>) -> Result<Finding> {
    let steps = if lab.args.quick { 20 } else { 200 };
    let mut text = format!(
        "Four workers train the built-in net, deterministic: {steps} steps at once, and half of them, a \
         kill -9 of one of its processes, and the rest.\n\n| | parameters at once | after the kill | |\n| --- | --- | --- | --- |\n"
    );
    let mut equal = 0;
    for (name, how) in WAYS {
        println!("equality: {name}");
        let task = format!("--deterministic --test never {how}");
        let whole = lab.train(&format!("{task} --steps {steps}"))?;
        let place = lab.fresh("saved")?;
        let half = steps / 2;
        lab.train_until_killed(&format!("{task} --steps 1000000 --every {half}"), &place, half)?;
        let place = place.display();
        let resumed = lab.train(&format!("--resume {place}@{half} --steps {steps}"))?;
        ensure!(resumed.steps == steps, "it went on to step {} of {steps}", resumed.steps);
        let same = whole.parameter_digest == resumed.parameter_digest;
        equal += usize::from(same);
        text += &format!(
            "| {name} | `{}` | `{}` | {} |\n",
            &whole.parameter_digest[..12],
            &resumed.parameter_digest[..12],
            if same { "equal" } else { "**different**" }
        );
    }
    let verdict = Verdict {
        target: "equal digests".into(),
        measured: format!("{equal} of {}", WAYS.len()),
        met: Some(equal == WAYS.len()),
    };
    Ok(Finding { text, verdicts: vec![verdict] })
}

fn cost(lab: &Lab<'_>) -> Result<Finding> {
    let Args { nodes, mbit, quick, .. } = *lab.args;
    let rounds = lab.rounds(5);
    let (steps, every) = if quick { (40, 10) } else { (200, 20) };
    let cluster = Cluster::up(nodes.into(), mbit, None)?;
    let task = format!("--model mlp --test never --steps {steps} --workers {nodes}");
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        println!("cost: round {} of {rounds}", round + 1);
        without.push(lab.train_in(&cluster, &task)?);
        let place = lab.fresh("saved")?;
        let saving = format!("--checkpoint {} --every {every} --keep 2", place.display());
        with.push(lab.train_in(&cluster, &format!("{task} {saving}"))?);
    }
    let median = |reports: &[Report], of: &dyn Fn(&Report) -> f64| {
        median(reports.iter().map(of).collect()).unwrap_or(f64::NAN)
    };
    let checkpoints = (steps / every) as f64;
    let step = median(&without, &|report| report.step_seconds.median);
    let seconds = [&without, &with].map(|side| median(side, &|report| report.seconds));
    let pause = (seconds[1] - seconds[0]) / checkpoints;
    let mut text = format!(
        "The built-in net `mlp` on {nodes} nodes with ports of {mbit} Mbit/s, on a virtual cluster of this \
         machine. {steps} steps, a checkpoint to a folder after every {every}, {rounds} rounds in turn. \
         Medians of the rounds.\n\n| | median step, ms | 90% of steps, ms | all steps, s |\n| --- | ---: | ---: | ---: |\n"
    );
    for (name, side) in [("without", &without), ("with checkpoints", &with)] {
        text += &format!(
            "| {name} | {:.2} | {:.2} | {:.2} |\n",
            1e3 * median(side, &|report| report.step_seconds.median),
            1e3 * median(side, &|report| report.step_seconds.p90),
            median(side, &|report| report.seconds),
        );
    }
    text += &format!(
        "\nDivided by the number of checkpoints, the difference is {:.2} ms, {:.1}% of a step. It includes \
         what writing takes from the cores that train. A difference below 0 is noise.\n",
        1e3 * pause,
        100.0 * pause / step
    );
    Ok(Finding { text, verdicts: Vec::new() })
}

impl Lab<'_> {
    /// How often all sides of a part take their turn, unless it is a try or told otherwise.
    fn rounds(&self, usual: usize) -> usize {
        self.args.rounds.unwrap_or(if self.args.quick { 1 } else { usual })
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

    /// Trains with one worker on every node of `cluster`.
    fn train_in(&self, cluster: &Cluster, words: &str) -> Result<Report> {
        let mut all = cluster.on_every_node();
        all.arg(environment::poseidon());
        self.finish(all, &format!("{words} --link tcp"))
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
        let raw = self.folder.join("raw.jsonl");
        let mut lines = fs::read_to_string(&raw).unwrap_or_default();
        lines += &format!("{json}\n");
        // Places of checkpoints are named from the root.
        let whole = fs::canonicalize(&self.scratch)?.display().to_string();
        let lines = lines.replace(&whole, "SCRATCH");
        let lines = lines.replace(&self.scratch.display().to_string(), "SCRATCH");
        record::write(&self.folder, "raw.jsonl", &lines)?;
        Ok(report)
    }

    /// Trains with checkpoints in `place` until there is one of `step`, then kills a worker.
    fn train_until_killed(&self, words: &str, place: &Path, step: u64) -> Result<()> {
        let mut command = command(&[environment::poseidon().display().to_string()]);
        command.arg("train").args(words.split_whitespace()).arg("--checkpoint").arg(place);
        command.arg("--report").arg(self.scratch.join("killed"));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().context("starting a run")?;
        let killed = kill_after(&mut child, &place.join(format!("step-{step:012}/manifest.json")));
        crate::command::end(&mut child)?;
        killed
    }
}

/// Waits until `file` is there, kills a worker of the run `child`, and waits for the run's end.
fn kill_after(child: &mut Child, file: &Path) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while !file.exists() {
        ensure!(child.try_wait()?.is_none(), "the run ended before it had saved anything");
        ensure!(Instant::now() < deadline, "nothing was saved in time");
        std::thread::sleep(Duration::from_millis(5));
    }
    let workers = children(child.id())?;
    let worker = workers.last().context("the run has no processes")?;
    let killed = Command::new("kill").args(["-9", &worker.to_string()]).status()?;
    ensure!(killed.success(), "process {worker} could not be killed");
    let status = wait_until(child, Instant::now() + LIMIT)?;
    let status = status.context("the run did not end after one of its processes was killed")?;
    ensure!(!status.success(), "the run did not notice that one of its processes was killed");
    Ok(())
}

/// The processes that `parent` has started.
fn children(parent: u32) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for task in fs::read_dir(format!("/proc/{parent}/task"))? {
        let text = fs::read_to_string(task?.path().join("children"))?;
        found.extend(text.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
    }
    found.sort_unstable();
    Ok(found)
}

/// No run takes longer.
const LIMIT: Duration = Duration::from_secs(600);
