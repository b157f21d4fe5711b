//! The matrix unit itself: leave to use it, its configuration, and the loop that keeps it busy.

use super::pack::{LANES, SIDE, Step};
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;

/// Proof that this process may use AMX and AVX-512. A process that has it keeps it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Permit(());

impl Permit {
    /// Asks the processor, and then the kernel, which saves tiles only for processes that asked.
    pub(super) fn request() -> Option<Self> {
        const BF16: u32 = 1 << 22;
        const TILE: u32 = 1 << 24;
        // SYS_arch_prctl's request and the number of the state, from the kernel's documentation of xstate.
        const REQUEST_PERMISSION: libc::c_ulong = 0x1023;
        const TILE_DATA: libc::c_ulong = 18;

        let vectors = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
        // Leaf 7 exists where AVX-512 does.
        if !vectors || __cpuid_count(7, 0).edx & (BF16 | TILE) != (BF16 | TILE) {
            return None;
        }
        // SAFETY: the call takes two numbers and touches no memory of ours. It fails where the kernel knows nothing
        // of tiles or a thread's signal stack is too small for them.
        let refused = unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) };
        (refused == 0).then_some(Self(()))
    }
}

/// This thread's tiles, configured: all eight have 16 rows of 64 bytes.
///
/// That they stay so until this is dropped is no assumption about the compiler, which never touches tiles, nor about
/// other threads and signals, around which the kernel saves them: it is about what runs on this thread
/// meanwhile, and that is this crate.
pub(super) struct Tiles {
    /// Tiles are the thread's own.
    _not_send: PhantomData<*const ()>,
}

/// A tile's row of sums: a line of the cache.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([f32; LANES]);

impl Line {
    pub(super) const ZERO: Self = Self([0.0; LANES]);

    /// What is in some lines, one after the other.
    pub(super) fn values(lines: &[Self]) -> &[f32] {
        // SAFETY: a line is an array of as many values as fit it, without padding.
        unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * LANES) }
    }
}

/// What LDTILECFG reads. The first palette is the one with eight tiles of up to 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The four quarters of the output, from two tiles of each side.
macro_rules! products {
    () => {
        "tdpbf16ps tmm0, tmm4, tmm6
        tdpbf16ps tmm1, tmm4, tmm7
        tdpbf16ps tmm2, tmm5, tmm6
        tdpbf16ps tmm3, tmm5, tmm7"
    };
}

impl Tiles {
    pub(super) fn configure(_: Permit) -> Self {
        let mut configuration = Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        configuration.row_bytes[..8].fill(64);
        configuration.rows[..8].fill(16);
        // SAFETY: the permit says that the instruction exists and is allowed; it reads the 64 bytes of a valid
        // configuration.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &configuration, options(nostack, readonly, preserves_flags));
        }
        Self { _not_send: PhantomData }
    }

    /// Multiplies a panel of a by a panel of b, step by step, into the first 32 x 32 of `sums`: overwrites them or
    /// adds to them. Rows of sums are `stride` lines apart. Meanwhile the cache fetches 32 x 32 values from `next` on,
    /// whose rows are `next_stride` values apart.
    ///
    /// Parts 1, 2 and 3 of a number get smaller by 2^-8 each. Of the nine products of parts the six largest are taken,
    /// small ones first, in an order in which a product shares one side with the product before: 14 loads for 24 products.
    #[expect(clippy::too_many_arguments, reason = "a call a microsecond, from one place")]
    pub(super) fn multiply(
        &self,
        a: &[Step],
        b: &[Step],
        add: bool,
        sums: &mut [Line],
        stride: usize,
        next: *const f32,
        next_stride: usize,
    ) {
        assert!(a.len() == b.len() && !a.is_empty(), "panels of the same depth");
        assert!(sums.len() >= (SIDE - 1) * stride + SIDE / LANES, "32 rows of two lines");
        let top = sums.as_mut_ptr();
        let bottom = top.wrapping_add(SIDE / 2 * stride);
        // SAFETY: `self` says that all tiles are configured as 16 rows of 64 bytes. A Step is 6144 bytes, of which every
        // load takes 16 rows at a stride of 64 from offsets up to 5120; there are `steps` of them in each panel, and
        // at least one. The sums are four quarters of 16 rows of 64 bytes, at `stride` lines, which the assertion has seen. Prefetching
        // is allowed anywhere. Labels are local, no stack is used, memory is clobbered.
        unsafe {
            asm!(
                "test {count}, {count}",
                "jz 2f",
                "tileloadd tmm0, [{top} + {stride}*1]",
                "tileloadd tmm1, [{top} + {stride}*1 + 64]",
                "tileloadd tmm2, [{bottom} + {stride}*1]",
                "tileloadd tmm3, [{bottom} + {stride}*1 + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                // a3 b1
                "tileloadd tmm4, [{a} + {row}*1 + 4096]",
                "tileloadd tmm5, [{a} + {row}*1 + 5120]",
                "tileloadd tmm6, [{b} + {row}*1]",
                "tileloadd tmm7, [{b} + {row}*1 + 1024]",
                products!(),
                // a2 b1
                "tileloadd tmm4, [{a} + {row}*1 + 2048]",
                "tileloadd tmm5, [{a} + {row}*1 + 3072]",
                products!(),
                // a2 b2
                "tileloadd tmm6, [{b} + {row}*1 + 2048]",
                "tileloadd tmm7, [{b} + {row}*1 + 3072]",
                products!(),
                // a1 b2
                "tileloadd tmm4, [{a} + {row}*1]",
                "tileloadd tmm5, [{a} + {row}*1 + 1024]",
                products!(),
                // a1 b3
                "tileloadd tmm6, [{b} + {row}*1 + 4096]",
                "tileloadd tmm7, [{b} + {row}*1 + 5120]",
                products!(),
                // a1 b1
                "tileloadd tmm6, [{b} + {row}*1]",
                "tileloadd tmm7, [{b} + {row}*1 + 1024]",
                products!(),
                // Two addresses reach all lines of a row that were not fetched for the block before.
                "mov {count}, {fetched}",
                "4:",
                "prefetchw [{next} + 63]",
                "prefetchw [{next} + 127]",
                "add {next}, {next_stride}",
                "dec {count}",
                "jnz 4b",
                "add {a}, {step}",
                "add {b}, {step}",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{top} + {stride}*1], tmm0",
                "tilestored [{top} + {stride}*1 + 64], tmm1",
                "tilestored [{bottom} + {stride}*1], tmm2",
                "tilestored [{bottom} + {stride}*1 + 64], tmm3",
                a = inout(reg) a.as_ptr() => _,
                b = inout(reg) b.as_ptr() => _,
                steps = inout(reg) a.len() => _,
                next = inout(reg) next => _,
                next_stride = in(reg) next_stride * size_of::<f32>(),
                top = in(reg) top,
                bottom = in(reg) bottom,
                stride = in(reg) stride * size_of::<Line>(),
                row = in(reg) 64_usize,
                count = inout(reg) usize::from(add) => _,
                fetched = in(reg) SIDE.div_ceil(a.len()),
                step = const size_of::<Step>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the instruction is allowed, or there would be no Tiles, and touches nothing but tiles.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
