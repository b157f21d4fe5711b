//! The dated folder a benchmark leaves behind.

use super::environment::mpirun_version;
use crate::command::{output, target_dir};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A new folder for the results of `bench`: the one asked for, or a dated one. Quick runs are not
/// worth keeping and go beside the build's outputs.
pub(crate) fn create(bench: &str, out: Option<&Path>, quick: bool) -> Result<PathBuf> {
    let folder = match out {
        Some(out) => out.to_owned(),
        None => {
            let runs = if quick { target_dir().join("bench") } else { "bench/runs".into() };
            let name = format!("{}-{bench}", output(&["date", "+%F"])?);
            unused(&runs, &name, |path| path.exists())
        }
    };
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}

/// Writes one file of the record.
pub(crate) fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}

/// What has to be known about this machine to judge its numbers. Whatever cannot be found out is
/// said to be unknown.
pub(crate) fn machine(python: &str) -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let cpu = field(&read("/proc/cpuinfo"), "model name");
    let cores = std::thread::available_parallelism().map_or(0, |cores| cores.get());
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    // What is not installed is left out.
    let versions = "import sys, importlib.metadata as m\nhave = {d.name.lower(): d.version for d in \
        m.distributions() if d.name}\nprint('python', sys.version.split()[0], *(f'{n} {have[n]}' for n in \
        ('torch', 'numpy', 'mpi4py') if n in have))";
    let commit = match (output(&["git", "rev-parse", "HEAD"]), output(&["git", "status", "-s"])) {
        (Ok(commit), Ok(changes)) if changes.is_empty() => Ok(commit),
        (Ok(commit), _) => Ok(format!("{commit} with uncommitted changes")),
        (error, _) => error,
    };
    let lines = [
        ("cpu", cpu),
        ("cores", cores.to_string()),
        ("memory", memory),
        ("kernel", known(output(&["uname", "-sr"]))),
        ("load at start", read("/proc/loadavg").trim().to_owned()),
        ("commit", known(commit)),
        ("rust", known(output(&["rustc", "--version"]))),
        (
            "python",
            if python.is_empty() {
                String::new()
            } else {
                known(output(&[python, "-c", versions]))
            },
        ),
        ("mpi", known(mpirun_version())),
    ];
    lines.iter().map(|(name, value)| format!("{name}: {}\n", or_unknown(value))).collect()
}

/// The command line this process was started with, as a user types it.
pub(crate) fn command_line() -> String {
    let words = std::env::args().skip(1).map(|word| without_folders(&word));
    format!("cargo xtask {}", words.collect::<Vec<_>>().join(" "))
}

/// A record is read on other machines: folders of this one mean nothing there.
fn without_folders(word: &str) -> String {
    let (option, value) = word.split_once('=').map_or(("", word), |(o, v)| (o, v));
    match (option, Path::new(value).is_absolute()) {
        (_, false) => word.to_owned(),
        ("", true) => "PATH".to_owned(),
        (option, true) => format!("{option}=PATH"),
    }
}

fn unused(runs: &Path, name: &str, exists: impl Fn(&Path) -> bool) -> PathBuf {
    let first = runs.join(name);
    if !exists(&first) {
        return first;
    }
    (2..).map(|n| runs.join(format!("{name}-{n}"))).find(|path| !exists(path)).unwrap_or(first)
}

/// The value of the first `name : value` line.
fn field(text: &str, name: &str) -> String {
    let line = text.lines().find(|line| line.starts_with(name));
    let value = line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim());
    value.unwrap_or_default().to_owned()
}

fn known(value: Result<String>) -> String {
    value.unwrap_or_default()
}

fn or_unknown(value: &str) -> &str {
    if value.is_empty() { "unknown" } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_of_the_day_does_not_overwrite_the_first() {
        let runs = Path::new("runs");
        assert_eq!(unused(runs, "day", |_| false), runs.join("day"));
        let taken = [runs.join("day"), runs.join("day-2")];
        let found = unused(runs, "day", |path| taken.iter().any(|one| one == path));
        assert_eq!(found, runs.join("day-3"));
    }

    #[test]
    fn command_lines_are_recorded_without_absolute_paths() {
        for (word, recorded) in
            [("--quick", "--quick"), ("/a/b", "PATH"), ("--out=/a", "--out=PATH"), ("a/b", "a/b")]
        {
            assert_eq!(without_folders(word), recorded);
        }
    }

    #[test]
    fn fields_of_proc_files() {
        let text = "processor\t: 0\nmodel name\t: Fast 3000\nmodel name\t: Other\n";
        assert_eq!(field(text, "model name"), "Fast 3000");
        assert_eq!(field(text, "flags"), "");
    }
}
