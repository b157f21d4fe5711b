//! How long a device takes to compute a layer.
//!
//! A profile is a TOML file. It knows a model from one of three sources, the first that it has:
//!
//! * `[[measured]]`: seconds of every layer, as `poseidon profile` writes them;
//! * `[[throughput]]`: images per second of the whole model, shared out by FLOPs;
//! * `[rates]`: FLOPs per second by kind of layer, for any model.
//!
//! A profile with `scaled_from` has none of these: it has the times of another profile, scaled by
//! the `[published]` figures of both devices. `[copies]` says how fast the device copies.

mod scaled;

use crate::zoo::{self, Model, ModelLayer, read_text};
use poseidon_core::LayerKind;
use scaled::Scale;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// Seconds that one layer takes for one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerTime {
    /// Forward.
    pub forward: f64,
    /// Backward, the layer's own gradient included.
    pub backward: f64,
}

/// How fast a device copies to and from pinned memory of its host, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopySpeed {
    /// From the device to the host.
    #[serde(deserialize_with = "positive")]
    pub to_host: f64,
    /// From the host to the device.
    #[serde(deserialize_with = "positive")]
    pub to_device: f64,
}

/// What is known about a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// What it is called on the command line.
    #[serde(default)]
    pub name: String,
    /// The device, for people.
    pub device: String,
    /// The built-in profile whose times are scaled to this device, if nothing was measured on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaled_from: Option<String>,
    /// What is published of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<Published>,
    /// How fast it copies. `None` if its memory is the host's, or if that is to be left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<CopySpeed>,
    /// Models whose layers were timed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<Measured>,
    /// Models of which only the whole was timed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub throughput: Vec<Throughput>,
    /// For all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
}

/// What a vendor publishes of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Most floating-point operations per second, in the precision of the profile, without sparsity.
    #[serde(deserialize_with = "positive")]
    pub flops: f64,
    /// Most bytes per second of its memory.
    #[serde(deserialize_with = "positive")]
    pub memory: f64,
    /// Where that is published, in words.
    pub source: String,
}

/// A model whose layers were timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Its name.
    pub model: String,
    /// Samples in the batch that was timed.
    #[serde(deserialize_with = "at_least_one")]
    pub batch: usize,
    /// Name, seconds forward, seconds backward, in the model's order.
    #[serde(deserialize_with = "timed_layers")]
    pub layers: Vec<(String, f64, f64)>,
}

/// A model of which the whole was timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Throughput {
    /// Its name.
    pub model: String,
    /// Samples in a batch.
    #[serde(deserialize_with = "at_least_one")]
    pub batch: usize,
    /// Samples per second, trained.
    #[serde(deserialize_with = "positive")]
    pub images_per_second: f64,
}

/// Floating-point operations per second by kind of layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Convolutions.
    #[serde(deserialize_with = "positive")]
    pub conv: f64,
    /// Fully connected layers, with enough rows to multiply with.
    #[serde(deserialize_with = "positive")]
    pub fc: f64,
    /// Anything else.
    #[serde(deserialize_with = "positive")]
    pub other: f64,
    /// A fully connected layer with fewer rows takes as long as one with this many: it waits for
    /// its weights.
    #[serde(default = "one", deserialize_with = "at_least_one")]
    pub fc_rows: usize,
}

/// What times of a model are based on.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Basis {
    /// Its layers were timed, with batches of this size.
    Measured {
        /// Samples.
        batch: usize,
    },
    /// The whole was timed.
    Throughput {
        /// Samples per second.
        images_per_second: f64,
    },
    /// The device's rates.
    Rates,
    /// The times of another profile and published figures: nothing was measured on the device.
    Published {
        /// The other profile.
        from: &'static str,
    },
}

/// Why there are no times.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// There is no built-in profile of this name.
    #[error(
        "there is no profile '{name}'{}; known are {}, or give a TOML file",
        zoo::did_you_mean(*nearest), known.join(", ")
    )]
    Unknown {
        /// What was asked for.
        name: String,
        /// What may have been meant.
        nearest: Option<&'static str>,
        /// What there is.
        known: Vec<&'static str>,
    },
    /// The file cannot be read.
    #[error("cannot read the profile {file}", file = file.display())]
    Read {
        /// Which.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The text is not a profile.
    #[error("{file}:{line}: {message}")]
    Malformed {
        /// The file, or what stands for it.
        file: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong, with the field.
        message: String,
    },
    /// It measures a model of this name whose layers are others.
    #[error(
        "profile '{profile}' has times for a model '{model}' with other layers: {expected} where \
         the model has {got}"
    )]
    OtherLayers {
        /// The profile.
        profile: String,
        /// The model.
        model: String,
        /// The profile's layer.
        expected: String,
        /// The model's.
        got: String,
    },
    /// It knows nothing about this model.
    #[error(
        "profile '{profile}' does not know the model '{model}': it has no rates, and times only for \
         {}", known.join(", ")
    )]
    NoTimes {
        /// The profile.
        profile: String,
        /// The model.
        model: String,
        /// The models it knows.
        known: Vec<String>,
    },
}

