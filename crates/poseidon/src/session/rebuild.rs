//! From factors to a gradient, and from there to what the training program gets back.
//!
//! One matrix product over all workers' rows (8 products of 32 rows take nearly twice as long as
//! one of 256); an optimizer takes pieces of it as they are computed. The product runs on the
//! session's rebuild thread or on the thread that receives the layer, never on a lane. Every worker
//! does the same on the same numbers in the same order, and on tiles only if all can, so replicas
//! stay equal bit by bit.

use poseidon_core::factors::Layout;
use poseidon_core::optim::{Step, add, scale};
use poseidon_core::{Clock, Optimizer};
use poseidon_matrix::{Matrix, Product};

/// What a worker keeps of a layer that goes by factors: its optimizer's state, which for other
/// layers is on the shards.
#[derive(Debug, Default)]
pub(crate) struct Rebuilder {
    /// Vectors as long as the layer; none before the first step.
    pub(crate) state: Vec<Vec<f32>>,
}

/// How a step is taken.
pub(crate) struct Rule<'a> {
    pub(crate) optimizer: &'a Optimizer,
    pub(crate) rate: f32,
    /// Steps taken with this one, those before this session included.
    pub(crate) clock: Clock,
    pub(crate) threads: usize,
    /// Whether the product may be computed on tiles.
    pub(crate) tiles: bool,
}

impl Rebuilder {
    /// Replaces `values` by the reduced gradient or, if the optimizer has parameters, takes them one
    /// step on, piece by piece of the gradient. `matrix` is everybody's rows; `values` is M x N weights
    /// and perhaps M biases.
    ///
    /// For a mean, the left columns of `matrix` are scaled instead of the gradient if that is
    /// exact: they have far fewer numbers than the gradient.
    pub(crate) fn apply(
        &mut self,
        matrix: &mut [f32],
        layout: &Layout,
        rule: &Rule<'_>,
        values: &mut [f32],
    ) {
        let Layout { m, n, workers, .. } = *layout;
        let Rule { optimizer, rate, clock, threads, tiles } = *rule;
        let width = layout.width();
        let factor = optimizer.reduction().scale(workers);
        let (before, after) = if workers.is_power_of_two() { (factor, 1.0) } else { (1.0, factor) };
        if before != 1.0 {
            matrix.chunks_exact_mut(width).for_each(|row| scale(&mut row[..m], before));
        }
        let rows = Matrix::row_major(matrix, matrix.len() / width, width);
        let (u, v) = (rows.columns(0..m), rows.columns(m..m + n));
        let product = Product::new(u.transposed(), v).threads(threads).allow_tiles(tiles);
        let sum_of_biases = |sum: &mut [f32]| {
            sum.fill(0.0);
            matrix.chunks_exact(width).for_each(|row| add(sum, &row[..m]));
        };
        if optimizer.is_stateless() {
            let (weights, bias) = values.split_at_mut(m * n);
            product.write_to(weights);
            if !bias.is_empty() {
                sum_of_biases(bias);
            }
            if after != 1.0 {
                scale(values, after);
            }
            return;
        }
        if self.state.is_empty() {
            self.state = vec![vec![0.0; values.len()]; optimizer.state_vectors()];
        }
        let step = |sum: &[f32], [parameters, state @ ..]: [&mut [f32]; PARTS]| {
            optimizer.step(Step { parameters, sum, scale: after, rate, clock, state });
        };
        let mut weights: [&mut [f32]; PARTS] = Default::default();
        let mut bias: [&mut [f32]; PARTS] = Default::default();
        let state = self.state.iter_mut().map(|vector| &mut vector[..]);
        for (part, whole) in std::iter::once(values).chain(state).enumerate() {
            (weights[part], bias[part]) = whole.split_at_mut(m * n);
        }
        product.update(weights, step);
        if !bias[0].is_empty() {
            let mut sum = vec![0.0; m];
            sum_of_biases(&mut sum);
            step(&sum, bias);
        }
    }
}

/// What a step changes: the parameters, and the optimizer's state.
const PARTS: usize = 1 + Optimizer::MOST_STATE_VECTORS;

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::optim::state_of;
    use poseidon_core::{ChunkSize, Cluster, Reduction, Servers};

    fn layout(m: usize, n: usize, batch: usize, workers: u16) -> Layout {
        let cluster = Cluster::new(workers, Servers::Colocated, 1).unwrap();
        Layout::new((m, n), batch, &cluster, ChunkSize::default(), 0)
    }

    /// Small integers: products and sums are exact in any order.
    fn numbers(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7 + i / 3) % 11) as f32 - 5.0).collect()
    }

    fn expected(matrix: &[f32], layout: &Layout) -> Vec<f32> {
        let (m, n) = (layout.m, layout.n);
        let mut values = vec![0.0; m * n + m];
        for row in matrix.chunks_exact(m + n) {
            for i in 0..m {
                for j in 0..n {
                    values[i * n + j] += row[i] * row[m + j];
                }
                values[m * n + i] += row[i];
            }
        }
        values
    }

    #[test]
    fn a_sum_of_outer_products_with_and_without_bias() {
        for (m, n, batch, workers) in [(1, 1, 1, 2), (3, 5, 2, 3), (700, 9, 4, 2), (1025, 33, 1, 3)]
        {
            let layout = layout(m, n, batch, workers);
            let mut matrix = numbers(layout.len());
            let sum = Optimizer::Reduce(Reduction::Sum);
            let rule =
                Rule { optimizer: &sum, rate: 0.0, clock: Clock(1), threads: 1, tiles: true };
            let expected = expected(&matrix, &layout);
            for len in [m * n, m * n + m] {
                let mut values = vec![f32::NAN; len];
                Rebuilder::default().apply(&mut matrix, &layout, &rule, &mut values);
                assert_eq!(values, expected[..len], "{m} x {n}");
            }
        }
    }

    #[test]
    fn parameters_take_the_steps_the_optimizer_would_take_on_the_whole_gradient() {
        let layout = layout(600, 7, 3, 2);
        let optimizer: Optimizer = "sgd:momentum=0.5,weight-decay=0.25".parse().unwrap();
        let mut rebuilder = Rebuilder::default();
        let mut values = numbers(600 * 7 + 600);
        let mut parameters = values.clone();
        let mut state = vec![vec![0.0; values.len()]];
        for clock in 1..4 {
            let mut matrix: Vec<f32> = numbers(layout.len() + clock).split_off(clock);
            let clock = Clock(clock as u64);
            let rule = Rule { optimizer: &optimizer, rate: 0.125, clock, threads: 2, tiles: true };
            let sum = expected(&matrix, &layout);
            rebuilder.apply(&mut matrix, &layout, &rule, &mut values);
            optimizer.step(Step {
                parameters: &mut parameters,
                sum: &sum,
                scale: 0.5,
                rate: 0.125,
                clock,
                state: state_of(&mut state),
            });
            assert_eq!(values, parameters);
        }
    }
}
