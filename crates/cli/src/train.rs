//! `poseidon train`: the main job. Trains a net with the built-in engine, on this machine or on many.

mod facts;
mod inputs;
mod outline;
mod pace;
mod saving;
mod screen;
mod settings;
mod thinned;
mod turnout;
mod worker;

use crate::dashboard::{Dashboard, PageAddress};
use crate::job::{Job, Size};
use crate::job_report;
use crate::supervise::{self, Options};
use crate::terminal::say;
use anyhow::{Context, bail};
use poseidon::config::{LinkRate, encryption_wanted};
use poseidon::{Config, Limit};
use settings::{Flags, Settings};
use std::process::{Command, ExitCode};

/// Train a net: data-parallel, with wait-free backpropagation and hybrid communication.
///
/// Without arguments, four workers on this machine train a small convolutional net on a bundled data
/// set, which takes well under two minutes. Every worker is a process of its own and also serves
/// its share of the parameters.
///
/// A layer is sent the moment its backward pass ends, and awaited only when its next forward needs
/// it. Fully connected layers whose factors are smaller than their gradients go from worker to worker
/// as factors; everything else goes through the sharded parameter server. The plan that is printed
/// first says which layer goes how, and why.
///
/// Started by torchrun, mpirun, srun or 'poseidon launch', or with --rank, --world and --coordinator,
/// it is one worker of a larger job.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    flags: Flags,

    /// Print the effective configuration as TOML and stop.
    #[arg(long)]
    print_config: bool,

    /// Print the model as TOML and stop: a beginning for one of your own.
    #[arg(long)]
    print_model: bool,

    /// Print report.json on standard output when done, and nothing else there.
    #[arg(long)]
    json: bool,

    /// This process's rank, in a job whose processes you start one by one.
    #[arg(long, value_name = "R", requires_all = ["world", "coordinator"])]
    rank: Option<u16>,

    /// Number of workers in that job.
    #[arg(long, value_name = "N", requires = "rank")]
    world: Option<u16>,

    /// Where the workers of that job meet: an address of worker 0, which listens there.
    #[arg(long, value_name = "HOST:PORT", requires = "rank")]
    coordinator: Option<String>,

    /// What this node's port carries, such as 10gbit; 'auto' measures it in a job of several hosts
    /// [default: auto, or POSEIDON_LINK_RATE].
    #[arg(long, value_name = "RATE|auto|unknown")]
    link_rate: Option<LinkRate>,

    /// What each node may send to other hosts, such as 400mbit; 'none' is no limit
    /// [default: none, or POSEIDON_BANDWIDTH_BUDGET].
    #[arg(long, value_name = "RATE|none")]
    bandwidth_budget: Option<Limit>,

    /// Encrypt everything between hosts. Every node of the job must be told
    /// [default: POSEIDON_ENCRYPT=1].
    #[arg(long)]
    encrypt: bool,

    /// The rack that this node is in: between racks each chunk goes once
    /// [default: POSEIDON_RACK, or Slurm's topology].
    #[arg(long, value_name = "NAME")]
    rack: Option<String>,

    /// Show the job as a page while it runs, at this address. Without a host, only this machine can
    /// see it: ':8080' is http://127.0.0.1:8080. 'poseidon top' shows the same in a terminal.
    #[arg(long, value_name = "[HOST]:PORT", env = "POSEIDON_DASHBOARD")]
    dashboard: Option<PageAddress>,
}

/// Trains, or starts the workers that do.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let settings = Settings::from_flags(&args.flags)?;
    if args.print_config {
        say(&settings.to_toml()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.print_model {
        say(&toml::to_string(&settings.model()?)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if settings.bare {
        worker::run_alone(&settings, args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.rank.is_none() && !Config::is_launched() {
        // Better to find out before there are several processes to say so.
        settings.check_workers()?;
        settings.check()?;
        settings.prepare_report()?;
        return start_workers(&args, &settings);
    }
    let variable = |name: &str| match (name, args.rank) {
        ("RANK", Some(rank)) => Some(rank.to_string()),
        ("WORLD_SIZE", Some(_)) => args.world.map(|world| world.to_string()),
        ("POSEIDON_COORDINATOR", Some(_)) => args.coordinator.clone(),
        _ => std::env::var(name).ok(),
    };
    let mut config = Config::from_variables(&variable)?;
    settings.apply_to(&mut config);
    config.link_rate = args.link_rate.unwrap_or(config.link_rate);
    config.bandwidth_budget =
        args.bandwidth_budget.map_or(config.bandwidth_budget, |limit| limit.0);
    config.encrypt |= args.encrypt;
    config.rack = args.rack.clone().or(config.rack);
    if args.flags.workers.is_some_and(|workers| workers != config.workers) {
        let (asked, found) = (settings.workers, config.workers);
        bail!(
            "--workers {asked}, but this process was started as one of {found}: leave --workers out"
        );
    }
    let settings = Settings { workers: config.workers, servers: config.servers, ..settings };
    settings.check_workers()?;
    // Where there is a launcher of ours, it has the coordinator, and shows the job.
    let shown = args.dashboard.filter(|_| config.serves_coordinator);
    let _dashboard = Dashboard::beside(shown, &config)?;
    worker::run(&settings, config, args.json)?;
    Ok(ExitCode::SUCCESS)
}

/// Starts the workers of a job on this machine. Worker 0 draws.
fn start_workers(args: &Args, settings: &Settings) -> anyhow::Result<ExitCode> {
    let job = Job::start(Size {
        workers: settings.workers,
        servers: settings.servers,
        lanes: settings.lanes,
        budget: args.bandwidth_budget,
        encrypt: args.encrypt || encryption_wanted()?,
        address: [127, 0, 0, 1].into(),
    })?;
    let _dashboard = Dashboard::of_job(args.dashboard, &job)?;
    let command = || {
        let mut command: Command = job.own_program();
        command.args(std::env::args_os().skip(1));
        if let Some(link) = args.flags.link {
            command.env("POSEIDON_LINK", link.to_string());
        }
        command
    };
    let mut processes = job.processes(command);
    processes.first_mut().context("a job has a worker")?.draws = true;
    let outcome = supervise::run(processes, Options::default())?;
    job_report::after_job();
    Ok(outcome.tell())
}

const EXAMPLES: &str = "\
Examples:
  Train on the bundled data with 8 workers, and put the report elsewhere:
    poseidon train --workers 8 --report runs/eight

  CIFAR-10, with Caffe's quick model:
    poseidon data fetch cifar10
    poseidon train --model cifar10-quick --data cifar10 --batch 25 --epochs 20

  What hybrid communication is worth: the same with a parameter server alone:
    poseidon train --model alexnet-small --data cifar10 --scheme ps

  A net of your own, beginning with one that is built in:
    poseidon train --model lenet --print-model > my-net.toml
    poseidon train --model my-net.toml --data 'images:photos?size=28x28'

  Save the state every 500 steps and keep the last three; go on after an interruption:
    poseidon train --checkpoint runs/a --every 500 --keep 3
    poseidon train --resume runs/a

  Watch it in a browser, at http://127.0.0.1:8080:
    poseidon train --dashboard :8080

  On two machines, one command each; both need the same secret (POSEIDON_SECRET):
    poseidon train --rank 0 --world 2 --coordinator 10.0.0.1:29600
    poseidon train --rank 1 --world 2 --coordinator 10.0.0.1:29600

  Under a launcher:
    mpirun -n 4 poseidon train
    torchrun --nproc-per-node 4 --no-python poseidon train";
