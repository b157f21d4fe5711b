//! `poseidon._native`: sessions for Python.
//!
//! Tensors come as a pointer, a length and the object that owns the memory; nothing is copied. Every
//! wait releases the interpreter's lock. What a framework needs beyond that is in the package's
//! Python files.

mod apart;
mod checkpoint;
mod choices;
mod device;
mod errors;
mod group;
mod log;
mod observed;
mod replicas;

use apart::wait_for_layer;
use device::{DeviceMemory, DeviceStream};
use errors::raise;
use poseidon::{
    Buffer, Config, Consistency, Encoding, Encodings, Factors, HalfFactors, Layer, LayerId,
    LayerKind, Limit, Optimizer, Policy, Rate, RuleState,
};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use xxhash_rust::xxh3::xxh3_64;

/// Memory of a tensor: where it is, how many elements it has, and who keeps it alive. The elements
/// are what the layer says, or float32.
#[derive(FromPyObject)]
struct Memory(usize, usize, Py<PyAny>);

impl Memory {
    fn buffer(self, encoding: Encoding) -> PyResult<Buffer> {
        let Self(address, len, owner) = self;
        // Any address is aligned for no elements.
        let address = if len == 0 { encoding.width() } else { address };
        if address % encoding.width() != 0 {
            return Err(PyValueError::new_err(format!("address {address:#x} is not aligned")));
        }
        let Some(start) = NonNull::new(address as *mut u8) else {
            return Err(PyValueError::new_err("a tensor without memory"));
        };
        // SAFETY: the Python side passes the address and length of a contiguous tensor on the CPU, of
        // the type that `encoding` says, together with the tensor, which keeps the memory alive, and
        // touches it again only after `receive` has given it back.
        Ok(unsafe { Buffer::encoded_from_raw(start, len, encoding, Box::new(owner)) })
    }

    /// The elements, which are as wide as a `T`.
    fn slice<T: Element>(&self) -> PyResult<&[T]> {
        let Self(address, len, _) = *self;
        if len == 0 {
            return Ok(&[]);
        }
        if address == 0 || address % align_of::<T>() != 0 {
            let width = size_of::<T>();
            let words = format!("no numbers of {width} bytes at {address:#x}");
            return Err(PyValueError::new_err(words));
        }
        // SAFETY: as for `buffer`; the owner is held by `self`, and the memory is only read. Any bits
        // are an element.
        Ok(unsafe { std::slice::from_raw_parts(address as *const T, len) })
    }
}

/// What memory may be taken for: types of which any bits are a value.
trait Element {}
impl Element for u8 {}
impl Element for f32 {}
impl Element for u16 {}

/// Outputs, inputs and rows of a layer that goes by factors.
type Shape = (usize, usize, usize);

/// A layer: its name, its number of parameters, its shape if it goes by factors and, unless both are
/// float32, how its numbers travel up and down.
#[derive(FromPyObject)]
enum LayerSpec {
    Encoded(String, usize, Option<Shape>, String, String),
    Plain(String, usize, Option<Shape>),
}

