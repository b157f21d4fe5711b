//! The loops: one pass over a chunk each, compiled once per instruction set.
//!
//! Results are bit-identical on every instruction set (NaN payloads aside), because replicas on
//! different machines must agree. So every operation is one that IEEE 754 rounds correctly
//! (`+ - * /` and square root), every element is computed on its own and in the order written, and
//! nothing is contracted: `a * b + c` stays two roundings, since the compiler never fuses on its
//! own and `mul_add` must not be used here, although the instruction sets below have it.
//!
//! Loops are plain Rust over slices that the compiler vectorises. `call` is `inline(always)`: it
//! has to become part of pulp's function for an instruction set to be compiled with it.

use pulp::NullaryFnOnce;

/// `sum += x`
pub(super) struct Add<'a> {
    pub(super) sum: &'a mut [f32],
    pub(super) x: &'a [f32],
}

impl NullaryFnOnce for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (sum, x) in self.sum.iter_mut().zip(self.x) {
            *sum += x;
        }
    }
}

/// `x *= factor`
pub(super) struct Scale<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) factor: f32,
}

impl NullaryFnOnce for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for x in self.x {
            *x *= self.factor;
        }
    }
}

/// Gradient descent without memory: what both kinds of SGD are when momentum is 0.
pub(super) struct Descent<'a> {
    pub(super) parameters: &'a mut [f32],
    pub(super) sum: &'a [f32],
    pub(super) scale: f32,
    pub(super) weight_decay: f32,
    pub(super) rate: f32,
}

impl NullaryFnOnce for Descent<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (p, sum) in self.parameters.iter_mut().zip(self.sum) {
            let gradient = sum * self.scale + self.weight_decay * *p;
            *p -= self.rate * gradient;
        }
    }
}

/// PyTorch's SGD.
pub(super) struct Momentum<'a> {
    pub(super) parameters: &'a mut [f32],
    pub(super) sum: &'a [f32],
    pub(super) buffer: &'a mut [f32],
    pub(super) scale: f32,
    pub(super) weight_decay: f32,
    pub(super) momentum: f32,
    /// 1 - dampening, but 1 in the first step: the buffer is 0 then and becomes the gradient.
    pub(super) gradient_share: f32,
    pub(super) rate: f32,
}

impl Momentum<'_> {
    /// `direction` turns the gradient and the new buffer into what is descended along.
    #[inline(always)]
    fn descend(self, direction: impl Fn(f32, f32) -> f32) {
        let chunk = self.parameters.iter_mut().zip(self.sum).zip(self.buffer);
        for ((p, sum), buffer) in chunk {
            let gradient = sum * self.scale + self.weight_decay * *p;
            *buffer = self.momentum * *buffer + self.gradient_share * gradient;
            *p -= self.rate * direction(gradient, *buffer);
        }
    }
}

impl NullaryFnOnce for Momentum<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.descend(|_, buffer| buffer);
    }
}

/// PyTorch's SGD with Nesterov momentum.
pub(super) struct Nesterov<'a>(pub(super) Momentum<'a>);

impl NullaryFnOnce for Nesterov<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let momentum = self.0.momentum;
        self.0.descend(|gradient, buffer| gradient + momentum * buffer);
    }
}

/// Caffe's SGD.
pub(super) struct Caffe<'a> {
    pub(super) parameters: &'a mut [f32],
    pub(super) sum: &'a [f32],
    pub(super) history: &'a mut [f32],
    pub(super) scale: f32,
    pub(super) weight_decay: f32,
    pub(super) momentum: f32,
    pub(super) rate: f32,
}

impl Caffe<'_> {
    /// `update` turns the history before and after the step into what is taken off.
    #[inline(always)]
    fn descend(self, update: impl Fn(f32, f32) -> f32) {
        let chunk = self.parameters.iter_mut().zip(self.sum).zip(self.history);
        for ((p, sum), history) in chunk {
            let gradient = sum * self.scale + self.weight_decay * *p;
            let before = *history;
            *history = self.momentum * before + self.rate * gradient;
            *p -= update(before, *history);
        }
    }
}

impl NullaryFnOnce for Caffe<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.descend(|_, after| after);
    }
}

/// Caffe's SGD with Nesterov momentum.
pub(super) struct CaffeNesterov<'a>(pub(super) Caffe<'a>);

impl NullaryFnOnce for CaffeNesterov<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let momentum = self.0.momentum;
        self.0.descend(|before, after| (1.0 + momentum) * after - momentum * before);
    }
}

/// Adam with either kind of weight decay. The factors that are the same for every element come
/// computed in `f64` and rounded once, as in PyTorch.
pub(super) struct Adam<'a> {
    pub(super) parameters: &'a mut [f32],
    pub(super) sum: &'a [f32],
    pub(super) mean: &'a mut [f32],
    pub(super) square: &'a mut [f32],
    pub(super) scale: f32,
    /// Weight decay as an L2 penalty; 0 for AdamW.
    pub(super) penalty: f32,
    /// What decoupled weight decay leaves of the parameters; 1 for Adam.
    pub(super) keep: f32,
    /// beta1
    pub(super) mean_keep: f32,
    /// 1 - beta1
    pub(super) mean_share: f32,
    /// beta2
    pub(super) square_keep: f32,
    /// 1 - beta2
    pub(super) square_share: f32,
    /// 1 / √(1 - beta2ᵗ)
    pub(super) root_scale: f32,
    pub(super) eps: f32,
    /// Learning rate / (1 - beta1ᵗ)
    pub(super) rate: f32,
}

impl NullaryFnOnce for Adam<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let state = self.mean.iter_mut().zip(self.square);
        let chunk = self.parameters.iter_mut().zip(self.sum).zip(state);
        for ((p, sum), (mean, square)) in chunk {
            let gradient = sum * self.scale + self.penalty * *p;
            *mean = self.mean_keep * *mean + self.mean_share * gradient;
            *square = self.square_keep * *square + self.square_share * gradient * gradient;
            let divisor = square.sqrt() * self.root_scale + self.eps;
            *p = self.keep * *p - self.rate * *mean / divisor;
        }
    }
}
