//! Virtual time, and what happens next in it.

use std::collections::VecDeque;

/// Picoseconds since the beginning: a byte takes 8 of them at a terabit per second, and 64 bits of
/// them are seven months.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Time(u64);

/// Something that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A worker has done what it was computing.
    Computed(u16),
    /// A worker's second processor has rebuilt a gradient.
    Rebuilt(u16),
    /// A worker's next piece is in its host's memory.
    CopiedOut(u16),
    /// A worker's next result is on its device.
    CopiedBack(u16),
    /// More chunks may begin at a node.
    Turn(u16),
    /// A node's port or memory is free for the segment that waits for it.
    Begin(u32),
    /// A node's segment is out.
    Sent(u32),
    /// The next segment for a node is in.
    Landed(u32),
    /// A segment has passed the link out of its rack.
    Crossed(u32),
    /// A segment's first byte is at its destination.
    Arrived(u32),
    /// A connection's receiver sees more of what has landed.
    Delivered(u32),
    /// A connection's timer is to be looked at.
    Timer(u32),
    /// A node falls silent.
    Failed(u16),
}

/// What is due, soonest first; at the same time, first come first served.
///
/// A radix heap: nothing is ever entered before now, so an event is kept by the highest bit in which
/// its time differs from now. Only the events of the lowest bucket that has any are looked at, and
/// they move down as now comes closer. Moving keeps their order, and events of one time are always
/// in one bucket, so that they come out as they were entered.
#[derive(Debug)]
pub(crate) struct Calendar {
    /// Due now.
    present: VecDeque<Event>,
    /// By the highest bit that differs.
    future: [Vec<(Time, Event)>; 64],
    /// Which of those have any.
    filled: u64,
    now: Time,
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

impl Default for Calendar {
    fn default() -> Self {
        Self {
            present: VecDeque::new(),
            future: std::array::from_fn(|_| Vec::new()),
            filled: 0,
            now: Time::default(),
            events: 0,
        }
    }
}

impl Calendar {
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    pub(crate) fn enter(&mut self, time: Time, event: Event) {
        debug_assert!(time >= self.now, "an event in the past");
        match (time.0 ^ self.now.0).checked_ilog2() {
            None => self.present.push_back(event),
            Some(bit) => {
                self.future[bit as usize].push((time, event));
                self.filled |= 1 << bit;
            }
        }
    }

    pub(crate) fn next(&mut self) -> Option<Event> {
        if self.present.is_empty() {
            self.advance();
        }
        let event = self.present.pop_front()?;
        self.events += 1;
        Some(event)
    }

    /// Goes on to when something is due, if anything is.
    fn advance(&mut self) {
        if self.filled == 0 {
            return;
        }
        let lowest = self.filled.trailing_zeros() as usize;
        self.filled &= !(1 << lowest);
        let mut soon = std::mem::take(&mut self.future[lowest]);
        self.now = soon.iter().map(|(time, _)| *time).min().unwrap_or(self.now);
        for (time, event) in soon.drain(..) {
            self.enter(time, event);
        }
        self.future[lowest] = soon; // for its memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    /// Beside a heap that orders by time and then by arrival.
    #[test]
    fn soonest_first_and_then_first_come_first_served() {
        let (mut calendar, mut heap) = (Calendar::default(), BinaryHeap::new());
        let mut random = 1u64;
        for entered in 0..20_000u32 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Near and far, and often at the same time as others.
            let time = calendar.now() + Time((random >> 40) >> (random >> 32 & 0x1f));
            calendar.enter(time, Event::Arrived(entered));
            heap.push(Reverse((time, entered)));
            if random >> 63 == 0 {
                continue;
            }
            for _ in 0..2 {
                let Some(Reverse((time, entered))) = heap.pop() else { break };
                assert_eq!(calendar.next(), Some(Event::Arrived(entered)));
                assert_eq!(calendar.now(), time);
            }
        }
        while let Some(Reverse((_, entered))) = heap.pop() {
            assert_eq!(calendar.next(), Some(Event::Arrived(entered)));
        }
        assert_eq!(calendar.next(), None);
        assert_eq!(calendar.events, 20_000);
    }
}
