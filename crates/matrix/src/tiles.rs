//! Products on the matrix unit, AMX: eight registers of 16 x 64 bytes, the *tiles*, and one instruction
//! that multiplies two of them as `bf16` and adds to a third in `f32`.
//!
//! Both factors are packed first (`pack.rs`). Then the product is computed in blocks of 32 x 32, four tiles that stay in
//! registers for 256 steps of the inner dimension. An element's terms are added in the same order in every block of
//! every thread. Blocks go to a band of 32 rows, and from there, in pieces of rows, to whoever wants the product.

mod pack;
mod unit;

use crate::Matrix;
use pack::{Form, LANES, SIDE, Step};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::OnceLock;
use unit::{Line, Permit, Tiles};

/// Whether the processor has the unit, the kernel lends it and the environment does not forbid it.
pub(crate) fn available() -> bool {
    permit().is_some()
}

fn permit() -> Option<Permit> {
    static PERMIT: OnceLock<Option<Permit>> = OnceLock::new();
    *PERMIT.get_or_init(|| {
        if std::env::var_os("POSEIDON_AMX").is_some_and(|value| value == "0") {
            return None;
        }
        Permit::request()
    })
}

/// Changes `targets` by `a` `b`. `Product` has checked that the shapes fit.
pub(crate) fn update<const N: usize>(
    a: Matrix<'_>,
    b: Matrix<'_>,
    threads: usize,
    targets: [&mut [f32]; N],
    change: &(impl Fn(&[f32], [&mut [f32]; N]) + Sync),
) {
    let permit = permit().expect("Product::on refuses tiles that are not available");
    let (rows, columns) = (a.shape().0, b.shape().1);
    assert!(a.shape().1 == b.shape().0, "shapes fit");
    let targets = targets.map(|target| {
        let fits = rows.checked_mul(columns) == Some(target.len());
        assert!(target.is_empty() || fits, "shapes fit");
        Target { first: target.as_mut_ptr(), stride: columns, is_empty: target.is_empty() }
    });
    // Every thread packs the other factor in full: the shorter side is left whole.
    let by_columns = columns >= rows;
    let side = if by_columns { columns } else { rows };
    let share = side.div_ceil(threads.max(1)).next_multiple_of(SIDE);
    let part = |range: Range<usize>| {
        let (a, b, first) = if by_columns {
            (a, b.columns(range.clone()), (0, range.start))
        } else {
            (a.rows(range.clone()), b, (range.start, 0))
        };
        let targets = targets.map(|target| target.at(first.0, first.1));
        // SAFETY: these are the parts of the targets for the rows of this `a` and the columns of this `b`, and
        // they are within them because the ranges are within the sides. The ranges do not overlap, and the targets are
        // borrowed exclusively until all parts are done.
        unsafe { compute(permit, a, b, targets, change) }
    };
    let ranges = (0..side).step_by(share).map(|start| start..(start + share).min(side));
    if share >= side {
        return ranges.for_each(part);
    }
    rayon::scope(|scope| {
        let part = &part;
        ranges.for_each(|range| scope.spawn(move |_| part(range)));
    });
}

/// Where a part of a target lies: row-major, in rows that are longer than the part.
#[derive(Clone, Copy)]
struct Target {
    first: *mut f32,
    stride: usize,
    is_empty: bool,
}

// SAFETY: a plain address. Who uses it vouches for exclusive access, see `compute`.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Target {
    fn at(self, row: usize, column: usize) -> Self {
        Self { first: self.first.wrapping_add(row * self.stride + column), ..self }
    }

    /// The first `len` values of the part's first row; none of an empty target.
    ///
    /// # Safety
    /// Unless the target is empty, they exist, and nobody else uses them for as long as the slice lives.
    unsafe fn row<'a>(self, len: usize) -> &'a mut [f32] {
        if self.is_empty {
            return &mut [];
        }
        // SAFETY: by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.first, len) }
    }
}

/// How far a block is computed before the next: 48 KiB of each factor, about what the nearest cache holds.
const DEPTH: usize = 256;

/// Most memory for columns of `b`, packed, in bytes: they stay in the second-level cache while all of `a` passes. Half and twice as
/// much is a tenth slower, where that cache has 2 MiB.
const COLUMNS_MEMORY: usize = 768 << 10;

/// Most columns at a time, of which 32 rows of sums are in the second-level cache, too.
const MOST_COLUMNS: usize = 1024;

/// Most memory for rows of `a`, packed, in bytes. More of them are packed in parts, each with another pass over `b`.
const ROWS_MEMORY: usize = 32 << 20;

/// What a thread keeps, because memory that was never touched costs page faults.
#[derive(Default)]
struct Workbench {
    /// Rows of `a`, packed.
    rows: Vec<Step>,
    stripe: Stripe,
}

