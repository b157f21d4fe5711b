//! What a switch with slow, long and unreliable links does with frames, without sockets and clocks.
//!
//! A frame that comes in is lost, or damaged, or takes its place behind the frames that wait for the
//! same node. The link to that node sends one frame after the other at its rate, and each arrives a
//! delay later. A frame that finds no room in the port's queue is dropped. All of it is decided when
//! the frame comes in, so a frame that is accepted has the time of its arrival with it.
//!
//! Chance has a generator for every node that sends: which of a node's frames are lost depends on
//! the seed and on how many that node has sent, and not on what others do meanwhile.

use crate::bandwidth::Bandwidth;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use std::collections::VecDeque;
use std::str::FromStr;
use std::time::Duration;

/// What the links between nodes are like.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    /// From the switch to every node.
    pub(super) rate: Bandwidth,
    /// From one node to another.
    pub(super) delay: Duration,
    /// Bytes that wait for one node at most, the frame that is being sent included.
    pub(super) queue: u32,
    pub(super) faults: Faults,
}

/// What goes wrong by chance on the way from one node to another.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Faults {
    /// Frames that are lost.
    pub(crate) loss: Probability,
    /// Frames that skip the delay, and so pass those before them.
    pub(crate) reorder: Probability,
    /// Frames of which one bit is turned over.
    pub(crate) corrupt: Probability,
    /// Of the generators: the same seed makes the same choices.
    pub(crate) seed: u64,
}

impl Faults {
    /// Whether anything can go wrong.
    pub(crate) fn any(&self) -> bool {
        [self.loss, self.reorder, self.corrupt].iter().any(|chance| chance.0 > 0.0)
    }
}

/// From 0 to 1, written as a percentage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Probability(f64);

impl FromStr for Probability {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent = text.strip_suffix('%').and_then(|number| number.parse::<f64>().ok());
        match percent {
            Some(percent) if (0.0..=100.0).contains(&percent) => Ok(Self(percent / 100.0)),
            _ => Err(format!("expected a percentage from 0% to 100% such as 0.1%, got '{text}'")),
        }
    }
}

/// The switch. Times are since it was started.
#[derive(Debug)]
pub(super) struct Switch {
    links: Links,
    ports: Vec<Port>,
    counts: Counts,
}

/// What has become of the frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Sent on to a node.
    pub(super) forwarded: u64,
    /// Lost by chance.
    pub(super) lost: u64,
    /// Dropped because the queue was full.
    pub(super) overflowed: u64,
    /// Damaged by chance, and still sent on.
    pub(super) corrupted: u64,
    /// Sent on later than [`LATE`] after their time, because the machine was busy.
    pub(super) late: u64,
}

/// One node's place at the switch.
#[derive(Debug)]
struct Port {
    /// Decides about frames that come from this node.
    chance: ChaCha8Rng,
    /// When the link to this node has sent all that was accepted for it.
    free_at: Duration,
    /// Accepted frames in the order of their arrival.
    under_way: VecDeque<(Duration, Vec<u8>)>,
    /// Bytes that have arrived at the node.
    delivered: u64,
}

/// Where a frame goes.
#[derive(Debug, PartialEq, Eq)]
enum Destination {
    Node(u16),
    /// Everybody but the sender, as questions for addresses do.
    All,
    /// An address that no node has: the frame was damaged.
    Nobody,
}

impl Switch {
    pub(super) fn new(nodes: u16, links: Links) -> Self {
        let port = |node| {
            let mut chance = ChaCha8Rng::seed_from_u64(links.faults.seed);
            chance.set_stream(u64::from(node));
            Port { chance, free_at: Duration::ZERO, under_way: VecDeque::new(), delivered: 0 }
        };
        Self { links, ports: (0..nodes).map(port).collect(), counts: Counts::default() }
    }

