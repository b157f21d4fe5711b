//! Data-parallel training: a worker's net, its devices, and the session that keeps replicas equal.
//!
//! Wait-free backpropagation (Poseidon 2017 §3.2, Algorithm 2): a layer is sent the moment its backward
//! ends and travels while the layers below are computed; its parameters are awaited where they are
//! needed, just before its next forward. [`Overlap`] turns either half off, to see what it is worth.
//!
//! A worker may have several devices, each a thread with a net of its own (Poseidon 2015 §4.1). They
//! share the parameters and the batch; what they compute is put together before it leaves the node.

mod log;
mod slot;
mod slower;

pub use log::{Iteration, Span, Stats, What};
pub use poseidon_core::Overlap;

use crate::data::{Batch, DataError, Evaluation};
use crate::net::LayerInfo;
use crate::{Draw, Gradient, LoadError, Loss, Model, ModelError, Net, Phase};
use log::Log;
use poseidon::checkpoint::{Keep, TensorFacts, What as Part};
use poseidon::session::{Builder, Saving};
use poseidon::{Layer, LayerKind, Optimizer, Pass, Reduction, Session};
use sha2::{Digest, Sha256};
use slot::{Alone, Slot};
use slower::Slower;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// What a worker trains.
#[derive(Clone, Debug)]
pub struct Task {
    /// The net.
    pub model: Model,
    /// Most samples in one step of this worker.
    pub batch: usize,
    /// Threads that compute.
    pub devices: usize,
    /// Where initial parameters and dropout come from.
    pub seed: u64,
    /// What is done at a step. Gradients are summed: they are divided by all workers' samples before.
    pub optimizer: Optimizer,
    /// How much of the synchronisation may run beside computing.
    pub overlap: Overlap,
}

/// Why training stopped.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The cluster failed.
    #[error(transparent)]
    Session(#[from] poseidon::Error),
    /// The model cannot be computed.
    #[error(transparent)]
    Model(Arc<ModelError>),
    /// The data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The data does not fit the model.
    #[error("step {step}: {why}")]
    Load {
        /// The step, counted from 0.
        step: u64,
        /// What does not fit.
        why: Arc<LoadError>,
    },
    /// The loss is not a number any more.
    #[error("the loss became {loss} at step {step}{place}: lower the learning rate, or warm it up")]
    Diverged {
        /// The step, counted from 0.
        step: u64,
        /// The loss.
        loss: f64,
        /// The first layer whose output is not finite, in words; may be empty.
        place: String,
    },
}

/// One worker of a training job.
pub struct Worker {
    sync: Sync,
    nets: Vec<Net>,
    /// By layer of the net; `None` for layers without parameters.
    slots: Vec<Option<Slot>>,
    capacity: usize,
    overlap: Overlap,
    seed: u64,
    step: u64,
    /// Steps that a checkpoint had when this worker joined.
    before: u64,
    log: Log,
    slower: Slower,
}

/// Who takes care of a step once the gradients are there.
enum Sync {
    Poseidon(Box<Session>),
    /// Nobody else: the bare engine, for comparison.
    Alone(Alone),
}

impl Task {
    /// Describes this task's layers and rule to a session, which [`Worker::join`] then takes.
    pub fn describe(&self, builder: Builder) -> Result<Builder, TrainError> {
        let net = Net::new(&self.model, 1).map_err(model_error)?;
        let layers = net.layers().iter().filter(|layer| layer.parameters > 0).map(|layer| {
            let kind = match layer.fc {
                Some((m, n)) => LayerKind::Fc { m, n },
                None if layer.is_conv => LayerKind::Conv,
                None => LayerKind::Other,
            };
            Layer { kind, ..Layer::new(layer.name.clone(), layer.parameters) }
        });
        Ok(builder.layers(layers).optimizer(self.rule()).batch(self.batch))
    }

    /// The batch is divided among all workers' samples by the net, so shards only add.
    fn rule(&self) -> Optimizer {
        self.optimizer.clone().with_reduction(Reduction::Sum)
    }

    fn nets(&self) -> Result<Vec<Net>, TrainError> {
        let devices = self.devices.clamp(1, self.batch.max(1));
        let share = self.batch.div_ceil(devices).max(1);
        (0..devices).map(|_| Net::new(&self.model, share).map_err(model_error)).collect()
    }
}

