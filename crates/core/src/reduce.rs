//! Arithmetic of collectives: numbers of any type, combined element by element.
//!
//! Memory is bytes here, because one operation serves all types. Loops are plain Rust that pulp compiles
//! once per instruction set, as in `optim`; every operation rounds as IEEE 754 says, so the result does
//! not depend on the machine.

use half::{bf16, f16};
use pulp::{Arch, NullaryFnOnce};
use std::fmt;

/// What a tensor's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// Bytes that are moved and never computed with: any type of one byte.
    Bytes = 0,
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary64.
    F64 = 2,
    /// IEEE 754 binary16.
    F16 = 3,
    /// The upper half of a binary32.
    Bf16 = 4,
    /// Signed, 8 bits.
    I8 = 5,
    /// Unsigned, 8 bits.
    U8 = 6,
    /// Signed, 16 bits.
    I16 = 7,
    /// Signed, 32 bits.
    I32 = 8,
    /// Signed, 64 bits.
    I64 = 9,
    /// 0 or 1 in a byte. Sum and maximum are *or*, product and minimum are *and*.
    Bool = 10,
}

/// How contributions become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum; integers wrap.
    Sum = 0,
    /// The sum divided by the number of contributions. Floating point only.
    Mean = 1,
    /// The product; integers wrap.
    Product = 2,
    /// The least; of floating-point numbers, NaN if any is.
    Min = 3,
    /// The greatest; of floating-point numbers, NaN if any is.
    Max = 4,
    /// Bitwise and. Integers only, as the next two.
    BitAnd = 5,
    /// Bitwise or.
    BitOr = 6,
    /// Bitwise exclusive or.
    BitXor = 7,
}

impl Dtype {
    /// All of them, by their number on the wire.
    pub const ALL: [Self; 11] = [
        Self::Bytes,
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::I8,
        Self::U8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::Bool,
    ];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::Bytes | Self::I8 | Self::U8 | Self::Bool => 1,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }

    fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::Bf16)
    }
}

impl ReduceOp {
    /// All of them, by their number on the wire.
    pub const ALL: [Self; 8] = [
        Self::Sum,
        Self::Mean,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
    ];

    /// Whether it means something for `dtype`.
    pub fn applies_to(self, dtype: Dtype) -> bool {
        match self {
            _ if dtype == Dtype::Bytes => false,
            Self::Mean => dtype.is_float(),
            Self::BitAnd | Self::BitOr | Self::BitXor => !dtype.is_float(),
            Self::Sum | Self::Product | Self::Min | Self::Max => true,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bytes => "bytes",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::I8 => "int8",
            Self::U8 => "uint8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::Bool => "bool",
        })
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::BitAnd => "and",
            Self::BitOr => "or",
            Self::BitXor => "xor",
        })
    }
}

/// Combines `from` into `into`, both whole elements of `dtype` and equally long. `op` applies to
/// `dtype`; [`ReduceOp::Mean`] only adds: [`divide`] comes last.
///
/// # Panics
/// If the lengths differ, or either is not aligned as `dtype` wants it.
pub fn reduce(dtype: Dtype, op: ReduceOp, into: &mut [u8], from: &[u8]) {
    assert_eq!(into.len(), from.len(), "both sides have the same elements");
    match dtype {
        Dtype::F32 => float::<f32>(op, into, from),
        Dtype::F64 => float::<f64>(op, into, from),
        Dtype::F16 => float::<f16>(op, into, from),
        Dtype::Bf16 => float::<bf16>(op, into, from),
        Dtype::I8 => integer::<i8>(op, into, from),
        Dtype::U8 | Dtype::Bytes => integer::<u8>(op, into, from),
        Dtype::I16 => integer::<i16>(op, into, from),
        Dtype::I32 => integer::<i32>(op, into, from),
        Dtype::I64 => integer::<i64>(op, into, from),
        Dtype::Bool => {
            let op = match op {
                ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Max => ReduceOp::BitOr,
                ReduceOp::Product | ReduceOp::Min => ReduceOp::BitAnd,
                bitwise => bitwise,
            };
            integer::<u8>(op, into, from);
        }
    }
}

