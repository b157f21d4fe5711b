//! Whether workers have the same parameters.

use super::Session;
use super::errors::raise;
use poseidon::Clock;
use pyo3::prelude::*;

/// How many steps are between two comparisons. Nothing if nothing is compared.
#[pyfunction]
fn compares_every(session: &Session) -> PyResult<Option<u64>> {
    Ok(session.session()?.compares_every())
}

/// Compares digests of what this worker has after `clock` steps with those of all others, beside the
/// program. All workers compare the same things at the same clocks.
#[pyfunction]
fn watch_replicas(
    py: Python<'_>,
    session: &Session,
    clock: u64,
    pieces: Vec<(String, u64)>,
) -> PyResult<()> {
    session.session()?.watch_replicas(Clock(clock), pieces).map_err(|error| raise(py, error))
}

/// The first difference that was found, in words. It is told once.
#[pyfunction]
fn take_difference(session: &Session) -> PyResult<Option<String>> {
    Ok(session.session()?.take_difference().map(|difference| difference.to_string()))
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(compares_every, module)?)?;
    module.add_function(wrap_pyfunction!(watch_replicas, module)?)?;
    module.add_function(wrap_pyfunction!(take_difference, module)?)
}
