//! The cases of the grid, and the rules by which some are left out.

use crate::bench::size::Size;
use crate::bench::turns::WARM_UP;
use anyhow::{Context, Result};
use clap::ValueEnum;
use std::{fmt, fs, thread};

/// What is exchanged. Gloo does an all_reduce of as many bytes in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum What {
    /// A layer's gradient, through the shards
    Push,
    /// The same in bf16; Gloo sums in bf16, too
    Bf16,
    /// A fully connected layer's gradient, by factors
    Factors,
    /// A tensor of a group
    AllReduce,
}

/// A cluster: so many nodes, and what their ports are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Network {
    pub(crate) nodes: u64,
    pub(crate) mbit: u64,
    /// What the last node's port carries instead.
    pub(crate) slow: Option<u64>,
    pub(crate) queue: Size,
}

/// One point of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) network: Network,
    pub(crate) what: What,
    /// Busy threads per core.
    pub(crate) busy: u64,
    pub(crate) size: Size,
}

/// What the rules have to know of this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub(crate) cores: u64,
    /// Bytes of memory that are free.
    pub(crate) memory: u64,
}

/// How long a case is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    pub(crate) pairs: usize,
    /// Iterations of a turn; by the case if `None`.
    pub(crate) iters: Option<u64>,
}

/// Nodes per core that still take their turns. Sixteen nodes on two cores are measured here, and
/// more have no record.
const NODES_PER_CORE: u64 = 8;
/// CPU seconds that a byte sent between nodes takes at least, kernel included, times 1e9. Gloo took
/// 0.75 with 8 nodes on two cores and 0.85 with 32 on sixteen, Poseidon 0.87 and 1.4.
const CPU_SECONDS_PER_GB: f64 = 1.0;
/// Part of the cores that may be needed to move the bytes. Beyond it a case measures processors.
const CORES_PART: f64 = 0.8;
/// Products that a core computes in a second, in floating-point operations: 32 nodes on 16 cores did 82e9
/// (`bench/runs/2026-11-19-grid-16-cores`).
const FLOPS: f64 = 80e9;
/// From this size on an exchange fills the ports; smaller ones measure round trips.
const FILLS_PORTS: Size = Size::mb(1);
/// Copies of a buffer that a node has, both contenders together.
const COPIES: u64 = 6;
/// Seconds that the bytes of a case may take.
const LONGEST: f64 = 180.0;
/// Seconds of iterations in a turn: as short as tells one exchange from the next.
const TURN: f64 = 0.4;
const MOST_ITERATIONS: u64 = 20;

impl Machine {
    /// This one.
    pub(crate) fn here() -> Result<Self> {
        let cores = thread::available_parallelism()?.get() as u64;
        let text = fs::read_to_string("/proc/meminfo").context("reading free memory")?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
        let kilobytes =
            line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
        Ok(Self { cores, memory: kilobytes.context("no MemAvailable in /proc/meminfo")? << 10 })
    }
}

impl Network {
    /// Seconds that one exchange of `size` takes the slowest port, without headers. Any exact exchange
    /// that shares the work evenly sends all but a node's own part of the gradients, and its own part
    /// of the sum to everyone else.
    pub(crate) fn port_seconds(&self, size: Size) -> f64 {
        let share = (self.nodes - 1) as f64 / self.nodes as f64;
        2.0 * size.0 as f64 * share / self.bytes_per_second()
    }

    /// What the slowest port carries each way.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        self.slow.unwrap_or(self.mbit) as f64 * 1e6 / 8.0
    }

    /// Ports' rates in Mbit/s, in words.
    pub(crate) fn rates(&self) -> String {
        match self.slow {
            None => self.mbit.to_string(),
            Some(slow) => format!("{}, one {slow}", self.mbit),
        }
    }

    /// Why this machine cannot show anything about this network and size, if it cannot.
    pub(crate) fn left_out(&self, size: Size, machine: Machine, effort: Effort) -> Option<String> {
        let Machine { cores, memory } = machine;
        if self.nodes > cores * NODES_PER_CORE {
            return Some(format!(
                "{} nodes are more than {NODES_PER_CORE} for each of {cores} cores",
                self.nodes
            ));
        }
        let (rate, needed) = (self.gigabytes_per_second(), self.cores_for_bytes());
        if size >= FILLS_PORTS && needed > CORES_PART * cores as f64 {
            return Some(format!(
                "{rate:.1} GB/s through all ports take about {needed:.1} cores, and {:.0}% of {cores} may be needed",
                100.0 * CORES_PART
            ));
        }
        let held = self.nodes * size.0 * COPIES;
        if held > memory {
            let gb = |bytes| bytes as f64 / 1e9;
            return Some(format!(
                "its buffers take about {:.1} GB, and {:.1} are free",
                gb(held),
                gb(memory)
            ));
        }
        let seconds = self.seconds(size, effort);
        (seconds > LONGEST).then(|| {
            let pairs = effort.pairs;
            format!(
                "the bytes of its {pairs} pairs take {seconds:.0} s, and {LONGEST:.0} is the most"
            )
        })
    }

    /// The same for a layer of `size` by factors of `rows` rows. Every node makes the sum of all factors,
    /// and all nodes' processors are here. On a cluster each node has its own.
    pub(crate) fn too_many_products(
        &self,
        size: Size,
        rows: u64,
        machine: Machine,
    ) -> Option<String> {
        let (nodes, numbers) = (self.nodes as f64, (size.0 / 4) as f64);
        let products = nodes * 2.0 * nodes * rows as f64 * numbers;
        let seconds = products / FLOPS / machine.cores as f64;
        let part =
            seconds / self.port_seconds(size) + self.cores_for_bytes() / machine.cores as f64;
        (part > CORES_PART).then(|| {
            format!(
                "products of factors take {seconds:.2} s of all {} cores, {:.0}% of them are needed while Gloo's bytes \
                 pass, and {:.0}% may be",
                machine.cores,
                100.0 * part,
                100.0 * CORES_PART
            )
        })
    }

    /// Through all ports.
    fn gigabytes_per_second(&self) -> f64 {
        self.nodes as f64 * self.bytes_per_second() / 1e9
    }

    fn cores_for_bytes(&self) -> f64 {
        self.gigabytes_per_second() * CPU_SECONDS_PER_GB
    }

    /// Iterations of a turn that are counted.
    pub(crate) fn iterations(&self, size: Size, effort: Effort) -> u64 {
        let enough = (TURN / self.port_seconds(size)).ceil() as u64;
        effort.iters.unwrap_or(enough.clamp(1, MOST_ITERATIONS))
    }

    /// Seconds that the bytes of all pairs take.
    pub(crate) fn seconds(&self, size: Size, effort: Effort) -> f64 {
        let exchanges = 2.0 * effort.pairs as f64;
        let iterations = (self.iterations(size, effort) + WARM_UP) as f64;
        exchanges * iterations * self.port_seconds(size)
    }
}

