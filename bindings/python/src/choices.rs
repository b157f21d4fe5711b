//! What Python asks before there is a job.

use crate::{Session, raise, value_error};
use poseidon::{Cluster, Consistency, Encodings, Layer, LayerKind, Policy, Servers};
use poseidon_core::scheme;
use pyo3::prelude::*;

/// How many workers, or those of a job.
#[derive(FromPyObject)]
pub(crate) enum Workers<'py> {
    /// So many, with a host each.
    Number(u16),
    /// Those of a job.
    Of(PyRef<'py, Session>),
}

/// The scheme for a fully connected layer, and why: among the workers of a job, whose hosts and ports
/// count, or among so many workers with a host each.
#[pyfunction]
#[pyo3(signature = (m, n, batch, workers, policy="auto", encoding="f32"))]
pub(crate) fn choose(
    py: Python<'_>,
    m: usize,
    n: usize,
    batch: usize,
    workers: Workers<'_>,
    policy: &str,
    encoding: &str,
) -> PyResult<(String, String)> {
    let cluster = match workers {
        Workers::Number(workers) => {
            Cluster::new(workers, Servers::Colocated, 1).map_err(value_error)?
        }
        Workers::Of(session) => {
            session.session()?.sibling_cluster().map_err(|error| raise(py, error))?
        }
    };
    let encodings = Encodings::both(encoding.parse().map_err(value_error)?);
    let layer = Layer { kind: LayerKind::Fc { m, n }, ..Layer::new("", m * n) };
    let layer = layer.encoded(encodings);
    let policy: Policy = policy.parse().map_err(value_error)?;
    let choice = scheme::compare(&layer, &cluster, Some(batch), policy);
    Ok((choice.scheme.to_string(), choice.reason))
}

/// Whether `sync`, such as `ssp:2`, lets workers be at different clocks.
#[pyfunction]
pub(crate) fn lets_workers_be_apart(sync: &str) -> PyResult<bool> {
    let consistency: Consistency = sync.parse().map_err(value_error)?;
    Ok(!consistency.is_bsp())
}
