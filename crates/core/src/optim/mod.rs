//! What a shard does with a reduced gradient.
//!
//! Workers push gradients, the shard [`add`]s them up, and when a chunk is complete its
//! [`Optimizer`] turns the sum into what the workers get back: the reduced gradient itself
//! ([`Optimizer::Reduce`]), or the parameters after one step.
//!
//! The same input gives the same bits on every machine, whatever instruction set runs: the loops
//! in `kernels` say how. That is what lets replicas on unlike machines agree without comparing.

mod kernels;
#[cfg(test)]
mod tests;
mod text;

pub use text::{ParseOptimizerError, ParseReductionError};

use crate::Clock;
use pulp::Arch;
use serde::{Deserialize, Serialize};
use std::fmt::Display;

/// How contributions are combined. Mean is what DDP users expect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// The sum divided by the number of contributions.
    #[default]
    Mean,
    /// The sum as it is.
    Sum,
}

impl Reduction {
    /// What a sum of `contributions` gradients is multiplied with: [`Step::scale`].
    pub fn scale(self, contributions: usize) -> f32 {
        match self {
            Self::Mean => (1.0 / contributions as f64) as f32,
            Self::Sum => 1.0,
        }
    }
}

/// What a shard does when a chunk is complete.
///
/// The text form is for command lines (`"sgd:momentum=0.9,nesterov"`) and is validated when parsed.
/// Whoever takes an optimizer from anywhere else calls [`validate`](Self::validate) before the
/// first step.
///
/// Everywhere below *g* is the gradient after reduction, *p* the parameters, *lr* the step's
/// learning rate and *wd* the weight decay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Optimizer {
    /// Stateless: the result is the reduced gradient.
    Reduce(Reduction),
    /// Stochastic gradient descent as `torch.optim.SGD` defines it.
    ///
    /// *g += wd·p*, then *buf = momentum·buf + (1 - dampening)·g* (the first step sets *buf = g*),
    /// then *p -= lr·buf*, or with Nesterov *p -= lr·(g + momentum·buf)*.
    ///
    /// A new learning rate acts on the whole history at once, unlike in
    /// [`CaffeSgd`](Self::CaffeSgd).
    Sgd {
        /// Share of the buffer that survives a step. 0 keeps no buffer.
        momentum: f32,
        /// Share of the gradient that is kept out of the buffer, from the second step on.
        dampening: f32,
        /// L2 penalty, added to the gradient.
        weight_decay: f32,
        /// Look ahead by one application of momentum.
        nesterov: bool,
        /// Go up the gradient instead of down: the gradient is negated before all else.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        maximize: bool,
        /// How contributions are combined.
        reduction: Reduction,
    },
    /// Stochastic gradient descent as Caffe's `SGD` and `Nesterov` solvers define it.
    ///
    /// *g += wd·p*, then *v = momentum·v + lr·g*, then *p -= v*, or with Nesterov
    /// *p -= (1 + momentum)·v - momentum·v_before*.
    ///
    /// The learning rate is inside the history: after a change of rate, earlier gradients go on
    /// acting at the rate they came with. While the rate is constant this is
    /// [`Sgd`](Self::Sgd) without dampening; from the first change on the two differ.
    CaffeSgd {
        /// Share of the history that survives a step. 0 keeps no history.
        momentum: f32,
        /// L2 penalty, added to the gradient.
        weight_decay: f32,
        /// Look ahead by one application of momentum.
        nesterov: bool,
        /// How contributions are combined.
        reduction: Reduction,
    },
    /// `torch.optim.Adam`: the decay is an L2 penalty, added to the gradient.
    ///
    /// *g += wd·p*, then *m = beta1·m + (1 - beta1)·g* and *v = beta2·v + (1 - beta2)·g²*,
    /// then *p -= lr·m̂ / (√v̂ + eps)* with *m̂ = m / (1 - beta1ᵗ)* and *v̂ = v / (1 - beta2ᵗ)* at
    /// step *t*.
    Adam {
        /// Share of the mean gradient that survives a step.
        ///
        /// The betas are `f64` because *1 - beta* is what counts, and 0.999 rounded to `f32`
        /// leaves only four correct digits of it.
        beta1: f64,
        /// Share of the mean squared gradient that survives a step.
        beta2: f64,
        /// Keeps the divisor away from 0.
        eps: f32,
        /// L2 penalty, added to the gradient.
        weight_decay: f32,
        /// Go up the gradient instead of down: the gradient is negated before all else.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        maximize: bool,
        /// How contributions are combined.
        reduction: Reduction,
    },
    /// `torch.optim.AdamW`: as [`Adam`](Self::Adam), but instead of changing the gradient the
    /// decay shrinks the parameters, *p -= lr·wd·p*, before the step.
    #[serde(rename = "adamw")]
    AdamW {
        /// Share of the mean gradient that survives a step; `f64` as in [`Adam`](Self::Adam).
        beta1: f64,
        /// Share of the mean squared gradient that survives a step.
        beta2: f64,
        /// Keeps the divisor away from 0.
        eps: f32,
        /// Share of the parameters, times the rate, that a step removes.
        weight_decay: f32,
        /// Go up the gradient instead of down: the gradient is negated before all else.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        maximize: bool,
        /// How contributions are combined.
        reduction: Reduction,
    },
}

