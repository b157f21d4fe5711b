//! Bytes that somebody lent, by address.

use std::ops::Range;
use std::ptr::NonNull;

/// A run of bytes in memory that its maker was lent: a tensor, a chunk of a layer, rows of factors.
///
/// An engine writes frames to links from regions, and reads frames from links into them. It lets go
/// of a region when it has told the channel so (`sent`, `landed`), or before it reports that the
/// channel has failed. Whoever makes a region promises that its memory is there until then. A
/// region can be copied, so it proves nothing: a channel promises which regions it gives an engine,
/// and how long they are good (the engine's `Channel`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a region is an address; whoever reads or writes through it says why that is sound.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// No bytes at all.
    pub(crate) const EMPTY: Self = Self { start: NonNull::dangling(), len: 0 };

    /// The `len` bytes at `start`.
    ///
    /// # Safety
    /// The bytes stay valid for reads, and for writes if anything is to be written there, until the
    /// engine has let go of the region.
    pub(crate) unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        Self { start, len }
    }

    /// All of `scratch`.
    ///
    /// # Safety
    /// The owner of `scratch` neither moves, drops nor touches it while the region is in use.
    pub(crate) unsafe fn of(scratch: &mut [u64]) -> Self {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
        Self { start: NonNull::from(&mut *bytes).cast(), len: bytes.len() }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes of `range`, which lies within.
    pub(crate) fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "part outside its region");
        // SAFETY: in bounds by the assertion.
        Self { start: unsafe { self.start.add(range.start) }, len: range.end - range.start }
    }

    /// # Safety
    /// While the slice lives nobody writes to the region. An engine keeps this promise by
    /// construction: one thread at a time drives it, channels own what they were lent, and memory
    /// that is being sent is not written before its receivers have had it.
    pub(crate) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: valid by the promise of whoever made the region, not written by the caller's.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// # Safety
    /// While the slice lives nobody else reads or writes the region; see [`Region::bytes`].
    pub(crate) unsafe fn bytes_mut<'a>(&self) -> &'a mut [u8] {
        // SAFETY: valid by the promise of whoever made the region, exclusive by the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Copies the bytes of `from` here. Both regions have the same length, and may overlap.
    ///
    /// # Safety
    /// Nobody else reads or writes this region, or writes `from`, meanwhile.
    pub(crate) unsafe fn copy_from(&self, from: &Self) {
        assert_eq!(self.len, from.len, "both sides have the same bytes");
        // SAFETY: both valid by their makers' promises; `copy` allows overlap.
        unsafe { std::ptr::copy(from.start.as_ptr(), self.start.as_ptr(), self.len) }
    }
}
