//! One layer's parameters on a worker: where they are, and what its devices make of them.

use super::log::{Log, What};
use super::{Sync, TrainError};
use crate::net::Factors;
use crate::{Gradient, Net};
use poseidon::{Buffer, Clock, LayerId, Optimizer, Scheme, Session};
use poseidon_core::optim::{self, Step, state_of};
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

/// A layer with parameters.
pub(super) struct Slot {
    /// Its place in the net.
    pub(super) layer: usize,
    /// Its id in the job.
    pub(super) id: LayerId,
    by_factors: bool,
    /// `None` while the layer is in flight. Whoever needs it then waits for it.
    values: RwLock<Option<Buffer>>,
    /// By device: what it contributes.
    work: Vec<Mutex<Work>>,
    /// Devices that take part in this pass, and those that are not done with this layer's backward.
    present: AtomicUsize,
    awaited: AtomicUsize,
    /// When it was sent.
    sent: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Work {
    gradient: Buffer,
    /// Copies of a device's factors, if there are several devices.
    u: Vec<f32>,
    v: Vec<f32>,
}

/// The optimizer of a worker that trains without Poseidon.
pub(super) struct Alone {
    optimizer: Optimizer,
    /// Bits of the learning rate.
    rate: AtomicU32,
    /// By layer: clock and optimizer state.
    layers: Vec<Mutex<(Clock, Vec<Vec<f32>>)>>,
}

/// The slots of `net`, by layer.
pub(super) fn slots(
    net: &Net,
    devices: usize,
    session: Option<&Session>,
) -> Result<Vec<Option<Slot>>, TrainError> {
    let mut count = 0;
    let mut slots = Vec::new();
    for (layer, info) in net.layers().iter().enumerate() {
        if info.parameters == 0 {
            slots.push(None);
            continue;
        }
        let id = LayerId(count);
        count += 1;
        let by_factors = match session {
            Some(session) => session.scheme(id)? == Scheme::Sfb,
            None => false,
        };
        // Factors need no room for a gradient.
        let room = if by_factors { 0 } else { info.parameters };
        let work = || Mutex::new(Work { gradient: Buffer::zeroed(room), ..Work::default() });
        slots.push(Some(Slot {
            layer,
            id,
            by_factors,
            values: RwLock::new(None),
            work: (0..devices).map(|_| work()).collect(),
            present: AtomicUsize::new(0),
            awaited: AtomicUsize::new(0),
            sent: Mutex::new(None),
        }));
    }
    Ok(slots)
}

/// A layer's parameters, on loan.
pub(super) struct Values<'a>(RwLockReadGuard<'a, Option<Buffer>>);

impl Deref for Values<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.0.as_ref().expect("values are lent only while they are here")
    }
}

