//! The matrix products of convolution, on patches that are read where they lie in the image.
//!
//! Each computes a tile of J patches or patch values times V vectors of outputs, and keeps it in
//! registers. A step of the inner loop loads V vectors, and broadcasts J values: with J = 8 and
//! V = 2 and two multiply-adds a cycle, loads keep up.

use pulp::{Arch, Simd, WithSimd};

/// Pieces of padded images, `rows` runs of `run` values each.
#[derive(Clone, Copy)]
pub(super) struct Patches<'a> {
    /// The images, and values to read past the end of the last run: [`SLACK`](crate::layer::SLACK).
    pub(super) values: &'a [f32],
    /// Where each patch begins.
    pub(super) origins: &'a [u32],
    pub(super) rows: usize,
    pub(super) run: usize,
    /// From one row of a patch to the next.
    pub(super) pitch: usize,
}

/// Weights, cut into panels of two vectors' outputs, or one at the end: `[panel][depth][output]`.
pub(super) struct Panels {
    depth: usize,
    outputs: usize,
    lanes: usize,
    /// What fills up the last vector is zero.
    values: Vec<f32>,
}

impl Panels {
    /// Panels for [`Arch::new`]'s instruction set.
    pub(super) fn new(depth: usize, outputs: usize) -> Self {
        Self::with_lanes(Arch::new().dispatch(Lanes), depth, outputs)
    }

    fn with_lanes(lanes: usize, depth: usize, outputs: usize) -> Self {
        let values = vec![0.0; depth * outputs.next_multiple_of(lanes)];
        Self { depth, outputs, lanes, values }
    }

    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    /// Takes every weight from `weight(depth, output)`.
    pub(super) fn pack(&mut self, weight: impl Fn(usize, usize) -> f32) {
        let (lanes, outputs) = (self.lanes, self.outputs);
        for first in (0..outputs).step_by(2 * lanes) {
            let width = if outputs - first > lanes { 2 * lanes } else { lanes };
            let panel = &mut self.values[first * self.depth..][..width * self.depth];
            for (k, row) in panel.chunks_exact_mut(width).enumerate() {
                for (value, output) in row.iter_mut().zip(first..outputs) {
                    *value = weight(k, output);
                }
            }
        }
    }
}

/// `y[patch][output] = bias[output] + Σ patch[k] weights[k][output]`
pub(super) struct Convolve<'a> {
    pub(super) patches: Patches<'a>,
    pub(super) weights: &'a Panels,
    /// Empty: no bias.
    pub(super) bias: &'a [f32],
    pub(super) y: &'a mut [f32],
}

impl WithSimd for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let lanes = S::F32_LANES;
        assert_eq!(self.weights.lanes, lanes, "weights packed for other vectors");
        for first in (0..self.weights.outputs).step_by(2 * lanes) {
            match (self.weights.outputs - first > lanes, S::REGISTER_COUNT >= 32) {
                (true, true) => self.panel::<S, 8, 2>(simd, first),
                (false, true) => self.panel::<S, 8, 1>(simd, first),
                (true, false) => self.panel::<S, 6, 2>(simd, first),
                (false, false) => self.panel::<S, 6, 1>(simd, first),
            }
        }
    }
}

impl Convolve<'_> {
    /// V vectors of outputs from `first` on, for all patches.
    #[inline(always)]
    fn panel<S: Simd, const J: usize, const V: usize>(&mut self, simd: S, first: usize) {
        let Patches { values, origins, rows, run, pitch } = self.patches;
        let Panels { depth, outputs, .. } = *self.weights;
        let width = V * S::F32_LANES;
        let panel = &self.weights.values[first * depth..][..width * depth];
        let bias = match self.bias {
            [] => [simd.splat_f32s(0.0); V],
            bias => load(simd, &bias[first..]),
        };
        for (origins, y) in origins.chunks(J).zip(self.y.chunks_mut(J * outputs)) {
            // An incomplete tile repeats its last patch, and does not store it again.
            let origin = |j: usize| origins[j.min(origins.len() - 1)] as usize;
            let mut tile = [bias; J];
            for (row, weights) in panel.chunks_exact(run * width).enumerate().take(rows) {
                let (weights, _) = S::as_simd_f32s(weights);
                let (weights, _) = weights.as_chunks::<V>();
                // Slices as long as the loop, so that it has no bounds to check.
                let runs: [&[f32]; J] =
                    std::array::from_fn(|j| &values[origin(j) + row * pitch..][..weights.len()]);
                for (k, weights) in weights.iter().enumerate() {
                    for (sums, run) in tile.iter_mut().zip(&runs) {
                        let value = simd.splat_f32s(run[k]);
                        for (sum, weight) in sums.iter_mut().zip(weights) {
                            *sum = simd.mul_add_f32s(value, *weight, *sum);
                        }
                    }
                }
            }
            for (y, sums) in y.chunks_exact_mut(outputs).zip(tile) {
                store(simd, &mut y[first..], sums);
            }
        }
    }
}

