//! What is noted of an engine's work, for traces and metrics.

use super::Engine;
use super::peer::Peer;
use crate::trace::{Record, Recorder, What};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Engine {
    /// What the engine does as lane `lane` is noted by `recorder`.
    pub(crate) fn recorded(self, recorder: Arc<Recorder>, lane: u32) -> Self {
        Self { recorder: Some((recorder, lane)), ..self }
    }

    /// Whether what the engine does is noted.
    pub(crate) fn is_recorded(&self) -> bool {
        self.recorder.as_ref().is_some_and(|(recorder, _)| recorder.on().is_some())
    }

    /// The engine was driven from `begin` to `end`, without sleeping.
    pub(crate) fn note_busy(&mut self, begin: Duration, end: Duration) {
        let moved = self.moved();
        let bytes = moved.saturating_sub(self.noted);
        let Some((recorder, lane)) = &self.recorder else { return };
        let Some(rings) = recorder.on() else { return };
        self.noted = moved;
        let (begin, end) = (begin.as_nanos() as u64, end.as_nanos() as u64);
        if let Some(totals) = rings.totals().get(*lane as usize) {
            let queued = self.channels.open.values().map(|slot| slot.unsent as u64).sum();
            totals.add(end.saturating_sub(begin), bytes, queued);
        }
        let (what, thread, more) = (What::Busy, *lane, bytes);
        rings.note(Record { what, channel: 0, layer: 0, clock: 0, begin, end, thread, more });
    }

    /// Notes how many segments TCP has sent again so far.
    pub(super) fn note_resent(&self) {
        if let Some((recorder, lane)) = &self.recorder
            && let Some(rings) = recorder.on()
            && let Some(totals) = rings.totals().get(*lane as usize)
        {
            let again = self.peers.iter().flatten().map(Peer::resent).sum();
            totals.retransmitted.store(again, Ordering::Relaxed);
        }
    }
}
