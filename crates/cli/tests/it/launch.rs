//! `poseidon launch`, the real command, with shell scripts for workers.

use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs, thread};

#[test]
fn every_worker_is_told_who_it_is_and_where_to_meet() {
    let names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT \
                 POSEIDON_COORDINATOR POSEIDON_COORDINATOR_SERVED POSEIDON_SECRET \
                 POSEIDON_CLUSTER POSEIDON_SERVERS POSEIDON_LANES";
    let script = format!("for name in {names}; do eval echo $name=\\$$name; done");
    let run = launch(&["-n", "3", "--lanes", "2"], &script).finish();
    assert_eq!(run.status.code(), Some(0), "{run:?}");

    let told = |rank: usize| -> BTreeMap<String, String> {
        let prefix = format!("[{rank}] ");
        let lines = run.stdout.lines().filter_map(|line| line.strip_prefix(&prefix));
        lines.filter_map(|line| line.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect()
    };
    for rank in 0..3 {
        let told = told(rank);
        assert_eq!(told.len(), 12, "{told:?}");
        assert_eq!(told["RANK"], rank.to_string());
        assert_eq!(told["LOCAL_RANK"], rank.to_string());
        assert_eq!(told["WORLD_SIZE"], "3");
        assert_eq!(told["LOCAL_WORLD_SIZE"], "3");
        assert_eq!(told["MASTER_ADDR"], "127.0.0.1");
        assert_eq!(told["POSEIDON_COORDINATOR_SERVED"], "1");
        assert_eq!(told["POSEIDON_SERVERS"], "colocated");
        assert_eq!(told["POSEIDON_LANES"], "2");
        assert_eq!(told["POSEIDON_SECRET"].len(), 64);
        let (host, port) = told["POSEIDON_COORDINATOR"].split_once(':').unwrap();
        assert_eq!(host, "127.0.0.1");
        assert_ne!(port, told["MASTER_PORT"]);
        assert_ne!(told["MASTER_PORT"].parse(), Ok(0_u16));
    }
    for shared in ["MASTER_PORT", "POSEIDON_COORDINATOR", "POSEIDON_SECRET", "POSEIDON_CLUSTER"] {
        let values: BTreeSet<_> = (0..3).map(|rank| told(rank)[shared].clone()).collect();
        assert_eq!(values.len(), 1, "{shared}: {values:?}");
    }
}

#[test]
fn whole_lines_are_marked_with_their_rank_on_the_stream_they_came_from() {
    let script = "i=0; while [ $i -lt 300 ]; do echo out $RANK $i; echo err $RANK $i >&2; \
                  i=$((i+1)); done; printf unfinished";
    let run = launch(&["-n", "3"], script).finish();
    assert_eq!(run.status.code(), Some(0));
    for rank in 0..3 {
        for (stream, what) in [(&run.stdout, "out"), (&run.stderr, "err")] {
            let start = format!("[{rank}] {what} ");
            let lines: Vec<_> = stream.lines().filter(|line| line.starts_with(&start)).collect();
            let expected: Vec<_> =
                (0..300).map(|i| format!("[{rank}] {what} {rank} {i}")).collect();
            assert_eq!(lines, expected);
        }
        assert!(run.stdout.lines().any(|line| line == format!("[{rank}] unfinished")));
    }
    assert_eq!(run.stdout.lines().count(), 3 * 301);
    assert_eq!(run.stderr.lines().count(), 3 * 300);
}

#[test]
fn bytes_that_are_no_text_pass_unchanged() {
    let run = launch(&["-n", "1"], r"printf '\377\376 \r 50%%\r\000\n'").output();
    assert_eq!(run.stdout, b"[0] \xff\xfe \r[0]  50%\r[0] \0\n");
    assert_eq!(run.status.code(), Some(0));
}

#[test]
fn workers_that_end_well_stop_nobody() {
    let go = tempfile::tempdir().unwrap();
    let go = go.path().join("go");
    let script = format!("[ $RANK = 0 ] && exit; echo ready; {}; echo done", wait_for(&go));
    let mut launcher = launch(&["-n", "3"], &script);
    let lines = launcher.lines();
    lines.wait_for(2, "ready");
    // Not even a zombie is left of it.
    eventually("worker 0 is gone", || children_of(launcher.pid()).len() == 2);
    fs::write(&go, "").unwrap();
    lines.wait_for(2, "done");
    assert_eq!(launcher.finish().status.code(), Some(0));
}

#[test]
fn a_worker_that_fails_is_named_quoted_and_ends_the_others() {
    let script = "if [ $RANK = 1 ]; then echo cannot find the data >&2; exit 3; fi; \
                  trap 'echo asked to end; exit 0' TERM; while :; do sleep 0.05; done";
    let run = launch(&["-n", "3"], script).finish();
    assert_eq!(run.status.code(), Some(3));
    let error = "error: worker 1 exited with status 3; its last lines on stderr:\n    \
                 cannot find the data\n";
    assert!(run.stderr.ends_with(error), "{}", run.stderr);
    // A shell that was asked before it had set its trap says nothing.
    let asked = run.sorted_stdout();
    assert!(asked.iter().all(|line| line.ends_with(" asked to end")), "{asked:?}");
}

#[test]
fn a_failure_is_told_by_the_status_when_nobody_reads_messages() {
    let mut launcher = launch(&["-n", "1"], "exit 3");
    drop(launcher.child.stderr.take());
    assert_eq!(launcher.finish().status.code(), Some(3));
}

#[test]
fn a_worker_that_is_killed_is_named_and_so_is_the_signal() {
    let script = "echo $RANK $$; [ $RANK = 2 ] && kill -9 $$; trap '' TERM; \
                  while :; do sleep 0.05; done";
    let run = launch(&["-n", "4"], script).finish();
    assert_eq!(run.status.code(), Some(128 + 9));
    let named = "error: worker 2 was killed by signal 9 (SIGKILL)\n";
    assert!(run.stderr.ends_with(named), "{}", run.stderr);
    // Deaf to SIGTERM, they were killed.
    for pid in run.pids() {
        assert!(is_over(pid), "{pid} is still there");
    }
}

#[test]
fn what_a_worker_started_ends_with_the_run() {
    let script = "sleep 600 & echo $RANK $!; [ $RANK = 1 ] && exit 1; wait";
    let run = launch(&["-n", "2"], script).finish();
    assert_eq!(run.status.code(), Some(1));
    let pids = run.pids();
    assert!(!pids.is_empty());
    for pid in pids {
        eventually("the sleepers are over", || is_over(pid));
    }
}

#[test]
fn sigterm_is_passed_on_and_waited_for() {
    let script = "trap 'echo saving; sleep 0.3; echo saved; exit 0' TERM; echo ready; \
                  while :; do sleep 0.05; done";
    let mut launcher = launch(&["-n", "2"], script);
    let lines = launcher.lines();
    lines.wait_for(2, "ready");
    kill_process(launcher.pid(), Signal::TERM).unwrap();
    lines.wait_for(2, "saved");
    assert_eq!(launcher.finish().status.code(), Some(128 + 15));
}

#[test]
fn a_ctrl_c_reaches_workers_once_and_the_second_one_kills() {
    let script = "n=0; trap 'n=$((n+1)); echo got $n' INT; echo ready; \
                  while :; do sleep 0.05; done";
    let mut launcher = launch(&["-n", "2"], script);
    let lines = launcher.lines();
    lines.wait_for(2, "ready");
    // What a terminal does: the signal goes to the foreground process group.
    kill_process_group(launcher.pid(), Signal::INT).unwrap();
    lines.wait_for(2, "got 1");
    kill_process_group(launcher.pid(), Signal::INT).unwrap();
    let run = launcher.finish();
    assert_eq!(run.status.code(), Some(128 + 2));
    assert_eq!(lines.rest(), Vec::<String>::new());
    assert!(run.stderr.ends_with("error: stopped by signal 2 (SIGINT)\n"), "{}", run.stderr);
}

#[test]
fn a_launcher_under_nohup_does_not_hear_the_hangup() {
    let go = tempfile::tempdir().unwrap();
    let go = go.path().join("go");
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' HUP; exec \"$@\"", "sh", POSEIDON, "launch", "-n", "1", "--"]);
    shell.args(["sh", "-c", &format!("echo ready; {}", wait_for(&go))]);
    let mut launcher = Launcher::start(shell);
    launcher.lines().wait_for(1, "ready");
    kill_process(launcher.pid(), Signal::HUP).unwrap();
    fs::write(&go, "").unwrap();
    assert_eq!(launcher.finish().status.code(), Some(0));
}

#[test]
fn workers_do_not_outlive_a_killed_launcher() {
    let mut launcher = launch(&["-n", "2"], "echo pid $$; exec sleep 600");
    let lines = launcher.lines();
    let workers: Vec<_> = lines.take(2).iter().map(|line| last_number(line)).collect();
    kill_process(launcher.pid(), Signal::KILL).unwrap();
    assert_eq!(launcher.finish().status.signal(), Some(9));
    for pid in workers {
        eventually("the workers are over", || is_over(pid));
    }
}

#[test]
fn a_command_that_does_not_exist_is_named() {
    let mut command = Command::new(POSEIDON);
    command.args(["launch", "-n", "2", "--servers", "1", "--", "no-such-program", "--flag"]);
    let run = Launcher::start(command).finish();
    assert_eq!(run.status.code(), Some(1));
    assert_eq!(
        run.stderr,
        "error: cannot start worker 0: command 'no-such-program' not found; nothing was started\n"
    );
}

#[test]
fn a_job_of_nobody_is_refused() {
    let run = launch(&["-n", "0"], "true").finish();
    assert_eq!(run.status.code(), Some(2));
    assert!(run.stderr.contains("must be at least 1"), "{}", run.stderr);
    let run = launch(&["-n", "1", "--servers", "0"], "true").finish();
    assert_eq!(run.status.code(), Some(1));
    assert!(run.stderr.contains("at least 1 of them"), "{}", run.stderr);
}

/// Workers of four share the cores, and what the user has set stays.
#[test]
fn workers_share_the_cores_unless_the_user_says_otherwise() {
    let threads = |value: Option<&str>| {
        let mut command = Command::new(POSEIDON);
        command.args(["launch", "-n", "4", "--", "sh", "-c", "echo $OMP_NUM_THREADS"]);
        match value {
            Some(value) => command.env(THREADS, value),
            None => command.env_remove(THREADS),
        };
        Launcher::start(command).finish()
    };
    let cores = thread::available_parallelism().unwrap().get();
    let share = (cores / 4).max(1);
    let run = threads(None);
    let expected: Vec<_> = (0..4).map(|rank| format!("[{rank}] {share}")).collect();
    assert_eq!(run.sorted_stdout(), expected);
    let said: Vec<_> = run.stderr.lines().filter(|line| line.contains(THREADS)).collect();
    assert_eq!(said.len(), 1, "{}", run.stderr);
    let words = format!("each worker gets {share}: {cores} cores for 4 workers");
    assert!(said[0].contains(&words), "{}", said[0]);

    let run = threads(Some("7"));
    assert_eq!(run.sorted_stdout(), ["[0] 7", "[1] 7", "[2] 7", "[3] 7"]);
    assert_eq!(run.stderr, "");
}

/// Worker 1 joins only after the launcher has said that it is missing.
#[test]
fn the_launcher_says_for_whom_the_others_wait() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let exchange = "exec \"$0\" bench exchange --in-cluster --bytes 1KB --iters 1 --json";
    let script = format!("[ $RANK = 0 ] || {}; {exchange}", wait_for(&go));
    let mut command = Command::new(POSEIDON);
    command.args(["launch", "-n", "2", "--", "sh", "-c", &script, POSEIDON]);
    let mut launcher = Launcher::start(command);
    let mut stderr = BufReader::new(launcher.child.stderr.take().unwrap()).lines();
    let notice = stderr.find(|line| line.as_ref().is_ok_and(|line| line.contains("waiting for")));
    let notice = notice.expect("a line about waiting").unwrap();
    assert!(notice.ends_with("waiting for worker 1, 1 of 2 have joined"), "{notice}");
    fs::write(&go, "").unwrap();
    let rest: Vec<_> = stderr.map_while(Result::ok).collect();
    assert!(rest.iter().any(|line| line.ends_with("all 2 have joined")), "{rest:?}");
    assert_eq!(launcher.finish().status.code(), Some(0), "{rest:?}");
}

