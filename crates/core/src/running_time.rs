//! Tells the time in which a process ran from the time in which it was away: stopped by a signal,
//! frozen with its control group or its virtual machine, or without a processor.
//!
//! A process that was away cannot tell silence of others from its own. So its deadlines for others
//! count the time in which it ran.

use std::time::Duration;

/// The clock of one thread that looks at the time at least every [`RunningTime::USUAL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunningTime {
    /// When the thread looked last.
    seen: Duration,
    /// How long it was away, in all.
    away: Duration,
}

impl RunningTime {
    /// The longest that the thread sleeps when all is well.
    pub const USUAL: Duration = Duration::from_millis(500);
    /// A thread that was not there for so long was away. A thread of a busy machine may get a
    /// processor a little late, which costs nothing: it then waits that much longer for others.
    const LATE: Duration = Duration::from_millis(750);

    /// The clock of a thread that runs at `now`.
    pub fn new(now: Duration) -> Self {
        Self { seen: now, away: Duration::ZERO }
    }

    /// The thread runs at `now`. Returns how long it was away, if it was.
    pub fn handle_running(&mut self, now: Duration) -> Option<Duration> {
        let gap = now.saturating_sub(self.seen);
        self.seen = now.max(self.seen);
        if gap <= Self::LATE {
            return None;
        }
        let away = gap - Self::USUAL;
        self.away += away;
        Some(away)
    }

    /// The thread had nothing to wait for until `now`. Whether it was away does not matter.
    pub fn rest_until(&mut self, now: Duration) {
        self.seen = now.max(self.seen);
    }

    /// The running time when the thread looked last.
    pub fn now(&self) -> Duration {
        self.at(self.seen)
    }

    /// The running time at `real`, which is not before the thread looked last.
    pub fn at(&self, real: Duration) -> Duration {
        real.saturating_sub(self.away)
    }

    /// When `running` is reached, if the thread is not away any more.
    pub fn real(&self, running: Duration) -> Duration {
        running.saturating_add(self.away)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn time_away_does_not_count() {
        let mut time = RunningTime::new(SECOND);
        for tenth in 11..=20 {
            assert_eq!(time.handle_running(SECOND * tenth / 10), None);
        }
        assert_eq!(time.now(), 2 * SECOND);
        assert_eq!(time.handle_running(22 * SECOND), Some(20 * SECOND - RunningTime::USUAL));
        assert_eq!(time.now(), 2 * SECOND + RunningTime::USUAL);
        assert_eq!(time.real(time.now()), 22 * SECOND);
        assert_eq!(time.handle_running(22 * SECOND + RunningTime::USUAL), None);
        assert_eq!(time.now(), 3 * SECOND);
    }

    #[test]
    fn a_thread_that_is_a_little_late_was_there() {
        let mut time = RunningTime::default();
        assert_eq!(time.handle_running(RunningTime::LATE), None);
        assert_eq!(time.now(), RunningTime::LATE);
    }
}
