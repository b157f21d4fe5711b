//! Gradients are what the loss does when parameters are moved a little.

mod batch;

use batch::Batch;
use poseidon_nn::{Draw, Model, Net};
use proptest::prelude::*;

/// A convolution, then `layers`, then an FC layer: the first one's gradient is right only if
/// `layers` pass theirs on as they should.
fn model(layers: &str) -> Model {
    let text = format!(
        r#"
        name = "test"
        input = [2, 6, 5]
        classes = 4
        [[layer]]
        name = "first"
        kind = "conv"
        outputs = 3
        kernel = 2
        pad = 1
        bias = {{ constant = 0.3 }}
        {layers}
        [[layer]]
        name = "last"
        kind = "fc"
        outputs = 4
        "#
    );
    Model::parse(&text, "test").unwrap()
}

fn check(layers: &str) {
    let model = model(layers);
    let mut net = Net::new(&model, 3).unwrap();
    let batch = Batch::new(&model, 3, 5);
    let mut parameters = batch::parameters(&net, 7);
    let mut gradients = parameters.clone();
    batch.load(&mut net);
    let loss = batch::step(&mut net, &parameters, &mut gradients);
    assert!(loss.mean() > 0.1, "{loss:?}");

    // Small enough that few ReLUs and maxima change sides, large enough for single precision.
    const STEP: f64 = 1.0 / 512.0;
    for layer in 0..parameters.len() {
        let largest = gradients[layer].iter().fold(0f64, |largest, x| largest.max(x.abs().into()));
        for i in 0..parameters[layer].len() {
            let before = parameters[layer][i];
            let mut slope = |step: f64| {
                parameters[layer][i] = before + step as f32;
                batch.load(&mut net);
                (batch::loss(&mut net, &parameters).mean() - loss.mean()) / step
            };
            let (left, right) = (slope(-STEP), slope(STEP));
            parameters[layer][i] = before;
            // The slopes to both sides differ where a ReLU or a maximum changes sides in between.
            let allowed = 5e-3 * largest;
            let (low, high) = (left.min(right) - allowed, left.max(right) + allowed);
            let got = f64::from(gradients[layer][i]);
            let name = &net.layers()[layer].name;
            assert!(low <= got && got <= high, "{name}[{i}]: {got}, slopes {left} and {right}");
        }
    }
}

#[test]
fn conv_and_fc() {
    check("");
}

#[test]
fn strided_conv() {
    check("[[layer]]\nname = 'conv'\nkind = 'conv'\noutputs = 5\nkernel = 3\nstride = 2\npad = 1");
}

#[test]
fn max_pool() {
    check(
        "[[layer]]\nname = 'pool'\nkind = 'pool'\nmethod = 'max'\nkernel = 3\nstride = 2\npad = 1",
    );
}

#[test]
fn average_pool() {
    check(
        "[[layer]]\nname = 'pool'\nkind = 'pool'\nmethod = 'average'\nkernel = 3\nstride = 2\npad = 1",
    );
}

#[test]
fn relu() {
    check("[[layer]]\nname = 'relu'\nkind = 'relu'");
}

#[test]
fn lrn() {
    check("[[layer]]\nname = 'lrn'\nkind = 'lrn'\nsize = 3\nalpha = 0.8");
}

#[test]
fn lrn_with_another_exponent() {
    check("[[layer]]\nname = 'lrn'\nkind = 'lrn'\nsize = 5\nalpha = 0.8\nbeta = 1.5\nk = 0.5");
}

#[test]
fn hidden_fc() {
    check(
        "[[layer]]\nname = 'fc'\nkind = 'fc'\noutputs = 6\n[[layer]]\nname = 'relu'\nkind = 'relu'",
    );
}

#[test]
fn dropout() {
    check("[[layer]]\nname = 'dropout'\nkind = 'dropout'\nratio = 0.4");
}

#[test]
fn all_together() {
    check(
        "[[layer]]\nname = 'relu'\nkind = 'relu'\n\
         [[layer]]\nname = 'dropout'\nkind = 'dropout'\n\
         [[layer]]\nname = 'lrn'\nkind = 'lrn'\nalpha = 0.5\n\
         [[layer]]\nname = 'relu2'\nkind = 'relu'\n\
         [[layer]]\nname = 'pool'\nkind = 'pool'\nmethod = 'max'\nkernel = 2\nstride = 2\n\
         [[layer]]\nname = 'dropout2'\nkind = 'dropout'\nratio = 0.2",
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Workers that share a batch compute what one worker would.
    #[test]
    fn parts_of_a_batch_sum_to_the_whole(samples in 2usize..9, cut in 1usize..8, seed: u64) {
        let cut = cut.min(samples - 1);
        let model = model(
            "[[layer]]\nname = 'pool'\nkind = 'pool'\nmethod = 'max'\nkernel = 3\nstride = 2\n\
             [[layer]]\nname = 'relu'\nkind = 'relu'\n\
             [[layer]]\nname = 'dropout'\nkind = 'dropout'\n\
             [[layer]]\nname = 'fc'\nkind = 'fc'\noutputs = 20\n\
             [[layer]]\nname = 'dropout2'\nkind = 'dropout'\nratio = 0.3",
        );
        let batch = Batch::new(&model, samples, seed);
        let len = model.input.len();
        let part = |from: usize, to: usize| {
            let mut net = Net::new(&model, to - from).unwrap();
            let parameters = batch::parameters(&net, 1);
            let mut gradients = parameters.clone();
            let draw = Draw { seed, step: 9, first: 100 + from as u64, total: samples };
            net.load(&batch.images[from * len..to * len], &batch.labels[from..to], draw).unwrap();
            let loss = batch::step(&mut net, &parameters, &mut gradients);
            (loss, gradients)
        };
        let (whole, whole_gradients) = part(0, samples);
        let (mut sum, mut sum_gradients) = part(0, cut);
        let (loss, gradients) = part(cut, samples);
        sum += loss;
        prop_assert!((sum.sum - whole.sum).abs() < 1e-5 * whole.sum);
        prop_assert_eq!((sum.correct, sum.count), (whole.correct, whole.count));
        for (sum, gradient) in sum_gradients.iter_mut().flatten().zip(gradients.iter().flatten()) {
            *sum += gradient;
        }
        for (sum, whole) in sum_gradients.iter().zip(&whole_gradients) {
            batch::assert_close(sum, whole, 1e-5, "a layer");
        }
    }
}