const THREADS: &str = "OMP_NUM_THREADS";
const POSEIDON: &str = env!("CARGO_BIN_EXE_poseidon");
/// Far more than anything here takes: a test that reaches it has found a hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// A launcher in a process group of its own, like a shell's job.
struct Launcher {
    child: Child,
}

#[derive(Debug)]
struct Run {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

/// `poseidon launch` with `options` and workers that run `script`.
fn launch(options: &[&str], script: &str) -> Launcher {
    let mut command = Command::new(POSEIDON);
    command.arg("launch").args(options).args(["--", "sh", "-c", script]);
    Launcher::start(command)
}

impl Launcher {
    fn start(mut command: Command) -> Self {
        command.env_remove("POSEIDON_LOG").process_group(0);
        // Unless a test says otherwise: if it is not set, the launcher chooses a value and says so.
        if !command.get_envs().any(|(name, _)| name == THREADS) {
            command.env(THREADS, "1");
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self { child: command.spawn().unwrap() }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Takes stdout from [`finish`](Self::finish), to read it while the launcher runs.
    fn lines(&mut self) -> Lines {
        let stdout = self.child.stdout.take().unwrap();
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Lines(lines)
    }

    fn finish(self) -> Run {
        let Output { status, stdout, stderr } = self.output();
        Run {
            status,
            stdout: String::from_utf8(stdout).unwrap(),
            stderr: String::from_utf8(stderr).unwrap(),
        }
    }

    fn output(mut self) -> Output {
        let (stdout, stderr) = (self.child.stdout.take(), self.child.stderr.take());
        let (stdout, stderr) = (read_all(stdout), read_all(stderr));
        let mut status = None;
        eventually("the launcher ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        Output {
            status: status.unwrap(),
            stdout: stdout.join().unwrap(),
            stderr: stderr.join().unwrap(),
        }
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
    fn sorted_stdout(&self) -> Vec<&str> {
        let mut lines: Vec<_> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }

    /// The last number of every line of stdout.
    fn pids(&self) -> Vec<Pid> {
        self.stdout.lines().map(last_number).collect()
    }
}

struct Lines(Receiver<String>);

impl Lines {
    fn take(&self, count: usize) -> Vec<String> {
        let next = |_| self.0.recv_timeout(PATIENCE).expect("a line in time");
        (0..count).map(next).collect()
    }

    /// Waits for `count` lines that end in `text`.
    fn wait_for(&self, count: usize, text: &str) {
        let mut missing = count;
        while missing > 0 {
            missing -= usize::from(self.take(1)[0].ends_with(text));
        }
    }

    fn rest(&self) -> Vec<String> {
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

fn last_number(line: &str) -> Pid {
    let number = line.rsplit(' ').next().and_then(|word| word.parse().ok());
    number.and_then(Pid::from_raw).unwrap_or_else(|| panic!("no process id in '{line}'"))
}

/// Shell code that waits until `path` exists.
fn wait_for(path: &std::path::Path) -> String {
    format!("while [ ! -e '{}' ]; do sleep 0.05; done", path.display())
}

/// Gone, or ended and waiting for an init that does not reap.
fn is_over(pid: Pid) -> bool {
    test_kill_process(pid).is_err() || state_and_parent(pid.as_raw_pid()).is_none_or(|s| s.0 == 'Z')
}

/// The children of `parent`, zombies included.
fn children_of(parent: Pid) -> Vec<i32> {
    let pids = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str().and_then(|name| name.parse().ok()));
    pids.filter(|&pid| state_and_parent(pid).is_some_and(|s| s.1 == parent.as_raw_pid())).collect()
}

fn state_and_parent(pid: i32) -> Option<(char, i32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name stands in parentheses and may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

fn eventually(what: &str, mut happens: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !happens() {
        assert!(Instant::now() < end, "never: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}
