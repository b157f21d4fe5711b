//! `cargo xtask test`: unit, integration and documentation tests, a short fuzz run among them, the
//! examples, the Python package, and what users install.

use crate::command::{command, succeed, works};
use crate::docs;
use crate::install;
use crate::miri;
use crate::python;
use crate::stages::{self, Outcome, Stage};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;

/// How much to test.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also the book, and what is slow: tests under Miri, and PyTorch's own tests of
    /// torch.distributed, against the backend "poseidon"; CI runs this
    #[arg(long)]
    all: bool,
    /// Begin no stage after so many minutes, and say which were left out
    #[arg(long)]
    minutes: Option<u64>,
    /// Stages to run, such as python [default: those that are named at the start]
    #[arg(long, value_name = "STAGE", value_delimiter = ',')]
    only: Vec<String>,
}

/// Runs all tests. The pinned toolchain installs itself, and the Python tests their environment.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut stages: Vec<Stage<'_>> = vec![
        ("tests", &tests),
        ("doc tests", &doc_tests),
        ("examples", &examples),
        ("python", &python::test),
        ("install", &install::stage),
    ];
    if args.all {
        stages.push(("book", &docs::stage));
        stages.push(("miri", &miri::stage));
        stages.push(("pytorch's own", &python::test_by_pytorch));
    }
    let names: Vec<_> = stages.iter().map(|(name, _)| *name).collect();
    if let Some(unknown) = args.only.iter().find(|only| !names.contains(&only.as_str())) {
        bail!("there is no stage `{unknown}`: expected {}", names.join(", "));
    }
    stages.retain(|(name, _)| args.only.is_empty() || args.only.iter().any(|only| only == name));
    let names: Vec<_> = stages.iter().map(|(name, _)| *name).collect();
    println!("stages: {}", names.join(", "));
    if let Some(words) = python::will_install() {
        println!("{words}");
    }
    stages::run_within(args.minutes, &stages)
}

/// The Python module is built by the tool that packs it, and for one Python: built here as well, it
/// would be built twice. The command is the one that later stages use.
const WORKSPACE: [&str; 5] =
    ["--workspace", "--exclude", "poseidon-python", "--features", "poseidon-cli/one-build"];

fn tests() -> Result<Outcome> {
    if works(&["cargo", "nextest", "--version"]) {
        let threads = ["--test-threads", &at_once().to_string()];
        succeed(command(&["cargo", "nextest", "run"]).args(WORKSPACE).args(threads))?;
    } else {
        // Documentation tests and examples have stages of their own.
        let targets = ["--lib", "--bins", "--tests"];
        succeed(command(&["cargo", "test"]).args(WORKSPACE).args(targets))?;
    }
    Ok(Outcome::Passed)
}

/// How many tests run at a time. Most of them wait: for other processes, for a slow link, or until a
/// peer that says nothing is given up.
fn at_once() -> usize {
    thread::available_parallelism().map_or(4, |cores| cores.get().max(4))
}

fn doc_tests() -> Result<Outcome> {
    succeed(command(&["cargo", "test", "--doc"]).args(WORKSPACE))?;
    Ok(Outcome::Passed)
}

/// Every example says in its first lines how it is run; that is run here.
///
/// `cargo run` of one package would build the workspace's crates and many others again, as another
/// package asks for other features of them. So all are built as for the tests, and what `cargo run`
/// would start is started.
fn examples() -> Result<Outcome> {
    let examples = find_examples(Path::new("crates"))?;
    if examples.is_empty() {
        return Ok(Outcome::Skipped("no crate has examples".to_owned()));
    }
    let mut build = command(&["cargo", "build"]);
    build.args(WORKSPACE).args(["--bins", "--examples", "--message-format"]);
    build.arg("json-render-diagnostics").stderr(Stdio::inherit());
    let built = build.output().context("starting cargo")?;
    ensure!(built.status.success(), "building the examples: {}", built.status);
    let programs = programs(&String::from_utf8_lossy(&built.stdout))?;
    for path in examples {
        let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        let line = run_line(&text).with_context(|| format!("{}", path.display()))?;
        println!("{}: {}", path.display(), line.join(" "));
        let words = started(&line, &programs).with_context(|| format!("{}", path.display()))?;
        succeed(&mut command(&words)).with_context(|| format!("{}", path.display()))?;
    }
    Ok(Outcome::Passed)
}

/// The executables by package, and by example if it is one.
type Programs = BTreeMap<(String, Option<String>), String>;

/// What cargo says it has built.
fn programs(messages: &str) -> Result<Programs> {
    let mut programs = Programs::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).context("what cargo says")?;
        let Some(executable) = message["executable"].as_str() else { continue };
        // Such as `path+file:///home/me/poseidon/crates/cli#poseidon-cli@0.1.0`. Where the folder has
        // the package's name, the name is left out.
        let id = message["package_id"].as_str().context("a package's id")?;
        let (folder, name) = id.rsplit_once('#').context("a package's id")?;
        let folder = folder.rsplit('/').next().unwrap_or_default();
        let package = name.split_once('@').map_or(folder, |(name, _)| name);
        let is_example = message["target"]["kind"][0] == "example";
        let example = message["target"]["name"].as_str().filter(|_| is_example);
        let key = (package.to_owned(), example.map(str::to_owned));
        programs.insert(key, executable.to_owned());
    }
    Ok(programs)
}

