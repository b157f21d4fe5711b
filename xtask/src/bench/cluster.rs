//! A virtual cluster: every node a network namespace whose port is limited both ways.

use crate::bench::environment;
use crate::command::{command, output, succeed, works};
use anyhow::{Context, Result, bail};
use std::process::Command;

const SCRIPT: &str = "bench/vcluster.sh";

/// What the script's burst is enough for, in Mbit/s. A faster port's burst passes in the same time,
/// 0.1 ms.
const FAST: u64 = 10_000;
/// The script's burst.
const BURST_KB: u64 = 128;

/// The switch's own address, which nodes reach through their ports.
pub(crate) const SWITCH: &str = "10.77.0.254";

/// Whether this process can make one.
pub(crate) fn check() -> Result<()> {
    if !environment::is_root() || !works(&["ip", "-V"]) || !works(&["tc", "-V"]) {
        bail!("network namespaces need root and iproute2 (Debian: apt-get install iproute2)");
    }
    Ok(())
}

/// The namespaces, taken down when this goes out of scope.
pub(crate) struct Cluster(());

impl Cluster {
    /// Joins `nodes` nodes, each with a port of `mbit` Mbit/s each way; `congestion` is what their
    /// routes ask TCP for, if anything.
    pub(crate) fn up(nodes: u64, mbit: u64, congestion: Option<&str>) -> Result<Self> {
        Self::with_queue(nodes, mbit, congestion, None)
    }

    /// As [`up`](Self::up), with ports whose queues hold `queue`, as tc writes it.
    pub(crate) fn with_queue(
        nodes: u64,
        mbit: u64,
        congestion: Option<&str>,
        queue: Option<&str>,
    ) -> Result<Self> {
        // Made first, so that a half-built cluster is taken down as well.
        let cluster = Self(());
        let mut up = command(&[SCRIPT, "up", &nodes.to_string(), &format!("{mbit}mbit")]);
        up.envs(congestion.map(|name| ("CONGESTION", name)));
        if mbit > FAST {
            up.env("BURST", format!("{}kb", mbit * BURST_KB / FAST));
        }
        succeed(up.envs(queue.map(|size| ("QUEUE", size))))?;
        Ok(cluster)
    }

    /// Bytes carried so far: both directions of every port.
    pub(crate) fn carried(&self) -> Result<Vec<u64>> {
        byte_counts(&output(&[SCRIPT, "bytes"])?)
    }

    /// A command that runs what is added to it on every node at once, each told its rank as torchrun
    /// does. `RANKS` in its environment says how many ranks a node has, if not one.
    pub(crate) fn on_every_node(&self) -> Command {
        let mut all = command(&[SCRIPT, "all"]);
        // The namespaces reach nobody else, so the secret protects nothing; nodes only have to agree.
        all.env("POSEIDON_SECRET", "known to the benchmark");
        all
    }

    /// A command that runs what is added to it at the switch, where no port limits it.
    pub(crate) fn at_switch(&self) -> Command {
        command(&[SCRIPT, "switch"])
    }

    /// As [`on_every_node`](Self::on_every_node), by `mpirun`: what is added are its arguments.
    pub(crate) fn by_mpirun(&self) -> Command {
        command(&[SCRIPT, "mpi"])
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !works(&[SCRIPT, "down"]) {
            eprintln!("some namespaces are left; `{SCRIPT} down` removes them");
        }
    }
}

fn byte_counts(text: &str) -> Result<Vec<u64>> {
    let count = |word: &str| word.parse().with_context(|| format!("not a byte count: `{word}`"));
    text.split_whitespace().map(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_are_read_and_garbage_is_named() {
        assert_eq!(byte_counts("10 20\n5 7\n").unwrap(), [10, 20, 5, 7]);
        assert!(byte_counts("10 20\noops\n").unwrap_err().to_string().contains("oops"));
    }
}
