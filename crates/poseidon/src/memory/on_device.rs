//! Memory of a device, lent while a layer is in flight. It can be copied; it cannot be read here.

use poseidon_core::Encoding;
use poseidon_device::Copier;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A contiguous run of a layer's elements on a device.
pub struct OnDevice {
    pub(crate) copier: Arc<Copier>,
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) encoding: Encoding,
    /// Held for its `Drop`.
    _keep_alive: Box<dyn Any + Send + Sync>,
}

impl OnDevice {
    /// `len` elements of `encoding` at `address` on the device of `copier`. `keep_alive` is dropped when
    /// copies from and to the memory are done.
    ///
    /// # Safety
    /// Until `keep_alive` is dropped, the memory is valid, and nobody touches it but work that its
    /// stream does before it is lent and after it is received.
    pub unsafe fn from_raw(
        copier: Arc<Copier>,
        address: u64,
        len: usize,
        encoding: Encoding,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { copier, address, len, encoding, _keep_alive: keep_alive }
    }
}

impl fmt::Debug for OnDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OnDevice({} elements of {}, {:?})", self.len, self.encoding, self.copier)
    }
}
