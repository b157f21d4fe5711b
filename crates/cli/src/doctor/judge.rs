//! What is wrong, and what to do about it: decisions about facts that others have gathered.

use super::NodeReport;
use super::gpus::Gpu;
use crate::report::units;
use poseidon::check::{Need, Unreached, Way, WayFailure};
use poseidon::{NodeId, Rate};
use serde::Serialize;
use std::collections::BTreeMap;

/// One thing to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) topic: Topic,
    /// Whether it makes the exit status 1. What is not wrong may still be worth a look.
    pub(super) wrong: bool,
    pub(super) what: String,
    pub(super) fix: String,
}

/// What a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Topic {
    Settings,
    Nodes,
    Secret,
    Version,
    Address,
    Connection,
    Mtu,
    Bandwidth,
    Latency,
    Loss,
    Clock,
    Processor,
    Copies,
    Memory,
    Limits,
}

impl Topic {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Settings => "settings",
            Self::Nodes => "nodes",
            Self::Secret => "secret",
            Self::Version => "version",
            Self::Address => "address",
            Self::Connection => "connection",
            Self::Mtu => "MTU",
            Self::Bandwidth => "bandwidth",
            Self::Latency => "latency",
            Self::Loss => "loss",
            Self::Clock => "clock",
            Self::Processor => "processor",
            Self::Copies => "copies",
            Self::Memory => "memory",
            Self::Limits => "limits",
        }
    }
}

impl Finding {
    pub(super) fn wrong(topic: Topic, what: String, fix: &str) -> Self {
        Self { topic, wrong: true, what, fix: fix.into() }
    }

    fn note(topic: Topic, what: String, fix: &str) -> Self {
        Self { topic, wrong: false, what, fix: fix.into() }
    }

    pub(super) fn host(host: &str, port: u16, error: &Unreached) -> Self {
        let fix = match error {
            Unreached::Name { .. } => {
                "check the spelling, or give the machine a name in DNS or /etc/hosts".into()
            }
            Unreached::Refused { .. } => format!(
                "nothing, if no job runs there now; otherwise start its worker 0, or name its port \
                 instead of {port}"
            ),
            _ => format!(
                "let TCP through to port {port} of {host}: look at the firewalls of both machines and \
                 at 'ip route get'"
            ),
        };
        // A machine that answers is not at fault for having no job.
        let wrong = !matches!(error, Unreached::Refused { .. });
        Self { topic: Topic::Connection, wrong, what: format!("{host}: {error}"), fix }
    }
}

/// Everything that can be said of these nodes and the ways between them.
pub(super) fn findings(nodes: &[NodeReport], ways: &[Way]) -> Vec<Finding> {
    let judge = Judge { nodes, ways };
    let mut findings = Vec::new();
    judge.machines(&mut findings);
    judge.unlike_others(&mut findings);
    judge.copies(&mut findings);
    judge.clocks(&mut findings);
    judge.connections(&mut findings);
    judge.packets(&mut findings);
    judge.rates(&mut findings);
    judge.losses(&mut findings);
    findings
}

/// How far each node's clock is ahead of worker 0's, in microseconds, where that was measured.
pub(super) fn clocks(nodes: usize, ways: &[Way]) -> Vec<Option<f64>> {
    let mut clocks = vec![None; nodes];
    if let Some(first) = clocks.first_mut() {
        *first = Some(0.0);
    }
    for way in ways {
        let Some(ahead) = way.clock_ahead_us else { continue };
        match (way.from.index(), way.to.index()) {
            (0, to) if to < nodes => clocks[to] = Some(ahead),
            (from, 0) if from < nodes => clocks[from] = Some(-ahead),
            _ => {}
        }
    }
    clocks
}

/// The one in the middle. `None` of none.
pub(super) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

struct Judge<'a> {
    nodes: &'a [NodeReport],
    ways: &'a [Way],
}

