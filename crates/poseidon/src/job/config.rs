//! Who am I, where is everybody: raw arguments and environment become a [`Config`] once.
//!
//! This is the only module that reads the environment.

use crate::Error;
pub use crate::job::link_rate::LinkRate;
use crate::job::link_rate::{cores, default_lanes};
use crate::job::observation::MetricsAddress;
pub use crate::job::observation::{Observation, TRACE};
use poseidon_core::budget::Limit;
use poseidon_core::{ByteSize, NodeId, Rate, Servers};
use poseidon_link::{Credentials, Secret};
use sha2::{Digest, Sha256};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// What a process needs to know to join a job.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which node of the job this process is.
    pub member: Member,
    /// Number of workers.
    pub workers: u16,
    /// Where the store lives.
    pub servers: Servers,
    /// Lanes per node; worker 0's number holds for all.
    pub lanes: u16,
    /// Whether `lanes` is only the most there may be, and the slowest port decides.
    pub lanes_by_rate: bool,
    /// What this node's port carries, or how that is to be found out.
    pub link_rate: LinkRate,
    /// What this node may send to other hosts at first. `None` is no limit.
    pub bandwidth_budget: Option<Rate>,
    /// The name of the host that this node counts as on; `None`: the machine's own. Nodes of one host
    /// share memory and contribute together.
    pub host: Option<String>,
    /// The name of the rack that this node is in, if there are racks to tell apart.
    pub rack: Option<String>,
    /// `host:port` of the coordinator.
    pub coordinator: String,
    /// Whether this process serves the coordinator (worker 0 does, unless a launcher does).
    pub serves_coordinator: bool,
    /// The address or interface to listen on, or several with commas between them. `None`: the one that routes to the coordinator.
    pub address: Option<String>,
    /// Bytes of host memory that this process may pin for each device. `None`: this node's share of a
    /// quarter of the machine's.
    pub pinned_memory: Option<usize>,
    /// What may carry links.
    pub carrier: Carriers,
    /// Whether lanes may be kept on one core each, where several nodes share a host.
    pub pin: bool,
    /// The job's name: nodes of another job are turned away.
    pub cluster: String,
    /// What nodes prove to each other that they know.
    pub secret: Secret,
    /// Whether connections to other hosts are encrypted. The same on all nodes.
    pub encrypt: bool,
    /// How long nodes wait for each other at the start.
    pub connect_timeout: Duration,
    /// How long a layer may take to come back. Covers the slowest worker's slowest step.
    pub timeout: Duration,
    /// How long a node may be silent before it is taken for dead.
    pub silence: Duration,
    /// How long a dedicated server waits for anything about any layer before it gives up.
    pub idle: Duration,
    /// What is written and served for people who want to see what this node does.
    pub observation: Observation,
    /// Every so many clocks workers compare a piece of what they have received; 0: never. The same on
    /// all workers.
    pub compare_every: u64,
}

/// Which node of the job a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    /// The worker of this rank.
    Worker(u16),
    /// The dedicated server of this index.
    Server(u16),
}

/// What may carry links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Carriers {
    /// Shared memory between nodes on one host, TCP otherwise.
    #[default]
    Auto,
    /// TCP only.
    Tcp,
    /// Unix sockets only, and no shared memory: all nodes are on one host.
    Unix,
}