impl Worker {
    /// Joins the job that `session` is in. All workers begin with worker 0's parameters, or go on from
    /// the session's [checkpoint](Session::checkpoint).
    pub fn join(task: &Task, session: Session) -> Result<Self, TrainError> {
        let nets = task.nets()?;
        let slots = slot::slots(&nets[0], nets.len(), Some(&session))?;
        for slot in slots.iter().flatten() {
            let layer = &nets[0].layers()[slot.layer];
            let mut values = vec![0.0; layer.parameters];
            match session.checkpoint() {
                // Worker 0's values are everybody's.
                Some(checkpoint) if session.rank() == 0 => {
                    let whole = 0..layer.parameters;
                    let read = checkpoint.read(&layer.name, &Part::Parameters, whole);
                    values = read.map_err(|why| poseidon::Error::Restore(Arc::new(why)))?;
                }
                Some(_) => {}
                None => nets[0].fill(slot.layer, task.seed, &mut values),
            }
            session.broadcast(slot.id, values.into())?;
        }
        for slot in slots.iter().flatten() {
            slot.fill(session.receive(slot.id)?.result);
        }
        let step = session.checkpoint().map_or(0, |checkpoint| checkpoint.manifest().step);
        let worker = Self::new(task, Sync::Poseidon(Box::new(session)), nets, slots);
        Ok(Self { step, before: step, ..worker })
    }

    /// Trains without anybody else and without Poseidon: what its overhead is measured against.
    pub fn alone(task: &Task) -> Result<Self, TrainError> {
        let nets = task.nets()?;
        let slots = slot::slots(&nets[0], nets.len(), None)?;
        for slot in slots.iter().flatten() {
            let mut values = vec![0.0; nets[0].layers()[slot.layer].parameters];
            nets[0].fill(slot.layer, task.seed, &mut values);
            slot.fill(values.into());
        }
        let alone = Alone::new(task.rule(), slots.iter().flatten().count());
        Ok(Self::new(task, Sync::Alone(alone), nets, slots))
    }

    fn new(task: &Task, sync: Sync, nets: Vec<Net>, slots: Vec<Option<Slot>>) -> Self {
        let log = Log::new(nets[0].layers().iter().map(|layer| layer.name.clone()).collect());
        let (capacity, overlap, seed) = (task.batch, task.overlap, task.seed);
        let slower = Slower::default();
        Self { sync, nets, slots, capacity, overlap, seed, step: 0, before: 0, log, slower }
    }

    /// The session, unless this worker trains alone.
    pub fn session(&self) -> Option<&Session> {
        self.sync.session()
    }

    /// Waits for what is in flight and for the other workers: the job is over.
    pub fn finish(mut self) -> Result<(), TrainError> {
        self.settle()?;
        match self.sync {
            Sync::Poseidon(session) => Ok(session.finish()?),
            Sync::Alone(_) => Ok(()),
        }
    }

    /// Takes the job down and tells the other workers why.
    pub fn abort(self, reason: &str) {
        if let Sync::Poseidon(session) = self.sync {
            session.abort(reason);
        }
    }

    /// Steps taken so far, those before a checkpoint included.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Begins a checkpoint of the state after the next step. None if this worker trains alone.
    pub fn begin_checkpoint(&self, keep: Keep) -> Result<Option<Saving>, TrainError> {
        let Some(session) = self.session() else { return Ok(None) };
        Ok(Some(session.begin_checkpoint(self.step + 1, keep)?))
    }

    /// By layer with parameters: how they are cut into tensors, for checkpoints.
    pub fn tensors(&self) -> Vec<Vec<TensorFacts>> {
        let layers = self.nets[0].layers().iter().filter(|layer| layer.parameters > 0);
        let named = |layer: &LayerInfo| {
            let facts = |(part, shape): &(&str, Vec<usize>)| TensorFacts {
                name: format!("{}.{part}", layer.name),
                shape: shape.clone(),
            };
            layer.tensors.iter().map(facts).collect()
        };
        layers.map(named).collect()
    }

    /// Takes the next step together with all workers, where their clocks
    /// [may be apart](Session::step_together).
    pub fn step_together(&self) -> Result<(), TrainError> {
        self.session().map_or(Ok(()), |session| Ok(session.step_together()?))
    }

