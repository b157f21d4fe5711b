//! A stand-in for ssh, and a launcher with a deadline.

// Every test file uses its own part of this.
#![allow(dead_code, reason = "each test file uses a part of it")]

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs, thread};
use tempfile::TempDir;

pub(crate) const POSEIDON: &str = env!("CARGO_BIN_EXE_poseidon");
/// Far more than anything here takes: a test that reaches it has found a hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// A script in place of ssh. What it is told to run on a host runs on this machine, in a session of
/// its own: as with sshd, signals for ssh do not reach it, and it sees the end of its input when
/// ssh is gone. The script writes down its arguments, its environment and its process id.
pub(crate) struct FakeSsh {
    folder: TempDir,
}

impl FakeSsh {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let script = "#!/bin/sh\n\
             here=$(dirname \"$0\")\n\
             { echo \"$@\"; env; } >> \"$here/seen\"\n\
             echo $$ > \"$here/pid-$1\"\n\
             [ -e \"$here/refuse-$1\" ] && exec sh \"$here/refuse-$1\"\n\
             [ -e \"$here/greet\" ] && sh \"$here/greet\"\n\
             mkfifo \"$here/input-$$\"\n\
             exec 3<&0\n\
             cat <&3 > \"$here/input-$$\" &\n\
             copier=$!\n\
             setsid --wait sh -c \"$2\" < \"$here/input-$$\"\n\
             status=$?\n\
             kill $copier 2> /dev/null\n\
             exit $status\n";
        let path = folder.path().join("ssh");
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// `poseidon launch` with `options`, up to the workers' command.
    pub(crate) fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(POSEIDON);
        let ssh = self.path("ssh");
        command.args(["launch", "--ssh", ssh.to_str().unwrap()]).args(options).arg("--");
        command
    }

    /// The same with workers that run `script`.
    pub(crate) fn launch(&self, options: &[&str], script: &str) -> Command {
        let mut command = self.command(options);
        command.args(["sh", "-c", script]);
        command
    }

    /// Has `script` run instead of what is asked for on `host`.
    pub(crate) fn refuse(&self, host: &str, script: &str) {
        fs::write(self.path(&format!("refuse-{host}")), script).unwrap();
    }

    /// Has `script` run before what is asked for.
    pub(crate) fn greet(&self, script: &str) {
        fs::write(self.path("greet"), script).unwrap();
    }

    /// Arguments and environments of all calls.
    pub(crate) fn seen(&self) -> String {
        fs::read_to_string(self.path("seen")).unwrap()
    }

    /// The hosts that were called.
    pub(crate) fn calls(&self) -> BTreeSet<String> {
        let names = fs::read_dir(self.folder()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned());
        names.filter_map(|name| name.strip_prefix("pid-").map(str::to_owned)).collect()
    }

    /// The process that leads to `host`, which leads its process group.
    pub(crate) fn process_of(&self, host: &str) -> Pid {
        last_number(fs::read_to_string(self.path(&format!("pid-{host}"))).unwrap().trim())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }
}

/// A launcher in a process group of its own, like a shell's job.
pub(crate) struct Launcher {
    child: Child,
}

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Launcher {
    pub(crate) fn start(mut command: Command) -> Self {
        command.env_remove("POSEIDON_LOG").env("OMP_NUM_THREADS", "1").process_group(0);
        // The stand-in for ssh would pass it on.
        command.env_remove("SSH_CONNECTION");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self { child: command.spawn().unwrap() }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Takes stdout from [`finish`](Self::finish), to read it while the launcher runs.
    pub(crate) fn lines(&mut self) -> Lines {
        let stdout = self.child.stdout.take().unwrap();
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Lines(lines)
    }

    pub(crate) fn finish(mut self) -> Run {
        let (stdout, stderr) = (self.child.stdout.take(), self.child.stderr.take());
        let (stdout, stderr) = (read_all(stdout), read_all(stderr));
        let mut status = None;
        eventually("the launcher ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        let text = |bytes: JoinHandle<Vec<u8>>| String::from_utf8(bytes.join().unwrap()).unwrap();
        Run { status: status.unwrap(), stdout: text(stdout), stderr: text(stderr) }
    }
}

impl Drop for Launcher {
    /// A test that fails leaves nothing behind.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Run {
    pub(crate) fn sorted_stdout(&self) -> Vec<&str> {
        let mut lines: Vec<_> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }
}

pub(crate) struct Lines(Receiver<String>);

impl Lines {
    pub(crate) fn take(&self, count: usize) -> Vec<String> {
        let next = |_| self.0.recv_timeout(PATIENCE).expect("a line in time");
        (0..count).map(next).collect()
    }

    /// Waits for `count` lines that end in `text`.
    pub(crate) fn wait_for(&self, count: usize, text: &str) {
        let mut missing = count;
        while missing > 0 {
            missing -= usize::from(self.take(1)[0].ends_with(text));
        }
    }

    pub(crate) fn rest(&self) -> Vec<String> {
        self.0.iter().collect()
    }
}

fn read_all(stream: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        stream.map(|mut stream| stream.read_to_end(&mut bytes).unwrap());
        bytes
    })
}

pub(crate) fn last_number(line: &str) -> Pid {
    let number = line.rsplit(' ').next().and_then(|word| word.parse().ok());
    number.and_then(Pid::from_raw).unwrap_or_else(|| panic!("no process id in '{line}'"))
}

/// Gone, or ended and waiting for an init that does not reap.
pub(crate) fn is_over(pid: Pid) -> bool {
    test_kill_process(pid).is_err() || state(pid.as_raw_pid()).is_none_or(|state| state == 'Z')
}

fn state(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name stands in parentheses and may hold anything.
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

pub(crate) fn eventually(what: &str, happens: impl FnMut() -> bool) {
    eventually_within(PATIENCE, what, happens);
}

pub(crate) fn eventually_within(patience: Duration, what: &str, mut happens: impl FnMut() -> bool) {
    let end = Instant::now() + patience;
    while !happens() {
        assert!(Instant::now() < end, "never: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Past the test harness, which swallows what passing tests print.
pub(crate) fn skipped(needs: &str) {
    use std::io::Write;
    let name = thread::current().name().unwrap_or_default().to_owned();
    let _ = writeln!(std::io::stderr(), "SKIPPED {name}: NOT TESTED, it needs {needs}");
}

pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    let quiet = |command: &mut Command| {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()
    };
    quiet(Command::new(program).args(args)).is_ok_and(|status| status.success())
}

/// Tells the numbers of a worker and of the `poseidon` process that has started it.
pub(crate) const TELL_PIDS: &str = "echo pid $$ $PPID; exec sleep 600";

/// Kills a launcher of two workers on two hosts that run [`TELL_PIDS`]: nothing is left.
pub(crate) fn kill_the_launcher(command: Command) {
    let mut launcher = Launcher::start(command);
    let lines = launcher.lines().take(2);
    let number = |word: &str| Pid::from_raw(word.parse().unwrap()).unwrap();
    let pids: Vec<_> = lines.iter().flat_map(|line| line.split(' ').skip(2).map(number)).collect();
    assert_eq!(pids.len(), 4, "two workers, and the host's two poseidon processes");
    kill_process(launcher.pid(), Signal::KILL).unwrap();
    launcher.finish();
    for pid in pids {
        eventually("workers and hosts are over", || is_over(pid));
    }
}
