//! A step that takes longer than this machine needs, as it would on a slower machine: every pass of every
//! layer takes the same multiple of its time. What travels meanwhile is hidden behind it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the passes of a step take at least.
#[derive(Debug, Default)]
pub(super) struct Slower {
    /// How long the next step computes at least.
    least: Duration,
    /// How long the passes of the last step really took, in their order.
    passes: Mutex<Vec<Duration>>,
}

/// One device's way through the passes of a step.
pub(super) struct Passes<'a> {
    slower: &'a Slower,
    /// After each pass: how long the device has computed at least. Empty: as long as it takes.
    due: Vec<Duration>,
    took: Vec<Duration>,
    /// How long it has computed so far, what it has slept included.
    spent: Duration,
}

impl Slower {
    /// The next step computes at least so long.
    pub(super) fn set(&mut self, least: Duration) {
        self.least = least;
    }

    /// A step begins that has so many passes.
    pub(super) fn passes(&self, count: usize) -> Passes<'_> {
        let mut due = Vec::new();
        if self.least > Duration::ZERO {
            let last = self.passes.lock().unwrap_or_else(PoisonError::into_inner);
            // Of the first step nothing is known: its passes are taken for equal.
            let took = |pass: usize| last.get(pass).map_or(1.0, Duration::as_secs_f64);
            let all: f64 = (0..count).map(took).sum();
            let mut so_far = 0.0;
            due.extend((0..count).map(|pass| {
                so_far += took(pass);
                self.least.mul_f64((so_far / all).clamp(0.0, 1.0))
            }));
        }
        Passes { slower: self, due, took: Vec::with_capacity(count), spent: Duration::ZERO }
    }
}

impl Passes<'_> {
    /// A pass that began at `start` is computed: sleeps as long as a slower machine would still compute.
    pub(super) fn end(&mut self, start: Instant) {
        let Some(due) = self.due.get(self.took.len()) else { return };
        let took = start.elapsed();
        self.took.push(took);
        std::thread::sleep(due.saturating_sub(self.spent + took));
        self.spent += start.elapsed();
    }

    /// The step is computed. One device of a worker calls it.
    pub(super) fn keep(self) {
        if !self.due.is_empty() {
            *self.slower.passes.lock().unwrap_or_else(PoisonError::into_inner) = self.took;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_take_the_same_multiple_of_their_time() {
        let mut slower = Slower::default();
        assert!(slower.passes(2).due.is_empty());
        slower.set(Duration::from_millis(40));
        assert_eq!(slower.passes(4).due, [10, 20, 30, 40].map(Duration::from_millis));
        *slower.passes.lock().unwrap() = [1, 5, 3, 1].map(Duration::from_millis).to_vec();
        assert_eq!(slower.passes(4).due, [4, 24, 36, 40].map(Duration::from_millis));
        let mut passes = slower.passes(4);
        for _ in 0..4 {
            passes.end(Instant::now());
        }
        assert!(passes.spent >= Duration::from_millis(40));
        passes.keep();
        assert_eq!(slower.passes.lock().unwrap().len(), 4);
    }
}
