//! NVIDIA's devices, by the driver's library.
//!
//! A device is used through its primary context, which is the one that frameworks use as well: their
//! streams and memory are good here as they are.

use crate::{Copy, Device, Event, Fault, Stream};
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

/// A device of this machine.
#[derive(Debug)]
pub struct Cuda {
    context: sys::CUcontext,
    out_stream: sys::CUstream,
    in_stream: sys::CUstream,
    name: String,
}

/// Memory of a device. It is given back when this value is dropped.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Cuda>,
    address: u64,
}

// SAFETY: contexts and streams are handles that the driver lets any thread use.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

const NON_BLOCKING: u32 = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
const UNTIMED: u32 = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for all contexts.
const PORTABLE: u32 = 1;

impl Cuda {
    /// The device that the driver numbers `ordinal`. It is kept until the process ends, as a
    /// framework does.
    pub fn open(ordinal: usize) -> Result<Self, Fault> {
        // SAFETY: loads the driver's library, whose initialisation any process may run.
        if !unsafe { sys::is_culib_present() } {
            return Err(Fault("there is no CUDA driver: libcuda.so was not found".into()));
        }
        let (mut device, mut context) = (0, std::ptr::null_mut());
        let mut name = [0 as c_char; 256];
        // SAFETY: `cuInit` comes first, and each call is given places for what it returns.
        unsafe {
            check(sys::cuInit(0), "starting CUDA")?;
            let doing = |what: &str| format!("{what} device {ordinal}");
            check(sys::cuDeviceGet(&mut device, ordinal as c_int), &doing("looking for"))?;
            let length = name.len() as c_int - 1;
            let named = sys::cuDeviceGetName(name.as_mut_ptr(), length, device);
            check(named, &doing("asking for the name of"))?;
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device), &doing("opening"))?;
        }
        // SAFETY: the array is longer than what the driver wrote, and was zeros before.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let none = std::ptr::null_mut();
        let mut cuda = Self { context, out_stream: none, in_stream: none, name };
        cuda.out_stream = cuda.create_stream()?;
        cuda.in_stream = cuda.create_stream()?;
        Ok(cuda)
    }

    /// Memory of the device, whatever is in it.
    pub fn allocate(device: &Arc<Self>, bytes: usize) -> Result<DeviceMemory, Fault> {
        let mut address = 0;
        // SAFETY: `address` is a place for the answer.
        let call = || unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
        device.with(call, "allocating memory")?;
        Ok(DeviceMemory { device: device.clone(), address })
    }

    fn create_stream(&self) -> Result<sys::CUstream, Fault> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; `stream` is a place for the answer.
        self.with(|| unsafe { sys::cuStreamCreate(&mut stream, NON_BLOCKING) }, "making a stream")?;
        Ok(stream)
    }

    fn stream(&self, stream: Stream) -> sys::CUstream {
        match stream {
            Stream::Out => self.out_stream,
            Stream::In => self.in_stream,
            Stream::Program(program) => program.0 as sys::CUstream,
        }
    }

    /// Calls the driver with the device's context as the thread's current one.
    fn with(&self, call: impl FnOnce() -> sys::CUresult, doing: &str) -> Result<(), Fault> {
        // SAFETY: the context lives until the process ends.
        check(unsafe { sys::cuCtxPushCurrent_v2(self.context) }, doing)?;
        let result = call();
        let mut popped = std::ptr::null_mut();
        // SAFETY: takes off what was pushed above.
        check(unsafe { sys::cuCtxPopCurrent_v2(&mut popped) }, doing)?;
        check(result, doing)
    }
}

impl DeviceMemory {
    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `allocate`, and nobody is left who knows of it.
        let call = || unsafe { sys::cuMemFree_v2(self.address) };
        if let Err(fault) = self.device.with(call, "giving memory back") {
            tracing::debug!("{fault}");
        }
    }
}

// SAFETY: CUDA keeps the order of streams and events.
unsafe impl Device for Cuda {
    fn name(&self) -> String {
        self.name.clone()
    }

    /// A program may capture a CUDA graph in the mode that forbids all threads some calls, among them
    /// questions about events. A question asked all the same ends the capture with an error. A
    /// thread in the mode set here is forbidden such calls by its own captures only, and has none.
    fn enter_thread(&self) -> Result<(), Fault> {
        let mut mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: `mode` says what is set, and is a place for what was set before.
        let call = || unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        self.with(call, "setting a thread's capture mode")
    }

    fn create_event(&self) -> Result<Event, Fault> {
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is a place for the answer.
        self.with(|| unsafe { sys::cuEventCreate(&mut event, UNTIMED) }, "making an event")?;
        Ok(Event(event as u64))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), Fault> {
        let stream = self.stream(stream);
        // SAFETY: events are never destroyed; whoever made a `ProgramStream` promised that it
        // lives.
        self.with(|| unsafe { sys::cuEventRecord(event.0 as _, stream) }, "recording an event")
    }

