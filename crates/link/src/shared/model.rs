//! The ring in every order that its two sides may run in, as far as loom tells them apart.
//!
//! `ring.rs` is compiled here a second time. Its atomics are loom's, which return whatever the
//! memory model allows, and its bytes are cells that refuse to be read while they are written. A
//! side that waits for a bell that nobody rings ends the model as a deadlock.

mod access {
    use loom::cell::UnsafeCell;
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

    /// Copies bytes from the first to the second.
    // SAFETY: for whoever calls it: both are valid for so many bytes, and they do not overlap.
    pub(super) type CopyBytes = unsafe fn(*const u8, *mut u8, usize);

    /// The bytes of a ring that is short, so that it is full and wraps around soon.
    pub(super) struct RingBytes<'a>(pub(super) &'a [UnsafeCell<u8>; 2]);

    impl RingBytes<'_> {
        pub(super) const LEN: usize = 2;

        pub(super) fn write(&self, at: usize, from: &[u8]) {
            for (cell, byte) in self.0[at..].iter().zip(from) {
                // SAFETY: loom ends the test if another thread uses the cell without being ordered.
                cell.with_mut(|cell| unsafe { *cell = *byte });
            }
        }

        /// # Safety
        /// `copy` copies.
        pub(super) unsafe fn read_with(&self, at: usize, to: &mut [u8], copy: CopyBytes) {
            for (cell, byte) in self.0[at..].iter().zip(to) {
                // SAFETY: as for `write`.
                cell.with(|cell| unsafe { copy(cell, byte, 1) });
            }
        }
    }
}

#[expect(clippy::duplicate_mod, reason = "the same code, with other atomics")]
#[path = "ring.rs"]
mod ring;

use access::RingBytes;
use loom::cell::UnsafeCell;
use loom::sync::Notify;
use loom::thread;
use ring::{Control, Ring};
use std::rc::Rc;

/// What two processes share.
#[derive(Default)]
struct Shared {
    control: Control,
    bytes: [UnsafeCell<u8>; 2],
}

impl Shared {
    fn ring(&self) -> Ring<'_> {
        Ring { control: &self.control, bytes: RingBytes(&self.bytes) }
    }
}

/// Sends `pieces`, and waits for `bell` when there is no room.
fn write(ring: &Ring<'_>, pieces: &[&[u8]], bell: &Notify, other: &Notify) {
    let mut position = 0;
    for piece in pieces {
        let mut left = *piece;
        while !left.is_empty() {
            let room = ring.room(position).unwrap().min(left.len());
            ring.copy_in(position, &left[..room]);
            position += room as u64;
            left = &left[room..];
            if room > 0 && ring.publish(position) {
                other.notify();
            }
            if !left.is_empty() && ring.may_writer_wait(position).unwrap() {
                bell.wait();
            }
        }
    }
}

/// Receives `len` bytes, and waits for `bell` when there are none.
fn read(ring: &Ring<'_>, len: usize, bell: &Notify, other: &Notify) -> Vec<u8> {
    let mut got = vec![0; len];
    let mut position = 0;
    while position < len {
        let ready = ring.ready(position as u64).unwrap().min(len - position);
        let into = &mut got[position..position + ready];
        // SAFETY: it copies.
        unsafe { ring.copy_out(position as u64, into, std::ptr::copy_nonoverlapping) };
        position += ready;
        if ready > 0 && ring.release(position as u64).unwrap() {
            other.notify();
        }
        if position < len && ring.may_reader_wait(position as u64).unwrap() {
            bell.wait();
        }
    }
    got
}

/// Sends `pieces` from one thread to another, in all orders with at most `preemptions` switches
/// that neither side asks for.
fn exchange(pieces: &'static [&'static [u8]], preemptions: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let shared = Rc::new(Shared::default());
        let bells = Rc::new([Notify::new(), Notify::new()]);
        let writer = thread::spawn({
            let (shared, bells) = (shared.clone(), bells.clone());
            move || write(&shared.ring(), pieces, &bells[0], &bells[1])
        });
        let sent = pieces.concat();
        assert_eq!(read(&shared.ring(), sent.len(), &bells[1], &bells[0]), sent);
        writer.join().unwrap();
    });
}

#[test]
fn no_byte_and_no_bell_is_lost() {
    exchange(&[b"a", b"b"], 4);
}

#[test]
fn a_full_ring_wraps_around() {
    exchange(&[b"abc", b"d"], 3);
}

#[test]
fn a_counter_that_cannot_be_true_is_refused() {
    loom::model(|| {
        let shared = Shared::default();
        shared.ring().claim(3);
        assert!(shared.ring().ready(0).is_err());
        assert!(shared.ring().may_reader_wait(0).is_err());
    });
}
