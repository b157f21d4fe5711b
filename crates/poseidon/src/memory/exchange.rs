//! A layer's memory on its way through the lanes.
//!
//! The session lends the memory. Every chunk of it belongs to one lane. All access goes through
//! [`Lent`], so the lanes themselves are safe code.

use crate::Buffer;
use crate::memory::landings::Landings;
use crate::memory::region::Region;
use poseidon_core::store::Outcome;
use poseidon_core::wire::{Kind, Terms};
use poseidon_core::{Clock, LayerId};
use std::ops::Range;
use std::sync::Arc;

/// One layer's memory while it is in flight. The session and the lanes share it.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) layer: LayerId,
    pub(crate) clock: Clock,
    pub(crate) kind: Kind,
    /// The step's learning rate, and what is asked of the step.
    pub(crate) terms: Terms,
    /// What this worker contributes. Sums of chunks that live on this node are made in it.
    pub(crate) gradient: Buffer,
    /// Where results go, if not into the gradient's memory. A chunk's result comes only after its
    /// contribution has been used.
    pub(crate) destination: Option<Buffer>,
    /// If results go on to a device: where lanes note which chunks have come.
    pub(crate) landings: Option<Arc<Landings>>,
}

impl Exchange {
    /// Worker 0's values go to everybody, and to the shards.
    pub(crate) fn of_initial_values(
        layer: LayerId,
        values: Buffer,
        landings: Option<Arc<Landings>>,
    ) -> Self {
        let (clock, kind, terms) = (Clock(0), Kind::Init, Terms::default());
        Self { layer, clock, kind, terms, gradient: values, destination: None, landings }
    }
}

/// One chunk of an exchange, as the lane it belongs to uses it.
///
/// Whoever makes a `Lent` promises that `range` is a chunk of the calling lane. A lane is one
/// thread at a time, and the slices below are borrowed for one call at a time. So nobody else
/// touches the chunk until the lane has let go of the exchange.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) exchange: Arc<Exchange>,
    pub(crate) range: Range<usize>,
}

impl Lent {
    /// What this worker contributes; later, the sum made in the same place.
    pub(crate) fn gradient(&self) -> &[u8] {
        // SAFETY: the chunk belongs to this lane, which is not writing to it while it reads it.
        unsafe { self.exchange.gradient.chunk(self.range.clone()) }
    }

    /// Where the sum of a chunk of this node is made. Only memory of `f32`s is lent for a sum.
    pub(crate) fn sum(&mut self) -> &mut [f32] {
        // SAFETY: the chunk belongs to this lane, which holds one slice of it at a time.
        bytemuck::cast_slice_mut(unsafe { self.exchange.gradient.chunk_mut(self.range.clone()) })
    }

    /// Where the result goes.
    pub(crate) fn result(&mut self) -> &mut [u8] {
        let result = self.exchange.destination.as_ref().unwrap_or(&self.exchange.gradient);
        // SAFETY: as for `sum`.
        unsafe { result.chunk_mut(self.range.clone()) }
    }

    /// What this worker contributes, to be read by links; or the sum made in the same place.
    pub(crate) fn gradient_region(&self) -> Region {
        // SAFETY: the lane keeps the exchange until links have taken all that they read from it and all
        // results have landed, or the engine has let go of everything and closes the lane's channel.
        unsafe { self.exchange.gradient.region(self.range.clone()) }
    }

    /// Where the result goes, to be written by a link.
    pub(crate) fn result_region(&self) -> Region {
        let result = self.exchange.destination.as_ref().unwrap_or(&self.exchange.gradient);
        // SAFETY: as for `gradient_region`.
        unsafe { result.region(self.range.clone()) }
    }

    /// Puts the result of a chunk of this node where the training program wants it.
    pub(crate) fn land(self, outcome: &Outcome) {
        let mut to = Self { exchange: self.exchange.clone(), range: self.range.clone() };
        match outcome {
            Outcome::Held(values) => to.result().copy_from_slice(values.bytes()),
            // Gradient and destination are two buffers, so these are slices of different memory.
            Outcome::Lent if self.exchange.destination.is_some() => {
                to.result().copy_from_slice(self.gradient());
            }
            Outcome::Lent | Outcome::Nothing => {}
        }
    }
}