impl Judge<'_> {
    fn name(&self, node: NodeId) -> &str {
        &self.nodes[node.index()].name
    }

    /// "worker 2 (gpu3)".
    fn placed(&self, node: NodeId) -> String {
        format!("{} ({})", self.name(node), self.nodes[node.index()].facts.hostname)
    }

    /// What each machine has by itself.
    fn machines(&self, findings: &mut Vec<Finding>) {
        let several_hosts = self.nodes.iter().any(|node| node.host != self.nodes[0].host);
        let is_fast = self.ways.iter().any(|way| way.bits_per_second > Some(FAST));
        for node in self.nodes {
            let (name, facts) = (&node.name, &node.facts);
            if let Some(fault) = &facts.secret_fault {
                let what = format!("{name}: {fault}");
                findings.push(Finding::wrong(Topic::Secret, what, "as it says"));
            }
            let need = Need { nodes: self.nodes.len(), lanes: MOST_LANES }.descriptors() as u64;
            if let Some(most) = facts.open_files[1].filter(|most| *most < need) {
                let what = format!(
                    "{name} may open {most} files, and a job of {} with {MOST_LANES} lanes takes {need}",
                    units::plural(self.nodes.len() as u64, "node")
                );
                let fix =
                    format!("raise the hard limit: 'ulimit -Hn {}'", need.next_power_of_two());
                findings.push(Finding::wrong(Topic::Limits, what, &fix));
            }
            let small = |buffer: &u64| is_fast && *buffer < LARGEST_WINDOW;
            if let Some(buffer) = facts.receive_buffer.filter(small) {
                let what = format!(
                    "{name} may receive into {} at most, and ports of 10 Gbit/s are busier with {}",
                    units::bytes(buffer),
                    units::bytes(LARGEST_WINDOW)
                );
                let fix = format!("as root: 'sysctl -w net.core.rmem_max={}'", 4 * LARGEST_WINDOW);
                findings.push(Finding::note(Topic::Limits, what, &fix));
            }
            if let Some(free) = facts.memory_free_bytes.filter(|free| *free < LITTLE_MEMORY) {
                let what = format!("{name} has {} of memory left", units::bytes(free));
                findings.push(Finding::note(Topic::Memory, what, "end what else runs there"));
            }
            let looped = |listens: &&super::Listens| {
                listens.address.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
            };
            if let Some(listens) = node.listens.iter().find(looped).filter(|_| several_hosts) {
                let what = format!(
                    "{name} listens at {}, where no other machine can call it ({})",
                    listens.address, listens.why
                );
                let fix = "set POSEIDON_ADDRESS on it to the interface that leads to the others";
                findings.push(Finding::wrong(Topic::Address, what, fix));
            }
        }
    }

    /// Nodes that differ from most others where all should be alike.
    fn unlike_others(&self, findings: &mut Vec<Finding>) {
        let versions: Vec<_> =
            self.nodes.iter().map(|node| Some(node.facts.version.clone())).collect();
        for (node, usual) in unusual(&versions) {
            let own = &self.nodes[node].facts.version;
            let what = format!(
                "{} runs Poseidon {own}, most run {usual}",
                self.placed(NodeId(node as u16))
            );
            findings.push(Finding::wrong(
                Topic::Version,
                what,
                "install the same Poseidon on every node",
            ));
        }
        // The n-th interface of a node talks to the n-th of the others.
        let interfaces = self.nodes.iter().map(|node| node.listens.len()).max().unwrap_or(0);
        (0..interfaces).for_each(|position| self.mtus(position, findings));
        let vectors: Vec<_> =
            self.nodes.iter().map(|node| Some(node.facts.vectors.join(", "))).collect();
        for (node, usual) in unusual(&vectors) {
            let own = vectors[node].as_deref().unwrap_or_default();
            let what = format!(
                "the processor of {} has {}, most others have {}",
                self.placed(NodeId(node as u16)),
                if own.is_empty() { "no vector instructions that are known here" } else { own },
                if usual.is_empty() { "none" } else { &usual }
            );
            let fix = "replicas may differ in their last bits where layers go by factors; '--scheme ps' \
                       keeps them equal";
            findings.push(Finding::note(Topic::Processor, what, fix));
        }
    }

    /// Nodes whose interface at `position` takes other packets than those of most others.
    fn mtus(&self, position: usize, findings: &mut Vec<Finding>) {
        let mtu = |node: &NodeReport| {
            let listens = node.listens.get(position)?;
            listens.mtu.filter(|_| listens.interface.as_deref() != Some("lo"))
        };
        let mtus: Vec<_> = self.nodes.iter().map(mtu).collect();
        for (node, usual) in unusual(&mtus) {
            let Some(own) = mtus[node] else { continue };
            let listens = &self.nodes[node].listens[position];
            let interface = listens.interface.as_deref().unwrap_or("?");
            let placed = self.placed(NodeId(node as u16));
            let what =
                format!("{interface} of {placed} has an MTU of {own}, most others have {usual}");
            let fix = format!(
                "on that machine: 'ip link set dev {interface} mtu {usual}', if its switch passes such \
                 packets; or the same on all others with {own}"
            );
            findings.push(Finding::wrong(Topic::Mtu, what, &fix));
        }
    }

    fn clocks(&self, findings: &mut Vec<Finding>) {
        for (node, clock) in clocks(self.nodes.len(), self.ways).into_iter().enumerate() {
            let Some(ahead) = clock.filter(|ahead| ahead.abs() > CLOCKS_APART_US) else { continue };
            let what = format!(
                "the clock of {} is {} {} that of {}",
                self.placed(NodeId(node as u16)),
                units::duration(ahead.abs() / 1e6),
                if ahead > 0.0 { "ahead of" } else { "behind" },
                self.name(NodeId(0))
            );
            let fix = "let chrony or systemd-timesyncd set it: logs cannot be compared, and object \
                       stores refuse requests of clocks that are 15 minutes off";
            findings.push(Finding::wrong(Topic::Clock, what, fix));
        }
    }

    fn connections(&self, findings: &mut Vec<Finding>) {
        for way in self.ways {
            let (from, to) = (self.placed(way.from), self.placed(way.to));
            match &way.failure {
                Some(WayFailure::Unreached { address, why }) => {
                    let what = format!("{from} cannot connect to {to} at {address}: {why}");
                    let range = self.nodes[way.to.index()].facts.ports;
                    let range = range.map_or("any port".into(), |[first, last]| {
                        format!("the ports {first} to {last}, of which nodes get any")
                    });
                    let listens = &self.nodes[way.from.index()].listens;
                    let caller = listens.first().map_or("it", |listens| &listens.address);
                    let fix = format!(
                        "on the machine of {}, let TCP from {caller} in to {range}; look for routes that \
                         lead nowhere with 'ip route get' on both machines",
                        self.name(way.to)
                    );
                    findings.push(Finding::wrong(Topic::Connection, what, &fix));
                }
                Some(WayFailure::Stalled { bytes }) => {
                    let what = format!(
                        "{from} and {to} can connect, but {} do not get through",
                        units::bytes(*bytes as u64)
                    );
                    let fix = "small packets pass and large ones do not: set the MTU of both interfaces \
                               to what the switch passes, or let ICMP 'fragmentation needed' through";
                    findings.push(Finding::wrong(Topic::Mtu, what, fix));
                }
                Some(WayFailure::Broken { why }) if !self.is_told(way) => {
                    let what = format!("the connection of {from} and {to} ended: {why}");
                    let fix = "look at what the two nodes print, and at their machines' logs";
                    findings.push(Finding::wrong(Topic::Connection, what, fix));
                }
                Some(WayFailure::Broken { .. }) | None => {}
            }
        }
    }

    /// Whether the other end of a connection that broke says more about it.
    fn is_told(&self, way: &Way) -> bool {
        let back = |other: &&Way| (other.from, other.to) == (way.to, way.from);
        self.ways.iter().find(back).and_then(|other| other.failure.as_ref()).is_some_and(
            |failure| !matches!(failure, WayFailure::Broken { .. }) || way.from > way.to,
        )
    }

    /// Packets that both interfaces take, and that something between them does not.
    fn packets(&self, findings: &mut Vec<Finding>) {
        for way in self.ways {
            let (Some(packet), Some(expected)) = (way.packet, way.packet_expected) else {
                continue;
            };
            if packet >= expected {
                continue;
            }
            let what = format!(
                "packets of {expected} bytes do not get from {} to {}, though both interfaces take them: \
                 the largest that do have {packet}",
                self.placed(way.from),
                self.placed(way.to)
            );
            let fix = format!(
                "let the switches and tunnels between the two pass {expected} bytes, or set the MTU of \
                 the nodes to {packet}"
            );
            findings.push(Finding::wrong(Topic::Mtu, what, &fix));
        }
    }

    /// Ways that are much slower than most, told by node where all ways of a node are.
    /// Copies that are slower than those of other GPUs, and such as could not be measured.
    fn copies(&self, findings: &mut Vec<Finding>) {
        let gpus =
            || self.nodes.iter().flat_map(|node| node.gpus.iter().map(move |gpu| (node, gpu)));
        for (node, gpu) in gpus() {
            let Some(fault) = &gpu.fault else { continue };
            let what = format!("GPU {} of {} cannot be used: {fault}", gpu.number, node.name);
            let fix = "look at 'nvidia-smi' on this machine, if the job is to use its GPUs";
            findings.push(Finding::note(Topic::Copies, what, fix));
        }
        for is_to_host in [true, false] {
            let way = if is_to_host { "to the host" } else { "to the GPU" };
            let speed = |gpu: &Gpu| if is_to_host { gpu.to_host } else { gpu.to_device };
            let all: Vec<f64> = gpus().filter_map(|(_, gpu)| speed(gpu)).collect();
            let Some(median) = median(&all) else { return };
            for (node, gpu) in gpus() {
                let Some(slow) = speed(gpu).filter(|speed| *speed < SLOW * median) else {
                    continue;
                };
                let what = format!(
                    "GPU {} of {} copies {}/s {way}, the median of all is {}/s",
                    gpu.number,
                    node.name,
                    units::bytes(slow as u64),
                    units::bytes(median as u64)
                );
                let fix = "look at 'nvidia-smi -q' on this machine: its PCIe link may be narrower or older \
                           than the others', or something else uses it";
                findings.push(Finding::wrong(Topic::Copies, what, fix));
            }
        }
    }

    fn rates(&self, findings: &mut Vec<Finding>) {
        let between: Vec<(&Way, u64)> = self.between_hosts(|way| way.bits_per_second);
        let all: Vec<f64> = between.iter().map(|(_, bits)| *bits as f64).collect();
        let Some(median) = median(&all).filter(|_| all.len() > 2) else { return };
        let rate = |bits: f64| Rate::nearest(bits).to_string();
        let is_slow = |bits: u64| (bits as f64) < SLOW * median;
        let mut told: Vec<(NodeId, NodeId)> = Vec::new();
        for sends in [true, false] {
            let mut by_node: BTreeMap<NodeId, Vec<(&Way, u64)>> = BTreeMap::new();
            for (way, bits) in &between {
                by_node
                    .entry(if sends { way.from } else { way.to })
                    .or_default()
                    .push((way, *bits));
            }
            for (node, ways) in by_node {
                if ways.len() < 2 || !ways.iter().all(|(_, bits)| is_slow(*bits)) {
                    continue;
                }
                let best = ways.iter().map(|(_, bits)| *bits).max().unwrap_or(0);
                let what = format!(
                    "{} {} all others with at most {}, the median of all pairs is {}",
                    self.placed(node),
                    if sends { "sends to" } else { "receives from" },
                    rate(best as f64),
                    rate(median)
                );
                let fix = "look at its cable, its port of the switch and 'ethtool' (speed, duplex), and \
                           at what else uses the port";
                findings.push(Finding::wrong(Topic::Bandwidth, what, fix));
                told.extend(ways.iter().map(|(way, _)| (way.from, way.to)));
            }
        }
        for (way, bits) in &between {
            let pair = (way.from, way.to);
            if !is_slow(*bits) || told.contains(&pair) {
                continue;
            }
            let what = format!(
                "{} sends to {} with {}, the median of all pairs is {}",
                self.placed(way.from),
                self.placed(way.to),
                rate(*bits as f64),
                rate(median)
            );
            let fix = "both send faster to others: look at the switches and routes between the two \
                       ('ip route get', 'traceroute')";
            findings.push(Finding::wrong(Topic::Bandwidth, what, fix));
        }
    }

    fn losses(&self, findings: &mut Vec<Finding>) {
        for (way, resent) in self.between_hosts(|way| way.resent.map(u64::from)) {
            let sent = f64::from(way.segments.unwrap_or(0));
            let share = resent as f64 / sent.max(1.0);
            if resent < FEW_RESENT || share < MUCH_LOSS {
                continue;
            }
            let what = format!(
                "{} had to send {} of its packets to {} again",
                self.placed(way.from),
                units::percent(share),
                self.placed(way.to)
            );
            let fix = "look for errors with 'ip -s link' and 'ethtool -S' on both, and for a port of the \
                       switch with a small queue";
            findings.push(Finding::note(Topic::Loss, what, fix));
        }
        let trips = self.between_hosts(|way| way.round_trip_us);
        let all: Vec<f64> = trips.iter().map(|(_, trip)| *trip).collect();
        let Some(median) = median(&all) else { return };
        // Both ends know the same round trip.
        for (way, trip) in trips.iter().filter(|(way, _)| way.from > way.to) {
            if *trip < FAR * median || trip - median < FAR_US {
                continue;
            }
            let what = format!(
                "a round trip between {} and {} takes {}, the median is {}",
                self.placed(way.from),
                self.placed(way.to),
                units::duration(trip / 1e6),
                units::duration(median / 1e6)
            );
            let fix = "look at the way between the two ('traceroute'), and at what keeps their \
                       processors busy";
            findings.push(Finding::note(Topic::Latency, what, fix));
        }
    }

    /// The ways between hosts that `of` says something of.
    fn between_hosts<T>(&self, of: impl Fn(&Way) -> Option<T>) -> Vec<(&Way, T)> {
        let ways = self.ways.iter().filter(|way| !way.same_host);
        ways.filter_map(|way| Some((way, of(way)?))).collect()
    }
}

