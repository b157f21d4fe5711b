//! What is asked: flags become a cluster, a model and a network, or a message that says why not.

use super::copies::CopyFlag;
use super::{described, device};
use crate::bandwidth::Bandwidth;
use crate::doctor::SavedCluster;
use anyhow::{Context, bail, ensure};
use poseidon_core::{ChunkSize, Cluster, Servers};
use poseidon_sim::profile::{Basis, Profile};
use poseidon_sim::{
    LayerTime, Model, Network, Overlap, Places, Racks, SchemeRule, Setup, read_text,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What can be said on the command line.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Flags {
    /// A model of the zoo, or a JSON file of your own (see --print-model) [default: vgg19].
    #[arg(long, short = 'm', value_name = "NAME|FILE", conflicts_with = "torch", help_heading = MODEL)]
    model: Option<String>,

    /// Plan a PyTorch model: FACTORY() in MODULE returns it, or it and an example of its input. Needs
    /// the Python package.
    #[arg(long, value_name = "MODULE:FACTORY", help_heading = MODEL)]
    torch: Option<String>,

    /// One sample of that model's input: 3x224x224, or 128:int64 for tokens.
    #[arg(long, value_name = "SHAPE", requires = "torch", help_heading = MODEL)]
    input: Option<String>,

    /// The Python that has torch and the poseidon package.
    #[arg(long, value_name = "PATH", default_value = "python3", help_heading = MODEL)]
    python: PathBuf,

    /// Samples per worker and step.
    #[arg(long, short = 'k', value_name = "K", default_value = "32", value_parser = positive, help_heading = MODEL)]
    batch: usize,

    /// How fast a worker computes: titan-x or titan-x-tensorflow (as the paper measured them), h200
    /// (measured), a100, h100, l4, rtx-4090 or t4 (from published figures, not measured), or a TOML
    /// file that 'poseidon profile' wrote [default: this machine's GPU if it is one of these;
    /// otherwise titan-x and h200, side by side].
    #[arg(long, value_name = "NAME|FILE", help_heading = MODEL)]
    profile: Option<String>,

    /// How fast a worker's device copies to its host's memory and back, each way: 25GB/s, 900MB/s.
    /// 'none' leaves copies out [default: what the profile says, if it says anything].
    #[arg(long, value_name = "RATE|none", allow_hyphen_values = true, help_heading = MODEL)]
    copy_speed: Option<CopyFlag>,

    /// What 'poseidon doctor --save FILE' has measured: workers, workers of a host, bandwidth and
    /// latency. Each of them can still be said otherwise.
    #[arg(long, value_name = "FILE.json", help_heading = CLUSTER)]
    cluster: Option<PathBuf>,

    /// Workers [default: 8].
    #[arg(long, short = 'n', value_name = "N", value_parser = positive, help_heading = CLUSTER)]
    workers: Option<usize>,

    /// Where parameters live: 'colocated' on the workers [default], on M dedicated servers, or
    /// 'colocated+M'. As many servers as workers are taken as one on each worker, which is how the
    /// papers count; 'dedicated:M' says otherwise.
    #[arg(long, value_name = "colocated|M|colocated+M|dedicated:M", help_heading = CLUSTER)]
    servers: Option<String>,

    /// Workers of one host. They reach each other through memory and share the host's port: what
    /// they contribute is added up inside the host, and one stream per chunk leaves it. --workers
    /// stays the number of all workers. The last host may have fewer. Dedicated servers have hosts
    /// of their own [default: 1].
    #[arg(long, value_name = "R", value_parser = positive, help_heading = CLUSTER)]
    ranks_per_host: Option<usize>,

    /// Threads, and connections to each peer, that move data in every node.
    #[arg(long, value_name = "L", default_value = "1", value_parser = positive, help_heading = CLUSTER)]
    lanes: usize,

    /// Of a host's port: 10gbit, 200mbit, 25GbE [default: 10gbit].
    #[arg(long, short = 'b', value_name = "RATE", allow_hyphen_values = true, help_heading = NETWORK)]
    bandwidth: Option<Bandwidth>,

    /// 'ethernet' is today's, switched and full duplex; 'virtual-cluster' is one of network namespaces
    /// on a single machine; 'paper-2017' is the network that the paper's figures fit, whose
    /// directions share a link's bandwidth.
    #[arg(long, value_name = "NAME", default_value = "ethernet", help_heading = NETWORK)]
    network: String,

    /// From one node to another, one way: 50us, 1ms [default: the network's].
    #[arg(long, value_name = "TIME", value_parser = duration, allow_hyphen_values = true, help_heading = NETWORK)]
    latency: Option<Duration>,

    /// Racks of equally many hosts. Between a rack and the others there is one link each way, of
    /// the rate of the rack's ports together, divided by --oversubscription. The plan says whether
    /// adding up inside racks pays (which a job does if its nodes say --rack) [default: one switch
    /// for all].
    #[arg(long, value_name = "N", value_parser = positive, help_heading = NETWORK)]
    racks: Option<usize>,

    /// How many times more the ports of a rack carry than its link to the other racks: 1 is a
    /// network without a bottleneck between racks, 4 or 8 is common.
    #[arg(long, value_name = "X", default_value = "1", requires = "racks", allow_hyphen_values = true, help_heading = NETWORK)]
    oversubscription: f64,

    /// What the switch's port holds for a host before it drops: 256kb, 2mb (powers of 1024)
    /// [default: everything].
    #[arg(long, value_name = "SIZE", value_parser = queue, help_heading = NETWORK)]
    queue: Option<u64>,

    /// How fully connected layers go: 'auto' is by factors if that saves a worker 16 KiB a step, and
    /// through servers if not; 'adam' (factors to one server, matrices back) is there to compare with.
    #[arg(long, value_name = "auto|ps|sfb|adam", default_value = "auto", help_heading = EXCHANGE)]
    scheme: SchemeRule,

    /// How much of the communication may run beside computing [default: full; on the paper's network
    /// backward, as in the paper].
    #[arg(long, value_name = "none|backward|full", help_heading = EXCHANGE)]
    overlap: Option<Overlap>,

    /// Largest chunk of a layer, in bytes: 256k, 1m.
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true, help_heading = EXCHANGE)]
    chunk: Option<ChunkSize>,
}

