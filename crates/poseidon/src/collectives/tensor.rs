//! Memory that is lent to a group while an operation is under way.

use crate::memory::region::Region;
use poseidon_core::Dtype;
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
        // SAFETY: valid by the caller's promise; the group lets go of it before the operation is done.
        Self { region: unsafe { Region::new(start, count * dtype.size()) }, dtype }
    }

    /// Its number of elements.
    pub fn count(&self) -> usize {
        self.region.len() / self.dtype.size()
    }

    /// What it is made of.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }
}
