//! Which thread drives an engine.
//!
//! An engine needs a thread that drives it. As long as the engine carries a session, this is the
//! engine's own thread, because gradients of other nodes may come at any time. Otherwise it is
//! cheapest if the thread that waits for an operation drives: no other thread has to be woken then,
//! on the way in or out. So the engine is behind a lock, and a thread that waits may take it. The
//! engine's own thread takes it for operations that nobody waits for, and twice a second to keep
//! the links alive.

use super::channel::Channel;
use super::sharing::{Place, Sharing};
use super::{Engine, Next};
use crate::Error;
use poseidon_core::NodeId;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

pub(crate) struct Driver {
    /// Held by the thread that drives.
    driven: Mutex<Driven>,
    /// What has been asked for and not yet taken up, in order.
    orders: Mutex<Vec<Order>>,
    /// Wakes the thread that drives.
    waker: mio::Waker,
    gate: Mutex<Gate>,
    /// For threads in `wait`.
    progressed: Condvar,
    /// For the engine's own thread.
    summoned: Condvar,
    /// For threads in `wait_stopped`.
    ended: Condvar,
    epoch: Instant,
    /// Several nodes share this host's cores: after writing, the thread lets the receivers run.
    yields: bool,
    /// The process that opened the links. A process that is forked from it has the links too, but
    /// not the engine's own thread, and has locks in whatever state they were.
    owner: u32,
    /// What this node is called in the error that its thread has panicked.
    name: String,
}

struct Driven {
    engine: Engine,
    poll: mio::Poll,
    events: mio::Events,
    stopped: bool,
}

/// What threads tell each other. Its lock is never held while a thread drives.
#[derive(Default)]
struct Gate {
    /// Threads in `wait` that do not drive.
    waiting: usize,
    /// The engine's own thread has been told that there is something to drive.
    kicked: bool,
    stopped: bool,
}

enum Order {
    Attach(Box<dyn Channel>),
    /// A channel has something to do.
    Look,
    Close,
}

const WAKER: mio::Token = mio::Token(usize::MAX);
/// How often the engine's own thread looks after the links when nothing is under way.
const LOOK: Duration = Duration::from_millis(500);

impl Driver {
    /// Starts the engine's own thread. `place` is where that thread stays. It may share a core with the
    /// same lane of other nodes on this host: what one of them sends, the next one to run receives,
    /// from the cache it was written to. Then, and if it `yields` anyway, the thread lets others run
    /// while a program waits.
    pub(crate) fn start(
        mut engine: Engine,
        epoch: Instant,
        name: String,
        place: Place,
        yields: bool,
    ) -> Result<Arc<Self>, Error> {
        let poll = mio::Poll::new().map_err(Error::io("opening an event queue"))?;
        let waker = mio::Waker::new(poll.registry(), WAKER);
        let waker = waker.map_err(Error::io("opening a mailbox"))?;
        for (node, link) in engine.links() {
            let registered = link.register(poll.registry(), mio::Token(node.index()));
            registered.map_err(Error::io("watching a link"))?;
        }
        let events = mio::Events::with_capacity(256);
        let driver = Arc::new(Self {
            driven: Mutex::new(Driven { engine, poll, events, stopped: false }),
            orders: Mutex::default(),
            waker,
            gate: Mutex::default(),
            progressed: Condvar::new(),
            summoned: Condvar::new(),
            ended: Condvar::new(),
            epoch,
            yields: yields || matches!(place, Place::Core(_)),
            owner: std::process::id(),
            name,
        });
        let own = driver.clone();
        let thread = std::thread::Builder::new().name("poseidon-lane".into());
        let body = move || {
            let _witness = Witness(&own);
            own.run(Sharing::new(&place, yields));
        };
        thread.spawn(body).map_err(Error::io("starting a lane"))?;
        Ok(driver)
    }

    /// Whether this process may touch anything here.
    pub(crate) fn check_owner(&self) -> Result<(), Error> {
        let owner = self.owner;
        if std::process::id() == owner { Ok(()) } else { Err(Error::Forked { owner }) }
    }

