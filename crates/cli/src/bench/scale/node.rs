//! One node of a run: a worker that sleeps instead of computing, and exchanges for real.

use super::case::Case;
use super::saver::{Made, Saver};
use crate::bench::worker::process_cpu;
use anyhow::ensure;
use poseidon::{
    Buffer, Checkpoints, Config, Factors, Layer, LayerId, LayerKind, Policy, Scheme, Session,
};
use poseidon_sim::Overlap;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::thread;
use std::time::{Duration, Instant};

/// What a node saw.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Seen {
    /// Seconds of every step.
    pub(super) steps: Vec<f64>,
    /// Per step, from here on: bytes handed to links,
    pub(super) bytes_sent: f64,
    /// seconds in which gradients were rebuilt from factors,
    pub(super) rebuilding: f64,
    /// seconds of a processor.
    pub(super) cpu: f64,
    /// The checkpoints that were made meanwhile.
    pub(super) checkpoints: Vec<Made>,
}

/// Takes part in a run. `saving` is where checkpoints go, and after how many steps one is made.
pub(super) fn run(
    case: &Case,
    scheme: Policy,
    saving: Option<(String, u32)>,
) -> anyhow::Result<Seen> {
    let mut config = Config::from_env()?;
    let step = Duration::try_from_secs_f64(case.compute_seconds())?;
    // A step may wait for as long as it computes, and for a link that is ten times too slow.
    config.timeout = config.timeout.max(step * 20);
    let layers = case.model.layers.iter().filter(|layer| layer.parameters > 0);
    let (to, every) = saving.unzip();
    let session = Session::builder(config)
        .layers(layers.map(Layer::from))
        .optimizer("sgd:momentum=0.9".parse()?)
        .learning_rate(RATE)
        .scheme(scheme)
        .batch(case.batch)
        .checkpoints(Checkpoints { to, from: None })
        .start()?;
    let mut worker = Worker::join(case, &session)?;
    let mut saver = Saver::new(&session, every);
    // Everybody begins with everybody's initial parameters, and nothing else is under way.
    session.gather("begin", &Value::Null)?;
    let (cpu, traffic) = (process_cpu(), session.traffic());
    let seconds = worker.train(case, &mut saver)?;
    session.gather("end", &Value::Null)?;
    let count = f64::from(case.steps);
    let seen = Seen {
        steps: seconds,
        bytes_sent: (session.traffic().bytes_sent - traffic.bytes_sent) as f64 / count,
        rebuilding: worker.rebuilding.as_secs_f64() / count,
        cpu: (process_cpu() - cpu).as_secs_f64() / count,
        checkpoints: saver.finish()?,
    };
    drop(worker);
    session.finish()?;
    Ok(seen)
}

struct Worker<'a> {
    session: &'a Session,
    /// By layer of the model; none for layers without parameters.
    slots: Vec<Option<Slot>>,
    device: Device,
    rebuilding: Duration,
}

/// A layer with parameters.
struct Slot {
    id: LayerId,
    /// `None` while the layer is in flight.
    values: Option<Buffer>,
    work: Work,
}

/// What a backward pass would have left.
enum Work {
    Gradient(Buffer),
    Factors { u: Vec<f32>, v: Vec<f32> },
}

/// Pretends to compute.
struct Device {
    /// When what it was given so far is done. What a sleep takes too long is made up by the next.
    busy_until: Instant,
}

