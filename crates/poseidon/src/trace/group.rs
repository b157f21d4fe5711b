//! What is noted of one group: its operations.

use super::{Record, Recorder, What, this_thread};
use crate::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is noted of one group.
pub(crate) struct GroupTrace {
    recorder: Arc<Recorder>,
    channel: u32,
    /// Operations that were begun while they were noted.
    begun: AtomicU64,
}

/// An operation that is under way, and noted when it is done.
pub(crate) struct BegunOperation {
    recorder: Arc<Recorder>,
    channel: u32,
    kind: u32,
    number: u64,
    begin: u64,
}

impl GroupTrace {
    pub(crate) fn new(recorder: Arc<Recorder>, channel: u32) -> Self {
        Self { recorder, channel, begun: AtomicU64::new(0) }
    }

    /// The program begins an operation of this kind. Nothing if nothing is noted.
    pub(crate) fn begun(&self, kind: u32) -> Option<BegunOperation> {
        self.recorder.operations.fetch_add(1, Ordering::Relaxed);
        let begin = self.recorder.now()?;
        let (recorder, channel) = (self.recorder.clone(), self.channel);
        let number = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
        Some(BegunOperation { recorder, channel, kind, number, begin })
    }
}

impl BegunOperation {
    /// The operation is over, and has failed if there is a `failure`.
    pub(crate) fn done(&self, failure: Option<&Error>) {
        let Some(rings) = self.recorder.on() else { return };
        if let Some(failure) = failure {
            self.recorder.failure.get_or_init(|| failure.to_string());
        }
        let end = rings.now();
        if let Some(kind) = self.recorder.kinds.get(self.kind as usize) {
            kind.count.fetch_add(1, Ordering::Relaxed);
            kind.nanos.fetch_add(end.saturating_sub(self.begin), Ordering::Relaxed);
        }
        rings.note(Record {
            what: What::Operation,
            channel: self.channel,
            layer: self.kind,
            clock: self.number,
            begin: self.begin,
            end,
            thread: this_thread(),
            more: 0,
        });
    }
}
