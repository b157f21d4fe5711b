//! What one node tells about once a second, and the last few of these.

use poseidon_core::NodeId;
use poseidon_core::printable::printable;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// What a node has counted since it began. It has the same few numbers at the beginning of a job and
/// after weeks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct NodeSummary {
    pub(crate) node: NodeId,
    /// Milliseconds since the node began, by its own clock.
    pub(crate) at_ms: u64,
    /// Steps whose results its program has received, of the session that has made most.
    pub(crate) steps: u64,
    /// Collective operations that its program has begun.
    pub(crate) operations: u64,
    /// Microseconds that its program has waited for layers.
    pub(crate) waited_us: u64,
    /// The layers it has waited for most since the summary before this one, and how many microseconds.
    pub(crate) layers: Vec<(String, u64)>,
    /// Bytes that links to other hosts have taken, and given.
    pub(crate) outside: [u64; 2],
    /// The same of links within the host.
    pub(crate) inside: [u64; 2],
    /// Messages that links have not taken.
    pub(crate) queued: u64,
    /// Segments that TCP has sent again.
    pub(crate) resent: u64,
    /// What went wrong with a session first.
    pub(crate) failure: Option<String>,
}

/// Layers in a summary.
pub(crate) const LAYERS: usize = 4;
/// Characters of a layer's name that are told.
const NAME: usize = 64;
/// Characters of an error that are told.
const WORDS: usize = 400;
/// Summaries that are kept of a node, and so the seconds that rates are of.
const KEPT: usize = 6;

impl NodeSummary {
    /// As long as it may be, whoever has written it, and safe to show.
    pub(super) fn bounded(mut self) -> Self {
        self.layers.truncate(LAYERS);
        for (name, _) in &mut self.layers {
            *name = printable(name).chars().take(NAME).collect();
        }
        self.failure = self.failure.as_deref().map(shortened);
        self
    }
}

/// Words of another process, no longer than people read.
pub(super) fn shortened(words: &str) -> String {
    let words = printable(words);
    match words.char_indices().nth(WORDS) {
        Some((end, _)) => format!("{} …", &words[..end]),
        None => words.into_owned(),
    }
}

/// The last summaries of one node.
#[derive(Debug, Default)]
pub(super) struct Recent {
    kept: VecDeque<NodeSummary>,
}

impl Recent {
    pub(super) fn push(&mut self, summary: NodeSummary) {
        // A clock that goes backwards belongs to another process in this place.
        if self.kept.back().is_some_and(|last| last.at_ms >= summary.at_ms) {
            self.kept.clear();
        }
        super::push_bounded(&mut self.kept, summary, KEPT);
    }

    pub(super) fn last(&self) -> Option<&NodeSummary> {
        self.kept.back()
    }

    pub(super) fn failure(&self) -> Option<&str> {
        self.last()?.failure.as_deref()
    }

    /// How long the summaries are apart, the first from the last.
    pub(super) fn seconds(&self) -> f64 {
        self.ends().map_or(0.0, |(first, last)| (last.at_ms - first.at_ms) as f64 / 1e3)
    }

    /// How fast a counter grows.
    pub(super) fn per_second(&self, counter: impl Fn(&NodeSummary) -> u64) -> f64 {
        let Some((first, last)) = self.ends() else { return 0.0 };
        // Of links that were closed nothing is counted any more.
        let grown = counter(last).saturating_sub(counter(first));
        grown as f64 * 1e3 / (last.at_ms - first.at_ms) as f64
    }

    /// Layers that were waited for in this time, and how many microseconds.
    pub(super) fn layers(&self) -> impl Iterator<Item = (&str, u64)> {
        self.kept.iter().skip(1).flat_map(|s| s.layers.iter().map(|(name, us)| (&**name, *us)))
    }

    /// The first and the last summary, if they are apart.
    fn ends(&self) -> Option<(&NodeSummary, &NodeSummary)> {
        let (first, last) = (self.kept.front()?, self.kept.back()?);
        (last.at_ms > first.at_ms).then_some((first, last))
    }
}