    fn make_wait(&self, stream: Stream, event: Event) -> Result<(), Fault> {
        let stream = self.stream(stream);
        // SAFETY: as for `record`.
        let call = || unsafe { sys::cuStreamWaitEvent(stream, event.0 as _, 0) };
        self.with(call, "having a stream wait")
    }

    fn has_passed(&self, event: Event) -> Result<bool, Fault> {
        let mut passed = true;
        let call = || {
            // SAFETY: as for `record`.
            let result = unsafe { sys::cuEventQuery(event.0 as _) };
            if result == sys::CUresult::CUDA_ERROR_NOT_READY {
                passed = false;
                return sys::CUresult::CUDA_SUCCESS;
            }
            result
        };
        self.with(call, "computing or copying")?;
        Ok(passed)
    }

    fn is_capturing(&self, stream: Stream) -> Result<bool, Fault> {
        let none = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut status, stream) = (none, self.stream(stream));
        // SAFETY: `status` is a place for the answer.
        let call = || unsafe { sys::cuStreamIsCapturing(stream, &mut status) };
        self.with(call, "asking about a stream")?;
        Ok(status != none)
    }

    // SAFETY: as the trait says.
    unsafe fn copy_out(&self, copy: &Copy) -> Result<(), Fault> {
        let call = || {
            let (device, host) = (copy.device, copy.host.as_ptr().cast::<c_void>());
            if copy.rows == 1 {
                // SAFETY: the caller's promise.
                return unsafe {
                    sys::cuMemcpyDtoHAsync_v2(host, device, copy.width, self.out_stream)
                };
            }
            let rows = sys::CUDA_MEMCPY2D {
                srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                srcDevice: device,
                srcPitch: copy.device_pitch,
                dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
                dstHost: host,
                dstPitch: copy.host_pitch,
                ..shape(copy)
            };
            // SAFETY: the caller's promise.
            unsafe { sys::cuMemcpy2DAsync_v2(&rows, self.out_stream) }
        };
        self.with(call, "copying from the device")
    }

    // SAFETY: as the trait says.
    unsafe fn copy_in(&self, copy: &Copy) -> Result<(), Fault> {
        let call = || {
            let (device, host) = (copy.device, copy.host.as_ptr().cast::<c_void>());
            if copy.rows == 1 {
                // SAFETY: the caller's promise.
                return unsafe {
                    sys::cuMemcpyHtoDAsync_v2(device, host, copy.width, self.in_stream)
                };
            }
            let rows = sys::CUDA_MEMCPY2D {
                srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
                srcHost: host,
                srcPitch: copy.host_pitch,
                dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                dstDevice: device,
                dstPitch: copy.device_pitch,
                ..shape(copy)
            };
            // SAFETY: the caller's promise.
            unsafe { sys::cuMemcpy2DAsync_v2(&rows, self.in_stream) }
        };
        self.with(call, "copying to the device")
    }

    // SAFETY: as the trait says.
    unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<(), Fault> {
        let start = start.as_ptr().cast();
        // SAFETY: the caller's promise.
        let call = || unsafe { sys::cuMemHostRegister_v2(start, bytes, PORTABLE) };
        self.with(call, "pinning memory")
    }

    // SAFETY: as the trait says.
    unsafe fn unpin(&self, start: NonNull<u8>) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        let call = || unsafe { sys::cuMemHostUnregister(start.as_ptr().cast()) };
        self.with(call, "unpinning memory")
    }
}

/// How many bytes in how many rows.
fn shape(copy: &Copy) -> sys::CUDA_MEMCPY2D {
    let nowhere = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: nowhere,
        srcHost: std::ptr::null(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: nowhere,
        dstHost: std::ptr::null_mut(),
        dstDevice: 0,
        dstArray: std::ptr::null_mut(),
        dstPitch: 0,
        WidthInBytes: copy.width,
        Height: copy.rows,
    }
}

fn check(result: sys::CUresult, doing: &str) -> Result<(), Fault> {
    result.result().map_err(|error| {
        let words = error.error_string().map(|words| words.to_string_lossy().into_owned());
        let words = words.unwrap_or_else(|_| format!("error {:?}", error.0));
        Fault(format!("{doing}: CUDA says '{words}'"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_opening_a_device_says_so() {
        // On a machine with a driver there may be a device 0, but hardly one with this number.
        let fault = Cuda::open(4000).unwrap_err();
        assert!(fault.0.contains("CUDA"), "{fault}");
    }
}
