//! Two workers average their gradients.
//!
//! A training step in miniature: every layer's gradient is sent the moment its backward pass ends,
//! the last layer first; every layer's result is awaited just before the next forward pass needs
//! it, the first layer first. What comes back is the mean over all workers, in the memory that was
//! sent. `poseidon launch` starts the processes and tells each of them who it is; the same program
//! runs under torchrun, mpirun and srun, and, as a job of one worker, without any of them.
//!
//! Run: cargo run -q -p poseidon-cli -- launch -n 2 -- cargo run -q -p poseidon --example 01-two-workers

use poseidon::{Buffer, Config, Error, Layer, Session};
use std::mem::take;

/// Name and number of parameters, in forward order.
const LAYERS: [(&str, usize); 3] = [("conv", 500), ("fc1", 200_000), ("fc2", 10_000)];
const STEPS: usize = 3;

fn main() -> Result<(), Error> {
    let session = Session::builder(Config::from_env()?)
        .layers(LAYERS.map(|(name, len)| Layer::new(name, len)))
        .start()?;
    let layers = [session.layer("conv")?, session.layer("fc1")?, session.layer("fc2")?];
    let mut gradients = LAYERS.map(|(_, len)| Buffer::zeroed(len));

    for step in 0..STEPS {
        for (layer, gradient) in layers.iter().zip(&mut gradients).rev() {
            backward(gradient, session.rank(), step);
            // The buffer is lent until the layer is received. This returns at once: the lanes
            // work while the next layer's backward pass runs.
            session.send(*layer, take(gradient))?;
        }
        for (layer, gradient) in layers.iter().zip(&mut gradients) {
            *gradient = session.receive(*layer)?.result;
            check(gradient, session.workers(), step);
        }
    }

    println!("{STEPS} steps, {} layers: the mean of {} workers", LAYERS.len(), session.workers());
    session.finish()
}

/// Stands for a backward pass: values that depend on the worker, the step and the position.
fn backward(gradient: &mut [f32], rank: u16, step: usize) {
    for (i, value) in gradient.iter_mut().enumerate() {
        *value = f32::from(rank) + (step * 10 + i % 10) as f32;
    }
}

fn check(mean: &[f32], workers: usize, step: usize) {
    let mean_rank = (workers - 1) as f32 / 2.0;
    for (i, value) in mean.iter().enumerate() {
        let expected = mean_rank + (step * 10 + i % 10) as f32;
        assert!((value - expected).abs() < 1e-4, "element {i} is {value}, expected {expected}");
    }
}