/// What is asked, complete and possible.
#[derive(Clone, Debug)]
pub(crate) struct Question {
    pub(crate) model: Model,
    pub(crate) profile: Profile,
    /// What the profile's times are based on.
    pub(crate) basis: Basis,
    pub(crate) setup: Setup,
    /// The same on another device, where nobody has said on which, and that device's name.
    pub(crate) beside: Option<(String, Setup)>,
    /// What was understood otherwise than it might have been meant, for people.
    pub(crate) notes: Vec<String>,
}

impl Question {
    pub(crate) fn new(flags: &Flags) -> anyhow::Result<Self> {
        let model = flags.model()?;
        let mut notes = Vec::new();
        let (name, other) = match &flags.profile {
            Some(name) => (name.clone(), None),
            None => match device::known_gpu() {
                Some((name, model)) => {
                    notes.push(format!("no --profile: this machine has an {model}, so {name}"));
                    (name.to_owned(), None)
                }
                None => (DEFAULT_PROFILE.to_owned(), Some(OTHER_PROFILE)),
            },
        };
        let profile = match file(&name, "toml") {
            Some(path) => Profile::read(path)?,
            None => Profile::named(&name)?,
        };
        let measured = flags.cluster.as_deref().map(SavedCluster::read).transpose()?;
        let cluster = flags.cluster(measured.as_ref(), &mut notes)?;
        let bandwidth = match (flags.bandwidth, &measured) {
            (Some(bandwidth), _) => bandwidth,
            (None, Some(saved)) => Bandwidth::from_bytes(saved.bits_per_second as f64 / 8.0),
            (None, None) => DEFAULT_BANDWIDTH,
        };
        let mut network = network(&flags.network, bandwidth)?;
        if let Some(latency) = flags.latency.or(measured.map(|saved| saved.latency())) {
            network.latency = latency;
        }
        network.queue = flags.queue;
        network.racks = flags.racks(&cluster)?;
        ensure!(flags.batch <= MOST_SAMPLES, "--batch must be at most {MOST_SAMPLES}");
        let (times, basis) = profile.times(&model, flags.batch)?;
        let mut setup = Setup::new(&model, times, cluster, flags.batch, network);
        setup.scheme = flags.scheme;
        // The paper's workers wait for all layers before the next step (Algorithm 2).
        let usual = if setup.network.name == PAPER { Overlap::Backward } else { Overlap::Full };
        setup.overlap = flags.overlap.unwrap_or(usual);
        setup.chunk = flags.chunk.unwrap_or_default();
        setup.rebuild_rate = profile.rates.map(|rates| rates.fc);
        setup.copies = flags.copy_speed.map_or(profile.copies, CopyFlag::speed);
        if flags.servers.is_some() {
            // Servers on workers as well: who asks for them wants something of each.
            setup.check_servers().map_err(|e| anyhow::anyhow!("{e}: see --servers and --chunk"))?;
        }
        setup.check()?;
        let beside = other.and_then(|name| {
            let profile = Profile::named(name).ok()?;
            let mut other = setup.clone();
            (other.times, _) = profile.times(&model, flags.batch).ok()?;
            other.rebuild_rate = profile.rates.map(|rates| rates.fc);
            other.copies = flags.copy_speed.map_or(profile.copies, CopyFlag::speed);
            other.check().ok()?;
            Some((name.to_owned(), other))
        });
        Ok(Self { model, profile, basis, setup, beside, notes })
    }

