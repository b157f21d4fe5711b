//! `cargo xtask bench`: measurements beside the peers, each recorded as a dated folder.

mod charts;
mod cluster;
mod contender;
mod environment;
mod exchange;
mod finding;
mod gpu;
mod hosts;
mod links;
mod measurement;
mod plot;
mod racks;
mod ratio;
mod record;
mod resume;
mod scale;
mod size;
mod soak;
mod strangers;
mod summary;
mod targets;
mod torch;
mod trace;
mod train;
mod turns;
mod weather;

use anyhow::Result;
use clap::Subcommand;

/// What to measure.
#[derive(Subcommand)]
pub(crate) enum Bench {
    /// One full exchange of a gradient on this machine, beside Gloo and Open MPI
    Exchange(exchange::Args),
    /// Training with PyTorch on a GPU, beside stock DistributedDataParallel; parts of it need root
    ///
    /// Ranks are in network namespaces with rate-limited ports and share this machine's one NVIDIA
    /// GPU. Contenders take turns in the same processes. `apart` is the same ranks without
    /// synchronisation; `ddp` is torch's DistributedDataParallel on Gloo, `ddp-nccl` on NCCL over
    /// TCP, `ddp-poseidon` on Poseidon's backend; `poseidon` and `poseidon-server` are
    /// poseidon.torch. The table shows all of them beside what the wire allows.
    ///
    /// Without cargo on the machine with the GPU, carry this command's binary there and run it from
    /// the checkout's root. --nets, --nodes, --gbit, --precision, --contenders, --rounds and
    /// --turn-seconds choose how long it takes: a turn takes about a second and a half, and every
    /// net has rounds x contenders of them for each number of ranks, rate and precision.
    Gpu(Box<gpu::Args>),
    /// Exchanges of several ranks per host beside Gloo and Open MPI; needs root
    ///
    /// Ranks of several hosts sum a buffer. A host is a network namespace, and its ranks share its
    /// port. Poseidon takes part twice: with a layer's gradient through its shards, and with a
    /// tensor of a group. Gloo and Open MPI do an all_reduce. Contenders take turns.
    ///
    /// The table has for every contender: the seconds of an exchange, how many times as long Gloo
    /// takes, the MB that the busiest port carried for one exchange, the part of the speed that the
    /// port allows, and CPU seconds. A host that sends one stream has as many MB on its port as a
    /// host with one rank.
    ///
    /// It needs root and iproute2. Cases that this machine cannot carry are left out, and the
    /// summary says why. Open MPI takes part if mpirun and mpi4py are there; nothing is installed
    /// for it.
    Hosts(Box<hosts::Args>),
    /// Exchanges over rate-limited links beside Gloo, one network namespace per node; needs root
    Links(Box<links::Args>),
    /// Exchanges between racks with a slow link, and with a server of several interfaces; needs root
    ///
    /// `racks`: nodes in racks sum a buffer in three ways: with the racks named (POSEIDON_RACK);
    /// flat, where hosts are in a ring; and flat without a ring, straight between all nodes. The
    /// table has the seconds of an exchange, the bytes on the link of a rack, and what `poseidon
    /// plan` says of the same network.
    ///
    /// `box`: workers sum a buffer through one dedicated server, whose machine has several
    /// interfaces (a PBox). One job uses all of them, and another one of them.
    ///
    /// All jobs of a part are on all nodes at the same time and take turns. It needs root and
    /// iproute2, and no Python.
    Racks(Box<racks::Args>),
    /// Whether training goes on bit by bit after a kill, what a checkpoint costs, and what slow workers
    /// cost; parts need root
    Resume(resume::Args),
    /// Training with PyTorch, beside stock DistributedDataParallel on Gloo; parts of it need root
    Torch(torch::Args),
    /// What it costs a job to write a trace
    Trace(trace::Args),
    /// Exactness, convergence, overhead and speed of `poseidon train`; parts of it need root
    Train(train::Args),
    /// Whether a job that is watched needs ever more memory
    ///
    /// Workers sleep where others compute, so that many find room on one machine. A job of an hour
    /// takes a few minutes of CPU time.
    Soak(soak::Args),
    /// The simulator beside real runs on virtual clusters with pretended computing
    Scale(scale::Args),
    /// Exchanges with and without strangers at the doors of the job
    ///
    /// It needs no root and no network: two workers of this machine, and strangers beside them.
    /// Without cargo, carry this command's binary and the poseidon command to the machine and pass
    /// --poseidon.
    Strangers(strangers::Args),
    /// An exchange over links with delay and loss, beside Gloo: one network namespace per node
    Weather(weather::Args),
}

/// Runs one benchmark.
pub(crate) fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Exchange(args) => exchange::run(args),
        Bench::Gpu(args) => gpu::run(args),
        Bench::Hosts(args) => hosts::run(args),
        Bench::Links(args) => links::run(args),
        Bench::Racks(args) => racks::run(args),
        Bench::Resume(args) => resume::run(args),
        Bench::Torch(args) => torch::run(args),
        Bench::Trace(args) => trace::run(args),
        Bench::Train(args) => train::run(args),
        Bench::Scale(args) => scale::run(args),
        Bench::Strangers(args) => strangers::run(args),
        Bench::Soak(args) => soak::run(args),
        Bench::Weather(args) => weather::run(args),
    }
}

/// A command line of a benchmark, for its tests.
#[cfg(test)]
#[derive(clap::Parser)]
struct Line<A: clap::Args> {
    #[command(flatten)]
    args: A,
}
