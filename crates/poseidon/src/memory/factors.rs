//! Where the factors of a layer meet.
//!
//! There are several matrices, used in turn by clocks ([`poseidon_core::factors`] says why two are
//! enough where workers are at one clock). The session writes this worker's own rows before it sends them. The lanes write
//! other workers' rows as they come. The session reads the whole matrix when all rows are there.
//! The clock decides who may touch which rows, and the lanes check it before they take a byte.

use crate::Buffer;
use crate::memory::region::Region;
use poseidon_core::encoding::{Block, Encoding};
use poseidon_core::factors::Layout;
use poseidon_core::{Clock, LaneId, LayerId, NodeId};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One worker's factors of one layer and one step: a row per sample.
///
/// The layer's gradient is uᵀv, summed over workers; a bias, if the layer has one, gets the sum of
/// the rows of u.
#[derive(Clone, Copy, Debug)]
pub struct Factors<'a> {
    /// Gradient of the layer's output: rows of M numbers.
    pub u: &'a [f32],
    /// The layer's input: rows of N numbers.
    pub v: &'a [f32],
}

/// As [`Factors`], of a layer whose contributions travel as numbers of two bytes: their bits.
#[derive(Clone, Copy, Debug)]
pub struct HalfFactors<'a> {
    /// Gradient of the layer's output: rows of M numbers.
    pub u: &'a [u16],
    /// The layer's input: rows of N numbers.
    pub v: &'a [u16],
}

/// One worker's factors, in the layer's own encoding or in `f32`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FactorBytes<'a> {
    pub(crate) u: &'a [u8],
    pub(crate) v: &'a [u8],
    pub(crate) width: usize,
}

impl<'a> From<Factors<'a>> for FactorBytes<'a> {
    fn from(Factors { u, v }: Factors<'a>) -> Self {
        Self { u: bytemuck::cast_slice(u), v: bytemuck::cast_slice(v), width: size_of::<f32>() }
    }
}

impl<'a> From<HalfFactors<'a>> for FactorBytes<'a> {
    fn from(HalfFactors { u, v }: HalfFactors<'a>) -> Self {
        Self { u: bytemuck::cast_slice(u), v: bytemuck::cast_slice(v), width: size_of::<u16>() }
    }
}

/// A worker, and all rows of its last chunk, which is too long for its block of the matrix.
type Chunk = (NodeId, Block);

/// The matrices of one layer. The session and the lanes share them for the life of the node.
#[derive(Debug)]
pub(crate) struct FactorMatrices {
    pub(crate) layer: LayerId,
    pub(crate) layout: Layout,
    places: Vec<Buffer>,
    /// By place: last chunks that are too long. Locked only by a thread that has such a chunk, and
    /// once a step.
    long: Vec<Mutex<Vec<Chunk>>>,
    /// By lane: the last clock of which, and of all before it, everybody's rows are here.
    gathered: Vec<AtomicU64>,
}

/// Some rows of one of the matrices, or a last chunk that is too long for it, as the lane they
/// belong to uses them.
#[derive(Debug)]
pub(crate) struct Rows {
    matrices: Arc<FactorMatrices>,
    place: usize,
    range: Range<usize>,
    /// The rows themselves, if they are a last chunk that is too long for the matrix.
    apart: Option<Block>,
}

impl FactorMatrices {
    pub(crate) fn new(layer: LayerId, layout: Layout) -> Self {
        let count = layout.places();
        let places = (0..count).map(|_| zeroed(layout.encoding, layout.len())).collect();
        let long = (0..count).map(|_| Mutex::default()).collect();
        let lanes = layout.lanes().map(|lane| lane.index() + 1).max().unwrap_or(0);
        let gathered = (0..lanes).map(|_| AtomicU64::new(0)).collect();
        Self { layer, layout, places, long, gathered }
    }

