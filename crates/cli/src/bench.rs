//! `poseidon bench`: measures Poseidon itself.

mod busy;
mod exchange;
mod overhead;
mod payload;
mod report;
mod scale;
mod servers;
pub(crate) mod simulate;
mod worker;

use std::process::ExitCode;

/// Measure Poseidon on this machine or inside a job.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    Exchange(exchange::Args),
    Overhead(overhead::Args),
    Scale(Box<scale::Args>),
    #[command(hide = true)]
    Busy(busy::Args),
    Simulate(simulate::Args),
}

/// Runs the measurement.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.what {
        What::Exchange(args) => exchange::run(args),
        What::Overhead(args) => overhead::run(args),
        What::Scale(args) => scale::run(*args),
        What::Busy(args) => busy::run(args),
        What::Simulate(args) => simulate::run(&args),
    }
}
