//! The order in which frames go to one peer.

use crate::LayerId;
use crate::wire::Kind;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

/// Messages waiting for one peer: the most urgent first, and among equals first come first served.
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

/// How urgent a session's frame is: a smaller number goes first.
///
/// Factors go first: their receiver has a gradient to rebuild, which takes it longest if it comes
/// last, when there is nothing left on the wire to do it behind. Then the layer nearest the input,
/// because the next forward pass needs it first.
pub fn urgency(kind: Kind, layer: LayerId) -> u64 {
    let place = match kind {
        // Who counts decides what is added up.
        Kind::Factors | Kind::Abort | Kind::Ready | Kind::Late | Kind::Roll => 0,
        // A goodbye waits for everything else.
        Kind::Bye => LAST,
        // Frames without a chunk have layer 0.
        _ => (1 + u64::from(layer.0)).min(LAST - 1),
    };
    place << ARRIVAL_BITS
}

/// How urgent a group's operation is: somebody waits for it, so it goes before layers; operations go
/// in the order they were begun, so that none is held up by its successors.
pub fn operation_urgency(number: u64) -> u64 {
    number.min((1 << ARRIVAL_BITS) - 1)
}

/// Urgency and arrival in one number, for a simulation, which has millions of them: one word is
/// compared, and moved, faster than two. `arrived` is how many frames came until this one.
pub fn order(kind: Kind, layer: LayerId, arrived: u64) -> u64 {
    urgency(kind, layer) | arrived
}

impl<T> Queue<T> {
    /// Puts a message in its place.
    pub fn push(&mut self, urgency: u64, message: T) {
        self.arrived += 1;
        let order = Reverse((urgency, self.arrived));
        self.waiting.push(Waiting { order, message });
    }

    /// The message that goes next, if `take` wants it: it stays where it is until `take` says that it
    /// is used up.
    pub fn take_next<R>(&mut self, take: impl FnOnce(&mut T) -> (R, bool)) -> Option<R> {
        let mut next = self.waiting.peek_mut()?;
        let (taken, used_up) = take(&mut next.message);
        if used_up {
            PeekMut::pop(next);
        }
        Some(taken)
    }

    /// The message that goes next.
    pub fn pop(&mut self) -> Option<T> {
        self.waiting.pop().map(|waiting| waiting.message)
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes out all messages, in no order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + '_ {
        self.waiting.drain().map(|waiting| waiting.message)
    }

    /// Forgets the messages that `keep` does not want.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        self.waiting.retain(|waiting| keep(&waiting.message));
    }
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { waiting: BinaryHeap::new(), arrived: 0 }
    }
}

/// A trillion frames to one peer, and 16 million layers.
const ARRIVAL_BITS: u32 = 40;
const LAST: u64 = u64::MAX >> ARRIVAL_BITS;

#[derive(Debug)]
struct Waiting<T> {
    order: Reverse<(u64, u64)>,
    message: T,
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
