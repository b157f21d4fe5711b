//! What a lane sends next to one peer: core's queue decides, and batches of it are written together.

use crate::memory::exchange::Lent;
use crate::memory::factors::Rows;
use poseidon_core::queue::{BATCH_BYTES, BATCH_FRAMES};
use poseidon_core::wire::{Header, Kind};
use poseidon_core::{LayerId, Queue};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;

/// Frames waiting for one peer, and those on their way.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    waiting: Queue<Frame>,
    /// Chosen and on their way: written together, in order.
    batch: VecDeque<Frame>,
    /// Bytes of the batch's first frame that the link has taken.
    written: usize,
}

#[derive(Debug)]
pub(crate) struct Frame {
    header: [u8; Header::SIZE],
    /// The layer it is about, if it is about one.
    pub(crate) layer: Option<LayerId>,
    pub(crate) payload: Payload,
}

/// Bytes are borrowed from where they are; a frame only keeps them alive.
#[derive(Debug)]
pub(crate) enum Payload {
    None,
    /// One chunk of what the training program lent.
    Gradient(Lent),
    /// One chunk of a shard's result, made in memory the training program of this node lent.
    Update(Lent),
    /// One chunk of a shard's result.
    Result(Arc<[f32]>),
    /// One chunk of this worker's factors.
    Factors(Rows),
    Text(Box<[u8]>),
}

impl Outbox {
    pub(crate) fn push(&mut self, header: &Header, payload: Payload) {
        let layer = matches!(header.kind, Kind::Push | Kind::Update | Kind::Init | Kind::Factors)
            .then_some(header.chunk.layer);
        self.waiting.push(header, Frame { header: header.encode(), layer, payload });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.batch.is_empty() && self.waiting.is_empty()
    }

    /// Hands every frame to `gone` instead of a link.
    pub(crate) fn discard(&mut self, mut gone: impl FnMut(Payload)) {
        self.written = 0;
        self.batch.drain(..).for_each(|frame| gone(frame.payload));
        self.waiting.drain().for_each(|frame| gone(frame.payload));
    }

    /// Forgets all frames the link has not begun to take.
    pub(crate) fn drop_unsent(&mut self) {
        self.waiting = Queue::default();
        self.batch.truncate(usize::from(self.written > 0));
    }

    /// Hands the next frames to `write`, once, and passes each frame the link has taken whole to
    /// `sent`. Returns the bytes taken and whether the link took all it was offered.
    pub(crate) fn write(
        &mut self,
        write: impl FnOnce(&[IoSlice<'_>]) -> io::Result<usize>,
        mut sent: impl FnMut(Frame),
    ) -> io::Result<(usize, bool)> {
        if self.batch.is_empty() {
            let mut bytes = 0;
            while bytes < BATCH_BYTES && self.batch.len() < BATCH_FRAMES {
                let Some(next) = self.waiting.pop() else { break };
                bytes += next.len();
                self.batch.push_back(next);
            }
        }
        let mut slices = [IoSlice::new(&[]); 2 * BATCH_FRAMES];
        let mut count = 0;
        let mut offered = 0;
        let mut skip = self.written;
        for frame in &self.batch {
            for part in [&frame.header[..], frame.payload.bytes()] {
                let rest = &part[skip.min(part.len())..];
                skip -= part.len() - rest.len();
                if !rest.is_empty() {
                    slices[count] = IoSlice::new(rest);
                    offered += rest.len();
                    count += 1;
                }
            }
        }
        let taken = write(&slices[..count])?;
        self.written += taken;
        while let Some(first) = self.batch.front()
            && self.written >= first.len()
        {
            self.written -= first.len();
            if let Some(frame) = self.batch.pop_front() {
                sent(frame);
            }
        }
        Ok((taken, taken == offered))
    }
}

impl Frame {
    /// Bytes on the wire.
    pub(crate) fn len(&self) -> usize {
        self.header.len() + self.payload.bytes().len()
    }
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Gradient(lent) | Self::Update(lent) => bytemuck::cast_slice(lent.gradient()),
            Self::Result(values) => bytemuck::cast_slice(values),
            Self::Factors(rows) => bytemuck::cast_slice(rows.values()),
            Self::Text(text) => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::{ChunkKey, Clock, LayerId, NodeId};

    fn push(outbox: &mut Outbox, layer: u32, index: u32, values: &[f32]) {
        let chunk = ChunkKey { layer: LayerId(layer), index };
        let length = (values.len() * 4) as u32;
        let header = Header {
            kind: Kind::Update,
            sender: NodeId(0),
            chunk,
            value: 0.0,
            clock: Clock(1),
            length,
        };
        outbox.push(&header, Payload::Result(values.into()));
    }

    /// Drains the outbox through a link that takes at most `step` bytes at a time.
    fn drain(outbox: &mut Outbox, step: usize) -> Vec<u8> {
        let mut out = Vec::new();
        while !outbox.is_empty() {
            let take = |slices: &[IoSlice<'_>]| {
                let all: Vec<u8> = slices.iter().flat_map(|s| s.to_vec()).collect();
                let n = all.len().min(step);
                out.extend_from_slice(&all[..n]);
                Ok(n)
            };
            outbox.write(take, |_| {}).unwrap();
        }
        out
    }

    fn headers(mut bytes: &[u8]) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        while let Some((head, rest)) = bytes.split_first_chunk() {
            let header = Header::decode(head).unwrap();
            found.push((header.chunk.layer.0, header.chunk.index));
            bytes = &rest[header.length as usize..];
        }
        found
    }

    #[test]
    fn the_layer_nearest_the_input_goes_first() {
        let mut outbox = Outbox::default();
        for (layer, index) in [(2, 0), (2, 1), (0, 0), (1, 0), (0, 1)] {
            push(&mut outbox, layer, index, &[1.0, 2.0]);
        }
        let order = headers(&drain(&mut outbox, usize::MAX));
        assert_eq!(order, [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]);
    }

    #[test]
    fn bytes_are_the_same_however_few_the_link_takes() {
        let fill = |outbox: &mut Outbox| {
            for index in 0..20 {
                push(outbox, 0, index, &[index as f32; 5]);
            }
            outbox.push(&Header::bare(Kind::Bye, NodeId(0), 0), Payload::None);
        };
        let mut whole = Outbox::default();
        fill(&mut whole);
        let expected = drain(&mut whole, usize::MAX);
        assert_eq!(expected.len(), 20 * (32 + 20) + 32);
        for step in [1, 3, 31, 32, 33, 52, 100] {
            let mut outbox = Outbox::default();
            fill(&mut outbox);
            assert_eq!(drain(&mut outbox, step), expected);
        }
    }
}
