//! `cargo xtask fuzz book`
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    poseidon_fuzz::book(input);
});
