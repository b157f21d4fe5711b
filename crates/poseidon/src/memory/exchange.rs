//! A layer's memory on its way through the lanes.
//!
//! The session lends the memory. Every chunk of it belongs to one lane. What is in the memory can
//! be reached in two ways only: by a lane through [`Lent`], and by whoever has the whole exchange
//! again.

use crate::Buffer;
use crate::memory::landings::Landings;
use crate::memory::region::Region;
use poseidon_core::store::Outcome;
use poseidon_core::wire::{Kind, Terms};
use poseidon_core::{Clock, Encoding, LayerId};
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
    pub(crate) gradient: LentBuffer,
    /// Where results go, if not into the gradient's memory. A chunk's result comes only after its
    /// contribution has been used.
    pub(crate) destination: Option<LentBuffer>,
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
        Self { layer, clock, kind, terms, gradient: values.into(), destination: None, landings }
    }
}

/// A buffer that lanes share. A shared reference to it tells how long it is, and no more: lanes may
/// be writing to it.
#[derive(Debug)]
pub(crate) struct LentBuffer(Buffer);

impl LentBuffer {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// What its elements are.
    pub(crate) fn encoding(&self) -> Encoding {
        self.0.encoding()
    }

    /// The buffer, which no lane has any more.
    pub(crate) fn into_buffer(self) -> Buffer {
        self.0
    }
}

impl From<Buffer> for LentBuffer {
    fn from(buffer: Buffer) -> Self {
        Self(buffer)
    }
}

/// One chunk of an exchange, as the lane it belongs to uses it.
#[derive(Debug)]
pub(crate) struct Lent {
    exchange: Arc<Exchange>,
    range: Range<usize>,
}

impl Lent {
    /// The elements `range` of an exchange.
    ///
    /// # Safety
    /// `range` is a chunk of the calling lane, which the session has lent and whose lane has not
    /// reported it done. A lane is one thread at a time. It makes no slice of the chunk while it
    /// has another one that is written to, be it of this value or of another for the same chunk. It
    /// keeps the exchange until links have taken all that they read from the chunk's regions and
    /// written all that goes to them.
    pub(crate) unsafe fn new(exchange: Arc<Exchange>, range: Range<usize>) -> Self {
        Self { exchange, range }
    }

    pub(crate) fn exchange(&self) -> &Exchange {
        &self.exchange
    }

    pub(crate) fn range(&self) -> &Range<usize> {
        &self.range
    }

    /// What this worker contributes; later, the sum made in the same place.
    pub(crate) fn gradient(&self) -> &[u8] {
        // SAFETY: the chunk belongs to this lane, which is not writing to it while it reads it.
        unsafe { self.exchange.gradient.0.chunk(self.range.clone()) }
    }

    /// Where the sum of a chunk of this node is made. Only memory of `f32`s is lent for a sum.
    pub(crate) fn sum(&mut self) -> &mut [f32] {
        // SAFETY: the chunk belongs to this lane, which holds one slice of it at a time.
        bytemuck::cast_slice_mut(unsafe { self.exchange.gradient.0.chunk_mut(self.range.clone()) })
    }

    /// Where the result goes.
    pub(crate) fn result(&mut self) -> &mut [u8] {
        let result = self.exchange.destination.as_ref().unwrap_or(&self.exchange.gradient);
        // SAFETY: as for `sum`.
        unsafe { result.0.chunk_mut(self.range.clone()) }
    }

    /// What this worker contributes, to be read by links; or the sum made in the same place.
    pub(crate) fn gradient_region(&self) -> Region {
        // SAFETY: the lane keeps the exchange until links have taken all that they read from it and all
        // results have landed, or the engine has let go of everything and closes the lane's channel.
        unsafe { self.exchange.gradient.0.region(self.range.clone()) }
    }

    /// Where the result goes, to be written by a link.
    pub(crate) fn result_region(&self) -> Region {
        let result = self.exchange.destination.as_ref().unwrap_or(&self.exchange.gradient);
        // SAFETY: as for `gradient_region`.
        unsafe { result.0.region(self.range.clone()) }
    }

    /// Puts the result of a chunk of this node where the training program wants it.
    pub(crate) fn land(mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Held(values) => self.result().copy_from_slice(values.bytes()),
            Outcome::Lent => {
                if let Some(result) = &self.exchange.destination {
                    // SAFETY: as for `sum`. Gradient and destination are two buffers, so these are
                    // slices of different memory.
                    unsafe { result.0.chunk_mut(self.range.clone()) }
                        .copy_from_slice(self.gradient());
                }
            }
            Outcome::Nothing => {}
        }
    }
}
