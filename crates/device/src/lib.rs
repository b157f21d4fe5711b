//! Copies between host memory and a device, beside the network and beside computing.
//!
//! * [`Device`]: the few things that are asked of a device. Streams are queues of work on it; events
//!   are marks in these queues.
//! * [`cuda`]: NVIDIA's devices, by the driver's library, which is looked for when one is opened.
//! * [`late`]: a device made of host memory, for tests. Its copies finish late, and those of
//!   different streams in any order.
//! * [`Copier`]: the thread that carries layers out of a device and results into it. It alone asks
//!   whether an event has passed; no lane and no thread of the program waits for a copy.
//! * [`Pinned`]: host memory that a device copies from and to at full speed. [`speed`]: how fast that
//!   is.

pub mod cuda;
pub mod late;
pub mod speed;

mod copier;
mod open;
mod pinned;

pub use copier::{Cargo, Collected, Copier, SharedEvent};
pub use open::{cuda_copier, pinnable_memory};
pub use pinned::{Lease, Pinned, Pins, Registered};

use std::fmt;
use std::ptr::NonNull;

/// What a device, or the library that drives it, says has gone wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Fault(pub String);

/// A mark in a stream's queue of work. It has passed when all work before it is done. Recorded
/// again, it is a new mark, and the old one is forgotten. Only a [device](Device::create_event)
/// makes events: a driver takes their numbers for addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Event(u64);

/// A queue of work on a device. What is in one queue is done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stream {
    /// The copier's, from the device to the host.
    Out,
    /// The copier's, from the host to the device.
    In,
    /// One of the training program's.
    Program(ProgramStream),
}

/// A stream of the training program, by the number its framework knows it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProgramStream(u64);

impl ProgramStream {
    /// The stream that the framework calls `number`.
    ///
    /// # Safety
    /// It is a stream of the device that it is used with, and lives as long as this value and its
    /// copies are used. A driver takes the number for an address.
    pub const unsafe fn from_raw(number: u64) -> Self {
        Self(number)
    }
}

/// Some rows of bytes, on a device and in host memory.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// The first row on the device.
    pub device: u64,
    /// The first row in host memory.
    pub host: NonNull<u8>,
    /// Bytes of a row that are copied.
    pub width: usize,
    /// How many rows.
    pub rows: usize,
    /// Bytes from one row to the next on the device.
    pub device_pitch: usize,
    /// Bytes from one row to the next in host memory.
    pub host_pitch: usize,
}

// SAFETY: a copy is two addresses; whoever orders it says why they may be read and written.
unsafe impl Send for Copy {}

impl Copy {
    /// `bytes` bytes in one piece.
    pub fn whole(device: u64, host: NonNull<u8>, bytes: usize) -> Self {
        Self { device, host, width: bytes, rows: 1, device_pitch: bytes, host_pitch: bytes }
    }

    /// Bytes that are copied.
    pub fn bytes(&self) -> usize {
        self.width * self.rows
    }
}

/// What is asked of a device. All calls return at once; work is done in the order of its stream.
///
/// # Safety
/// Others free memory because of what a device says. An event has passed only when all work is done
/// that its stream had when the event was recorded, copies included.
pub unsafe trait Device: Send + Sync + fmt::Debug {
    /// What people call it.
    fn name(&self) -> String;

    /// Called first by a thread that asks about events while the program's threads do what they like.
    fn enter_thread(&self) -> Result<(), Fault> {
        Ok(())
    }

    /// A new event, which counts as passed until it is recorded.
    fn create_event(&self) -> Result<Event, Fault>;

    /// Marks where `stream` is now.
    fn record(&self, event: Event, stream: Stream) -> Result<(), Fault>;

    /// Work that `stream` gets from now on begins after `event`, as it was recorded last.
    fn make_wait(&self, stream: Stream, event: Event) -> Result<(), Fault>;

    /// Whether the work before `event` is done.
    fn has_passed(&self, event: Event) -> Result<bool, Fault>;

    /// Whether `stream` is being captured: what is ordered now is not done now, but whenever the
    /// captured graph is launched.
    fn is_capturing(&self, stream: Stream) -> Result<bool, Fault>;

    /// Copies from the device to the host, on [`Stream::Out`].
    ///
    /// # Safety
    /// Both ends are valid, and the host's is touched by nobody, until an event that follows the copy
    /// has passed.
    unsafe fn copy_out(&self, copy: &Copy) -> Result<(), Fault>;

    /// Copies from the host to the device, on [`Stream::In`].
    ///
    /// # Safety
    /// Both ends are valid, and nobody writes to the host's, until an event that follows the copy has
    /// passed.
    unsafe fn copy_in(&self, copy: &Copy) -> Result<(), Fault>;

    /// Lets the device reach host memory at full speed.
    ///
    /// # Safety
    /// The memory is valid until it is unpinned.
    unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Fault>;

    /// Ends [`pin`](Device::pin).
    ///
    /// # Safety
    /// `start` was pinned, and no copy from or to it is under way.
    unsafe fn unpin(&self, start: NonNull<u8>) -> Result<(), Fault>;
}