    /// `lane` has everybody's rows up to `clock`.
    ///
    /// # Safety
    /// That is so, and the lane writes no more of them: the session reads the matrix of `clock`
    /// now.
    pub(crate) unsafe fn note_gathered(&self, lane: LaneId, clock: Clock) {
        self.gathered[lane.index()].store(clock.0, Ordering::Release);
    }

    /// The last clock of which, and of all before it, all lanes have everybody's rows.
    pub(crate) fn gathered(&self) -> Clock {
        let by_lane = self.layout.lanes().map(|lane| &self.gathered[lane.index()]);
        Clock(by_lane.map(|clock| clock.load(Ordering::Acquire)).min().unwrap_or(u64::MAX))
    }

    /// The rows of `parts` together, or why they cannot be this layer's.
    pub(crate) fn count_rows(&self, parts: &[FactorBytes<'_>]) -> Result<usize, String> {
        let (m, n, most) = (self.layout.m, self.layout.n, self.layout.most_rows());
        let encoding = self.layout.encoding;
        let mut rows = 0;
        for FactorBytes { u, v, width } in parts {
            if *width != encoding.width() && *width != size_of::<f32>() {
                return Err(format!(
                    "expected factors of {encoding}, got numbers of {width} bytes"
                ));
            }
            let (u, v) = (u.len() / width, v.len() / width);
            let part = u / m.max(1);
            if u != part * m || v != part * n {
                return Err(format!(
                    "expected rows of {m} and {n} numbers, got {u} and {v} in all"
                ));
            }
            rows += part;
        }
        if rows > most {
            let batch = self.layout.batch;
            return Err(format!(
                "{rows} rows of factors: {batch} were announced, at most {most} can go"
            ));
        }
        Ok(rows)
    }

    /// Writes this worker's rows of `clock` and blanks the rest of its block. The caller has
    /// [counted](Self::count_rows) the rows. If there are more rows than the block has, the whole
    /// last chunk is kept apart as well, because it goes out in one piece.
    ///
    /// # Safety
    /// `me` is this worker, nobody else writes its rows meanwhile, and the last exchange that used
    /// the place of `clock` is over. `clock` is sent after this: no lane reads or writes the block
    /// until then.
    pub(crate) unsafe fn write_own(&self, me: NodeId, clock: Clock, parts: &[FactorBytes<'_>]) {
        let (m, n, encoding) = (self.layout.m, self.layout.n, self.layout.encoding);
        // SAFETY: the caller's promise.
        let block =
            unsafe { self.places[self.layout.place(clock)].chunk_mut(self.layout.block(me)) };
        let rows = || {
            parts.iter().flat_map(|FactorBytes { u, v, width }| {
                u.chunks_exact(m * width).zip(v.chunks_exact(n * width))
            })
        };
        let write = |(u, v): (&[u8], &[u8]), row: &mut [u8]| {
            let (left, right) = row.split_at_mut(encoding.bytes(m));
            for (from, to) in [(u, left), (v, right)] {
                match from.len() == to.len() {
                    true => to.copy_from_slice(from),
                    false => encoding.encode(bytemuck::cast_slice(from), to),
                }
            }
        };
        let mut room = block.chunks_exact_mut(self.layout.row_bytes());
        rows().zip(&mut room).for_each(|(from, row)| write(from, row));
        room.for_each(|row| row.fill(0));
        if rows().nth(self.layout.batch).is_some() {
            let last = || rows().skip(self.layout.last_start());
            let mut chunk = Block::zeroed(encoding, last().count() * self.layout.width());
            let bytes = chunk.bytes_mut().expect("a new block is nobody else's");
            let room = bytes.chunks_exact_mut(self.layout.row_bytes());
            last().zip(room).for_each(|(from, row)| write(from, row));
            self.keep(self.layout.place(clock), me, chunk);
        }
    }

    /// Where this worker's rows of `clock` begin, for a copy from a device.
    ///
    /// # Safety
    /// As for [`write_own`](Self::write_own): whoever writes there does so before `clock` is sent.
    pub(crate) unsafe fn own_block(&self, me: NodeId, clock: Clock) -> NonNull<u8> {
        // SAFETY: the caller's promise.
        let block =
            unsafe { self.places[self.layout.place(clock)].chunk_mut(self.layout.block(me)) };
        NonNull::from(block).cast()
    }

    /// Blanks what is behind the first `rows` rows of this worker's block.
    ///
    /// # Safety
    /// As for [`own_block`](Self::own_block), and no copy to the block is under way.
    pub(crate) unsafe fn blank_own(&self, me: NodeId, clock: Clock, rows: usize) {
        // SAFETY: the caller's promise.
        let block =
            unsafe { self.places[self.layout.place(clock)].chunk_mut(self.layout.block(me)) };
        block[rows * self.layout.row_bytes()..].fill(0);
    }

    /// Where everybody's rows of `clock` are, and how many bytes they have.
    pub(crate) fn memory(&self, clock: Clock) -> (NonNull<u8>, usize) {
        // Lanes may be writing there: an address, and no slice.
        (
            self.places[self.layout.place(clock)].start(),
            self.layout.encoding.bytes(self.layout.len()),
        )
    }

    /// The memory of all matrices, to be pinned.
    pub(crate) fn memories(&self) -> impl Iterator<Item = (NonNull<u8>, usize)> + '_ {
        (0..self.places.len() as u64).map(|place| self.memory(Clock(place)))
    }

    fn keep(&self, place: usize, worker: NodeId, chunk: Block) {
        self.long(place).push((worker, chunk));
    }

    fn long(&self, place: usize) -> MutexGuard<'_, Vec<Chunk>> {
        self.long[place].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes out the rows of `clock` that have no place in the matrix, in the order of workers.
    fn take_rows_beyond(&self, clock: Clock) -> Vec<Block> {
        let mut long = std::mem::take(&mut *self.long(self.layout.place(clock)));
        long.sort_by_key(|(worker, _)| *worker);
        long.into_iter().map(|(_, chunk)| chunk).collect()
    }

    /// As [`take_rows_beyond`](Self::take_rows_beyond), as `f32`s, without those that have a place.
    pub(crate) fn take_decoded_beyond(&self, clock: Clock) -> Vec<f32> {
        let encoding = self.layout.encoding;
        let placed = (self.layout.batch - self.layout.last_start()) * self.layout.row_bytes();
        let mut decoded = Vec::new();
        for chunk in self.take_rows_beyond(clock) {
            let (rows, from) = (&chunk.bytes()[placed..], decoded.len());
            decoded.resize(from + rows.len() / encoding.width(), 0.0);
            encoding.decode(rows, &mut decoded[from..]);
        }
        decoded
    }

    /// Everybody's rows of `clock`, as `f32`s: in the matrix itself, or decoded into `scratch`.
    ///
    /// # Safety
    /// All of them have come and this worker's own have been sent, the clock that uses this matrix next
    /// has not been sent yet, and nobody else holds this slice.
    pub(crate) unsafe fn rows<'a>(
        &'a self,
        clock: Clock,
        scratch: &'a mut Vec<f32>,
    ) -> &'a mut [f32] {
        let (encoding, len) = (self.layout.encoding, self.layout.len());
        // SAFETY: the caller's promise; the lanes write to this place again only after a later clock
        // has been sent.
        let matrix = unsafe { self.places[self.layout.place(clock)].chunk_mut(0..len) };
        let beyond = self.take_rows_beyond(clock);
        if encoding == Encoding::F32 && beyond.is_empty() {
            return bytemuck::cast_slice_mut(matrix);
        }
        let placed = (self.layout.batch - self.layout.last_start()) * self.layout.row_bytes();
        let beyond: Vec<&[u8]> = beyond.iter().map(|chunk| &chunk.bytes()[placed..]).collect();
        let bytes = matrix.len() + beyond.iter().map(|rows| rows.len()).sum::<usize>();
        scratch.resize(bytes / encoding.width(), 0.0);
        let mut room = &mut scratch[..];
        for rows in std::iter::once(&*matrix).chain(beyond) {
            let (into, rest) = room.split_at_mut(rows.len() / encoding.width());
            encoding.decode(rows, into);
            room = rest;
        }
        scratch
    }
}

