//! An operation that is under way, as its program sees it.

use super::start_order::Queued;
use crate::Error;
use crate::engine::driver::Driver;
use crate::trace::BegunOperation;
use poseidon_device::{Copier, Fault, ProgramStream, SharedEvent, Stream};
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// An operation of a group. The operation goes on when its `Work` is dropped.
pub struct Work {
    pub(super) completion: Arc<Completion>,
    pub(super) driver: Arc<Driver>,
    /// If its tensors are on a device.
    pub(super) arrival: Option<Arrival>,
    /// If others had to begin first when it was asked for.
    pub(super) queued: Option<Queued>,
}

/// How an operation's results come to a device, and who waits for that.
#[derive(Clone)]
pub(super) struct Arrival(Arc<Arriving>);

struct Arriving {
    /// The operation, in words.
    operation: String,
    copier: Arc<Copier>,
    /// Passed by the copies of the results.
    event: SharedEvent,
    gate: Mutex<()>,
    changed: Condvar,
}

/// How an operation ended, once it has ended. The channels that have a part of it write this, each
/// once.
pub(super) struct Completion {
    /// Parts that are not over, each on a lane. Written under the lock of `followed`.
    parts: AtomicUsize,
    done: AtomicBool,
    failure: OnceLock<Error>,
    /// The rank a message came from.
    source: AtomicU32,
    /// What keeps the tensors alive.
    keep: Mutex<Option<Box<dyn Any + Send + Sync>>>,
    /// The name that the group's list of completed operations gets, if somebody wants to be told.
    followed: Mutex<Option<u64>>,
    /// When and as what the operation began, if that is noted.
    noted: Option<BegunOperation>,
}

impl Work {
    /// Waits until the operation is done, and no longer than `patience`: true if the operation is
    /// done, false if it goes on. When the operation is done the tensors are the program's own
    /// again, whatever the outcome.
    pub fn wait(&self, patience: Duration) -> Result<bool, Error> {
        if !self.completion.is_done() {
            self.driver.check_owner()?;
            match &self.arrival {
                Some(arrival) => arrival.wait(&self.completion, patience),
                None => self.drive(patience),
            }
        }
        match self.completion.is_done() {
            true => self.completion.failure().map_or(Ok(true), Err),
            false => Ok(false),
        }
    }

    fn drive(&self, patience: Duration) {
        let deadline = Instant::now().checked_add(patience);
        if let Some(queued) = &self.queued {
            let begins = queued.deadline();
            let until = deadline.map_or(begins, |deadline| deadline.min(begins));
            let is_over = || self.completion.is_done() || queued.is_hopeless();
            self.driver.wait(is_over, Some(until));
            queued.give_up_if_late();
        }
        self.driver.wait(|| self.completion.is_done(), deadline);
    }

    /// Has stream `program` wait until results are on their device. The operation is done; this thread
    /// does not wait. Nothing to do if its tensors are in host memory.
    pub fn make_wait(&self, program: ProgramStream) -> Result<(), Error> {
        let Some(Arrival(arriving)) = &self.arrival else { return Ok(()) };
        let waits = arriving.copier.make_wait(Stream::Program(program), &arriving.event);
        waits.map_err(|fault| arriving.fault(&fault))
    }

    /// Whether the operation is done, successfully or not.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }

    /// Why the operation failed, if it did.
    pub fn failure(&self) -> Option<Error> {
        self.completion.failure()
    }

    /// The rank that a received message came from.
    pub fn source(&self) -> Option<u16> {
        u16::try_from(self.completion.source.load(Ordering::Relaxed)).ok()
    }

    /// Has [`Group::completed`](super::Group::completed) report `name` when the operation is done.
    /// False if it is done already, and then nothing is reported.
    pub fn follow(&self, name: u64) -> bool {
        let mut followed = self.completion.lock_followed();
        if self.completion.is_done() {
            return false;
        }
        *followed = Some(name);
        drop(followed);
        // No thread may be waiting for the operation: the lane's own thread has to drive it.
        self.driver.kick();
        true
    }

