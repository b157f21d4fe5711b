//! The virtual cluster itself: a switch, nodes, and the limited links between them.
//!
//! Every node is a network namespace with one interface, `eth0`, whose other end is a port of a
//! bridge in a namespace of its own. What leaves a node is held back at its own end, what arrives at
//! the bridge's: queued, as in a switch, and dropped only when the queue is full.
//!
//! If the links have a delay or faults, there is no bridge: `eth0` is a tap, and a thread of this
//! process is the switch. Kernels can do the same with `netem`, but many are built without it, and
//! `netem` sees segments of 64 KB instead of frames.
//!
//! No namespace has a name and nothing is written anywhere: all of it is held by this process and by
//! what it starts, and goes with them, however they end.

use super::LabError;
use super::iproute::Tool;
use super::namespace::{self, Namespace};
use super::switch::{Counts, Faults, Links, hardware_address};
use super::switch_thread::SwitchThread;
use crate::bandwidth::Bandwidth;
use crate::supervise::{Process, Role};
use poseidon::Secret;
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

/// How many nodes a virtual cluster has, and what its links are like.
#[derive(Clone, Debug)]
pub(crate) struct LabSpec {
    /// Processes of each node, by node.
    pub(crate) ranks: Vec<u16>,
    /// Of every node's link, each way.
    pub(crate) rate: Bandwidth,
    /// From one node to another, one way, on top of what the machine itself takes.
    pub(crate) delay: Duration,
    /// Of TCP between nodes, whatever the machine's own is.
    pub(crate) congestion: String,
    /// Bytes that a port of the switch holds at most.
    pub(crate) queue: u32,
    /// What goes wrong on the way by chance.
    pub(crate) faults: Faults,
}

/// A cluster that is up. It is down when this is dropped and the programs on it have ended.
#[derive(Debug)]
pub(crate) struct Lab {
    middle: Middle,
    nodes: Vec<Namespace>,
    /// By node: how many processes it has.
    ranks: Vec<u16>,
    secret: Secret,
}

/// What joins the nodes.
#[derive(Debug)]
enum Middle {
    /// The kernel's bridge, in a namespace of its own.
    Bridge(Namespace),
    /// A thread, for links with delay or faults.
    Switch(SwitchThread),
}

/// Bytes that a node's link has carried, with Ethernet, IP and TCP headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Carried {
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// A process of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rank {
    /// Among all processes.
    rank: u16,
    /// The number of its node.
    node: u16,
    /// Among those of its node.
    local: u16,
}

/// Nodes that one bridge holds with room to spare.
pub(crate) const MOST_NODES: u16 = 1000;
/// Processes of a node. So many on the most nodes still have numbers.
pub(crate) const MOST_RANKS: u16 = 64;

impl Lab {
    /// Gets this process ready to have clusters. Must be called while it has one thread.
    pub(crate) fn prepare() -> Result<(), LabError> {
        Tool::Ip.find()?;
        Tool::Tc.find()?;
        namespace::prepare().map_err(LabError::refused)
    }

    /// Makes a cluster.
    pub(crate) fn up(spec: &LabSpec) -> Result<Self, LabError> {
        let namespace = || Namespace::new().map_err(LabError::refused);
        let nodes: Vec<_> = spec.ranks.iter().map(|_| namespace()).collect::<Result<_, _>>()?;
        let secret = Secret::random().map_err(LabError::refused)?;
        let middle = if spec.delay.is_zero() && !spec.faults.any() {
            Middle::Bridge(namespace()?)
        } else {
            let &LabSpec { rate, delay, queue, faults, .. } = spec;
            let links = Links { rate, delay, queue, faults };
            let switch = SwitchThread::start(&nodes, NIC, links);
            Middle::Switch(switch.map_err(|source| LabError::Tap { source })?)
        };
        let lab = Self { middle, nodes, ranks: spec.ranks.clone(), secret };
        lab.connect(spec)?;
        lab.limit(spec)?;
        Ok(lab)
    }

