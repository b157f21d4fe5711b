//! What can go wrong with checkpoints, said so that a person knows which file to look at.

use crate::storage::StorageError;
use std::fmt;
use std::path::PathBuf;

/// Results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a checkpoint was not written, found, read or accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text that names no place.
    #[error("'{place}' is no place for checkpoints: {reason}")]
    Place {
        /// The text.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The storage did not do what it was asked for.
    #[error("cannot {action} {file} in {place}: {cause}")]
    Storage {
        /// Where it is.
        place: String,
        /// The file, or the folder.
        file: String,
        /// What was tried.
        action: &'static str,
        /// What happened. It is part of the words already, so it is no source of this error.
        cause: StorageError,
    },
    /// There is no complete checkpoint of this step.
    #[error("there is no complete checkpoint of step {step} in {place}: {file} is not there; {}", there(.complete))]
    NoStep {
        /// Where it was looked for.
        place: String,
        /// The manifest that is not there.
        file: String,
        /// The step.
        step: u64,
        /// The steps with a manifest.
        complete: Vec<u64>,
    },
    /// A part or a manifest for a step that has a complete checkpoint.
    #[error(
        "step {step} has a complete checkpoint in {place} ({file}): save elsewhere, or delete the folder before the step is written again"
    )]
    Complete {
        /// Where it is.
        place: String,
        /// Its manifest.
        file: String,
        /// The step.
        step: u64,
    },
    /// The checkpoint is of a later version of the format.
    #[error(
        "{file} in {place} was written by a newer version of poseidon: its format has version {found}, this program knows versions up to {known}; upgrade poseidon"
    )]
    Newer {
        /// Where it is.
        place: String,
        /// The manifest.
        file: String,
        /// The version that it has.
        found: u64,
        /// The latest version that can be read.
        known: u64,
    },
    /// A file that the manifest names is not there.
    #[error(
        "{file} of {place} is missing: the manifest says that it has {bytes} bytes; all nodes must write to one place"
    )]
    MissingPart {
        /// Where it should be.
        place: String,
        /// The file.
        file: String,
        /// Its size.
        bytes: u64,
    },
    /// A file is not what was written.
    #[error("{file} in {place} is damaged: {flaw}")]
    Damaged {
        /// Where it is.
        place: String,
        /// The file.
        file: String,
        /// Which property of the file, of which of its pieces if there is one.
        flaw: Box<Flaw>,
    },
    /// Numbers of a layer are missing, are there twice, or belong to nothing in the manifest.
    #[error("layer '{layer}' in {file} of {place}: {flaw}")]
    Layer {
        /// Where it is.
        place: String,
        /// The file that shows it.
        file: String,
        /// The layer.
        layer: String,
        /// What is wrong with which of its numbers, such as `state.0`.
        flaw: Box<Flaw>,
    },
    /// The checkpoint is of another model, or of other update rules.
    #[error("layer '{layer}' in {file} of {place}: {difference}")]
    Differs {
        /// Where the checkpoint is.
        place: String,
        /// Its manifest.
        file: String,
        /// The layer.
        layer: String,
        /// How it differs.
        difference: Difference,
    },
    /// Something that no reader would accept was to be written.
    #[error("cannot write {file} in {place}: {flaw}")]
    Unwritable {
        /// Where it was to be written.
        place: String,
        /// The file.
        file: String,
        /// What is wrong, with the layer if there is one.
        flaw: Box<Flaw>,
    },
    /// The checkpoint was not exported.
    #[error("cannot export {file} of {place} to {}: {reason}", .path.display())]
    Export {
        /// Where the checkpoint is.
        place: String,
        /// Its manifest.
        file: String,
        /// Where it was to be exported to.
        path: PathBuf,
        /// What happened.
        reason: String,
    },
}

/// How a layer of a checkpoint differs from the layer of a job that wants to go on from it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// The job has the layer, the checkpoint does not.
    Missing,
    /// The checkpoint has the layer, the job does not.
    Extra,
    /// The layer has another number of elements.
    Len {
        /// In the job.
        expected: usize,
        /// In the checkpoint.
        found: usize,
    },
    /// The layer has another update rule.
    Rule {
        /// In the job.
        expected: String,
        /// In the checkpoint.
        found: String,
    },
    /// The update rule remembers another number of vectors.
    Vectors {
        /// In the job.
        expected: usize,
        /// In the checkpoint.
        found: usize,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the job has this layer, the checkpoint does not"),
            Self::Extra => f.write_str("the checkpoint has this layer, the job does not"),
            Self::Len { expected, found } => {
                write!(f, "the job expects {expected} elements, the checkpoint has {found}")
            }
            Self::Rule { expected, found } => {
                write!(f, "the job's update rule is '{expected}', the checkpoint's is '{found}'")
            }
            Self::Vectors { expected, found } => write!(
                f,
                "the job's update rule remembers {expected} vectors, the checkpoint has {found}"
            ),
        }
    }
}

/// A difference between what should be and what is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: expected {expected}, found {found}")]
pub struct Flaw {
    /// Of what.
    pub what: String,
    /// What it should be.
    pub expected: String,
    /// What it is.
    pub found: String,
}

impl Flaw {
    pub(crate) fn new(
        what: impl Into<String>,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Self { what: what.into(), expected: expected.to_string(), found: found.to_string() }
    }

    /// The error for a file that was read.
    pub(crate) fn damaged(self, place: String, file: &str) -> Error {
        Error::Damaged { place, file: file.into(), flaw: self.into() }
    }

    /// The error for a file that was to be written.
    pub(crate) fn unwritable(self, place: String, file: &str) -> Error {
        Error::Unwritable { place, file: file.into(), flaw: self.into() }
    }

    /// The error for numbers of a layer.
    pub(crate) fn of_layer(self, place: String, file: &str, layer: &str) -> Error {
        Error::Layer { place, file: file.into(), layer: layer.into(), flaw: self.into() }
    }
}

fn there(complete: &[u64]) -> String {
    match complete {
        [] => "there is no complete checkpoint at all".into(),
        steps => {
            // The newest ones, because those are asked for.
            let shown: Vec<_> = steps.iter().rev().take(8).rev().map(u64::to_string).collect();
            let more = if shown.len() < steps.len() { "..., " } else { "" };
            format!("complete are {more}{}", shown.join(", "))
        }
    }
}
