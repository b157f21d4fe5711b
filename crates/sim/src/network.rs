//! What lies between nodes.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The network that every host is connected to by one port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// What people call it.
    pub name: String,
    /// Bytes per second that a host's port is sold as.
    pub bandwidth: f64,
    /// From one node to another.
    pub latency: Duration,
    /// Whether the two directions of a link hinder each other.
    pub duplex: Duplex,
    /// The share of the bandwidth that payloads and their headers get.
    pub efficiency: f64,
    /// Bytes per second that a node gets out of any link, however fast; `None` if it keeps up.
    pub ceiling: Option<f64>,
    /// Racks whose links to each other are narrower than the ports of their hosts together.
    pub racks: Option<Racks>,
    /// What lies between nodes of one host.
    #[serde(default)]
    pub memory: Memory,
    /// Bytes that wait at the switch's port towards a host, headers included, before what comes on
    /// top is dropped. `None` if any number of bytes can wait.
    #[serde(default)]
    pub queue: Option<u64>,
}

/// Whether the two directions of a link hinder each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Duplex {
    /// Each has the whole bandwidth.
    #[default]
    Full,
    /// They share it.
    Shared,
}

/// Hosts in racks. Every rack has a link to the others, which carries what its ports carry
/// together, over the oversubscription.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Racks {
    /// Hosts `0..n` are in the first rack, and so on.
    pub hosts_per_rack: usize,
    /// The bandwidth of a rack's ports together over that of its link to the others.
    pub oversubscription: f64,
}

/// The memory through which nodes of one host reach each other. It does not use the host's port.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Bytes per second that a node hands to the others of its host, and as many that it takes from
    /// them at the same time.
    pub rate: f64,
    /// From one node to another.
    pub latency: Duration,
}

impl Network {
    /// Today's Ethernet: full duplex, switched, of `bandwidth` bytes per second.
    pub fn ethernet(bandwidth: f64) -> Self {
        Self {
            name: "ethernet".into(),
            bandwidth,
            latency: Duration::from_micros(50),
            duplex: Duplex::Full,
            efficiency: TCP_SHARE,
            ceiling: None,
            racks: None,
            memory: Memory::default(),
            queue: None,
        }
    }

    /// A virtual cluster of network namespaces: its rate limit counts a packet's Ethernet header, but
    /// no preamble and no gap between packets.
    pub fn virtual_cluster(bandwidth: f64) -> Self {
        Self {
            name: "virtual-cluster".into(),
            latency: Duration::from_micros(30),
            efficiency: 1448.0 / 1514.0,
            ..Self::ethernet(bandwidth)
        }
    }

    /// The network of Poseidon 2017 §5, as its own figures show it: a link whose two directions share
    /// one capacity, of which a node gets at most 27 Gbit/s through TCP.
    ///
    /// The ceiling is fitted on one figure, VGG19-22K by parameter server on 32 nodes at 40GbE
    /// (21.5x); `docs/reproduction.md` judges it by the others.
    pub fn paper_2017(bandwidth: f64) -> Self {
        Self {
            name: "paper-2017".into(),
            duplex: Duplex::Shared,
            ceiling: Some(27e9 / 8.0),
            ..Self::ethernet(bandwidth)
        }
    }

    /// Bytes per second that a link carries.
    pub fn rate(&self) -> f64 {
        (self.bandwidth * self.efficiency).min(self.ceiling.unwrap_or(f64::INFINITY))
    }
}

impl Racks {
    /// Bytes per second that a rack's link to the others carries each way.
    pub fn rate(&self, network: &Network) -> f64 {
        network.rate() * self.hosts_per_rack as f64 / self.oversubscription
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self { rate: MEMORY_RATE, latency: MEMORY_LATENCY }
    }
}

/// What a lane with a core of its own reaches: `poseidon bench exchange -n 2 --link auto --bytes
/// 100MB` took 40 ms on two cores of 2026, in which every node sent and received 105 MB. Nodes that
/// share cores reach less.
const MEMORY_RATE: f64 = 2.5e9;
/// Half of what `poseidon bench exchange -n 2 --link auto --bytes 4KB` took there, 22 us: a chunk
/// goes to its server and back.
const MEMORY_LATENCY: Duration = Duration::from_micros(10);

/// 1448 bytes of every 1538 on the wire are a TCP segment's payload.
const TCP_SHARE: f64 = 1448.0 / 1538.0;
