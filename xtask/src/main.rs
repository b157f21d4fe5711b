//! One door for everything that is done to this repository: `cargo xtask check`, `test`, `tidy`,
//! `docs`, `fuzz`, `miri`, `dist` and `bench`. CI calls the same commands.

mod bench;
mod check;
mod command;
mod dist;
mod docs;
mod fuzz;
mod install;
mod miri;
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
    /// All tests: unit, integration, documentation, the examples, a short fuzz run, PyTorch
    Test(test::Args),
    /// The rules no compiler checks: crate arrows, file length, unsafe, machine paths, links
    Tidy,
    /// Check the links of all documents, and build the book from them
    Docs(docs::Args),
    /// Fuzz one target with libFuzzer; needs cargo-fuzz and a nightly toolchain
    Fuzz(fuzz::Args),
    /// Run tests under Miri, which finds undefined behaviour; needs a nightly toolchain with Miri
    Miri,
    /// Build what installs without Rust: the command as one file, and wheels of the Python package
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
        Task::Test(args) => test::run(&args),
        Task::Tidy => tidy::run(),
        Task::Docs(args) => docs::run(&args),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Miri => miri::run(),
        Task::Dist(args) => dist::run(&args),
        Task::Bench(bench) => bench::run(&bench),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A flag that is renamed in the code makes its documents wrong, and this fail.
    #[test]
    fn commands_in_documents_can_be_typed() {
        let pages = fs::read_dir("../docs").unwrap().map(|entry| entry.unwrap().path());
        let pages = pages.filter(|path| path.extension().is_some_and(|end| end == "md"));
        let others = ["../README.md", "../CONTRIBUTING.md", "../bindings/python/README.md"];
        let mut count = 0;
        for path in pages.chain(others.map(Into::into)) {
            let text = fs::read_to_string(&path).unwrap();
            for (line, command) in tidy::markdown::read(&text).commands {
                let command = command.strip_prefix("$ ").unwrap_or(&command);
                let Some(words) = command.strip_prefix("cargo xtask") else { continue };
                let words = words.split_whitespace().take_while(|word| !word.starts_with('#'));
                let parsed = Args::try_parse_from(["xtask"].into_iter().chain(words));
                let fine = parsed.as_ref().map_or_else(|error| !error.use_stderr(), |_| true);
                assert!(fine, "{}:{line}: {}", path.display(), parsed.err().unwrap());
                count += 1;
            }
        }
        assert!(count >= 5, "only {count} commands were found");
    }
}
