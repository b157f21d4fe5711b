//! Products on the matrix unit, AMX: eight registers of 16 x 64 bytes, the *tiles*, and one instruction
//! that multiplies two of them as `bf16` and adds to a third in `f32`.
//!
//! Both factors are packed first (`pack.rs`). Then the output is computed in blocks of 32 x 32, four tiles that stay in
//! registers for 256 steps of the inner dimension. An element's terms are added in the same order in every block of
//! every thread.

mod pack;
mod unit;

use crate::Matrix;
use pack::{Form, SIDE, Step};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::OnceLock;
use unit::{Permit, Tiles};

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

/// `into` = `a` `b`, or that added to it. `Product` has checked that the shapes fit.
pub(crate) fn multiply(a: Matrix<'_>, b: Matrix<'_>, add: bool, threads: usize, into: &mut [f32]) {
    let permit = permit().expect("Product::on refuses tiles that are not available");
    let (rows, columns) = (a.shape().0, b.shape().1);
    assert!(a.shape().1 == b.shape().0 && into.len() == rows * columns, "shapes fit");
    if a.shape().1 == 0 {
        if !add {
            into.fill(0.0);
        }
        return;
    }
    let output = Output { first: into.as_mut_ptr(), stride: columns };
    // Every thread packs the other factor in full: the shorter side is left whole.
    let by_columns = columns >= rows;
    let side = if by_columns { columns } else { rows };
    let share = side.div_ceil(threads.max(1)).next_multiple_of(SIDE);
    let part = |range: Range<usize>| {
        let (a, b, output) = if by_columns {
            (a, b.columns(range.clone()), output.at(0, range.start))
        } else {
            (a.rows(range.clone()), b, output.at(range.start, 0))
        };
        // SAFETY: `output` is the part of `into` for the rows of this `a` and the columns of this `b`, and
        // it is within it because the ranges are within the sides. The ranges do not overlap, and `into` is borrowed
        // exclusively until all parts are done.
        unsafe { compute(permit, a, b, add, output) }
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

/// Where a part of the output lies: row-major, in rows that are longer than the part.
#[derive(Clone, Copy)]
struct Output {
    first: *mut f32,
    stride: usize,
}

// SAFETY: a plain address. Who uses it vouches for exclusive access, see `compute`.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

impl Output {
    fn at(self, row: usize, column: usize) -> Self {
        Self { first: self.first.wrapping_add(row * self.stride + column), ..self }
    }
}

/// How far a block of the output is computed before the next: 48 KiB of each factor, about what the nearest cache holds.
const DEPTH: usize = 256;

/// Most memory for columns of `b`, packed, in bytes: they stay in the second-level cache while all of `a` passes. Half and twice as
/// much is a tenth slower, where that cache has 2 MiB.
const COLUMNS_MEMORY: usize = 768 << 10;

/// Most memory for rows of `a`, packed, in bytes. More of them are packed in parts, each with another pass over `b`.
const ROWS_MEMORY: usize = 32 << 20;

/// Packed factors. A thread keeps its own, because memory that was never touched costs page faults.
struct Packed {
    a: Vec<Step>,
    b: Vec<Step>,
}

thread_local! {
    static PACKED: RefCell<Packed> = const { RefCell::new(Packed { a: Vec::new(), b: Vec::new() }) };
}

/// # Safety
/// `output` is valid for reads and writes of as many rows as `a` and columns as `b` have, and nobody else uses these.
unsafe fn compute(permit: Permit, a: Matrix<'_>, b: Matrix<'_>, add: bool, output: Output) {
    let ((rows, inner), columns) = (a.shape(), b.shape().1);
    let steps = inner.div_ceil(Step::DEPTH);
    let panels = |memory: usize, steps: usize| (memory / (steps * size_of::<Step>())).max(1) * SIDE;
    let some_rows = panels(ROWS_MEMORY, steps);
    let some_columns = panels(COLUMNS_MEMORY, steps.min(DEPTH / Step::DEPTH));
    PACKED.with_borrow_mut(|Packed { a: packed_a, b: packed_b }| {
        let tiles = Tiles::configure(permit);
        for first_row in (0..rows).step_by(some_rows) {
            let a = a.rows(first_row..(first_row + some_rows).min(rows));
            pack::pack(permit, a, Form::Left, packed_a);
            for first_column in (0..columns).step_by(some_columns) {
                let range = first_column..(first_column + some_columns).min(columns);
                for depth in (0..inner).step_by(DEPTH) {
                    let b = b
                        .rows(depth..(depth + DEPTH).min(inner))
                        .columns(range.clone())
                        .transposed();
                    pack::pack(permit, b, Form::Right, packed_b);
                    let packed = Factors {
                        a: packed_a,
                        a_steps: steps,
                        a_first: depth / Step::DEPTH,
                        b: packed_b,
                        shape: (a.shape().0, b.shape().0),
                    };
                    let output = output.at(first_row, first_column);
                    // SAFETY: from here on, the output is as large as the product of the rows of `a`
                    // and the columns of `b` that are packed, and the caller has it for itself.
                    unsafe { blocks(&tiles, packed, add || depth > 0, output) };
                }
            }
        }
    });
}

/// Packed factors whose product fits their cache.
struct Factors<'a> {
    /// Panels of rows, each `a_steps` long, of which those from `a_first` on meet b's.
    a: &'a [Step],
    a_steps: usize,
    a_first: usize,
    b: &'a [Step],
    /// Of the product.
    shape: (usize, usize),
}

/// # Safety
/// `output` is valid for reads and writes of a matrix of `factors.shape`, and nobody else uses it.
unsafe fn blocks(tiles: &Tiles, factors: Factors<'_>, add: bool, output: Output) {
    let (rows, columns) = factors.shape;
    let steps = factors.b.len() / columns.div_ceil(SIDE);
    for (row, a) in (0..rows).step_by(SIDE).zip(factors.a.chunks_exact(factors.a_steps)) {
        let a = &a[factors.a_first..][..steps];
        for (column, b) in (0..columns).step_by(SIDE).zip(factors.b.chunks_exact(steps)) {
            let to = output.at(row, column);
            let (height, width) = (SIDE.min(rows - row), SIDE.min(columns - column));
            if height == SIDE && width == SIDE {
                let is_last = column + SIDE >= columns;
                let next =
                    if is_last { output.at(row + SIDE, 0) } else { output.at(row, column + SIDE) };
                // SAFETY: SIDE x SIDE values from `to` on are within the output.
                unsafe { tiles.multiply(a, b, add, to, next.first) };
                continue;
            }
            let mut edge = [0.0; SIDE * SIDE];
            let whole = Output { first: edge.as_mut_ptr(), stride: SIDE };
            // SAFETY: height x width values from `to` on are within the output and nobody else's; `edge` has
            // SIDE x SIDE of them and is ours.
            unsafe {
                if add {
                    copy(to, whole, height, width);
                }
                tiles.multiply(a, b, add, whole, whole.first);
                copy(whole, to, height, width);
            }
        }
    }
}

/// # Safety
/// `from` is valid for reads and `to` for writes of `height` rows of `width` values, and they do not overlap.
unsafe fn copy(from: Output, to: Output, height: usize, width: usize) {
    for row in 0..height {
        // SAFETY: by the caller.
        unsafe { to.at(row, 0).first.copy_from_nonoverlapping(from.at(row, 0).first, width) };
    }
}
