//! What an engine sends next to one peer. Core's queue decides the order; frames are written in
//! batches.

use crate::memory::region::Region;
use poseidon_core::encoding::Block;
use poseidon_core::queue::{BATCH_BYTES, BATCH_FRAMES};
use poseidon_core::wire::{Header, Kind};
use poseidon_core::{ChannelId, Queue};
use poseidon_link::{Sealer, TAG_SIZE, Tag};
use std::collections::VecDeque;
use std::io::{self, IoSlice};

/// Messages waiting for one peer, and frames on their way.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    waiting: Queue<Message>,
    /// Whether last words are among them.
    hurries: bool,
    /// Frames that were chosen and are on their way. They are written together, in order.
    batch: VecDeque<Frame>,
    /// Bytes of the batch's first frame that the link has taken.
    written: usize,
    /// Makes the frames' tags, on a link that has them. It has counted the tags of all frames that
    /// the link has taken whole.
    sealer: Option<Sealer>,
}

/// What a channel wants sent: one frame, or several if the payload is cut into pieces.
#[derive(Debug)]
pub(crate) struct Message {
    /// The header of the first frame. Every later frame has the next chunk index.
    pub(crate) header: Header,
    pub(crate) payload: Payload,
    /// Smaller numbers go first.
    pub(crate) urgency: u64,
    /// The channel gets this number back when the message's last frame has left.
    pub(crate) receipt: u64,
    /// Most bytes of a frame's payload.
    pub(crate) piece: usize,
}

/// What a message carries. Bytes are read from where they are.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    None,
    /// Memory lent to the channel.
    Region(Region),
    /// Memory that several links read, and that goes back to the channel.
    Shared(Block),
    Text(Box<[u8]>),
}

/// A frame that is on its way.
#[derive(Debug)]
pub(super) struct Frame {
    /// The header and its tag. On a link without tags only the header is written.
    head: [u8; Header::SIZE + TAG_SIZE],
    /// The payload's tag.
    foot: Tag,
    /// Whether the tags are those of the place that the frame has in the batch.
    sealed: bool,
    /// Whether the frame has tags.
    tagged: bool,
    pub(super) channel: ChannelId,
    /// The layer that the frame is about, if it is about one.
    pub(super) layer: Option<u32>,
    pub(super) payload: Payload,
    /// The message's receipt, if this is its last frame.
    pub(super) receipt: Option<u64>,
    /// No budget holds it back.
    urgent: bool,
}

impl Message {
    /// A message of one frame.
    pub(crate) fn new(header: Header, payload: Payload, urgency: u64, receipt: u64) -> Self {
        Self { header, payload, urgency, receipt, piece: usize::MAX }
    }

    /// Whether no budget holds it back: it is short, and without it somebody would wait in vain, or
    /// take this node for dead.
    fn is_urgent(&self) -> bool {
        use Kind::{Abort, Bye, Heartbeat, Late, Ready, Roll};
        matches!(self.header.kind, Heartbeat | Bye | Abort | Ready | Late | Roll)
    }

    /// Whether it says that a channel has stopped, and why.
    fn is_last_words(&self) -> bool {
        self.header.kind == Kind::Abort
    }

    /// The next frame, and whether it is the last.
    fn next_frame(&mut self, tagged: bool) -> (Frame, bool) {
        let payload = match &mut self.payload {
            Payload::Region(region) => {
                let rest = *region;
                let cut = rest.len().min(self.piece);
                *region = rest.part(cut..rest.len());
                Payload::Region(rest.part(0..cut))
            }
            whole => std::mem::replace(whole, Payload::None),
        };
        let last = self.payload.len() == 0;
        self.header.length = payload.len() as u32;
        let mut head = [0; Header::SIZE + TAG_SIZE];
        head[..Header::SIZE].copy_from_slice(&self.header.encode());
        self.header.chunk.index += 1;
        let layer =
            matches!(self.header.kind, Kind::Push | Kind::Update | Kind::Init | Kind::Factors);
        let layer = layer.then_some(self.header.chunk.layer.0);
        let receipt = last.then_some(self.receipt);
        let (channel, urgent, foot) = (self.header.channel, self.is_urgent(), [0; TAG_SIZE]);
        let sealed = false;
        let frame = Frame { head, foot, sealed, tagged, channel, layer, payload, receipt, urgent };
        (frame, last)
    }
}

impl Outbox {
    /// The outbox of a link whose frames have the tags that `sealer` makes, if there is one.
    pub(super) fn new(sealer: Option<Sealer>) -> Self {
        Self { sealer, ..Self::default() }
    }

    pub(super) fn push(&mut self, message: Message) {
        self.hurries |= message.is_last_words();
        self.waiting.push(message.urgency, message);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batch.is_empty() && self.waiting.is_empty()
    }

