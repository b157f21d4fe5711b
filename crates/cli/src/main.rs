//! The `poseidon` command.
//!
//! One file per subcommand, each with its `Args` and its `run`; a new one is a file, a line in
//! [`Command`] and a line in [`Command::run`].

mod bandwidth;
mod bench;
mod budget;
mod checkpoint;
mod completions;
mod dashboard;
mod data;
mod doctor;
#[cfg(test)]
mod documented_commands;
mod figures;
mod job;
mod job_report;
mod lab;
mod launch;
mod man;
mod orphan;
mod plan;
mod profile;
mod query;
mod report;
mod running_job;
mod serve;
mod supervise;
mod terminal;
mod threads;
mod top;
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
    Doctor(doctor::Args),
    Serve(serve::Args),
    Top(top::Args),
    Dashboard(dashboard::Args),
    Query(query::Args),
    Budget(budget::Args),
    Report(job_report::Args),
    Bench(bench::Args),
    Completions(completions::Args),
    Man(man::Args),
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
            Self::Doctor(args) => doctor::run(args),
            Self::Serve(args) => serve::run(args),
            Self::Top(args) => top::run(args),
            Self::Dashboard(args) => dashboard::run(args),
            Self::Query(args) => query::run(args),
            Self::Budget(args) => budget::run(args),
            Self::Report(args) => job_report::run(args),
            Self::Bench(args) => bench::run(args),
            Self::Completions(args) => completions::run(args),
            Self::Man(args) => man::run(args),
        }
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            let words = terminal::printable_lines(&format!("{error:#}"));
            // Nobody is left to tell if stderr is closed.
            let _ = writeln!(io::stderr(), "error: {words}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    if launch::is_host(std::env::args_os()) {
        start_log()?;
        return launch::run_as_host();
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => error.exit(),
        // Help, and the version.
        Err(text) => {
            terminal::said(text.print())?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    start_log()?;
    cli.command.run()
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

  Watch it while it runs: in another terminal, or in a browser at http://127.0.0.1:8080
    poseidon top
    poseidon launch -n 4 --dashboard :8080 -- python train.py

  See what a job does, layer by layer; launch makes a page of it:
    POSEIDON_REPORT=seen poseidon launch -n 4 -- python train.py

  See what a subcommand can do:
    poseidon launch --help

Environment:
  POSEIDON_LOG  what to log to stderr, e.g. 'debug' or 'warn,poseidon=trace' (default: 'warn,poseidon=info')
  NO_COLOR      set it to anything to get no colours";
