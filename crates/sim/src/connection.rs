//! One direction of a TCP connection between two nodes, on a network that drops.
//!
//! What is modelled is what costs time when packets are dropped:
//!
//! * A sender does not know of a drop. It learns of it when a segment that it sent later lands, and
//!   sends the dropped one again. If nothing lands, it waits for its timer, which is 200 ms at first
//!   and doubles with every wait in vain.
//! * What landed behind a dropped segment is kept until that one has come: nodes see segments in
//!   order.
//! * The congestion window bounds what is under way. It doubles with every round trip at first, and
//!   grows by half a packet a round trip after a loss. A loss takes three tenths of it, once a round
//!   trip, as CUBIC does; the timer takes all of it but a packet.
//!
//! What is left out: acknowledgements take no time and are never dropped, nothing is sent twice that
//! was not dropped, CUBIC's growth over many seconds, probes for a lost tail, and pauses after which
//! a window is forgotten.

use crate::calendar::Time;
use crate::multicast::{Cut, MulticastId};
use std::collections::{BTreeMap, VecDeque};

/// What the sender of a connection knows, and what its receiver has not passed on.
#[derive(Debug)]
pub(crate) struct Connection {
    /// What may be under way, in bytes, and up to where that doubles.
    window: f64,
    threshold: f64,
    /// Bytes sent and neither landed nor known to be dropped.
    under_way: u32,
    /// The number of the next new segment, and of the next one that the receiver passes on.
    next: u32,
    due: u32,
    /// Transmissions so far. Those from before `last_cut` are of the round trip of the last cut.
    transmissions: u64,
    last_cut: u64,
    /// Transmissions on their way to the port, and in its queue, in order.
    crossing: VecDeque<Flight>,
    queued: VecDeque<Flight>,
    /// Dropped, and the sender does not know.
    dropped: Vec<Flight>,
    /// By number: to be sent again.
    again: BTreeMap<u32, Flight>,
    /// By number: landed, and not passed on.
    landed: BTreeMap<u32, (MulticastId, Cut)>,
    /// Whether an entry of the calendar is there for the timer; since when nothing has landed; how
    /// often the timer has been waited for in vain.
    timed: bool,
    heard: Time,
    waits: u32,
}

/// A transmission of a segment.
#[derive(Clone, Copy, Debug)]
struct Flight {
    /// The segment's number.
    number: u32,
    /// The transmission's number.
    transmission: u64,
    multicast: MulticastId,
    cut: Cut,
}

/// What a timer says when it is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    /// There is nothing to wait for.
    Idle,
    /// Look again at this time.
    Until(Time),
    /// Segments have been waited for in vain and are sent again.
    Expired,
}

impl Connection {
    pub(crate) fn new() -> Self {
        Self {
            window: FIRST_WINDOW,
            threshold: f64::INFINITY,
            under_way: 0,
            next: 0,
            due: 0,
            transmissions: 0,
            last_cut: 0,
            crossing: VecDeque::new(),
            queued: VecDeque::new(),
            dropped: Vec::new(),
            again: BTreeMap::new(),
            landed: BTreeMap::new(),
            timed: false,
            heard: Time::default(),
            waits: 0,
        }
    }

    /// Whether `bytes` more may be under way. A segment alone always may.
    pub(crate) fn has_room(&self, bytes: u32) -> bool {
        self.under_way == 0 || f64::from(self.under_way + bytes) <= self.window
    }

    /// Whether a segment has to be sent again.
    pub(crate) fn is_repeating(&self) -> bool {
        !self.again.is_empty()
    }

    /// A new segment is sent.
    pub(crate) fn handle_sent(&mut self, multicast: MulticastId, cut: Cut) {
        let flight = Flight { number: self.next, transmission: 0, multicast, cut };
        self.next += 1;
        self.transmit(flight);
    }

    /// The segment that is sent again now, if there is one.
    pub(crate) fn poll_again(&mut self) -> Option<(MulticastId, Cut)> {
        let (_, first) = self.again.first_key_value()?;
        if !self.has_room(first.cut.bytes()) {
            return None;
        }
        let (_, flight) = self.again.pop_first()?;
        self.transmit(flight);
        Some((flight.multicast, flight.cut))
    }

    /// The first segment that crosses is in the port's queue.
    pub(crate) fn handle_queued(&mut self) {
        self.queued.extend(self.crossing.pop_front());
    }

