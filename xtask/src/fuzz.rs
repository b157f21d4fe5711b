//! `cargo xtask fuzz`. A short run on the stable toolchain is one of the tests: `fuzz/tests/smoke.rs`.

use crate::command::{command, succeed, works};
use anyhow::{Result, bail};

/// What to fuzz, and for how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A file of fuzz/fuzz_targets, without its extension
    target: String,
    /// Stop after so many seconds; 0 never stops
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// Fuzzes one target with libFuzzer.
pub(crate) fn run(args: &Args) -> Result<()> {
    if !works(&["cargo", "fuzz", "--version"]) {
        bail!("cargo-fuzz is not installed: `cargo install --locked cargo-fuzz`");
    }
    if !works(&["rustup", "run", "nightly", "rustc", "--version"]) {
        bail!("there is no nightly toolchain: `rustup toolchain install nightly`");
    }
    let fuzz = ["rustup", "run", "nightly", "cargo", "fuzz", "run", "--features", "libfuzzer"];
    let seconds = format!("-max_total_time={}", args.seconds);
    let mut fuzz = command(&fuzz);
    fuzz.args([&args.target, "--", &seconds]);
    // What a sanitizer adds does not go through the release profile's optimisation at link time.
    succeed(fuzz.env("CARGO_PROFILE_RELEASE_LTO", "off"))
}
