//! A copy to memory that nobody reads soon.

/// A shorter copy stays in the nearest caches, where the next reader finds it.
const WORTH_IT: usize = 32 << 10;

/// Copies `len` bytes. A long copy does not pass through the cache: an ordinary write first reads the
/// memory it is about to overwrite, and drives data out of the cache that is needed sooner. From a
/// ring that is in the cache to memory that is not, this takes two thirds of the time of an ordinary
/// copy.
///
/// # Safety
/// `from` is valid for reads of `len` bytes, `to` for writes, and they do not overlap.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    if len < WORTH_IT || cfg!(not(target_arch = "x86_64")) {
        // SAFETY: by the caller.
        return unsafe { from.copy_to_nonoverlapping(to, len) };
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: by the caller.
    unsafe {
        copy_lines(from, to, len);
    }
}

/// # Safety
/// As for [`copy`], and `len` is at least a line.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_lines(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    const PART: usize = size_of::<__m128i>();
    let head = to.align_offset(LINE);
    let lines = (len - head) / LINE * LINE;
    // SAFETY: the head, whole lines and the rest are `len` bytes together, and every line written
    // begins at a multiple of a line in the target.
    unsafe {
        from.copy_to_nonoverlapping(to, head);
        for at in (head..head + lines).step_by(LINE) {
            let parts: [__m128i; LINE / PART] =
                std::array::from_fn(|i| _mm_loadu_si128(from.add(at + i * PART).cast()));
            for (i, part) in parts.into_iter().enumerate() {
                _mm_stream_si128(to.add(at + i * PART).cast(), part);
            }
        }
        // The streamed bytes are in memory before anybody is told that they are there.
        _mm_sfence();
        let rest = head + lines;
        from.add(rest).copy_to_nonoverlapping(to.add(rest), len - rest);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_byte_arrives_and_no_other_changes() {
        let source: Vec<u8> = (0..100_000_u32).map(|i| (i * 31 + i / 256) as u8).collect();
        for len in [0, 1, 63, 32_767, 32_768, 32_769, 65_600, 99_000] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (17, 63), (64, 5)] {
                let mut target = vec![0xee; 100_000];
                // SAFETY: both are longer than the offset and `len` together.
                unsafe { super::copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len) };
                assert_eq!(target[to..to + len], source[from..from + len], "{len} bytes");
                assert!(target[..to].iter().chain(&target[to + len..]).all(|b| *b == 0xee));
            }
        }
    }
}
