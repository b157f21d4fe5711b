//! Files of a data set, read piece by piece.

use super::DataError;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A file, read through the page cache, which all workers on a host share. It is read and not mapped:
/// a file that somebody cuts short while it is in use is an error, and not the end of the process.
pub(super) struct DataFile {
    path: PathBuf,
    file: File,
    len: u64,
}

impl DataFile {
    /// Opens the file at `path`, which should be `expected`.
    pub(super) fn open(path: &Path, expected: &str) -> Result<Self, DataError> {
        let error = |why| DataError::reading(path, expected, why);
        let file = File::open(path).map_err(error)?;
        let len = file.metadata().map_err(error)?.len();
        Ok(Self { path: path.to_owned(), file, len })
    }

    /// Where the file is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// How long the file was when it was opened.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Fills `into` with what is in the file from `start` on.
    pub(super) fn read(&self, start: u64, into: &mut [u8]) -> Result<(), DataError> {
        self.file.read_exact_at(into, start).map_err(|why| match why.kind() {
            io::ErrorKind::UnexpectedEof => DataError::Truncated {
                path: self.path.clone(),
                expected: start.saturating_add(into.len() as u64),
                got: self.file.metadata().map_or(0, |now| now.len()),
            },
            _ => DataError::reading(&self.path, "a file of data", why),
        })
    }
}
