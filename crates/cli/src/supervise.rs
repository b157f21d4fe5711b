//! Starts a set of processes, relays what they print, and sees every one of them to its end.
//!
//! The rules, in the order in which a run meets them:
//!
//! * A worker that ends well stops nobody. When all workers have ended, servers have two seconds to
//!   end by themselves.
//! * A process that fails ends the run: the others are asked (SIGTERM), and whoever is left after
//!   a second and a half is killed.
//! * SIGINT, SIGTERM and SIGHUP are passed on, and the processes have all the time they want to
//!   act on them. Another SIGINT kills them.
//!
//! Every process leads its own process group. A Ctrl-C at the terminal thus reaches only this
//! process, which passes it on once; and signals reach what a process has started as well.
//! A process is over when it has ended *and* its output has: until then it is not reaped, which
//! keeps its process id, and so its group's, from being given to a stranger we might signal.

pub(crate) mod heap;
mod output;
mod run;
mod signals;

pub(crate) use run::wait_without_reaping;
pub(crate) use signals::SignalListener;

use run::{Event, Run};
use rustix::process::Signal;
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

/// A process to start.
#[derive(Debug)]
pub(crate) struct Process {
    /// What messages call it: "worker 2".
    pub(crate) name: String,
    /// What stands before its lines: "2" for `[2] …`.
    pub(crate) label: String,
    /// How to start it. Its stdin is empty, its stdout and stderr are ours to relay.
    pub(crate) command: Command,
    /// Whether the run lasts as long as it does.
    pub(crate) role: Role,
    /// Whether it writes to our stdout and stderr itself: for one that draws on the terminal.
    pub(crate) draws: bool,
}

/// Whether a run lasts as long as a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The run lasts until all of these have ended.
    Worker,
    /// Serves the workers, and has no reason to be when they have ended.
    Server,
}

/// How to run a set of processes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    /// Keep what processes write to stdout in [`Finished::stdout`] instead of passing it on.
    pub(crate) capture_stdout: bool,
    /// Where lines and news go instead of our own stdout and stderr. If there is one, the processes
    /// are a part of a larger run, which says when all workers have ended ([`Control::leave`]).
    pub(crate) sink: Option<Arc<dyn Sink>>,
    /// The place of the first process among those that have colours.
    pub(crate) first_colour: usize,
}

/// Takes what processes print, and hears how they fare while they run.
pub(crate) trait Sink: fmt::Debug + Send + Sync {
    /// Takes whole lines, with the mark of their process.
    fn lines(&self, stream: Stream, lines: Vec<u8>) -> io::Result<()>;
    /// Whether marks are coloured.
    fn wants_colour(&self, stream: Stream) -> bool;
    /// A process has failed, and ends the run.
    fn failed(&self, name: &str, end: End);
    /// All workers have ended well.
    fn workers_ended(&self);
}

/// Where a process wrote something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Its standard output.
    Stdout,
    /// Its standard error.
    Stderr,
}

/// A run that has not begun.
pub(crate) struct Supervisor {
    events: Sender<Event>,
    inbox: Receiver<Event>,
}

/// Tells a run what to do, from another thread. Nothing happens if it is over.
#[derive(Clone)]
pub(crate) struct Control(Sender<Event>);

impl Control {
    /// As if this process had got the signal.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = self.0.send(Event::Signal(signal));
    }

    /// Ends all processes, as after a failure.
    pub(crate) fn end(&self) {
        let _ = self.0.send(Event::End);
    }

    /// Workers have ended elsewhere too: servers may leave.
    pub(crate) fn leave(&self) {
        let _ = self.0.send(Event::Leave);
    }
}

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// All processes, in the order in which they were given.
    pub(crate) processes: Vec<Finished>,
    /// Which of them failed first, and so ended the run.
    failure: Option<usize>,
    /// The first signal that asked the run to end, if no failure came before it.
    interrupted: Option<Signal>,
}

