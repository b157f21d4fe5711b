//! Virtual time, and what happens next in it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Picoseconds since the beginning: a byte takes 8 of them at a terabit per second, and 64 bits of
/// them are seven months.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Time(u64);

/// Something that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A worker has done what it was computing.
    Computed(u16),
    /// A node's link is free for the segment that waits for it.
    Begin(u16),
    /// A node's segment is out.
    Sent(u16),
    /// The next segment for a node is in.
    Landed(u16),
    /// A segment has passed the link out of its rack.
    Crossed(u32),
    /// A segment's first byte is at its destination.
    Arrived(u32),
    /// A node falls silent.
    Failed(u16),
}

/// What is due, soonest first; at the same time, first come first served.
#[derive(Debug, Default)]
pub(crate) struct Calendar {
    due: BinaryHeap<Reverse<(Time, u64, Event)>>,
    now: Time,
    entered: u64,
    /// Events so far.
    pub(crate) events: u64,
}

impl Time {
    pub(crate) fn from_seconds(seconds: f64) -> Self {
        Self((seconds * 1e12).round() as u64)
    }

    pub(crate) fn seconds(self) -> f64 {
        self.0 as f64 / 1e12
    }

    pub(crate) fn since(self, earlier: Self) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 / 1e12
    }
}

impl std::ops::Add for Time {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Calendar {
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    pub(crate) fn enter(&mut self, time: Time, event: Event) {
        debug_assert!(time >= self.now, "an event in the past");
        self.entered += 1;
        self.due.push(Reverse((time, self.entered, event)));
    }

    pub(crate) fn next(&mut self) -> Option<Event> {
        let Reverse((time, _, event)) = self.due.pop()?;
        self.now = time;
        self.events += 1;
        Some(event)
    }
}
