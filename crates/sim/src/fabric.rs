//! The virtual network.
//!
//! A segment occupies its sender's port for as long as its bytes take. It reaches the other end one
//! latency later, and occupies the receiver's port as long again, in order of arrival. So a segment
//! passes straight through where both ports are free, and waits where many nodes send to one. The
//! bytes that were sent to a peer and have not landed are limited; peers that have room take turns.
//! The [`Switch`] says who has room, and what finds no place at a port is dropped there and sent
//! again.
//!
//! The nodes of a host share its port: each has a segment in hand, and the port takes them in turn.
//! Between them there is memory, which every node uses at a rate of its own, beside the port.
//! Between racks there are links, one out of and one into every rack.

use crate::calendar::{Calendar, Event, Time};
use crate::connection::Timer;
use crate::multicast::{Cut, Frame, Multicast, MulticastId, Multicasts};
use crate::network::Duplex;
use crate::outbox::Outbox;
use crate::outcome::Drops;
use crate::setup::Setup;
use crate::switch::{self, ConnectionId, Switch};
use poseidon_core::queue::BATCH_BYTES;
use poseidon_core::{NodeId, Tree};
use slab::Slab;
use std::collections::VecDeque;
use std::time::Duration;

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
    nodes: usize,
    /// The nodes' ends: of the network, and behind these, where nodes share hosts, of memory.
    ends: Vec<End>,
    /// When a line is free, out and in. The lines are the hosts' ports, and behind these, where
    /// nodes share hosts, every node's part in its host's memory.
    lines: Vec<[Time; 2]>,
    tree: Tree,
    alive: Vec<bool>,
    multicasts: Multicasts,
    duplex: Duplex,
    network: Medium,
    memory: Medium,
    host: crate::setup::Host,
    racks: Option<Racks>,
    switch: Switch,
    /// Segments between two ports, where they may overtake each other.
    under_way: Slab<Segment>,
}

/// What carries segments from one end to another.
#[derive(Clone, Copy)]
struct Medium {
    latency: Time,
    /// Seconds per byte.
    link: f64,
}

/// Links between racks.
struct Racks {
    hosts: usize,
    /// Seconds per byte.
    link: f64,
    /// By rack: when the link out of it and the link into it are free, and their bytes.
    free: Vec<[Time; 2]>,
    bytes: Vec<[u64; 2]>,
}

/// One node's end of a medium. It is kept in few cache lines: a thousand ends are used in turn.
#[repr(align(64))]
struct End {
    me: NodeId,
    /// The line that it sends and receives by.
    line: u32,
    outbox: Outbox,
    sending: Option<Segment>,
    /// Segments on their way in, in the order in which they land.
    arriving: VecDeque<Arrival>,
    bytes: [u64; 2],
}

