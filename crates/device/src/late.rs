//! A device made of host memory, for tests.
//!
//! Work waits in its stream until [`Late::step`] does some of it. Which stream goes on is left to
//! chance, so copies finish late, and those of different streams in any order; what a stream has is
//! done in its order, as on a real device. Addresses on the device are host addresses.

use crate::{Copy, Device, Event, Fault, Stream};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The device.
pub struct Late(Mutex<State>);

struct State {
    streams: BTreeMap<Stream, VecDeque<Work>>,
    /// By event: how often it was recorded, and which record has passed.
    events: Vec<(u64, u64)>,
    random: u64,
    /// What every call says from now on.
    fault: Option<Fault>,
    /// A fault that is still to come, and how many calls before it are answered.
    next_fault: Option<(usize, Fault)>,
    /// How much may be pinned; more is refused.
    pinnable: usize,
    is_capturing: bool,
    copies: usize,
}

enum Work {
    Compute(Box<dyn FnOnce() + Send>),
    Copy { copy: Copy, is_out: bool },
    Record { event: Event, number: u64 },
    Wait { event: Event, number: u64 },
}

impl Late {
    /// A device whose order of work follows from `seed`.
    pub fn new(seed: u64) -> Self {
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self(Mutex::new(State {
            streams: BTreeMap::new(),
            events: Vec::new(),
            random,
            fault: None,
            next_fault: None,
            pinnable: usize::MAX,
            is_capturing: false,
            copies: 0,
        }))
    }

    /// Puts something to compute into a stream of the program.
    pub fn compute(&self, stream: Stream, work: impl FnOnce() + Send + 'static) {
        self.state().push(stream, Work::Compute(Box::new(work)));
    }

    /// Does the next piece of work of a stream that can go on. False if no stream can.
    pub fn step(&self) -> bool {
        let mut state = self.state();
        let ready: Vec<_> = state
            .streams
            .iter()
            .filter(|(_, queue)| match queue.front() {
                Some(Work::Wait { event, number }) => state.events[event.0 as usize].1 >= *number,
                first => first.is_some(),
            })
            .map(|(stream, _)| *stream)
            .collect();
        if ready.is_empty() {
            return false;
        }
        let chosen = ready[state.chance(ready.len())];
        let queue = state.streams.get_mut(&chosen).expect("it was just there");
        match queue.pop_front().expect("a stream that can go on has work") {
            Work::Compute(work) => work(),
            Work::Copy { copy, is_out } => {
                for row in 0..copy.rows {
                    let device = (copy.device as usize + row * copy.device_pitch) as *mut u8;
                    // SAFETY: whoever ordered the copy promised that both ends are valid.
                    unsafe {
                        let host = copy.host.as_ptr().add(row * copy.host_pitch);
                        let (from, to) = if is_out { (device, host) } else { (host, device) };
                        std::ptr::copy_nonoverlapping(from, to, copy.width);
                    }
                }
                state.copies += 1;
            }
            Work::Record { event, number } => state.events[event.0 as usize].1 = number,
            Work::Wait { .. } => {}
        }
        true
    }

    /// Does everything that can be done.
    pub fn drain(&self) {
        while self.step() {}
    }

    /// Works beside the test until the device is dropped, a little at a time.
    pub fn work_beside(self: &Arc<Self>) {
        let device = Arc::downgrade(self);
        std::thread::spawn(move || {
            while let Some(device) = device.upgrade() {
                let pause = device.state().chance(4) as u64;
                device.step();
                drop(device);
                std::thread::sleep(Duration::from_micros(20 * pause));
            }
        });
    }

    /// How many copies are done.
    pub fn copies(&self) -> usize {
        self.state().copies
    }

    /// From now on the device answers everything with this fault.
    pub fn fail(&self, words: &str) {
        self.state().fault = Some(Fault(words.into()));
    }

    /// As [`fail`](Self::fail), after `calls` more calls.
    pub fn fail_after(&self, calls: usize, words: &str) {
        self.state().next_fault = Some((calls, Fault(words.into())));
    }

    /// From now on no more than `bytes` can be pinned at once.
    pub fn limit_pinning(&self, bytes: usize) {
        self.state().pinnable = bytes;
    }

    /// Whether streams of the program are being captured.
    pub fn capture(&self, is_capturing: bool) {
        self.state().is_capturing = is_capturing;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn working(&self) -> Result<MutexGuard<'_, State>, Fault> {
        let mut state = self.state();
        match &mut state.next_fault {
            Some((0, fault)) => state.fault = Some(fault.clone()),
            Some((calls, _)) => *calls -= 1,
            None => {}
        }
        match &state.fault {
            Some(fault) => Err(fault.clone()),
            None => Ok(state),
        }
    }
}

impl State {
    fn push(&mut self, stream: Stream, work: Work) {
        self.streams.entry(stream).or_default().push_back(work);
    }

    /// A number below `n`.
    fn chance(&mut self, n: usize) -> usize {
        // xorshift
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % n as u64) as usize
    }
}

// SAFETY: an event passes when the work before it in its queue has been done.
unsafe impl Device for Late {
    fn name(&self) -> String {
        "a device made of host memory".into()
    }

    fn create_event(&self) -> Result<Event, Fault> {
        let mut state = self.working()?;
        state.events.push((0, 0));
        Ok(Event(state.events.len() as u64 - 1))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), Fault> {
        let mut state = self.working()?;
        let (recorded, _) = &mut state.events[event.0 as usize];
        *recorded += 1;
        let number = *recorded;
        state.push(stream, Work::Record { event, number });
        Ok(())
    }

    fn make_wait(&self, stream: Stream, event: Event) -> Result<(), Fault> {
        let mut state = self.working()?;
        let (number, _) = state.events[event.0 as usize];
        state.push(stream, Work::Wait { event, number });
        Ok(())
    }

    fn has_passed(&self, event: Event) -> Result<bool, Fault> {
        let (recorded, passed) = self.working()?.events[event.0 as usize];
        Ok(passed == recorded)
    }

    fn is_capturing(&self, _: Stream) -> Result<bool, Fault> {
        Ok(self.working()?.is_capturing)
    }

    // SAFETY: as the trait says.
    unsafe fn copy_out(&self, copy: &Copy) -> Result<(), Fault> {
        self.working()?.push(Stream::Out, Work::Copy { copy: *copy, is_out: true });
        Ok(())
    }

    // SAFETY: as the trait says.
    unsafe fn copy_in(&self, copy: &Copy) -> Result<(), Fault> {
        self.working()?.push(Stream::In, Work::Copy { copy: *copy, is_out: false });
        Ok(())
    }

    // SAFETY: as the trait says.
    unsafe fn pin(&self, _: NonNull<u8>, bytes: usize) -> Result<(), Fault> {
        if bytes > self.working()?.pinnable {
            return Err(Fault("this much cannot be pinned".into()));
        }
        Ok(())
    }

    // SAFETY: as the trait says.
    unsafe fn unpin(&self, _: NonNull<u8>) -> Result<(), Fault> {
        Ok(())
    }
}

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Late")
    }
}
