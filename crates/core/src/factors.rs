//! Sufficient factor broadcasting (Poseidon 2017 §2.1): where factors lie, and the state machine that
//! gathers one layer's factors on one lane of a worker.
//!
//! The gradient of a fully connected layer is the sum over samples of u vᵀ: u is the gradient of the
//! layer's output (M numbers), v its input (N numbers). Every worker sends the rows (u, v) of its
//! batch to every other one. On the wire: K·(M + N) numbers to each of P - 1 workers. The bias'
//! gradient is the sum of the u's and costs nothing.
//!
//! A worker that has all workers' factors of clock c may send its factors of c + 1 while other
//! workers still wait for factors of c. It cannot send its factors of c + 2 then, because for that
//! it needs all workers' factors of c + 1. So two matrices, used in turn, are enough to have room
//! for every frame before it comes. They are called *places* 0 and 1.
//!
//! Where a worker may be s clocks [ahead](crate::consistency), a worker that has sent clock c may miss
//! factors of the clocks from c - s on, and others may have sent theirs up to c + s + 1. So there are
//! 2s + 2 places. Steps are taken clock by clock, when all factors of a clock are there.
//!
//! Factors reach the workers of another host [through one of them](crate::tree). So a frame's sender
//! need not be the worker whose factors the frame has; that worker follows from the chunk's index,
//! which counts the chunks of worker 0, then those of worker 1, and so on.

use crate::wire::{Header, Kind};
use crate::{
    ChunkKey, ChunkSize, Clock, Cluster, Consistency, Encoding, LaneId, LayerId, NodeId, Ring,
    Route, Tree, Violation,
};
use std::ops::Range;

/// Where the factors of one layer lie: a matrix of `workers · batch` rows. A block of `batch` rows
/// belongs to each worker, in the order of ranks. A row is one sample's u, then its v.
///
/// A worker may have more than `batch` rows in a step. Then the last chunk that it sends is longer
/// than the room for it in the worker's block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Length of u: the layer's outputs.
    pub m: usize,
    /// Length of v: the layer's inputs.
    pub n: usize,
    /// Rows in each worker's block.
    pub batch: usize,
    /// Number of workers.
    pub workers: usize,
    /// How rows travel, and how they lie in the matrix.
    pub encoding: Encoding,
    /// How many clocks a worker may be ahead of another.
    pub lead: u64,
    chunk_rows: usize,
    lanes: u16,
    /// The lane of the first chunk.
    first_lane: u16,
    /// Whether hosts are in a ring.
    has_ring: bool,
    /// Whether chunks go round the ring of hosts: they are large enough for the way.
    ring: bool,
}

impl Layout {
    /// The layout for a layer of `m` outputs and `n` inputs. Chunks are whole rows, about as large
    /// as `size` says, dealt out to the lanes from `first_lane` on.
    pub fn new(
        (m, n): (usize, usize),
        batch: usize,
        cluster: &Cluster,
        size: ChunkSize,
        first_lane: u16,
    ) -> Self {
        let (workers, lanes) = (cluster.workers(), cluster.lanes());
        let (encoding, chunk_rows, first_lane) = (Encoding::F32, 1, first_lane % lanes);
        let (lead, has_ring, ring) = (0, cluster.is_ring(), false);
        let layout = Self {
            m,
            n,
            batch,
            workers,
            encoding,
            lead,
            chunk_rows,
            lanes,
            first_lane,
            has_ring,
            ring,
        };
        layout.encoded(encoding, size)
    }

    /// The same for rows that travel as `encoding`.
    pub fn encoded(self, encoding: Encoding, size: ChunkSize) -> Self {
        let row = encoding.bytes(self.width().max(1));
        let fit = |bytes: usize| (bytes / row).max(1);
        let spread = self.batch.div_ceil(self.lanes.into());
        let chunk_rows = spread.clamp(fit(size.min), fit(size.max));
        let ring = self.has_ring && self.batch * row >= size.min;
        Self { encoding, chunk_rows, ring, ..self }
    }

    /// How many matrices there are, used in turn.
    pub fn places(&self) -> usize {
        2 * self.lead as usize + 2
    }

    /// The matrix of `clock`.
    pub fn place(&self, clock: Clock) -> usize {
        (clock.0 % self.places() as u64) as usize
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.encoding.bytes(self.width())
    }

    /// Numbers in a row.
    pub fn width(&self) -> usize {
        self.m + self.n
    }

