//! What a program can show of its process to people.

use super::Session;
use super::errors::raise;
use poseidon::Pass;
use pyo3::prelude::*;
use std::path::PathBuf;

/// From now on the session's process notes what it does.
#[pyfunction]
fn record(session: &Session) -> PyResult<()> {
    session.session()?.record();
    Ok(())
}

/// The program computes from now on, in a forward or in a backward pass.
#[pyfunction]
fn begin_pass(session: &Session, is_backward: bool) -> PyResult<()> {
    let pass = if is_backward { Pass::Backward } else { Pass::Forward };
    session.session()?.begin_pass(pass);
    Ok(())
}

/// The pass is over.
#[pyfunction]
fn end_pass(session: &Session) -> PyResult<()> {
    session.session()?.end_pass();
    Ok(())
}

/// Writes what was noted into a folder. Returns the path of the file.
#[pyfunction]
fn write_trace(py: Python<'_>, session: &Session, folder: PathBuf) -> PyResult<PathBuf> {
    let session = session.session()?;
    py.detach(|| session.write_trace(&folder)).map_err(|error| raise(py, error))
}

/// Tells a value to whoever looks at the process's scalars.
#[pyfunction]
fn scalar(session: &Session, name: &str, value: f64) -> PyResult<()> {
    session.session()?.scalar(name, value);
    Ok(())
}

/// Where metrics of the session's process are served, as `address:port`, if they are.
#[pyfunction]
fn metrics_address(session: &Session) -> PyResult<Option<String>> {
    Ok(session.session()?.metrics_address().map(|address| address.to_string()))
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(record, module)?)?;
    module.add_function(wrap_pyfunction!(begin_pass, module)?)?;
    module.add_function(wrap_pyfunction!(end_pass, module)?)?;
    module.add_function(wrap_pyfunction!(scalar, module)?)?;
    module.add_function(wrap_pyfunction!(write_trace, module)?)?;
    module.add_function(wrap_pyfunction!(metrics_address, module)?)
}
