//! `poseidon._native`: sessions for Python.
//!
//! Tensors come as a pointer, a length and the object that owns the memory; nothing is copied. Every
//! wait releases the interpreter's lock. What a framework needs beyond that is in the package's
//! Python files.

mod errors;
mod group;

use errors::raise;
use poseidon::{
    Buffer, Cluster, Config, Factors, Layer, LayerId, LayerKind, Limit, Optimizer, Policy, Rate,
    RuleState, Servers,
};
use poseidon_core::scheme;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Memory of a tensor: where it is, how many float32 it has, and who keeps it alive.
#[derive(FromPyObject)]
struct Memory(usize, usize, Py<PyAny>);

impl Memory {
    fn buffer(self) -> PyResult<Buffer> {
        let Self(address, len, owner) = self;
        if len == 0 {
            return Ok(Buffer::default());
        }
        if address % align_of::<f32>() != 0 {
            return Err(PyValueError::new_err(format!("address {address:#x} is not aligned")));
        }
        let Some(start) = NonNull::new(address as *mut f32) else {
            return Err(PyValueError::new_err("a tensor without memory"));
        };
        // SAFETY: the Python side passes the address and length of a contiguous float32 tensor on the
        // CPU together with the tensor, which keeps the memory alive, and touches it again only after
        // `receive` has given it back.
        Ok(unsafe { Buffer::from_raw(start, len, Box::new(owner)) })
    }

    fn slice(&self) -> PyResult<&[f32]> {
        let Self(address, len, _) = *self;
        if len == 0 {
            return Ok(&[]);
        }
        if address == 0 || address % align_of::<f32>() != 0 {
            return Err(PyValueError::new_err(format!("no float32 memory at {address:#x}")));
        }
        // SAFETY: as for `buffer`; the owner is held by `self`, and the memory is only read.
        Ok(unsafe { std::slice::from_raw_parts(address as *const f32, len) })
    }
}

/// A layer: its name, its number of parameters and, if it goes by factors, outputs, inputs and rows.
#[derive(FromPyObject)]
struct LayerSpec(String, usize, Option<(usize, usize, usize)>);

impl From<LayerSpec> for Layer {
    fn from(LayerSpec(name, len, fc): LayerSpec) -> Self {
        let layer = Self::new(name, len);
        match fc {
            Some((m, n, rows)) => Self { kind: LayerKind::Fc { m, n }, rows: Some(rows), ..layer },
            None => layer,
        }
    }
}

/// A worker's part in a job.
#[pyclass(frozen, module = "poseidon._native")]
struct Session {
    /// `None` once it is finished.
    inner: Mutex<Option<Arc<poseidon::Session>>>,
    /// The process whose it is.
    process: u32,
}

impl Drop for Session {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // A process forked from it has none of the threads, and the connections are its parent's.
            std::mem::forget(self.take());
        }
    }
}

/// Name, parameters, scheme, reason, bytes this worker sends a step.
type PlanRow = (String, usize, String, String, usize);

/// How a session is set up, besides its layers.
struct Setup {
    optimizer: Optimizer,
    learning_rate: Option<f32>,
    deterministic: bool,
    threads: usize,
}

impl Setup {
    fn describe(
        self,
        layers: Vec<LayerSpec>,
        builder: poseidon::session::Builder,
    ) -> poseidon::session::Builder {
        let mut builder = builder
            .layers(layers.into_iter().map(Layer::from))
            .optimizer(self.optimizer)
            // Layers have rows only if they are to go by factors.
            .scheme(Policy::Sfb)
            .deterministic(self.deterministic)
            .rebuild_threads(self.threads);
        if let Some(rate) = self.learning_rate {
            builder = builder.learning_rate(rate);
        }
        builder
    }
}

