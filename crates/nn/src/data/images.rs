//! Folders of images: `train/CLASS/FILE` and `test/CLASS/FILE` below the root.

use super::source::ImageSize;
use super::{DataError, Samples, Split};
use image::DynamicImage;
use image::imageops::FilterType;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

const EXTENSIONS: [&str; 4] = ["png", "jpg", "jpeg", "bmp"];

/// The files of one split.
pub(super) struct Images {
    files: Vec<(PathBuf, u32)>,
    /// The training set's folders, sorted: a label is a place in this list.
    names: Vec<String>,
    shape: [usize; 3],
    /// What images are made to fit. Without it they must fit by themselves.
    size: Option<ImageSize>,
}

impl Images {
    /// Lists the files. The first training image tells the number of channels and, without `size`,
    /// how large all of them are.
    pub(super) fn open(
        folder: &Path,
        size: Option<ImageSize>,
        split: Split,
    ) -> Result<Self, DataError> {
        let train = folder.join("train");
        let names = entries(&train, "a folder with one folder of images per class")?;
        let names: Vec<_> = names.into_iter().filter(|name| train.join(name).is_dir()).collect();
        let missing =
            || DataError::Missing { path: train.clone(), expected: "one folder per class".into() };
        let first_class = names.first().ok_or_else(missing)?;
        let first = files(&train.join(first_class))?.into_iter().next().ok_or_else(|| {
            DataError::Missing { path: train.join(first_class), expected: "an image".into() }
        })?;
        let image = decode_file(&first)?;
        let shape = match size {
            Some(size) => [channels(&image), size.height as usize, size.width as usize],
            None => [channels(&image), image.height() as usize, image.width() as usize],
        };

        let root = folder.join(split.to_string());
        let mut all = Vec::new();
        for class in entries(&root, "a folder with one folder of images per class")? {
            let path = root.join(&class);
            let Ok(label) = names.binary_search(&class) else {
                return Err(DataError::Malformed {
                    path,
                    record: None,
                    expected: format!("the folder of one of the classes in {}", train.display()),
                    got: format!("'{class}'"),
                });
            };
            let files = files(&path)?;
            if files.is_empty() && split == Split::Train {
                return Err(DataError::Missing { path, expected: "an image".into() });
            }
            all.extend(files.into_iter().map(|file| (file, label as u32)));
        }
        if all.is_empty() {
            return Err(DataError::Missing { path: root, expected: "an image".into() });
        }
        Ok(Self { files: all, names, shape, size })
    }
}

impl Samples for Images {
    fn len(&self) -> usize {
        self.files.len()
    }

    fn shape(&self) -> [usize; 3] {
        self.shape
    }

    fn classes(&self) -> usize {
        self.names.len()
    }

    fn class_names(&self) -> &[String] {
        &self.names
    }

    fn read(&self, index: usize, image: &mut [u8]) -> Result<u32, DataError> {
        let (path, label) = &self.files[index];
        let mut decoded = decode_file(path)?;
        let [channels, height, width] = self.shape;
        let fits = [decoded.height() as usize, decoded.width() as usize] == [height, width];
        match self.size {
            Some(size) if !fits => {
                decoded = decoded.resize_exact(size.width, size.height, FilterType::Triangle);
            }
            None if !fits => {
                return Err(DataError::Malformed {
                    path: path.clone(),
                    record: None,
                    expected: format!(
                        "{width}x{height} pixels as in the first image (?size=WIDTHxHEIGHT resizes)"
                    ),
                    got: format!("{}x{}", decoded.width(), decoded.height()),
                });
            }
            _ => {}
        }
        write_planes(&decoded, channels, Order::Rgb, image);
        Ok(*label)
    }
}

/// Which plane comes first in a colour image.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Red.
    Rgb,
    /// Blue.
    Bgr,
}

/// Decodes an image file, whose first bytes tell its format.
pub(super) fn decode(bytes: &[u8]) -> Result<DynamicImage, String> {
    let reader = image::ImageReader::new(Cursor::new(bytes)).with_guessed_format();
    let reader = reader.map_err(|why| why.to_string())?;
    reader.decode().map_err(|why| why.to_string())
}

/// One for grey images, three for coloured ones; transparency does not count.
pub(super) fn channels(image: &DynamicImage) -> usize {
    if image.color().has_color() { 3 } else { 1 }
}

/// Writes the planes of an image, made grey or coloured as `channels` says.
pub(super) fn write_planes(image: &DynamicImage, channels: usize, order: Order, out: &mut [u8]) {
    if channels == 1 {
        out.copy_from_slice(&image.to_luma8());
        return;
    }
    let pixels = image.to_rgb8();
    let plane = out.len() / 3;
    for (channel, plane) in out.chunks_exact_mut(plane).enumerate() {
        let channel = if order == Order::Bgr { 2 - channel } else { channel };
        for (value, pixel) in plane.iter_mut().zip(pixels.pixels()) {
            *value = pixel.0[channel];
        }
    }
}

fn decode_file(path: &Path) -> Result<DynamicImage, DataError> {
    let bytes = fs::read(path).map_err(|why| DataError::reading(path, "an image", why))?;
    decode(&bytes).map_err(|why| DataError::Image { path: path.to_owned(), record: None, why })
}

/// The image files of a class. Anything else there would be a sample that is silently left out.
fn files(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for name in entries(folder, "a folder of images")? {
        let path = folder.join(&name);
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let known = EXTENSIONS.iter().any(|known| extension.eq_ignore_ascii_case(known));
        if !known || !path.is_file() {
            return Err(DataError::Malformed {
                path,
                record: None,
                expected: format!("image files only ({})", EXTENSIONS.join(", ")),
                got: format!("'{name}'"),
            });
        }
        files.push(path);
    }
    Ok(files)
}

/// The names in a folder, sorted, without hidden ones.
fn entries(folder: &Path, expected: &str) -> Result<Vec<String>, DataError> {
    let error = |why| DataError::reading(folder, expected, why);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(error)? {
        let name = entry.map_err(error)?.file_name();
        let name = name.into_string().map_err(|name| DataError::Malformed {
            path: folder.to_owned(),
            record: None,
            expected: "names in UTF-8".to_owned(),
            got: format!("{name:?}"),
        })?;
        if !name.starts_with('.') {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}