/// `weights[k][output] += Σ patch[k] dy[patch][output]`, `bias[output] += Σ dy[patch][output]`
pub(super) struct WeightGradient<'a> {
    pub(super) patches: Patches<'a>,
    /// `[patch][output]`, and values to read past the end: [`SLACK`](crate::layer::SLACK).
    pub(super) dy: &'a [f32],
    pub(super) outputs: usize,
    pub(super) weights: &'a mut [f32],
    pub(super) bias: &'a mut [f32],
}

impl WithSimd for WeightGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let lanes = S::F32_LANES;
        for first in (0..self.outputs).step_by(2 * lanes) {
            match (self.outputs - first > lanes, S::REGISTER_COUNT >= 32) {
                (true, true) => self.panel::<S, 8, 2>(simd, first),
                (false, true) => self.panel::<S, 8, 1>(simd, first),
                (true, false) => self.panel::<S, 6, 2>(simd, first),
                (false, false) => self.panel::<S, 6, 1>(simd, first),
            }
        }
    }
}

impl WeightGradient<'_> {
    /// V vectors of outputs from `first` on, for all values of a patch.
    #[inline(always)]
    fn panel<S: Simd, const J: usize, const V: usize>(&mut self, simd: S, first: usize) {
        let Patches { values, origins, rows, run, pitch } = self.patches;
        let (outputs, width) = (self.outputs, V * S::F32_LANES);
        // What the last vectors read of the next patch's outputs, or of the slack, is not stored.
        let dy = |patch: usize| {
            let (dy, _) = S::as_simd_f32s(&self.dy[patch * outputs + first..][..width]);
            dy.as_chunks::<V>().0[0]
        };
        let mut sums = [simd.splat_f32s(0.0); V];
        for patch in 0..origins.len() {
            sums = add(simd, sums, dy(patch));
        }
        let bias = &mut self.bias[first..];
        let sums = add(simd, sums, load(simd, bias));
        store(simd, bias, sums);
        for row in 0..rows {
            for k in (0..run).step_by(J) {
                let mut tile = [[simd.splat_f32s(0.0); V]; J];
                for (patch, origin) in origins.iter().enumerate() {
                    let start = *origin as usize + row * pitch + k;
                    let dy = dy(patch);
                    for (sums, value) in tile.iter_mut().zip(&values[start..start + J]) {
                        let value = simd.splat_f32s(*value);
                        for (sum, dy) in sums.iter_mut().zip(dy) {
                            *sum = simd.mul_add_f32s(value, dy, *sum);
                        }
                    }
                }
                // What lies behind the run is not part of the patch.
                let weights = &mut self.weights[(row * run + k) * outputs..];
                let valid = weights.chunks_exact_mut(outputs).take(run - k);
                for (weights, sums) in valid.zip(tile) {
                    let weights = &mut weights[first..];
                    let sums = add(simd, sums, load(simd, weights));
                    store(simd, weights, sums);
                }
            }
        }
    }
}

struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F32_LANES
    }
}

#[inline(always)]
fn add<S: Simd, const V: usize>(simd: S, a: [S::f32s; V], b: [S::f32s; V]) -> [S::f32s; V] {
    std::array::from_fn(|v| simd.add_f32s(a[v], b[v]))
}

/// The first V vectors of `from`; what is missing is zero.
#[inline(always)]
fn load<S: Simd, const V: usize>(simd: S, from: &[f32]) -> [S::f32s; V] {
    let (vectors, rest) = S::as_simd_f32s(from);
    std::array::from_fn(|v| match vectors.get(v) {
        Some(vector) => *vector,
        None if v == vectors.len() => simd.partial_load_f32s(rest),
        None => simd.splat_f32s(0.0),
    })
}