    /// The first segment that crosses is dropped. Returns when the timer is to be looked at, if
    /// nobody does already.
    pub(crate) fn handle_dropped(&mut self, now: Time) -> Option<Time> {
        self.dropped.extend(self.crossing.pop_front());
        self.heard = self.heard.max(now);
        (!std::mem::replace(&mut self.timed, true)).then(|| self.heard + self.timeout())
    }

    /// The first segment of the queue has landed, and the sender knows.
    pub(crate) fn handle_landed(&mut self, now: Time) {
        let Some(flight) = self.queued.pop_front() else { return };
        self.under_way -= flight.cut.bytes();
        (self.heard, self.waits) = (now, 0);
        let bytes = f64::from(flight.cut.bytes());
        let slow_start = self.window < self.threshold;
        self.window += if slow_start { bytes } else { GROWTH * bytes / self.window };
        self.window = self.window.min(MOST_WINDOW);
        self.landed.insert(flight.number, (flight.multicast, flight.cut));
        let overtaken = |dropped: &mut Flight| dropped.transmission < flight.transmission;
        let noticed: Vec<_> = self.dropped.extract_if(.., overtaken).collect();
        if noticed.iter().any(|dropped| dropped.transmission >= self.last_cut) {
            self.window = (self.window * KEPT).max(LEAST_WINDOW);
            self.threshold = self.window;
            self.last_cut = self.transmissions;
        }
        self.repeat(noticed);
    }

    /// The next segment that the receiver passes on, if it has come.
    pub(crate) fn poll_delivered(&mut self) -> Option<(MulticastId, Cut)> {
        let segment = self.landed.remove(&self.due)?;
        self.due += 1;
        Some(segment)
    }

    /// The timer is looked at.
    pub(crate) fn handle_timer(&mut self, now: Time) -> Timer {
        if self.dropped.is_empty() {
            self.timed = false;
            return Timer::Idle;
        }
        let expiry = self.heard + self.timeout();
        if now < expiry {
            return Timer::Until(expiry);
        }
        self.timed = false;
        self.waits += 1;
        self.threshold = (self.window * KEPT).max(LEAST_WINDOW);
        self.window = LEAST_WINDOW;
        self.last_cut = self.transmissions;
        let dropped = std::mem::take(&mut self.dropped);
        self.repeat(dropped);
        Timer::Expired
    }

    fn timeout(&self) -> Time {
        let seconds = TIMEOUT * f64::from(1u32 << self.waits.min(16));
        Time::from_seconds(seconds.min(LONGEST_TIMEOUT))
    }

    fn transmit(&mut self, flight: Flight) {
        let transmission = self.transmissions;
        self.transmissions += 1;
        self.under_way += flight.cut.bytes();
        self.crossing.push_back(Flight { transmission, ..flight });
    }

    fn repeat(&mut self, dropped: Vec<Flight>) {
        for flight in dropped {
            self.under_way -= flight.cut.bytes();
            self.again.insert(flight.number, flight);
        }
    }
}

