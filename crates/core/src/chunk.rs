//! Cutting layers into chunks: the paper's fixed-size KV pairs (Poseidon 2017 §4.1).

use crate::LayerId;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Names one chunk of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkKey {
    /// The layer it is a slice of.
    pub layer: LayerId,
    /// Its position in the layer.
    pub index: u32,
}

/// How large chunks are, in bytes.
///
/// A large layer is cut into equal chunks of at most `max` bytes, as many for every shard. A layer
/// too small for that is cut into as many as there are shards, but not below `min`: a frame costs a
/// few microseconds however short it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkSize {
    /// Smallest chunk worth a frame of its own.
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

/// How one layer is cut. All chunks have the same length, but the last may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    layer_len: usize,
    chunk_len: usize,
}

/// Chunks start at multiples of this many elements (64 bytes: a cache line, an AVX-512 register).
const ALIGN: usize = 16;

impl Chunks {
    /// Cuts a layer of `layer_len` elements for `shards` shards.
    pub fn even(layer_len: usize, size: ChunkSize, shards: usize) -> Self {
        let elements = |bytes: usize| (bytes / size_of::<f32>()).max(1);
        let at_most_max = layer_len.div_ceil(elements(size.max));
        let at_least_min = layer_len.div_ceil(elements(size.min)).min(shards);
        let mut count = at_most_max.max(at_least_min).max(1);
        if count > shards {
            count = count.next_multiple_of(shards);
        }
        let exact = layer_len.div_ceil(count).max(1);
        // Rounding up to the alignment must not push a chunk over the maximum the user asked for.
        let aligned = exact.next_multiple_of(ALIGN);
        let chunk_len = if aligned <= elements(size.max) { aligned } else { exact };
        Self { layer_len, chunk_len }
    }

    /// One chunk for the whole layer: per-tensor sharding, the comparator of Poseidon 2017 §5.3.
    pub fn whole(layer_len: usize) -> Self {
        Self { layer_len, chunk_len: layer_len.max(1) }
    }

    /// Number of chunks. A layer without parameters has none.
    pub fn count(&self) -> usize {
        self.layer_len.div_ceil(self.chunk_len)
    }

    /// The elements of the layer that chunk `index` covers. `None` if there is no such chunk.
    pub fn range(&self, index: u32) -> Option<Range<usize>> {
        let start = (index as usize).checked_mul(self.chunk_len)?;
        (start < self.layer_len).then(|| start..(start + self.chunk_len).min(self.layer_len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_tile_the_layer(
            len in 0usize..3_000_000, min in 4usize..100_000, extra in 0usize..1_000_000,
            shards in 1usize..65,
        ) {
            let size = ChunkSize { min, max: min + extra };
            let chunks = Chunks::even(len, size, shards);
            let mut next = 0;
            for index in 0..chunks.count() as u32 {
                let range = chunks.range(index).unwrap();
                prop_assert_eq!(range.start, next);
                prop_assert!(!range.is_empty());
                prop_assert!(range.len() * 4 <= size.max.max(4));
                next = range.end;
            }
            prop_assert_eq!(next, len);
            prop_assert_eq!(chunks.range(chunks.count() as u32), None);
        }
    }

    #[test]
    fn a_large_layer_gives_every_shard_as_many_chunks() {
        let chunks = Chunks::even(25_000_000, ChunkSize::default(), 8);
        assert_eq!(chunks.count() % 8, 0);
    }

    #[test]
    fn a_small_layer_is_not_cut_finer_than_a_frame_is_worth() {
        let chunks = Chunks::even(16 << 10, ChunkSize::default(), 8);
        assert_eq!(chunks.count(), 2);
        assert_eq!(Chunks::even(0, ChunkSize::default(), 8).count(), 0);
        assert_eq!(Chunks::even(1, ChunkSize::default(), 8).count(), 1);
    }
}
