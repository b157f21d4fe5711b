//! `poseidon bench exchange`: pure parameter exchange, with infinitely fast compute.
//!
//! PHub's ZeroComputeEngine (§2): what is left of a training step when computing costs nothing.

use super::payload::What;
use super::report::{CpuOf, Report, Summary};
use super::servers::ServerProcesses;
use super::worker::{Exchange, Turn, Worker};
use crate::job::{Job, Size};
use crate::launch::at_least_1;
use crate::supervise::{self, Options};
use crate::terminal::say;
use anyhow::{Context, ensure};
use clap::ValueEnum;
use poseidon::config::{Carriers, LinkRate, Member, encryption_wanted};
use poseidon::{ChunkSize, Config, Encoding, Limit, Optimizer, Reduction, Scheme, Servers};
use std::io::BufRead;
use std::process::{Command, ExitCode};
use std::time::Duration;

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

    /// Size of the model, such as 64KB or 100MB (powers of 1024). Several are measured one after the
    /// other, each with a report of its own.
    #[arg(long, value_name = "N,…", default_value = "100MB", value_delimiter = ',', value_parser = bytes)]
    bytes: Vec<usize>,

    /// Iterations to measure, after three that are not.
    #[arg(long, value_name = "I", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,

    /// Where parameters live: 'colocated', a number of dedicated servers, or 'colocated+M'
    /// [default: colocated; with --in-cluster, what the job's environment says].
    #[arg(long, value_name = "colocated|M")]
    servers: Option<Servers>,

    /// What shards do: 'sum', 'mean', 'sgd:momentum=0.9', 'caffe-sgd', 'adam', 'adamw', …
    #[arg(long, value_name = "RULE", default_value = "sum")]
    optimizer: Optimizer,

    /// How the model goes: through the shards ('ps'), or as one fully connected layer by its factors
    /// ('sfb'), a matrix of --bytes as near to a square as divides them.
    #[arg(long, value_name = "ps|sfb", default_value_t = Scheme::Ps, value_parser = scheme)]
    scheme: Scheme,

    /// With --scheme sfb: rows of factors each worker has, which is its batch.
    #[arg(long, value_name = "K", default_value_t = 32, value_parser = at_least_1)]
    rows: u16,

    /// With --scheme ps: the model is this many layers of equal size. Gradients are sent from the last
    /// layer to the first, as a backward pass ends with them.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_1)]
    layers: u16,

    /// With --scheme ps: how numbers travel. The model has twice as many numbers of 'bf16' or 'f16'.
    #[arg(long, value_name = "f32|bf16|f16", default_value_t = Encoding::F32)]
    encoding: Encoding,

    /// Have a group sum a tensor of --bytes, instead of synchronising a model.
    #[arg(long, value_enum, conflicts_with = "scheme")]
    collective: Option<Collective>,

    /// Threads per core that compute meanwhile, on the whole machine once. Their time is not in the
    /// CPU time that is reported.
    #[arg(long, value_name = "N", default_value_t = 0)]
    busy: u16,

    /// Largest chunk.
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    chunk: Option<usize>,

    /// Lanes per process [default: half the cores, shared by the processes; between hosts, as many of
    /// them as the slowest port needs].
    #[arg(long, value_name = "L", value_parser = at_least_1)]
    lanes: Option<u16>,

    /// What carries links: 'auto' is shared memory within a machine and TCP between machines.
    #[arg(long, value_name = "auto|tcp|unix", default_value_t = Carriers::Auto)]
    link: Carriers,

    /// What this node's port carries, such as 10gbit; 'auto' measures it in a job of several hosts
    /// [default: auto, or POSEIDON_LINK_RATE].
    #[arg(long, value_name = "RATE|auto|unknown")]
    link_rate: Option<LinkRate>,

    /// What each node may send to other hosts, such as 400mbit; 'none' is no limit
    /// [default: none, or POSEIDON_BANDWIDTH_BUDGET].
    #[arg(long, value_name = "RATE|none")]
    bandwidth_budget: Option<Limit>,

    /// Encrypt what goes by TCP [default: POSEIDON_ENCRYPT=1].
    #[arg(long)]
    encrypt: bool,

    /// Print one JSON object and nothing else.
    #[arg(long)]
    json: bool,

    /// Be one worker of a job that is already running (torchrun, mpirun, srun, poseidon launch)
    /// instead of starting one. Rank 0 prints.
    #[arg(long)]
    in_cluster: bool,

    /// With --in-cluster: say 'ready', then measure what is asked for. Every line of rank 0's standard
    /// input, 'BYTES ITERS', is a turn of so many iterations after one that is not counted; the answer
    /// is one JSON object on a line. It ends when the input does.
    #[arg(long, requires = "in_cluster", conflicts_with_all = ["iters", "busy"])]
    turns: bool,

    /// Be one worker of a job this command has started; print what it measured.
    #[arg(long, hide = true)]
    worker: bool,
}

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Collective {
    /// Everybody's tensors become their sum, in place.
    AllReduce,
}

