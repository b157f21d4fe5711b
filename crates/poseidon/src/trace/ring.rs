//! The last records of a part of a node, in memory of a fixed size.
//!
//! `ring_model.rs` compiles this file a second time, with loom's atomics and shorter records.

use super::ring_parts::{AtomicU64, Ordering, WORDS, fence};

/// The last records of one part of a node. Any thread may write, without a lock and without taking
/// memory; the oldest record makes room.
pub(super) struct Ring {
    /// How many records were ever written, or are being written.
    next: AtomicU64,
    slots: Box<[Slot]>,
}

/// The number of a record that is being written.
const WRITING: u64 = u64::MAX;

/// A record, which fills one line of a cache.
#[derive(Default)]
#[repr(align(64))]
struct Slot {
    /// Which record this is, counted from 1; 0 if there is none; [`WRITING`] while it is being written.
    /// So a reader can tell a whole record from one that is overwritten meanwhile.
    number: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl Ring {
    /// Room for `len` records, a power of two.
    pub(super) fn new(len: usize) -> Self {
        assert!(len.is_power_of_two(), "the slot of a record is the low bits of its number");
        Self { next: AtomicU64::new(0), slots: (0..len).map(|_| Slot::default()).collect() }
    }

    /// Writes a record. It is lost if another thread has not finished the record before it in the same
    /// slot, a whole ring earlier.
    pub(super) fn push(&self, words: [u64; WORDS]) {
        let at = self.next.fetch_add(1, Ordering::Relaxed);
        let slot = &self.slots[at as usize & (self.slots.len() - 1)];
        if slot.number.swap(WRITING, Ordering::Acquire) == WRITING {
            return;
        }
        // A reader that sees a word of this record then sees that the slot is being written.
        fence(Ordering::Release);
        for (to, word) in slot.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        slot.number.store(at + 1, Ordering::Release);
    }

    /// The records that are here, the oldest first. Those that are being written are left out.
    pub(super) fn read(&self) -> Vec<[u64; WORDS]> {
        let end = self.next.load(Ordering::Acquire);
        let begin = end.saturating_sub(self.slots.len() as u64);
        let slot = |at: u64| &self.slots[at as usize & (self.slots.len() - 1)];
        (begin..end).filter_map(|at| slot(at).read(at)).collect()
    }
}

impl Slot {
    /// Record `at`, counted from 0, if the slot has it whole.
    fn read(&self, at: u64) -> Option<[u64; WORDS]> {
        if self.number.load(Ordering::Acquire) != at + 1 {
            return None;
        }
        let words = std::array::from_fn(|i| self.words[i].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (self.number.load(Ordering::Relaxed) == at + 1).then_some(words)
    }
}
