//! A job on several hosts that is under way: who is told what, and when it is over.
//!
//! The rules are those of a job on one machine (`supervise.rs`). Each host applies them to its own
//! processes; this is what hosts are told of each other.

use super::connection::{Connection, Event};
use super::protocol::{HEARTBEAT, News, Order, SILENCE};
use super::refusal::said;
use crate::supervise::{End, SignalName};
use crate::terminal::printable_lines;
use rustix::process::Signal;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// A job on several hosts that is under way.
pub(super) struct Run {
    connections: Vec<Connection>,
    hosts: Vec<State>,
    phase: Phase,
    /// When the phase began.
    since: Instant,
    failure: Option<Failure>,
    interrupted: Option<Signal>,
    /// A second Ctrl-C came.
    killing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    /// All hosts have been told to end their processes.
    Ending,
    /// ssh has been killed.
    Cut,
}

/// How far a host is.
#[derive(Default)]
struct State {
    workers_ended: bool,
    /// What it said at its end.
    over: Option<(u8, Option<String>)>,
    /// ssh has ended.
    gone: bool,
}

/// What ended the job.
struct Failure {
    host: Option<usize>,
    words: String,
    status: u8,
}

impl Run {
    pub(super) fn new(connections: Vec<Connection>) -> Self {
        Self {
            hosts: connections.iter().map(|_| State::default()).collect(),
            connections,
            phase: Phase::Running,
            since: Instant::now(),
            failure: None,
            interrupted: None,
            killing: false,
        }
    }

    /// Returns when all hosts are done, or have been given up.
    pub(super) fn watch(&mut self, inbox: &Receiver<Event>) {
        let mut beat = Instant::now() + HEARTBEAT;
        while self.hosts.iter().any(|host| !host.gone) {
            let until = self.deadline().into_iter().chain([beat]).min().unwrap_or(beat);
            match inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(event) => self.handle(event),
                Err(_) => self.handle_time(),
            }
            if Instant::now() >= beat {
                beat = Instant::now() + HEARTBEAT;
                self.tell_all(|| Order::Alive);
                self.look_for_silence();
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::News(index, News::Failed { words, status }) => {
                self.fail(Some(index), words, status);
            }
            Event::News(index, News::Refused { words }) => {
                let words = format!("host {}: {words}", self.connections[index].host.name);
                self.hosts[index].over = Some((1, None));
                self.connections[index].hang_up();
                self.fail(Some(index), words, 1);
            }
            Event::News(index, News::WorkersEnded) => {
                self.hosts[index].workers_ended = true;
                if self.hosts.iter().all(|host| host.workers_ended) {
                    self.tell_all(|| Order::Leave);
                }
            }
            Event::News(index, News::Over { status, report }) => {
                let words = report.clone().unwrap_or_else(|| format!("exit status {status}"));
                self.hosts[index].over = Some((status, report));
                self.connections[index].hang_up();
                if status != 0 {
                    // Nothing new if a process of it had failed, or was asked to end.
                    self.fail(Some(index), format!("host {}: {words}", self.name(index)), status);
                }
            }
            Event::News(_, News::Alive) | Event::Greeted(..) => {}
            Event::Garbled(index, error) => {
                let words = format!("host {} says nonsense: {error}", self.name(index));
                self.fail(Some(index), words, 1);
                self.connections[index].cut();
            }
            Event::Ended(index, end) => self.handle_end(index, end),
            Event::Unwritten(error) => {
                // A reader that has seen enough: the shell's status for it is SIGPIPE's.
                let status = if error.kind() == ErrorKind::BrokenPipe { 141 } else { 1 };
                self.fail(None, format!("cannot write to standard output: {error}"), status);
            }
            Event::Signal(signal) => self.handle_signal(signal),
        }
    }

