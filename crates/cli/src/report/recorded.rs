//! What a page about a job needs of one node's trace.

use super::{Span, Track, What};
use anyhow::Context;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// One node, as its trace tells.
pub(crate) struct NodeTrace {
    pub(crate) node: u16,
    pub(crate) summary: Summary,
    /// By session and step, if the node has noted that step: what happened to its layers, and when the
    /// first of them was sent.
    pub(crate) steps: BTreeMap<(u64, u64), Step>,
}

/// One step of one session. Times are microseconds since 1970.
#[derive(Default)]
pub(crate) struct Step {
    pub(crate) begin: Option<u64>,
    /// Starts and ends are microseconds since 1970. What is of no single layer has no name.
    events: Vec<(Track, String, What, u64, u64)>,
}

/// What a node says of itself.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Summary {
    pub(crate) version: String,
    pub(crate) node: u16,
    pub(crate) name: String,
    pub(crate) role: String,
    pub(crate) host: String,
    pub(crate) workers: u16,
    pub(crate) seconds: f64,
    pub(crate) failure: Option<String>,
    pub(crate) sessions: Vec<SessionSummary>,
    /// Bytes that links have taken, and given.
    #[serde(default)]
    pub(crate) link_bytes: [u64; 2],
    #[serde(default)]
    pub(crate) operations: Vec<OperationSummary>,
}

/// Collective operations of one kind.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct OperationSummary {
    pub(crate) name: String,
    pub(crate) count: u64,
    /// From the beginning to the end, added up.
    pub(crate) seconds: f64,
}

/// A session of a node.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct SessionSummary {
    pub(crate) session: u64,
    pub(crate) steps: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
    /// Of forward and backward passes, if the program says when it computes them.
    #[serde(default)]
    pub(crate) compute_seconds: Option<f64>,
    pub(crate) layers: Vec<LayerSummary>,
}

/// A layer of a session.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LayerSummary {
    pub(crate) name: String,
    pub(crate) parameters: usize,
    pub(crate) scheme: Option<String>,
    pub(crate) reason: Option<String>,
    pub(crate) bytes_sent: u64,
    pub(crate) wait_seconds: f64,
}

/// An event, as far as it matters here.
#[derive(Deserialize)]
struct Event {
    ph: String,
    #[serde(default)]
    cat: String,
    tid: u64,
    #[serde(default)]
    ts: u64,
    #[serde(default)]
    dur: u64,
    #[serde(default)]
    id: String,
    #[serde(default)]
    args: Args,
    #[serde(default)]
    name: String,
}

#[derive(Default, Deserialize)]
struct Args {
    #[serde(default)]
    name: String,
    #[serde(default)]
    layer: String,
    #[serde(default)]
    step: u64,
    #[serde(default)]
    session: u64,
}

impl NodeTrace {
    pub(crate) fn read(file: &Value) -> anyhow::Result<Self> {
        let summary = file.pointer("/otherData/poseidon").context("it says nothing of its node")?;
        let summary = Summary::deserialize(summary)?;
        let events = Vec::<Event>::deserialize(&file["traceEvents"])?;
        let is_program = |event: &&Event| {
            event.ph == "M" && event.name == "thread_name" && event.args.name.starts_with("program")
        };
        let programs: BTreeSet<u64> = events.iter().filter(is_program).map(|e| e.tid).collect();
        let mut steps: BTreeMap<(u64, u64), Step> = BTreeMap::new();
        let mut under_way: BTreeMap<&str, u64> = BTreeMap::new();
        for event in &events {
            let Args { layer, step, session, .. } = &event.args;
            // Initial values are step 0.
            let of_step = |steps: &'_ mut BTreeMap<(u64, u64), Step>, what, begin, end| {
                let track = match what {
                    What::Sync => Track::Network,
                    What::Rebuild if !programs.contains(&event.tid) => Track::Beside,
                    _ => Track::Compute,
                };
                let of = steps.entry((*session, *step)).or_default();
                of.events.push((track, layer.clone(), what, begin, end));
            };
            let end = event.ts.saturating_add(event.dur);
            match (event.ph.as_str(), event.cat.as_str()) {
                ("X", "wait") => of_step(&mut steps, What::Wait, event.ts, end),
                ("X", "rebuild") => of_step(&mut steps, What::Rebuild, event.ts, end),
                ("X", "forward") => of_step(&mut steps, What::Forward, event.ts, end),
                ("X", "backward") => of_step(&mut steps, What::Backward, event.ts, end),
                ("X", "send") => {
                    let of = steps.entry((*session, *step)).or_default();
                    of.begin = Some(of.begin.map_or(event.ts, |begin| begin.min(event.ts)));
                }
                ("b", "layer") => drop(under_way.insert(&event.id, event.ts)),
                ("e", "layer") => {
                    if let Some(begin) = under_way.remove(event.id.as_str()) {
                        of_step(&mut steps, What::Sync, begin, event.ts);
                    }
                }
                _ => {}
            }
        }
        steps.retain(|_, step| step.begin.is_some());
        Ok(Self { node: summary.node, summary, steps })
    }
}

impl Step {
    /// What happened, in seconds since the step's first pass began, or else since its first layer was sent.
    pub(crate) fn spans(&self) -> Vec<Span> {
        let passes = self.events.iter().filter(|(_, _, what, ..)| what.is_pass());
        let zero = passes.map(|(.., begin, _)| *begin).chain(self.begin).min().unwrap_or(0);
        let mut sorted: Vec<_> = self.events.iter().collect();
        sorted.sort_by_key(|(.., begin, _)| *begin);
        let seconds = |time: u64| (time as i64 - zero as i64) as f64 / 1e6;
        let span = |(track, layer, what, begin, end): &(Track, String, What, u64, u64)| Span {
            track: *track,
            layer: layer.clone(),
            what: *what,
            start: seconds(*begin),
            end: seconds(*end),
        };
        sorted.into_iter().map(span).collect()
    }

    /// How long the program waited, in seconds.
    pub(crate) fn waited(&self) -> f64 {
        let waits = self.events.iter().filter(|(_, _, what, ..)| *what == What::Wait);
        waits.map(|(.., begin, end)| end.saturating_sub(*begin) as f64 / 1e6).sum()
    }
}
