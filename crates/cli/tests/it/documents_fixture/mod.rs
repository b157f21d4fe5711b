//! Runs scripts of documented commands, each on a machine of its own: a folder, and namespaces in
//! which nothing else listens, runs or is mounted. So commands use the ports and addresses that the
//! document has, and find only the jobs of their script.

use crate::hosts_fixture::{POSEIDON, skipped, succeeds};
use crate::reader::root;
use crate::trial::SMALL;
use std::process::Command;
use std::sync::LazyLock;
use std::{fs, iter};

/// What begins a line of a script.
const COMMAND: &str = "$ ";
const REFUSED: &str = "! ";
const BEHIND: &str = "& ";
const MORE: &str = "> ";
const REPLACED: &str = "with ";

/// A shell's status for "it cannot be tested here": the last line says what is needed.
const SKIPPED: i32 = 77;
/// Seconds, far more than any script takes.
const PATIENCE: &str = "300";

/// The documented commands of a script, as the documents have them.
pub(crate) fn commands(script: &str) -> impl Iterator<Item = &str> {
    script.lines().filter_map(|line| {
        let marks = [COMMAND, REFUSED, BEHIND, MORE];
        marks.iter().find_map(|mark| line.strip_prefix(mark)).map(str::trim)
    })
}

/// Runs a script to its end, which has to be a good one.
pub(crate) fn run(script: &str) {
    let Some(namespaces) = &*NAMESPACES else {
        skipped("unshare (util-linux), ip (iproute2), bash, python3, and root or user namespaces");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("small.toml"), SMALL).unwrap();
    fs::write(folder.path().join("script"), bash(script)).unwrap();
    let mut machine = Command::new("timeout");
    machine.args(["--signal=KILL", PATIENCE, "unshare"]).args(namespaces);
    machine.args(["bash", "script"]).current_dir(&folder);
    machine.env("POSEIDON", POSEIDON).env("CHECKOUT", root().canonicalize().unwrap());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("POSEIDON_")) {
        machine.env_remove(name);
    }
    let output = machine.output().unwrap();
    let [printed, errors] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    match output.status.code() {
        Some(0) => {}
        Some(SKIPPED) => skipped(printed.lines().last().unwrap_or_default()),
        _ => panic!("{}:\n{printed}{errors}", output.status),
    }
}

/// What `unshare` is told, if it can give what scripts need.
static NAMESPACES: LazyLock<Option<Vec<&str>>> = LazyLock::new(|| {
    let own = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let tools = ["ip -V", "bash --version", "python3 --version"];
    let tools = tools.iter().all(|tool| succeeds("sh", &["-c", tool]));
    let users = [&[][..], &["--user", "--map-root-user"]];
    let flags = users.map(|user| [user, &own].concat());
    let up = ["ip", "link", "set", "lo", "up"];
    flags.into_iter().find(|flags| tools && succeeds("unshare", &[flags, &up[..]].concat()))
});

/// The script for bash.
fn bash(script: &str) -> String {
    let mut lines = script.lines().peekable();
    let mut replaced = Vec::new();
    let mut text = BEFORE.to_owned();
    while let Some(line) = lines.next() {
        let marks = [COMMAND, REFUSED, BEHIND];
        if let Some(pair) = line.strip_prefix(REPLACED) {
            replaced.push(pair.split_once(" => ").expect("with THIS => THAT"));
        } else if let Some(mark) = marks.into_iter().find(|mark| line.starts_with(mark)) {
            let more = iter::from_fn(|| lines.next_if(|line| line.starts_with(MORE)));
            let command: Vec<_> = iter::once(line).chain(more).map(|line| &line[2..]).collect();
            let replace = |text: String, (from, to): &(&str, &str)| text.replace(from, to);
            let command = replaced.iter().fold(command.join("\n"), replace);
            let quoted = command.replace('\'', r"'\''");
            text += &format!("begins '{quoted}'\n");
            text += &match mark {
                REFUSED => format!("{{ {command}\n}} &> \"$said\" && fail 'it ended well'\n"),
                // Without braces, so that the process is the command's.
                BEHIND => format!("{command} &> \"$said\" & behind=$!\n"),
                _ => format!("{{ {command}\n}} &> \"$said\" || fail \"it ended with $?\"\n"),
            };
        } else {
            text += &format!("{line}\n");
        }
    }
    text
}

/// The machine, and what scripts may use. Commands run in an empty folder with a file of a small
/// net. All hosts are the machine itself. `python` and the programs are stand-ins that become a
/// worker of `poseidon train`: PyTorch is not in these tests.
const BEFORE: &str = r#"set -u
top=$PWD python=$(python3 -c 'import sys; print(sys.executable)')
mkdir bin home work said
ln -s "$POSEIDON" bin/poseidon
ln -s "$python" bin/python
export HOME=$top/home PATH=$top/bin:$PATH OMP_NUM_THREADS=1
cd work
mv ../small.toml .
export TRAIN="poseidon train --model small.toml --batch 16"
export TAKES="--epochs 1"
printf '#!/bin/sh\nexec $TRAIN $TAKES\n' > program
chmod +x program
echo 'import os; os.execl("program", "program")' > train.py
cp train.py mnist_cnn.py

ip link set lo up
ip addr add 10.0.0.1/24 dev lo
ip addr add 10.0.0.2/24 dev lo
hosts=("127.0.0.1 localhost" "10.0.0.1 node1 node3 node4 $(hostname)" "10.0.0.2 node2")
printf '%s\n' "${hosts[@]}" > ../hosts
mount --bind ../hosts /etc/hosts

fail() {
  printf '%s\n' "$command" "$1; it printed:"
  cat "$said"
  exit 1
}
count=0
begins() { command=$1 said=$top/said/$((++count)) behind=; }
# Whether the last command has printed these words. One that is still running is waited for.
says() {
  local over
  for ((i = 0; i < 600; i++)); do
    over=yes
    [ -n "$behind" ] && [ -e "/proc/$behind" ] && over=
    grep -qF -e "$*" "$said" && return
    [ -z "$over" ] || break
    sleep 0.1
  done
  fail "'$*' was not said"
}
# Waits until the last command ends well.
ends() { wait "$behind" || fail "it ended with $?"; }
# Waits until this succeeds.
until_ok() {
  for ((i = 0; i < 600; i++)); do
    "$@" > "$top/asked" 2>&1 && return
    sleep 0.1
  done
  fail "never: $*: $(cat "$top/asked")"
}
page_is_shown() {
  "$python" -c 'import urllib.request as web; web.urlopen("http://127.0.0.1:8080/live")'
}
# Ends the test, which shows no more.
lacks() { echo "$*"; exit 77; }
# Ends the test if this program is missing.
needs() { command -v "$1" > "$top/asked" || lacks "$@"; }
"#;
