//! `poseidon bench scale`: a whole training job on a virtual cluster, with pretended computing.
//!
//! Processes, plan, bytes, links and sums are real; only the layers' forward and backward are slept
//! through, for as long as a profile says they take. A session cannot tell. Beside every measurement
//! stands what the simulator predicts for the same set-up.

mod case;
mod node;
mod report;
mod saver;

use crate::bandwidth::Bandwidth;
use crate::lab::{Faults, Lab, LabSpec, MOST_NODES, QUEUE};
use crate::launch::at_least_1;
use crate::plan::{duration, positive};
use crate::supervise::{self, Options};
use crate::terminal::say;
use anyhow::Context;
use case::Case;
use poseidon::Policy;
use poseidon_sim::Overlap;
use report::{Report, Row};
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Train on a virtual cluster with pretended computing, and compare with the simulator.
///
/// For every number of nodes, starts as many processes in a virtual cluster (see 'poseidon lab'),
/// each a worker and a server. They exchange the model's gradients and factors for real; what they
/// would compute is slept through, layer by layer, for as long as the profile says. Prints the time
/// of an iteration and the bytes each node sends beside what the simulator predicts.
///
/// A small machine can stand in for a fast network: --dilate F makes computing and links F times as
/// slow, which changes no ratio between them; times are told as they would be without it.
/// --scale-model S trains a model with 1/S of the parameters and of the computing, for machines that
/// have no memory for so many copies of it; its factors shrink only by the root of S, so factors pay
/// off less than in the model itself.
///
/// Rebuilding gradients from factors is done for real too. How long it took is told to the simulator,
/// which knows networks, not processors.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// A model of the zoo, or a JSON file of your own (see poseidon plan --print-model).
    #[arg(long, short = 'm', value_name = "NAME|FILE", default_value = "vgg19")]
    model: String,

    /// How fast a worker computes: titan-x, or a TOML file that 'poseidon profile' wrote.
    #[arg(long, value_name = "NAME|FILE", default_value = "titan-x")]
    profile: String,

    /// Samples per worker and step.
    #[arg(long, short = 'k', value_name = "K", default_value = "32", value_parser = positive)]
    batch: usize,

    /// Numbers of nodes, one after the other.
    #[arg(long, short = 'n', value_name = "P,…", default_value = "2,4,8", value_delimiter = ',',
        value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST_NODES)))]
    nodes: Vec<u16>,

    /// Of a node's link, each way: 10gbit, 200mbit.
    #[arg(
        long,
        short = 'b',
        value_name = "RATE",
        default_value = "10gbit",
        allow_hyphen_values = true
    )]
    bandwidth: Bandwidth,

    /// From one node to another, one way, on top of what this machine takes.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration, allow_hyphen_values = true)]
    latency: Duration,

    /// Times as slow: computing, links and latency.
    #[arg(long, value_name = "F", default_value = "1", value_parser = factor, allow_hyphen_values = true)]
    dilate: f64,

    /// Times as small: the model and its computing.
    #[arg(long, value_name = "S", default_value = "1", value_parser = factor, allow_hyphen_values = true)]
    scale_model: f64,

    /// How fully connected layers go; several are measured one after the other.
    #[arg(long, value_name = "auto|ps|sfb", default_value = "auto", value_delimiter = ',')]
    scheme: Vec<Policy>,

    /// How much of the communication may run beside computing.
    #[arg(long, value_name = "none|backward|full", default_value_t = Overlap::Full)]
    overlap: Overlap,

    /// Steps of a run. The first and the last are not counted.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(3..))]
    steps: u32,

    /// Threads, and connections to each peer, that move data in every node.
    #[arg(long, value_name = "L", default_value_t = 1, value_parser = at_least_1)]
    lanes: u16,

    /// Make checkpoints in PLACE meanwhile: 'cargo xtask bench resume' finds out what they cost.
    #[arg(long, value_name = "PLACE", requires = "every", hide = true)]
    checkpoint: Option<String>,

    /// Make one after every N steps.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), hide = true)]
    every: Option<u32>,

    /// Print one JSON object and nothing else.
    #[arg(long)]
    json: bool,

    /// Be one node of a run with this scheme; print what it saw.
    #[arg(long, value_name = "SCHEME", hide = true)]
    node: Option<Policy>,
}

/// Runs the benchmark, or one node of it.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let case = Case::new(&args)?;
    if let Some(scheme) = args.node {
        let seen = node::run(&case, scheme, args.checkpoint.clone().zip(args.every))?;
        say(&(serde_json::to_string(&seen)? + "\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    Lab::prepare()?;
    let mut report = Report::new(&args, &case);
    for &scheme in &args.scheme {
        for &nodes in &args.nodes {
            let seen = match measure(&case, scheme, nodes)? {
                Ok(seen) => seen,
                Err(code) => return Ok(code),
            };
            let row = Row::new(&case, scheme, &seen)?;
            if !args.json {
                say(&format!("{}\n", report.line(&row)))?;
            }
            report.rows.push(row);
        }
    }
    let closing = match args.json {
        true => serde_json::to_string(&report)?,
        false => report.closing().to_string(),
    };
    say(&(closing + "\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// One run on a cluster of its own. The exit code is of a run that failed, which has been told.
fn measure(
    case: &Case,
    scheme: Policy,
    nodes: u16,
) -> anyhow::Result<Result<Vec<node::Seen>, ExitCode>> {
    let spec = LabSpec {
        ranks: vec![1; nodes.into()],
        rate: case.rate,
        delay: case.delay,
        congestion: "cubic".into(),
        queue: QUEUE,
        faults: Faults::default(),
    };
    let lab = Lab::up(&spec)?;
    let program = std::env::current_exe().context("cannot find the poseidon command itself")?;
    let command = || {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).arg("--node").arg(scheme.to_string());
        command.env("POSEIDON_LANES", case.lanes.to_string());
        // All ports have one rate, and bytes that measure it are not of the training.
        command.env("POSEIDON_LINK_RATE", "unknown");
        command
    };
    let outcome = supervise::run(
        lab.processes(command)?,
        Options { capture_stdout: true, ..Options::default() },
    )?;
    if outcome.status() != 0 {
        return Ok(Err(outcome.tell()));
    }
    let seen = outcome.processes.iter().map(|node| {
        serde_json::from_slice(&node.stdout)
            .with_context(|| format!("{} reported something else than a report", node.name))
    });
    Ok(Ok(seen.collect::<anyhow::Result<_>>()?))
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if (1.0..=1e6).contains(&factor) => Ok(factor),
        _ => Err(format!("expected a number from 1 to 1000000, got '{text}'")),
    }
}

const EXAMPLES: &str = "\
Examples:
  VGG19 on 10GbE, by this machine at a fiftieth of the speed, with an eighth of the model:
    poseidon bench scale --bandwidth 10gbit --dilate 50 --scale-model 8

  Parameter server beside hybrid communication:
    poseidon bench scale --scheme ps,auto --dilate 50 --scale-model 8

  What overlap is worth on four nodes:
    poseidon bench scale -n 4 --overlap none --dilate 50 --scale-model 8";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_slow_down_and_never_speed_up() {
        assert_eq!(factor("50"), Ok(50.0));
        assert_eq!(factor("1"), Ok(1.0));
        for bad in ["0", "0.5", "-3", "nan", "inf", "fast"] {
            assert!(factor(bad).unwrap_err().contains("from 1"), "{bad}");
        }
    }
}
