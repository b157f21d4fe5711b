//! `cargo xtask fuzz`, and the short run on the stable toolchain that is part of `cargo xtask test`.

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
    succeed(command(&fuzz).args([&args.target, "--", &seconds]))
}

/// Feeds a bounded number of seeded inputs to every target; needs neither nightly nor cargo-fuzz.
pub(crate) fn smoke() -> Result<()> {
    // Its dependencies are those of the workspace: one folder, so that they are built once.
    let words = ["cargo", "test", "--manifest-path", "fuzz/Cargo.toml", "--target-dir", "target"];
    succeed(&mut command(&words))
}
