//! Colour images for nets that have one channel.

use super::{DataError, Samples};
use std::cell::RefCell;
use std::sync::Arc;

/// Samples of three channels as samples of one: the brightness of each pixel.
pub struct Grey {
    colour: Arc<dyn Samples>,
}

impl Grey {
    /// `None` if the samples have not three channels.
    pub fn new(colour: Arc<dyn Samples>) -> Option<Self> {
        (colour.shape()[0] == 3).then_some(Self { colour })
    }
}

impl Samples for Grey {
    fn len(&self) -> usize {
        self.colour.len()
    }

    fn shape(&self) -> [usize; 3] {
        let [_, height, width] = self.colour.shape();
        [1, height, width]
    }

    fn classes(&self) -> usize {
        self.colour.classes()
    }

    fn class_names(&self) -> &[String] {
        self.colour.class_names()
    }

    fn read(&self, index: usize, image: &mut [u8]) -> Result<u32, DataError> {
        thread_local! {
            /// The planes of the image that is being read.
            static PLANES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        PLANES.with_borrow_mut(|planes| {
            planes.resize(3 * image.len(), 0);
            let label = self.colour.read(index, planes)?;
            let (red, rest) = planes.split_at(image.len());
            let (green, blue) = rest.split_at(image.len());
            let colours = red.iter().zip(green).zip(blue);
            for (grey, ((red, green), blue)) in image.iter_mut().zip(colours) {
                let [red, green, blue] = [red, green, blue].map(|part| u32::from(*part));
                // ITU-R BT.601, in thousandths.
                *grey = ((299 * red + 587 * green + 114 * blue + 500) / 1000) as u8;
            }
            Ok(label)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Three;

    impl Samples for Three {
        fn len(&self) -> usize {
            1
        }
        fn shape(&self) -> [usize; 3] {
            [3, 1, 4]
        }
        fn classes(&self) -> usize {
            7
        }
        fn read(&self, _: usize, image: &mut [u8]) -> Result<u32, DataError> {
            // White, red, green, blue; plane by plane.
            image.copy_from_slice(&[255, 255, 0, 0, 255, 0, 255, 0, 255, 0, 0, 255]);
            Ok(5)
        }
    }

    #[test]
    fn a_pixel_becomes_its_brightness() {
        let grey = Grey::new(Arc::new(Three)).unwrap();
        assert_eq!((grey.shape(), grey.classes(), grey.len()), ([1, 1, 4], 7, 1));
        let mut image = [0; 4];
        assert_eq!(grey.read(0, &mut image).unwrap(), 5);
        assert_eq!(image, [255, 76, 150, 29]);
        assert!(Grey::new(Arc::new(grey)).is_none());
    }
}