    /// Adds a channel to the engine.
    pub(crate) fn attach(&self, channel: Box<dyn Channel>) {
        lock(&self.orders).push(Order::Attach(channel));
        self.nudge(false);
    }

    /// Leaves: says goodbye on every link. The thread ends when the others have heard it.
    pub(crate) fn close(&self) {
        lock(&self.orders).push(Order::Close);
        self.nudge(false);
        self.kick();
    }

    /// A channel has been given something to do by a program that does not drive.
    pub(crate) fn wake(&self) {
        // If the wake-up fails, the thread that drives finds the command at its next turn.
        let _ = self.waker.wake();
    }

    /// A channel has been given something to do. If nobody drives, this thread takes one turn,
    /// which begins the work. `watched`: a thread will wait for the rest, and drive; otherwise the
    /// engine's own thread is told to.
    pub(crate) fn nudge(&self, watched: bool) {
        match self.try_take() {
            Some(mut driven) => {
                self.turn(&mut driven);
                self.let_go(driven, watched);
            }
            None if watched => self.ask_to_look(),
            None => self.tell(),
        }
    }

    /// As [`nudge`](Self::nudge), from a thread that does not drive: another thread takes the turn.
    pub(crate) fn tell(&self) {
        self.ask_to_look();
        self.kick();
    }

    fn ask_to_look(&self) {
        // The thread that drives may be about to let go of the lock. It looks at the orders once
        // more afterwards.
        lock(&self.orders).push(Order::Look);
        self.wake();
    }

    /// Something that threads in [`wait`](Self::wait) may wait for has happened on another lane.
    pub(crate) fn announce(&self) {
        self.wake();
        // A thread that is about to wait looks once more while it has the gate.
        if lock(&self.gate).waiting > 0 {
            self.progressed.notify_all();
        }
    }

