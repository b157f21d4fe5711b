//! `poseidon doctor`: looks at machines and the network between them before a job runs on them.

mod facts;
mod gpus;
mod judge;
mod saved;
mod text;

pub(crate) use saved::SavedCluster;

use crate::report::write_whole;
use crate::terminal::say;
use anyhow::Context;
use facts::Facts;
use gpus::Gpu;
use judge::{Finding, Topic};
use poseidon::check::{CheckMember, Choice, Way, reach};
use poseidon::{Config, NodeId};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Check the machines of a job and the network between them, and say what to mend.
///
/// Inside a job (started by poseidon launch, poseidon lab, torchrun, mpirun or srun) every node
/// reports, and worker 0 prints: which address each node listens on and why, versions, processors,
/// memory, limits, clocks, and for every pair of nodes whether it can connect, its round trip, the
/// largest packet that passes, what was sent again, and bytes per second both ways. What is wrong
/// comes last, with what to do about it. A pair takes about half a second, and 64 MB each way at
/// most. Where there are NVIDIA's GPUs, it also says how fast bytes go to and from each.
///
/// With names of hosts, outside a job: whether the names resolve and the coordinator's port answers.
/// With nothing: this machine alone.
///
/// The exit status is 1 if something is wrong.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Machines to reach from this one. The port is the coordinator's: 29501 where torchrun's is
    /// 29500.
    #[arg(value_name = "HOST[:PORT]")]
    hosts: Vec<String>,

    /// Seconds to wait for the nodes of the job, or for a host [default: 30, or
    /// POSEIDON_CONNECT_TIMEOUT; 5 for a host].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,

    /// Write what was measured to FILE, for 'poseidon plan --cluster FILE'. In a job of one host there
    /// is nothing to write.
    #[arg(long, value_name = "FILE.json", conflicts_with = "hosts")]
    save: Option<PathBuf>,

    /// Print JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// Everything that was seen. `--json` prints it: the names are a contract with those who read it.
#[derive(Debug, Default, Serialize)]
struct Report {
    nodes: Vec<NodeReport>,
    /// By pair and direction.
    ways: Vec<Way>,
    hosts: Vec<HostReport>,
    findings: Vec<Finding>,
}

/// One node, as it reports itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct NodeReport {
    name: String,
    /// Names the machine and its network namespace.
    host: String,
    /// Where it listens, first interface first. Empty outside a job.
    listens: Vec<Listens>,
    facts: Facts,
    /// The host's, with its first node.
    #[serde(default)]
    gpus: Vec<Gpu>,
}

/// An address that a node listens on.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Listens {
    address: String,
    interface: Option<String>,
    /// Why this address.
    why: String,
    mtu: Option<u32>,
}

/// A host that was tried from here.
#[derive(Clone, Debug, Serialize)]
struct HostReport {
    host: String,
    /// What the name stands for.
    address: Option<String>,
    /// The address of this machine on the way there.
    from: Option<String>,
    seconds: Option<f64>,
    failure: Option<String>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if !args.hosts.is_empty() {
        return tell(&args, &check_hosts(&args));
    }
    if !Config::is_launched() {
        let mut report = local(None);
        report.findings.extend(Config::from_env().err().map(|e| Finding::setting(&e)));
        return tell(&args, &report);
    }
    let mut config = match Config::from_env() {
        Ok(config) => config,
        Err(error) => {
            let mut report = local(None);
            report.findings.push(Finding::setting(&error));
            return tell(&args, &report);
        }
    };
    config.connect_timeout = match args.timeout {
        Some(seconds) => Duration::from_secs(seconds),
        None => poseidon::config::connect_timeout(JOB_PATIENCE)?,
    };
    match check_job(&config) {
        // Worker 0 tells what everybody has seen. The others leave meanwhile: it may be the one that
        // serves the coordinator.
        Ok((report, _member)) if config.node() == NodeId(0) => tell(&args, &report),
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            let mut report = local(Some(&config));
            report.findings.push(Finding::not_together(&error, &config.coordinator));
            tell(&args, &report)
        }
    }
}

/// Takes part in the check of a job. All nodes know all of it.
fn check_job(config: &Config) -> Result<(Report, CheckMember), poseidon::Error> {
    let mut member = CheckMember::join(config)?;
    let listens: Vec<Listens> = member.choices().map(Listens::new).collect();
    let mtu = listens.first().and_then(|listens| listens.mtu);
    let host = member.nodes()[member.node().index()].host.clone();
    let first = member.nodes().iter().position(|node| node.host == host);
    let node = NodeReport {
        name: member.name(member.node()),
        listens,
        facts: Facts::here(),
        // One at a time: they share the machine's memory.
        gpus: if first == Some(member.node().index()) { Gpu::measure_all() } else { Vec::new() },
        host,
    };
    let nodes = member.gather("doctor: nodes", &node)?;
    let ways = member.measure(mtu)?;
    let ways: Vec<Way> = member.gather("doctor: ways", &ways)?.into_iter().flatten().collect();
    let findings = judge::findings(&nodes, &ways);
    Ok((Report { nodes, ways, findings, ..Report::default() }, member))
}

