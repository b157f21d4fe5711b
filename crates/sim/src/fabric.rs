//! The virtual network.
//!
//! A segment occupies its sender's link for as long as its bytes take. It reaches the other end one
//! latency later, and occupies the receiver's link as long again, in order of arrival. So a segment
//! passes straight through where both links are free, and waits where many nodes send to one. The
//! bytes that were sent to a peer and have not landed are limited, as by a socket's buffers; peers
//! that have room take turns.

use crate::calendar::{Calendar, Event, Time};
use crate::multicast::{Frame, Left, Multicast, MulticastId, Multicasts};
use crate::network::Duplex;
use crate::outbox::Outbox;
use crate::setup::Setup;
use poseidon_core::NodeId;
use slab::Slab;
use std::collections::VecDeque;

/// What the fabric has done.
pub(crate) enum Done {
    /// Nothing that anybody waits for.
    Nothing,
    /// The sender's link has taken the whole frame. `last` says whether it was the multicast's last.
    Sent { from: NodeId, frame: Frame, last: bool },
    /// The whole frame is at its destination.
    Landed { from: NodeId, to: NodeId, frame: Frame },
}

pub(crate) struct Fabric {
    ports: Vec<Port>,
    multicasts: Multicasts,
    duplex: Duplex,
    latency: Time,
    /// Seconds per byte of a node's link.
    link: f64,
    host: crate::setup::Host,
    racks: Option<Racks>,
    /// Segments between two ports, where they may overtake each other.
    under_way: Slab<Segment>,
}

/// Links between racks.
struct Racks {
    nodes: usize,
    /// Seconds per byte.
    link: f64,
    /// By rack: when the link out of it and the link into it are free.
    free: Vec<[Time; 2]>,
}

/// One node's end of its link. It is kept in few cache lines: a thousand ports are used in turn.
#[repr(align(64))]
struct Port {
    alive: bool,
    outbox: Outbox,
    sending: Option<Segment>,
    /// When the link is free: out and in, or both together.
    free: [Time; 2],
    /// Segments on their way in, in the order in which they land.
    arriving: VecDeque<Arrival>,
    bytes: [u64; 2],
}

/// A part of a frame that is sent at once.
#[derive(Clone, Copy, Debug)]
struct Segment {
    multicast: MulticastId,
    to: u16,
    left: Left,
    /// When its last byte has left the sender.
    out: Time,
}

/// A segment on its way in. It is small, because many nodes send to one and there are millions of
/// segments.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    end: Time,
    multicast: MulticastId,
    left: Left,
}

const OUT: usize = 0;
const IN: usize = 1;

impl Fabric {
    pub(crate) fn new(setup: &Setup) -> Self {
        let nodes = setup.cluster.nodes();
        let link = 1.0 / setup.network.rate();
        let port = |me| Port {
            alive: true,
            outbox: Outbox::new(me, nodes),
            sending: None,
            free: [Time::default(); 2],
            arriving: VecDeque::new(),
            bytes: [0; 2],
        };
        let racks = setup.network.racks.filter(|racks| racks.nodes_per_rack < nodes);
        Self {
            ports: setup.cluster.node_ids().map(port).collect(),
            multicasts: Multicasts::default(),
            duplex: setup.network.duplex,
            latency: Time::from_seconds(setup.network.latency.as_secs_f64()),
            link,
            host: setup.host,
            racks: racks.map(|racks| Racks {
                nodes: racks.nodes_per_rack,
                link: link * racks.oversubscription / racks.nodes_per_rack as f64,
                free: vec![[Time::default(); 2]; nodes.div_ceil(racks.nodes_per_rack)],
            }),
            under_way: Slab::new(),
        }
    }

    /// Queues a frame for each peer of a multicast. Nothing moves before [`pump`](Self::pump).
    pub(crate) fn enqueue(&mut self, from: NodeId, multicast: Multicast) {
        self.ports[from.index()].outbox.push(multicast, &mut self.multicasts);
    }

    /// Starts to send what `node` has, if its link is idle.
    pub(crate) fn pump(&mut self, node: NodeId, calendar: &mut Calendar) {
        let port = &mut self.ports[node.index()];
        if port.sending.is_some() || !port.alive {
            return;
        }
        let Some((to, multicast, left)) = port.outbox.poll_segment(&mut self.multicasts) else {
            return;
        };
        let now = calendar.now();
        let start = port.free[OUT].max(now);
        let bytes = f64::from(left.segment());
        let cost = self.host.send * bytes + self.host.frame;
        let wire = self.link * bytes;
        let out = start + Time::from_seconds(wire.max(cost));
        port.occupy(OUT, out, self.duplex);
        let segment = Segment { multicast, to, left, out };
        port.sending = Some(segment);
        if start > now {
            calendar.enter(start, Event::Begin(node.0));
        } else {
            self.begin(node, segment, calendar);
        }
    }

