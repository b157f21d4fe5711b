//! What is noted of one session.

use super::{Record, Recorder, What, this_thread};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// What is noted of one session, layer by layer.
pub(crate) struct SessionTrace {
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) channel: u32,
    layers: Box<[LayerTrace]>,
    /// The highest clock of a layer that the program has received.
    steps: AtomicU64,
}

/// Written by the thread that sends or receives the layer.
#[derive(Default)]
struct LayerTrace {
    /// When the layer was sent, in the recorder's time. 0: it is not in flight, or that was not noted.
    sent: AtomicU64,
    /// The clock it was sent at.
    clock: AtomicU64,
    /// Nanoseconds that threads of the program have waited for it.
    waited: AtomicU64,
}

impl SessionTrace {
    pub(crate) fn new(recorder: Arc<Recorder>, channel: u32, layers: usize) -> Self {
        let layers = (0..layers).map(|_| LayerTrace::default()).collect();
        Self { recorder, channel, layers, steps: AtomicU64::new(0) }
    }

    /// The time, if it is needed because something is noted.
    pub(crate) fn now(&self) -> Option<u64> {
        self.recorder.now()
    }

    /// This thread has sent `layer`, and began to at `begin`.
    pub(crate) fn sent(&self, layer: usize, clock: u64, begin: Option<u64>) {
        let (Some(begin), Some(of)) = (begin, self.layers.get(layer)) else { return };
        of.clock.store(clock, Ordering::Relaxed);
        of.sent.store(begin.max(1), Ordering::Relaxed);
        self.note(What::Send, layer, clock, (begin, self.now().unwrap_or(begin)));
    }

    /// This thread begins to wait for a layer. Waits are counted always.
    pub(crate) fn begin_wait(&self) -> u64 {
        self.recorder.nanos()
    }

    /// This thread has waited for `layer` since `begin`.
    pub(crate) fn waited(&self, layer: usize, clock: u64, begin: u64) {
        let Some(of) = self.layers.get(layer) else { return };
        let end = self.recorder.nanos();
        of.waited.fetch_add(end.saturating_sub(begin), Ordering::Relaxed);
        self.note(What::Wait, layer, clock, (begin, end));
    }

    /// The program has received `layer`, whose last part was back at `landed`.
    pub(crate) fn received(&self, layer: usize, clock: u64, landed: Instant) {
        self.steps.fetch_max(clock, Ordering::Relaxed);
        let (Some(rings), Some(of)) = (self.recorder.on(), self.layers.get(layer)) else { return };
        let begin = of.sent.swap(0, Ordering::Relaxed);
        if begin > 0 {
            self.note(What::Flight, layer, clock, (begin, rings.at(landed).max(begin)));
        }
    }

    /// This thread has rebuilt `layer` since `begin`.
    pub(crate) fn rebuilt(&self, layer: usize, clock: u64, begin: Option<u64>) {
        let Some(begin) = begin else { return };
        self.note(What::Rebuild, layer, clock, (begin, self.now().unwrap_or(begin)));
    }

    /// Something has happened to `layer` just now, by this thread.
    pub(crate) fn happened(&self, what: What, layer: usize, clock: u64) {
        if let Some(now) = self.now() {
            self.note(what, layer, clock, (now, now));
        }
    }

    fn note(&self, what: What, layer: usize, clock: u64, (begin, end): (u64, u64)) {
        let Some(rings) = self.recorder.on() else { return };
        let (channel, layer, thread) = (self.channel, layer as u32, this_thread());
        rings.note(Record { what, channel, layer, clock, begin, end, thread, more: 0 });
    }

    /// Steps that the program has received.
    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Nanoseconds that the program has waited for the layer of this index.
    pub(crate) fn waited_nanos(&self, layer: usize) -> u64 {
        self.layers.get(layer).map_or(0, |of| of.waited.load(Ordering::Relaxed))
    }

    /// Layers that are in flight: as records that end `now`.
    pub(crate) fn in_flight(&self, now: u64) -> impl Iterator<Item = Record> + '_ {
        self.layers.iter().enumerate().filter_map(move |(layer, of)| {
            let (begin, clock) =
                (of.sent.load(Ordering::Relaxed), of.clock.load(Ordering::Relaxed));
            let (what, channel, layer) = (What::Flight, self.channel, layer as u32);
            let record =
                Record { what, channel, layer, clock, begin, end: now, thread: 0, more: 1 };
            (begin > 0 && begin <= now).then_some(record)
        })
    }
}

impl fmt::Debug for SessionTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionTrace(channel {})", self.channel)
    }
}
