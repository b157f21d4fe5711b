//! In which order the operations of a group begin: as they were asked for.
//!
//! An operation on a device begins when its tensors have left the device. All operations that were
//! asked for later wait for it, those of host memory and of other devices too: every rank has to
//! begin them in the same order, and on every rank other tensors leave first. Whoever asks does not
//! wait.

use super::request::{Request, Words};
use super::shared::{HOME, Shared};
use super::work::Completion;
use crate::Error;
use crate::engine::driver::Driver;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(super) struct StartOrder {
    pub(super) shared: Arc<Shared>,
    /// What drives the group's lanes, the home lane first.
    pub(super) drivers: Vec<Arc<Driver>>,
    /// Operations that have not begun, in the order in which they were asked for. The first is one
    /// whose tensors are leaving a device. Written by whoever asks, and by copiers.
    waiting: Mutex<VecDeque<Waiting>>,
}

/// An operation that can begin.
pub(super) struct Start {
    pub(super) request: Request,
    pub(super) timeout: Duration,
    pub(super) completion: Arc<Completion>,
}

struct Waiting {
    /// Tells it from others.
    completion: Arc<Completion>,
    /// None while its tensors are leaving a device.
    start: Option<Start>,
}

/// The place of an operation whose tensors are leaving a device. If it is dropped, the operation
/// never begins, and those behind it no longer wait for it.
pub(super) struct Departure {
    order: Arc<StartOrder>,
    completion: Arc<Completion>,
}

/// An operation in host memory that waits for others to begin.
pub(super) struct Queued {
    order: Arc<StartOrder>,
    completion: Arc<Completion>,
    /// What it is, in words.
    operation: String,
    asked: Instant,
    timeout: Duration,
}

impl StartOrder {
    pub(super) fn new(shared: Arc<Shared>, drivers: Vec<Arc<Driver>>) -> Self {
        Self { shared, drivers, waiting: Mutex::default() }
    }

    /// Begins an operation in host memory, or has it wait for those that were asked for before it.
    /// `waits`: this thread waits for the operation next, and drives meanwhile.
    pub(super) fn begin(self: &Arc<Self>, start: Start, waits: bool) -> Option<Queued> {
        let mut waiting = self.waiting();
        if waiting.is_empty() {
            let lanes = self.shared.begin(start);
            drop(waiting);
            // Nobody waits at other lanes than the home lane: their own threads drive them.
            self.drivers[..lanes].iter().skip(1).for_each(|driver| driver.tell());
            self.drivers[HOME].nudge(waits);
            return None;
        }
        let (completion, timeout) = (start.completion.clone(), start.timeout);
        let operation = Words(start.request.signature()).to_string();
        waiting.push_back(Waiting { completion: completion.clone(), start: Some(start) });
        let (order, asked) = (self.clone(), Instant::now());
        Some(Queued { order, completion, operation, asked, timeout })
    }

    /// The next place, for an operation whose tensors are about to leave a device.
    pub(super) fn reserve(self: &Arc<Self>, completion: &Arc<Completion>) -> Departure {
        let waiting = Waiting { completion: completion.clone(), start: None };
        self.waiting().push_back(waiting);
        Departure { order: self.clone(), completion: completion.clone() }
    }

    /// Stops the group and tells every rank why.
    pub(super) fn abort(&self, reason: String) {
        self.shared.abort(reason);
        self.drivers[HOME].tell();
    }

    /// Begins what can begin, in order. Whoever calls has changed the list.
    fn go_on(&self, mut waiting: MutexGuard<'_, VecDeque<Waiting>>) {
        let mut lanes = 0;
        while let Some(start) = waiting.front_mut().and_then(|first| first.start.take()) {
            waiting.pop_front();
            // The list is locked meanwhile, so that nobody begins anything in between.
            lanes = self.shared.begin(start).max(lanes);
        }
        drop(waiting);
        self.drivers[..lanes].iter().for_each(|driver| driver.tell());
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Departure {
    /// The tensors have left: the operation begins when it is its turn.
    pub(super) fn left(self, start: Start) {
        let mut waiting = self.order.waiting();
        let mut places = waiting.iter_mut();
        if let Some(place) = places.find(|w| Arc::ptr_eq(&w.completion, &self.completion)) {
            place.start = Some(start);
        }
        self.order.go_on(waiting);
    }
}

impl Drop for Departure {
    fn drop(&mut self) {
        let mut waiting = self.order.waiting();
        let is_leaving =
            |w: &Waiting| w.start.is_none() && Arc::ptr_eq(&w.completion, &self.completion);
        waiting.retain(|w| !is_leaving(w));
        self.order.go_on(waiting);
    }
}

impl Queued {
    /// When the operation has to have begun.
    pub(super) fn deadline(&self) -> Instant {
        self.asked + self.timeout
    }

    /// Whether the group has stopped.
    pub(super) fn is_hopeless(&self) -> bool {
        self.order.shared.closed().is_some()
    }

    /// Gives the operation up if it still waits and its time is over, or the group has stopped. The
    /// group stops then.
    pub(super) fn give_up_if_late(&self) {
        let waited = self.asked.elapsed();
        let error = match self.order.shared.closed() {
            Some(error) => error,
            None if waited < self.timeout => return,
            None => Error::Device {
                what: format!("an operation before {}", self.operation),
                why: format!("its tensors have not left the device for {waited:.1?}"),
            },
        };
        let mut waiting = self.order.waiting();
        let at = waiting.iter().position(|w| Arc::ptr_eq(&w.completion, &self.completion));
        let Some(at) = at else { return };
        waiting.remove(at);
        drop(waiting);
        let reason = error.to_string();
        self.order.shared.report(HOME, &self.completion, Err(error));
        self.order.abort(reason);
    }
}
