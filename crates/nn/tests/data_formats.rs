//! Every format, as it should be and as it should not. LMDB's tests are beside its code.

use flate2::Compression;
use flate2::write::GzEncoder;
use image::{GrayImage, Luma, Rgb, RgbImage};
use poseidon_nn::data::{DataError, Samples, Source, Split, Statistics, Transform, open};
use std::fs;
use std::io::Write;
use std::path::Path;
use tempfile::TempDir;

type Opened = Result<Box<dyn Samples>, DataError>;

fn open_text(text: &str, split: Split) -> Opened {
    open(&text.parse()?, split)
}

fn open_in(format: &str, folder: &TempDir, option: &str, split: Split) -> Opened {
    open_text(&format!("{format}:{}{option}", folder.path().display()), split)
}

/// What went wrong, with the folder left out.
fn message(folder: &TempDir, error: DataError) -> String {
    error.to_string().replace(&folder.path().display().to_string(), "FOLDER")
}

fn read(samples: &dyn Samples, index: usize) -> Result<(Vec<u8>, u32), DataError> {
    let mut image = vec![0; samples.shape().iter().product()];
    let label = samples.read(index, &mut image)?;
    Ok((image, label))
}

#[test]
fn the_bundled_set_is_balanced_and_whole() {
    for (split, per_class) in [(Split::Train, 460), (Split::Test, 100)] {
        let samples = open_text("fashion-mnist-mini", split).unwrap();
        assert_eq!(samples.shape(), [1, 28, 28]);
        assert_eq!(samples.classes(), 10);
        assert_eq!(samples.class_names()[9], "Ankle boot");
        let statistics = Statistics::of(&*samples, usize::MAX).unwrap();
        assert_eq!(statistics.histogram, [per_class; 10]);
        // The full set's mean and deviation are 72.9 and 90.0.
        assert!((statistics.mean[0] - 72.9).abs() < 2.0, "{statistics:?}");
        assert!((statistics.deviation[0] - 90.0).abs() < 2.0, "{statistics:?}");
    }
    // The full set's first training image is an ankle boot.
    let samples = open_text("fashion-mnist-mini", Split::Train).unwrap();
    let (image, label) = read(&*samples, 0).unwrap();
    assert_eq!(label, 9);
    assert_eq!(image.iter().map(|&pixel| u64::from(pixel)).sum::<u64>(), 76_247);
    let transform = Transform::from_samples(&*samples).unwrap();
    assert_eq!(transform.channels(), 1);
}

fn write_cifar10(folder: &Path, name: &str, labels: &[u8]) {
    let record = |&label: &u8| [vec![label], vec![label * 10; 3072]].concat();
    fs::write(folder.join(name), labels.iter().flat_map(record).collect::<Vec<_>>()).unwrap();
}

fn cifar10() -> TempDir {
    let folder = TempDir::new().unwrap();
    for batch in 1..=5 {
        write_cifar10(folder.path(), &format!("data_batch_{batch}.bin"), &[batch, 0]);
    }
    write_cifar10(folder.path(), "test_batch.bin", &[9, 8, 7]);
    folder
}

#[test]
fn cifar10_is_read_across_its_files() {
    let folder = cifar10();
    let train = open_in("cifar10", &folder, "", Split::Train).unwrap();
    assert_eq!((train.len(), train.shape(), train.classes()), (10, [3, 32, 32], 10));
    assert!(train.class_names().is_empty());
    let labels: Vec<_> = (0..10).map(|i| read(&*train, i).unwrap().1).collect();
    assert_eq!(labels, [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]);
    assert_eq!(read(&*train, 8).unwrap().0, [50; 3072]);
    assert_eq!(open_in("cifar10", &folder, "", Split::Test).unwrap().len(), 3);

    let some = open_in("cifar10", &folder, "?batches=4,2", Split::Train).unwrap();
    assert_eq!(some.len(), 4);
    assert_eq!(read(&*some, 0).unwrap().1, 4);

    let names = "airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n";
    fs::write(folder.path().join("batches.meta.txt"), names).unwrap();
    let named = open_text(&folder.path().display().to_string(), Split::Train).unwrap();
    assert_eq!(named.class_names()[3], "cat");
}

