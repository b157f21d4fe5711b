//! What the book is made of: the documents, as they lie in the repository, and what they link to.
//!
//! The book's source is a copy of a part of the repository, so that the same links work in a
//! checkout and in the book. `docs/SUMMARY.md` has the chapters. Documents that chapters link to and
//! that are no chapters, such as the summaries of records, become pages of an appendix.

use crate::tidy::links::from_root;
use crate::tidy::markdown;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const SUMMARY: &str = "docs/SUMMARY.md";
const SETTINGS: &str = "docs/book.toml";

/// Copies the book's source into the folder `to`, whose content is replaced. Returns the number of
/// pages.
pub(super) fn gather(to: &Path) -> Result<usize> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    fs::create_dir_all(to)?;
    fs::copy(SETTINGS, to.join("book.toml")).context(SETTINGS)?;
    let summary = fs::read_to_string(SUMMARY).context(SUMMARY)?;
    let mut chapters = BTreeSet::new();
    for link in markdown::read(&summary).links {
        let file = link.file().filter(|file| !file.is_empty());
        let file = file.with_context(|| format!("{SUMMARY}:{} names no file", link.line))?;
        let path = from_root(SUMMARY, file);
        ensure!(chapters.insert(path.clone()), "{SUMMARY} has {path} twice");
    }

    let mut pages = BTreeSet::new();
    let mut files = BTreeSet::new();
    let mut unread: Vec<_> = chapters.iter().cloned().collect();
    while let Some(path) = unread.pop() {
        if !pages.insert(path.clone()) {
            continue;
        }
        let text = fs::read_to_string(&path).with_context(|| path.clone())?;
        for link in markdown::read(&text).links {
            let Some(file) = link.file().filter(|file| !file.is_empty()) else { continue };
            let there = document(&from_root(&path, file));
            if there.ends_with(".md") {
                unread.push(there);
            } else {
                files.insert(there);
            }
        }
        let parent = to.join(&path);
        fs::create_dir_all(parent.parent().context("a file has a folder")?)?;
        fs::write(to.join(&path), for_the_book(&path, &text))?;
    }
    for file in &files {
        ensure!(
            Path::new(file).is_file(),
            "{file} is a folder without README.md, and is linked to"
        );
        let copy = to.join(file);
        fs::create_dir_all(copy.parent().context("a file has a folder")?)?;
        fs::copy(file, &copy).with_context(|| file.clone())?;
    }

    let mut whole = summary_from_root(&summary);
    whole.push_str("\n# Pages that others link to\n\n");
    for page in pages.difference(&chapters) {
        whole.push_str(&format!("- [{}](<{page}>)\n", title(page)));
    }
    fs::write(to.join("SUMMARY.md"), whole)?;
    Ok(pages.len())
}

/// The document that a link means: of a folder its README.
fn document(path: &str) -> String {
    let readme = format!("{path}/README.md");
    if Path::new(&readme).is_file() { readme } else { path.to_owned() }
}

/// A document's text with links to folders as links to their README.
fn for_the_book(path: &str, text: &str) -> String {
    let mut text = text.to_owned();
    for link in markdown::read(&text.clone()).links {
        let Some(file) = link.file().filter(|file| !file.is_empty()) else { continue };
        let there = from_root(path, file);
        if document(&there) != there {
            let readme = format!("{}/README.md", file.trim_end_matches('/'));
            text = text.replace(&format!("]({file})"), &format!("]({readme})"));
            text = text.replace(&format!("]: {file}\n"), &format!("]: {readme}\n"));
        }
    }
    text
}

/// The chapters with their paths from the repository's root, where the book's source begins.
fn summary_from_root(summary: &str) -> String {
    let mut whole = String::new();
    for line in summary.lines() {
        match line.split_once("](") {
            Some((before, rest)) => {
                let (file, after) = rest.split_once(')').unwrap_or((rest, ""));
                whole.push_str(&format!("{before}]({}){after}\n", from_root(SUMMARY, file)));
            }
            None => {
                whole.push_str(line);
                whole.push('\n');
            }
        }
    }
    whole
}

/// What a page that is no chapter is called in the list: a record by its folder.
fn title(page: &str) -> String {
    let page = page.strip_prefix("bench/runs/").unwrap_or(page);
    let name = page.strip_suffix("/summary.md").or_else(|| page.strip_suffix("/README.md"));
    name.unwrap_or(page).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chapters_are_found_from_the_root() {
        let summary = "# Summary\n\n[Read me](../README.md)\n  - [Plan](plan.md)\n---\n";
        let expected = "# Summary\n\n[Read me](README.md)\n  - [Plan](docs/plan.md)\n---\n";
        assert_eq!(summary_from_root(summary), expected);
    }

    #[test]
    fn records_are_called_by_their_folder() {
        assert_eq!(title("bench/runs/2026-11-17-gpu/half/summary.md"), "2026-11-17-gpu/half");
        assert_eq!(title("examples/pytorch/README.md"), "examples/pytorch");
        assert_eq!(title("CHANGELOG.md"), "CHANGELOG.md");
    }
}
