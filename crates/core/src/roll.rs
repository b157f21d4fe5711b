//! Which workers count at a clock, where a job does not wait for its slowest workers
//! ([`DropSlowest`](crate::Consistency::DropSlowest)).
//!
//! One node calls the roll: that of worker 0. A worker tells it when it begins to send its
//! contribution to a clock. Once all but B have begun, and a short grace is over, the node tells
//! everybody who counts: a [`Roll`]. So all shards add up the same workers, for all layers.
//!
//! A contribution that does not count is late. Shards take it in and forget it. When its worker has
//! sent all of it, the worker says so and waits. The next roll says that the worker *joins*: it gets the
//! result of that clock, like the workers that count, and begins the next clock with them. So a worker
//! may jump over clocks, but all its layers jump to the same one.
//!
//! At a clock that is taken [together](crate::wire::Marks::TOGETHER) all workers count. Those who wait
//! get the result of the clock before at once, so that they can contribute.

use crate::wire::Marks;
use crate::{Clock, NodeId, Violation};
use std::collections::VecDeque;
use std::time::Duration;

/// Who counts at a clock, and who goes on with its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roll {
    /// The clock.
    pub clock: Clock,
    /// What some worker asked, whether it counts or not.
    pub marks: Marks,
    parts: Vec<Part>,
    counted: usize,
}

/// What a worker has to do with a clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Part {
    /// Nothing: its contribution to this clock or to an earlier one is not all there.
    Absent = 0,
    /// Its contribution is in the sum.
    Counts = 1,
    /// Its contribution to this clock or to an earlier one was late. It goes on with the result.
    Joins = 2,
}

/// Calls the roll. It lives on the node of worker 0.
#[derive(Debug)]
pub struct RollCall {
    /// Workers that must count, at least.
    needed: usize,
    /// The clock whose roll is called next.
    clock: Clock,
    workers: Vec<Standing>,
    /// Workers that have begun to contribute to `clock`.
    ready: usize,
    /// Whether `clock` is taken together. Unknown before the first worker is ready.
    together: Option<bool>,
    /// What workers asked. That all are to stop is said in every roll from then on.
    marks: Marks,
    /// When enough workers were ready.
    quorum: Option<Duration>,
    /// When the last roll was called, and how long after the one before.
    called: Duration,
    length: Option<Duration>,
    rolls: VecDeque<Roll>,
}

/// How a worker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    /// The clock that it contributes to next, or now.
    clock: Clock,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has not begun to send.
    Computing,
    /// It has begun to send.
    Sending,
    /// It has sent all of a contribution that is late, and waits for a result.
    Waiting,
}

/// A worker's side of the roll call.
#[derive(Debug)]
pub struct Member {
    me: NodeId,
    /// Chunks that it sends at each clock.
    chunks: usize,
    /// The clock that it sends or has sent last, and how many chunks of it.
    clock: Clock,
    sent: usize,
    said_late: bool,
    /// The last clock whose roll is known, and the last one that this worker counted at.
    called: Clock,
    counted: Clock,
}

/// The worker whose node calls the roll.
pub const CALLER: NodeId = NodeId(0);

/// Enough workers are ready: the others have this part of a clock's time to get ready, too. So workers
/// that are as fast as the others seldom lose their work to chance.
const GRACE: u32 = 8;
/// How long that is at the first clock, whose time is not known.
const FIRST_GRACE: Duration = Duration::from_secs(1);

impl Roll {
    /// A roll as it came from another node, with a byte for each of `workers`. `None` if it is none.
    pub fn read(clock: Clock, marks: Marks, bytes: &[u8], workers: usize) -> Option<Self> {
        let part = |byte: &u8| match byte {
            0 => Some(Part::Absent),
            1 => Some(Part::Counts),
            2 => Some(Part::Joins),
            _ => None,
        };
        let parts: Vec<Part> = bytes.iter().map(part).collect::<Option<_>>()?;
        (parts.len() == workers).then(|| Self::new(clock, marks, parts))
    }

