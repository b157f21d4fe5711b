//! `cargo xtask fuzz header`
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    poseidon_fuzz::header(input);
});
