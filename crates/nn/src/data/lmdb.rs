//! LMDB environments as Caffe's tools write them: one [`Datum`] per key.

mod pages;

use super::datum::Datum;
use super::file::DataFile;
use super::images::{self, Order};
use super::{DataError, Samples, Split};
use pages::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// One environment.
pub(super) struct Lmdb {
    file: DataFile,
    /// By sample: where its record lies. A sample's number is its key's place in LMDB's order.
    records: Vec<Value>,
    shape: [usize; 3],
    classes: usize,
}

impl Lmdb {
    /// Opens the environment of a split. Without `classes`, the labels of the training set are all
    /// read to find the largest.
    pub(super) fn open(
        folder: &Path,
        classes: Option<usize>,
        split: Split,
    ) -> Result<Self, DataError> {
        let mut lmdb = Self::open_environment(&find(folder, split)?)?;
        lmdb.classes = match (classes, split) {
            (Some(classes), _) => classes,
            (None, Split::Train) => lmdb.largest_label()? + 1,
            (None, Split::Test) => {
                Self::open_environment(&find(folder, Split::Train)?)?.largest_label()? + 1
            }
        };
        Ok(lmdb)
    }

    /// Whether `folder` holds a training set in this format.
    pub(super) fn is_in(folder: &Path) -> bool {
        find(folder, Split::Train).is_ok()
    }

    fn open_environment(folder: &Path) -> Result<Self, DataError> {
        let file = DataFile::open(&folder.join("data.mdb"), "an LMDB file")?;
        let records = pages::values(&file)?;
        if records.is_empty() {
            let (path, expected) = (file.path().to_owned(), "a record".to_owned());
            return Err(DataError::Missing { path, expected });
        }
        let mut lmdb = Self { file, records, shape: [0; 3], classes: 0 };
        lmdb.shape = lmdb.with_datum(0, |datum| {
            if datum.encoded {
                let image = images::decode(datum.data).map_err(|why| lmdb.bad_image(0, why))?;
                return Ok([images::channels(&image), image.height() as _, image.width() as _]);
            }
            let shape = [datum.channels, datum.height, datum.width];
            let pixels = datum.data.len().max(datum.float_data.len()) as u64;
            let size = shape.iter().try_fold(1, |size: u64, &n| size.checked_mul(n));
            if pixels == 0 || size != Some(pixels) {
                let expected = format!("{} x {} x {} pixels", shape[0], shape[1], shape[2]);
                return Err(lmdb.malformed(0, expected, pixels.to_string()));
            }
            Ok(shape.map(|n| n as usize))
        })?;
        Ok(lmdb)
    }

    fn largest_label(&self) -> Result<usize, DataError> {
        let mut largest = 0;
        for record in 0..self.records.len() {
            let label = self.with_datum(record, |datum| Ok(datum.label))?;
            // More classes than a label can tell apart: so only negative ones are out of range.
            let classes = i32::MAX as usize;
            largest = largest.max(self.checked_label(record, label, classes)?);
        }
        Ok(largest as usize)
    }

    fn with_datum<T>(
        &self,
        record: usize,
        use_datum: impl FnOnce(Datum<'_>) -> Result<T, DataError>,
    ) -> Result<T, DataError> {
        let Value { start, len } = self.records[record];
        let mut bytes = vec![0; len as usize];
        self.file.read(start, &mut bytes)?;
        let datum = Datum::decode(&bytes);
        use_datum(datum.map_err(|got| self.malformed(record, "a Caffe Datum", got))?)
    }

    fn checked_label(&self, record: usize, label: i64, classes: usize) -> Result<u32, DataError> {
        u32::try_from(label)
            .ok()
            .filter(|&label| (label as usize) < classes)
            .ok_or_else(|| DataError::Label { path: self.path(), record, classes, label })
    }

    fn malformed(&self, record: usize, expected: impl Into<String>, got: String) -> DataError {
        let path = self.path();
        DataError::Malformed { path, record: Some(record), expected: expected.into(), got }
    }

    fn bad_image(&self, record: usize, why: String) -> DataError {
        DataError::Image { path: self.path(), record: Some(record), why }
    }

    fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }
}

