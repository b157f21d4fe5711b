//! Access to memory that another process may write at any time.
//!
//! Counters and flags are atomics, for which any bits are valid. Bytes are copied from and to raw
//! addresses: no reference to them is ever formed, because the compiler may assume of what a
//! reference points to that nobody else changes it.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use std::marker::PhantomData;
use std::ptr::NonNull;

/// Copies bytes from the first to the second.
// SAFETY: for whoever calls it: both are valid for so many bytes, and they do not overlap.
pub(super) type CopyBytes = unsafe fn(*const u8, *mut u8, usize);

/// The bytes of one ring.
#[derive(Clone, Copy)]
pub(super) struct RingBytes<'a> {
    start: NonNull<u8>,
    mapped: PhantomData<&'a u8>,
}

impl RingBytes<'_> {
    /// How many there are: one chunk of the default size. Of the sizes from 32 KiB to 512 KiB this
    /// one took the least CPU time for 100 MB between 2 and between 8 processes. A larger ring
    /// falls out of the cache between the two copies; a smaller one wakes the other side more
    /// often.
    pub(super) const LEN: usize = 256 << 10;

    /// The bytes from `start` on.
    ///
    /// # Safety
    /// They are mapped, for reading and writing, as long as the value lives, and nobody has a
    /// reference to them.
    pub(super) unsafe fn new(start: NonNull<u8>) -> Self {
        Self { start, mapped: PhantomData }
    }

    /// Copies `from` to the bytes from `at` on.
    ///
    /// # Panics
    /// If there are not so many.
    pub(super) fn write(&self, at: usize, from: &[u8]) {
        assert!(at <= Self::LEN && from.len() <= Self::LEN - at, "within the ring");
        // SAFETY: within the ring, which no reference overlaps. If the other process touches the
        // bytes before it may, it reads garbage, and no more than that.
        unsafe {
            self.start.add(at).copy_from_nonoverlapping(NonNull::from(from).cast(), from.len())
        }
    }

    /// Copies the bytes from `at` on to `to`, with `copy`.
    ///
    /// # Safety
    /// `copy` copies, and does nothing else.
    ///
    /// # Panics
    /// If there are not so many.
    pub(super) unsafe fn read_with(&self, at: usize, to: &mut [u8], copy: CopyBytes) {
        assert!(at <= Self::LEN && to.len() <= Self::LEN - at, "within the ring");
        // SAFETY: as for `write`, with the roles exchanged.
        unsafe { copy(self.start.add(at).as_ptr(), to.as_mut_ptr(), to.len()) }
    }
}
