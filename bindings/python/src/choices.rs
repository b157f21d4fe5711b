//! What Python asks before there is a job.

use crate::value_error;
use poseidon::{Cluster, Consistency, Encodings, Layer, LayerKind, Policy, Servers};
use poseidon_core::scheme;
use pyo3::prelude::*;

/// The scheme for a fully connected layer among colocated workers, and why.
#[pyfunction]
#[pyo3(signature = (m, n, batch, workers, policy="auto", encoding="f32"))]
pub(crate) fn choose(
    m: usize,
    n: usize,
    batch: usize,
    workers: u16,
    policy: &str,
    encoding: &str,
) -> PyResult<(String, String)> {
    let cluster = Cluster::new(workers, Servers::Colocated, 1).map_err(value_error)?;
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
