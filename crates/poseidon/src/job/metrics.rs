//! Numbers as Prometheus reads them.

use crate::job::live::{LiveJob, LiveNode, LiveNodeState};
use poseidon_core::printable::printable;
use std::fmt::{Display, Write};

/// What a server says that metrics are.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The names and values of a sample's labels.
pub(crate) type Labels<'a> = &'a [(&'a str, &'a dyn Display)];

/// Metrics, as text. A family comes first, then its samples.
pub(crate) struct Page {
    text: String,
    /// The label that every sample has, or nothing.
    common: String,
}

impl Page {
    /// A page whose samples all have the label `name`.
    pub(crate) fn labelled(name: &str, value: &str) -> Self {
        Self { text: String::new(), common: format!("{name}=\"{}\"", Escaped(value)) }
    }

    pub(crate) fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    pub(crate) fn sample(&mut self, name: &str, labels: Labels<'_>, value: f64) {
        let text = &mut self.text;
        text.push_str(name);
        let mut before = '{';
        if !self.common.is_empty() {
            let _ = write!(text, "{before}{}", self.common);
            before = ',';
        }
        for (label, of) in labels {
            let _ = write!(text, "{before}{label}=\"{}\"", Escaped(&of.to_string()));
            before = ',';
        }
        let end = if before == ',' { "}" } else { "" };
        let _ = writeln!(text, "{end} {value}");
    }

    pub(crate) fn text(self) -> String {
        self.text
    }
}

/// All metrics of a job.
pub(super) fn of_job(job: &LiveJob) -> String {
    let mut page = Page { text: String::new(), common: String::new() };
    let of_all: [(&str, &str, &str, f64); 7] = [
        ("poseidon_job_steps_total", "counter", "Steps of the foremost worker.", job.steps as f64),
        ("poseidon_job_steps_per_second", "gauge", "Steps in a second.", job.steps_per_second),
        (
            "poseidon_job_operations_per_second",
            "gauge",
            "Collective operations in a second.",
            job.operations_per_second,
        ),
        (
            "poseidon_job_waiting_ratio",
            "gauge",
            "Share of time that workers wait for layers.",
            job.waiting.unwrap_or(0.0),
        ),
        (
            "poseidon_job_missing_nodes",
            "gauge",
            "Nodes that have not joined.",
            job.missing.len() as f64,
        ),
        ("poseidon_job_plan_epoch", "gauge", "The number of the plan.", f64::from(job.plan.epoch)),
        (
            "poseidon_job_straggler",
            "gauge",
            "The worker that others wait for, or -1.",
            job.slowest.as_ref().map_or(-1.0, |slowest| f64::from(slowest.node.0)),
        ),
    ];
    for (name, kind, help, value) in of_all {
        page.family(name, kind, help);
        page.sample(name, &[], value);
    }
    for (name, kind, help, of) in OF_NODES {
        page.family(name, kind, help);
        for node in &job.nodes {
            page.sample(name, &[("node", &node.name), ("host", &node.host)], of(node));
        }
    }
    let used = "poseidon_node_port_use_ratio";
    page.family(used, "gauge", "Share of what a node's port carries that is used.");
    for node in &job.nodes {
        for (way, share) in ["sent", "received"].iter().zip(node.port_use.into_iter().flatten()) {
            page.sample(used, &[("node", &node.name), ("way", way)], share);
        }
    }
    let waits = "poseidon_job_layer_waiting_ratio";
    page.family(
        waits,
        "gauge",
        "Share of time that workers wait for a layer: the most awaited ones.",
    );
    for layer in &job.layers {
        page.sample(waits, &[("layer", &layer.layer)], layer.waiting);
    }
    page.text
}

/// A metric of every node: its name, its kind, what it means, and how it is found.
type OfNode = (&'static str, &'static str, &'static str, fn(&LiveNode) -> f64);

const OF_NODES: [OfNode; 9] = [
    ("poseidon_node_up", "gauge", "Whether a node is in the job and has been heard.", |node| {
        f64::from(u8::from(node.state == LiveNodeState::Running))
    }),
    ("poseidon_node_steps_total", "counter", "Steps that a node has received.", |n| n.steps as f64),
    ("poseidon_node_waiting_ratio", "gauge", "Share of time that a node waits for layers.", |n| {
        n.waiting.unwrap_or(0.0)
    }),
    ("poseidon_node_sent_bytes_per_second", "gauge", "Bytes to other hosts in a second.", |n| {
        n.sent
    }),
    (
        "poseidon_node_received_bytes_per_second",
        "gauge",
        "Bytes from other hosts in a second.",
        |node| node.received,
    ),
    (
        "poseidon_node_sent_inside_bytes_per_second",
        "gauge",
        "Bytes within the host in a second.",
        |node| node.sent_inside,
    ),
    ("poseidon_node_queued_messages", "gauge", "Messages that links have not taken.", |node| {
        node.queued as f64
    }),
    (
        "poseidon_node_retransmitted_segments_total",
        "counter",
        "Segments that TCP sent again.",
        |n| n.resent as f64,
    ),
    ("poseidon_node_unheard_seconds", "gauge", "How long nothing was heard of a node.", |node| {
        node.unheard
    }),
];

/// Text as it may stand in a label.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for c in printable(self.0).chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}
