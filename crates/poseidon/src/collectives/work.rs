//! An operation that is under way, as its program sees it.

use crate::Error;
use crate::engine::driver::Driver;
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// An operation of a group. The operation goes on when its `Work` is dropped.
pub struct Work {
    pub(super) completion: Arc<Completion>,
    pub(super) driver: Arc<Driver>,
}

/// How an operation ended, once it has ended. The group's channel writes this, once.
pub(super) struct Completion {
    done: AtomicBool,
    failure: OnceLock<Error>,
    /// The rank a message came from.
    source: AtomicU32,
    /// What keeps the tensors alive.
    keep: Mutex<Option<Box<dyn Any + Send + Sync>>>,
    /// The name that the group's list of completed operations gets, if somebody wants to be told.
    followed: Mutex<Option<u64>>,
}

impl Work {
    /// Waits until the operation is done, and no longer than `patience`: true if the operation is
    /// done, false if it goes on. When the operation is done the tensors are the program's own
    /// again, whatever the outcome.
    pub fn wait(&self, patience: Duration) -> Result<bool, Error> {
        if !self.completion.is_done() {
            self.driver.check_owner()?;
            let deadline = Instant::now().checked_add(patience);
            self.driver.wait(|| self.completion.is_done(), deadline);
        }
        match self.completion.is_done() {
            true => self.completion.failure().map_or(Ok(true), Err),
            false => Ok(false),
        }
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
        // No thread may be waiting for the operation: the lane's own thread has to drive it.
        self.driver.kick();
        true
    }

    /// Drops what kept the tensors alive, if the operation is done. So it is dropped on this
    /// thread, rather than on the one that has the last reference to the operation.
    pub fn release(&self) {
        if self.completion.is_done() {
            drop(self.completion.take_keep());
        }
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
            done: AtomicBool::new(false),
            failure: OnceLock::new(),
            source: AtomicU32::new(u32::MAX),
            keep: Mutex::new(Some(keep)),
            followed: Mutex::new(None),
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }

    pub(super) fn set_source(&self, rank: u16) {
        self.source.store(rank.into(), Ordering::Relaxed);
    }

    /// The operation is over. Returns the name it is followed by, if it is.
    pub(super) fn finish(&self, outcome: Result<(), Error>) -> Option<u64> {
        if let Err(error) = outcome {
            let _ = self.failure.set(error);
        }
        let mut followed = self.lock_followed();
        self.done.store(true, Ordering::SeqCst);
        followed.take()
    }

    pub(super) fn failure(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    fn take_keep(&self) -> Option<Box<dyn Any + Send + Sync>> {
        self.keep.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn lock_followed(&self) -> std::sync::MutexGuard<'_, Option<u64>> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
