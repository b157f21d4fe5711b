//! Matrix products, checked: the only place of this crate that calls `gemm`.

use gemm::Parallelism;

/// A matrix in borrowed memory: element (r, c) is at `r * strides.0 + c * strides.1`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    strides: (usize, usize),
}

impl<'a> Matrix<'a> {
    /// `rows` x `columns` values, row after row.
    pub(crate) fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        check(data.len(), rows, columns);
        Self { data, rows, columns, strides: (columns, 1) }
    }

    /// The same memory with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            strides: (self.strides.1, self.strides.0),
            ..self
        }
    }
}

/// `out = a b`, or `out += a b`; `out` lies row after row, as many as `a` has.
///
/// # Panics
/// If the shapes do not fit each other.
pub(crate) fn multiply(a: Matrix<'_>, b: Matrix<'_>, accumulate: bool, out: &mut [f32]) {
    let (rows, columns) = (a.rows, b.columns);
    assert_eq!(a.columns, b.rows, "inner dimensions differ");
    check(out.len(), rows, columns);
    if rows == 0 || columns == 0 {
        return;
    }
    // SAFETY: `Matrix::new` and the check above made sure that each of the three slices holds
    // rows x columns values, and strides are (columns, 1) or, transposed, (1, columns): every
    // element that gemm reads or writes lies within its slice. `out` is borrowed mutably, so it
    // overlaps neither `a` nor `b`. A slice is at most isize::MAX bytes: the strides fit isize.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            a.columns,
            out.as_mut_ptr(),
            1,
            columns as isize,
            accumulate,
            a.data.as_ptr(),
            a.strides.1 as isize,
            a.strides.0 as isize,
            b.data.as_ptr(),
            b.strides.1 as isize,
            b.strides.0 as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

fn check(len: usize, rows: usize, columns: usize) {
    let needed = rows.checked_mul(columns);
    assert!(needed == Some(len), "{len} values for a matrix of {rows} x {columns}");
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    const B: [f32; 6] = [1.0, 0.0, -1.0, 2.0, 1.0, 1.0];

    #[test]
    fn products_of_all_orientations() {
        let mut out = [0.0; 4];
        multiply(Matrix::new(&A, 2, 3), Matrix::new(&B, 3, 2), false, &mut out);
        assert_eq!(out, [2.0, 7.0, 5.0, 16.0]);
        multiply(Matrix::new(&A, 2, 3), Matrix::new(&B, 2, 3).transposed(), true, &mut out);
        assert_eq!(out, [2.0 - 2.0, 7.0 + 7.0, 5.0 - 2.0, 16.0 + 19.0]);
        multiply(Matrix::new(&A, 3, 2).transposed(), Matrix::new(&B, 3, 2), false, &mut out);
        assert_eq!(out, [3.0, 11.0, 4.0, 14.0]);
    }

    #[test]
    fn an_empty_sum_is_zero() {
        let mut out = [7.0; 4];
        multiply(Matrix::new(&[], 2, 0), Matrix::new(&[], 0, 2), false, &mut out);
        assert_eq!(out, [0.0; 4]);
    }

    #[test]
    #[should_panic(expected = "5 values for a matrix of 2 x 3")]
    fn a_slice_that_is_too_short_is_refused() {
        Matrix::new(&A[..5], 2, 3);
    }
}
