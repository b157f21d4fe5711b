//! Waits that count only the time in which this process ran.

use poseidon_core::running_time::RunningTime;
use poseidon_link::ConnectError;
use std::convert::Infallible;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// What is left of a wait for other nodes. While this process is stopped, frozen or suspended,
/// nothing is taken from it.
#[derive(Debug)]
pub(crate) struct Patience {
    epoch: Instant,
    time: RunningTime,
    total: Duration,
}

impl Patience {
    /// The longest stretch.
    pub(crate) const LONGEST: Duration = RunningTime::USUAL;

    pub(crate) fn new(total: Duration) -> Self {
        Self { epoch: Instant::now(), time: RunningTime::default(), total }
    }

    /// How long to wait before this is asked again. Zero if nothing is left.
    pub(crate) fn stretch(&mut self) -> Duration {
        self.left().min(Self::LONGEST)
    }

    fn left(&mut self) -> Duration {
        self.time.handle_running(self.epoch.elapsed());
        self.total.saturating_sub(self.time.now())
    }

    /// There is no more than `left` from now on.
    pub(crate) fn shorten(&mut self, left: Duration) {
        self.time.handle_running(self.epoch.elapsed());
        self.total = self.total.min(self.time.now().saturating_add(left));
    }

    /// How long ago the wait began, with the time that did not count.
    pub(crate) fn elapsed(&self) -> Duration {
        self.epoch.elapsed()
    }
}

/// A [`Patience`] for calls that block for longer than a stretch, such as connecting. A thread beside
/// them sees whether this process runs.
pub(crate) struct WatchedPatience {
    patience: Arc<Mutex<Patience>>,
    /// When this is dropped, the thread ends.
    _watching: Sender<Infallible>,
}

impl WatchedPatience {
    pub(crate) fn start(total: Duration) -> io::Result<Self> {
        let patience = Arc::new(Mutex::new(Patience::new(total)));
        let (watching, ended) = channel::<Infallible>();
        let watched = patience.clone();
        thread::Builder::new().name("poseidon-time".into()).spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(Patience::LONGEST / 2) {
                lock(&watched).left();
            }
        })?;
        Ok(Self { patience, _watching: watching })
    }

    pub(crate) fn left(&self) -> Duration {
        lock(&self.patience).left()
    }

    /// When it ends, unless this process is away before that.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.left()
    }

    /// Has `call` connect before a deadline, and once more if this process was away for so long that
    /// the deadline passed meanwhile.
    pub(crate) fn connect<T>(
        &self,
        mut call: impl FnMut(Instant) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        loop {
            match call(self.deadline()) {
                Err(ConnectError::GaveUp { .. }) if !self.left().is_zero() => {}
                result => return result,
            }
        }
    }
}

fn lock(patience: &Mutex<Patience>) -> MutexGuard<'_, Patience> {
    patience.lock().unwrap_or_else(PoisonError::into_inner)
}
