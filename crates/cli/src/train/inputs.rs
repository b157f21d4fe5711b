//! What a worker reads: its samples, and in which order.

use super::facts::{StartFacts, gather};
use super::settings::{Partition, Settings, Test};
use anyhow::ensure;
use poseidon_nn::Model;
use poseidon_nn::data::{self, Sampler, Samples, Sampling, Split, Statistics, Transform};
use poseidon_nn::train::Worker;
use std::sync::Arc;

/// What a worker can open and check before it joins the others.
pub(super) struct Inputs {
    pub(super) model: Model,
    pub(super) train: Arc<dyn Samples>,
    pub(super) test: Option<Arc<dyn Samples>>,
    sampling: Sampling,
    /// What data and model were made to fit each other by, for people.
    notes: Vec<String>,
}

/// What all workers have agreed on before the first step.
pub(super) struct Agreement {
    pub(super) transform: Transform,
    pub(super) sampler: Sampler,
    /// Steps that the checkpoint has behind it.
    pub(super) taken: u64,
    /// Of the whole training.
    pub(super) steps: u64,
    /// Samples of an epoch.
    pub(super) samples: usize,
}

impl Agreement {
    /// Says so if the checkpoint has all steps of the training behind it.
    pub(super) fn nothing_left(&self) -> Option<String> {
        let Self { taken, steps, .. } = self;
        (taken >= steps).then(|| {
            format!(
                "nothing is left to do: the checkpoint is of step {taken}, and the training has {steps} \
                 steps; more --epochs or --steps make it longer"
            )
        })
    }
}

impl Inputs {
    pub(super) fn open(settings: &Settings, rank: u16, ranks: u16) -> anyhow::Result<Self> {
        let model = settings.model()?;
        let mut notes = Vec::new();
        let train = settings.open(Split::Train, rank, &model, &mut notes)?;
        let (classes, outputs) = (train.classes(), model.classes);
        let model = settings.model_for(model, classes);
        let name = &model.name;
        if model.classes != outputs {
            let data = &settings.data;
            notes.push(format!(
                "{data} has {classes} classes: '{name}' gets as many outputs, instead of {outputs}"
            ));
        } else if classes < outputs {
            let data = &settings.data;
            notes.push(format!(
                "{data} has {classes} classes, and '{name}' keeps the {outputs} outputs of its file"
            ));
        }
        let test = match settings.test {
            Test::Never => None,
            Test::Epoch | Test::End => {
                Some(settings.open(Split::Test, rank, &model, &mut notes)?)
            }
        };
        let partition = match settings.partition {
            Partition::Shared => data::Partition::Shared,
            Partition::Private => data::Partition::Private { smallest: train.len() },
        };
        let sampling = Sampling {
            samples: train.len(),
            rank: rank.into(),
            ranks: ranks.into(),
            batch: settings.batch as usize,
            seed: settings.seed,
            partition,
        };
        // A batch that does not fit is found here, not after memory for it was made.
        Sampler::new(sampling)?;
        Ok(Self { model, train, test, sampling, notes })
    }

    /// Says what data and model were made to fit each other by. One worker does.
    pub(super) fn tell_notes(&self) {
        self.notes.iter().for_each(|note| tracing::info!("{note}"));
    }

    /// Exchanges facts with the other workers. Fails if their data or settings differ.
    pub(super) fn agree(&self, settings: &Settings, worker: &Worker) -> anyhow::Result<Agreement> {
        let statistics = Statistics::of(&*self.train, Transform::SAMPLES)?;
        let facts = StartFacts::new(settings, self.train.len(), statistics);
        let all = gather(worker, "start", facts)?;
        StartFacts::agree(&all)?;
        let mut sampling = self.sampling;
        match &mut sampling.partition {
            data::Partition::Shared => {
                for (rank, worker) in all.iter().enumerate() {
                    let (expected, got) = (all[0].samples, worker.samples);
                    ensure!(
                        got == expected,
                        "{} has {expected} samples on worker 0 but {got} on worker {rank}",
                        settings.data
                    );
                }
            }
            data::Partition::Private { smallest } => {
                *smallest = all.iter().map(|w| w.samples).min().unwrap_or(*smallest);
            }
        }
        let samples = match sampling.partition {
            data::Partition::Shared => sampling.samples,
            data::Partition::Private { smallest } => smallest,
        };
        let mut sampler = Sampler::new(sampling)?;
        let mut taken = 0;
        if let Some(resumed) = &settings.resumed {
            resumed.check(settings, samples)?;
            let (then, now) = (resumed.workers, usize::from(settings.workers));
            ensure!(
                settings.partition == Partition::Shared || then == now,
                "the checkpoint was made by {then} workers with private data: {now} cannot go on"
            );
            sampler.resume(resumed.state.position)?;
            taken = resumed.at.step;
        }
        // What is left of this epoch, and the epochs after it.
        let position = sampler.position();
        let left = settings.epochs.saturating_sub(position.epoch + 1);
        let rest = match position.epoch < settings.epochs {
            true => sampling.steps_left(position) + left.saturating_mul(sampler.steps_per_epoch()),
            false => 0,
        };
        let steps = settings.steps.unwrap_or(taken.saturating_add(rest));
        let transform = Transform::from_statistics(&StartFacts::pool(&all));
        Ok(Agreement { transform, sampler, taken, steps, samples })
    }
}
