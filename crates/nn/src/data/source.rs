//! How a person names a data set.

use super::idx::Idx;
use super::lmdb::Lmdb;
use super::{DataError, bundled};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A data set, by name.
///
/// | text | data set |
/// | --- | --- |
/// | `fashion-mnist-mini` | the one built into the program |
/// | `cifar10:FOLDER` | CIFAR-10, binary version; `?batches=1,3` takes some of the training files |
/// | `idx:FOLDER` | MNIST's format, gzipped or not; `?classes=N` says how many classes there are |
/// | `lmdb:FOLDER` | LMDB as Caffe writes it; `?classes=N` saves reading all labels at the start |
/// | `images:FOLDER` | `train/CLASS/FILE` and `test/CLASS/FILE`; `?size=WIDTHxHEIGHT` resizes |
/// | `FOLDER` | whichever of these its files say |
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The one built into the program.
    FashionMnistMini,
    /// CIFAR-10, binary version.
    Cifar10 {
        /// Where the files are.
        folder: PathBuf,
        /// Which of the training files to read: a private partition may be some of them.
        batches: Vec<u32>,
    },
    /// MNIST's format.
    Idx {
        /// Where the files are.
        folder: PathBuf,
        /// Number of classes, if not one more than the largest label of the training set.
        classes: Option<usize>,
    },
    /// LMDB as Caffe writes it.
    Lmdb {
        /// Where the environments of the splits are.
        folder: PathBuf,
        /// Number of classes, if not one more than the largest label of the training set.
        classes: Option<usize>,
    },
    /// Folders of images.
    Images {
        /// Where `train` and `test` are.
        folder: PathBuf,
        /// What to resize images to. Without it all must be as large as the first.
        size: Option<ImageSize>,
    },
    /// A folder whose format is recognised when it is opened.
    Folder(PathBuf),
}

/// Width and height of images, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSize {
    /// Pixels in a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

/// The largest image that is made or asked for, in pixels: more is a slip of the keyboard.
const MAX_PIXELS: u64 = 1 << 26;

const ALL_BATCHES: [u32; 5] = [1, 2, 3, 4, 5];

impl Source {
    /// All of CIFAR-10.
    pub(super) fn cifar10(folder: PathBuf) -> Self {
        Self::Cifar10 { folder, batches: ALL_BATCHES.to_vec() }
    }

    /// Finds out the format of a folder by the files in it.
    pub fn recognise(folder: &Path) -> Result<Self, DataError> {
        if !folder.is_dir() {
            return Err(DataError::Missing {
                path: folder.to_owned(),
                expected: format!("{}, a FORMAT:FOLDER or a folder with a data set", bundled::NAME),
            });
        }
        let folder = folder.to_owned();
        if folder.join("data_batch_1.bin").is_file() {
            return Ok(Self::cifar10(folder));
        }
        if Idx::is_in(&folder) {
            return Ok(Self::Idx { folder, classes: None });
        }
        if Lmdb::is_in(&folder) {
            return Ok(Self::Lmdb { folder, classes: None });
        }
        if folder.join("train").is_dir() {
            return Ok(Self::Images { folder, size: None });
        }
        Err(DataError::Unrecognised {
            path: folder,
            looked_for:
                "data_batch_1.bin (CIFAR-10), train-images-idx3-ubyte or the same with .gz \
                         (IDX), train/data.mdb or NAME_train_lmdb/data.mdb (LMDB), train/CLASS/ \
                         (images)"
                    .to_owned(),
        })
    }
}

impl FromStr for Source {
    type Err = DataError;

