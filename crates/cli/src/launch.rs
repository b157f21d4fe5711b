//! `poseidon launch`: a whole job on this machine.

use crate::supervise::{self, Options, Process, Role};
use anyhow::Context;
use poseidon_core::{Cluster, Servers};
use std::ffi::OsString;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
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

    /// The address of this machine at which the processes of the job meet.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    coordinator_address: IpAddr,

    /// The program each worker runs, and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Runs the job to its end.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    // Without a number of lanes each process chooses its own; any number will do for this check.
    let cluster = Cluster::new(args.workers, args.servers, args.lanes.unwrap_or(1))?;
    let coordinator = serve_coordinator(args.coordinator_address)?;
    let job = Job {
        coordinator: coordinator.local_addr().context("the coordinator has no address")?,
        master: free_port(args.coordinator_address)?,
        secret: random_hex::<32>()?,
        name: format!("launch-{}", random_hex::<4>()?),
        own_program: std::env::current_exe().context("cannot find the poseidon command itself")?,
        args,
    };
    let workers = (0..cluster.workers()).map(|rank| job.worker(rank));
    let servers = (0..job.args.servers.extra()).map(|index| job.server(index));
    // Workers first: a command that cannot be run then leaves nothing to clean up.
    let outcome = supervise::run(workers.chain(servers).collect(), Options::default())?;
    drop(coordinator);

    if let Some(report) = outcome.report() {
        let message = [b"error: ", report.as_slice(), b"\n"].concat();
        // Nobody is left to tell if stderr is closed; the exit status says it too.
        let _ = io::stderr().write_all(&message);
    }
    Ok(outcome.status().into())
}

/// Makes `address` the place where the job's processes meet, until the result is dropped.
fn serve_coordinator(address: IpAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind((address, 0)).with_context(|| format!("cannot listen at {address}"))
}

/// A port nobody listens at now. While the coordinator listens at its own, this one is another.
fn free_port(address: IpAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind((address, 0));
    listener
        .and_then(|listener| listener.local_addr())
        .with_context(|| format!("no free port at {address}"))
}

/// What all processes of a job are told.
struct Job {
    args: Args,
    coordinator: SocketAddr,
    master: SocketAddr,
    secret: String,
    name: String,
    own_program: PathBuf,
}

impl Job {
    fn worker(&self, rank: usize) -> Process {
        let mut command = Command::new(&self.args.command[0]);
        command.args(&self.args.command[1..]);
        self.describe(&mut command);
        command.env("RANK", rank.to_string());
        command.env("LOCAL_RANK", rank.to_string());
        command.env_remove("POSEIDON_SERVER");
        let label = rank.to_string();
        Process { name: format!("worker {rank}"), label, command, role: Role::Worker }
    }

    fn server(&self, index: u16) -> Process {
        let mut command = Command::new(&self.own_program);
        command.arg("serve");
        self.describe(&mut command);
        command.env("POSEIDON_SERVER", index.to_string());
        command.env_remove("RANK");
        command.env_remove("LOCAL_RANK");
        let name = format!("server {index}");
        Process { label: name.clone(), name, command, role: Role::Server }
    }

    fn describe(&self, command: &mut Command) {
        let workers = self.args.workers.to_string();
        command
            .env("WORLD_SIZE", &workers)
            .env("LOCAL_WORLD_SIZE", &workers)
            .env("MASTER_ADDR", self.master.ip().to_string())
            .env("MASTER_PORT", self.master.port().to_string())
            .env("POSEIDON_COORDINATOR", self.coordinator.to_string())
            .env("POSEIDON_COORDINATOR_SERVED", "1")
            .env("POSEIDON_SECRET", &self.secret)
            .env("POSEIDON_CLUSTER", &self.name)
            .env("POSEIDON_SERVERS", self.args.servers.to_string());
        if let Some(lanes) = self.args.lanes {
            command.env("POSEIDON_LANES", lanes.to_string());
        }
    }
}

fn at_least_1(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(e.to_string()),
    }
}

fn random_hex<const BYTES: usize>() -> anyhow::Result<String> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).context("the system gave no random bytes")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

const EXAMPLES: &str = "\
Examples:
  Four workers, each of which also serves a quarter of the parameters:
    poseidon launch -n 4 -- python train.py

  Two workers and one process that serves all parameters:
    poseidon launch -n 2 --servers 1 -- python train.py --lr 0.1

  See what a worker is told:
    poseidon launch -n 2 -- sh -c 'echo I am $RANK of $WORLD_SIZE'";

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::collections::BTreeMap;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn job(arguments: &str) -> Job {
        let cli = Cli::parse_from(["launch"].into_iter().chain(arguments.split(' ')));
        Job {
            args: cli.args,
            coordinator: "127.0.0.1:5000".parse().unwrap(),
            master: "127.0.0.1:5001".parse().unwrap(),
            secret: "5ec2e7".into(),
            name: "launch-1".into(),
            own_program: "/bin/poseidon".into(),
        }
    }

    /// What is set (`Some`) and what is removed (`None`).
    fn environment(process: &Process) -> BTreeMap<&str, Option<&str>> {
        process
            .command
            .get_envs()
            .map(|(key, value)| (key.to_str().unwrap(), value.map(|v| v.to_str().unwrap())))
            .collect()
    }

    const EVERYBODY: [(&str, Option<&str>); 9] = [
        ("WORLD_SIZE", Some("3")),
        ("LOCAL_WORLD_SIZE", Some("3")),
        ("MASTER_ADDR", Some("127.0.0.1")),
        ("MASTER_PORT", Some("5001")),
        ("POSEIDON_COORDINATOR", Some("127.0.0.1:5000")),
        ("POSEIDON_COORDINATOR_SERVED", Some("1")),
        ("POSEIDON_SECRET", Some("5ec2e7")),
        ("POSEIDON_CLUSTER", Some("launch-1")),
        ("POSEIDON_SERVERS", Some("colocated+2")),
    ];

    #[test]
    fn a_server_is_told_its_index_and_no_rank() {
        let server = job("-n 3 --servers colocated+2 --lanes 4 -- prog -x").server(1);
        let own = [
            ("POSEIDON_LANES", Some("4")),
            ("POSEIDON_SERVER", Some("1")),
            ("RANK", None),
            ("LOCAL_RANK", None),
        ];
        assert_eq!(environment(&server), BTreeMap::from_iter(EVERYBODY.into_iter().chain(own)));
        assert_eq!(server.command.get_program(), "/bin/poseidon");
        assert_eq!(server.command.get_args().collect::<Vec<_>>(), ["serve"]);
        assert_eq!((server.label.as_str(), server.role), ("server 1", Role::Server));
    }

    #[test]
    fn a_worker_is_told_its_rank_and_no_server_index() {
        let worker = job("-n 3 --servers colocated+2 -- prog -x").worker(2);
        let own = [("RANK", Some("2")), ("LOCAL_RANK", Some("2")), ("POSEIDON_SERVER", None)];
        assert_eq!(environment(&worker), BTreeMap::from_iter(EVERYBODY.into_iter().chain(own)));
        assert_eq!(worker.command.get_program(), "prog");
        assert_eq!(worker.command.get_args().collect::<Vec<_>>(), ["-x"]);
    }

    #[test]
    fn secrets_are_fresh() {
        let secret = random_hex::<32>().unwrap();
        assert_eq!(secret.len(), 64);
        assert_ne!(secret, random_hex::<32>().unwrap());
    }
}