    /// Numbers in the matrix.
    pub fn len(&self) -> usize {
        self.workers * self.batch * self.width()
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of the matrix that hold `worker`'s rows.
    pub fn block(&self, worker: NodeId) -> Range<usize> {
        let len = self.batch * self.width();
        worker.index() * len..(worker.index() + 1) * len
    }

    /// The most rows a worker can send in one step. There is always room for a whole gradient beside
    /// a batch: as factors, a gradient takes a row for each of its rows or columns, whichever are
    /// fewer, or two of them in a type that has no room to scale them, and one row for the bias.
    pub fn most_rows(&self) -> usize {
        let row = self.row_bytes().max(1);
        let gradient = (self.batch + 2 * self.m.min(self.n) + 1).min(LONGEST_FRAME / row);
        let beyond = (LONGEST / row).max(gradient);
        self.last_start() + beyond.max(self.batch - self.last_start())
    }

    /// The first row of a worker's last chunk.
    pub fn last_start(&self) -> usize {
        self.chunks().saturating_sub(1) as usize * self.chunk_rows
    }

    /// The part of a chunk's `range` that lies in `worker`'s block: all of it, unless the chunk is a
    /// last one that is too long for the block.
    pub fn placed(&self, worker: NodeId, range: &Range<usize>) -> Range<usize> {
        range.start..range.end.min(self.block(worker).end)
    }

    /// Number of chunks that each worker sends in every step, however many rows its batch has.
    pub fn chunks(&self) -> u32 {
        self.batch.div_ceil(self.chunk_rows) as u32
    }

    /// The index on the wire of `worker`'s chunk `index`.
    fn wire_index(&self, worker: NodeId, index: u32) -> u32 {
        u32::from(worker.0) * self.chunks() + index
    }

    /// Whose chunk has this index on the wire, and which of the worker's chunks it is. The tree that
    /// the chunk takes begins at that worker. `None` if there is no such chunk.
    pub fn route(&self, wire_index: u32) -> Option<Route> {
        let worker = wire_index.checked_div(self.chunks())?;
        let root = u16::try_from(worker).ok().filter(|w| usize::from(*w) < self.workers)?;
        Some(self.route_of(NodeId(root), wire_index % self.chunks()))
    }

    /// The ways of all workers' chunks, and how many numbers each has when batches are full.
    pub(crate) fn routes(&self) -> impl Iterator<Item = (Route, usize)> + '_ {
        let all = (0..self.workers as u16).flat_map(|w| (0..self.chunks()).map(move |i| (w, i)));
        all.map(|(worker, turn)| {
            let root = NodeId(worker);
            (self.route_of(root, turn), self.chunk(root, turn, self.batch).len())
        })
    }

    /// The way of a worker's chunk `turn`.
    fn route_of(&self, root: NodeId, turn: u32) -> Route {
        Route { root, turn, ring: Ring::whole(self.ring) }
    }

    /// The lane that carries chunk `index` of any worker.
    pub fn lane(&self, index: u32) -> LaneId {
        LaneId(((u32::from(self.first_lane) + index) % u32::from(self.lanes)) as u16)
    }

    /// The lanes that carry anything.
    pub fn lanes(&self) -> impl Iterator<Item = LaneId> + '_ {
        (0..self.chunks().min(self.lanes.into())).map(|index| self.lane(index))
    }

    /// The elements of the matrix for chunk `index` of `worker`, which has `rows` rows in this step.
    /// The range may be empty. The range of a last chunk may go beyond the worker's block.
    fn chunk(&self, worker: NodeId, index: u32, rows: usize) -> Range<usize> {
        let start = index as usize * self.chunk_rows;
        let is_last = index + 1 == self.chunks();
        let end = if is_last { rows } else { (start + self.chunk_rows).min(rows) };
        let at = |row: usize| self.block(worker).start + row * self.width();
        at(start)..at(end.max(start))
    }
}

/// The most bytes of a last chunk that goes beyond its worker's block, unless a whole gradient takes
/// more. Memory for such a chunk is allocated when its header comes.
const LONGEST: usize = 256 << 20;
/// The most bytes that a frame's header can announce.
const LONGEST_FRAME: usize = u32::MAX as usize;

