//! Memory that is lent to the lanes while a layer is in flight.
//!
//! [`Session::send`](crate::Session::send) takes a buffer, [`Session::receive`](crate::Session::receive)
//! gives it back: between the two the lanes read and write it, and the borrow checker keeps the
//! training program out. Within that time every chunk of the buffer belongs to one lane.

use crate::memory::region::Region;
use poseidon_core::Encoding;
use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

/// A contiguous run of numbers at a stable address: of `f32`s, or of another [`Encoding`] that a
/// layer's numbers travel in.
///
/// A buffer of `f32`s is a slice of them. One of another encoding can be lent, and read as
/// [bytes](Buffer::bytes); taking it for a slice is a bug of the program, and panics.
pub struct Buffer {
    start: NonNull<u8>,
    /// In elements.
    len: usize,
    encoding: Encoding,
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
    /// The buffer's own: becomes a `Vec` of this capacity again when it is dropped. Its elements are
    /// `f32`s, or `u16`s if the encoding has two bytes.
    Vec { capacity: usize },
    /// Somebody else's, kept alive by this value.
    Foreign(#[allow(dead_code, reason = "held for its Drop")] Box<dyn Any + Send + Sync>),
}

impl Buffer {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        vec![0.0; len].into()
    }

    /// Elements of two bytes each, given as their bits.
    ///
    /// # Panics
    /// If `encoding` has another width.
    pub fn from_bits(encoding: Encoding, bits: Vec<u16>) -> Self {
        assert_eq!(encoding.width(), size_of::<u16>(), "elements of {encoding} have other bits");
        let mut bits = ManuallyDrop::new(bits);
        let start = NonNull::new(bits.as_mut_ptr()).expect("a Vec's pointer is never null").cast();
        let owner = Owner::Vec { capacity: bits.capacity() };
        Self { start, len: bits.len(), encoding, owner }
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
        // SAFETY: the caller's promise.
        unsafe { Self::encoded_from_raw(start.cast(), len, Encoding::F32, keep_alive) }
    }

    /// As [`from_raw`](Buffer::from_raw), for elements of any encoding.
    ///
    /// # Safety
    /// `start` must be aligned for elements of `encoding` and valid for reads and writes of `len` of
    /// them, and nobody else may touch that memory, until `keep_alive` is dropped.
    pub unsafe fn encoded_from_raw(
        start: NonNull<u8>,
        len: usize,
        encoding: Encoding,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { start, len, encoding, owner: Owner::Foreign(keep_alive) }
    }

    /// What its elements are.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as they lie in memory.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is valid for `len` elements; lanes write only to buffers that were
        // given to them by value, which nobody can look into.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.encoding.bytes(self.len)) }
    }

    /// Where the elements begin. Nothing is said of who may touch them.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
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
        let bytes = self.byte_range(range);
        // SAFETY: in bounds, as `byte_range` has checked; alive and untouched by the caller's promise.
        unsafe { Region::new(self.start.add(bytes.start), bytes.len()) }
    }

    /// Reads a chunk through a shared reference.
    ///
    /// # Safety
    /// While the slice lives nobody may write to `range`. Lanes keep this promise by construction:
    /// a chunk belongs to one lane, and one thread at a time works on a lane.
    pub(crate) unsafe fn chunk(&self, range: Range<usize>) -> &[u8] {
        let bytes = self.byte_range(range);
        // SAFETY: in bounds, as `byte_range` has checked; no writer by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(bytes.start), bytes.len()) }
    }

    /// Writes a chunk through a shared reference.
    ///
    /// # Safety
    /// While the slice lives nobody else may read or write `range`; see [`Buffer::chunk`].
    #[allow(clippy::mut_from_ref, reason = "lanes share a buffer and own disjoint chunks of it")]
    pub(crate) unsafe fn chunk_mut(&self, range: Range<usize>) -> &mut [u8] {
        let bytes = self.byte_range(range);
        // SAFETY: in bounds, as `byte_range` has checked; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(bytes.start), bytes.len()) }
    }

    /// Where the elements of `range` are, in bytes from the start.
    ///
    /// # Panics
    /// If they are not all in the buffer.
    fn byte_range(&self, range: Range<usize>) -> Range<usize> {
        assert!(range.start <= range.end && range.end <= self.len, "chunk outside its buffer");
        self.encoding.bytes(range.start)..self.encoding.bytes(range.end)
    }

    /// Where the elements are, if they are `f32`s.
    ///
    /// # Panics
    /// If they are not.
    #[track_caller]
    fn floats(&self) -> *mut f32 {
        assert_eq!(
            self.encoding,
            Encoding::F32,
            "a buffer of {} is no slice of f32",
            self.encoding
        );
        self.start.as_ptr().cast()
    }
}

// SAFETY: a buffer owns its memory (or holds what keeps it alive, which is Send), and numbers are Send.
unsafe impl Send for Buffer {}
// SAFETY: shared access writes only through `chunk_mut`, whose callers promise disjointness.
unsafe impl Sync for Buffer {}

impl From<Vec<f32>> for Buffer {
    fn from(vec: Vec<f32>) -> Self {
        let mut vec = ManuallyDrop::new(vec);
        let start = NonNull::new(vec.as_mut_ptr()).expect("a Vec's pointer is never null").cast();
        let owner = Owner::Vec { capacity: vec.capacity() };
        Self { start, len: vec.len(), encoding: Encoding::F32, owner }
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Owner::Vec { capacity } = self.owner else { return };
        let (start, len) = (self.start.as_ptr(), self.len);
        if self.encoding == Encoding::F32 {
            // SAFETY: these are the parts of the Vec of `f32`s this buffer was made from.
            drop(unsafe { Vec::<f32>::from_raw_parts(start.cast(), len, capacity) });
        } else {
            // SAFETY: these are the parts of the Vec of bits this buffer was made from.
            drop(unsafe { Vec::<u16>::from_raw_parts(start.cast(), len, capacity) });
        }
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: the memory is valid for `len` elements, which `floats` has seen to be `f32`s; lanes
        // write only to buffers that were given to them by value, which nobody can dereference.
        unsafe { std::slice::from_raw_parts(self.floats(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as for `deref`, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.floats(), self.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} elements of {})", self.len, self.encoding)
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
    fn halves_are_lent_as_they_lie() {
        let buffer = Buffer::from_bits(Encoding::Bf16, vec![0x3f80, 0x4000, 0xbf80]);
        assert_eq!((buffer.len(), buffer.encoding()), (3, Encoding::Bf16));
        assert_eq!(buffer.bytes(), bytemuck::cast_slice::<u16, u8>(&[0x3f80, 0x4000, 0xbf80]));
        // SAFETY: nobody else holds the buffer.
        let (chunk, region) = unsafe { (buffer.chunk(1..3), buffer.region(1..3)) };
        assert_eq!((chunk.len(), region.len()), (4, 4));
    }

    #[test]
    #[should_panic(expected = "a buffer of f16 is no slice of f32")]
    fn halves_are_no_slice() {
        let _ = Buffer::from_bits(Encoding::F16, vec![0; 4]).iter().sum::<f32>();
    }

    #[test]
    #[should_panic(expected = "chunk outside its buffer")]
    fn chunks_are_checked_against_the_buffer() {
        let buffer = Buffer::zeroed(4);
        // SAFETY: nobody else holds the buffer.
        let _ = unsafe { buffer.chunk(2..5) };
    }
}
