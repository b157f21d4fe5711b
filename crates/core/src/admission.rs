//! How much of its own a node has on the way round.
//!
//! A node that sends all it has at once gets ahead of its neighbours, and then has nothing to send while they
//! catch up: nothing couples the queues of their ports. So a lane begins the next chunk when the result of
//! an earlier one is back (ADR 0037). What others have begun and this node passes on is never held up.

use crate::port::Rate;
use crate::{Cluster, NodeId, Queue, Tree};
use std::time::Duration;

/// Chunks that begin at one lane of a node: those that wait for their turn, and how many bytes of the others
/// are not back.
#[derive(Debug)]
pub struct Admission<T> {
    /// Chunks begin while fewer bytes than this are under way: from `least` to [`MOST`] times as many.
    limit: usize,
    least: usize,
    /// What comes back in a second if no port is ever idle, in bytes.
    full_speed: f64,
    under_way: usize,
    /// Chunks that may not begin yet, with their bytes.
    waiting: Queue<(usize, T)>,
    /// Since when chunks have been waiting, or the limit was changed.
    since: Option<Duration>,
    /// How many bytes are back since then, and when the last of them, or the change, was noticed.
    back: usize,
    noticed: (usize, Duration),
    /// Whether all that waits begins, because nothing has come back for too long.
    lifted: bool,
}

impl<T> Admission<T> {
    /// For a lane of `me`.
    pub fn new(cluster: &Cluster, me: NodeId) -> Self {
        let tree = Tree::new(cluster);
        let mut hosts: Vec<u16> = cluster.node_ids().map(|node| tree.host(node)).collect();
        let here = hosts.iter().filter(|host| **host == tree.host(me)).count();
        hosts.sort_unstable();
        hosts.dedup();
        // What passes all ports is as fast as the slowest one.
        let Some(rate) = cluster.ports().iter().map(|port| port.rate).min() else {
            // Nobody knows how much a way of unknown speed holds.
            return Self::with(usize::MAX, 0.0);
        };
        let bytes = Rate::bits(rate) as f64 / 8.0;
        // Lanes, and nodes of a host, share its port.
        let sharing = here.max(1) * usize::from(cluster.lanes());
        let least = (bytes * OF_A_PORT.as_secs_f64()) as usize;
        // A port takes a chunk, and its result, of every host that these pass.
        let passing = if cluster.is_ring() { 2 * (hosts.len() - 1) } else { 2 };
        Self::with(least.max(LEAST_OF_A_PORT) / sharing, bytes / (passing * sharing) as f64)
    }

    fn with(least: usize, full_speed: f64) -> Self {
        let (limit, under_way, waiting) = (least.max(1), 0, Queue::default());
        let (since, back, noticed, lifted) = (None, 0, (0, Duration::ZERO), false);
        Self { limit, least: limit, full_speed, under_way, waiting, since, back, noticed, lifted }
    }

    /// A chunk of so many `bytes` may begin here. The most urgent ones begin first.
    pub fn handle_ready(&mut self, urgency: u64, bytes: usize, chunk: T) {
        self.waiting.push(urgency, (bytes, chunk));
    }

    /// The result of a chunk of so many `bytes` is back, which has begun here.
    pub fn handle_back(&mut self, bytes: usize) {
        self.under_way = self.under_way.saturating_sub(bytes);
        self.back += bytes;
    }

    /// The chunk that begins now.
    pub fn poll_begin(&mut self, now: Duration) -> Option<T> {
        self.adjust(now);
        if self.is_full() {
            return None;
        }
        let (bytes, chunk) = self.waiting.pop()?;
        self.under_way += bytes;
        Some(chunk)
    }

    /// When to ask again, even if nothing has come back until then.
    pub fn wake(&self) -> Option<Duration> {
        let holds = self.since.is_some() && !self.waiting.is_empty() && self.is_full();
        holds.then(|| self.noticed.1 + self.patience())
    }

