//! `cargo xtask dist`: what installs without Rust, for old systems and for other processors. The
//! `poseidon` command as one file that needs no library of the system, and wheels of the Python
//! package, which carry the command, too.

use crate::command::{command, output, succeed, target_dir, works};
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What to build.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Processors to build for [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Processor>,
    /// What to build [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    what: Vec<What>,
    /// The oldest glibc that a wheel runs with: 2.17 (manylinux2014) or 2.28
    #[arg(long, value_enum, default_value_t = Glibc::V2_17)]
    glibc: Glibc,
    /// Where the files go [default: target/wheels]
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Processor {
    /// Intel and AMD
    #[value(name = "x86_64")]
    X86,
    /// ARM
    #[value(name = "aarch64")]
    Arm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// The command, linked statically with musl: one file for any Linux
    Binary,
    /// The Python package
    Wheel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Glibc {
    /// Systems since 2014
    #[value(name = "2.17")]
    V2_17,
    /// Systems since 2018
    #[value(name = "2.28")]
    V2_28,
}

/// A virtual environment for what builds wheels.
const ENV: &str = "dist-env";
/// Maturin makes the wheel. Zig links against any glibc and for any processor; cargo-zigbuild has
/// cargo use it for the command, as maturin does for the module.
const TOOLS: [&str; 3] = ["maturin>=1.9,<2", "ziglang", "cargo-zigbuild"];

const MANIFEST: &str = "bindings/python/Cargo.toml";
/// Where the package has the command; the console script looks there.
const COMMAND: &str = "bindings/python/python/poseidon/bin/poseidon";

/// How both are built: see `Cargo.toml`.
const PROFILE: &str = "dist";

/// Builds what is asked for.
pub(crate) fn run(args: &Args) -> Result<()> {
    let processors =
        if args.only.is_empty() { Processor::value_variants() } else { args.only.as_slice() };
    let out = args.out.clone().unwrap_or_else(|| target_dir().join("wheels"));
    let tools = Tools::install()?;
    let mut made = Vec::new();
    let mut missing = Vec::new();
    let whats = if args.what.is_empty() { What::value_variants() } else { args.what.as_slice() };
    for (&what, &processor) in whats.iter().flat_map(|w| processors.iter().map(move |p| (w, p))) {
        let name = format!("{what:?} for {processor:?}");
        println!("--- {name}");
        let file = match what {
            What::Binary => tools.binary(processor, &out),
            What::Wheel => tools.wheel(processor, args.glibc, &out),
        };
        match file {
            Ok(file) => made.push(file),
            // The others are worth having all the same.
            Err(error) => missing.push(format!("{name}: {error:#}")),
        }
    }
    println!("--- summary");
    for file in &made {
        let megabytes = fs::metadata(file)?.len() as f64 / 1e6;
        println!("{}, {megabytes:.1} MB", file.display());
    }
    if !missing.is_empty() {
        bail!("missing: {}", missing.join("; "));
    }
    Ok(())
}

/// The programs that build wheels.
struct Tools {
    /// Of the environment.
    bin: PathBuf,
    /// This process's search path, with the environment's programs first.
    path: OsString,
}

impl Tools {
    fn install() -> Result<Self> {
        let env = env::current_dir()?.join(target_dir()).join(ENV);
        let bin = env.join("bin");
        let python = bin.join("python").display().to_string();
        if !works(&[&python, "-c", "import maturin, ziglang, cargo_zigbuild"]) {
            println!("installing {} into {ENV}", TOOLS.join(", "));
            succeed(command(&["python3", "-m", "venv"]).arg(&env)).context(
                "python3 with its venv module is needed (Debian: apt-get install python3-venv)",
            )?;
            succeed(command(&[&python, "-m", "pip", "install", "--quiet"]).args(TOOLS))
                .context("a package index must be reachable")?;
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let path = env::join_paths([bin.clone()].into_iter().chain(env::split_paths(&path)))?;
        Ok(Self { bin, path })
    }

    /// Builds the command as one file.
    fn binary(&self, processor: Processor, out: &Path) -> Result<PathBuf> {
        let triple = processor.static_triple();
        let built = self.command(triple, triple)?;
        let needs = interpreter(&fs::read(&built)?);
        ensure!(!needs, "{} needs libraries of the system", built.display());
        fs::create_dir_all(out)?;
        let binary = out.join(format!("poseidon-{}", triple.replace("-unknown", "")));
        fs::copy(&built, &binary).with_context(|| binary.display().to_string())?;
        Ok(binary)
    }

    /// Builds the command for `target`, which is `triple` and perhaps a glibc, and says where it is.
    fn command(&self, triple: &str, target: &str) -> Result<PathBuf> {
        add_target(triple)?;
        let words = ["build", "--profile", PROFILE, "-p", "poseidon-cli", "--bin", "poseidon"];
        succeed(self.tool("cargo-zigbuild").args(words).args(["--target", target]))?;
        Ok(target_dir().join(triple).join(PROFILE).join("poseidon"))
    }

    /// Builds the command and the wheel that carries it.
    fn wheel(&self, processor: Processor, glibc: Glibc, out: &Path) -> Result<PathBuf> {
        let triple = processor.triple();
        let built = self.command(triple, &format!("{triple}.{}", glibc.version()))?;
        let command = Path::new(COMMAND);
        fs::create_dir_all(command.parent().context("a folder")?)?;
        fs::copy(&built, command).with_context(|| format!("{} to {COMMAND}", built.display()))?;
        let wheel = self.pack(triple, glibc, out);
        // A package that is developed in this checkout must not run a command of an old build, or
        // one for another processor.
        fs::remove_file(command)?;
        let wheel = wheel?;
        let python = self.bin.join("python").display().to_string();
        let files = output(&[&python, "-m", "zipfile", "-l", &wheel.display().to_string()])?;
        ensure!(has_command(&files), "{} does not carry the command", wheel.display());
        Ok(wheel)
    }

    fn pack(&self, triple: &str, glibc: Glibc, out: &Path) -> Result<PathBuf> {
        // A folder of its own, so that there is one wheel in it.
        let fresh = target_dir().join("dist").join(triple);
        if fresh.exists() {
            fs::remove_dir_all(&fresh)?;
        }
        let mut maturin = self.tool("maturin");
        maturin.args(["build", "--profile", PROFILE, "--zig"]);
        maturin.args(["--compatibility", glibc.manylinux()]);
        maturin.args(["--target", triple, "-m", MANIFEST, "--out"]).arg(&fresh);
        succeed(&mut maturin)?;
        let made = fs::read_dir(&fresh)?.next().context("maturin has made no wheel")??;
        fs::create_dir_all(out)?;
        let wheel = out.join(made.file_name());
        fs::copy(made.path(), &wheel).with_context(|| wheel.display().to_string())?;
        Ok(wheel)
    }

    /// One of the environment's programs, which finds the others.
    fn tool(&self, name: &str) -> Command {
        let mut tool = Command::new(self.bin.join(name));
        tool.env("PATH", &self.path);
        tool
    }
}

impl Processor {
    /// As rustup calls it.
    fn triple(self) -> &'static str {
        match self {
            Self::X86 => "x86_64-unknown-linux-gnu",
            Self::Arm => "aarch64-unknown-linux-gnu",
        }
    }

    /// With a C library that can be linked statically.
    fn static_triple(self) -> &'static str {
        match self {
            Self::X86 => "x86_64-unknown-linux-musl",
            Self::Arm => "aarch64-unknown-linux-musl",
        }
    }
}

impl Glibc {
    fn version(self) -> &'static str {
        match self {
            Self::V2_17 => "2.17",
            Self::V2_28 => "2.28",
        }
    }

    /// The name of what pip accepts on such systems.
    fn manylinux(self) -> &'static str {
        match self {
            Self::V2_17 => "manylinux2014",
            Self::V2_28 => "manylinux_2_28",
        }
    }
}

