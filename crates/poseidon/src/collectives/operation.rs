//! One operation on one rank: what it still awaits and sends, and what becomes of what comes. No I/O.
//!
//! What an operation sends, awaits and passes on is its [`Flow`].

use super::flow::{Flow, Mode, Stated, Stream, piece_of};
use super::members::Ways;
use super::request::{Request, Words, is_uneven};
use super::work::Completion;
use crate::engine::outbox::{Message, Payload};
use crate::memory::region::Region;
use poseidon_core::queue::operation_urgency;
use poseidon_core::reduce::{divide, reduce};
use poseidon_core::wire::{Place, Signature};
use poseidon_core::{NodeId, ReduceOp};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a piece: a few times what a link takes at once, so that headers cost nothing, and short
/// enough that the second step begins early.
pub(super) const PIECE: usize = 256 << 10;

pub(super) struct Operation {
    /// Counts the operations of this rank, in the order they were begun.
    pub(super) ticket: u64,
    pub(super) key: Key,
    flow: Flow,
    me: usize,
    size: usize,
    /// Messages that links have not taken to their end.
    unsent: usize,
    /// Streams of which pieces are still to come.
    open_streams: usize,
    pub(super) begun: Duration,
    pub(super) deadline: Duration,
    pub(super) completion: Arc<Completion>,
}

/// How frames find their operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Key {
    Collective { sequence: u64, signature: Signature },
    Send { to: u16, tag: u32 },
    Receive { from: Option<u16>, tag: u32, bound: Option<(u16, u64)>, region: Region },
}

/// What one operation has that another operation of the same request has not.
pub(super) struct Start {
    pub(super) ticket: u64,
    /// The number among the group's collectives, or among the messages to that rank.
    pub(super) sequence: u64,
    /// What the whole collective is, of which the request may be a part. None for messages.
    pub(super) signature: Option<Signature>,
    pub(super) begun: Duration,
    pub(super) deadline: Duration,
    pub(super) completion: Arc<Completion>,
}

impl Operation {
    /// The operation of `request`, which was checked. Messages that can be sent at once go to
    /// `send`.
    pub(super) fn begin(
        request: Request,
        start: Start,
        ways: &Ways,
        mut send: impl FnMut(usize, Message),
    ) -> Self {
        let Start { ticket, sequence, signature, begun, deadline, completion } = start;
        let key = match &request {
            Request::Send { to, tag, .. } => Key::Send { to: *to, tag: *tag },
            Request::Receive { from, tag, tensor } => {
                Key::Receive { from: *from, tag: *tag, bound: None, region: tensor.region }
            }
            _ => {
                let signature = signature.unwrap_or_else(|| request.signature());
                Key::Collective { sequence, signature }
            }
        };
        let mut flow = Flow::of(request, ways);
        let first = std::mem::take(&mut flow.first);
        let operation = Self {
            ticket,
            key,
            unsent: first.len(),
            open_streams: flow.streams.len(),
            flow,
            me: ways.me.into(),
            size: ways.size().into(),
            begun,
            deadline,
            completion,
        };
        for run in first {
            let place = Place { sequence, step: run.step, slice: run.slice, piece: 0 };
            let stated = Stated::of(run.region.len());
            send(run.to.into(), operation.message(place, run.region, stated));
        }
        operation
    }

    /// The pieces of `region`, from `place` on, for one rank. They are part of a slice or a message of
    /// length `stated`. The engine fills in the sender and the length of each piece.
    fn message(&self, place: Place, region: Region, stated: Stated) -> Message {
        let header = match self.key {
            Key::Collective { signature, .. } if is_uneven(signature.operation) => {
                Signature { count: stated.0, ..signature }.header(NodeId(0), place, 0)
            }
            Key::Collective { signature, .. } => signature.header(NodeId(0), place, 0),
            Key::Send { tag, .. } | Key::Receive { tag, .. } => {
                place.message(NodeId(0), tag, stated.0, 0)
            }
        };
        Message {
            header,
            payload: Payload::Region(region),
            urgency: operation_urgency(self.ticket),
            receipt: self.ticket,
            piece: PIECE,
        }
    }

    /// The first frame of a message is here, and this operation receives it.
    pub(super) fn bind(&mut self, rank: u16, sequence: u64) {
        if let Key::Receive { bound, region, .. } = &mut self.key {
            *bound = Some((rank, sequence));
            self.flow.take(rank, *region);
            self.open_streams += 1;
        }
    }

    /// Where a frame's payload goes, or why this operation does not take it. `stated` is the length of
    /// all that the frame is a part of, if the frame says so. It is judged with the first piece: a
    /// tensor of another length must not end up here by half.
    pub(super) fn open(
        &self,
        rank: usize,
        place: Place,
        length: usize,
        stated: Option<Stated>,
    ) -> Result<(Region, Mode), String> {
        let Place { step, slice, piece, .. } = place;
        let stream = self.stream(rank, place).map(|index| &self.flow.streams[index]);
        let Some(stream) = stream.filter(|stream| stream.is_open()) else {
            return Err(format!("nothing of step {step} of slice {slice} is awaited from it"));
        };
        let awaited = Stated::of(stream.region.len());
        if let Some(sent) = stated.filter(|sent| *sent != awaited) {
            return Err(format!("{sent} are sent where {awaited} are awaited"));
        }
        if piece != stream.arrived {
            let next = stream.arrived;
            return Err(format!("piece {piece} of step {step} before piece {next}"));
        }
        let slice = self.flow.slices.get(usize::from(slice));
        let missing = slice.and_then(|slice| slice.missing.get(piece as usize));
        if let Some(missing) = missing.filter(|missing| step > 0 && **missing > 0) {
            return Err(format!(
                "the result of piece {piece} before {missing} contributions to it"
            ));
        }
        let region = piece_of(&stream.region, piece);
        if region.len() != length {
            let expected = region.len();
            return Err(format!("piece {piece} has {length} bytes, expected {expected}"));
        }
        Ok((region, stream.mode))
    }

