//! What the layers compute.
//!
//! Between layers an image lies position after position, the channels of a position side by side
//! (`[row][column][channel]`): convolution, pooling and normalisation all do the same to
//! neighbouring channels, so vectors run along them. Parameters, gradients, the net's input and
//! the inputs of FC layers are in the order users know (`[channel][row][column]`).

mod conv;
mod draw;
mod dropout;
mod fc;
mod filler;
mod lrn;
mod pool;
pub(crate) mod relu;

pub(crate) use conv::Conv;
pub use draw::Draw;
pub(crate) use dropout::Dropout;
pub(crate) use fc::Fc;
pub(crate) use filler::fill;
pub(crate) use lrn::Lrn;
pub(crate) use pool::Pool;

use crate::spec::{Filler, LayerSpec, MOST_VALUES, ModelError, Shape};

/// Values that lie, unused, behind the last one: vectors may be read across the end. Twice the
/// widest vector.
pub(crate) const SLACK: usize = 32;

/// One layer with the memory it needs between forward and backward.
pub(crate) enum Layer {
    Conv(Box<Conv>),
    Pool(Pool),
    Relu,
    Lrn(Lrn),
    Fc(Fc),
    Dropout(Dropout),
}

impl Layer {
    /// `spec` must have passed [`output_shape`], `capacity` is the largest batch.
    pub(crate) fn new(spec: &LayerSpec, input: Shape, output: Shape, capacity: usize) -> Self {
        match *spec {
            LayerSpec::Conv { kernel, stride, pad, .. } => {
                let geometry = conv::Geometry { kernel, stride, pad };
                Self::Conv(Box::new(Conv::new(input, output, geometry)))
            }
            LayerSpec::Pool { method, kernel, stride, pad, .. } => {
                let geometry = pool::Geometry { kernel, stride, pad };
                Self::Pool(Pool::new(method, geometry, input, output, capacity))
            }
            LayerSpec::Relu { .. } => Self::Relu,
            LayerSpec::Lrn { size, alpha, beta, k, .. } => {
                Self::Lrn(Lrn::new(lrn::Formula { size, alpha, beta, k }, input, capacity))
            }
            LayerSpec::Fc { outputs, .. } => Self::Fc(Fc::new(outputs, input, capacity)),
            LayerSpec::Dropout { ratio, .. } => {
                Self::Dropout(Dropout::new(ratio, input.len(), capacity))
            }
        }
    }

    /// Whether output and input may be the same memory. What computes the input must not look at
    /// its output again in backward, and none of the layers does.
    pub(crate) fn in_place(&self) -> bool {
        matches!(self, Self::Relu | Self::Dropout(_))
    }
}