    /// The same with another batch.
    pub(crate) fn times(&self, batch: usize) -> anyhow::Result<Vec<LayerTime>> {
        Ok(self.profile.times(&self.model, batch)?.0)
    }
}

impl Flags {
    /// The model's file: what one of your own may begin with.
    pub(crate) fn model_text(&self) -> anyhow::Result<String> {
        let name = self.model.as_deref().unwrap_or(DEFAULT_MODEL);
        if let Some(factory) = &self.torch {
            return described::describe(&self.python, factory, self.input.as_deref());
        }
        if let Some(path) = file(name, "json") {
            return read_text(path).with_context(|| format!("cannot read {name}"));
        }
        Model::named(name)?;
        Ok(poseidon_sim::zoo::text(name).unwrap_or_default().to_owned())
    }

    fn model(&self) -> anyhow::Result<Model> {
        let name = self.model.as_deref().unwrap_or(DEFAULT_MODEL);
        if let Some(factory) = &self.torch {
            let text = described::describe(&self.python, factory, self.input.as_deref())?;
            return Ok(Model::parse(&text, factory)?);
        }
        match file(name, "json") {
            Some(path) => Ok(Model::read(path)?),
            None => Ok(Model::named(name)?),
        }
    }

    fn cluster(
        &self,
        measured: Option<&SavedCluster>,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<Cluster> {
        let narrow = |what: &str, number: usize, most: u16| {
            let fits = u16::try_from(number).ok().filter(|number| *number <= most);
            fits.with_context(|| format!("{what} must be at most {most}, got {number}"))
        };
        let workers = self.workers.or(measured.map(|saved| saved.workers));
        let workers = narrow("--workers", workers.unwrap_or(DEFAULT_WORKERS), MOST_WORKERS)?;
        let lanes = narrow("--lanes", self.lanes, MOST_LANES)?;
        let servers = match self.servers.as_deref() {
            None => Servers::Colocated,
            Some(text) => {
                let (own, text) = match text.strip_prefix("dedicated:") {
                    Some(number) => (true, number),
                    None => (false, text),
                };
                let servers = text.parse().map_err(|e| anyhow::anyhow!("--servers: {e}"))?;
                if servers == Servers::Dedicated(workers) && !own {
                    notes.push(format!(
                        "{workers} servers for {workers} workers: one on each worker; for machines of \
                         their own say --servers dedicated:{workers}"
                    ));
                    Servers::Colocated
                } else {
                    servers
                }
            }
        };
        let ranks = self.ranks_per_host.or(measured.map(|saved| saved.ranks_per_host));
        let ranks_per_host = narrow("--ranks-per-host", ranks.unwrap_or(1), MOST_WORKERS)?;
        let places = Places { ranks_per_host, hosts_per_rack: None };
        Ok(places.place(Cluster::new(workers, servers, lanes)?))
    }

    /// The racks that the hosts of `cluster` stand in.
    fn racks(&self, cluster: &Cluster) -> anyhow::Result<Option<Racks>> {
        let Some(racks) = self.racks else { return Ok(None) };
        let hosts = Places::of(cluster).hosts(cluster);
        ensure!(
            hosts.is_multiple_of(racks),
            "--racks {racks}: {hosts} hosts cannot be divided equally into {racks} racks"
        );
        let oversubscription = self.oversubscription;
        ensure!(
            (1.0..=MOST_OVERSUBSCRIBED).contains(&oversubscription),
            "--oversubscription must be from 1 to {MOST_OVERSUBSCRIBED}, got {oversubscription}"
        );
        Ok(Some(Racks { hosts_per_rack: hosts / racks, oversubscription }))
    }
}

/// `name` if it is a path of a file, which either has the ending of one or is there.
pub(crate) fn file<'a>(name: &'a str, ending: &str) -> Option<&'a Path> {
    let path = Path::new(name);
    let looks_so = name.contains('/') || path.extension().is_some_and(|e| e == ending);
    (looks_so || path.is_file()).then_some(path)
}

