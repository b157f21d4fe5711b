//! One layer as a person writes it, the shapes between layers, and why a model cannot be used: what
//! both [`Model`](crate::model::Model) and the layers that compute need.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::path::PathBuf;

/// The most values an image or a layer's parameters may have: offsets are 32 bits wide.
pub(crate) const MOST_VALUES: usize = i32::MAX as usize;

/// The shape of one sample between layers; in TOML `[channels, height, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "[usize; 3]", into = "[usize; 3]")]
pub struct Shape {
    /// Channels, or the outputs of an FC layer.
    pub channels: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

/// One layer of a [`Model`](crate::model::Model).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
#[non_exhaustive]
pub enum LayerSpec {
    /// Convolution with a square kernel.
    Conv {
        /// Unique name.
        name: String,
        /// Output channels.
        outputs: usize,
        /// Height and width of the kernel.
        kernel: usize,
        /// Step between neighbouring outputs.
        #[serde(default = "one")]
        stride: usize,
        /// Zeros around the input, on each side.
        #[serde(default)]
        pad: usize,
        /// What weights start from.
        #[serde(default)]
        weights: Filler,
        /// What biases start from.
        #[serde(default = "zeros")]
        bias: Filler,
    },
    /// Pooling with Caffe's geometry: the output's size is rounded up, windows are clipped.
    Pool {
        /// Unique name.
        name: String,
        /// What becomes of a window.
        method: PoolMethod,
        /// Height and width of the window.
        kernel: usize,
        /// Step between neighbouring windows.
        #[serde(default = "one")]
        stride: usize,
        /// How far windows reach beyond the input, on each side.
        #[serde(default)]
        pad: usize,
    },
    /// max(x, 0)
    Relu {
        /// Unique name.
        name: String,
    },
    /// Local response normalisation across channels: x / (k + alpha/size Σx²)^beta.
    Lrn {
        /// Unique name.
        name: String,
        /// Channels in the sum, an odd number, centred on the one normalised.
        #[serde(default = "lrn_size")]
        size: usize,
        /// Weight of the sum.
        #[serde(default = "lrn_alpha")]
        alpha: f32,
        /// Exponent.
        #[serde(default = "lrn_beta")]
        beta: f32,
        /// What the sum is added to.
        #[serde(default = "lrn_k")]
        k: f32,
    },
    /// Fully connected: every output is a weighted sum of all inputs, plus a bias.
    Fc {
        /// Unique name.
        name: String,
        /// Number of outputs.
        outputs: usize,
        /// What weights start from.
        #[serde(default)]
        weights: Filler,
        /// What biases start from.
        #[serde(default = "zeros")]
        bias: Filler,
    },
    /// Zeroes values at random while training, and scales the others up to make good for it.
    Dropout {
        /// Unique name.
        name: String,
        /// How many are zeroed, as a fraction.
        #[serde(default = "half")]
        ratio: f32,
    },
}

/// What a pooling window becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PoolMethod {
    /// Its largest value.
    Max,
    /// Its mean. What lies in the padding counts as zero, what lies beyond it does not count.
    Average,
}

/// What parameters start from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Filler {
    /// Uniform in ±sqrt(3 / inputs): outputs have the variance of inputs.
    #[default]
    Xavier,
    /// Normal with mean 0 and this standard deviation.
    Gaussian(f32),
    /// All the same.
    Constant(f32),
}

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file cannot be read.
    #[error("{}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The text is not a model.
    #[error("{file}:{line}: {message}")]
    Syntax {
        /// The file.
        file: String,
        /// Line, counted from 1.
        line: usize,
        /// What is wrong there.
        message: String,
    },
    /// A layer does not fit its input or the model.
    #[error("layer '{layer}': expected {expected}, got {got}")]
    Layer {
        /// The layer's name.
        layer: String,
        /// What would fit.
        expected: String,
        /// What is there.
        got: String,
    },
    /// Something other than a layer is out of range.
    #[error("model '{model}': expected {expected}, got {got}")]
    Model {
        /// The model's name.
        model: String,
        /// What would do.
        expected: String,
        /// What is there.
        got: String,
    },
    /// A model file parses, but the model it describes cannot be used.
    #[error("{file}: {source}")]
    File {
        /// The file.
        file: String,
        /// Why not.
        source: Box<ModelError>,
    },
}

impl LayerSpec {
    /// The layer's name.
    pub fn name(&self) -> &str {
        match self {
            Self::Conv { name, .. }
            | Self::Pool { name, .. }
            | Self::Relu { name }
            | Self::Lrn { name, .. }
            | Self::Fc { name, .. }
            | Self::Dropout { name, .. } => name,
        }
    }

    pub(crate) fn misfit(&self, expected: impl fmt::Display, got: impl fmt::Display) -> ModelError {
        ModelError::Layer {
            layer: self.name().into(),
            expected: expected.to_string(),
            got: got.to_string(),
        }
    }
}

impl fmt::Display for LayerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Conv { outputs, kernel, .. } => write!(f, "conv {kernel}x{kernel}x{outputs}"),
            Self::Pool { method, kernel, stride, .. } => {
                let method = match method {
                    PoolMethod::Max => "max",
                    PoolMethod::Average => "average",
                };
                write!(f, "{method} pool {kernel}/{stride}")
            }
            Self::Relu { .. } => f.write_str("relu"),
            Self::Lrn { size, .. } => write!(f, "lrn {size}"),
            Self::Fc { outputs, .. } => write!(f, "fc {outputs}"),
            Self::Dropout { ratio, .. } => write!(f, "dropout {ratio}"),
        }
    }
}

impl Shape {
    /// A shape of `channels` times `height` times `width` values.
    pub const fn new(channels: usize, height: usize, width: usize) -> Self {
        Self { channels, height, width }
    }

    /// Number of values.
    pub const fn len(self) -> usize {
        self.channels * self.height * self.width
    }

    /// Whether there are no values.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Number of values, if it is one that offsets of 32 bits can address.
    pub(crate) fn checked_len(self) -> Option<usize> {
        let len = self.channels.checked_mul(self.height)?.checked_mul(self.width)?;
        (len <= MOST_VALUES).then_some(len)
    }
}

impl From<[usize; 3]> for Shape {
    fn from([channels, height, width]: [usize; 3]) -> Self {
        Self { channels, height, width }
    }
}

impl From<Shape> for [usize; 3] {
    fn from(shape: Shape) -> Self {
        [shape.channels, shape.height, shape.width]
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.channels, self.height, self.width)
    }
}

fn one() -> usize {
    1
}

fn zeros() -> Filler {
    Filler::Constant(0.0)
}

fn half() -> f32 {
    0.5
}

fn lrn_size() -> usize {
    5
}

fn lrn_alpha() -> f32 {
    1e-4
}

fn lrn_beta() -> f32 {
    0.75
}

fn lrn_k() -> f32 {
    1.0
}
