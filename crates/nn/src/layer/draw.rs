//! Where random numbers come from.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// Which random numbers a batch uses, and what its mean is taken over. Equal for equal samples,
/// however many workers share a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Draw {
    /// The run's seed.
    pub seed: u64,
    /// The training step.
    pub step: u64,
    /// Position of this batch's first sample in the batch of all workers.
    pub first: u64,
    /// Samples of all workers: gradients are those of the sum of losses, divided by this.
    pub total: usize,
}

/// A generator whose values depend on all of `words` and on nothing else.
pub(super) fn generator(words: [u64; 4]) -> ChaCha8Rng {
    let mut key = [0; 32];
    for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}