    /// Whether no chunk waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn is_full(&self) -> bool {
        !self.lifted && self.under_way >= self.limit
    }

    /// So long nothing comes back before all begins that waits: somebody has not sent what these chunks are
    /// added to, and may wait for others of this node.
    fn patience(&self) -> Duration {
        let twice = 2.0 * self.limit as f64 / self.full_speed;
        Duration::from_secs_f64(twice.clamp(PATIENCE[0], PATIENCE[1]))
    }

    /// A limit that keeps the port idle is raised: the way round is longer than it seemed, or threads of other
    /// nodes do not get their turn. One that keeps it full is lowered.
    fn adjust(&mut self, now: Duration) {
        if self.waiting.is_empty() {
            (self.since, self.back, self.lifted) = (None, 0, false);
            return;
        }
        let since = *self.since.get_or_insert_with(|| {
            self.noticed = (self.back, now);
            now
        });
        if self.noticed.0 != self.back {
            self.noticed = (self.back, now);
        }
        if self.back >= self.limit {
            let possible = self.full_speed * now.saturating_sub(since).as_secs_f64();
            let used = self.back as f64 / possible;
            if used < IDLE {
                self.limit = (self.limit / 4 * 5).min(MOST * self.least);
            } else if used > FULL {
                self.limit = (self.limit / 5 * 4).max(self.least);
            }
            (self.since, self.back, self.noticed) = (Some(now), 0, (0, now));
        } else if self.is_full() && now.saturating_sub(self.noticed.1) >= self.patience() {
            self.lifted = true;
        }
    }
}

