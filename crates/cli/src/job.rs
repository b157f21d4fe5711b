//! A job on this machine: its coordinator, and what every process of it is told.

use crate::running_job;
use crate::supervise::{Process, Role, heap};
use anyhow::Context;
use poseidon::config::credentials;
use poseidon::{Cluster, Config, Coordinator, Limit, Secret, Servers};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// A coordinator that is already listening, and the facts the processes need to find it.
pub(crate) struct Job {
    facts: Facts,
    _coordinator: Coordinator,
}

/// How large a job is and where it meets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) workers: u16,
    pub(crate) servers: Servers,
    /// `None`: each process decides.
    pub(crate) lanes: Option<u16>,
    /// What each process may send to other hosts. `None`: the environment says.
    pub(crate) budget: Option<Limit>,
    /// Whether what goes between hosts is encrypted.
    pub(crate) encrypt: bool,
    pub(crate) address: IpAddr,
}

/// The processes of a job that one host has.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    /// The host's name.
    pub(crate) host: String,
    /// The rank of its first worker.
    pub(crate) first: u16,
    pub(crate) workers: u16,
    /// The indices of its dedicated servers.
    pub(crate) servers: Vec<u16>,
}

struct Facts {
    size: Size,
    coordinator: SocketAddr,
    /// Host and port of torch's own store, which rank 0 serves.
    master: (String, u16),
    secret: String,
    name: String,
    own_program: PathBuf,
}

/// How long the coordinator waits for the last process: they start together.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long an answer of the coordinator may take: it is in this very process.
const ANSWER: Duration = Duration::from_secs(5);

impl Job {
    /// Starts the coordinator of a job on this machine. The processes are started by whoever asked.
    pub(crate) fn start(size: Size) -> anyhow::Result<Self> {
        let listening = Self::listen(size)?;
        // While the coordinator listens at its own port, this one is another.
        let master = free_port(size.address)?;
        listening.meet(size, (master.ip().to_string(), master.port()))
    }

    /// The same for a job on several hosts. Rank 0 serves torch's own store at `master`.
    pub(crate) fn start_on_hosts(size: Size, master: (String, u16)) -> anyhow::Result<Self> {
        Self::listen(size)?.meet(size, master)
    }

    fn listen(size: Size) -> anyhow::Result<Listening> {
        // Without a number of lanes each process chooses its own; any number will do for this check.
        Cluster::new(size.workers, size.servers, size.lanes.unwrap_or(1))?;
        let secret = Secret::random().context("the system gave no random bytes")?;
        let name = format!("launch-{}", std::process::id());
        let door = credentials(&name, secret.clone(), size.encrypt);
        heap::share_one();
        let coordinator = Coordinator::bind(size.address, 0, door, PATIENCE)?;
        Ok(Listening { coordinator, secret, name })
    }

    /// Where the coordinator listens.
    pub(crate) fn coordinator(&self) -> SocketAddr {
        self.facts.coordinator
    }

    /// Its coordinator, to be asked as anybody may who knows the secret.
    pub(crate) fn to_ask(&self) -> anyhow::Result<running_job::Coordinator> {
        let mut config = Config::alone(self.facts.secret.parse::<Secret>()?);
        config.coordinator = self.facts.coordinator.to_string();
        config.cluster = self.facts.name.clone();
        Ok(running_job::Coordinator { config, patience: ANSWER })
    }

    /// All processes: `command` makes each worker's. Workers come first: a command that cannot be
    /// run then leaves nothing to clean up.
    pub(crate) fn processes(&self, command: impl Fn() -> Command) -> Vec<Process> {
        let Size { workers, servers, .. } = self.facts.size;
        let everything = Share {
            host: String::new(),
            first: 0,
            workers,
            servers: (0..servers.extra()).collect(),
        };
        self.processes_of(&everything, command)
    }

    /// The processes of one host, in the same order.
    pub(crate) fn processes_of(
        &self,
        share: &Share,
        command: impl Fn() -> Command,
    ) -> Vec<Process> {
        let workers = (0..share.workers).map(|local| self.facts.worker(share, local, command()));
        let servers = share.servers.iter().map(|index| self.facts.server(share, *index));
        workers.chain(servers).collect()
    }

    /// The poseidon command itself.
    pub(crate) fn own_program(&self) -> Command {
        Command::new(&self.facts.own_program)
    }
}

/// A coordinator that listens, before the processes' facts are known.
struct Listening {
    coordinator: Coordinator,
    secret: Secret,
    name: String,
}

impl Listening {
    fn meet(self, size: Size, master: (String, u16)) -> anyhow::Result<Job> {
        let Self { coordinator, secret, name } = self;
        let facts = Facts {
            size,
            coordinator: coordinator.address(),
            master,
            secret: secret.expose().to_string(),
            name,
            own_program: std::env::current_exe()
                .context("cannot find the poseidon command itself")?,
        };
        Ok(Job { facts, _coordinator: coordinator })
    }
}

/// A port nobody listens at now.
fn free_port(address: IpAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind((address, 0));
    listener
        .and_then(|listener| listener.local_addr())
        .with_context(|| format!("no free port at {address}"))
}