    fn new(clock: Clock, marks: Marks, parts: Vec<Part>) -> Self {
        let counted = parts.iter().filter(|part| **part == Part::Counts).count();
        Self { clock, marks, parts, counted }
    }

    /// What [`read`](Self::read) reads.
    pub fn bytes(&self) -> Vec<u8> {
        self.parts.iter().map(|part| *part as u8).collect()
    }

    /// What `worker` has to do with the clock.
    pub fn part(&self, worker: NodeId) -> Part {
        self.parts.get(worker.index()).copied().unwrap_or(Part::Absent)
    }

    /// How many workers count.
    pub fn counted(&self) -> usize {
        self.counted
    }

    /// The workers that have this part.
    pub fn those(&self, part: Part) -> impl Iterator<Item = NodeId> + '_ {
        let has = move |(_, its): &(NodeId, &Part)| **its == part;
        (0..).map(NodeId).zip(&self.parts).filter(has).map(|(worker, _)| worker)
    }
}

impl Member {
    /// Worker `me`, which sends so many chunks at each clock.
    pub fn new(me: NodeId, chunks: usize) -> Self {
        let (clock, called, counted) = (Clock(0), Clock(0), Clock(0));
        Self { me, chunks, clock, sent: 0, said_late: false, called, counted }
    }

    /// `chunks` of `clock` go out. True if they are the first of their clock: then the caller is told
    /// that this worker is [ready](RollCall::handle_ready).
    pub fn handle_send(&mut self, clock: Clock, chunks: usize) -> Result<bool, Violation> {
        let is_first = clock != self.clock;
        if is_first {
            if self.sent < self.chunks && self.clock != Clock(0) {
                return Err(Violation::Unsent(clock));
            }
            (self.clock, self.sent, self.said_late) = (clock, 0, false);
        }
        self.sent += chunks;
        Ok(is_first)
    }

    /// It is known who counts at a clock. It may be a later one than this worker is at.
    pub fn handle_roll(&mut self, roll: &Roll) {
        self.called = self.called.max(roll.clock);
        if roll.part(self.me) == Part::Counts {
            self.counted = self.counted.max(roll.clock);
        }
    }

    /// Gives the clock that the caller has to be told of: all of a contribution has been sent that is
    /// [late](RollCall::handle_late). `is_gone`: links have taken all that they were given.
    pub fn poll_late(&mut self, is_gone: bool) -> Option<Clock> {
        let is_late = self.called >= self.clock && self.counted < self.clock;
        if !is_late || !is_gone || self.said_late || self.sent < self.chunks {
            return None;
        }
        self.said_late = true;
        Some(self.clock)
    }
}

impl RollCall {
    /// Calls the roll of `workers` and does not wait for the slowest `drops` of them.
    pub fn new(workers: usize, drops: u16) -> Self {
        let first = Standing { clock: Clock(1), state: State::Computing };
        Self {
            needed: workers.saturating_sub(drops.into()).max(1),
            clock: Clock(1),
            workers: vec![first; workers],
            ready: 0,
            together: None,
            marks: Marks::NONE,
            quorum: None,
            called: Duration::ZERO,
            length: None,
            rolls: VecDeque::new(),
        }
    }

    /// `worker` has begun to send its contribution to `clock`.
    pub fn handle_ready(
        &mut self,
        worker: NodeId,
        clock: Clock,
        marks: Marks,
        now: Duration,
    ) -> Result<(), Violation> {
        self.expect(worker, clock, State::Computing)?;
        self.workers[worker.index()].state = State::Sending;
        if marks.contains(Marks::STOP) {
            self.marks |= Marks::STOP;
        }
        let together = marks.wait_for_all();
        if clock < self.clock {
            // All workers count at a clock that is taken together, so this was none.
            return if together { Err(Violation::NotTogether(clock)) } else { Ok(()) };
        }
        if *self.together.get_or_insert(together) != together {
            return Err(Violation::NotTogether(clock));
        }
        self.ready += 1;
        if self.ready == self.needed {
            self.quorum = Some(now);
        }
        if together && self.ready == 1 {
            let waiting = |standing: &Standing| standing.state == State::Waiting;
            let late = (0..self.workers.len()).filter(|at| waiting(&self.workers[*at]));
            late.collect::<Vec<_>>().into_iter().for_each(|at| self.catch_up(at));
        }
        Ok(())
    }