    /// Whether what the link has to take next is a session's. What it was not offered yet does not
    /// count.
    pub(super) fn next_is_about_a_layer(&self) -> bool {
        self.batch.front().is_some_and(|frame| frame.layer.is_some())
    }

    /// Hands the channel and receipt of every message to `gone` instead of a link.
    pub(super) fn discard(&mut self, mut gone: impl FnMut(ChannelId, u64, Payload)) {
        (self.written, self.hurries) = (0, false);
        for frame in self.batch.drain(..) {
            if let Some(receipt) = frame.receipt {
                gone(frame.channel, receipt, frame.payload);
            }
        }
        for message in self.waiting.drain() {
            gone(message.header.channel, message.receipt, message.payload);
        }
    }

    /// Forgets all messages and frames of `channel` that the link has not begun to take. A frame
    /// that the link has begun to take is copied, so that nothing refers to the channel's memory
    /// any more.
    pub(super) fn let_go(&mut self, channel: ChannelId) {
        self.hurries = false;
        self.waiting.retain(|message| {
            let stays = message.header.channel != channel;
            self.hurries |= stays && message.is_last_words();
            stays
        });
        let begun = self.written > 0;
        if let Some(first) = self.batch.front_mut().filter(|f| begun && f.channel == channel) {
            first.payload = Payload::Text(first.payload.bytes().into());
            first.receipt = None;
        }
        let mut first = true;
        self.batch.retain_mut(|frame| {
            let is_begun = std::mem::take(&mut first) && begun;
            // The frames behind one that is removed move up, and get other tags.
            frame.sealed &= is_begun;
            is_begun || frame.channel != channel
        });
    }

