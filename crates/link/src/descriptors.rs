//! File descriptors: how many a process has open, how many it may have, and how many a job needs.

use std::fmt;
use std::io;

/// What a job's links take on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Nodes of the job.
    pub nodes: usize,
    /// Links between two nodes.
    pub lanes: usize,
}

/// A process that has, or will have, more descriptors open than it may.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Shortage {
    /// Descriptors that are open now, where the system tells.
    pub open: Option<usize>,
    /// The limit, `RLIMIT_NOFILE`; `None` if there is none.
    pub limit: Option<u64>,
    /// What the job takes, if that is known.
    pub need: Option<Need>,
}

impl Need {
    /// Descriptors that the job takes at most: one per link, and what starting takes for a moment.
    pub fn descriptors(&self) -> usize {
        self.nodes.saturating_mul(self.lanes).saturating_add(SPARE)
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (nodes, lanes, all) = (self.nodes, self.lanes, self.descriptors());
        write!(
            f,
            "this job needs {all} more for links ({nodes} nodes x {lanes} lanes, {SPARE} to spare)"
        )
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not enough file descriptors: this process ")?;
        match self.open {
            Some(open) => write!(f, "has {open} open")?,
            None => f.write_str("has too many open")?,
        }
        if let Some(limit) = self.limit {
            write!(f, " and may have {limit} (RLIMIT_NOFILE)")?;
        }
        if let Some(need) = &self.need {
            write!(f, "; {need}")?;
        }
        let need = self.need.map_or(SPARE, |need| need.descriptors());
        let enough = (self.open.unwrap_or(0) + need).max(self.limit.unwrap_or(0) as usize + 1);
        write!(
            f,
            ": raise the limit before starting it, for instance `ulimit -n {}`",
            enough.next_power_of_two()
        )
    }
}

/// Makes sure that the process may open what the job needs: raises its limit as far as the system lets it.
pub fn reserve(need: Need) -> Result<(), Shortage> {
    let Some(open) = count_open() else { return Ok(()) };
    let wanted = (open + need.descriptors()) as u64;
    let (soft, hard) = limits();
    if soft.is_none_or(|soft| soft >= wanted) {
        return Ok(());
    }
    let raised = raise(hard);
    if raised && hard.is_none_or(|hard| hard >= wanted) {
        tracing::debug!(?soft, ?hard, wanted, "raised the limit of open files");
        return Ok(());
    }
    let limit = if raised { hard } else { soft };
    Err(Shortage { open: Some(open), limit, need: Some(need) })
}

/// `error` with the facts, if it says that the process has no descriptor left.
pub fn explain(error: io::Error, need: Option<Need>) -> io::Error {
    if !is_shortage(&error) {
        return error;
    }
    let shortage = Shortage { open: count_open(), limit: limits().0, need };
    io::Error::new(error.kind(), shortage)
}

/// Whether the process has no descriptor left.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error())
}

/// Open descriptors. The count needs one itself: at the limit it is the limit.
fn count_open() -> Option<usize> {
    let listed = if cfg!(target_os = "linux") { "/proc/self/fd" } else { "/dev/fd" };
    match std::fs::read_dir(listed) {
        Ok(entries) => Some(entries.count().saturating_sub(1)),
        Err(error) if is_shortage(&error) => limits().0.map(|soft| soft as usize),
        Err(_) => None,
    }
}

fn limits() -> (Option<u64>, Option<u64>) {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    (limit.current, limit.maximum)
}

fn raise(to: Option<u64>) -> bool {
    let limit = rustix::process::Rlimit { current: to, maximum: to };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).is_ok()
}

/// What is open for a moment while a node starts: 64 handshakes with two each, event queues, the descriptors of
/// shared memory.
const SPARE: usize = 192;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_says_what_is_open_what_is_allowed_what_is_needed_and_what_to_do() {
        let need = Some(Need { nodes: 128, lanes: 8 });
        let words = Shortage { open: Some(40), limit: Some(1024), need }.to_string();
        for part in [
            "has 40 open",
            "may have 1024 (RLIMIT_NOFILE)",
            "needs 1216",
            "128 nodes x 8 lanes",
            "ulimit -n 2048",
        ] {
            assert!(words.contains(part), "{words}");
        }
    }

    #[test]
    fn only_a_shortage_is_explained() {
        let plain = explain(io::ErrorKind::ConnectionRefused.into(), None).to_string();
        assert!(!plain.contains("RLIMIT"), "{plain}");
        let short = io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        let words = explain(short, None).to_string();
        assert!(words.contains("RLIMIT_NOFILE") && words.contains("ulimit -n"), "{words}");
    }

    #[test]
    fn a_small_job_fits() {
        reserve(Need { nodes: 2, lanes: 2 }).unwrap();
    }
}
