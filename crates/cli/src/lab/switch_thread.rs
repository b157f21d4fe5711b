//! The thread that carries frames between the nodes' taps as a [`Switch`] decides.

use super::namespace::Namespace;
use super::switch::{Counts, Links, Switch};
use super::tap::Tap;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::setpriority_process;
use rustix::thread::set_current_timer_slack;
use rustix::time::Timespec;
use std::io::{self, PipeReader, PipeWriter};
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A switch at work. It stops when this is dropped.
#[derive(Debug)]
pub(super) struct SwitchThread {
    /// The thread holds it while it handles what has come in.
    switch: Arc<Mutex<Switch>>,
    /// Taken when this is dropped: that wakes the thread and tells it to end.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl SwitchThread {
    /// Joins `nodes`: makes the interface `name` in each of them.
    pub(super) fn start(nodes: &[Namespace], name: &str, links: Links) -> io::Result<Self> {
        let taps = nodes.iter().map(|node| Tap::new(node, name)).collect::<io::Result<Vec<_>>>()?;
        let switch = Arc::new(Mutex::new(Switch::new(taps.len() as u16, links)));
        let (stopped, stop) = io::pipe()?;
        let of_thread = Arc::clone(&switch);
        let thread = thread::Builder::new()
            .name("switch".into())
            .spawn(move || carry(taps.into_iter().map(Some).collect(), &of_thread, &stopped))?;
        Ok(Self { switch, stop: Some(stop), thread: Some(thread) })
    }

    /// What has become of the frames so far.
    pub(super) fn counts(&self) -> Counts {
        lock(&self.switch).counts()
    }

    /// Bytes that have arrived at every node so far.
    pub(super) fn delivered(&self) -> Vec<u64> {
        lock(&self.switch).delivered()
    }
}

impl Drop for SwitchThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // If the thread has panicked, that has been told.
            let _ = thread.join();
        }
    }
}

/// Carries frames until the other end of `stopped` is gone. A tap is taken away from `taps` when its
/// interface is.
fn carry(mut taps: Vec<Option<Tap>>, switch: &Mutex<Switch>, stopped: &PipeReader) {
    go_first();
    let start = Instant::now();
    loop {
        let due = lock(switch).poll_timeout();
        let readable = wait(&taps, stopped, due.map(|due| due.saturating_sub(start.elapsed())));
        if readable.contains(&taps.len()) {
            return;
        }
        let mut switch = lock(switch);
        for &node in &readable {
            if take_frames(&taps[node], &mut switch, node as u16, start).is_err() {
                taps[node] = None;
            }
        }
        for (node, tap) in (0..).zip(&taps) {
            let now = start.elapsed();
            while let Some(frame) = switch.poll_frame(now, node) {
                // An interface that is down takes nothing, as behind a cable that is out.
                let _ = tap.as_ref().map(|tap| tap.write(&frame));
            }
        }
    }
}

/// A network does not get slower when its nodes compute. Where the system refuses, the switch competes
/// with the nodes, and counts the frames that come late.
fn go_first() {
    let _ = setpriority_process(Some(rustix::thread::gettid()), HIGHEST_PRIORITY);
    let _ = set_current_timer_slack(NonZeroU64::new(1));
}

/// Waits until something can be read, or for `timeout`. Returns the positions of the taps with
/// frames; one behind the last is that of `stopped`.
fn wait(taps: &[Option<Tap>], stopped: &PipeReader, timeout: Option<Duration>) -> Vec<usize> {
    let (mut fds, mut positions) = (Vec::new(), Vec::new());
    for (position, tap) in taps.iter().enumerate() {
        if let Some(tap) = tap {
            fds.push(PollFd::new(tap, PollFlags::IN));
            positions.push(position);
        }
    }
    fds.push(PollFd::new(stopped, PollFlags::IN));
    positions.push(taps.len());
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    if poll(&mut fds, timeout.as_ref()).is_err() {
        // A signal came. Whatever is there is found the next time.
        return Vec::new();
    }
    let with_events = fds.iter().zip(positions).filter(|(fd, _)| !fd.revents().is_empty());
    with_events.map(|(_, position)| position).collect()
}

/// Passes what a node has sent to the switch.
fn take_frames(
    tap: &Option<Tap>,
    switch: &mut Switch,
    node: u16,
    start: Instant,
) -> io::Result<()> {
    let Some(tap) = tap else { return Ok(()) };
    for _ in 0..MOST_AT_ONCE {
        match tap.read()? {
            Some(frame) => switch.handle_frame(start.elapsed(), node, frame),
            None => break,
        }
    }
    Ok(())
}

/// A panic while the lock was held left numbers behind, and no broken rule.
fn lock(switch: &Mutex<Switch>) -> MutexGuard<'_, Switch> {
    switch.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As `nice` counts.
const HIGHEST_PRIORITY: i32 = -20;
/// Frames that are read from one node before others have their turn: some 100 KB, so that a node
/// that sends much keeps nobody waiting for longer than a fraction of a millisecond.
const MOST_AT_ONCE: usize = 64;