impl What {
    /// Its name on a command line and in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Bf16 => "bf16",
            Self::Factors => "factors",
            Self::AllReduce => "all_reduce",
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { nodes, queue, .. } = self;
        write!(f, "{nodes} nodes, {} Mbit/s, queue {queue}", self.rates())
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { network, what, busy, size } = self;
        write!(f, "{network}, {size}, {}, busy {busy}", what.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_CORES: Machine = Machine { cores: 2, memory: 16 << 30 };
    const EFFORT: Effort = Effort { pairs: 10, iters: None };

    fn network(nodes: u64, mbit: u64) -> Network {
        Network { nodes, mbit, slow: None, queue: Size::kb(256) }
    }

    #[test]
    fn what_this_machine_carries_is_kept() {
        for (nodes, mbit, size) in [
            (8, 1000, Size::mb(100)),
            (12, 1000, Size::mb(10)),
            (16, 200, Size::mb(10)),
            (2, 100_000, Size::kb(64)),
        ] {
            let why = network(nodes, mbit).left_out(size, TWO_CORES, EFFORT);
            assert_eq!(why, None, "{nodes} nodes at {mbit}");
        }
    }

    #[test]
    fn every_rule_leaves_something_out_and_says_why() {
        let small = Machine { memory: 1 << 30, ..TWO_CORES };
        for (network, size, machine, words) in [
            (network(24, 200), Size::mb(1), TWO_CORES, "24 nodes are more than 8 for each of 2"),
            (network(16, 1000), Size::mb(1), TWO_CORES, "2.0 GB/s through all ports take about"),
            (network(4, 1000), Size::mb(100), small, "take about 2.5 GB, and 1.1 are free"),
            (network(8, 200), Size::mb(100), TWO_CORES, "10 pairs take 294 s, and 180"),
        ] {
            let why = network.left_out(size, machine, EFFORT).unwrap_or_default();
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn products_that_take_longer_than_the_bytes_are_left_out() {
        let machine = Machine { cores: 16, ..TWO_CORES };
        let why = |nodes, rows| network(nodes, 1000).too_many_products(Size::mb(10), rows, machine);
        assert_eq!([why(16, 32), why(32, 8)], [None, None]);
        let words = "0.13 s of all 16 cores, 108% of them";
        assert!(why(32, 32).unwrap().contains(words), "{:?}", why(32, 32));
    }

    #[test]
    fn a_turn_is_short_and_has_an_iteration() {
        // 8 nodes, 10 MB at 1 Gbit/s: 18.35 MB a node, 0.147 s.
        let at = |size| network(8, 1000).iterations(size, EFFORT);
        assert_eq!((at(Size::mb(1)), at(Size::mb(10)), at(Size::mb(100))), (20, 3, 1));
        let told = Effort { iters: Some(7), ..EFFORT };
        assert_eq!(network(8, 1000).iterations(Size::mb(100), told), 7);
        let seconds = network(8, 1000).seconds(Size::mb(10), EFFORT);
        assert!((seconds - 20.0 * 4.0 * 0.1468).abs() < 0.01, "{seconds}");
        let slow = Network { slow: Some(100), ..network(8, 1000) };
        assert!((slow.port_seconds(Size::mb(10)) - 1.468).abs() < 0.001);
        assert_eq!(slow.to_string(), "8 nodes, 1000, one 100 Mbit/s, queue 256KB");
    }
}
