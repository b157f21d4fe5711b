//! Checkpoints for Python: parts are written, committed, opened and read.
//!
//! The format and the storages are those of `poseidon-checkpoint`. What a framework's state consists
//! of is in the package's Python files.

use crate::Memory;
use crate::errors::CheckpointError;
use poseidon_checkpoint::{
    Dtype, Error, Keep, LayerFacts, Manifest, PartFacts, Piece, Typed, What, has_manifest, open,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use serde::de::DeserializeOwned;
use std::time::SystemTime;

/// A piece: its layer, what it is of it, its first element, the type of its numbers, and their bytes.
type PieceSpec = (String, String, usize, String, Memory);

/// The type of numbers, and ranges of elements: the first of each, and the first behind it.
type Pieces = (Option<String>, Vec<(usize, usize)>);

/// A checkpoint that was found whole. Its numbers are checked when they are read.
#[pyclass(frozen, module = "poseidon._native")]
struct Checkpoint {
    inner: poseidon_checkpoint::Checkpoint,
    /// Newer ones that are damaged, in words.
    #[pyo3(get)]
    passed_over: Vec<String>,
}

#[pymethods]
impl Checkpoint {
    /// Opens the checkpoint of `step` in `place`, or the newest one.
    #[new]
    #[pyo3(signature = (place, step=None))]
    fn new(py: Python<'_>, place: &str, step: Option<u64>) -> PyResult<Self> {
        let found = py.detach(|| {
            let storage = open(place)?;
            match step {
                Some(step) => {
                    let checkpoint = poseidon_checkpoint::Checkpoint::open(&storage, step)?;
                    Ok((Some(checkpoint), Vec::new()))
                }
                None => poseidon_checkpoint::Checkpoint::latest(&storage)
                    .map(|latest| (latest.checkpoint, latest.damaged)),
            }
        });
        let (checkpoint, damaged) = found.map_err(refusal)?;
        let words = |(step, error)| format!("step {step} is passed over: {error}");
        let passed_over: Vec<String> = damaged.into_iter().map(words).collect();
        let Some(inner) = checkpoint else {
            let words = format!("there is no complete checkpoint in {place}");
            let all = std::iter::once(words).chain(passed_over).collect::<Vec<_>>();
            return Err(CheckpointError::new_err(all.join("; ")));
        };
        Ok(Self { inner, passed_over })
    }

    #[getter]
    fn step(&self) -> u64 {
        self.inner.manifest().step
    }

    /// The manifest's layers, as JSON.
    fn layers(&self) -> PyResult<String> {
        to_json(&self.inner.manifest().layers)
    }

    /// What the program has noted, as JSON.
    fn program(&self) -> String {
        self.inner.manifest().program.to_string()
    }

    /// Something of a layer: the type of its numbers, unless there are none, and the ranges of elements
    /// in which it was written.
    fn pieces(&self, layer: &str, what: &str) -> PyResult<Pieces> {
        let what = parse(what)?;
        let dtype = self.inner.dtype(layer, &what).map(|dtype| dtype.to_string());
        let ranges = self.inner.pieces(layer, &what).into_iter();
        Ok((dtype, ranges.map(|range| (range.start, range.end)).collect()))
    }

    /// The bytes of elements `first` to `last` of something of a layer.
    fn read<'py>(
        &self,
        py: Python<'py>,
        layer: &str,
        what: &str,
        first: usize,
        last: usize,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let what = parse(what)?;
        let read = py.detach(|| self.inner.read_bytes(layer, &what, first..last));
        Ok(PyByteArray::new(py, &read.map_err(refusal)?.1))
    }
}

/// Writes one worker's part. Returns what the manifest says of it, as JSON.
#[pyfunction]
fn write_part(
    py: Python<'_>,
    place: &str,
    step: u64,
    part: u32,
    pieces: Vec<PieceSpec>,
) -> PyResult<String> {
    let mut typed = Vec::new();
    for (layer, what, start, dtype, memory) in &pieces {
        let (what, dtype) = (parse(what)?, from_json::<Dtype>(&format!("\"{dtype}\""))?);
        let values = Typed { dtype, bytes: memory.slice()? };
        typed.push(Piece { layer: layer.clone(), what, start: *start, values });
    }
    let facts = py.detach(|| {
        let storage = open(place)?;
        poseidon_checkpoint::write_part(&*storage, step, part, &typed)
    });
    to_json(&facts.map_err(refusal)?)
}

/// Writes the manifest; the checkpoint exists when this returns. Then deletes old checkpoints, of which
/// `keep` stay. Returns a warning if that fails.
#[pyfunction]
#[pyo3(signature = (place, step, workers, layers, parts, program, keep))]
#[expect(clippy::too_many_arguments, reason = "Python names them")]
fn commit(
    py: Python<'_>,
    place: &str,
    step: u64,
    workers: usize,
    layers: &str,
    parts: Vec<String>,
    program: &str,
    keep: Option<usize>,
) -> PyResult<Option<String>> {
    let parts = parts.iter().map(|part| from_json::<PartFacts>(part)).collect::<PyResult<_>>()?;
    let manifest = Manifest {
        step,
        created: SystemTime::now(),
        poseidon: env!("CARGO_PKG_VERSION").into(),
        workers,
        layers: from_json::<Vec<LayerFacts>>(layers)?,
        parts,
        program: from_json(program)?,
    };
    let pruned = py.detach(|| {
        let storage = open(place)?;
        poseidon_checkpoint::commit(&*storage, &manifest)?;
        let keep = Keep { count: keep, age: None };
        Ok(poseidon_checkpoint::prune(&storage, &keep, SystemTime::now()))
    });
    let pruned = pruned.map_err(refusal)?;
    Ok(pruned.err().map(|error| format!("old checkpoints were not deleted: {error}")))
}

/// Deletes what is left of a checkpoint that was given up. A complete one stays.
#[pyfunction]
fn discard(py: Python<'_>, place: &str, step: u64) -> PyResult<()> {
    let discarded = py.detach(|| {
        let storage = open(place)?;
        if has_manifest(&*storage, step)? {
            return Ok(());
        }
        poseidon_checkpoint::discard(&*storage, step)
    });
    discarded.map_err(refusal)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Checkpoint>()?;
    module.add_function(wrap_pyfunction!(write_part, module)?)?;
    module.add_function(wrap_pyfunction!(commit, module)?)?;
    module.add_function(wrap_pyfunction!(discard, module)?)
}

fn refusal(error: Error) -> PyErr {
    CheckpointError::new_err(error.to_string())
}

fn parse(what: &str) -> PyResult<What> {
    what.parse().map_err(crate::value_error)
}

fn from_json<T: DeserializeOwned>(text: &str) -> PyResult<T> {
    serde_json::from_str(text)
        .map_err(|error| PyValueError::new_err(format!("{error} in JSON '{text}'")))
}

fn to_json(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(crate::value_error)
}
