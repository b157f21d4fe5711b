//! From matrices of `f32` to panels of tiles of `bf16`.

use super::unit::Permit;
use crate::Matrix;
use std::arch::x86_64::*;

/// Lines in a panel, rows of a or columns of b: two tiles beside each other.
pub(super) const SIDE: usize = 2 * LANES;

/// Numbers in a vector, and rows in a tile.
pub(super) const LANES: usize = 16;

/// A register's worth: 16 rows of 16 pairs of `bf16`.
type Tile = [__m512i; LANES];

/// A panel's numbers along 32 steps of the inner dimension.
#[derive(Clone, Copy)]
pub(super) struct Step {
    /// Parts 1, 2 and 3 of the numbers, of 16 lines and of the next 16.
    parts: [[Tile; 2]; 3],
}

impl Step {
    pub(super) const DEPTH: usize = 2 * LANES;
}

/// How a factor's pairs of neighbours along the inner dimension lie in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// A line is a row of the tile.
    Left,
    /// A line is a column of the tile.
    Right,
}

/// Packs the rows of `lines`: panel after panel, within a panel step after step, filled up with zeros. `memory` grows as
/// needed, and never shrinks, because it would have to be cleared when it grows again.
pub(super) fn pack<'a>(
    _: Permit,
    lines: Matrix<'_>,
    form: Form,
    memory: &'a mut Vec<Step>,
) -> &'a [Step] {
    // SAFETY: the permit says that the processor has these instructions.
    unsafe { pack_with_vectors(lines, form, memory) }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn pack_with_vectors<'a>(lines: Matrix<'_>, form: Form, memory: &'a mut Vec<Step>) -> &'a [Step] {
    let (count, depth) = lines.shape();
    let steps = depth.div_ceil(Step::DEPTH);
    let len = count.div_ceil(SIDE) * steps;
    if memory.len() < len {
        memory.resize(len, Step { parts: [[[_mm512_setzero_si512(); LANES]; 2]; 3] });
    }
    let into = &mut memory[..len];
    let natural = if lines.strides().1 == 1 {
        pack_along(lines, steps, into);
        Form::Left
    } else {
        pack_across(lines, steps, into);
        Form::Right
    };
    if form != natural {
        for step in &mut *into {
            step.parts.as_flattened_mut().iter_mut().for_each(|tile| transpose(tile));
        }
    }
    into
}

/// Lines lie in one piece each.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_along(lines: Matrix<'_>, steps: usize, into: &mut [Step]) {
    let (count, depth) = lines.shape();
    // The upper halves of 32 lanes of 32 bits.
    let mut upper = [0_u16; 2 * LANES];
    upper.iter_mut().zip((1..).step_by(2)).for_each(|(from, odd)| *from = odd);
    // SAFETY: 64 bytes of indices.
    let upper = unsafe { _mm512_loadu_si512(upper.as_ptr().cast()) };
    for (panel, into) in into.chunks_exact_mut(steps).enumerate() {
        for line in 0..SIDE {
            let at = panel * SIDE + line;
            let values =
                if at < count { &lines.values()[at * lines.strides().0..][..depth] } else { &[] };
            let (half, row) = (line / LANES, line % LANES);
            for (step, into) in into.iter_mut().enumerate() {
                let first = split(load(values, step * Step::DEPTH));
                let second = split(load(values, step * Step::DEPTH + LANES));
                for part in 0..3 {
                    into.parts[part][half][row] =
                        _mm512_permutex2var_epi16(first[part], upper, second[part]);
                }
            }
        }
    }
}

/// Lines lie beside each other: what is contiguous is the same place in all of them.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_across(lines: Matrix<'_>, steps: usize, into: &mut [Step]) {
    let (count, depth) = lines.shape();
    let place = |at: usize| {
        if at < depth { &lines.values()[at * lines.strides().1..][..count] } else { &[] }
    };
    for row in 0..steps * LANES {
        let (first, second) = (place(2 * row), place(2 * row + 1));
        let next = (place(2 * row + 2), place(2 * row + 3));
        let (step, row) = (row / LANES, row % LANES);
        let into = into.chunks_exact_mut(steps).map(|panel| &mut panel[step]);
        for (panel, into) in into.enumerate() {
            for half in 0..2 {
                let line = panel * SIDE + half * LANES;
                fetch(next.0, line);
                fetch(next.1, line);
                let (first, second) = (split(load(first, line)), split(load(second, line)));
                for part in 0..3 {
                    let lower = _mm512_srli_epi32::<16>(first[part]);
                    into.parts[part][half][row] =
                        _mm512_mask_blend_epi16(0xaaaa_aaaa, lower, second[part]);
                }
            }
        }
    }
}

/// Has the cache get values from `at` on.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn fetch(values: &[f32], at: usize) {
    _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().wrapping_add(at).cast());
}

/// Sixteen values from `at` on; zeros beyond the last.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn load(values: &[f32], at: usize) -> __m512 {
    let values = values.get(at..).unwrap_or_default();
    let mask = if values.len() < LANES { (1 << values.len()) - 1 } else { u16::MAX };
    // SAFETY: the mask has a bit for values that are there, and memory without its bit is not touched.
    unsafe { _mm512_maskz_loadu_ps(mask, values.as_ptr()) }
}

/// Three `bf16`, in the upper halves, whose sum is `x`: each is the rest that the ones before leave, rounded to its eight
/// bits. The third has no rest, because 24 bits are all that there are.
///
/// A NaN is one in some part, and so is an infinity, because infinity less infinity is the rest of it.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn split(x: __m512) -> [__m512i; 3] {
    let first = round(x);
    let rest = _mm512_sub_ps(x, _mm512_castsi512_ps(first));
    let second = round(rest);
    let third = _mm512_sub_ps(rest, _mm512_castsi512_ps(second));
    [first, second, _mm512_castps_si512(third)]
}

/// To the nearest number whose lower half is zero. (Cut off instead, all parts had the same sign, and so had the
/// products that are left out.)
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn round(x: __m512) -> __m512i {
    let half = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    _mm512_and_si512(half, _mm512_set1_epi32(!0xffff))
}

/// Exchanges rows and columns, where a pair is one element.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn transpose(tile: &mut Tile) {
    let rows = *tile;
    let mut pairs = rows;
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // The 128 bits number l of fours[4 * g + c] are column 4 * l + c of the rows from 4 * g on.
    let mut fours = rows;
    for i in 0..4 {
        fours[4 * i] = _mm512_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
        fours[4 * i + 1] = _mm512_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
        fours[4 * i + 2] = _mm512_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
        fours[4 * i + 3] = _mm512_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
    }
    for c in 0..4 {
        let [top, upper, lower, bottom] = [fours[c], fours[4 + c], fours[8 + c], fours[12 + c]];
        let even = _mm512_shuffle_i32x4::<0x88>(top, upper);
        let odd = _mm512_shuffle_i32x4::<0xdd>(top, upper);
        let even_below = _mm512_shuffle_i32x4::<0x88>(lower, bottom);
        let odd_below = _mm512_shuffle_i32x4::<0xdd>(lower, bottom);
        tile[c] = _mm512_shuffle_i32x4::<0x88>(even, even_below);
        tile[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd, odd_below);
        tile[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even, even_below);
        tile[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd, odd_below);
    }
}
