//! The order in which frames go to one peer.

use crate::LayerId;
use crate::wire::{Header, Kind};
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Frames waiting for one peer. Factors go first: their receiver has a gradient to rebuild, which
/// takes it longest if it comes last, when there is nothing left on the wire to do it behind. Then
/// the layer nearest the input, because the next forward pass needs it first; within a layer, first
/// come first served.
#[derive(Debug)]
pub struct Queue<T> {
    waiting: BinaryHeap<Waiting<T>>,
    arrived: u64,
}

/// What goes to one peer before the next one has its turn: no frame is begun beyond this. Enough
/// that short frames share a system call, little enough that an urgent one does not wait long.
pub const BATCH_BYTES: usize = 128 << 10;
/// The same, in frames.
pub const BATCH_FRAMES: usize = 16;

/// When a frame goes: before those of a greater number. `arrived` is how many came until this one.
pub fn order(kind: Kind, layer: LayerId, arrived: u64) -> u64 {
    let place = match kind {
        Kind::Factors => 0,
        // Goodbyes wait for everything else.
        Kind::Bye => LAST,
        // Frames without a chunk have layer 0.
        _ => (1 + u64::from(layer.0)).min(LAST - 1),
    };
    place << ARRIVAL_BITS | arrived
}

impl<T> Queue<T> {
    /// Puts a frame in its place.
    pub fn push(&mut self, header: &Header, frame: T) {
        self.arrived += 1;
        let order = order(header.kind, header.chunk.layer, self.arrived);
        self.waiting.push(Waiting { order: Reverse(order), frame });
    }

    /// The frame that goes next.
    pub fn pop(&mut self) -> Option<T> {
        self.waiting.pop().map(|waiting| waiting.frame)
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes out all frames, in no order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + '_ {
        self.waiting.drain().map(|waiting| waiting.frame)
    }
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { waiting: BinaryHeap::new(), arrived: 0 }
    }
}

/// A trillion frames to one peer, and 16 million layers: one word is compared, and moved, faster than
/// two, and a simulation has millions of them.
const ARRIVAL_BITS: u32 = 40;
const LAST: u64 = u64::MAX >> ARRIVAL_BITS;

#[derive(Debug)]
struct Waiting<T> {
    order: Reverse<u64>,
    frame: T,
}

impl<T> PartialEq for Waiting<T> {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl<T> Eq for Waiting<T> {}

impl<T> PartialOrd for Waiting<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Waiting<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.order.cmp(&other.order)
    }
}