    /// Drops what kept the tensors alive, if the operation is done. So it is dropped on this
    /// thread, rather than on the one that has the last reference to the operation.
    pub fn release(&self) {
        // Copies to a device may still be under way: whoever makes them lets go.
        if self.arrival.is_none() && self.completion.is_done() {
            drop(self.completion.take_keep());
        }
    }
}

impl Arrival {
    pub(super) fn new(operation: String, copier: Arc<Copier>, event: SharedEvent) -> Self {
        let (gate, changed) = (Mutex::new(()), Condvar::new());
        Self(Arc::new(Arriving { operation, copier, event, gate, changed }))
    }

    /// Passed by the copies of the results.
    pub(super) fn event(&self) -> &SharedEvent {
        &self.0.event
    }

    /// The device has failed, or refuses the operation.
    pub(super) fn fault(&self, fault: &Fault) -> Error {
        self.0.fault(fault)
    }

    /// The operation is done.
    pub(super) fn wake(&self) {
        // Taking the gate orders this wake-up after a sleeper's last look.
        drop(self.0.gate.lock().unwrap_or_else(PoisonError::into_inner));
        self.0.changed.notify_all();
    }

    fn wait(&self, completion: &Completion, patience: Duration) {
        let gate = self.0.gate.lock().unwrap_or_else(PoisonError::into_inner);
        let is_under_way = |_: &mut ()| !completion.is_done();
        let _ = self.0.changed.wait_timeout_while(gate, patience, is_under_way);
    }
}

impl Arriving {
    fn fault(&self, fault: &Fault) -> Error {
        Error::Device { what: self.operation.clone(), why: fault.to_string() }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Work({})", if self.is_done() { "done" } else { "under way" })
    }
}

impl Completion {
    pub(super) fn new(keep: Box<dyn Any + Send + Sync>) -> Self {
        Self {
            parts: AtomicUsize::new(1),
            done: AtomicBool::new(false),
            failure: OnceLock::new(),
            source: AtomicU32::new(u32::MAX),
            keep: Mutex::new(Some(keep)),
            followed: Mutex::new(None),
            noted: None,
        }
    }

    /// The end of the operation is noted.
    pub(super) fn noted(self, noted: Option<BegunOperation>) -> Self {
        Self { noted, ..self }
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }

    pub(super) fn set_source(&self, rank: u16) {
        self.source.store(rank.into(), Ordering::Relaxed);
    }

    /// The message of this operation came as that of `inner`.
    pub(super) fn copy_source(&self, inner: &Self) {
        self.source.store(inner.source.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The operation is cut into so many parts. It is one if nobody says so.
    pub(super) fn expect_parts(&self, count: usize) {
        let _followed = self.lock_followed();
        self.parts.store(count, Ordering::Relaxed);
    }

    /// A part of the operation is over, and with the last one the operation. Returns the name it is
    /// followed by then, if it is.
    pub(super) fn finish(&self, outcome: Result<(), Error>) -> Option<u64> {
        if let Err(error) = outcome {
            let _ = self.failure.set(error);
        }
        let mut followed = self.lock_followed();
        let parts = self.parts.load(Ordering::Relaxed).saturating_sub(1);
        self.parts.store(parts, Ordering::Relaxed);
        if parts > 0 {
            return None;
        }
        if let Some(noted) = self.noted.as_ref().filter(|_| !self.is_done()) {
            noted.done(self.failure.get());
        }
        self.done.store(true, Ordering::SeqCst);
        followed.take()
    }

    pub(super) fn failure(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    pub(super) fn take_keep(&self) -> Option<Box<dyn Any + Send + Sync>> {
        self.keep.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn lock_followed(&self) -> std::sync::MutexGuard<'_, Option<u64>> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