impl LayerSpec {
    fn layer(self) -> PyResult<Layer> {
        let (name, len, shape, encodings) = match self {
            Self::Plain(name, len, shape) => (name, len, shape, Encodings::default()),
            Self::Encoded(name, len, shape, up, down) => {
                let (up, down) = (up.parse(), down.parse());
                let (up, down) = (up.map_err(value_error)?, down.map_err(value_error)?);
                (name, len, shape, Encodings { up, down })
            }
        };
        let layer = Layer::new(name, len).encoded(encodings);
        Ok(match shape {
            Some((m, n, rows)) => Layer { kind: LayerKind::Fc { m, n }, rows: Some(rows), ..layer },
            None => layer,
        })
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
    /// By layer: its own rule, if it has one. Layers beyond have none.
    rules: Vec<Option<Optimizer>>,
    learning_rate: Option<f32>,
    deterministic: bool,
    sync: Consistency,
    threads: usize,
}

impl Setup {
    fn describe(
        self,
        layers: Vec<Layer>,
        builder: poseidon::session::Builder,
    ) -> poseidon::session::Builder {
        let rules = self.rules.into_iter().chain(std::iter::repeat(None));
        let layers = layers.into_iter().zip(rules);
        let mut builder = builder
            .layers(layers.map(|(layer, optimizer)| Layer { optimizer, ..layer }))
            .optimizer(self.optimizer)
            // Layers have rows only if they are to go by factors.
            .scheme(Policy::Sfb)
            .deterministic(self.deterministic)
            .consistency(self.sync)
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
    #[pyo3(signature = (name, layers, *, optimizer="mean", rules=Vec::new(), learning_rate=None, deterministic=false, sync="bsp", threads=1))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn sibling(
        &self,
        py: Python<'_>,
        name: &str,
        layers: Vec<LayerSpec>,
        optimizer: &str,
        rules: Vec<Option<String>>,
        learning_rate: Option<f32>,
        deterministic: bool,
        sync: &str,
        threads: usize,
    ) -> PyResult<Self> {
        let rule = |text: Option<String>| text.map(|text| text.parse()).transpose();
        let rules = rules.into_iter().map(rule).collect::<Result<_, _>>().map_err(value_error)?;
        let setup = Setup {
            optimizer: optimizer.parse().map_err(value_error)?,
            rules,
            learning_rate,
            deterministic,
            sync: sync.parse().map_err(value_error)?,
            threads,
        };
        let session = self.session()?;
        let layers = layers.into_iter().map(LayerSpec::layer).collect::<PyResult<Vec<_>>>()?;
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
        let gradient = gradient.buffer(session.plan().encodings(LayerId(layer)).up)?;
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
        let Encodings { up, down } = session.plan().encodings(LayerId(layer));
        let (gradient, result) = (gradient.buffer(up)?, result.buffer(down)?);
        session.send_into(LayerId(layer), gradient, result).map_err(|error| raise(py, error))
    }

    /// Contributes factors, in parts of (u, v), which are of the type that the layer's contributions
    /// travel as; what becomes of them goes to `result`, in float32.
    fn send_factors(
        &self,
        py: Python<'_>,
        layer: u32,
        parts: Vec<(Memory, Memory)>,
        result: Memory,
    ) -> PyResult<()> {
        let session = self.session()?;
        let (id, result) = (LayerId(layer), result.buffer(Encoding::F32)?);
        let sent = if session.plan().encodings(id).up == Encoding::F32 {
            let parts = parts.iter().map(|(u, v)| Ok(Factors { u: u.slice()?, v: v.slice()? }));
            let parts = parts.collect::<PyResult<Vec<_>>>()?;
            py.detach(|| session.send_factors(id, &parts, result))
        } else {
            let parts = parts.iter().map(|(u, v)| Ok(HalfFactors { u: u.slice()?, v: v.slice()? }));
            let parts = parts.collect::<PyResult<Vec<_>>>()?;
            py.detach(|| session.send_half_factors(id, &parts, result))
        };
        sent.map_err(|error| raise(py, error))
    }

    /// As `send`, or `send_into`, of memory on a device, when the work that `stream` has now is done.
    #[pyo3(signature = (layer, gradient, stream, into=None))]
    fn send_on_device(
        &self,
        py: Python<'_>,
        layer: u32,
        gradient: DeviceMemory,
        stream: DeviceStream,
        into: Option<DeviceMemory>,
    ) -> PyResult<()> {
        let session = self.session()?;
        let gradient = gradient.lend(py, &session)?;
        let into = into.map(|into| into.lend(py, &session)).transpose()?;
        let sent = session.send_on_device(LayerId(layer), gradient, into, stream.lend());
        sent.map_err(|error| raise(py, error))
    }

    /// As `broadcast`, of memory on a device.
    fn broadcast_on_device(
        &self,
        py: Python<'_>,
        layer: u32,
        values: DeviceMemory,
        stream: DeviceStream,
    ) -> PyResult<()> {
        let session = self.session()?;
        let values = values.lend(py, &session)?;
        let sent = session.broadcast_on_device(LayerId(layer), values, stream.lend());
        sent.map_err(|error| raise(py, error))
    }

    /// Contributes factors on a device, in parts that have rows of u and v side by side; everybody's
    /// rows go to `into`.
    fn gather_on_device(
        &self,
        py: Python<'_>,
        layer: u32,
        parts: Vec<DeviceMemory>,
        into: DeviceMemory,
        stream: DeviceStream,
    ) -> PyResult<()> {
        let session = self.session()?;
        let parts = parts.into_iter().map(|part| part.lend(py, &session));
        let (parts, into) = (parts.collect::<PyResult<Vec<_>>>()?, into.lend(py, &session)?);
        let sent = session.gather_on_device(LayerId(layer), parts, into, stream.lend());
        sent.map_err(|error| raise(py, error))
    }

