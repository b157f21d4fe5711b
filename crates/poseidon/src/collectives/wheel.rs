//! Who moves a group's operations along.
//!
//! The engine needs a thread to drive it, and for a short operation the cheapest is the one that waits for it: no
//! other thread has to be woken. So the engine is a wheel that whoever waits may take. A thread of the
//! group's own takes it for operations that nobody waits for, and now and then to keep the links
//! alive.

use super::engine::{Engine, Next};
use super::request::Request;
use super::work::Progress;
use crate::Error;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

pub(super) struct Wheel {
    /// Held by the thread that drives.
    driven: Mutex<Driven>,
    /// What was begun and not yet taken up, in order.
    mailbox: Mutex<VecDeque<Command>>,
    /// Wakes the thread that drives.
    waker: mio::Waker,
    gate: Mutex<Gate>,
    /// For threads in `wait`.
    progressed: Condvar,
    /// For the group's own thread.
    summoned: Condvar,
    /// For threads in `completed`.
    reported: Condvar,
    /// For threads in `wait_stopped`.
    ended: Condvar,
    epoch: Instant,
    /// As many ranks on this host as cores, or more: let them run rather than spin.
    crowded: bool,
    /// The process whose links these are. One that is forked from it has the links too, but no thread of the
    /// group's, and locks as they happened to be.
    owner: u32,
}

struct Driven {
    engine: Engine,
    poll: mio::Poll,
    events: mio::Events,
    stopped: bool,
}

/// What threads tell each other. Never held while driving.
#[derive(Default)]
struct Gate {
    /// Threads that wait for the wheel, or for an operation.
    waiting: usize,
    /// The group's own thread has something to do.
    kicked: bool,
    stopped: bool,
    /// Followed operations that are done.
    completed: VecDeque<u64>,
}

pub(super) enum Command {
    Begin { request: Request, timeout: Duration, progress: Arc<Progress> },
    Abort(String),
    Leave,
}

const MAILBOX: mio::Token = mio::Token(usize::MAX);
/// How often the group's own thread looks after the links when nothing is under way.
const LOOK: Duration = Duration::from_millis(500);

impl Wheel {
    pub(super) fn new(mut engine: Engine, epoch: Instant, crowded: bool) -> Result<Self, Error> {
        let poll = mio::Poll::new().map_err(Error::io("opening an event queue"))?;
        let waker = mio::Waker::new(poll.registry(), MAILBOX);
        let waker = waker.map_err(Error::io("opening a mailbox"))?;
        for peer in engine.peers() {
            let token = mio::Token(peer.rank);
            let registered = peer.link.register(poll.registry(), token);
            registered.map_err(Error::io("watching a link"))?;
        }
        let events = mio::Events::with_capacity(256);
        Ok(Self {
            driven: Mutex::new(Driven { engine, poll, events, stopped: false }),
            mailbox: Mutex::default(),
            waker,
            gate: Mutex::default(),
            progressed: Condvar::new(),
            summoned: Condvar::new(),
            reported: Condvar::new(),
            ended: Condvar::new(),
            epoch,
            crowded,
            owner: std::process::id(),
        })
    }

    /// Whether this process may touch anything here.
    pub(super) fn check_owner(&self) -> Result<(), Error> {
        let owner = self.owner;
        if std::process::id() == owner { Ok(()) } else { Err(Error::Forked { owner }) }
    }

    /// Begins something: here and now if nobody is at the wheel. `watched`: somebody will wait for it;
    /// otherwise the group's own thread sees to it.
    pub(super) fn command(&self, command: Command, watched: bool) {
        lock(&self.mailbox).push_back(command);
        match self.try_take() {
            Some(mut driven) => {
                self.turn(&mut driven);
                self.let_go(driven, watched);
            }
            // If that fails, whoever drives finds the mail at its next turn.
            None => {
                let _ = self.waker.wake();
                if !watched {
                    self.kick();
                }
            }
        }
    }

