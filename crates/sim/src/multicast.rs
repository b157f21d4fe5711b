//! Frames that a node sends to several peers at once, kept once for all of these peers.

use crate::peers::Peers;
use poseidon_core::wire::{Header, Kind};
use poseidon_core::{ChunkKey, NodeId, queue};
use slab::Slab;
use std::num::NonZero;
use std::rc::Rc;

/// A frame without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) chunk: ChunkKey,
    pub(crate) clock: u32,
    /// Bytes on the wire after the header.
    pub(crate) payload: u32,
    /// Whether the payload is read from memory that the sender's worker waits for.
    pub(crate) lent: bool,
}

/// One frame for each of several peers.
#[derive(Debug)]
pub(crate) struct Multicast {
    /// The frame of every peer, except for the fields that `parts` replaces.
    pub(crate) frame: Frame,
    /// By node: the chunk that this node gets. `None` if all peers get the same chunk.
    pub(crate) parts: Option<Rc<Vec<Part>>>,
    /// The peers that get a frame.
    pub(crate) peers: Peers,
}

/// Where one peer's frame differs from the multicast's.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Part {
    /// The chunk's index in its layer.
    pub(crate) index: u32,
    /// Bytes on the wire after the header.
    pub(crate) payload: u32,
}

/// All multicasts that have not yet landed at every one of their peers.
///
/// A thousand nodes have a million pairs. A queue for each pair would be somewhere else in memory
/// each time it is needed. So a multicast is kept once, with a bit for each peer that has not had
/// its frame, and a frame under way is represented by its multicast's id. The price: a multicast
/// to one peer takes as much memory as one to all, some 240 bytes among a thousand nodes.
#[derive(Debug, Default)]
pub(crate) struct Multicasts {
    states: Slab<MulticastState>,
    /// How many multicasts have ever been inserted.
    count: u64,
}

/// A multicast's index in [`Multicasts`], counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MulticastId(NonZero<u32>);

/// A multicast, and how far it has come. It fills one cache line, because the simulator reads it
/// for every frame, often for another node each time.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct MulticastState {
    pub(crate) from: NodeId,
    pub(crate) frame: Frame,
    parts: Option<Rc<Vec<Part>>>,
    /// The peers whose frame has not begun to leave.
    pub(crate) peers: Peers,
    /// How many peers are in `peers`.
    pub(crate) waiting: u16,
    /// Frames that the sender's link has not taken to their end.
    unsent: u16,
    /// Frames that have not landed.
    unlanded: u16,
    /// The place among all multicasts that wait at the sender: smaller goes first.
    pub(crate) order: u64,
    /// The multicast after this one in that order.
    pub(crate) next: Option<MulticastId>,
}

/// The bytes of a frame that are not sent yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left(u32);

/// A part of a frame that is sent at once: its bytes, and a bit that says whether it is the frame's
/// end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut(u32);

const _: () = assert!(size_of::<MulticastState>() == 64, "one cache line");

impl Multicasts {
    pub(crate) fn insert(&mut self, from: NodeId, multicast: Multicast) -> MulticastId {
        let Multicast { frame, parts, peers } = multicast;
        self.count += 1;
        let order = queue::order(frame.kind, frame.chunk.layer, self.count);
        let waiting = peers.len() as u16;
        let (unsent, unlanded, next) = (waiting, waiting, None);
        let states =
            MulticastState { from, frame, parts, peers, waiting, unsent, unlanded, order, next };
        let at = self.states.insert(states) as u32;
        MulticastId(NonZero::<u32>::MIN.saturating_add(at))
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// The frame that `peer` gets.
    pub(crate) fn frame(&self, id: MulticastId, peer: usize) -> Frame {
        let MulticastState { mut frame, ref parts, .. } = self[id];
        if let Some(parts) = parts {
            let Part { index, payload } = parts[peer];
            (frame.chunk.index, frame.payload) = (index, payload);
        }
        frame
    }

    /// The sender's link has taken all of a frame. True if it was the multicast's last frame.
    pub(crate) fn handle_sent(&mut self, id: MulticastId) -> bool {
        self[id].unsent -= 1;
        self[id].unsent == 0
    }

    /// One of the peers has all of its frame. When all peers have, the multicast is forgotten.
    pub(crate) fn handle_landed(&mut self, id: MulticastId) {
        self[id].unlanded -= 1;
        if self[id].unlanded == 0 {
            self.states.remove(id.index());
        }
    }
}

impl std::ops::Index<MulticastId> for Multicasts {
    type Output = MulticastState;

    fn index(&self, id: MulticastId) -> &MulticastState {
        &self.states[id.index()]
    }
}

impl std::ops::IndexMut<MulticastId> for Multicasts {
    fn index_mut(&mut self, id: MulticastId) -> &mut MulticastState {
        &mut self.states[id.index()]
    }
}

impl MulticastId {
    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

impl Left {
    /// All bytes of `frame`, with its header.
    pub(crate) fn all(frame: &Frame) -> Self {
        Self(frame.payload.saturating_add(Header::SIZE as u32))
    }

    /// The next segment, of at most `most` bytes, and what is left after it, if anything.
    pub(crate) fn cut(self, most: u32) -> (Cut, Option<Self>) {
        let bytes = self.0.min(most).min(Cut::MOST);
        let after = (self.0 > bytes).then(|| Self(self.0 - bytes));
        (Cut(bytes | if after.is_none() { Cut::LAST } else { 0 }), after)
    }
}

impl Cut {
    const LAST: u32 = 1 << 31;
    const MOST: u32 = Self::LAST - 1;

    pub(crate) fn bytes(self) -> u32 {
        self.0 & Self::MOST
    }

    /// Whether it is the end of its frame.
    pub(crate) fn is_last(self) -> bool {
        self.0 & Self::LAST != 0
    }
}
