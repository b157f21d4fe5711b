//! `poseidon train` in a folder of its own, with a deadline.

// Every test file uses its own part of this.
#![allow(dead_code, reason = "each test file uses a part of it")]

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};
use std::{fs, thread};
use tempfile::TempDir;

pub(crate) type Variables = BTreeMap<String, String>;

/// A folder that processes run in. What they leave there goes with it.
pub(crate) struct Trial {
    folder: TempDir,
}

/// A process that was started, and what it prints.
pub(crate) struct Running {
    child: Child,
    stdout: Stream,
    stderr: Stream,
}

/// A process that is over.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

struct Stream {
    lines: Receiver<String>,
    seen: String,
}

/// Far more than anything here takes: a test that reaches it has found a hang.
const PATIENCE: Duration = Duration::from_secs(90);

impl Trial {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// With a net in `small.toml` that trains in a moment.
    pub(crate) fn with_small_net() -> Self {
        let trial = Self::new();
        trial.write("small.toml", SMALL);
        trial
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes a file, and the folder that it is in.
    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }

    /// Starts `poseidon train` in this folder with `args`, which have spaces between them. It knows
    /// nothing of the outside but `variables`.
    pub(crate) fn start_with(&self, args: &str, variables: &Variables) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
        command.arg("train").args(args.split_whitespace()).args(["--report", "report"]);
        command.env_clear().env("HOME", self.folder.path()).envs(variables);
        command.current_dir(&self.folder).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdout = Stream::new(child.stdout.take().unwrap());
        let stderr = Stream::new(child.stderr.take().unwrap());
        Running { child, stdout, stderr }
    }

    pub(crate) fn start(&self, args: &str) -> Running {
        self.start_with(args, &Variables::new())
    }

    pub(crate) fn train(&self, args: &str) -> Run {
        self.start(args).finish()
    }

    /// Trains, and returns the report.
    pub(crate) fn report(&self, args: &str) -> Value {
        self.train(&format!("{args} --json")).report()
    }

    /// Everything that was written to the folder of the report.
    pub(crate) fn report_files(&self) -> Vec<String> {
        let Ok(files) = fs::read_dir(self.path("report")) else { return Vec::new() };
        let mut names: Vec<_> =
            files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }

    /// The processes that run in this folder, by rank; those that have none are left out.
    pub(crate) fn workers(&self) -> BTreeMap<u16, Pid> {
        let folder = self.folder.path().canonicalize().unwrap();
        let pids = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<i32>().ok());
        let rank = |pid: i32| {
            // A process may end while it is looked at.
            let lives_here = fs::read_link(format!("/proc/{pid}/cwd")).ok()? == folder;
            let variables = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let rank = variables.split(|&b| b == 0).find_map(|v| v.strip_prefix(b"RANK="))?;
            let rank = std::str::from_utf8(rank).ok()?.parse().ok()?;
            lives_here.then_some((rank, Pid::from_raw(pid)?))
        };
        pids.filter_map(rank).collect()
    }
}

impl Running {
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Waits for a line of stdout that begins with `text`.
    pub(crate) fn wait_for(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while let Some(line) = self.stdout.next(deadline) {
            if line.starts_with(text) {
                return;
            }
        }
        self.stderr.drain(Instant::now());
        panic!("no '{text}' on stdout:\n{}{}", self.stdout.seen, self.stderr.seen);
    }

    pub(crate) fn finish(mut self) -> Run {
        let deadline = Instant::now() + PATIENCE;
        self.stdout.drain(deadline);
        self.stderr.drain(deadline);
        eventually("the command ends", || self.child.try_wait().unwrap().is_some());
        let status = self.child.wait().unwrap();
        let take = std::mem::take;
        Run { status, stdout: take(&mut self.stdout.seen), stderr: take(&mut self.stderr.seen) }
    }
}

impl Drop for Running {
    /// A test that fails leaves nothing behind: the workers end with what started them.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Run {
    /// What `--json` printed, of a run that had nothing to complain about.
    pub(crate) fn report(&self) -> Value {
        assert!(self.status.code() == Some(0) && self.complaints().is_empty(), "{self:?}");
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }

