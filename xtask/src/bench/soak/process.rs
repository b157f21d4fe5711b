//! The processes of a job, and their memory as the system tells it.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;

/// A process of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Process {
    /// The one that was started: it has the coordinator and the dashboard.
    Launcher,
    /// The worker of this rank.
    Worker(u16),
}

/// Memory of one process in KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) rss: u64,
    /// The process's own, in no file.
    pub(super) anonymous: u64,
    /// In shared memory.
    pub(super) shared: u64,
}

/// The launcher `id` and the workers that it has started. A process that ends meanwhile is left out.
pub(super) fn family(id: u32) -> Result<BTreeMap<Process, Memory>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc").context("reading /proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
        let process = if pid == id {
            Some(Process::Launcher)
        } else if field(&status, "PPid") == Some(u64::from(id)) {
            fs::read(format!("/proc/{pid}/environ")).ok().and_then(|all| rank(&all))
        } else {
            None
        };
        if let Some((process, memory)) = process.zip(memory(&status)) {
            found.insert(process, memory);
        }
    }
    Ok(found)
}

fn memory(status: &str) -> Option<Memory> {
    Some(Memory {
        rss: field(status, "VmRSS")?,
        anonymous: field(status, "RssAnon")?,
        shared: field(status, "RssShmem")?,
    })
}

/// The number in a line such as `VmRSS:     3456 kB`.
fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The worker that an environment is of.
fn rank(environment: &[u8]) -> Option<Process> {
    let mut variables = environment.split(|byte| *byte == 0);
    let rank = variables.find_map(|variable| variable.strip_prefix(b"RANK="))?;
    std::str::from_utf8(rank).ok()?.parse().ok().map(Process::Worker)
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Launcher => write!(f, "launcher"),
            Self::Worker(rank) => write!(f, "worker {rank}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{command, end};
    use std::time::{Duration, Instant};

    #[test]
    fn the_system_tells_of_a_process_and_its_workers() {
        let mut worker = command(&["sleep", "600"]);
        let mut worker = worker.env("RANK", "3").spawn().unwrap();
        // A process has no environment yet when it has just begun.
        let until = Instant::now() + Duration::from_secs(60);
        let mut found = family(std::process::id()).unwrap();
        while !found.contains_key(&Process::Worker(3)) && Instant::now() < until {
            std::thread::yield_now();
            found = family(std::process::id()).unwrap();
        }
        end(&mut worker).unwrap();
        assert!(found[&Process::Launcher].anonymous > 0, "{found:?}");
        assert!(found[&Process::Worker(3)].rss > 0, "{found:?}");
    }

    #[test]
    fn fields_are_those_of_the_whole_name() {
        let status = "VmRSS:\t    3456 kB\nRssAnon:\t 12 kB\nRssShmem:\t 3 kB\nPPid:\t77\n";
        let expected = Memory { rss: 3456, anonymous: 12, shared: 3 };
        assert_eq!(memory(status), Some(expected));
        assert_eq!((field(status, "PPid"), field(status, "Rss")), (Some(77), None));
        assert_eq!(rank(b"A=1\0LOCAL_RANK=2\0RANK=5\0"), Some(Process::Worker(5)));
        assert_eq!(rank(b"A=1\0"), None);
    }
}
