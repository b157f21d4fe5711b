//! What is noted of an engine's work, for traces and metrics.

use super::Engine;
use crate::trace::{Record, Recorder, What};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Engine {
    /// What the engine does as lane `lane` is noted by `recorder`.
    pub(crate) fn recorded(self, recorder: Arc<Recorder>, lane: u32) -> Self {
        Self { recorder: Some((recorder, lane)), ..self }
    }

    /// The engine was driven from `begin` to `end`, without sleeping.
    pub(crate) fn note_busy(&mut self, begin: Duration, end: Duration) {
        let Some((recorder, lane)) = &self.recorder else { return };
        let Some(rings) = recorder.on() else { return };
        let moved = self.moved();
        let bytes = moved.saturating_sub(std::mem::replace(&mut self.noted, moved));
        let (begin, end) = (begin.as_nanos() as u64, end.as_nanos() as u64);
        if let Some(totals) = recorder.totals().get(*lane as usize) {
            totals.add(end.saturating_sub(begin), bytes);
        }
        let (what, thread, more) = (What::Busy, *lane, bytes);
        rings.note_on_lane(Record {
            what,
            channel: 0,
            layer: 0,
            clock: 0,
            begin,
            end,
            thread,
            more,
        });
    }

    /// Writes down what the links have moved so far, and what waits for them.
    pub(super) fn count(&self) {
        let Some((recorder, lane)) = &self.recorder else { return };
        let Some(totals) = recorder.totals().get(*lane as usize) else { return };
        let (mut resent, mut outside, mut inside) = (0, [0; 2], [0; 2]);
        for peer in self.peers.iter().flatten() {
            resent += peer.resent();
            let [written, read] = if peer.is_budgeted() { &mut outside } else { &mut inside };
            *written += peer.written;
            *read += peer.read;
        }
        totals.retransmitted.store(resent, Ordering::Relaxed);
        totals.queued.store(self.queued(), Ordering::Relaxed);
        let counts = totals.outside.iter().chain(&totals.inside).zip(outside.iter().chain(&inside));
        counts.for_each(|(total, bytes)| total.store(*bytes, Ordering::Relaxed));
    }

    /// Messages that links have not taken.
    fn queued(&self) -> u64 {
        self.channels.open.values().map(|slot| slot.unsent as u64).sum()
    }
}
