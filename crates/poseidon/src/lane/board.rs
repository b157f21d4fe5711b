//! Where lanes tell the training program what is done, and what went wrong.
//!
//! `board_model.rs` compiles this file a second time, with loom's atomics and locks, and tries the
//! orders in which lanes and sleepers may run.

use super::sync::{AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, fence};
use crate::Error;
use poseidon_core::wire::Marks;
use poseidon_core::{Clock, LayerId, NodeId};
use std::sync::{OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Progress of all layers of a session on this node, and the session's failure if it has one.
#[derive(Debug)]
pub(crate) struct Board {
    /// Per layer: lanes that have not finished their part. The session sets it when a layer goes
    /// out; each lane takes one off after it has let go of the exchange.
    pending: Vec<AtomicUsize>,
    /// Per layer: when its last lane finished, in nanoseconds since `epoch`. Written by that lane.
    finished: Vec<AtomicU64>,
    epoch: Instant,
    /// Lanes that the session still has a part on.
    lanes: AtomicUsize,
    failure: OnceLock<Error>,
    /// The first node that said goodbye. Written by the lane that heard the goodbye.
    departed: OnceLock<NodeId>,
    /// Per layer: the clock whose result came last. Written by a lane that has it.
    answers: Vec<AtomicU64>,
    /// Per worker, where slow ones may be dropped: clocks that it counted at, and contributions of it
    /// that came too late. Written by the one lane that there is then.
    rolls: Vec<[AtomicU64; 2]>,
    /// The first clock at which a worker asked all to stop. `u64::MAX` before that.
    stop: AtomicU64,
    /// Threads that wait: without one, a lane need not touch the gate.
    sleepers: AtomicUsize,
    /// How many of the sleepers are threads of the training program.
    idlers: AtomicUsize,
    gate: Mutex<()>,
    changed: Condvar,
}

impl Board {
    pub(crate) fn new(layers: usize, workers: usize) -> Self {
        Self {
            answers: (0..layers).map(|_| AtomicU64::new(0)).collect(),
            rolls: (0..workers).map(|_| Default::default()).collect(),
            pending: (0..layers).map(|_| AtomicUsize::new(0)).collect(),
            finished: (0..layers).map(|_| AtomicU64::new(0)).collect(),
            epoch: Instant::now(),
            lanes: AtomicUsize::new(0),
            failure: OnceLock::new(),
            departed: OnceLock::new(),
            stop: AtomicU64::new(u64::MAX),
            sleepers: AtomicUsize::new(0),
            idlers: AtomicUsize::new(0),
            gate: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// The session has a part on one more lane.
    pub(crate) fn open_lane(&self) {
        self.lanes.fetch_add(1, Ordering::SeqCst);
    }

    /// A lane has removed this session's part.
    pub(crate) fn close_lane(&self) {
        self.lanes.fetch_sub(1, Ordering::SeqCst);
        self.wake_all();
    }

    /// Whether the session has no part on any lane any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.lanes.load(Ordering::SeqCst) == 0
    }

    /// Waits until the session has no part on any lane. `stretch` says how long to wait before it is
    /// asked again. False when it says zero.
    pub(crate) fn wait_closed(&self, mut stretch: impl FnMut() -> Duration) -> bool {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        while self.lanes.load(Ordering::SeqCst) > 0 {
            let stretch = stretch();
            if stretch.is_zero() {
                return false;
            }
            let woken = self.changed.wait_timeout(gate, stretch);
            gate = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// `lanes` lanes are about to work on `layer`.
    pub(crate) fn begin(&self, layer: LayerId, lanes: usize) {
        self.pending[layer.index()].store(lanes, Ordering::Release);
    }

    /// One lane has finished its part of `layer` and dropped its exchange.
    pub(crate) fn finish_part(&self, layer: LayerId) {
        let now = self.epoch.elapsed().as_nanos() as u64;
        self.finished[layer.index()].fetch_max(now, Ordering::Relaxed);
        if self.pending[layer.index()].fetch_sub(1, Ordering::SeqCst) == 1 {
            self.wake();
        }
    }

    /// The result of `clock` is what comes back of `layer`. Called before the layer is reported done.
    pub(crate) fn note_answer(&self, layer: LayerId, clock: Clock) {
        self.answers[layer.index()].store(clock.0, Ordering::Relaxed);
    }

    /// The clock whose result came last of `layer`, which is done.
    pub(crate) fn answer(&self, layer: LayerId) -> Clock {
        Clock(self.answers[layer.index()].load(Ordering::Relaxed))
    }

    /// These workers count at a clock, and late contributions of those have been dropped.
    pub(crate) fn note_roll(
        &self,
        counted: impl Iterator<Item = NodeId>,
        late: impl Iterator<Item = NodeId>,
    ) {
        let add = |worker: NodeId, which: usize| {
            if let Some(of) = self.rolls.get(worker.index()) {
                of[which].fetch_add(1, Ordering::Relaxed);
            }
        };
        counted.for_each(|worker| add(worker, 0));
        late.for_each(|worker| add(worker, 1));
    }

    /// By worker: the clocks that it counted at, and its contributions that came too late.
    pub(crate) fn rolls(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        self.rolls.iter().map(move |[counted, late]| (read(counted), read(late)))
    }

    /// The session has failed; the first reason stays.
    pub(crate) fn fail(&self, error: Error) {
        let _ = self.failure.set(error);
        self.wake_all();
    }

    pub(crate) fn failure(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    /// `node` has said goodbye, while others go on.
    pub(crate) fn note_departed(&self, node: NodeId) {
        let _ = self.departed.set(node);
    }

    /// The first node that has said goodbye: it takes part in nothing new.
    pub(crate) fn departed(&self) -> Option<NodeId> {
        self.departed.get().copied()
    }

    /// Something of `clock` has come that has these marks. Called before the layer is reported done,
    /// so a program that has all of a clock knows its marks.
    pub(crate) fn note_marks(&self, marks: Marks, clock: Clock) {
        if marks.contains(Marks::STOP) {
            self.stop.fetch_min(clock.0, Ordering::SeqCst);
        }
    }

    /// The first clock at which a worker asked all to stop.
    pub(crate) fn stop(&self) -> Option<Clock> {
        let clock = self.stop.load(Ordering::SeqCst);
        (clock != u64::MAX).then_some(Clock(clock))
    }

    /// Whether the training program is waiting rather than computing.
    pub(crate) fn is_awaited(&self) -> bool {
        self.idlers.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn is_done(&self, layer: LayerId) -> bool {
        self.pending[layer.index()].load(Ordering::SeqCst) == 0
    }

    /// Whether one part of `layer` is missing.
    pub(crate) fn is_last_part(&self, layer: LayerId) -> bool {
        self.pending[layer.index()].load(Ordering::SeqCst) == 1
    }

    /// When the last lane finished its part of `layer`, which is done.
    pub(crate) fn finished(&self, layer: LayerId) -> Instant {
        self.epoch + Duration::from_nanos(self.finished[layer.index()].load(Ordering::Relaxed))
    }

    /// Sleeps until `layer` is done (true), the session has failed, or `deadline` has passed
    /// (false). Meanwhile the training program does nothing else.
    pub(crate) fn wait(&self, layer: LayerId, deadline: Instant) -> Result<bool, Error> {
        if !self.is_over(layer) {
            self.idlers.fetch_add(1, Ordering::Relaxed);
            self.sleep(layer, deadline);
            self.idlers.fetch_sub(1, Ordering::Relaxed);
        }
        if self.is_done(layer) {
            return Ok(true);
        }
        self.failure().map_or(Ok(false), Err)
    }

    /// As [`wait`](Self::wait), for a thread beside the training program, which may be computing.
    /// True if `layer` is done.
    pub(crate) fn wait_beside(&self, layer: LayerId, deadline: Instant) -> bool {
        self.sleep(layer, deadline);
        self.is_done(layer)
    }

    fn sleep(&self, layer: LayerId, deadline: Instant) {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        // Announced before the last look: a lane that finishes after it sees a sleeper. The fence
        // is paired with the one in `wake`.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        while !self.is_over(layer) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let woken = self.changed.wait_timeout(gate, left);
            gate = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn is_over(&self, layer: LayerId) -> bool {
        self.is_done(layer) || self.failure.get().is_some()
    }

    fn wake(&self) {
        // What is reported comes before the look for sleepers.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        // Taking the gate orders this wake-up after a sleeper's last look.
        drop(self.gate.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}
