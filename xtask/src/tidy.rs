//! `cargo xtask tidy`: the rules of this repository that no compiler checks.
//!
//! Each check is a pure function from text to the violations in it.

mod arrows;
mod imports;
mod modules;
mod reader;
mod source;
mod unsafety;

use crate::command::output;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;

/// Runs all checks and lists every violation.
pub(crate) fn run() -> Result<()> {
    let metadata = output(&["cargo", "metadata", "--no-deps", "--format-version", "1"])?;
    let mut violations = arrows::violations(&metadata)?;

    let core = "crates/core/src/lib.rs";
    let text = fs::read_to_string(core).with_context(|| core.to_owned())?;
    violations.extend(unsafety::missing_forbid(core, &text));

    let files = project_files()?;
    let mut sources = Vec::new();
    for path in &files {
        // Figures and other binary files have no rules.
        let Ok(text) = fs::read_to_string(path) else { continue };
        violations.extend(source::machine_paths(path, &text));
        if path.ends_with(".rs") {
            violations.extend(source::too_long(path, &text));
            violations.extend(unsafety::violations(path, &text));
            sources.push((path.clone(), text));
            continue;
        }
        if path.ends_with(".md") {
            let exists = |file: &str| Path::new(file).exists();
            violations.extend(source::missing_links(path, &text, exists));
            if path == "README.md" || path.starts_with("docs/") {
                violations.extend(source::missing_runs(path, &text, exists));
            }
        }
    }

    violations.extend(modules::violations(&sources));

    if !violations.is_empty() {
        for violation in &violations {
            eprintln!("tidy: {violation}");
        }
        bail!("{} violation(s) of the repository's rules", violations.len());
    }
    println!("tidy: {} files follow the rules", files.len());
    Ok(())
}

/// Tracked files, and those that would be tracked by the next commit.
fn project_files() -> Result<Vec<String>> {
    let list = output(&["git", "ls-files", "--cached", "--others", "--exclude-standard"])?;
    Ok(list.lines().filter(|path| Path::new(path).is_file()).map(str::to_owned).collect())
}
