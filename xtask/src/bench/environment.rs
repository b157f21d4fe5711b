//! Sets up what the peers need: a Python of their own, and Open MPI.

use super::contender::{Contender, Programs};
use crate::command::{command, output, succeed, target_dir, works};
use crate::python;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::thread;

/// The peers' own virtual environment.
const ENV: &str = "bench/.env";

/// What has to be importable for the exchange.
const PACKAGES: &str = "import torch, numpy, mpi4py.MPI";

/// What has to be importable to build and run the plug-in for PyTorch.
const TORCH_PACKAGES: &str = "import torch, numpy, maturin";

/// Builds and installs what these contenders need, and says where it is. `python` is used as it is
/// when given.
pub(crate) fn prepare(contenders: &[Contender], python: Option<&str>) -> Result<Programs> {
    let needs_mpi = contenders.iter().any(|contender| contender.is_mpi());
    if contenders.iter().any(|contender| contender.is_poseidon()) {
        build_poseidon()?;
    }
    if needs_mpi {
        install_openmpi()?;
    }
    let python = match python {
        Some(python) => python.to_owned(),
        None if contenders.iter().all(|contender| contender.is_poseidon()) => String::new(),
        None => install_python(PACKAGES)?,
    };
    Ok(Programs {
        poseidon: poseidon().display().to_string(),
        python,
        shared_memory: shared_memory(),
        cores: thread::available_parallelism()?.get(),
    })
}

/// A Python with this checkout's package for PyTorch, built as it is shipped. `python` is used as it is
/// when given.
pub(crate) fn python_with_poseidon(python: Option<&str>) -> Result<String> {
    if let Some(python) = python {
        let import = [python, "-c", "import numpy, torch, poseidon.torch"];
        output(&import).with_context(|| {
            format!("{python} must have torch and poseidon (`maturin develop --release` in bindings/python)")
        })?;
        return Ok(python.to_owned());
    }
    let python = install_python(TORCH_PACKAGES)?;
    python::build(&python, ENV, "release")?;
    Ok(python)
}

/// Where [`build_poseidon`] leaves the command.
pub(crate) fn poseidon() -> PathBuf {
    target_dir().join("release/poseidon")
}

/// Where cargo leaves an example that was built for release.
pub(crate) fn example(name: &str) -> PathBuf {
    target_dir().join("release/examples").join(name)
}

/// The command to measure: the one given, or one built from this checkout.
pub(crate) fn poseidon_or_built(given: Option<&str>) -> Result<String> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    build_poseidon()?;
    Ok(poseidon().display().to_string())
}

/// Builds the `poseidon` command as it is shipped.
pub(crate) fn build_poseidon() -> Result<()> {
    succeed(&mut command(&["cargo", "build", "--release", "-p", "poseidon-cli"]))
}

/// Whether this process may install packages and make network namespaces.
pub(crate) fn is_root() -> bool {
    output(&["id", "-u"]).is_ok_and(|id| id == "0")
}

fn install_python(packages: &str) -> Result<String> {
    let python = format!("{ENV}/bin/python");
    if works(&[&python, "-c", packages]) {
        return Ok(python);
    }
    println!("installing the peers' Python packages into {ENV}; the first time takes minutes");
    succeed(&mut command(&["python3", "-m", "venv", ENV]))
        .context("python3 with its venv module is needed (Debian: apt-get install python3-venv)")?;
    let pip = [&python, "-m", "pip", "install", "--quiet", "-r", "bench/requirements.txt"];
    succeed(&mut command(&pip))
        .context("a package index must be reachable; --python takes a Python that has them all")?;
    succeed(&mut command(&[&python, "-c", packages]))?;
    Ok(python)
}

fn install_openmpi() -> Result<()> {
    if works(&["mpirun", "--version"]) {
        return Ok(());
    }
    let packages = ["openmpi-bin", "libopenmpi-dev"];
    if !is_root() || !works(&["apt-get", "--version"]) {
        bail!("mpirun is missing: install Open MPI (Debian: {})", packages.join(" "));
    }
    println!("installing {}", packages.join(" "));
    succeed(&mut command(&["apt-get", "update", "-qq"]))?;
    let mut install = command(&["apt-get", "install", "-y", "-qq", "--no-install-recommends"]);
    succeed(install.args(packages).env("DEBIAN_FRONTEND", "noninteractive"))
}

/// The first line of `mpirun --version`.
pub(crate) fn mpirun_version() -> Result<String> {
    let text = output(&["mpirun", "--version"])?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// What the Open MPI of this machine calls its shared-memory transport; any name if there is none.
pub(crate) fn shared_memory() -> &'static str {
    shared_memory_of(&mpirun_version().unwrap_or_default())
}

/// Open MPI 5 renamed its shared-memory transport.
fn shared_memory_of(version: &str) -> &'static str {
    let number = version.split_whitespace().next_back().unwrap_or_default();
    let major = number.split('.').next().and_then(|major| major.parse().ok());
    if major.is_some_and(|major: u32| major >= 5) { "sm" } else { "vader" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_memory_transport_depends_on_the_version() {
        assert_eq!(shared_memory_of("mpirun (Open MPI) 4.1.4"), "vader");
        assert_eq!(shared_memory_of("mpirun (Open MPI) 5.0.3"), "sm");
        assert_eq!(shared_memory_of("mpirun (Open MPI) 10.0.0rc1"), "sm");
        assert_eq!(shared_memory_of("unheard of"), "vader");
    }
}