    /// Where slow workers may be dropped: waits for the layer that is needed first, because it is known then
    /// which step comes next. Returns how many steps were taken without this worker: their batches are to
    /// be left out. Otherwise none.
    pub fn catch_up(&mut self) -> Result<u64, TrainError> {
        let (Sync::Poseidon(session), Some(first)) =
            (&self.sync, self.slots.iter().flatten().next())
        else {
            return Ok(0);
        };
        if session.plan().consistency().drops() == 0 {
            return Ok(0);
        }
        // All layers come back at the same clock. This one is needed first.
        first.settle(&self.sync, &self.log)?;
        let taken = self.before + session.clock(first.id)?.0;
        let missed = taken - self.step;
        self.step = taken;
        Ok(missed)
    }

    /// Whether some worker asked all to stop. All workers hear it after the same step, unless none waits
    /// for another: then they hear it at the latest with the next step that is taken together.
    pub fn stop_asked(&self) -> bool {
        // With full overlap the results of the last step come during the next one.
        let late = u64::from(self.overlap == Overlap::Full);
        let known = (self.step - self.before).saturating_sub(late);
        let asked = self.session().and_then(Session::stop_asked);
        asked.is_some_and(|clock| clock.0 <= known)
    }

    /// One step on `batch` at learning rate `rate`. The result is of this worker's samples alone.
    pub fn step(&mut self, batch: &Batch<'_>, rate: f32) -> Result<Loss, TrainError> {
        match &self.sync {
            Sync::Poseidon(session) => session.set_learning_rate(rate),
            Sync::Alone(alone) => alone.set_learning_rate(rate),
        }
        self.log.begin(self.step);
        let loss = self.on_devices(batch, Phase::Train)?;
        if !loss.sum.is_finite() {
            return Err(self.diverged(loss.sum));
        }
        if self.overlap == Overlap::None {
            for slot in self.slots.iter().flatten().rev() {
                let factors = || self.nets[0].factors(slot.layer);
                slot.send(&self.sync, &self.log, factors)?;
            }
        }
        self.step += 1;
        if self.overlap != Overlap::Full {
            self.settle()?;
        }
        Ok(loss)
    }

    /// Waits until every layer has come back.
    pub fn settle(&mut self) -> Result<(), TrainError> {
        for slot in self.slots.iter().flatten() {
            slot.settle(&self.sync, &self.log)?;
        }
        Ok(())
    }

    /// The loss and accuracy on this worker's part of a split. `progress` hears how many samples
    /// are done.
    pub fn evaluate(
        &mut self,
        part: &mut Evaluation,
        mut progress: impl FnMut(usize),
    ) -> Result<Loss, TrainError> {
        self.settle()?;
        let mut all = Loss::default();
        while let Some(batch) = part.next()? {
            all += self.on_devices(&batch, Phase::Test)?;
            progress(all.count);
        }
        Ok(all)
    }

