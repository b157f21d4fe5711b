//! What a slot of a store collects: from whom, and in which order if the order counts.

use crate::NodeId;
use crate::tree::Sum;

/// The streams that a chunk collects. Chunks with the same streams share this.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Streams {
    /// Who sends them, in order.
    nodes: Vec<NodeId>,
    /// The stream that brings worker 0's initial values, which become everybody's.
    initial: Option<usize>,
    /// Streams that cover several workers.
    collected: Vec<bool>,
    /// How the streams are added up in the order of ranks.
    pub(super) fold: Vec<Fold>,
}

/// One step of adding streams up, on a stack of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fold {
    /// A stream's numbers go onto the stack.
    Take(usize),
    /// The uppermost sum is added to the one below it.
    Add,
}

impl Streams {
    pub(super) fn new(sum: &Sum) -> Self {
        let mut streams = Vec::new();
        sum.visit(&mut |stream| streams.push(*stream));
        streams.sort_unstable();
        let nodes: Vec<NodeId> = streams.iter().map(|stream| stream.node).collect();
        let mut fold = Vec::new();
        unfold(sum, &nodes, &mut fold);
        Self {
            initial: streams.iter().position(|stream| stream.first == NodeId(0)),
            collected: streams.iter().map(|stream| stream.workers > 1).collect(),
            nodes,
            fold,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// The stream that `node` sends.
    pub(super) fn position(&self, node: NodeId) -> Option<usize> {
        self.nodes.binary_search(&node).ok()
    }

    /// Whether `stream` covers several workers.
    pub(super) fn is_collected(&self, stream: usize) -> bool {
        self.collected[stream]
    }

    /// Whether a stream brings worker 0's initial values.
    pub(super) fn has_initial(&self) -> bool {
        self.initial.is_some()
    }

    /// Whether `stream` brings worker 0's initial values.
    pub(super) fn is_initial(&self, stream: usize) -> bool {
        self.initial == Some(stream)
    }
}

/// Adds `sum` to `fold`. True unless it is a sum of nothing.
fn unfold(sum: &Sum, nodes: &[NodeId], fold: &mut Vec<Fold>) -> bool {
    match sum {
        Sum::Stream(stream) => {
            fold.extend(nodes.binary_search(&stream.node).map(Fold::Take));
            true
        }
        Sum::Group(sums) => {
            let mut begun = false;
            for sum in sums {
                let more = unfold(sum, nodes, fold);
                if begun && more {
                    fold.push(Fold::Add);
                }
                begun |= more;
            }
            begun
        }
    }
}
