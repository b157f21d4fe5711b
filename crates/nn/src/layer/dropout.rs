//! Dropout, in place. Which values are dropped depends on the draw and the sample's position in
//! the whole batch only, so it does not matter how many workers share the batch.

use crate::layer::draw::{Draw, generator};
use rand_chacha::rand_core::Rng;

pub(crate) struct Dropout {
    /// A value is dropped if 32 random bits are below this.
    threshold: u64,
    kept: f32,
    len: usize,
    /// What each value was multiplied with.
    mask: Vec<f32>,
}

impl Dropout {
    pub(crate) fn new(ratio: f32, len: usize, capacity: usize) -> Self {
        Self {
            threshold: (f64::from(ratio) * (1u64 << 32) as f64).round() as u64,
            kept: 1.0 / (1.0 - ratio),
            len,
            mask: vec![0.0; capacity * len],
        }
    }

    pub(crate) fn forward(&mut self, layer: usize, draw: Draw, x: &mut [f32]) {
        let samples = x.chunks_exact_mut(self.len).zip(self.mask.chunks_exact_mut(self.len));
        for (sample, (x, mask)) in (draw.first..).zip(samples) {
            let mut random = generator([draw.seed, draw.step, layer as u64, sample]);
            let mut bits = [0; 1024];
            for (x, mask) in x.chunks_mut(256).zip(mask.chunks_mut(256)) {
                random.fill_bytes(&mut bits);
                for ((x, mask), bits) in x.iter_mut().zip(mask).zip(bits.as_chunks().0) {
                    let dropped = u64::from(u32::from_le_bytes(*bits)) < self.threshold;
                    *mask = if dropped { 0.0 } else { self.kept };
                    *x *= *mask;
                }
            }
        }
    }

    pub(crate) fn backward(&self, gradient: &mut [f32]) {
        for (gradient, mask) in gradient.iter_mut().zip(&self.mask) {
            *gradient *= mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAW: Draw = Draw { seed: 1, step: 2, first: 10, total: 4 };

    fn drop(layer: usize, draw: Draw, samples: usize) -> Vec<f32> {
        let mut values = vec![1.0; samples * 1000];
        Dropout::new(0.25, 1000, samples).forward(layer, draw, &mut values);
        values
    }

    #[test]
    fn the_ratio_is_dropped_and_the_rest_makes_good_for_it() {
        let values = drop(0, DRAW, 20);
        let dropped = values.iter().filter(|&&v| v == 0.0).count();
        assert!((4_800..5_200).contains(&dropped), "{dropped}");
        assert!(values.iter().all(|&v| v == 0.0 || v == 1.0 / 0.75));
    }

    #[test]
    fn a_sample_draws_the_same_mask_wherever_it_is_computed() {
        let whole = drop(3, DRAW, 4);
        let half = drop(3, Draw { first: 12, ..DRAW }, 2);
        assert_eq!(whole[2000..], half);
        assert_ne!(whole, drop(4, DRAW, 4));
        assert_ne!(whole, drop(3, Draw { step: 3, ..DRAW }, 4));
        assert_ne!(whole, drop(3, Draw { seed: 2, ..DRAW }, 4));
    }
}
