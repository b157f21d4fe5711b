//! One operation on one rank: what it sends, what it awaits, what becomes of it. No I/O.
//!
//! Tensors travel in pieces. There are three ways an operation may go:
//!
//! * *Exchange*: one step, each pair of ranks on its own. What comes is assigned or reduced into
//!   place. Small all-reduces go this way too: every rank sends its whole tensor to every other
//!   rank, in one latency, and combines all of them in rank order.
//! * *Sliced*: every rank owns an equal slice. In step 0 contributions go to the owner of their slice; when a
//!   piece of the slice is complete the owner sends it to those who lack it, step 1, while later pieces are still
//!   coming. An all-reduce sends 2·N·(P-1)/P bytes from each rank, whatever P is. A large broadcast
//!   is the same with one contributor.
//! * *Message*: from one rank to another.

use super::request::{Request, Words};
use super::work::Completion;
use crate::engine::outbox::{Message, Payload};
use crate::memory::region::Region;
use poseidon_core::queue::operation_urgency;
use poseidon_core::reduce::{divide, reduce};
use poseidon_core::wire::{Header, Place, Signature};
use poseidon_core::{Dtype, NodeId, ReduceOp};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a piece: a few times what a link takes at once, so that headers cost nothing, and short
/// enough that the second step begins early.
pub(super) const PIECE: usize = 256 << 10;
/// Up to this many bytes an all-reduce sends the whole tensor to every rank, if these are no more
/// than `SMALL_TOTAL` bytes altogether: one latency instead of two is worth more than the bytes.
const SMALL: usize = 16 << 10;
const SMALL_TOTAL: usize = 64 << 10;
/// From this many bytes on a broadcast is sliced: it goes through all ranks rather than from the
/// root to each.
const LARGE_BROADCAST: usize = 256 << 10;

pub(super) struct Operation {
    /// Counts the operations of this rank, in the order they were begun.
    pub(super) ticket: u64,
    pub(super) key: Key,
    flow: Flow,
    me: usize,
    /// Messages that links have not taken to their end.
    unsent: usize,
    /// By rank: pieces still to come, by step.
    awaited: Vec<[u32; 2]>,
    /// By rank: pieces that have come, by step. They come in order.
    arrived: Vec<[u32; 2]>,
    pub(super) begun: Duration,
    pub(super) deadline: Duration,
    pub(super) completion: Arc<Completion>,
}

/// How frames find their operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Key {
    Collective { sequence: u64, signature: Signature },
    Send { to: u16, tag: u32 },
    Receive { from: Option<u16>, tag: u32, bound: Option<(u16, u64)> },
}

enum Flow {
    Exchange {
        /// By rank: where what comes from it goes.
        into: Vec<Option<Region>>,
        mode: Mode,
        /// Everybody's tensor, side by side, and where their reduction goes.
        combine: Option<(Vec<u64>, Region)>,
        /// The result is divided by the number of ranks.
        divided: Option<(Region, Dtype)>,
    },
    Sliced {
        whole: Region,
        slices: Vec<Range<usize>>,
        mode: Mode,
        /// By piece of this rank's slice: contributions that have not come.
        missing: Vec<u16>,
        /// Who gets this rank's slice when it is complete.
        lacking: Vec<usize>,
    },
    Message(Option<Region>),
}

/// What becomes of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Assign,
    Reduce(Dtype, ReduceOp),
}

/// What one operation has that another operation of the same request has not.
pub(super) struct Start {
    pub(super) ticket: u64,
    /// The number among the group's collectives, or among the messages to that rank.
    pub(super) sequence: u64,
    pub(super) me: u16,
    pub(super) size: u16,
    pub(super) begun: Duration,
    pub(super) deadline: Duration,
    pub(super) completion: Arc<Completion>,
}