impl Profile {
    /// The built-in profile that is called `name`; case, hyphens and underscores do not matter.
    pub fn named(name: &str) -> Result<Self, ProfileError> {
        let wanted = zoo::folded(name);
        let found = PROFILES.iter().find(|(known, _)| zoo::folded(known) == wanted);
        let (name, text) = found.ok_or_else(|| ProfileError::Unknown {
            name: name.into(),
            nearest: zoo::nearest(name, names()),
            known: names().collect(),
        })?;
        Ok(Self { name: (*name).into(), ..Self::parse(text, name)? })
    }

    /// Reads a profile from a TOML file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ProfileError> {
        let path = path.as_ref();
        let text =
            read_text(path).map_err(|source| ProfileError::Read { file: path.into(), source })?;
        let mut profile = Self::parse(&text, &path.display().to_string())?;
        if profile.name.is_empty() {
            profile.name = path.file_stem().unwrap_or_default().to_string_lossy().into();
        }
        Ok(profile)
    }

    /// The profile in `text`, which is from `file`.
    pub fn parse(text: &str, file: &str) -> Result<Self, ProfileError> {
        let malformed = |line, message: &str| ProfileError::Malformed {
            file: file.into(),
            line,
            message: message.into(),
        };
        let mut profile: Self = toml::from_str(text).map_err(|e| {
            let start = e.span().map_or(0, |span| span.start);
            let before = &text.as_bytes()[..start.min(text.len())];
            malformed(1 + before.iter().filter(|b| **b == b'\n').count(), e.message())
        })?;
        if profile.scaled_from.is_some() {
            profile.rates = Some(profile.scaled_rates().map_err(|why| malformed(1, &why))?);
        }
        if profile.measured.is_empty() && profile.throughput.is_empty() && profile.rates.is_none() {
            let message = "no `measured`, no `throughput` and no `rates`: nothing is known";
            return Err(malformed(1, message));
        }
        if !profile.throughput.is_empty() && profile.rates.is_none() {
            let message = "`throughput` needs `rates`, to share it out between layers";
            return Err(malformed(1, message));
        }
        Ok(profile)
    }

    /// How long the layers of `model` take for a batch of `batch` samples, and how that is known.
    ///
    /// Times of another batch are scaled by what the batch computes.
    pub fn times(
        &self,
        model: &Model,
        batch: usize,
    ) -> Result<(Vec<LayerTime>, Basis), ProfileError> {
        if let Some((from, base)) = self.base() {
            let (times, _) = base.times(model, batch)?;
            if let Ok(scale) = Scale::between(&base, self) {
                return Ok((scale.times(&times, model, batch), Basis::Published { from }));
            }
        }
        let name = zoo::folded(&model.name);
        let same = |other: &str| zoo::folded(other) == name;
        let measured = self.measured.iter().filter(|m| same(&m.model));
        // A neighbour in size rather than in number: from 32, 64 is as far as 16.
        let far = |m: &&Measured| ((m.batch as f64).ln() - (batch as f64).ln()).abs();
        if let Some(nearest) = measured.min_by(|a, b| far(a).total_cmp(&far(b))) {
            let times = nearest.times(&self.name, model, batch)?;
            return Ok((times, Basis::Measured { batch: nearest.batch }));
        }
        let Some(rates) = self.rates else {
            return Err(ProfileError::NoTimes {
                profile: self.name.clone(),
                model: model.name.clone(),
                known: self.measured.iter().map(|m| m.model.clone()).collect(),
            });
        };
        let at = |batch| -> Vec<LayerTime> {
            model.layers.iter().map(|layer| rates.time(layer, batch)).collect()
        };
        let Some(whole) = self.throughput.iter().find(|t| same(&t.model)) else {
            return Ok((at(batch), Basis::Rates));
        };
        let estimated: f64 = at(whole.batch).iter().map(LayerTime::sum).sum();
        let factor = whole.batch as f64 / whole.images_per_second / estimated;
        let times = at(batch).into_iter().map(|time| time.scaled(factor)).collect();
        Ok((times, Basis::Throughput { images_per_second: whole.images_per_second }))
    }
}

