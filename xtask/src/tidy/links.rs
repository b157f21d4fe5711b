//! Links between documents, and from documents to files: all of them lead somewhere. Addresses on
//! the web are not visited.

use super::markdown::{self, Document};
use std::collections::BTreeMap;

/// Links to files and headings that do not exist. `documents` are all Markdown files by path, and
/// `exists` tells of any file or folder.
pub(crate) fn violations(
    documents: &BTreeMap<String, Document>,
    exists: impl Fn(&str) -> bool,
) -> Vec<String> {
    let mut violations = Vec::new();
    for (path, document) in documents {
        for (line, name) in &document.undefined {
            violations.push(format!("{path}:{line} refers to [{name}], which it does not define"));
        }
        for link in &document.links {
            let Some(file) = link.file() else { continue };
            let line = link.line;
            let there = if file.is_empty() { path.clone() } else { from_root(path, file) };
            if !file.is_empty() && !exists(&there) {
                violations.push(format!("{path}:{line} links to {file}, which does not exist"));
                continue;
            }
            let (Some(anchor), Some(other)) = (link.anchor(), documents.get(&there)) else {
                continue;
            };
            if !other.anchors.iter().any(|known| known == anchor) {
                violations.push(format!("{path}:{line}: {there} has no heading #{anchor}"));
            }
        }
    }
    violations
}

/// Reads those of `files` that are Markdown.
pub(crate) fn documents<'a>(
    files: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> BTreeMap<String, Document> {
    let markdown = files.into_iter().filter(|(path, _)| path.ends_with(".md"));
    markdown.map(|(path, text)| (path.to_owned(), markdown::read(text))).collect()
}

/// A document's relative link as a path from the repository's root.
pub(crate) fn from_root(document: &str, link: &str) -> String {
    let mut parts: Vec<_> = document.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_to_nowhere_is_found_from_where_the_document_lies() {
        let a = "[a](../README.md), [b](plan.md#models)\n[c](#here) [d](https://e.org/f#g) \
            ![h](figures/lost.svg) [i](plan.md#nothing) [j][k]\n# Here\n";
        let plan = "## Models\n";
        let documents = documents([("docs/a.md", a), ("docs/plan.md", plan), ("b.rs", "[x](y)")]);
        let found = violations(&documents, |file| {
            assert_ne!(file, "", "a heading of the document itself is no file");
            ["README.md", "docs/plan.md"].contains(&file)
        });
        let expected = [
            "docs/a.md:2 refers to [k], which it does not define",
            "docs/a.md:2 links to figures/lost.svg, which does not exist",
            "docs/a.md:2: docs/plan.md has no heading #nothing",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_heading_of_the_document_itself_must_exist() {
        let documents = documents([("a.md", "# Here\n[b](#here) [c](#there)")]);
        assert_eq!(violations(&documents, |_| true), ["a.md:2: a.md has no heading #there"]);
    }
}
