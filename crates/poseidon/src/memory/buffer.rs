//! Memory that is lent to the lanes while a layer is in flight.
//!
//! [`Session::send`](crate::Session::send) takes a buffer, [`Session::receive`](crate::Session::receive)
//! gives it back: between the two the lanes read and write it, and the borrow checker keeps the
//! training program out. Within that time every chunk of the buffer belongs to one lane.

use crate::memory::region::Region;
use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

/// A contiguous run of `f32`s at a stable address.
pub struct Buffer {
    start: NonNull<f32>,
    len: usize,
    owner: Owner,
}

/// Where a buffer's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// Ordinary memory of this process.
    Host,
}

enum Owner {
    /// The buffer's own: becomes a `Vec` of this capacity again when it is dropped.
    Vec { capacity: usize },
    /// Somebody else's, kept alive by this value.
    Foreign(#[allow(dead_code, reason = "held for its Drop")] Box<dyn Any + Send + Sync>),
}

impl Buffer {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        vec![0.0; len].into()
    }

    /// A view of memory that belongs to somebody else, such as a framework's tensor. `keep_alive`
    /// is dropped when the buffer is.
    ///
    /// # Safety
    /// `start` must be aligned and valid for reads and writes of `len` elements, and nobody else may
    /// touch that memory, until `keep_alive` is dropped.
    pub unsafe fn from_raw(
        start: NonNull<f32>,
        len: usize,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { start, len, owner: Owner::Foreign(keep_alive) }
    }

    /// Where the memory is.
    pub fn location(&self) -> Location {
        Location::Host
    }

    /// The memory of a chunk, for an engine's links.
    ///
    /// # Safety
    /// The buffer lives, and nobody but the lane that `range` belongs to touches it, until the engine
    /// has let go of the region.
    pub(crate) unsafe fn region(&self, range: Range<usize>) -> Region {
        assert!(range.start <= range.end && range.end <= self.len, "chunk outside its buffer");
        let len = (range.end - range.start) * size_of::<f32>();
        // SAFETY: in bounds by the assertion; alive and untouched by the caller's promise.
        unsafe { Region::new(self.start.add(range.start).cast(), len) }
    }

    /// Reads a chunk through a shared reference.
    ///
    /// # Safety
    /// While the slice lives nobody may write to `range`. Lanes keep this promise by construction:
    /// a chunk belongs to one lane, and one thread at a time works on a lane.
    pub(crate) unsafe fn chunk(&self, range: Range<usize>) -> &[f32] {
        assert!(range.start <= range.end && range.end <= self.len, "chunk outside its buffer");
        // SAFETY: in bounds by the assertion; no writer by the caller's promise.
        unsafe {
            std::slice::from_raw_parts(
                self.start.as_ptr().add(range.start),
                range.end - range.start,
            )
        }
    }

    /// Writes a chunk through a shared reference.
    ///
    /// # Safety
    /// While the slice lives nobody else may read or write `range`; see [`Buffer::chunk`].
    #[allow(clippy::mut_from_ref, reason = "lanes share a buffer and own disjoint chunks of it")]
    pub(crate) unsafe fn chunk_mut(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len, "chunk outside its buffer");
        // SAFETY: in bounds by the assertion; exclusive by the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.start.as_ptr().add(range.start),
                range.end - range.start,
            )
        }
    }
}

// SAFETY: a buffer owns its memory (or holds what keeps it alive, which is Send), and `f32` is Send.
unsafe impl Send for Buffer {}
// SAFETY: shared access writes only through `chunk_mut`, whose callers promise disjointness.
unsafe impl Sync for Buffer {}

impl From<Vec<f32>> for Buffer {
    fn from(vec: Vec<f32>) -> Self {
        let mut vec = ManuallyDrop::new(vec);
        let start = NonNull::new(vec.as_mut_ptr()).expect("a Vec's pointer is never null");
        Self { start, len: vec.len(), owner: Owner::Vec { capacity: vec.capacity() } }
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Owner::Vec { capacity } = self.owner {
            // SAFETY: these are the parts of the Vec this buffer was made from.
            drop(unsafe { Vec::from_raw_parts(self.start.as_ptr(), self.len, capacity) });
        }
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: the memory is valid for `len` elements; lanes write only to buffers that were
        // given to them by value, which nobody can dereference.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as for `deref`, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} elements)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_vec_goes_in_and_its_values_come_out() {
        let mut buffer = Buffer::from(vec![1.0, 2.0, 3.0]);
        buffer[1] = 5.0;
        assert_eq!(&buffer[..], [1.0, 5.0, 3.0]);
        assert!(Buffer::default().is_empty());
    }

    #[test]
    fn foreign_memory_is_kept_alive_as_long_as_the_buffer() {
        let owner = Arc::new(());
        let mut memory = vec![1.0f32; 4].into_boxed_slice();
        let start = NonNull::new(memory.as_mut_ptr()).unwrap();
        // SAFETY: `memory` outlives the buffer and is not touched meanwhile.
        let buffer = unsafe { Buffer::from_raw(start, 4, Box::new(owner.clone())) };
        assert_eq!(buffer.iter().sum::<f32>(), 4.0);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(buffer);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    #[should_panic(expected = "chunk outside its buffer")]
    fn chunks_are_checked_against_the_buffer() {
        let buffer = Buffer::zeroed(4);
        // SAFETY: nobody else holds the buffer.
        let _ = unsafe { buffer.chunk(2..5) };
    }
}
