//! What a training run was and what came of it: `report.json` for programs, `report.html` for
//! people. And pages about any job, of what its nodes have `recorded`: `job_page`.

pub(crate) mod bars;
pub(crate) mod curves;
pub(crate) mod job_page;
pub(crate) mod page;
pub(crate) mod recorded;
mod rows;
pub(crate) mod svg;
pub(crate) mod timeline;
pub(crate) mod units;

use anyhow::Context;
use serde::{Deserialize, Deserializer, Serialize};
use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// One training run. The names of the fields are keys of `report.json`, a contract with those who
/// read it. Shares and accuracies are between 0 and 1; a number that is not finite is `null` there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) model: String,
    pub(crate) data: String,
    pub(crate) workers: u16,
    /// `colocated`, a number of dedicated servers, or `colocated+N`.
    pub(crate) servers: String,
    pub(crate) threads_per_worker: usize,
    /// Images per step of one worker.
    pub(crate) batch: usize,
    pub(crate) steps: u64,
    #[serde(deserialize_with = "number")]
    pub(crate) epochs: f64,
    #[serde(deserialize_with = "number")]
    pub(crate) seconds: f64,
    /// Of all workers together.
    #[serde(deserialize_with = "number")]
    pub(crate) images_per_second: f64,
    /// Of worker 0: waiting and reading data included, tests not.
    pub(crate) step_seconds: Quantiles,
    #[serde(deserialize_with = "number")]
    pub(crate) final_loss: f64,
    pub(crate) test_accuracy: Option<f64>,
    /// How much of the time that communication took passed while the worker computed.
    #[serde(deserialize_with = "number")]
    pub(crate) overlap_hidden_fraction: f64,
    pub(crate) parameter_digest: String,
    /// After every step, if that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) digests: Vec<String>,
    pub(crate) scheme: String,
    pub(crate) overlap: String,
    /// How far apart workers may be.
    pub(crate) sync: String,
    pub(crate) seed: u64,
    pub(crate) deterministic: bool,
    pub(crate) version: String,
    pub(crate) command: String,
    /// When training began, in UTC.
    #[serde(default)]
    pub(crate) date: String,
    /// The machine of worker 0.
    #[serde(default)]
    pub(crate) host: String,
    /// Steps that were taken before, by the run whose checkpoint this one goes on from.
    #[serde(default)]
    pub(crate) steps_before: u64,
    /// Why it is not the report of a whole training: it is still running, was stopped, or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) partial: Option<String>,
    /// In forward order.
    pub(crate) layers: Vec<LayerReport>,
    pub(crate) nodes: Vec<NodeReport>,
    pub(crate) curve: Vec<CurvePoint>,
    pub(crate) epochs_done: Vec<EpochReport>,
    pub(crate) timeline: Timeline,
    /// The effective configuration, as TOML.
    pub(crate) config: String,
}

/// How long something that happens again and again takes.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Quantiles {
    #[serde(deserialize_with = "number")]
    pub(crate) median: f64,
    #[serde(deserialize_with = "number")]
    pub(crate) p10: f64,
    #[serde(deserialize_with = "number")]
    pub(crate) p90: f64,
}

impl Quantiles {
    /// Of `times`; zero if there are none.
    pub(crate) fn of(times: &[f64]) -> Self {
        let mut times = times.to_vec();
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = times.len().saturating_sub(1) as f64;
            times.get((last * share).round() as usize).copied().unwrap_or(0.0)
        };
        Self { median: at(0.5), p10: at(0.1), p90: at(0.9) }
    }
}

/// How one layer was synchronised, and why so.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LayerReport {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) parameters: usize,
    pub(crate) scheme: String,
    pub(crate) reason: String,
    /// Per node, the mean over all nodes.
    pub(crate) bytes_sent_per_step: u64,
}

/// What one node moved and how it spent its time, over the whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeReport {
    pub(crate) rank: u16,
    /// `worker` or `server`.
    pub(crate) role: String,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
    #[serde(deserialize_with = "number")]
    pub(crate) compute_seconds: f64,
    /// Time in which computing waited for communication.
    #[serde(deserialize_with = "number")]
    pub(crate) stall_seconds: f64,
    /// Where slow workers may be dropped: how much of a worker's work counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) turnout: Option<TurnoutReport>,
}

/// How much of a worker's work counted. The run's steps that are in neither number were taken while the
/// worker was still busy with an earlier one.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct TurnoutReport {
    pub(crate) steps_counted: u64,
    /// Steps whose contribution came too late and was dropped.
    pub(crate) steps_late: u64,
    pub(crate) samples_counted: u64,
}

/// The training loss of one step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct CurvePoint {
    pub(crate) step: u64,
    #[serde(deserialize_with = "number")]
    pub(crate) epoch: f64,
    /// Since training began.
    #[serde(deserialize_with = "number")]
    pub(crate) seconds: f64,
    #[serde(deserialize_with = "number")]
    pub(crate) loss: f64,
}

