//! The order in which frames go to one peer.

use crate::LayerId;
use crate::wire::{Header, Kind};
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Frames that wait for one peer. Factors go first: their receiver has to rebuild a gradient from
/// them, and can do that while other frames are still on the wire. Then comes the layer nearest the
/// input, because the next forward pass needs that layer first. Within a layer, the oldest frame
/// goes first.
#[derive(Debug)]
pub struct Queue<T> {
    waiting: BinaryHeap<Waiting<T>>,
    arrived: u64,
}

/// How many bytes go to one peer before the next peer has its turn: after so many, no further frame
/// is begun. It is enough for short frames to share a system call, and little enough for an urgent
/// frame to a later peer not to wait long.
pub const BATCH_BYTES: usize = 128 << 10;
/// How many frames go to one peer before the next peer has its turn.
pub const BATCH_FRAMES: usize = 16;

/// A frame's place in the order: frames with smaller numbers go first. `arrived` is how many frames
/// have come, this one included.
pub fn order(kind: Kind, layer: LayerId, arrived: u64) -> u64 {
    let place = match kind {
        Kind::Factors => 0,
        // A goodbye goes after everything else.
        Kind::Bye => LAST,
        // Frames without a chunk have layer 0.
        _ => (1 + u64::from(layer.0)).min(LAST - 1),
    };
    place << ARRIVAL_BITS | arrived
}

impl<T> Queue<T> {
    /// Adds a frame.
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

/// Bits of an order that count arrivals; the other bits are for the layer. That is enough for a
/// trillion frames to one peer and for 16 million layers. Both are in one word, because one word is
/// compared and moved faster than two, and a simulation has millions of frames.
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