    /// A digest of all parameters: equal on replicas that are equal bit by bit.
    pub fn digest(&mut self) -> Result<String, TrainError> {
        self.settle()?;
        let mut hash = Sha256::new();
        for slot in self.slots.iter().flatten() {
            slot.with_values(|values| {
                // A few kilobytes at a time: hashing number by number takes ten times as long.
                for values in values.chunks(1024) {
                    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                    hash.update(bytes);
                }
            });
        }
        Ok(hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The next step computes at least so long, as it would on a slower machine.
    pub fn slow_down(&mut self, least: Duration) {
        self.slower.set(least);
    }

    /// Where the time went so far. To be asked after the last step.
    pub fn stats(&self) -> Stats {
        self.log.stats()
    }

    /// The last whole iteration: what this worker did when.
    pub fn last_iteration(&self) -> Option<Iteration> {
        self.log.last_iteration()
    }

    /// Largest batch one call of [`step`](Self::step) or of an evaluation takes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    fn on_devices(&mut self, batch: &Batch<'_>, phase: Phase) -> Result<Loss, TrainError> {
        let shared = Shared {
            sync: &self.sync,
            slots: &self.slots,
            log: &self.log,
            overlap: self.overlap,
            draw: Draw { seed: self.seed, step: self.step, first: batch.first, total: batch.total },
            slower: &self.slower,
            phase,
        };
        let share = batch.labels.len().div_ceil(self.nets.len()).max(1);
        // As many as there are shares: a batch need not have one for every device.
        let devices = batch.labels.len().div_ceil(share).max(1);
        for slot in self.slots.iter().flatten() {
            slot.expect(devices);
        }
        let sample = batch.images.len() / batch.labels.len().max(1);
        let parts = batch.labels.chunks(share).zip(batch.images.chunks((share * sample).max(1)));
        if devices == 1 {
            return shared.compute(0, &mut self.nets[0], batch.labels, batch.images, 0);
        }
        thread::scope(|scope| {
            let threads: Vec<_> = (self.nets.iter_mut().zip(parts).enumerate())
                .map(|(device, (net, (labels, images)))| {
                    let shared = &shared;
                    let first = device * share;
                    scope.spawn(move || shared.compute(device, net, labels, images, first))
                })
                .collect();
            let mut all = Loss::default();
            for thread in threads {
                // A device that panics has a bug; the panic goes on here.
                all += thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            }
            Ok(all)
        })
    }

    fn diverged(&self, loss: f64) -> TrainError {
        let broken = self.nets.iter().find_map(Net::first_not_finite);
        let place = broken.map_or(String::new(), |layer| {
            format!(" (the output of layer '{}' is not finite)", layer.name)
        });
        TrainError::Diverged { step: self.step, loss, place }
    }
}

impl Sync {
    fn session(&self) -> Option<&Session> {
        match self {
            Self::Poseidon(session) => Some(session),
            Self::Alone(_) => None,
        }
    }
}

/// What the devices of a worker share during a pass.
struct Shared<'a> {
    sync: &'a Sync,
    slots: &'a [Option<Slot>],
    log: &'a Log,
    overlap: Overlap,
    draw: Draw,
    slower: &'a Slower,
    phase: Phase,
}

impl Shared<'_> {
    /// One device's part of a pass.
    fn compute(
        &self,
        device: usize,
        net: &mut Net,
        labels: &[u32],
        images: &[f32],
        first: usize,
    ) -> Result<Loss, TrainError> {
        let draw = Draw { first: self.draw.first + first as u64, ..self.draw };
        let step = self.draw.step;
        let load = |why| TrainError::Load { step, why: Arc::new(why) };
        net.load(images, labels, draw).map_err(load)?;
        let trains = self.phase == Phase::Train;
        // One device stands for all in the log: they do the same at the same time.
        let mut passes = self.slower.passes(2 * self.slots.len());
        let mut note = |layer, what, start| {
            if trains {
                passes.end(start);
            }
            if trains && device == 0 {
                self.log.note(layer, what, start, Instant::now());
            }
        };
        let watched = self.sync.session().filter(|_| trains && device == 0);
        watched.inspect(|session| session.begin_pass(Pass::Forward));
        for layer in 0..self.slots.len() {
            match &self.slots[layer] {
                Some(slot) => {
                    let values = slot.values(self.sync, self.log)?;
                    let start = Instant::now();
                    net.forward(layer, &values, self.phase);
                    note(layer, What::Forward, start);
                    watched.inspect(|session| session.computed(slot.id));
                }
                None => {
                    let start = Instant::now();
                    net.forward(layer, &[], self.phase);
                    note(layer, What::Forward, start);
                }
            }
        }
        let loss = net.loss();
        if !trains || !loss.sum.is_finite() {
            return Ok(loss);
        }
        watched.inspect(|session| session.begin_pass(Pass::Backward));
        for layer in (0..self.slots.len()).rev() {
            let start = Instant::now();
            let Some(slot) = &self.slots[layer] else {
                net.backward_through(layer, &[], Gradient::None);
                note(layer, What::Backward, start);
                continue;
            };
            slot.backward(device, net, self.sync, self.log)?;
            note(layer, What::Backward, start);
            watched.inspect(|session| session.computed(slot.id));
            if slot.arrive() && self.overlap != Overlap::None {
                slot.send(self.sync, self.log, || net.factors(layer))?;
            }
        }
        if device == 0 {
            passes.keep();
        }
        watched.inspect(|session| session.end_pass());
        Ok(loss)
    }
}

fn model_error(error: ModelError) -> TrainError {
    TrainError::Model(Arc::new(error))
}
