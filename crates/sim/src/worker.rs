//! What a worker computes, layer by layer, and where it waits.

use crate::calendar::Time;
use crate::copies::CopyEngine;
use crate::outcome::StepTimes;
use crate::profile::{CopySpeed, LayerTime};
use crate::rebuild::{Rebuilder, Sent};
use crate::setup::{Jitter, Setup, Stragglers};
use poseidon_core::{NodeId, Overlap};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// A worker's place in its program.
pub(crate) struct Worker {
    at: At,
    /// The step it is in, from 1.
    pub(crate) step: u64,
    /// Its second processor.
    pub(crate) rebuilder: Rebuilder,
    /// Its device's copy engines, if it has a device: to the host, and to the device.
    pub(crate) copies: Option<[CopyEngine; 2]>,
    /// How many times as long as its profile says this step takes.
    pace: f64,
    slow: f64,
    chance: ChaCha8Rng,
    /// Since when it waits, and for which layer: for the network, or since the layer has landed, for
    /// its second processor.
    pub(crate) waiting: Option<(Time, usize)>,
    /// When its steps began; the last is when it was done.
    pub(crate) begun: Vec<Time>,
    /// By step, those that have begun to compute.
    pub(crate) steps: Vec<StepTimes>,
    /// By step: seconds it waited for the network, and seconds it waited for its second processor or
    /// rebuilt gradients itself.
    pub(crate) waited: Vec<f64>,
    pub(crate) rebuilt: Vec<f64>,
}

#[derive(Clone, Copy, Debug)]
enum At {
    /// Before a layer's forward: it must be here.
    Await(usize),
    Forward(usize),
    Forwarded(usize),
    Backward(usize),
    Backwarded(usize),
    /// After a backward pass: layers below this one are still to be sent, if none was before.
    Flush(usize),
    /// After a step or the last step: everything must come back, from this layer on.
    Settle(usize),
    Done,
}

/// What a worker does next.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Next {
    /// Computes for so many seconds.
    Compute(f64),
    /// Sends a layer, and goes on.
    Send(usize),
    /// Rebuilds a gradient that its second processor has not begun.
    Rebuild(Sent),
    /// Needs a layer that is in flight, or that its second processor is at work on.
    Wait(usize),
    /// Nothing more.
    Stop,
}

/// What all workers do.
pub(crate) struct Program {
    times: Vec<LayerTime>,
    /// By layer: seconds to rebuild its gradient; 0 for those that do not go by factors.
    pub(crate) rebuild: Vec<f64>,
    /// By layer: whether it has anything to synchronise.
    synced: Vec<bool>,
    overlap: Overlap,
    copies: Option<CopySpeed>,
    steps: u64,
    jitter: Jitter,
}

impl Program {
    pub(crate) fn new(setup: &Setup, rebuild: Vec<f64>) -> Self {
        Self {
            times: setup.times.clone(),
            rebuild,
            synced: setup.layers.iter().map(|layer| layer.len > 0).collect(),
            overlap: setup.overlap,
            copies: setup.copies,
            steps: setup.iterations as u64,
            jitter: setup.stragglers.jitter,
        }
    }

    /// Seconds one worker alone computes in a step.
    pub(crate) fn compute_seconds(&self) -> f64 {
        self.times.iter().map(|time| time.forward + time.backward).sum()
    }
}

impl Worker {
    pub(crate) fn new(program: &Program, rank: NodeId, stragglers: &Stragglers, seed: u64) -> Self {
        let mut chance = ChaCha8Rng::seed_from_u64(seed);
        chance.set_stream(rank.0.into());
        let slow = stragglers.slow.iter().filter(|(node, _)| *node == rank);
        let mut worker = Self {
            at: At::Await(0),
            step: 0,
            rebuilder: Rebuilder::default(),
            copies: program
                .copies
                .map(|speed| [speed.to_host, speed.to_device].map(CopyEngine::new)),
            pace: 1.0,
            slow: slow.map(|(_, factor)| factor).product(),
            chance,
            waiting: None,
            begun: Vec::with_capacity(program.steps as usize + 1),
            steps: Vec::with_capacity(program.steps as usize),
            waited: vec![0.0; program.steps as usize + 1],
            rebuilt: vec![0.0; program.steps as usize + 1],
        };
        worker.begin_step(program, Time::default());
        worker
    }

