//! The `poseidon` command.
//!
//! One file per subcommand, each with its `Args` and its `run`; a new one is a file, a line in
//! [`Command`] and a line in [`Command::run`].

mod bandwidth;
mod bench;
mod budget;
mod checkpoint;
mod data;
mod figures;
mod job;
mod lab;
mod launch;
mod orphan;
mod plan;
mod profile;
mod query;
mod report;
mod running_job;
mod serve;
mod supervise;
mod terminal;
mod train;

use anyhow::Context;
use clap::{Parser, Subcommand};
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Makes data-parallel training scale on ordinary Ethernet.
#[derive(Parser)]
#[command(name = "poseidon", version, arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(Box<train::Args>),
    Plan(Box<plan::Args>),
    Profile(profile::Args),
    Figures(figures::Args),
    Data(data::Args),
    Checkpoint(checkpoint::Args),
    Launch(launch::Args),
    Lab(lab::Args),
    Serve(serve::Args),
    Query(query::Args),
    Budget(budget::Args),
    Bench(bench::Args),
}

impl Command {
    fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Train(args) => train::run(*args),
            Self::Plan(args) => plan::run(*args),
            Self::Profile(args) => profile::run(args),
            Self::Figures(args) => figures::run(args),
            Self::Data(args) => data::run(args),
            Self::Checkpoint(args) => checkpoint::run(args),
            Self::Launch(args) => launch::run(args),
            Self::Lab(args) => lab::run(args),
            Self::Serve(args) => serve::run(args),
            Self::Query(args) => query::run(args),
            Self::Budget(args) => budget::run(args),
            Self::Bench(args) => bench::run(args),
        }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match start_log().and_then(|()| cli.command.run()) {
        Ok(code) => code,
        Err(error) => {
            // Nobody is left to tell if stderr is closed.
            let _ = writeln!(io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Logs to stderr, so that stdout carries only what the user asked for.
fn start_log() -> anyhow::Result<()> {
    let filter = match std::env::var("POSEIDON_LOG") {
        Ok(filter) => EnvFilter::try_new(&filter)
            .with_context(|| format!("POSEIDON_LOG is not a log filter: '{filter}'"))?,
        Err(_) => EnvFilter::new("warn,poseidon=info"),
    };
    tracing_subscriber::fmt()
        .compact()
        .without_time()
        .with_target(false)
        // They would be printed with a panic if stderr is what does not work.
        .log_internal_errors(false)
        .with_ansi(wants_colour(&io::stderr()))
        .with_writer(io::stderr)
        .with_env_filter(filter)
        .init();
    Ok(())
}

/// Whether what is written to `stream` is read by a person who likes colours.
fn wants_colour(stream: &impl IsTerminal) -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !refused
}

const EXAMPLES: &str = "\
Examples:
  Train a small net on this machine, with nothing else installed:
    poseidon train

  What VGG19 would do on sixteen machines and 10GbE, before they are bought:
    poseidon plan --model vgg19 --workers 16 --bandwidth 10gbit

  Train with four workers on this machine, each also a server:
    poseidon launch -n 4 -- python train.py --epochs 10

  The same on four virtual machines with 1 Gbit/s between them:
    poseidon lab --nodes 4 --rate 1gbit -- python train.py --epochs 10

  See what a subcommand can do:
    poseidon launch --help

Environment:
  POSEIDON_LOG  what to log to stderr, e.g. 'debug' or 'warn,poseidon=trace' (default: 'warn,poseidon=info')
  NO_COLOR      set it to anything to get no colours";
