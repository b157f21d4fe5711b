//! A net as a person writes it: a short TOML file, or one of the [built-in models](Model::builtin).
//!
//! ```toml
//! name = "two-layers"
//! input = [1, 28, 28]            # channels, height, width
//! classes = 10
//!
//! [[layer]]
//! name = "hidden"
//! kind = "fc"
//! outputs = 100
//!
//! [[layer]]
//! name = "relu"
//! kind = "relu"
//!
//! [[layer]]
//! name = "scores"                # the last layer has an output per class; softmax and loss follow
//! kind = "fc"
//! outputs = 10
//! weights = { gaussian = 0.01 }  # or "xavier" (default), { constant = 0.0 }
//! ```
//!
//! | kind | keys (default) |
//! | --- | --- |
//! | `conv` | `outputs`, `kernel`, `stride` (1), `pad` (0), `weights` ("xavier"), `bias` ({ constant = 0.0 }) |
//! | `pool` | `method` ("max", "average"), `kernel`, `stride` (1), `pad` (0) |
//! | `relu` | |
//! | `lrn` | `size` (5), `alpha` (1e-4), `beta` (0.75), `k` (1.0) |
//! | `fc` | `outputs`, `weights` ("xavier"), `bias` ({ constant = 0.0 }) |
//! | `dropout` | `ratio` (0.5) |

use crate::layer;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A net: what goes in, the layers it passes through, what comes out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// What the net is called.
    pub name: String,
    /// The shape of one image.
    pub input: Shape,
    /// Number of classes: what the last layer's outputs stand for.
    pub classes: usize,
    /// The layers, in forward order.
    #[serde(rename = "layer", default)]
    pub layers: Vec<LayerSpec>,
}

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

/// One layer of a [`Model`].
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

impl Model {
    /// The model of this name that comes with the crate; see [`Model::builtins`].
    pub fn builtin(name: &str) -> Option<Self> {
        let index = Self::builtins().iter().position(|&builtin| builtin == name)?;
        // The texts are part of this crate, and a test parses every one.
        Some(Self::parse(BUILTIN_TEXTS[index], name).expect("a built-in model is broken"))
    }

    /// The names of the models that come with the crate.
    ///
    /// * `cifar10-quick`: Caffe's CIFAR-10 quick, 145,578 parameters.
    /// * `alexnet-small`: AlexNet's shape for 32x32 images; 95% of its parameters are in FC layers.
    /// * `lenet`: Caffe's LeNet for 28x28 digits, 431,080 parameters.
    /// * `mlp`: two hidden FC layers for 28x28 images.
    /// * `fashion-cnn`: a small CNN for 28x28 images that learns Fashion-MNIST in a few epochs.
    pub fn builtins() -> &'static [&'static str] {
        &["cifar10-quick", "alexnet-small", "lenet", "mlp", "fashion-cnn"]
    }

    /// Reads a model from TOML; `file` is what errors call the text.
    pub fn parse(text: &str, file: &str) -> Result<Self, ModelError> {
        let model: Self = toml::from_str(text).map_err(|e| ModelError::Syntax {
            file: file.into(),
            line: e.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count()),
            message: e.message().into(),
        })?;
        match model.shapes() {
            Ok(_) => Ok(model),
            Err(source) => Err(ModelError::File { file: file.into(), source: source.into() }),
        }
    }

    /// Reads a model from a file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ModelError::Read { file: path.into(), source })?;
        Self::parse(&text, &path.display().to_string())
    }

    /// The shape of each layer's output. An error names the layer that does not fit.
    pub fn shapes(&self) -> Result<Vec<Shape>, ModelError> {
        let wrong = |expected: &str, got: String| ModelError::Model {
            model: self.name.clone(),
            expected: expected.into(),
            got,
        };
        if self.classes == 0 {
            return Err(wrong("at least 1 class", "0".into()));
        }
        if self.input.checked_len().is_none_or(|len| len == 0) {
            return Err(wrong("a non-empty input that fits in memory", self.input.to_string()));
        }
        let Some(last) = self.layers.last() else {
            return Err(wrong("at least 1 layer", "none".into()));
        };
        let mut names = HashSet::new();
        let mut shape = self.input;
        let mut shapes = Vec::with_capacity(self.layers.len());
        for spec in &self.layers {
            if spec.name().is_empty() || !names.insert(spec.name()) {
                return Err(spec.misfit("a name that no other layer has", spec.name()));
            }
            shape = layer::output_shape(spec, shape)?;
            shapes.push(shape);
        }
        if shape.len() != self.classes {
            let expected = format!("{} outputs, the number of classes", self.classes);
            return Err(last.misfit(expected, shape));
        }
        Ok(shapes)
    }
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
        (len <= layer::MOST_VALUES).then_some(len)
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

/// In the order of [`Model::builtins`].
const BUILTIN_TEXTS: [&str; 5] = [
    include_str!("../models/cifar10-quick.toml"),
    include_str!("../models/alexnet-small.toml"),
    include_str!("../models/lenet.toml"),
    include_str!("../models/mlp.toml"),
    include_str!("../models/fashion-cnn.toml"),
];
