//! `cargo xtask fuzz router`
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    poseidon_fuzz::router(input);
});
