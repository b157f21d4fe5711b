//! Copies between a worker's device and the memory of its host.
//!
//! They follow `session/device.rs` of the `poseidon` crate: a gradient goes to the host in pieces, a
//! chunk is sent when its piece is there, and a chunk's result goes to the device when it has come.
//! Of a layer by factors only rows are copied: the worker's own to the host, all workers' to the
//! device, which rebuilds the gradient.

use crate::calendar::Time;
use crate::setup::Setup;
use poseidon_core::copies::{Piece, pieces};
use poseidon_core::wire::Kind;
use poseidon_core::{LayerId, Plan};
use std::collections::VecDeque;

/// What is copied of one layer, in one step of one worker.
#[derive(Debug)]
pub(crate) struct LayerCopies {
    /// What goes to the host, in order. If nothing is copied, one piece that has the whole layer. Of
    /// a layer by factors, one piece that has all its rows.
    pub(crate) pieces: Vec<Piece>,
    pub(crate) back: Back,
}

/// What goes to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Back {
    Nothing,
    /// Each of so many chunks, when it has come.
    Chunks(u32),
    /// So many bytes, when all workers' rows have come.
    Rows(usize),
}

impl LayerCopies {
    /// Of all layers that `plan` has.
    pub(crate) fn of_layers(setup: &Setup, plan: &Plan) -> Vec<Self> {
        let layers = (0..setup.layers.len() as u32).map(LayerId);
        layers.map(|layer| Self::new(setup, plan, layer)).collect()
    }

    fn new(setup: &Setup, plan: &Plan, layer: LayerId) -> Self {
        let chunks = plan.layer_chunks(layer).count() as u32;
        if setup.copies.is_none() {
            let all = Piece { chunks: 0..chunks, bytes: 0 };
            return Self { pieces: vec![all], back: Back::Nothing };
        }
        if let Some(layout) = plan.factors(layer) {
            let own = Piece { chunks: 0..0, bytes: setup.factor_rows(layer) * layout.row_bytes() };
            let all = plan.encodings(layer).up.bytes(layout.len());
            return Self { pieces: vec![own], back: Back::Rows(all) };
        }
        let factors = setup.adam_push(layer);
        let sizes = plan
            .layer_chunks(layer)
            .map(|(key, _)| factors.unwrap_or_else(|| plan.payload(key, Kind::Push)));
        Self { pieces: pieces(sizes), back: Back::Chunks(chunks) }
    }
}

/// The copy engine of one direction: one copy at a time, in the order in which they were asked for.
#[derive(Debug)]
pub(crate) struct CopyEngine {
    /// Bytes per second.
    speed: f64,
    queue: VecDeque<CopyOrder>,
    is_busy: bool,
    /// What it has copied in all steps.
    pub(crate) bytes: u64,
}

/// A copy that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyOrder {
    pub(crate) layer: usize,
    pub(crate) clock: u64,
    /// Which of the layer's pieces. Of no meaning on the way back.
    pub(crate) piece: usize,
    pub(crate) bytes: usize,
}

impl CopyEngine {
    pub(crate) fn new(speed: f64) -> Self {
        Self { speed, queue: VecDeque::new(), is_busy: false, bytes: 0 }
    }

    pub(crate) fn handle_order(&mut self, order: CopyOrder) {
        self.queue.push_back(order);
    }

    /// How long the copy takes that begins now, if one does.
    pub(crate) fn poll_begin(&mut self) -> Option<Time> {
        let first = self.queue.front().filter(|_| !self.is_busy)?;
        self.is_busy = true;
        Some(Time::from_seconds(first.bytes as f64 / self.speed))
    }

    /// The copy that was begun is done. Returns what it was.
    pub(crate) fn handle_copied(&mut self) -> CopyOrder {
        self.is_busy = false;
        let order = self.queue.pop_front().expect("only a copy that was begun ends");
        self.bytes += order.bytes as u64;
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_copy_at_a_time_in_order() {
        let mut engine = CopyEngine::new(1000.0);
        let order = |layer, bytes| CopyOrder { layer, clock: 1, piece: 0, bytes };
        assert_eq!(engine.poll_begin(), None);
        engine.handle_order(order(2, 500));
        engine.handle_order(order(1, 1000));
        assert_eq!(engine.poll_begin(), Some(Time::from_seconds(0.5)));
        assert_eq!(engine.poll_begin(), None);
        assert_eq!(engine.handle_copied(), order(2, 500));
        assert_eq!(engine.poll_begin(), Some(Time::from_seconds(1.0)));
        assert_eq!(engine.handle_copied(), order(1, 1000));
        assert_eq!((engine.poll_begin(), engine.bytes), (None, 1500));
    }
}