impl Config {
    /// Reads the environment of `poseidon launch`, torchrun, Open MPI or Slurm. Without any of
    /// them the process is the only worker of its own job.
    ///
    /// | variable | meaning |
    /// | --- | --- |
    /// | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` | as torchrun sets them; the coordinator listens on the port after `MASTER_PORT`, which torch uses itself |
    /// | `OMPI_COMM_WORLD_*`, `SLURM_*` | as Open MPI and Slurm set them |
    /// | `POSEIDON_COORDINATOR` | `host:port`, instead of the above |
    /// | `POSEIDON_COORDINATOR_SERVED` | `1`: somebody else, such as a launcher, serves the coordinator there, not worker 0 |
    /// | `POSEIDON_SERVERS` | `colocated` (default), a number of dedicated servers, `colocated+N` |
    /// | `POSEIDON_SERVER` | this process is the dedicated server of this index |
    /// | `POSEIDON_LANES` | threads per node (default: half the cores, or this process's share of them; at least 2 if there are two cores, at most 8; in a job of several hosts no more than the slowest port needs) |
    /// | `POSEIDON_LINK_RATE` | what this node's port carries, such as `10gbit`; `auto` (default): it is measured in a job of several hosts; `unknown`: it counts as any other |
    /// | `POSEIDON_BANDWIDTH_BUDGET` | what this node may send to other hosts, such as `400mbit`; `none` (default): no limit |
    /// | `POSEIDON_HOST` | the name of the host that this node counts as on (default: the machine's own); nodes of one host share memory and contribute together, so containers that cannot share memory need names of their own |
    /// | `POSEIDON_RACK` | the name of this node's rack: large layers cross a rack's link once; default: the switches of `SLURM_TOPOLOGY_ADDR`, where Slurm knows them |
    /// | `POSEIDON_SECRET`, `POSEIDON_SECRET_FILE` | the cluster secret, or a file that holds it; at least 16 bytes; default: a file made in the user's configuration folder |
    /// | `POSEIDON_ENCRYPT` | `1`: connections to other hosts are encrypted; the same on every node |
    /// | `POSEIDON_ADDRESS` | address or interface to listen on; several with commas: lanes take them in turn |
    /// | `POSEIDON_LINK` | `auto`, `tcp`, `unix` |
    /// | `POSEIDON_PIN` | `0`: never keep lanes on one core each, not even where nodes share a host |
    /// | `POSEIDON_PINNED_MEMORY` | how much host memory this process may pin for each GPU, such as `4GiB` (default: a quarter of the machine's memory, divided by the nodes of this host) |
    /// | `POSEIDON_CLUSTER` | the job's name |
    /// | `POSEIDON_AMX` | `0`: multiply matrices without AMX; read by `poseidon-matrix`, once per process |
    /// | `POSEIDON_TIMEOUT`, `POSEIDON_CONNECT_TIMEOUT`, `POSEIDON_SILENCE` | seconds |
    /// | `POSEIDON_TRACE` | a file for a trace of this node, which Perfetto opens; `rank0`, or whatever the node is, goes where the name has `%r`, or before its ending |
    /// | `POSEIDON_REPORT` | a folder for the traces of all nodes; `poseidon report` makes a page of them |
    /// | `POSEIDON_METRICS` | `ADDRESS:PORT`, or a port of 127.0.0.1, where metrics are served as Prometheus reads them; the n-th node of a host takes the n-th port from there |
    /// | `POSEIDON_TENSORBOARD` | a folder for scalars of all workers, which TensorBoard shows |
    pub fn from_env() -> Result<Self, Error> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    /// As [`Config::from_env`], with the environment as an argument.
    pub fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let env = Env(get);
        let place = env.place()?;
        let servers = env.parse("POSEIDON_SERVERS")?.unwrap_or(Servers::Colocated);
        let member = match env.parse("POSEIDON_SERVER")? {
            Some(index) => Member::Server(index),
            None => Member::Worker(place.rank),
        };
        let served = env.0("POSEIDON_COORDINATOR_SERVED").is_some_and(|v| v != "0");
        let coordinator = env.0("POSEIDON_COORDINATOR").map_or(place.coordinator, Ok)?;
        let (lanes, lanes_by_rate) = match env.parse("POSEIDON_LANES")? {
            Some(lanes) => (lanes, false),
            None => default_lanes(cores(), place.workers, place.local),
        };
        let config = Self {
            member,
            workers: place.workers,
            servers,
            lanes,
            lanes_by_rate,
            link_rate: env.parse("POSEIDON_LINK_RATE")?.unwrap_or(LinkRate::Measured),
            bandwidth_budget: env.parse("POSEIDON_BANDWIDTH_BUDGET")?.and_then(|Limit(rate)| rate),
            host: env.0("POSEIDON_HOST").filter(|name| !name.is_empty()),
            rack: env.rack(),
            serves_coordinator: member == Member::Worker(0) && !served,
            cluster: env.0("POSEIDON_CLUSTER").unwrap_or(place.job),
            coordinator,
            address: env.0("POSEIDON_ADDRESS").filter(|address| !address.is_empty()),
            pinned_memory: env.pinned_memory()?,
            carrier: env.parse("POSEIDON_LINK")?.unwrap_or_default(),
            pin: env.0("POSEIDON_PIN").is_none_or(|v| v != "0"),
            secret: env.secret()?,
            encrypt: env.encrypt()?,
            connect_timeout: env.seconds("POSEIDON_CONNECT_TIMEOUT", 60)?,
            timeout: env.seconds("POSEIDON_TIMEOUT", 300)?,
            silence: env.seconds("POSEIDON_SILENCE", 15)?,
            idle: env.seconds("POSEIDON_IDLE", IDLE.as_secs())?,
            observation: env.observation(match member {
                Member::Worker(_) => place.local_rank,
                Member::Server(index) => place.local.saturating_add(index),
            })?,
            compare_every: env.parse("POSEIDON_COMPARE_EVERY")?.unwrap_or(COMPARE_EVERY),
        };
        config.validate()?;
        Ok(config)
    }

    /// Rank `rank` of a [`Group`](crate::Group) of `size`, whose coordinator is at `coordinator`. Of the environment
    /// only `POSEIDON_ADDRESS`, `POSEIDON_LINK`, `POSEIDON_HOST`, `POSEIDON_RACK`, `POSEIDON_LANES`, `POSEIDON_PIN`,
    /// `POSEIDON_LINK_RATE`, `POSEIDON_BANDWIDTH_BUDGET`, `POSEIDON_PINNED_MEMORY`, `POSEIDON_CONNECT_TIMEOUT`,
    /// `POSEIDON_SILENCE`, `POSEIDON_ENCRYPT` and what is written and served for people who look on.
    pub fn for_group(
        rank: u16,
        size: u16,
        coordinator: &str,
        cluster: &str,
        secret: Secret,
    ) -> Result<Self, Error> {
        let env = Env(&|name| std::env::var(name).ok());
        let of_host: Option<u16> = env.parse("LOCAL_WORLD_SIZE")?;
        // A group on one host has one lane: its ranks meet in memory.
        let (lanes, lanes_by_rate) = match env.parse("POSEIDON_LANES")? {
            Some(lanes) => (lanes, false),
            None => (default_lanes(cores(), size, of_host.unwrap_or(1)).0, true),
        };
        Ok(Self {
            member: Member::Worker(rank),
            workers: size,
            lanes,
            lanes_by_rate,
            link_rate: env.parse("POSEIDON_LINK_RATE")?.unwrap_or(LinkRate::Measured),
            bandwidth_budget: env.parse("POSEIDON_BANDWIDTH_BUDGET")?.and_then(|Limit(rate)| rate),
            host: env.0("POSEIDON_HOST").filter(|name| !name.is_empty()),
            rack: env.rack(),
            pin: env.0("POSEIDON_PIN").is_none_or(|v| v != "0"),
            coordinator: coordinator.into(),
            serves_coordinator: false,
            address: wanted_address(),
            pinned_memory: env.pinned_memory()?,
            carrier: env.parse("POSEIDON_LINK")?.unwrap_or_default(),
            cluster: cluster.into(),
            encrypt: env.encrypt()?,
            connect_timeout: env.seconds("POSEIDON_CONNECT_TIMEOUT", 60)?,
            // A rank that is gone is reported within ten seconds.
            silence: env.seconds("POSEIDON_SILENCE", 9)?,
            observation: {
                // Ports for metrics come after those of sessions, which the processes may have, too.
                let local = env.parse("LOCAL_RANK")?.unwrap_or(rank);
                env.observation(local.saturating_add(of_host.unwrap_or(size)))?.of_group()
            },
            ..Self::alone(secret)
        })
    }

    /// Whether a launcher has started this process as one of several.
    pub fn is_launched() -> bool {
        Env(&|name| std::env::var(name).ok()).launcher().is_some()
    }

    /// The only worker of its own job, on this machine.
    pub fn alone(secret: Secret) -> Self {
        Self {
            member: Member::Worker(0),
            workers: 1,
            servers: Servers::Colocated,
            lanes: default_lanes(cores(), 1, 1).0,
            lanes_by_rate: false,
            link_rate: LinkRate::Unknown,
            bandwidth_budget: None,
            host: None,
            rack: None,
            coordinator: "127.0.0.1:0".into(),
            serves_coordinator: true,
            address: None,
            pinned_memory: None,
            carrier: Carriers::Auto,
            pin: true,
            cluster: "alone".into(),
            secret,
            encrypt: false,
            connect_timeout: Duration::from_secs(60),
            timeout: Duration::from_secs(300),
            silence: Duration::from_secs(15),
            idle: IDLE,
            observation: Observation::default(),
            compare_every: COMPARE_EVERY,
        }
    }

    /// This process's node id.
    pub fn node(&self) -> NodeId {
        match self.member {
            Member::Worker(rank) => NodeId(rank),
            Member::Server(index) => NodeId(self.workers + index),
        }
    }

    /// What this process's node is called in the names of files: `rank0`, `server0`.
    pub(crate) fn node_label(&self) -> String {
        match self.member {
            Member::Worker(rank) => format!("rank{rank}"),
            Member::Server(index) => format!("server{index}"),
        }
    }

    pub(crate) fn validate(&self) -> Result<(), Error> {
        poseidon_core::Cluster::new(self.workers, self.servers, self.lanes)?;
        let (what, index, count) = match self.member {
            Member::Worker(rank) => ("rank", rank, self.workers),
            Member::Server(index) => ("server index", index, self.servers.extra()),
        };
        if index >= count {
            return Err(Error::Config(format!(
                "{what} {index} of {count}: expected less than {count}"
            )));
        }
        Ok(())
    }

    /// What this node proves who it is with, on every connection.
    pub fn credentials(&self) -> Credentials {
        credentials(&self.cluster, self.secret.clone(), self.encrypt)
    }
}

