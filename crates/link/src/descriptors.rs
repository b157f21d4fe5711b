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
    /// Descriptors that the job takes: one per link, an event queue and a mailbox per lane, and a
    /// few for the node.
    pub fn descriptors(&self) -> usize {
        self.lanes.saturating_mul(self.nodes.saturating_add(2)).saturating_add(NODE)
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { nodes, lanes } = self;
        write!(f, "this job needs {} more ({nodes} nodes x {lanes} lanes)", self.descriptors())
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
        let need = self.need.map_or(0, |need| need.descriptors()) + SPARE;
        let enough = (self.open.unwrap_or(0) + need).next_power_of_two();
        write!(f, ": raise the limit before starting it, for instance with `ulimit -n {enough}`")
    }
}

/// Makes sure that the process may open what the job needs. Raises the limit as far as the system
/// lets it, if there would be little to spare.
pub fn reserve(need: Need) -> Result<(), Shortage> {
    let Some(open) = count_open() else { return Ok(()) };
    let wanted = (open + need.descriptors()) as u64;
    let suffices =
        |limit: Option<u64>, spare: u64| limit.is_none_or(|limit| limit >= wanted + spare);
    let (soft, hard) = limits();
    if suffices(soft, SPARE as u64) {
        return Ok(());
    }
    let limit = if raise(hard) { hard } else { soft };
    tracing::debug!(?soft, ?limit, open, wanted, "raised the limit of open files");
    if suffices(limit, 0) {
        return Ok(());
    }
    Err(Shortage { open: Some(open), limit, need: Some(need) })
}

/// What `error` says of descriptors, if it was [explained](explain).
pub fn shortage(error: &io::Error) -> Option<&Shortage> {
    error.get_ref()?.downcast_ref()
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

/// Two doors, their event queue and mailbox, the control connection, and the descriptors of shared
/// memory, for a moment.
const NODE: usize = 12;
/// What is good to have: up to 128 strangers take one each, and the program opens files too.
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
            "needs 1052 more",
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
