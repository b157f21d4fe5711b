//! What is asked for, and who computes it.

use crate::matrix::{Matrix, check_len};
use crate::{tiles, vectors};

/// The product of two matrices, yet to be computed.
#[derive(Clone, Copy, Debug)]
#[must_use = "a product is computed by `write_to` or `add_to`"]
pub struct Product<'a> {
    a: Matrix<'a>,
    b: Matrix<'a>,
    threads: usize,
    unit: Option<Unit>,
}

/// What computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// The vector instructions of any processor, through the `gemm` crate.
    Vectors,
    /// The matrix unit (AMX) that some processors have.
    Tiles,
}

impl Unit {
    /// Those this process can use. The processor, the operating system and the environment (`POSEIDON_AMX`) decide;
    /// they are asked once.
    pub fn available() -> &'static [Self] {
        if tiles::available() { &[Self::Vectors, Self::Tiles] } else { &[Self::Vectors] }
    }
}

impl<'a> Product<'a> {
    /// `a` times `b`, on one thread.
    ///
    /// # Panics
    /// If `a` has not as many columns as `b` has rows.
    pub fn new(a: Matrix<'a>, b: Matrix<'a>) -> Self {
        let ((_, inner), (rows, _)) = (a.shape(), b.shape());
        assert!(inner == rows, "{inner} columns times {rows} rows");
        Self { a, b, threads: 1, unit: None }
    }

    /// Computes on so many threads of rayon's pool. The result is the same for any number of them.
    pub fn threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Computes on this unit, also if it is the slower one.
    ///
    /// # Panics
    /// If the unit is not [available](Unit::available).
    pub fn on(self, unit: Unit) -> Self {
        assert!(Unit::available().contains(&unit), "{unit:?} are not available");
        Self { unit: Some(unit), ..self }
    }

    /// Overwrites `into`, row after row, with the product.
    ///
    /// # Panics
    /// If `into` has not as many values as the product.
    pub fn write_to(self, into: &mut [f32]) {
        self.compute(false, into);
    }

    /// Adds the product to `into`, row after row.
    ///
    /// # Panics
    /// If `into` has not as many values as the product.
    pub fn add_to(self, into: &mut [f32]) {
        self.compute(true, into);
    }

    fn compute(self, add: bool, into: &mut [f32]) {
        let (rows, columns) = (self.a.shape().0, self.b.shape().1);
        check_len(into.len(), rows, columns);
        if into.is_empty() {
            return;
        }
        match self.unit.unwrap_or_else(|| self.fastest()) {
            Unit::Vectors => vectors::multiply(self.a, self.b, add, self.threads, into),
            Unit::Tiles => tiles::multiply(self.a, self.b, add, self.threads, into),
        }
    }

    /// By the whole product's shape, never by a thread's part of it: the result must not depend on threads.
    fn fastest(&self) -> Unit {
        let ((rows, inner), columns) = (self.a.shape(), self.b.shape().1);
        let sides_fit = [rows, inner, columns].iter().all(|side| *side >= SMALLEST_SIDE);
        let worth_it = sides_fit && rows * inner * columns >= SMALLEST_VOLUME;
        if worth_it && tiles::available() { Unit::Tiles } else { Unit::Vectors }
    }
}

/// Tiles are filled up with zeros to twice 16, in all three directions.
const SMALLEST_SIDE: usize = 32;

/// Below 2^20 multiplications, packing costs more than tiles gain: 64 x 64 x 64 is slower by a fifth, 128 x 64 x 128 faster
/// by a tenth.
const SMALLEST_VOLUME: usize = 1 << 20;
