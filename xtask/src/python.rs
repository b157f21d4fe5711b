//! The Python package: its environment, its build, its tests.

use crate::command::{command, succeed, works};
use crate::stages::Outcome;
use anyhow::{Context, Result};
use std::env;

pub(crate) const PACKAGE: &str = "bindings/python";
/// A virtual environment of its own.
const ENV: &str = "bindings/python/.env";
/// What has to be importable before the package is built.
const NEEDS: &str = "import expecttest, maturin, mypy, numpy, pytest, pytest_rerunfailures, safetensors, \
                     tensorboard, torch";

/// Builds the package into its own environment, checks its types and runs its tests, the examples
/// among them.
pub(crate) fn test() -> Result<Outcome> {
    let python = prepare()?;
    let settings = format!("{PACKAGE}/pyproject.toml");
    succeed(&mut command(&[&python, "-m", "mypy", "--config-file", &settings]))?;
    let tests = format!("{PACKAGE}/tests");
    // As for Rust's tests (.config/nextest.toml): a test that passes at its second try is named.
    let words = ["-q", "--durations=3", "--reruns=2", "-rR"];
    succeed(command(&[&python, "-m", "pytest"]).args(words).arg(tests))?;
    Ok(Outcome::Passed)
}

/// Runs PyTorch's own tests of `torch.distributed` against the backend.
pub(crate) fn test_by_pytorch() -> Result<Outcome> {
    let python = prepare()?;
    succeed(&mut command(&[&python, &format!("{PACKAGE}/tests/pytorch_suite.py")]))?;
    Ok(Outcome::Passed)
}

/// What the Python tests are about to install, in words, unless everything is there.
pub(crate) fn will_install() -> Option<String> {
    (!works(&[&format!("{ENV}/bin/python"), "-c", NEEDS])).then(|| {
        format!(
            "the stage `python` will install PyTorch and what the tests need into {ENV}: several \
             gigabytes, some minutes"
        )
    })
}

/// The environment's Python, with the package built from this checkout.
fn prepare() -> Result<String> {
    let python = environment()?;
    build(&python, ENV, "dev")?;
    Ok(python)
}

/// The environment's Python, with all that tests need but the package.
pub(crate) fn environment() -> Result<String> {
    let python = format!("{ENV}/bin/python");
    if let Some(words) = will_install() {
        println!("{words}");
        succeed(&mut command(&["python3", "-m", "venv", ENV])).context(
            "python3 with its venv module is needed (Debian: apt-get install python3-venv)",
        )?;
        let wanted = format!("{PACKAGE}/requirements-test.txt");
        succeed(&mut command(&[&python, "-m", "pip", "install", "--quiet", "-r", &wanted]))
            .context("a package index must be reachable")?;
    }
    Ok(python)
}

/// Builds the package from this checkout into the virtual environment `env`, whose Python has maturin.
pub(crate) fn build(python: &str, env: &str, profile: &str) -> Result<()> {
    let here = env::current_dir()?;
    let manifest = format!("{PACKAGE}/Cargo.toml");
    let words =
        [python, "-m", "maturin", "develop", "--quiet", "--profile", profile, "-m", &manifest];
    succeed(command(&words).env("VIRTUAL_ENV", here.join(env)))
}