/// One chunk at the moment its last contribution is in: what [`Optimizer::step`] works on.
#[derive(Debug)]
pub struct Step<'a> {
    /// The chunk's parameters, replaced by the new ones.
    pub parameters: &'a mut [f32],
    /// The sum of the contributions, as long as the parameters.
    pub sum: &'a [f32],
    /// What makes the sum a gradient: 1/P for mean, 1 for sum ([`Reduction::scale`]).
    pub scale: f32,
    /// The step's learning rate.
    pub rate: f32,
    /// 1 for the first step.
    pub clock: Clock,
    /// [`Optimizer::state_vectors`] vectors as long as the parameters, all zero before the first
    /// step and afterwards as the step before left them. The others are empty.
    pub state: State<'a>,
}

/// What an optimizer keeps of a chunk between steps; [`state_of`] has it from a list of vectors.
pub type State<'a> = [&'a mut [f32]; Optimizer::MOST_STATE_VECTORS];

/// The vectors, and empty ones in place of those the optimizer does not keep.
///
/// # Panics
///
/// If there are more than any optimizer keeps.
pub fn state_of(vectors: &mut [Vec<f32>]) -> State<'_> {
    let mut state = State::default();
    assert!(vectors.len() <= state.len(), "no optimizer keeps {} vectors", vectors.len());
    state.iter_mut().zip(vectors).for_each(|(state, vector)| *state = vector);
    state
}

/// A hyperparameter with which training cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptimizerError {
    /// A number is outside its range, or not a number.
    #[error("{optimizer}: {field} must be {expected}, got {got}")]
    OutOfRange {
        /// The optimizer's name in the text form.
        optimizer: &'static str,
        /// The field's name in the text form.
        field: &'static str,
        /// The range.
        expected: &'static str,
        /// The number.
        got: String,
    },
}

impl Default for Optimizer {
    fn default() -> Self {
        Self::Reduce(Reduction::default())
    }
}

impl Optimizer {
    /// [`Sgd`](Self::Sgd) with PyTorch's defaults: no momentum, no decay.
    pub fn sgd() -> Self {
        Self::Sgd {
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
            reduction: Reduction::default(),
        }
    }

    /// [`CaffeSgd`](Self::CaffeSgd) with Caffe's defaults: no momentum, no decay.
    pub fn caffe_sgd() -> Self {
        Self::CaffeSgd {
            momentum: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            reduction: Reduction::default(),
        }
    }

    /// [`Adam`](Self::Adam) with PyTorch's defaults: betas 0.9 and 0.999, eps 1e-8, no decay.
    pub fn adam() -> Self {
        Self::Adam {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            maximize: false,
            reduction: Reduction::default(),
        }
    }

    /// [`AdamW`](Self::AdamW) with PyTorch's defaults: as [`adam`](Self::adam), decay 0.01.
    pub fn adamw() -> Self {
        Self::AdamW {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            maximize: false,
            reduction: Reduction::default(),
        }
    }

