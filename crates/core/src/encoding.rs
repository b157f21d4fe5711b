//! How a layer's numbers travel: the type of the elements in a frame's payload.
//!
//! Arithmetic is always in `f32`. Contributions are decoded while they are added up; a result is
//! encoded once, when it is complete, and everybody gets the same bits.

use crate::wire::Kind;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::{Arch, NullaryFnOnce};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::{fmt, str::FromStr};

/// The type of the elements in a payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// IEEE 754 binary32: the numbers as they are.
    #[default]
    F32,
    /// The upper half of a binary32: its exponent, and 8 bits of its significand.
    Bf16,
    /// IEEE 754 binary16. Numbers beyond 65504 become infinite.
    F16,
}

/// How the numbers of one layer travel, by direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Encodings {
    /// Contributions: gradients, sums of them on their way to the shard, rows of factors.
    pub up: Encoding,
    /// Results, and the initial values, which are a result too.
    pub down: Encoding,
}

/// Numbers in memory that several links may read. It is shared, not copied.
#[derive(Clone, Debug)]
pub enum Block {
    /// Elements of [`Encoding::F32`].
    Whole(Arc<[f32]>),
    /// The bits of elements that have two bytes each.
    Half(Arc<[u16]>),
}

impl Encoding {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// Bytes of one element.
    pub fn width(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Bytes of `elements` elements.
    pub fn bytes(self, elements: usize) -> usize {
        elements * self.width()
    }

    /// `sum += piece`. The piece is as many whole elements as `sum` has.
    ///
    /// # Panics
    /// If the lengths differ, or if `piece` is not aligned for its elements.
    pub fn add(self, sum: &mut [f32], piece: &[u8]) {
        assert_eq!(piece.len(), self.bytes(sum.len()), "a piece has as many elements as its sum");
        match self {
            Self::F32 => crate::optim::add(sum, bytemuck::cast_slice(piece)),
            Self::Bf16 => Arch::new().dispatch(AddBf16 { sum, x: bytemuck::cast_slice(piece) }),
            Self::F16 => {
                let mut decoded = [0.0; BLOCK];
                let x: &[f16] = bytemuck::cast_slice(piece);
                for (sum, x) in sum.chunks_mut(BLOCK).zip(x.chunks(BLOCK)) {
                    let decoded = &mut decoded[..x.len()];
                    x.convert_to_f32_slice(decoded);
                    crate::optim::add(sum, decoded);
                }
            }
        }
    }

    /// `into = piece`. The piece is as many whole elements as `into` has.
    ///
    /// # Panics
    /// If the lengths differ, or if `piece` is not aligned for its elements.
    pub fn decode(self, piece: &[u8], into: &mut [f32]) {
        assert_eq!(piece.len(), self.bytes(into.len()), "both sides have the same elements");
        match self {
            Self::F32 => into.copy_from_slice(bytemuck::cast_slice(piece)),
            Self::Bf16 => Arch::new().dispatch(DecodeBf16 { x: bytemuck::cast_slice(piece), into }),
            Self::F16 => {
                let x: &[f16] = bytemuck::cast_slice(piece);
                x.convert_to_f32_slice(into);
            }
        }
    }

    /// `into = values`, each rounded to the nearest number there is, to the even one of two.
    ///
    /// # Panics
    /// If the lengths differ, or if `into` is not aligned for its elements.
    pub fn encode(self, values: &[f32], into: &mut [u8]) {
        assert_eq!(into.len(), self.bytes(values.len()), "both sides have the same elements");
        match self {
            Self::F32 => into.copy_from_slice(bytemuck::cast_slice(values)),
            Self::Bf16 => {
                Arch::new().dispatch(EncodeBf16 { values, into: bytemuck::cast_slice_mut(into) });
            }
            Self::F16 => {
                let into: &mut [f16] = bytemuck::cast_slice_mut(into);
                into.convert_from_f32_slice(values);
            }
        }
    }
}

/// Elements that are decoded at a time before they are added: they stay in the first cache.
const BLOCK: usize = 512;

impl Encodings {
    /// The same in both directions.
    pub fn both(encoding: Encoding) -> Self {
        Self { up: encoding, down: encoding }
    }

    /// The encoding of the payload of a frame of this kind that is about a layer.
    pub fn of(self, kind: Kind) -> Encoding {
        match kind {
            Kind::Init | Kind::Update => self.down,
            _ => self.up,
        }
    }