/// Where a process finds the cluster secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretPlace {
    /// In `POSEIDON_SECRET`.
    Variable,
    /// In a file that `POSEIDON_SECRET_FILE` names.
    NamedFile(PathBuf),
    /// In the file of the user's configuration folder.
    UsersFile(PathBuf),
    /// There is no home to keep it in.
    Nowhere,
}

/// Where this process finds the cluster secret. The secret itself is not read.
pub fn secret_place() -> SecretPlace {
    Env(&|name| std::env::var(name).ok()).secret_place()
}

/// How long nodes wait for each other when they start: `POSEIDON_CONNECT_TIMEOUT`, or if that is not set `otherwise`,
/// but no longer than a year.
pub fn connect_timeout(otherwise: Duration) -> Result<Duration, Error> {
    let env = Env(&|name| std::env::var(name).ok());
    match env.0("POSEIDON_CONNECT_TIMEOUT") {
        Some(_) => env.seconds("POSEIDON_CONNECT_TIMEOUT", 60),
        None => Ok(otherwise.min(Duration::from_secs_f64(LONGEST))),
    }
}

/// The address or interface to listen on, if the environment names one.
pub(crate) fn wanted_address() -> Option<String> {
    std::env::var("POSEIDON_ADDRESS").ok().filter(|address| !address.is_empty())
}

