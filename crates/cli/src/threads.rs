//! How many threads the numeric libraries of a worker may use.

use std::process::Command;

/// What each of several processes of this machine is told about threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Threads {
    /// `None`: the user has said how many.
    each: Option<usize>,
}

impl Threads {
    /// The cores of this machine are shared by `workers` processes, unless `OMP_NUM_THREADS` is
    /// set. Without it, every process of torch takes all cores, and several of them take turns on
    /// each core. torchrun sets it too.
    pub(crate) fn shared_by(workers: u16) -> Self {
        if std::env::var_os(VARIABLE).is_some() {
            return Self { each: None };
        }
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let each = share(cores, workers);
        tracing::info!(
            "{VARIABLE} is not set, each worker gets {each}: {cores} cores for {workers} workers"
        );
        Self { each: Some(each) }
    }

    /// Tells a worker.
    pub(crate) fn describe(self, command: &mut Command) {
        if let Some(each) = self.each {
            command.env(VARIABLE, each.to_string());
        }
    }
}

fn share(cores: usize, workers: u16) -> usize {
    (cores / usize::from(workers.max(1))).max(1)
}

/// What OpenMP, MKL, OpenBLAS and torch read.
pub(crate) const VARIABLE: &str = "OMP_NUM_THREADS";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_at_least_one_thread() {
        assert_eq!([1, 2, 3, 8, 100].map(|workers| share(8, workers)), [8, 4, 2, 1, 1]);
    }
}