    /// The processes of all nodes; `command` makes each one's.
    pub(crate) fn processes(
        &self,
        command: impl Fn() -> Command,
    ) -> Result<Vec<Process>, LabError> {
        let process = |place: Rank| {
            let Rank { rank, node, .. } = place;
            let mut command = command();
            self.describe(&mut command, place);
            self.nodes[usize::from(node)].host(&mut command).map_err(LabError::refused)?;
            let alone = self.ranks.iter().all(|ranks| *ranks == 1);
            Ok(Process {
                name: if alone {
                    format!("node {node}")
                } else {
                    format!("rank {rank} on node {node}")
                },
                label: rank.to_string(),
                command,
                role: Role::Worker,
                draws: false,
            })
        };
        all_ranks(&self.ranks).into_iter().map(process).collect()
    }

    /// What every node's link has carried so far.
    pub(crate) fn carried(&self) -> Result<Vec<Carried>, LabError> {
        let received: Vec<u64> = match &self.middle {
            Middle::Bridge(bridge) => {
                let ports = counters(bridge)?;
                (0..self.nodes.len()).map(|rank| bytes(&ports, &port(rank))).collect()
            }
            Middle::Switch(switch) => switch.delivered(),
        };
        let node = |(node, received): (&Namespace, u64)| {
            Ok(Carried { sent: bytes(&counters(node)?, NIC), received })
        };
        self.nodes.iter().zip(received).map(node).collect()
    }

    /// What the switch has done with frames so far, if this process is the switch.
    pub(super) fn switched(&self) -> Option<Counts> {
        match &self.middle {
            Middle::Bridge(_) => None,
            Middle::Switch(switch) => Some(switch.counts()),
        }
    }

    fn connect(&self, spec: &LabSpec) -> Result<(), LabError> {
        if let Middle::Bridge(bridge) = &self.middle {
            let mut lines = vec![
                "link add bridge type bridge stp_state 0 mcast_snooping 0".to_owned(),
                "link set bridge up".to_owned(),
            ];
            for (rank, node) in self.nodes.iter().enumerate() {
                let (port, node) = (port(rank), node.path());
                lines.push(format!("link add {port} type veth peer name {NIC} netns {node}"));
                lines.push(format!("link set {port} master bridge up"));
            }
            Tool::Ip.batch(bridge, &lines)?;
        }
        for (rank, node) in (0..).zip(&self.nodes) {
            let own = address(rank);
            // Congestion control is set on the route: a namespace's default can only be one that
            // the machine lets everybody use, and the route overrules what a program asks for.
            let mut lines = vec![
                "link set lo up".to_owned(),
                format!("addr add {own}/16 dev {NIC}"),
                format!("link set {NIC} up"),
                format!(
                    "route replace 10.77.0.0/16 dev {NIC} proto kernel scope link src {own} congctl {}",
                    spec.congestion
                ),
            ];
            if let Middle::Switch(_) = self.middle {
                let [a, b, c, d, e, f] = hardware_address(rank);
                lines.insert(
                    0,
                    format!(
                        "link set {NIC} address {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x} \
                         txqueuelen {TAP_QUEUE} gso_max_size {TAP_SEGMENT}"
                    ),
                );
            }
            Tool::Ip.batch(node, &lines)?;
        }
        Ok(())
    }

    fn limit(&self, spec: &LabSpec) -> Result<(), LabError> {
        let bits = spec.rate.bits();
        let limit = |burst: f64, queue: u32| {
            let burst = (bits / 8.0 * BURST_SECONDS).max(burst).round();
            format!("tbf rate {bits:.0}bit burst {burst} limit {queue}")
        };
        let own = match &self.middle {
            Middle::Bridge(bridge) => {
                let limit = limit(BURST, spec.queue);
                let ports = (0..self.nodes.len()).map(port);
                let ports: Vec<_> =
                    ports.map(|port| format!("qdisc replace dev {port} root {limit}")).collect();
                Tool::Tc.batch(bridge, &ports)?;
                limit
            }
            Middle::Switch(_) => limit(TAP_BURST, QUEUE),
        };
        let own = [format!("qdisc replace dev {NIC} root {own}")];
        self.nodes.iter().try_for_each(|node| Tool::Tc.batch(node, &own))
    }

