//! What dedicated servers use of the processors, as a worker beside them sees it.

use anyhow::{Context, ensure};
use rustix::process::getppid;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The processes of a job's dedicated servers: folders of `/proc`. A server knows no iterations, so
/// a worker reads the servers' times when its own measured part begins and when it ends.
#[derive(Debug, Default)]
pub(crate) struct ServerProcesses(Vec<PathBuf>);

impl ServerProcesses {
    /// The `expected` servers that were started by the process that started this one.
    pub(crate) fn beside(expected: u16) -> anyhow::Result<Self> {
        if expected == 0 {
            return Ok(Self::default());
        }
        let launcher = getppid().context("the process that started this one is gone")?;
        let entries = fs::read_dir("/proc").context("looking for the servers' processes")?;
        let folders = entries.flatten().map(|entry| entry.path());
        let launcher = launcher.as_raw_nonzero().get();
        let servers: Vec<_> =
            folders.filter(|folder| is_server(folder, launcher).unwrap_or(false)).collect();
        let found = servers.len();
        ensure!(
            found == usize::from(expected),
            "found {found} of {expected} servers' processes, whose CPU time is to be counted"
        );
        Ok(Self(servers))
    }

    /// What all of them have used so far.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        self.0.iter().map(|folder| process_cpu(folder)).sum()
    }
}

/// Whether the process of this folder is `poseidon serve`, started by `launcher`. `None` if the
/// folder is no process, or the process is over.
fn is_server(folder: &Path, launcher: i32) -> Option<bool> {
    let stat = fs::read_to_string(folder.join("stat")).ok()?;
    let words = fs::read(folder.join("cmdline")).ok()?;
    let subcommand = words.split(|byte| *byte == 0).nth(1);
    Some(parent(&stat)? == launcher && subcommand == Some(b"serve"))
}

/// The parent's number in a line of `/proc/PID/stat`. The name before it may have any characters.
fn parent(stat: &str) -> Option<i32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// The time of all threads of a process. `schedstat` has nanoseconds, where `stat` has hundredths of
/// a second. Threads that are over are left out; a server's last as long as it does.
fn process_cpu(folder: &Path) -> anyhow::Result<Duration> {
    let told = || format!("reading the CPU time of the server {}", folder.display());
    let mut nanoseconds = 0;
    for thread in fs::read_dir(folder.join("task")).with_context(told)? {
        let path = thread.with_context(told)?.path().join("schedstat");
        let text = fs::read_to_string(path).with_context(told)?;
        let first = text.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
        nanoseconds += first.with_context(told)?;
    }
    Ok(Duration::from_nanos(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::worker::thread_cpu;

    #[test]
    fn a_parent_is_found_behind_any_name() {
        assert_eq!(parent("12 (poseidon) S 7 12 12 0"), Some(7));
        assert_eq!(parent("12 (odd) name) (S 9) R 34 1"), Some(34));
        assert_eq!(parent("12 poseidon"), None);
    }

    #[test]
    fn the_time_of_this_process_grows_with_what_it_does() {
        let (this, mut value) = (Path::new("/proc/self"), 1_u64);
        let (before, begin) = (process_cpu(this).unwrap(), thread_cpu());
        while thread_cpu() - begin < Duration::from_millis(100) {
            value = std::hint::black_box(value.wrapping_mul(31).wrapping_add(7));
        }
        // The kernel counts a running thread now and then, not at every moment.
        assert!(process_cpu(this).unwrap() - before >= Duration::from_millis(50));
    }

    #[test]
    fn servers_that_are_not_there_are_missed() {
        let error = ServerProcesses::beside(2).unwrap_err().to_string();
        assert!(error.contains("found 0 of 2 servers"), "{error}");
        assert_eq!(ServerProcesses::beside(0).unwrap().cpu().unwrap(), Duration::ZERO);
    }
}