impl Operation {
    /// The operation of `request`, which was checked. Messages that can be sent at once go to
    /// `send`.
    pub(super) fn begin(
        request: &Request,
        start: Start,
        mut send: impl FnMut(usize, Message),
    ) -> Self {
        let (me, size) = (usize::from(start.me), usize::from(start.size));
        let Start { ticket, sequence, begun, deadline, completion, .. } = start;
        let signature = request.signature();
        let key = match request {
            Request::Send { to, tag, .. } => Key::Send { to: *to, tag: *tag },
            Request::Receive { from, tag, .. } => {
                Key::Receive { from: *from, tag: *tag, bound: None }
            }
            _ => Key::Collective { sequence, signature },
        };
        let mut operation = Self {
            ticket,
            key,
            flow: Flow::Message(None),
            me,
            unsent: 0,
            awaited: vec![[0; 2]; size],
            arrived: vec![[0; 2]; size],
            begun,
            deadline,
            completion,
        };
        // The rank after this one first, so that not all begin with rank 0.
        let others = || (1..size).map(move |i| (me + i) % size);
        let nobody = || vec![None; size];
        let only = |rank: u16, region: Region| {
            let mut by_rank = vec![None; size];
            by_rank[usize::from(rank)] = Some(region);
            by_rank
        };
        let of = |list: &[super::Tensor]| list.iter().map(|t| Some(t.region)).collect::<Vec<_>>();
        let exchange = |into, mode| Flow::Exchange { into, mode, combine: None, divided: None };
        let mut out = nobody();
        operation.flow = match request {
            Request::AllReduce { tensor, op } => {
                let (len, bytes) = (tensor.region.len(), tensor.region.len() * (size - 1));
                if len <= SMALL && bytes <= SMALL_TOTAL {
                    out = vec![Some(tensor.region); size];
                    Self::combining(tensor, size, me)
                } else {
                    let mode = Mode::Reduce(tensor.dtype, *op);
                    let everyone: Vec<usize> = others().collect();
                    operation.slice(tensor, mode, &everyone, &everyone, &mut send)
                }
            }
            Request::Broadcast { tensor, root } if tensor.region.len() < LARGE_BROADCAST => {
                let root_here = usize::from(*root) == me;
                out = if root_here { vec![Some(tensor.region); size] } else { nobody() };
                let into = if root_here { nobody() } else { only(*root, tensor.region) };
                exchange(into, Mode::Assign)
            }
            Request::Broadcast { tensor, root } => {
                let root = usize::from(*root);
                let contributors = if me == root { Vec::new() } else { vec![root] };
                let lacking: Vec<usize> = others().filter(|&rank| rank != root).collect();
                operation.slice(tensor, Mode::Assign, &contributors, &lacking, &mut send)
            }
            Request::Reduce { tensor, root, op } => {
                let mode = Mode::Reduce(tensor.dtype, *op);
                if usize::from(*root) == me {
                    let divided = (*op == ReduceOp::Mean).then_some((tensor.region, tensor.dtype));
                    let into = vec![Some(tensor.region); size];
                    Flow::Exchange { into, mode, combine: None, divided }
                } else {
                    out = only(*root, tensor.region);
                    exchange(nobody(), mode)
                }
            }
            Request::AllGather { input, outputs } => {
                out = vec![Some(input.region); size];
                copy(&input.region, &outputs[me].region);
                exchange(of(outputs), Mode::Assign)
            }
            Request::ReduceScatter { inputs, output, op } => {
                out = of(inputs);
                copy(&inputs[me].region, &output.region);
                let mode = Mode::Reduce(output.dtype, *op);
                let divided = (*op == ReduceOp::Mean).then_some((output.region, output.dtype));
                let into = vec![Some(output.region); size];
                Flow::Exchange { into, mode, combine: None, divided }
            }
            Request::Gather { input, outputs, root } => {
                if usize::from(*root) == me {
                    copy(&input.region, &outputs[me].region);
                } else {
                    out = only(*root, input.region);
                }
                let here = usize::from(*root) == me;
                exchange(if here { of(outputs) } else { nobody() }, Mode::Assign)
            }
            Request::Scatter { inputs, output, root } => {
                if usize::from(*root) == me {
                    copy(&inputs[me].region, &output.region);
                    out = of(inputs);
                    exchange(nobody(), Mode::Assign)
                } else {
                    exchange(only(*root, output.region), Mode::Assign)
                }
            }
            Request::AllToAll { inputs, outputs } => {
                out = of(inputs);
                copy(&inputs[me].region, &outputs[me].region);
                exchange(of(outputs), Mode::Assign)
            }
            Request::Barrier => {
                let nothing = Region::EMPTY;
                out = vec![Some(nothing); size];
                exchange(vec![Some(nothing); size], Mode::Assign)
            }
            Request::Send { tensor, to, tag } => {
                let place = Place { sequence, step: 0, piece: 0 };
                let header = place.message(NodeId(0), *tag, tensor.region.len(), 0);
                operation.unsent = 1;
                send(usize::from(*to), operation.message(header, tensor.region));
                Flow::Message(None)
            }
            Request::Receive { tensor, .. } => Flow::Message(Some(tensor.region)),
        };
        if let Flow::Exchange { into, .. } = &mut operation.flow {
            into[me] = None;
            for (awaited, region) in operation.awaited.iter_mut().zip(into) {
                awaited[0] = region.map_or(0, |region| pieces(region.len()));
            }
            for rank in others() {
                if let Some(region) = out[rank] {
                    operation.unsent += 1;
                    send(rank, operation.pieces(0, 0, region));
                }
            }
        }
        operation
    }

