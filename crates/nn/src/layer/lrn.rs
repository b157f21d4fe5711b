//! Local response normalisation across channels, Caffe's formula:
//! y = x s^-beta with s = k + alpha/size Σ x², the sum over `size` channels centred on x's own.

use crate::layer::{GROUP, group, group_mut};
use crate::spec::Shape;
use pulp::{Arch, NullaryFnOnce};
use std::ops::Range;

/// The numbers in the formula.
#[derive(Clone, Copy)]
pub(crate) struct Formula {
    pub(crate) size: usize,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    pub(crate) k: f32,
}

pub(crate) struct Lrn {
    formula: Formula,
    channels: usize,
    /// s of every value.
    scale: Vec<f32>,
    /// The terms of one position's sums, with size/2 zeros before and after them.
    terms: Vec<f32>,
}

impl Lrn {
    pub(crate) fn new(formula: Formula, shape: Shape, capacity: usize) -> Self {
        Self {
            formula,
            channels: shape.channels,
            scale: vec![0.0; capacity * shape.len()],
            terms: vec![0.0; shape.channels + formula.size - 1],
        }
    }

    pub(crate) fn forward(&mut self, x: &[f32], y: &mut [f32]) {
        Arch::new().dispatch(Forward { lrn: self, x, y });
    }

    /// The input's gradient, `dx`, from the output's, `dy`, and the input.
    pub(crate) fn backward(&mut self, x: &[f32], dy: &[f32], dx: &mut [f32]) {
        Arch::new().dispatch(Backward { lrn: self, x, dy, dx });
    }
}

struct Forward<'a> {
    lrn: &'a mut Lrn,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl NullaryFnOnce for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { lrn, x, y } = self;
        let channels = lrn.channels;
        let positions = x.chunks_exact(channels).zip(y.chunks_exact_mut(channels));
        let mut scales = std::mem::take(&mut lrn.scale);
        for ((x, y), scale) in positions.zip(scales.chunks_exact_mut(channels)) {
            let grouped = channels - channels % GROUP;
            lrn.squares::<GROUP>(x, 0..grouped);
            lrn.squares::<1>(x, grouped..channels);
            lrn.normalise::<GROUP>(x, scale, y, 0..grouped);
            lrn.normalise::<1>(x, scale, y, grouped..channels);
        }
        lrn.scale = scales;
    }
}

struct Backward<'a> {
    lrn: &'a mut Lrn,
    x: &'a [f32],
    dy: &'a [f32],
    dx: &'a mut [f32],
}

impl NullaryFnOnce for Backward<'_> {
    type Output = ();

    /// dx = dy s^-beta - 2 alpha beta / size x Σ dy y / s, the sum over the same channels.
    #[inline(always)]
    fn call(self) {
        let Self { lrn, x, dy, dx } = self;
        let channels = lrn.channels;
        let scales = std::mem::take(&mut lrn.scale);
        let inputs = x.chunks_exact(channels).zip(scales.chunks_exact(channels));
        let gradients = dy.chunks_exact(channels).zip(dx.chunks_exact_mut(channels));
        for ((x, scale), (dy, dx)) in inputs.zip(gradients) {
            let grouped = channels - channels % GROUP;
            lrn.direct::<GROUP>(x, scale, dy, dx, 0..grouped);
            lrn.direct::<1>(x, scale, dy, dx, grouped..channels);
            lrn.through_sums::<GROUP>(x, dx, 0..grouped);
            lrn.through_sums::<1>(x, dx, grouped..channels);
        }
        lrn.scale = scales;
    }
}

/// One position's channels, N at a time.
impl Lrn {
    #[inline(always)]
    fn squares<const N: usize>(&mut self, x: &[f32], channels: Range<usize>) {
        for channel in channels.step_by(N) {
            let to = group_mut::<_, N>(&mut self.terms, channel + self.formula.size / 2);
            *to = group::<_, N>(x, channel).map(|x| x * x);
        }
    }

    #[inline(always)]
    fn normalise<const N: usize>(
        &self,
        x: &[f32],
        scale: &mut [f32],
        y: &mut [f32],
        channels: Range<usize>,
    ) {
        let Formula { size, alpha, beta, k } = self.formula;
        for channel in channels.step_by(N) {
            let s = self.sums::<N>(channel).map(|sum| k + alpha / size as f32 * sum);
            let (mut to, x) = (power(s, beta), group::<_, N>(x, channel));
            for lane in 0..N {
                to[lane] *= x[lane];
            }
            *group_mut(y, channel) = to;
            *group_mut(scale, channel) = s;
        }
    }

    /// dy s^-beta, and the terms of the sums.
    #[inline(always)]
    fn direct<const N: usize>(
        &mut self,
        x: &[f32],
        scale: &[f32],
        dy: &[f32],
        dx: &mut [f32],
        channels: Range<usize>,
    ) {
        for channel in channels.step_by(N) {
            let (x, s) = (group::<_, N>(x, channel), *group::<_, N>(scale, channel));
            let dy = group::<_, N>(dy, channel);
            let mut direct = power(s, self.formula.beta);
            let mut terms = [0.0; N];
            for lane in 0..N {
                direct[lane] *= dy[lane];
                terms[lane] = direct[lane] * x[lane] / s[lane];
            }
            *group_mut(dx, channel) = direct;
            *group_mut(&mut self.terms, channel + self.formula.size / 2) = terms;
        }
    }

    #[inline(always)]
    fn through_sums<const N: usize>(&self, x: &[f32], dx: &mut [f32], channels: Range<usize>) {
        let Formula { size, alpha, beta, .. } = self.formula;
        let weight = 2.0 * alpha * beta / size as f32;
        for channel in channels.step_by(N) {
            let (x, sums) = (group::<_, N>(x, channel), self.sums::<N>(channel));
            let dx = group_mut::<_, N>(dx, channel);
            for lane in 0..N {
                dx[lane] -= weight * x[lane] * sums[lane];
            }
        }
    }

    /// The sums over the terms around N channels.
    #[inline(always)]
    fn sums<const N: usize>(&self, channel: usize) -> [f32; N] {
        let mut sums = [0.0; N];
        for offset in 0..self.formula.size {
            let terms = group::<_, N>(&self.terms, channel + offset);
            for lane in 0..N {
                sums[lane] += terms[lane];
            }
        }
        sums
    }
}

/// s^-beta. The usual exponent needs no logarithm.
#[inline(always)]
fn power<const N: usize>(mut s: [f32; N], beta: f32) -> [f32; N] {
    if beta == 0.75 {
        for s in &mut s {
            let root = s.sqrt();
            *s = 1.0 / (root * root.sqrt());
        }
    } else {
        for s in &mut s {
            *s = s.powf(-beta);
        }
    }
    s
}