/// Divides floating-point numbers by `count`; leaves others alone.
///
/// # Panics
/// If `values` is not aligned as `dtype` wants it.
pub fn divide(dtype: Dtype, values: &mut [u8], count: usize) {
    match dtype {
        Dtype::F32 => scale::<f32>(values, |x| x / count as f32),
        Dtype::F64 => scale::<f64>(values, |x| x / count as f64),
        Dtype::F16 => scale::<f16>(values, |x| f16::from_f32(x.to_f32() / count as f32)),
        Dtype::Bf16 => scale::<bf16>(values, |x| bf16::from_f32(x.to_f32() / count as f32)),
        _ => {}
    }
}

fn scale<T: bytemuck::Pod>(values: &mut [u8], f: impl Fn(T) -> T) {
    for value in bytemuck::cast_slice_mut::<u8, T>(values) {
        *value = f(*value);
    }
}

/// Two of a kind become one.
trait Combine: Copy {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

macro_rules! floats {
    ($($t:ty),*) => {$(
        impl Combine for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { self * other }
            // NaN on either side wins, whichever comes first.
            #[inline(always)]
            fn least(self, other: Self) -> Self {
                if self < other || self != self { self } else { other }
            }
            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                if self > other || self != self { self } else { other }
            }
        }
    )*};
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Combine for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn least(self, other: Self) -> Self { self.min(other) }
            #[inline(always)]
            fn greatest(self, other: Self) -> Self { self.max(other) }
        }
    )*};
}

floats!(f32, f64);
integers!(i8, u8, i16, i32, i64);

macro_rules! halves {
    ($($t:ty),*) => {$(
        impl Combine for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self { Self::from_f32(self.to_f32() + other.to_f32()) }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { Self::from_f32(self.to_f32() * other.to_f32()) }
            #[inline(always)]
            fn least(self, other: Self) -> Self { Self::from_f32(self.to_f32().least(other.to_f32())) }
            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                Self::from_f32(self.to_f32().greatest(other.to_f32()))
            }
        }
    )*};
}

halves!(f16, bf16);

/// `into[i] = f(into[i], from[i])`
struct Each<'a, T, F> {
    into: &'a mut [T],
    from: &'a [T],
    f: F,
}

impl<T: Copy, F: Fn(T, T) -> T> NullaryFnOnce for Each<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (into, from) in self.into.iter_mut().zip(self.from) {
            *into = (self.f)(*into, *from);
        }
    }
}

fn each<T: bytemuck::Pod>(into: &mut [u8], from: &[u8], f: impl Fn(T, T) -> T) {
    let (into, from) = (bytemuck::cast_slice_mut(into), bytemuck::cast_slice(from));
    Arch::new().dispatch(Each { into, from, f });
}

fn float<T: bytemuck::Pod + Combine>(op: ReduceOp, into: &mut [u8], from: &[u8]) {
    match op {
        ReduceOp::Product => each(
            into,
            from,
            #[inline(always)]
            |a: T, b| a.multiply(b),
        ),
        ReduceOp::Min => each(
            into,
            from,
            #[inline(always)]
            |a: T, b| a.least(b),
        ),
        ReduceOp::Max => each(
            into,
            from,
            #[inline(always)]
            |a: T, b| a.greatest(b),
        ),
        // Bitwise operations do not apply and are refused before memory is touched.
        _ => each(
            into,
            from,
            #[inline(always)]
            |a: T, b| a.add(b),
        ),
    }
}

