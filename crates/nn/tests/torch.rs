//! Losses and gradients are PyTorch's, for the nets of torch_reference.py.

mod batch;

use batch::Batch;
use poseidon_nn::{Gradient, Model, Net, Phase};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::path::Path;

/// Relative to a tensor's largest value.
const TOLERANCE: f32 = 1e-4;

#[test]
fn quick() {
    check("quick");
}

#[test]
fn wide() {
    check("wide");
}

#[test]
fn strided() {
    check("strided");
}

#[test]
fn pools() {
    check("pools");
}

#[test]
fn mlp() {
    check("mlp");
}

fn check(name: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference");
    let bytes = std::fs::read(folder.join(name).with_extension("safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let text = &header.metadata().as_ref().unwrap()["model"];
    let tensor = |name: &str| file.tensor(name).unwrap();

    let model = Model::parse(text, name).unwrap();
    let labels: Vec<u32> = words(&tensor("labels")).collect();
    let batch = Batch { images: floats(&tensor("images")), labels };
    // Larger than the batch: the rest must stay out of it.
    let mut net = Net::new(&model, 5).unwrap();
    let layers = net.layers().to_vec();
    let parameters: Vec<Vec<f32>> = layers
        .iter()
        .map(|layer| match layer.parameters {
            0 => Vec::new(),
            _ => floats(&tensor(&format!("{}.parameters", layer.name))),
        })
        .collect();

    batch.load(&mut net);
    let mut gradients = parameters.clone();
    let loss = batch::step(&mut net, &parameters, &mut gradients);
    let expected = f64::from_le_bytes(tensor("loss").data().try_into().unwrap());
    assert!((loss.mean() / expected - 1.0).abs() < 1e-6, "{} against {expected}", loss.mean());
    for (layer, gradient) in layers.iter().zip(&gradients).filter(|(l, _)| l.parameters > 0) {
        let expected = floats(&tensor(&format!("{}.gradient", layer.name)));
        batch::assert_close(gradient, &expected, TOLERANCE, &layer.name);
    }

    // Once more with factors, from which the same gradient can be made.
    for (layer, parameters) in parameters.iter().enumerate() {
        net.forward(layer, parameters, Phase::Train);
    }
    net.loss();
    for layer in (0..layers.len()).rev() {
        let Some((m, n)) = layers[layer].fc else {
            net.backward_through(layer, &parameters[layer], Gradient::None);
            continue;
        };
        net.backward_through(layer, &parameters[layer], Gradient::Factors);
        let factors = net.factors(layer);
        assert_eq!(factors.rows, 3);
        let mut rebuilt = vec![0.0; m * n + m];
        for (u, v) in factors.u.chunks_exact(m).zip(factors.v.chunks_exact(n)) {
            for (output, u) in u.iter().enumerate() {
                let row = &mut rebuilt[output * n..][..n];
                row.iter_mut().zip(v).for_each(|(sum, v)| *sum += u * v);
                rebuilt[m * n + output] += u;
            }
        }
        batch::assert_close(&rebuilt, &gradients[layer], 1e-5, &layers[layer].name);
    }
}

fn words(tensor: &TensorView<'_>) -> impl Iterator<Item = u32> {
    tensor.data().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes))
}

fn floats(tensor: &TensorView<'_>) -> Vec<f32> {
    words(tensor).map(f32::from_bits).collect()
}
