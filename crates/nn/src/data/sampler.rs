//! Which samples a rank reads at which step: a function of a few numbers, the same on every node.

use super::DataError;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// What a sampler needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// Number of samples in this rank's data set.
    pub samples: usize,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Samples per step and rank.
    pub batch: usize,
    /// Where the order of samples comes from.
    pub seed: u64,
    /// Whose the samples are.
    pub partition: Partition,
}

/// Whose the samples of a data set are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Partition {
    /// All ranks see the same data set, and every epoch deals it out anew.
    ///
    /// A step takes the next `ranks * batch` samples of the epoch's order, and rank r the r-th
    /// `batch` of those: the same as one rank with a batch `ranks` times as large, in the same
    /// order. The last step of an epoch shares out what is left, as evenly as it can, unless that
    /// is less than one sample each: then they are left out of this epoch.
    Shared,
    /// This rank's data set is its own partition. It goes through it in an order of its own,
    /// `batch` at a time. Every rank takes the same number of steps, so larger partitions leave out
    /// some samples, others in every epoch.
    Private {
        /// Number of samples in the smallest partition of all ranks.
        smallest: usize,
    },
}

/// Where in the course of a training a sampler is: between two steps. Another number of ranks can go on
/// from here.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Position {
    /// How often all samples have been gone through.
    pub epoch: u64,
    /// Samples that all ranks together have taken since then. With private partitions: samples that
    /// each rank has taken of its own.
    pub samples: usize,
}

/// One step of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step<'a> {
    /// Where it begins.
    pub position: Position,
    /// The samples to read, in order. Never none.
    pub indices: &'a [u32],
    /// Place of the first of them among the samples of all ranks in this step.
    pub first: u64,
    /// Samples of all ranks in this step. A mean over the step weights this rank's mean by
    /// `indices.len() / total`.
    pub total: usize,
}

impl Sampling {
    /// Steps from `position` to the end of its epoch.
    pub fn steps_left(&self, position: Position) -> u64 {
        let Self { samples, ranks, batch, partition, .. } = *self;
        let steps = match partition {
            Partition::Shared => {
                let (left, step) = (samples.saturating_sub(position.samples), ranks * batch);
                left / step + usize::from(left % step >= ranks)
            }
            Partition::Private { smallest } => smallest.saturating_sub(position.samples) / batch,
        };
        steps as u64
    }

    /// Where the step after the one at `position` begins.
    pub fn after(&self, position: Position) -> Position {
        let taken = match self.partition {
            Partition::Shared => (self.samples - position.samples).min(self.ranks * self.batch),
            Partition::Private { .. } => self.batch,
        };
        self.settled(Position { samples: position.samples + taken, ..position })
    }

    /// `position`, or the beginning of the next epoch if what is left is too little for a step.
    fn settled(&self, position: Position) -> Position {
        match self.steps_left(position) {
            0 => Position { epoch: position.epoch + 1, samples: 0 },
            _ => position,
        }
    }
}

/// Deals out samples, step by step, for ever.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    position: Position,
    /// The order of all samples in the epoch of this number.
    order: Vec<u32>,
    ordered: Option<u64>,
}

impl Sampler {
    /// A sampler at the beginning.
    pub fn new(sampling: Sampling) -> Result<Self, DataError> {
        let Sampling { samples, rank, ranks, batch, partition, .. } = sampling;
        let refuse = |what, expected, got: usize| {
            Err(DataError::Sampling { what, expected, got: got as u64 })
        };
        if rank >= ranks {
            return refuse("rank", format!("less than {ranks}"), rank);
        }
        if batch == 0 {
            return refuse("batch size", "at least 1".to_owned(), batch);
        }
        if samples > u32::MAX as usize {
            return refuse("samples", format!("at most {}", u32::MAX), samples);
        }
        match partition {
            Partition::Shared => {
                let step = ranks.checked_mul(batch).filter(|&step| step <= samples);
                step.ok_or(DataError::BatchTooLarge { batch, ranks, samples })?;
            }
            Partition::Private { smallest } => {
                if smallest > samples {
                    return refuse("smallest partition", format!("at most {samples}"), smallest);
                }
                if batch > smallest {
                    let samples = smallest;
                    return Err(DataError::BatchTooLarge { batch, ranks: 1, samples });
                }
            }
        }
        Ok(Self {
            sampling,
            position: Position::default(),
            order: (0..samples as u32).collect(),
            ordered: None,
        })
    }

