//! The virtual network, and what a lane does with it: the order of frames, and whose turn it is.
//!
//! A segment occupies its sender's link for as long as its bytes take, reaches the other end one
//! latency later, and occupies the receiver's link as long again, in order of arrival: it passes
//! straight through where both are free, and waits where many send to one. What has been sent to a
//! peer and not landed is limited, as by a socket's buffers; peers that have room take turns.

use crate::calendar::{Calendar, Event, Time};
use crate::network::Duplex;
use crate::setup::Setup;
use poseidon_core::queue::{BATCH_BYTES, BATCH_FRAMES};
use poseidon_core::wire::{Header, Kind};
use poseidon_core::{ChunkKey, NodeId, Queue};
use std::collections::VecDeque;

/// A frame without its bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) chunk: ChunkKey,
    pub(crate) clock: u32,
    /// Bytes on the wire after the header.
    pub(crate) payload: u32,
    /// Whether it is read from memory that the sender's worker waits for.
    pub(crate) lent: bool,
}

/// What the fabric has done.
pub(crate) enum Done {
    /// Nothing that anybody waits for.
    Nothing,
    /// The sender's link has taken the whole frame.
    Sent(NodeId, Frame),
    /// The whole frame is at its destination.
    Landed { from: NodeId, to: NodeId, frame: Frame },
}

pub(crate) struct Fabric {
    ports: Vec<Port>,
    duplex: Duplex,
    latency: Time,
    /// Seconds per byte of a node's link.
    link: f64,
    host: crate::setup::Host,
    racks: Option<Racks>,
    /// Segments between two ports, where they may overtake each other.
    under_way: Vec<Segment>,
    vacant: Vec<u32>,
}

/// Links between racks.
struct Racks {
    nodes: usize,
    /// Seconds per byte.
    link: f64,
    /// By rack: when the link out of it and the link into it are free.
    free: Vec<[Time; 2]>,
}

/// One node's end.
struct Port {
    alive: bool,
    /// By peer.
    queues: Vec<Queue<Frame>>,
    /// By peer: bytes sent and not landed. Apart from the queues, because it is needed more often.
    unlanded: Vec<u32>,
    /// Frames that are sent in part, and the bytes that are left of them.
    begun: Vec<(u16, Frame, u32)>,
    /// Peers that have something waiting and room for it.
    ready: Ready,
    /// The peer whose turn it is, and what it has had of it.
    turn: usize,
    turn_bytes: usize,
    turn_frames: usize,
    sending: Option<Segment>,
    /// When the link is free: out and in, or both together.
    free: [Time; 2],
    /// On their way in, and when they will have landed.
    landing: VecDeque<(Time, Segment)>,
    bytes: [u64; 2],
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    from: u16,
    to: u16,
    bytes: u32,
    /// Whether the frame ends with it.
    last: bool,
    frame: Frame,
    /// When its last byte has left the sender.
    out: Time,
}

/// What a link takes of a frame before another peer has its turn.
const SEGMENT: u32 = 512 << 10;
/// Bytes under way to one peer: a socket's buffers on both ends.
const WINDOW: u32 = 1 << 20;

const OUT: usize = 0;
const IN: usize = 1;

impl Fabric {
    pub(crate) fn new(setup: &Setup) -> Self {
        let nodes = setup.cluster.nodes();
        let link = 1.0 / setup.network.rate();
        let port = |me: usize| Port {
            alive: true,
            queues: (0..nodes).map(|_| Queue::default()).collect(),
            unlanded: vec![0; nodes],
            begun: Vec::new(),
            ready: Ready::new(nodes),
            // Everybody starts with somebody else, as lanes do.
            turn: (me + 1) % nodes,
            turn_bytes: 0,
            turn_frames: 0,
            sending: None,
            free: [Time::default(); 2],
            landing: VecDeque::new(),
            bytes: [0; 2],
        };
        let racks = setup.network.racks.filter(|racks| racks.nodes_per_rack < nodes);
        Self {
            ports: (0..nodes).map(port).collect(),
            duplex: setup.network.duplex,
            latency: Time::from_seconds(setup.network.latency.as_secs_f64()),
            link,
            host: setup.host,
            racks: racks.map(|racks| Racks {
                nodes: racks.nodes_per_rack,
                link: link * racks.oversubscription / racks.nodes_per_rack as f64,
                free: vec![[Time::default(); 2]; nodes.div_ceil(racks.nodes_per_rack)],
            }),
            under_way: Vec::new(),
            vacant: Vec::new(),
        }
    }

