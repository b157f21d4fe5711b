//! Data sets: where samples come from, which of them a rank reads when, and how they reach the net.
//!
//! [`Source`] names a data set, [`open`] gives its [`Samples`]; a [`Sampler`] says which of them a
//! rank reads at which step, a [`Transform`] makes numbers of pixels, and a [`Loader`] joins the three
//! and reads ahead while the net computes. [`Evaluation`] goes once through a test split.
//!
//! ```
//! use poseidon_nn::data::{Loader, Partition, Sampler, Sampling, Source, Split, Transform, open};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let source: Source = "fashion-mnist-mini".parse()?;
//! let samples = open(&source, Split::Train)?;
//! let transform = Transform::from_samples(&*samples)?;
//! let sampler = Sampler::new(Sampling {
//!     samples: samples.len(),
//!     rank: 0,
//!     ranks: 2,
//!     batch: 32,
//!     seed: 1,
//!     partition: Partition::Shared,
//! })?;
//! let mut loader = Loader::new(samples, transform, sampler)?;
//! let batch = loader.next()?;
//! assert_eq!(batch.images.len(), 32 * 28 * 28);
//! assert_eq!(batch.total, 64);
//! # Ok(())
//! # }
//! ```
//!
//! Files are read piece by piece, through the page cache that all workers on a host share. A file that
//! is damaged, or cut short while it is in use, is an error that names it.

mod bundled;
mod cifar10;
mod datum;
mod error;
pub mod fetch;
mod file;
mod grey;
mod idx;
mod images;
mod lmdb;
mod loader;
mod sampler;
mod source;
mod transform;

pub use error::DataError;
pub use grey::Grey;
pub use loader::{Batch, Evaluation, Loader};
pub use sampler::{Partition, Position, Sampler, Sampling, Step};
pub use source::{ImageSize, Source};
pub use transform::{Statistics, Transform};

use std::fmt;

/// One split of a data set: images of one size, each with a label.
pub trait Samples: Send + Sync {
    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there are none. A data set that can be opened has some.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Channels, height and width of every image.
    fn shape(&self) -> [usize; 3];

    /// Number of classes: labels are below it.
    fn classes(&self) -> usize;

    /// What the classes are called, by label; empty if nobody knows.
    fn class_names(&self) -> &[String] {
        &[]
    }

    /// Writes the image into `image`, one plane per channel, and gives its label.
    ///
    /// # Panics
    /// If there is no such sample, or if `image` does not have the length that the shape says.
    fn read(&self, index: usize, image: &mut [u8]) -> Result<u32, DataError>;
}

/// The part of a data set that is learned from, or the part that shows how much was learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// To learn from.
    Train,
    /// To measure with.
    Test,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Train => "train",
            Self::Test => "test",
        })
    }
}

/// Opens one split of a data set. What is cheap to check is checked here: lengths, magic numbers and
/// the labels of formats that keep them apart. The rest is checked as it is read.
pub fn open(source: &Source, split: Split) -> Result<Box<dyn Samples>, DataError> {
    Ok(match source {
        Source::FashionMnistMini => Box::new(bundled::fashion_mnist_mini(split)?),
        Source::Cifar10 { folder, batches } => {
            Box::new(cifar10::Cifar10::open(folder, batches, split)?)
        }
        Source::Idx { folder, classes } => Box::new(idx::Idx::open(folder, *classes, split)?),
        Source::Lmdb { folder, classes } => Box::new(lmdb::Lmdb::open(folder, *classes, split)?),
        Source::Images { folder, size } => Box::new(images::Images::open(folder, *size, split)?),
        Source::Folder(folder) => return open(&Source::recognise(folder)?, split),
    })
}