/// The index of an end.
type EndId = usize;

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
        let (nodes, network) = (setup.cluster.nodes(), &setup.network);
        let link = 1.0 / network.rate();
        let switch = Switch::new(setup);
        let tree = Tree::new(&setup.cluster);
        let hosts = tree.workers_by_host().len();
        let end = |(me, line, batch)| End {
            me,
            line,
            outbox: Outbox::new(me, nodes, batch),
            sending: None,
            arriving: VecDeque::new(),
            bytes: [0; 2],
        };
        let ids = || setup.cluster.node_ids();
        let ports = ids().map(|me| (me, tree.host(me).into(), switch.batch(me)));
        let shared = hosts < nodes;
        let memory = ids().zip(hosts as u32..).filter(|_| shared);
        let memory = memory.map(|(me, line)| (me, line, BATCH_BYTES as u32));
        let ends: Vec<End> = ports.chain(memory).map(end).collect();
        let racks = network.racks.filter(|racks| racks.hosts_per_rack < hosts);
        let medium = |latency: Duration, link| Medium {
            latency: Time::from_seconds(latency.as_secs_f64()),
            link,
        };
        Self {
            nodes,
            lines: vec![[Time::default(); 2]; hosts + if shared { nodes } else { 0 }],
            ends,
            tree,
            alive: vec![true; nodes],
            multicasts: Multicasts::default(),
            duplex: network.duplex,
            network: medium(network.latency, link),
            memory: medium(network.memory.latency, 1.0 / network.memory.rate),
            host: setup.host,
            racks: racks.map(|racks| {
                let count = hosts.div_ceil(racks.hosts_per_rack);
                Racks {
                    hosts: racks.hosts_per_rack,
                    link: link * racks.oversubscription / racks.hosts_per_rack as f64,
                    free: vec![[Time::default(); 2]; count],
                    bytes: vec![[0; 2]; count],
                }
            }),
            switch,
            under_way: Slab::new(),
        }
    }

    /// Queues a frame for each peer of a multicast. All peers are on the host of `from`, or none
    /// is. Nothing moves before [`pump`](Self::pump).
    pub(crate) fn enqueue(&mut self, from: NodeId, multicast: Multicast) {
        let Some(first) = multicast.peers.iter().next() else { return };
        let end = self.end(from, NodeId(first as u16));
        self.ends[end].outbox.push(multicast, &mut self.multicasts);
    }

    /// Starts to send what `node` has, if its port or its memory is idle.
    pub(crate) fn pump(&mut self, node: NodeId, calendar: &mut Calendar) {
        self.pump_end(node.index(), calendar);
        if self.ends.len() > self.nodes {
            self.pump_end(self.nodes + node.index(), calendar);
        }
    }

    /// The end by which `node` reaches `peer`.
    fn end(&self, node: NodeId, peer: NodeId) -> EndId {
        let near = self.ends.len() > self.nodes && self.tree.host(node) == self.tree.host(peer);
        if near { self.nodes + node.index() } else { node.index() }
    }

    fn is_memory(&self, end: EndId) -> bool {
        end >= self.nodes
    }

    fn medium(&self, end: EndId) -> Medium {
        if self.is_memory(end) { self.memory } else { self.network }
    }

    fn pump_end(&mut self, id: EndId, calendar: &mut Calendar) {
        let (in_memory, medium) = (self.is_memory(id), self.medium(id));
        let end = &mut self.ends[id];
        let node = end.me;
        if end.sending.is_some() || !self.alive[node.index()] {
            return;
        }
        let repeated = if in_memory { None } else { self.switch.poll_again(node) };
        let (again, (to, multicast, cut)) = match repeated {
            Some(segment) => (true, segment),
            None => {
                let turn = if in_memory { None } else { self.switch.poll_turn() };
                let room = |to, unlanded| match in_memory {
                    true => switch::room(unlanded),
                    false => self.switch.room(node, to, unlanded),
                };
                let Some(next) = end.outbox.poll_segment(&mut self.multicasts, turn, room) else {
                    return;
                };
                (false, next)
            }
        };
        let now = calendar.now();
        let line = &mut self.lines[end.line as usize];
        let start = line[OUT].max(now);
        let bytes = f64::from(cut.bytes());
        let cost = self.host.send * bytes + self.host.frame;
        let wire = medium.link * bytes;
        let out = start + Time::from_seconds(wire.max(cost));
        occupy(line, OUT, out, if in_memory { Duplex::Full } else { self.duplex });
        if !again && !in_memory {
            self.switch.handle_sent(node, to, multicast, cut);
        }
        let segment = Segment { multicast, to, cut, again, out };
        end.sending = Some(segment);
        if start > now {
            calendar.enter(start, Event::Begin(id as u32));
        } else {
            self.begin(id, segment, calendar);
        }
    }

    pub(crate) fn handle(&mut self, event: Event, calendar: &mut Calendar) -> Done {
        match event {
            Event::Begin(end) => {
                if let Some(segment) = self.ends[end as EndId].sending {
                    self.begin(end as EndId, segment, calendar);
                }
            }
            Event::Sent(id) => {
                let end = &mut self.ends[id as EndId];
                let Some(segment) = end.sending.take() else { return Done::Nothing };
                end.bytes[OUT] += u64::from(segment.cut.bytes());
                if !segment.again && segment.cut.is_last() {
                    // A frame lands only after it is out, so the multicast still exists.
                    let frame = self.multicasts[segment.multicast].frame;
                    let last = self.multicasts.handle_sent(segment.multicast);
                    return Done::Sent { from: end.me, frame, last };
                }
                self.pump_end(id as EndId, calendar);
            }
            Event::Crossed(id) => self.enter_rack(id, calendar),
            Event::Arrived(id) => {
                let segment = self.under_way.remove(id as usize);
                self.arrive(usize::from(segment.to), segment, calendar.now(), calendar);
            }
            Event::Landed(end) => return self.land(end as EndId, calendar),
            Event::Delivered(id) => return self.deliver_in_order(id, calendar),
            Event::Timer(id) => self.look_at_timer(id, calendar),
            Event::Failed(node) => self.alive[usize::from(node)] = false,
            Event::Computed(_)
            | Event::Rebuilt(_)
            | Event::CopiedOut(_)
            | Event::CopiedBack(_)
            | Event::Turn(_) => {}
        }
        Done::Nothing
    }

    /// Bytes that `node` has sent and received.
    pub(crate) fn bytes(&self, node: usize) -> [u64; 2] {
        let [network, memory] = [self.network_bytes(node), self.memory_bytes(node)];
        [network[OUT] + memory[OUT], network[IN] + memory[IN]]
    }

    /// Of these, what passed the port of the node's host.
    pub(crate) fn network_bytes(&self, node: usize) -> [u64; 2] {
        self.ends[node].bytes
    }

    /// Of these, what passed the memory of the node's host.
    pub(crate) fn memory_bytes(&self, node: usize) -> [u64; 2] {
        self.ends.get(self.nodes + node).map_or([0; 2], |end| end.bytes)
    }

    /// By rack: bytes that left it and came into it. None if there are no racks.
    pub(crate) fn rack_bytes(&self) -> &[[u64; 2]] {
        self.racks.as_ref().map_or(&[], |racks| &racks.bytes)
    }

    /// What the ports have dropped.
    pub(crate) fn drops(&self) -> Drops {
        self.switch.drops()
    }

    pub(crate) fn is_alive(&self, node: NodeId) -> bool {
        self.alive[node.index()]
    }

    /// The first byte leaves.
    fn begin(&mut self, id: EndId, segment: Segment, calendar: &mut Calendar) {
        calendar.enter(segment.out, Event::Sent(id as u32));
        let first = calendar.now() + self.medium(id).latency;
        let bytes = segment.cut.bytes();
        if self.is_memory(id) {
            return self.arrive(self.nodes + usize::from(segment.to), segment, first, calendar);
        }
        if let Some(racks) = &mut self.racks {
            let rack = racks.of(self.tree.host(self.ends[id].me));
            if rack != racks.of(self.tree.host(NodeId(segment.to))) {
                let through = racks.pass(rack, OUT, bytes, calendar.now());
                let id = self.under_way.insert(segment) as u32;
                calendar.enter(through, Event::Crossed(id));
                return;
            }
        }
        // A link for one direction is free in the order in which segments were begun. One for both
        // may be used otherwise until this one comes.
        if self.duplex == Duplex::Full && self.racks.is_none() {
            self.arrive(usize::from(segment.to), segment, first, calendar);
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
        let rack = racks.of(self.tree.host(NodeId(segment.to)));
        let through = racks.pass(rack, IN, bytes, calendar.now());
        calendar.enter(through + self.network.latency, Event::Arrived(id));
    }

    /// The first byte is, or will be at `first`, at its destination, the end `at`.
    fn arrive(&mut self, at: EndId, segment: Segment, first: Time, calendar: &mut Calendar) {
        let (in_memory, medium) = (self.is_memory(at), self.medium(at));
        let from = self.multicasts[segment.multicast].from;
        if !in_memory {
            let id = self.switch.id(from, segment.to);
            let watch = |time| calendar.enter(time, Event::Timer(id));
            if !self.switch.admit(id, segment.cut.bytes(), first, watch) {
                return;
            }
        }
        let end = &mut self.ends[at];
        let line = &mut self.lines[end.line as usize];
        let bytes = f64::from(segment.cut.bytes());
        let cost = self.host.receive * bytes + self.host.frame;
        let wire = medium.link * bytes;
        let start = line[IN].max(first);
        let until = start + Time::from_seconds(wire.max(cost));
        let until = until.max(segment.out + medium.latency);
        occupy(line, IN, until, if in_memory { Duplex::Full } else { self.duplex });
        let Segment { multicast, cut, .. } = segment;
        end.arriving.push_back(Arrival { end: until, multicast, cut });
        if end.arriving.len() == 1 {
            calendar.enter(until, Event::Landed(at as u32));
        }
    }

    fn land(&mut self, at: EndId, calendar: &mut Calendar) -> Done {
        let end = &mut self.ends[at];
        let to = end.me;
        let Some(Arrival { multicast, cut, .. }) = end.arriving.pop_front() else {
            return Done::Nothing;
        };
        if let Some(next) = end.arriving.front() {
            calendar.enter(next.end, Event::Landed(at as u32));
        }
        let from = self.multicasts[multicast].from;
        if self.is_memory(at) || !self.switch.has_queues() {
            return self.deliver(from, at, (multicast, cut), calendar);
        }
        let (id, alive) = (self.switch.id(from, to.0), self.alive[to.index()]);
        self.switch.handle_landed(id, cut.bytes(), calendar.now(), alive);
        if !alive {
            return Done::Nothing;
        }
        let done = self.deliver_in_order(id, calendar);
        self.pump_to(from.index(), to, calendar);
        done
    }

    /// Passes on what has landed of a connection, as far as it is in order. If these are several
    /// frames, the second follows at the same time.
    fn deliver_in_order(&mut self, id: ConnectionId, calendar: &mut Calendar) -> Done {
        let (from, to) = self.switch.ends(id);
        while let Some(segment) = self.switch.poll_delivered(id) {
            let done = self.deliver(from, to.index(), segment, calendar);
            if !matches!(done, Done::Nothing) {
                calendar.enter(calendar.now(), Event::Delivered(id));
                return done;
            }
        }
        Done::Nothing
    }

    /// A segment from `from` is at the end `at`.
    fn deliver(
        &mut self,
        from: NodeId,
        at: EndId,
        (multicast, cut): (MulticastId, Cut),
        calendar: &mut Calendar,
    ) -> Done {
        let to = self.ends[at].me;
        let frame = cut.is_last().then(|| self.multicasts.frame(multicast, to.index()));
        if frame.is_some() {
            self.multicasts.handle_landed(multicast);
        }
        if !self.alive[to.index()] {
            return Done::Nothing;
        }
        self.ends[at].bytes[IN] += u64::from(cut.bytes());
        let sender = if self.is_memory(at) { self.nodes + from.index() } else { from.index() };
        self.ends[sender].outbox.handle_landed(to.0, cut.bytes());
        self.pump_to(sender, to, calendar);
        frame.map_or(Done::Nothing, |frame| Done::Landed { from, to, frame })
    }

    /// Lets the end `id` send, if there is room for `to` that was not there before.
    fn pump_to(&mut self, id: EndId, to: NodeId, calendar: &mut Calendar) {
        let (in_memory, from) = (self.is_memory(id), self.ends[id].me);
        let room = |to, unlanded| match in_memory {
            true => switch::room(unlanded),
            false => self.switch.room(from, to, unlanded),
        };
        let ready = self.ends[id].outbox.handle_room(to.0, room);
        if ready || !in_memory && self.switch.is_repeating(from) {
            self.pump_end(id, calendar);
        }
    }

    fn look_at_timer(&mut self, id: ConnectionId, calendar: &mut Calendar) {
        match self.switch.handle_timer(id, calendar.now()) {
            Timer::Idle => {}
            Timer::Until(time) => calendar.enter(time, Event::Timer(id)),
            Timer::Expired => self.pump_end(self.switch.ends(id).0.index(), calendar),
        }
    }
}

impl Racks {
    fn of(&self, host: u16) -> usize {
        usize::from(host) / self.hosts
    }

    /// When the first of `bytes` bytes passes the link in or out of `rack`.
    fn pass(&mut self, rack: usize, way: usize, bytes: u32, now: Time) -> Time {
        self.bytes[rack][way] += u64::from(bytes);
        let free = &mut self.free[rack][way];
        let start = (*free).max(now);
        *free = start + Time::from_seconds(self.link * f64::from(bytes));
        start
    }
}

fn occupy(line: &mut [Time; 2], way: usize, until: Time, duplex: Duplex) {
    match duplex {
        Duplex::Full => line[way] = until,
        Duplex::Shared => *line = [until; 2],
    }
}
