//! IDX, the format of MNIST and its relatives: one file of images and one of labels.

use super::file::DataFile;
use super::{DataError, Samples, Split};
use flate2::read::MultiGzDecoder;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// One split, with its labels all checked.
pub(super) struct Idx {
    images: Contents,
    labels: Vec<u8>,
    shape: [usize; 3],
    len: usize,
    classes: usize,
    names: Vec<String>,
}

/// A file that is known to be as long as its header says.
pub(super) struct Contents {
    path: PathBuf,
    dimensions: Vec<usize>,
    body: Body,
}

/// Where a file's bytes are. The header is among them.
enum Body {
    /// It was packed.
    Memory(Vec<u8>),
    Disk(DataFile),
}

/// Unsigned bytes, in this many dimensions: a type and a count that make up a file's magic number.
#[derive(Clone, Copy)]
enum Kind {
    Labels = 1,
    Images = 3,
}

impl Idx {
    /// Opens `train-*` or `t10k-*`. Without `classes`, the largest label of the training set tells.
    pub(super) fn open(
        folder: &Path,
        classes: Option<usize>,
        split: Split,
    ) -> Result<Self, DataError> {
        let images = Contents::find(folder, split, Kind::Images)?;
        let labels = Contents::find(folder, split, Kind::Labels)?;
        let classes = match (classes, split) {
            (Some(classes), _) => classes,
            (None, Split::Train) => labels.largest()? + 1,
            (None, Split::Test) => {
                Contents::find(folder, Split::Train, Kind::Labels)?.largest()? + 1
            }
        };
        Self::new(images, labels, classes)
    }

    /// Joins images and labels, and checks that they belong together.
    pub(super) fn new(
        images: Contents,
        labels: Contents,
        classes: usize,
    ) -> Result<Self, DataError> {
        let (len, height, width) = match images.dimensions[..] {
            [len, height, width] => (len, height, width),
            _ => {
                unreachable!("a file of images has three dimensions: its magic number was checked")
            }
        };
        if labels.dimensions != [len] {
            return Err(DataError::Malformed {
                path: labels.path,
                record: None,
                expected: format!("{len} labels, one per image of {}", images.path.display()),
                got: labels.dimensions[0].to_string(),
            });
        }
        let path = labels.path.clone();
        let labels = labels.all()?;
        let bad = labels.iter().position(|&label| usize::from(label) >= classes);
        if let Some(record) = bad {
            let label = labels[record].into();
            return Err(DataError::Label { path, record, classes, label });
        }
        Ok(Self { images, labels, shape: [1, height, width], len, classes, names: Vec::new() })
    }

    /// The same, with names for the classes.
    pub(super) fn with_names(mut self, names: &[&str]) -> Self {
        self.names = names.iter().map(|&name| name.to_owned()).collect();
        self
    }

    /// Whether `folder` holds training images in this format.
    pub(super) fn is_in(folder: &Path) -> bool {
        candidates(folder, Split::Train, Kind::Images).iter().any(|path| path.is_file())
    }
}

impl Samples for Idx {
    fn len(&self) -> usize {
        self.len
    }

    fn shape(&self) -> [usize; 3] {
        self.shape
    }

    fn classes(&self) -> usize {
        self.classes
    }

    fn class_names(&self) -> &[String] {
        &self.names
    }

    fn read(&self, index: usize, image: &mut [u8]) -> Result<u32, DataError> {
        let size = self.shape.iter().product::<usize>();
        self.images.read(index * size, &mut image[..size])?;
        Ok(self.labels[index].into())
    }
}

impl Contents {
    /// Images that were gzipped into the program.
    pub(super) fn bundled_images(name: &str, packed: &[u8]) -> Result<Self, DataError> {
        Self::unpack(Path::new(name), packed, Kind::Images)
    }

    /// Labels that were gzipped into the program.
    pub(super) fn bundled_labels(name: &str, packed: &[u8]) -> Result<Self, DataError> {
        Self::unpack(Path::new(name), packed, Kind::Labels)
    }

    fn find(folder: &Path, split: Split, kind: Kind) -> Result<Self, DataError> {
        let candidates = candidates(folder, split, kind);
        // The first name is the one to tell a person who has none of them.
        let path = candidates.iter().find(|path| path.is_file()).unwrap_or(&candidates[0]);
        if path.extension().is_some_and(|extension| extension == "gz") {
            let file =
                File::open(path).map_err(|why| DataError::reading(path, kind.what(), why))?;
            Self::unpack(path, io::BufReader::new(file), kind)
        } else {
            Self::on_disk(path, kind)
        }
    }

    fn on_disk(path: &Path, kind: Kind) -> Result<Self, DataError> {
        let file = DataFile::open(path, kind.what())?;
        let mut header = vec![0; file.len().min(kind.header_len() as u64) as usize];
        file.read(0, &mut header)?;
        let (dimensions, expected) = kind.header(path, &header)?;
        check_len(path, expected, file.len())?;
        Ok(Self { path: path.to_owned(), dimensions, body: Body::Disk(file) })
    }