    /// A small all-reduce: everybody's tensor gets a place, in rank order.
    fn combining(tensor: &super::Tensor, size: usize, me: usize) -> Flow {
        let len = tensor.region.len();
        let stride = len.div_ceil(size_of::<u64>());
        let mut scratch = vec![0u64; stride * size];
        // SAFETY: the scratch is kept, untouched, in the operation until everything has come.
        let all = unsafe { Region::of(&mut scratch) };
        let place = |rank: usize| all.part(rank * stride * 8..rank * stride * 8 + len);
        let into = (0..size).map(|rank| (rank != me).then(|| place(rank))).collect();
        let combine = Some((scratch, tensor.region));
        Flow::Exchange { into, mode: Mode::Assign, combine, divided: None }
    }

    /// Cuts the tensor into a slice for each rank. `contributors` send theirs of this rank's slice,
    /// and `lacking` get it when it is complete. This rank contributes if it is the root of a
    /// broadcast, or if all ranks contribute.
    fn slice(
        &mut self,
        tensor: &super::Tensor,
        mode: Mode,
        contributors: &[usize],
        lacking: &[usize],
        send: &mut impl FnMut(usize, Message),
    ) -> Flow {
        let (size, me, whole) = (self.awaited.len(), self.me, tensor.region);
        let (count, width) = (tensor.count(), tensor.dtype.size());
        let edge = |rank: usize| (count as u128 * rank as u128 / size as u128) as usize * width;
        let slices: Vec<_> = (0..size).map(|rank| edge(rank)..edge(rank + 1)).collect();
        let own = pieces(slices[me].len());
        let is_root = contributors.is_empty();
        let reduces = mode != Mode::Assign;
        for rank in (1..size).map(|i| (me + i) % size) {
            if contributors.contains(&rank) {
                self.awaited[rank][0] = own;
            }
            // A root has everything; the others lack everybody's slice.
            if !is_root {
                self.awaited[rank][1] = pieces(slices[rank].len());
            }
            if reduces || is_root {
                self.unsent += 1;
                send(rank, self.pieces(0, 0, whole.part(slices[rank].clone())));
            }
        }
        if is_root {
            for &rank in lacking {
                self.unsent += 1;
                send(rank, self.pieces(1, 0, whole.part(slices[me].clone())));
            }
        }
        let missing = vec![contributors.len() as u16; own as usize];
        Flow::Sliced { whole, slices, mode, missing, lacking: lacking.to_vec() }
    }

    /// The pieces of `region`, from `piece` on, for one rank.
    fn pieces(&self, step: u8, piece: u32, region: Region) -> Message {
        // Messages are made where they are begun.
        let Key::Collective { sequence, signature } = self.key else {
            unreachable!("a message has one run of pieces")
        };
        // The engine fills in the sender and the length of each piece.
        let header = signature.header(NodeId(0), Place { sequence, step, piece }, 0);
        self.message(header, region)
    }

    fn message(&self, header: Header, region: Region) -> Message {
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
        if let (Key::Receive { bound, .. }, Flow::Message(Some(region))) =
            (&mut self.key, &self.flow)
        {
            *bound = Some((rank, sequence));
            self.awaited[usize::from(rank)][0] = pieces(region.len());
        }
    }