/// Memory for some columns of the product.
#[derive(Default)]
struct Stripe {
    /// Columns of `b`, packed.
    columns: Vec<Step>,
    sums: Vec<Line>,
}

thread_local! {
    static WORKBENCH: RefCell<Workbench> = RefCell::default();
}

/// # Safety
/// Each of `targets` is empty or valid for reads and writes of as many rows as `a` and columns as `b` have, and
/// nobody else uses these.
unsafe fn compute<const N: usize>(
    permit: Permit,
    a: Matrix<'_>,
    b: Matrix<'_>,
    targets: [Target; N],
    change: &impl Fn(&[f32], [&mut [f32]; N]),
) {
    let ((rows, inner), columns) = (a.shape(), b.shape().1);
    let steps = inner.div_ceil(Step::DEPTH);
    let panels = |memory: usize, steps: usize| (memory / (steps * size_of::<Step>())).max(1) * SIDE;
    let some_rows = panels(ROWS_MEMORY, steps);
    let some_columns = panels(COLUMNS_MEMORY, steps.min(DEPTH / Step::DEPTH)).min(MOST_COLUMNS);
    // Taken, not borrowed: `change` may multiply, or wait on a thread of rayon's that then begins another part.
    let Workbench { rows: mut packed, mut stripe } = WORKBENCH.take();
    for row in (0..rows).step_by(some_rows) {
        let a = a.rows(row..(row + some_rows).min(rows));
        let rows = (a.shape().0, pack::pack(permit, a, Form::Left, &mut packed));
        for column in (0..columns).step_by(some_columns) {
            let b = b.columns(column..(column + some_columns).min(columns));
            let targets = targets.map(|target| target.at(row, column));
            // SAFETY: from here on, the targets are as large as the product of these rows and columns, and
            // the caller has them for itself.
            unsafe { compute_stripe(permit, rows, b, &mut stripe, targets, change) };
        }
    }
    WORKBENCH.set(Workbench { rows: packed, stripe });
}

/// The product of some rows, their number and what they are packed, and the columns of `b`. Of up to 256 terms one band of sums is in
/// the cache at a time; with more, the whole stripe's sums wait in memory for the last of them.
///
/// # Safety
/// As for [`compute`].
unsafe fn compute_stripe<const N: usize>(
    permit: Permit,
    (rows, packed): (usize, &[Step]),
    b: Matrix<'_>,
    stripe: &mut Stripe,
    targets: [Target; N],
    change: &impl Fn(&[f32], [&mut [f32]; N]),
) {
    let (inner, columns) = b.shape();
    let panel_len = inner.div_ceil(Step::DEPTH);
    // One line more than needed: rows whose distance is a power of two would share a few places of the nearest cache.
    let stride = columns.div_ceil(SIDE) * (SIDE / LANES) + 1;
    // A band of sums is done with after one pass, or has to wait for the next.
    let bands = if inner <= DEPTH { 1 } else { rows.div_ceil(SIDE) };
    let lines = bands * SIDE * stride;
    if stripe.sums.len() < lines {
        stripe.sums.resize(lines, Line::ZERO);
    }
    for depth in (0..inner).step_by(DEPTH) {
        let b = b.rows(depth..(depth + DEPTH).min(inner)).transposed();
        let panels = pack::pack(permit, b, Form::Right, &mut stripe.columns);
        let steps = b.shape().1.div_ceil(Step::DEPTH);
        let is_last = depth + DEPTH >= inner;
        for (band, a) in packed.chunks_exact(panel_len).enumerate() {
            let a = &a[depth / Step::DEPTH..][..steps];
            let targets = targets.map(|target| target.at(band * SIDE, 0));
            let sums = &mut stripe.sums[band % bands * SIDE * stride..];
            // What is needed next: the targets, or the sums of the next band.
            let (next, next_stride) = match targets.iter().find(|target| !target.is_empty) {
                Some(target) if is_last => (target.first.cast_const(), target.stride),
                _ => (sums[SIDE * stride..].as_ptr().cast(), stride * LANES),
            };
            let sums = &mut sums[..SIDE * stride];
            // Not for longer than this: `change` may use tiles in its own way.
            let tiles = Tiles::configure(permit);
            for (panel, b) in panels.chunks_exact(steps).enumerate() {
                let next = next.wrapping_add(panel * SIDE);
                let sums = &mut sums[panel * (SIDE / LANES)..];
                tiles.multiply(a, b, depth > 0, sums, stride, next, next_stride);
            }
            drop(tiles);
            let height = if is_last { SIDE.min(rows - band * SIDE) } else { 0 };
            for (row, sums) in sums.chunks_exact(stride).enumerate().take(height) {
                // SAFETY: by the caller, the targets have this row and `columns` of it, or are empty.
                let pieces = targets.map(|target| unsafe { target.at(row, 0).row(columns) });
                change(&Line::values(sums)[..columns], pieces);
            }
        }
    }
}
