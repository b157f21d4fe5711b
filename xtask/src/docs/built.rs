//! Looks at the pages that came out: mdBook itself does not mind a link that leads nowhere.

use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Checks every relative link, picture and heading of all pages below `folder`.
pub(super) fn check(folder: &Path) -> Result<()> {
    let mut pages = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "html") {
                let text = fs::read_to_string(&path)?;
                pages.insert(path, text);
            }
        }
    }
    let names: BTreeMap<_, BTreeSet<_>> =
        pages.iter().map(|(path, text)| (path.clone(), attributes(text, "id").collect())).collect();
    let mut lost = Vec::new();
    for (path, text) in &pages {
        for target in attributes(text, "href").chain(attributes(text, "src")) {
            // Addresses on the web, and pictures that are written out in the page.
            if target.contains(':') {
                continue;
            }
            let (file, name) = target.split_once('#').unwrap_or((target, ""));
            let there = if file.is_empty() { path.clone() } else { beside(path, file) };
            let known = names.get(&there).is_some_and(|names| names.contains(name));
            if !there.exists() || (!name.is_empty() && !known) {
                let page = path.strip_prefix(folder).unwrap_or(path).display();
                lost.push(format!("{page} links to {target}, which is not there"));
            }
        }
    }
    for line in &lost {
        eprintln!("book: {line}");
    }
    if !lost.is_empty() {
        bail!("{} link(s) of the book lead nowhere", lost.len());
    }
    println!("{} pages have no link that leads nowhere", pages.len());
    Ok(())
}

/// Values of an attribute in a page.
fn attributes<'a>(text: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let opening = format!(" {name}=\"");
    let length = opening.len();
    let starts: Vec<_> = text.match_indices(&opening).map(|(at, _)| at + length).collect();
    starts.into_iter().filter_map(|start| text[start..].split('"').next())
}

/// The file that a page links to.
fn beside(page: &Path, link: &str) -> PathBuf {
    let mut path = page.to_owned();
    path.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(path.pop()),
            name => path.push(name),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_from_pages() {
        let text = "<h2 id=\"a-b\"><a class=\"x\" href=\"c.html#d\">e</a></h2><img src=\"f.svg\">";
        assert_eq!(attributes(text, "id").collect::<Vec<_>>(), ["a-b"]);
        assert_eq!(attributes(text, "href").collect::<Vec<_>>(), ["c.html#d"]);
        assert_eq!(attributes(text, "src").collect::<Vec<_>>(), ["f.svg"]);
    }

    #[test]
    fn links_are_found_from_where_the_page_lies() {
        let found = beside(Path::new("book/docs/plan.html"), "../README.html");
        assert_eq!(found, Path::new("book/README.html"));
    }
}
