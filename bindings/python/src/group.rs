//! Groups for Python: what `poseidon._c10d` builds the torch backend from.
//!
//! Tensors come as an address, a number of elements and a type; what keeps them alive comes with them
//! and is held until the operation is done. Waits release the interpreter's lock.

use crate::Session;
use crate::apart::Apart;
use crate::device::DeviceStream;
use crate::errors::raise;
use poseidon::collectives::{DeviceTensor, Request, Tensor, Terms};
use poseidon::config::{Config, connect_timeout, credentials, encryption_wanted};
use poseidon::coordinator::query;
use poseidon::{Coordinator, Dtype, Rate, ReduceOp, Secret};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Host>()?;
    module.add_class::<Group>()?;
    module.add_class::<Work>()
}

/// Where the ranks of a group find each other: made by rank 0, and given to its group.
#[pyclass(frozen, module = "poseidon._native")]
struct Host {
    coordinator: Mutex<Option<Coordinator>>,
    address: String,
    secret: Secret,
}

#[pymethods]
impl Host {
    /// Listens at the address by which this host reaches `near` (`host:port`).
    #[new]
    fn new(py: Python<'_>, near: &str, name: &str, patience: f64) -> PyResult<Self> {
        let secret = Secret::random().map_err(|e| PyOSError::new_err(e.to_string()))?;
        let encrypt = encryption_wanted().map_err(|error| raise(py, error))?;
        let keys = credentials(name, secret.clone(), encrypt);
        let patience = connect_timeout(seconds(patience)?).map_err(|error| raise(py, error))?;
        let coordinator = Coordinator::beside(near, keys, patience);
        let coordinator = coordinator.map_err(|error| raise(py, error))?;
        let address = coordinator.address().to_string();
        Ok(Self { coordinator: Mutex::new(Some(coordinator)), address, secret })
    }

    /// Whether at `address` ranks of the group that has this secret still gather.
    #[staticmethod]
    fn is_open(py: Python<'_>, address: &str, name: &str, secret: &str) -> PyResult<bool> {
        let secret = secret.parse().map_err(|e| PyValueError::new_err(format!("secret: {e}")))?;
        let encrypt = encryption_wanted().map_err(|error| raise(py, error))?;
        let keys = credentials(name, secret, encrypt);
        let missing = py.detach(|| query(address, &keys, "missing", ANSWER));
        Ok(missing.is_ok_and(|missing| missing.is_some()))
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    #[getter]
    fn secret(&self) -> &str {
        self.secret.expose()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.take()));
    }
}

impl Host {
    fn take(&self) -> Option<Coordinator> {
        self.coordinator.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The ranks that do collective operations together.
#[pyclass(frozen, module = "poseidon._native")]
pub(crate) struct Group {
    inner: Arc<poseidon::Group>,
}

/// A tensor: address, elements, type.
type Spec = (usize, usize, u8);

#[pymethods]
impl Group {
    /// Joins the group that meets at `coordinator`. The rank that has made the `host` there gives it away.
    #[new]
    #[pyo3(signature = (rank, coordinator, name, secret, names, patience, host=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn new(
        py: Python<'_>,
        rank: u16,
        coordinator: &str,
        name: &str,
        secret: &str,
        names: Vec<String>,
        patience: f64,
        host: Option<&Host>,
    ) -> PyResult<Self> {
        let secret = secret.parse().map_err(|e| PyValueError::new_err(format!("secret: {e}")))?;
        let size = u16::try_from(names.len()).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let patience = seconds(patience)?;
        let group = py.detach(|| {
            let mut config = Config::for_group(rank, size, coordinator, name, secret)?;
            config.connect_timeout = connect_timeout(patience)?;
            let coordinator = host.and_then(Host::take);
            poseidon::Group::start(&config, names, coordinator)
        });
        Ok(Self::wrap(group.map_err(|error| raise(py, error))?))
    }

    /// Another group among some ranks of this one, on the same links.
    fn subgroup(
        &self,
        py: Python<'_>,
        name: &str,
        ranks: Vec<u16>,
        names: Vec<String>,
        patience: f64,
    ) -> PyResult<Self> {
        let patience = connect_timeout(seconds(patience)?).map_err(|error| raise(py, error))?;
        let group = py.detach(|| self.inner.subgroup(name, &ranks, names, patience));
        Ok(Self::wrap(group.map_err(|error| raise(py, error))?))
    }

    /// Tells the links of this group from those of every other job; nothing if no other group can share them.
    #[getter]
    fn identity(&self) -> Option<String> {
        self.inner.identity().map(|identity| identity.to_string())
    }

    /// Changes what this process may send to other hosts, such as `400mbit`; nothing is no limit.
    #[pyo3(signature = (rate))]
    fn set_bandwidth_budget(&self, py: Python<'_>, rate: Option<&str>) -> PyResult<()> {
        let set = self.inner.set_bandwidth_budget(crate::budget(rate)?);
        set.map_err(|error| raise(py, error))
    }

    /// Bits a second that this process may send to other hosts; nothing is no limit.
    #[getter]
    fn bandwidth_budget(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let budget = self.inner.bandwidth_budget().map_err(|error| raise(py, error))?;
        Ok(budget.map(Rate::bits))
    }

    /// Begins an operation: its name, what goes in, what comes out, and what it needs besides.
    #[pyo3(signature = (operation, inputs, outputs, keep, timeout, waits, *, op=0, root=0, peer=None, tag=0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn begin(
        &self,
        py: Python<'_>,
        operation: &str,
        inputs: Vec<Spec>,
        outputs: Vec<Spec>,
        keep: Py<PyAny>,
        timeout: f64,
        waits: bool,
        op: usize,
        root: u16,
        peer: Option<u16>,
        tag: u32,
    ) -> PyResult<Work> {
        let asked = Asked { operation, op, root, peer, tag };
        // SAFETY: the Python side passes contiguous tensors on the CPU and, as `keep`, what owns
        // them; it looks at the memory again when the operation is done.
        let tensor = |spec| unsafe { tensor(spec) };
        let inputs: Vec<Tensor> = inputs.into_iter().map(tensor).collect::<PyResult<_>>()?;
        let outputs: Vec<Tensor> = outputs.into_iter().map(tensor).collect::<PyResult<_>>()?;
        let large = inputs.iter().any(|tensor| tensor.count() > SMALL);
        let request = asked.request(inputs, outputs)?;
        let terms = Terms { timeout: seconds(timeout)?, waits };
        let group = &self.inner;
        let begin = || group.begin(request, terms, Box::new(keep));
        // A large operation copies before it returns: let others run meanwhile.
        let work = if large { py.detach(begin) } else { begin() };
        Ok(Work { inner: work.map_err(|error| raise(py, error))? })
    }