#[test]
fn broken_cifar10_is_named() {
    let folder = cifar10();
    write_cifar10(folder.path(), "data_batch_2.bin", &[3, 10]);
    let train = open_in("cifar10", &folder, "", Split::Train).unwrap();
    assert_eq!(read(&*train, 2).unwrap().1, 3);
    assert_eq!(
        message(&folder, read(&*train, 3).unwrap_err()),
        "FOLDER/data_batch_2.bin, record 1: expected a label below 10, got 10"
    );
    drop(train);

    let failure = || message(&folder, open_in("cifar10", &folder, "", Split::Train).err().unwrap());
    for (len, record, rest) in [(3073 * 2 - 1, 1, 3072), (1, 0, 1), (0, 0, 0)] {
        fs::write(folder.path().join("data_batch_4.bin"), vec![0; len]).unwrap();
        assert_eq!(
            failure(),
            format!(
                "FOLDER/data_batch_4.bin, record {record}: expected a file of whole records of 3073 \
                 bytes, got {len} bytes, of which the last {rest} are no record"
            )
        );
    }
    fs::remove_file(folder.path().join("data_batch_4.bin")).unwrap();
    assert_eq!(
        failure(),
        "FOLDER/data_batch_4.bin: expected a batch of CIFAR-10 (binary version) here, and there is \
         nothing"
    );
}