/// Counts off the factors of one layer that one lane carries.
#[derive(Debug)]
pub struct Gather {
    layer: LayerId,
    layout: Layout,
    me: NodeId,
    /// The chunks of this lane, the same for every worker.
    chunks: Vec<u32>,
    /// The last clock that was sent.
    sent: Clock,
    /// The last clock of which, and of all before it, everybody's factors are here. Not after `sent`.
    gathered: Clock,
    /// The clock that this worker waits for before its next: see [`handle_send`](Self::handle_send).
    needed: Clock,
    /// By place: the clocks that may miss something, and those that others may have sent.
    rounds: Vec<GatheredClock>,
}

/// What has come of one clock.
#[derive(Clone, Debug)]
struct GatheredClock {
    clock: Clock,
    /// The learning rate of this clock, once the first worker has named it. All must name the same.
    rate: Option<f32>,
    /// Whether a chunk has come: the chunks of this lane of worker 0, then of worker 1, and so on.
    arrived: Vec<bool>,
    missing: usize,
}

/// Where a frame's payload goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The worker whose factors they are.
    pub worker: NodeId,
    /// Which of the matrices: that of the clock.
    pub place: usize,
    /// The elements of the matrix that the payload fills. They go beyond the sender's block if the
    /// chunk is a last one that is too long for it.
    pub range: Range<usize>,
    /// Elements of the chunk that the payload leaves out, because the batch was short. They become
    /// zero.
    pub blank: Range<usize>,
}

impl Gather {
    /// The gatherer of `layer` for the factors that `lane` of worker `me` carries.
    pub fn new(layer: LayerId, layout: &Layout, me: NodeId, lane: LaneId) -> Self {
        let chunks: Vec<u32> = (0..layout.chunks()).filter(|&i| layout.lane(i) == lane).collect();
        let (layout, clock) = (layout.clone(), Clock(0));
        let (sent, gathered, needed, rounds) = (clock, clock, clock, Vec::new());
        let mut gather = Self { layer, layout, me, chunks, sent, gathered, needed, rounds };
        // No factors of clock 0 ever come.
        gather.resume(clock);
        gather
    }

    /// The layer has come back at `clock`, under another plan: it goes on from there.
    pub fn resume(&mut self, clock: Clock) {
        (self.sent, self.gathered, self.needed) = (clock, clock, clock);
        let (others, places) = (self.others(), self.layout.places() as u64);
        let nothing = GatheredClock {
            clock,
            rate: None,
            arrived: vec![true; self.chunks.len() * self.layout.workers],
            missing: 0,
        };
        self.rounds = vec![nothing; self.layout.places()];
        // Others may send up to lead + 1 clocks beyond the last one that this worker has sent.
        for ahead in 1..places / 2 + 1 {
            let clock = Clock(clock.0 + ahead);
            self.rounds[self.layout.place(clock)].open(clock, others);
        }
    }

