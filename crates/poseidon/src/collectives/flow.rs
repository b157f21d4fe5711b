//! What one operation sends, awaits and passes on, on one rank.
//!
//! A tensor is cut into *slices*, and a slice travels in pieces. There are four ways a slice may go:
//!
//! * *Straight*: from one rank to another. All slices of gather, scatter, all_to_all and messages.
//!   Small all-reduces go this way too, where ranks do not share ports: every rank sends its whole
//!   tensor to every other rank, in one latency, and combines all of them in rank order.
//! * *Up*: contributions go up the tree of the slice's root, step 0. A rank that collects adds the
//!   contributions of its children to its own, and sends a piece on when the piece is complete, while
//!   later pieces are still coming. The root ends with the reduction. All slices of reduce and
//!   reduce_scatter.
//! * *Up and down*: the same, and the root sends each complete piece back down the tree, step 1. In an
//!   all-reduce every rank is the root of a slice, and the slices of every host are equally long
//!   together. 2·N·(P-1)/P bytes leave each rank if no two share a host; and if ranks share hosts, as
//!   much leaves each host, with the hosts for P. A small all-reduce among ranks that share hosts is
//!   one slice.
//! * *Down*: the root's slice goes down its tree, step 0. All slices of all_gather, and small
//!   broadcasts. In a large broadcast every rank is the root of a slice as in an all-reduce, and a
//!   slice goes from the rank that has the tensor up to the slice's root, step 0, and down to all
//!   others, step 1.

use super::Tensor;
use super::members::{Source, Ways};
use super::operation::PIECE;
use super::request::Request;
use crate::memory::region::Region;
use poseidon_core::{Dtype, ReduceOp};
use std::fmt;
use std::ops::Range;

/// Up to this many bytes an all-reduce sends the whole tensor to every rank, if these are no more
/// than `SMALL_TOTAL` bytes altogether: one latency instead of two is worth more than the bytes.
const SMALL: usize = 16 << 10;
const SMALL_TOTAL: usize = 64 << 10;
/// Where ranks share hosts, an all-reduce is one slice up to this many bytes, if all hosts together
/// send no more than `ONE_SLICE_TOTAL`. A slice for each rank means many short frames. On 4 hosts of
/// 4 ranks with ports of 1 Gbit/s, on two cores, one slice of 256 bytes took 0.4 ms, of 16 KiB 0.6 and
/// of 64 KiB 1.7. A slice for each rank took 1.8, 2.4 and 3.7 ms. At 256 KiB it was 15 ms against 7.
/// The whole tensor to every rank took 1.9 ms for 256 bytes.
const ONE_SLICE: usize = 64 << 10;
const ONE_SLICE_TOTAL: usize = 256 << 10;
/// From this many bytes on a broadcast is sliced: it goes through all ranks rather than from the
/// root to each.
const LARGE_BROADCAST: usize = 256 << 10;

/// What one operation sends, awaits and passes on, on one rank.
#[derive(Default)]
pub(super) struct Flow {
    /// What is sent at once.
    pub(super) first: Vec<Run>,
    /// What comes, in the order of senders, steps and slices.
    pub(super) streams: Vec<Stream>,
    /// By number: what becomes of a slice's pieces here. Empty if nothing is passed on or counted.
    pub(super) slices: Vec<Slice>,
    /// Everybody's tensor, side by side, and where their reduction goes.
    pub(super) combine: Option<(Vec<u64>, Region)>,
    /// Where contributions meet that may not meet in the program's own tensors.
    scratch: Vec<Vec<u64>>,
}

/// Pieces that go to one rank: all pieces of `region`.
pub(super) struct Run {
    pub(super) to: u16,
    pub(super) step: u8,
    pub(super) slice: u16,
    pub(super) region: Region,
}

/// Pieces that come from one rank. They come in order.
pub(super) struct Stream {
    pub(super) from: u16,
    pub(super) step: u8,
    pub(super) slice: u16,
    pub(super) region: Region,
    pub(super) mode: Mode,
    /// The sender has the pieces from other ranks, or adds what other ranks send.
    pub(super) is_passed_on: bool,
    /// Pieces that have come.
    pub(super) arrived: u32,
}