fn idx(magic: u32, dimensions: &[u32], body: &[u8]) -> Vec<u8> {
    let header = [&[magic], dimensions].concat();
    let header = header.iter().flat_map(|word| word.to_be_bytes());
    header.chain(body.iter().copied()).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Four images of 2 rows and 3 columns, image i all of pixel i.
fn images() -> Vec<u8> {
    idx(0x803, &[4, 2, 3], &[0, 1, 2, 3].map(|i| [i; 6]).concat())
}

fn labels() -> Vec<u8> {
    idx(0x801, &[4], &[0, 2, 1, 2])
}

const IMAGES: &str = "train-images-idx3-ubyte";
const LABELS: &str = "train-labels-idx1-ubyte";

/// Either kind of file: under this name, with these contents.
fn folder_of(files: &[(&str, Vec<u8>)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

#[test]
fn idx_is_the_same_gzipped_or_not_and_in_either_spelling() {
    let (zipped_images, zipped_labels) = (format!("{IMAGES}.gz"), format!("{LABELS}.gz"));
    for files in [
        [(IMAGES, images()), (LABELS, labels())],
        [(&zipped_images, gzip(&images())), (&zipped_labels, gzip(&labels()))],
        [("train-images.idx3-ubyte", images()), ("train-labels.idx1-ubyte.gz", gzip(&labels()))],
    ] {
        let folder = folder_of(&files);
        for source in
            [format!("idx:{}", folder.path().display()), folder.path().display().to_string()]
        {
            let samples = open_text(&source, Split::Train).unwrap();
            assert_eq!((samples.len(), samples.shape(), samples.classes()), (4, [1, 2, 3], 3));
            assert_eq!(read(&*samples, 3).unwrap(), (vec![3; 6], 2));
            assert_eq!(read(&*samples, 0).unwrap(), (vec![0; 6], 0));
        }
    }
}

#[test]
fn the_classes_of_a_test_set_are_the_training_sets() {
    let folder = folder_of(&[
        (IMAGES, images()),
        (LABELS, labels()),
        ("t10k-images-idx3-ubyte", images()),
        ("t10k-labels-idx1-ubyte", idx(0x801, &[4], &[0, 1, 1, 1])),
    ]);
    assert_eq!(open_in("idx", &folder, "", Split::Test).unwrap().classes(), 3);
    fs::write(folder.path().join("t10k-labels-idx1-ubyte"), idx(0x801, &[4], &[0, 1, 3, 1]))
        .unwrap();
    assert_eq!(
        message(&folder, open_in("idx", &folder, "", Split::Test).err().unwrap()),
        "FOLDER/t10k-labels-idx1-ubyte, record 2: expected a label below 3, got 3"
    );
    assert_eq!(open_in("idx", &folder, "?classes=9", Split::Test).unwrap().classes(), 9);
    assert_eq!(
        message(&folder, open_in("idx", &folder, "?classes=2", Split::Train).err().unwrap()),
        format!("FOLDER/{LABELS}, record 1: expected a label below 2, got 2")
    );
}

#[test]
fn broken_idx_is_named() {
    let whole = images();
    let truncated = |len: usize, expected| {
        let got = format!("expected {expected} bytes, got {len}: the file is truncated");
        (whole[..len].to_vec(), got)
    };
    let cases = [
        truncated(0, 16),
        truncated(3, 16),
        truncated(15, 16),
        truncated(16, 40),
        truncated(39, 40),
        ([images(), vec![0]].concat(), "expected 40 bytes, as its header says, got more".into()),
        (
            idx(0x801, &[40], &[0; 40]),
            "expected the magic number 0x00000803 (an IDX file of images), got 0x00000801".into(),
        ),
        (idx(0x803, &[0, 2, 3], &[]), "expected dimensions of at least 1, got [0, 2, 3]".into()),
        (
            idx(0x803, &[u32::MAX; 3], &[]),
            format!("expected dimensions of at least 1, got [{0}, {0}, {0}]", u32::MAX),
        ),
    ];
    for (bytes, wrong) in cases {
        let plain = folder_of(&[(IMAGES, bytes.clone()), (LABELS, labels())]);
        let error = open_in("idx", &plain, "", Split::Train).err().unwrap();
        assert_eq!(message(&plain, error), format!("FOLDER/{IMAGES}: {wrong}"));

        let zipped = format!("{IMAGES}.gz");
        let zipped = folder_of(&[(&zipped, gzip(&bytes)), (LABELS, labels())]);
        let error = open_in("idx", &zipped, "", Split::Train).err().unwrap();
        assert_eq!(message(&zipped, error), format!("FOLDER/{IMAGES}.gz: {wrong}"));
    }
}

#[test]
fn images_without_labels_and_labels_without_images_are_named() {
    let folder = folder_of(&[(IMAGES, images())]);
    assert_eq!(
        message(&folder, open_in("idx", &folder, "", Split::Train).err().unwrap()),
        format!("FOLDER/{LABELS}: expected an IDX file of labels here, and there is nothing")
    );
    fs::write(folder.path().join(LABELS), idx(0x801, &[3], &[0; 3])).unwrap();
    assert_eq!(
        message(&folder, open_in("idx", &folder, "", Split::Train).err().unwrap()),
        format!("FOLDER/{LABELS}: expected 4 labels, one per image of FOLDER/{IMAGES}, got 3")
    );
}

#[test]
fn a_gzip_file_is_checked_to_its_end() {
    let packed = gzip(&images());
    let name = format!("{IMAGES}.gz");
    let failure = |bytes: &[u8]| {
        let folder = folder_of(&[(&name, bytes.to_vec()), (LABELS, labels())]);
        let error = open_in("idx", &folder, "", Split::Train).err().unwrap();
        (message(&folder, error.clone()), error)
    };
    // In the header, in the contents, and in the checksum, when all contents are there.
    for len in [0, 5, packed.len() / 2, packed.len() - 9, packed.len() - 1] {
        let (message, error) = failure(&packed[..len]);
        assert!(matches!(error, DataError::Truncated { .. }), "{len}: {message}");
    }
    let mut damaged = packed.clone();
    damaged[packed.len() - 8] ^= 1;
    let (message, _) = failure(&damaged);
    assert!(
        message.starts_with("FOLDER/train-images-idx3-ubyte.gz: expected a gzip file"),
        "{message}"
    );
    let (message, _) = failure(&images());
    assert!(
        message.starts_with("FOLDER/train-images-idx3-ubyte.gz: expected a gzip file"),
        "{message}"
    );
}

fn coloured(folder: &Path, name: &str, size: [u32; 2], pixel: [u8; 3]) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    RgbImage::from_pixel(size[0], size[1], Rgb(pixel)).save(path).unwrap();
}

fn pictures() -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, pixel) in [
        ("train/dog/b.png", [3, 4, 5]),
        ("train/cat/a.png", [0, 1, 2]),
        ("train/cat/B.BMP", [7, 8, 9]),
        ("train/dog/.hidden.png", [0, 0, 0]),
        ("test/dog/x.png", [1, 1, 1]),
    ] {
        coloured(folder.path(), name, [3, 2], pixel);
    }
    folder
}

