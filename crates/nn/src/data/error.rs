//! What can be wrong with a data set, said so that a person knows which file to look at.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Why samples could not be had.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A text that does not name a data set.
    #[error("'{text}' does not name a data set: {why}")]
    Source {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A folder that holds no data set of a known format.
    #[error("{}: not a data set; looked for {looked_for}", .path.display())]
    Unrecognised {
        /// The folder.
        path: PathBuf,
        /// The files that would have told the format.
        looked_for: String,
    },
    /// A file or folder that the format needs is not there.
    #[error("{}: expected {expected} here, and there is nothing", .path.display())]
    Missing {
        /// Where it should be.
        path: PathBuf,
        /// What it is.
        expected: String,
    },
    /// The operating system would not let a file be read.
    #[error("{}: {why}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        why: Arc<io::Error>,
    },
    /// A file ends too early.
    #[error("{}: expected {expected} bytes, got {got}: the file is truncated", .path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// How long it should be (unpacked, if it is compressed).
        expected: u64,
        /// How long it is.
        got: u64,
    },
    /// A file, or one record of it, is not what the format says.
    #[error("{}: expected {expected}, got {got}", place(.path, *.record))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The record, counted from 0, if it is about one.
        record: Option<usize>,
        /// What the format says.
        expected: String,
        /// What is there.
        got: String,
    },
    /// A label that no class has.
    #[error("{}: expected a label below {classes}, got {label}", place(.path, Some(*.record)))]
    Label {
        /// The file.
        path: PathBuf,
        /// The record, counted from 0.
        record: usize,
        /// Number of classes.
        classes: usize,
        /// The label.
        label: i64,
    },
    /// An image that cannot be decoded.
    #[error("{}: expected a PNG, JPEG or BMP image: {why}", place(.path, *.record))]
    Image {
        /// The file.
        path: PathBuf,
        /// The record, counted from 0, if the file has several.
        record: Option<usize>,
        /// What the decoder said.
        why: String,
    },
    /// A step needs more samples than there are.
    #[error(
        "a batch of {batch} is larger than a rank's partition: {samples} samples over {ranks} ranks \
         are {} each", .samples / (*.ranks).max(1)
    )]
    BatchTooLarge {
        /// Samples per step and rank.
        batch: usize,
        /// Ranks that share the samples.
        ranks: usize,
        /// Samples there are.
        samples: usize,
    },
    /// A sampler that cannot exist.
    #[error("{what}: expected {expected}, got {got}")]
    Sampling {
        /// Which of its numbers.
        what: &'static str,
        /// What would do.
        expected: String,
        /// What was given.
        got: u64,
    },
    /// A transform for images of another kind.
    #[error("the transform is for {transform} channels, the images have {images}")]
    Channels {
        /// Channels of the transform.
        transform: usize,
        /// Channels of the images.
        images: usize,
    },
    /// A transform that would make infinities.
    #[error(
        "transform: expected one finite mean and scale per channel, got {means:?} and {scales:?}"
    )]
    Transform {
        /// The means.
        means: Vec<f32>,
        /// The scales.
        scales: Vec<f32>,
    },
    /// The thread that reads ahead could not be started.
    #[error("cannot start a thread to read ahead: {0}")]
    Thread(Arc<io::Error>),
    /// The thread that reads ahead panicked.
    #[error("the thread that reads ahead panicked: {0}")]
    Panicked(String),
    /// No batch came from the thread that reads ahead.
    #[error(
        "epoch {epoch}, after {samples} samples: the batch was not read within {waited:?}: storage hangs"
    )]
    Stalled {
        /// The epoch of the batch.
        epoch: u64,
        /// Samples of the epoch that were taken before.
        samples: usize,
        /// How long was waited.
        waited: Duration,
    },
}

impl DataError {
    /// What went wrong with opening or reading `path`, which should be `expected`.
    pub(super) fn reading(path: &Path, expected: &str, why: io::Error) -> Self {
        match why.kind() {
            io::ErrorKind::NotFound => {
                Self::Missing { path: path.to_owned(), expected: expected.to_owned() }
            }
            _ => Self::Io { path: path.to_owned(), why: Arc::new(why) },
        }
    }
}

fn place(path: &Path, record: Option<usize>) -> String {
    match record {
        Some(record) => format!("{}, record {record}", path.display()),
        None => path.display().to_string(),
    }
}
