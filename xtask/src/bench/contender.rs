//! Who is measured, and the command that runs it.

use super::size::Size;
use clap::ValueEnum;

/// A way to sum a buffer over processes of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Contender {
    /// Poseidon over TCP on loopback
    PoseidonTcp,
    /// Poseidon over what it picks between processes of one machine
    PoseidonLocal,
    /// torch.distributed on Gloo, over TCP on loopback
    Gloo,
    /// Open MPI over TCP on loopback
    OpenmpiTcp,
    /// Open MPI over shared memory
    OpenmpiShm,
}

/// One point of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Case {
    pub(crate) workers: usize,
    pub(crate) size: Size,
}

/// The programs the contenders are run with.
pub(crate) struct Programs {
    /// The `poseidon` command.
    pub(crate) poseidon: String,
    /// A Python that has the peers' packages.
    pub(crate) python: String,
    /// Open MPI's name for its shared-memory transport.
    pub(crate) shared_memory: &'static str,
    /// Cores of this machine.
    pub(crate) cores: usize,
}

impl Contender {
    /// Its name in tables and files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::PoseidonTcp => "poseidon-tcp",
            Self::PoseidonLocal => "poseidon-local",
            Self::Gloo => "gloo",
            Self::OpenmpiTcp => "openmpi-tcp",
            Self::OpenmpiShm => "openmpi-shm",
        }
    }

    /// Whether it is this project's.
    pub(crate) fn is_poseidon(self) -> bool {
        matches!(self, Self::PoseidonTcp | Self::PoseidonLocal)
    }

    /// Whether it needs mpirun.
    pub(crate) fn is_mpi(self) -> bool {
        matches!(self, Self::OpenmpiTcp | Self::OpenmpiShm)
    }

    /// The words of the command that measures one case.
    pub(crate) fn words(self, case: Case, iters: usize, programs: &Programs) -> Vec<String> {
        let Case { workers, size: Size(bytes) } = case;
        let Programs { poseidon, python, shared_memory, cores } = programs;
        let line = match self {
            Self::PoseidonTcp | Self::PoseidonLocal => {
                let link = if self == Self::PoseidonTcp { "tcp" } else { "auto" };
                format!(
                    "{poseidon} bench exchange --workers {workers} --bytes {bytes} --iters {iters} \
                     --link {link} --json"
                )
            }
            Self::Gloo => format!(
                "{python} bench/peers/gloo.py --workers {workers} --bytes {bytes} --iters {iters}"
            ),
            Self::OpenmpiTcp | Self::OpenmpiShm => {
                let (link, transport) = match self {
                    Self::OpenmpiTcp => ("tcp", "tcp,self --mca btl_tcp_if_include lo".to_owned()),
                    _ => ("shm", format!("{shared_memory},self")),
                };
                // More ranks than cores make no progress while the others spin.
                let waiting = if workers > *cores { "--mca mpi_yield_when_idle 1 " } else { "" };
                format!(
                    "mpirun --allow-run-as-root --oversubscribe --mca pml ob1 --mca btl {transport} \
                     {waiting}-np {workers} \
                     {python} bench/peers/mpi.py --bytes {bytes} --iters {iters} --link {link}"
                )
            }
        };
        line.split_whitespace().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(contender: Contender, workers: usize) -> String {
        let programs = Programs {
            poseidon: "poseidon".to_owned(),
            python: "python".to_owned(),
            shared_memory: "vader",
            cores: 2,
        };
        contender.words(Case { workers, size: Size::kb(64) }, 9, &programs).join(" ")
    }

    #[test]
    fn the_two_links_of_poseidon() {
        let command = "poseidon bench exchange --workers 4 --bytes 65536 --iters 9 --link";
        assert_eq!(line(Contender::PoseidonTcp, 4), format!("{command} tcp --json"));
        assert_eq!(line(Contender::PoseidonLocal, 4), format!("{command} auto --json"));
    }

    #[test]
    fn mpi_yields_only_when_ranks_outnumber_cores() {
        assert!(!line(Contender::OpenmpiTcp, 2).contains("yield"));
        assert!(line(Contender::OpenmpiTcp, 4).contains("--mca mpi_yield_when_idle 1 -np 4"));
        assert!(line(Contender::OpenmpiShm, 2).contains("--mca btl vader,self -np 2"));
    }
}
