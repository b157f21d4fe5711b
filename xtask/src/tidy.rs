//! `cargo xtask tidy`: the rules of this repository that no compiler checks.
//!
//! Each check is a pure function from text to the violations in it.

mod arrows;
mod imports;
pub(crate) mod links;
pub(crate) mod markdown;
mod modules;
mod quotes;
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
    let texts = texts(&files);
    for (path, text) in &texts {
        violations.extend(source::machine_paths(path, text));
        if path.ends_with(".rs") {
            violations.extend(source::too_long(path, text));
            violations.extend(unsafety::violations(path, text));
        }
    }
    violations.extend(modules::violations(&rust(&texts)));
    violations.extend(documents(&texts));

    if !violations.is_empty() {
        for violation in &violations {
            eprintln!("tidy: {violation}");
        }
        bail!("{} violation(s) of the repository's rules", violations.len());
    }
    println!("tidy: {} files follow the rules", files.len());
    Ok(())
}

/// What is wrong with documents: links, and what they say of the code.
pub(crate) fn documents(texts: &[(String, String)]) -> Vec<String> {
    let exists = |file: &str| Path::new(file).exists();
    let documents = links::documents(texts.iter().map(|(path, text)| (&**path, &**text)));
    let mut violations = links::violations(&documents, exists);
    let code = |path: &str| [".rs", ".py", ".sh"].iter().any(|end| path.ends_with(end));
    let code = quotes::joined(texts.iter().filter(|(path, _)| code(path)).map(|(_, text)| &**text));
    for (path, text) in texts.iter().filter(|(path, _)| is_for_users(path)) {
        violations.extend(source::missing_runs(path, text, exists));
        violations.extend(quotes::lost_variables(path, text, &code));
    }
    if let Some(page) = documents.get(quotes::MESSAGES) {
        violations.extend(quotes::lost_messages(quotes::MESSAGES, page, &code));
    }
    violations
}

/// Whether a document shows figures of records, and tells how to use the code as it is.
fn is_for_users(path: &str) -> bool {
    path == "README.md" || path.starts_with("docs/") && path.ends_with(".md")
}

/// Texts of those files that are text: figures and other binary files have no rules.
pub(crate) fn texts(files: &[String]) -> Vec<(String, String)> {
    let read = |path: &String| Some((path.clone(), fs::read_to_string(path).ok()?));
    files.iter().filter_map(read).collect()
}

fn rust(texts: &[(String, String)]) -> Vec<(String, String)> {
    texts.iter().filter(|(path, _)| path.ends_with(".rs")).cloned().collect()
}

/// Tracked files, and those that would be tracked by the next commit.
pub(crate) fn project_files() -> Result<Vec<String>> {
    let list = output(&["git", "ls-files", "--cached", "--others", "--exclude-standard"])?;
    Ok(list.lines().filter(|path| Path::new(path).is_file()).map(str::to_owned).collect())
}
