//! Where the factors of a layer meet.
//!
//! There is a matrix for each of two clocks, used in turn ([`poseidon_core::factors`] says why two
//! are enough). The session writes this worker's own rows before it sends them. The lanes write
//! other workers' rows as they come. The session reads the whole matrix when all rows are there.
//! The clock decides who may touch which rows, and the lanes check it before they take a byte.

use crate::Buffer;
use crate::memory::region::Region;
use poseidon_core::factors::{Layout, place};
use poseidon_core::{Clock, LayerId, NodeId};
use std::ops::Range;
use std::ptr::NonNull;
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

/// A worker, and all rows of its last chunk, which is too long for its block of the matrix.
type Chunk = (NodeId, Arc<[f32]>);

/// The two matrices of one layer. The session and the lanes share them for the life of the node.
#[derive(Debug)]
pub(crate) struct FactorMatrices {
    pub(crate) layer: LayerId,
    pub(crate) layout: Layout,
    places: [Buffer; 2],
    /// By place: last chunks that are too long. Locked only by a thread that has such a chunk, and
    /// once a step.
    long: [Mutex<Vec<Chunk>>; 2],
}

/// Some rows of one of the two matrices, or a last chunk that is too long for it, as the lane they
/// belong to uses them.
///
/// Whoever makes `Rows` promises that `range` is a chunk of the calling lane, at a clock whose
/// matrix is open to the lanes: see [`poseidon_core::factors::Gather`].
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) matrices: Arc<FactorMatrices>,
    pub(crate) place: usize,
    pub(crate) range: Range<usize>,
    /// The rows themselves, if they are a last chunk that is too long for the matrix.
    apart: Option<Arc<[f32]>>,
}

impl FactorMatrices {
    pub(crate) fn new(layer: LayerId, layout: Layout) -> Self {
        let places = [(); 2].map(|()| Buffer::zeroed(layout.len()));
        Self { layer, layout, places, long: Default::default() }
    }

    /// The rows of `parts` together, or why they cannot be this layer's.
    pub(crate) fn count_rows(&self, parts: &[Factors<'_>]) -> Result<usize, String> {
        let (m, n, most) = (self.layout.m, self.layout.n, self.layout.most_rows());
        let mut rows = 0;
        for Factors { u, v } in parts {
            let part = u.len() / m.max(1);
            if u.len() != part * m || v.len() != part * n {
                let (u, v) = (u.len(), v.len());
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
    /// checked the lengths and sends `clock` next: no lane reads or writes this block until then.
    /// If there are more rows than the block has, the whole last chunk is kept apart as well,
    /// because it goes out in one piece.
    pub(crate) fn write_own(&self, me: NodeId, clock: Clock, parts: &[Factors<'_>]) {
        let (m, n) = (self.layout.m, self.layout.n);
        // SAFETY: the lanes touch a worker's own block only between its sending and the end of the
        // exchange, and the last exchange that used this place is over.
        let block = unsafe { self.places[place(clock)].chunk_mut(self.layout.block(me)) };
        let rows =
            || parts.iter().flat_map(|part| part.u.chunks_exact(m).zip(part.v.chunks_exact(n)));
        let mut room = block.chunks_exact_mut(m + n);
        for ((u, v), row) in rows().zip(&mut room) {
            row[..m].copy_from_slice(u);
            row[m..].copy_from_slice(v);
        }
        room.for_each(|row| row.fill(0.0));
        if rows().nth(self.layout.batch).is_some() {
            let last = rows().skip(self.layout.last_start());
            let chunk: Vec<f32> = last.flat_map(|(u, v)| [u, v].concat()).collect();
            self.keep(place(clock), me, chunk.into());
        }
    }

    fn keep(&self, place: usize, worker: NodeId, chunk: Arc<[f32]>) {
        self.long(place).push((worker, chunk));
    }

    fn long(&self, place: usize) -> MutexGuard<'_, Vec<Chunk>> {
        self.long[place].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes out the rows of `clock` that have no place in the matrix, in the order of workers.
    pub(crate) fn take_rows_beyond(&self, clock: Clock) -> Vec<f32> {
        let mut long = std::mem::take(&mut *self.long(place(clock)));
        long.sort_by_key(|(worker, _)| *worker);
        let placed = (self.layout.batch - self.layout.last_start()) * self.layout.width();
        long.iter().flat_map(|(_, chunk)| &chunk[placed..]).copied().collect()
    }

    /// Everybody's rows of `clock`.
    ///
    /// # Safety
    /// All of them have come and this worker's own have been sent, the next clock has not been sent
    /// yet, and nobody else holds this slice.
    #[expect(clippy::mut_from_ref, reason = "who may touch a place follows from the clock")]
    pub(crate) unsafe fn matrix(&self, clock: Clock) -> &mut [f32] {
        // SAFETY: the caller's promise; the lanes write to this place again only after the next
        // clock has been sent.
        unsafe { self.places[place(clock)].chunk_mut(0..self.layout.len()) }
    }
}

impl Rows {
    /// This worker's own rows at `clock`, to be sent.
    pub(crate) fn own(
        matrices: Arc<FactorMatrices>,
        me: NodeId,
        clock: Clock,
        range: Range<usize>,
    ) -> Self {
        let place = place(clock);
        let is_long = matrices.layout.placed(me, &range) != range;
        let own = |(worker, chunk): &Chunk| (*worker == me).then(|| chunk.clone());
        let apart = is_long.then(|| matrices.long(place).iter().find_map(own)).flatten();
        Self { matrices, place, range, apart }
    }

    /// Room for rows of `sender`.
    pub(crate) fn others(
        matrices: Arc<FactorMatrices>,
        sender: NodeId,
        place: usize,
        range: Range<usize>,
    ) -> Self {
        let is_long = matrices.layout.placed(sender, &range) != range;
        let apart = is_long.then(|| range.clone().map(|_| 0.0).collect());
        Self { matrices, place, range, apart }
    }

    /// All rows of `sender` are here.
    pub(crate) fn land(mut self, sender: NodeId) {
        let Some(chunk) = self.apart.take() else { return };
        self.range = self.matrices.layout.placed(sender, &self.range);
        let placed = self.range.len();
        self.room().copy_from_slice(&chunk[..placed]);
        self.matrices.keep(self.place, sender, chunk);
    }

    /// Rows that are all here, to be sent: in the matrix, or a chunk that is too long for it.
    pub(crate) fn to_send(&self) -> Result<Region, Arc<[f32]>> {
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
                let rows =
                    Arc::get_mut(apart).expect("rows that are still coming are nobody else's");
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(rows);
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
    pub(crate) fn room(&mut self) -> &mut [f32] {
        if let Some(apart) = &mut self.apart {
            return Arc::get_mut(apart).expect("rows that are still coming are nobody else's");
        }
        // SAFETY: the rows belong to this lane, which holds one slice of them at a time; the session
        // reads them only after the lane has reported them.
        unsafe { self.matrices.places[self.place].chunk_mut(self.range.clone()) }
    }
}
