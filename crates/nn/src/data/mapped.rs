//! Files mapped into memory: the one place where data sets need `unsafe`, LMDB apart.

use super::DataError;
use memmap2::Mmap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A whole file, read through the page cache, which all workers on a host share.
pub(super) struct Mapped {
    path: PathBuf,
    bytes: Mmap,
}

impl Mapped {
    /// Maps the file at `path`, which should be `expected`.
    pub(super) fn open(path: &Path, expected: &str) -> Result<Self, DataError> {
        let error = |why| DataError::reading(path, expected, why);
        let file = File::open(path).map_err(error)?;
        // SAFETY: nobody changes or cuts a data file while it is in use; the module's documentation
        // asks for that, as every program that maps files must. Pages are only read.
        let bytes = unsafe { Mmap::map(&file) }.map_err(error)?;
        Ok(Self { path: path.to_owned(), bytes })
    }

    /// Where the file is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