    /// A frame's payload is in its place. A piece that is complete goes to `send`, for the ranks that
    /// have it from this one.
    pub(super) fn landed(
        &mut self,
        rank: usize,
        place: Place,
        mut send: impl FnMut(usize, Message),
    ) {
        let Some(index) = self.stream(rank, place) else { return };
        let stream = &mut self.flow.streams[index];
        stream.arrived += 1;
        self.open_streams -= usize::from(!stream.is_open());
        let piece = piece_of(&stream.region, place.piece);
        let stated = Stated::of(stream.region.len());
        let Some(slice) = self.flow.slices.get_mut(usize::from(place.slice)) else { return };
        if place.step == 0 {
            if let Some(missing) = slice.missing.get_mut(place.piece as usize) {
                *missing -= 1;
                if *missing > 0 {
                    return;
                }
            }
            if let Some(dtype) = slice.divided {
                // SAFETY: complete, and not yet sent: nobody else looks at it.
                divide(dtype, unsafe { piece.bytes_mut() }, self.size);
            }
        }
        let onward = &self.flow.slices[usize::from(place.slice)].onward[usize::from(place.step)];
        self.unsent += onward.len();
        for (to, step) in onward {
            send(usize::from(*to), self.message(Place { step: *step, ..place }, piece, stated));
        }
    }

    /// The stream that a frame of `rank` belongs to.
    fn stream(&self, rank: usize, place: Place) -> Option<usize> {
        let key = (rank as u16, place.step, place.slice);
        self.flow.streams.binary_search_by_key(&key, Stream::key).ok()
    }

    /// A link has taken the last byte of a message.
    pub(super) fn sent(&mut self) {
        self.unsent -= 1;
    }

    /// Whether `rank` still has to send something for this operation.
    pub(super) fn awaits(&self, rank: usize) -> bool {
        match self.key {
            Key::Receive { from, bound: None, .. } => {
                from.is_none_or(|from| usize::from(from) == rank)
            }
            _ => self.open_streams_of(rank).next().is_some(),
        }
    }

    /// Whether all that `rank` still has to send may be late because of other ranks: `rank` passes
    /// on what they send.
    pub(super) fn awaits_others_through(&self, rank: usize) -> bool {
        let mut streams = self.open_streams_of(rank).peekable();
        streams.peek().is_some() && streams.all(|stream| stream.is_passed_on)
    }

    fn open_streams_of(&self, rank: usize) -> impl Iterator<Item = &Stream> {
        let of = move |stream: &&Stream| usize::from(stream.from) == rank && stream.is_open();
        self.flow.streams.iter().filter(of)
    }

    /// Whether this receives a message from any rank, and the message has not come yet.
    pub(super) fn is_from_any(&self) -> bool {
        matches!(self.key, Key::Receive { from: None, bound: None, .. })
    }

    /// Whether everything has come and gone.
    pub(super) fn is_complete(&self) -> bool {
        let unbound = matches!(self.key, Key::Receive { bound: None, .. });
        !unbound && self.unsent == 0 && self.open_streams == 0
    }

    /// The arithmetic that comes last.
    pub(super) fn conclude(&mut self) {
        let Some((scratch, target)) = &mut self.flow.combine else { return };
        let Key::Collective { signature: Signature { dtype, op, .. }, .. } = self.key else {
            return;
        };
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
        let (len, stride) = (target.len(), bytes.len() / self.size);
        // SAFETY: sent to everybody and not yet written: ours alone until the operation is done.
        let target = unsafe { target.bytes_mut() };
        bytes[self.me * stride..][..len].copy_from_slice(target);
        let (first, others) = bytes.split_at_mut(stride);
        for other in others.chunks(stride.max(1)) {
            reduce(dtype, op, &mut first[..len], &other[..len]);
        }
        if op == ReduceOp::Mean {
            divide(dtype, &mut first[..len], self.size);
        }
        target.copy_from_slice(&first[..len]);
    }

    /// The operation in words.
    pub(super) fn words(&self) -> String {
        match self.key {
            Key::Collective { sequence, signature } => {
                format!("{} (collective {sequence} of the group)", Words(signature))
            }
            Key::Send { to, tag } => format!("send to rank {to} with tag {tag}"),
            Key::Receive { from: Some(from), tag, .. } => {
                format!("receive from rank {from} with tag {tag}")
            }
            Key::Receive { from: None, tag, .. } => format!("receive from any rank with tag {tag}"),
        }
    }
}