/// What becomes of a slice's pieces at one rank.
#[derive(Clone, Default)]
pub(super) struct Slice {
    /// By piece: contributions that have not come. Empty if there is only one.
    pub(super) missing: Vec<u16>,
    /// A piece that is complete is divided by the number of ranks.
    pub(super) divided: Option<Dtype>,
    /// By step that a piece came with: the ranks it goes to next, and with which step. A piece of
    /// step 0 goes on when all contributions to the piece have come.
    pub(super) onward: [Vec<(u16, u8)>; 2],
}

/// What becomes of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Assign,
    Reduce(Dtype, ReduceOp),
}

/// The bytes of a slice that may go round a ring, if `request` has such slices. A broadcast has none:
/// its slices go up and down the same way.
fn slice_bytes(request: &Request, size: u16) -> usize {
    match request {
        Request::AllReduce { tensor, .. } => tensor.region.len() / usize::from(size),
        Request::Reduce { tensor, .. } => tensor.region.len(),
        // Tensors of ranks may have different lengths. All ranks know all of them, and all have to take
        // the same way.
        Request::AllGather { outputs: tensors, .. }
        | Request::ReduceScatter { inputs: tensors, .. } => {
            tensors.iter().map(|tensor| tensor.region.len()).sum::<usize>() / usize::from(size)
        }
        _ => 0,
    }
}

impl Flow {
    /// The flow of `request`, which was checked. From now on the flow alone has the request's
    /// tensors.
    pub(super) fn of(request: Request, ways: &Ways) -> Self {
        let mut flow = Self::default();
        let ways = ways.for_slices(slice_bytes(&request, ways.size()));
        match &request {
            Request::AllReduce { tensor, op } => flow.all_reduce(tensor, *op, ways),
            Request::Broadcast { tensor, root } if tensor.region.len() < LARGE_BROADCAST => {
                flow.cut(1);
                flow.down(0, *root, tensor.region, ways);
            }
            Request::Broadcast { tensor, root } => flow.broadcast(tensor, *root, ways),
            Request::Reduce { tensor, root, op } => {
                flow.cut(1);
                let mode = Mode::Reduce(tensor.dtype, *op);
                flow.up(0, *root, tensor.region, mode, ways);
            }
            Request::AllGather { input, outputs } => {
                input.copy_to(&outputs[usize::from(ways.me)]);
                flow.cut(ways.size());
                for (slice, output) in (0..).zip(outputs) {
                    let region = if slice == ways.me { input.region } else { output.region };
                    flow.down(slice, slice, region, ways);
                }
            }
            Request::ReduceScatter { inputs, output, op } => {
                inputs[usize::from(ways.me)].copy_to(output);
                flow.cut(ways.size());
                let mode = Mode::Reduce(output.dtype, *op);
                for slice in ways.others() {
                    flow.up(slice, slice, inputs[usize::from(slice)].region, mode, ways);
                }
                flow.up(ways.me, ways.me, output.region, mode, ways);
            }
            Request::Gather { input, outputs, root } if *root == ways.me => {
                input.copy_to(&outputs[usize::from(ways.me)]);
                ways.others().for_each(|from| flow.take(from, outputs[usize::from(from)].region));
            }
            Request::Gather { input, root, .. } => flow.give(*root, input.region),
            Request::Scatter { inputs, output, root } if *root == ways.me => {
                inputs[usize::from(ways.me)].copy_to(output);
                ways.others().for_each(|to| flow.give(to, inputs[usize::from(to)].region));
            }
            Request::Scatter { output, root, .. } => flow.take(*root, output.region),
            Request::AllToAll { inputs, outputs } => {
                let me = usize::from(ways.me);
                inputs[me].copy_to(&outputs[me]);
                for other in ways.others() {
                    flow.give(other, inputs[usize::from(other)].region);
                    flow.take(other, outputs[usize::from(other)].region);
                }
            }
            Request::Barrier if ways.is_flat() => {
                for other in ways.others() {
                    flow.give(other, Region::EMPTY);
                    flow.take(other, Region::EMPTY);
                }
            }
            Request::Barrier => {
                flow.cut(1);
                flow.up_and_down(0, 0, Region::EMPTY, Mode::Assign, ways);
            }
            Request::Send { tensor, to, .. } => flow.give(*to, tensor.region),
            // The stream is added when the message comes: only then its sender is known.
            Request::Receive { .. } => {}
        }
        flow.streams.sort_unstable_by_key(Stream::key);
        flow
    }

