//! Cutting layers into chunks: the paper's fixed-size KV pairs (Poseidon 2017 §4.1).

use crate::{ByteSize, LayerId};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::{fmt, str::FromStr};

/// Names one chunk of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkKey {
    /// The layer that the chunk is a slice of.
    pub layer: LayerId,
    /// The chunk's position among the layer's chunks.
    pub index: u32,
}

/// How large chunks are, in bytes on the wire: a chunk of numbers of two bytes has twice as many.
///
/// A layer that has at least `min` bytes for every shard is cut into equal chunks of at most `max`
/// bytes, the same number for every shard. Smaller layers are laid end to end and cut where one
/// shard's share of them ends and the next shard's begins. A share is not below `min`, because a
/// frame costs a few microseconds however short it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkSize {
    /// Smallest share of a layer that is worth a frame to every shard.
    pub min: usize,
    /// Largest chunk.
    pub max: usize,
}

impl ChunkSize {
    /// Chunks of at most `max` bytes.
    pub fn at_most(max: usize) -> Self {
        Self { min: Self::default().min.min(max), max }
    }
}

impl Default for ChunkSize {
    fn default() -> Self {
        Self { min: 32 << 10, max: 256 << 10 }
    }
}

/// The largest chunk, as people say it: `256k`, `2m`, or a number of bytes.
impl fmt::Display for ChunkSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.max {
            max if max > 0 && max % (1 << 20) == 0 => write!(f, "{}m", max >> 20),
            max if max > 0 && max % (1 << 10) == 0 => write!(f, "{}k", max >> 10),
            max => max.fmt(f),
        }
    }
}

/// Chunks of at most `4096`, `256k` or `2MB` (powers of 1024).
impl FromStr for ChunkSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ByteSize(bytes) = text.parse()?;
        if !(SMALLEST..=LARGEST).contains(&bytes) {
            return Err(format!("a chunk has from {SMALLEST} to {LARGEST} bytes, got {bytes}"));
        }
        Ok(Self::at_most(bytes))
    }
}

/// What can be asked for in words. Below, there are more headers than numbers; above, a frame is too long for the wire.
const SMALLEST: usize = 1 << 10;
const LARGEST: usize = 1 << 30;

/// How one layer is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// Where chunks begin, in order.
    starts: Vec<usize>,
    len: usize,
}

/// Chunks start at multiples of this many elements (of `f32` 64 bytes: a cache line, an AVX-512
/// register).
const ALIGN: usize = 16;

impl Chunks {
    /// Cuts a layer of `len` elements of `width` bytes into equal chunks, the same number for each of
    /// `shards` shards. `None` if the layer is too small for that.
    pub fn even(len: usize, width: usize, size: ChunkSize, shards: usize) -> Option<Self> {
        if len < shards * elements(size.min, width) {
            return None;
        }
        let longest = elements(size.max, width);
        let count = len.div_ceil(longest).next_multiple_of(shards);
        let exact = len.div_ceil(count);
        // Rounding up to the alignment must not push a chunk over the maximum the user asked for.
        let aligned = exact.next_multiple_of(ALIGN);
        let step = if aligned <= longest { aligned } else { exact };
        Some(Self { starts: (0..len).step_by(step.max(1)).collect(), len })
    }

    /// One chunk for the whole layer: per-tensor sharding, the comparator of Poseidon 2017 §5.3.
    pub fn whole(len: usize) -> Self {
        Self::cut(len, usize::MAX, std::iter::empty())
    }

    /// Cuts a layer of `len` elements at `cuts`, which are in rising order. Chunks longer than
    /// `longest` are cut further.
    pub fn cut(len: usize, longest: usize, cuts: impl IntoIterator<Item = usize>) -> Self {
        let mut starts: Vec<usize> = Vec::new();
        let ends = cuts.into_iter().filter(|&cut| cut > 0 && cut < len).chain([len]);
        let mut from = 0;
        for end in ends.filter(|_| len > 0) {
            let pieces = (end - from).div_ceil(longest.max(1));
            starts.extend((0..pieces).map(|i| from + (end - from) * i / pieces));
            from = end;
        }
        Self { starts, len }
    }