/// What this machine alone shows.
fn local(config: Option<&Config>) -> Report {
    let name = match config {
        Some(config) => format!("worker {}", config.node()),
        None => "this machine".into(),
    };
    let (host, listens) = (String::new(), Vec::new());
    let (facts, gpus) = (Facts::here(), Gpu::measure_all());
    let nodes = vec![NodeReport { name, host, listens, facts, gpus }];
    let findings = judge::findings(&nodes, &[]);
    Report { nodes, findings, ..Report::default() }
}

fn check_hosts(args: &Args) -> Report {
    let patience = Duration::from_secs(args.timeout.unwrap_or(HOST_PATIENCE));
    let mut report = local(None);
    for host in &args.hosts {
        let (name, port) = host_and_port(host);
        let mut seen = HostReport {
            host: host.clone(),
            address: None,
            from: None,
            seconds: None,
            failure: None,
        };
        match reach(name, port, patience) {
            Ok(reached) => {
                seen.address = Some(reached.to.to_string());
                seen.from = Some(reached.from.to_string());
                seen.seconds = Some(reached.took.as_secs_f64());
            }
            Err(error) => {
                seen.failure = Some(error.to_string());
                report.findings.push(Finding::host(host, port, &error));
            }
        }
        report.hosts.push(seen);
    }
    report
}

/// `gpu1:29501`, `gpu1`, `10.0.0.1`, `fe80::1`, `[fe80::1]:29501`.
fn host_and_port(text: &str) -> (&str, u16) {
    let is_bare_ipv6 = text.parse::<std::net::Ipv6Addr>().is_ok();
    match text.rsplit_once(':').filter(|_| !is_bare_ipv6) {
        Some((host, port)) if !host.is_empty() => match port.parse() {
            Ok(port) => (host, port),
            Err(_) => (text, COORDINATOR_PORT),
        },
        _ => (text, COORDINATOR_PORT),
    }
}

fn tell(args: &Args, report: &Report) -> anyhow::Result<ExitCode> {
    let shown = match args.json {
        true => serde_json::to_string_pretty(report)? + "\n",
        false => text::text(report),
    };
    say(&shown)?;
    if let Some(path) = &args.save {
        let saved = SavedCluster::new(&report.nodes, &report.ways)?;
        let text = serde_json::to_string_pretty(&saved)? + "\n";
        write_whole(path, text.as_bytes()).context("the measurements were not saved")?;
        tracing::info!("saved: poseidon plan --cluster {}", path.display());
    }
    Ok(match report.findings.iter().any(|finding| finding.wrong) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

impl Listens {
    fn new(choice: &Choice) -> Self {
        let Choice { ip, interface, reason, .. } = choice;
        let (interface, why) = (interface.clone(), reason.clone());
        Self { address: ip.to_string(), interface, why, mtu: choice.mtu() }
    }
}

impl Finding {
    fn setting(error: &poseidon::Error) -> Self {
        let fix = "mend this setting on this machine; docs/running.md lists all of them";
        Self::wrong(Topic::Settings, error.to_string(), fix)
    }

    fn not_together(error: &poseidon::Error, coordinator: &str) -> Self {
        if matches!(error, poseidon::Error::Config(_)) {
            return Self::setting(error);
        }
        let fix = format!(
            "look at what the missing nodes print; let TCP through to the coordinator at {coordinator} \
             from every node; give every node the same POSEIDON_SECRET and the same Poseidon"
        );
        Self::wrong(Topic::Nodes, error.to_string(), &fix)
    }
}

/// How long the nodes of a job wait for each other.
const JOB_PATIENCE: Duration = Duration::from_secs(30);
/// Seconds that a host has to answer.
const HOST_PATIENCE: u64 = 5;
/// After torchrun's usual port, which is 29500.
const COORDINATOR_PORT: u16 = 29_501;

const EXAMPLES: &str = "\
Examples:
  This machine:
    poseidon doctor

  The machines of a Slurm job, one process each, and a file for 'poseidon plan':
    srun --ntasks-per-node 1 poseidon doctor --save cluster.json
    poseidon plan --model resnet50 --profile h200 --cluster cluster.json

  A virtual cluster, to see what doctor prints:
    poseidon lab --nodes 4 --rate 1gbit -- poseidon doctor

  Whether this machine reaches the coordinator's port of two others:
    poseidon doctor gpu1 gpu2:29501";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_a_port_or_the_coordinators() {
        let cases = [
            ("gpu1", ("gpu1", 29_501)),
            ("gpu1:7000", ("gpu1", 7000)),
            ("10.0.0.1:80", ("10.0.0.1", 80)),
            ("fe80::1", ("fe80::1", 29_501)),
            ("[fe80::1]:80", ("[fe80::1]", 80)),
        ];
        for (text, expected) in cases {
            assert_eq!(host_and_port(text), expected, "{text}");
        }
    }
}
