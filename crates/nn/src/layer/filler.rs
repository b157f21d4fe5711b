//! What parameters start from.

use crate::layer::draw::generator;
use crate::spec::{Filler, LayerSpec};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::Rng;

/// Fills weights, then biases, of the layer at position `layer` of its net. Layers without
/// parameters take an empty slice.
pub(crate) fn fill(spec: &LayerSpec, layer: usize, seed: u64, parameters: &mut [f32]) {
    let (LayerSpec::Conv { outputs, weights, bias, .. }
    | LayerSpec::Fc { outputs, weights, bias, .. }) = spec
    else {
        return;
    };
    // Dropout counts steps and samples in these places; they do not get this far.
    let mut random = generator([seed, u64::MAX, layer as u64, u64::MAX]);
    let count = parameters.len() - outputs;
    let inputs = count / outputs;
    weights.draw(&mut random, inputs, &mut parameters[..count]);
    bias.draw(&mut random, inputs, &mut parameters[count..]);
}

impl Filler {
    fn draw(self, random: &mut ChaCha8Rng, inputs: usize, values: &mut [f32]) {
        match self {
            Self::Xavier => {
                let limit = (3.0 / inputs as f64).sqrt();
                values.fill_with(|| ((2.0 * uniform(random) - 1.0) * limit) as f32);
            }
            Self::Gaussian(deviation) => {
                values.fill_with(|| (normal(random) * f64::from(deviation)) as f32);
            }
            Self::Constant(value) => values.fill(value),
        }
    }
}

/// In [0, 1).
fn uniform(random: &mut ChaCha8Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Mean 0, deviation 1: Box and Muller's transform, of which one half is enough here.
fn normal(random: &mut ChaCha8Rng) -> f64 {
    let radius = (-2.0 * (1.0 - uniform(random)).ln()).sqrt();
    radius * (std::f64::consts::TAU * uniform(random)).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conv(weights: Filler, bias: Filler) -> LayerSpec {
        let (stride, pad) = (1, 0);
        LayerSpec::Conv { name: "c".into(), outputs: 100, kernel: 5, stride, pad, weights, bias }
    }

    fn moments(values: &[f32]) -> (f64, f64) {
        let mean = |f: &dyn Fn(f64) -> f64| {
            values.iter().map(|&x| f(x.into())).sum::<f64>() / values.len() as f64
        };
        let m = mean(&|x| x);
        (m, mean(&|x| (x - m).powi(2)))
    }

    #[test]
    fn xavier_is_uniform_with_variance_one_over_inputs() {
        let mut values = vec![0.0; 100 * (20 * 25) + 100];
        fill(&conv(Filler::Xavier, Filler::Constant(0.5)), 3, 1, &mut values);
        let (weights, bias) = values.split_at(50_000);
        let limit = (3.0f32 / 500.0).sqrt();
        assert!(weights.iter().all(|w| w.abs() <= limit));
        assert!(weights.iter().any(|w| w.abs() > 0.999 * limit));
        let (mean, variance) = moments(weights);
        assert!(mean.abs() < 1e-3, "{mean}");
        assert!((variance * 500.0 - 1.0).abs() < 0.02, "{variance}");
        assert!(bias.iter().all(|&b| b == 0.5));
    }

    #[test]
    fn gaussian_has_the_deviation_it_was_given() {
        let mut values = vec![0.0; 50_100];
        fill(&conv(Filler::Gaussian(0.01), Filler::Gaussian(0.0)), 0, 7, &mut values);
        let (mean, variance) = moments(&values[..50_000]);
        assert!(mean.abs() < 2e-4, "{mean}");
        assert!((variance / 1e-4 - 1.0).abs() < 0.03, "{variance}");
        // A normal distribution has 4.6% beyond two deviations, a uniform one none.
        let beyond = values[..50_000].iter().filter(|v| v.abs() > 0.02).count();
        assert!((2_000..2_600).contains(&beyond), "{beyond}");
    }

    #[test]
    fn seed_and_layer_make_a_difference_and_nothing_else_does() {
        let draw = |layer, seed| {
            let mut values = vec![0.0; 600];
            fill(&conv(Filler::Xavier, Filler::Xavier), layer, seed, &mut values);
            values
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(2, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
    }
}