impl Facts {
    /// The worker of number `local` on its host.
    fn worker(&self, share: &Share, local: u16, mut command: Command) -> Process {
        let rank = share.first + local;
        self.describe(share, &mut command);
        command.env("RANK", rank.to_string());
        command.env("LOCAL_RANK", local.to_string());
        command.env_remove("POSEIDON_SERVER");
        let (name, label) = (share.on_host(format!("worker {rank}")), rank.to_string());
        Process { name, label, command, role: Role::Worker, draws: false }
    }

    fn server(&self, share: &Share, index: u16) -> Process {
        let mut command = Command::new(&self.own_program);
        command.arg("serve");
        self.describe(share, &mut command);
        command.env("POSEIDON_SERVER", index.to_string());
        command.env_remove("RANK");
        command.env_remove("LOCAL_RANK");
        let label = format!("server {index}");
        let name = share.on_host(label.clone());
        Process { name, label, command, role: Role::Server, draws: false }
    }

    fn describe(&self, share: &Share, command: &mut Command) {
        command
            .env("WORLD_SIZE", self.size.workers.to_string())
            .env("LOCAL_WORLD_SIZE", share.workers.to_string())
            .env("MASTER_ADDR", &self.master.0)
            .env("MASTER_PORT", self.master.1.to_string())
            .env("POSEIDON_COORDINATOR", self.coordinator.to_string())
            .env("POSEIDON_COORDINATOR_SERVED", "1")
            .env("POSEIDON_SECRET", &self.secret)
            .env("POSEIDON_CLUSTER", &self.name)
            .env("POSEIDON_SERVERS", self.size.servers.to_string());
        if self.size.encrypt {
            command.env("POSEIDON_ENCRYPT", "1");
        }
        if let Some(lanes) = self.size.lanes {
            command.env("POSEIDON_LANES", lanes.to_string());
        }
        if let Some(Limit(budget)) = self.size.budget {
            let text =
                budget.map_or("none".into(), |rate| format!("{}kbit", rate.bits() as f64 / 1e3));
            command.env("POSEIDON_BANDWIDTH_BUDGET", text);
        }
    }
}

impl Share {
    /// What a process is called where there are several hosts.
    fn on_host(&self, name: String) -> String {
        if self.host.is_empty() { name } else { format!("{name} on {}", self.host) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn facts(lanes: Option<u16>) -> Facts {
        let address = IpAddr::from([127, 0, 0, 1]);
        Facts {
            size: Size {
                workers: 3,
                servers: Servers::Mixed(2),
                lanes,
                budget: None,
                encrypt: false,
                address,
            },
            coordinator: "127.0.0.1:5000".parse().unwrap(),
            master: ("127.0.0.1".into(), 5001),
            secret: "5ec2e7".into(),
            name: "launch-1".into(),
            own_program: "/bin/poseidon".into(),
        }
    }

    /// All three workers, on this machine.
    fn here() -> Share {
        Share { host: String::new(), first: 0, workers: 3, servers: vec![0, 1] }
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
        let server = facts(Some(4)).server(&here(), 1);
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
    fn every_process_is_told_the_same_budget_to_the_bit() {
        for (limit, text) in
            [("none", "none"), ("400mbit", "400000kbit"), ("1234.567kbit", "1234.567kbit")]
        {
            let mut facts = facts(None);
            let limit: Limit = limit.parse().unwrap();
            facts.size.budget = Some(limit);
            for process in
                [facts.server(&here(), 0), facts.worker(&here(), 0, Command::new("prog"))]
            {
                assert_eq!(environment(&process)["POSEIDON_BANDWIDTH_BUDGET"], Some(text));
                assert_eq!(text.parse(), Ok(limit));
            }
        }
    }

    #[test]
    fn every_process_is_told_to_encrypt() {
        let mut facts = facts(None);
        facts.size.encrypt = true;
        for process in [facts.server(&here(), 0), facts.worker(&here(), 0, Command::new("prog"))] {
            assert_eq!(environment(&process)["POSEIDON_ENCRYPT"], Some("1"));
        }
    }

    #[test]
    fn a_worker_is_told_its_rank_and_no_server_index() {
        let mut program = Command::new("prog");
        program.arg("-x");
        let worker = facts(None).worker(&here(), 2, program);
        let own = [("RANK", Some("2")), ("LOCAL_RANK", Some("2")), ("POSEIDON_SERVER", None)];
        assert_eq!(environment(&worker), BTreeMap::from_iter(EVERYBODY.into_iter().chain(own)));
        assert_eq!(worker.command.get_program(), "prog");
        assert_eq!(worker.command.get_args().collect::<Vec<_>>(), ["-x"]);
    }

    #[test]
    fn a_worker_of_another_host_is_told_its_place_there() {
        let share = Share { host: "b".into(), first: 2, workers: 1, servers: Vec::new() };
        let worker = facts(None).worker(&share, 0, Command::new("prog"));
        let told = environment(&worker);
        for (name, value) in
            [("RANK", "2"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")]
        {
            assert_eq!(told[name], Some(value), "{name}");
        }
        assert_eq!((worker.name.as_str(), worker.label.as_str()), ("worker 2 on b", "2"));
    }
}
