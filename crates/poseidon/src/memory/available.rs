//! How much memory this process may still get, at most.

use std::fs;
use std::path::Path;

/// A bound of what this process may get, and what sets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Available {
    pub(crate) bytes: u64,
    pub(crate) by: String,
}

/// The least of what the machine has free, swap included, and what the process's control groups allow.
/// It is a bound from above: a job that needs more cannot run, one that needs less may still not fit.
/// `None` where nothing says.
pub(crate) fn available() -> Option<Available> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| of_machine(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    // The second version has one hierarchy, and every group above the process's own limits it too.
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let mounted = Path::new("/sys/fs/cgroup");
    let own = mounted.join(own);
    let above = own.ancestors().take_while(|folder| folder.starts_with(mounted));
    let limits = above.map(|folder| folder.join("memory.max"));
    let limits = limits.chain([mounted.join("memory/memory.limit_in_bytes")]);
    let limits = limits.filter_map(|file| of_group(&fs::read_to_string(&file).ok()?, &file));
    machine.into_iter().chain(limits).min_by_key(|limit| limit.bytes)
}

fn of_machine(meminfo: &str) -> Option<Available> {
    let kilobytes = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse().ok()
    };
    let free = kilobytes("MemAvailable")?.saturating_add(kilobytes("SwapFree").unwrap_or(0));
    let by = "MemAvailable and SwapFree of /proc/meminfo".into();
    Some(Available { bytes: free.saturating_mul(1024), by })
}

/// "max" is no number, and no limit.
fn of_group(limit: &str, file: &Path) -> Option<Available> {
    let bytes = limit.trim().parse().ok()?;
    Some(Available { bytes, by: file.display().to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_linux_writes_them() {
        let meminfo = "MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   20 kB\nSwapFree:  3 kB\n";
        assert_eq!(of_machine(meminfo).unwrap().bytes, 23 << 10);
        assert_eq!(of_machine("MemTotal: 100 kB\n"), None);
        let file = Path::new("/sys/fs/cgroup/memory.max");
        assert_eq!(of_group("4096\n", file).unwrap().bytes, 4096);
        assert_eq!(of_group("max\n", file), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_says_something() {
        assert!(available().is_some_and(|available| available.bytes > 0));
    }
}
