//! A run in progress: its processes, the threads that listen to them, and when to signal whom.

use super::output::{self, Destination, Kept, Relay};
use super::{End, Finished, Options, Outcome, Process, Role, SignalName, Stream, SuperviseError};
use crate::{orphan, wants_colour};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{mem, thread};
use tracing::{debug, error, info, warn};

/// What the threads around a run tell it.
pub(super) enum Event {
    /// The child ended. It is not reaped yet.
    Ended(usize, End),
    /// One of the child's two output streams ended, and all of it has been relayed.
    Closed(usize),
    /// Somebody asks the run to end.
    Signal(Signal),
    /// The larger run has failed: end everything.
    End,
    /// All workers of the larger run have ended.
    Leave,
}

/// The processes of a run and how far it is. Belongs to the thread that started them.
pub(super) struct Run {
    options: Options,
    children: Vec<Supervised>,
    phase: Phase,
    /// When the phase began.
    since: Instant,
    failure: Option<usize>,
    interrupted: Option<Signal>,
    /// All workers have ended, and the larger run was told.
    told_of_end: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Workers work.
    Running,
    /// All workers have ended; the others may end by themselves.
    Leaving,
    /// Everybody has been asked to end.
    Terminating,
    /// Everybody has been killed.
    Killing,
}

struct Supervised {
    name: String,
    role: Role,
    process: Child,
    kept: Arc<Mutex<Kept>>,
    open_streams: usize,
    end: Option<End>,
    reaped: bool,
}

impl Run {
    pub(super) fn new(options: Options) -> Self {
        Self {
            options,
            children: Vec::new(),
            phase: Phase::Running,
            since: Instant::now(),
            failure: None,
            interrupted: None,
            told_of_end: false,
        }
    }

    /// Starts one more process. If that fails, dropping the run ends those before it.
    pub(super) fn start(
        &mut self,
        process: Process,
        events: &Sender<Event>,
    ) -> Result<(), SuperviseError> {
        let Process { name, label, mut command, role, draws } = process;
        let output = || if draws { Stdio::inherit() } else { Stdio::piped() };
        command.stdin(Stdio::null()).stdout(output()).stderr(output());
        command.process_group(0);
        orphan::end_with_launcher(&mut command);
        let mut process = command.spawn().map_err(|reason| SuperviseError::Start {
            name: name.clone(),
            program: command.get_program().to_string_lossy().into_owned(),
            started: self.children.len(),
            reason,
        })?;

        let index = self.children.len();
        let colour = self.options.first_colour + index;
        let sink = self.options.sink.clone();
        let pid = Pid::from_child(&process);
        let (stdout, stderr) = (process.stdout.take(), process.stderr.take());
        let kept = Arc::new(Mutex::new(Kept::default()));
        self.children.push(Supervised {
            name,
            role,
            process,
            kept: Arc::clone(&kept),
            open_streams: usize::from(stdout.is_some()) + usize::from(stderr.is_some()),
            end: None,
            reaped: false,
        });

        let prefix = |stream| {
            let wanted = match (&self.options.sink, stream) {
                (Some(sink), stream) => sink.wants_colour(stream),
                (None, Stream::Stdout) => wants_colour(&io::stdout()),
                (None, Stream::Stderr) => wants_colour(&io::stderr()),
            };
            output::prefix(&label, colour, wanted)
        };
        if let Some(stdout) = stdout {
            let to = match self.options.capture_stdout {
                true => Destination::Captured,
                false => Destination::Stdout,
            };
            let (prefix, kept, sink) = (prefix(Stream::Stdout), Arc::clone(&kept), sink.clone());
            relay(Relay { to, prefix, kept, sink }, stdout, index, events)?;
        }
        if let Some(stderr) = stderr {
            let (to, prefix) = (Destination::Stderr, prefix(Stream::Stderr));
            relay(Relay { to, prefix, kept, sink }, stderr, index, events)?;
        }
        let events = events.clone();
        spawn(move || {
            // The run is gone only after an error, which has ended the child as well.
            let _ = events.send(Event::Ended(index, wait_without_reaping(pid)));
        })
    }

