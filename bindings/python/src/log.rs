//! What Poseidon has to say while a program runs: lines on standard error.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::io;
use tracing_subscriber::EnvFilter;

/// Shows warnings, such as for whom a job waits. `POSEIDON_LOG` asks for more, or for less.
pub(crate) fn start() -> PyResult<()> {
    let filter = std::env::var("POSEIDON_LOG").unwrap_or_else(|_| "warn".to_owned());
    let filter = EnvFilter::try_new(&filter).map_err(|error| {
        PyValueError::new_err(format!("POSEIDON_LOG is not a log filter: '{filter}' ({error})"))
    })?;
    let lines = tracing_subscriber::fmt()
        .compact()
        .without_time()
        .with_target(false)
        .with_ansi(false)
        // They would be printed with a panic if standard error is what does not work.
        .log_internal_errors(false)
        .with_writer(io::stderr)
        .with_env_filter(filter);
    // The module may be loaded twice in one process. Then its lines have their place already.
    let _ = lines.try_init();
    Ok(())
}
