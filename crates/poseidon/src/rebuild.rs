//! From factors to a gradient, and from there to what the training program gets back.
//!
//! One matrix product over all workers' rows (8 products of 32 rows take nearly twice as long as one
//! of 256). It runs on the thread that receives the layer, never on a lane. Every worker does the
//! same on the same numbers in the same order, so replicas stay equal bit by bit on equal machines.

use poseidon_core::factors::Layout;
use poseidon_core::optim::{Step, add, scale};
use poseidon_core::{Clock, Optimizer};
use poseidon_matrix::{Matrix, Product};
use std::ops::Range;

/// What a worker keeps of a layer that goes by factors: its optimizer's state, which for other
/// layers is on the shards.
#[derive(Debug, Default)]
pub(crate) struct Rebuilder {
    /// By block of the layer.
    state: Vec<Vec<Vec<f32>>>,
    /// One block's gradient.
    gradient: Vec<f32>,
}

/// How a step is taken.
pub(crate) struct Rule<'a> {
    pub(crate) optimizer: &'a Optimizer,
    pub(crate) rate: f32,
    /// Steps taken with this one, those before this session included.
    pub(crate) clock: Clock,
    pub(crate) threads: usize,
}

/// Rows of the gradient that are rebuilt at a time. The product packs the inputs anew for each
/// block, which costs at most an eighth of it at this size, and the whole gradient is never in memory.
const BLOCK: usize = 512;

impl Rebuilder {
    /// Replaces `values` by the reduced gradient or, if the optimizer has parameters, takes them one
    /// step on. `matrix` is everybody's rows; `values` is M x N weights and perhaps M biases.
    ///
    /// For a mean, the left columns of `matrix` are scaled if that is exact: there are far fewer of them
    /// than numbers in the gradient.
    pub(crate) fn apply(
        &mut self,
        matrix: &mut [f32],
        layout: &Layout,
        rule: &Rule<'_>,
        values: &mut [f32],
    ) {
        let Layout { m, n, workers, .. } = *layout;
        let factor = rule.optimizer.reduction().scale(workers);
        let (before, after) = if workers.is_power_of_two() { (factor, 1.0) } else { (1.0, factor) };
        if before != 1.0 {
            matrix.chunks_exact_mut(layout.width()).for_each(|row| scale(&mut row[..m], before));
        }
        let matrix = &*matrix;
        let mut weights = 0..0;
        let mut block = 0;
        while weights.end < m * n {
            let rows = weights.end / n..(weights.end / n + BLOCK).min(m);
            weights = rows.start * n..rows.end * n;
            let into = &mut values[weights.clone()];
            self.update(block, rule, after, into, |sum| {
                product(matrix, layout, rows, rule.threads, sum)
            });
            block += 1;
        }
        if values.len() > m * n {
            let bias = &mut values[m * n..];
            self.update(block, rule, after, bias, |sum| {
                sum.fill(0.0);
                matrix.chunks_exact(layout.width()).for_each(|row| add(sum, &row[..m]));
            });
        }
    }

    /// The update rule's vectors, each as long as the layer; none before the first step.
    pub(crate) fn rule_state(&self) -> Vec<Vec<f32>> {
        let vectors = self.state.first().map_or(0, Vec::len);
        let blocks = |vector: usize| self.state.iter().map(move |block| &block[vector][..]);
        (0..vectors).map(|vector| blocks(vector).collect::<Vec<_>>().concat()).collect()
    }

    /// Puts the update rule where it was.
    pub(crate) fn restore_rule(&mut self, layout: &Layout, vectors: &[Vec<f32>]) {
        let weights = layout.m * layout.n;
        self.state.clear();
        let len = vectors.first().map_or(0, Vec::len);
        let mut start = 0;
        while start < len {
            let end = if start < weights { (start + BLOCK * layout.n).min(weights) } else { len };
            self.state.push(vectors.iter().map(|vector| vector[start..end].to_vec()).collect());
            start = end;
        }
    }

    fn update(
        &mut self,
        block: usize,
        rule: &Rule<'_>,
        factor: f32,
        values: &mut [f32],
        rebuild: impl FnOnce(&mut [f32]),
    ) {
        if rule.optimizer.is_stateless() {
            rebuild(values);
            if factor != 1.0 {
                scale(values, factor);
            }
            return;
        }
        if self.state.len() == block {
            let vectors = rule.optimizer.state_vectors();
            self.state.push(vec![vec![0.0; values.len()]; vectors]);
        }
        // The bias is shorter than a block of weights: the memory stays as long as the longest.
        self.gradient.resize(self.gradient.len().max(values.len()), 0.0);
        let gradient = &mut self.gradient[..values.len()];
        rebuild(gradient);
        rule.optimizer.step(Step {
            parameters: values,
            sum: gradient,
            scale: factor,
            rate: rule.rate,
            clock: rule.clock,
            state: &mut self.state[block],
        });
    }
}

/// `rows` of uᵀv, where u and v are the left and the right columns of `matrix`.
fn product(matrix: &[f32], layout: &Layout, rows: Range<usize>, threads: usize, into: &mut [f32]) {
    let Layout { m, n, .. } = *layout;
    let width = layout.width();
    let matrix = Matrix::row_major(matrix, matrix.len() / width, width);
    let (u, v) = (matrix.columns(rows), matrix.columns(m..m + n));
    Product::new(u.transposed(), v).threads(threads).write_to(into);
}

#[cfg(test)]
mod tests {
    use super::*;
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
            let rule = Rule { optimizer: &sum, rate: 0.0, clock: Clock(1), threads: 1 };
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
            let rule = Rule { optimizer: &optimizer, rate: 0.125, clock, threads: 2 };
            let sum = expected(&matrix, &layout);
            rebuilder.apply(&mut matrix, &layout, &rule, &mut values);
            optimizer.step(Step {
                parameters: &mut parameters,
                sum: &sum,
                scale: 0.5,
                rate: 0.125,
                clock,
                state: &mut state,
            });
            assert_eq!(values, parameters);
        }
    }
}
