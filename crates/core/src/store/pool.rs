//! A shard's memory for sums and results, which is used again and again.

use crate::encoding::{Block, Encoding};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Free buffers by length. The one used last is taken first: it is most likely in cache.
#[derive(Debug, Default)]
pub(super) struct Pool {
    whole: BTreeMap<usize, Vec<Arc<[f32]>>>,
    half: BTreeMap<usize, Vec<Arc<[u16]>>>,
}

impl Pool {
    /// A buffer of `len` numbers that nobody else holds. Its contents are left over.
    pub(super) fn take(&mut self, len: usize) -> Arc<[f32]> {
        let recycled = self.whole.get_mut(&len).and_then(Vec::pop);
        recycled.unwrap_or_else(|| std::iter::repeat_n(0.0, len).collect())
    }

    /// Takes back a buffer that nobody else holds.
    pub(super) fn put(&mut self, buffer: Arc<[f32]>) {
        self.whole.entry(buffer.len()).or_default().push(buffer);
    }

    /// Write access to `buffer`. If somebody else holds it, a copy takes its place first.
    pub(super) fn exclusive<'a>(&mut self, buffer: &'a mut Arc<[f32]>) -> &'a mut [f32] {
        if Arc::get_mut(buffer).is_none() {
            let mut copy = self.take(buffer.len());
            unshared(&mut copy).copy_from_slice(buffer);
            *buffer = copy;
        }
        unshared(buffer)
    }

    /// `values`, rounded to what `encoding` has.
    pub(super) fn encode(&mut self, encoding: Encoding, values: &[f32]) -> Block {
        let mut block = match encoding {
            Encoding::F32 => Block::Whole(self.take(values.len())),
            Encoding::Bf16 | Encoding::F16 => {
                let recycled = self.half.get_mut(&values.len()).and_then(Vec::pop);
                recycled.map_or_else(|| Block::zeroed(encoding, values.len()), Block::Half)
            }
        };
        let bytes = block.bytes_mut().expect("a buffer from the pool is nobody else's");
        encoding.encode(values, bytes);
        block
    }

    /// As [`encode`](Self::encode), for a buffer that is not needed any more.
    pub(super) fn encode_whole(&mut self, encoding: Encoding, values: Arc<[f32]>) -> Block {
        if encoding == Encoding::F32 {
            return Block::Whole(values);
        }
        let block = self.encode(encoding, &values);
        self.put(values);
        block
    }

    /// Takes back a block unless somebody else holds it.
    pub(super) fn release(&mut self, block: Block) {
        match block {
            Block::Whole(buffer) if Arc::strong_count(&buffer) == 1 => self.put(buffer),
            Block::Half(bits) if Arc::strong_count(&bits) == 1 => {
                self.half.entry(bits.len()).or_default().push(bits);
            }
            _ => {}
        }
    }

    /// Bytes of all free buffers.
    pub(super) fn bytes(&self) -> usize {
        let whole: usize = self.whole.iter().map(|(len, free)| 4 * len * free.len()).sum();
        let half: usize = self.half.iter().map(|(len, free)| 2 * len * free.len()).sum();
        whole + half
    }
}

/// Write access to a buffer that nobody else holds: one from the pool, or a sum under way.
pub(super) fn unshared(buffer: &mut Arc<[f32]>) -> &mut [f32] {
    Arc::get_mut(buffer).expect("sums are shared only once they are complete")
}
