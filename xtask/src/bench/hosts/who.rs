//! Who takes part, and the command that starts it on all hosts.

use super::layout::Layout;
use crate::bench::cluster::Cluster;
use crate::bench::environment;
use crate::bench::size::Size;
use crate::command::works;
use clap::ValueEnum;
use serde::Serialize;
use std::process::Command;

/// A way to sum a buffer over the ranks of several hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub(crate) enum Who {
    /// Poseidon: a layer's gradient, through the shards
    Push,
    /// Poseidon: a tensor of a group, by all_reduce
    AllReduce,
    /// torch.distributed's all_reduce on Gloo
    Gloo,
    /// Open MPI's Allreduce, over TCP between hosts and shared memory within
    Openmpi,
}

/// The programs that contenders are run with.
pub(crate) struct Programs {
    pub(crate) poseidon: String,
    pub(crate) python: String,
}

/// Poseidon's second job must not meet on the port of the first.
const SECOND_PORT: &str = "29600";

impl Who {
    /// Its name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Push => "poseidon",
            Self::AllReduce => "poseidon, all_reduce",
            Self::Gloo => "gloo",
            Self::Openmpi => "openmpi",
        }
    }

    /// Whether it is this project's.
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Self::Push | Self::AllReduce)
    }

    /// Why this machine cannot run it, if it cannot. Nothing is installed.
    pub(crate) fn missing(self, python: &str) -> Option<String> {
        if self != Self::Openmpi {
            return None;
        }
        if !works(&["mpirun", "--version"]) {
            return Some("there is no mpirun on this machine".into());
        }
        let imports = works(&[python, "-c", "import mpi4py.MPI"]);
        (!imports).then(|| "this Python has no mpi4py that works".into())
    }

    /// A command that runs its ranks on all hosts of `cluster`, ready for turns of these sizes.
    pub(crate) fn command(
        self,
        cluster: &Cluster,
        layout: &Layout,
        sizes: &[Size],
        programs: &Programs,
    ) -> Command {
        let mut command = match self {
            Self::Openmpi => cluster.by_mpirun(),
            _ => cluster.on_every_node(),
        };
        command.env("RANKS", layout.list());
        if self == Self::AllReduce {
            command.env("MASTER_PORT", SECOND_PORT);
        }
        command.args(self.words(layout, sizes, programs));
        command
    }

    fn words(self, layout: &Layout, sizes: &[Size], programs: &Programs) -> Vec<String> {
        let Programs { poseidon, python } = programs;
        let bytes: Vec<_> = sizes.iter().map(|size| size.0.to_string()).collect();
        let turns = format!("--turns --bytes {}", bytes.join(","));
        let line = match self {
            Self::Push => format!("{poseidon} bench exchange --in-cluster {turns}"),
            Self::AllReduce => {
                format!("{poseidon} bench exchange --in-cluster {turns} --collective all_reduce")
            }
            Self::Gloo => format!("{python} bench/peers/gloo.py --in-cluster {turns}"),
            Self::Openmpi => {
                let memory = environment::shared_memory();
                // More ranks than cores make no progress while the others spin.
                let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
                let crowded = layout.ranks() > cores as u64;
                let waiting = if crowded { "--mca mpi_yield_when_idle 1 " } else { "" };
                format!(
                    "--mca pml ob1 --mca btl tcp,{memory},self {waiting}\
                     {python} bench/peers/mpi.py --link tcp {turns}"
                )
            }
        };
        line.split_whitespace().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_start_has_all_sizes() {
        let programs = Programs { poseidon: "poseidon".into(), python: "python".into() };
        let layout = "2x8".parse().unwrap();
        let sizes = [Size::kb(64), Size::mb(1)];
        let words = |who: Who| who.words(&layout, &sizes, &programs).join(" ");
        let push = "poseidon bench exchange --in-cluster --turns --bytes 65536,1048576";
        assert_eq!(words(Who::Push), push);
        assert_eq!(words(Who::AllReduce), format!("{push} --collective all_reduce"));
        let gloo = "python bench/peers/gloo.py --in-cluster --turns --bytes 65536,1048576";
        assert_eq!(words(Who::Gloo), gloo);
        let mpi = words(Who::Openmpi);
        let end = "python bench/peers/mpi.py --link tcp --turns --bytes 65536,1048576";
        assert!(mpi.starts_with("--mca pml ob1 ") && mpi.ends_with(end), "{mpi}");
    }
}