    /// Queues a frame. Nothing moves before [`pump`](Self::pump).
    pub(crate) fn post(&mut self, from: NodeId, to: NodeId, frame: Frame) {
        let port = &mut self.ports[from.index()];
        let header = Header { chunk: frame.chunk, ..Header::bare(frame.kind, from, frame.payload) };
        port.queues[to.index()].push(&header, frame);
        if port.unlanded[to.index()] < WINDOW {
            port.ready.insert(to.index());
        }
    }

    /// Starts to send what `node` has, if its link is idle.
    pub(crate) fn pump(&mut self, node: NodeId, calendar: &mut Calendar) {
        let port = &mut self.ports[node.index()];
        if port.sending.is_some() || !port.alive {
            return;
        }
        let Some(mut segment) = port.next_segment(node.0) else { return };
        let now = calendar.now();
        let start = port.free[OUT].max(now);
        let cost = self.host.send * f64::from(segment.bytes) + self.host.frame;
        let wire = self.link * f64::from(segment.bytes);
        segment.out = start + Time::from_seconds(wire.max(cost));
        port.occupy(OUT, segment.out, self.duplex);
        port.sending = Some(segment);
        if start > now {
            calendar.enter(start, Event::Begin(node.0));
        } else {
            self.begin(segment, calendar);
        }
    }

    pub(crate) fn handle(&mut self, event: Event, calendar: &mut Calendar) -> Done {
        match event {
            Event::Begin(node) => {
                if let Some(segment) = self.ports[usize::from(node)].sending {
                    self.begin(segment, calendar);
                }
            }
            Event::Sent(node) => {
                let port = &mut self.ports[usize::from(node)];
                let Some(segment) = port.sending.take() else { return Done::Nothing };
                port.bytes[OUT] += u64::from(segment.bytes);
                if segment.last {
                    return Done::Sent(NodeId(node), segment.frame);
                }
                self.pump(NodeId(node), calendar);
            }
            Event::Crossed(id) => self.enter_rack(id, calendar),
            Event::Arrived(id) => {
                let segment = self.under_way[id as usize];
                self.vacant.push(id);
                self.arrive(segment, calendar.now(), calendar);
            }
            Event::Landed(node) => return self.land(NodeId(node), calendar),
            Event::Failed(node) => self.ports[usize::from(node)].alive = false,
            Event::Computed(_) | Event::Rebuilt(_) => {}
        }
        Done::Nothing
    }

    /// Bytes that `node` has sent and received.
    pub(crate) fn bytes(&self, node: usize) -> [u64; 2] {
        self.ports[node].bytes
    }

    pub(crate) fn is_alive(&self, node: NodeId) -> bool {
        self.ports[node.index()].alive
    }

    /// The first byte leaves.
    fn begin(&mut self, segment: Segment, calendar: &mut Calendar) {
        calendar.enter(segment.out, Event::Sent(segment.from));
        let first = calendar.now() + self.latency;
        if let Some(racks) = &mut self.racks {
            let rack = usize::from(segment.from) / racks.nodes;
            if rack != usize::from(segment.to) / racks.nodes {
                let through = racks.pass(rack, OUT, segment.bytes, calendar.now());
                let id = self.keep(segment);
                calendar.enter(through, Event::Crossed(id));
                return;
            }
        }
        // A link for one direction is free in the order in which segments were begun. One for both
        // may be used otherwise until this one comes.
        if self.duplex == Duplex::Full && self.racks.is_none() {
            self.arrive(segment, first, calendar);
        } else {
            let id = self.keep(segment);
            calendar.enter(first, Event::Arrived(id));
        }
    }

    /// The first byte is on the link into its rack.
    fn enter_rack(&mut self, id: u32, calendar: &mut Calendar) {
        let segment = self.under_way[id as usize];
        let Some(racks) = &mut self.racks else { return };
        let rack = usize::from(segment.to) / racks.nodes;
        let through = racks.pass(rack, IN, segment.bytes, calendar.now());
        calendar.enter(through + self.latency, Event::Arrived(id));
    }

    /// The first byte is, or will be at `first`, at its destination.
    fn arrive(&mut self, segment: Segment, first: Time, calendar: &mut Calendar) {
        let port = &mut self.ports[usize::from(segment.to)];
        let cost = self.host.receive * f64::from(segment.bytes) + self.host.frame;
        let wire = self.link * f64::from(segment.bytes);
        let start = port.free[IN].max(first);
        let end = start + Time::from_seconds(wire.max(cost));
        let end = end.max(segment.out + self.latency);
        port.occupy(IN, end, self.duplex);
        port.landing.push_back((end, segment));
        if port.landing.len() == 1 {
            calendar.enter(end, Event::Landed(segment.to));
        }
    }