    /// Number of chunks. A layer without parameters has none.
    pub fn count(&self) -> usize {
        self.starts.len()
    }

    /// The elements of the layer that chunk `index` covers. `None` if there is no such chunk.
    pub fn range(&self, index: u32) -> Option<Range<usize>> {
        let start = *self.starts.get(index as usize)?;
        let end = self.starts.get(index as usize + 1).copied().unwrap_or(self.len);
        Some(start..end)
    }
}

/// How many elements of `width` bytes fit into `bytes`; at least one.
pub(crate) fn elements(bytes: usize, width: usize) -> usize {
    (bytes / width).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(chunks: &Chunks, len: usize, longest: usize) -> Result<(), TestCaseError> {
        let mut next = 0;
        for index in 0..chunks.count() as u32 {
            let range = chunks.range(index).unwrap();
            prop_assert_eq!(range.start, next);
            prop_assert!(!range.is_empty());
            prop_assert!(range.len() <= longest);
            next = range.end;
        }
        prop_assert_eq!(next, len);
        prop_assert_eq!(chunks.range(chunks.count() as u32), None);
        Ok(())
    }

    proptest! {
        #[test]
        fn even_chunks_tile_the_layer(
            len in 0usize..3_000_000, min in 4usize..100_000, extra in 0usize..1_000_000,
            shards in 1usize..65, width in prop_oneof![Just(2), Just(4)],
        ) {
            let size = ChunkSize { min, max: min + extra };
            if let Some(chunks) = Chunks::even(len, width, size, shards) {
                check(&chunks, len, elements(size.max, width))?;
            }
        }

        #[test]
        fn cut_chunks_tile_the_layer(
            len in 0usize..10_000, longest in 1usize..5000,
            mut cuts in proptest::collection::vec(0usize..12_000, 0..6),
        ) {
            cuts.sort_unstable();
            cuts.dedup();
            let chunks = Chunks::cut(len, longest, cuts.clone());
            check(&chunks, len, longest)?;
            for cut in cuts.into_iter().filter(|&cut| cut < len) {
                prop_assert!((0..chunks.count() as u32).any(|i| chunks.range(i).unwrap().start == cut));
            }
        }
    }

    #[test]
    fn a_large_layer_gives_every_shard_as_many_chunks() {
        let whole = Chunks::even(25_000_000, 4, ChunkSize::default(), 8).unwrap();
        assert_eq!(whole.count() % 8, 0);
        // Half the bytes are half the frames.
        let half = Chunks::even(25_000_000, 2, ChunkSize::default(), 8).unwrap();
        assert_eq!((whole.count(), half.count()), (384, 192));
    }

    #[test]
    fn chunk_sizes_round_trip_through_text() {
        for (text, max) in [("2m", 2 << 20), ("96k", 96 << 10), ("1030", 1030)] {
            assert_eq!(text.parse(), Ok(ChunkSize::at_most(max)));
            assert_eq!(ChunkSize::at_most(max).to_string(), text);
        }
        assert_eq!("2MB".parse(), Ok(ChunkSize::at_most(2 << 20)));
        assert_eq!("256KiB".parse(), Ok(ChunkSize::default()));
        for bad in ["", "k", "0", "-1k", "1023", "2g", "1.5m", "99999999999999999999m"] {
            let error = bad.parse::<ChunkSize>().unwrap_err();
            assert!(error.contains("bytes"), "{error}");
        }
    }

    #[test]
    fn a_small_layer_is_not_cut_evenly() {
        assert_eq!(Chunks::even(16 << 10, 4, ChunkSize::default(), 8), None);
        assert_eq!(Chunks::whole(0).count(), 0);
        assert_eq!(Chunks::whole(1).count(), 1);
    }
}