    fn all_reduce(&mut self, tensor: &Tensor, op: ReduceOp, ways: &Ways) {
        let (len, mode) = (tensor.region.len(), Mode::Reduce(tensor.dtype, op));
        if ways.is_flat() {
            let everywhere = len * usize::from(ways.size() - 1);
            if len <= SMALL && everywhere <= SMALL_TOTAL {
                return self.combine(tensor, ways);
            }
        } else if len <= ONE_SLICE && len * (ways.hosts() - 1) <= ONE_SLICE_TOTAL {
            self.cut(1);
            return self.up_and_down(0, 0, tensor.region, mode, ways);
        }
        self.cut(ways.size());
        for slice in ways.others().chain([ways.me]) {
            let region = tensor.region.part(range_of(slice, tensor, ways));
            self.up_and_down(slice, slice, region, mode, ways);
        }
    }

    /// A small all-reduce: everybody's tensor gets a place, in rank order.
    fn combine(&mut self, tensor: &Tensor, ways: &Ways) {
        let len = tensor.region.len();
        let stride = len.div_ceil(size_of::<u64>());
        let mut scratch = vec![0u64; stride * usize::from(ways.size())];
        // SAFETY: the scratch is kept, untouched, in the operation until everything has come.
        let all = unsafe { Region::of(&mut scratch) };
        for other in ways.others() {
            let start = usize::from(other) * stride * size_of::<u64>();
            self.give(other, tensor.region);
            self.take(other, all.part(start..start + len));
        }
        self.combine = Some((scratch, tensor.region));
    }

    fn broadcast(&mut self, tensor: &Tensor, origin: u16, ways: &Ways) {
        self.cut(ways.size());
        for root in ways.others().chain([ways.me]) {
            let region = tensor.region.part(range_of(root, tensor, ways));
            let way = ways.of(root);
            let source = ways.source(root, origin);
            let onward = way.parent.map(|parent| (parent, 0)).into_iter();
            let onward = onward.chain(way.children.iter().map(|child| (*child, 1)));
            // What comes from a neighbour does not go back there.
            let from = match source {
                Source::Here => None,
                Source::Child(from) | Source::Parent(from) => Some(from),
            };
            let onward: Vec<_> = onward.filter(|(to, _)| Some(*to) != from).collect();
            match source {
                Source::Here => {
                    for (to, step) in onward {
                        self.first.push(Run { to, step, slice: root, region });
                    }
                }
                Source::Child(from) | Source::Parent(from) => {
                    let step = u8::from(Source::Parent(from) == source);
                    self.await_from(from, step, root, region, Mode::Assign, from != origin);
                    self.slices[usize::from(root)].onward[usize::from(step)] = onward;
                }
            }
        }
    }

    /// The slice goes up, and its reduction comes down. `region` is this rank's contribution, and the
    /// result.
    fn up_and_down(&mut self, slice: u16, root: u16, region: Region, mode: Mode, ways: &Ways) {
        let way = ways.of(root);
        self.collect(slice, root, region, mode, ways);
        let down = way.receivers.iter().map(|to| (*to, 1)).collect();
        let step = match way.parent.zip(way.source) {
            None => 0,
            Some((parent, source)) => {
                let is_passed_on = !ways.is_flat();
                self.await_from(source, 1, slice, region, Mode::Assign, is_passed_on);
                if way.children.is_empty() {
                    self.first.push(Run { to: parent, step: 0, slice, region });
                }
                1
            }
        };
        self.slices[usize::from(slice)].onward[step] = down;
    }

    /// The slice goes up. `region` is this rank's contribution. It stays as it is, except at the
    /// root, where it becomes the result.
    fn up(&mut self, slice: u16, root: u16, region: Region, mode: Mode, ways: &Ways) {
        let way = ways.of(root);
        match way.parent {
            Some(to) if way.children.is_empty() => {
                self.first.push(Run { to, step: 0, slice, region });
            }
            Some(_) => {
                let place = self.copy_of(&region);
                self.collect(slice, root, place, mode, ways);
            }
            None => self.collect(slice, root, region, mode, ways),
        }
    }