    fn land(&mut self, to: NodeId, calendar: &mut Calendar) -> Done {
        let port = &mut self.ports[to.index()];
        let Some((_, segment)) = port.landing.pop_front() else { return Done::Nothing };
        if let Some(&(next, _)) = port.landing.front() {
            calendar.enter(next, Event::Landed(to.0));
        }
        if !port.alive {
            return Done::Nothing;
        }
        port.bytes[IN] += u64::from(segment.bytes);
        let from = NodeId(segment.from);
        let sender = &mut self.ports[from.index()];
        let peer = to.index();
        let was_full = sender.unlanded[peer] >= WINDOW;
        sender.unlanded[peer] -= segment.bytes;
        // Where there was room before, the peer is ready already or has nothing waiting; looking at
        // its queue would only cost time.
        if was_full && sender.unlanded[peer] < WINDOW && sender.has_for(peer) {
            sender.ready.insert(peer);
            self.pump(from, calendar);
        }
        match segment.last {
            true => Done::Landed { from, to, frame: segment.frame },
            false => Done::Nothing,
        }
    }

    fn keep(&mut self, segment: Segment) -> u32 {
        if let Some(id) = self.vacant.pop() {
            self.under_way[id as usize] = segment;
            return id;
        }
        self.under_way.push(segment);
        self.under_way.len() as u32 - 1
    }
}

impl Racks {
    /// When the first of `bytes` bytes passes the link in or out of `rack`.
    fn pass(&mut self, rack: usize, way: usize, bytes: u32, now: Time) -> Time {
        let free = &mut self.free[rack][way];
        let start = (*free).max(now);
        *free = start + Time::from_seconds(self.link * f64::from(bytes));
        start
    }
}

impl Port {
    /// What goes out next: peers in turn, each a batch at a time, as far as there is room for it.
    fn next_segment(&mut self, me: u16) -> Option<Segment> {
        if self.turn_bytes >= BATCH_BYTES || self.turn_frames >= BATCH_FRAMES {
            self.turn = (self.turn + 1) % self.queues.len();
            (self.turn_bytes, self.turn_frames) = (0, 0);
        }
        let peer = self.ready.next_from(self.turn)?;
        if peer != self.turn {
            self.turn = peer;
            (self.turn_bytes, self.turn_frames) = (0, 0);
        }
        let to = peer as u16;
        let (frame, left) = match self.begun.iter().position(|(p, ..)| *p == to) {
            Some(at) => {
                let (_, frame, left) = self.begun.swap_remove(at);
                (frame, left)
            }
            None => {
                let frame = self.queues[peer].pop()?;
                (frame, frame.payload.saturating_add(Header::SIZE as u32))
            }
        };
        let bytes = left.min(SEGMENT);
        if left > bytes {
            self.begun.push((to, frame, left - bytes));
        }
        self.turn_bytes += bytes as usize;
        self.turn_frames += 1;
        self.unlanded[peer] += bytes;
        if self.unlanded[peer] >= WINDOW || !self.has_for(peer) {
            self.ready.remove(peer);
        }
        let last = left == bytes;
        Some(Segment { from: me, to, bytes, last, frame, out: Time::default() })
    }

    fn has_for(&self, peer: usize) -> bool {
        !self.queues[peer].is_empty() || self.begun.iter().any(|(p, ..)| usize::from(*p) == peer)
    }

    fn occupy(&mut self, way: usize, until: Time, duplex: Duplex) {
        match duplex {
            Duplex::Full => self.free[way] = until,
            Duplex::Shared => self.free = [until; 2],
        }
    }
}

/// A set of peers.
struct Ready {
    words: Vec<u64>,
    len: usize,
}

impl Ready {
    fn new(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(64)], len }
    }

    fn insert(&mut self, peer: usize) {
        self.words[peer / 64] |= 1 << (peer % 64);
    }

    fn remove(&mut self, peer: usize) {
        self.words[peer / 64] &= !(1 << (peer % 64));
    }

    /// The first member at or after `from`, beginning again at 0.
    fn next_from(&self, from: usize) -> Option<usize> {
        let after = |from: usize| {
            let masked = self.words[from / 64] & (u64::MAX << (from % 64));
            let first = from / 64;
            let rest = self.words[first + 1..].iter().copied().zip(first + 1..);
            std::iter::once((masked, first))
                .chain(rest)
                .find(|(word, _)| *word != 0)
                .map(|(word, at)| at * 64 + word.trailing_zeros() as usize)
        };
        after(from.min(self.len - 1)).or_else(|| after(0))
    }
}
