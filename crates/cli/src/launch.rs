//! `poseidon launch`: a whole job, on this machine or on several.

mod as_host;
mod connection;
mod host_list;
mod meeting;
mod over_ssh;
mod protocol;
mod refusal;
mod watch;

use crate::dashboard::{Dashboard, PageAddress};
use crate::job::{Job, Size};
use crate::job_report;
use crate::supervise::{self, Options};
use crate::threads::Threads;
use anyhow::Context;
use poseidon::config::encryption_wanted;
use poseidon::{Limit, Servers};
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Start a job, on this machine or over ssh: N workers that run CMD, and the servers they need.
///
/// Every worker finds in its environment who it is (RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE) and where the others meet (POSEIDON_COORDINATOR and its companions; for
/// programs that also use torch.distributed, MASTER_ADDR and MASTER_PORT). Its lines are printed
/// with its rank before them, and it reads an empty standard input. If OMP_NUM_THREADS is not set,
/// workers get their share of the cores.
///
/// When a worker fails, the others are ended within two seconds, and the exit status is that
/// worker's: 128 + n if signal n killed it. Ctrl-C is passed on to the workers, which may take
/// their time; a second Ctrl-C kills them.
///
/// With --hosts, workers run on other machines: ssh is started once for each of them, with
/// 'poseidon launch --as-host' at its other end, and all of the above holds for workers of all
/// hosts. ssh must need no password. The hosts need the same version of poseidon: at the path of
/// this one, on their PATH, or where --remote-program says. The job's secret goes through ssh's
/// standard input. Workers run in the folder of the same path, and get OMP_NUM_THREADS, what --env
/// names, and the POSEIDON_… variables that are not one machine's own. When ssh or this command
/// dies, hosts end what they run.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// How many workers to start, at least 1 [default with --hosts: one on each host].
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        value_parser = at_least_1,
        required_unless_present_any = ["hosts", "hostfile"]
    )]
    workers: Option<u16>,

    /// Run workers on these hosts, over ssh: a,b,c, or a:4,b:2 with the number of workers of each.
    /// Ranks are given out host by host.
    #[arg(
        long,
        value_name = "HOST[:N],…",
        value_delimiter = ',',
        conflicts_with = "hostfile",
        allow_hyphen_values = true
    )]
    hosts: Vec<String>,

    /// The same from a file: a host on each line, 'host', 'host:4' or 'host slots=4'.
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,

    /// The program that reaches a host, with its flags, separated by spaces. It is started as 'CMD
    /// HOST COMMAND'.
    #[arg(
        long,
        value_name = "CMD",
        default_value = "ssh -o BatchMode=yes",
        allow_hyphen_values = true
    )]
    ssh: String,

    /// The poseidon command of the hosts [default: the path of this one, or the one on their PATH].
    #[arg(long, value_name = "PATH")]
    remote_program: Option<String>,

    /// The folder in which workers run on the hosts [default: the current one].
    #[arg(long, value_name = "DIR")]
    workdir: Option<PathBuf>,

    /// Set a variable for workers on the hosts: NAME takes the value it has here. May be repeated.
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,

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

    /// Encrypt everything between hosts. The processes are told by their environment
    /// [default: POSEIDON_ENCRYPT=1].
    #[arg(long)]
    encrypt: bool,

    /// The address of this machine at which the processes of the job meet [default: 127.0.0.1; with
    /// --hosts, the one from which this machine reaches the hosts].
    #[arg(long, value_name = "IP")]
    coordinator_address: Option<IpAddr>,

    /// Show the job as a page while it runs, at this address. Without a host, only this machine can
    /// see it: ':8080' is http://127.0.0.1:8080.
    #[arg(long, value_name = "[HOST]:PORT", env = "POSEIDON_DASHBOARD")]
    dashboard: Option<PageAddress>,

    /// The program each worker runs, and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Whether the arguments are those with which 'poseidon launch --hosts' starts a host's process. It
/// is no flag of the command: completions and the manual would show it to people.
pub(crate) fn is_host(arguments: impl Iterator<Item = OsString>) -> bool {
    arguments.skip(1).eq(["launch", "--as-host"])
}

/// Runs the processes of this host, as standard input says.
pub(crate) fn run_as_host() -> anyhow::Result<ExitCode> {
    as_host::run()
}

/// Runs the job to its end.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if !args.hosts.is_empty() || args.hostfile.is_some() {
        return run_on_hosts(args);
    }
    let workers = args.workers.context("-n says how many workers to start")?;
    let size = args.size(workers)?;
    let job = Job::start(size)?;
    let _dashboard = Dashboard::of_job(args.dashboard, &job)?;
    let threads = Threads::shared_by(workers);
    let command = || {
        let mut command = Command::new(&args.command[0]);
        command.args(&args.command[1..]);
        threads.describe(&mut command);
        command
    };
    let outcome = supervise::run(job.processes(command), Options::default())?;
    job_report::after_job();
    Ok(outcome.tell())
}

fn run_on_hosts(args: Args) -> anyhow::Result<ExitCode> {
    let hosts = host_list::hosts(&args.hosts, args.hostfile.as_deref(), args.workers)?;
    let size = args.size(hosts.iter().map(|host| host.ranks).sum())?;
    let folder = match args.workdir {
        Some(folder) => folder,
        None => std::env::current_dir().context("there is no current folder: give --workdir")?,
    };
    let plan = over_ssh::Plan {
        hosts,
        ssh: args.ssh.split_whitespace().map(str::to_owned).collect(),
        program: args.remote_program,
        folder,
        environment: over_ssh::environment(&args.env, std::env::vars_os())?,
        command: args.command,
        address: args.coordinator_address,
        dashboard: args.dashboard,
    };
    over_ssh::run(plan, size)
}

impl Args {
    fn size(&self, workers: u16) -> anyhow::Result<Size> {
        Ok(Size {
            workers,
            servers: self.servers,
            lanes: self.lanes,
            budget: self.bandwidth_budget,
            encrypt: self.encrypt || encryption_wanted()?,
            address: self.coordinator_address.unwrap_or(Ipv4Addr::LOCALHOST.into()),
        })
    }
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

  Eight workers on two machines; 'ssh gpu1 true' must work without a password:
    poseidon launch --hosts gpu1:4,gpu2:4 -- python train.py

  The machines of a file, by another port and with another key:
    poseidon launch --hostfile hosts.txt --ssh 'ssh -p 2222 -i key' -- python train.py

  Watch it in a browser, at http://127.0.0.1:8080, or in another terminal with 'poseidon top':
    poseidon launch -n 4 --dashboard :8080 -- python train.py

  See what a worker is told:
    poseidon launch -n 2 -- sh -c 'echo I am $RANK of $WORLD_SIZE'";
