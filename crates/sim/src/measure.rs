//! From a simulation that has run to what people want to know of it.

use crate::Error;
use crate::calendar::Time;
use crate::engine::Engine;
use crate::network::Duplex;
use crate::outcome::{Bottleneck, Carried, Copied, LayerTimeline, Outcome, Rebuilt};
use crate::setup::Setup;
use poseidon_core::{Cluster, NodeId};
use std::cmp::Reverse;

/// Simulates `setup`.
pub fn simulate(setup: &Setup) -> Result<Outcome, Error> {
    setup.check()?;
    let mut engine = Engine::new(setup)?;
    let halt = engine.run();
    let measured = Steps::of(&engine);
    let compute_seconds = engine.program.compute_seconds();
    let steps = match &halt {
        None => setup.iterations as u64,
        Some(_) => engine.workers.iter().map(|worker| worker.step).max().unwrap_or(1).max(1),
    };
    let (bytes_sent, bytes_received): (Vec<u64>, Vec<u64>) = (0..setup.cluster.nodes())
        .map(|node| engine.fabric.bytes(node))
        .map(|[sent, received]| (sent / steps, received / steps))
        .unzip();
    let tree = &engine.facts.places;
    let mut ports = vec![Carried::default(); tree.workers_by_host().len()];
    for node in setup.cluster.node_ids() {
        let [sent, received] = engine.fabric.network_bytes(node.index());
        let port = &mut ports[usize::from(tree.host(node))];
        (port.sent, port.received) = (port.sent + sent, port.received + received);
    }
    let per_step = |carried: Carried| Carried {
        sent: carried.sent / steps,
        received: carried.received / steps,
    };
    let ports: Vec<Carried> = ports.into_iter().map(per_step).collect();
    let racks = engine.fabric.rack_bytes().iter();
    let racks = racks.map(|&[sent, received]| per_step(Carried { sent, received })).collect();
    let shared = engine.facts.hosts.is_some();
    let memory = setup.cluster.node_ids().filter(|_| shared).map(|node| {
        let [sent, received] = engine.fabric.memory_bytes(node.index());
        per_step(Carried { sent, received })
    });
    let copies = engine.workers.iter().filter_map(|worker| {
        let [out, back] = worker.copies.as_ref()?;
        Some(Copied { to_host: out.bytes / steps, to_device: back.bytes / steps })
    });
    let links = Links { ports, racks, memory: memory.collect(), copies: copies.collect() };
    let (bottleneck, reason) = match &halt {
        Some(halt) => {
            let failed: Vec<_> = halt.failed.iter().map(|n| setup.cluster.name(*n)).collect();
            (Bottleneck::Latency, format!("the job stopped: {} fell silent", failed.join(", ")))
        }
        None => find_bottleneck(setup, &measured, &links),
    };
    let start = engine.workers.first().and_then(|w| w.begun.get(engine.watched() as usize - 1));
    let start = start.map_or(0.0, |time| time.seconds());
    let since = |time: f64| (time - start).max(0.0);
    let relative = |seen: &LayerTimeline| LayerTimeline {
        ready: since(seen.ready),
        sent: since(seen.sent),
        landed: since(seen.landed),
        rebuilt: seen.rebuilt.map(|by| Rebuilt { start: since(by.start), ..by }),
        applied: since(seen.applied),
        awaited: seen.awaited,
    };
    let events = engine.calendar.events;
    Ok(Outcome {
        iteration_seconds: measured.median,
        compute_seconds,
        stall_fraction: measured.stalled(),
        steps_per_second: measured.rate,
        speedup: measured.rate * compute_seconds,
        bytes_sent,
        bytes_received,
        ports: links.ports,
        memory: links.memory,
        racks: links.racks,
        copies: links.copies,
        drops: engine.fabric.drops(),
        timeline: engine.timeline.iter().map(relative).collect(),
        steps: engine.workers.into_iter().map(|worker| worker.steps).collect(),
        bottleneck,
        reason,
        halt,
        events,
    })
}

/// The steps that count, of all workers: those between the first and the last, which have others
/// before and after them, as far as there are any.
struct Steps {
    median: f64,
    mean: f64,
    /// Of all workers together, in a second.
    rate: f64,
    /// Of the mean: waiting for the network, and for gradients that are rebuilt or rebuilding them.
    waited: f64,
    rebuilt: f64,
}

impl Steps {
    fn of(engine: &Engine<'_>) -> Self {
        let all = engine.setup.iterations;
        let counted = match all {
            1 => 1..2,
            2 => 2..3,
            _ => 2..all,
        };
        let mut lengths = Vec::new();
        let (mut rate, mut waited, mut rebuilt) = (0.0, 0.0, 0.0);
        for worker in &engine.workers {
            let before = lengths.len();
            for step in counted.clone() {
                if let [start, end, ..] = worker.begun[(step - 1).min(worker.begun.len())..] {
                    lengths.push(Time::since(end, start));
                    waited += worker.waited[step];
                    rebuilt += worker.rebuilt[step];
                }
            }
            let own = &lengths[before..];
            let seconds = own.iter().sum::<f64>();
            rate += if seconds > 0.0 { own.len() as f64 / seconds } else { 0.0 };
        }
        lengths.sort_by(f64::total_cmp);
        let count = lengths.len().max(1) as f64;
        let median = lengths.get(lengths.len() / 2).copied().unwrap_or(0.0);
        let mean = lengths.iter().sum::<f64>() / count;
        Self { median, mean, rate, waited: waited / count, rebuilt: rebuilt / count }
    }