#[pymethods]
impl Session {
    /// Joins the job the environment describes, as a session without layers.
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        let session = py.detach(|| {
            let config = Config::from_env()?;
            poseidon::Session::builder(config).start()
        });
        Ok(Self::wrap(session.map_err(|error| raise(py, error))?))
    }

    /// Another session among the same workers.
    #[pyo3(signature = (name, layers, *, optimizer="mean", learning_rate=None, deterministic=false, threads=1))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn sibling(
        &self,
        py: Python<'_>,
        name: &str,
        layers: Vec<LayerSpec>,
        optimizer: &str,
        learning_rate: Option<f32>,
        deterministic: bool,
        threads: usize,
    ) -> PyResult<Self> {
        let setup = Setup {
            optimizer: optimizer.parse().map_err(value_error)?,
            learning_rate,
            deterministic,
            threads,
        };
        let session = self.session()?;
        let sibling =
            py.detach(|| session.sibling(name, |builder| setup.describe(layers, builder)));
        Ok(Self::wrap(sibling.map_err(|error| raise(py, error))?))
    }

    #[getter]
    fn rank(&self) -> PyResult<u16> {
        Ok(self.session()?.rank())
    }

    #[getter]
    fn workers(&self) -> PyResult<usize> {
        Ok(self.session()?.workers())
    }

    /// How each layer is synchronised: name, parameters, scheme, reason, bytes this worker sends a step.
    fn plan(&self) -> PyResult<Vec<PlanRow>> {
        let session = self.session()?;
        let (book, plan) = (session.book(), session.plan());
        let me = poseidon::NodeId(session.rank());
        let rows = book.job.layers.iter().enumerate().filter_map(|(position, layer)| {
            let id = LayerId(position as u32);
            let choice = plan.choice(id)?;
            let bytes = plan.bytes_sent(me, id);
            let (scheme, reason) = (choice.scheme.to_string(), choice.reason.clone());
            Some((layer.name.clone(), layer.len, scheme, reason, bytes))
        });
        Ok(rows.collect())
    }

    /// Contributes a gradient; its memory is overwritten with the result.
    fn send(&self, py: Python<'_>, layer: u32, gradient: Memory) -> PyResult<()> {
        let session = self.session()?;
        let gradient = gradient.buffer()?;
        session.send(LayerId(layer), gradient).map_err(|error| raise(py, error))
    }

    /// Contributes a gradient; the result goes to `result`.
    fn send_into(
        &self,
        py: Python<'_>,
        layer: u32,
        gradient: Memory,
        result: Memory,
    ) -> PyResult<()> {
        let session = self.session()?;
        let (gradient, result) = (gradient.buffer()?, result.buffer()?);
        session.send_into(LayerId(layer), gradient, result).map_err(|error| raise(py, error))
    }

    /// Contributes factors, in parts of (u, v); what becomes of them goes to `result`.
    fn send_factors(
        &self,
        py: Python<'_>,
        layer: u32,
        parts: Vec<(Memory, Memory)>,
        result: Memory,
    ) -> PyResult<()> {
        let session = self.session()?;
        let parts = parts.iter().map(|(u, v)| Ok(Factors { u: u.slice()?, v: v.slice()? }));
        let parts: Vec<Factors<'_>> = parts.collect::<PyResult<_>>()?;
        let result = result.buffer()?;
        let sent = py.detach(|| session.send_factors(LayerId(layer), &parts, result));
        sent.map_err(|error| raise(py, error))
    }

    /// Has a layer rebuilt from its factors as soon as they are there; its result may change from now on.
    fn rebuild(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        let session = self.session()?;
        py.detach(|| session.rebuild(LayerId(layer))).map_err(|error| raise(py, error))
    }

    /// Gives every worker worker 0's values, in place.
    fn broadcast(&self, py: Python<'_>, layer: u32, values: Memory) -> PyResult<()> {
        let session = self.session()?;
        let values = values.buffer()?;
        session.broadcast(LayerId(layer), values).map_err(|error| raise(py, error))
    }

    /// Waits for what was sent. The memory is the tensors' own again.
    fn receive(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        let session = self.session()?;
        // Signals, such as the user's interrupt, come to the thread that waits only if it asks for them.
        let mut signal = None;
        let received = py.detach(|| {
            session.receive_unless(LayerId(layer), || {
                signal = Python::attach(|py| py.check_signals()).err();
                signal.is_some()
            })
        });
        received.map_err(|error| raise(py, error))?;
        signal.map_or(Ok(()), Err)
    }

    /// Whether `receive` would return at once.
    fn is_ready(&self, py: Python<'_>, layer: u32) -> PyResult<bool> {
        self.session()?.is_ready(LayerId(layer)).map_err(|error| raise(py, error))
    }

    fn set_learning_rate(&self, rate: f32) -> PyResult<()> {
        self.session()?.set_learning_rate(rate);
        Ok(())
    }

    /// Changes what this process may send to other hosts, such as `400mbit`; nothing is no limit.
    #[pyo3(signature = (rate))]
    fn set_bandwidth_budget(&self, py: Python<'_>, rate: Option<&str>) -> PyResult<()> {
        let set = self.session()?.set_bandwidth_budget(budget(rate)?);
        set.map_err(|error| raise(py, error))
    }

    /// Bits a second that this process may send to other hosts; nothing is no limit.
    #[getter]
    fn bandwidth_budget(&self) -> PyResult<Option<u64>> {
        Ok(self.session()?.bandwidth_budget().map(Rate::bits))
    }

    /// Fills `into` with what this node holds of the update rule's vectors; elsewhere they are 0.
    /// Returns the steps taken.
    fn rule_state(&self, py: Python<'_>, layer: u32, into: Vec<Memory>) -> PyResult<u64> {
        let session = self.session()?;
        let state = py.detach(|| session.rule_state(LayerId(layer)));
        let state = state.map_err(|error| raise(py, error))?;
        if state.vectors.len() != into.len() {
            let (expected, got) = (state.vectors.len(), into.len());
            return Err(PyValueError::new_err(format!("expected {expected} vectors, got {got}")));
        }
        for (vector, into) in state.vectors.iter().zip(into) {
            let mut into = into.buffer()?;
            if into.len() != vector.len() {
                let (expected, got) = (vector.len(), into.len());
                return Err(PyValueError::new_err(format!(
                    "expected {expected} numbers, got {got}"
                )));
            }
            into.copy_from_slice(vector);
        }
        Ok(state.steps)
    }

    /// Puts the update rule where it was when it had taken `steps` steps.
    fn restore_rule(
        &self,
        py: Python<'_>,
        layer: u32,
        steps: u64,
        vectors: Vec<Memory>,
    ) -> PyResult<()> {
        let session = self.session()?;
        let vectors = vectors.iter().map(|vector| Ok(vector.slice()?.to_vec()));
        let vectors = vectors.collect::<PyResult<_>>()?;
        let restored = session.restore_rule(LayerId(layer), RuleState { steps, vectors });
        restored.map_err(|error| raise(py, error))
    }

    /// Every worker's `value`, as JSON text, in rank order.
    fn gather(&self, py: Python<'_>, topic: &str, value: &str) -> PyResult<Vec<String>> {
        let session = self.session()?;
        let value: serde_json::Value = serde_json::from_str(value).map_err(value_error)?;
        let values =
            py.detach(|| session.gather(topic, &value)).map_err(|error| raise(py, error))?;
        Ok(values.iter().map(ToString::to_string).collect())
    }

    /// Bytes sent and received so far.
    fn traffic(&self) -> PyResult<(u64, u64)> {
        let traffic = self.session()?.traffic();
        Ok((traffic.bytes_sent, traffic.bytes_received))
    }

    /// The same workers as a group, for collective operations.
    fn group(&self, py: Python<'_>, name: &str) -> PyResult<group::Group> {
        let session = self.session()?;
        let group = py.detach(|| session.group(name)).map_err(|error| raise(py, error))?;
        Ok(group::Group::wrap(group))
    }

    /// Seconds until a wait is given up.
    #[getter]
    fn timeout(&self) -> PyResult<f64> {
        Ok(self.session()?.timeout().as_secs_f64())
    }

    /// Says goodbye without waiting for the others; `finish` does.
    fn say_goodbye(&self, py: Python<'_>) -> PyResult<()> {
        self.session()?.say_goodbye().map_err(|error| raise(py, error))
    }

    /// Says goodbye and waits for the others.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let Some(session) = self.take() else { return Ok(()) };
        let session = Arc::into_inner(session)
            .ok_or_else(|| PyRuntimeError::new_err("another thread is still using this session"))?;
        py.detach(|| session.finish()).map_err(|error| raise(py, error))
    }

    /// Stops the job and tells every worker why.
    fn abort(&self, py: Python<'_>, reason: &str) {
        let Some(session) = self.take() else { return };
        py.detach(|| match Arc::try_unwrap(session) {
            Ok(session) => session.abort(reason),
            // A thread waits for a layer; its wait ends with the reason.
            Err(shared) => shared.cancel(reason),
        });
    }
}

