//! How a run ends before its last step: one of its processes is asked to end, or fails.
//!
//! All workers end after the same step. Where they take every step together, or are apart by a known
//! number of steps, they hear of it at the same step. Where slow workers may be dropped, they hear of it
//! with the result of the same clock. With `asp` they hear of it at different steps, and end after the next
//! step that all of them take together.

use super::Run;
use crate::train::saving;
use poseidon::Consistency;
use poseidon_nn::train::{TrainError, Worker};

impl Run<'_> {
    pub(super) fn is_stopped(&self) -> bool {
        self.stop_at.is_some_and(|step| self.worker.steps() >= step)
    }

    /// After a step: tells the others that this process was asked to end, and hears whether one was.
    /// `left`: steps of this epoch.
    pub(super) fn hear_whether_to_stop(&mut self, left: u64) {
        let asked = saving::is_set(&self.asked);
        let stops = match self.worker.session() {
            Some(session) => {
                if asked {
                    session.ask_to_stop();
                }
                self.worker.stop_asked()
            }
            None => asked,
        };
        // Workers that do not wait, or miss steps, hear of it at different steps: see `stop_if_known`.
        let alike = matches!(self.settings.sync, Consistency::Bsp | Consistency::Ssp(_));
        if stops && alike {
            self.stop_soon();
        }
        if asked {
            self.tell_when(left);
        }
    }

    /// Before a step, where workers hear at different times that all are to stop: stops after this step if
    /// all of them know by now. `together`: all have taken the last step.
    pub(super) fn stop_if_known(&mut self, together: bool) -> anyhow::Result<()> {
        let known = match self.settings.sync {
            // See `hear_whether_to_stop`.
            Consistency::Bsp | Consistency::Ssp(_) => false,
            // The step that has just come back, and the roll of it, are those of all workers.
            Consistency::DropSlowest(_) => true,
            Consistency::Asp => together,
        };
        if !known {
            return Ok(());
        }
        if self.settings.sync == Consistency::Asp {
            self.worker.settle()?;
        }
        if self.worker.session().is_some_and(|session| session.stop_asked().is_some()) {
            self.stop_soon();
        }
        Ok(())
    }

    /// With `asp` nobody waits for another, so there may be no step soon that all of them can stop after:
    /// says so, once, to whoever asked.
    fn tell_when(&mut self, left: u64) {
        if self.settings.sync != Consistency::Asp || self.told_when || self.stop_at.is_some() {
            return;
        }
        self.told_when = true;
        let steps = self.worker.steps();
        let end = steps + left;
        let meets = self.saver.next_due(steps).map_or(end, |due| due.min(end));
        self.screen.note(&format!(
            "asked to end: with --sync asp the workers are at different steps, this one after {steps}; all of \
             them end after step {}, when they have met in step {meets}. --checkpoint with --every makes them \
             meet more often. A second signal ends this process at once",
            (meets + 1).min(self.steps)
        ));
    }

    /// The step after this one is saved, on all workers, and is the last.
    pub(super) fn stop_soon(&mut self) {
        self.stop_at.get_or_insert(self.worker.steps() + 1);
    }
}

/// Ends this worker, after telling the others why: not that a connection was lost.
pub(super) fn give_up(worker: Worker, error: anyhow::Error) -> anyhow::Result<()> {
    if let Some(reason) = own_fault(&error) {
        worker.abort(&reason);
    }
    Err(error)
}

/// What this worker has to tell the others, unless it heard it from them.
fn own_fault(error: &anyhow::Error) -> Option<String> {
    let theirs = matches!(error.downcast_ref(), Some(TrainError::Session(_)))
        || error.downcast_ref::<poseidon::Error>().is_some();
    (!theirs).then(|| format!("{error:#}"))
}