    /// Bytes of one element in the direction in which it has more.
    pub fn widest(self) -> usize {
        self.up.width().max(self.down.width())
    }
}

impl Block {
    /// The elements as they go over the wire.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Whole(values) => bytemuck::cast_slice(values),
            Self::Half(bits) => bytemuck::cast_slice(bits),
        }
    }

    /// The elements, to be written. `None` while somebody else holds the block.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        match self {
            Self::Whole(values) => Some(bytemuck::cast_slice_mut(Arc::get_mut(values)?)),
            Self::Half(bits) => Some(bytemuck::cast_slice_mut(Arc::get_mut(bits)?)),
        }
    }

    /// A block of `len` zeros in this encoding.
    pub fn zeroed(encoding: Encoding, len: usize) -> Self {
        match encoding {
            Encoding::F32 => Self::Whole(std::iter::repeat_n(0.0, len).collect()),
            Encoding::Bf16 | Encoding::F16 => Self::Half(std::iter::repeat_n(0, len).collect()),
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

impl FromStr for Encoding {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let all = Self::ALL.into_iter().find(|encoding| encoding.to_string() == s);
        all.ok_or_else(|| format!("expected 'f32', 'bf16' or 'f16', got '{s}'"))
    }
}

// `half` converts slices of f16 with the processor's instructions, but bf16 number by number. These
// loops are compiled once per instruction set, as in `optim`.

/// `sum += x`
struct AddBf16<'a> {
    sum: &'a mut [f32],
    x: &'a [u16],
}

impl NullaryFnOnce for AddBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (sum, x) in self.sum.iter_mut().zip(self.x) {
            *sum += f32::from_bits(u32::from(*x) << 16);
        }
    }
}

/// `into = x`
struct DecodeBf16<'a> {
    x: &'a [u16],
    into: &'a mut [f32],
}

impl NullaryFnOnce for DecodeBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (into, x) in self.into.iter_mut().zip(self.x) {
            *into = f32::from_bits(u32::from(*x) << 16);
        }
    }
}

/// `into = values`, rounded
struct EncodeBf16<'a> {
    values: &'a [f32],
    into: &'a mut [u16],
}

impl NullaryFnOnce for EncodeBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (into, value) in self.into.iter_mut().zip(self.values) {
            *into = bf16::from_f32(*value).to_bits();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reference(encoding: Encoding, value: f32) -> f32 {
        match encoding {
            Encoding::F32 => value,
            Encoding::Bf16 => bf16::from_f32(value).to_f32(),
            Encoding::F16 => f16::from_f32_const(value).to_f32_const(),
        }
    }

    /// What comes of `values` on the other side.
    fn there_and_back(encoding: Encoding, values: &[f32]) -> Vec<f32> {
        let mut block = Block::zeroed(encoding, values.len());
        encoding.encode(values, block.bytes_mut().unwrap());
        let mut back = vec![f32::NAN; values.len()];
        encoding.decode(block.bytes(), &mut back);
        back
    }

    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    proptest! {
        /// Any bits at all: subnormal numbers, infinities and NaN among them.
        #[test]
        fn every_number_becomes_the_nearest_one(bits in proptest::collection::vec(any::<u32>(), 0..1500)) {
            let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            for encoding in Encoding::ALL {
                for (value, back) in values.iter().zip(there_and_back(encoding, &values)) {
                    prop_assert!(same(back, reference(encoding, *value)), "{encoding}: {value} is {back}");
                }
            }
        }

        #[test]
        fn a_piece_is_added_in_f32(
            values in proptest::collection::vec(-1e4f32..1e4, 0..1500), begun in -1e4f32..1e4,
        ) {
            for encoding in Encoding::ALL {
                let mut block = Block::zeroed(encoding, values.len());
                encoding.encode(&values, block.bytes_mut().unwrap());
                let mut sum = vec![begun; values.len()];
                encoding.add(&mut sum, block.bytes());
                for (sum, value) in sum.iter().zip(&values) {
                    prop_assert_eq!(*sum, begun + reference(encoding, *value), "{}", encoding);
                }
            }
        }
    }

    /// Halfway between two numbers the even one is taken, on both sides of zero.
    #[test]
    fn ties_go_to_the_even_number() {
        let step = 1.0 / 128.0; // between neighbours of 1.0 in bf16
        let values = [1.0 + step / 2.0, 1.0 + 1.5 * step, -1.0 - step / 2.0];
        let back = there_and_back(Encoding::Bf16, &values);
        assert_eq!(back, [1.0, 1.0 + 2.0 * step, -1.0]);
        let step = 1.0 / 1024.0; // in f16
        let values = [1.0 + step / 2.0, 1.0 + 1.5 * step, 65504.0, 65520.0];
        let back = there_and_back(Encoding::F16, &values);
        assert_eq!(back, [1.0, 1.0 + 2.0 * step, 65504.0, f32::INFINITY]);
    }

    #[test]
    fn encodings_round_trip_through_text() {
        for encoding in Encoding::ALL {
            assert_eq!(encoding.to_string().parse(), Ok(encoding));
            let json = serde_json::to_string(&encoding).unwrap();
            assert_eq!(json, format!("\"{encoding}\""));
        }
        assert!("float16".parse::<Encoding>().unwrap_err().contains("'bf16'"));
    }

    #[test]
    #[should_panic(expected = "as many elements as its sum")]
    fn a_piece_of_another_length_is_a_bug() {
        Encoding::Bf16.add(&mut [0.0; 3], &[0; 8]);
    }
}
