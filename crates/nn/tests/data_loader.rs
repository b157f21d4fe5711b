//! Batches as a training program gets them.

use poseidon_nn::data::{
    DataError, Evaluation, Loader, Partition, Position, Sampler, Samples, Sampling, Source, Split,
    Transform, open,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Sample i: one channel of 2 pixels, `[i, i + 1]`, with label `i % 4`. Some cannot be read.
struct Counted {
    len: usize,
    bad: Option<usize>,
    panics: bool,
    reads: Arc<AtomicUsize>,
}

impl Counted {
    fn new(len: usize) -> Self {
        Self { len, bad: None, panics: false, reads: Arc::default() }
    }
}

impl Samples for Counted {
    fn len(&self) -> usize {
        self.len
    }

    fn shape(&self) -> [usize; 3] {
        [1, 1, 2]
    }

    fn classes(&self) -> usize {
        4
    }

    fn read(&self, index: usize, image: &mut [u8]) -> Result<u32, DataError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        if self.bad == Some(index) {
            assert!(!self.panics, "sample {index} is cursed");
            let path = "counted".into();
            return Err(DataError::Label { path, record: index, classes: 4, label: 9 });
        }
        image.copy_from_slice(&[index as u8, index as u8 + 1]);
        Ok(index as u32 % 4)
    }
}

fn sampling(samples: usize, batch: usize) -> Sampling {
    Sampling { samples, rank: 0, ranks: 1, batch, seed: 3, partition: Partition::Shared }
}

fn identity() -> Transform {
    Transform::new(vec![0.0], vec![1.0]).unwrap()
}

fn loader(samples: Counted, sampling: Sampling) -> Loader {
    let samples: Arc<dyn Samples> = Arc::new(samples);
    Loader::new(samples, identity(), Sampler::new(sampling).unwrap()).unwrap()
}

#[test]
fn batches_are_the_samplers_steps() {
    let sampling = Sampling { rank: 1, ranks: 2, ..sampling(23, 5) };
    let mut sampler = Sampler::new(sampling).unwrap();
    let transform = Transform::new(vec![2.0], vec![0.5]).unwrap();
    let samples: Arc<dyn Samples> = Arc::new(Counted::new(23));
    let mut loader = Loader::new(samples, transform, sampler.clone()).unwrap();
    for _ in 0..8 {
        assert_eq!(loader.position(), sampler.position());
        let position = sampler.position();
        let step = sampler.next_step();
        let batch = loader.next().unwrap();
        assert_eq!(batch.position, position);
        assert_eq!((batch.first, batch.total), (step.first, step.total));
        let labels: Vec<_> = step.indices.iter().map(|index| index % 4).collect();
        assert_eq!(batch.labels, labels);
        let pixels = step.indices.iter().flat_map(|&index| [index as f32, index as f32 + 1.0]);
        let images: Vec<_> = pixels.map(|pixel| (pixel - 2.0) * 0.5).collect();
        assert_eq!(batch.images, images);
    }
}

#[test]
fn a_resumed_loader_gives_the_same_batches() {
    let mut first = loader(Counted::new(40), sampling(40, 6));
    (0..9).for_each(|_| drop(first.next().unwrap().labels.to_vec()));
    let mut sampler = Sampler::new(sampling(40, 6)).unwrap();
    sampler.resume(first.position()).unwrap();
    let samples: Arc<dyn Samples> = Arc::new(Counted::new(40));
    let mut second = Loader::new(samples, identity(), sampler).unwrap();
    for _ in 0..9 {
        assert_eq!(first.next().unwrap().images, second.next().unwrap().images);
    }
}

#[test]
fn batches_that_are_left_out_are_not_read_and_the_rest_is_the_same() {
    let sampling = sampling(40, 3);
    let mut all = loader(Counted::new(40), sampling);
    let mut some = loader(Counted::new(40), sampling);
    // Over the end of an epoch of 14 steps, too.
    for skipped in [0, 1, 4, 0, 2, 9] {
        for _ in 0..skipped {
            all.next().unwrap();
        }
        some.skip(skipped).unwrap();
        assert_eq!((some.position(), some.steps_left()), (all.position(), all.steps_left()));
        let labels = all.next().unwrap().labels.to_vec();
        let batch = some.next().unwrap();
        assert_eq!(batch.labels, labels, "after {skipped}");
        assert_eq!(some.position(), all.position());
    }
}