    /// The numbers it was made with.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Steps in every epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        self.sampling.steps_left(Position::default())
    }

    /// Where the step that comes next begins.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Goes on at `position`, as if all steps before it had been taken, perhaps by other ranks. What is
    /// left of the epoch may be too little for a step; then the next epoch begins.
    pub fn resume(&mut self, position: Position) -> Result<(), DataError> {
        let samples = match self.sampling.partition {
            Partition::Shared => self.sampling.samples,
            Partition::Private { smallest } => smallest,
        };
        if position.samples > samples {
            return Err(DataError::Sampling {
                what: "samples taken before",
                expected: format!("at most the {samples} of an epoch"),
                got: position.samples as u64,
            });
        }
        self.position = self.sampling.settled(position);
        Ok(())
    }

    /// Leaves out a step.
    pub fn skip(&mut self) {
        self.position = self.sampling.after(self.position);
    }

    /// Takes a step.
    pub fn next_step(&mut self) -> Step<'_> {
        let position @ Position { epoch, samples: taken } = self.position;
        if self.ordered != Some(epoch) {
            self.shuffle(epoch);
            self.ordered = Some(epoch);
        }
        let Sampling { rank, ranks, batch, partition, .. } = self.sampling;
        let (start, first, len, total) = match partition {
            Partition::Shared => {
                let total = (self.order.len() - taken).min(ranks * batch);
                let (even, extra) = (total / ranks, total % ranks);
                let first = rank * even + rank.min(extra);
                let len = even + usize::from(rank < extra);
                (taken + first, first, len, total)
            }
            Partition::Private { .. } => (taken, rank * batch, batch, ranks * batch),
        };
        self.skip();
        Step { position, indices: &self.order[start..start + len], first: first as u64, total }
    }

    /// Puts the samples in the order of `epoch`. Depends on nothing but the seed, the epoch and, for
    /// private partitions, the rank; written out here, so that no other version of a library makes a
    /// resumed training see samples twice.
    fn shuffle(&mut self, epoch: u64) {
        let owner = match self.sampling.partition {
            Partition::Shared => 0,
            Partition::Private { .. } => self.sampling.rank as u64 + 1,
        };
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.sampling.seed.to_le_bytes());
        key[8..16].copy_from_slice(&owner.to_le_bytes());
        let mut random = ChaCha8Rng::from_seed(key);
        random.set_stream(epoch);
        for (place, index) in self.order.iter_mut().zip(0..) {
            *place = index;
        }
        for last in (1..self.order.len()).rev() {
            // Off from even odds by less than one in 2^32, as there are fewer than 2^32 samples.
            let scaled = u128::from(random.next_u64()) * (last as u128 + 1);
            self.order.swap(last, (scaled >> 64) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: Sampling = Sampling {
        samples: 10,
        rank: 0,
        ranks: 1,
        batch: 10,
        seed: 7,
        partition: Partition::Shared,
    };

    /// The order is part of the state of a training: it must not change with a new version. These
    /// numbers come from another implementation of ChaCha8 and of the shuffle.
    #[test]
    fn the_order_is_always_the_same() {
        let mut sampler = Sampler::new(TEN).unwrap();
        assert_eq!(sampler.next_step().indices, [5, 3, 9, 8, 1, 6, 2, 0, 4, 7]);
        assert_eq!(sampler.next_step().indices, [3, 1, 0, 6, 8, 4, 5, 7, 2, 9]);
        let private = Sampling { partition: Partition::Private { smallest: 10 }, ..TEN };
        assert_eq!(
            Sampler::new(private).unwrap().next_step().indices,
            [3, 5, 6, 1, 7, 2, 4, 9, 0, 8]
        );
    }

    #[test]
    fn the_rest_of_an_epoch_is_shared_out() {
        let sampling = Sampling { ranks: 3, batch: 2, ..TEN };
        let rests = [(0, 2), (2, 1), (3, 1)];
        for (rank, (first, len)) in rests.into_iter().enumerate() {
            let mut sampler = Sampler::new(Sampling { rank, ..sampling }).unwrap();
            assert_eq!(sampler.steps_per_epoch(), 2);
            assert_eq!(sampler.next_step().total, 6);
            let step = sampler.next_step();
            assert_eq!((step.first, step.indices.len(), step.total), (first, len, 4));
            assert_eq!(sampler.position(), Position { epoch: 1, samples: 0 });
        }
    }

    #[test]
    fn less_than_one_sample_each_is_left_out() {
        let sampling = Sampling { samples: 8, ranks: 3, batch: 2, ..TEN };
        assert_eq!(Sampler::new(sampling).unwrap().steps_per_epoch(), 1);
    }

    #[test]
    fn a_batch_larger_than_the_partition_is_refused_with_both_numbers() {
        let error = Sampler::new(Sampling { ranks: 3, batch: 4, ..TEN }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a batch of 4 is larger than a rank's partition: 10 samples over 3 ranks are 3 each"
        );
        let partition = Partition::Private { smallest: 3 };
        let error = Sampler::new(Sampling { ranks: 2, batch: 4, partition, ..TEN }).unwrap_err();
        assert!(matches!(error, DataError::BatchTooLarge { batch: 4, ranks: 1, samples: 3 }));
        let error = Sampler::new(Sampling { batch: usize::MAX, ranks: 2, ..TEN }).unwrap_err();
        assert!(matches!(error, DataError::BatchTooLarge { .. }));
    }

    #[test]
    fn nonsense_is_refused() {
        let refused = |sampling| Sampler::new(sampling).unwrap_err().to_string();
        assert_eq!(refused(Sampling { rank: 1, ..TEN }), "rank: expected less than 1, got 1");
        assert_eq!(refused(Sampling { batch: 0, ..TEN }), "batch size: expected at least 1, got 0");
        let partition = Partition::Private { smallest: 11 };
        assert_eq!(
            refused(Sampling { partition, ..TEN }),
            "smallest partition: expected at most 10, got 11"
        );
        let mut sampler = Sampler::new(Sampling { batch: 4, ..TEN }).unwrap();
        assert_eq!(
            sampler.resume(Position { epoch: 0, samples: 11 }).unwrap_err().to_string(),
            "samples taken before: expected at most the 10 of an epoch, got 11"
        );
    }
}
