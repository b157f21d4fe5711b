//! `poseidon bench exchange`: pure parameter exchange, with infinitely fast compute.
//!
//! PHub's ZeroComputeEngine (§2): what is left of a training step when computing costs nothing.

use super::report::{Report, Summary};
use super::worker::{self, Exchange};
use crate::job::{Job, Size};
use crate::launch::at_least_1;
use crate::supervise::{self, Options};
use anyhow::{Context, ensure};
use poseidon::config::Carriers;
use poseidon::{ChunkSize, Config, Optimizer, Servers};
use std::process::{Command, ExitCode};

/// Exchange parameters as fast as possible, with no computing in between.
///
/// Every iteration each worker contributes a buffer of float32 and ends with the reduced result in
/// its own memory, as in an all-reduce. The time of an iteration is the slowest worker's. Results
/// are checked on every iteration, outside the timed part.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Worker processes to start.
    #[arg(long, short = 'n', value_name = "P", default_value_t = 4, value_parser = at_least_1)]
    workers: u16,

    /// Size of the model, such as 64KB or 100MB (powers of 1024).
    #[arg(long, value_name = "N", default_value = "100MB", value_parser = bytes)]
    bytes: usize,

    /// Iterations to measure, after three that are not.
    #[arg(long, value_name = "I", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,

    /// Where parameters live: 'colocated', a number of dedicated servers, or 'colocated+M'.
    #[arg(long, value_name = "colocated|M", default_value_t = Servers::Colocated)]
    servers: Servers,

    /// What shards do: 'sum', 'mean', 'sgd:momentum=0.9', 'caffe-sgd', 'adam', 'adamw', …
    #[arg(long, value_name = "RULE", default_value = "sum")]
    optimizer: Optimizer,

    /// Largest chunk.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    chunk: Option<usize>,

    /// Lanes per process [default: half the cores, shared by the processes].
    #[arg(long, value_name = "L", value_parser = at_least_1)]
    lanes: Option<u16>,

    /// What carries links: 'auto' is shared memory within a machine and TCP between machines.
    #[arg(long, value_name = "auto|tcp|unix", default_value_t = Carriers::Auto)]
    link: Carriers,

    /// Print one JSON object and nothing else.
    #[arg(long)]
    json: bool,

    /// Be one worker of a job that is already running (torchrun, mpirun, srun, poseidon launch)
    /// instead of starting one. Rank 0 prints.
    #[arg(long)]
    in_cluster: bool,

    /// Be one worker of a job this command has started; print what it measured.
    #[arg(long, hide = true)]
    worker: bool,
}

/// Runs the benchmark, or one worker of it.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.worker {
        let report = worker::run(&args.exchange(), &args.config()?)?;
        println!("{}", serde_json::to_string(&report)?);
        return Ok(ExitCode::SUCCESS);
    }
    let reports = if args.in_cluster {
        match worker::run_and_gather(&args.exchange(), &args.config()?)? {
            Some(reports) => reports,
            None => return Ok(ExitCode::SUCCESS),
        }
    } else {
        match start_workers(&args)? {
            Ok(reports) => reports,
            Err(code) => return Ok(code),
        }
    };
    let summary = Summary::new(&reports, &args.exchange(), args.link.to_string())?;
    if args.json {
        println!("{}", serde_json::to_string(&summary)?);
    } else {
        println!("{summary}");
    }
    Ok(ExitCode::SUCCESS)
}

fn start_workers(args: &Args) -> anyhow::Result<Result<Vec<Report>, ExitCode>> {
    let job = Job::start(Size {
        workers: args.workers,
        servers: args.servers,
        lanes: args.lanes,
        address: [127, 0, 0, 1].into(),
    })?;
    let command = || {
        let mut command: Command = job.own_program();
        command.args(std::env::args_os().skip(1)).arg("--worker");
        command.env("POSEIDON_LINK", args.link.to_string());
        command
    };
    let options = Options { capture_stdout: true };
    let outcome = supervise::run(job.processes(command), options)?;
    if outcome.status() != 0 {
        return Ok(Err(outcome.tell()));
    }
    let workers = outcome.processes.iter().take(args.workers.into());
    let reports = workers.map(|worker| {
        serde_json::from_slice(&worker.stdout)
            .with_context(|| format!("{} reported something else than a report", worker.name))
    });
    Ok(Ok(reports.collect::<anyhow::Result<_>>()?))
}

impl Args {
    fn exchange(&self) -> Exchange {
        Exchange {
            bytes: self.bytes,
            iters: self.iters,
            optimizer: self.optimizer.clone(),
            chunk: self.chunk.map_or(ChunkSize::default(), ChunkSize::at_most),
        }
    }

    fn config(&self) -> anyhow::Result<Config> {
        let mut config = Config::from_env()?;
        if self.in_cluster {
            config.carrier = self.link;
            config.servers = self.servers;
            config.lanes = self.lanes.unwrap_or(config.lanes);
            ensure!(
                self.optimizer.is_stateless(),
                "--in-cluster gathers its figures with the exchange itself: expected --optimizer sum or mean, got {}",
                self.optimizer
            );
        }
        Ok(config)
    }
}

/// A size of whole floats, as people write it.
pub(super) fn bytes(text: &str) -> Result<usize, String> {
    let expected = || format!("expected a size such as 4096, 64KB or 100MB, got '{text}'");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "B" => 1,
        "KB" | "KiB" | "K" => 1 << 10,
        "MB" | "MiB" | "M" => 1 << 20,
        "GB" | "GiB" | "G" => 1 << 30,
        _ => return Err(expected()),
    };
    let count: usize = digits.parse().map_err(|_| expected())?;
    let bytes = count.checked_mul(unit).ok_or_else(expected)?;
    if bytes == 0 || bytes % 4 != 0 {
        return Err(format!("{expected}: a positive multiple of 4 bytes", expected = expected()));
    }
    Ok(bytes)
}

const EXAMPLES: &str = "\
Examples:
  100 MB between 8 processes over TCP:
    poseidon bench exchange --workers 8 --bytes 100MB --link tcp

  Momentum SGD on two dedicated servers:
    poseidon bench exchange --workers 4 --servers 2 --optimizer sgd:momentum=0.9

  On a cluster, under any launcher:
    mpirun -n 8 poseidon bench exchange --in-cluster --bytes 100MB";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024_and_whole_floats() {
        assert_eq!(bytes("64KB"), Ok(65_536));
        assert_eq!(bytes("100MB"), Ok(104_857_600));
        assert_eq!(bytes("4096"), Ok(4096));
        for bad in ["", "KB", "0", "3", "1.5MB", "-4", "4 parsecs", "99999999999999GB"] {
            assert!(bytes(bad).unwrap_err().contains("expected a size"), "{bad}");
        }
    }
}
