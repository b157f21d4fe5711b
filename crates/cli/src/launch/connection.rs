//! One host of a job: the ssh process that leads there, and the threads around it.

use super::host_list::Host;
use super::protocol::{Greeting, Heard, MARK, News, Order, read_line, write_line};
use crate::orphan;
use crate::supervise::{End, wait_without_reaping};
use crate::terminal::printable;
use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// What the threads around all hosts tell the one that decides. The number is the host's.
pub(super) enum Event {
    Greeted(usize, Greeting),
    News(usize, News),
    /// The host wrote something that makes no sense.
    Garbled(usize, io::Error),
    /// ssh has ended, and all that came by it has been told before.
    Ended(usize, End),
    /// Our own stdout does not take what the workers write.
    Unwritten(io::Error),
    /// Somebody asks the job to end.
    Signal(Signal),
}

/// A host that was called.
pub(super) struct Connection {
    pub(super) host: Host,
    ssh: Child,
    reaped: bool,
    /// Dropped when nothing more is to be ordered: the host then sees the end of its input.
    orders: Option<Sender<Order>>,
    shared: Arc<Shared>,
}

/// What the threads of a host and the deciding thread share.
#[derive(Default)]
struct Shared {
    /// The last lines that ssh, or the host's `poseidon` itself, wrote to stderr. The relay writes
    /// it.
    tail: Mutex<VecDeque<String>>,
    /// Since when the reader waits for the host. It does not while it writes to our own streams,
    /// whose reader may be slow. The reader writes it.
    waiting_since: Mutex<Option<Instant>>,
}

impl Connection {
    /// Calls `host`, the job's number `index`, and has the shell there run `script`.
    pub(super) fn start(
        index: usize,
        host: Host,
        ssh: &[String],
        script: &str,
        events: &Sender<Event>,
    ) -> anyhow::Result<Self> {
        let program = ssh.first().context("--ssh names no program")?;
        let mut command = Command::new(program);
        command.args(&ssh[1..]).arg(&host.name).arg(script);
        // ssh may be set up to send variables, and the process list may show them.
        command.env_remove("POSEIDON_SECRET").env_remove("POSEIDON_SECRET_FILE");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C at the terminal is the launcher's to pass on.
        command.process_group(0);
        orphan::end_with_launcher(&mut command);
        let mut ssh = command.spawn().with_context(|| {
            format!(
                "cannot call host {}: cannot run '{program}'; install OpenSSH's client, or name \
                 another program with --ssh",
                host.name
            )
        })?;

        let pid = Pid::from_child(&ssh);
        let missing = "ssh's streams are piped";
        let stdin = ssh.stdin.take().context(missing)?;
        let stdout = ssh.stdout.take().context(missing)?;
        let stderr = ssh.stderr.take().context(missing)?;
        let shared = Arc::new(Shared::default());
        let (orders, ordered) = mpsc::channel();
        let connection =
            Self { host, ssh, reaped: false, orders: Some(orders), shared: shared.clone() };
        let name = connection.host.name.clone();
        let (closed, streams) = mpsc::channel();

        spawn("orders", move || {
            let mut stdin = stdin;
            for order in ordered {
                // A host that hears nothing is about to be noticed by the others.
                if write_line(&mut stdin, "", &order).is_err() {
                    break;
                }
            }
        })?;
        let reader =
            Reader { index, name: name.clone(), events: events.clone(), shared: shared.clone() };
        let done = closed.clone();
        spawn("host", move || {
            reader.run(stdout);
            let _ = done.send(());
        })?;
        spawn("ssh-stderr", move || {
            relay_stderr(&name, stderr, &shared);
            let _ = closed.send(());
        })?;
        let events = events.clone();
        spawn("ssh-end", move || {
            let end = wait_without_reaping(pid);
            // A connection that ssh shares with others may keep stderr open for hours.
            let until = Instant::now() + DRAIN;
            for _ in 0..2 {
                let left = until.saturating_duration_since(Instant::now());
                let _ = streams.recv_timeout(left);
            }
            let _ = events.send(Event::Ended(index, end));
        })?;
        Ok(connection)
    }

