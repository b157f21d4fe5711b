//! In which order a node's frames leave, and which peer has its turn: what a lane does with its
//! links.

use crate::multicast::{Cut, Left, Multicast, MulticastId, Multicasts};
use crate::peers::Peers;
use poseidon_core::NodeId;
use poseidon_core::queue::BATCH_FRAMES;
use std::collections::BTreeMap;

/// The frames that wait at one node for its peers, and how many bytes are on their way to them.
#[derive(Debug)]
pub(crate) struct Outbox {
    me: NodeId,
    /// The bytes that a peer gets in its turn.
    batch: u32,
    /// The peer whose turn it is.
    turn: u16,
    /// The frames and bytes that this peer has had in its turn.
    turn_frames: u16,
    turn_bytes: u32,
    peers: Box<[PeerQueue]>,
    /// The peers that have a frame waiting, without those that had no room for it when they were
    /// asked.
    ready: Peers,
    /// Frames that are sent in part.
    begun: Vec<(u16, MulticastId, Left)>,
    /// The multicasts that wait for any peer, by their order. Each multicast knows the next one, so
    /// this map is searched only when a multicast comes or goes.
    waiting: BTreeMap<u64, MulticastId>,
    /// The multicasts that wait only for peers that are far behind, and those that ever were for
    /// one peer, by peer and order. In `waiting` every other peer would have to pass over them each
    /// time it looks for its next one.
    late: BTreeMap<(u16, u64), MulticastId>,
}

/// What waits for one peer, and what is on its way there.
#[derive(Clone, Copy, Debug, Default)]
struct PeerQueue {
    /// The first multicast that waits for this peer, in `waiting` or in `late`.
    first: Option<MulticastId>,
    /// Bytes sent and not landed.
    unlanded: u32,
}

/// How many multicasts a peer passes over before they are made late. The number is rarely reached
/// where peers go on together, and soon reached where one peer is left behind.
const MANY: usize = 64;

impl Outbox {
    /// The outbox of the node `me`, one of `nodes`. Every peer gets `batch` bytes in its turn.
    pub(crate) fn new(me: NodeId, nodes: usize, batch: u32) -> Self {
        Self {
            me,
            batch,
            // Everybody starts with somebody else, as lanes do.
            turn: ((me.index() + 1) % nodes) as u16,
            turn_frames: 0,
            turn_bytes: 0,
            peers: vec![PeerQueue::default(); nodes].into(),
            ready: Peers::none(nodes),
            begun: Vec::new(),
            waiting: BTreeMap::new(),
            late: BTreeMap::new(),
        }
    }

    /// Puts a multicast where core's queue would put its frame, for every peer.
    pub(crate) fn push(&mut self, multicast: Multicast, multicasts: &mut Multicasts) {
        if multicast.peers.is_empty() {
            return;
        }
        let id = multicasts.insert(self.me, multicast);
        let order = multicasts[id].order;
        for at in multicasts[id].peers.iter() {
            let peer = &mut self.peers[at];
            if peer.first.is_none_or(|first| multicasts[first].order > order) {
                peer.first = Some(id);
            }
            self.ready.insert(at);
        }
        if multicasts[id].waiting == 1 {
            let peers = multicasts[id].peers.iter();
            self.late.extend(peers.map(|peer| ((peer as u16, order), id)));
            return;
        }
        multicasts[id].next = self.waiting.range(order..).next().map(|(_, next)| *next);
        if let Some((_, &previous)) = self.waiting.range(..order).next_back() {
            multicasts[previous].next = Some(id);
        }
        self.waiting.insert(order, id);
    }

