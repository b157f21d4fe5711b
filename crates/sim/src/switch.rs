//! The switch between hosts: what may be under way to its ports, and what their queues drop.
//!
//! Without queues nothing is ever dropped, and a socket's buffers bound what is under way between
//! two nodes. With queues, a segment that finds no place in the queue of its receiver's port is
//! gone, and a [`Connection`] sends it again. What may be under way is then also what TCP's
//! congestion window lets through.
//!
//! With queues it matters how much is under way. In a session every link has its part of the port's
//! budget as window (core's `port::window`), so nodes turn to their peers often. Without these
//! windows, a node sends a long burst and then turns to any peer by chance: so sockets of which each
//! takes what it can get behave, and so incast comes about.

use crate::calendar::Time;
use crate::connection::{Connection, Timer};
use crate::multicast::{Cut, MulticastId};
use crate::outcome::Drops;
use crate::peers::Peers;
use crate::setup::Setup;
use poseidon_core::queue::BATCH_BYTES;
use poseidon_core::{NodeId, Tree, Windows};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// All ports of the switch, and the connections that end there.
#[derive(Debug)]
pub(crate) struct Switch {
    nodes: usize,
    queues: Option<Queues>,
}

/// Ports with queues that drop.
#[derive(Debug)]
struct Queues {
    /// Bytes that a queue holds, and by host those that are in the queue of its port.
    length: f64,
    queued: Vec<u64>,
    tree: Tree,
    /// By sender and receiver, as far as they have had anything to say.
    connections: Vec<Option<Box<Connection>>>,
    /// By sender: the receivers to whom something is to be sent again.
    again: Vec<Peers>,
    /// By receiver and sender: the window of the link, if a port has a budget.
    windows: Option<Vec<u32>>,
    chance: ChaCha8Rng,
    drops: Drops,
}

/// A connection's index.
pub(crate) type ConnectionId = u32;

impl Switch {
    pub(crate) fn new(setup: &Setup) -> Self {
        let nodes = setup.cluster.nodes();
        let network = &setup.network;
        let queues = network.queue.map(|queue| Queues {
            // A queue holds headers too.
            length: queue as f64 * network.efficiency,
            queued: vec![0; nodes],
            tree: Tree::new(&setup.cluster),
            connections: (0..nodes * nodes).map(|_| None).collect(),
            again: vec![Peers::none(nodes); nodes],
            windows: setup.windows.then(|| windows(setup)),
            chance: ChaCha8Rng::seed_from_u64(setup.seed),
            drops: Drops::default(),
        });
        Self { nodes, queues }
    }

    /// How many bytes `from` may send to `to` at once, with `unlanded` bytes under way.
    pub(crate) fn room(&self, from: NodeId, to: u16, unlanded: u32) -> u32 {
        let Some(queues) = &self.queues else { return room(unlanded) };
        let connection = queues.connections[self.id(from, to) as usize].as_ref();
        let window = queues
            .windows
            .as_ref()
            .map_or(WINDOW, |windows| windows[usize::from(to) * self.nodes + from.index()]);
        let segment = SHORT_SEGMENT.min(window);
        let has_room = unlanded + segment <= window
            && connection.is_none_or(|connection| connection.has_room(segment));
        if has_room { segment } else { 0 }
    }

    /// Whether its ports have queues that drop.
    pub(crate) fn has_queues(&self) -> bool {
        self.queues.is_some()
    }

    /// The bytes that one peer of `node` gets before another has its turn.
    pub(crate) fn batch(&self, node: NodeId) -> u32 {
        match &self.queues {
            None => BATCH_BYTES as u32,
            Some(Queues { windows: Some(windows), .. }) => {
                let own = &windows[node.index() * self.nodes..][..self.nodes];
                let bounded = own.iter().copied().filter(|window| *window < WINDOW);
                bounded.max().unwrap_or(BATCH_BYTES as u32)
            }
            Some(_) => BURST,
        }
    }

    /// Whose turn it is after a batch, if that is chance.
    pub(crate) fn poll_turn(&mut self) -> Option<u16> {
        let nodes = self.nodes as u16;
        let queues = self.queues.as_mut().filter(|queues| queues.windows.is_none());
        queues.map(|queues| queues.chance.random_range(0..nodes))
    }

    /// What its ports have dropped.
    pub(crate) fn drops(&self) -> Drops {
        self.queues.as_ref().map_or_else(Drops::default, |queues| queues.drops)
    }

    /// `from` sends a segment for the first time.
    pub(crate) fn handle_sent(&mut self, from: NodeId, to: u16, multicast: MulticastId, cut: Cut) {
        let id = self.id(from, to);
        if let Some(queues) = &mut self.queues {
            queues.connection(id).handle_sent(multicast, cut);
        }
    }

    /// Whether `from` has anything to send again.
    pub(crate) fn is_repeating(&self, from: NodeId) -> bool {
        self.queues.as_ref().is_some_and(|queues| !queues.again[from.index()].is_empty())
    }

