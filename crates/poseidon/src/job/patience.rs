//! Waits that count only the time in which this process ran.

use poseidon_core::running_time::RunningTime;
use std::time::{Duration, Instant};

/// What is left of a wait for other nodes. While this process is stopped, frozen or suspended,
/// nothing is taken from it.
#[derive(Debug)]
pub(crate) struct Patience {
    epoch: Instant,
    time: RunningTime,
    total: Duration,
}

impl Patience {
    /// The longest stretch.
    pub(crate) const LONGEST: Duration = RunningTime::USUAL;

    pub(crate) fn new(total: Duration) -> Self {
        Self { epoch: Instant::now(), time: RunningTime::default(), total }
    }

    /// How long to wait before this is asked again. Zero if nothing is left.
    pub(crate) fn stretch(&mut self) -> Duration {
        self.time.handle_running(self.epoch.elapsed());
        self.total.saturating_sub(self.time.now()).min(Self::LONGEST)
    }

    /// There is no more than `left` from now on.
    pub(crate) fn shorten(&mut self, left: Duration) {
        self.time.handle_running(self.epoch.elapsed());
        self.total = self.total.min(self.time.now().saturating_add(left));
    }

    /// How long ago the wait began, with the time that did not count.
    pub(crate) fn elapsed(&self) -> Duration {
        self.epoch.elapsed()
    }
}