/// Has rustup fetch the standard library for a target, unless it is there.
fn add_target(triple: &str) -> Result<()> {
    let libraries = output(&["rustc", "--print", "target-libdir", "--target", triple])?;
    if Path::new(&libraries).is_dir() {
        return Ok(());
    }
    succeed(&mut command(&["rustup", "target", "add", triple])).with_context(|| {
        format!("Rust's standard library for {triple} is needed, and rustup cannot fetch it")
    })
}

/// Whether an ELF file of 64 bits names a program that loads its libraries.
fn interpreter(file: &[u8]) -> bool {
    const INTERPRETER: usize = 3;
    let number = |at: usize, bytes: usize| {
        let bytes = file.get(at..at + bytes).unwrap_or_default().iter().rev();
        bytes.fold(0, |number, byte| number << 8 | usize::from(*byte))
    };
    let (table, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    (0..count).any(|entry| number(table + entry * size, 4) == INTERPRETER)
}

/// Whether the list of a wheel's files has the command.
fn has_command(files: &str) -> bool {
    files.lines().any(|line| line.split_whitespace().next() == Some("poseidon/bin/poseidon"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_without_the_command_is_noticed() {
        let line = |file: &str| format!("{file}    2026-11-16 10:00:00    123\n");
        let module = line("poseidon/_native.abi3.so");
        assert!(has_command(&(module.clone() + &line("poseidon/bin/poseidon"))));
        assert!(!has_command(&(module + &line("poseidon/bin/poseidon.txt"))));
    }

    #[test]
    fn a_program_that_needs_libraries_is_told_from_one_that_does_not() {
        let this = fs::read(env::current_exe().unwrap()).unwrap();
        assert!(interpreter(&this));
        // Without the table that names the interpreter.
        let mut without = this[..64].to_vec();
        without[56..58].fill(0);
        assert!(!interpreter(&without));
    }

    #[test]
    fn the_command_is_where_the_console_script_looks() {
        let script = fs::read_to_string("../bindings/python/python/poseidon/_command.py").unwrap();
        assert!(COMMAND.ends_with("python/poseidon/bin/poseidon"));
        assert!(script.contains(r#"Path(__file__).parent / "bin" / "poseidon""#));
    }
}
