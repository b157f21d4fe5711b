//! `cargo xtask test`: unit, integration and documentation tests, the examples, a short fuzz run, the
//! Python package, and what users install.

use crate::command::{command, succeed, works};
use crate::fuzz;
use crate::install;
use crate::miri;
use crate::python;
use crate::stages::{self, Outcome, Stage};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// How much to test.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also what is slow: tests under Miri, and PyTorch's own tests of torch.distributed, against
    /// the backend "poseidon"; CI runs this
    #[arg(long)]
    all: bool,
}

/// Runs all tests. The pinned toolchain installs itself, and the Python tests their environment.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut stages: Vec<Stage<'_>> = vec![
        ("tests", &tests),
        ("doc tests", &doc_tests),
        ("examples", &examples),
        ("fuzz smoke", &|| fuzz::smoke().map(|()| Outcome::Passed)),
        ("python", &python::test),
        ("install", &install::stage),
    ];
    if args.all {
        stages.push(("miri", &miri::stage));
        stages.push(("pytorch's own", &python::test_by_pytorch));
    }
    let names: Vec<_> = stages.iter().map(|(name, _)| *name).collect();
    println!("stages: {}", names.join(", "));
    if let Some(words) = python::will_install() {
        println!("{words}");
    }
    stages::run(&stages)
}

fn tests() -> Result<Outcome> {
    if works(&["cargo", "nextest", "--version"]) {
        succeed(&mut command(&["cargo", "nextest", "run", "--workspace"]))?;
    } else {
        // --all-targets leaves out documentation tests, which have a stage of their own.
        succeed(&mut command(&["cargo", "test", "--workspace", "--all-targets"]))?;
    }
    Ok(Outcome::Passed)
}

fn doc_tests() -> Result<Outcome> {
    succeed(&mut command(&["cargo", "test", "--doc", "--workspace"]))?;
    Ok(Outcome::Passed)
}

/// Every example says in its first lines how it is run; exactly that is run here.
fn examples() -> Result<Outcome> {
    let examples = find_examples(Path::new("crates"))?;
    if examples.is_empty() {
        return Ok(Outcome::Skipped("no crate has examples".to_owned()));
    }
    for path in examples {
        let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        let words = run_line(&text).with_context(|| format!("{}", path.display()))?;
        println!("{}: {}", path.display(), words.join(" "));
        succeed(&mut command(&words)).with_context(|| format!("{}", path.display()))?;
    }
    Ok(Outcome::Passed)
}

fn find_examples(crates: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for folder in fs::read_dir(crates)? {
        let examples = folder?.path().join("examples");
        if !examples.is_dir() {
            continue;
        }
        for file in fs::read_dir(examples)? {
            let path = file?.path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The words after `//! Run:` in an example's opening documentation.
fn run_line(text: &str) -> Result<Vec<&str>> {
    let line = text
        .lines()
        .take_while(|line| line.starts_with("//!"))
        .find_map(|line| line.strip_prefix("//! Run:"))
        .context("no line `//! Run: cargo run ...` in its opening documentation")?;
    let words: Vec<_> = line.trim().trim_matches('`').split_whitespace().collect();
    if !words.starts_with(&["cargo", "run"]) {
        bail!("its `Run:` line does not begin with `cargo run`: {}", line.trim());
    }
    if line.contains(['"', '\'', '|', '&', '>', '$']) {
        bail!("its `Run:` line needs a shell, and none is used: {}", line.trim());
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_run_line_is_found_in_the_opening_documentation() {
        let text =
            "//! Two workers.\n//!\n//! Run: cargo run -p poseidon --example 01\n\nfn main() {}";
        let words = ["cargo", "run", "-p", "poseidon", "--example", "01"];
        assert_eq!(run_line(text).unwrap(), words);
    }

    #[test]
    fn an_example_that_cannot_be_run_as_written_is_refused() {
        let refusals = [
            ("//! Two workers.\nfn main() {}\n//! Run: cargo run", "no line"),
            ("//! Run: rm -r everything", "does not begin"),
            ("//! Run: cargo run | tee log", "needs a shell"),
        ];
        for (text, reason) in refusals {
            let error = run_line(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