/// A buffer of zeros.
fn zeroed(encoding: Encoding, len: usize) -> Buffer {
    match encoding {
        Encoding::F32 => Buffer::zeroed(len),
        half => Buffer::from_bits(half, vec![0; len]),
    }
}

impl Rows {
    /// This worker's own rows at `clock`, to be sent.
    ///
    /// # Safety
    /// `range` is a chunk of the calling lane. The session has written the rows of `clock`, and
    /// writes to their place again only after the lane has reported that links have taken them.
    pub(crate) unsafe fn own(
        matrices: Arc<FactorMatrices>,
        me: NodeId,
        clock: Clock,
        range: Range<usize>,
    ) -> Self {
        let place = matrices.layout.place(clock);
        let is_long = matrices.layout.placed(me, &range) != range;
        let own = |(worker, chunk): &Chunk| (*worker == me).then(|| chunk.clone());
        let apart = is_long.then(|| matrices.long(place).iter().find_map(own)).flatten();
        Self { matrices, place, range, apart }
    }

    /// Room for rows of `sender`.
    ///
    /// # Safety
    /// `range` is a chunk of the calling lane in the block of `sender`, at a clock whose matrix is
    /// open to the lanes: see [`poseidon_core::factors::Gather`]. The lane has no other `Rows` of
    /// it that are still coming.
    pub(crate) unsafe fn others(
        matrices: Arc<FactorMatrices>,
        sender: NodeId,
        place: usize,
        range: Range<usize>,
    ) -> Self {
        let is_long = matrices.layout.placed(sender, &range) != range;
        let apart = is_long.then(|| Block::zeroed(matrices.layout.encoding, range.len()));
        Self { matrices, place, range, apart }
    }