impl Measured {
    fn times(
        &self,
        profile: &str,
        model: &Model,
        batch: usize,
    ) -> Result<Vec<LayerTime>, ProfileError> {
        let ours = self.layers.iter().map(|(name, ..)| Some(name.as_str()));
        let theirs = model.layers.iter().map(|layer| Some(layer.name.as_str()));
        let count = self.layers.len().max(model.layers.len());
        let padded = std::iter::repeat(None);
        let pairs = ours.chain(padded.clone()).zip(theirs.chain(padded)).take(count);
        if let Some((expected, got)) = pairs.into_iter().find(|(ours, theirs)| ours != theirs) {
            let shown =
                |name: Option<&str>| name.map_or("no more layers".into(), |n| format!("'{n}'"));
            return Err(ProfileError::OtherLayers {
                profile: profile.into(),
                model: model.name.clone(),
                expected: shown(expected),
                got: shown(got),
            });
        }
        let factor = batch as f64 / self.batch as f64;
        let time = |&(_, forward, backward): &(String, f64, f64)| {
            LayerTime { forward, backward }.scaled(factor)
        };
        Ok(self.layers.iter().map(time).collect())
    }
}

impl Rates {
    fn time(&self, layer: &ModelLayer, batch: usize) -> LayerTime {
        let (rate, samples) = match layer.kind {
            LayerKind::Fc { .. } => {
                let rows = (batch * layer.rows).max(self.fc_rows);
                (self.fc, rows as f64 / layer.rows as f64)
            }
            LayerKind::Conv => (self.conv, batch as f64),
            _ => (self.other, batch as f64),
        };
        LayerTime { forward: layer.forward_flops, backward: layer.backward_flops }
            .scaled(samples / rate)
    }
}

impl LayerTime {
    fn sum(&self) -> f64 {
        self.forward + self.backward
    }

    fn scaled(self, factor: f64) -> Self {
        Self { forward: self.forward * factor, backward: self.backward * factor }
    }
}

impl fmt::Display for Basis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Measured { batch } => write!(f, "layers measured with a batch of {batch}"),
            Self::Throughput { images_per_second } => {
                write!(f, "{images_per_second} images/s, shared out by FLOPs")
            }
            Self::Rates => f.write_str("FLOPs at the device's rates"),
            Self::Published { from } => {
                write!(f, "from published figures, not measured: the times of {from}, scaled")
            }
        }
    }
}

/// The built-in profiles.
pub fn names() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().map(|(name, _)| *name)
}

fn one() -> usize {
    1
}

fn positive<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let number = f64::deserialize(from)?;
    if number.is_finite() && number > 0.0 {
        return Ok(number);
    }
    Err(serde::de::Error::custom(format!("expected a number above 0, got {number}")))
}

fn at_least_one<'de, D: serde::Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    match usize::deserialize(from)? {
        0 => Err(serde::de::Error::custom("expected at least 1, got 0")),
        number => Ok(number),
    }
}

fn timed_layers<'de, D>(from: D) -> Result<Vec<(String, f64, f64)>, D::Error>
where
    D: serde::Deserializer<'de>,
{
    let layers = Vec::<(String, f64, f64)>::deserialize(from)?;
    let bad = |seconds: f64| !seconds.is_finite() || seconds < 0.0;
    match layers.iter().find(|(_, forward, backward)| bad(*forward) || bad(*backward)) {
        Some((name, forward, backward)) => Err(serde::de::Error::custom(format!(
            "`layers`: '{name}' takes {forward} and {backward} seconds, expected numbers of at least 0"
        ))),
        None if layers.is_empty() => Err(serde::de::Error::custom("`layers` is empty")),
        None => Ok(layers),
    }
}

const PROFILES: [(&str, &str); 8] = [
    ("a100", include_str!("../profiles/a100.toml")),
    ("h100", include_str!("../profiles/h100.toml")),
    ("h200", include_str!("../profiles/h200.toml")),
    ("l4", include_str!("../profiles/l4.toml")),
    ("rtx-4090", include_str!("../profiles/rtx-4090.toml")),
    ("t4", include_str!("../profiles/t4.toml")),
    ("titan-x", include_str!("../profiles/titan-x.toml")),
    ("titan-x-tensorflow", include_str!("../profiles/titan-x-tensorflow.toml")),
];

#[cfg(test)]
mod tests;
