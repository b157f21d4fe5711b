//! What a lane does with its links: the order of frames, and whose turn it is.

use crate::mail::{Left, Mail, Mailing, MailingId};
use crate::peers::Peers;
use poseidon_core::NodeId;
use poseidon_core::queue::{BATCH_BYTES, BATCH_FRAMES};
use std::collections::BTreeMap;

/// What waits at one node for the others, and how much is on its way to them.
#[derive(Debug)]
pub(crate) struct Outbox {
    me: NodeId,
    /// The peer whose turn it is, and what it has had of it.
    turn: u16,
    turn_frames: u16,
    turn_bytes: u32,
    peers: Box<[Peer]>,
    /// Those that have something waiting and room for it.
    ready: Peers,
    /// Frames that are sent in part.
    begun: Vec<(u16, MailingId, Left)>,
    /// What waits for anybody, by its order. Each knows the next, so that only what comes and goes
    /// is looked for here.
    waiting: BTreeMap<u64, MailingId>,
    /// By peer and order: what waits for those who are far behind. Others would have to pass it
    /// over each time they look for what is next.
    late: BTreeMap<(u16, u64), MailingId>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    /// The first that waits for it, late or not.
    first: Option<MailingId>,
    /// Bytes sent and not landed.
    unlanded: u32,
}

/// What is passed over before it is set aside: rarely reached where peers go on together, and soon
/// where one is left behind.
const MANY: usize = 64;

/// Bytes under way to one peer: a socket's buffers on both ends.
const WINDOW: u32 = 1 << 20;

impl Outbox {
    /// That of `me`, one of `nodes`.
    pub(crate) fn new(me: NodeId, nodes: usize) -> Self {
        Self {
            me,
            // Everybody starts with somebody else, as lanes do.
            turn: ((me.index() + 1) % nodes) as u16,
            turn_frames: 0,
            turn_bytes: 0,
            peers: vec![Peer::default(); nodes].into(),
            ready: Peers::none(nodes),
            begun: Vec::new(),
            waiting: BTreeMap::new(),
            late: BTreeMap::new(),
        }
    }

    /// Puts a mailing in its place: that of core's queue, for every peer.
    pub(crate) fn push(&mut self, mailing: Mailing, mail: &mut Mail) {
        if mailing.peers.is_empty() {
            return;
        }
        let id = mail.insert(self.me, mailing);
        let order = mail[id].order;
        for at in mail[id].peers.iter() {
            let peer = &mut self.peers[at];
            if peer.first.is_none_or(|first| mail[first].order > order) {
                peer.first = Some(id);
            }
            if peer.unlanded < WINDOW {
                self.ready.insert(at);
            }
        }
        mail[id].next = self.waiting.range(order..).next().map(|(_, next)| *next);
        if let Some((_, &previous)) = self.waiting.range(..order).next_back() {
            mail[previous].next = Some(id);
        }
        self.waiting.insert(order, id);
    }

    /// What goes out next: peers in turn, each a batch at a time, as far as there is room for it.
    pub(crate) fn poll_segment(&mut self, mail: &mut Mail) -> Option<(u16, MailingId, Left)> {
        if self.turn_bytes as usize >= BATCH_BYTES || usize::from(self.turn_frames) >= BATCH_FRAMES
        {
            self.turn = (self.turn + 1) % self.peers.len() as u16;
            (self.turn_bytes, self.turn_frames) = (0, 0);
        }
        let to = self.ready.next_from(self.turn.into())? as u16;
        if to != self.turn {
            self.turn = to;
            (self.turn_bytes, self.turn_frames) = (0, 0);
        }
        let (mailing, left) = match self.begun.iter().position(|(peer, ..)| *peer == to) {
            Some(at) => {
                let (_, mailing, left) = self.begun.swap_remove(at);
                (mailing, left)
            }
            None => {
                let mailing = self.pop(to, mail)?;
                (mailing, Left::all(&mail.frame(mailing, to.into())))
            }
        };
        self.begun.extend(left.after().map(|left| (to, mailing, left)));
        self.turn_bytes += left.segment();
        self.turn_frames += 1;
        let peer = &mut self.peers[usize::from(to)];
        peer.unlanded += left.segment();
        if peer.unlanded >= WINDOW || !self.has_for(to) {
            self.ready.remove(to.into());
        }
        Some((to, mailing, left))
    }

