//! Which chunks of a layer have come back, for a thread that carries them on.
//!
//! `landings_model.rs` compiles this file a second time, with loom's atomics.

use super::atomics::{AtomicU64, Ordering};

/// A bit for each chunk of a layer. Lanes set bits; one other thread takes them.
#[derive(Debug)]
pub(crate) struct Landings(Box<[AtomicU64]>);

impl Landings {
    /// For a layer of `chunks` chunks, none of which has landed.
    pub(crate) fn new(chunks: usize) -> Self {
        Self((0..chunks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// The result of chunk `index` is in its place.
    pub(crate) fn note(&self, index: u32) {
        let at = index as usize;
        self.0[at / 64].fetch_or(1 << (at % 64), Ordering::Release);
    }

    /// Gives `each` the chunks that were noted since the last call, in order.
    pub(crate) fn take(&self, mut each: impl FnMut(usize)) {
        for (word, bits) in self.0.iter().enumerate() {
            if bits.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = bits.swap(0, Ordering::Acquire);
            while bits != 0 {
                each(64 * word + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }
}
