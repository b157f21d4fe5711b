//! The learning rates that steps are sent with.

use crate::{Error, Session};
use poseidon_core::LayerId;
use std::sync::atomic::{AtomicU32, Ordering};

/// By layer: the learning rate's bits. Written by the training program between steps.
pub(super) struct Rates(Vec<AtomicU32>);

impl Rates {
    pub(super) fn new(layers: usize, rate: f32) -> Self {
        Self((0..layers).map(|_| AtomicU32::new(rate.to_bits())).collect())
    }

    /// The rate of `layer`, which the session has.
    pub(super) fn get(&self, layer: LayerId) -> f32 {
        f32::from_bits(self.0[layer.index()].load(Ordering::Relaxed))
    }
}

impl Session {
    /// Changes the learning rate of the steps sent from now on, of every layer. Every worker must do
    /// so alike.
    pub fn set_learning_rate(&self, rate: f32) {
        self.rates.0.iter().for_each(|own| own.store(rate.to_bits(), Ordering::Relaxed));
    }

    /// Changes the learning rate of the steps of `layer` sent from now on. Every worker must do so
    /// alike.
    pub fn set_layer_learning_rate(&self, layer: LayerId, rate: f32) -> Result<(), Error> {
        let own = self.rates.0.get(layer.index());
        let own = own.ok_or_else(|| self.unknown(&format!("#{layer}")))?;
        own.store(rate.to_bits(), Ordering::Relaxed);
        Ok(())
    }
}