impl Samples for Lmdb {
    fn len(&self) -> usize {
        self.records.len()
    }

    fn shape(&self) -> [usize; 3] {
        self.shape
    }

    fn classes(&self) -> usize {
        self.classes
    }

    fn read(&self, index: usize, image: &mut [u8]) -> Result<u32, DataError> {
        let [channels, height, width] = self.shape;
        let as_first = || format!("{channels} x {height} x {width} as in the first record");
        self.with_datum(index, |datum| {
            if datum.encoded {
                let decoded =
                    images::decode(datum.data).map_err(|why| self.bad_image(index, why))?;
                let got = [decoded.height() as usize, decoded.width() as usize];
                if got != [height, width] {
                    let got = format!("{} x {}", got[0], got[1]);
                    return Err(self.malformed(index, as_first(), got));
                }
                // As Caffe sees them, and as its tools write planes that are not encoded.
                images::write_planes(&decoded, channels, Order::Bgr, image);
            } else {
                let got = [datum.channels, datum.height, datum.width];
                if got != self.shape.map(|n| n as u64) {
                    let got = format!("{} x {} x {}", got[0], got[1], got[2]);
                    return Err(self.malformed(index, as_first(), got));
                }
                if datum.data.len() == image.len() {
                    image.copy_from_slice(datum.data);
                } else if datum.data.is_empty() && datum.float_data.len() == image.len() {
                    for (byte, float) in image.iter_mut().zip(&datum.float_data) {
                        if float.fract() != 0.0 || !(0.0..=255.0).contains(float) {
                            let expected = "pixels that are whole numbers from 0 to 255";
                            return Err(self.malformed(index, expected, float.to_string()));
                        }
                        *byte = *float as u8;
                    }
                } else {
                    let got = datum.data.len().max(datum.float_data.len());
                    let expected = format!("{} pixels", image.len());
                    return Err(self.malformed(index, expected, got.to_string()));
                }
            }
            self.checked_label(index, datum.label, self.classes)
        })
    }
}

