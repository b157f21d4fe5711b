//! Makes checkpoints of a run, and notes what this node saw of each.

use poseidon::Session;
use poseidon::checkpoint::Keep;
use poseidon::session::{Description, Saved, Saving};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// A checkpoint that was made.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Made {
    /// The step that it is the state after. The first is 1.
    pub(super) step: u64,
    /// Seconds that the worker waited before it could go on: the last one may still be written.
    pub(super) begin: f64,
    /// Seconds from the step's end until all nodes had written, beside the training.
    pub(super) writing: f64,
    /// Of all nodes.
    pub(super) bytes: u64,
}

/// Makes a checkpoint after every so many steps.
pub(super) struct Saver<'a> {
    session: &'a Session,
    every: Option<u32>,
    /// With the seconds that its beginning took.
    saving: Option<(Saving, f64)>,
    made: Vec<Made>,
}

impl<'a> Saver<'a> {
    pub(super) fn new(session: &'a Session, every: Option<u32>) -> Self {
        Self { session, every, saving: None, made: Vec::new() }
    }

    /// Called before every step; begins the checkpoint of the state after it, if one is due.
    pub(super) fn before(&mut self, step: u32) -> anyhow::Result<()> {
        if !self.every.is_some_and(|every| step.is_multiple_of(every)) {
            return Ok(());
        }
        let asked = Instant::now();
        self.wait()?;
        let keep = Keep { count: Some(1), age: None };
        let saving = self.session.begin_checkpoint(step.into(), keep)?;
        // There is nothing else that a later run would need.
        saving.describe(Description::default());
        self.saving = Some((saving, asked.elapsed().as_secs_f64()));
        Ok(())
    }

    /// All that were made. Waits for the last one.
    pub(super) fn finish(mut self) -> anyhow::Result<Vec<Made>> {
        self.wait()?;
        Ok(self.made)
    }

    fn wait(&mut self) -> anyhow::Result<()> {
        if let Some((saving, begin)) = self.saving.take() {
            let Saved { step, bytes, took, .. } = saving.wait()?;
            self.made.push(Made { step, begin, writing: took.as_secs_f64(), bytes });
        }
        Ok(())
    }
}
