//! A run that was killed and resumed ends as one that was not.

use super::{LIMIT, Lab, Report};
use crate::bench::environment;
use crate::bench::finding::Finding;
use crate::bench::targets::Verdict;
use crate::command::{command, end, lines_within, wait_until};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How jobs are trained. With hosts, every rank is told its own, as on a cluster.
const WAYS: [(&str, &str, Start); 9] = [
    ("parameter server, momentum", "--scheme ps", Start::Launcher),
    ("factors, momentum", "--scheme sfb", Start::Launcher),
    ("auto, momentum", "--scheme auto", Start::Launcher),
    ("auto, Adam", "--scheme auto --optimizer adam --lr 0.001", Start::Launcher),
    ("dedicated servers, Adam", "--servers 2 --optimizer adam --lr 0.001", Start::Launcher),
    ("two threads per worker", "--threads-per-worker 2", Start::Launcher),
    ("two hosts of two ranks, parameter server, momentum", "--scheme ps", Start::TwoHosts),
    ("two hosts of two ranks, factors, momentum", "--scheme sfb", Start::TwoHosts),
    (
        "two hosts of two ranks, auto, Adam",
        "--scheme auto --optimizer adam --lr 0.001",
        Start::TwoHosts,
    ),
];

const WORKERS: usize = 4;

/// Who starts the processes of a job.
#[derive(Clone, Copy)]
enum Start {
    /// `poseidon train` starts its workers on this host.
    Launcher,
    /// Every rank is started by itself and told which of two hosts it counts as on.
    TwoHosts,
}

/// The built-in net, by `poseidon train`.
pub(super) fn built_in(lab: &Lab<'_>) -> Result<Finding> {
    let steps = lab.steps();
    let mut text = format!(
        "Four workers train the built-in net, deterministic: {steps} steps at once, and half of them, a \
         kill -9 of one of its processes, and the rest. Hosts are names that ranks were given: ranks of \
         one name share memory and contribute together.\n\n\
         | | parameters at once | after the kill | |\n| --- | --- | --- | --- |\n"
    );
    let mut equal = 0;
    for (name, how, start) in WAYS {
        println!("equality: {name}");
        let task = format!("--deterministic --test never {how}");
        let whole = train(lab, start, &format!("{task} --steps {steps}"))?;
        let place = lab.fresh("saved")?;
        let half = steps / 2;
        let words = format!("{task} --steps 1000000 --every {half}");
        train_until_killed(lab, start, &words, &place, half)?;
        let place = place.display();
        let resumed = train(lab, start, &format!("--resume {place}@{half} --steps {steps}"))?;
        ensure!(resumed.steps == steps, "it went on to step {} of {steps}", resumed.steps);
        let same = whole.parameter_digest == resumed.parameter_digest;
        equal += usize::from(same);
        text += &row(name, &whole.parameter_digest, &resumed.parameter_digest);
    }
    Ok(Finding { text, verdicts: vec![verdict(equal, WAYS.len())] })
}

/// A case of `bench/peers/torch_resume.py`.
#[derive(Debug, Deserialize)]
struct Case {
    case: String,
    whole: String,
    resumed: String,
}

/// PyTorch, by `psd.save` and `psd.load`.
pub(super) fn pytorch(lab: &Lab<'_>) -> Result<Finding> {
    let (steps, device) = (lab.steps().to_string(), lab.args.device.name());
    let place = lab.fresh("saved")?;
    let mut run = command(&[lab.python()?, "bench/peers/torch_resume.py"]);
    run.args(["--steps", &steps, "--device", device, "--folder"]).arg(&place);
    let (mut rows, mut equal, mut all) = (String::new(), 0, 0);
    // It runs three jobs.
    lines_within(&mut run, 3 * LIMIT, |line| {
        if !line.starts_with('{') {
            return Ok(());
        }
        lab.record(line)?;
        let Case { case, whole, resumed } = serde_json::from_str(line)?;
        equal += usize::from(whole == resumed);
        all += 1;
        rows += &row(&case, &whole, &resumed);
        Ok(())
    })?;
    ensure!(all > 0, "no case was reported");
    let text = format!(
        "Four ranks, two on each of two hosts (names, as above), train a small net with `deterministic=True` \
         on {device}: {steps} steps at once, and half of them, `psd.save`, ten more, a kill -9 of one \
         rank, `psd.load` and the rest. Digests are of the model's and the optimizer's state. \
         `worker` and `server` say who steps.\n\n\
         | | state at once | after the kill | |\n| --- | --- | --- | --- |\n{rows}"
    );
    Ok(Finding { text, verdicts: vec![verdict(equal, all)] })
}