fn network(name: &str, bandwidth: Bandwidth) -> anyhow::Result<Network> {
    match name.to_ascii_lowercase().as_str() {
        "ethernet" => Ok(Network::ethernet(bandwidth.bytes())),
        "virtual-cluster" => Ok(Network::virtual_cluster(bandwidth.bytes())),
        PAPER => Ok(Network::paper_2017(bandwidth.bytes())),
        _ => bail!("there is no network '{name}'; known are ethernet, virtual-cluster and {PAPER}"),
    }
}

pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err(format!("expected a whole number of at least 1, got '{text}'")),
    }
}

/// `50us`, `1.5ms`, `0s`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("expected a time such as 50us, 1ms or 0s, got '{text}'");
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(end);
    let factor = match unit.trim() {
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return Err(wrong()),
    };
    let seconds = number.parse::<f64>().map_err(|_| wrong())? * factor;
    if seconds > LONGEST_LATENCY {
        return Err(format!("{text} is too long: expected at most {LONGEST_LATENCY} s"));
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// `256kb`, `2mb`: a port's queue, in bytes.
pub(crate) fn queue(text: &str) -> Result<u64, String> {
    let wrong = || format!("expected a size from 2kb to 1gb such as 256kb or 2mb, got '{text}'");
    let lower = text.to_ascii_lowercase();
    let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &lower[digits.len()..] {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        _ => return Err(wrong()),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    bytes.filter(|bytes| (2 << 10..=1 << 30).contains(bytes)).ok_or_else(wrong)
}

const DEFAULT_MODEL: &str = "vgg19";
const DEFAULT_WORKERS: usize = 8;
const DEFAULT_BANDWIDTH: Bandwidth = Bandwidth::gigabits(10.0);
/// The paper's device, and one of today that was measured: shown together where none is named.
const DEFAULT_PROFILE: &str = "titan-x";
const OTHER_PROFILE: &str = "h200";
const PAPER: &str = "paper-2017";
const MODEL: &str = "What is trained";
const CLUSTER: &str = "On what";
const NETWORK: &str = "Network";
const EXCHANGE: &str = "How layers are exchanged";
/// Every chunk of every worker is simulated, several times: more take hours.
const MOST_WORKERS: u16 = 1024;
const MOST_LANES: u16 = 64;
/// More do not fit into any memory.
const MOST_SAMPLES: usize = 1 << 24;
/// No switch is built so, but somebody may want to see what it does.
const MOST_OVERSUBSCRIBED: f64 = 1000.0;
/// To the moon takes 1.3.
const LONGEST_LATENCY: f64 = 10.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_read_as_tc_reads_them() {
        assert_eq!(queue("256kb"), Ok(262_144));
        assert_eq!(queue("2MB"), Ok(2 << 20));
        assert_eq!(queue("4096"), Ok(4096));
        for bad in ["", "kb", "1kb", "-2kb", "2 parsecs", "1.5mb", "2gb", "99999999999999999999gb"]
        {
            assert!(queue(bad).unwrap_err().contains("expected a size"), "{bad}");
        }
    }
}