    fn from_str(text: &str) -> Result<Self, DataError> {
        let wrong = |why: String| DataError::Source { text: text.to_owned(), why };
        if text == bundled::NAME {
            return Ok(Self::FashionMnistMini);
        }
        let Some((format @ ("cifar10" | "idx" | "lmdb" | "images"), rest)) = text.split_once(':')
        else {
            if text.is_empty() {
                return Err(wrong(format!(
                    "expected {}, FORMAT:FOLDER or a folder",
                    bundled::NAME
                )));
            }
            return Ok(Self::Folder(text.into()));
        };
        let (folder, option) = match rest.split_once('?') {
            Some((folder, option)) => (folder, Some(option)),
            None => (rest, None),
        };
        if folder.is_empty() {
            return Err(wrong(format!("expected a folder after '{format}:'")));
        }
        let folder = PathBuf::from(folder);
        let option = option.map(|option| {
            let key = match format {
                "cifar10" => "batches",
                "images" => "size",
                _ => "classes",
            };
            let value = option.strip_prefix(key).and_then(|rest| rest.strip_prefix('='));
            value.ok_or_else(|| wrong(format!("expected '?{key}=...', got '?{option}'")))
        });
        let option = option.transpose()?;
        let classes = || {
            let parse = |n: &str| n.parse().ok().filter(|n| (1..=i32::MAX as usize).contains(n));
            let parsed = option.map(|n| parse(n).ok_or(n)).transpose();
            parsed.map_err(|n| wrong(format!("expected a number of classes, got '{n}'")))
        };
        Ok(match format {
            "cifar10" => {
                let parse = |n: &str| n.parse().ok().filter(|n| ALL_BATCHES.contains(n)).ok_or(());
                let batches = match option {
                    Some(list) => list.split(',').map(parse).collect::<Result<_, _>>(),
                    None => Ok(ALL_BATCHES.to_vec()),
                };
                let list = option.unwrap_or_default();
                let batches = batches
                    .map_err(|()| wrong(format!("expected batches as in '1,3', got '{list}'")))?;
                Self::Cifar10 { folder, batches }
            }
            "idx" => Self::Idx { folder, classes: classes()? },
            "lmdb" => Self::Lmdb { folder, classes: classes()? },
            _ => {
                let size = option.map(|size| size.parse().map_err(wrong)).transpose()?;
                Self::Images { folder, size }
            }
        })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FashionMnistMini => f.write_str(bundled::NAME),
            Self::Cifar10 { folder, batches } => {
                write!(f, "cifar10:{}", folder.display())?;
                if *batches == ALL_BATCHES {
                    return Ok(());
                }
                let batches: Vec<_> = batches.iter().map(u32::to_string).collect();
                write!(f, "?batches={}", batches.join(","))
            }
            Self::Idx { folder, classes } => {
                write!(f, "idx:{}", folder.display())?;
                classes.map_or(Ok(()), |classes| write!(f, "?classes={classes}"))
            }
            Self::Lmdb { folder, classes } => {
                write!(f, "lmdb:{}", folder.display())?;
                classes.map_or(Ok(()), |classes| write!(f, "?classes={classes}"))
            }
            Self::Images { folder, size } => {
                write!(f, "images:{}", folder.display())?;
                size.map_or(Ok(()), |size| write!(f, "?size={size}"))
            }
            Self::Folder(folder) => write!(f, "{}", folder.display()),
        }
    }
}

impl FromStr for ImageSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |n: &str| n.parse().ok().filter(|&n: &u32| n > 0);
        let size = text.split_once('x').and_then(|(width, height)| {
            Some(Self { width: parse(width)?, height: parse(height)? })
        });
        size.filter(|size| u64::from(size.width) * u64::from(size.height) <= MAX_PIXELS)
            .ok_or_else(|| format!("expected a size such as 32x32 (width, height), got '{text}'"))
    }
}

impl fmt::Display for ImageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        for text in [
            "fashion-mnist-mini",
            "cifar10:some/folder",
            "cifar10:f?batches=1,3",
            "idx:/a b",
            "idx:x?classes=47",
            "lmdb:x",
            "lmdb:x?classes=1000",
            "images:pictures",
            "images:pictures?size=32x24",
            "some/folder",
            "odd:folder",
        ] {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), text);
        }
        let size = Some(ImageSize { width: 32, height: 24 });
        let images = Source::Images { folder: "pictures".into(), size };
        assert_eq!("images:pictures?size=32x24".parse::<Source>().unwrap(), images);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, why) in [
            ("", "expected fashion-mnist-mini, FORMAT:FOLDER or a folder"),
            ("idx:", "expected a folder after 'idx:'"),
            ("idx:x?size=3", "expected '?classes=...', got '?size=3'"),
            ("lmdb:x?classes=0", "expected a number of classes, got '0'"),
            ("cifar10:x?batches=1,6", "expected batches as in '1,3', got '1,6'"),
            ("images:x?size=32", "expected a size such as 32x32 (width, height), got '32'"),
            ("images:x?size=0x9", "expected a size such as 32x32 (width, height), got '0x9'"),
        ] {
            let error = text.parse::<Source>().unwrap_err().to_string();
            assert_eq!(error, format!("'{text}' does not name a data set: {why}"));
        }
    }
}