    /// As `gather_on_device`, of rows in host memory.
    fn gather_from_host(
        &self,
        py: Python<'_>,
        layer: u32,
        parts: Vec<(Memory, Memory)>,
        into: DeviceMemory,
        stream: DeviceStream,
    ) -> PyResult<()> {
        let parts = parts.iter().map(|(u, v)| Ok(Factors { u: u.slice()?, v: v.slice()? }));
        let parts: Vec<Factors<'_>> = parts.collect::<PyResult<_>>()?;
        let session = self.session()?;
        let (into, stream) = (into.lend(py, &session)?, stream.lend());
        // It copies the rows: let others run meanwhile.
        let sent = py.detach(|| session.gather_from_host(LayerId(layer), &parts, into, stream));
        sent.map_err(|error| raise(py, error))
    }

    /// Waits for what was sent from a device; `stream` waits for it to be there again. Returns rows of
    /// factors that had no place in what `gather_on_device` was given: the bytes of float32 numbers.
    fn receive_on_device<'py>(
        &self,
        py: Python<'py>,
        layer: u32,
        stream: DeviceStream,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let (session, layer, stream) = (self.session()?, LayerId(layer), stream.lend());
        let beyond = wait_for_layer(py, &session, layer, |interrupted| {
            session.receive_on_device(layer, stream, interrupted)
        })?;
        Ok(PyByteArray::new(py, bytemuck::cast_slice(&beyond.unwrap_or_default())))
    }

    /// Has a layer rebuilt from its factors as soon as they are there; its result may change from now on.
    fn rebuild(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        let session = self.session()?;
        py.detach(|| session.rebuild(LayerId(layer))).map_err(|error| raise(py, error))
    }

    /// Gives every worker worker 0's values, in place.
    fn broadcast(&self, py: Python<'_>, layer: u32, values: Memory) -> PyResult<()> {
        let session = self.session()?;
        let values = values.buffer(session.plan().encodings(LayerId(layer)).down)?;
        session.broadcast(LayerId(layer), values).map_err(|error| raise(py, error))
    }

    /// Waits for what was sent. The memory is the tensors' own again.
    fn receive(&self, py: Python<'_>, layer: u32) -> PyResult<()> {
        let (session, layer) = (self.session()?, LayerId(layer));
        wait_for_layer(py, &session, layer, |interrupted| {
            session.receive_unless(layer, interrupted)
        })?;
        Ok(())
    }

    /// The next step is taken together with all workers, where their clocks may be apart.
    fn step_together(&self, py: Python<'_>) -> PyResult<()> {
        self.session()?.step_together().map_err(|error| raise(py, error))
    }

    /// Keeps this process's connection to the coordinator until the process ends.
    fn stay_until_exit(&self) -> PyResult<()> {
        self.session()?.stay_until_exit();
        Ok(())
    }

    /// Waits until another node's process has ended, at most `patience` seconds. Whether it has.
    fn await_end(&self, py: Python<'_>, patience: f64) -> PyResult<bool> {
        let session = self.session()?;
        let patience = group::seconds(patience)?;
        Ok(py.detach(|| session.await_end(patience)))
    }

    /// Whether `receive` would return at once.
    fn is_ready(&self, py: Python<'_>, layer: u32) -> PyResult<bool> {
        self.session()?.is_ready(LayerId(layer)).map_err(|error| raise(py, error))
    }

    fn set_learning_rate(&self, rate: f32) -> PyResult<()> {
        self.session()?.set_learning_rate(rate);
        Ok(())
    }

