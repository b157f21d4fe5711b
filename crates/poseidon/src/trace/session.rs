//! What is noted of one session.

use super::{NO_LAYER, Record, Recorder, What, this_thread};
use poseidon_core::LayerId;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Instant;

/// What is noted of one session, layer by layer.
pub(crate) struct SessionTrace {
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) channel: u32,
    layers: Box<[LayerTrace]>,
    /// The highest clock of a layer that the program has received, and that it has sent.
    steps: AtomicU64,
    sent: AtomicU64,
    computing: Computing,
}

/// What the program computes, as far as it says so. Its threads write: in most frameworks one of them
/// runs the forward pass and another one the backward pass, one after the other.
#[derive(Default)]
struct Computing {
    /// The pass as its number, or 0.
    pass: AtomicU8,
    /// The step it is of.
    step: AtomicU64,
    /// Since when nothing of it has been noted, in the recorder's time.
    since: AtomicU64,
    /// Nanoseconds that were noted so far.
    noted: AtomicU64,
}

/// A pass of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Pass {
    /// From the input to the loss.
    Forward = 1,
    /// From the loss to the gradients.
    Backward,
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
        let (steps, sent, computing) = Default::default();
        Self { recorder, channel, layers, steps, sent, computing }
    }

    /// The time, if it is needed because something is noted.
    pub(crate) fn now(&self) -> Option<u64> {
        self.recorder.now()
    }

    /// This thread has sent `layer`, and began to at `begin`.
    pub(crate) fn sent(&self, layer: usize, clock: u64, begin: Option<u64>) {
        let (Some(begin), Some(of)) = (begin, self.layers.get(layer)) else { return };
        self.sent.fetch_max(clock, Ordering::Relaxed);
        of.clock.store(clock, Ordering::Relaxed);
        of.sent.store(begin.max(1), Ordering::Relaxed);
        let end = self.now().unwrap_or(begin);
        self.note_computed(layer as u32, Some(clock), (begin, end));
        self.note(What::Send, layer as u32, clock, (begin, end));
    }

    /// The program's threads compute a pass from now on, or if it is `None`, something else.
    pub(crate) fn begin_pass(&self, pass: Option<Pass>) {
        let Some(now) = self.now() else { return };
        self.note_computed(NO_LAYER, None, (now, now));
        self.computing.step.store(self.sent.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.computing.since.store(now, Ordering::Relaxed);
        self.computing.pass.store(pass.map_or(0, |pass| pass as u8), Ordering::Relaxed);
    }

    /// The pass has computed `layer`.
    pub(crate) fn computed(&self, layer: LayerId) {
        if let Some(now) = self.now() {
            self.note_computed(layer.0, None, (now, now));
        }
    }

    /// Nanoseconds in which the program has computed passes, if it says so.
    pub(crate) fn computed_nanos(&self) -> Option<u64> {
        Some(self.computing.noted.load(Ordering::Relaxed)).filter(|nanos| *nanos > 0)
    }

    /// What the pass has computed until `begin` was of `layer`, at `clock` if that is known. From then
    /// until `end` this thread did something else.
    fn note_computed(&self, layer: u32, clock: Option<u64>, (begin, end): (u64, u64)) {
        let what = match self.computing.pass.load(Ordering::Relaxed) {
            0 => return,
            pass if pass == Pass::Forward as u8 => What::Forward,
            _ => What::Backward,
        };
        let since = self.computing.since.swap(end, Ordering::Relaxed);
        if since < begin {
            self.computing.noted.fetch_add(begin - since, Ordering::Relaxed);
            let step = || self.computing.step.load(Ordering::Relaxed);
            self.note(what, layer, clock.unwrap_or_else(step), (since, begin));
        }
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
        // What was computed before belongs to no layer: it waits for another one.
        self.note_computed(NO_LAYER, None, (begin, end));
        self.note(What::Wait, layer as u32, clock, (begin, end));
    }

    /// The program has received `layer`, whose last part was back at `landed`.
    pub(crate) fn received(&self, layer: usize, clock: u64, landed: Instant) {
        self.steps.fetch_max(clock, Ordering::Relaxed);
        let (Some(rings), Some(of)) = (self.recorder.on(), self.layers.get(layer)) else { return };
        let begin = of.sent.swap(0, Ordering::Relaxed);
        if begin > 0 {
            self.note(What::Flight, layer as u32, clock, (begin, rings.at(landed).max(begin)));
        }
    }

    /// This thread has rebuilt `layer` since `begin`.
    pub(crate) fn rebuilt(&self, layer: usize, clock: u64, begin: Option<u64>) {
        let Some(begin) = begin else { return };
        self.note(What::Rebuild, layer as u32, clock, (begin, self.now().unwrap_or(begin)));
    }

    /// Copies of `layer` from or to its device are done. They began at `begin`; if that is not known,
    /// when the layer was sent.
    pub(crate) fn copied(&self, what: What, layer: usize, clock: u64, begin: Option<u64>) {
        let (Some(now), Some(of)) = (self.now(), self.layers.get(layer)) else { return };
        let sent = || Some(of.sent.load(Ordering::Relaxed)).filter(|sent| *sent > 0);
        let begin = begin.or_else(sent).unwrap_or(now).min(now);
        self.note(what, layer as u32, clock, (begin, now));
    }

    fn note(&self, what: What, layer: u32, clock: u64, (begin, end): (u64, u64)) {
        let Some(rings) = self.recorder.on() else { return };
        let (channel, thread) = (self.channel, this_thread());
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
