//! What a report says of the run as a whole: its plan, and how to do it again.

use crate::report::LayerReport;
use poseidon::{LayerId, NodeId};
use poseidon_nn::Net;
use poseidon_nn::train::Worker;

/// The plan, layer by layer. What it predicts for a step is the mean over all workers.
pub(super) fn plan(worker: &Worker, net: &Net) -> Vec<LayerReport> {
    let layers = net.layers().iter().filter(|layer| layer.parameters > 0);
    let rows = layers.enumerate().map(|(position, layer)| {
        let id = LayerId(position as u32);
        let planned = worker.session().and_then(|session| {
            let choice = session.plan().choice(id)?.clone();
            let cluster = &session.book().cluster;
            let bytes = |node: NodeId| session.plan().bytes_sent(node, id) as u64;
            let mean = cluster.worker_ids().map(bytes).sum::<u64>() / cluster.workers() as u64;
            Some((choice.scheme.to_string(), choice.reason, mean))
        });
        let (scheme, reason, bytes_sent_per_step) =
            planned.unwrap_or_else(|| ("none".into(), "trained without Poseidon".into(), 0));
        LayerReport {
            name: layer.name.clone(),
            kind: layer.kind.clone(),
            parameters: layer.parameters,
            scheme,
            reason,
            bytes_sent_per_step,
        }
    });
    rows.collect()
}

/// How to do this again.
pub(super) fn command() -> String {
    let word = |word: std::ffi::OsString| {
        let word = word.to_string_lossy().into_owned();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_=.,:/+".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            return word;
        }
        format!("'{}'", word.replace('\'', "'\\''"))
    };
    let words = std::env::args_os().skip(1).map(word);
    std::iter::once("poseidon".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}