/// The folder of a split's environment: `train`, or what Caffe's examples call it, such as
/// `cifar10_train_lmdb`.
fn find(folder: &Path, split: Split) -> Result<PathBuf, DataError> {
    let endings: &[&str] = match split {
        Split::Train => &["train", "train_lmdb"],
        Split::Test => &["test", "test_lmdb", "val", "val_lmdb"],
    };
    let expected =
        format!("folder of an LMDB environment, named or ending in {}", endings.join(", "));
    let reading = |why| DataError::reading(folder, "a folder of LMDB environments", why);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(reading)? {
        let path = entry.map_err(reading)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let fits = |ending: &&str| {
            name.strip_suffix(*ending).is_some_and(|start| start.is_empty() || start.ends_with('_'))
        };
        if endings.iter().any(fits) && path.join("data.mdb").is_file() {
            found.push(path);
        }
    }
    match found.as_slice() {
        [] => {
            Err(DataError::Missing { path: folder.to_owned(), expected: format!("the {expected}") })
        }
        [one] => Ok(one.clone()),
        several => Err(DataError::Malformed {
            path: folder.to_owned(),
            record: None,
            expected: format!("one {expected}"),
            got: format!("{several:?}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use heed::types::Bytes;
    use heed::{CommitOrAbort, EnvOpenOptions};
    use image::{ImageFormat, Rgb, RgbImage};
    use std::io::Cursor;
    use tempfile::TempDir;

    /// Writes an environment as Caffe's tools do: keys are numbers with leading zeros.
    fn write(folder: &Path, datums: &[Vec<u8>]) {
        fs::create_dir_all(folder).unwrap();
        let mut options = EnvOpenOptions::new();
        options.map_size(1 << 24);
        // SAFETY: a folder of this test's own.
        let env = unsafe { options.open(folder) }.unwrap();
        let create = env.create_databases_and_commit(env.write_txn().unwrap(), |opener, txn| {
            let created = opener.create_database::<Bytes, Bytes>(txn, None);
            created.map(CommitOrAbort::<_, ()>::Commit)
        });
        let database = create.unwrap().unwrap_commit();
        let mut transaction = env.write_txn().unwrap();
        for (number, datum) in datums.iter().enumerate() {
            let key = format!("{number:08}");
            database.put(&mut transaction, key.as_bytes(), datum).unwrap();
        }
        transaction.commit().unwrap();
    }

    fn number(field: u8, value: u64) -> Vec<u8> {
        let mut bytes = vec![field << 3];
        let mut value = value;
        while value >= 0x80 {
            bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        bytes.push(value as u8);
        bytes
    }

    fn data(bytes: &[u8]) -> Vec<u8> {
        let mut message = number(4, bytes.len() as u64);
        message[0] |= 2;
        message.extend_from_slice(bytes);
        message
    }

    fn shape(shape: [u64; 3]) -> Vec<u8> {
        [number(1, shape[0]), number(2, shape[1]), number(3, shape[2])].concat()
    }

    fn planes(pixels: &[u8; 6], label: u64) -> Vec<u8> {
        [shape([1, 2, 3]), data(pixels), number(5, label)].concat()
    }

    fn encoded(image: &RgbImage, label: u64) -> Vec<u8> {
        let mut png = Cursor::new(Vec::new());
        image.write_to(&mut png, ImageFormat::Png).unwrap();
        [data(png.get_ref()), number(5, label), number(7, 1)].concat()
    }

    /// A folder with a training set of these records.
    fn train(datums: &[Vec<u8>]) -> TempDir {
        let folder = TempDir::new().unwrap();
        write(&folder.path().join("cifar10_train_lmdb"), datums);
        folder
    }

    fn open_error(folder: &TempDir, split: Split) -> String {
        let error = Lmdb::open(folder.path(), None, split).err().unwrap().to_string();
        error.replace(&folder.path().display().to_string(), "FOLDER")
    }

    fn read_error(folder: &TempDir, record: usize) -> String {
        let lmdb = Lmdb::open(folder.path(), Some(10), Split::Train).unwrap();
        let mut image = vec![0; lmdb.shape().iter().product()];
        let error = lmdb.read(record, &mut image).unwrap_err().to_string();
        error.replace(&folder.path().display().to_string(), "FOLDER")
    }

    #[test]
    fn reads_what_caffe_writes() {
        let floats = [1.0f32, 2.0, 3.0, 4.0, 5.0, 255.0];
        let floats = floats.iter().flat_map(|f| [vec![0x35], f.to_le_bytes().to_vec()].concat());
        let floats = [shape([1, 2, 3]), floats.collect(), number(5, 3)].concat();
        let folder = train(&[planes(&[1, 2, 3, 4, 5, 6], 0), planes(&[9; 6], 7), floats]);
        write(&folder.path().join("cifar10_test_lmdb"), &[planes(&[8; 6], 1)]);

        let lmdb = Lmdb::open(folder.path(), None, Split::Train).unwrap();
        assert_eq!((lmdb.len(), lmdb.shape(), lmdb.classes()), (3, [1, 2, 3], 8));
        let mut image = [0; 6];
        assert_eq!(lmdb.read(0, &mut image).unwrap(), 0);
        assert_eq!(image, [1, 2, 3, 4, 5, 6]);
        assert_eq!(lmdb.read(1, &mut image).unwrap(), 7);
        assert_eq!(image, [9; 6]);
        assert_eq!(lmdb.read(2, &mut image).unwrap(), 3);
        assert_eq!(image, [1, 2, 3, 4, 5, 255]);

        // The classes are the training set's, and one environment may be open several times.
        let test = Lmdb::open(folder.path(), None, Split::Test).unwrap();
        assert_eq!((test.len(), test.classes()), (1, 8));
        let again = Lmdb::open(folder.path(), Some(9), Split::Train).unwrap();
        drop(lmdb);
        assert_eq!(again.read(1, &mut image).unwrap(), 7);
    }

    #[test]
    fn decodes_encoded_images_in_caffes_order_of_planes() {
        let image = RgbImage::from_fn(2, 1, |x, _| Rgb([10 + x as u8, 20, 30]));
        let large = RgbImage::new(2, 2);
        let folder = train(&[encoded(&image, 1), encoded(&large, 0), {
            [data(b"not an image"), number(7, 1)].concat()
        }]);
        let lmdb = Lmdb::open(folder.path(), None, Split::Train).unwrap();
        assert_eq!(lmdb.shape(), [3, 1, 2]);
        let mut planes = [0; 6];
        assert_eq!(lmdb.read(0, &mut planes).unwrap(), 1);
        assert_eq!(planes, [30, 30, 20, 20, 10, 11]);
        drop(lmdb);
        assert_eq!(
            read_error(&folder, 1),
            "FOLDER/cifar10_train_lmdb/data.mdb, record 1: expected 3 x 1 x 2 as in the first \
             record, got 2 x 2"
        );
        let error = read_error(&folder, 2);
        let start =
            "FOLDER/cifar10_train_lmdb/data.mdb, record 2: expected a PNG, JPEG or BMP image";
        assert!(error.starts_with(start), "{error}");
    }

    #[test]
    fn names_the_record_that_is_wrong() {
        let good = planes(&[0; 6], 1);
        let folder = train(&[
            good.clone(),
            planes(&[0; 6], 10),
            good[..good.len() - 4].to_vec(),
            [shape([1, 2, 3]), data(&[0; 5])].concat(),
            [shape([1, 3, 2]), data(&[0; 6])].concat(),
            planes(&[0; 6], u64::MAX),
            [shape([1, 2, 3]), [0x35, 0, 0, 0, 0x3f].repeat(6)].concat(),
        ]);
        let place =
            |record| format!("FOLDER/cifar10_train_lmdb/data.mdb, record {record}: expected ");
        for (record, wrong) in [
            (1, "a label below 10, got 10"),
            (2, "a Caffe Datum, got 4 bytes where 6 are announced"),
            (3, "6 pixels, got 5"),
            (4, "1 x 2 x 3 as in the first record, got 1 x 3 x 2"),
            (5, "a label below 10, got -1"),
            (6, "pixels that are whole numbers from 0 to 255, got 0.5"),
        ] {
            assert_eq!(read_error(&folder, record), format!("{}{wrong}", place(record)));
        }
        assert_eq!(
            open_error(&folder, Split::Train),
            format!("{}a Caffe Datum, got 4 bytes where 6 are announced", place(2))
        );
    }

    #[test]
    fn a_truncated_file_is_noticed_before_it_is_read() {
        let datums: Vec<_> = (0..50)
            .map(|i| [shape([1, 50, 100]), data(&[i; 5000]), number(5, 1)].concat())
            .collect();
        let folder = train(&datums);
        let path = folder.path().join("cifar10_train_lmdb/data.mdb");
        let whole = fs::metadata(&path).unwrap().len();
        assert!(Lmdb::open(folder.path(), None, Split::Train).is_ok());
        for len in [whole - 4096, whole / 2, 3 * 4096, 100, 0] {
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
            let error = Lmdb::open(folder.path(), None, Split::Train).err().unwrap();
            assert!(
                matches!(error, DataError::Truncated { got, expected, .. } if got == len && len < expected),
                "{len} of {whole} bytes: {error}"
            );
        }
        fs::write(&path, [7; 20_000]).unwrap();
        let error = open_error(&folder, Split::Train);
        assert!(error.starts_with("FOLDER/cifar10_train_lmdb/data.mdb: expected LMDB"), "{error}");
    }

    /// A tree of several levels, with values in leaves and in overflow pages.
    fn large() -> TempDir {
        let small = |i| planes(&[i; 6], 1);
        let long = |i| [shape([1, 2, 3]), data(&[i; 6]), vec![0x42, 0xb8, 0x17], vec![0; 3000]];
        let datum = |i: usize| match i % 100 {
            0 => long(i as u8).concat(),
            _ => small(i as u8),
        };
        train(&(0..3000).map(datum).collect::<Vec<_>>())
    }

    #[test]
    fn finds_every_record_of_a_deep_tree() {
        let folder = large();
        let lmdb = Lmdb::open(folder.path(), Some(10), Split::Train).unwrap();
        assert_eq!(lmdb.len(), 3000);
        let mut image = [0; 6];
        for record in 0..3000 {
            lmdb.read(record, &mut image).unwrap();
            assert_eq!(image, [record as u8; 6]);
        }
    }

    /// Damage anywhere is an error that names the file, or is in a record's own bytes. It is never
    /// the end of the process.
    #[test]
    fn flipped_bits_are_errors_and_not_signals() {
        let folder = large();
        let path = folder.path().join("cifar10_train_lmdb/data.mdb");
        let whole = fs::read(&path).unwrap();
        let mut dice = 1u64;
        let mut below = |end: usize| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (dice >> 33) as usize % end
        };
        let mut refused = 0;
        for mutant in 0..600 {
            let mut bytes = whole.clone();
            // Most of what matters stands at the beginning of pages.
            let page = below(whole.len() / 4096) * 4096;
            let at = match mutant % 4 {
                0 => below(2 * 4096),
                1 => page + below(160),
                _ => page + below(4096),
            };
            match mutant % 3 {
                0 => bytes[at] ^= 1 << below(8),
                1 => bytes[at..][..2].copy_from_slice(&[0xff; 2]),
                _ => bytes[at..][..2].copy_from_slice(&[0; 2]),
            }
            fs::write(&path, &bytes).unwrap();
            let read = Lmdb::open(folder.path(), Some(10), Split::Train).and_then(|lmdb| {
                let mut image = vec![0; lmdb.shape().iter().product()];
                (0..lmdb.len()).try_for_each(|record| lmdb.read(record, &mut image).map(drop))
            });
            if let Err(error) = read {
                assert!(error.to_string().contains("data.mdb"), "mutant {mutant}: {error}");
                refused += 1;
            }
        }
        assert!(refused > 100, "only {refused} mutants were refused");
    }

    #[test]
    fn a_file_that_is_cut_short_while_it_is_read_is_an_error() {
        let folder = large();
        let lmdb = Lmdb::open(folder.path(), Some(10), Split::Train).unwrap();
        let path = folder.path().join("cifar10_train_lmdb/data.mdb");
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(8192).unwrap();
        let error = lmdb.read(2999, &mut [0; 6]).unwrap_err().to_string();
        assert!(error.contains("data.mdb") && error.contains("truncated"), "{error}");
    }

    #[test]
    fn says_which_environment_is_missing_or_in_doubt() {
        let folder = train(&[planes(&[0; 6], 1)]);
        assert!(matches!(
            Lmdb::open(folder.path(), None, Split::Test),
            Err(DataError::Missing { path, expected })
                if path == folder.path() && expected.contains("test_lmdb")
        ));
        write(&folder.path().join("train"), &[planes(&[0; 6], 1)]);
        let error = open_error(&folder, Split::Train);
        assert!(error.contains("expected one folder of an LMDB environment"), "{error}");
        let empty = train(&[]);
        let error = open_error(&empty, Split::Train);
        assert!(
            error.ends_with("data.mdb: expected a record here, and there is nothing"),
            "{error}"
        );
    }
}