    /// Waits until `progress` is done or the deadline has passed, and drives if nobody else does.
    pub(super) fn wait(&self, progress: &Progress, deadline: Option<Instant>) {
        let expired = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        while !progress.is_done() && !expired() {
            if let Some(mut driven) = self.try_take() {
                self.drive(&mut driven, deadline, |_| progress.is_done());
                self.let_go(driven, false);
                continue;
            }
            let mut gate = lock(&self.gate);
            gate.waiting += 1;
            // Whoever drives looks at `waiting` after it has let go: it sees this one, or this one sees that
            // the wheel is free.
            if !progress.is_done() && self.driven.try_lock().is_err_and(would_block) {
                let left = deadline.map_or(LOOK, |d| d.saturating_duration_since(Instant::now()));
                let woken = self.progressed.wait_timeout(gate, left.min(LOOK));
                gate = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
            gate.waiting -= 1;
        }
    }

    /// The group's own thread has something to do.
    pub(super) fn kick(&self) {
        let mut gate = lock(&self.gate);
        if !gate.kicked {
            gate.kicked = true;
            self.summoned.notify_one();
        }
    }

    /// The name of a followed operation that is done. None when nothing more will come.
    pub(super) fn completed(&self) -> Option<u64> {
        let mut gate = lock(&self.gate);
        while gate.completed.is_empty() && !gate.stopped {
            gate = self.reported.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
        gate.completed.pop_front()
    }

    /// Waits until the group has stopped, and no longer than `patience`.
    pub(super) fn wait_stopped(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut gate = lock(&self.gate);
        while !gate.stopped {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let woken = self.ended.wait_timeout(gate, left);
            gate = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The body of the group's own thread.
    pub(super) fn run(&self) {
        loop {
            let mut gate = lock(&self.gate);
            if !gate.kicked && !gate.stopped {
                let woken = self.summoned.wait_timeout(gate, LOOK);
                gate = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
            if gate.stopped {
                return;
            }
            gate.kicked = false;
            drop(gate);
            // Whoever is at the wheel looks after the links too.
            let Some(mut driven) = self.try_take() else { continue };
            self.look(&mut driven, Duration::ZERO);
            self.drive(&mut driven, None, Engine::is_idle);
            self.let_go(driven, true);
        }
    }

    /// Turns the wheel until `enough`, the deadline, or the end of the group. Turns it at least once.
    fn drive(
        &self,
        driven: &mut Driven,
        deadline: Option<Instant>,
        enough: impl Fn(&Engine) -> bool,
    ) {
        let until = deadline.map(|d| d.saturating_duration_since(self.epoch));
        while !driven.stopped {
            let next = self.turn(driven);
            let now = self.epoch.elapsed();
            if enough(&driven.engine) || until.is_some_and(|until| now >= until) {
                return;
            }
            let timeout = match next {
                Next::Again => {
                    if self.crowded {
                        std::thread::yield_now();
                    }
                    Duration::ZERO
                }
                Next::Sleep(wake) => {
                    until.map_or(wake, |until| until.min(wake)).saturating_sub(now)
                }
                Next::Stop => return,
            };
            self.look(driven, timeout);
        }
    }

    /// Takes up what was begun and does what can be done.
    fn turn(&self, driven: &mut Driven) -> Next {
        self.take_mail(driven);
        let next = driven.engine.turn(self.epoch.elapsed());
        driven.stopped |= next == Next::Stop;
        if std::mem::take(&mut driven.engine.progressed) {
            let mut gate = lock(&self.gate);
            for name in driven.engine.completed.drain(..) {
                gate.completed.push_back(name);
                self.reported.notify_one();
            }
            if gate.waiting > 0 {
                self.progressed.notify_all();
            }
        }
        next
    }

    /// Hears from the links, for at most `timeout`.
    fn look(&self, driven: &mut Driven, timeout: Duration) {
        match driven.poll.poll(&mut driven.events, Some(timeout)) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return,
            Err(e) => {
                let reason = format!("waiting for links: {e}");
                return driven.engine.abort(&reason, self.epoch.elapsed());
            }
        }
        for event in driven.events.iter().filter(|e| e.token() != MAILBOX) {
            if let Some(peer) = driven.engine.peer(event.token().0) {
                let closed = event.is_read_closed() || event.is_error();
                let writable = event.is_writable() || event.is_write_closed();
                peer.handle_ready(event.is_readable(), writable, closed);
            }
        }
    }

    fn take_mail(&self, driven: &mut Driven) {
        loop {
            // The lock is not held while the engine works: others may begin more.
            let Some(command) = lock(&self.mailbox).pop_front() else { return };
            let now = self.epoch.elapsed();
            match command {
                Command::Begin { request, timeout, progress } => {
                    driven.engine.begin(&request, timeout, progress, now);
                }
                Command::Abort(reason) => driven.engine.abort(&reason, now),
                Command::Leave => driven.engine.leave(now),
            }
        }
    }

    fn try_take(&self) -> Option<MutexGuard<'_, Driven>> {
        match self.driven.try_lock() {
            Ok(driven) => Some(driven),
            // A panic while driving is a bug; what it has left is better served than abandoned.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Leaves the wheel. Unless `settled`, what is under way is left to the group's own thread.
    fn let_go<'a>(&'a self, mut driven: MutexGuard<'a, Driven>, settled: bool) {
        loop {
            let orphaned = !settled && !driven.engine.is_idle();
            let stopped = driven.stopped;
            drop(driven);
            let mut gate = lock(&self.gate);
            if stopped && !gate.stopped {
                gate.stopped = true;
                self.reported.notify_all();
                self.ended.notify_all();
                self.summoned.notify_one();
            }
            if orphaned && !gate.kicked {
                gate.kicked = true;
                self.summoned.notify_one();
            }
            if gate.waiting > 0 {
                self.progressed.notify_all();
            }
            drop(gate);
            // Mail that came while this thread was on its way out: its sender saw the wheel taken.
            if lock(&self.mailbox).is_empty() {
                return;
            }
            let Some(again) = self.try_take() else { return };
            driven = again;
            self.turn(&mut driven);
        }
    }
}

fn would_block<T>(error: TryLockError<T>) -> bool {
    matches!(error, TryLockError::WouldBlock)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
