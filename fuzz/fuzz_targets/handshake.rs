//! `cargo xtask fuzz handshake`
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    poseidon_fuzz::handshake(input);
});
