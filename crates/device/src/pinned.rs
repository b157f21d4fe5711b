//! Host memory that a device copies from and to at full speed.

use crate::Device;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What is pinned for one device, and how much may be.
#[derive(Debug)]
pub struct Pins {
    device: Arc<dyn Device>,
    /// Bytes in use, and how many there may be.
    pinned: AtomicUsize,
    limit: usize,
    has_warned: AtomicBool,
    /// Memory that nobody uses now.
    spare: Mutex<Vec<Pinned>>,
}

/// Host memory of its own, pinned for a device if that is possible. Zeros at first.
#[derive(Debug)]
pub struct Pinned {
    /// Ends before the memory does.
    _registered: Option<Registered>,
    memory: Pages,
}

/// Memory of somebody else's, pinned for a device until this value is dropped.
#[derive(Debug)]
pub struct Registered {
    pins: Arc<Pins>,
    start: NonNull<u8>,
    bytes: usize,
}

/// Pinned memory for one operation. When it is dropped, it is kept for the next one that needs as much.
#[derive(Debug)]
pub struct Lease {
    pins: Arc<Pins>,
    /// Until it is given back.
    pinned: Option<Pinned>,
}

/// Whole pages of host memory.
#[derive(Debug)]
struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

const PAGE: usize = 4096;
/// The smallest lease.
const SMALLEST: usize = 64 << 10;

impl Pins {
    pub(crate) fn new(device: Arc<dyn Device>, limit: usize) -> Self {
        let (pinned, has_warned) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { device, pinned, limit, has_warned, spare: Mutex::default() }
    }

    /// Bytes of host memory that are pinned for this device.
    pub fn pinned(&self) -> usize {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Pinned memory of at least `bytes` bytes, for one operation. What is in it is anything.
    pub fn lend(self: &Arc<Self>, bytes: usize) -> Lease {
        // Powers of two, so that what one operation needed fits the next.
        let bytes = bytes.next_power_of_two().max(SMALLEST);
        let pinned = self.take_spare(bytes).unwrap_or_else(|| Pinned::new(self, bytes));
        Lease { pins: self.clone(), pinned: Some(pinned) }
    }

    fn take_spare(&self, bytes: usize) -> Option<Pinned> {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let at = spare.iter().position(|pinned| pinned.bytes() == bytes)?;
        Some(spare.swap_remove(at))
    }

    fn keep_spare(&self, pinned: Pinned) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(pinned);
    }

    fn reserve(&self, bytes: usize) -> bool {
        let limit = self.limit;
        let more = |pinned: usize| pinned.checked_add(bytes).filter(|sum| *sum <= limit);
        let reserved = self.pinned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        if !reserved {
            let (limit, pinned) = (limit >> 20, self.pinned() >> 20);
            self.warn_unpinned(&format!("the limit is {limit} MiB, and {pinned} MiB are pinned"));
        }
        reserved
    }

    fn give_back(&self, bytes: usize) {
        self.pinned.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn warn_unpinned(&self, why: &str) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "host memory is not pinned ({why}): copies from and to {} go through ordinary \
                 memory, which is several times slower. POSEIDON_PINNED_MEMORY sets the limit",
                self.device.name()
            );
        }
    }
}

impl Pinned {
    /// `bytes` zeros. If they cannot be pinned, they are ordinary memory, and the log says so.
    pub fn new(pins: &Arc<Pins>, bytes: usize) -> Self {
        let memory = Pages::zeroed(bytes);
        // SAFETY: the memory lives as long as `_registered`, which is dropped before it.
        let _registered = unsafe { Registered::new(pins, memory.start, bytes) };
        Self { _registered, memory }
    }

    /// Where it begins.
    pub fn start(&self) -> NonNull<u8> {
        self.memory.start
    }

    fn bytes(&self) -> usize {
        self.memory.layout.size()
    }
}

// SAFETY: memory of its own.
unsafe impl Send for Pinned {}
// SAFETY: through a shared reference there is only its address.
unsafe impl Sync for Pinned {}

impl Lease {
    /// Where it begins.
    pub fn start(&self) -> NonNull<u8> {
        self.pinned.as_ref().expect("it is given back when it is dropped").start()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            self.pins.keep_spare(pinned);
        }
    }
}

impl Registered {
    /// Pins memory for the device of `pins`, unless their limit is reached or the system
    /// refuses. The memory can be copied all the same, more slowly; the log says so once.
    ///
    /// # Safety
    /// The memory stays valid until the value is dropped, and no copy of it is under way then.
    pub unsafe fn new(pins: &Arc<Pins>, start: NonNull<u8>, bytes: usize) -> Option<Self> {
        if bytes == 0 || !pins.reserve(bytes) {
            return None;
        }
        // SAFETY: the caller's promise.
        match unsafe { pins.device.pin(start, bytes) } {
            Ok(()) => Some(Self { pins: pins.clone(), start, bytes }),
            Err(fault) => {
                pins.give_back(bytes);
                pins.warn_unpinned(&fault.to_string());
                None
            }
        }
    }
}

// SAFETY: an address, and what is told to the device about it.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: pinned by `new`; its caller has promised that nothing is under way.
        if let Err(fault) = unsafe { self.pins.device.unpin(self.start) } {
            tracing::debug!("{fault}");
        }
        self.pins.give_back(self.bytes);
    }
}

impl Pages {
    fn zeroed(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes.next_multiple_of(PAGE).max(PAGE), PAGE)
            .expect("a layer's memory is less than half of the address space");
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, layout }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
