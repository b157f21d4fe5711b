//! Batches, read and transformed while the net is busy with the one before.

use super::{DataError, Position, Sampler, Samples, Sampling, Transform};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Samples for one step of one rank.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The images, transformed, one after the other; each is one plane per channel.
    pub images: &'a [f32],
    /// The labels, one per image.
    pub labels: &'a [u32],
    /// Where its step begins.
    pub position: Position,
    /// Place of the first sample among those of all ranks in this step; in an [`Evaluation`], among
    /// all of the split.
    pub first: u64,
    /// Samples of all ranks in this step; in an [`Evaluation`], all of the split.
    pub total: usize,
}

/// Gives a rank its batches, for ever.
///
/// A thread reads one batch ahead. It ends with the loader.
pub struct Loader {
    /// `None` once the loader is being dropped: that is what ends the thread.
    used: Option<SyncSender<Order>>,
    filled: Receiver<Result<Buffer, DataError>>,
    thread: Option<JoinHandle<()>>,
    current: Buffer,
    next: Position,
    sampling: Sampling,
    failure: Option<DataError>,
}

/// Goes once through one rank's part of a split, in order.
pub struct Evaluation {
    samples: Arc<dyn Samples>,
    transform: Transform,
    part: Range<usize>,
    batch: usize,
    buffer: Buffer,
}

/// How long to wait for a batch: longer than any storage that still works takes.
const PATIENCE: Duration = Duration::from_secs(300);

impl Loader {
    /// Starts to read at the sampler's position.
    ///
    /// # Panics
    /// If the sampler is for another number of samples.
    pub fn new(
        samples: impl Into<Arc<dyn Samples>>,
        transform: Transform,
        sampler: Sampler,
    ) -> Result<Self, DataError> {
        let samples = samples.into();
        check_channels(&transform, &*samples)?;
        assert_eq!(sampler.sampling().samples, samples.len(), "a sampler for these samples");
        // Two buffers: the caller has one while the thread fills the other. Room for both, so that
        // neither side ever waits to hand one over.
        let (used, to_fill) = sync_channel(2);
        let (fill, filled) = sync_channel(2);
        let (next, sampling) = (sampler.position(), *sampler.sampling());
        let read = move || read_ahead(&*samples, &transform, sampler, &to_fill, &fill);
        let thread = thread::Builder::new().name("poseidon-data".to_owned()).spawn(read);
        let thread = thread.map_err(|why| DataError::Thread(Arc::new(why)))?;
        let _ = used.send(Order { buffer: Buffer::default(), skip: 0 });
        Ok(Self {
            used: Some(used),
            filled,
            thread: Some(thread),
            current: Buffer::default(),
            next,
            sampling,
            failure: None,
        })
    }

    /// Where the step begins whose batch comes next: what to keep in a checkpoint, and to
    /// [resume](Sampler::resume) at.
    pub fn position(&self) -> Position {
        self.next
    }

    /// Steps to the end of this epoch.
    pub fn steps_left(&self) -> u64 {
        self.sampling.steps_left(self.next)
    }

    /// The next batch. A loader that has failed stays failed, with the same error.
    #[expect(clippy::should_implement_trait, reason = "a batch borrows the loader's buffer")]
    pub fn next(&mut self) -> Result<Batch<'_>, DataError> {
        self.take(0)?;
        Ok(self.current.batch())
    }

    /// Leaves out the next `steps` batches. Only the one that has been read ahead costs anything.
    pub fn skip(&mut self, steps: u64) -> Result<(), DataError> {
        if steps > 0 {
            let next = (0..steps).fold(self.next, |position, _| self.sampling.after(position));
            self.take(steps - 1)?;
            // The batch that the thread reads now has no place in front of it any more.
            self.next = next;
        }
        Ok(())
    }

    /// Takes the batch that was read ahead. The thread leaves out `skip` of those after the next one.
    fn take(&mut self, skip: u64) -> Result<(), DataError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        match self.filled.recv_timeout(PATIENCE) {
            Ok(Ok(buffer)) => {
                let used = std::mem::replace(&mut self.current, buffer);
                if let Some(sender) = &self.used {
                    // A thread that is gone has left its error in the other channel.
                    let _ = sender.send(Order { buffer: used, skip });
                }
            }
            Ok(Err(failure)) => return Err(self.fail(failure)),
            Err(RecvTimeoutError::Timeout) => {
                // Dropping must not wait for it either.
                self.thread = None;
                let Position { epoch, samples } = self.next;
                return Err(self.fail(DataError::Stalled { epoch, samples, waited: PATIENCE }));
            }
            Err(RecvTimeoutError::Disconnected) => {
                let panic = self.thread.take().and_then(|thread| thread.join().err());
                return Err(self.fail(DataError::Panicked(message(panic))));
            }
        }
        self.next = self.current.after;
        Ok(())
    }

    fn fail(&mut self, failure: DataError) -> DataError {
        self.failure = Some(failure.clone());
        failure
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.used = None;
        if let Some(thread) = self.thread.take() {
            // A panic has nobody left to matter to.
            let _ = thread.join();
        }
    }
}