/// Whether the environment asks for connections to other hosts to be encrypted: `POSEIDON_ENCRYPT`.
pub fn encryption_wanted() -> Result<bool, Error> {
    Env(&|name| std::env::var(name).ok()).encrypt()
}

/// The credentials of the job called `cluster`. `encrypt`: whether its connections between hosts are
/// encrypted.
pub fn credentials(cluster: &str, secret: Secret, encrypt: bool) -> Credentials {
    let digest = Sha256::digest(cluster.as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    Credentials { cluster: id, secret, encrypt }
}

impl FromStr for Carriers {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "tcp" => Ok(Self::Tcp),
            "unix" => Ok(Self::Unix),
            _ => Err(format!("expected 'auto', 'tcp' or 'unix', got '{s}'")),
        }
    }
}

impl fmt::Display for Carriers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Unix => "unix",
        })
    }
}

struct Env<'a>(&'a dyn Fn(&str) -> Option<String>);

/// What is known by its environment. `poseidon launch` sets torchrun's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Launcher {
    Torchrun,
    OpenMpi,
    Slurm,
}

/// Where a launcher has put this process.
struct Launch {
    rank: u16,
    workers: u16,
    /// Processes of the job on this host.
    local: u16,
    /// Which of them this one is.
    local_rank: u16,
    /// The error is for when nothing else says where the coordinator is.
    coordinator: Result<String, Error>,
    job: String,
}