/// Those that differ from the value that most have, with that value. Of equally many the first counts.
fn unusual<T: Clone + Ord>(values: &[Option<T>]) -> Vec<(usize, T)> {
    let mut counts: BTreeMap<&T, usize> = BTreeMap::new();
    values.iter().flatten().for_each(|value| *counts.entry(value).or_default() += 1);
    let most = counts.values().copied().max().unwrap_or(0);
    let Some(usual) = values.iter().flatten().find(|value| counts[value] == most).cloned() else {
        return Vec::new();
    };
    let differs = |(node, value): (usize, &Option<T>)| {
        value.as_ref().is_some_and(|value| *value != usual).then(|| (node, usual.clone()))
    };
    values.iter().enumerate().filter_map(differs).collect()
}

/// A way below this share of the median is slow. Pairs that are measured at the same time on a busy
/// machine differ by less.
const SLOW: f64 = 0.5;
/// A round trip is far if it takes so many times the median, and so many microseconds more.
const FAR: f64 = 4.0;
const FAR_US: f64 = 1000.0;
const MUCH_LOSS: f64 = 0.02;
const FEW_RESENT: u64 = 20;
const CLOCKS_APART_US: f64 = 1e6;
/// The largest receive window that a link has (`core/port.rs`). The system cuts it to what it allows.
const LARGEST_WINDOW: u64 = 1 << 20;
/// Bits per second of ports that gain from it.
const FAST: u64 = 2_750_000_000;
const LITTLE_MEMORY: u64 = 512 << 20;
/// The most lanes that a node takes by itself.
const MOST_LANES: usize = 8;

#[cfg(test)]
mod tests;