/// The words of a `Run:` line, with executables instead of `cargo run`, which may stand in it several
/// times: `cargo run -p a -- b -- cargo run -p c --example d`.
fn started(line: &[&str], programs: &Programs) -> Result<Vec<String>> {
    let mut words = Vec::new();
    let mut rest = line.iter();
    while let Some(word) = rest.next() {
        if *word != "cargo" {
            words.push((*word).to_owned());
            continue;
        }
        let (mut package, mut example) = (None, None);
        while let Some(word) = rest.next() {
            match *word {
                // Examples are run to see them work: how fast they are does not matter.
                "run" | "-q" | "--release" => {}
                "-p" => package = rest.next(),
                "--example" => example = rest.next(),
                "--" => break,
                other => bail!("`cargo run` with `{other}` is not understood here"),
            }
        }
        let package = package.context("a `cargo run` has no -p PACKAGE")?;
        let key = ((*package).to_owned(), example.map(|name| (*name).to_owned()));
        let program = programs.get(&key).with_context(|| format!("there is no {key:?}"))?;
        words.push(program.clone());
    }
    Ok(words)
}

fn find_examples(crates: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for folder in fs::read_dir(crates)? {
        let examples = folder?.path().join("examples");
        if !examples.is_dir() {
            continue;
        }
        for file in fs::read_dir(examples)? {
            let path = file?.path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The words after `//! Run:` in an example's opening documentation.
fn run_line(text: &str) -> Result<Vec<&str>> {
    let line = text
        .lines()
        .take_while(|line| line.starts_with("//!"))
        .find_map(|line| line.strip_prefix("//! Run:"))
        .context("no line `//! Run: cargo run ...` in its opening documentation")?;
    let words: Vec<_> = line.trim().trim_matches('`').split_whitespace().collect();
    if !words.starts_with(&["cargo", "run"]) {
        bail!("its `Run:` line does not begin with `cargo run`: {}", line.trim());
    }
    if line.contains(['"', '\'', '|', '&', '>', '$']) {
        bail!("its `Run:` line needs a shell, and none is used: {}", line.trim());
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_run_line_is_found_in_the_opening_documentation() {
        let text =
            "//! Two workers.\n//!\n//! Run: cargo run -p poseidon --example 01\n\nfn main() {}";
        let words = ["cargo", "run", "-p", "poseidon", "--example", "01"];
        assert_eq!(run_line(text).unwrap(), words);
    }

    #[test]
    fn an_example_that_cannot_be_run_as_written_is_refused() {
        let refusals = [
            ("//! Two workers.\nfn main() {}\n//! Run: cargo run", "no line"),
            ("//! Run: rm -r everything", "does not begin"),
            ("//! Run: cargo run | tee log", "needs a shell"),
        ];
        for (text, reason) in refusals {
            let error = run_line(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
    /// One that is missing makes the tests take longer, and nothing else would say so.
    #[test]
    fn one_build_has_every_dependency() {
        let names = |path: &str, table: &str| -> BTreeSet<String> {
            let text = fs::read_to_string(path).unwrap();
            let lines = text.lines().skip_while(|line| *line != table).skip(1);
            let lines = lines.take_while(|line| !line.starts_with('['));
            let names = lines.filter_map(|line| line.split(['.', ' ']).next());
            let ours = |name: &str| name.starts_with("poseidon") || name.starts_with('#');
            names.filter(|name| !name.is_empty() && !ours(name)).map(str::to_owned).collect()
        };
        let mut all = names("../Cargo.toml", "[workspace.dependencies]");
        // Only for a nightly toolchain.
        assert!(all.remove("libfuzzer-sys"));
        assert!(all.len() > 50, "{all:?}");
        assert_eq!(names("../crates/one-build/Cargo.toml", "[dependencies]"), all);
    }

    #[test]
    fn executables_stand_for_what_cargo_would_run() {
        let message = |id: &str, kind: &str, name: &str, executable: &str| {
            format!(
                r#"{{"package_id":"path+file:///a/crates/{id}","target":{{"kind":["{kind}"],"name":"{name}"}},"executable":{executable}}}"#
            )
        };
        let messages = [
            message("cli#poseidon-cli@0.1.0", "bin", "poseidon", r#""/t/poseidon""#),
            message("poseidon#0.1.0", "example", "01", r#""/t/examples/01""#),
            message("core#poseidon-core@0.1.0", "lib", "poseidon_core", "null"),
        ];
        let programs = programs(&messages.join("\n")).unwrap();
        let started = |line: &str| started(&line.split(' ').collect::<Vec<_>>(), &programs);
        let line =
            "cargo run -q -p poseidon-cli -- launch -n 2 -- cargo run -p poseidon --example 01";
        let words = ["/t/poseidon", "launch", "-n", "2", "--", "/t/examples/01"];
        assert_eq!(started(line).unwrap(), words);
        let line = "cargo run --release -p poseidon --example 01 -- 4 8";
        assert_eq!(started(line).unwrap(), ["/t/examples/01", "4", "8"]);
        for wrong in ["cargo run -p poseidon --example 02", "cargo run -F x -p poseidon-cli"] {
            assert!(started(wrong).is_err(), "{wrong}");
        }
    }
}
