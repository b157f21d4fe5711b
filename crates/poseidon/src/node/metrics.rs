//! What a node has done so far, as Prometheus reads it.

use super::observed::{Shared, Watched};
use crate::collectives::operation_name;
use crate::engine::traffic::Traffic;
use crate::job::metrics::{Labels, Page};
use crate::trace::{KindTotals, LaneTotals};
use std::sync::atomic::Ordering;

/// All metrics of a node.
pub(super) fn text(node: &Shared) -> String {
    let (sessions, ended) = node.sessions();
    let mut page = Page::labelled("node", &node.name);
    page.family("poseidon_info", "gauge", "Always 1; the labels say what runs here.");
    page.sample("poseidon_info", &[("version", &env!("CARGO_PKG_VERSION"))], 1.0);

    page.family("poseidon_steps_total", "counter", "Steps whose results the program has received.");
    for session in &sessions {
        let labels: Labels<'_> = &[("session", &session.id)];
        page.sample("poseidon_steps_total", labels, session.trace.steps() as f64);
    }
    let families: [Family<OfTraffic>; 4] = [
        ("poseidon_sent_bytes_total", "Bytes handed to links.", |t| t.bytes_sent),
        ("poseidon_received_bytes_total", "Bytes taken from links.", |t| t.bytes_received),
        ("poseidon_sent_frames_total", "Frames handed to links.", |t| t.frames_sent),
        ("poseidon_received_frames_total", "Frames taken from links.", |t| t.frames_received),
    ];
    let traffic: Vec<_> = sessions.iter().map(|s| (s.id, s.counters.traffic())).collect();
    for (name, help, of) in families {
        page.family(name, "counter", help);
        for (id, traffic) in &traffic {
            page.sample(name, &[("session", id)], of(traffic) as f64);
        }
        page.sample(name, &[("session", &"ended")], of(&ended) as f64);
    }
    let by_layer: [Family<OfLayer>; 2] = [
        ("poseidon_layer_sent_bytes_total", "Bytes sent about a layer.", |session, layer| {
            session.counters.sent(layer) as f64
        }),
        (
            "poseidon_layer_wait_seconds_total",
            "Time the program waited for a layer.",
            |s, layer| s.trace.waited_nanos(layer) as f64 / 1e9,
        ),
    ];
    for (name, help, of) in by_layer {
        page.family(name, "counter", help);
        for session in &sessions {
            for (index, layer) in session.book.job.layers.iter().enumerate() {
                let labels: Labels<'_> = &[("session", &session.id), ("layer", &layer.name)];
                page.sample(name, labels, of(session, index));
            }
        }
    }
    let by_kind: [Family<OfKind>; 2] = [
        ("poseidon_operations_total", "Collective operations that are done.", |kind| {
            kind.count.load(Ordering::Relaxed) as f64
        }),
        ("poseidon_operation_seconds_total", "How long they took, added up.", |kind| {
            kind.nanos.load(Ordering::Relaxed) as f64 / 1e9
        }),
    ];
    for (name, help, of) in by_kind {
        page.family(name, "counter", help);
        for (number, kind) in node.recorder.kinds() {
            page.sample(name, &[("operation", &operation_name(number))], of(kind));
        }
    }
    let lanes = node.recorder.totals();
    let by_lane: [(&str, Family<OfLane>); 4] = [
        (
            "counter",
            ("poseidon_lane_busy_seconds_total", "Time a lane was at work.", |lane| {
                lane.busy() as f64 / 1e9
            }),
        ),
        (
            "counter",
            ("poseidon_lane_bytes_total", "Bytes that a lane moved, both ways.", |lane| {
                lane.bytes() as f64
            }),
        ),
        (
            "gauge",
            ("poseidon_lane_queued_messages", "Messages that links have not taken.", |lane| {
                lane.queued.load(Ordering::Relaxed) as f64
            }),
        ),
        (
            "counter",
            (
                "poseidon_lane_retransmitted_segments_total",
                "Segments that TCP sent again.",
                |lane| lane.retransmitted.load(Ordering::Relaxed) as f64,
            ),
        ),
    ];
    for (kind, (name, help, of)) in by_lane {
        page.family(name, kind, help);
        for (index, lane) in lanes.iter().enumerate() {
            page.sample(name, &[("lane", &index)], of(lane));
        }
    }
    page.text()
}

/// A metric: its name, what it means, and how it is found.
type Family<F> = (&'static str, &'static str, F);

type OfTraffic = fn(&Traffic) -> u64;
type OfLayer = fn(&Watched, usize) -> f64;
type OfKind = fn(&KindTotals) -> f64;
type OfLane = fn(&LaneTotals) -> f64;
