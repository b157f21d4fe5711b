//! Memory that is lent to a group while an operation is under way.

use poseidon_core::Dtype;
use std::ops::Range;
use std::ptr::NonNull;

/// A contiguous tensor: where it is, how many elements it has, and of what.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    pub(super) region: Region,
    pub(super) dtype: Dtype,
}

impl Tensor {
    /// The tensor of `count` elements at `start`.
    ///
    /// # Safety
    /// The memory must be aligned, and valid for reads and writes of `count` elements, and nobody else
    /// may touch it, from the operation it is given to until that operation is done: until its
    /// `keep_alive` is dropped, or [`Work::wait`](super::Work::wait) has returned. What an operation only
    /// reads may be read by others meanwhile.
    pub unsafe fn from_raw(start: NonNull<u8>, count: usize, dtype: Dtype) -> Self {
        Self { region: Region { start, len: count * dtype.size() }, dtype }
    }

    /// Its number of elements.
    pub fn count(&self) -> usize {
        self.region.len / self.dtype.size()
    }

    /// What it is made of.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }
}

/// Bytes of a tensor, or of a group's own scratch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    start: NonNull<u8>,
    pub(super) len: usize,
}

// SAFETY: a region is an address; whoever reads or writes through it says why that is sound.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// All of `scratch`, which its owner neither moves nor touches while the region is in use.
    pub(super) fn of(scratch: &mut [u64]) -> Self {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
        Self { start: NonNull::from(&mut *bytes).cast(), len: bytes.len() }
    }

    /// The bytes of `range`, which lies within.
    pub(super) fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "part outside its region");
        // SAFETY: in bounds by the assertion.
        Self { start: unsafe { self.start.add(range.start) }, len: range.end - range.start }
    }

    /// # Safety
    /// While the slice lives nobody writes to the region. An engine keeps this by construction: its
    /// operations own what they were lent, it is one thread at a time, and it never holds two slices
    /// of which one is written.
    pub(super) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: valid by the promise of `Tensor::from_raw`, not written by the caller's.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// # Safety
    /// While the slice lives nobody else reads or writes the region; see [`Region::bytes`].
    pub(super) unsafe fn bytes_mut<'a>(&self) -> &'a mut [u8] {
        // SAFETY: valid by the promise of `Tensor::from_raw`, exclusive by the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Copies `from` here. They have the same length, and may be the same memory.
    pub(super) fn copy_from(&self, from: &Self) {
        assert_eq!(self.len, from.len, "both sides have the same bytes");
        // SAFETY: both valid for `len` by the promise of `Tensor::from_raw`; `copy` allows overlap.
        unsafe { std::ptr::copy(from.start.as_ptr(), self.start.as_ptr(), self.len) }
    }
}
