//! One ring: bytes on their way from one process to another, without a lock.
//!
//! A side that finds nothing to read (or no room to write) sets a flag in the ring's control block,
//! looks at the ring once more, and only then waits. The other side moves bytes, then looks at the
//! flag, and rings the bell if it is set. Between the two steps each side has a fence, so either
//! the first side sees the bytes or the other side sees the flag. `model.rs` compiles this file a
//! second time, with loom's atomics, and tries the orders in which the two sides may run.

use super::access::{AtomicU32, AtomicU64, CopyBytes, Ordering, RingBytes, fence};
use std::io::{self, ErrorKind};

const LEN: usize = RingBytes::LEN;

/// What the two sides tell each other about one ring. Each field is on its own cache line. Each
/// counter has one writer. A flag has two: the waiting side sets it, the other side clears it. So
/// flags are only ever exchanged, which puts what both sides do into one order.
#[derive(Default)]
#[repr(C)]
pub(super) struct Control {
    written: Line<AtomicU64>,
    read: Line<AtomicU64>,
    reader_waits: Line<AtomicU32>,
    writer_waits: Line<AtomicU32>,
}

#[derive(Default)]
#[repr(C, align(64))]
struct Line<T>(T);

/// One ring. Positions count bytes since the beginning and wrap around the ring.
pub(super) struct Ring<'a> {
    pub(super) control: &'a Control,
    pub(super) bytes: RingBytes<'a>,
}

impl Ring<'_> {
    /// Bytes the reader at `position` may take.
    pub(super) fn ready(&self, position: u64) -> io::Result<usize> {
        // The bytes were written before the counter.
        self.distance(self.control.written.0.load(Ordering::Acquire), position)
    }

    /// Bytes the writer at `position` may add.
    pub(super) fn room(&self, position: u64) -> io::Result<usize> {
        // The bytes that were there have been read before the counter was written.
        Ok(LEN - self.distance(position, self.control.read.0.load(Ordering::Acquire))?)
    }

    /// Bytes in the ring. The other side wrote one of the two counters, so its value may be
    /// anything and is checked.
    fn distance(&self, written: u64, read: u64) -> io::Result<usize> {
        let distance = written.wrapping_sub(read);
        if distance > LEN as u64 {
            let why = format!(
                "a ring of {LEN} bytes cannot hold {distance}: written {written}, read {read}"
            );
            return Err(io::Error::new(ErrorKind::InvalidData, why));
        }
        Ok(distance as usize)
    }

    /// Copies `bytes`, for which there is [room](Self::room), to where the writer at `position` is.
    pub(super) fn copy_in(&self, position: u64, bytes: &[u8]) {
        let at = position as usize % LEN;
        let (first, second) = bytes.split_at(bytes.len().min(LEN - at));
        self.bytes.write(at, first);
        self.bytes.write(0, second);
    }

    /// Copies bytes that are [ready](Self::ready) for the reader at `position`, with `copy`.
    ///
    /// # Safety
    /// `copy` copies, and does nothing else.
    pub(super) unsafe fn copy_out(&self, position: u64, bytes: &mut [u8], copy: CopyBytes) {
        let at = position as usize % LEN;
        let split = bytes.len().min(LEN - at);
        let (first, second) = bytes.split_at_mut(split);
        // SAFETY: by the caller.
        unsafe {
            self.bytes.read_with(at, first, copy);
            self.bytes.read_with(0, second, copy);
        }
    }

    /// Everything before `position` has been written. True if the reader waits for it and has to be
    /// woken.
    pub(super) fn publish(&self, position: u64) -> bool {
        self.control.written.0.store(position, Ordering::Release);
        fence(Ordering::SeqCst);
        clear(&self.control.reader_waits.0)
    }

    /// Everything before `position` has been read. True if the writer waits for room and has to be
    /// woken. It is not woken for every few bytes: it should find room for a large piece.
    pub(super) fn release(&self, position: u64) -> io::Result<bool> {
        self.control.read.0.store(position, Ordering::Release);
        fence(Ordering::SeqCst);
        Ok(self.ready(position)? <= LEN / 2 && clear(&self.control.writer_waits.0))
    }

    /// Whether the reader at `position` may wait: it is woken when there is something to read.
    pub(super) fn may_reader_wait(&self, position: u64) -> io::Result<bool> {
        self.control.reader_waits.0.swap(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let waits = self.ready(position)? == 0;
        if !waits {
            self.control.reader_waits.0.swap(0, Ordering::Relaxed);
        }
        Ok(waits)
    }

    /// Whether the writer at `position` may wait: it is woken when there is room.
    pub(super) fn may_writer_wait(&self, position: u64) -> io::Result<bool> {
        self.control.writer_waits.0.swap(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let waits = self.room(position)? <= LEN / 2;
        if !waits {
            self.control.writer_waits.0.swap(0, Ordering::Relaxed);
        }
        Ok(waits)
    }

    /// Says that any number of bytes is there.
    #[cfg(test)]
    pub(super) fn claim(&self, written: u64) {
        self.control.written.0.store(written, Ordering::Release);
    }
}

/// Clears a flag that the other side may have set. True if it had. The flag is read first, because
/// it is seldom set, and a plain read is cheap.
fn clear(flag: &AtomicU32) -> bool {
    flag.load(Ordering::Relaxed) == 1 && flag.swap(0, Ordering::Relaxed) == 1
}