    fn stalled(&self) -> f64 {
        match self.mean > 0.0 {
            true => ((self.waited + self.rebuilt) / self.mean).min(1.0),
            false => 0.0,
        }
    }
}

/// What passed the links in a step.
struct Links {
    /// By host.
    ports: Vec<Carried>,
    /// By rack.
    racks: Vec<Carried>,
    /// By node, if nodes share hosts.
    memory: Vec<Carried>,
    /// By worker, if the job has copies.
    copies: Vec<Copied>,
}

/// Below this share of a step, waiting is not what is worth changing.
const NEGLIGIBLE: f64 = 0.05;

fn find_bottleneck(setup: &Setup, steps: &Steps, links: &Links) -> (Bottleneck, String) {
    let stalled = steps.stalled();
    let percent = |share: f64| format!("{:.0}%", share * 100.0);
    if stalled < NEGLIGIBLE {
        let reason = format!("workers compute {} of the time", percent(1.0 - stalled));
        return (Bottleneck::Compute, reason);
    }
    if steps.rebuilt > steps.waited {
        let reason = format!(
            "workers wait {} of a step for gradients to be rebuilt from factors, or rebuild them",
            percent(steps.rebuilt / steps.mean)
        );
        return (Bottleneck::Rebuild, reason);
    }
    let Busy { what, who, does, bytes, seconds } = busiest(setup, links);
    if seconds < steps.waited / 2.0 {
        let reason = format!(
            "workers wait {} of a step, but the busiest link is in use for {} of it",
            percent(stalled),
            percent(seconds / steps.mean)
        );
        return (Bottleneck::Latency, reason);
    }
    let reason = format!(
        "{who} {does} {:.0} MB a step, which takes {} of it",
        bytes as f64 / 1e6,
        percent(seconds / steps.mean)
    );
    (what, reason)
}

/// The link that is in use for longest.
struct Busy {
    what: Bottleneck,
    who: String,
    does: &'static str,
    /// One way, in a step.
    bytes: u64,
    seconds: f64,
}

fn busiest(setup: &Setup, links: &Links) -> Busy {
    let network = &setup.network;
    let most = |bytes: fn(&Carried) -> u64| {
        let all = links.ports.iter().map(bytes).zip(0..);
        all.max_by_key(|&(bytes, host)| (bytes, Reverse(host))).unwrap_or((0, 0usize))
    };
    let ((out, sender), (into, receiver)) = (most(|port| port.sent), most(|port| port.received));
    let egress = out >= into;
    let (bytes, host) = if egress { (out, sender) } else { (into, receiver) };
    let port = links.ports[host];
    let both = network.duplex == Duplex::Shared;
    let carried = if both { port.sent + port.received } else { bytes };
    let (node, who) = name(&setup.cluster, host);
    let mut busy = Busy {
        what: if egress { Bottleneck::Egress(node) } else { Bottleneck::Ingress(node) },
        who,
        does: if egress { "sends" } else { "receives" },
        bytes,
        seconds: carried as f64 / network.rate(),
    };
    let uplink = network.racks.map_or(f64::INFINITY, |racks| racks.rate(network));
    for (rack, number) in links.racks.iter().zip(0..) {
        let seconds = rack.most() as f64 / uplink;
        if seconds > busy.seconds {
            let (what, does) = (Bottleneck::Rack(number), "exchanges with the others");
            busy = Busy { what, who: format!("rack {number}"), does, bytes: rack.most(), seconds };
        }
    }
    for (memory, node) in links.memory.iter().zip(setup.cluster.node_ids()) {
        let seconds = memory.most() as f64 / network.memory.rate;
        if seconds > busy.seconds {
            let (what, who) = (Bottleneck::Memory(node), setup.cluster.name(node));
            let does = "exchanges with the others of its host";
            busy = Busy { what, who, does, bytes: memory.most(), seconds };
        }
    }
    let workers = links.copies.iter().zip(setup.cluster.worker_ids());
    for (speed, (copied, node)) in setup.copies.iter().cycle().zip(workers) {
        let seconds = copied.seconds(*speed);
        if seconds > busy.seconds {
            let (what, who) = (Bottleneck::Copies(node), setup.cluster.name(node));
            let does = "copies between its device and its host";
            let bytes = copied.to_host.max(copied.to_device);
            busy = Busy { what, who, does, bytes, seconds };
        }
    }
    busy
}

/// The first node of a host, and how a person would call the host.
fn name(cluster: &Cluster, host: usize) -> (NodeId, String) {
    let is_there = |node: &NodeId| match cluster.hosts().get(node.index()) {
        Some(other) => usize::from(*other) == host,
        None => node.index() == host,
    };
    let mut nodes = cluster.node_ids().filter(is_there);
    let first = nodes.next().unwrap_or(NodeId(0));
    match nodes.last() {
        Some(last) => (first, format!("host {host} (nodes {first} to {last})")),
        None => (first, cluster.name(first)),
    }
}
