//! The binary version of CIFAR-10: records of one label byte and the red, green and blue planes.

use super::file::DataFile;
use super::{DataError, Samples, Split};
use std::fs;
use std::path::Path;

const SHAPE: [usize; 3] = [3, 32, 32];
const CLASSES: usize = 10;
const RECORD: usize = 1 + 3 * 32 * 32;

/// The batch files of one split.
pub(super) struct Cifar10 {
    files: Vec<DataFile>,
    /// For each file, the number of records in it and in those before it.
    ends: Vec<usize>,
    names: Vec<String>,
}

impl Cifar10 {
    /// Opens `data_batch_N.bin` for each of `batches`, or `test_batch.bin`.
    pub(super) fn open(folder: &Path, batches: &[u32], split: Split) -> Result<Self, DataError> {
        let names: Vec<_> = match split {
            Split::Train => batches.iter().map(|batch| format!("data_batch_{batch}.bin")).collect(),
            Split::Test => vec!["test_batch.bin".to_owned()],
        };
        let mut files = Vec::new();
        let mut ends = Vec::new();
        let mut records = 0;
        for name in names {
            let file = DataFile::open(&folder.join(name), "a batch of CIFAR-10 (binary version)")?;
            let len = file.len() as usize;
            if len == 0 || !len.is_multiple_of(RECORD) {
                return Err(DataError::Malformed {
                    path: file.path().to_owned(),
                    record: Some(len / RECORD),
                    expected: format!("a file of whole records of {RECORD} bytes"),
                    got: format!("{len} bytes, of which the last {} are no record", len % RECORD),
                });
            }
            records += len / RECORD;
            files.push(file);
            ends.push(records);
        }
        Ok(Self { files, ends, names: class_names(folder) })
    }
}

impl Samples for Cifar10 {
    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn shape(&self) -> [usize; 3] {
        SHAPE
    }

    fn classes(&self) -> usize {
        CLASSES
    }

    fn class_names(&self) -> &[String] {
        &self.names
    }

    fn read(&self, index: usize, image: &mut [u8]) -> Result<u32, DataError> {
        let file = self.ends.partition_point(|&end| end <= index);
        let record = index - if file == 0 { 0 } else { self.ends[file - 1] };
        let mut bytes = [0; RECORD];
        self.files[file].read((record * RECORD) as u64, &mut bytes)?;
        let label = bytes[0];
        if usize::from(label) >= CLASSES {
            return Err(DataError::Label {
                path: self.files[file].path().to_owned(),
                record,
                classes: CLASSES,
                label: label.into(),
            });
        }
        image.copy_from_slice(&bytes[1..]);
        Ok(label.into())
    }
}

/// The file of names comes with the data, but nothing depends on it.
fn class_names(folder: &Path) -> Vec<String> {
    let text = fs::read_to_string(folder.join("batches.meta.txt")).unwrap_or_default();
    let names = text.lines().map(str::trim).filter(|name| !name.is_empty());
    let names: Vec<_> = names.map(str::to_owned).collect();
    if names.len() == CLASSES { names } else { Vec::new() }
}
