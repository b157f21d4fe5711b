//! Installs Poseidon as the README says, and asks what was installed for its version.
//!
//! The profile differs, and the features of dependencies: the build that tests have is there already,
//! and a release takes minutes.

use crate::command::{command, output, succeed, target_dir};
use crate::python::{self, ONE_BUILD, TESTS};
use crate::stages::Outcome;
use anyhow::{Context, Result, ensure};
use std::path::{self, Path};
use std::{env, fs, iter};

/// `cargo install`, `pip wheel`, and `pip install` of the wheel in an environment of its own.
pub(crate) fn stage() -> Result<Outcome> {
    let root = target_dir().join("installed");
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| format!("emptying {}", root.display()))?;
    }
    let words = ["cargo", "install", "--locked", "--path", "crates/cli", "--debug"];
    succeed(command(&words).args(["--features", ONE_BUILD, "--root"]).arg(&root))?;
    says_its_version(&root.join("bin/poseidon"))?;

    let python = python::environment()?;
    let wheels = root.join("wheels");
    // What builds the wheel is in the environment, and is found there: nothing is fetched.
    let tools = path::absolute(Path::new(&python).with_file_name(""))?;
    let others = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(iter::once(tools).chain(env::split_paths(&others)))?;
    let words = [&python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir"];
    let mut wheel = command(&words);
    wheel
        .arg(&wheels)
        .arg(python::PACKAGE)
        .env("MATURIN_PEP517_ARGS", format!("--profile {TESTS} --features {ONE_BUILD}"))
        .env("PATH", path);
    succeed(&mut wheel)?;
    let own = root.join("env");
    succeed(command(&[&python, "-m", "venv"]).arg(&own))?;
    let mut install = command(&["env"]);
    install.arg(own.join("bin/pip")).args(["install", "--no-deps", "--no-index", "--quiet"]);
    for wheel in fs::read_dir(&wheels)? {
        install.arg(wheel?.path());
    }
    succeed(&mut install)?;
    says_its_version(&own.join("bin/poseidon"))?;
    Ok(Outcome::Passed)
}

fn says_its_version(poseidon: &Path) -> Result<()> {
    let said = output(&[&poseidon.display().to_string(), "--version"])?;
    ensure!(said.starts_with("poseidon "), "{} says: {said}", poseidon.display());
    println!("{}: {said}", poseidon.display());
    Ok(())
}
