//! `cargo xtask docs`: the documents as a book, with all their links checked.

mod built;
mod source;

use crate::command::{command, output, succeed, target_dir};
use crate::stages::{self, Outcome};
use crate::tidy;
use anyhow::{Context, Result, bail};
use std::env;
use std::fs;
use std::path::PathBuf;

/// Where the book goes.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder of the pages; what is in it is replaced [default: target/book/html]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// The version that makes the book: another one may give headings other names.
const MDBOOK: &str = "0.5.4";

/// Checks links, and builds the book.
pub(crate) fn run(args: &Args) -> Result<()> {
    let folder = env::current_dir()?.join(target_dir()).join("book");
    let out = match &args.out {
        Some(out) => env::current_dir()?.join(out),
        None => folder.join("html"),
    };
    stages::run(&[
        ("links", &links),
        ("mdbook", &|| install().map(|()| Outcome::Passed)),
        ("book", &|| {
            let source = folder.join("source");
            let pages = source::gather(&source)?;
            let mut build = command(&[mdbook()]);
            build.arg("build").arg(&source).arg("--dest-dir").arg(&out);
            succeed(&mut build)?;
            println!("{pages} pages: {}", out.join("index.html").display());
            Ok(Outcome::Passed)
        }),
        ("links of the book", &|| built::check(&out).map(|()| Outcome::Passed)),
    ])
}

/// What `cargo xtask tidy` says of documents.
fn links() -> Result<Outcome> {
    let violations = tidy::documents(&tidy::texts(&tidy::project_files()?));
    for violation in &violations {
        eprintln!("links: {violation}");
    }
    if !violations.is_empty() {
        bail!("{} link(s) or quotes lead nowhere", violations.len());
    }
    Ok(Outcome::Passed)
}

/// Where the tool is: in the folder of what is built, so that nothing of the user's changes.
fn mdbook() -> String {
    target_dir().join("mdbook/bin/mdbook").display().to_string()
}

/// Builds the tool if it is not there in the right version.
fn install() -> Result<()> {
    if output(&[&mdbook(), "--version"]).is_ok_and(|said| said.ends_with(MDBOOK)) {
        return Ok(());
    }
    let root = target_dir().join("mdbook");
    println!(
        "mdbook {MDBOOK} is not there. It is built from crates.io into {} now, which takes minutes",
        root.display()
    );
    fs::create_dir_all(&root)?;
    let words =
        ["cargo", "install", "mdbook", "--locked", "--version", MDBOOK, "--force", "--root"];
    let mut install = command(&words);
    install.arg(&root).arg("--target-dir").arg(root.join("build"));
    succeed(&mut install).context("a package registry must be reachable")
}