    /// Whether the result is the reduced gradient, so that the shard holds neither parameters nor
    /// state. An optimizer that has parameters is not stateless, even without state vectors.
    pub fn is_stateless(&self) -> bool {
        matches!(self, Self::Reduce(_))
    }

    /// No optimizer keeps more vectors than this.
    pub const MOST_STATE_VECTORS: usize = 2;

    /// How many vectors as long as the parameters the shard keeps between steps.
    pub fn state_vectors(&self) -> usize {
        match *self {
            Self::Reduce(_) => 0,
            Self::Sgd { momentum, .. } | Self::CaffeSgd { momentum, .. } => {
                usize::from(momentum != 0.0)
            }
            Self::Adam { .. } | Self::AdamW { .. } => 2,
        }
    }

    /// How contributions are combined.
    pub fn reduction(&self) -> Reduction {
        match *self {
            Self::Reduce(reduction)
            | Self::Sgd { reduction, .. }
            | Self::CaffeSgd { reduction, .. }
            | Self::Adam { reduction, .. }
            | Self::AdamW { reduction, .. } => reduction,
        }
    }

    /// The same rule with another way to combine contributions.
    #[must_use]
    pub fn with_reduction(mut self, with: Reduction) -> Self {
        match &mut self {
            Self::Reduce(reduction)
            | Self::Sgd { reduction, .. }
            | Self::CaffeSgd { reduction, .. }
            | Self::Adam { reduction, .. }
            | Self::AdamW { reduction, .. } => *reduction = with,
        }
        self
    }

    /// Applies one step to one chunk.
    ///
    /// # Panics
    ///
    /// If the optimizer is stateless (there is nothing to step: use [`scale`]), if the clock is 0,
    /// or if the slices disagree in length or number. All of these are the caller's own doing and
    /// none can come from a peer.
    pub fn step(&self, step: Step<'_>) {
        self.step_on(Arch::new(), step);
    }

    /// Checks every number, with the ranges PyTorch uses. Where PyTorch lets `eps` be 0 this does
    /// not: a parameter that never had a gradient would become 0/0.
    pub fn validate(&self) -> Result<(), OptimizerError> {
        let check = |field, valid: bool, expected, got: &dyn Display| match valid {
            true => Ok(()),
            false => Err(OptimizerError::OutOfRange {
                optimizer: self.name(),
                field,
                expected,
                got: got.to_string(),
            }),
        };
        let not_negative = |field, got: f32| {
            check(field, got.is_finite() && got >= 0.0, "a finite number >= 0", &got)
        };
        match *self {
            Self::Reduce(_) => Ok(()),
            Self::Sgd { momentum, dampening, weight_decay, nesterov, .. } => {
                not_negative("momentum", momentum)?;
                check("dampening", dampening.is_finite(), "a finite number", &dampening)?;
                not_negative("weight-decay", weight_decay)?;
                if nesterov {
                    check("momentum", momentum > 0.0, "> 0 with nesterov", &momentum)?;
                    check("dampening", dampening == 0.0, "0 with nesterov", &dampening)?;
                }
                Ok(())
            }
            Self::CaffeSgd { momentum, weight_decay, nesterov, .. } => {
                not_negative("momentum", momentum)?;
                not_negative("weight-decay", weight_decay)?;
                check("momentum", momentum > 0.0 || !nesterov, "> 0 with nesterov", &momentum)
            }
            Self::Adam { beta1, beta2, eps, weight_decay, .. }
            | Self::AdamW { beta1, beta2, eps, weight_decay, .. } => {
                let share = "at least 0 and below 1";
                check("beta1", (0.0..1.0).contains(&beta1), share, &beta1)?;
                check("beta2", (0.0..1.0).contains(&beta2), share, &beta2)?;
                check("eps", eps.is_finite() && eps > 0.0, "a finite number > 0", &eps)?;
                not_negative("weight-decay", weight_decay)
            }
        }
    }

    fn maximizes(&self) -> bool {
        match *self {
            Self::Reduce(_) | Self::CaffeSgd { .. } => false,
            Self::Sgd { maximize, .. }
            | Self::Adam { maximize, .. }
            | Self::AdamW { maximize, .. } => maximize,
        }
    }