/// A process that is over.
#[derive(Debug)]
pub(crate) struct Finished {
    /// The name it was given.
    pub(crate) name: String,
    /// How it ended.
    pub(crate) end: End,
    /// What it wrote to stdout, if that was captured; of more than a MiB, the end.
    pub(crate) stdout: Vec<u8>,
    /// The last lines it wrote to stderr.
    pub(crate) stderr_tail: Vec<Vec<u8>>,
    /// Why lines of its stdout were not passed on, if they were not.
    unwritten: Option<String>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// By itself, with this status.
    Status(i32),
    /// Killed by this signal.
    Signal(i32),
    /// The system did not say, or the process did not end when it was killed.
    Unknown,
}

/// Why a set of processes was not run. None of them is left.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum SuperviseError {
    /// A process could not be started.
    #[error("cannot start {name}: {}; {}", refusal(program, reason), aftermath(*started))]
    Start {
        /// The process.
        name: String,
        /// What it was to run.
        program: String,
        /// Processes that had been started before it, and were killed.
        started: usize,
        /// What the system said.
        reason: io::Error,
    },
    /// The system refused something that supervising needs.
    #[error("cannot supervise: no {what}")]
    Resource {
        /// What it refused.
        what: &'static str,
        /// What it said.
        source: io::Error,
    },
}

/// Starts `processes` in their order and returns when all of them are over.
///
/// Termination signals are caught from here on, also after the return.
pub(crate) fn run(processes: Vec<Process>, options: Options) -> Result<Outcome, SuperviseError> {
    Supervisor::new().run(processes, options)
}

impl Supervisor {
    pub(crate) fn new() -> Self {
        heap::share_one();
        let (events, inbox) = mpsc::channel();
        Self { events, inbox }
    }

    /// What others may tell the run.
    pub(crate) fn control(&self) -> Control {
        Control(self.events.clone())
    }

    /// As [`run`].
    pub(crate) fn run(
        self,
        processes: Vec<Process>,
        options: Options,
    ) -> Result<Outcome, SuperviseError> {
        let signals = self.events.clone();
        let _listener = SignalListener::start(move |s| signals.send(Event::Signal(s)).is_ok())
            .map_err(|source| SuperviseError::Resource { what: "signal handler", source })?;
        let mut run = Run::new(options);
        for process in processes {
            run.start(process, &self.events)?;
        }
        run.watch(&self.inbox);
        Ok(run.into_outcome())
    }
}

impl Outcome {
    /// Says on standard error what went wrong, if something did. The exit status says it too.
    pub(crate) fn tell(&self) -> ExitCode {
        if let Some(report) = self.report() {
            let message = [b"error: ", report.as_slice(), b"\n"].concat();
            // Nobody is left to tell if stderr is closed.
            let _ = io::stderr().write_all(&message);
        }
        self.status().into()
    }

    /// The exit status that tells a shell how the run ended.
    pub(crate) fn status(&self) -> u8 {
        match (self.failure, self.interrupted) {
            (Some(first), _) => self.processes[first].end.status(),
            (None, Some(signal)) => End::Signal(signal.as_raw()).status(),
            (None, None) => u8::from(self.unwritten().is_some()),
        }
    }

    fn unwritten(&self) -> Option<&String> {
        self.processes.iter().find_map(|process| process.unwritten.as_ref())
    }

    /// What went wrong, for people: bytes, because it quotes the process that failed.
    pub(crate) fn report(&self) -> Option<Vec<u8>> {
        let Some(first) = self.failure else {
            let unwritten =
                |why: &String| format!("cannot write to standard output: {why}").into_bytes();
            let Some(signal) = self.interrupted else { return self.unwritten().map(unwritten) };
            return Some(format!("stopped by {}", SignalName(signal.as_raw())).into_bytes());
        };
        let Finished { name, end, stderr_tail, .. } = &self.processes[first];
        let mut report = format!("{name} {end}").into_bytes();
        if !stderr_tail.is_empty() {
            report.extend_from_slice(b"; its last lines on stderr:");
        }
        for line in stderr_tail {
            report.extend_from_slice(b"\n    ");
            report.extend_from_slice(line);
        }
        Some(report)
    }
}