    /// `bytes` have landed at `to`. True if that makes room for more.
    pub(crate) fn handle_landed(&mut self, to: u16, bytes: u32) -> bool {
        let peer = &mut self.peers[usize::from(to)];
        let was_full = peer.unlanded >= WINDOW;
        peer.unlanded -= bytes;
        // Where there was room before, the peer is ready already or has nothing waiting.
        let ready = was_full && peer.unlanded < WINDOW && self.has_for(to);
        if ready {
            self.ready.insert(to.into());
        }
        ready
    }

    /// The first that waits for `peer` does not any more.
    fn pop(&mut self, peer: u16, mail: &mut Mail) -> Option<MailingId> {
        let at = usize::from(peer);
        let id = self.peers[at].first?;
        let first = &mut mail[id];
        first.peers.remove(at);
        first.waiting -= 1;
        let (order, done) = (first.order, first.waiting == 0);
        let late = !self.late.is_empty() && self.late.remove(&(peer, order)).is_some();
        // A mailing's `next` holds only while it is in `waiting`; a late one is found again by its order.
        let mut next = match late {
            true => self.waiting.range(order..).next().map(|(_, next)| *next),
            false => first.next,
        };
        let mut passed = 0;
        while let Some(other) = next.filter(|other| !mail[*other].peers.contains(at)) {
            next = mail[other].next;
            passed += 1;
        }
        if passed > MANY {
            self.set_aside(order, next, mail);
        }
        if done && !late {
            self.unlink(order, mail[id].next, mail);
        }
        if !self.late.is_empty()
            && let Some((&(_, due), &other)) = self.late.range((peer, 0)..=(peer, u64::MAX)).next()
            && next.is_none_or(|next| mail[next].order > due)
        {
            next = Some(other);
        }
        self.peers[at].first = next;
        Some(id)
    }

    /// Makes late what is between `order` and `next`.
    fn set_aside(&mut self, order: u64, next: Option<MailingId>, mail: &mut Mail) {
        let end = next.map_or(u64::MAX, |next| mail[next].order);
        let between = self.waiting.range(order + 1..end).map(|(order, id)| (*order, *id));
        for (order, id) in between.collect::<Vec<_>>() {
            let peers = mail[id].peers.iter();
            self.late.extend(peers.map(|peer| ((peer as u16, order), id)));
            self.waiting.remove(&order);
        }
        if let Some((_, &previous)) = self.waiting.range(..=order).next_back() {
            mail[previous].next = next;
        }
    }

    /// Takes out what nobody waits for, and what is before it goes on with `next`.
    fn unlink(&mut self, order: u64, next: Option<MailingId>, mail: &mut Mail) {
        self.waiting.remove(&order);
        if let Some((_, &previous)) = self.waiting.range(..order).next_back() {
            mail[previous].next = next;
        }
    }

    fn has_for(&self, peer: u16) -> bool {
        self.peers[usize::from(peer)].first.is_some() || self.begun.iter().any(|(p, ..)| *p == peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mail::{Frame, Part};
    use poseidon_core::queue::urgency;
    use poseidon_core::wire::Kind;
    use poseidon_core::{ChunkKey, LayerId, Queue};
    use std::rc::Rc;

    /// Beside one of core's queues for each peer. One of them takes nothing most of the time.
    #[test]
    fn every_peer_gets_its_frames_in_the_order_of_cores_queue() {
        const NODES: usize = 70;
        const SLOW: u16 = 68;
        let mut mail = Mail::default();
        let mut outbox = Outbox::new(NodeId(0), NODES);
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
            outbox.push(Mailing { frame, parts, peers }, &mut mail);
            let sent = if clock == 1_999 { u64::MAX } else { below(60) };
            if clock % 500 == 499 {
                held.drain(..).for_each(|bytes| _ = outbox.handle_landed(SLOW, bytes));
            }
            for _ in 0..sent {
                let Some((to, id, left)) = outbox.poll_segment(&mut mail) else { break };
                let expected = queues[usize::from(to)].take_next(|frame| (*frame, true));
                assert_eq!(Some(mail.frame(id, to.into())), expected);
                mail.handle_landed(id);
                if to == SLOW && clock < 1_999 {
                    held.push(left.segment());
                } else {
                    assert!(!outbox.handle_landed(to, left.segment()), "there was room before");
                }
                most = most.max(outbox.late.len());
            }
        }
        assert!(queues.iter().all(Queue::is_empty));
        assert!(mail.is_empty() && outbox.waiting.is_empty() && outbox.late.is_empty());
        assert!(most > MANY, "only {most} were ever late");
    }
}
