//! From a simulation that has run to what people want to know of it.

use crate::Error;
use crate::calendar::Time;
use crate::engine::Engine;
use crate::network::Duplex;
use crate::outcome::{Bottleneck, LayerTimeline, Outcome, Rebuilt};
use crate::setup::Setup;
use poseidon_core::NodeId;
use std::cmp::Reverse;

/// Simulates `setup`.
pub fn simulate(setup: &Setup) -> Result<Outcome, Error> {
    setup.check()?;
    let mut engine = Engine::new(setup)?;
    let halt = engine.run();
    let measured = Steps::of(&engine);
    let compute_seconds = engine.program.compute_seconds();
    let workers = setup.cluster.workers() as f64;
    let speedup = match measured.mean > 0.0 {
        true => workers * compute_seconds / measured.mean,
        false => 0.0,
    };
    let steps = match &halt {
        None => setup.iterations as u64,
        Some(_) => engine.workers.iter().map(|worker| worker.step).max().unwrap_or(1).max(1),
    };
    let (bytes_sent, bytes_received): (Vec<u64>, Vec<u64>) = (0..setup.cluster.nodes())
        .map(|node| engine.fabric.bytes(node))
        .map(|[sent, received]| (sent / steps, received / steps))
        .unzip();
    let (bottleneck, reason) = match &halt {
        Some(halt) => {
            let failed: Vec<_> = halt.failed.iter().map(|n| setup.cluster.name(*n)).collect();
            (Bottleneck::Latency, format!("the job stopped: {} fell silent", failed.join(", ")))
        }
        None => find_bottleneck(setup, &measured, &bytes_sent, &bytes_received),
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
    Ok(Outcome {
        iteration_seconds: measured.median,
        compute_seconds,
        stall_fraction: measured.stalled(),
        speedup,
        bytes_sent,
        bytes_received,
        drops: engine.fabric.drops(),
        timeline: engine.timeline.iter().map(relative).collect(),
        bottleneck,
        reason,
        halt,
        events: engine.calendar.events,
    })
}

/// The steps that count, of all workers: those between the first and the last, which have others
/// before and after them, as far as there are any.
struct Steps {
    median: f64,
    mean: f64,
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
        let (mut waited, mut rebuilt) = (0.0, 0.0);
        for worker in &engine.workers {
            for step in counted.clone() {
                if let [start, end, ..] = worker.begun[(step - 1).min(worker.begun.len())..] {
                    lengths.push(Time::since(end, start));
                    waited += worker.waited[step];
                    rebuilt += worker.rebuilt[step];
                }
            }
        }
        lengths.sort_by(f64::total_cmp);
        let count = lengths.len().max(1) as f64;
        let median = lengths.get(lengths.len() / 2).copied().unwrap_or(0.0);
        let mean = lengths.iter().sum::<f64>() / count;
        Self { median, mean, waited: waited / count, rebuilt: rebuilt / count }
    }

    fn stalled(&self) -> f64 {
        match self.mean > 0.0 {
            true => ((self.waited + self.rebuilt) / self.mean).min(1.0),
            false => 0.0,
        }
    }
}

/// Below this share of a step, waiting is not what is worth changing.
const NEGLIGIBLE: f64 = 0.05;

fn find_bottleneck(
    setup: &Setup,
    steps: &Steps,
    sent: &[u64],
    received: &[u64],
) -> (Bottleneck, String) {
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
    let busiest = |bytes: &[u64]| {
        let most = bytes.iter().zip(0..).max_by_key(|&(&bytes, node)| (bytes, Reverse(node)));
        most.map_or((0, NodeId(0)), |(&bytes, node)| (bytes, NodeId(node)))
    };
    let ((out, sender), (into, receiver)) = (busiest(sent), busiest(received));
    let (bytes, node, egress) =
        if out >= into { (out, sender, true) } else { (into, receiver, false) };
    let both = sent[node.index()] + received[node.index()];
    let carried = if setup.network.duplex == Duplex::Shared { both } else { bytes };
    let wire = carried as f64 / setup.network.rate();
    if wire < steps.waited / 2.0 {
        let reason = format!(
            "workers wait {} of a step, but the busiest link is in use for {} of it",
            percent(stalled),
            percent(wire / steps.mean)
        );
        return (Bottleneck::Latency, reason);
    }
    let reason = format!(
        "{} {} {:.0} MB a step, which takes {} of it",
        setup.cluster.name(node),
        if egress { "sends" } else { "receives" },
        bytes as f64 / 1e6,
        percent(wire / steps.mean)
    );
    (if egress { Bottleneck::Egress(node) } else { Bottleneck::Ingress(node) }, reason)
}
