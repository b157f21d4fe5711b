//! From pixels to the numbers a net likes.

use super::{DataError, Samples};
use serde::{Deserialize, Serialize};

/// Per channel, `(pixel - mean) * scale`.
///
/// All ranks must use the same one: ranks with partitions of their own have to agree on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transform {
    mean: Vec<f32>,
    scale: Vec<f32>,
}

/// What the pixels and labels of a data set are like.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// How many samples were looked at.
    pub samples: usize,
    /// Mean pixel of each channel, from 0 to 255.
    pub mean: Vec<f64>,
    /// Standard deviation of each channel's pixels.
    pub deviation: Vec<f64>,
    /// Number of samples of each class.
    pub histogram: Vec<usize>,
}

impl Transform {
    /// Enough samples to know a mean of pixels to three digits.
    pub const SAMPLES: usize = 10_000;

    /// The means and scales given, one of each per channel.
    pub fn new(mean: Vec<f32>, scale: Vec<f32>) -> Result<Self, DataError> {
        let finite = mean.iter().chain(&scale).all(|number| number.is_finite());
        if mean.len() != scale.len() || mean.is_empty() || !finite {
            return Err(DataError::Transform { means: mean, scales: scale });
        }
        Ok(Self { mean, scale })
    }

    /// Makes pixels of mean 0 and deviation 1, as far as [`Transform::SAMPLES`] samples tell.
    pub fn from_samples(samples: &dyn Samples) -> Result<Self, DataError> {
        Ok(Self::from_statistics(&Statistics::of(samples, Self::SAMPLES)?))
    }

    /// Makes pixels of mean 0 and deviation 1.
    pub fn from_statistics(statistics: &Statistics) -> Self {
        let mean = statistics.mean.iter().map(|&mean| mean as f32).collect();
        // A channel that is the same everywhere tells nothing and must not become infinite.
        let scale = |&deviation: &f64| if deviation > 0.0 { (1.0 / deviation) as f32 } else { 0.0 };
        Self { mean, scale: statistics.deviation.iter().map(scale).collect() }
    }

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.mean.len()
    }

    /// Transforms one image.
    ///
    /// # Panics
    /// If the two are not of the same length, or not a number of whole planes, one per channel.
    pub fn apply(&self, image: &[u8], out: &mut [f32]) {
        assert_eq!(image.len(), out.len(), "an image and where it goes");
        assert_eq!(image.len() % self.channels(), 0, "planes of {} channels", self.channels());
        let plane = (image.len() / self.channels()).max(1);
        let planes = image.chunks_exact(plane).zip(out.chunks_exact_mut(plane));
        for ((pixels, out), (&mean, &scale)) in planes.zip(self.mean.iter().zip(&self.scale)) {
            for (out, &pixel) in out.iter_mut().zip(pixels) {
                *out = (f32::from(pixel) - mean) * scale;
            }
        }
    }
}

impl Statistics {
    /// Looks at no more than `at_most` samples, spread evenly: the same ones every time.
    pub fn of(samples: &dyn Samples, at_most: usize) -> Result<Self, DataError> {
        let [channels, height, width] = samples.shape();
        let looked_at = samples.len().min(at_most);
        let mut image = vec![0; channels * height * width];
        // Whole numbers, so that the sums are exact: 2^64 is room for 2^48 pixels of 255 squared.
        let mut sums = vec![(0u64, 0u64); channels];
        let mut histogram = vec![0; samples.classes()];
        for i in 0..looked_at {
            let index = (i as u128 * samples.len() as u128 / looked_at as u128) as usize;
            let label = samples.read(index, &mut image)?;
            histogram[label as usize] += 1;
            for (plane, (sum, squares)) in image.chunks_exact(height * width).zip(&mut sums) {
                // In parts that fit 32 bits, which the compiler makes wide instructions of.
                for part in plane.chunks(1 << 16) {
                    *sum += u64::from(part.iter().map(|&p| u32::from(p)).sum::<u32>());
                    *squares += u64::from(part.iter().map(|&p| u32::from(p).pow(2)).sum::<u32>());
                }
            }
        }
        let pixels = (looked_at * height * width).max(1) as f64;
        let mean = |&(sum, _): &(u64, u64)| sum as f64 / pixels;
        let deviation = |sums: &(u64, u64)| {
            let variance = sums.1 as f64 / pixels - mean(sums).powi(2);
            variance.max(0.0).sqrt()
        };
        Ok(Self {
            samples: looked_at,
            mean: sums.iter().map(mean).collect(),
            deviation: sums.iter().map(deviation).collect(),
            histogram,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two channels of two pixels: `[i, i, 7, 7]`, with label `i % 3`.
    struct Ramp(usize);

    impl Samples for Ramp {
        fn len(&self) -> usize {
            self.0
        }

        fn shape(&self) -> [usize; 3] {
            [2, 1, 2]
        }

        fn classes(&self) -> usize {
            3
        }

        fn read(&self, index: usize, image: &mut [u8]) -> Result<u32, DataError> {
            image.copy_from_slice(&[index as u8, index as u8, 7, 7]);
            Ok(index as u32 % 3)
        }
    }

    #[test]
    fn the_training_set_gets_mean_zero_and_deviation_one() {
        let samples = Ramp(101);
        let transform = Transform::from_samples(&samples).unwrap();
        let (mut image, mut out) = ([0; 4], [0.0; 4]);
        let (mut sum, mut squares) = (0.0, 0.0);
        for index in 0..samples.len() {
            samples.read(index, &mut image).unwrap();
            transform.apply(&image, &mut out);
            assert_eq!(out[0], out[1]);
            assert_eq!(out[2..], [0.0, 0.0], "a channel that never changes");
            sum += f64::from(out[0]);
            squares += f64::from(out[0]).powi(2);
        }
        assert!(sum.abs() < 1e-4, "{sum}");
        assert!((squares / 101.0 - 1.0).abs() < 1e-5, "{squares}");
    }

    #[test]
    fn statistics_of_some_samples_are_spread_over_all() {
        let statistics = Statistics::of(&Ramp(100), 10).unwrap();
        assert_eq!(statistics.samples, 10);
        assert_eq!(statistics.mean, [45.0, 7.0]);
        assert_eq!(statistics.histogram, [4, 3, 3]);
        assert_eq!(Statistics::of(&Ramp(5), 10).unwrap().samples, 5);
    }

    #[test]
    fn a_given_transform_is_checked() {
        let transform = Transform::new(vec![10.0, 0.0], vec![0.5, 2.0]).unwrap();
        let mut out = [0.0; 4];
        transform.apply(&[10, 12, 0, 255], &mut out);
        assert_eq!(out, [0.0, 1.0, 0.0, 510.0]);
        for (mean, scale) in [(vec![], vec![]), (vec![1.0], vec![]), (vec![f32::NAN], vec![1.0])] {
            assert!(matches!(Transform::new(mean, scale), Err(DataError::Transform { .. })));
        }
    }
}