    /// The segment that `from` sends again now, if there is one.
    pub(crate) fn poll_again(&mut self, from: NodeId) -> Option<(u16, MulticastId, Cut)> {
        let nodes = self.nodes;
        let queues = self.queues.as_mut()?;
        let peers: Vec<_> = queues.again[from.index()].iter().collect();
        peers.into_iter().find_map(|to| {
            let connection = queues.connection((from.index() * nodes + to) as u32);
            let (multicast, cut) = connection.poll_again()?;
            if !connection.is_repeating() {
                queues.again[from.index()].remove(to);
            }
            Some((to as u16, multicast, cut))
        })
    }

    /// A segment of `bytes` bytes is at its receiver's port. True if it has a place there, which it
    /// always has in an empty queue. If not, it is gone, and `watch` is told when the connection's
    /// timer is to be looked at.
    pub(crate) fn admit(
        &mut self,
        id: ConnectionId,
        bytes: u32,
        now: Time,
        watch: impl FnOnce(Time),
    ) -> bool {
        let (_, to) = self.ends(id);
        let Some(queues) = &mut self.queues else { return true };
        let queued = &mut queues.queued[usize::from(queues.tree.host(to))];
        let more = *queued + u64::from(bytes);
        let admitted = *queued == 0 || more as f64 <= queues.length;
        if admitted {
            *queued = more;
            queues.connection(id).handle_queued();
        } else {
            queues.drops.segments += 1;
            queues.drops.bytes += u64::from(bytes);
            if let Some(time) = queues.connection(id).handle_dropped(now) {
                watch(time);
            }
        }
        admitted
    }

    /// A segment of `bytes` bytes has landed. `alive`: somebody is there to say so.
    pub(crate) fn handle_landed(&mut self, id: ConnectionId, bytes: u32, now: Time, alive: bool) {
        let (from, to) = self.ends(id);
        let Some(queues) = &mut self.queues else { return };
        queues.queued[usize::from(queues.tree.host(to))] -= u64::from(bytes);
        if !alive {
            return;
        }
        queues.connection(id).handle_landed(now);
        if queues.connection(id).is_repeating() {
            queues.again[from.index()].insert(to.index());
        }
    }

    /// The next segment of a connection that its receiver sees.
    pub(crate) fn poll_delivered(&mut self, id: ConnectionId) -> Option<(MulticastId, Cut)> {
        self.queues.as_mut()?.connection(id).poll_delivered()
    }

    /// Looks at a connection's timer.
    pub(crate) fn handle_timer(&mut self, id: ConnectionId, now: Time) -> Timer {
        let (from, to) = self.ends(id);
        let Some(queues) = &mut self.queues else { return Timer::Idle };
        let timer = queues.connection(id).handle_timer(now);
        if timer == Timer::Expired {
            queues.drops.timeouts += 1;
            queues.again[from.index()].insert(to.index());
        }
        timer
    }

    pub(crate) fn id(&self, from: NodeId, to: u16) -> ConnectionId {
        (from.index() * self.nodes + usize::from(to)) as u32
    }

    /// Sender and receiver.
    pub(crate) fn ends(&self, id: ConnectionId) -> (NodeId, NodeId) {
        let (from, to) = (id as usize / self.nodes, id as usize % self.nodes);
        (NodeId(from as u16), NodeId(to as u16))
    }
}

impl Queues {
    fn connection(&mut self, id: ConnectionId) -> &mut Connection {
        self.connections[id as usize].get_or_insert_with(|| Box::new(Connection::new()))
    }
}

/// How many bytes a node may send to a peer at once, with `unlanded` bytes under way, where nothing
/// is dropped.
pub(crate) fn room(unlanded: u32) -> u32 {
    if unlanded < WINDOW { SEGMENT } else { 0 }
}

/// By receiver and sender: the window of the link, as sessions have it.
fn windows(setup: &Setup) -> Vec<u32> {
    let Setup { cluster, consistency, .. } = setup;
    let nodes = || cluster.node_ids();
    let of_receiver = |receiver| {
        let windows = Windows::new(cluster, receiver, 1, None, consistency.is_bsp());
        let of = move |sender| windows.of(sender, 1, None).map_or(WINDOW, |window| window as u32);
        nodes().map(of)
    };
    nodes().flat_map(of_receiver).collect()
}

/// Bytes under way to one peer: a socket's buffers on both ends.
const WINDOW: u32 = 1 << 20;
/// The bytes of a frame that a link takes before another peer has its turn.
const SEGMENT: u32 = 512 << 10;
/// The same where queues are short: a few packets, which are dropped or not as one.
const SHORT_SEGMENT: u32 = 16 << 10;
/// A batch where queues are short and turns are not. Batches are written to sockets. A socket takes
/// 256 KiB ahead of the wire, and two lanes have two of them. Of 128 KiB to 1 MiB this came nearest to
/// what was measured between 8 to 32 real nodes at 1 Gbit/s.
const BURST: u32 = 512 << 10;