impl Session {
    fn wrap(session: poseidon::Session) -> Self {
        Self { inner: Mutex::new(Some(Arc::new(session))), process: std::process::id() }
    }

    fn session(&self) -> PyResult<Arc<poseidon::Session>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.clone().ok_or_else(|| PyRuntimeError::new_err("this session is finished"))
    }

    fn take(&self) -> Option<Arc<poseidon::Session>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A budget as people write it.
fn budget(text: Option<&str>) -> PyResult<Option<Rate>> {
    let Some(text) = text else { return Ok(None) };
    let Limit(rate) = text
        .parse()
        .map_err(|error| PyValueError::new_err(format!("bandwidth budget '{text}': {error}")))?;
    Ok(rate)
}

/// The scheme for a fully connected layer among colocated workers, and why.
#[pyfunction]
#[pyo3(signature = (m, n, batch, workers, policy="auto"))]
fn choose(
    m: usize,
    n: usize,
    batch: usize,
    workers: u16,
    policy: &str,
) -> PyResult<(String, String)> {
    let cluster = Cluster::new(workers, Servers::Colocated, 1).map_err(value_error)?;
    let layer = Layer { kind: LayerKind::Fc { m, n }, ..Layer::new("", m * n) };
    let policy: Policy = policy.parse().map_err(value_error)?;
    let choice = scheme::choose(&layer, &cluster, Some(batch), policy);
    Ok((choice.scheme.to_string(), choice.reason))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<Session>()?;
    module.add_function(wrap_pyfunction!(choose, module)?)?;
    group::register(module)?;
    errors::register(module)
}
