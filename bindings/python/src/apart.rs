//! Workers that wait for each other in different calls.

use crate::errors::{TimeoutError, raise};
use poseidon::{Awaited, Error, LayerId, Session};
use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// Waits for a layer. `receive` asks over and over whether to stop waiting: if the user interrupts, or
/// if others wait for this worker elsewhere. Then it has nothing, and the reason is raised.
pub(crate) fn wait_for_layer<T: Send>(
    py: Python<'_>,
    session: &Session,
    layer: LayerId,
    receive: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<Option<T>, Error> + Send,
) -> PyResult<Option<T>> {
    let known = session.book().job.layers.get(layer.index());
    let wait = known.map_or_else(String::new, |layer| format!("layer '{}'", layer.name));
    let mut apart = Apart::new(session);
    let mut reason = None;
    let received = py.detach(|| {
        receive(&mut || {
            // Signals come to the thread that waits only if it asks for them.
            reason = Python::attach(|py| py.check_signals()).err();
            reason = reason.take().or_else(|| apart.look(&wait));
            reason.is_some()
        })
    });
    let received = received.map_err(|error| raise(py, error))?;
    reason.map_or(Ok(received), Err)
}

/// Looks now and then, while this worker waits, whether others wait for it elsewhere: one worker has
/// made a call that all of them have to make, such as `optimizer.state_dict()`.
pub(crate) struct Apart<'a> {
    session: &'a Session,
    every: Duration,
    next: Instant,
    seen: Option<Awaited>,
}

impl<'a> Apart<'a> {
    pub(crate) fn new(session: &'a Session) -> Self {
        let every = session.timeout() / LOOKS;
        Self { session, every, next: Instant::now() + every, seen: None }
    }

    /// An error if the same others have waited for this worker at two looks in a row. `wait` says what
    /// this worker waits for.
    pub(crate) fn look(&mut self, wait: &str) -> Option<PyErr> {
        if Instant::now() < self.next {
            return None;
        }
        self.next = Instant::now() + self.every;
        let found = self.session.awaited();
        let Some(Awaited { call, workers }) = found.as_ref().filter(|_| found == self.seen) else {
            self.seen = found;
            return None;
        };
        let (me, who) = (self.session.rank(), workers.join(", "));
        Some(TimeoutError::new_err(format!(
            "worker {me} waits for {wait}, while {who} waits for it in '{call}': every worker has to make that call, \
             and worker {me} has not"
        )))
    }
}

/// How often a wait looks before its deadline. With the usual time-out of 300 s that is every 15 s, so
/// the second look is after half a minute: long enough for a worker that is only slow.
const LOOKS: u32 = 20;