#[test]
fn no_more_than_one_batch_is_read_ahead() {
    let samples = Counted::new(40);
    let reads = samples.reads.clone();
    let mut loader = loader(samples, sampling(40, 4));
    for given in 1..=30 {
        loader.next().unwrap();
        assert!(reads.load(Ordering::SeqCst) <= (given + 1) * 4);
    }
}

#[test]
fn a_sample_that_cannot_be_read_stops_the_loader_for_good() {
    let all: Vec<_> = {
        let mut sampler = Sampler::new(sampling(12, 4)).unwrap();
        (0..3).flat_map(|_| sampler.next_step().indices.to_vec()).collect()
    };
    let bad = Counted { bad: Some(all[9] as usize), ..Counted::new(12) };
    let mut loader = loader(bad, sampling(12, 4));
    loader.next().unwrap();
    loader.next().unwrap();
    for _ in 0..2 {
        let error = loader.next().unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("counted, record {}: expected a label below 4, got 9", all[9])
        );
        assert_eq!(loader.position(), Position { epoch: 0, samples: 8 });
    }
}

#[test]
fn a_decoder_that_panics_is_an_error() {
    let bad = Counted { bad: Some(0), panics: true, ..Counted::new(4) };
    let mut loader = loader(bad, sampling(4, 4));
    let error = loader.next().unwrap_err();
    assert_eq!(error.to_string(), "the thread that reads ahead panicked: sample 0 is cursed");
}

#[test]
fn the_thread_ends_with_the_loader() {
    let samples: Arc<dyn Samples> = Arc::new(Counted::new(12));
    let sampler = Sampler::new(sampling(12, 4)).unwrap();
    let mut loader = Loader::new(samples.clone(), identity(), sampler.clone()).unwrap();
    loader.next().unwrap();
    drop(loader);
    assert_eq!(Arc::strong_count(&samples), 1);
    drop(Loader::new(samples.clone(), identity(), sampler).unwrap());
    assert_eq!(Arc::strong_count(&samples), 1);
}

#[test]
fn a_transform_for_other_images_is_refused() {
    let transform = Transform::new(vec![0.0; 3], vec![1.0; 3]).unwrap();
    let samples: Arc<dyn Samples> = Arc::new(Counted::new(12));
    let sampler = Sampler::new(sampling(12, 4)).unwrap();
    let refused = Loader::new(samples.clone(), transform.clone(), sampler).err().unwrap();
    assert_eq!(refused.to_string(), "the transform is for 3 channels, the images have 1");
    assert!(Evaluation::new(samples, transform, 0, 1, 4).is_err());
}

#[test]
fn evaluation_goes_once_through_everything() {
    for (len, ranks, batch) in [(10, 3, 2), (10, 1, 10), (10, 1, 64), (2, 3, 1), (9, 3, 3)] {
        let samples: Arc<dyn Samples> = Arc::new(Counted::new(len));
        let mut seen = Vec::new();
        for rank in 0..ranks {
            let mut evaluation =
                Evaluation::new(samples.clone(), identity(), rank, ranks, batch).unwrap();
            while let Some(part) = evaluation.next().unwrap() {
                assert_eq!(part.first, seen.len() as u64);
                assert_eq!(part.total, len);
                assert!((1..=batch).contains(&part.labels.len()));
                seen.extend(part.images.chunks_exact(2).map(|image| image[0] as usize));
            }
            assert!(evaluation.next().unwrap().is_none());
        }
        assert_eq!(seen, (0..len).collect::<Vec<_>>());
    }
}

#[test]
fn an_epoch_of_the_bundled_set_has_every_image() {
    let source: Source = "fashion-mnist-mini".parse().unwrap();
    let samples = open(&source, Split::Train).unwrap();
    let transform = Transform::from_samples(&*samples).unwrap();
    let sampler = Sampler::new(sampling(samples.len(), 128)).unwrap();
    let steps = sampler.steps_per_epoch();
    let mut loader = Loader::new(samples, transform, sampler).unwrap();
    let (mut sum, mut images, mut histogram) = (0.0, 0, [0; 10]);
    for _ in 0..steps {
        let batch = loader.next().unwrap();
        sum += batch.images.iter().map(|&pixel| f64::from(pixel)).sum::<f64>();
        images += batch.labels.len();
        batch.labels.iter().for_each(|&label| histogram[label as usize] += 1);
    }
    assert_eq!((images, histogram), (4600, [460; 10]));
    assert!((sum / (4600.0 * 784.0)).abs() < 1e-4);
}
