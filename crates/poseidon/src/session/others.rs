//! What the coordinator knows of the other nodes: in which call they wait, and whether one has
//! ended.

use crate::Session;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A call that all workers have to make. Some have made it, and this worker has not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The topic of a [`gather`](Session::gather), or the name of a session or a group.
    pub call: String,
    /// The workers that wait in it, by name.
    pub workers: Vec<String>,
}

impl Session {
    /// Asks the coordinator whether other workers wait for this one. A program that waits for a layer
    /// while others wait for the program in another call would wait until the time-out.
    pub fn awaited(&self) -> Option<Awaited> {
        let round = self.node.line.awaited(ANSWER)?;
        let workers = round.waiting.iter().map(|&node| self.node.line.name(node)).collect();
        Some(Awaited { call: round.name, workers })
    }

    /// The process is about to end, because of an error. Its connection to the coordinator stays open
    /// until then, so that others see when it has ended ([`await_end`](Session::await_end)).
    pub fn stay_until_exit(&self) {
        self.node.stays.store(true, Ordering::Relaxed);
    }

    /// Waits until the process of some other node has ended, at most `patience`. Whoever was stopped
    /// by another node's error calls it before it ends itself: launchers blame the process that ends
    /// first.
    pub fn await_end(&self, patience: Duration) -> bool {
        let line = &self.node.line;
        let deadline = Instant::now() + patience;
        while line.lost().is_none() && line.is_connected() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(GLANCE);
        }
        true
    }
}

/// How long the coordinator may take to answer. It answers at once, unless it is about to end.
const ANSWER: Duration = Duration::from_secs(5);
/// How often a wait looks whether another node has ended.
const GLANCE: Duration = Duration::from_millis(20);