    /// `worker` has sent all of its contribution to `clock`, which does not count.
    pub fn handle_late(&mut self, worker: NodeId, clock: Clock) -> Result<(), Violation> {
        self.expect(worker, clock, State::Sending)?;
        if clock >= self.clock {
            return Err(Violation::Clock { expected: self.clock, got: clock });
        }
        self.workers[worker.index()].state = State::Waiting;
        if self.together == Some(true) {
            self.catch_up(worker.index());
        }
        Ok(())
    }

    /// The next roll to tell all nodes, in order, if there is one.
    pub fn poll(&mut self, now: Duration) -> Option<Roll> {
        if self.is_due(now) {
            self.call(now);
        }
        self.rolls.pop_front()
    }

    /// When [`poll`](Self::poll) has something to do, if nothing comes before.
    pub fn wake(&self) -> Option<Duration> {
        let quorum = self.quorum.filter(|_| self.together == Some(false))?;
        if self.clock == Clock(1) {
            return Some(quorum + FIRST_GRACE);
        }
        // Something else may have been done since the last roll: a test of what was learnt.
        let length = quorum.saturating_sub(self.called).min(self.length.unwrap_or(Duration::MAX));
        Some(quorum + length / GRACE)
    }

    fn is_due(&self, now: Duration) -> bool {
        let expected = |standing: &&Standing| {
            standing.state == State::Computing && standing.clock == self.clock
        };
        match self.together {
            None => false,
            Some(true) => self.ready == self.workers.len(),
            Some(false) if self.ready < self.needed => false,
            Some(false) => {
                self.wake().is_some_and(|wake| now >= wake)
                    || !self.workers.iter().any(|standing| expected(&standing))
            }
        }
    }

    /// Whoever is ready counts, and whoever waits joins.
    fn call(&mut self, now: Duration) {
        let (clock, next) = (self.clock, self.clock.next());
        let parts = self.workers.iter_mut().map(|standing| {
            let part = match standing.state {
                State::Sending if standing.clock == clock => Part::Counts,
                State::Waiting => Part::Joins,
                _ => return Part::Absent,
            };
            *standing = Standing { clock: next, state: State::Computing };
            part
        });
        let roll = Roll::new(clock, self.marks, parts.collect());
        self.rolls.push_back(roll);
        self.length = (clock != Clock(1)).then(|| now.saturating_sub(self.called));
        (self.clock, self.called) = (next, now);
        (self.ready, self.together, self.quorum) = (0, None, None);
    }

    /// A worker that waits goes on with the result of the clock before this one.
    fn catch_up(&mut self, worker: usize) {
        let before = Clock(self.clock.0 - 1);
        let mut parts = vec![Part::Absent; self.workers.len()];
        parts[worker] = Part::Joins;
        self.rolls.push_back(Roll::new(before, self.marks, parts));
        self.workers[worker] = Standing { clock: self.clock, state: State::Computing };
    }

    fn expect(&self, worker: NodeId, clock: Clock, state: State) -> Result<(), Violation> {
        let Some(standing) = self.workers.get(worker.index()) else {
            return Err(Violation::NotAWorker(worker));
        };
        if standing.clock != clock {
            return Err(Violation::Clock { expected: standing.clock, got: clock });
        }
        if standing.state != state {
            return Err(Violation::OutOfTurn(clock));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
