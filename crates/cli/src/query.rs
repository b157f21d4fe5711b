//! `poseidon query`: asks a running job's coordinator.

use anyhow::{Context, bail};
use poseidon::Config;
use poseidon::coordinator::query;
use std::process::ExitCode;
use std::time::Duration;

/// Ask a running job's coordinator for the information book: nodes, addresses, layers, plan facts.
///
/// Takes the coordinator's address and the secret from the job's environment (POSEIDON_COORDINATOR,
/// POSEIDON_SECRET, POSEIDON_CLUSTER), unless they are given.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// A dotted path into the book; without it, all of it.
    #[arg(default_value = "")]
    key: String,

    /// The coordinator's address.
    #[arg(long, value_name = "HOST:PORT")]
    coordinator: Option<String>,

    /// The job's name, where it is not the environment's.
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,

    /// Seconds to wait for an answer.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    patience: u64,
}

/// Prints the answer as JSON.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut config = Config::from_env()?;
    config.cluster = args.cluster.unwrap_or(config.cluster);
    let address = args.coordinator.unwrap_or(config.coordinator.clone());
    if address.ends_with(":0") {
        bail!(
            "no coordinator to ask: give --coordinator HOST:PORT, or run inside a job's environment"
        );
    }
    let patience = Duration::from_secs(args.patience);
    let answer = query(&address, &config.credentials(), &args.key, patience)?;
    let answer = answer.with_context(|| format!("the book has nothing under '{}'", args.key))?;
    println!("{answer:#}");
    Ok(ExitCode::SUCCESS)
}

const EXAMPLES: &str = "\
Examples:
  What does a worker's job look like, from inside it?
    poseidon launch -n 2 -- sh -c '[ $RANK = 1 ] || ./train & poseidon query cluster; wait'

  Where does node 3 listen?
    poseidon query nodes.3.tcp --coordinator node1:29501";
