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

pub use crate::spec::{Filler, LayerSpec, ModelError, PoolMethod, Shape};

use crate::layer;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::io::{self, Read};
use std::path::Path;

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

    /// The same net for another number of classes, if its last layer is a fully connected one with an
    /// output for each class.
    pub fn with_classes(mut self, classes: usize) -> Option<Self> {
        let expected = self.classes;
        match self.layers.last_mut() {
            Some(LayerSpec::Fc { outputs, .. }) if *outputs == expected => *outputs = classes,
            _ => return None,
        }
        self.classes = classes;
        Some(self)
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
        let read = || {
            let mut text = String::new();
            std::fs::File::open(path)?.take(LONGEST + 1).read_to_string(&mut text)?;
            match text.len() as u64 {
                0..=LONGEST => Ok(text),
                _ => Err(io::Error::other("more than 16 MiB: this is not a model")),
            }
        };
        let text = read().map_err(|source| ModelError::Read { file: path.into(), source })?;
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

/// Bytes of the longest file that is read: no model is written in more.
const LONGEST: u64 = 16 << 20;

/// In the order of [`Model::builtins`].
const BUILTIN_TEXTS: [&str; 5] = [
    include_str!("../models/cifar10-quick.toml"),
    include_str!("../models/alexnet-small.toml"),
    include_str!("../models/lenet.toml"),
    include_str!("../models/mlp.toml"),
    include_str!("../models/fashion-cnn.toml"),
];
