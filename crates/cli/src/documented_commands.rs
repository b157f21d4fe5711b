//! Commands that the documents and `--help` show are parsed by the parser that ships. A flag that is
//! renamed, or a value that is no longer taken, fails here. Nothing is run: `tests/it/documents.rs`
//! does that with the commands of documents.
//!
//! Lines of shell blocks count if `poseidon` or `cargo run` is in them: alone, under torchrun, mpirun,
//! srun, env or ssh, or after the `--` of another command of ours.

mod reader;

use crate::Cli;
use clap::{CommandFactory, Parser};
use reader::{commands, documents, joined, root};
use std::collections::BTreeSet;
use std::fs;

#[test]
fn commands_in_documents_can_be_typed() {
    let mut count = 0;
    let mut refused = Vec::new();
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        for (line, command) in commands(&text) {
            let at = format!("{}:{line}", path.strip_prefix(root()).unwrap().display());
            count += judge(&at, &command, &mut refused);
        }
    }
    assert_eq!(refused, [""; 0], "these commands are not what the program takes");
    assert!(count >= 30, "only {count} commands were found: does the reader still see them?");
}

#[test]
fn commands_in_help_can_be_typed() {
    let mut count = 0;
    let mut refused = Vec::new();
    let mut unread = vec![Cli::command()];
    while let Some(command) = unread.pop() {
        unread.extend(command.get_subcommands().cloned());
        let Some(examples) = command.get_after_help() else { continue };
        for (_, line) in joined(examples.to_string().lines().map(str::trim)) {
            count += judge(&format!("{} --help", command.get_name()), &line, &mut refused);
        }
    }
    assert_eq!(refused, [""; 0], "these commands are not what the program takes");
    assert!(count >= 20, "only {count} commands were found: does the reader still see them?");
}

/// Flags that stand alone in running text, such as `--sync ssp:3`.
#[test]
fn flags_in_documents_exist() {
    let mut flags = BTreeSet::from(OTHERS.map(str::to_owned));
    let mut unread = vec![Cli::command()];
    while let Some(mut command) = unread.pop() {
        command.build();
        flags.extend(command.get_arguments().filter_map(|flag| flag.get_long()).map(str::to_owned));
        unread.extend(command.get_subcommands().cloned());
    }
    let mut unknown = Vec::new();
    for path in documents().filter(|path| !path.ends_with("docs/benchmarks.md")) {
        let text = fs::read_to_string(&path).unwrap();
        for code in text.split('`').skip(1).step_by(2) {
            let Some(flag) = code.strip_prefix("--").and_then(|flag| flag.split([' ', '=']).next())
            else {
                continue;
            };
            if !flags.contains(flag) {
                unknown.push(format!("{}: --{flag}", path.display()));
            }
        }
    }
    assert_eq!(unknown, [""; 0], "these flags exist nowhere");
}

/// Flags of other programs that documents tell of: torchrun, cargo xtask.
const OTHERS: [&str; 7] =
    ["help", "version", "max-restarts", "master-port", "rdzv-id", "glibc", "poseidon"];

#[test]
fn a_command_that_is_wrong_is_refused() {
    let wrong = [
        "$ poseidon launch --worker 4 -- ./program",
        "$ FOO=1 poseidon plan --model vgg19 --bandwidth fast",
        "$ mpirun -n 4 poseidon trian",
        "$ poseidon lab --nodes 2 -- poseidon train --ranks 3",
        "$ cargo run --release -- train --epoch 3   # words",
        "$ cargo run -p poseidon --example 77-nothing",
    ];
    for command in wrong {
        let mut refused = Vec::new();
        judge("here", command, &mut refused);
        assert_eq!(refused.len(), 1, "{command}: {refused:?}");
    }
    let fine = [
        "$ poseidon launch -n 4 -- sh -c 'echo poseidon $RANK'",
        "poseidon data fetch cifar10 | head",
        "# poseidon is quoted here",
        "$ pip install poseidon-*.whl",
        "poseidon-report/report.html",
    ];
    for command in fine {
        let mut refused = Vec::new();
        judge("here", command, &mut refused);
        assert_eq!(refused, [""; 0], "{command}");
    }
}

/// Parses the commands of one line. Returns how many there were.
fn judge(at: &str, line: &str, refused: &mut Vec<String>) -> usize {
    let mut count = 0;
    let mut words = words(line.strip_prefix("$ ").unwrap_or(line));
    if words.starts_with(&["cargo".into(), "run".into()]) {
        let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
        if let Err(why) = cargo_run(&words[2..end]) {
            refused.push(format!("{at}: {line}: {why}"));
        }
        count += 1;
        // Other programs than ours have parsers of their own.
        let ours = !words[..end].iter().any(|word| ["-p", "--example"].contains(&&**word));
        if !ours || end == words.len() {
            return count;
        }
        words[end] = "poseidon".into();
        words.drain(..end);
    }
    while let Some(at_word) = words.iter().position(|word| word == "poseidon") {
        if !words[..at_word].iter().all(|word| may_come_before(word)) {
            break;
        }
        count += 1;
        let ours = &words[at_word..];
        if let Err(error) = Cli::try_parse_from(ours)
            && error.use_stderr()
        {
            let why = error.to_string();
            refused.push(format!("{at}: {line}: {}", why.lines().next().unwrap_or_default()));
        }
        // The command that it runs may be one of ours, too.
        let Some(end) = ours.iter().position(|word| word == "--") else { break };
        words = ours[end + 1..].to_vec();
    }
    count
}

/// Whether a word may stand before `poseidon` and the line is still a command: an assignment, a
/// launcher, or a launcher's argument. Words of a sentence are not.
fn may_come_before(word: &str) -> bool {
    let launchers = ["torchrun", "mpirun", "srun", "env", "ssh", "nice", "sudo", "export"];
    let argument = word.starts_with('-') || word.parse::<u16>().is_ok();
    argument || word.contains('=') || word.starts_with("node") || launchers.contains(&word)
}

/// The package and the example that `cargo run` is to find.
fn cargo_run(words: &[String]) -> Result<(), String> {
    let after = |flag: &str| words.iter().skip_while(|word| *word != flag).nth(1);
    let package = after("-p").map_or("poseidon-cli", |name| name);
    let folder =
        ["crates", "bindings", ""].iter().map(|above| root().join(above)).find_map(|above| {
            let manifests = fs::read_dir(above).ok()?.flatten().map(|entry| entry.path());
            manifests.into_iter().find(|folder| {
                let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap_or_default();
                manifest.contains(&format!("name = \"{package}\""))
            })
        });
    let folder = folder.ok_or_else(|| format!("there is no package {package}"))?;
    match after("--example") {
        Some(name) if !folder.join("examples").join(format!("{name}.rs")).is_file() => {
            Err(format!("{package} has no example {name}"))
        }
        _ => Ok(()),
    }
}

/// The words of a shell's command up to its end: a comment, a pipe, a redirection or the next command.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = None::<String>;
    let mut quote = None;
    for c in line.trim().chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, '|' | '>' | '<' | ';' | '&') => break,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}