    /// Contributions of this rank's children meet in `place`, where this rank's own is. What is
    /// complete goes to the parent.
    fn collect(&mut self, slice: u16, root: u16, place: Region, mode: Mode, ways: &Ways) {
        let way = ways.of(root);
        for child in &way.children {
            let is_passed_on = ways.collects(*child, root);
            self.await_from(*child, 0, slice, place, mode, is_passed_on);
        }
        if way.children.is_empty() {
            return;
        }
        let slice = &mut self.slices[usize::from(slice)];
        slice.missing = vec![way.children.len() as u16; pieces(place.len()) as usize];
        match (way.parent, mode) {
            (Some(parent), _) => slice.onward[0] = vec![(parent, 0)],
            (None, Mode::Reduce(dtype, ReduceOp::Mean)) => slice.divided = Some(dtype),
            (None, _) => {}
        }
    }

    /// The slice goes from its root to everybody. `region` is where it is, or is to be.
    fn down(&mut self, slice: u16, root: u16, region: Region, ways: &Ways) {
        let way = ways.of(root);
        let Some(source) = way.source else {
            let runs = way.receivers.iter().map(|to| Run { to: *to, step: 0, slice, region });
            return self.first.extend(runs);
        };
        self.await_from(source, 0, slice, region, Mode::Assign, source != root);
        let onward = way.receivers.iter().map(|to| (*to, 0)).collect();
        self.slices[usize::from(slice)].onward[0] = onward;
    }

    /// Sends a tensor straight to one rank.
    fn give(&mut self, to: u16, region: Region) {
        self.first.push(Run { to, step: 0, slice: 0, region });
    }

    /// Takes a tensor straight from one rank.
    pub(super) fn take(&mut self, from: u16, region: Region) {
        self.await_from(from, 0, 0, region, Mode::Assign, false);
    }

    fn await_from(
        &mut self,
        from: u16,
        step: u8,
        slice: u16,
        region: Region,
        mode: Mode,
        is_passed_on: bool,
    ) {
        self.streams.push(Stream { from, step, slice, region, mode, is_passed_on, arrived: 0 });
    }

    /// There are `count` slices.
    fn cut(&mut self, count: u16) {
        self.slices = vec![Slice::default(); count.into()];
    }

    /// A copy of what is in `region`, which the operation keeps.
    fn copy_of(&mut self, region: &Region) -> Region {
        let mut scratch = vec![0u64; region.len().div_ceil(size_of::<u64>())];
        // SAFETY: the operation keeps the scratch, untouched, until it is done. The numbers stay where
        // they are in memory when the vector that owns them is moved.
        let place = unsafe { Region::of(&mut scratch) }.part(0..region.len());
        self.scratch.push(scratch);
        // SAFETY: the operation has been lent `region` and has just made `place`, and nothing of it
        // is under way yet.
        unsafe { place.copy_from(region) };
        place
    }
}

impl Stream {
    /// What finds the stream of a frame.
    pub(super) fn key(&self) -> (u16, u8, u16) {
        (self.from, self.step, self.slice)
    }

    /// Whether pieces are still to come.
    pub(super) fn is_open(&self) -> bool {
        self.arrived < pieces(self.region.len())
    }
}

/// The number of pieces of a tensor of `len` bytes. An empty tensor has one, which is empty.
pub(super) fn pieces(len: usize) -> u32 {
    len.div_ceil(PIECE).max(1) as u32
}

/// The length of a tensor as frames state it: bytes, or from 2 GiB on the number of pieces. Tensors
/// that state the same and differ have a last piece of another length, and that is found out too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stated(pub(super) u32);

impl Stated {
    const IN_PIECES: u32 = 1 << 31;

    pub(super) fn of(len: usize) -> Self {
        let bytes = u32::try_from(len).ok().filter(|bytes| *bytes < Self::IN_PIECES);
        Self(bytes.unwrap_or_else(|| Self::IN_PIECES | pieces(len)))
    }
}

impl fmt::Display for Stated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes < Self::IN_PIECES => write!(f, "{bytes} bytes"),
            many => write!(f, "{} pieces of {PIECE} bytes", many - Self::IN_PIECES),
        }
    }
}

/// Piece `piece` of `region`. Empty if there is no such piece.
pub(super) fn piece_of(region: &Region, piece: u32) -> Region {
    let start = region.len().min(piece as usize * PIECE);
    region.part(start..region.len().min(start + PIECE))
}

/// The bytes of the slice that one rank owns.
fn range_of(rank: u16, tensor: &Tensor, ways: &Ways) -> Range<usize> {
    let (slice, width) = (ways.slice(rank, tensor.count()), tensor.dtype.size());
    slice.start * width..slice.end * width
}
