//! Where the factors of a layer meet.
//!
//! A matrix for each of two clocks, used in turn ([`poseidon_core::factors`] says why two are
//! enough). The session writes this worker's own rows before it sends them; the lanes write the
//! others' as they come; the session reads the whole when all are there. Who may touch what follows
//! from the clock, which the lanes check before they take a byte.

use crate::Buffer;
use poseidon_core::factors::{Layout, place};
use poseidon_core::{Clock, LayerId, NodeId};
use std::ops::Range;
use std::sync::Arc;

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

/// The two matrices of one layer. The session and the lanes share them for the life of the node.
#[derive(Debug)]
pub(crate) struct Meeting {
    pub(crate) layer: LayerId,
    pub(crate) layout: Layout,
    places: [Buffer; 2],
}

/// Some rows of a meeting's matrix, in the hands of the lane they belong to.
///
/// Whoever makes one promises that `range` is a chunk of the calling lane at a clock whose place is
/// open: see [`poseidon_core::factors::Gather`].
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) meeting: Arc<Meeting>,
    pub(crate) place: usize,
    pub(crate) range: Range<usize>,
}

impl Meeting {
    pub(crate) fn new(layer: LayerId, layout: Layout) -> Self {
        let places = [(); 2].map(|()| Buffer::zeroed(layout.len()));
        Self { layer, layout, places }
    }

    /// Writes this worker's rows of `clock` and blanks the rest of its block. The caller has checked
    /// the lengths and sends `clock` next: no lane reads or writes this block until then.
    pub(crate) fn write_own(&self, me: NodeId, clock: Clock, parts: &[Factors<'_>]) {
        let (m, n) = (self.layout.m, self.layout.n);
        // SAFETY: the lanes touch a worker's own block only between its sending and the end of the
        // exchange, and the last exchange that used this place is over.
        let block = unsafe { self.places[place(clock)].chunk_mut(self.layout.block(me)) };
        let rows = parts.iter().flat_map(|part| part.u.chunks_exact(m).zip(part.v.chunks_exact(n)));
        let mut room = block.chunks_exact_mut(m + n);
        for ((u, v), row) in rows.zip(&mut room) {
            row[..m].copy_from_slice(u);
            row[m..].copy_from_slice(v);
        }
        room.for_each(|row| row.fill(0.0));
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
    /// This worker's own rows, to be sent.
    pub(crate) fn values(&self) -> &[f32] {
        // SAFETY: nobody writes to a worker's own block while it is being sent.
        unsafe { self.meeting.places[self.place].chunk(self.range.clone()) }
    }

    /// Room for another worker's rows.
    pub(crate) fn room(&mut self) -> &mut [f32] {
        // SAFETY: the rows belong to this lane, which holds one slice of them at a time; the session
        // reads them only after the lane has reported them.
        unsafe { self.meeting.places[self.place].chunk_mut(self.range.clone()) }
    }
}