    /// Returns when every process is over. The other end of `inbox` must stay open meanwhile.
    pub(super) fn watch(&mut self, inbox: &Receiver<Event>) {
        // There may be no worker at all.
        self.leave_if_workers_are_done();
        while !self.children.iter().all(|child| child.reaped) {
            let event = match self.deadline() {
                Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())).ok(),
                None => inbox.recv().ok(),
            };
            match event {
                Some(Event::Ended(index, end)) => self.handle_end(index, end),
                Some(Event::Closed(index)) => {
                    self.children[index].open_streams -= 1;
                    self.children[index].reap_if_over();
                }
                Some(Event::Signal(signal)) => self.handle_signal(signal),
                Some(Event::End) if matches!(self.phase, Phase::Running | Phase::Leaving) => {
                    self.enter(Phase::Terminating);
                }
                Some(Event::Leave) if self.phase == Phase::Running => self.enter(Phase::Leaving),
                Some(Event::End | Event::Leave) => {}
                None => self.handle_deadline(),
            }
        }
    }

    /// What there is to say about a run that is over.
    pub(super) fn into_outcome(self) -> Outcome {
        let finish = |child: Supervised| {
            let kept = mem::take(&mut *child.kept.lock().unwrap());
            Finished {
                name: child.name.clone(),
                end: child.end.unwrap_or(End::Unknown),
                stdout: kept.stdout,
                stderr_tail: kept.stderr_tail.into(),
                unwritten: kept.unwritten,
            }
        };
        Outcome {
            failure: self.failure,
            interrupted: self.interrupted,
            processes: self.children.into_iter().map(finish).collect(),
        }
    }

    fn handle_end(&mut self, index: usize, end: End) {
        let child = &mut self.children[index];
        child.end = Some(end);
        child.reap_if_over();
        debug!("{} {end}", child.name);
        let expected = end.is_success()
            || self.interrupted.is_some()
            || matches!(self.phase, Phase::Terminating | Phase::Killing);
        if let Some(signal) = self.interrupted
            && !end.is_success()
            && end.status() != End::Signal(signal.as_raw()).status()
        {
            warn!("{} {end}", self.children[index].name);
        }
        if expected {
            self.leave_if_workers_are_done();
            return;
        }
        self.failure = Some(index);
        let name = &self.children[index].name;
        if let Some(sink) = &self.options.sink {
            sink.failed(name, end);
            return self.enter(Phase::Terminating);
        }
        match self.children.iter().filter(|child| child.end.is_none()).count() {
            0 => error!("{name} {end}"),
            others => error!("{name} {end}; ending the other {others}"),
        }
        self.enter(Phase::Terminating);
    }

    fn handle_signal(&mut self, signal: Signal) {
        if self.phase == Phase::Killing {
            return;
        }
        let name = SignalName(signal.as_raw());
        let ending = self.interrupted.is_some() || self.phase == Phase::Terminating;
        // The larger run says it for all of its parts.
        let alone = self.options.sink.is_none();
        if signal == Signal::INT && ending {
            if alone {
                warn!("got {name}, killing all processes");
            }
            self.enter(Phase::Killing);
            return;
        }
        if alone {
            info!("got {name}, passed on to all processes; another Ctrl-C kills them");
        }
        if self.failure.is_none() {
            self.interrupted.get_or_insert(signal);
        }
        self.signal(signal);
    }

    fn handle_deadline(&mut self) {
        match self.phase {
            Phase::Running => {}
            Phase::Leaving => {
                for child in self.children.iter().filter(|child| !child.reaped) {
                    match child.end {
                        None => info!("{} is still there after the workers: ending it", child.name),
                        Some(_) => info!("{} left processes behind: ending them", child.name),
                    }
                }
                self.enter(Phase::Terminating);
            }
            Phase::Terminating => self.enter(Phase::Killing),
            Phase::Killing => {
                for child in &mut self.children {
                    child.abandon();
                }
            }
        }
    }

    fn leave_if_workers_are_done(&mut self) {
        let mut workers = self.children.iter().filter(|child| child.role == Role::Worker);
        if self.phase != Phase::Running || !workers.all(|child| child.end.is_some()) {
            return;
        }
        match &self.options.sink {
            None => self.enter(Phase::Leaving),
            Some(_) if self.told_of_end => {}
            Some(sink) => {
                self.told_of_end = true;
                sink.workers_ended();
            }
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.since = Instant::now();
        match phase {
            Phase::Running | Phase::Leaving => {}
            Phase::Terminating => self.signal(Signal::TERM),
            Phase::Killing => self.signal(Signal::KILL),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let patience = match self.phase {
            Phase::Running => return None,
            Phase::Leaving => LEAVE,
            Phase::Terminating => TERMINATE,
            Phase::Killing if self.children.iter().any(|child| child.end.is_none()) => KILL,
            Phase::Killing => DRAIN,
        };
        Some(self.since + patience)
    }

    fn signal(&self, signal: Signal) {
        self.children.iter().for_each(|child| child.signal(signal));
    }
}

impl Supervised {
    /// Signals the process and what it started, unless it is over.
    fn signal(&self, signal: Signal) {
        // A process that is not reaped keeps its id, so this cannot reach a stranger.
        if !self.reaped
            && let Err(e) = kill_process_group(Pid::from_child(&self.process), signal)
        {
            debug!("{} did not get {}: {e}", self.name, SignalName(signal.as_raw()));
        }
    }

    fn reap_if_over(&mut self) {
        if self.end.is_some() && self.open_streams == 0 {
            self.reap();
        }
    }

    /// Stops waiting for a process that was killed: for output that another process, which left
    /// the group, keeps open, or for an end that the kernel does not grant.
    fn abandon(&mut self) {
        match self.end {
            Some(_) => self.reap(),
            None => {
                warn!("{} did not end when it was killed", self.name);
                self.reaped = true;
            }
        }
    }

    fn reap(&mut self) {
        if !mem::replace(&mut self.reaped, true)
            && let Err(e) = self.process.wait()
        {
            debug!("{} was reaped by somebody else: {e}", self.name);
        }
    }
}

impl Drop for Supervised {
    /// Only a run that could not start all of its processes has any left here.
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        self.reap();
    }
}

