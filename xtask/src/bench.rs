//! `cargo xtask bench`: measurements beside the peers, each recorded as a dated folder.

mod charts;
mod cluster;
mod contender;
mod environment;
mod exchange;
mod finding;
mod links;
mod measurement;
mod plot;
mod ratio;
mod record;
mod scale;
mod size;
mod summary;
mod targets;
mod torch;
mod train;
mod weather;

use anyhow::Result;
use clap::Subcommand;

/// What to measure.
#[derive(Subcommand)]
pub(crate) enum Bench {
    /// One full exchange of a gradient on this machine, beside Gloo and Open MPI
    Exchange(exchange::Args),
    /// Exchanges over rate-limited links beside Gloo, one network namespace per node; needs root
    Links(Box<links::Args>),
    /// Training with PyTorch, beside stock DistributedDataParallel on Gloo; parts of it need root
    Torch(torch::Args),
    /// Exactness, convergence, overhead and speed of `poseidon train`; parts of it need root
    Train(train::Args),
    /// The simulator beside real runs on virtual clusters with pretended computing
    Scale(scale::Args),
    /// An exchange over links with delay and loss, beside Gloo: one network namespace per node
    Weather(weather::Args),
}

/// Runs one benchmark.
pub(crate) fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Exchange(args) => exchange::run(args),
        Bench::Links(args) => links::run(args),
        Bench::Torch(args) => torch::run(args),
        Bench::Train(args) => train::run(args),
        Bench::Scale(args) => scale::run(args),
        Bench::Weather(args) => weather::run(args),
    }
}