    /// How many clocks may pass before it is certain that these rows have come everywhere.
    pub(crate) fn lead(&self) -> u64 {
        self.matrices.layout.lead
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// All rows of `sender` are here.
    pub(crate) fn land(mut self, sender: NodeId) {
        let Some(chunk) = self.apart.take() else { return };
        self.range = self.matrices.layout.placed(sender, &self.range);
        let room = self.room();
        room.copy_from_slice(&chunk.bytes()[..room.len()]);
        self.matrices.keep(self.place, sender, chunk);
    }

    /// Rows that are all here, to be sent: in the matrix, or a chunk that is too long for it.
    pub(crate) fn to_send(&self) -> Result<Region, Block> {
        match &self.apart {
            Some(apart) => Err(apart.clone()),
            // SAFETY: the lane keeps the matrices, and nobody writes to rows while they are being sent:
            // the layer stays in flight until then.
            None => Ok(unsafe { self.matrices.places[self.place].region(self.range.clone()) }),
        }
    }

    /// Where a link writes another worker's rows.
    pub(crate) fn room_region(&mut self) -> Region {
        match &mut self.apart {
            Some(apart) => {
                let bytes =
                    apart.bytes_mut().expect("rows that are still coming are nobody else's");
                let len = bytes.len();
                // SAFETY: the lane keeps these rows, and nobody touches them until they have landed.
                unsafe { Region::new(NonNull::from(bytes).cast(), len) }
            }
            // SAFETY: the lane keeps the matrices; the rows belong to this lane, and the session reads
            // them only after the lane has reported them.
            None => unsafe { self.matrices.places[self.place].region(self.range.clone()) },
        }
    }

    /// Room for another worker's rows.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        if let Some(apart) = &mut self.apart {
            return apart.bytes_mut().expect("rows that are still coming are nobody else's");
        }
        // SAFETY: the rows belong to this lane, which holds one slice of them at a time; the session
        // reads them only after the lane has reported them.
        unsafe { self.matrices.places[self.place].chunk_mut(self.range.clone()) }
    }
}