/// At 10 Gbit/s, 2, 4 and 8 nodes use 98% to 99.6% of their ports for 100 MB with 1 MB for each port, and used
/// 94% to 96% without a limit (`bench/runs/2026-11-19-admission`).
const LEAST_OF_A_PORT: usize = 1 << 20;
/// The same at faster ports, in time.
const OF_A_PORT: Duration = Duration::from_micros(800);
/// The limit may be so many times the least.
const MOST: usize = 16;
/// A port that carries less than this part of its rate is idle at times. Headers and what is sent for other
/// reasons are the rest.
const IDLE: f64 = 0.8;
/// One that carries more than this part of it is not.
const FULL: f64 = 0.9;
/// The least and the most of the patience, in seconds. A thread that shares its core may be away for some
/// milliseconds.
const PATIENCE: [f64; 2] = [0.02, 0.1];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Port, Servers};

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn begun(admission: &mut Admission<u32>, now: Duration) -> Vec<u32> {
        std::iter::from_fn(|| admission.poll_begin(now)).collect()
    }

    /// Chunks of 10 bytes, of which 20 bytes may be under way.
    fn of_twenty(full_speed: f64, chunks: u32) -> Admission<u32> {
        let mut admission = Admission::with(20, full_speed);
        (0..chunks).for_each(|chunk| admission.handle_ready(chunk.into(), 10, chunk));
        admission
    }

    #[test]
    fn a_chunk_begins_when_one_is_back_and_the_most_urgent_goes_first() {
        let mut admission = of_twenty(1e9, 3);
        assert_eq!(begun(&mut admission, ms(0)), [0, 1]);
        admission.handle_ready(1, 10, 9);
        assert!(begun(&mut admission, ms(1)).is_empty());
        admission.handle_back(10);
        assert_eq!(begun(&mut admission, ms(1)), [9]);
        admission.handle_back(20);
        assert_eq!(begun(&mut admission, ms(2)), [2]);
        assert!(admission.is_empty() && admission.wake().is_none());
    }

    #[test]
    fn one_chunk_may_always_be_under_way() {
        let mut admission = Admission::with(0, 1e9);
        admission.handle_ready(0, 1 << 20, 0);
        admission.handle_ready(0, 1 << 20, 1);
        assert_eq!(begun(&mut admission, ms(0)), [0]);
    }

    #[test]
    fn nobody_is_held_up_for_long_by_chunks_that_do_not_come_back() {
        let mut admission = of_twenty(1e9, 6);
        assert_eq!(begun(&mut admission, ms(5)), [0, 1]);
        assert!(begun(&mut admission, ms(6)).is_empty());
        // One is back, and then nothing any more.
        admission.handle_back(10);
        assert_eq!(begun(&mut admission, ms(7)), [2]);
        let wake = admission.wake().unwrap();
        assert_eq!(wake, ms(27));
        assert_eq!(begun(&mut admission, wake), [3, 4, 5]);
        // What comes later has to wait again, as if nothing had been.
        admission.handle_back(50);
        (6..10).for_each(|chunk| admission.handle_ready(0, 10, chunk));
        assert_eq!(begun(&mut admission, wake + ms(1)), [6, 7]);
    }

    #[test]
    fn a_slow_way_has_more_patience() {
        // 20 bytes take 40 ms.
        let mut admission = of_twenty(500.0, 6);
        assert_eq!(begun(&mut admission, ms(0)), [0, 1]);
        assert_eq!(admission.wake(), Some(ms(80)));
        let mut admission = of_twenty(0.001, 6);
        assert_eq!(begun(&mut admission, ms(0)), [0, 1]);
        assert_eq!(admission.wake(), Some(ms(100)));
    }

    #[test]
    fn nothing_waits_where_nobody_knows_what_ports_carry() {
        let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap();
        let mut admission = Admission::new(&cluster, NodeId(0));
        (0..9).for_each(|chunk| admission.handle_ready(0, 1 << 30, chunk));
        assert_eq!(begun(&mut admission, ms(0)).len(), 9);
    }

    /// Chunks come back one by one, each `late` after it began. Returns how many were under way at most.
    fn most_under_way(full_speed: f64, late: Duration) -> usize {
        let mut admission = of_twenty(full_speed, 1000);
        let mut now = ms(1);
        let mut under_way: Vec<Duration> = Vec::new();
        let mut most = 0;
        loop {
            while admission.poll_begin(now).is_some() {
                under_way.push(now + late);
            }
            most = most.max(under_way.len());
            if under_way.is_empty() {
                return most;
            }
            now = under_way.remove(0).max(now);
            admission.handle_back(10);
        }
    }

    #[test]
    fn the_limit_is_raised_while_it_keeps_the_port_idle() {
        // Two chunks of 10 bytes in 10 ms are 2,000 bytes a second.
        assert_eq!(most_under_way(2_000.0, ms(10)), 2);
        // Eight of them fill a port of 8,000.
        let most = most_under_way(8_000.0, ms(10));
        assert!((6..=9).contains(&most), "{most} chunks");
        // Where nothing helps, there is an end.
        assert_eq!(most_under_way(1e9, ms(10)), 2 * MOST);
    }

    #[test]
    fn lanes_and_nodes_of_a_host_share_what_its_port_may_have() {
        let rate = |gbit: u64| Rate::new(gbit * 1_000_000_000).unwrap();
        let least = |hosts: &[u16], lanes, gbit| {
            let nodes = hosts.len() as u16;
            let cluster = Cluster::new(nodes, Servers::Colocated, lanes).unwrap();
            let port = |host: &u16| Port { number: *host, rate: rate(gbit) };
            let cluster = cluster.with_hosts(hosts.to_vec(), Vec::new()).unwrap();
            let cluster = cluster.with_ports(hosts.iter().map(port).collect()).unwrap();
            Admission::<()>::new(&cluster, NodeId(0)).least
        };
        assert_eq!(least(&[0, 1, 2], 1, 1), 1 << 20);
        assert_eq!(least(&[0, 1, 2], 2, 10), 1 << 19);
        assert_eq!(least(&[0, 0, 1, 2], 2, 10), 1 << 18);
        assert_eq!(least(&[0, 1], 1, 40), 4_000_000);
    }
}
