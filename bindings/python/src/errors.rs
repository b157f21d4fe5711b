//! Exceptions that carry the facts.

use poseidon::Error;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

create_exception!(poseidon, PoseidonError, PyRuntimeError, "The job has failed, or cannot start.");
create_exception!(
    poseidon,
    ConfigError,
    PyValueError,
    "The configuration or the environment makes no sense."
);
create_exception!(
    poseidon,
    UsageError,
    PyValueError,
    "A call that cannot be right; the job goes on."
);
create_exception!(poseidon, ConnectionError, PoseidonError, "The nodes did not find each other.");
create_exception!(
    poseidon,
    LostError,
    PoseidonError,
    "A node is gone: `node`, and what was awaited from it."
);
create_exception!(
    poseidon,
    TimeoutError,
    PoseidonError,
    "A wait came to its deadline: `layer`, `clock`, and who or what is missing."
);
create_exception!(
    poseidon,
    AbortedError,
    PoseidonError,
    "Another node stopped the job: `node` and `reason`."
);
create_exception!(poseidon, ProtocolError, PoseidonError, "A node broke the protocol: `node`.");

create_exception!(
    poseidon,
    ModelMismatchError,
    PoseidonError,
    "Workers have wrapped models, or made optimizers, that are not the same."
);

create_exception!(
    poseidon,
    CheckpointError,
    PyRuntimeError,
    "A checkpoint was not written, found, read or accepted; the job goes on."
);

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("PoseidonError", py.get_type::<PoseidonError>())?;
    module.add("ConfigError", py.get_type::<ConfigError>())?;
    module.add("UsageError", py.get_type::<UsageError>())?;
    module.add("ConnectionError", py.get_type::<ConnectionError>())?;
    module.add("LostError", py.get_type::<LostError>())?;
    module.add("TimeoutError", py.get_type::<TimeoutError>())?;
    module.add("AbortedError", py.get_type::<AbortedError>())?;
    module.add("ModelMismatchError", py.get_type::<ModelMismatchError>())?;
    module.add("CheckpointError", py.get_type::<CheckpointError>())?;
    module.add("ProtocolError", py.get_type::<ProtocolError>())
}

/// The exception for `error`, with its facts as attributes.
pub(crate) fn raise(py: Python<'_>, error: Error) -> PyErr {
    let words = error.to_string();
    let exception = match &error {
        Error::Config(_) | Error::Cluster(_) | Error::Optimizer(_) => ConfigError::new_err(words),
        Error::Request { .. }
        | Error::UnknownLayer { .. }
        | Error::Length { .. }
        | Error::Factors { .. }
        | Error::Scheme { .. }
        | Error::Encoding { .. }
        | Error::RuleState { .. }
        | Error::InFlight { .. }
        | Error::NotInFlight { .. }
        | Error::NotInitialised { .. }
        | Error::AlreadyInitialised { .. } => UsageError::new_err(words),
        Error::Address(_)
        | Error::Bind(_)
        | Error::Connect { .. }
        | Error::Rendezvous(_)
        | Error::Open { .. }
        | Error::Descriptors(_)
        | Error::NeverConnected { .. } => ConnectionError::new_err(words),
        Error::Timeout { .. }
        | Error::Stalled { .. }
        | Error::Overdue { .. }
        | Error::Unfinished { .. } => TimeoutError::new_err(words),
        Error::Lost { .. } | Error::Away { .. } => LostError::new_err(words),
        Error::Violation { .. }
        | Error::RollCall { .. }
        | Error::Garbage { .. }
        | Error::Changed { .. }
        | Error::Mismatch { .. }
        | Error::Message { .. } => ProtocolError::new_err(words),
        Error::Aborted { .. } => AbortedError::new_err(words),
        _ => PoseidonError::new_err(words),
    };
    let value = exception.value(py);
    // Facts are a convenience: an exception without them still says everything in words.
    let set = |name: &str, fact: Option<String>| {
        let _ = value.setattr(name, fact);
    };
    let (node, layer, clock) = match &error {
        Error::Timeout { layer, clock, .. } | Error::Stalled { layer, clock, .. } => {
            (None, Some(layer), Some(*clock))
        }
        Error::Violation { node, layer, clock, .. } => (Some(node), Some(layer), Some(*clock)),
        Error::InFlight { layer, clock } | Error::AlreadyInitialised { layer, clock } => {
            (None, Some(layer), Some(*clock))
        }
        Error::Lost { node, .. }
        | Error::Away { node, .. }
        | Error::Aborted { node, .. }
        | Error::Garbage { node, .. }
        | Error::Changed { node, .. }
        | Error::Message { node, .. }
        | Error::Panicked { node } => (Some(node), None, None),
        Error::Length { layer, .. }
        | Error::Factors { layer, .. }
        | Error::Scheme { layer, .. }
        | Error::NotInFlight { layer }
        | Error::NotInitialised { layer, .. } => (None, Some(layer), None),
        _ => (None, None, None),
    };
    set("node", node.cloned());
    set("layer", layer.cloned());
    let _ = value.setattr("clock", clock.map(|clock| clock.0));
    let chunk = match &error {
        Error::Stalled { chunk, .. } | Error::Violation { chunk, .. } => Some(*chunk),
        _ => None,
    };
    let _ = value.setattr("chunk", chunk);
    if let Error::Aborted { reason, .. } = &error {
        set("reason", Some(reason.clone()));
    }
    if let Error::Stalled { missing, .. } = &error {
        let _ = value.setattr("missing", missing.clone());
    }
    exception
}