    /// One step with the instructions of `arch`. The result does not depend on it.
    fn step_on(&self, arch: Arch, step: Step<'_>) {
        let Step { parameters, sum, scale, rate, clock, state } = step;
        let scale = if self.maximizes() { -scale } else { scale };
        let len = parameters.len();
        assert_eq!(sum.len(), len, "the sum of a chunk is as long as its parameters");
        assert_ne!(clock, Clock(0), "clock 0 is the initial value, the first step has clock 1");
        match *self {
            Self::Reduce(_) => panic!("a stateless optimizer has no parameters to step"),
            Self::Sgd { momentum: 0.0, weight_decay, .. }
            | Self::CaffeSgd { momentum: 0.0, weight_decay, .. } => {
                let [] = vectors(state, len);
                arch.dispatch(kernels::Descent { parameters, sum, scale, weight_decay, rate });
            }
            Self::Sgd { momentum, dampening, weight_decay, nesterov, .. } => {
                let [buffer] = vectors(state, len);
                let gradient_share =
                    if clock == Clock(1) { 1.0 } else { (1.0 - f64::from(dampening)) as f32 };
                let kernel = kernels::Momentum {
                    parameters,
                    sum,
                    buffer,
                    scale,
                    weight_decay,
                    momentum,
                    gradient_share,
                    rate,
                };
                match nesterov {
                    false => arch.dispatch(kernel),
                    true => arch.dispatch(kernels::Nesterov(kernel)),
                }
            }
            Self::CaffeSgd { momentum, weight_decay, nesterov, .. } => {
                let [history] = vectors(state, len);
                let kernel = kernels::Caffe {
                    parameters,
                    sum,
                    history,
                    scale,
                    weight_decay,
                    momentum,
                    rate,
                };
                match nesterov {
                    false => arch.dispatch(kernel),
                    true => arch.dispatch(kernels::CaffeNesterov(kernel)),
                }
            }
            Self::Adam { beta1, beta2, eps, weight_decay, .. }
            | Self::AdamW { beta1, beta2, eps, weight_decay, .. } => {
                let [mean, square] = vectors(state, len);
                let rate = f64::from(rate);
                let decay = f64::from(weight_decay);
                let (penalty, keep) = match self {
                    Self::AdamW { .. } => (0.0, 1.0 - rate * decay),
                    _ => (decay, 1.0),
                };
                arch.dispatch(kernels::Adam {
                    parameters,
                    sum,
                    mean,
                    square,
                    scale,
                    penalty: penalty as f32,
                    keep: keep as f32,
                    mean_keep: beta1 as f32,
                    mean_share: (1.0 - beta1) as f32,
                    square_keep: beta2 as f32,
                    square_share: (1.0 - beta2) as f32,
                    root_scale: (1.0 / (1.0 - power(beta2, clock.0)).sqrt()) as f32,
                    eps,
                    rate: (rate / (1.0 - power(beta1, clock.0))) as f32,
                });
            }
        }
    }
}

/// Adds `x` to `sum`.
///
/// # Panics
///
/// If the lengths differ.
pub fn add(sum: &mut [f32], x: &[f32]) {
    assert_eq!(sum.len(), x.len(), "a contribution is as long as the sum it is added to");
    Arch::new().dispatch(kernels::Add { sum, x });
}

/// Multiplies every element of `x` with `factor`.
pub fn scale(x: &mut [f32], factor: f32) {
    Arch::new().dispatch(kernels::Scale { x, factor });
}

/// The first `N` vectors of the state, which are all that are not empty.
fn vectors<const N: usize>(state: State<'_>, len: usize) -> [&mut [f32]; N] {
    let lens = state.each_ref().map(|vector| vector.len());
    assert!(
        lens.iter().enumerate().all(|(i, got)| *got == if i < N { len } else { 0 }),
        "the optimizer keeps {N} state vectors of {len} elements, the chunk has {lens:?}"
    );
    let mut state = state.into_iter();
    std::array::from_fn(|_| state.next().expect("no optimizer keeps more"))
}

/// `base` to the power of `exponent`. Not `powi`, whose rounding is the platform's choice.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}
