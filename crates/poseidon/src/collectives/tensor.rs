//! Memory that is lent to a group while an operation is under way.

use crate::memory::region::Region;
use poseidon_core::Dtype;
use std::ptr::NonNull;

/// Bytes of a line of the cache.
const LINE: usize = 64;

/// A contiguous tensor that is lent for one operation: where it is, how many elements it has, and
/// of what.
///
/// Whoever has it may have an operation read and write the memory. It cannot be copied, and the
/// operation takes it: for another operation the memory is lent anew.
#[derive(Debug)]
pub struct Tensor {
    pub(super) region: Region,
    pub(super) dtype: Dtype,
}

impl Tensor {
    /// The tensor of `count` elements at `start`.
    ///
    /// # Safety
    /// The memory must be aligned, and valid for reads and writes of `count` elements, and nobody
    /// else may touch it, until the tensor is dropped, or if it is given to an operation, until
    /// that operation is done: until its `keep_alive` is dropped, or
    /// [`Work::wait`](super::Work::wait) has returned true or an error. What an operation only
    /// reads may be read by others meanwhile, and may be lent to several operations.
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

    /// The tensor in `count` parts that lie side by side, about equally long.
    pub(super) fn cut(self, count: usize) -> impl Iterator<Item = Self> {
        let (all, size) = (self.count(), self.dtype.size());
        // All but the last part are whole lines of the cache.
        let line = (LINE / size).max(1);
        let edge = move |part: usize| match part == count {
            true => all,
            false => (all as u128 * part as u128 / count as u128) as usize / line * line,
        };
        (0..count).map(move |part| Self {
            region: self.region.part(edge(part) * size..edge(part + 1) * size),
            dtype: self.dtype,
        })
    }

    /// Copies all of it to `other`, which has as many bytes and may overlap it.
    pub(super) fn copy_to(&self, other: &Self) {
        // SAFETY: both are lent, and nothing of the operation that has them is under way: it would
        // have taken them.
        unsafe { other.region.copy_from(&self.region) }
    }
}