fn row(name: &str, whole: &str, resumed: &str) -> String {
    let word = if whole == resumed { "equal" } else { "**different**" };
    let short = |digest: &str| digest.get(..12).unwrap_or(digest).to_owned();
    format!("| {name} | `{}` | `{}` | {word} |\n", short(whole), short(resumed))
}

fn verdict(equal: usize, all: usize) -> Verdict {
    Verdict {
        target: "equal digests".into(),
        measured: format!("{equal} of {all}"),
        met: Some(equal == all),
    }
}

/// Trains, and returns what the run reports.
fn train(lab: &Lab<'_>, start: Start, words: &str) -> Result<Report> {
    match start {
        Start::Launcher => lab.train(words),
        Start::TwoHosts => {
            let mut others = Vec::new();
            let mut ranks = two_hosts()?;
            let first = ranks.remove(0);
            for mut rank in ranks {
                rank.arg("train").args(words.split_whitespace());
                rank.stdout(Stdio::null()).stderr(Stdio::null());
                others.push(rank.spawn().context("starting a rank")?);
            }
            let report = lab.finish(first, words);
            for mut other in others {
                match &report {
                    Ok(_) => {
                        let status = wait_until(&mut other, Instant::now() + LIMIT)?;
                        let status = status.context("a rank does not end")?;
                        ensure!(status.success(), "a rank ended with {status}");
                    }
                    Err(_) => end(&mut other)?,
                }
            }
            report
        }
    }
}

/// Trains with checkpoints in `place` until there is one of `step`, then kills a worker.
fn train_until_killed(
    lab: &Lab<'_>,
    start: Start,
    words: &str,
    place: &Path,
    step: u64,
) -> Result<()> {
    let words = format!("{words} --checkpoint {}", place.display());
    let mut commands = match start {
        Start::Launcher => vec![command(&[environment::poseidon().display().to_string()])],
        Start::TwoHosts => two_hosts()?,
    };
    for command in &mut commands {
        command.arg("train").args(words.split_whitespace());
        command.arg("--report").arg(lab.scratch.join("killed"));
        command.stdout(Stdio::null()).stderr(Stdio::null());
    }
    let mut started = Vec::new();
    for command in &mut commands {
        started.push(command.spawn().context("starting a run")?);
    }
    let file = place.join(format!("step-{step:012}/manifest.json"));
    let killed = kill_after(start, &mut started, &file);
    started.iter_mut().try_for_each(end)?;
    killed
}

/// Waits until `file` is there, kills a worker of the run, and waits for the run's end.
fn kill_after(start: Start, started: &mut [Child], file: &Path) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while !file.exists() {
        for child in &mut *started {
            ensure!(child.try_wait()?.is_none(), "the run ended before it had saved anything");
        }
        ensure!(Instant::now() < deadline, "nothing was saved in time");
        std::thread::sleep(Duration::from_millis(5));
    }
    let worker = match start {
        Start::Launcher => {
            let workers = children(started[0].id())?;
            *workers.last().context("the run has no processes")?
        }
        Start::TwoHosts => started.last().context("nothing was started")?.id(),
    };
    let killed = Command::new("kill").args(["-9", &worker.to_string()]).status()?;
    ensure!(killed.success(), "process {worker} could not be killed");
    for child in started {
        let status = wait_until(child, Instant::now() + LIMIT)?;
        let status = status.context("the run did not end after one of its processes was killed")?;
        ensure!(!status.success(), "the run did not notice that one of its processes was killed");
    }
    Ok(())
}

/// The `poseidon` command for every rank of a job, half of them on each of two hosts.
fn two_hosts() -> Result<Vec<Command>> {
    // The one after it is the coordinator's.
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let per_host = WORKERS / 2;
    let rank = |rank: usize| {
        let mut command = command(&[environment::poseidon().display().to_string()]);
        for (name, number) in [
            ("RANK", rank),
            ("WORLD_SIZE", WORKERS),
            ("LOCAL_RANK", rank % per_host),
            ("LOCAL_WORLD_SIZE", per_host),
            ("MASTER_PORT", port.into()),
        ] {
            command.env(name, number.to_string());
        }
        command.env("MASTER_ADDR", "127.0.0.1").env("POSEIDON_SECRET", "known to the benchmark");
        command.env("POSEIDON_HOST", format!("host{}", rank / per_host));
        command
    };
    Ok((0..WORKERS).map(rank).collect())
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
