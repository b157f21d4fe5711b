//! What a group's handle and its channels share. A group has a channel on each lane of its node.
//!
//! The first of these lanes is the group's *home*. Messages and small operations go over the home
//! lane alone: one thread has to be woken for them. A large operation is cut into parts, one for each
//! lane, because one thread cannot keep a fast port busy. The group ends as one: if a lane's channel
//! fails, those of the other lanes fail for the same reason.

use super::request::{Request, is_uneven};
use super::start_order::Start;
use super::work::Completion;
use crate::Error;
use crate::engine::driver::Driver;
use poseidon_core::wire::Signature;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// What the channel of one lane is told.
pub(super) enum Command {
    Begin(Part),
    Abort(String),
    Leave,
}

/// What one lane does of an operation.
pub(super) struct Part {
    pub(super) request: Request,
    /// The number among the group's collectives, and what the whole operation is. None if it is a
    /// message.
    pub(super) collective: Option<(u64, Signature)>,
    pub(super) timeout: Duration,
    pub(super) completion: Arc<Completion>,
}

/// What the channel of a lane has to do next.
pub(super) enum Taken {
    Command(Command),
    Nothing,
    /// The group has ended on another lane.
    Closed(Error),
}

pub(super) struct Shared {
    ranks: u16,
    state: Mutex<State>,
    /// For threads in `completed` and `wait_closed`.
    changed: Condvar,
    /// By lane, the home lane first. They own the channels, and through these what is here.
    drivers: OnceLock<Vec<Weak<Driver>>>,
}

struct State {
    /// By lane.
    commands: Vec<VecDeque<Command>>,
    /// Lanes whose channels are not closed.
    open: usize,
    /// Collectives begun so far.
    collectives: u64,
    /// Names of followed operations that are done.
    completed: VecDeque<u64>,
    /// Set when the first channel is closed: why nothing can be begun any more.
    closed: Option<Error>,
}

/// The home lane of every group.
pub(super) const HOME: usize = 0;

impl Shared {
    pub(super) fn new(ranks: u16, lanes: usize) -> Self {
        let state = State {
            commands: (0..lanes).map(|_| VecDeque::new()).collect(),
            open: lanes,
            collectives: 0,
            completed: VecDeque::new(),
            closed: None,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self { ranks, state, changed, drivers: OnceLock::new() }
    }

    /// What drives the lanes, the home lane first.
    pub(super) fn driven_by(&self, drivers: &[Arc<Driver>]) {
        let _ = self.drivers.set(drivers.iter().map(Arc::downgrade).collect());
    }

    /// Passes an operation to the channels, and returns how many of them have a part of it. One that
    /// cannot be begun any more fails at once.
    pub(super) fn begin(&self, start: Start) -> usize {
        let Start { request, timeout, completion } = start;
        let mut state = self.lock();
        if let Some(error) = state.closed.clone() {
            let name = completion.finish(Err(error));
            state.completed.extend(name);
            self.changed.notify_all();
            return 0;
        }
        let mut collective = request.is_collective().then(|| {
            state.collectives += 1;
            (state.collectives - 1, request.signature())
        });
        let parts = request.cut(state.commands.len(), self.ranks);
        let count = parts.len();
        // Where frames do not state the length of the whole, ranks could cut differently and not notice.
        if let Some((_, signature)) = &mut collective
            && count > 1
            && is_uneven(signature.operation)
        {
            signature.root = count as u16;
        }
        completion.expect_parts(count);
        for (commands, request) in state.commands.iter_mut().zip(parts) {
            let completion = completion.clone();
            let part = Part { request, collective, timeout, completion };
            commands.push_back(Command::Begin(part));
        }
        count
    }

    /// Stops the group. The home lane tells the others.
    pub(super) fn abort(&self, reason: String) {
        let mut state = self.lock();
        if state.closed.is_none() {
            state.commands[HOME].push_back(Command::Abort(reason));
        }
    }

    pub(super) fn leave(&self) {
        let mut state = self.lock();
        if state.closed.is_none() {
            state.commands.iter_mut().for_each(|commands| commands.push_back(Command::Leave));
        }
    }

    /// What `lane` has to do next.
    pub(super) fn take(&self, lane: usize) -> Taken {
        let mut state = self.lock();
        match (state.commands[lane].pop_front(), &state.closed) {
            (Some(command), _) => Taken::Command(command),
            (None, Some(error)) => Taken::Closed(error.clone()),
            (None, None) => Taken::Nothing,
        }
    }

    /// The name of a followed operation that is done. None when nothing more will come.
    pub(super) fn completed(&self) -> Option<u64> {
        let mut state = self.lock();
        while state.completed.is_empty() && state.open > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.completed.pop_front()
    }

    /// Waits until all channels are closed, and no longer than `patience`.
    pub(super) fn wait_closed(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        while state.open > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let woken = self.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Why nothing can be begun any more, if a channel is closed.
    pub(super) fn closed(&self) -> Option<Error> {
        self.lock().closed.clone()
    }

    /// A part of an operation is over on `lane`.
    pub(super) fn report(&self, lane: usize, completion: &Completion, outcome: Result<(), Error>) {
        if let Some(name) = completion.finish(outcome) {
            self.lock().completed.push_back(name);
            self.changed.notify_all();
        }
        // Whoever waits for the operation waits at the home lane.
        if lane != HOME
            && completion.is_done()
            && let Some(home) = self.driver(HOME)
        {
            home.announce();
        }
    }

    /// The channel of `lane` is closed, once, because of `error`. Operations that were asked for, and
    /// that the channels have not taken up, fail. So do the channels of other lanes.
    pub(super) fn close(&self, lane: usize, error: Error) {
        let mut state = self.lock();
        let error = state.closed.get_or_insert(error).clone();
        state.open -= 1;
        let State { commands, completed, .. } = &mut *state;
        for commands in commands {
            commands.retain(|command| match command {
                Command::Begin(part) => {
                    completed.extend(part.completion.finish(Err(error.clone())));
                    false
                }
                // A lane that has not left says goodbye.
                Command::Abort(_) | Command::Leave => true,
            });
        }
        let lanes = state.commands.len();
        drop(state);
        self.changed.notify_all();
        let others = (0..lanes).filter(|other| *other != lane);
        others.filter_map(|other| self.driver(other)).for_each(|driver| driver.tell());
    }

    fn driver(&self, lane: usize) -> Option<Arc<Driver>> {
        self.drivers.get()?.get(lane)?.upgrade()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