    /// Waits until `is_done`, or until the deadline has passed. Drives the engine meanwhile if no
    /// other thread does.
    pub(crate) fn wait(&self, is_done: impl Fn() -> bool, deadline: Option<Instant>) {
        let expired = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        while !is_done() && !expired() {
            if let Some(mut driven) = self.try_take() {
                if driven.stopped {
                    return self.let_go(driven, true);
                }
                let mut sharing = Sharing::new(&Place::Anywhere, self.yields);
                self.drive(&mut driven, deadline, &mut sharing, |_| is_done());
                self.let_go(driven, false);
                continue;
            }
            let mut gate = lock(&self.gate);
            gate.waiting += 1;
            // A thread that drives looks at `waiting` after it has let go of the lock. So either it
            // sees this thread, or this thread sees that the lock is free.
            if !is_done() && self.driven.try_lock().is_err_and(would_block) {
                let left = deadline.map_or(LOOK, |d| d.saturating_duration_since(Instant::now()));
                let woken = self.progressed.wait_timeout(gate, left.min(LOOK));
                gate = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
            gate.waiting -= 1;
        }
    }

    /// Wakes the engine's own thread, to drive what no other thread may be waiting for.
    pub(crate) fn kick(&self) {
        let mut gate = lock(&self.gate);
        if !gate.kicked {
            gate.kicked = true;
            self.summoned.notify_one();
        }
    }

    /// Waits until the engine has stopped, and no longer than `patience`.
    pub(crate) fn wait_stopped(&self, patience: Duration) {
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

    /// The body of the engine's own thread.
    fn run(&self, mut sharing: Sharing) {
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
            // If another thread drives, that thread looks after the links.
            let Some(mut driven) = self.try_take() else { continue };
            self.look(&mut driven, Duration::ZERO);
            self.drive(&mut driven, None, &mut sharing, Engine::is_idle);
            self.let_go(driven, true);
        }
    }

    /// Drives until `enough`, the deadline, or the end. Takes at least one turn.
    fn drive(
        &self,
        driven: &mut Driven,
        deadline: Option<Instant>,
        sharing: &mut Sharing,
        enough: impl Fn(&Engine) -> bool,
    ) {
        let until = deadline.map(|d| d.saturating_duration_since(self.epoch));
        // Since when the engine has been driven without sleeping.
        let mut busy = None;
        while !driven.stopped {
            let (began, next) = self.turn(driven);
            let since = *busy.get_or_insert(began);
            let now = self.epoch.elapsed();
            let is_over = enough(&driven.engine) || until.is_some_and(|until| now >= until);
            let sleeps = matches!(next, Next::Sleep(wake) if wake > now);
            if is_over || sleeps {
                driven.engine.note_busy(since, now);
                busy = None;
            }
            if is_over {
                return;
            }
            let timeout = match next {
                Next::Again => {
                    // Let the receivers run, which read what was just written while it is in the
                    // cache. Not while the training program computes: it would take the core, and
                    // keep it. But once after a command, because a program that is about to wait
                    // must run to get there.
                    let commanded = driven.engine.take_commanded();
                    if commanded || driven.engine.is_awaited() {
                        sharing.let_run();
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

    /// Takes up what was asked for and does what can be done. Returns also when it began to.
    fn turn(&self, driven: &mut Driven) -> (Duration, Next) {
        // The lock is not held while the engine works: others may ask for more.
        let orders = std::mem::take(&mut *lock(&self.orders));
        for order in orders {
            match order {
                Order::Attach(channel) => driven.engine.attach(channel, self.epoch.elapsed()),
                Order::Look => {}
                Order::Close => driven.engine.close(self.epoch.elapsed()),
            }
        }
        let began = self.epoch.elapsed();
        let next = driven.engine.turn(began);
        driven.stopped |= next == Next::Stop;
        if driven.engine.take_progressed() {
            let gate = lock(&self.gate);
            if gate.waiting > 0 {
                self.progressed.notify_all();
            }
        }
        (began, next)
    }

    /// Hears from the links, for at most `timeout`.
    fn look(&self, driven: &mut Driven, timeout: Duration) {
        match driven.poll.poll(&mut driven.events, Some(timeout)) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return,
            Err(e) => {
                let why = Arc::new(e);
                return driven
                    .engine
                    .fail_all(&Error::Io { what: "waiting for links".into(), why });
            }
        }
        for event in driven.events.iter().filter(|e| e.token() != WAKER) {
            let node = NodeId(event.token().0 as u16);
            let closed = event.is_read_closed() || event.is_error();
            let writable = event.is_writable() || event.is_write_closed();
            driven.engine.handle_ready(node, event.is_readable(), writable, closed);
        }
    }

    fn try_take(&self) -> Option<MutexGuard<'_, Driven>> {
        match self.driven.try_lock() {
            Ok(driven) => Some(driven),
            // A panic while a thread drove is a bug. The engine it has left is better driven on
            // than abandoned.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Gives the lock back. Unless `settled`, the engine's own thread is told to drive on what is
    /// under way.
    fn let_go<'a>(&'a self, mut driven: MutexGuard<'a, Driven>, mut settled: bool) {
        loop {
            let orphaned = !settled && !driven.engine.is_idle();
            let stopped = driven.stopped;
            drop(driven);
            let mut gate = lock(&self.gate);
            if stopped && !gate.stopped {
                gate.stopped = true;
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
            // Orders may have come just before this thread gave the lock back. The threads that
            // gave them saw the lock taken, and did not drive.
            if lock(&self.orders).is_empty() {
                return;
            }
            let Some(again) = self.try_take() else { return };
            driven = again;
            self.turn(&mut driven);
            // These orders may be of others, for whom nobody drives.
            settled = false;
        }
    }
}

/// Closes all channels if the engine's own thread panics. Without it, programs would hear of the
/// panic only when a deadline passes.
struct Witness<'a>(&'a Driver);

impl Drop for Witness<'_> {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(mut driven) = self.0.try_take()
        {
            driven.engine.fail_all(&Error::Panicked { node: self.0.name.clone() });
            // A channel that comes later is refused: nobody would drive it.
            driven.engine.close(self.0.epoch.elapsed());
            driven.stopped = true;
            self.0.let_go(driven, true);
        }
    }
}

fn would_block<T>(error: TryLockError<T>) -> bool {
    matches!(error, TryLockError::WouldBlock)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