/// The shape of the layer's output, or what does not fit.
pub(crate) fn output_shape(spec: &LayerSpec, input: Shape) -> Result<Shape, ModelError> {
    let too_much = |what: &str| spec.misfit(format!("at most {MOST_VALUES} {what}"), "more");
    let positive = |what: &str, value: usize| match value {
        0 => Err(spec.misfit(format!("{what} of at least 1"), 0)),
        1..=MOST_VALUES => Ok(()),
        _ => Err(spec.misfit(format!("{what} of at most {MOST_VALUES}"), value)),
    };
    let fits = |kernel: usize, stride: usize, pad: usize| {
        positive("a kernel", kernel)?;
        positive("a stride", stride)?;
        if pad >= kernel {
            return Err(spec.misfit(format!("a pad smaller than the kernel, {kernel}"), pad));
        }
        let room = input.height.min(input.width) + 2 * pad;
        if kernel > room {
            let expected = format!("a kernel of at most {room}, the padded input's size");
            return Err(spec.misfit(expected, kernel));
        }
        Ok(())
    };
    let output = match *spec {
        LayerSpec::Conv { outputs, kernel, stride, pad, weights, bias, .. } => {
            positive("a number of outputs", outputs)?;
            fits(kernel, stride, pad)?;
            finite(spec, weights)?;
            finite(spec, bias)?;
            let geometry = conv::Geometry { kernel, stride, pad };
            for padded in [geometry.padded_input(input), geometry.padded_output(input, outputs)] {
                padded.checked_len().ok_or_else(|| too_much("values with padding"))?;
            }
            geometry.output(input, outputs)
        }
        LayerSpec::Pool { kernel, stride, pad, .. } => {
            fits(kernel, stride, pad)?;
            pool::Geometry { kernel, stride, pad }.output(input)
        }
        LayerSpec::Fc { outputs, weights, bias, .. } => {
            positive("a number of outputs", outputs)?;
            finite(spec, weights)?;
            finite(spec, bias)?;
            Shape::new(outputs, 1, 1)
        }
        LayerSpec::Lrn { size, alpha, beta, k, .. } => {
            if size % 2 == 0 {
                return Err(spec.misfit("an odd size", size));
            }
            if size > 2 * input.channels {
                let expected = format!("a size of at most twice the channels, {}", input.channels);
                return Err(spec.misfit(expected, size));
            }
            for (what, value) in [("alpha", alpha), ("beta", beta)] {
                if !(value.is_finite() && value >= 0.0) {
                    return Err(spec.misfit(format!("a finite {what} of at least 0"), value));
                }
            }
            if !(k.is_finite() && k > 0.0) {
                return Err(spec.misfit("a finite k greater than 0", k));
            }
            input
        }
        LayerSpec::Dropout { ratio, .. } => {
            if !(0.0..1.0).contains(&ratio) {
                return Err(spec.misfit("a ratio of at least 0 and less than 1", ratio));
            }
            input
        }
        LayerSpec::Relu { .. } => input,
    };
    output.checked_len().ok_or_else(|| too_much("outputs"))?;
    parameters(spec, input).ok_or_else(|| too_much("parameters"))?;
    Ok(output)
}

/// Number of the layer's parameters, if it is one that offsets of 32 bits can address.
pub(crate) fn parameters(spec: &LayerSpec, input: Shape) -> Option<usize> {
    let (inputs, outputs) = match *spec {
        LayerSpec::Conv { outputs, kernel, .. } => {
            (input.channels.checked_mul(kernel)?.checked_mul(kernel)?, outputs)
        }
        LayerSpec::Fc { outputs, .. } => (input.len(), outputs),
        _ => return Some(0),
    };
    let total = inputs.checked_mul(outputs)?.checked_add(outputs)?;
    (total <= MOST_VALUES).then_some(total)
}

/// `[channel][position]` to `[position][channel]`, or back with the two numbers exchanged.
pub(crate) fn transpose(from: &[f32], channels: usize, positions: usize, to: &mut [f32]) {
    if channels == 1 || positions == 1 {
        to.copy_from_slice(from);
        return;
    }
    for (position, to) in to.chunks_exact_mut(channels).enumerate() {
        for (to, from) in to.iter_mut().zip(from[position..].iter().step_by(positions)) {
            *to = *from;
        }
    }
}

/// Channels that loops take together, in arrays that the compiler turns into vectors: the widest
/// have as many lanes. What is left is taken one by one.
const GROUP: usize = 16;

/// N values from `start` on.
#[inline(always)]
fn group<T, const N: usize>(values: &[T], start: usize) -> &[T; N] {
    values[start..].first_chunk().expect("a group of channels beyond the end")
}

/// N values from `start` on.
#[inline(always)]
fn group_mut<T, const N: usize>(values: &mut [T], start: usize) -> &mut [T; N] {
    values[start..].first_chunk_mut().expect("a group of channels beyond the end")
}

fn finite(spec: &LayerSpec, filler: Filler) -> Result<(), ModelError> {
    match filler {
        Filler::Gaussian(deviation) if !(deviation.is_finite() && deviation >= 0.0) => {
            Err(spec.misfit("a finite deviation of at least 0", deviation))
        }
        Filler::Constant(value) if !value.is_finite() => {
            Err(spec.misfit("a finite constant", value))
        }
        _ => Ok(()),
    }
}
