//! What becomes of results that nobody can read, and of what a report is written over.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::process::{Command, Output, Stdio};

const PLAN: [&str; 7] = ["plan", "--model", "vgg19", "--workers", "2", "--bandwidth", "10gbit"];

fn poseidon(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
    command.args(args).stdin(Stdio::null()).stderr(Stdio::piped()).env("POSEIDON_LOG", "error");
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_full_disk_is_not_success() {
    let json: Vec<&str> = PLAN.iter().copied().chain(["--json"]).collect();
    let model: Vec<&str> = PLAN.iter().copied().chain(["--print-model"]).collect();
    let simulate = ["bench", "simulate", "--nodes", "2", "--bytes", "1MB", "--rate", "10gbit"];
    let launch = ["launch", "-n", "1", "--", "echo", "a line"];
    let all: [&[&str]; 8] = [
        &PLAN,
        &json,
        &model,
        &["--help"],
        &["--version"],
        &["train", "--print-config"],
        &simulate,
        &launch,
    ];
    for args in all {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = poseidon(args).stdout(full).spawn().unwrap().wait_with_output().unwrap();
        assert!(!output.status.success(), "{args:?}: {}", stderr(&output));
        let words = stderr(&output);
        assert!(words.contains("cannot write to standard output"), "{args:?}: {words}");
        assert!(words.contains("No space left"), "{args:?}: {words}");
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    for args in [&PLAN[..], &["--help"], &["train", "--print-config"]] {
        let mut child = poseidon(args).stdout(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut words = String::new();
        child.stderr.take().unwrap().read_to_string(&mut words).unwrap();
        assert!(child.wait().unwrap().success(), "{args:?}: {words}");
        assert_eq!(words, "", "{args:?}");
    }
}

#[test]
fn a_report_is_written_into_what_is_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let report = |name: &str| {
        let path = folder.path().join(name);
        let mut command = poseidon(&PLAN);
        command.arg("--report").arg(&path).stdout(Stdio::null());
        (path, command)
    };
    let (pipe, mut command) = report("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let child = command.spawn().unwrap();
    assert!(fs::read_to_string(&pipe).unwrap().contains("</html>"));
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo(), "it was replaced");

    let (link, mut command) = report("link");
    let target = folder.path().join("target.html");
    fs::write(&target, "an older report").unwrap();
    symlink(&target, &link).unwrap();
    assert!(command.output().unwrap().status.success());
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink(), "it was replaced");
    assert!(fs::read_to_string(&target).unwrap().contains("</html>"));
}
