//! The last records of a part of a node, in memory of a fixed size.
//!
//! `ring_model.rs` compiles this file a second time, with loom's atomics.

use super::ring_parts::{AtomicU64, Ordering, fence};
use std::array;

/// The last records of one part of a node, of `WORDS` words each. A writer takes no lock and no
/// memory; the oldest record makes room.
///
/// One thread at a time writes. So a record costs one locked instruction, on a line of the cache
/// that the writer has already. The record itself goes out by plain stores, which nobody waits for:
/// its line may be far away. The line of `next` is the ring's alone, because writers of
/// neighbouring rings are on other cores. It is two lines, which processors fetch together.
#[repr(align(128))]
pub(super) struct Ring<const WORDS: usize> {
    /// Twice the number of records that were ever written, and one more while the next one is being
    /// written.
    next: AtomicU64,
    slots: Box<[[AtomicU64; WORDS]]>,
}

/// The bit of `next` that says that a record is being written.
const WRITING: u64 = 1;

impl<const WORDS: usize> Ring<WORDS> {
    /// Room for `len` records, a power of two.
    pub(super) fn new(len: usize) -> Self {
        assert!(len.is_power_of_two(), "the slot of a record is the low bits of its number");
        let slot = |_| array::from_fn(|_| AtomicU64::new(0));
        Self { next: AtomicU64::new(0), slots: (0..len).map(slot).collect() }
    }

    /// Writes a record. False if another thread is writing one right now: then this one is not
    /// here.
    pub(super) fn push(&self, words: [u64; WORDS]) -> bool {
        let next = self.next.load(Ordering::Relaxed);
        if next & WRITING != 0 {
            return false;
        }
        let (order, otherwise) = (Ordering::Acquire, Ordering::Relaxed);
        if self.next.compare_exchange(next, next | WRITING, order, otherwise).is_err() {
            return false;
        }
        // A reader that sees a word of this record then sees that it is being written.
        fence(Ordering::Release);
        for (to, word) in self.slot(next / 2).iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        self.next.store(next + 2, Ordering::Release);
        true
    }

    /// The records that are here, the oldest first. Those that are overwritten meanwhile are left
    /// out.
    pub(super) fn read(&self) -> Vec<[u64; WORDS]> {
        let end = self.next.load(Ordering::Acquire) / 2;
        let begin = end.saturating_sub(self.slots.len() as u64);
        (begin..end).filter_map(|at| self.read_one(at)).collect()
    }

    /// Record `at`, counted from 0, which was written; nothing if its slot has been taken since.
    fn read_one(&self, at: u64) -> Option<[u64; WORDS]> {
        let slot = self.slot(at);
        let words = array::from_fn(|i| slot[i].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let begun = self.next.load(Ordering::Relaxed).div_ceil(2);
        (at + self.slots.len() as u64 >= begun).then_some(words)
    }

    fn slot(&self, at: u64) -> &[AtomicU64; WORDS] {
        &self.slots[at as usize & (self.slots.len() - 1)]
    }
}
