//! `cargo xtask check`: everything that can be said about the code without running it.

use crate::command::{command, succeed, works};
use crate::stages::{self, Outcome};
use crate::tidy;
use anyhow::Result;

/// Runs all checks.
pub(crate) fn run() -> Result<()> {
    stages::run(&[
        ("fmt", &format),
        ("clippy", &clippy),
        ("doc", &documentation),
        ("tidy", &|| tidy::run().map(|()| Outcome::Passed)),
        ("deny", &dependencies),
    ])
}

fn format() -> Result<Outcome> {
    succeed(&mut command(&["cargo", "fmt", "--all", "--", "--check"]))?;
    Ok(Outcome::Passed)
}

fn clippy() -> Result<Outcome> {
    let words = ["cargo", "clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    succeed(&mut command(&words))?;
    Ok(Outcome::Passed)
}

fn documentation() -> Result<Outcome> {
    let words = ["cargo", "doc", "--workspace", "--no-deps"];
    succeed(command(&words).env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Outcome::Passed)
}

/// Licences, bans and sources only: advisories need a database from the network.
fn dependencies() -> Result<Outcome> {
    if !works(&["cargo", "deny", "--version"]) {
        let why = "cargo-deny is not installed; `cargo install --locked cargo-deny` adds it";
        return Ok(Outcome::Skipped(why.to_owned()));
    }
    succeed(&mut command(&["cargo", "deny", "check", "licenses", "bans", "sources"]))?;
    Ok(Outcome::Passed)
}