    /// Tells the host something, if it still listens.
    pub(super) fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            let _ = orders.send(order);
        }
    }

    /// Tells the host nothing more: it sees the end of its input.
    pub(super) fn hang_up(&mut self) {
        self.orders = None;
    }

    /// How long the host has said nothing.
    pub(super) fn silent_for(&self) -> Duration {
        lock(&self.shared.waiting_since).map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// The last lines that ssh, or the host's `poseidon` itself, wrote to stderr.
    pub(super) fn tail(&self) -> Vec<String> {
        lock(&self.shared.tail).iter().cloned().collect()
    }

    /// ssh has ended.
    pub(super) fn reap(&mut self) {
        self.orders = None;
        if !std::mem::replace(&mut self.reaped, true) {
            let _ = self.ssh.wait();
        }
    }

    /// Ends ssh at once. The host notices by the end of its input.
    pub(super) fn cut(&mut self) {
        self.orders = None;
        // What is not reaped keeps its id, so this cannot reach a stranger.
        if !self.reaped {
            let _ = kill_process_group(Pid::from_child(&self.ssh), Signal::KILL);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.cut();
        self.reap();
    }
}

/// Reads what a host says, and prints what its processes print.
struct Reader {
    index: usize,
    name: String,
    events: Sender<Event>,
    shared: Arc<Shared>,
}

impl Reader {
    fn run(&self, stdout: impl Read) {
        let mut from = BufReader::new(stdout);
        let scripted = |line: &[u8]| {
            let text = printable(String::from_utf8_lossy(line).trim_end());
            if !text.is_empty() {
                print_stderr(format!("[{}] {text}\n", self.name).as_bytes());
            }
        };
        match read_line(&mut from, MARK, scripted) {
            Ok(Some(greeting)) => self.send(Event::Greeted(self.index, greeting)),
            Ok(None) => return,
            Err(error) => return self.send(Event::Garbled(self.index, error)),
        }
        loop {
            *lock(&self.shared.waiting_since) = Some(Instant::now());
            let heard = Heard::read(&mut from);
            *lock(&self.shared.waiting_since) = None;
            match heard {
                Ok(None) => return,
                Ok(Some(Heard::News(news))) => self.send(Event::News(self.index, news)),
                Ok(Some(Heard::Stderr(lines))) => print_stderr(&lines),
                Ok(Some(Heard::Stdout(lines))) => {
                    let mut stdout = io::stdout().lock();
                    if let Err(error) = stdout.write_all(&lines).and_then(|()| stdout.flush()) {
                        drop(stdout);
                        self.send(Event::Unwritten(error));
                    }
                }
                Err(error) => return self.send(Event::Garbled(self.index, error)),
            }
        }
    }

    fn send(&self, event: Event) {
        // Nobody listens any more once the launcher has given up.
        let _ = self.events.send(event);
    }
}

/// Passes on what ssh, or the host's `poseidon` itself, says, and keeps the last lines.
fn relay_stderr(name: &str, stderr: impl Read, shared: &Shared) {
    let mut from = BufReader::new(stderr);
    loop {
        let mut line = Vec::new();
        match from.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = printable(String::from_utf8_lossy(&line).trim_end());
        if text.is_empty() {
            continue;
        }
        print_stderr(format!("[{name}] {text}\n").as_bytes());
        let mut tail = lock(&shared.tail);
        if tail.len() == TAIL {
            tail.pop_front();
        }
        tail.push_back(text);
    }
}

fn print_stderr(bytes: &[u8]) {
    // Nobody is left to tell if stderr is closed.
    let _ = io::stderr().lock().write_all(bytes);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
    let spawned = thread::Builder::new().name(name.into()).spawn(body);
    spawned.map(drop).context("no thread to watch a host")
}

/// How long streams may stay open after ssh has ended.
const DRAIN: Duration = Duration::from_secs(1);
/// Lines of ssh's stderr that are kept.
const TAIL: usize = 20;
const LONGEST_LINE: u64 = 4 << 10;
