//! VGG19 for tests, with compute shared out by operations.

use poseidon_core::LayerKind;
use poseidon_sim::{LayerTime, Model, ModelLayer};

/// VGG19 with a classifier of `classes` classes.
pub(crate) fn vgg19(classes: usize) -> Model {
    let conv = [
        (3, 64, 224),
        (64, 64, 224),
        (64, 128, 112),
        (128, 128, 112),
        (128, 256, 56),
        (256, 256, 56),
        (256, 256, 56),
        (256, 256, 56),
        (256, 512, 28),
        (512, 512, 28),
        (512, 512, 28),
        (512, 512, 28),
        (512, 512, 14),
        (512, 512, 14),
        (512, 512, 14),
        (512, 512, 14),
    ];
    let layer = |name, kind, weights: usize, biases: usize, uses: f64| {
        let forward_flops = 2.0 * weights as f64 * uses;
        let (parameters, backward_flops) = (weights + biases, 2.0 * forward_flops);
        ModelLayer { name, kind, parameters, rows: 1, forward_flops, backward_flops }
    };
    let conv = conv.iter().zip(1..).map(|(&(from, to, side), n)| {
        let uses = f64::from(side) * f64::from(side);
        layer(format!("conv{n}"), LayerKind::Conv, from * to * 9, to, uses)
    });
    let fc = [(4096, 25088), (4096, 4096), (classes, 4096)];
    let fc = fc
        .iter()
        .zip(6..)
        .map(|(&(m, n), i)| layer(format!("fc{i}"), LayerKind::Fc { m, n }, m * n, m, 1.0));
    Model { name: "vgg19".into(), layers: conv.chain(fc).collect() }
}

/// A step of `seconds` shared out by operations.
pub(crate) fn times(model: &Model, seconds: f64) -> Vec<LayerTime> {
    let flops = model.layers.iter().map(|l| l.forward_flops + l.backward_flops).sum::<f64>();
    let time = |flops_here: f64| seconds * flops_here / flops;
    let layers = model.layers.iter();
    layers
        .map(|l| LayerTime { forward: time(l.forward_flops), backward: time(l.backward_flops) })
        .collect()
}
