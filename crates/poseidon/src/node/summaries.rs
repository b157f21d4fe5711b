//! The thread that tells the coordinator what this node does.

use super::observed::Shared;
use super::scalars::ScalarFile;
use crate::job::control::Message;
use crate::job::line::{ControlLine, JobState};
use crate::job::live::PERIOD;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Tells the coordinator about once a second what this node has counted, until it is dropped, and writes
/// scalars if they are wanted. It reads counters that others write, so no lane and no program waits for it.
pub(super) struct SummaryThread {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

/// Whether the thread is to end. Written once, by the drop.
#[derive(Default)]
struct Stop {
    asked: Mutex<bool>,
    changed: Condvar,
}

impl SummaryThread {
    pub(super) fn start(
        node: Arc<Shared>,
        line: Arc<ControlLine>,
        mut scalars: Option<ScalarFile>,
    ) -> io::Result<Self> {
        let stop = Arc::<Stop>::default();
        let asked = stop.clone();
        let body = move || {
            let mut before = BTreeMap::new();
            let mut has_failed = false;
            let watch = || if asked.is_asked() { JobState::Failed } else { JobState::Running };
            loop {
                let summary = node.count(&mut before);
                node.write_scalars(&mut scalars, &summary);
                // A program whose operation has failed may do nothing more than print the error.
                if !has_failed && node.recorder.failure().is_some() {
                    has_failed = true;
                    node.write();
                }
                let summary = Message::Summary(Box::new(summary));
                // Each one is acknowledged before the next one is written, so a coordinator that is
                // away is not flooded. One that is gone is told nothing more.
                if line.ask(&summary, FOREVER, &watch).is_err() || asked.wait(PERIOD) {
                    break;
                }
            }
            // What was done since the last time.
            if scalars.is_some() {
                node.write_scalars(&mut scalars, &node.count(&mut before));
            }
        };
        let thread = std::thread::Builder::new().name("poseidon-summary".into()).spawn(body)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for SummaryThread {
    fn drop(&mut self) {
        *self.stop.asked.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic is a bug; its message is on standard error already.
            let _ = thread.join();
        }
    }
}

impl Stop {
    fn is_asked(&self) -> bool {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `time`, or until the end is asked for. True if it is.
    fn wait(&self, time: Duration) -> bool {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(asked, time, |asked| !*asked);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The drop ends a wait for the coordinator. Nothing else has to: a wait for a coordinator that is gone
/// ends by itself.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