    /// Tells a process who it is, as torchrun would.
    fn describe(&self, command: &mut Command, place: Rank) {
        let Rank { rank, node, local } = place;
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", self.ranks.iter().sum::<u16>().to_string())
            .env("LOCAL_RANK", local.to_string())
            .env("LOCAL_WORLD_SIZE", self.ranks[usize::from(node)].to_string())
            .env("MASTER_ADDR", address(0).to_string())
            .env("MASTER_PORT", MASTER_PORT)
            .env("POSEIDON_SECRET", self.secret.expose())
            .env("POSEIDON_CLUSTER", "lab")
            .env("GLOO_SOCKET_IFNAME", NIC)
            .env("NCCL_SOCKET_IFNAME", NIC);
        // A node knows nothing of a job that this process may be part of.
        for name in ["COORDINATOR", "COORDINATOR_SERVED", "SERVER", "ADDRESS"] {
            command.env_remove(format!("POSEIDON_{name}"));
        }
    }
}

/// The processes of all nodes, node by node.
fn all_ranks(by_node: &[u16]) -> Vec<Rank> {
    let of_node = |(node, count): (u16, &u16)| (0..*count).map(move |local| (node, local));
    let places = (0u16..).zip(by_node).flat_map(of_node);
    (0u16..).zip(places).map(|(rank, (node, local))| Rank { rank, node, local }).collect()
}

/// What a queue has let through.
#[derive(Deserialize)]
struct Counter {
    dev: String,
    #[serde(default)]
    root: bool,
    #[serde(default)]
    bytes: u64,
}

fn counters(namespace: &Namespace) -> Result<Vec<Counter>, LabError> {
    let text = Tool::Tc.ask(namespace, &["-s", "-j", "qdisc", "show"])?;
    serde_json::from_slice(&text).map_err(|source| LabError::Counters { source })
}

/// What the queue of a device has let through.
fn bytes(counters: &[Counter], device: &str) -> u64 {
    counters.iter().find(|c| c.root && c.dev == device).map_or(0, |c| c.bytes)
}

fn port(rank: usize) -> String {
    format!("port{rank}")
}

/// 10.77.0.1 for rank 0.
fn address(rank: u16) -> Ipv4Addr {
    let [high, low] = (rank + 1).to_be_bytes();
    Ipv4Addr::new(10, 77, high, low)
}

/// A node's only interface.
const NIC: &str = "eth0";
/// torch's usual one. Nobody else is there to have taken it.
const MASTER_PORT: &str = "29500";
/// Chosen by measurement at 1 Gbit/s: with 16 KB a third of the rate goes into retransmissions.
const BURST: f64 = 131_072.0;
/// What a link carries between two looks of the kernel's timer, with a reserve; counts above 4 Gbit/s.
const BURST_SECONDS: f64 = 250e-6;
/// In bytes. One that cannot hold many segments of 64 KB lets almost nothing through.
pub(crate) const QUEUE: u32 = 2 << 20;
/// What TCP hands to a tap at once, in bytes. Behind the node's queue a segment becomes frames that
/// reach the switch together, so a large one would fill a small port queue by itself.
const TAP_SEGMENT: u32 = 16 << 10;
/// Two such segments: as little as keeps the link busy.
const TAP_BURST: f64 = 32_768.0;
/// Frames that wait for the switch's thread to read them. More than a node has under way: only the
/// switch loses frames, and it counts them.
const TAP_QUEUE: u32 = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_go_on_after_a_byte_is_full() {
        assert_eq!(address(0).to_string(), "10.77.0.1");
        assert_eq!(address(255).to_string(), "10.77.1.0");
        assert_eq!(address(MOST_NODES - 1).to_string(), "10.77.3.232");
    }

    #[test]
    fn ranks_are_counted_node_by_node() {
        let places: Vec<_> =
            all_ranks(&[2, 1, 2]).iter().map(|r| (r.rank, r.node, r.local)).collect();
        assert_eq!(places, [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 2, 0), (4, 2, 1)]);
        // The last of the most has a number.
        assert!(MOST_RANKS.checked_mul(MOST_NODES).is_some());
    }

    #[test]
    fn counters_are_read_as_tc_prints_them() {
        let text = r#"[{"kind":"noqueue","handle":"0:","dev":"lo","root":true,"bytes":0},
            {"kind":"netem","handle":"1:","dev":"eth0","root":true,"bytes":700,"drops":0},
            {"kind":"tbf","handle":"2:","dev":"eth0","parent":"1:1","bytes":600}]"#;
        let counters: Vec<Counter> = serde_json::from_str(text).unwrap();
        let roots: Vec<_> = counters.iter().filter(|c| c.root && c.dev == NIC).collect();
        assert_eq!(roots.len(), 1);
        assert_eq!(roots[0].bytes, 700);
    }
}