fn integer<T>(op: ReduceOp, into: &mut [u8], from: &[u8])
where
    T: bytemuck::Pod + Combine,
    T: std::ops::BitAnd<Output = T> + std::ops::BitOr<Output = T> + std::ops::BitXor<Output = T>,
{
    match op {
        ReduceOp::BitAnd => each(
            into,
            from,
            #[inline(always)]
            |a: T, b| a & b,
        ),
        ReduceOp::BitOr => each(
            into,
            from,
            #[inline(always)]
            |a: T, b| a | b,
        ),
        ReduceOp::BitXor => each(
            into,
            from,
            #[inline(always)]
            |a: T, b| a ^ b,
        ),
        other => float::<T>(other, into, from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn combine<T: bytemuck::Pod>(dtype: Dtype, op: ReduceOp, a: &[T], b: &[T]) -> Vec<T> {
        let mut into = a.to_vec();
        reduce(dtype, op, bytemuck::cast_slice_mut(&mut into), bytemuck::cast_slice(b));
        into
    }

    #[test]
    fn every_operation_on_integers() {
        let (a, b) = ([6i32, -3, i32::MAX], [3i32, 5, 1]);
        let of = |op| combine(Dtype::I32, op, &a, &b);
        assert_eq!(of(ReduceOp::Sum), [9, 2, i32::MIN]);
        assert_eq!(of(ReduceOp::Product), [18, -15, i32::MAX]);
        assert_eq!(of(ReduceOp::Min), [3, -3, 1]);
        assert_eq!(of(ReduceOp::Max), [6, 5, i32::MAX]);
        assert_eq!(of(ReduceOp::BitAnd), [2, 5, 1]);
        assert_eq!(of(ReduceOp::BitOr), [7, -3, i32::MAX]);
        assert_eq!(of(ReduceOp::BitXor), [5, -8, i32::MAX - 1]);
    }

    #[test]
    fn every_type_adds() {
        assert_eq!(combine(Dtype::F32, ReduceOp::Sum, &[1.5f32; 19], &[2.0; 19]), [3.5; 19]);
        assert_eq!(combine(Dtype::F64, ReduceOp::Sum, &[1.5f64], &[2.0]), [3.5]);
        let (a, b) = (f16::from_f32(1.5), bf16::from_f32(1.5));
        assert_eq!(combine(Dtype::F16, ReduceOp::Sum, &[a], &[a]), [f16::from_f32(3.0)]);
        assert_eq!(combine(Dtype::Bf16, ReduceOp::Sum, &[b], &[b]), [bf16::from_f32(3.0)]);
        assert_eq!(combine(Dtype::I8, ReduceOp::Sum, &[127i8], &[1]), [-128]);
        assert_eq!(combine(Dtype::U8, ReduceOp::Sum, &[255u8], &[2]), [1]);
        assert_eq!(combine(Dtype::I16, ReduceOp::Sum, &[300i16], &[2]), [302]);
        assert_eq!(combine(Dtype::I64, ReduceOp::Sum, &[1i64 << 40], &[2]), [(1 << 40) + 2]);
    }

    #[test]
    fn booleans_stay_booleans() {
        let of = |op| combine(Dtype::Bool, op, &[0u8, 0, 1, 1], &[0, 1, 0, 1]);
        assert_eq!(of(ReduceOp::Sum), [0, 1, 1, 1]);
        assert_eq!(of(ReduceOp::Product), [0, 0, 0, 1]);
        assert_eq!(of(ReduceOp::BitXor), [0, 1, 1, 0]);
    }

    #[test]
    fn nan_is_not_lost_on_the_way() {
        for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            assert!(combine(Dtype::F32, ReduceOp::Min, &[a], &[b])[0].is_nan());
            assert!(combine(Dtype::F32, ReduceOp::Max, &[a], &[b])[0].is_nan());
        }
    }

    #[test]
    fn a_mean_is_divided_last() {
        let mut sum = combine(Dtype::F32, ReduceOp::Mean, &[1.0f32, 5.0], &[2.0, 1.0]);
        divide(Dtype::F32, bytemuck::cast_slice_mut(&mut sum), 2);
        assert_eq!(sum, [1.5, 3.0]);
        assert!(ReduceOp::Mean.applies_to(Dtype::Bf16) && !ReduceOp::Mean.applies_to(Dtype::I32));
        assert!(!ReduceOp::BitOr.applies_to(Dtype::F64) && ReduceOp::BitOr.applies_to(Dtype::Bool));
    }
}
