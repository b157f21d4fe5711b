//! Images per second of forward and backward on one thread, without an optimizer.
//!
//! Run: cargo run -p poseidon-nn --example speed -- mlp 10 0.2
//!
//! The arguments are the name of a built-in model or a file, the batch size, and seconds; for figures
//! that mean something add `--release`. bench/peers/torch_engine.py does the same in PyTorch.

use poseidon_nn::{Draw, Gradient, Model, Net, Phase};
use std::error::Error;
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or("cifar10-quick".into());
    let batch: usize = arguments.next().map_or(Ok(100), |batch| batch.parse())?;
    let seconds: f64 = arguments.next().map_or(Ok(3.0), |seconds| seconds.parse())?;
    let model = Model::builtin(&name).map_or_else(|| Model::read(&name), Ok)?;

    let mut net = Net::new(&model, batch)?;
    let layers = net.layers().to_vec();
    let mut parameters: Vec<_> = layers.iter().map(|l| vec![0.0; l.parameters]).collect();
    let mut gradients = parameters.clone();
    for (layer, parameters) in parameters.iter_mut().enumerate() {
        net.fill(layer, 1, parameters);
    }
    let values = 0..batch * model.input.len();
    let images: Vec<f32> = values.map(|i| (i * 7919 % 256) as f32 / 128.0 - 1.0).collect();
    let labels: Vec<u32> = (0..batch).map(|i| (i % model.classes) as u32).collect();

    // Each layer's best step; other programs on the machine only ever make one slower.
    let mut forward = vec![Duration::MAX; layers.len()];
    let mut backward = forward.clone();
    let mut steps = Vec::new();
    let mut begin = None;
    for step in 0.. {
        let start = Instant::now();
        // The first steps bring memory and caches into their usual state and do not count.
        if step == 3 {
            begin = Some(start);
            steps.clear();
        }
        net.load(&images, &labels, Draw { seed: 1, step, first: 0, total: batch })?;
        let mut last = start;
        let mut lap = |best: &mut Duration| {
            let now = Instant::now();
            *best = (now - last).min(*best);
            last = now;
        };
        for (layer, parameters) in parameters.iter().enumerate() {
            net.forward(layer, parameters, Phase::Train);
            lap(&mut forward[layer]);
        }
        net.loss();
        for layer in (0..layers.len()).rev() {
            let gradient = Gradient::Full(&mut gradients[layer]);
            net.backward_through(layer, &parameters[layer], gradient);
            lap(&mut backward[layer]);
        }
        steps.push(start.elapsed());
        if begin.is_some_and(|begin| begin.elapsed().as_secs_f64() > seconds) {
            break;
        }
    }
    let per_image = |best: Duration| best.as_secs_f64() * 1e6 / batch as f64;
    println!("{:<10} {:<16} {:>12} {:>12}", "layer", "kind", "forward", "backward");
    for ((layer, forward), backward) in layers.iter().zip(&forward).zip(&backward) {
        let (forward, backward) = (per_image(*forward), per_image(*backward));
        println!("{:<10} {:<16} {forward:>9.1} us {backward:>9.1} us", layer.name, layer.kind);
    }
    steps.sort();
    let rate = |step: Duration| batch as f64 / step.as_secs_f64();
    println!(
        "{}: batch {batch}, {} steps, median {:.0} images/s, best {:.0}",
        model.name,
        steps.len(),
        rate(steps[steps.len() / 2]),
        rate(steps[0])
    );
    Ok(())
}