    /// The next segment to send. Peers take turns of one batch each, as far as they have room: `room`
    /// says of a peer, and of the bytes under way to it, how many may be sent at once. `turn`
    /// is whose turn is next, if peers do not take turns in order.
    pub(crate) fn poll_segment(
        &mut self,
        multicasts: &mut Multicasts,
        turn: Option<u16>,
        mut room: impl FnMut(u16, u32) -> u32,
    ) -> Option<(u16, MulticastId, Cut)> {
        if self.turn_bytes >= self.batch || usize::from(self.turn_frames) >= BATCH_FRAMES {
            let next = (self.turn + 1) % self.peers.len() as u16;
            self.turn = turn.unwrap_or(next);
            (self.turn_bytes, self.turn_frames) = (0, 0);
        }
        let (to, most) = loop {
            let peer = self.ready.next_from(self.turn.into())?;
            match room(peer as u16, self.peers[peer].unlanded) {
                0 => self.ready.remove(peer),
                most => break (peer as u16, most),
            }
        };
        if to != self.turn {
            self.turn = to;
            (self.turn_bytes, self.turn_frames) = (0, 0);
        }
        let (multicast, left) = match self.begun.iter().position(|(peer, ..)| *peer == to) {
            Some(at) => {
                let (_, multicast, left) = self.begun.swap_remove(at);
                (multicast, left)
            }
            None => {
                let multicast = self.pop(to, multicasts)?;
                (multicast, Left::all(&multicasts.frame(multicast, to.into())))
            }
        };
        let (cut, after) = left.cut(most);
        self.begun.extend(after.map(|left| (to, multicast, left)));
        self.turn_bytes += cut.bytes();
        self.turn_frames += u16::from(cut.is_last());
        self.peers[usize::from(to)].unlanded += cut.bytes();
        if !self.has_for(to) {
            self.ready.remove(to.into());
        }
        Some((to, multicast, cut))
    }

    /// `bytes` have landed at `to`.
    pub(crate) fn handle_landed(&mut self, to: u16, bytes: u32) {
        self.peers[usize::from(to)].unlanded -= bytes;
    }

    /// There may be room for `to`. True if there was none before, and there is something to send.
    pub(crate) fn handle_room(&mut self, to: u16, room: impl FnOnce(u16, u32) -> u32) -> bool {
        let peer = usize::from(to);
        let ready = !self.ready.contains(peer)
            && self.has_for(to)
            && room(to, self.peers[peer].unlanded) > 0;
        if ready {
            self.ready.insert(peer);
        }
        ready
    }

    /// Takes the first multicast that waits for `peer`, and finds the one after it.
    fn pop(&mut self, peer: u16, multicasts: &mut Multicasts) -> Option<MulticastId> {
        let at = usize::from(peer);
        let id = self.peers[at].first?;
        let first = &mut multicasts[id];
        first.peers.remove(at);
        first.waiting -= 1;
        let (order, done) = (first.order, first.waiting == 0);
        let late = !self.late.is_empty() && self.late.remove(&(peer, order)).is_some();
        // A multicast's `next` is right only while the multicast is in `waiting`. After a late one,
        // the next is searched by its order.
        let mut next = match late {
            true => self.waiting.range(order..).next().map(|(_, next)| *next),
            false => first.next,
        };
        let mut passed = 0;
        while let Some(other) = next.filter(|other| !multicasts[*other].peers.contains(at)) {
            next = multicasts[other].next;
            passed += 1;
        }
        if passed > MANY {
            self.set_aside(order, next, multicasts);
        }
        if done && !late {
            self.unlink(order, multicasts[id].next, multicasts);
        }
        if !self.late.is_empty()
            && let Some((&(_, due), &other)) = self.late.range((peer, 0)..=(peer, u64::MAX)).next()
            && next.is_none_or(|next| multicasts[next].order > due)
        {
            next = Some(other);
        }
        self.peers[at].first = next;
        Some(id)
    }

    /// Makes the multicasts between `order` and `next` late.
    fn set_aside(&mut self, order: u64, next: Option<MulticastId>, multicasts: &mut Multicasts) {
        let end = next.map_or(u64::MAX, |next| multicasts[next].order);
        let between = self.waiting.range(order + 1..end).map(|(order, id)| (*order, *id));
        for (order, id) in between.collect::<Vec<_>>() {
            let peers = multicasts[id].peers.iter();
            self.late.extend(peers.map(|peer| ((peer as u16, order), id)));
            self.waiting.remove(&order);
        }
        if let Some((_, &previous)) = self.waiting.range(..=order).next_back() {
            multicasts[previous].next = next;
        }
    }

