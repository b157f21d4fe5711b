//! What must hold for the way samples are dealt out, whatever the numbers.

use poseidon_nn::data::{Partition, Position, Sampler, Sampling};
use proptest::prelude::*;

/// A step, with its samples.
#[derive(Debug, PartialEq)]
struct Taken {
    at: Position,
    indices: Vec<u32>,
    first: u64,
    total: usize,
}

fn take(sampler: &mut Sampler) -> Taken {
    let step = sampler.next_step();
    Taken {
        at: step.position,
        indices: step.indices.to_vec(),
        first: step.first,
        total: step.total,
    }
}

/// Samples that are enough for at least one step.
fn shared() -> impl Strategy<Value = Sampling> {
    let numbers = (1usize..6, 1usize..9, 0usize..60, any::<u64>());
    numbers.prop_map(|(ranks, batch, more, seed)| Sampling {
        samples: ranks * batch + more,
        rank: 0,
        ranks,
        batch,
        seed,
        partition: Partition::Shared,
    })
}

fn of_all_ranks(sampling: Sampling) -> Vec<Sampler> {
    let of_rank = |rank| Sampler::new(Sampling { rank, ..sampling }).unwrap();
    (0..sampling.ranks).map(of_rank).collect()
}

proptest! {
    #[test]
    fn every_sample_is_read_once_per_epoch_by_one_rank(sampling in shared()) {
        let mut ranks = of_all_ranks(sampling);
        let rest = sampling.samples % (sampling.ranks * sampling.batch);
        let left_out = if rest < sampling.ranks { rest } else { 0 };
        for epoch in 0..2 {
            let mut read = vec![0; sampling.samples];
            for step in 0..ranks[0].steps_per_epoch() as usize {
                let mut place = 0;
                let taken: Vec<_> = ranks.iter_mut().map(take).collect();
                for taken in &taken {
                    let samples = step * sampling.ranks * sampling.batch;
                    prop_assert_eq!(taken.at, Position { epoch, samples });
                    prop_assert!(!taken.indices.is_empty());
                    prop_assert_eq!(taken.first, place as u64);
                    place += taken.indices.len();
                    taken.indices.iter().for_each(|&index| read[index as usize] += 1);
                }
                prop_assert!(taken.iter().all(|taken| taken.total == place));
            }
            prop_assert_eq!(read.iter().filter(|&&times| times == 0).count(), left_out);
            prop_assert!(read.iter().all(|&times| times <= 1));
        }
    }

    #[test]
    fn many_ranks_read_what_one_with_a_large_batch_reads(sampling in shared()) {
        let rest = sampling.samples % (sampling.ranks * sampling.batch);
        // Fewer samples than ranks are a step for one rank, but not for many.
        prop_assume!(rest == 0 || rest >= sampling.ranks);
        let mut ranks = of_all_ranks(sampling);
        let batch = sampling.ranks * sampling.batch;
        let mut one = Sampler::new(Sampling { ranks: 1, batch, ..sampling }).unwrap();
        prop_assert_eq!(one.steps_per_epoch(), ranks[0].steps_per_epoch());
        for _ in 0..2 * one.steps_per_epoch() + 1 {
            let expected = take(&mut one);
            let taken: Vec<_> = ranks.iter_mut().map(take).collect();
            for taken in &taken {
                prop_assert_eq!(taken.at, expected.at);
                prop_assert_eq!(taken.total, expected.indices.len());
            }
            let most = taken.iter().map(|taken| taken.indices.len()).max().unwrap();
            let least = taken.iter().map(|taken| taken.indices.len()).min().unwrap();
            prop_assert!(most - least <= 1);
            let together: Vec<_> = taken.into_iter().flat_map(|taken| taken.indices).collect();
            prop_assert_eq!(together, expected.indices);
        }
    }

    #[test]
    fn a_resumed_sampler_goes_on_as_if_nothing_had_happened(
        sampling in shared(), rank in 0usize..6, steps in 0usize..40, private: bool,
    ) {
        let partition = match private {
            true => Partition::Private { smallest: sampling.samples },
            false => Partition::Shared,
        };
        let sampling = Sampling { rank: rank % sampling.ranks, partition, ..sampling };
        let mut sampler = Sampler::new(sampling).unwrap();
        (0..steps).for_each(|_| drop(take(&mut sampler)));
        let kept = serde_json::to_string(&sampler.position()).unwrap();
        let mut resumed = Sampler::new(sampling).unwrap();
        resumed.resume(serde_json::from_str(&kept).unwrap()).unwrap();
        for _ in 0..20 {
            prop_assert_eq!(take(&mut resumed), take(&mut sampler));
        }
    }

    #[test]
    fn other_ranks_lose_and_repeat_no_sample_of_the_epoch(
        sampling in shared(), ranks in 1usize..6, batch in 1usize..9, steps in 0u64..40,
    ) {
        prop_assume!(ranks * batch <= sampling.samples);
        let mut before = Sampler::new(sampling).unwrap();
        let mut read = vec![0; sampling.samples];
        for _ in 0..steps % before.steps_per_epoch() {
            for rank in 0..sampling.ranks {
                let mut sampler = Sampler::new(Sampling { rank, ..sampling }).unwrap();
                sampler.resume(before.position()).unwrap();
                take(&mut sampler).indices.iter().for_each(|&index| read[index as usize] += 1);
            }
            take(&mut before);
        }
        let position = before.position();
        let others = Sampling { ranks, batch, ..sampling };
        for rank in 0..ranks {
            let mut sampler = Sampler::new(Sampling { rank, ..others }).unwrap();
            sampler.resume(position).unwrap();
            while sampler.position().epoch == 0 {
                take(&mut sampler).indices.iter().for_each(|&index| read[index as usize] += 1);
            }
            prop_assert_eq!(sampler.position(), Position { epoch: 1, samples: 0 });
        }
        prop_assert!(read.iter().all(|&times| times <= 1), "a sample is read twice");
        // Fewer samples than ranks are left out of an epoch, always.
        let left_out = read.iter().filter(|&&times| times == 0).count();
        prop_assert!(left_out < ranks.max(sampling.ranks), "{left_out} samples are lost");
    }

    #[test]
    fn private_partitions_take_the_same_steps(
        smallest in 1usize..50, more in 0usize..50, batch in 1usize..9, rank in 0usize..4, seed: u64,
    ) {
        prop_assume!(batch <= smallest);
        let partition = Partition::Private { smallest };
        let samples = smallest + more;
        let sampling = Sampling { samples, rank, ranks: 4, batch, seed, partition };
        let mut sampler = Sampler::new(sampling).unwrap();
        prop_assert_eq!(sampler.steps_per_epoch(), (smallest / batch) as u64);
        let mut read = vec![0; samples];
        for _ in 0..sampler.steps_per_epoch() {
            let taken = take(&mut sampler);
            prop_assert_eq!(taken.indices.len(), batch);
            prop_assert_eq!((taken.first, taken.total), ((rank * batch) as u64, 4 * batch));
            taken.indices.iter().for_each(|&index| read[index as usize] += 1);
        }
        prop_assert!(read.iter().all(|&times| times <= 1));
        prop_assert_eq!(sampler.position(), Position { epoch: 1, samples: 0 });
    }
}

#[test]
fn seeds_epochs_and_owners_of_partitions_have_orders_of_their_own() {
    let shared = Sampling {
        samples: 100,
        rank: 0,
        ranks: 1,
        batch: 100,
        seed: 1,
        partition: Partition::Shared,
    };
    let private = Sampling { ranks: 2, partition: Partition::Private { smallest: 100 }, ..shared };
    let mut orders = Vec::new();
    for sampling in
        [shared, Sampling { seed: 2, ..shared }, private, Sampling { rank: 1, ..private }]
    {
        let mut sampler = Sampler::new(sampling).unwrap();
        orders.push(take(&mut sampler).indices);
        orders.push(take(&mut sampler).indices);
    }
    for (i, order) in orders.iter().enumerate() {
        assert!(!orders[..i].contains(order), "order {i} is not new");
    }
}