impl End {
    fn is_success(self) -> bool {
        self == Self::Status(0)
    }

    /// As a shell would give it.
    pub(crate) fn status(self) -> u8 {
        match self {
            Self::Status(status) => status as u8,
            Self::Signal(signal) => 128 + signal as u8,
            Self::Unknown => 1,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Status(status) => write!(f, "exited with status {status}"),
            Self::Signal(signal) => write!(f, "was killed by {}", SignalName(signal)),
            Self::Unknown => f.write_str("ended in a way the system did not tell"),
        }
    }
}

/// "signal 9 (SIGKILL)".
pub(crate) struct SignalName(pub(crate) i32);

impl fmt::Display for SignalName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "signal {}", self.0)?;
        signals::name(self.0).map_or(Ok(()), |name| write!(f, " ({name})"))
    }
}

fn refusal(program: &str, reason: &io::Error) -> String {
    match reason.kind() {
        ErrorKind::NotFound => format!("command '{program}' not found"),
        _ => format!("'{program}': {reason}"),
    }
}

fn aftermath(started: usize) -> String {
    match started {
        0 => "nothing was started".into(),
        n => format!("what was started before it ({n}) has been killed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, kill_process};

    fn worker(script: &str) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process {
            name: "worker".into(),
            label: "0".into(),
            command,
            role: Role::Worker,
            draws: false,
        }
    }

    #[test]
    fn captured_output_is_whole_and_in_order() {
        let scripts = ["echo one; echo two", "seq 100000; printf end", "echo lost >&2; exit 0"];
        let processes = scripts.iter().map(|script| worker(script)).collect();
        let outcome =
            run(processes, Options { capture_stdout: true, ..Options::default() }).unwrap();
        assert_eq!(outcome.status(), 0);
        let stdout: Vec<_> = outcome.processes.iter().map(|p| p.stdout.as_slice()).collect();
        assert_eq!(stdout[0], b"one\ntwo\n");
        assert_eq!(stdout[1].iter().filter(|&&b| b == b'\n').count(), 100_000);
        assert!(stdout[1].ends_with(b"\n100000\nend"));
        assert_eq!(stdout[2], b"");
        assert_eq!(outcome.processes[2].stderr_tail, [b"lost"]);
    }

    #[test]
    fn a_process_that_cannot_be_started_takes_the_others_with_it() {
        let missing = Process { command: Command::new("no-such-program"), ..worker("") };
        let error = run(vec![worker("sleep 600"), missing], Options::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot start worker: command 'no-such-program' not found; \
             what was started before it (1) has been killed"
        );
    }

    #[test]
    fn servers_are_ended_when_the_workers_are_done() {
        let server = Process { role: Role::Server, ..worker("exec sleep 600") };
        let outcome = run(vec![worker("exit 0"), server], Options::default()).unwrap();
        assert_eq!(outcome.processes[1].end, End::Signal(Signal::TERM.as_raw()));
        assert_eq!((outcome.status(), outcome.report()), (0, None));
    }

    #[test]
    fn a_server_that_fails_ends_the_run() {
        let server = Process { name: "server 0".into(), role: Role::Server, ..worker("exit 9") };
        let outcome = run(vec![worker("sleep 600"), server], Options::default()).unwrap();
        assert_eq!(outcome.report().unwrap(), b"server 0 exited with status 9");
        assert_eq!(outcome.status(), 9);
    }

    #[test]
    fn output_held_open_by_a_runaway_does_not_hold_the_run() {
        // It is in a session of its own, where the group's signals do not reach it.
        let processes = vec![worker("setsid sleep 600 & echo $!")];
        let outcome =
            run(processes, Options { capture_stdout: true, ..Options::default() }).unwrap();
        assert_eq!(outcome.status(), 0);
        let pid = String::from_utf8_lossy(&outcome.processes[0].stdout).trim().parse().unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).expect("it is still there");
    }
}
