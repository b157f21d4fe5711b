//! `poseidon budget`: changes what a running job may send.

use crate::running_job::{Coordinator, RunningJob};
use crate::terminal::say;
use poseidon::coordinator::set_bandwidth_budget;
use poseidon::{Limit, NodeId};
use std::process::ExitCode;

/// Change the bandwidth budget of a running job: what each of its nodes may send to other hosts.
///
/// The coordinator tells the nodes, and the new budget holds at once. Nodes that joined with another
/// budget of their own have this one from then on.
///
/// Takes the coordinator's address and the secret from the job's environment (POSEIDON_COORDINATOR,
/// POSEIDON_SECRET, POSEIDON_CLUSTER), unless they are given.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// What a node may send, such as 400mbit; 'none' is no limit.
    #[arg(value_name = "RATE|none")]
    budget: Limit,

    /// Only this node: a worker's rank, or the number of workers plus a server's index.
    #[arg(long, value_name = "N")]
    node: Option<u16>,

    #[command(flatten)]
    job: RunningJob,
}

/// Tells the nodes, and prints which were told.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Coordinator { config, patience } = args.job.find()?;
    let (address, keys, node) = (&config.coordinator, config.credentials(), args.node.map(NodeId));
    let told = set_bandwidth_budget(address, &keys, args.budget.0, node, patience)?;
    let told: Vec<_> = told.iter().map(ToString::to_string).collect();
    say(&match told.len() {
        0 => "nobody was told: the nodes have left the job\n".into(),
        _ => format!("nodes {}: {}\n", told.join(", "), args.budget),
    })?;
    Ok(ExitCode::SUCCESS)
}

const EXAMPLES: &str = "\
Examples:
  Every node of a running job may send 400 Mbit/s, for as long as others need the network:
    poseidon budget 400mbit --coordinator node1:29501
    poseidon budget none --coordinator node1:29501

  Only node 3 may send less:
    poseidon budget 100mbit --node 3 --coordinator node1:29501";
