//! The virtual network.
//!
//! A segment occupies its sender's link for as long as its bytes take. It reaches the other end one
//! latency later, and occupies the receiver's link as long again, in order of arrival. So a segment
//! passes straight through where both links are free, and waits where many nodes send to one. The
//! bytes that were sent to a peer and have not landed are limited; peers that have room take turns.
//! The [`Switch`] says who has room, and what finds no place at a port is dropped there and sent
//! again.

use crate::calendar::{Calendar, Event, Time};
use crate::connection::Timer;
use crate::multicast::{Cut, Frame, Multicast, MulticastId, Multicasts};
use crate::network::Duplex;
use crate::outbox::Outbox;
use crate::outcome::Drops;
use crate::setup::Setup;
use crate::switch::{ConnectionId, Switch};
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
    switch: Switch,
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
    cut: Cut,
    /// Whether it was sent before, and dropped.
    again: bool,
    /// When its last byte has left the sender.
    out: Time,
}

/// A segment on its way in. It is small, because many nodes send to one and there are millions of
/// segments.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    end: Time,
    multicast: MulticastId,
    cut: Cut,
}

const OUT: usize = 0;
const IN: usize = 1;

impl Fabric {
    pub(crate) fn new(setup: &Setup) -> Self {
        let nodes = setup.cluster.nodes();
        let link = 1.0 / setup.network.rate();
        let switch = Switch::new(setup);
        let port = |me| Port {
            alive: true,
            outbox: Outbox::new(me, nodes, switch.batch()),
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
            switch,
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
        let (again, (to, multicast, cut)) = match self.switch.poll_again(node) {
            Some(segment) => (true, segment),
            None => {
                let turn = self.switch.poll_turn();
                let room = |to, unlanded| self.switch.room(node, to, unlanded);
                let Some(next) = port.outbox.poll_segment(&mut self.multicasts, turn, room) else {
                    return;
                };
                (false, next)
            }
        };
        let now = calendar.now();
        let start = port.free[OUT].max(now);
        let bytes = f64::from(cut.bytes());
        let cost = self.host.send * bytes + self.host.frame;
        let wire = self.link * bytes;
        let out = start + Time::from_seconds(wire.max(cost));
        port.occupy(OUT, out, self.duplex);
        if !again {
            self.switch.handle_sent(node, to, multicast, cut);
        }
        let segment = Segment { multicast, to, cut, again, out };
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
                port.bytes[OUT] += u64::from(segment.cut.bytes());
                if !segment.again && segment.cut.is_last() {
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
            Event::Delivered(id) => return self.deliver_in_order(id, calendar),
            Event::Timer(id) => self.look_at_timer(id, calendar),
            Event::Failed(node) => self.ports[usize::from(node)].alive = false,
            Event::Computed(_) | Event::Rebuilt(_) => {}
        }
        Done::Nothing
    }

    /// Bytes that `node` has sent and received.
    pub(crate) fn bytes(&self, node: usize) -> [u64; 2] {
        self.ports[node].bytes
    }

    /// What the ports have dropped.
    pub(crate) fn drops(&self) -> Drops {
        self.switch.drops()
    }

    pub(crate) fn is_alive(&self, node: NodeId) -> bool {
        self.ports[node.index()].alive
    }

    /// The first byte leaves.
    fn begin(&mut self, from: NodeId, segment: Segment, calendar: &mut Calendar) {
        calendar.enter(segment.out, Event::Sent(from.0));
        let first = calendar.now() + self.latency;
        let bytes = segment.cut.bytes();
        if let Some(racks) = &mut self.racks {
            let rack = from.index() / racks.nodes;
            if rack != usize::from(segment.to) / racks.nodes {
                let through = racks.pass(rack, OUT, bytes, calendar.now());
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
        let bytes = segment.cut.bytes();
        let Some(racks) = &mut self.racks else { return };
        let rack = usize::from(segment.to) / racks.nodes;
        let through = racks.pass(rack, IN, bytes, calendar.now());
        calendar.enter(through + self.latency, Event::Arrived(id));
    }

    /// The first byte is, or will be at `first`, at its destination.
    fn arrive(&mut self, segment: Segment, first: Time, calendar: &mut Calendar) {
        let port = &mut self.ports[usize::from(segment.to)];
        let from = self.multicasts[segment.multicast].from;
        let id = self.switch.id(from, segment.to);
        let watch = |time| calendar.enter(time, Event::Timer(id));
        if !self.switch.admit(id, segment.cut.bytes(), first, watch) {
            return;
        }
        let bytes = f64::from(segment.cut.bytes());
        let cost = self.host.receive * bytes + self.host.frame;
        let wire = self.link * bytes;
        let start = port.free[IN].max(first);
        let end = start + Time::from_seconds(wire.max(cost));
        let end = end.max(segment.out + self.latency);
        port.occupy(IN, end, self.duplex);
        let Segment { multicast, cut, .. } = segment;
        port.arriving.push_back(Arrival { end, multicast, cut });
        if port.arriving.len() == 1 {
            calendar.enter(end, Event::Landed(segment.to));
        }
    }

    fn land(&mut self, to: NodeId, calendar: &mut Calendar) -> Done {
        let port = &mut self.ports[to.index()];
        let Some(Arrival { multicast, cut, .. }) = port.arriving.pop_front() else {
            return Done::Nothing;
        };
        if let Some(next) = port.arriving.front() {
            calendar.enter(next.end, Event::Landed(to.0));
        }
        let from = self.multicasts[multicast].from;
        if !self.switch.has_queues() {
            return self.deliver(from, to, (multicast, cut), calendar);
        }
        let (id, alive) = (self.switch.id(from, to.0), port.alive);
        self.switch.handle_landed(id, cut.bytes(), calendar.now(), alive);
        if !alive {
            return Done::Nothing;
        }
        let done = self.deliver_in_order(id, calendar);
        self.pump_to(from, to, calendar);
        done
    }

    /// Passes on what has landed of a connection, as far as it is in order. If these are several
    /// frames, the second follows at the same time.
    fn deliver_in_order(&mut self, id: ConnectionId, calendar: &mut Calendar) -> Done {
        let (from, to) = self.switch.ends(id);
        while let Some(segment) = self.switch.poll_delivered(id) {
            let done = self.deliver(from, to, segment, calendar);
            if !matches!(done, Done::Nothing) {
                calendar.enter(calendar.now(), Event::Delivered(id));
                return done;
            }
        }
        Done::Nothing
    }

    fn deliver(
        &mut self,
        from: NodeId,
        to: NodeId,
        (multicast, cut): (MulticastId, Cut),
        calendar: &mut Calendar,
    ) -> Done {
        let frame = cut.is_last().then(|| self.multicasts.frame(multicast, to.index()));
        if frame.is_some() {
            self.multicasts.handle_landed(multicast);
        }
        let port = &mut self.ports[to.index()];
        if !port.alive {
            return Done::Nothing;
        }
        port.bytes[IN] += u64::from(cut.bytes());
        self.ports[from.index()].outbox.handle_landed(to.0, cut.bytes());
        self.pump_to(from, to, calendar);
        frame.map_or(Done::Nothing, |frame| Done::Landed { from, to, frame })
    }

    /// Lets `from` send, if there is room for `to` that was not there before.
    fn pump_to(&mut self, from: NodeId, to: NodeId, calendar: &mut Calendar) {
        let room = |to, unlanded| self.switch.room(from, to, unlanded);
        let ready = self.ports[from.index()].outbox.handle_room(to.0, room);
        if ready || self.switch.is_repeating(from) {
            self.pump(from, calendar);
        }
    }

    fn look_at_timer(&mut self, id: ConnectionId, calendar: &mut Calendar) {
        match self.switch.handle_timer(id, calendar.now()) {
            Timer::Idle => {}
            Timer::Until(time) => calendar.enter(time, Event::Timer(id)),
            Timer::Expired => self.pump(self.switch.ends(id).0, calendar),
        }
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