    /// Whether all its steps are done.
    pub(crate) fn is_done(&self) -> bool {
        matches!(self.at, At::Done)
    }

    /// Goes on from where it was. `in_flight` says whether a layer is.
    pub(crate) fn advance(
        &mut self,
        program: &Program,
        now: Time,
        in_flight: impl Fn(usize) -> bool,
    ) -> Next {
        let layers = program.times.len();
        loop {
            match self.at {
                At::Await(layer) | At::Settle(layer) if layer < layers => {
                    if program.synced[layer] {
                        if in_flight(layer) || self.rebuilder.is_at(layer) {
                            return Next::Wait(layer);
                        }
                        if let Some(sent) = self.rebuilder.leave(layer) {
                            self.rebuilt[self.step as usize] += program.rebuild[layer];
                            return Next::Rebuild(sent);
                        }
                    }
                    self.at = match self.at {
                        At::Settle(_) => At::Settle(layer + 1),
                        _ => At::Forward(layer),
                    };
                }
                At::Await(_) => self.at = At::Backward(layers - 1),
                At::Forward(layer) => {
                    if layer == 0 {
                        self.steps.push(StepTimes { started: now.seconds(), computed: None });
                    }
                    self.at = At::Forwarded(layer);
                    return Next::Compute(program.times[layer].forward * self.pace);
                }
                At::Forwarded(layer) => self.at = At::Await(layer + 1),
                At::Backward(layer) => {
                    self.at = At::Backwarded(layer);
                    return Next::Compute(program.times[layer].backward * self.pace);
                }
                At::Backwarded(layer) => {
                    self.at = if layer > 0 { At::Backward(layer - 1) } else { At::Flush(layers) };
                    if let Some(step) = self.steps.last_mut().filter(|_| layer == 0) {
                        step.computed = Some(now.seconds());
                    }
                    if program.overlap != Overlap::None && program.synced[layer] {
                        return self.send(program, layer);
                    }
                }
                At::Flush(above) if above > 0 && program.overlap == Overlap::None => {
                    self.at = At::Flush(above - 1);
                    if program.synced[above - 1] {
                        return self.send(program, above - 1);
                    }
                }
                At::Flush(_) if program.overlap == Overlap::Full && self.step < program.steps => {
                    self.begin_step(program, now);
                    self.at = At::Await(0);
                }
                At::Flush(_) => self.at = At::Settle(0),
                At::Settle(_) if self.step < program.steps => {
                    self.begin_step(program, now);
                    self.at = At::Await(0);
                }
                At::Settle(_) => {
                    self.begun.push(now);
                    self.at = At::Done;
                }
                At::Done => return Next::Stop,
            }
        }
    }

    /// The layer it waits for, if it is this one, is there. Returns how long it has waited.
    pub(crate) fn end_wait(&mut self, layer: usize, now: Time) -> Option<f64> {
        let (since, _) = self.waiting.take_if(|(_, awaited)| *awaited == layer)?;
        Some(now.since(since))
    }

    fn send(&mut self, program: &Program, layer: usize) -> Next {
        if program.rebuild[layer] > 0.0 {
            self.rebuilder.handle_sent(Sent { layer, clock: self.step });
        }
        Next::Send(layer)
    }

    fn begin_step(&mut self, program: &Program, now: Time) {
        self.step += 1;
        self.begun.push(now);
        self.pace = self.slow * program.jitter.draw(&mut self.chance);
    }
}
