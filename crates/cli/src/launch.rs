//! `poseidon launch`: a whole job on this machine.

use crate::job::{Job, Size};
use crate::supervise::{self, Options};
use poseidon::{Limit, Servers};
use std::ffi::OsString;
use std::net::IpAddr;
use std::process::{Command, ExitCode};

/// Start a job on this machine: N workers that run CMD, and the servers they need.
///
/// Every worker finds in its environment who it is (RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE) and where the others meet (POSEIDON_COORDINATOR and its companions; for
/// programs that also use torch.distributed, MASTER_ADDR and MASTER_PORT). Its lines are printed
/// with its rank before them, and it reads an empty standard input.
///
/// When a worker fails, the others are ended within two seconds, and the exit status is that
/// worker's: 128 + n if signal n killed it. Ctrl-C is passed on to the workers, which may take their
/// time; a second Ctrl-C kills them.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// How many workers to start, at least 1.
    #[arg(short = 'n', long, value_name = "N", value_parser = at_least_1)]
    workers: u16,

    /// Where parameters live: 'colocated' on the workers, on M dedicated server processes, or
    /// 'colocated+M' on both.
    #[arg(long, value_name = "colocated|M|colocated+M", default_value_t = Servers::Colocated)]
    servers: Servers,

    /// Threads, and connections to each peer, that move data in every process [default: each
    /// process decides].
    #[arg(long, value_name = "L", value_parser = at_least_1)]
    lanes: Option<u16>,

    /// What each process may send to other hosts, such as 400mbit; 'none' is no limit
    /// [default: none, or POSEIDON_BANDWIDTH_BUDGET].
    #[arg(long, value_name = "RATE|none")]
    bandwidth_budget: Option<Limit>,

    /// The address of this machine at which the processes of the job meet.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    coordinator_address: IpAddr,

    /// The program each worker runs, and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Runs the job to its end.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let job = Job::start(Size {
        workers: args.workers,
        servers: args.servers,
        lanes: args.lanes,
        budget: args.bandwidth_budget,
        address: args.coordinator_address,
    })?;
    let command = || {
        let mut command = Command::new(&args.command[0]);
        command.args(&args.command[1..]);
        command
    };
    let outcome = supervise::run(job.processes(command), Options::default())?;
    Ok(outcome.tell())
}

pub(crate) fn at_least_1(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(e.to_string()),
    }
}

const EXAMPLES: &str = "\
Examples:
  Four workers, each of which also serves a quarter of the parameters:
    poseidon launch -n 4 -- python train.py

  Two workers and one process that serves all parameters:
    poseidon launch -n 2 --servers 1 -- python train.py --lr 0.1

  See what a worker is told:
    poseidon launch -n 2 -- sh -c 'echo I am $RANK of $WORLD_SIZE'";