#[test]
fn folders_of_images_are_classes_in_order_of_their_names() {
    let folder = pictures();
    for source in
        [format!("images:{}", folder.path().display()), folder.path().display().to_string()]
    {
        let train = open_text(&source, Split::Train).unwrap();
        assert_eq!((train.len(), train.shape(), train.classes()), (3, [3, 2, 3], 2));
        assert_eq!(train.class_names(), ["cat", "dog"]);
        let planes = |[r, g, b]: [u8; 3]| [[r; 6], [g; 6], [b; 6]].concat();
        assert_eq!(read(&*train, 0).unwrap(), (planes([7, 8, 9]), 0));
        assert_eq!(read(&*train, 1).unwrap(), (planes([0, 1, 2]), 0));
        assert_eq!(read(&*train, 2).unwrap(), (planes([3, 4, 5]), 1));
        let test = open_text(&source, Split::Test).unwrap();
        assert_eq!(read(&*test, 0).unwrap(), (planes([1, 1, 1]), 1));
    }
}

#[test]
fn images_are_resized_on_request_and_otherwise_refused() {
    let folder = pictures();
    coloured(folder.path(), "train/dog/c.png", [8, 8], [50, 60, 70]);
    let train = open_in("images", &folder, "", Split::Train).unwrap();
    assert_eq!(
        message(&folder, read(&*train, 3).unwrap_err()),
        "FOLDER/train/dog/c.png: expected 3x2 pixels as in the first image (?size=WIDTHxHEIGHT \
         resizes), got 8x8"
    );
    let train = open_in("images", &folder, "?size=4x5", Split::Train).unwrap();
    assert_eq!(train.shape(), [3, 5, 4]);
    assert_eq!(read(&*train, 3).unwrap(), ([[50; 20], [60; 20], [70; 20]].concat(), 1));
}

#[test]
fn grey_images_have_one_channel() {
    let folder = TempDir::new().unwrap();
    fs::create_dir_all(folder.path().join("train/a")).unwrap();
    let image = GrayImage::from_fn(2, 1, |x, _| Luma([x as u8 * 100]));
    image.save(folder.path().join("train/a/1.png")).unwrap();
    let train = open_in("images", &folder, "", Split::Train).unwrap();
    assert_eq!(train.shape(), [1, 1, 2]);
    assert_eq!(read(&*train, 0).unwrap(), (vec![0, 100], 0));
}

#[test]
fn broken_folders_of_images_are_named() {
    let folder = pictures();
    let failure = |split| message(&folder, open_in("images", &folder, "", split).err().unwrap());

    let png = fs::read(folder.path().join("train/dog/b.png")).unwrap();
    fs::write(folder.path().join("train/dog/b.png"), &png[..png.len() / 2]).unwrap();
    let train = open_in("images", &folder, "", Split::Train).unwrap();
    let error = message(&folder, read(&*train, 2).unwrap_err());
    assert!(
        error.starts_with("FOLDER/train/dog/b.png: expected a PNG, JPEG or BMP image: "),
        "{error}"
    );

    coloured(folder.path(), "test/bird/x.png", [3, 2], [0; 3]);
    assert_eq!(
        failure(Split::Test),
        "FOLDER/test/bird: expected the folder of one of the classes in FOLDER/train, got 'bird'"
    );
    fs::write(folder.path().join("train/dog/notes.txt"), "").unwrap();
    assert_eq!(
        failure(Split::Train),
        "FOLDER/train/dog/notes.txt: expected image files only (png, jpg, jpeg, bmp), got 'notes.txt'"
    );
    fs::remove_file(folder.path().join("train/dog/notes.txt")).unwrap();
    fs::create_dir(folder.path().join("train/emu")).unwrap();
    assert_eq!(
        failure(Split::Train),
        "FOLDER/train/emu: expected an image here, and there is nothing"
    );
    fs::remove_dir_all(folder.path().join("test")).unwrap();
    assert_eq!(
        failure(Split::Test),
        "FOLDER/test: expected a folder with one folder of images per class here, and there is \
         nothing"
    );
}

#[test]
fn a_folder_that_is_no_data_set_says_what_was_looked_for() {
    let folder = TempDir::new().unwrap();
    let error = Source::recognise(folder.path()).unwrap_err().to_string();
    for name in ["data_batch_1.bin", "train-images-idx3-ubyte", "data.mdb", "train/CLASS/"] {
        assert!(error.contains(name), "{error}");
    }
    let error = open_text("no/such/folder", Split::Train).err().unwrap().to_string();
    assert_eq!(
        error,
        "no/such/folder: expected fashion-mnist-mini, a FORMAT:FOLDER or a folder with a data set \
         here, and there is nothing"
    );
}
