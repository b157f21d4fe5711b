//! One door for everything that is done to this repository: `cargo xtask check`, `test`, `tidy`,
//! `fuzz`, `dist` and `bench`. CI calls the same commands.

mod bench;
mod check;
mod command;
mod dist;
mod fuzz;
mod python;
mod stages;
mod test;
mod tidy;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use std::path::Path;
use std::process::ExitCode;

/// Checks, tests, fuzzing and benchmarks of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Formatting, clippy, documentation, tidy, licences and sources of dependencies
    Check,
    /// All tests: unit, integration, documentation, the examples, and a short fuzz run
    Test,
    /// The rules no compiler checks: crate arrows, file length, unsafe, machine paths, figures
    Tidy,
    /// Fuzz one target with libFuzzer; needs cargo-fuzz and a nightly toolchain
    Fuzz(fuzz::Args),
    /// Build wheels of the Python package, with the poseidon command, for x86_64 and aarch64
    Dist(dist::Args),
    /// Measure, and record the result as a dated folder
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<()> {
    // Every path below is relative to the repository's root, whatever folder cargo was called from.
    // Without cargo, on a machine that this binary was carried to, the root is the current folder.
    if let Some(manifest) = std::env::var_os("CARGO_MANIFEST_DIR") {
        let root = Path::new(&manifest).parent().context("xtask has no parent")?;
        std::env::set_current_dir(root).with_context(|| format!("entering {}", root.display()))?;
    }
    let here = std::env::current_dir()?;
    ensure!(Path::new("xtask").is_dir(), "{} is not the repository's root", here.display());
    match args.task {
        Task::Check => check::run(),
        Task::Test => test::run(),
        Task::Tidy => tidy::run(),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Dist(args) => dist::run(&args),
        Task::Bench(bench) => bench::run(&bench),
    }
}