    /// Hands the next frames to `write`, once, and passes each frame the link has taken whole to
    /// `sent`. Offers no more than `most` bytes, except of urgent frames that come first, and of frames
    /// that are in the way of last words. Returns the bytes taken and whether the link took all it was
    /// offered.
    pub(super) fn write(
        &mut self,
        most: usize,
        write: impl FnOnce(&[IoSlice<'_>]) -> io::Result<usize>,
        mut sent: impl FnMut(Frame),
    ) -> io::Result<(usize, bool)> {
        let tagged = self.sealer.is_some();
        if self.batch.is_empty() {
            let mut bytes = 0;
            while bytes < BATCH_BYTES && self.batch.len() < BATCH_FRAMES {
                // What there is no room for stays in the queue, where more urgent messages overtake
                // it.
                let take = |message: &mut Message| match bytes < most || message.is_urgent() {
                    true => {
                        self.hurries &= !message.is_last_words();
                        let (frame, last) = message.next_frame(tagged);
                        (Some(frame), last)
                    }
                    false => (None, false),
                };
                let Some(next) = self.waiting.take_next(take).flatten() else { break };
                bytes += next.len();
                self.batch.push_back(next);
            }
        }
        self.seal();
        let hurries = self.hurries;
        let urgent = self.batch.iter().take_while(|frame| frame.urgent || hurries).map(Frame::len);
        let most = most.max(urgent.sum::<usize>().saturating_sub(self.written));
        let mut slices = [IoSlice::new(&[]); 3 * BATCH_FRAMES];
        let mut count = 0;
        let mut offered = 0;
        let mut skip = self.written;
        for frame in &self.batch {
            for part in [frame.head(), frame.payload.bytes(), frame.foot()] {
                let rest = &part[skip.min(part.len())..];
                skip -= part.len() - rest.len();
                let rest = &rest[..rest.len().min(most - offered)];
                if !rest.is_empty() {
                    slices[count] = IoSlice::new(rest);
                    offered += rest.len();
                    count += 1;
                }
            }
        }
        let taken = if count == 0 { 0 } else { write(&slices[..count])? };
        self.written += taken;
        while let Some(first) = self.batch.front()
            && self.written >= first.len()
        {
            self.written -= first.len();
            if let Some(frame) = self.batch.pop_front() {
                if let Some(sealer) = &mut self.sealer {
                    sealer.count(frame.tags());
                }
                sent(frame);
            }
        }
        Ok((taken, taken == offered))
    }

    /// Makes the tags of the frames that are about to be offered to the link. The link then reads the
    /// same bytes again while they are in the cache.
    fn seal(&mut self) {
        let Some(sealer) = &self.sealer else { return };
        let mut ahead = 0;
        for frame in &mut self.batch {
            if !frame.sealed {
                let (header, tag) = frame.head.split_at_mut(Header::SIZE);
                tag.copy_from_slice(&sealer.seal_ahead(ahead, header));
                if !frame.foot().is_empty() {
                    frame.foot = sealer.seal_ahead(ahead + 1, frame.payload.bytes());
                }
                frame.sealed = true;
            }
            ahead += frame.tags();
        }
    }
}

impl Frame {
    /// Bytes on the wire.
    pub(super) fn len(&self) -> usize {
        self.head().len() + self.payload.len() + self.foot().len()
    }

    /// Bytes that are counted: all but the tags.
    pub(super) fn untagged_len(&self) -> usize {
        Header::SIZE + self.payload.len()
    }

    fn head(&self) -> &[u8] {
        if self.tagged { &self.head } else { &self.head[..Header::SIZE] }
    }

    fn foot(&self) -> &[u8] {
        if self.tagged && self.payload.len() > 0 { &self.foot } else { &[] }
    }

    /// How many tags the frame has.
    fn tags(&self) -> u64 {
        1 + u64::from(self.payload.len() > 0)
    }
}

impl Payload {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Region(region) => region.len(),
            Self::Shared(values) => values.bytes().len(),
            Self::Text(text) => text.len(),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            // SAFETY: by the channel's promise, what is being sent is valid and not written: a
            // result that goes to the same place comes only after its receivers have had all of
            // this.
            Self::Region(region) => unsafe { region.bytes() },
            Self::Shared(values) => values.bytes(),
            Self::Text(text) => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::queue::urgency;
    use poseidon_core::{ChunkKey, Clock, LayerId, NodeId};
    use poseidon_link::Opener;

    fn push(outbox: &mut Outbox, layer: u32, index: u32, values: &[f32]) {
        let chunk = ChunkKey { layer: LayerId(layer), index };
        let bare = Header::bare(Kind::Update, NodeId(0), (values.len() * 4) as u32);
        let header = Header { chunk, clock: Clock(1), channel: ChannelId(layer), ..bare };
        let payload = Payload::Shared(Block::Whole(values.into()));
        let urgency = urgency(Kind::Update, LayerId(layer));
        outbox.push(Message::new(header, payload, urgency, u64::from(index)));
    }

    /// Drains the outbox through a link that takes at most `step` bytes at a time.
    fn drain(outbox: &mut Outbox, step: usize) -> Vec<u8> {
        let mut out = Vec::new();
        while !outbox.is_empty() {
            write_once(outbox, step, &mut out);
        }
        out
    }

    fn write_once(outbox: &mut Outbox, step: usize, out: &mut Vec<u8>) {
        let take = |slices: &[IoSlice<'_>]| {
            let all: Vec<u8> = slices.iter().flat_map(|s| s.to_vec()).collect();
            let n = all.len().min(step);
            out.extend_from_slice(&all[..n]);
            Ok(n)
        };
        outbox.write(usize::MAX, take, |_| {}).unwrap();
    }

    /// The frames in `bytes`, whose tags must be right.
    fn tagged_headers(mut bytes: &[u8], mut opener: Opener) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        while let Some((head, rest)) = bytes.split_first_chunk() {
            let header = Header::decode(head).unwrap();
            let (tag, rest) = rest.split_first_chunk().unwrap();
            opener.open(head, tag).unwrap();
            bytes = rest;
            if header.length > 0 {
                let (payload, rest) = bytes.split_at(header.length as usize);
                let (tag, rest) = rest.split_first_chunk().unwrap();
                opener.open(payload, tag).unwrap();
                bytes = rest;
            }
            found.push((header.chunk.layer.0, header.chunk.index));
        }
        found
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
            let bye = Header::bare(Kind::Bye, NodeId(0), 0);
            outbox.push(Message::new(bye, Payload::None, u64::MAX, 0));
        };
        let mut whole = Outbox::default();
        fill(&mut whole);
        let expected = drain(&mut whole, usize::MAX);
        assert_eq!(expected.len(), 20 * (Header::SIZE + 20) + Header::SIZE);
        for step in [1, 3, 31, 32, 33, 52, 100] {
            let mut outbox = Outbox::default();
            fill(&mut outbox);
            assert_eq!(drain(&mut outbox, step), expected);
        }
    }

    /// Tags are counted in the order in which frames leave, also when a channel is let go whose frames
    /// had their tags already.
    #[test]
    fn frames_have_the_tags_of_their_turn() {
        let [mut near, far] = poseidon_link::memory::tags();
        for step in [1, 7, Header::SIZE + 20, 1000] {
            let mut outbox = Outbox::new(Some(near.sealer.clone()));
            for (layer, index) in [(1, 0), (2, 0), (1, 1), (2, 1)] {
                push(&mut outbox, layer, index, &[1.0; 8]);
            }
            let bye = Header::bare(Kind::Bye, NodeId(0), 0);
            outbox.push(Message::new(bye, Payload::None, u64::MAX, 0));
            let mut out = Vec::new();
            write_once(&mut outbox, step, &mut out);
            outbox.let_go(ChannelId(1));
            out.extend(drain(&mut outbox, step));
            let found = tagged_headers(&out, far.opener.clone());
            assert!(found.ends_with(&[(2, 0), (2, 1), (0, 0)]), "{found:?}");
        }
        // Another connection has other keys.
        let tag = near.sealer.seal(b"frame");
        assert!(near.opener.open(b"frame", &tag).is_err());
    }