    /// As `begin`, of tensors on a device, when the work that `stream` has now is done.
    #[pyo3(signature = (operation, inputs, outputs, keep, timeout, device, stream, *, op=0, root=0, peer=None, tag=0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn begin_on_device(
        &self,
        py: Python<'_>,
        operation: &str,
        inputs: Vec<Spec>,
        outputs: Vec<Spec>,
        keep: Py<PyAny>,
        timeout: f64,
        device: usize,
        stream: DeviceStream,
        op: usize,
        root: u16,
        peer: Option<u16>,
        tag: u32,
    ) -> PyResult<Work> {
        let asked = Asked { operation, op, root, peer, tag };
        let copier = self.inner.cuda_copier(device).map_err(|error| raise(py, error))?;
        let inputs: Vec<_> = inputs.into_iter().map(device_tensor).collect::<PyResult<_>>()?;
        let outputs: Vec<_> = outputs.into_iter().map(device_tensor).collect::<PyResult<_>>()?;
        let terms = Terms { timeout: seconds(timeout)?, waits: false };
        let mut refused = None;
        // SAFETY: the Python side passes contiguous tensors and, as `keep`, what owns them; it uses them
        // again on streams that have been made to wait.
        let work = unsafe {
            self.inner.begin_on_device(
                (&copier, stream.lend()),
                &inputs,
                &outputs,
                |inputs, outputs| {
                    asked.request(inputs, outputs).map_err(|error| {
                        let words = error.to_string();
                        refused = Some(error);
                        poseidon::Error::Config(words)
                    })
                },
                terms,
                Box::new(keep),
            )
        };
        if let Some(refused) = refused {
            return Err(refused);
        }
        Ok(Work { inner: work.map_err(|error| raise(py, error))? })
    }

    /// Waits until a followed operation is done and returns its name, to one thread; nothing at the end.
    fn completed(&self, py: Python<'_>) -> Option<u64> {
        py.detach(|| self.inner.completed())
    }

    /// Leaves the group, and waits until its connections are closed or `patience` is over.
    fn leave(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        let patience = seconds(patience)?;
        py.detach(|| {
            self.inner.leave();
            self.inner.wait_left(patience);
        });
        Ok(())
    }

    /// Stops the group and tells every rank why.
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.inner.abort(reason));
    }
}

impl Group {
    pub(crate) fn wrap(group: poseidon::Group) -> Self {
        Self { inner: Arc::new(group) }
    }
}

/// An operation that is under way.
#[pyclass(frozen, module = "poseidon._native")]
struct Work {
    inner: poseidon::collectives::Work,
}

