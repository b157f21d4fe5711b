//! Checkpoints of a training run: where they go, when they are made, and which one to go on from.

use super::settings::Settings;
use crate::report::EpochReport;
use crate::report::units;
use anyhow::{Context, ensure};
use poseidon::CheckpointAt;
use poseidon::checkpoint::{Checkpoint, Keep, open};
use poseidon::session::{Description, Saved, Saving};
use poseidon_nn::data::Position;
use poseidon_nn::train::Worker;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a run wants to find again, beside what the session saves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RunState {
    /// The effective configuration, as TOML.
    pub(super) config: String,
    pub(super) seed: u64,
    /// Samples of the data set; with private partitions, of the smallest.
    pub(super) samples: usize,
    /// Where the next step begins in the data.
    pub(super) position: Position,
    /// The epochs that are done.
    pub(super) epochs: Vec<EpochReport>,
}

/// The checkpoint that a run goes on from.
#[derive(Clone, Debug)]
pub(super) struct Resumed {
    pub(super) at: CheckpointAt,
    pub(super) workers: usize,
    pub(super) state: RunState,
}

impl Resumed {
    /// The checkpoint that `text` names: a place, or `PLACE@STEP`. The newest one if there is no step.
    /// `None` if the place has none and no step is named.
    pub(super) fn find(text: &str) -> anyhow::Result<Option<Self>> {
        let step =
            text.rsplit_once('@').and_then(|(place, step)| Some((place, step.parse().ok()?)));
        let (place, step) = step.map_or((text, None), |(place, step)| (place, Some(step)));
        let place = absolute(place)?;
        let storage = open(&place)?;
        let checkpoint = match step {
            Some(step) => Checkpoint::open(&storage, step)?,
            None => {
                let latest = Checkpoint::latest(&storage)?;
                for (step, why) in &latest.damaged {
                    tracing::warn!("the checkpoint of step {step} is passed over: {why}");
                }
                match latest.checkpoint {
                    Some(checkpoint) => checkpoint,
                    None => return Ok(None),
                }
            }
        };
        let manifest = checkpoint.manifest();
        let state = serde_json::from_value(manifest.program["job"].clone()).with_context(|| {
            let step = manifest.step;
            format!("the checkpoint of step {step} in {place} was not made by 'poseidon train'")
        })?;
        let at = CheckpointAt { place, step: manifest.step };
        Ok(Some(Self { at, workers: manifest.workers, state }))
    }

    /// Refuses data and settings with which the training would not go on, but begin another one.
    pub(super) fn check(&self, settings: &Settings, samples: usize) -> anyhow::Result<()> {
        let (step, RunState { seed, samples: before, .. }) = (self.at.step, &self.state);
        ensure!(
            settings.seed == *seed,
            "the checkpoint of step {step} has seed {seed}, not {}: leave --seed out",
            settings.seed
        );
        ensure!(
            samples == *before,
            "{} has {samples} samples, but {before} when the checkpoint of step {step} was made",
            settings.data
        );
        Ok(())
    }
}

/// A folder's name from the root, so that every process means the same. Other places as they are.
pub(super) fn absolute(place: &str) -> anyhow::Result<String> {
    if place.contains("://") {
        return Ok(place.into());
    }
    let path = std::path::absolute(place)
        .with_context(|| format!("'{place}' is no place for checkpoints"))?;
    let text = path.to_str().with_context(|| format!("{path:?} is a name that is not text"))?;
    Ok(text.into())
}

/// Makes the checkpoints of a run.
#[derive(Debug, Default)]
pub(super) struct Saver {
    /// `None`: no checkpoints are made.
    due: Option<Due>,
    keep: Keep,
    saving: Option<Saving>,
}

/// After which steps a checkpoint is made.
#[derive(Clone, Copy, Debug)]
enum Due {
    Every(u64),
    Epoch,
}

impl Saver {
    pub(super) fn new(settings: &Settings) -> Self {
        let due = settings.every.map_or(Due::Epoch, Due::Every);
        let age = settings.keep_for.map(|age| age.0);
        Self {
            due: settings.checkpoint.as_ref().map(|_| due),
            keep: Keep { count: settings.keep, age },
            saving: None,
        }
    }

    /// Whether the state after `step` is to be saved, if that is the last one of an epoch or of the
    /// run.
    pub(super) fn is_due(&self, step: u64, ends_epoch: bool, ends_run: bool) -> bool {
        self.due.is_some_and(|due| {
            ends_run
                || match due {
                    Due::Every(steps) => step.is_multiple_of(steps),
                    Due::Epoch => ends_epoch,
                }
        })
    }

    /// The next step after `step` that is saved because of its number.
    pub(super) fn next_due(&self, step: u64) -> Option<u64> {
        match self.due {
            Some(Due::Every(steps)) => Some((step / steps).saturating_add(1).saturating_mul(steps)),
            Some(Due::Epoch) | None => None,
        }
    }

    /// Begins a checkpoint of the state after the next step. Returns how the last one ended, if it was
    /// still being written.
    pub(super) fn begin(&mut self, worker: &Worker) -> anyhow::Result<Option<String>> {
        let last = self.wait();
        self.saving = worker.begin_checkpoint(self.keep)?;
        Ok(last)
    }

    /// The worker has taken a step. Returns how a checkpoint ended, if one has.
    pub(super) fn stepped(
        &mut self,
        worker: &Worker,
        state: impl FnOnce() -> anyhow::Result<RunState>,
    ) -> anyhow::Result<Option<String>> {
        match &self.saving {
            Some(saving) if saving.step() == worker.steps() => {
                let job = serde_json::to_value(state()?)?;
                let (rank, tensors) = (serde_json::Value::Null, worker.tensors());
                saving.describe(Description { job, rank, tensors });
                Ok(None)
            }
            Some(saving) if saving.is_finished() => Ok(self.wait()),
            _ => Ok(None),
        }
    }

    /// Waits for a checkpoint that is being written. Returns how it ended.
    pub(super) fn wait(&mut self) -> Option<String> {
        let words = match self.saving.take()?.wait() {
            Ok(Saved { step, bytes, took, .. }) => {
                let (bytes, took) = (units::bytes(bytes), units::duration(took.as_secs_f64()));
                format!("checkpoint of step {step}: {bytes}, written in {took}")
            }
            Err(error) => format!("warning: {error}; training goes on"),
        };
        Some(words)
    }
}

/// Whether this process was asked to end, by SIGTERM or Ctrl-C. A second signal ends it at once.
pub(super) fn asked_to_end() -> anyhow::Result<Arc<AtomicBool>> {
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_default(signal, asked.clone())?;
        signal_hook::flag::register(signal, asked.clone())?;
    }
    Ok(asked)
}

/// Whether `asked` says so.
pub(super) fn is_set(asked: &AtomicBool) -> bool {
    asked.load(Ordering::Relaxed)
}