/// One finished epoch. They are counted from 1.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct EpochReport {
    pub(crate) epoch: u64,
    #[serde(deserialize_with = "number")]
    pub(crate) seconds: f64,
    #[serde(deserialize_with = "number")]
    pub(crate) train_loss: f64,
    #[serde(deserialize_with = "number")]
    pub(crate) train_accuracy: f64,
    pub(crate) test_accuracy: Option<f64>,
    #[serde(deserialize_with = "number")]
    pub(crate) images_per_second: f64,
}

/// One iteration of one worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Timeline {
    pub(crate) step: u64,
    pub(crate) rank: u16,
    #[serde(deserialize_with = "number")]
    pub(crate) seconds: f64,
    pub(crate) spans: Vec<Span>,
}

/// What happened to one layer from `start` to `end`, in seconds since the iteration began.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Span {
    pub(crate) track: Track,
    pub(crate) layer: String,
    pub(crate) what: What,
    #[serde(deserialize_with = "number")]
    pub(crate) start: f64,
    #[serde(deserialize_with = "number")]
    pub(crate) end: f64,
}

/// Who was busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Track {
    Compute,
    Network,
    /// A processor beside the computing, that rebuilds gradients.
    Beside,
}

/// With what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum What {
    Forward,
    Backward,
    /// The gradient is computed from the factors of all workers.
    Rebuild,
    /// Computing cannot go on before this layer is synchronised.
    Wait,
    /// From the moment the layer is sent until its result is there.
    Sync,
}

impl What {
    /// Whether it is computing in a pass.
    pub(crate) fn is_pass(self) -> bool {
        matches!(self, Self::Forward | Self::Backward)
    }
}

impl Report {
    /// Writes `report.json` and `report.html` into `dir`, which is made if need be, and returns the
    /// path of the page. Each file appears whole or not at all, the page last.
    pub(crate) fn write(&self, dir: &Path) -> anyhow::Result<PathBuf> {
        fs::create_dir_all(dir)
            .with_context(|| format!("cannot make the report's folder {}", dir.display()))?;
        // Piece by piece: a training writes one after each epoch, and its curve is long.
        write_by(&dir.join("report.json"), |file| {
            let mut out = BufWriter::new(file);
            serde_json::to_writer_pretty(&mut out, self)?;
            out.write_all(b"\n")?;
            out.flush()
        })?;
        write_whole(&dir.join("report.html"), page::page(self).as_bytes())
    }

    /// What a node sends per step, on average.
    pub(crate) fn bytes_per_step(&self) -> u64 {
        self.layers.iter().map(|layer| layer.bytes_sent_per_step).fold(0, u64::saturating_add)
    }

    /// What `layer` would have made a node send per step through the parameter server, if it went
    /// as sufficient factors instead. Known where every worker is also a server: a node then sends
    /// its gradients of the chunks that live elsewhere, and its own chunks to all the others.
    pub(crate) fn bytes_as_ps(&self, layer: &LayerReport) -> Option<u64> {
        let by_factors = layer.scheme.eq_ignore_ascii_case("sfb");
        if !by_factors || self.servers != "colocated" || self.workers < 2 {
            return None;
        }
        let nodes = u128::from(self.workers);
        let both_ways = 2 * size_of::<f32>() as u128;
        u64::try_from(layer.parameters as u128 * both_ways * (nodes - 1) / nodes).ok()
    }
}

/// Moves the reports of an earlier run out of the way, so that none of them looks like this run's.
pub(crate) fn set_aside(dir: &Path) -> anyhow::Result<()> {
    for name in ["report.json", "report.html"] {
        let (old, aside) = (dir.join(name), dir.join(format!("previous-{name}")));
        match fs::rename(&old, aside) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => {
                return Err(why).with_context(|| format!("cannot move {}", old.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Puts `content` beside its destination and moves it there. What is no file, such as a device, a
/// pipe or a link to a file, stays what it is: `content` is written into it.
pub(crate) fn write_whole(path: &Path, content: &[u8]) -> anyhow::Result<PathBuf> {
    write_by(path, |file| file.write_all(content))
}

/// As [`write_whole`], with content that `write` writes.
fn write_by(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> anyhow::Result<PathBuf> {
    let written = match fs::symlink_metadata(path) {
        Ok(there) if !there.is_file() => File::create(path).and_then(|mut file| write(&mut file)),
        _ => replace(path, write),
    };
    written.with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path.into())
}

fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut file = tempfile::Builder::new()
        .prefix(".poseidon.")
        // As any other file, the umask decides: reports are made to be passed around.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder.unwrap_or(Path::new(".")))?;
    write(file.as_file_mut())?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

/// The other half of writing numbers that are not finite as `null`.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
mod tests;
