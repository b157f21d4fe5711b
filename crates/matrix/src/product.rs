//! What is asked for, and who computes it.

use crate::matrix::{Matrix, check_len};
use crate::{tiles, vectors};

/// The product of two matrices, yet to be computed.
#[derive(Clone, Copy, Debug)]
#[must_use = "a product is computed by `write_to`, `add_to` or `update`"]
pub struct Product<'a> {
    a: Matrix<'a>,
    b: Matrix<'a>,
    threads: usize,
    unit: Option<Unit>,
    may_use_tiles: bool,
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
        Self { a, b, threads: 1, unit: None, may_use_tiles: true }
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

    /// Whether tiles may be used where they are faster and [available](Unit::available); they may, unless this says no.
    /// For instance because another machine, which has none, has to come to the same bits.
    pub fn allow_tiles(self, allowed: bool) -> Self {
        Self { may_use_tiles: allowed, ..self }
    }

    /// Overwrites `into`, row after row, with the product.
    ///
    /// # Panics
    /// If `into` has not as many values as the product.
    pub fn write_to(self, into: &mut [f32]) {
        match self.unit_for([into.len()]) {
            None => {}
            Some(Unit::Vectors) => vectors::multiply(self.a, self.b, false, self.threads, into),
            Some(Unit::Tiles) => {
                tiles::update(self.a, self.b, self.threads, [into], &|x, [into]| {
                    into.copy_from_slice(x);
                })
            }
        }
    }

    /// Adds the product to `into`, row after row.
    ///
    /// # Panics
    /// If `into` has not as many values as the product.
    pub fn add_to(self, into: &mut [f32]) {
        match self.unit_for([into.len()]) {
            None => {}
            Some(Unit::Vectors) => vectors::multiply(self.a, self.b, true, self.threads, into),
            Some(Unit::Tiles) => {
                tiles::update(self.a, self.b, self.threads, [into], &|x, [into]| {
                    into.iter_mut().zip(x).for_each(|(into, x)| *into += x);
                })
            }
        }
    }

    /// Changes `targets` by the product: `change` gets pieces of it as they are computed, each with the same piece of every
    /// target. On tiles, and with up to 256 terms in a sum, they are parts of rows that are still in the cache, and the product is never in memory.
    ///
    /// A target that is empty stays so, in every piece. Pieces come in any order, and from several threads if the
    /// product is computed on several.
    ///
    /// ```
    /// # use poseidon_matrix::{Matrix, Product};
    /// let column = Matrix::row_major(&[1.0, 2.0], 2, 1);
    /// let (mut weights, mut momentum) = ([10.0; 4], [1.0; 4]);
    /// Product::new(column, column.transposed()).update(
    ///     [&mut weights, &mut momentum],
    ///     |gradient, [weights, momentum]| {
    ///         for i in 0..gradient.len() {
    ///             momentum[i] = 0.5 * momentum[i] + gradient[i];
    ///             weights[i] -= momentum[i];
    ///         }
    ///     },
    /// );
    /// assert_eq!(weights, [8.5, 7.5, 7.5, 5.5]);
    /// ```
    ///
    /// # Panics
    /// If a target has other than as many values as the product, or none.
    pub fn update<const N: usize>(
        self,
        targets: [&mut [f32]; N],
        change: impl Fn(&[f32], [&mut [f32]; N]) + Sync,
    ) {
        const { assert!(N > 0, "nothing to change") };
        let lens = targets.each_ref().map(|target| target.len());
        match self.unit_for(lens.into_iter().filter(|len| *len > 0)) {
            None => {}
            Some(Unit::Vectors) => {
                vectors::update(self.a, self.b, self.threads, targets, &change);
            }
            Some(Unit::Tiles) => tiles::update(self.a, self.b, self.threads, targets, &change),
        }
    }

    /// Who computes this, into memory of these lengths; nobody if there is nothing to compute.
    fn unit_for(&self, lens: impl IntoIterator<Item = usize>) -> Option<Unit> {
        let ((rows, inner), columns) = (self.a.shape(), self.b.shape().1);
        lens.into_iter().for_each(|len| check_len(len, rows, columns));
        if rows == 0 || columns == 0 {
            return None;
        }
        // Tiles have no way to add up nothing.
        if inner == 0 {
            Some(Unit::Vectors)
        } else {
            Some(self.unit.unwrap_or_else(|| self.fastest()))
        }
    }

    /// By the whole product's shape, never by a thread's part of it: the result must not depend on threads.
    fn fastest(&self) -> Unit {
        let ((rows, inner), columns) = (self.a.shape(), self.b.shape().1);
        let sides_fit = [rows, inner, columns].iter().all(|side| *side >= SMALLEST_SIDE);
        let worth_it = sides_fit && rows * inner * columns >= SMALLEST_VOLUME;
        if worth_it && self.may_use_tiles && tiles::available() {
            Unit::Tiles
        } else {
            Unit::Vectors
        }
    }
}

/// Tiles are filled up with zeros to twice 16, in all three directions.
const SMALLEST_SIDE: usize = 32;

/// Below 2^21 multiplications, packing costs more than tiles gain: 128 x 64 x 128 is slower by a tenth.
const SMALLEST_VOLUME: usize = 1 << 21;
