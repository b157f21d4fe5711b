//! What `poseidon plan` can use of a check: how many workers there are, and what is between them.

use super::NodeReport;
use anyhow::{Context, ensure};
use poseidon::check::Way;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// A cluster that was measured. The names are a contract with files that were written before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedCluster {
    version: u16,
    pub(crate) workers: usize,
    pub(crate) ranks_per_host: usize,
    /// Of the slowest host's port.
    pub(crate) bits_per_second: u64,
    /// Half of the median round trip between hosts, in microseconds.
    pub(crate) latency_us: f64,
}

impl SavedCluster {
    pub(super) fn new(nodes: &[NodeReport], ways: &[Way]) -> anyhow::Result<Self> {
        let mut hosts: BTreeMap<&str, usize> = BTreeMap::new();
        nodes.iter().for_each(|node| *hosts.entry(&node.host).or_default() += 1);
        ensure!(hosts.len() > 1, "nothing to save: a network has at least two hosts");
        // A port is as fast as the fastest way from it, and to it.
        let mut ports: BTreeMap<(&str, bool), u64> = BTreeMap::new();
        for way in ways.iter().filter(|way| !way.same_host) {
            let Some(bits) = way.bits_per_second else { continue };
            for (node, sends) in [(way.from, true), (way.to, false)] {
                let port = ports.entry((&nodes[node.index()].host, sends)).or_default();
                *port = bits.max(*port);
            }
        }
        let slowest = ports.values().copied().min();
        let trips = ways.iter().filter(|way| !way.same_host).filter_map(|way| way.round_trip_us);
        let trips: Vec<f64> = trips.collect();
        let round_trip = super::judge::median(&trips).context("no pair of hosts was measured")?;
        Ok(Self {
            version: VERSION,
            workers: nodes.len(),
            ranks_per_host: hosts.values().copied().max().unwrap_or(1),
            bits_per_second: slowest.context("no pair of hosts was measured")?,
            latency_us: round_trip / 2.0,
        })
    }

    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let what =
            || format!("{} is no cluster that 'poseidon doctor --save' wrote", path.display());
        let saved: Self = serde_json::from_str(&text).with_context(what)?;
        ensure!(saved.version == VERSION, "{}: its version is {}", what(), saved.version);
        let sensible = saved.workers > 0
            && saved.ranks_per_host > 0
            && saved.bits_per_second > 0
            && (0.0..=1e7).contains(&saved.latency_us);
        ensure!(sensible, "{}: a number in it makes no sense", what());
        Ok(saved)
    }

    pub(crate) fn latency(&self) -> Duration {
        Duration::from_secs_f64(self.latency_us / 1e6)
    }
}

const VERSION: u16 = 1;