    pub(crate) fn handle(&mut self, event: Event, calendar: &mut Calendar) -> Done {
        match event {
            Event::Begin(node) => {
                if let Some(segment) = self.ports[usize::from(node)].sending {
                    self.begin(NodeId(node), segment, calendar);
                }
            }
            Event::Sent(node) => {
                let port = &mut self.ports[usize::from(node)];
                let Some(segment) = port.sending.take() else { return Done::Nothing };
                port.bytes[OUT] += u64::from(segment.left.segment());
                if segment.left.after().is_none() {
                    // A frame lands only after it is out, so the multicast still exists.
                    let frame = self.multicasts[segment.multicast].frame;
                    let last = self.multicasts.handle_sent(segment.multicast);
                    return Done::Sent { from: NodeId(node), frame, last };
                }
                self.pump(NodeId(node), calendar);
            }
            Event::Crossed(id) => self.enter_rack(id, calendar),
            Event::Arrived(id) => {
                let segment = self.under_way.remove(id as usize);
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
    fn begin(&mut self, from: NodeId, segment: Segment, calendar: &mut Calendar) {
        calendar.enter(segment.out, Event::Sent(from.0));
        let first = calendar.now() + self.latency;
        if let Some(racks) = &mut self.racks {
            let rack = from.index() / racks.nodes;
            if rack != usize::from(segment.to) / racks.nodes {
                let through = racks.pass(rack, OUT, segment.left.segment(), calendar.now());
                let id = self.under_way.insert(segment) as u32;
                calendar.enter(through, Event::Crossed(id));
                return;
            }
        }
        // A link for one direction is free in the order in which segments were begun. One for both
        // may be used otherwise until this one comes.
        if self.duplex == Duplex::Full && self.racks.is_none() {
            self.arrive(segment, first, calendar);
        } else {
            let id = self.under_way.insert(segment) as u32;
            calendar.enter(first, Event::Arrived(id));
        }
    }

    /// The first byte is on the link into its rack.
    fn enter_rack(&mut self, id: u32, calendar: &mut Calendar) {
        let segment = self.under_way[id as usize];
        let Some(racks) = &mut self.racks else { return };
        let rack = usize::from(segment.to) / racks.nodes;
        let through = racks.pass(rack, IN, segment.left.segment(), calendar.now());
        calendar.enter(through + self.latency, Event::Arrived(id));
    }

    /// The first byte is, or will be at `first`, at its destination.
    fn arrive(&mut self, segment: Segment, first: Time, calendar: &mut Calendar) {
        let port = &mut self.ports[usize::from(segment.to)];
        let bytes = f64::from(segment.left.segment());
        let cost = self.host.receive * bytes + self.host.frame;
        let wire = self.link * bytes;
        let start = port.free[IN].max(first);
        let end = start + Time::from_seconds(wire.max(cost));
        let end = end.max(segment.out + self.latency);
        port.occupy(IN, end, self.duplex);
        let Segment { multicast, left, .. } = segment;
        port.arriving.push_back(Arrival { end, multicast, left });
        if port.arriving.len() == 1 {
            calendar.enter(end, Event::Landed(segment.to));
        }
    }

    fn land(&mut self, to: NodeId, calendar: &mut Calendar) -> Done {
        let port = &mut self.ports[to.index()];
        let Some(Arrival { multicast, left, .. }) = port.arriving.pop_front() else {
            return Done::Nothing;
        };
        if let Some(next) = port.arriving.front() {
            calendar.enter(next.end, Event::Landed(to.0));
        }
        let from = self.multicasts[multicast].from;
        let frame = left.after().is_none().then(|| self.multicasts.frame(multicast, to.index()));
        if frame.is_some() {
            self.multicasts.handle_landed(multicast);
        }
        if !port.alive {
            return Done::Nothing;
        }
        port.bytes[IN] += u64::from(left.segment());
        if self.ports[from.index()].outbox.handle_landed(to.0, left.segment()) {
            self.pump(from, calendar);
        }
        frame.map_or(Done::Nothing, |frame| Done::Landed { from, to, frame })
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
    fn occupy(&mut self, way: usize, until: Time, duplex: Duplex) {
        match duplex {
            Duplex::Full => self.free[way] = until,
            Duplex::Shared => self.free = [until; 2],
        }
    }
}
