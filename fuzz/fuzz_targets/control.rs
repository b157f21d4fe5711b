//! `cargo xtask fuzz control`
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    poseidon_fuzz::control(input);
});
