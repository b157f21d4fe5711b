//! Batches for tests, and one training step on them.

#![allow(dead_code, reason = "each test uses its own part")]

use poseidon_nn::{Draw, Gradient, Loss, Model, Net, Phase};

/// Images and their labels.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) images: Vec<f32>,
    pub(crate) labels: Vec<u32>,
}

impl Batch {
    /// `samples` images of numbers between -1 and 1 that look random, the same for the same seed.
    pub(crate) fn new(model: &Model, samples: usize, seed: u64) -> Self {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32
        };
        let images = (0..samples * model.input.len())
            .map(|_| next() as f32 / (1u32 << 30) as f32 - 1.0)
            .collect();
        let labels = (0..samples).map(|_| next() % model.classes as u32).collect();
        Self { images, labels }
    }

    /// Loads it as a batch of its own.
    pub(crate) fn load(&self, net: &mut Net) {
        let draw = Draw { seed: 3, step: 4, first: 0, total: self.labels.len() };
        net.load(&self.images, &self.labels, draw).unwrap();
    }
}

/// What the model's fillers make of `seed`.
pub(crate) fn parameters(net: &Net, seed: u64) -> Vec<Vec<f32>> {
    let lens = net.layers().iter().map(|layer| layer.parameters);
    let mut parameters: Vec<_> = lens.map(|len| vec![0.0; len]).collect();
    for (layer, parameters) in parameters.iter_mut().enumerate() {
        net.fill(layer, seed, parameters);
    }
    parameters
}

/// Forward through all layers.
pub(crate) fn loss(net: &mut Net, parameters: &[Vec<f32>]) -> Loss {
    for (layer, parameters) in parameters.iter().enumerate() {
        net.forward(layer, parameters, Phase::Train);
    }
    net.loss()
}

/// Forward and backward through all layers.
pub(crate) fn step(net: &mut Net, parameters: &[Vec<f32>], gradients: &mut [Vec<f32>]) -> Loss {
    let loss = loss(net, parameters);
    for layer in (0..parameters.len()).rev() {
        let gradient = Gradient::Full(&mut gradients[layer]);
        net.backward_through(layer, &parameters[layer], gradient);
    }
    loss
}

/// Fails if a value is off by more than `tolerance` times the largest.
pub(crate) fn assert_close(got: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        // Not `>`: NaN must fail.
        let close = (got - expected).abs() <= tolerance * largest;
        assert!(close, "{what}[{i}]: {got} against {expected}, the largest is {largest}");
    }
}
