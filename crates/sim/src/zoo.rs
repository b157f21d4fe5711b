//! Models as data: what a layer holds and what it costs to compute.
//!
//! The zoo's models are JSON files made by `zoo/generate.py`; a user's own model is a file of the
//! same form:
//!
//! ```json
//! {"name": "mine", "layers": [
//!   {"name": "conv1", "kind": "conv", "parameters": 2432, "forward_flops": 4915200},
//!   {"name": "fc", "kind": {"fc": {"m": 10, "n": 1024}}, "parameters": 10250, "forward_flops": 20480}
//! ]}
//! ```
//!
//! `rows` is 1 where it is not given, and `backward_flops` twice the forward ones.

use poseidon_core::{Layer, LayerKind};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// A model, layer by layer in forward order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "file::Model")]
pub struct Model {
    /// What people call it.
    pub name: String,
    /// In forward order.
    pub layers: Vec<ModelLayer>,
}

/// One layer of a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelLayer {
    /// Unique within the model.
    pub name: String,
    /// What it computes, which decides how it can be synchronised.
    pub kind: LayerKind,
    /// Number of `f32` parameters, biases included. May be 0.
    pub parameters: usize,
    /// Rows per sample that a fully connected layer sees: 1 for images, the sequence length for
    /// transformers.
    pub rows: usize,
    /// Floating-point operations of the forward pass, per sample.
    pub forward_flops: f64,
    /// Floating-point operations of the backward pass, per sample.
    pub backward_flops: f64,
}

/// Why there is no model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The zoo has no model of this name.
    #[error("there is no model '{name}'{}; known are {}", did_you_mean(*nearest), known.join(", "))]
    Unknown {
        /// What was asked for.
        name: String,
        /// What may have been meant.
        nearest: Option<&'static str>,
        /// What there is.
        known: Vec<&'static str>,
    },
    /// The file cannot be read.
    #[error("cannot read the model {file}", file = file.display())]
    Read {
        /// Which.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The text is not a model.
    #[error("{file}:{line}: {message}")]
    Malformed {
        /// The file, or what stands for it.
        file: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong, with the field.
        message: String,
    },
}

impl Model {
    /// The model of the zoo that is called `name`; case, hyphens and underscores do not matter.
    pub fn named(name: &str) -> Result<Self, ModelError> {
        let text = text(name).ok_or_else(|| ModelError::Unknown {
            name: name.into(),
            nearest: nearest(name, names()),
            known: names().collect(),
        })?;
        Self::parse(text, name)
    }

    /// Reads a model from a JSON file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = path.as_ref();
        let text =
            read_text(path).map_err(|source| ModelError::Read { file: path.into(), source })?;
        Self::parse(&text, &path.display().to_string())
    }

    /// The model in `text`, which is from `file`.
    pub fn parse(text: &str, file: &str) -> Result<Self, ModelError> {
        serde_json::from_str(text).map_err(|error| {
            let message = error.to_string();
            let place = format!(" at line {} column {}", error.line(), error.column());
            ModelError::Malformed {
                file: file.into(),
                line: error.line().max(1),
                message: message.strip_suffix(&place).unwrap_or(&message).into(),
            }
        })
    }

    /// Number of parameters in all.
    pub fn parameters(&self) -> usize {
        self.layers.iter().map(|layer| layer.parameters).sum()
    }

    /// Floating-point operations of one sample, forward and backward.
    pub fn flops(&self) -> f64 {
        self.layers.iter().map(ModelLayer::flops).sum()
    }
}

impl ModelLayer {
    /// Floating-point operations of one sample, forward and backward.
    pub fn flops(&self) -> f64 {
        self.forward_flops + self.backward_flops
    }
}

/// The models of the zoo, smaller and older ones first.
pub fn names() -> impl Iterator<Item = &'static str> {
    ZOO.iter().map(|(name, _)| *name)
}

/// The file of the model `name`, with the shapes of its convolutions.
pub fn text(name: &str) -> Option<&'static str> {
    let wanted = folded(name);
    ZOO.iter().find(|(known, _)| folded(known) == wanted).map(|(_, text)| *text)
}

/// Of `names` the one that `name` was most likely meant to be, if it is like any.
pub fn nearest(name: &str, names: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    let name = folded(name);
    let scored = names.map(|known| (strsim::jaro_winkler(&name, &folded(known)), known));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 > LIKE).then_some(best.1)
}

/// " (did you mean 'lenet'?)", or nothing.
pub fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |nearest| format!(" (did you mean '{nearest}'?)"))
}

