//! What nodes send each other.

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
    /// Whether it is read from memory that the sender's worker waits for.
    pub(crate) lent: bool,
}

/// One frame for each of several peers.
#[derive(Debug)]
pub(crate) struct Mailing {
    /// What everybody gets, but for what `parts` says otherwise.
    pub(crate) frame: Frame,
    /// By node: its own chunk of the layer. `None` if all get the same.
    pub(crate) parts: Option<Rc<Vec<Part>>>,
    /// Who gets one.
    pub(crate) peers: Peers,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Part {
    /// The chunk's.
    pub(crate) index: u32,
    /// Bytes on the wire after the header.
    pub(crate) payload: u32,
}

/// All that has been mailed and has not landed everywhere.
///
/// A thousand nodes have a million pairs, and a queue for each of them would be somewhere else in
/// memory each time it is needed. So what is the same for all peers is kept once, with a bit for
/// each peer that has not had it, and a frame under way is the number of its mailing. (The other side of it: a
/// mailing to one peer costs as much as one to all, some 240 bytes among a thousand nodes.)
#[derive(Debug, Default)]
pub(crate) struct Mail {
    mailed: Slab<Mailed>,
    /// How many there have been.
    count: u64,
}

/// A mailing's place in [`Mail`], from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MailingId(NonZero<u32>);

/// A mailing, and how far it has come. One cache line: it is needed for every frame, often of
/// another node.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Mailed {
    pub(crate) from: NodeId,
    pub(crate) frame: Frame,
    parts: Option<Rc<Vec<Part>>>,
    /// Those that it still waits for.
    pub(crate) peers: Peers,
    /// How many those are.
    pub(crate) waiting: u16,
    /// Frames that are not out, and those that have not landed.
    unsent: u16,
    unlanded: u16,
    /// When it goes, among all that waits at its sender, and what comes after it there.
    pub(crate) order: u64,
    pub(crate) next: Option<MailingId>,
}

/// Bytes of a frame that are not sent: its next segment is as many of them as a link takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left(u32);

/// What a link takes of a frame before another peer has its turn.
const SEGMENT: u32 = 512 << 10;

const _: () = assert!(size_of::<Mailed>() == 64, "one cache line");

impl Mail {
    pub(crate) fn insert(&mut self, from: NodeId, mailing: Mailing) -> MailingId {
        let Mailing { frame, parts, peers } = mailing;
        self.count += 1;
        let order = queue::order(frame.kind, frame.chunk.layer, self.count);
        let waiting = peers.len() as u16;
        let (unsent, unlanded, next) = (waiting, waiting, None);
        let mailed = Mailed { from, frame, parts, peers, waiting, unsent, unlanded, order, next };
        let at = self.mailed.insert(mailed) as u32;
        MailingId(NonZero::<u32>::MIN.saturating_add(at))
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.mailed.is_empty()
    }

    /// What `peer` gets.
    pub(crate) fn frame(&self, id: MailingId, peer: usize) -> Frame {
        let Mailed { mut frame, ref parts, .. } = self[id];
        if let Some(parts) = parts {
            let Part { index, payload } = parts[peer];
            (frame.chunk.index, frame.payload) = (index, payload);
        }
        frame
    }

    /// The sender's link has taken all of a frame. True if it was the last one of its mailing.
    pub(crate) fn handle_sent(&mut self, id: MailingId) -> bool {
        self[id].unsent -= 1;
        self[id].unsent == 0
    }

    /// One of the peers has all of its frame. The last one's is the end of the mailing.
    pub(crate) fn handle_landed(&mut self, id: MailingId) {
        self[id].unlanded -= 1;
        if self[id].unlanded == 0 {
            self.mailed.remove(id.index());
        }
    }
}

impl std::ops::Index<MailingId> for Mail {
    type Output = Mailed;

    fn index(&self, id: MailingId) -> &Mailed {
        &self.mailed[id.index()]
    }
}

impl std::ops::IndexMut<MailingId> for Mail {
    fn index_mut(&mut self, id: MailingId) -> &mut Mailed {
        &mut self.mailed[id.index()]
    }
}

impl MailingId {
    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

impl Left {
    /// All of `frame` and its header.
    pub(crate) fn all(frame: &Frame) -> Self {
        Self(frame.payload.saturating_add(Header::SIZE as u32))
    }

    /// The bytes of the next segment.
    pub(crate) fn segment(self) -> u32 {
        self.0.min(SEGMENT)
    }

    /// What is left after it, if anything.
    pub(crate) fn after(self) -> Option<Self> {
        (self.0 > SEGMENT).then(|| Self(self.0 - SEGMENT))
    }
}
