//! The gradient of a fully connected layer that goes by factors.

use super::Payload;
use anyhow::ensure;
use poseidon::{Buffer, Factors, LayerId, Scheme, Session};

/// One fully connected layer without a bias.
pub(super) struct FactorLayer {
    layer: LayerId,
    rank: u16,
    workers: u16,
    m: usize,
    n: usize,
    rows: usize,
    u: Vec<f32>,
    v: Vec<f32>,
    values: Buffer,
}

/// Factors repeat with this period along a row, so one square of the gradient has all its values.
const PERIOD: usize = 16;
/// Whole numbers up to this one are exact.
const EXACT: usize = 1 << f32::MANTISSA_DIGITS;

impl FactorLayer {
    /// `shape` is M and N of the layer, and the rows of factors each worker has.
    pub(super) fn new(
        session: &Session,
        layer: LayerId,
        [m, n, rows]: [usize; 3],
    ) -> anyhow::Result<Self> {
        let (rank, workers) = (session.rank(), session.workers());
        ensure!(
            session.scheme(layer)? == Scheme::Sfb,
            "factors go from worker to worker: expected at least 2 workers, got {workers}"
        );
        let largest = rows * workers * (PERIOD - 1) * (PERIOD - 1);
        ensure!(
            largest <= EXACT,
            "{rows} rows of {workers} workers: expected few enough that their sum is exact in float32"
        );
        let (u, v) = (vec![0.0; rows * m], vec![0.0; rows * n]);
        let (workers, values) = (workers as u16, Buffer::zeroed(m * n));
        Ok(Self { layer, rank, workers, m, n, rows, u, v, values })
    }
}

impl Payload for FactorLayer {
    fn fill(&mut self, iteration: u32) {
        for (row, u) in self.u.chunks_exact_mut(self.m).enumerate() {
            fill_row(u, shift_of_u(self.rank, row, iteration));
        }
        for (row, v) in self.v.chunks_exact_mut(self.n).enumerate() {
            fill_row(v, shift_of_v(self.rank, row, iteration));
        }
    }

    fn exchange(&mut self, session: &Session) -> anyhow::Result<()> {
        let values = std::mem::take(&mut self.values);
        let factors = Factors { u: &self.u, v: &self.v };
        session.send_factors(self.layer, &[factors], values)?;
        self.values = session.receive(self.layer)?.result;
        Ok(())
    }

    fn check(&mut self, iteration: u32) -> anyhow::Result<()> {
        let expected = expected(self.workers, self.rows, iteration);
        for (i, row) in self.values.chunks_exact(self.n).enumerate() {
            let expected = &expected[i % PERIOD];
            let wrong = row.chunks(PERIOD).position(|got| *got != expected[..got.len()]);
            ensure!(
                wrong.is_none(),
                "iteration {iteration}: row {i} from column {} on is {:?}, expected {expected:?}",
                wrong.unwrap_or(0) * PERIOD,
                row.chunks(PERIOD).nth(wrong.unwrap_or(0)),
            );
        }
        Ok(())
    }
}

/// The square of all workers' gradients that repeats.
fn expected(workers: u16, rows: usize, iteration: u32) -> [[f32; PERIOD]; PERIOD] {
    let mut sum = [[0.0; PERIOD]; PERIOD];
    for rank in 0..workers {
        for row in 0..rows {
            let (mut u, mut v) = ([0.0; PERIOD], [0.0; PERIOD]);
            fill_row(&mut u, shift_of_u(rank, row, iteration));
            fill_row(&mut v, shift_of_v(rank, row, iteration));
            for (sums, u) in sum.iter_mut().zip(u) {
                sums.iter_mut().zip(v).for_each(|(sum, v)| *sum += u * v);
            }
        }
    }
    sum
}

fn fill_row(values: &mut [f32], shift: usize) {
    for (i, value) in values.iter_mut().enumerate() {
        *value = ((i + shift) % PERIOD) as f32;
    }
}

/// The two factors' shifts differ, so that no row of u is a row of v.
fn shift_of_u(rank: u16, row: usize, iteration: u32) -> usize {
    usize::from(rank) * 5 + row * 3 + iteration as usize * 7
}

fn shift_of_v(rank: u16, row: usize, iteration: u32) -> usize {
    usize::from(rank) * 11 + row * 13 + iteration as usize * 3 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_expected_is_the_sum_of_the_workers_products() {
        // One worker, one row: its own product.
        let (mut u, mut v) = ([0.0; PERIOD], [0.0; PERIOD]);
        fill_row(&mut u, shift_of_u(0, 0, 4));
        fill_row(&mut v, shift_of_v(0, 0, 4));
        assert_eq!((u[0], v[0]), (12.0, 13.0));
        let one = expected(1, 1, 4);
        assert_eq!((one[0][0], one[2][5]), (12.0 * 13.0, 14.0 * 2.0));
        // Another worker and another row change it.
        assert_ne!(expected(2, 1, 4), one);
        assert_ne!(expected(1, 2, 4), one);
        assert_ne!(expected(1, 1, 5), one);
    }
}