#[pymethods]
impl Work {
    /// Waits until it is done: true; or `timeout` seconds have passed: false. Raises what went wrong.
    /// With a `session` of the same workers, looks meanwhile whether one of them waits for this one in
    /// another call; `what` says what is awaited here.
    #[pyo3(signature = (timeout=None, session=None, what=""))]
    fn wait(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        session: Option<&Session>,
        what: &str,
    ) -> PyResult<bool> {
        let deadline = timeout.map(seconds).transpose()?.map(|wait| Instant::now() + wait);
        let session = session.map(Session::session).transpose()?;
        let mut apart = session.as_deref().map(Apart::new);
        loop {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SIGNALS, |left| left.min(SIGNALS));
            let done = py.detach(|| self.inner.wait(slice)).map_err(|error| raise(py, error))?;
            if done {
                self.inner.release();
                return Ok(true);
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            py.check_signals()?;
            let error = py.detach(|| apart.as_mut().and_then(|apart| apart.look(what)));
            error.map_or(Ok(()), Err)?;
        }
    }

    /// Has `stream` wait until results are on their device.
    fn make_wait(&self, py: Python<'_>, stream: DeviceStream) -> PyResult<()> {
        self.inner.make_wait(stream.lend()).map_err(|error| raise(py, error))
    }

    fn is_done(&self) -> bool {
        self.inner.is_done()
    }

    /// The exception it ended with, if it did.
    fn failure(&self, py: Python<'_>) -> Option<PyErr> {
        self.inner.release();
        self.inner.failure().map(|error| raise(py, error))
    }

    /// Has `completed` report `name` when it is done; false if it is done already.
    fn follow(&self, name: u64) -> bool {
        self.inner.follow(name)
    }

    /// The rank a received message came from.
    fn source(&self) -> PyResult<u16> {
        self.inner.source().ok_or_else(|| PyRuntimeError::new_err("nothing was received"))
    }
}

/// What is asked for, besides tensors.
struct Asked<'a> {
    operation: &'a str,
    op: usize,
    root: u16,
    peer: Option<u16>,
    tag: u32,
}

impl Asked<'_> {
    fn request(&self, inputs: Vec<Tensor>, outputs: Vec<Tensor>) -> PyResult<Request> {
        let Self { operation, op, root, peer, tag } = *self;
        let op = *ReduceOp::ALL.get(op).ok_or_else(|| PyValueError::new_err("no such op"))?;
        let first = |list: Vec<Tensor>| {
            let first = list.into_iter().next();
            first.ok_or_else(|| PyValueError::new_err("a tensor is missing"))
        };
        let request = match operation {
            "all_reduce" => Request::AllReduce { tensor: first(inputs)?, op },
            "broadcast" => Request::Broadcast { tensor: first(inputs)?, root },
            "reduce" => Request::Reduce { tensor: first(inputs)?, root, op },
            "all_gather" => Request::AllGather { input: first(inputs)?, outputs },
            "reduce_scatter" => Request::ReduceScatter { output: first(outputs)?, inputs, op },
            "gather" => Request::Gather { input: first(inputs)?, outputs, root },
            "scatter" => Request::Scatter { output: first(outputs)?, inputs, root },
            "all_to_all" => Request::AllToAll { inputs, outputs },
            "barrier" => Request::Barrier,
            "send" => {
                let to = peer.ok_or_else(|| PyValueError::new_err("send to whom?"))?;
                Request::Send { tensor: first(inputs)?, to, tag }
            }
            "receive" => Request::Receive { tensor: first(outputs)?, from: peer, tag },
            other => return Err(PyValueError::new_err(format!("no operation '{other}'"))),
        };
        Ok(request)
    }
}

/// Elements from which on beginning an operation lets other threads run.
const SMALL: usize = 16 << 10;
/// How long a host may take to answer.
const ANSWER: Duration = Duration::from_secs(1);
/// How often a wait looks whether the user has interrupted it.
const SIGNALS: Duration = Duration::from_millis(500);

/// # Safety
/// As for [`Tensor::from_raw`]; an address that is not aligned is refused.
unsafe fn tensor((address, count, dtype): Spec) -> PyResult<Tensor> {
    let dtype = *Dtype::ALL
        .get(usize::from(dtype))
        .ok_or_else(|| PyValueError::new_err(format!("no type {dtype}")))?;
    let bad = || PyValueError::new_err(format!("no {dtype} memory at {address:#x}"));
    if count == 0 {
        // SAFETY: no element is ever accessed.
        return Ok(unsafe { Tensor::from_raw(NonNull::<u64>::dangling().cast(), 0, dtype) });
    }
    let start = NonNull::new(address as *mut u8).ok_or_else(bad)?;
    if address % dtype.size() != 0 {
        return Err(bad());
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { Tensor::from_raw(start, count, dtype) })
}

fn device_tensor((address, count, dtype): Spec) -> PyResult<DeviceTensor> {
    let dtype = *Dtype::ALL
        .get(usize::from(dtype))
        .ok_or_else(|| PyValueError::new_err(format!("no type {dtype}")))?;
    Ok(DeviceTensor { address: address as u64, count, dtype })
}

pub(crate) fn seconds(value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|e| PyValueError::new_err(e.to_string()))
}
