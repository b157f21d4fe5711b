//! Where the objects of checkpoints are kept.
//!
//! An object has a name of two levels, `folder/file`. It is written whole or not at all.

mod directory;
#[cfg(feature = "s3")]
mod s3;

pub use directory::Directory;
pub(crate) use directory::{parent, persist, temporary};
#[cfg(feature = "s3")]
pub use s3::S3;

use std::fmt;
use std::io;
use std::ops::Range;
use std::time::Duration;

/// A place that keeps objects.
pub trait Storage: Send + Sync + fmt::Debug {
    /// The place, as a person would name it.
    fn describe(&self) -> String;

    /// Writes a whole object: `slices`, one after the other. An object of this name is replaced.
    ///
    /// When this returns `Ok`, the object survives a loss of power. When it fails, or the process
    /// dies meanwhile, the name refers to what it referred to before.
    fn put(&self, name: &str, slices: &[&[u8]]) -> Result<(), StorageError>;

    /// Reads the bytes of `range`, all of them.
    fn get_range(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>, StorageError>;

    /// The number of bytes of an object.
    fn size(&self, name: &str) -> Result<u64, StorageError>;

    /// The names of the folders of this place. A place that is not there yet has none.
    fn folders(&self) -> Result<Vec<String>, StorageError>;

    /// The objects of a folder. A folder that is not there has none.
    fn list(&self, folder: &str) -> Result<Vec<Entry>, StorageError>;

    /// Deletes an object, durably. It is no error if there is none.
    fn delete(&self, name: &str) -> Result<(), StorageError>;

    /// Reads a whole object. The caller has bounded its size.
    fn get(&self, name: &str) -> Result<Vec<u8>, StorageError> {
        let size = self.size(name)?;
        self.get_range(name, 0..size)
    }
}

/// An object of a folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Its name inside the folder.
    pub file: String,
    /// Its size.
    pub bytes: u64,
}

/// Why a storage did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// There is no object of this name.
    #[error("it is not there")]
    Missing,
    /// The object does not fit.
    #[error("no space left: {needed} bytes are needed, {free} bytes can be had")]
    Full {
        /// The object's size.
        needed: u64,
        /// What the storage has left, without what was written of the object.
        free: u64,
    },
    /// The object is shorter than the range that was asked for.
    #[error("it ends early: bytes {} to {} were asked for, and {found} of them are there", .range.start, .range.end)]
    Short {
        /// The bytes that were asked for.
        range: Range<u64>,
        /// How many of them there are.
        found: u64,
    },
    /// A remote storage did not answer in time.
    #[error("no answer within {} s", .waited.as_secs())]
    Late {
        /// How long it was waited for.
        waited: Duration,
    },
    /// Anything else that the system or the store reports.
    #[error("{}", all_words(&**.0))]
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

impl From<io::Error> for StorageError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Missing,
            _ => Self::Failed(error.into()),
        }
    }
}

/// The words of an error and of what has led to it, each once. Errors of the network say why only in
/// the last of them.
fn all_words(error: &(dyn std::error::Error + 'static)) -> String {
    let mut words = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let more = source.to_string();
        if !words.contains(&more) {
            words = format!("{words}: {more}");
        }
        next = source.source();
    }
    words
}

/// Bytes of all slices together.
fn total(slices: &[&[u8]]) -> u64 {
    slices.iter().map(|slice| slice.len() as u64).sum()
}
