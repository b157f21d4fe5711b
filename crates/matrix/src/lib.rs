//! Products of matrices of `f32`, as fast as the processor can and as exact as `f32` is.
//!
//! ```
//! use poseidon_matrix::{Matrix, Product};
//!
//! let a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
//! let a = Matrix::row_major(&a, 2, 3);
//! let mut sums = [0.0; 4];
//! Product::new(a, a.transposed()).write_to(&mut sums);
//! assert_eq!(sums, [14.0, 32.0, 32.0, 77.0]);
//! ```
//!
//! There are two ways to compute, [`Unit`]s. *Vectors* are the `gemm` crate, and work everywhere. *Tiles*
//! are the matrix unit of newer x86 servers (AMX, under Linux), which multiplies `bf16` only: each number is cut
//! into three of these, without a rest, and the six products that matter are added in `f32`. That is
//! up to 1.6 times as fast as vectors and its errors are smaller (`docs/adr/0012-products-on-tiles.md`).
//!
//! Tiles differ from vectors where numbers end:
//!
//! - An infinity, or a number beyond 3.39e38, gives a result that is not finite, as it should, but perhaps NaN
//!   where vectors give an infinity.
//! - What is smaller than the smallest normal number, 1.2e-38, counts as zero: inputs, products and sums.
//!   Inputs below 9.9e-32 lose the last of their digits for this reason.
//!
//! The environment's `POSEIDON_AMX=0` turns tiles off for the whole process, for instance because machines without
//! them have to come to the same bits.

mod matrix;
mod product;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tiles;
mod vectors;

/// A machine without the matrix unit.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod tiles {
    use crate::Matrix;

    pub(crate) fn available() -> bool {
        false
    }

    pub(crate) fn update<const N: usize>(
        _: Matrix<'_>,
        _: Matrix<'_>,
        _: usize,
        _: [&mut [f32]; N],
        _: &impl Fn(&[f32], [&mut [f32]; N]),
    ) {
        unreachable!("Product::on refuses tiles that are not available");
    }
}

pub use matrix::Matrix;
pub use product::{Product, Unit};