/// A packet's payload, and ten of them, which a connection begins with.
const PACKET: f64 = 1448.0;
const FIRST_WINDOW: f64 = 10.0 * PACKET;
const LEAST_WINDOW: f64 = PACKET;
/// A socket's buffers, beyond which a window that is not used does not grow.
const MOST_WINDOW: f64 = 1048576.0;
/// What a loss leaves of the window.
const KEPT: f64 = 0.7;
/// Bytes by which the window grows in a round trip.
const GROWTH: f64 = PACKET / 2.0;
/// Linux's least and longest, in seconds.
const TIMEOUT: f64 = 0.2;
const LONGEST_TIMEOUT: f64 = 120.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::multicast::{Frame, Left, Multicast, Multicasts};
    use crate::peers::Peers;
    use poseidon_core::wire::Kind;
    use poseidon_core::{ChunkKey, LayerId, NodeId};

    /// A connection with a window of 64 KiB, and the segments of a frame of `count` KiB.
    fn connection(count: u32) -> (Connection, Vec<(MulticastId, Cut)>) {
        let mut peers = Peers::none(2);
        peers.insert(1);
        let chunk = ChunkKey { layer: LayerId(0), index: 0 };
        let payload = (count << 10) - 40;
        let frame = Frame { kind: Kind::Push, chunk, clock: 1, payload, lent: false };
        let mut left = Some(Left::all(&frame));
        let id = Multicasts::default().insert(NodeId(0), Multicast { frame, parts: None, peers });
        let cuts = std::iter::from_fn(|| {
            let (cut, after) = left?.cut(1 << 10);
            left = after;
            Some((id, cut))
        });
        let connection = Connection { window: 65_536.0, ..Connection::new() };
        (connection, cuts.collect())
    }

    fn at(seconds: f64) -> Time {
        Time::from_seconds(seconds)
    }

    fn delivered(connection: &mut Connection) -> usize {
        std::iter::from_fn(|| connection.poll_delivered()).count()
    }

    /// The second of four is dropped. The third shows it, and waits for it to come again.
    #[test]
    fn what_lands_later_shows_a_drop_and_waits_for_it() {
        let (mut connection, segments) = connection(4);
        for (multicast, cut) in segments {
            connection.handle_sent(multicast, cut);
        }
        connection.handle_queued();
        assert_eq!(connection.handle_dropped(at(0.0)), Some(at(0.2)));
        connection.handle_queued();
        connection.handle_queued();
        connection.handle_landed(at(0.01));
        assert_eq!(delivered(&mut connection), 1);
        assert!(!connection.is_repeating());
        connection.handle_landed(at(0.02));
        assert!(connection.is_repeating());
        assert_eq!(delivered(&mut connection), 0);
        let (_, again) = connection.poll_again().unwrap();
        assert_eq!((again.bytes(), again.is_last()), (1024, false));
        // Later ones show nothing new, and take nothing more of the window.
        let window = connection.window;
        connection.handle_landed(at(0.03));
        assert!(!connection.is_repeating());
        assert!(connection.window >= window);
        connection.handle_queued();
        connection.handle_landed(at(0.04));
        assert_eq!(delivered(&mut connection), 3);
        assert_eq!(connection.under_way, 0);
        assert_eq!(connection.handle_timer(at(0.2)), Timer::Idle);
    }

    /// Nothing comes behind the last one, nor behind it when it is sent again.
    #[test]
    fn a_lost_tail_waits_for_the_timer_which_doubles() {
        let (mut connection, segments) = connection(1);
        connection.handle_sent(segments[0].0, segments[0].1);
        assert_eq!(connection.handle_dropped(at(1.0)), Some(at(1.2)));
        assert!(connection.poll_again().is_none());
        assert_eq!(connection.handle_timer(at(1.1)), Timer::Until(at(1.2)));
        assert_eq!(connection.handle_timer(at(1.2)), Timer::Expired);
        assert!(connection.poll_again().is_some());
        assert_eq!(connection.handle_dropped(at(1.2)), Some(at(1.6)));
        assert_eq!(connection.handle_timer(at(1.6)), Timer::Expired);
        assert!(connection.poll_again().is_some());
        connection.handle_queued();
        connection.handle_landed(at(1.7));
        assert_eq!((delivered(&mut connection), connection.waits), (1, 0));
    }

    /// Several drops of one round trip are one loss, and the timer leaves one packet.
    #[test]
    fn a_loss_takes_three_tenths_of_the_window_once() {
        let (mut connection, segments) = connection(8);
        let mut segments = segments.into_iter();
        let mut send = |connection: &mut Connection, count| {
            for (multicast, cut) in segments.by_ref().take(count) {
                connection.handle_sent(multicast, cut);
            }
        };
        send(&mut connection, 6);
        connection.handle_dropped(at(0.0));
        connection.handle_queued();
        connection.handle_dropped(at(0.0));
        connection.handle_queued();
        connection.handle_landed(at(0.01));
        let cut = (65_536.0 + 1024.0) * KEPT;
        assert_eq!(connection.window, cut);
        connection.handle_landed(at(0.01));
        assert!(connection.window > cut && connection.window < cut + GROWTH);
        // Two are crossing still, and are dropped: they were sent before the sender knew.
        connection.handle_dropped(at(0.02));
        connection.handle_dropped(at(0.02));
        send(&mut connection, 1);
        connection.handle_queued();
        connection.handle_landed(at(0.03));
        assert!(connection.window > cut);
        assert_eq!(connection.again.len(), 4);
        send(&mut connection, 1);
        connection.handle_dropped(at(0.04));
        assert_eq!(connection.handle_timer(at(0.24)), Timer::Expired);
        assert_eq!(connection.window, LEAST_WINDOW);
        assert!(connection.threshold > LEAST_WINDOW);
    }
}
