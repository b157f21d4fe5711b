//! Memory of tensors on a device.

use crate::errors::raise;
use poseidon::device::{ProgramStream, speed};
use poseidon::{Encoding, OnDevice, Session};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

/// Where a contiguous tensor is, how many elements it has, who keeps it alive, and the number of its
/// device.
#[derive(FromPyObject)]
pub(crate) struct DeviceMemory(u64, usize, Py<PyAny>, usize);

impl DeviceMemory {
    pub(crate) fn lend(self, py: Python<'_>, session: &Session) -> PyResult<OnDevice> {
        let Self(address, len, owner, ordinal) = self;
        let encoding = encoding(owner.bind(py))?;
        let copier = session.cuda_copier(ordinal).map_err(|error| raise(py, error))?;
        // SAFETY: the Python side passes a contiguous tensor together with its address, and uses it again
        // only on a stream that has been made to wait by `receive_on_device`.
        Ok(unsafe { OnDevice::from_raw(copier, address, len, encoding, Box::new(owner)) })
    }
}

/// A stream of a device, by the number that torch knows it by.
#[derive(FromPyObject)]
pub(crate) struct DeviceStream(u64);

impl DeviceStream {
    pub(crate) fn lend(self) -> ProgramStream {
        // SAFETY: the Python side passes the number of a stream of the tensors' device. Torch keeps
        // its streams until the process ends.
        unsafe { ProgramStream::from_raw(self.0) }
    }
}

/// What the elements of a tensor are.
fn encoding(tensor: &Bound<'_, PyAny>) -> PyResult<Encoding> {
    let dtype = tensor.getattr("dtype")?.str()?;
    match &*dtype.to_cow()? {
        "torch.float32" => Ok(Encoding::F32),
        "torch.bfloat16" => Ok(Encoding::Bf16),
        "torch.float16" => Ok(Encoding::F16),
        other => Err(PyTypeError::new_err(format!("no layer travels as {other}"))),
    }
}

/// Bytes a second of copies through pinned host memory: "to device", "to host" or "both". Of the first
/// device, in `bytes` bytes for each direction.
#[pyfunction]
pub(crate) fn copy_speed(py: Python<'_>, direction: &str, bytes: usize) -> PyResult<f64> {
    let direction: speed::Direction = direction.parse().map_err(PyValueError::new_err)?;
    let speed = py.detach(|| speed::copy_speed(0, direction, bytes));
    speed.map_err(|fault| PyRuntimeError::new_err(fault.to_string()))
}
