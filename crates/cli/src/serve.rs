//! `poseidon serve`: one dedicated server.

use poseidon::config::LinkRate;
use poseidon::{Config, Limit};
use std::process::ExitCode;

/// Run one dedicated server until the last worker has finished.
///
/// A server holds a part of the parameters and does nothing else. `poseidon launch --servers M`
/// starts M of them on this machine; on other machines start them by hand, with the environment of
/// the job and each with its own POSEIDON_SERVER.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// What this node's port carries, such as 10gbit; 'auto' measures it in a job of several hosts
    /// [default: auto, or POSEIDON_LINK_RATE].
    #[arg(long, value_name = "RATE|auto|unknown")]
    link_rate: Option<LinkRate>,

    /// What this server may send to other hosts, such as 400mbit; 'none' is no limit
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
}

/// Serves to the end of the job.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut config = Config::from_env()?;
    config.link_rate = args.link_rate.unwrap_or(config.link_rate);
    config.bandwidth_budget =
        args.bandwidth_budget.map_or(config.bandwidth_budget, |limit| limit.0);
    config.encrypt |= args.encrypt;
    config.rack = args.rack.clone().or(config.rack);
    let traffic = poseidon::serve(&config)?;
    tracing::debug!(sent = traffic.bytes_sent, received = traffic.bytes_received, "served");
    Ok(ExitCode::SUCCESS)
}

const EXAMPLES: &str = "\
Examples:
  Server 0 of 2, for 8 workers whose rank 0 runs on node1:
    WORLD_SIZE=8 POSEIDON_COORDINATOR=node1:29501 POSEIDON_SECRET=... \\
    POSEIDON_SERVERS=2 POSEIDON_SERVER=0 poseidon serve";
