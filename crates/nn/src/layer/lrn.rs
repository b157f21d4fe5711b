//! Local response normalisation across channels, Caffe's formula:
//! y = x s^-beta with s = k + alpha/size Σ x², the sum over `size` channels centred on x's own.

use crate::model::Shape;
use pulp::{Arch, NullaryFnOnce};

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
        let Lrn { formula: Formula { size, alpha, beta, k }, channels, scale, terms } = self.lrn;
        let weight = *alpha / *size as f32;
        let positions = self.x.chunks_exact(*channels).zip(self.y.chunks_exact_mut(*channels));
        for ((x, y), scale) in positions.zip(scale.chunks_exact_mut(*channels)) {
            for (term, x) in terms[*size / 2..].iter_mut().zip(x) {
                *term = x * x;
            }
            scale.fill(0.0);
            for offset in 0..*size {
                for (scale, term) in scale.iter_mut().zip(&terms[offset..]) {
                    *scale += term;
                }
            }
            for scale in &mut *scale {
                *scale = *k + weight * *scale;
            }
            power(scale, *beta, y);
            for (y, x) in y.iter_mut().zip(x) {
                *y *= x;
            }
        }
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
        let Lrn { formula: Formula { size, alpha, beta, .. }, channels, scale, terms } = self.lrn;
        let weight = 2.0 * *alpha * *beta / *size as f32;
        let inputs = self.x.chunks_exact(*channels).zip(scale.chunks_exact(*channels));
        let gradients = self.dy.chunks_exact(*channels).zip(self.dx.chunks_exact_mut(*channels));
        for ((x, scale), (dy, dx)) in inputs.zip(gradients) {
            power(scale, *beta, dx);
            for (dx, dy) in dx.iter_mut().zip(dy) {
                *dx *= dy;
            }
            let values = x.iter().zip(scale).zip(&*dx);
            for (term, ((x, scale), dx)) in terms[*size / 2..].iter_mut().zip(values) {
                *term = dx * x / scale;
            }
            for offset in 0..*size {
                let sums = x.iter().zip(&terms[offset..]);
                for (dx, (x, term)) in dx.iter_mut().zip(sums) {
                    *dx -= weight * x * term;
                }
            }
        }
    }
}

/// `to = scale^-beta`. The usual exponent needs no logarithm.
#[inline(always)]
fn power(scale: &[f32], beta: f32, to: &mut [f32]) {
    if beta == 0.75 {
        for (to, scale) in to.iter_mut().zip(scale) {
            let root = scale.sqrt();
            *to = 1.0 / (root * root.sqrt());
        }
    } else {
        for (to, scale) in to.iter_mut().zip(scale) {
            *to = scale.powf(-beta);
        }
    }
}
