//! `cargo xtask docs`: the documents as a book, with all their links checked.

mod built;
mod source;

use crate::command::{command, output, succeed, target_dir};
use crate::stages::{self, Outcome};
use crate::tidy;
use anyhow::{Context, Result, bail};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

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
    let out = match &args.out {
        Some(out) => env::current_dir()?.join(out),
        None => folder()?.join("html"),
    };
    stages::run(&[
        ("links", &links),
        ("mdbook", &|| install().map(|()| Outcome::Passed)),
        ("book", &|| build(&out).map(|()| Outcome::Passed)),
        ("links of the book", &|| built::check(&out).map(|()| Outcome::Passed)),
    ])
}

/// As a stage of the tests: skipped where mdBook cannot be had. The links of the sources are checked
/// by tidy.
pub(crate) fn stage() -> Result<Outcome> {
    if let Err(error) = install() {
        return Ok(Outcome::Skipped(format!("mdbook {MDBOOK} cannot be had: {error:#}")));
    }
    let out = folder()?.join("html");
    build(&out)?;
    built::check(&out)?;
    Ok(Outcome::Passed)
}

fn folder() -> Result<PathBuf> {
    Ok(env::current_dir()?.join(target_dir()).join("book"))
}

/// Makes the pages.
fn build(out: &Path) -> Result<()> {
    let source = folder()?.join("source");
    let pages = source::gather(&source)?;
    succeed(command(&[mdbook()]).arg("build").arg(&source).arg("--dest-dir").arg(out))?;
    println!("{pages} pages: {}", out.join("index.html").display());
    Ok(())
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

/// Builds the tool if it is not there in the right version. It is not optimised, and has no server: the
/// pages are made in a second all the same, and it takes a third of the time to build.
fn install() -> Result<()> {
    if output(&[&mdbook(), "--version"]).is_ok_and(|said| said.ends_with(MDBOOK)) {
        return Ok(());
    }
    let root = target_dir().join("mdbook");
    println!(
        "mdbook {MDBOOK} is not there. It is fetched and built into {} now, which takes some minutes",
        root.display()
    );
    fs::create_dir_all(&root)?;
    let mut install = command(&["cargo", "install", "mdbook", "--version", MDBOOK, "--locked"]);
    install.args(["--debug", "--no-default-features", "--features", "search", "--force", "--root"]);
    install.arg(&root).arg("--target-dir").arg(root.join("build"));
    succeed(&mut install).context("a package registry must be reachable")
}
