//! Reads the commands that documents show. `crates/cli/tests/it/documents.rs` includes this file, too.

use std::fs;
use std::path::{Path, PathBuf};

/// README and pages for users, and those of the Python package.
pub(crate) fn documents() -> impl Iterator<Item = PathBuf> {
    let pages = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let others = ["README.md", "bindings/python/README.md", "examples/pytorch/README.md"];
    let mut paths: Vec<_> = pages.chain(others.map(|path| root().join(path))).collect();
    paths.sort();
    paths.into_iter()
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The commands of a document's blocks, each with its line. A console's lines are commands if they
/// have a prompt; a script's are, unless they are comments. A block without a language may show
/// what a program prints: a line is a command there if it has a prompt, or begins with a program
/// that documents use.
pub(crate) fn commands(text: &str) -> Vec<(usize, String)> {
    let mut inside = None;
    let mut languages = Vec::new();
    let lines = text.lines().map(|line| {
        let fence = line.trim().strip_prefix("```");
        inside = match (inside, fence) {
            (None, Some(language)) => Some(language),
            (Some(_), Some("")) => None,
            (state, _) => state,
        };
        languages.push(inside.filter(|_| fence.is_none()));
        if inside.is_some() && fence.is_none() { line } else { "" }
    });
    let lines = joined(lines);
    let command = |(number, line): (usize, String)| {
        let typed = line.strip_prefix("$ ");
        let command = match languages[number - 1]? {
            "console" => typed,
            "sh" | "bash" => Some(&*line).filter(|line| !line.is_empty() && !line.starts_with('#')),
            "" => typed.or_else(|| begins_with_a_program(&line).then_some(&line)),
            _ => None,
        };
        Some((number, command?.to_owned()))
    };
    lines.into_iter().filter_map(command).collect()
}

fn begins_with_a_program(line: &str) -> bool {
    let programs =
        ["cargo", "mpirun", "pip", "poseidon", "python", "srun", "tensorboard", "torchrun"];
    let first = line.split(' ').find(|word| !word.contains('='));
    first.is_some_and(|word| programs.contains(&word))
}

/// Lines that end with a backslash, with the lines that they go on in; and where each begins.
pub(crate) fn joined<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<(usize, String)> {
    let mut whole: Vec<(usize, String)> = Vec::new();
    let mut goes_on = false;
    for (number, line) in (1..).zip(lines) {
        let (words, more) = line.strip_suffix('\\').map_or((line, false), |words| (words, true));
        match whole.last_mut().filter(|_| goes_on) {
            Some((_, command)) => command.push_str(words),
            None => whole.push((number, words.to_owned())),
        }
        goes_on = more;
    }
    whole
}