    /// Unpacks no more than the header announces, whatever the file would unpack to.
    fn unpack(path: &Path, packed: impl Read, kind: Kind) -> Result<Self, DataError> {
        let mut unpacker = MultiGzDecoder::new(packed);
        let mut bytes = Vec::new();
        let read = unpacker.by_ref().take(kind.header_len() as u64).read_to_end(&mut bytes);
        let whole = |read: io::Result<usize>, expected: u64, got: usize| match read {
            Ok(_) => Ok(()),
            Err(why) if why.kind() == io::ErrorKind::UnexpectedEof => {
                Err(DataError::Truncated { path: path.to_owned(), expected, got: got as u64 })
            }
            Err(why) if why.raw_os_error().is_some() => {
                Err(DataError::reading(path, kind.what(), why))
            }
            Err(why) => Err(DataError::Malformed {
                path: path.to_owned(),
                record: None,
                expected: "a gzip file".to_owned(),
                got: why.to_string(),
            }),
        };
        whole(read, kind.header_len() as u64, bytes.len())?;
        let (dimensions, expected) = kind.header(path, &bytes)?;
        // One byte more than there should be: to notice a file that goes on, and to make the unpacker
        // see the end of a good one, where the checksum is.
        let rest = expected - bytes.len() as u64 + 1;
        let read = unpacker.take(rest).read_to_end(&mut bytes);
        whole(read, expected, bytes.len())?;
        check_len(path, expected, bytes.len() as u64)?;
        Ok(Self { path: path.to_owned(), dimensions, body: Body::Memory(bytes) })
    }

    /// Fills `into` with what is behind the header, from `start` on.
    fn read(&self, start: usize, into: &mut [u8]) -> Result<(), DataError> {
        let start = 4 + 4 * self.dimensions.len() + start;
        match &self.body {
            Body::Memory(bytes) => into.copy_from_slice(&bytes[start..][..into.len()]),
            Body::Disk(file) => file.read(start as u64, into)?,
        }
        Ok(())
    }

    /// All that is behind the header. The file is as long as the header says.
    fn all(&self) -> Result<Vec<u8>, DataError> {
        let mut bytes = vec![0; self.dimensions.iter().product()];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    fn largest(&self) -> Result<usize, DataError> {
        Ok(self.all()?.into_iter().max().unwrap_or(0).into())
    }
}

impl Kind {
    fn what(self) -> &'static str {
        match self {
            Self::Labels => "an IDX file of labels",
            Self::Images => "an IDX file of images",
        }
    }

    fn header_len(self) -> usize {
        4 + 4 * self as usize
    }

    /// The dimensions that a file begins with, and how long the whole of it must be.
    fn header(self, path: &Path, bytes: &[u8]) -> Result<(Vec<usize>, u64), DataError> {
        let Some(header) = bytes.get(..self.header_len()) else {
            return Err(DataError::Truncated {
                path: path.to_owned(),
                expected: self.header_len() as u64,
                got: bytes.len() as u64,
            });
        };
        let malformed = |expected, got| DataError::Malformed {
            path: path.to_owned(),
            record: None,
            expected,
            got,
        };
        let word = |i: usize| u32::from_be_bytes([0, 1, 2, 3].map(|byte| header[4 * i + byte]));
        let magic = 0x0800 | self as u32;
        if word(0) != magic {
            let got = format!("{:#010x}", word(0));
            return Err(malformed(
                format!("the magic number {magic:#010x} ({})", self.what()),
                got,
            ));
        }
        let dimensions: Vec<_> = (1..=self as usize).map(|i| word(i) as usize).collect();
        let size = dimensions.iter().try_fold(1u64, |size, &n| size.checked_mul(n as u64));
        match size {
            Some(size @ 1..) if size < isize::MAX as u64 / 2 => {
                Ok((dimensions, size + self.header_len() as u64))
            }
            _ => Err(malformed("dimensions of at least 1".to_owned(), format!("{dimensions:?}"))),
        }
    }
}

/// MNIST's names, in the two spellings that go around.
fn candidates(folder: &Path, split: Split, kind: Kind) -> Vec<PathBuf> {
    let split = match split {
        Split::Train => "train",
        Split::Test => "t10k",
    };
    let kind = match kind {
        Kind::Labels => ["labels-idx1-ubyte", "labels.idx1-ubyte"],
        Kind::Images => ["images-idx3-ubyte", "images.idx3-ubyte"],
    };
    let names = kind.iter().flat_map(|kind| ["", ".gz"].map(|end| format!("{split}-{kind}{end}")));
    names.map(|name| folder.join(name)).collect()
}

fn check_len(path: &Path, expected: u64, got: u64) -> Result<(), DataError> {
    let path = path.to_owned();
    match got {
        _ if got < expected => Err(DataError::Truncated { path, expected, got }),
        _ if got > expected => Err(DataError::Malformed {
            path,
            record: None,
            expected: format!("{expected} bytes, as its header says"),
            got: "more".to_owned(),
        }),
        _ => Ok(()),
    }
}
