//! How a layer is cut for copies from a device to its host.

use std::ops::Range;

/// A piece ends with the chunk that makes it at least this many bytes long: one piece is on the wire
/// while the next is copied, and none is so short that ordering it takes longer than copying it.
pub const PIECE: usize = 2 << 20;

/// Neighbouring chunks of a layer that are copied as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Their positions among the layer's chunks.
    pub chunks: Range<u32>,
    /// What they have together.
    pub bytes: usize,
}

/// The pieces of a layer whose chunks have so many bytes each.
pub fn pieces(chunks: impl IntoIterator<Item = usize>) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for (bytes, index) in chunks.into_iter().zip(0..) {
        match pieces.last_mut() {
            Some(last) if last.bytes < PIECE => {
                last.chunks.end = index + 1;
                last.bytes += bytes;
            }
            _ => pieces.push(Piece { chunks: index..index + 1, bytes }),
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_neighbours_until_they_are_long_enough() {
        let ranges = |sizes: &[usize]| -> Vec<(Range<u32>, usize)> {
            let pieces = pieces(sizes.iter().copied());
            pieces.into_iter().map(|piece| (piece.chunks, piece.bytes)).collect()
        };
        assert_eq!(ranges(&[]), []);
        assert_eq!(ranges(&[100]), [(0..1, 100)]);
        let half = PIECE / 2;
        assert_eq!(ranges(&[half; 5]), [(0..2, PIECE), (2..4, PIECE), (4..5, half)]);
        assert_eq!(ranges(&[half - 1, half, half]), [(0..3, PIECE + half - 1)]);
        assert_eq!(ranges(&[3 * PIECE, 8]), [(0..1, 3 * PIECE), (1..2, 8)]);
    }
}
