//! A matrix that lies in somebody's memory.

use std::ops::Range;

/// A matrix in borrowed memory.
///
/// One of the two strides is 1: rows or columns are contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Element (r, c) is `values[r * strides.0 + c * strides.1]`, which exists for every r < `rows` and c <
    /// `columns`.
    values: &'a [f32],
    rows: usize,
    columns: usize,
    strides: (usize, usize),
}

impl<'a> Matrix<'a> {
    /// `rows` x `columns` values, row after row.
    ///
    /// # Panics
    /// If there are more or fewer values than that.
    pub fn row_major(values: &'a [f32], rows: usize, columns: usize) -> Self {
        check_len(values.len(), rows, columns);
        Self { values, rows, columns, strides: (columns, 1) }
    }

    /// The same memory with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        let (rows, columns) = (self.columns, self.rows);
        Self { rows, columns, strides: (self.strides.1, self.strides.0), ..self }
    }

    /// Some of the rows.
    ///
    /// # Panics
    /// If `range` is not within the matrix.
    pub fn rows(self, range: Range<usize>) -> Self {
        let Range { start, end } = range;
        assert!(start <= end && end <= self.rows, "rows {start}..{end} of {}", self.rows);
        let is_empty = start == end || self.columns == 0;
        let first = if is_empty { self.values.len() } else { start * self.strides.0 };
        Self { values: &self.values[first..], rows: end - start, ..self }
    }

    /// Some of the columns.
    ///
    /// # Panics
    /// If `range` is not within the matrix.
    pub fn columns(self, range: Range<usize>) -> Self {
        let Range { start, end } = range;
        assert!(start <= end && end <= self.columns, "columns {start}..{end} of {}", self.columns);
        self.transposed().rows(range).transposed()
    }

    /// Number of rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// From one row to the next and from one column to the next.
    pub(crate) fn strides(&self) -> (usize, usize) {
        self.strides
    }

    /// From element (0, 0) on.
    pub(crate) fn values(&self) -> &'a [f32] {
        self.values
    }
}

pub(crate) fn check_len(len: usize, rows: usize, columns: usize) {
    let needed = rows.checked_mul(columns);
    assert!(needed == Some(len), "{len} values for a matrix of {rows} x {columns}");
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];

    fn elements(matrix: Matrix<'_>) -> Vec<Vec<f32>> {
        let (rows, columns) = matrix.shape();
        let at = |r, c| matrix.values()[r * matrix.strides().0 + c * matrix.strides().1];
        (0..rows).map(|r| (0..columns).map(|c| at(r, c)).collect()).collect()
    }

    #[test]
    fn views_of_the_same_memory() {
        let matrix = Matrix::row_major(&VALUES, 2, 3);
        assert_eq!(elements(matrix), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        assert_eq!(elements(matrix.transposed()), [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]);
        assert_eq!(elements(matrix.rows(1..2)), [[4.0, 5.0, 6.0]]);
        assert_eq!(elements(matrix.columns(1..3)), [[2.0, 3.0], [5.0, 6.0]]);
        assert_eq!(elements(matrix.columns(1..3).transposed().rows(1..2)), [[3.0, 6.0]]);
    }

    #[test]
    fn nothing_is_a_view_too() {
        let matrix = Matrix::row_major(&VALUES, 2, 3);
        assert_eq!(matrix.rows(2..2).shape(), (0, 3));
        assert_eq!(matrix.columns(3..3).shape(), (2, 0));
        assert_eq!(matrix.columns(3..3).rows(1..2).shape(), (1, 0));
    }

    #[test]
    #[should_panic(expected = "5 values for a matrix of 2 x 3")]
    fn a_slice_that_is_too_short_is_refused() {
        Matrix::row_major(&VALUES[..5], 2, 3);
    }

    #[test]
    #[should_panic(expected = "columns 1..4 of 3")]
    fn columns_beyond_the_last_are_refused() {
        let _ = Matrix::row_major(&VALUES, 2, 3).columns(1..4);
    }
}
