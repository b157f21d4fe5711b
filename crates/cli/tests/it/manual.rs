//! `poseidon completions` and `poseidon man`, as shells and `man` see them.

use std::fs;
use std::process::{Command, Output};

const POSEIDON: &str = env!("CARGO_BIN_EXE_poseidon");

fn poseidon(args: &[&str]) -> Output {
    Command::new(POSEIDON).args(args).output().unwrap()
}

fn text(args: &[&str]) -> String {
    let output = poseidon(args);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// What bash offers after `words`, whose last one has been begun.
fn bash_offers(words: &[&str]) -> Vec<String> {
    let script = text(&["completions", "bash"]);
    let line = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
    let (last, before) = (words.last().unwrap(), words[words.len().saturating_sub(2)]);
    let ask = format!(
        "{script}\nCOMP_WORDS=({line}); COMP_CWORD={}; \
         _poseidon poseidon '{last}' '{before}'; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        words.len() - 1
    );
    let output = Command::new("bash").args(["--norc", "-c", &ask]).output().expect("bash");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_subcommands_and_flags() {
    assert_eq!(bash_offers(&["poseidon", "lau"]), ["launch"]);
    let flags = bash_offers(&["poseidon", "launch", "--host"]);
    assert_eq!(flags, ["--hosts", "--hostfile"]);
    let all = bash_offers(&["poseidon", "launch", "--"]);
    assert!(!all.contains(&"--as-host".to_owned()), "it is not for people: {all:?}");
    assert_eq!(bash_offers(&["poseidon", "bench", "exch"]), ["exchange"]);
}

#[test]
fn every_shell_has_a_script_that_names_all_subcommands() {
    for shell in ["bash", "zsh", "fish"] {
        let script = text(&["completions", shell]);
        for subcommand in ["train", "launch", "lab", "query", "checkpoint", "man"] {
            assert!(script.contains(subcommand), "{shell}: {subcommand}");
        }
    }
    let refused = poseidon(&["completions", "tcsh"]);
    assert_eq!(refused.status.code(), Some(2));
    let words = String::from_utf8(refused.stderr).unwrap();
    assert!(words.contains("tcsh") && words.contains("fish"), "{words}");
}

#[test]
fn pages_have_the_words_of_help() {
    let page = text(&["man"]);
    assert!(page.contains(".TH poseidon 1"), "{page}");
    let page = text(&["man", "launch"]);
    for words in [".TH poseidon-launch 1", "OMP_NUM_THREADS", "hostfile", "Examples"] {
        assert!(page.contains(words), "{words}: {page}");
    }
    assert!(!page.contains("as\\-host]"), "{page}");
    assert!(text(&["man", "bench", "exchange"]).contains(".TH poseidon-bench-exchange 1"));
    let refused = poseidon(&["man", "nonesuch"]);
    assert_eq!(refused.status.code(), Some(1));
    let words = String::from_utf8(refused.stderr).unwrap();
    assert!(words.contains("'nonesuch'") && words.contains("launch"), "{words}");
}

#[test]
fn all_pages_are_written_and_groff_reads_them_without_complaint() {
    let folder = tempfile::tempdir().unwrap();
    let output = poseidon(&["man", "--out", folder.path().to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let pages: Vec<_> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    for name in ["poseidon.1", "poseidon-launch.1", "poseidon-bench-exchange.1"] {
        assert!(folder.path().join(name).is_file(), "{name}");
    }
    if Command::new("groff").arg("--version").output().is_err() {
        use std::io::Write;
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED in part: groff is not installed, so only the pages' text was tested"
        );
        return;
    }
    for page in pages {
        let output =
            Command::new("groff").args(["-Kutf8", "-man", "-Tutf8", "-ww"]).arg(&page).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}: {output:?}", page.display());
        assert!(output.stderr.is_empty(), "{}: {output:?}", page.display());
    }
}