    /// Where a frame's payload goes, or why this operation does not take it.
    pub(super) fn open(
        &self,
        rank: usize,
        place: Place,
        length: usize,
    ) -> Result<(Region, Mode), String> {
        let step = usize::from(place.step);
        let piece = place.piece;
        if step > 1 || self.awaited[rank][step] == 0 {
            return Err(format!("nothing of step {step} is awaited from it"));
        }
        if piece != self.arrived[rank][step] {
            let next = self.arrived[rank][step];
            return Err(format!("piece {piece} of step {step} before piece {next}"));
        }
        let (region, mode) = match &self.flow {
            // Awaited pieces are counted only where there is a place for them.
            Flow::Exchange { into, mode, .. } => (into[rank].ok_or("it is not awaited")?, *mode),
            Flow::Sliced { whole, slices, mode, .. } => {
                let owner = if step == 0 { self.me } else { rank };
                let mode = if step == 0 { *mode } else { Mode::Assign };
                (whole.part(slices[owner].clone()), mode)
            }
            Flow::Message(region) => (region.ok_or("it is not awaited")?, Mode::Assign),
        };
        let start = region.len().min(piece as usize * PIECE);
        let region = region.part(start..region.len().min(start + PIECE));
        if region.len() != length {
            let expected = region.len();
            return Err(format!("piece {piece} has {length} bytes, expected {expected}"));
        }
        Ok((region, mode))
    }

    /// A frame's payload is in its place. If that completes a piece of this rank's slice, the piece
    /// goes to `send`, for the ranks that lack it.
    pub(super) fn landed(
        &mut self,
        rank: usize,
        place: Place,
        mut send: impl FnMut(usize, Message),
    ) {
        let step = usize::from(place.step);
        self.awaited[rank][step] -= 1;
        self.arrived[rank][step] += 1;
        let Flow::Sliced { whole, slices, mode, missing, lacking } = &mut self.flow else { return };
        let left = match missing.get_mut(place.piece as usize) {
            Some(left) if step == 0 => left,
            _ => return,
        };
        *left -= 1;
        if *left > 0 {
            return;
        }
        let slice = whole.part(slices[self.me].clone());
        let start = slice.len().min(place.piece as usize * PIECE);
        let piece = slice.part(start..slice.len().min(start + PIECE));
        if let Mode::Reduce(dtype, ReduceOp::Mean) = *mode {
            // SAFETY: complete, and not yet sent: nobody else looks at it.
            divide(dtype, unsafe { piece.bytes_mut() }, slices.len());
        }
        let lacking = std::mem::take(lacking);
        for &rank in &lacking {
            self.unsent += 1;
            send(rank, self.pieces(1, place.piece, piece));
        }
        if let Flow::Sliced { lacking: slot, .. } = &mut self.flow {
            *slot = lacking;
        }
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
            _ => self.awaited[rank] != [0; 2],
        }
    }

    /// Whether this receives a message from any rank, and the message has not come yet.
    pub(super) fn is_from_any(&self) -> bool {
        matches!(self.key, Key::Receive { from: None, bound: None, .. })
    }

    /// Whether everything has come and gone.
    pub(super) fn is_complete(&self) -> bool {
        let unbound = matches!(self.key, Key::Receive { bound: None, .. });
        !unbound && self.unsent == 0 && self.awaited.iter().all(|steps| *steps == [0; 2])
    }

    /// The arithmetic that comes last.
    pub(super) fn conclude(&mut self) {
        let size = self.awaited.len();
        let Flow::Exchange { combine, divided, .. } = &mut self.flow else { return };
        if let Some((region, dtype)) = divided {
            // SAFETY: everything has come; the operation still owns the memory.
            divide(*dtype, unsafe { region.bytes_mut() }, size);
        }
        let Some((scratch, target)) = combine else { return };
        let Key::Collective { signature: Signature { dtype, op, .. }, .. } = self.key else {
            return;
        };
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
        let (len, stride) = (target.len(), bytes.len() / size);
        // SAFETY: sent to everybody and not yet written: ours alone until the operation is done.
        let target = unsafe { target.bytes_mut() };
        bytes[self.me * stride..][..len].copy_from_slice(target);
        let (first, others) = bytes.split_at_mut(stride);
        for other in others.chunks(stride.max(1)) {
            reduce(dtype, op, &mut first[..len], &other[..len]);
        }
        if op == ReduceOp::Mean {
            divide(dtype, &mut first[..len], size);
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

/// Copies this rank's own part of an operation that has just begun.
fn copy(from: &Region, to: &Region) {
    // SAFETY: the operation has been lent both, and nothing of it is under way yet.
    unsafe { to.copy_from(from) }
}

/// The number of pieces of a tensor of `len` bytes. An empty tensor has one, which is empty.
fn pieces(len: usize) -> u32 {
    len.div_ceil(PIECE).max(1) as u32
}