impl Env<'_> {
    fn parse<T: FromStr<Err: fmt::Display>>(&self, name: &str) -> Result<Option<T>, Error> {
        let parse = |v: String| v.parse().map_err(|e| Error::Config(format!("{name}={v}: {e}")));
        self.0(name).filter(|v| !v.is_empty()).map(parse).transpose()
    }

    fn encrypt(&self) -> Result<bool, Error> {
        match self.0("POSEIDON_ENCRYPT").as_deref() {
            None | Some("" | "0") => Ok(false),
            Some("1") => Ok(true),
            Some(other) => Err(Error::Config(format!("POSEIDON_ENCRYPT={other}: expected 1 or 0"))),
        }
    }

    /// What is asked of the `local`-th node of this host.
    fn observation(&self, local: u16) -> Result<Observation, Error> {
        let (trace, report) = (self.path("POSEIDON_TRACE"), self.path("POSEIDON_REPORT"));
        let metrics = self.parse::<MetricsAddress>("POSEIDON_METRICS")?;
        let metrics = metrics.map(|address| address.of_local(local)).transpose();
        let refused = |why| Error::Config(format!("POSEIDON_METRICS: {why}"));
        let tensorboard = self.path("POSEIDON_TENSORBOARD");
        Ok(Observation { trace, report, metrics: metrics.map_err(refused)?, tensorboard })
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.0(name).filter(|path| !path.is_empty()).map(PathBuf::from)
    }

    fn pinned_memory(&self) -> Result<Option<usize>, Error> {
        Ok(self.parse("POSEIDON_PINNED_MEMORY")?.map(|ByteSize(bytes)| bytes))
    }

    /// The rack that somebody has named, or the switches above this machine, as Slurm writes them:
    /// `switch.switch.node`.
    fn rack(&self) -> Option<String> {
        let given = self.0("POSEIDON_RACK").filter(|name| !name.is_empty());
        given.or_else(|| {
            let pattern = self.0("SLURM_TOPOLOGY_ADDR_PATTERN")?;
            let address = self.0("SLURM_TOPOLOGY_ADDR")?;
            let (switches, _) = address.rsplit_once('.')?;
            pattern.starts_with("switch").then(|| switches.into())
        })
    }

    fn seconds(&self, name: &str, default: u64) -> Result<Duration, Error> {
        let Some(seconds) = self.parse::<f64>(name)? else {
            return Ok(Duration::from_secs(default));
        };
        if !(seconds > 0.0 && seconds <= LONGEST) {
            return Err(Error::Config(format!(
                "{name} is {seconds}: expected seconds, more than 0 and at most {LONGEST}, a year"
            )));
        }
        Ok(Duration::from_secs_f64(seconds))
    }

    fn need<T: FromStr<Err: fmt::Display>>(&self, name: &str, because: &str) -> Result<T, Error> {
        let missing = || Error::Config(format!("{because} is set but {name} is not"));
        self.parse(name)?.ok_or_else(missing)
    }

    /// Who has started this process, if anybody did.
    fn launcher(&self) -> Option<Launcher> {
        let set = |name| self.0(name).is_some();
        if set("WORLD_SIZE") {
            return Some(Launcher::Torchrun);
        }
        if set("OMPI_COMM_WORLD_RANK") {
            return Some(Launcher::OpenMpi);
        }
        (set("SLURM_PROCID") && set("SLURM_STEP_ID")).then_some(Launcher::Slurm)
    }

    fn place(&self) -> Result<Launch, Error> {
        let launcher = self.launcher();
        if launcher == Some(Launcher::Torchrun) {
            let server = self.0("POSEIDON_SERVER").is_some();
            let rank = if server { 0 } else { self.need("RANK", "WORLD_SIZE")? };
            let workers = self.need("WORLD_SIZE", "WORLD_SIZE")?;
            let local = self.parse("LOCAL_WORLD_SIZE")?.unwrap_or(1);
            let local_rank = self.parse("LOCAL_RANK")?.unwrap_or(0);
            let job = self.0("TORCHELASTIC_RUN_ID").unwrap_or_else(|| "torchrun".into());
            let coordinator = self.beside_master();
            return Ok(Launch { rank, workers, local, local_rank, coordinator, job });
        }
        if launcher == Some(Launcher::OpenMpi) {
            let rank = self.need("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK")?;
            let workers = self.need("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")?;
            let local: u16 = self.need("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK")?;
            let local_rank = self.parse("OMPI_COMM_WORLD_LOCAL_RANK")?.unwrap_or(0);
            let job = self.0("PMIX_NAMESPACE").unwrap_or_else(|| "openmpi".into());
            let host = if local == workers { Some("127.0.0.1".into()) } else { self.mpirun_host() };
            let coordinator = self.on_host(host, &job);
            return Ok(Launch { rank, workers, local, local_rank, coordinator, job });
        }
        if launcher == Some(Launcher::Slurm) {
            let rank = self.need("SLURM_PROCID", "SLURM_PROCID")?;
            let workers: u16 = self.need("SLURM_NTASKS", "SLURM_PROCID")?;
            let nodes: u16 = self.parse("SLURM_STEP_NUM_NODES")?.unwrap_or(1).max(1);
            let local = workers.div_ceil(nodes);
            let local_rank = self.parse("SLURM_LOCALID")?.unwrap_or(0);
            let id = |name| self.0(name).unwrap_or_default();
            let job = format!("slurm-{}-{}", id("SLURM_JOB_ID"), id("SLURM_STEP_ID"));
            let list = self.0("SLURM_STEP_NODELIST").or_else(|| self.0("SLURM_JOB_NODELIST"));
            let host =
                if nodes == 1 { Some("127.0.0.1".into()) } else { list.map(|l| first_host(&l)) };
            let coordinator = self.on_host(host, &job);
            return Ok(Launch { rank, workers, local, local_rank, coordinator, job });
        }
        if self.0("RANK").is_some() {
            return Err(Error::Config("RANK is set but WORLD_SIZE is not".into()));
        }
        let coordinator = Ok("127.0.0.1:0".into());
        let (rank, workers, local, local_rank) = (0, 1, 1, 0);
        Ok(Launch { rank, workers, local, local_rank, coordinator, job: "alone".into() })
    }

    /// torchrun's own store listens on `MASTER_PORT`: the coordinator takes the port after it.
    fn beside_master(&self) -> Result<String, Error> {
        if self.0("POSEIDON_COORDINATOR").is_some() {
            return Ok(String::new()); // not needed
        }
        let host: String = self.need("MASTER_ADDR", "WORLD_SIZE")?;
        let port: u16 = self.need("MASTER_PORT", "WORLD_SIZE")?;
        let port = port.checked_add(1).ok_or_else(|| {
            Error::Config("MASTER_PORT=65535: the coordinator needs the port after it".into())
        })?;
        Ok(join_host_port(&host, port))
    }

    /// A port that every process of the job computes alike and other jobs probably do not.
    fn on_host(&self, host: Option<String>, job: &str) -> Result<String, Error> {
        let host = self.0("MASTER_ADDR").or(host).ok_or_else(|| {
            let fix = "set MASTER_ADDR to the host of rank 0, or POSEIDON_COORDINATOR to host:port";
            Error::Config(format!("cannot tell on which host rank 0 runs: {fix}"))
        })?;
        let digest = Sha256::digest(job.as_bytes());
        let port = 20_000 + u16::from_le_bytes([digest[0], digest[1]]) % 10_000;
        Ok(join_host_port(&host, port))
    }

    /// Open MPI tells its processes where mpirun runs, and puts rank 0 there unless told otherwise.
    fn mpirun_host(&self) -> Option<String> {
        let uri = self.0("OMPI_MCA_orte_hnp_uri")?;
        let address = uri.split("tcp://").nth(1)?.split([':', ',']).next()?;
        Some(address.to_string())
    }

    fn secret_place(&self) -> SecretPlace {
        let set = |name| self.0(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        if self.0("POSEIDON_SECRET").is_some() {
            return SecretPlace::Variable;
        }
        if let Some(path) = set("POSEIDON_SECRET_FILE") {
            return SecretPlace::NamedFile(path);
        }
        let home = set("XDG_CONFIG_HOME");
        let home = home.or_else(|| Some(PathBuf::from(self.0("HOME")?).join(".config")));
        match home {
            Some(home) => SecretPlace::UsersFile(home.join("poseidon").join("secret")),
            None => SecretPlace::Nowhere,
        }
    }

    fn secret(&self) -> Result<Secret, Error> {
        match self.secret_place() {
            SecretPlace::Variable => {
                let secret = self.0("POSEIDON_SECRET").unwrap_or_default();
                secret.parse().map_err(|e| Error::Config(format!("POSEIDON_SECRET: {e}")))
            }
            // A file that somebody has named is not made: its name may be mistyped.
            SecretPlace::NamedFile(path) => {
                Secret::read(&path).map_err(|e| Error::Config(format!("POSEIDON_SECRET_FILE: {e}")))
            }
            SecretPlace::UsersFile(path) => Secret::read_or_make(&path)
                .map_err(|e| Error::Config(format!("cluster secret: {e}"))),
            SecretPlace::Nowhere => {
                let fix = "set POSEIDON_SECRET to the same long random value on every node";
                Err(Error::Config(format!("no HOME for a secret file: {fix}")))
            }
        }
    }
}

fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// The first host of a Slurm list such as `gpu[03-05,09],login1`.
fn first_host(list: &str) -> String {
    let Some((prefix, rest)) = list.split_once('[').filter(|(p, _)| !p.contains(',')) else {
        return list.split(',').next().unwrap_or(list).to_string();
    };
    let (range, after) = rest.split_once(']').unwrap_or((rest, ""));
    let number = range.split([',', '-']).next().unwrap_or(range);
    let suffix = after.split(',').next().unwrap_or("");
    format!("{prefix}{number}{suffix}")
}

/// See ADR 0027 for what a comparison costs.
const COMPARE_EVERY: u64 = 100;
/// Workers may compute and evaluate for hours between two steps. A day without a step is a mistake.
const IDLE: Duration = Duration::from_secs(24 * 3600);
/// A year is as good as forever, and clocks can count that far.
const LONGEST: f64 = 365.0 * 24.0 * 3600.0;

#[cfg(test)]
mod tests;
