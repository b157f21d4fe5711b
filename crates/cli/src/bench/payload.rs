//! What `bench exchange` exchanges: a gradient through the shards, a gradient by factors, or a
//! tensor of a group.

mod barrier;
mod factors;
mod gradient;
mod tensor;

pub(crate) use barrier::Barrier;
pub(crate) use gradient::RATE;

use factors::FactorLayer;
use gradient::Gradients;
use poseidon::session::Builder;
use poseidon::{Encoding, Encodings, Layer, LayerId, LayerKind, Optimizer, Policy, Session};
use std::sync::Arc;
use tensor::GroupTensor;

/// What is exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The gradients of so many equal layers, through the shards.
    Push { layers: usize, encoding: Encoding },
    /// The gradient of a fully connected layer, by this many rows of factors from each worker.
    Factors { rows: usize },
    /// A tensor, by the all_reduce of a group.
    AllReduce,
}

/// One worker's contribution and result, again and again. Contributions are small whole numbers that
/// differ by place, worker and iteration: their sums are exact in any order of addition, and a piece
/// in the wrong place is noticed.
pub(crate) trait Payload {
    /// Writes this worker's contribution to `iteration`.
    fn fill(&mut self, iteration: u32);
    /// Contributes it, and waits for the result.
    fn exchange(&mut self, session: &Session) -> anyhow::Result<()>;
    /// Whether the result is what it must be.
    fn check(&mut self, iteration: u32) -> anyhow::Result<()>;
}

impl What {
    /// Its name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Push { encoding: Encoding::F32, .. } => "push",
            Self::Push { encoding: Encoding::Bf16, .. } => "push in bf16",
            Self::Push { encoding: Encoding::F16, .. } => "push in f16",
            Self::Factors { .. } => "factors",
            Self::AllReduce => "all_reduce",
        }
    }

    /// Adds to a session what it has to know of buffers of these sizes.
    pub(crate) fn describe(self, builder: Builder, sizes: &[usize]) -> Builder {
        let layers = |&bytes| match self {
            Self::Push { layers, encoding } => {
                let encodings = Encodings::both(encoding);
                let layer =
                    |(number, len)| Layer::new(layer_name(bytes, number), len).encoded(encodings);
                cut(bytes / encoding.width(), layers).enumerate().map(layer).collect()
            }
            Self::Factors { .. } => {
                let (m, n) = shape(length(bytes));
                let kind = LayerKind::Fc { m, n };
                vec![Layer { kind, ..Layer::new(layer_name(bytes, 0), m * n) }]
            }
            Self::AllReduce => Vec::new(),
        };
        let builder = builder.layer(Layer::new(BARRIER, 1)).layers(sizes.iter().flat_map(layers));
        match self {
            Self::Factors { rows } => builder.scheme(Policy::Sfb).batch(rows),
            Self::Push { .. } | Self::AllReduce => builder,
        }
    }

    /// The memory of a worker for buffers of these sizes, in their order, and the barrier before each
    /// exchange. All workers call it.
    pub(crate) fn prepare(
        self,
        session: &Session,
        sizes: &[usize],
        optimizer: &Optimizer,
    ) -> anyhow::Result<(Barrier, Vec<Box<dyn Payload>>)> {
        if self == Self::AllReduce {
            let group = Arc::new(session.group("all_reduce")?);
            let tensor = |&bytes| GroupTensor::new(&group, length(bytes));
            let tensors = sizes.iter().map(|bytes| Box::new(tensor(bytes)) as Box<dyn Payload>);
            let payloads = tensors.collect();
            return Ok((Barrier::Group(group), payloads));
        }
        let layer = session.layer(BARRIER)?;
        let barrier = Barrier::of_layer(session, layer, !optimizer.is_stateless())?;
        let mut payloads: Vec<Box<dyn Payload>> = Vec::new();
        for &bytes in sizes {
            payloads.push(match self {
                Self::Factors { rows } => {
                    let (m, n) = shape(length(bytes));
                    let layer = session.layer(&layer_name(bytes, 0))?;
                    Box::new(FactorLayer::new(session, layer, [m, n, rows])?)
                }
                Self::Push { layers, encoding } => {
                    let layer = |(number, len)| -> anyhow::Result<(LayerId, usize)> {
                        Ok((session.layer(&layer_name(bytes, number))?, len))
                    };
                    let layers = cut(bytes / encoding.width(), layers).enumerate().map(layer);
                    let layers = layers.collect::<anyhow::Result<Vec<_>>>()?;
                    Box::new(Gradients::new(session, &layers, encoding, optimizer)?)
                }
                Self::AllReduce => continue,
            });
        }
        Ok((barrier, payloads))
    }
}

/// The layer by which workers meet.
const BARRIER: &str = "barrier";

fn layer_name(bytes: usize, number: usize) -> String {
    format!("layer {number} of {bytes} bytes")
}

/// The lengths of up to `layers` layers of `len` numbers altogether. None is empty.
fn cut(len: usize, layers: usize) -> impl Iterator<Item = usize> {
    let layers = layers.clamp(1, len.max(1));
    (0..layers).map(move |number| (number + 1) * len / layers - number * len / layers)
}

fn length(bytes: usize) -> usize {
    bytes / size_of::<f32>()
}

/// The rows and columns of a matrix of `len` numbers, as near to a square as they divide it.
fn shape(len: usize) -> (usize, usize) {
    let m = (1..=len.isqrt()).rev().find(|m| len.is_multiple_of(*m)).unwrap_or(1);
    (m, len / m)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_nearly_equal_and_have_all_numbers() {
        assert_eq!(cut(10, 3).collect::<Vec<_>>(), [3, 3, 4]);
        assert_eq!(cut(2, 5).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn matrices_are_nearly_square_and_have_all_numbers() {
        for (len, m, n) in [(1 << 18, 512, 512), (10 << 18, 1280, 2048), (1, 1, 1), (7, 1, 7)] {
            assert_eq!(shape(len), (m, n));
        }
    }
}