impl Slot {
    /// The parameters; waits for them if they are in flight.
    pub(super) fn values(&self, sync: &Sync, log: &Log) -> Result<Values<'_>, TrainError> {
        loop {
            let values = self.values.read().unwrap_or_else(PoisonError::into_inner);
            if values.is_some() {
                return Ok(Values(values));
            }
            drop(values);
            self.settle(sync, log)?;
        }
    }

    /// Calls `look` with the parameters, if they are here.
    pub(super) fn with_values(&self, look: impl FnOnce(&[f32])) {
        let values = self.values.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(values) = &*values {
            look(values);
        }
    }

    /// Waits for the layer if it is in flight.
    pub(super) fn settle(&self, sync: &Sync, log: &Log) -> Result<(), TrainError> {
        let mut values = self.values.write().unwrap_or_else(PoisonError::into_inner);
        let Sync::Poseidon(session) = sync else { return Ok(()) };
        if values.is_some() {
            return Ok(()); // another device was faster
        }
        let asked = Instant::now();
        let received = session.receive(self.id)?;
        let here = Instant::now();
        // What is left of the rebuilding when the layer is needed is waited for like computing.
        let rebuilt = received.rebuilt.unwrap_or(here..here);
        let needed = rebuilt.start.clamp(asked, here);
        log.note(self.layer, What::Wait, asked, needed);
        log.note(self.layer, What::Rebuild, needed, rebuilt.end);
        log.note(self.layer, What::RebuildBeside, rebuilt.start, rebuilt.end.min(asked));
        if let Some(sent) = lock(&self.sent).take() {
            log.note(self.layer, What::Sync, sent, received.landed);
        }
        if let Some(gradient) = received.gradient {
            lock(&self.work[0]).gradient = gradient;
        }
        *values = Some(received.result);
        Ok(())
    }

    /// Keeps these as the layer's parameters.
    pub(super) fn fill(&self, values: Buffer) {
        *self.values.write().unwrap_or_else(PoisonError::into_inner) = Some(values);
    }

    /// `devices` devices take part in the next pass.
    pub(super) fn expect(&self, devices: usize) {
        self.present.store(devices, Ordering::Relaxed);
        self.awaited.store(devices, Ordering::Relaxed);
    }

    /// One device's backward through this layer.
    pub(super) fn backward(
        &self,
        device: usize,
        net: &mut Net,
        sync: &Sync,
        log: &Log,
    ) -> Result<(), TrainError> {
        let values = self.values(sync, log)?;
        let mut work = lock(&self.work[device]);
        let work = &mut *work;
        if !self.by_factors {
            net.backward_through(self.layer, &values, Gradient::Full(&mut work.gradient));
            return Ok(());
        }
        net.backward_through(self.layer, &values, Gradient::Factors);
        if self.present.load(Ordering::Relaxed) > 1 {
            let factors = net.factors(self.layer);
            factors.u.clone_into(&mut work.u);
            factors.v.clone_into(&mut work.v);
        }
        Ok(())
    }

    /// A device is done with this layer's backward. True for the last one.
    pub(super) fn arrive(&self) -> bool {
        self.awaited.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Sends what the devices have computed. `factors` are the only device's.
    pub(super) fn send<'a>(
        &self,
        sync: &Sync,
        log: &Log,
        factors: impl FnOnce() -> Factors<'a>,
    ) -> Result<(), TrainError> {
        let mut values = self.values.write().unwrap_or_else(PoisonError::into_inner);
        let devices = self.present.load(Ordering::Relaxed);
        let mut works: Vec<_> = self.work[..devices].iter().map(lock).collect();
        if !self.by_factors {
            // In the order of devices, so that runs repeat.
            let (first, others) = works.split_first_mut().expect("at least one device computes");
            others.iter().for_each(|other| optim::add(&mut first.gradient, &other.gradient));
        }
        let session = match sync {
            Sync::Poseidon(session) => session,
            Sync::Alone(alone) => {
                let start = Instant::now();
                let parameters = values.as_mut().expect("nothing is ever in flight alone");
                alone.apply(self.id, parameters, &works[0].gradient);
                log.note(self.layer, What::Rebuild, start, Instant::now());
                return Ok(());
            }
        };
        let parameters = values.take().expect("a layer is sent once per step");
        *lock(&self.sent) = Some(Instant::now());
        if !self.by_factors {
            let gradient = std::mem::take(&mut works[0].gradient);
            return Ok(session.send_into(self.id, gradient, parameters)?);
        }
        let parts: Vec<poseidon::Factors<'_>> = match devices {
            1 => {
                let Factors { u, v, .. } = factors();
                vec![poseidon::Factors { u, v }]
            }
            _ => works.iter().map(|w| poseidon::Factors { u: &w.u, v: &w.v }).collect(),
        };
        session.send_factors(self.id, &parts, parameters)?;
        Ok(session.rebuild(self.id)?)
    }
}

impl Alone {
    pub(super) fn new(optimizer: Optimizer, layers: usize) -> Self {
        let layers = (0..layers).map(|_| Mutex::default()).collect();
        Self { optimizer, rate: AtomicU32::new(0), layers }
    }

    pub(super) fn set_learning_rate(&self, rate: f32) {
        self.rate.store(rate.to_bits(), Ordering::Relaxed);
    }

    fn apply(&self, layer: LayerId, parameters: &mut [f32], gradient: &[f32]) {
        let mut layer = lock(&self.layers[layer.index()]);
        let (clock, state) = &mut *layer;
        if *clock == Clock(0) {
            *state = vec![vec![0.0; parameters.len()]; self.optimizer.state_vectors()];
        }
        *clock = clock.next();
        self.optimizer.step(Step {
            parameters,
            sum: gradient,
            scale: 1.0,
            rate: f32::from_bits(self.rate.load(Ordering::Relaxed)),
            clock: *clock,
            state: state_of(state),
        });
    }
}

/// A panic elsewhere is reported there; what it left behind is not used again.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
