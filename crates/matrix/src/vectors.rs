//! Products by vector instructions: the only place that calls `gemm`.

use crate::Matrix;
use gemm::Parallelism;
use std::cell::RefCell;

/// Rows that are computed at a time. The product packs its right factor anew for each block, which costs at most an eighth of it
/// at this size.
const BLOCK: usize = 512;

thread_local! {
    /// One block. A thread keeps it, because memory that was never touched costs page faults.
    static PRODUCT: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Changes `targets` by `a` `b`. `Product` has checked that the shapes fit.
pub(crate) fn update<const N: usize>(
    a: Matrix<'_>,
    b: Matrix<'_>,
    threads: usize,
    mut targets: [&mut [f32]; N],
    change: &impl Fn(&[f32], [&mut [f32]; N]),
) {
    let (rows, columns) = (a.shape().0, b.shape().1);
    // Taken, not borrowed: a thread of rayon's that waits for others may begin another product meanwhile.
    let mut product = PRODUCT.take();
    for start in (0..rows).step_by(BLOCK) {
        let a = a.rows(start..(start + BLOCK).min(rows));
        let len = a.shape().0.checked_mul(columns).expect("a block fits the memory");
        // It never shrinks: it would have to be cleared when it grows again.
        if product.len() < len {
            product.resize(len, 0.0);
        }
        let product = &mut product[..len];
        multiply(a, b, false, threads, product);
        let pieces = targets.each_mut().map(|target| {
            let rest = std::mem::take(target);
            let (piece, rest) = rest.split_at_mut(product.len().min(rest.len()));
            *target = rest;
            piece
        });
        change(product, pieces);
    }
    PRODUCT.set(product);
}

/// `into` = `a` `b`, or that added to it. `Product` has checked that the shapes fit.
pub(crate) fn multiply(a: Matrix<'_>, b: Matrix<'_>, add: bool, threads: usize, into: &mut [f32]) {
    let ((rows, inner), columns) = (a.shape(), b.shape().1);
    let fits = rows.checked_mul(columns) == Some(into.len());
    assert!(inner == b.shape().0 && fits, "shapes fit");
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    // SAFETY: a Matrix has each of its rows x columns elements within its slice, at its strides; those of
    // `into` are (columns, 1), and the assertion has seen that it is as long. `into` is borrowed mutably, so it
    // overlaps neither. A slice is at most isize::MAX bytes: strides fit isize.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            inner,
            into.as_mut_ptr(),
            1,
            columns as isize,
            add,
            a.values().as_ptr(),
            a.strides().1 as isize,
            a.strides().0 as isize,
            b.values().as_ptr(),
            b.strides().1 as isize,
            b.strides().0 as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}