    /// Changes the learning rate of one layer.
    fn set_layer_learning_rate(&self, py: Python<'_>, layer: u32, rate: f32) -> PyResult<()> {
        let set = self.session()?.set_layer_learning_rate(LayerId(layer), rate);
        set.map_err(|error| raise(py, error))
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

    /// Puts into `into` what this node holds of the update rule's vectors, and of the parameters if
    /// workers get them rounded. Other elements stay as they are. Returns the steps taken.
    fn rule_state(&self, py: Python<'_>, layer: u32, into: Vec<Memory>) -> PyResult<u64> {
        let session = self.session()?;
        let mut into =
            into.into_iter().map(|m| m.buffer(Encoding::F32)).collect::<PyResult<Vec<_>>>()?;
        let steps = py.detach(|| {
            let mut into: Vec<&mut [f32]> = into.iter_mut().map(|buffer| &mut **buffer).collect();
            session.rule_state_into(LayerId(layer), &mut into)
        });
        steps.map_err(|error| raise(py, error))
    }

    /// Elements of which `rule_state` has this node's state: the first of each run, and the first behind it.
    fn held(&self, py: Python<'_>, layer: u32) -> PyResult<Vec<(usize, usize)>> {
        let held = self.session()?.held(LayerId(layer)).map_err(|error| raise(py, error))?;
        Ok(held.into_iter().map(|range| (range.start, range.end)).collect())
    }

    /// Puts the update rule where it was when it had taken `steps` steps; and the shards' parameters,
    /// if `masters` is given.
    #[pyo3(signature = (layer, steps, vectors, masters=None))]
    fn restore_rule(
        &self,
        py: Python<'_>,
        layer: u32,
        steps: u64,
        vectors: Vec<Memory>,
        masters: Option<Memory>,
    ) -> PyResult<()> {
        let session = self.session()?;
        let values = |memory: &Memory| memory.slice().map(<[f32]>::to_vec);
        let vectors = vectors.iter().map(values).collect::<PyResult<_>>()?;
        let masters = masters.as_ref().map(values).transpose()?.unwrap_or_default();
        let state = RuleState { steps, vectors, masters };
        session.restore_rule(LayerId(layer), state).map_err(|error| raise(py, error))
    }

    /// Every worker's `value`, as JSON text, in rank order. With `beside`, a thread beside the program
    /// asks, for at most so many seconds, and the job goes on if it fails.
    #[pyo3(signature = (topic, value, beside=None))]
    fn gather(
        &self,
        py: Python<'_>,
        topic: &str,
        value: &str,
        beside: Option<f64>,
    ) -> PyResult<Vec<String>> {
        let session = self.session()?;
        let value: serde_json::Value = serde_json::from_str(value).map_err(value_error)?;
        let beside = beside.map(group::seconds).transpose()?;
        let values = py.detach(|| match beside {
            Some(patience) => session.gather_beside(topic, &value, patience),
            None => session.gather(topic, &value),
        });
        let values = values.map_err(|error| raise(py, error))?;
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
        let Ok(shared) = self.session() else { return Ok(()) };
        // A session that cannot be finished yet stays as it is: the program may mend that.
        py.detach(|| shared.say_goodbye()).map_err(|error| raise(py, error))?;
        drop(shared);
        let Some(session) = self.take() else { return Ok(()) };
        match Arc::try_unwrap(session) {
            Ok(session) => py.detach(|| session.finish()).map_err(|error| raise(py, error)),
            Err(shared) => {
                *self.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(shared);
                Err(PyRuntimeError::new_err("another thread is still using this session"))
            }
        }
    }

    /// Stops the job and tells every worker why.
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        if std::process::id() != self.process {
            return Err(raise(py, poseidon::Error::Forked { owner: self.process }));
        }
        let Some(session) = self.take() else { return Ok(()) };
        py.detach(|| match Arc::try_unwrap(session) {
            Ok(session) => session.abort(reason),
            // A thread waits for a layer; its wait ends with the reason.
            Err(shared) => shared.cancel(reason),
        });
        Ok(())
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

/// A checksum of the bytes of a tensor: where they are, how many, and who keeps them alive.
#[pyfunction]
fn checksum(py: Python<'_>, address: usize, bytes: usize, owner: Py<PyAny>) -> PyResult<u64> {
    let memory = Memory(address, bytes, owner);
    let content = memory.slice::<u8>()?;
    Ok(py.detach(|| xxh3_64(content)))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    log::start()?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<Session>()?;
    module.add_function(wrap_pyfunction!(choices::choose, module)?)?;
    module.add_function(wrap_pyfunction!(checksum, module)?)?;
    module.add_function(wrap_pyfunction!(choices::lets_workers_be_apart, module)?)?;
    module.add_function(wrap_pyfunction!(device::copy_speed, module)?)?;
    group::register(module)?;
    checkpoint::register(module)?;
    observed::register(module)?;
    replicas::register(module)?;
    errors::register(module)
}
