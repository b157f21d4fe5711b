//! How a thread that drives shares its core.
//!
//! Lanes of several nodes on one host are fastest if the same lane of all of them stays on one core,
//! and each lets the others run after it has written: what one sends, the next one receives from the
//! cache. That holds on a quiet machine. A thread that computes does not give the core back: a lane
//! that yields to it waits for a whole slice of time, and a lane that stays on the core cannot go to
//! another. So a lane finds out how long its yields take. When they take long, it leaves the core to
//! whoever computes, and lets the scheduler find it another.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::time::{Duration, Instant};

/// How one thread shares its core.
pub(super) struct Sharing {
    /// Where the thread stays while only lanes are there, and where it may go otherwise.
    core: Option<(usize, Vec<usize>)>,
    yields: bool,
    habit: Habit,
}

/// Whether to yield, by how long earlier yields took.
#[derive(Debug)]
struct Habit {
    /// Yields that took long, and yields that did not, one after the other.
    long: u32,
    short: u32,
    /// Somebody computes here. Until then the thread does not yield.
    avoids: Option<Instant>,
    pause: Duration,
}

/// A yield among lanes takes less: each of the others takes one turn.
const LONG: Duration = Duration::from_micros(1500);
/// So many long yields, one after the other, are no chance.
const MANY: u32 = 3;
/// How long a thread does not yield, at first and at most.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// After so many short yields, one after the other, the next pause is a short one again.
const CALM: u32 = 200;

/// Where a lane's thread stays.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Wherever the scheduler has it.
    Anywhere,
    /// On this core, with lanes of other nodes.
    Core(usize),
    /// On these cores, as far as the process may use them: they are near the lane's interface. What the
    /// thread is the first to write is in the memory near them, too.
    Near(Vec<usize>),
}

impl Sharing {
    pub(super) fn new(place: &Place, yields: bool) -> Self {
        let core = match place {
            Place::Anywhere => None,
            Place::Core(core) => {
                let all = cores();
                stay_on(&[*core]);
                Some((*core, all))
            }
            Place::Near(near) => {
                let mut allowed = cores();
                allowed.retain(|core| near.contains(core));
                if !allowed.is_empty() {
                    stay_on(&allowed);
                }
                None
            }
        };
        let habit = Habit { long: 0, short: 0, avoids: None, pause: PAUSE };
        Self { yields: yields || core.is_some(), core, habit }
    }

    /// Lets others run, unless they would keep the core.
    pub(super) fn let_run(&mut self) {
        if !self.yields {
            return;
        }
        let before = Instant::now();
        match self.habit.avoids {
            Some(until) if before < until => return,
            Some(_) => {
                self.habit.avoids = None;
                if let Some((core, _)) = self.core {
                    stay_on(&[core]);
                }
            }
            None => {}
        }
        std::thread::yield_now();
        let now = Instant::now();
        if self.habit.handle_yield(now - before, now)
            && let Some((_, all)) = &self.core
        {
            stay_on(all);
        }
    }
}

impl Habit {
    /// A yield took this long. True if the thread had better not yield for a while.
    fn handle_yield(&mut self, took: Duration, now: Instant) -> bool {
        if took < LONG {
            self.long = 0;
            self.short = self.short.saturating_add(1);
            if self.short >= CALM {
                self.pause = PAUSE;
            }
            return false;
        }
        self.short = 0;
        self.long += 1;
        if self.long < MANY {
            return false;
        }
        self.long = 0;
        self.avoids = Some(now + self.pause);
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
        true
    }
}

/// The cores this thread may use.
pub(crate) fn cores() -> Vec<usize> {
    let allowed = sched_getaffinity(None);
    allowed.map_or_else(
        |_| Vec::new(),
        |set| (0..CpuSet::MAX_CPU).filter(|&c| set.is_set(c)).collect(),
    )
}

/// Keeps this thread on `cores`.
fn stay_on(cores: &[usize]) {
    let mut set = CpuSet::new();
    cores.iter().for_each(|core| set.set(*core));
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::debug!(%error, "a lane could not be kept on its cores");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn habit() -> Habit {
        Habit { long: 0, short: 0, avoids: None, pause: PAUSE }
    }

    #[test]
    fn a_lane_stays_near_its_interface_where_it_may() {
        let all = cores();
        let stays = |near: Vec<usize>| {
            let thread = std::thread::spawn(move || {
                Sharing::new(&Place::Near(near), false);
                cores()
            });
            thread.join().unwrap()
        };
        let last = all[all.len() - 1];
        assert_eq!(stays(vec![last, CpuSet::MAX_CPU - 1]), [last]);
        assert_eq!(stays(vec![CpuSet::MAX_CPU - 1]), all, "the process may not use that core");
        assert_eq!(stays(Vec::new()), all);
    }

    #[test]
    fn yields_that_take_long_again_and_again_are_avoided_for_longer_each_time() {
        let (mut habit, now) = (habit(), Instant::now());
        let mut avoided = Vec::new();
        for _ in 0..3 {
            for _ in 1..MANY {
                assert!(!habit.handle_yield(LONG, now));
            }
            assert!(habit.handle_yield(LONG, now));
            avoided.push(habit.avoids.take().unwrap() - now);
        }
        assert_eq!(avoided, [PAUSE, 2 * PAUSE, 4 * PAUSE]);
        for _ in 0..20 * MANY {
            habit.handle_yield(LONG, now);
        }
        assert_eq!(habit.pause, LONGEST_PAUSE);
        for _ in 0..CALM {
            assert!(!habit.handle_yield(LONG / 2, now));
        }
        assert_eq!(habit.pause, PAUSE);
    }

    #[test]
    fn a_long_yield_now_and_then_is_chance() {
        let (mut habit, now) = (habit(), Instant::now());
        for _ in 0..100 {
            assert!(!habit.handle_yield(LONG, now) && !habit.handle_yield(LONG, now));
            assert!(!habit.handle_yield(LONG / 2, now));
        }
    }
}