    /// This worker sends `rows` rows at `clock`, the clock after the last one sent. Returns the
    /// chunks to send to every other worker, with their elements of the matrix. Those of a last
    /// chunk that is too long go beyond this worker's block. `together`: the worker goes on when it has
    /// all workers' factors of this clock, however far ahead it might be otherwise.
    pub fn handle_send(
        &mut self,
        clock: Clock,
        rows: usize,
        rate: f32,
        together: bool,
    ) -> Result<impl Iterator<Item = (ChunkKey, Range<usize>)> + '_, Violation> {
        debug_assert_eq!(clock, self.sent.next(), "factors are sent clock by clock");
        debug_assert!(self.is_gathered(), "layer sent while in flight");
        self.sent = clock;
        let lead = if together { 0 } else { self.layout.lead };
        self.needed = Consistency::needs(clock, lead);
        self.rounds[self.layout.place(clock)].agree(rate)?;
        let (others, furthest) = (self.others(), Clock(clock.0 + self.layout.lead + 1));
        self.rounds[self.layout.place(furthest)].open(furthest, others);
        self.advance();
        let this = &*self;
        Ok(this.chunks.iter().map(move |&index| {
            let key = ChunkKey { layer: this.layer, index: this.layout.wire_index(this.me, index) };
            (key, this.layout.chunk(this.me, index, rows))
        }))
    }

    /// A frame of factors is about to arrive, along `tree`. Returns where its payload goes.
    pub fn handle_factors(&mut self, header: &Header, tree: &Tree) -> Result<Arrival, Violation> {
        if header.kind != Kind::Factors {
            return Err(Violation::WrongKind);
        }
        let route = self.layout.route(header.chunk.index).ok_or(Violation::UnknownChunk)?;
        let Route { root: worker, turn: index, .. } = route;
        let slot = self.slot(worker, index).ok_or(Violation::UnknownChunk)?;
        // This worker's own factors never come back to it.
        let expected = tree.source(self.me, route).ok_or(Violation::NotAWorker(worker))?;
        if header.sender != expected {
            return Err(Violation::WrongWay { expected, got: header.sender });
        }
        let whole = self.layout.chunk(worker, index, self.layout.batch);
        let most = self.layout.chunk(worker, index, self.layout.most_rows());
        let (most, got) = (self.layout.encoding.bytes(most.len()), header.length as usize);
        let row = self.layout.row_bytes();
        if got > most || got % row != 0 {
            return Err(Violation::Rows { row, most, got });
        }
        let place = self.layout.place(header.clock);
        let round = &mut self.rounds[place];
        if round.clock != header.clock || header.clock == Clock(0) {
            return Err(Violation::Clock { expected: self.sent.next(), got: header.clock });
        }
        if round.arrived[slot] {
            return Err(Violation::Duplicate(header.clock));
        }
        round.agree(header.value)?;
        let end = whole.start + got / self.layout.encoding.width();
        let blank = end..whole.end.max(end);
        Ok(Arrival { worker, place, range: whole.start..end, blank })
    }

    /// The payload of a frame that `handle_factors` accepted is in place. `index` is that on the wire.
    /// True if this lane now has all factors that this worker waits for before its next clock.
    pub fn handle_landed(&mut self, index: u32, clock: Clock) -> bool {
        let route = self.layout.route(index);
        let Some(slot) = route.and_then(|route| self.slot(route.root, route.turn)) else {
            return false;
        };
        let was_gathered = self.is_gathered();
        let round = &mut self.rounds[self.layout.place(clock)];
        if round.clock != clock || std::mem::replace(&mut round.arrived[slot], true) {
            return false;
        }
        round.missing -= 1;
        self.advance();
        !was_gathered && self.is_gathered()
    }

    /// Whether this lane has all factors that this worker waits for before its next clock: all
    /// workers' factors of the clock that was sent last, unless workers may be apart.
    pub fn is_gathered(&self) -> bool {
        self.gathered >= self.needed
    }

    /// The last clock of which, and of all before it, everybody's factors are here.
    pub fn gathered(&self) -> Clock {
        self.gathered
    }

    fn advance(&mut self) {
        let is_complete =
            |gather: &Self, clock| gather.rounds[gather.layout.place(clock)].missing == 0;
        while self.gathered < self.sent && is_complete(self, self.gathered.next()) {
            self.gathered = self.gathered.next();
        }
    }

    /// Chunks that the other workers send in a clock.
    fn others(&self) -> usize {
        (self.layout.workers - 1) * self.chunks.len()
    }

    /// The last clock that was sent.
    pub fn clock(&self) -> Clock {
        self.sent
    }

    /// The chunks that this worker waits for, of the first clock that misses some, and whose they are.
    pub fn missing(&self) -> impl Iterator<Item = (ChunkKey, NodeId)> + '_ {
        let clock = if self.is_gathered() { self.gathered } else { self.gathered.next() };
        let round = &self.rounds[self.layout.place(clock)];
        let awaited =
            (0..self.layout.workers).flat_map(|w| self.chunks.iter().map(move |&i| (w, i)));
        awaited
            .zip(&round.arrived)
            .filter(|((worker, _), arrived)| {
                round.missing > 0 && !**arrived && *worker != self.me.index()
            })
            .map(|((worker, index), _)| {
                let worker = NodeId(worker as u16);
                let index = self.layout.wire_index(worker, index);
                (ChunkKey { layer: self.layer, index }, worker)
            })
    }

    fn slot(&self, worker: NodeId, index: u32) -> Option<usize> {
        let position = self.chunks.binary_search(&index).ok()?;
        Some(worker.index() * self.chunks.len() + position)
    }
}

impl GatheredClock {
    fn open(&mut self, clock: Clock, missing: usize) {
        (self.clock, self.rate, self.missing) = (clock, None, missing);
        self.arrived.fill(false);
    }

    fn agree(&mut self, rate: f32) -> Result<(), Violation> {
        let expected = *self.rate.get_or_insert(rate);
        if expected.to_bits() == rate.to_bits() {
            return Ok(());
        }
        Err(Violation::Rate { expected, got: rate })
    }
}

#[cfg(test)]
mod tests;
