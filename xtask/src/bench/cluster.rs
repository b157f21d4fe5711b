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

/// The namespaces reach nobody else, so the secret protects nothing; nodes only have to agree.
const SECRET: &str = "known to the benchmark";

/// The switch's own address, which nodes reach through their ports.
pub(crate) const SWITCH: &str = "10.77.0.254";

/// Ethernet, IP and TCP headers of full packets, in proportion: 1514 bytes carry 1448.
pub(crate) const HEADERS: f64 = 1514.0 / 1448.0;

/// What a cluster has beside nodes at one switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    /// Racks of equally many nodes. Every rack has a link of `core_mbit` Mbit/s each way to the
    /// others. Nodes are in them in equal runs or, if `in_turn`, one in each, in turn.
    Racks { racks: u64, core_mbit: u64, in_turn: bool },
    /// One more machine. Each of its interfaces has a port as a node has.
    Box { interfaces: u64 },
}

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
        let mut up = up(nodes, mbit, mbit);
        up.envs(congestion.map(|name| ("CONGESTION", name)));
        Self::made_by(up.envs(queue.map(|size| ("QUEUE", size))))
    }

    /// As [`with_queue`](Self::with_queue). The last node has a port of `slow_mbit` Mbit/s.
    pub(crate) fn with_slow(
        nodes: u64,
        mbit: u64,
        slow_mbit: u64,
        congestion: &str,
        queue: &str,
    ) -> Result<Self> {
        let mut up = up(nodes, mbit, mbit.max(slow_mbit));
        up.args(["--slow", &format!("{slow_mbit}mbit")]);
        Self::made_by(up.env("CONGESTION", congestion).env("QUEUE", queue))
    }

    /// As [`with_queue`](Self::with_queue), with racks or a box beside.
    pub(crate) fn with_beside(nodes: u64, mbit: u64, queue: &str, beside: Beside) -> Result<Self> {
        let mut up = match beside {
            Beside::Racks { core_mbit, .. } => up(nodes, mbit, mbit.max(core_mbit)),
            Beside::Box { .. } => up(nodes, mbit, mbit),
        };
        Self::made_by(up.args(beside.options()).env("QUEUE", queue))
    }

    fn made_by(up: &mut Command) -> Result<Self> {
        // Made first, so that a half-built cluster is taken down as well.
        let cluster = Self(());
        succeed(up)?;
        Ok(cluster)
    }

    /// Bytes carried so far: both directions of every port.
    pub(crate) fn carried(&self) -> Result<Vec<u64>> {
        byte_counts(&output(&[SCRIPT, "bytes"])?)
    }

    /// Bytes carried so far by the racks' links, or by the interfaces of the box: both directions
    /// of each.
    pub(crate) fn carried_beside(&self, beside: Beside) -> Result<Vec<u64>> {
        byte_counts(&output(&[SCRIPT, "bytes", beside.name()])?)
    }

    /// A command that runs what is added to it on every node at once, each told its rank as torchrun
    /// does. `RANKS` in its environment says how many ranks a node has, if not one.
    pub(crate) fn on_every_node(&self) -> Command {
        let mut all = command(&[SCRIPT, "all"]);
        all.env("POSEIDON_SECRET", SECRET);
        all
    }

    /// A command that runs what is added to it on the box, which is told where the nodes' job meets.
    pub(crate) fn at_box(&self) -> Command {
        let mut at_box = command(&[SCRIPT, "box"]);
        at_box.env("POSEIDON_SECRET", SECRET);
        at_box
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

impl Beside {
    /// As the script calls it where it counts bytes.
    fn name(self) -> &'static str {
        match self {
            Self::Racks { .. } => "racks",
            Self::Box { .. } => "box",
        }
    }

    fn options(self) -> Vec<String> {
        let words = match self {
            Self::Racks { racks, core_mbit, in_turn } => {
                let in_turn = if in_turn { " --in-turn" } else { "" };
                format!("--racks {racks} --core {core_mbit}mbit{in_turn}")
            }
            Self::Box { interfaces } => format!("--box {interfaces}"),
        };
        words.split(' ').map(str::to_owned).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !works(&[SCRIPT, "down"]) {
            eprintln!("some namespaces are left; `{SCRIPT} down` removes them");
        }
    }
}

/// The script's command for so many nodes. `fastest_mbit` is the rate of the fastest link.
fn up(nodes: u64, mbit: u64, fastest_mbit: u64) -> Command {
    let mut up = command(&[SCRIPT, "up", &nodes.to_string(), &format!("{mbit}mbit")]);
    if fastest_mbit > FAST {
        up.env("BURST", format!("{}kb", fastest_mbit * BURST_KB / FAST));
    }
    up
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

    #[test]
    fn what_is_beside_nodes_is_told_to_the_script() {
        let racks = |in_turn| Beside::Racks { racks: 2, core_mbit: 500, in_turn }.options();
        assert_eq!(racks(false), ["--racks", "2", "--core", "500mbit"]);
        assert_eq!(racks(true), ["--racks", "2", "--core", "500mbit", "--in-turn"]);
        assert_eq!(Beside::Box { interfaces: 4 }.options(), ["--box", "4"]);
    }
}