    /// Takes out a multicast that no peer waits for. The one before it is followed by `next` now.
    fn unlink(&mut self, order: u64, next: Option<MulticastId>, multicasts: &mut Multicasts) {
        self.waiting.remove(&order);
        if let Some((_, &previous)) = self.waiting.range(..order).next_back() {
            multicasts[previous].next = next;
        }
    }

    fn has_for(&self, peer: u16) -> bool {
        self.peers[usize::from(peer)].first.is_some() || self.begun.iter().any(|(p, ..)| *p == peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::multicast::{Frame, Part};
    use poseidon_core::queue::urgency;
    use poseidon_core::wire::Kind;
    use poseidon_core::{ChunkKey, LayerId, Queue};
    use std::rc::Rc;

    /// Beside one of core's queues for each peer. One of them takes nothing most of the time.
    #[test]
    fn every_peer_gets_its_frames_in_the_order_of_cores_queue() {
        const NODES: usize = 70;
        const SLOW: u16 = 68;
        const WINDOW: u32 = 1 << 20;
        let mut multicasts = Multicasts::default();
        let mut outbox = Outbox::new(NodeId(0), NODES, 128 << 10);
        let mut queues: Vec<Queue<Frame>> = (0..NODES).map(|_| Queue::default()).collect();
        let (mut held, mut most) = (Vec::new(), 0);
        let mut random = 1u64;
        let mut below = |n: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % n
        };
        for clock in 0..2_000 {
            let kind = [Kind::Push, Kind::Update, Kind::Factors][below(3) as usize];
            let layer = LayerId(below(20) as u32);
            let parts = (kind == Kind::Push).then(|| {
                let part = |n| Part { index: n, payload: 100 * n };
                Rc::new((0..NODES as u32).map(part).collect::<Vec<_>>())
            });
            let mut peers = Peers::none(NODES);
            (0..below(3) * below(40)).for_each(|_| peers.insert(below(NODES as u64) as usize));
            let chunk = ChunkKey { layer, index: 7 };
            let frame = Frame { kind, chunk, clock, payload: 100_000, lent: false };
            for peer in peers.iter() {
                let mut frame = frame;
                if let Some(parts) = &parts {
                    (frame.chunk.index, frame.payload) = (parts[peer].index, parts[peer].payload);
                }
                queues[peer].push(urgency(kind, layer), frame);
            }
            outbox.push(Multicast { frame, parts, peers }, &mut multicasts);
            let sent = if clock == 1_999 { u64::MAX } else { below(60) };
            if clock % 500 == 499 {
                held.drain(..).for_each(|bytes| outbox.handle_landed(SLOW, bytes));
                outbox.handle_room(SLOW, |_, _| 1);
            }
            for _ in 0..sent {
                let room = |_, unlanded| if unlanded < WINDOW { 512 << 10 } else { 0 };
                let segment = outbox.poll_segment(&mut multicasts, None, room);
                let Some((to, id, cut)) = segment else { break };
                assert!(cut.is_last(), "frames are short here");
                let expected = queues[usize::from(to)].take_next(|frame| (*frame, true));
                assert_eq!(Some(multicasts.frame(id, to.into())), expected);
                multicasts.handle_landed(id);
                if to == SLOW && clock < 1_999 {
                    held.push(cut.bytes());
                } else {
                    outbox.handle_landed(to, cut.bytes());
                    assert!(!outbox.handle_room(to, room), "there was room before");
                }
                most = most.max(outbox.late.len());
            }
        }
        assert!(queues.iter().all(Queue::is_empty));
        assert!(multicasts.is_empty() && outbox.waiting.is_empty() && outbox.late.is_empty());
        assert!(most > MANY, "only {most} were ever late");
    }
}