pub(crate) fn folded(name: &str) -> String {
    name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

impl From<&ModelLayer> for Layer {
    fn from(layer: &ModelLayer) -> Self {
        Layer { kind: layer.kind, ..Layer::new(layer.name.clone(), layer.parameters) }
    }
}

/// Models as they are written. Checked here, where the parser still knows the line.
mod file {
    use super::*;
    use serde::de::value::MapAccessDeserializer;
    use serde::de::{Deserializer, Error, MapAccess, Visitor};
    use std::fmt;

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(super) struct Model {
        #[serde(deserialize_with = "filled")]
        name: String,
        /// One sample's shape; for people.
        #[serde(default, rename = "input")]
        _input: Vec<usize>,
        #[serde(deserialize_with = "layers")]
        layers: Vec<ModelLayer>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(super) struct Layer {
        name: String,
        kind: LayerKind,
        parameters: usize,
        #[serde(default = "one")]
        rows: usize,
        forward_flops: f64,
        backward_flops: Option<f64>,
        convolution: Option<Convolution>,
    }

    /// What `poseidon profile` rebuilds a convolution from.
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Convolution {
        inputs: usize,
        outputs: usize,
        kernel: [usize; 2],
        stride: [usize; 2],
        #[serde(rename = "padding")]
        _padding: [usize; 2],
        groups: usize,
        #[serde(rename = "size")]
        _size: [usize; 2],
    }

    fn one() -> usize {
        1
    }

    fn filled<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
        let name = String::deserialize(from)?;
        if name.trim().is_empty() {
            return Err(D::Error::custom("field `name` of the model is empty"));
        }
        Ok(name)
    }

    fn layers<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<ModelLayer>, D::Error> {
        let layers = Vec::<ModelLayer>::deserialize(from)?;
        let mut names = HashSet::new();
        if let Some(twice) = layers.iter().find(|layer| !names.insert(&layer.name)) {
            return Err(D::Error::custom(format!("two layers have the `name` '{}'", twice.name)));
        }
        let add = |sum: usize, layer: &ModelLayer| sum.checked_add(layer.parameters);
        match layers.iter().try_fold(0usize, add) {
            _ if layers.is_empty() => Err(D::Error::custom("field `layers` is empty")),
            None => Err(D::Error::custom("more `parameters` than can be counted")),
            Some(0) => Err(D::Error::custom("no layer has `parameters`")),
            Some(_) => Ok(layers),
        }
    }

    impl From<Model> for super::Model {
        fn from(model: Model) -> Self {
            Self { name: model.name, layers: model.layers }
        }
    }

    impl<'de> Deserialize<'de> for ModelLayer {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            struct Checked;

            impl<'de> Visitor<'de> for Checked {
                type Value = ModelLayer;

                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("a layer")
                }

                // A complaint from here has the layer's line; one from `try_from` would have the
                // line of what comes next.
                fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ModelLayer, A::Error> {
                    let layer = Layer::deserialize(MapAccessDeserializer::new(map))?;
                    ModelLayer::try_from(layer).map_err(A::Error::custom)
                }
            }

            from.deserialize_map(Checked)
        }
    }

    impl TryFrom<Layer> for ModelLayer {
        type Error = String;

        fn try_from(layer: Layer) -> Result<Self, String> {
            let wrong = |what: String| Err(format!("layer '{}': {what}", layer.name));
            if layer.name.trim().is_empty() {
                return Err("field `name` of a layer is empty".into());
            }
            if layer.parameters > LARGEST {
                return wrong(format!("`parameters` must be at most {LARGEST}"));
            }
            if layer.rows == 0 || layer.rows > LARGEST {
                return wrong(format!("`rows` must be from 1 to {LARGEST}, got {}", layer.rows));
            }
            let backward = layer.backward_flops.unwrap_or(2.0 * layer.forward_flops);
            for (field, flops) in
                [("forward_flops", layer.forward_flops), ("backward_flops", backward)]
            {
                if !flops.is_finite() || flops < 0.0 {
                    return wrong(format!("`{field}` must not be negative, got {flops}"));
                }
            }
            if let LayerKind::Fc { m, n } = layer.kind {
                let matrix = m.checked_mul(n).filter(|&len| len > 0);
                let fits =
                    |len: usize| [Some(len), len.checked_add(m)].contains(&Some(layer.parameters));
                if !matrix.is_some_and(fits) {
                    let got = layer.parameters;
                    return wrong(format!(
                        "`parameters` of a fully connected layer must be m·n, or m·n + m with biases; \
                         m is {m}, n is {n}, got {got}"
                    ));
                }
            }
            if let Some(shape) = &layer.convolution {
                let sizes = [shape.inputs, shape.outputs, shape.groups];
                let sizes = sizes.into_iter().chain(shape.kernel).chain(shape.stride);
                if sizes.into_iter().any(|size| size == 0) {
                    return wrong("no size of `convolution` may be 0".into());
                }
            }
            Ok(Self {
                name: layer.name,
                kind: layer.kind,
                parameters: layer.parameters,
                rows: layer.rows,
                forward_flops: layer.forward_flops,
                backward_flops: backward,
            })
        }
    }

    /// 2⁴⁰: what no computation here can overflow from.
    const LARGEST: usize = 1 << 40;
}

/// Of Jaro-Winkler similarity: `vgg20` is like `vgg19`, `net` is not like `resnet50`.
const LIKE: f64 = 0.8;

macro_rules! zoo {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../zoo/", $name, ".json")))),*]
    };
}

/// The text in a file that somebody has written. What is longer than anybody writes is refused before
/// it fills the memory.
pub fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(LONGEST + 1).read_to_string(&mut text)?;
    match text.len() as u64 {
        0..=LONGEST => Ok(text),
        _ => Err(io::Error::other("it has more than 16 MiB: this is not what it should be")),
    }
}

const LONGEST: u64 = 16 << 20;

const ZOO: [(&str, &str); 12] = zoo![
    "cifar10-quick",
    "alexnet",
    "googlenet",
    "inception-v3",
    "vgg16",
    "vgg19",
    "vgg19-22k",
    "resnet50",
    "resnet152",
    "resnext50",
    "bert-base",
    "gpt2-small",
];

#[cfg(test)]
mod tests;