fn relay(
    relay: Relay,
    from: impl Read + Send + 'static,
    index: usize,
    events: &Sender<Event>,
) -> Result<(), SuperviseError> {
    let events = events.clone();
    spawn(move || {
        relay.run(from);
        let _ = events.send(Event::Closed(index));
    })
}

fn spawn(body: impl FnOnce() + Send + 'static) -> Result<(), SuperviseError> {
    let spawned = thread::Builder::new().name("supervise".into()).spawn(body);
    spawned
        .map(drop)
        .map_err(|source| SuperviseError::Resource { what: "thread to watch a process", source })
}

/// Waits for the end of a child, whose process id stays taken.
pub(crate) fn wait_without_reaping(pid: Pid) -> End {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let status = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), options));
    let Ok(Some(status)) = status else {
        return End::Unknown;
    };
    match (status.exit_status(), status.terminating_signal()) {
        (Some(status), _) => End::Status(status),
        (None, Some(signal)) => End::Signal(signal),
        (None, None) => End::Unknown,
    }
}

/// How long servers may take to notice that all workers have left.
const LEAVE: Duration = Duration::from_secs(2);
/// How long processes may take to act on SIGTERM. With [`DRAIN`], a failed run is over in 2 s.
const TERMINATE: Duration = Duration::from_millis(1500);
/// How long to wait for output that outlives all processes of a killed run.
const DRAIN: Duration = Duration::from_millis(250);
/// How long a killed process may take to end: the kernel frees hundreds of GiB in seconds.
const KILL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::super::Sink;
    use super::*;
    use std::process::Command;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    /// Counts how often it hears that all workers have ended.
    #[derive(Debug, Default)]
    struct Counter(AtomicUsize);

    impl Sink for Counter {
        fn lines(&self, _: Stream, _: Vec<u8>) -> io::Result<()> {
            Ok(())
        }

        fn wants_colour(&self, _: Stream) -> bool {
            false
        }

        fn failed(&self, _: &str, _: End) {}

        fn workers_ended(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The server may be needed by workers elsewhere.
    #[test]
    fn a_server_of_a_larger_run_stays_until_it_is_told_to_leave() {
        let counter = Arc::new(Counter::default());
        let (events, inbox) = mpsc::channel();
        let mut run = Run::new(Options { sink: Some(counter.clone()), ..Options::default() });
        for role in [Role::Worker, Role::Worker, Role::Server] {
            let mut command = Command::new("sleep");
            command.arg(if role == Role::Server { "600" } else { "0" });
            let (name, label) = (String::new(), String::new());
            run.start(Process { name, label, command, role, draws: false }, &events).unwrap();
        }
        let mut ended = 0;
        while ended < 2 {
            match inbox.recv().unwrap() {
                Event::Ended(index, end) => {
                    assert_eq!(counter.0.load(Ordering::Relaxed), 0, "a worker is left");
                    run.handle_end(index, end);
                    ended += 1;
                }
                Event::Closed(index) => run.children[index].open_streams -= 1,
                _ => panic!("nobody has sent anything else"),
            }
        }
        assert_eq!(counter.0.load(Ordering::Relaxed), 1);
        assert_eq!((run.phase, run.deadline()), (Phase::Running, None), "nothing ends the server");
        events.send(Event::Leave).unwrap();
        run.children.iter_mut().for_each(Supervised::reap_if_over);
        run.watch(&inbox);
        assert_eq!(run.children[2].end, Some(End::Signal(Signal::TERM.as_raw())));
    }
}