impl Evaluation {
    /// The part of rank `rank` of `ranks`: contiguous, and none if there are more ranks than
    /// samples.
    ///
    /// # Panics
    /// If `rank` is not less than `ranks`, or `batch` is 0.
    pub fn new(
        samples: impl Into<Arc<dyn Samples>>,
        transform: Transform,
        rank: usize,
        ranks: usize,
        batch: usize,
    ) -> Result<Self, DataError> {
        assert!(rank < ranks && batch > 0, "rank {rank} of {ranks}, batch {batch}");
        let samples = samples.into();
        check_channels(&transform, &*samples)?;
        let cut = |rank| (samples.len() as u128 * rank as u128 / ranks as u128) as usize;
        let part = cut(rank)..cut(rank + 1);
        Ok(Self { samples, transform, part, batch, buffer: Buffer::default() })
    }

    /// The next batch, `None` after the last. The last may be short.
    #[expect(clippy::should_implement_trait, reason = "a batch borrows the evaluation's buffer")]
    pub fn next(&mut self) -> Result<Option<Batch<'_>>, DataError> {
        let start = self.part.start;
        let end = self.part.end.min(start.saturating_add(self.batch));
        if start == end {
            return Ok(None);
        }
        self.buffer.fill(&*self.samples, &self.transform, start..end)?;
        self.buffer.position = Position { epoch: 0, samples: start };
        self.buffer.first = start as u64;
        self.buffer.total = self.samples.len();
        self.part.start = end;
        Ok(Some(self.buffer.batch()))
    }
}

/// What the thread is to do.
struct Order {
    /// Where the next batch goes.
    buffer: Buffer,
    /// How many batches are left out before it.
    skip: u64,
}

/// The memory of one batch, used again and again.
#[derive(Default)]
struct Buffer {
    pixels: Vec<u8>,
    images: Vec<f32>,
    labels: Vec<u32>,
    position: Position,
    after: Position,
    first: u64,
    total: usize,
}

impl Buffer {
    fn fill(
        &mut self,
        samples: &dyn Samples,
        transform: &Transform,
        indices: impl ExactSizeIterator<Item = usize>,
    ) -> Result<(), DataError> {
        let size = samples.shape().iter().product();
        self.pixels.resize(size, 0);
        self.images.resize(indices.len() * size, 0.0);
        self.labels.clear();
        for (index, image) in indices.zip(self.images.chunks_exact_mut(size)) {
            self.labels.push(samples.read(index, &mut self.pixels)?);
            transform.apply(&self.pixels, image);
        }
        Ok(())
    }

    fn batch(&self) -> Batch<'_> {
        Batch {
            images: &self.images,
            labels: &self.labels,
            position: self.position,
            first: self.first,
            total: self.total,
        }
    }
}

/// Fills every buffer that comes, until none comes any more or one cannot be filled.
fn read_ahead(
    samples: &dyn Samples,
    transform: &Transform,
    mut sampler: Sampler,
    to_fill: &Receiver<Order>,
    fill: &SyncSender<Result<Buffer, DataError>>,
) {
    for Order { mut buffer, skip } in to_fill {
        (0..skip).for_each(|_| sampler.skip());
        buffer.position = sampler.position();
        let step = sampler.next_step();
        (buffer.first, buffer.total) = (step.first, step.total);
        let indices = step.indices.iter().map(|&index| index as usize);
        let filled = buffer.fill(samples, transform, indices);
        buffer.after = sampler.position();
        let failed = filled.is_err();
        if fill.send(filled.map(|()| buffer)).is_err() || failed {
            return;
        }
    }
}

fn check_channels(transform: &Transform, samples: &dyn Samples) -> Result<(), DataError> {
    let (transform, images) = (transform.channels(), samples.shape()[0]);
    if transform == images { Ok(()) } else { Err(DataError::Channels { transform, images }) }
}

fn message(panic: Option<Box<dyn Any + Send>>) -> String {
    let panic = panic.as_deref();
    let text = panic.and_then(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| panic.downcast_ref::<String>().cloned())
    });
    text.unwrap_or_else(|| "no reason given".to_owned())
}