/// Iterations before the first measured one.
const WARM_UP: u32 = 3;
/// The same in a turn: connections that have been idle begin slowly again, memory is warm.
const TURN_WARM_UP: u32 = 1;
/// How long a worker waits for its next turn, while others have theirs.
const TURN_PATIENCE: Duration = Duration::from_secs(1800);

/// Runs the benchmark, or one worker of it.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let exchange = args.exchange()?;
    if args.worker {
        return be_worker(&args, &exchange);
    }
    if args.in_cluster {
        return be_rank(&args, &exchange);
    }
    let by_worker = match start_workers(&args)? {
        Ok(reports) => reports,
        Err(code) => return Ok(code),
    };
    for (position, turn) in args.each_size().enumerate() {
        let reports: Option<Vec<_>> =
            by_worker.iter().map(|sizes| sizes.get(position).cloned()).collect();
        let reports = reports.context("a worker left a size out")?;
        args.tell(&Summary::new(&reports, turn, &exchange, args.link.to_string(), CpuOf::All)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One worker of a job this command has started. Worker 0 counts the servers' CPU time.
fn be_worker(args: &Args, exchange: &Exchange) -> anyhow::Result<ExitCode> {
    let config = args.config()?;
    let first = config.member == Member::Worker(0);
    let counted = if first { config.servers.extra() } else { 0 };
    let mut worker = Worker::join(exchange, &config, || ServerProcesses::beside(counted))?;
    let reports: Result<Vec<Report>, _> =
        args.each_size().map(|turn| worker.measure(turn)).collect();
    let reports = reports?;
    worker.finish()?;
    say(&(serde_json::to_string(&reports)? + "\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// One worker of a job that somebody else has started. Rank 0 prints.
fn be_rank(args: &Args, exchange: &Exchange) -> anyhow::Result<ExitCode> {
    let mut config = args.config()?;
    if args.turns {
        config.timeout = config.timeout.max(TURN_PATIENCE);
    }
    let mut worker = Worker::join(exchange, &config, || Ok(ServerProcesses::default()))?;
    let cpu_of = if config.servers.extra() > 0 { CpuOf::Workers } else { CpuOf::All };
    let measure = |worker: &mut Worker, turn| -> anyhow::Result<()> {
        let report = worker.measure(turn)?;
        let reports = worker.gather(&report)?;
        if worker.rank() == 0 {
            let link = args.link.to_string();
            args.tell(&Summary::new(&reports, turn, exchange, link, cpu_of)?)?;
        }
        Ok(())
    };
    if !args.turns {
        args.each_size().try_for_each(|turn| measure(&mut worker, turn))?;
        worker.finish()?;
        return Ok(ExitCode::SUCCESS);
    }
    if worker.rank() == 0 {
        say("ready\n")?;
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        let asked = match worker.rank() {
            0 => lines.next().transpose()?.map(|line| parse_turn(&line)).transpose()?,
            _ => None,
        };
        let Some(turn) = worker.agree(asked)? else { break };
        measure(&mut worker, turn)?;
    }
    worker.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// 'BYTES ITERS'.
fn parse_turn(line: &str) -> anyhow::Result<Turn> {
    let expected = || format!("expected the bytes and the iterations of a turn, got '{line}'");
    let (bytes, iters) = line.split_once(' ').with_context(expected)?;
    let bytes = bytes.parse().with_context(expected)?;
    let iters = iters.parse().with_context(expected)?;
    ensure!(iters > 0, expected());
    Ok(Turn { bytes, iters, warm_up: TURN_WARM_UP })
}

/// By worker: its report of every size. The exit code is of a run that failed, which has been told.
fn start_workers(args: &Args) -> anyhow::Result<Result<Vec<Vec<Report>>, ExitCode>> {
    let job = Job::start(Size {
        workers: args.workers,
        servers: args.servers.unwrap_or(Servers::Colocated),
        lanes: args.lanes,
        budget: args.bandwidth_budget,
        encrypt: args.encrypt || encryption_wanted()?,
        address: [127, 0, 0, 1].into(),
    })?;
    let command = || {
        let mut command: Command = job.own_program();
        command.args(std::env::args_os().skip(1)).arg("--worker");
        command.env("POSEIDON_LINK", args.link.to_string());
        command
    };
    let options = Options { capture_stdout: true, ..Options::default() };
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
    fn exchange(&self) -> anyhow::Result<Exchange> {
        let what = match (self.collective, self.scheme) {
            (Some(Collective::AllReduce), _) => What::AllReduce,
            (None, Scheme::Sfb) => What::Factors { rows: self.rows.into() },
            (None, _) => What::Push { layers: self.layers.into(), encoding: self.encoding },
        };
        let sums = self.optimizer == Optimizer::Reduce(Reduction::Sum);
        ensure!(
            matches!(what, What::Push { .. }) || sums,
            "factors and collectives are measured as sums: expected --optimizer sum, got {}",
            self.optimizer
        );
        let halves = self.encoding != Encoding::F32;
        ensure!(
            !halves || matches!(what, What::Push { .. }),
            "factors and collectives are measured in f32: expected no --encoding, got {}",
            self.encoding
        );
        Ok(Exchange {
            what,
            sizes: self.bytes.clone(),
            optimizer: self.optimizer.clone(),
            chunk: self.chunk.map_or(ChunkSize::default(), ChunkSize::at_most),
            busy: self.busy,
        })
    }

    /// What is measured unless turns are asked for.
    fn each_size(&self) -> impl Iterator<Item = Turn> {
        let (iters, warm_up) = (self.iters, WARM_UP);
        self.bytes.iter().map(move |&bytes| Turn { bytes, iters, warm_up })
    }

    fn tell(&self, summary: &Summary) -> anyhow::Result<()> {
        let text = match self.json || self.turns {
            true => serde_json::to_string(summary)?,
            false => summary.to_string(),
        };
        say(&(text + "\n"))
    }

    fn config(&self) -> anyhow::Result<Config> {
        let mut config = Config::from_env()?;
        config.link_rate = self.link_rate.unwrap_or(config.link_rate);
        config.bandwidth_budget =
            self.bandwidth_budget.map_or(config.bandwidth_budget, |limit| limit.0);
        config.encrypt |= self.encrypt;
        if self.in_cluster {
            config.carrier = self.link;
            config.servers = self.servers.unwrap_or(config.servers);
            if let Some(lanes) = self.lanes {
                (config.lanes, config.lanes_by_rate) = (lanes, false);
            }
        }
        Ok(config)
    }
}

fn scheme(text: &str) -> Result<Scheme, String> {
    match text {
        "ps" => Ok(Scheme::Ps),
        "sfb" => Ok(Scheme::Sfb),
        _ => Err(format!("expected ps or sfb, got '{text}'")),
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

  A fully connected layer by factors, and a tensor by all_reduce:
    poseidon bench exchange --scheme sfb --rows 32 --bytes 10MB --link tcp
    poseidon bench exchange --collective all_reduce --bytes 10MB --link tcp

  Many layers in half precision:
    poseidon bench exchange --layers 100 --encoding bf16

  Beside a busy thread on every core:
    poseidon bench exchange --workers 4 --busy 1

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

    #[test]
    fn a_turn_is_two_numbers() {
        let turn = Turn { bytes: 4096, iters: 7, warm_up: TURN_WARM_UP };
        assert_eq!(parse_turn("4096 7").unwrap(), turn);
        for bad in ["", "4096", "4096 0", "4096 -1", "4096 7 9", "many 7"] {
            assert!(parse_turn(bad).unwrap_err().to_string().contains("expected"), "{bad}");
        }
    }
}
