//! What `poseidon train` reports, as far as it is of interest here.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// One training run. Serialised, it is what the record keeps: no folders of this machine, and of the
/// long lists only those a part asks for.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Report {
    pub(super) model: String,
    pub(super) workers: u16,
    pub(super) threads_per_worker: u16,
    pub(super) batch: u64,
    pub(super) steps: u64,
    pub(super) seconds: f64,
    pub(super) images_per_second: f64,
    pub(super) step_seconds: Quantiles,
    pub(super) final_loss: f64,
    pub(super) test_accuracy: Option<f64>,
    pub(super) overlap_hidden_fraction: Option<f64>,
    pub(super) parameter_digest: String,
    pub(super) scheme: String,
    pub(super) overlap: String,
    pub(super) seed: u64,
    pub(super) deterministic: bool,
    pub(super) layers: Vec<Layer>,
    pub(super) nodes: Vec<Node>,
    /// Of all replicas, after every step, if they were compared; the run fails where they differ.
    #[serde(default, skip_serializing)]
    pub(super) digests: Vec<String>,
    #[serde(skip_serializing)]
    pub(super) curve: Vec<Point>,
    #[serde(rename(deserialize = "epochs_done", serialize = "epochs"))]
    pub(super) epochs: Vec<Epoch>,
}

/// Seconds of a step of worker 0.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Quantiles {
    pub(super) median: f64,
    pub(super) p10: f64,
    pub(super) p90: f64,
}

/// A layer and how it was synchronised.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Layer {
    pub(super) name: String,
    pub(super) kind: String,
    pub(super) parameters: u64,
    pub(super) scheme: String,
    pub(super) bytes_sent_per_step: u64,
}

/// What a node moved over the whole run, headers included.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Node {
    pub(super) rank: u16,
    pub(super) bytes_sent: u64,
    pub(super) bytes_received: u64,
    pub(super) compute_seconds: f64,
    pub(super) stall_seconds: f64,
}

/// The loss of one step.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Point {
    pub(super) loss: f64,
}

/// One epoch.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Epoch {
    pub(super) epoch: u64,
    pub(super) seconds: f64,
    pub(super) train_loss: f64,
    pub(super) train_accuracy: f64,
    pub(super) test_accuracy: Option<f64>,
}

impl Report {
    /// Reads what `--json` printed.
    pub(super) fn parse(printed: &str) -> Result<Self> {
        serde_json::from_str(printed).context("the report of `poseidon train` is not as expected")
    }

    /// The loss of every step.
    pub(super) fn losses(&self) -> Vec<f64> {
        self.curve.iter().map(|point| point.loss).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::json;

    /// A report with one FC layer of 64 x 1024 beside a convolution.
    pub(crate) fn report() -> Report {
        let layer = |name: &str, kind: &str, parameters: u64, scheme: &str| {
            json!({ "name": name, "kind": kind, "parameters": parameters, "scheme": scheme,
                "reason": "told", "bytes_sent_per_step": 10 })
        };
        let node = |rank: u16| {
            json!({ "rank": rank, "role": "worker", "bytes_sent": 1000, "bytes_received": 1000,
                "compute_seconds": 1.0, "stall_seconds": 0.5 })
        };
        let printed = json!({
            "model": "tiny", "data": "cifar10:/somewhere", "workers": 2, "threads_per_worker": 1,
            "batch": 8, "steps": 2, "seconds": 1.5, "images_per_second": 20.0,
            "step_seconds": { "median": 0.5, "p10": 0.4, "p90": 0.6 }, "final_loss": 1.0,
            "test_accuracy": null, "overlap_hidden_fraction": null, "parameter_digest": "ab",
            "scheme": "auto", "overlap": "full", "seed": 1, "deterministic": false,
            "command": "poseidon train --data cifar10:/somewhere",
            "layers": [layer("conv1", "conv 5x5x32", 2432, "ps"), layer("ip1", "fc 64", 65600, "sfb")],
            "nodes": [node(0), node(1)],
            "curve": [{ "step": 0, "loss": 2.0 }, { "step": 1, "loss": 1.0 }],
            "epochs_done": [{ "epoch": 1, "seconds": 1.5, "train_loss": 1.5, "train_accuracy": 0.5,
                "test_accuracy": 0.25, "images_per_second": 20.0 }],
        });
        Report::parse(&printed.to_string()).unwrap()
    }

    #[test]
    fn what_is_kept_has_no_folders_and_no_long_lists() {
        let report = report();
        assert_eq!(report.losses(), [2.0, 1.0]);
        assert_eq!(report.epochs[0].test_accuracy, Some(0.25));
        let kept = serde_json::to_string(&report).unwrap();
        assert!(!kept.contains("/somewhere") && !kept.contains("curve"), "{kept}");
        assert!(kept.contains(r#""epochs":[{"epoch":1"#), "{kept}");
    }

    #[test]
    fn what_is_no_report_is_refused() {
        assert!(Report::parse(r#"{"model": "tiny"}"#).is_err());
    }
}
