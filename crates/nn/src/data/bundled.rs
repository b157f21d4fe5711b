//! The data set that is part of the program: 5,600 images of Fashion-MNIST.

use super::idx::{Contents, Idx};
use super::{DataError, Split};

/// The name by which it is asked for.
pub(super) const NAME: &str = "fashion-mnist-mini";

const NAMES: [&str; 10] = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
];

macro_rules! bundled {
    ($file:literal) => {
        (
            concat!("fashion-mnist-mini/", $file),
            include_bytes!(concat!("../../data/fashion-mnist-mini/", $file)).as_slice(),
        )
    };
}

/// Opens one split of it; this unpacks it into memory.
pub(super) fn fashion_mnist_mini(split: Split) -> Result<Idx, DataError> {
    let (images, labels) = match split {
        Split::Train => {
            (bundled!("train-images-idx3-ubyte.gz"), bundled!("train-labels-idx1-ubyte.gz"))
        }
        Split::Test => {
            (bundled!("t10k-images-idx3-ubyte.gz"), bundled!("t10k-labels-idx1-ubyte.gz"))
        }
    };
    let images = Contents::bundled_images(images.0, images.1)?;
    let labels = Contents::bundled_labels(labels.0, labels.1)?;
    Ok(Idx::new(images, labels, NAMES.len())?.with_names(&NAMES))
}
