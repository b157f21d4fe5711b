//! `cargo xtask fuzz checkpoint`
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    poseidon_fuzz::checkpoint(input);
});
