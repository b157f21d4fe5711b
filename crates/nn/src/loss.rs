//! Softmax cross-entropy.

/// What a net made of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// Sum of the samples' losses, -ln of the probability given to the right class. NaN if the
    /// net computed a NaN or an infinity.
    pub sum: f64,
    /// Samples whose class has the highest score.
    pub correct: usize,
    /// Samples.
    pub count: usize,
}

impl Loss {
    /// Mean loss of a sample.
    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    /// Fraction of samples whose class has the highest score.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.count as f64
    }
}

impl std::ops::AddAssign for Loss {
    fn add_assign(&mut self, other: Self) {
        self.sum += other.sum;
        self.correct += other.correct;
        self.count += other.count;
    }
}

/// The loss of `scores`, a row for every label, and its gradient divided by `total`.
pub(crate) fn softmax_cross_entropy(
    scores: &[f32],
    labels: &[u32],
    total: usize,
    gradient: &mut [f32],
) -> Loss {
    let classes = scores.len() / labels.len().max(1);
    let mut loss = Loss { count: labels.len(), ..Loss::default() };
    let rows = scores.chunks_exact(classes.max(1)).zip(gradient.chunks_exact_mut(classes.max(1)));
    for ((scores, gradient), &label) in rows.zip(labels) {
        let label = label as usize;
        let mut best = 0;
        for (class, score) in scores.iter().enumerate() {
            if *score > scores[best] {
                best = class;
            }
        }
        loss.correct += usize::from(best == label);
        // In double precision and relative to the best: nothing overflows, and small losses are
        // not lost to rounding.
        let relative = |class: usize| f64::from(scores[class]) - f64::from(scores[best]);
        let sum: f64 = (0..classes).map(|class| relative(class).exp()).sum();
        loss.sum += sum.ln() - relative(label);
        for (class, gradient) in gradient.iter_mut().enumerate() {
            let wanted = f64::from(u8::from(class == label));
            *gradient = ((relative(class).exp() / sum - wanted) / total as f64) as f32;
        }
    }
    loss
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_and_gradient_of_known_scores() {
        let scores = [0.0, 2f32.ln(), 0.0, 1000.0, 0.0, 0.0];
        let mut gradient = [9.0; 6];
        let loss = softmax_cross_entropy(&scores, &[1, 1], 4, &mut gradient);
        assert!((loss.sum - (2f64.ln() + 1000.0)).abs() < 1e-6, "{loss:?}");
        assert_eq!((loss.correct, loss.count), (1, 2));
        let expected = [0.0625, -0.125, 0.0625, 0.25, -0.25, 0.0];
        for (got, expected) in gradient.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-7, "{gradient:?}");
        }
    }

    #[test]
    fn what_is_not_a_number_is_reported() {
        let mut gradient = [0.0; 2];
        for bad in [f32::NAN, f32::INFINITY] {
            for scores in [[bad, 0.0], [0.0, bad]] {
                let loss = softmax_cross_entropy(&scores, &[0], 1, &mut gradient);
                assert!(loss.sum.is_nan(), "{scores:?} {loss:?}");
            }
        }
    }
}
