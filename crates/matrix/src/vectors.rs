//! Products by vector instructions: the only place that calls `gemm`.

use crate::Matrix;
use gemm::Parallelism;

/// `into` = `a` `b`, or that added to it. `Product` has checked that the shapes fit.
pub(crate) fn multiply(a: Matrix<'_>, b: Matrix<'_>, add: bool, threads: usize, into: &mut [f32]) {
    let ((rows, inner), columns) = (a.shape(), b.shape().1);
    assert!(inner == b.shape().0 && into.len() == rows * columns, "shapes fit");
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
