//! `cargo xtask miri`: tests under Miri, the interpreter that finds undefined behaviour. Part of
//! `cargo xtask test --all` where Miri is installed.

use crate::command::{command, succeed, works};
use crate::stages::Outcome;
use anyhow::{Result, bail};

/// Tests of one crate that Miri runs. It knows no sockets, no shared memory and no other language,
/// and is some hundred times slower than the processor.
struct Run {
    package: &'static str,
    /// Their names contain one of these.
    only: &'static [&'static str],
}

const RUNS: &[Run] = &[
    Run {
        package: "poseidon",
        only: &["memory::buffer", "memory::landings_tests", "lane::plan_state"],
    },
    Run { package: "poseidon-matrix", only: &["matrix::"] },
    Run {
        package: "poseidon-core",
        only: &[
            "byte_size::tests",
            "chunk::tests",
            "cluster::tests",
            "consistency::tests",
            "copies::tests",
            "cost::tests",
        ],
    },
];

const NIGHTLY: [&str; 4] = ["rustup", "run", "nightly", "cargo"];

/// What is missing, and how to get it.
fn missing() -> Option<&'static str> {
    if !works(&["rustup", "run", "nightly", "rustc", "--version"]) {
        return Some(
            "there is no nightly toolchain: \
             `rustup toolchain install nightly --component miri --component rust-src`",
        );
    }
    if !works(&[&NIGHTLY[..], &["miri", "--version"]].concat()) {
        return Some(
            "Miri is not installed: `rustup component add miri rust-src --toolchain nightly`",
        );
    }
    None
}

/// Runs all of it, or says what is missing.
pub(crate) fn run() -> Result<()> {
    if let Some(missing) = missing() {
        bail!("{missing}");
    }
    for Run { package, only } in RUNS {
        println!("{package}");
        // A folder of its own: what Miri runs is built for Miri.
        let build = ["miri", "test", "--target-dir", "target/miri-tests", "-p", package, "--lib"];
        let mut miri = command(&[&NIGHTLY[..], &build, &["--"], only].concat());
        // The seed of tests that try random inputs comes from the system. A device that is made of
        // host memory takes addresses for numbers, as real ones do. Few random inputs are enough
        // here: most of them take the same way through the code.
        miri.env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-permissive-provenance");
        miri.env("PROPTEST_CASES", "3");
        // A test that panics on purpose would spend minutes on finding out where.
        miri.env("RUST_BACKTRACE", "0");
        succeed(&mut miri)?;
    }
    Ok(())
}

/// As a stage of the tests: skipped where Miri is not installed.
pub(crate) fn stage() -> Result<Outcome> {
    match missing() {
        Some(missing) => Ok(Outcome::Skipped(missing.to_owned())),
        None => run().map(|()| Outcome::Passed),
    }
}
