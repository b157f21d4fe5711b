//! The data sets that can be fetched by name: where they are published, and their checksums.

use crate::data::Source;
use std::path::Path;

/// The data sets that can be fetched.
pub const WELL_KNOWN: &[WellKnown<'static>] = &[
    WellKnown {
        name: "mnist",
        about: "handwritten digits: 60,000 + 10,000 grey images of 28x28 pixels, 12 MB",
        base: "https://ossci-datasets.s3.amazonaws.com/mnist",
        files: &[
            plain("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            plain("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            plain("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            plain("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ],
        format: Format::Idx,
    },
    WellKnown {
        name: "fashion-mnist",
        about: "clothes: 60,000 + 10,000 grey images of 28x28 pixels, 31 MB",
        base: "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        files: &[
            plain("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            plain("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            plain("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            plain("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ],
        format: Format::Idx,
    },
    WellKnown {
        name: "cifar10",
        about: "things and animals: 50,000 + 10,000 colour images of 32x32 pixels, 170 MB",
        base: "https://www.cs.toronto.edu/~kriz",
        files: &[Remote {
            name: "cifar-10-binary.tar.gz",
            md5: "c32a1d4ab5d03f1284b67883e8d87530",
            contents: &[
                Packed { name: "data_batch_1.bin", len: Some(30_730_000) },
                Packed { name: "data_batch_2.bin", len: Some(30_730_000) },
                Packed { name: "data_batch_3.bin", len: Some(30_730_000) },
                Packed { name: "data_batch_4.bin", len: Some(30_730_000) },
                Packed { name: "data_batch_5.bin", len: Some(30_730_000) },
                Packed { name: "test_batch.bin", len: Some(30_730_000) },
                Packed { name: "batches.meta.txt", len: None },
            ],
        }],
        format: Format::Cifar10,
    },
];

/// A data set that people know by name, and where it is published.
#[derive(Clone, Copy, Debug)]
pub struct WellKnown<'a> {
    /// The name to fetch it by.
    pub name: &'a str,
    /// What it is, in a line.
    pub about: &'a str,
    /// Where its files are published.
    pub base: &'a str,
    /// Its files.
    pub files: &'a [Remote<'a>],
    /// How the folder is read afterwards.
    pub format: Format,
}

/// A published file.
#[derive(Clone, Copy, Debug)]
pub struct Remote<'a> {
    /// Its name.
    pub name: &'a str,
    /// The MD5 of its contents, which guards against accidents, in hexadecimal digits.
    pub md5: &'a str,
    /// What to unpack from it, if it is a gzipped tar archive.
    pub contents: &'a [Packed<'a>],
}

/// A file in an archive.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    /// Its name, without the folder it is in.
    pub name: &'a str,
    /// Its length. `None`: it does not matter, nor whether it is there.
    pub len: Option<u64>,
}

/// How a folder of fetched files is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// As [`Source::Idx`].
    Idx,
    /// As [`Source::Cifar10`].
    Cifar10,
}

impl WellKnown<'_> {
    /// How the set is named once it has been fetched into `folder`.
    pub fn source(&self, folder: &Path) -> Source {
        let folder = folder.to_owned();
        match self.format {
            Format::Idx => Source::Idx { folder, classes: None },
            Format::Cifar10 => Source::cifar10(folder),
        }
    }
}

const fn plain(name: &'static str, md5: &'static str) -> Remote<'static> {
    Remote { name, md5, contents: &[] }
}