    /// ssh has ended. That is well if its host had said that all is over.
    fn handle_end(&mut self, index: usize, end: End) {
        self.connections[index].reap();
        self.hosts[index].gone = true;
        if self.hosts[index].over.is_none() {
            let name = self.name(index);
            let tail = said(&self.connections[index].tail());
            let words = format!(
                "host {name} is lost: the connection to it {end}{tail}; what it ran is ended there"
            );
            self.fail(Some(index), words, 1);
        }
    }

    fn handle_signal(&mut self, signal: Signal) {
        let name = SignalName(signal.as_raw());
        if signal == Signal::INT && (self.interrupted.is_some() || self.phase == Phase::Ending) {
            tracing::warn!("got {name}, killing all processes");
            self.killing = true;
            self.since = Instant::now();
        } else {
            tracing::info!(
                "got {name}, passed on to all hosts; another Ctrl-C kills the processes"
            );
        }
        if self.failure.is_none() {
            self.interrupted.get_or_insert(signal);
        }
        self.tell_all(|| Order::Signal(signal.as_raw()));
    }

    /// Ends the job, if this is the first thing that goes wrong and nobody has asked for the end.
    fn fail(&mut self, host: Option<usize>, words: String, status: u8) {
        if self.phase != Phase::Running || self.interrupted.is_some() {
            return;
        }
        let others = self.hosts.iter().filter(|host| !host.gone).count();
        tracing::error!("{}; ending what runs on {others} hosts", printable_lines(&words));
        self.failure = Some(Failure { host, words, status });
        self.enter(Phase::Ending);
        self.tell_all(|| Order::End);
    }

    fn handle_time(&mut self) {
        if self.deadline().is_none_or(|deadline| Instant::now() < deadline) {
            return;
        }
        match self.phase {
            Phase::Running | Phase::Ending => {
                for index in 0..self.hosts.len() {
                    if !self.hosts[index].gone {
                        tracing::warn!(
                            "host {} has not ended in time: it is left",
                            self.name(index)
                        );
                        self.connections[index].cut();
                    }
                }
                self.enter(Phase::Cut);
            }
            // The kernel does not let go of ssh.
            Phase::Cut => self.hosts.iter_mut().for_each(|host| host.gone = true),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Running if self.killing => Some(self.since + ENDING),
            Phase::Running => None,
            Phase::Ending => Some(self.since + ENDING),
            Phase::Cut => Some(self.since + CUT),
        }
    }

    fn look_for_silence(&mut self) {
        for index in 0..self.hosts.len() {
            let silent = self.connections[index].silent_for();
            if !self.hosts[index].gone && self.hosts[index].over.is_none() && silent > SILENCE {
                let words = format!(
                    "host {} is lost: it has said nothing for {} s",
                    self.name(index),
                    silent.as_secs()
                );
                self.fail(Some(index), words, 1);
                self.connections[index].cut();
            }
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.since = Instant::now();
    }

    fn name(&self, index: usize) -> &str {
        &self.connections[index].host.name
    }

    fn tell_all(&self, order: impl Fn() -> Order) {
        self.connections.iter().for_each(|connection| connection.order(order()));
    }

    /// Says on standard error what went wrong, if something did. The exit status says it too.
    pub(super) fn tell(self) -> ExitCode {
        let over = |failure: &Failure| self.hosts[failure.host?].over.clone()?.1;
        let (words, status) = match (&self.failure, self.interrupted) {
            // The host's own report has the last lines on stderr, too.
            (Some(failure), _) => {
                (over(failure).unwrap_or_else(|| failure.words.clone()), failure.status)
            }
            (None, Some(signal)) => {
                let raw = signal.as_raw();
                (format!("stopped by {}", SignalName(raw)), End::Signal(raw).status())
            }
            (None, None) => return ExitCode::SUCCESS,
        };
        // Nobody is left to tell if stderr is closed.
        let _ = io::stderr().write_all(format!("error: {words}\n").as_bytes());
        status.into()
    }
}

/// Hosts give their processes 1.75 s when they are told to end them; the rest is the network's.
const ENDING: Duration = Duration::from_secs(5);
/// How long a killed ssh may take to end.
const CUT: Duration = Duration::from_secs(5);
