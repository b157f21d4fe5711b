//! Where a worker's time goes: what it computed, when it waited, what travelled meanwhile.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What happened to a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Its forward pass.
    Forward,
    /// Its backward pass.
    Backward,
    /// Its gradient was rebuilt from factors and applied.
    Rebuild,
    /// The same, beside the computing of other layers.
    RebuildBeside,
    /// Computing waited for it.
    Wait,
    /// It was in flight: from its sending until the last byte was back.
    Sync,
}

/// Something that happened to a layer, in seconds since the iteration began.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The layer's name.
    pub layer: String,
    /// What happened.
    pub what: What,
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// One iteration: from the beginning of a step to the beginning of the next.
#[derive(Clone, Debug, PartialEq)]
pub struct Iteration {
    /// The step, counted from 0.
    pub step: u64,
    /// How long it took.
    pub seconds: f64,
    /// What happened in it, cut at its ends.
    pub spans: Vec<Span>,
}

/// Totals of all steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Forward, backward and rebuilding.
    pub compute_seconds: f64,
    /// Waiting for layers.
    pub stall_seconds: f64,
    /// Time in which at least one layer was in flight.
    pub sync_seconds: f64,
}

impl Stats {
    /// How much of the time communication took passed while the worker computed. 1 if there was none.
    pub fn hidden_fraction(&self) -> f64 {
        if self.sync_seconds <= 0.0 {
            return 1.0;
        }
        (1.0 - self.stall_seconds / self.sync_seconds).clamp(0.0, 1.0)
    }
}

/// Collects events of a step as they happen.
pub(super) struct Log {
    names: Vec<String>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    stats: Stats,
    step: u64,
    began: Option<Instant>,
    /// Until when time in flight has been counted.
    counted: Option<Instant>,
    /// Flights that began in the step under way when they were looked at. Others of that step, which began
    /// earlier, may not be back.
    flights: Vec<(Instant, Instant)>,
    /// Events of the iteration under way and of the one before.
    events: Vec<Event>,
    /// How many of them were looked at for flights.
    looked: usize,
    before: Vec<Event>,
    before_began: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Event {
    layer: usize,
    what: What,
    start: Instant,
    end: Instant,
}

impl Log {
    pub(super) fn new(names: Vec<String>) -> Self {
        Self { names, inner: Mutex::default() }
    }

    /// A step begins.
    pub(super) fn begin(&self, step: u64) {
        let mut inner = self.inner();
        let inner = &mut *inner;
        inner.count_flights(inner.began);
        std::mem::swap(&mut inner.events, &mut inner.before);
        inner.events.clear();
        inner.looked = 0;
        inner.before_began = inner.began;
        inner.began = Some(Instant::now());
        inner.step = step;
    }

    pub(super) fn note(&self, layer: usize, what: What, start: Instant, end: Instant) {
        if end <= start {
            return;
        }
        let mut inner = self.inner();
        let seconds = (end - start).as_secs_f64();
        match what {
            What::Forward | What::Backward | What::Rebuild => {
                inner.stats.compute_seconds += seconds
            }
            What::Wait => inner.stats.stall_seconds += seconds,
            What::RebuildBeside | What::Sync => {}
        }
        inner.events.push(Event { layer, what, start, end });
    }

    pub(super) fn stats(&self) -> Stats {
        let mut inner = self.inner();
        inner.count_flights(None);
        inner.stats
    }

    /// The iteration before the one under way. What was in flight at its end came back since.
    pub(super) fn last_iteration(&self) -> Option<Iteration> {
        let inner = self.inner();
        let (began, ended) = (inner.before_began?, inner.began?);
        let at = |time: Instant| time.saturating_duration_since(began).as_secs_f64();
        let cut = |time: Instant| time.clamp(began, ended);
        let spans = inner.before.iter().chain(&inner.events).filter_map(|event| {
            let (start, end) = (cut(event.start), cut(event.end));
            let layer = self.names.get(event.layer)?.clone();
            (end > start).then(|| Span { layer, what: event.what, start: at(start), end: at(end) })
        });
        let spans = spans.collect();
        Some(Iteration { step: inner.step.saturating_sub(1), seconds: at(ended), spans })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Adds the time in which anything was in flight: overlapping flights count once. Flights are counted
    /// in the order in which they began, so those that began at `until` or later wait for the next call.
    fn count_flights(&mut self, until: Option<Instant>) {
        let fresh = self.events[self.looked..].iter().filter(|event| event.what == What::Sync);
        self.flights.extend(fresh.map(|event| (event.start, event.end)));
        self.looked = self.events.len();
        self.flights.sort_unstable();
        let begun = until.map_or(self.flights.len(), |until| {
            self.flights.partition_point(|(start, _)| *start < until)
        });
        for (start, end) in self.flights.drain(..begun) {
            let start = self.counted.map_or(start, |counted| counted.max(start));
            let fresh = end.checked_duration_since(start).unwrap_or(Duration::ZERO);
            self.stats.sync_seconds += fresh.as_secs_f64();
            self.counted = self.counted.max(Some(end));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_flights_count_once_and_waits_are_not_hidden() {
        let log = Log::new(vec!["a".into(), "b".into()]);
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        log.begin(0);
        log.note(1, What::Sync, at(10), at(50));
        log.note(0, What::Sync, at(20), at(60));
        log.note(0, What::Wait, at(50), at(60));
        log.begin(1);
        log.note(1, What::Sync, at(55), at(80));
        let stats = log.stats();
        assert!((stats.sync_seconds - 0.070).abs() < 1e-9, "{stats:?}");
        assert!((stats.stall_seconds - 0.010).abs() < 1e-9);
        assert!((stats.hidden_fraction() - 6.0 / 7.0).abs() < 1e-9);
        // Asking twice changes nothing.
        assert_eq!(log.stats(), stats);
    }

    /// Where slow workers may be dropped, the layer that was sent last is received before the next step
    /// begins, and those that were sent before it afterwards.
    #[test]
    fn a_flight_that_ends_before_its_step_does_not_hide_the_others() {
        let log = Log::new(vec!["first".into(), "last".into()]);
        log.begin(0);
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        log.note(0, What::Sync, at(30), at(40));
        log.begin(1);
        log.note(1, What::Sync, at(10), at(35));
        log.begin(2);
        let stats = log.stats();
        assert!((stats.sync_seconds - 0.030).abs() < 1e-9, "{stats:?}");
    }

    #[test]
    fn without_communication_nothing_is_exposed() {
        assert_eq!(Stats::default().hidden_fraction(), 1.0);
    }

    #[test]
    fn an_iteration_is_cut_at_its_ends() {
        let log = Log::new(vec!["a".into()]);
        log.begin(0);
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(2));
        log.note(0, What::Forward, start, Instant::now());
        log.begin(1);
        let later = Instant::now();
        log.note(0, What::Sync, start, later + Duration::from_secs(1));
        let iteration = log.last_iteration().unwrap();
        assert_eq!((iteration.step, iteration.spans.len()), (0, 2));
        assert!(iteration.spans.iter().all(|span| span.end <= iteration.seconds));
    }
}