impl<'a> Worker<'a> {
    fn join(case: &Case, session: &'a Session) -> anyhow::Result<Self> {
        let mut slots = Vec::new();
        let mut ids = (0..).map(LayerId);
        for layer in &case.model.layers {
            if layer.parameters == 0 {
                slots.push(None);
                continue;
            }
            let id = ids.next().unwrap_or(LayerId(u32::MAX));
            let work = match (session.scheme(id)?, layer.kind) {
                (Scheme::Sfb, LayerKind::Fc { m, n }) => {
                    let rows = |width| vec![SMALL; case.batch * width];
                    Work::Factors { u: rows(m), v: rows(n) }
                }
                (scheme, _) => {
                    ensure!(scheme == Scheme::Ps, "layer '{}' goes by {scheme}", layer.name);
                    Work::Gradient(vec![SMALL; layer.parameters].into())
                }
            };
            session.broadcast(id, vec![SMALL; layer.parameters].into())?;
            slots.push(Some(Slot { id, values: None, work }));
        }
        let device = Device { busy_until: Instant::now() };
        let mut worker = Self { session, slots, device, rebuilding: Duration::ZERO };
        worker.settle()?;
        worker.rebuilding = Duration::ZERO;
        Ok(worker)
    }

    /// Takes all steps; returns the seconds of each.
    fn train(&mut self, case: &Case, saver: &mut Saver<'_>) -> anyhow::Result<Vec<f64>> {
        let layers = 0..case.times.len();
        let mut begun = Vec::new();
        self.device.busy_until = Instant::now();
        for step in 1..=case.steps {
            begun.push(Instant::now());
            saver.before(step)?;
            for layer in layers.clone() {
                self.receive(layer)?;
                self.device.compute(case.times[layer].forward);
            }
            for layer in layers.clone().rev() {
                self.device.compute(case.times[layer].backward);
                if case.overlap != Overlap::None {
                    self.send(layer)?;
                }
            }
            if case.overlap == Overlap::None {
                layers.clone().rev().try_for_each(|layer| self.send(layer))?;
            }
            if case.overlap != Overlap::Full {
                self.settle()?;
            }
        }
        self.settle()?;
        begun.push(Instant::now());
        let seconds = begun.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64());
        Ok(seconds.collect())
    }

    fn settle(&mut self) -> anyhow::Result<()> {
        (0..self.slots.len()).try_for_each(|layer| self.receive(layer))
    }

    /// Waits for a layer if it is in flight.
    fn receive(&mut self, layer: usize) -> anyhow::Result<()> {
        let Some(slot) = &mut self.slots[layer] else { return Ok(()) };
        if slot.values.is_some() {
            return Ok(());
        }
        let ready = self.session.is_ready(slot.id)?;
        let asked = Instant::now();
        let received = self.session.receive(slot.id)?;
        let here = Instant::now();
        let rebuilt = received.rebuilt.unwrap_or(asked..asked);
        self.rebuilding += rebuilt.end - rebuilt.start;
        if !ready || rebuilt.end > asked {
            self.device.idle_until(here);
        }
        if let Some(gradient) = received.gradient {
            slot.work = Work::Gradient(gradient);
        }
        slot.values = Some(received.result);
        Ok(())
    }

    fn send(&mut self, layer: usize) -> anyhow::Result<()> {
        let Some(slot) = &mut self.slots[layer] else { return Ok(()) };
        let Some(values) = slot.values.take() else { return Ok(()) };
        match &mut slot.work {
            Work::Gradient(gradient) => {
                self.session.send_into(slot.id, std::mem::take(gradient), values)?;
            }
            Work::Factors { u, v } => {
                self.session.send_factors(slot.id, &[Factors { u, v }], values)?;
                self.session.rebuild(slot.id)?;
            }
        }
        Ok(())
    }
}

impl Device {
    fn compute(&mut self, seconds: f64) {
        self.busy_until += Duration::from_secs_f64(seconds);
        thread::sleep(self.busy_until.saturating_duration_since(Instant::now()));
    }

    fn idle_until(&mut self, now: Instant) {
        self.busy_until = self.busy_until.max(now);
    }
}

/// So small that parameters stay numbers, whatever the gradients are.
const RATE: f32 = 1e-6;
/// What gradients and parameters begin as. Not 0: that could be sent and added in less time.
const SMALL: f32 = 1e-3;