    /// Takes a frame that `from` has sent.
    pub(super) fn handle_frame(&mut self, now: Duration, from: u16, mut frame: Vec<u8>) {
        let Faults { loss, reorder, corrupt, .. } = self.links.faults;
        let destination = destination(&frame);
        let chance = &mut self.ports[usize::from(from)].chance;
        if chance.random_bool(loss.0) {
            self.counts.lost += 1;
            return;
        }
        let overtakes = chance.random_bool(reorder.0);
        if chance.random_bool(corrupt.0) && !frame.is_empty() {
            let bit = chance.random_range(0..8 * frame.len());
            frame[bit / 8] ^= 1 << (bit % 8);
            self.counts.corrupted += 1;
        }
        match destination {
            Destination::Node(to) if usize::from(to) < self.ports.len() => {
                self.accept(now, to, frame, overtakes);
            }
            Destination::All => {
                for to in (0..self.ports.len() as u16).filter(|to| *to != from) {
                    self.accept(now, to, frame.clone(), overtakes);
                }
            }
            Destination::Node(_) | Destination::Nobody => {}
        }
    }

    /// The next frame that has arrived at `node` by now.
    pub(super) fn poll_frame(&mut self, now: Duration, node: u16) -> Option<Vec<u8>> {
        let port = &mut self.ports[usize::from(node)];
        let (due, frame) = port.under_way.pop_front_if(|(due, _)| *due <= now)?;
        port.delivered += frame.len() as u64;
        self.counts.forwarded += 1;
        self.counts.late += u64::from(now - due > LATE);
        Some(frame)
    }

    /// When the next frame arrives at any node.
    pub(super) fn poll_timeout(&self) -> Option<Duration> {
        self.ports.iter().filter_map(|port| port.under_way.front()).map(|(due, _)| *due).min()
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes that have arrived at every node.
    pub(super) fn delivered(&self) -> Vec<u64> {
        self.ports.iter().map(|port| port.delivered).collect()
    }

    /// Sends a frame over the link to `to`, if the queue has room for it.
    fn accept(&mut self, now: Duration, to: u16, frame: Vec<u8>, overtakes: bool) {
        let Links { rate, delay, queue, .. } = self.links;
        let port = &mut self.ports[usize::from(to)];
        let waiting = port.free_at.saturating_sub(now).as_secs_f64() * rate.bytes();
        if waiting + frame.len() as f64 > f64::from(queue) {
            self.counts.overflowed += 1;
            return;
        }
        let sending = Duration::from_secs_f64(frame.len() as f64 / rate.bytes());
        port.free_at = port.free_at.max(now) + sending;
        let due = if overtakes { port.free_at } else { port.free_at + delay };
        // Mostly at the end: only a frame that overtakes others looks for its place.
        let place = match port.under_way.back() {
            Some((last, _)) if *last > due => port.under_way.partition_point(|(d, _)| *d <= due),
            _ => port.under_way.len(),
        };
        port.under_way.insert(place, (due, frame));
    }
}

/// The hardware address of a node: one that is locally administered, and ends with the rank.
pub(super) fn hardware_address(node: u16) -> [u8; 6] {
    let [high, low] = node.to_be_bytes();
    let [a, b, c, d] = OURS;
    [a, b, c, d, high, low]
}

fn destination(frame: &[u8]) -> Destination {
    match frame {
        [first, ..] if first & GROUP != 0 => Destination::All,
        [a, b, c, d, high, low, ..] if [*a, *b, *c, *d] == OURS => {
            Destination::Node(u16::from_be_bytes([*high, *low]))
        }
        _ => Destination::Nobody,
    }
}

/// How the hardware address of every node begins.
const OURS: [u8; 4] = [0x02, 0x00, 0x0a, 0x4d];
/// In the first byte of a hardware address: it is that of many.
const GROUP: u8 = 1;
/// More than a busy machine takes to wake a thread, and a fifth of what a long link takes.
pub(super) const LATE: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests;