/// As much of V vectors as `to` has room for.
#[inline(always)]
fn store<S: Simd, const V: usize>(simd: S, to: &mut [f32], values: [S::f32s; V]) {
    let (vectors, rest) = S::as_mut_simd_f32s(to);
    let whole = vectors.len();
    for (v, value) in values.into_iter().enumerate() {
        match vectors.get_mut(v) {
            Some(vector) => *vector = value,
            None if v == whole => simd.partial_store_f32s(rest, value),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::SLACK;
    use proptest::prelude::*;

    #[derive(Debug)]
    struct Case {
        values: Vec<f32>,
        origins: Vec<u32>,
        rows: usize,
        run: usize,
        pitch: usize,
        outputs: usize,
    }

    /// Numbers of one digit: sums are exact, in whatever order.
    fn digit(i: usize) -> f32 {
        (i.wrapping_mul(2654435761) >> 7) as f32 % 10.0 - 4.0
    }

    impl Case {
        fn patches(&self) -> Patches<'_> {
            let Self { values, origins, rows, run, pitch, .. } = self;
            Patches { values, origins, rows: *rows, run: *run, pitch: *pitch }
        }

        fn depth(&self) -> usize {
            self.rows * self.run
        }

        fn weight(&self, k: usize, output: usize) -> f32 {
            digit(k * self.outputs + output)
        }

        /// What the definitions say.
        fn expected(&self, dy: &[f32]) -> [Vec<f32>; 3] {
            let (outputs, depth) = (self.outputs, self.depth());
            let mut y: Vec<f32> =
                (0..self.origins.len() * outputs).map(|i| (i % outputs) as f32).collect();
            let mut weights = vec![1.0; depth * outputs];
            let mut bias = vec![1.0; outputs];
            for (patch, origin) in self.origins.iter().enumerate() {
                for output in 0..outputs {
                    bias[output] += dy[patch * outputs + output];
                    for k in 0..depth {
                        let at = k / self.run * self.pitch + k % self.run;
                        let value = self.values[*origin as usize + at];
                        y[patch * outputs + output] += value * self.weight(k, output);
                        weights[k * outputs + output] += value * dy[patch * outputs + output];
                    }
                }
            }
            [y, weights, bias]
        }

        fn computed<S: Simd>(&self, simd: S, dy: &[f32]) -> [Vec<f32>; 3] {
            let (outputs, depth) = (self.outputs, self.depth());
            let mut panels = Panels::with_lanes(S::F32_LANES, depth, outputs);
            panels.pack(|k, output| self.weight(k, output));
            let ramp: Vec<f32> = (0..outputs).map(|output| output as f32).collect();
            let mut y = vec![f32::NAN; self.origins.len() * outputs];
            simd.vectorize(Convolve {
                patches: self.patches(),
                weights: &panels,
                bias: &ramp,
                y: &mut y,
            });
            let mut weights = vec![1.0; depth * outputs];
            let mut bias = vec![1.0; outputs];
            simd.vectorize(WeightGradient {
                patches: self.patches(),
                dy,
                outputs,
                weights: &mut weights,
                bias: &mut bias,
            });
            [y, weights, bias]
        }
    }

    fn case() -> impl Strategy<Value = Case> {
        (1usize..20, 1usize..4, 1usize..20, 0usize..5, 1usize..70).prop_map(
            |(patches, rows, run, more, outputs)| {
                let pitch = run + more;
                let origins = (0..patches as u32).map(|i| i * 3 % 17).collect();
                let mut values: Vec<f32> = (0..16 + rows * pitch).map(digit).collect();
                values.extend([f32::NAN; SLACK]);
                Case { values, origins, rows, run, pitch, outputs }
            },
        )
    }

    proptest! {
        #[test]
        fn every_instruction_set_computes_the_definition(case in case()) {
            let mut dy: Vec<f32> = (0..case.origins.len() * case.outputs).map(digit).collect();
            dy.extend([f32::NAN; SLACK]);
            let expected = case.expected(&dy);
            prop_assert_eq!(&case.computed(pulp::Scalar::new(), &dy), &expected);
            #[cfg(target_arch = "x86_64")]
            {
                use pulp::x86::{V3, V4};
                if let Some(simd) = V3::try_new() {
                    prop_assert_eq!(&case.computed(simd, &dy), &expected);
                }
                if let Some(simd) = V4::try_new() {
                    prop_assert_eq!(&case.computed(simd, &dy), &expected);
                }
            }
        }
    }
}