    /// What was said on stderr, but for two things: a dedicated server's goodbye, and that this machine
    /// stood still or was slow, which it may be while other tests run.
    pub(crate) fn complaints(&self) -> Vec<&str> {
        let is_goodbye = |line: &str| line.starts_with("[server ") && line.contains(" INFO ");
        let is_delay = |line: &str| {
            line.contains(" WARN ")
                && ["waiting for ", "was away for "].iter().any(|w| line.contains(w))
        };
        self.stderr.lines().filter(|line| !is_goodbye(line) && !is_delay(line)).collect()
    }
}

impl Stream {
    fn new(stream: impl Read + Send + 'static) -> Self {
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { lines, seen: String::new() }
    }

    fn next(&mut self, deadline: Instant) -> Option<String> {
        let left = deadline.saturating_duration_since(Instant::now());
        let line = self.lines.recv_timeout(left).ok()?;
        self.seen.push_str(&line);
        self.seen.push('\n');
        Some(line)
    }

    fn drain(&mut self, deadline: Instant) {
        while self.next(deadline).is_some() {}
    }
}

pub(crate) fn kill(pid: Pid, signal: Signal) {
    kill_process(pid, signal).unwrap();
}

pub(crate) fn variables(pairs: &[(&str, &str)]) -> Variables {
    pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

/// Flags of each worker of a job whose processes are started one by one, and what they all know.
pub(crate) fn by_hand(world: u16) -> (Vec<String>, Variables) {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Below the ports the system hands out by itself, and another one for every test.
    let free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let start = 10_000 + (std::process::id() % 9_000) as u16;
    let ports = (0..1000).map(|_| start + NEXT.fetch_add(1, Ordering::Relaxed));
    let port = ports.into_iter().find(free).expect("a free port");
    let flags = |rank| format!("--rank {rank} --world {world} --coordinator 127.0.0.1:{port}");
    let secret = variables(&[("POSEIDON_SECRET", "known to all the workers of this test")]);
    ((0..world).map(flags).collect(), secret)
}

pub(crate) fn eventually(what: &str, mut happens: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !happens() {
        assert!(Instant::now() < end, "never: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// An IDX file of `count` images of 28x28 pixels: sample i has a bright band for class i % 10.
pub(crate) fn idx_images(count: u32) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        [0x0803, count, 28, 28].iter().flat_map(|n: &u32| n.to_be_bytes()).collect();
    for sample in 0..count {
        let band = (sample % 10 * 2) as usize;
        let pixel = |i: usize| if (band..band + 4).contains(&(i / 28)) { 250 } else { 10 };
        bytes.extend((0..28 * 28).map(pixel));
    }
    bytes
}

/// The labels to [`idx_images`].
pub(crate) fn idx_labels(count: u32) -> Vec<u8> {
    let header = [0x0801, count];
    let header = header.iter().flat_map(|n: &u32| n.to_be_bytes());
    header.chain((0..count).map(|sample| (sample % 10) as u8)).collect()
}

impl Trial {
    /// Makes `folder` an IDX data set of `count` training samples and ten to test.
    pub(crate) fn write_idx(&self, folder: &str, count: u32) {
        for (split, count) in [("train", count), ("t10k", 10)] {
            self.write(&format!("{folder}/{split}-images-idx3-ubyte"), idx_images(count));
            self.write(&format!("{folder}/{split}-labels-idx1-ubyte"), idx_labels(count));
        }
    }
}

/// A net that is small enough for a test, and has a layer of each kind that is synchronised: for
/// several workers with a few samples each, `fc1` is cheaper by factors, `fc2` is not.
pub(crate) const SMALL: &str = r#"
name = "small"
input = [1, 28, 28]
classes = 10

[[layer]]
name = "conv"
kind = "conv"
outputs = 4
kernel = 5
stride = 2

[[layer]]
name = "relu"
kind = "relu"

[[layer]]
name = "fc1"
kind = "fc"
outputs = 48

[[layer]]
name = "fc2"
kind = "fc"
outputs = 10
"#;