    /// Pieces of one message go in order, with the next index each, whatever else is waiting.
    #[test]
    fn a_long_payload_is_cut_into_pieces_and_receipted_once() {
        let mut memory = vec![7u64; 4];
        // SAFETY: `memory` outlives the outbox's use of it and is not touched meanwhile.
        let region = unsafe { Region::of(&mut memory) };
        let mut outbox = Outbox::default();
        let header = Header { channel: ChannelId(9), ..Header::bare(Kind::Message, NodeId(0), 0) };
        let (payload, urgency) = (Payload::Region(region), 0);
        outbox.push(Message { header, payload, urgency, receipt: 5, piece: 12 });
        let mut receipts = Vec::new();
        let mut out = Vec::new();
        let take = |slices: &[IoSlice<'_>]| {
            out.extend(slices.iter().flat_map(|s| s.to_vec()));
            Ok(out.len())
        };
        outbox.write(usize::MAX, take, |frame| receipts.push(frame.receipt)).unwrap();
        assert_eq!(headers(&out), [(0, 0), (0, 1), (0, 2)]);
        assert_eq!(receipts, [None, None, Some(5)]);
    }

    /// The stream stays whole, and nothing refers to the channel's memory afterwards.
    #[test]
    fn a_channel_that_is_let_go_leaves_only_what_was_begun() {
        let mut outbox = Outbox::default();
        for (layer, index) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            push(&mut outbox, layer, index, &[1.0; 8]);
        }
        let mut out = Vec::new();
        write_once(&mut outbox, Header::SIZE + 5, &mut out);
        outbox.let_go(ChannelId(0));
        out.extend(drain(&mut outbox, usize::MAX));
        assert_eq!(headers(&out), [(0, 0), (1, 0), (1, 1)]);
    }
    /// Writes what fits into `most` bytes, and returns it.
    fn write_most(outbox: &mut Outbox, most: usize) -> Vec<u8> {
        let mut out = Vec::new();
        let take = |slices: &[IoSlice<'_>]| {
            out.extend(slices.iter().flat_map(|s| s.to_vec()));
            Ok(out.len())
        };
        outbox.write(most, take, |_| {}).unwrap();
        out
    }

    #[test]
    fn no_more_is_offered_than_there_is_room_for() {
        let mut outbox = Outbox::default();
        (0..3).for_each(|index| push(&mut outbox, 1, index, &[1.0; 8]));
        let frame = Header::SIZE + 32;
        let mut out = write_most(&mut outbox, frame + 5);
        assert_eq!(out.len(), frame + 5);
        assert!(write_most(&mut outbox, 0).is_empty());
        // What was not begun is overtaken.
        push(&mut outbox, 0, 7, &[1.0; 8]);
        while !outbox.is_empty() {
            out.extend(write_most(&mut outbox, 11));
        }
        assert_eq!(headers(&out), [(1, 0), (1, 1), (0, 7), (1, 2)]);
    }

    /// A frame that was begun at a low budget would take minutes.
    #[test]
    fn last_words_do_not_wait_for_room_of_the_frame_before_them() {
        let mut outbox = Outbox::default();
        push(&mut outbox, 1, 0, &[1.0; 8]);
        let mut out = write_most(&mut outbox, 5);
        let abort = Header { channel: ChannelId(3), ..Header::bare(Kind::Abort, NodeId(0), 0) };
        outbox.push(Message::new(abort, Payload::None, 0, 0));
        push(&mut outbox, 2, 0, &[1.0; 8]);
        (0..4).for_each(|_| out.extend(write_most(&mut outbox, 0)));
        assert_eq!(headers(&out), [(1, 0), (0, 0)]);
        // Those of a channel that is let go hurry nobody.
        write_most(&mut outbox, 5);
        outbox.push(Message::new(abort, Payload::None, 0, 0));
        outbox.let_go(ChannelId(3));
        assert!(write_most(&mut outbox, 0).is_empty());
    }

    #[test]
    fn a_heartbeat_last_words_and_a_goodbye_need_no_room() {
        for kind in [Kind::Heartbeat, Kind::Abort, Kind::Bye] {
            let mut outbox = Outbox::default();
            outbox.push(Message::new(Header::bare(kind, NodeId(0), 0), Payload::None, 0, 0));
            push(&mut outbox, 1, 0, &[1.0; 8]);
            assert_eq!(write_most(&mut outbox, 0).len(), Header::SIZE);
            assert!(write_most(&mut outbox, 0).is_empty());
        }
    }
}
