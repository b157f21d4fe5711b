//! The Python package: its environment, its build, its tests.

use crate::command::{command, succeed, works};
use crate::stages::Outcome;
use anyhow::{Context, Result};
use std::env;

pub(crate) const PACKAGE: &str = "bindings/python";
/// The profile of tests, and the feature that lets them share what they build: see its crate.
pub(crate) const TESTS: &str = "dev";
pub(crate) const ONE_BUILD: &str = "one-build";
/// A virtual environment of its own.
const ENV: &str = "bindings/python/.env";
/// What its tests need.
const REQUIREMENTS: &str = "bindings/python/requirements-test.txt";
/// Fails if one of them is not there. Those for another Python or system need not be.
const ALL_THERE: &str = "
import sys
from importlib.metadata import version
from pip._vendor.packaging.requirements import Requirement

for line in open(sys.argv[1]):
    words = line.partition('#')[0].strip()
    need = Requirement(words) if words else None
    if need and (need.marker is None or need.marker.evaluate()):
        assert need.specifier.contains(version(need.name), prereleases=True), need
";

/// Builds the package into its own environment, checks its types and runs its tests, the examples
/// among them.
pub(crate) fn test() -> Result<Outcome> {
    let python = prepare()?;
    let settings = format!("{PACKAGE}/pyproject.toml");
    succeed(&mut command(&[&python, "-m", "mypy", "--config-file", &settings]))?;
    let tests = format!("{PACKAGE}/tests");
    // As for Rust's tests (.config/nextest.toml): a test that passes at its second try is named.
    let words = ["-q", "--durations=3", "--reruns=2", "-rR"];
    // Tests mostly wait for their workers. Four processes run them, and tests of one group
    // (`xdist_group`) in one process.
    let at_once = ["-n4", "--dist=loadgroup"];
    succeed(command(&[&python, "-m", "pytest"]).args(words).args(at_once).arg(tests))?;
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
    (!works(&[&format!("{ENV}/bin/python"), "-c", ALL_THERE, REQUIREMENTS])).then(|| {
        format!(
            "the stage `python` will install PyTorch, Ray and what else the tests need into {ENV}: \
             several gigabytes, some minutes"
        )
    })
}

/// The environment's Python, with the package built from this checkout.
fn prepare() -> Result<String> {
    let python = environment()?;
    build(&python, ENV, TESTS)?;
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
        succeed(&mut command(&[&python, "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS]))
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
    let mut develop = command(&words);
    if profile == TESTS {
        develop.args(["--features", ONE_BUILD]);
    }
    succeed(develop.env("VIRTUAL_ENV", here.join(env)))
}
