//! What carries the frames of one lane: its links, what goes out next, heartbeats, goodbyes and last
//! words. Sessions and groups are [channels](channel::Channel) on it.
//!
//! [`Engine`] is the engine without a thread: tests drive it over in-memory links in virtual time.
//! [`driver::Driver`] gives an engine its thread.
//!
//! * `channel`: what the engine asks of sessions and groups. `driver`: which thread drives it.
//!   `sharing`: how that thread shares its core.
//! * `peer`: one link. `outbox`: what is sent next on it. `traffic`: what is counted.
//!   `budgeted`: sending within a budget. `absence`: silence of others, and of this node.
//!   `recorded`: what is noted of its work.

pub(crate) mod channel;
pub(crate) mod driver;
pub(crate) mod outbox;
pub(crate) mod sharing;
pub(crate) mod traffic;

mod absence;
mod budgeted;
mod peer;
mod recorded;

#[cfg(test)]
mod tests;

use crate::Error;
use crate::trace::Recorder;
use absence::Absence;
use channel::{Channel, Landing, LastWords, Outgoing, Polled, Sent};
use outbox::{Message, Payload};
use peer::Peer;
use poseidon_core::queue::urgency;
use poseidon_core::running_time::RunningTime;
use poseidon_core::wire::{Header, Kind, MAX_ABORT};
use poseidon_core::{Allowance, Budget, ChannelId, LayerId, NodeId};
use poseidon_link::Link;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// One lane's links, by the node at the other end.
pub(crate) type Links = Vec<(NodeId, Box<dyn Link>)>;

/// One lane of a node: its links, and the channels whose frames they carry. One thread at a time
/// drives it, by calling `turn` again and again.
pub(crate) struct Engine {
    me: NodeId,
    peers: Vec<Option<Peer>>,
    channels: Channels,
    /// Payloads that are combined are read here first. All links share it, so that it stays in the
    /// cache.
    scratch: Vec<u64>,
    silence: Duration,
    /// All times in here are of this clock, which does not count the time in which nobody drove the
    /// engine. Callers tell the real time.
    time: RunningTime,
    /// When nobody drove it last.
    absence: Option<Absence>,
    /// What this node is called.
    name: String,
    next_tick: Duration,
    /// The index of the peer that is written to first, next time.
    turn: usize,
    /// What this lane may send to other hosts.
    allowance: Allowance,
    /// As `turn`, of the peers on other hosts while there is a budget.
    budget_turn: usize,
    /// Something has happened that programs may wait for.
    progressed: bool,
    /// A program has just told a channel to do something.
    commanded: bool,
    /// Set when the node leaves: the time at which the connections are closed, whoever has not read
    /// all of them.
    closing: Option<Duration>,
    /// Where the node notes what it does, and which lane this is. Tests may have none.
    recorder: Option<(Arc<Recorder>, u32)>,
    /// Bytes that links had taken and given when the lane's work was noted last.
    noted: u64,
}

/// The channels of an engine, and which of them a frame belongs to.
#[derive(Default)]
pub(crate) struct Channels {
    open: BTreeMap<ChannelId, Slot>,
    /// Channels that were closed here. Frames of them may still come.
    ended: BTreeSet<ChannelId>,
    /// Channels that have to be closed, and why.
    faults: Vec<(ChannelId, Error)>,
    /// Channels that have to be closed because of a frame, and who has sent it.
    broken_by: Vec<(ChannelId, NodeId)>,
    /// A channel has something to tell its program, and has to be polled.
    due: bool,
}

struct Slot {
    channel: Box<dyn Channel>,
    /// By node: whether it is one of the channel's members.
    members: Box<[bool]>,
    /// Messages that links have not taken.
    unsent: usize,
}

/// What the thread that drives should do after a turn.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// There is more to do right now.
    Again,
    /// Nothing to do until a link is ready, a command comes, or this time is reached.
    Sleep(Duration),
    /// All said and done.
    Stop,
}

/// Scratch of 128 KiB: fits the second-level cache of any machine. From 16 to 256 KiB the exchange
/// of 100 MB between 8 processes took the same time (ADR 0008).
const SCRATCH: usize = (128 << 10) / size_of::<u64>();
/// What an engine writes before it looks at what has come in.
const BURST: usize = 256 << 10;
const TICK: Duration = RunningTime::USUAL;
const HEARTBEAT: Duration = Duration::from_secs(2);
/// How long a node that leaves keeps a connection open if the other end has not read all of it.
const LINGER: Duration = Duration::from_secs(10);

impl Engine {
    /// An engine of node `me` of `nodes` nodes. A peer that has not been heard for `silence` is
    /// taken for dead, and so is a peer that takes no bytes for as long.
    pub(crate) fn new(
        me: NodeId,
        nodes: usize,
        links: Links,
        silence: Duration,
        now: Duration,
    ) -> Self {
        let mut peers: Vec<Option<Peer>> = (0..nodes).map(|_| None).collect();
        for (node, link) in links {
            peers[node.index()] = Some(Peer::new(node, link, now));
        }
        Self {
            me,
            peers,
            channels: Channels::default(),
            scratch: vec![0; SCRATCH],
            silence,
            time: RunningTime::new(now),
            absence: None,
            name: format!("node {me}"),
            next_tick: now + TICK,
            // Every node starts with the node after itself, so that no node is flooded by all the
            // others.
            turn: me.index() + 1,
            allowance: Allowance::new(Arc::new(Budget::new(None, 1))),
            budget_turn: me.index() + 1,
            progressed: false,
            commanded: false,
            closing: None,
            recorder: None,
            noted: 0,
        }
    }

    /// The engine keeps to `budget`, which it shares with the other lanes of its node.
    pub(crate) fn within(self, budget: Arc<Budget>) -> Self {
        Self { allowance: Allowance::new(budget), ..self }
    }

    /// What this node is called in its own errors.
    pub(crate) fn called(self, name: String) -> Self {
        Self { name, ..self }
    }

    /// Adds a channel. Frames of it may have come already.
    pub(crate) fn attach(&mut self, channel: Box<dyn Channel>, now: Duration) {
        let now = self.run_at(now);
        let id = channel.id();
        let mut fault = self.closing.map(|_| Error::Config("this node has left the job".into()));
        for node in channel.members() {
            if self.peers.get(node.index()).is_none_or(Option::is_none) && fault.is_none() {
                fault = Some(Error::Config(format!("there is no link to node {node}")));
            }
        }
        let members = channel.members().to_vec();
        let is_member = |node: usize| members.iter().any(|member| member.index() == node);
        let slot =
            Slot { channel, members: (0..self.peers.len()).map(is_member).collect(), unsent: 0 };
        self.channels.open.insert(id, slot);
        self.channels.faults.extend(fault.map(|error| (id, error)));
        // What a node has said comes before its departure.
        self.reconsider(now);
        for node in members {
            let peer = self.peers.get(node.index()).and_then(Option::as_ref);
            // A departure that nobody has been told of is told to all channels, in this turn.
            let gone = peer.filter(|peer| peer.reported).and_then(|peer| peer.gone.clone());
            if let Some(why) = gone
                && let Some(slot) = self.channels.open.get_mut(&id)
            {
                let told = slot.channel.handle_gone(node, &why, false);
                self.channels.faults.extend(told.err().map(|error| (id, error)));
            }
        }
    }

    /// The link to `node` is ready. `closed`: nothing more comes than what is there to be read.
    pub(crate) fn handle_ready(
        &mut self,
        node: NodeId,
        readable: bool,
        writable: bool,
        closed: bool,
    ) {
        if let Some(peer) = self.peers.get_mut(node.index()).and_then(Option::as_mut) {
            peer.handle_ready(readable, writable, closed);
        }
    }

    /// The links, to be watched.
    pub(crate) fn links(&mut self) -> impl Iterator<Item = (NodeId, &mut dyn Link)> {
        self.peers.iter_mut().flatten().map(|peer| (peer.node(), peer.link()))
    }

    /// Bytes that links have taken and given so far.
    pub(crate) fn moved(&self) -> u64 {
        self.peers.iter().flatten().map(|peer| peer.written + peer.read).sum()
    }

    /// Whether nothing is under way, and nothing may come unasked.
    pub(crate) fn is_idle(&self) -> bool {
        let needed = |slot: &Slot| slot.channel.needs_driver();
        self.closing.is_none()
            && !self.channels.open.values().any(needed)
            && !self.peers.iter().flatten().any(Peer::may_write)
    }

    /// Whether a program waits for one of the channels.
    pub(crate) fn is_awaited(&self) -> bool {
        self.channels.open.values().any(|slot| slot.channel.is_awaited())
    }

    /// Whether programs that wait should look again, since the last time this was asked.
    pub(crate) fn take_progressed(&mut self) -> bool {
        std::mem::take(&mut self.progressed)
    }

    /// Whether a program has told a channel to do something, since the last time this was asked.
    pub(crate) fn take_commanded(&mut self) -> bool {
        std::mem::take(&mut self.commanded)
    }

    /// Reads, lets channels work, and writes: a share of what can be done now. Then looks at what
    /// is due, and closes channels that have failed.
    pub(crate) fn turn(&mut self, now: Duration) -> Next {
        let now = self.run_at(now);
        match self.take_turn(now) {
            Next::Sleep(wake) => Next::Sleep(self.time.real(wake)),
            next => next,
        }
    }

    fn take_turn(&mut self, now: Duration) -> Next {
        if let Some(end) = self.closing {
            self.close_failed();
            return self.take_leave(now, end);
        }
        for peer in self.peers.iter_mut().flatten().filter(|peer| peer.may_read()) {
            peer.read(&mut self.channels, &mut self.scratch, now);
        }
        let polled = self.poll(now);
        let held = self.write_burst(now);
        if now >= self.next_tick {
            self.next_tick = now + TICK.min(self.silence / 4);
            self.tick(now);
        }
        self.note_gone();
        let failed = self.close_failed();
        // A channel that is closed may have left room for frames that had to wait.
        let moved = (polled.reconsider || failed) && self.reconsider(now);
        // A link that the budget holds back is not ready before its time.
        let may_write = |peer: &Peer| peer.may_write() && !(held.is_some() && peer.is_budgeted());
        let ready = |peer: &Peer| peer.may_read() || may_write(peer);
        let due = std::mem::take(&mut self.channels.due);
        if polled.busy || due || failed || moved || self.peers.iter().flatten().any(ready) {
            return Next::Again;
        }
        let sign = self.peers.iter().flatten().filter_map(Peer::sign_due).min();
        if sign.is_some_and(|due| due <= now) {
            self.give_signs(now);
            return Next::Again;
        }
        let wake = polled.wake.into_iter().chain(held).chain(sign).min();
        Next::Sleep(wake.map_or(self.next_tick, |wake| wake.min(self.next_tick)))
    }

    /// The node leaves: it says goodbye on every link. Channels that are still open are dropped.
    pub(crate) fn close(&mut self, now: Duration) {
        if self.closing.is_some() {
            return;
        }
        let now = self.run_at(now);
        // A channel may have been told to stop in the same breath: it says so to the others.
        self.poll(now);
        self.close_failed();
        let open: Vec<ChannelId> = self.channels.open.keys().copied().collect();
        open.into_iter().for_each(|id| self.remove(id));
        for peer in self.peers.iter_mut().flatten().filter(|peer| peer.gone.is_none()) {
            let bye = Header::bare(Kind::Bye, self.me, 0);
            peer.send(message(bye, Payload::None));
        }
        self.closing = Some(now + LINGER);
    }

    /// Closes every channel with `error`, because nobody can drive this engine any more.
    pub(crate) fn fail_all(&mut self, error: &Error) {
        let open: Vec<ChannelId> = self.channels.open.keys().copied().collect();
        self.channels.faults.extend(open.into_iter().map(|id| (id, error.clone())));
        self.close_failed();
    }

    /// Lets every channel do its work.
    fn poll(&mut self, now: Duration) -> Polled {
        let mut all = Polled::default();
        let mut over = Vec::new();
        let Channels { open, faults, .. } = &mut self.channels;
        for (&id, Slot { channel, unsent, .. }) in open {
            let (epoch, peers) = (channel.epoch(), &mut self.peers[..]);
            let mut out = Outgoing { me: self.me, id, epoch, peers, unsent };
            match channel.poll(now, &mut out) {
                Ok(polled) => {
                    all.busy |= polled.busy;
                    all.commanded |= polled.commanded;
                    all.reconsider |= polled.reconsider;
                    all.progressed |= polled.progressed;
                    all.wake = all.wake.into_iter().chain(polled.wake).min();
                    if polled.over {
                        over.push(id);
                    }
                }
                Err(error) => faults.push((id, error)),
            }
        }
        for id in over {
            self.remove(id);
            all.progressed = true;
            all.reconsider = true;
        }
        self.progressed |= all.progressed;
        self.commanded |= all.commanded;
        all
    }

    /// Writes to the peers in turn until a burst is out. The rest is written in the next turn,
    /// after reading: so what is on its way between two nodes of one host stays in the cache.
    /// Returns when the budget has room again, if it holds something back.
    fn write_burst(&mut self, now: Duration) -> Option<Duration> {
        let limited = self.allowance.is_limited();
        let held = if limited { self.write_within_budget(now) } else { None };
        let nodes = self.peers.len();
        let mut left = BURST;
        let first = self.turn;
        for node in (0..nodes).map(|i| (first + i) % nodes) {
            let Some(peer) = &mut self.peers[node] else { continue };
            if limited && peer.is_budgeted() {
                continue;
            }
            left = left.saturating_sub(peer.write(&mut self.channels, usize::MAX, now));
            if left == 0 {
                self.turn = node + 1;
                break;
            }
        }
        held
    }

    /// Tells the channels which peers are gone, once for each peer.
    fn note_gone(&mut self) {
        for peer in self.peers.iter_mut().flatten() {
            let Some(why) = peer.gone.clone().filter(|_| !peer.reported) else { continue };
            peer.reported = true;
            let node = peer.node();
            // It is not written to any more: if it lives, it hears that now. If this fails, it is dead.
            let _ = peer.link().finish();
            let mut undelivered = Vec::new();
            peer.discard(|id, receipt, payload| undelivered.push((id, receipt, payload)));
            for (&id, slot) in &mut self.channels.open {
                if slot.members[node.index()] {
                    let unsent = undelivered.iter().any(|(of, ..)| *of == id);
                    let told = slot.channel.handle_gone(node, &why, unsent);
                    self.channels.faults.extend(told.err().map(|error| (id, error)));
                }
            }
            // A channel that goes on without the messages that were not delivered counts them as
            // sent. A channel that has failed must not.
            for (id, receipt, payload) in undelivered {
                if !self.channels.faults.iter().any(|(failed, _)| *failed == id) {
                    self.channels.let_go(id, receipt, payload);
                }
            }
        }
    }

    /// Closes the channels that have failed, and tells their members why. True if there were any.
    fn close_failed(&mut self) -> bool {
        let faults = std::mem::take(&mut self.channels.faults);
        self.channels.broken_by.clear();
        let any = !faults.is_empty();
        for (id, error) in faults {
            // The first reason is the one that counts.
            let Some(mut slot) = self.channels.open.remove(&id) else { continue };
            let error = self.after_absence(error);
            self.channels.ended.insert(id);
            self.peers.iter_mut().flatten().for_each(|peer| peer.let_go(id));
            let epoch = slot.channel.epoch();
            let LastWords { mut reason, speaker } = slot.channel.fail(error);
            reason.truncate(reason.floor_char_boundary(MAX_ABORT));
            tracing::debug!(node = %self.me, channel = %id, %reason, "a channel stops");
            let mut unsent = 0;
            let peers = &mut self.peers[..];
            let mut out = Outgoing { me: self.me, id, epoch, peers, unsent: &mut unsent };
            for &member in slot.channel.members() {
                let mut abort = Header::bare(Kind::Abort, self.me, reason.len() as u32);
                abort.chunk.index = speaker;
                out.send(member, message(abort, Payload::Text(reason.as_bytes().into())));
            }
            self.progressed = true;
        }
        any
    }

    /// Removes a channel that is over, or whose node leaves.
    fn remove(&mut self, id: ChannelId) {
        self.peers.iter_mut().flatten().for_each(|peer| peer.let_go(id));
        self.channels.open.remove(&id);
        self.channels.ended.insert(id);
    }

    /// Offers the frames that had to wait to the channels once more. True if something has moved.
    fn reconsider(&mut self, now: Duration) -> bool {
        let mut moved = false;
        for peer in self.peers.iter_mut().flatten() {
            moved |= peer.reconsider(&mut self.channels, &mut self.scratch, now);
        }
        moved
    }

    /// Writes what is left to every peer, the goodbye last, then waits until the peer closes the
    /// connection. A connection that is closed while something in it is unread may lose what it has
    /// still to deliver. Shared memory does not lose it.
    fn take_leave(&mut self, now: Duration, end: Duration) -> Next {
        for slot in &mut self.peers {
            let Some(peer) = slot else { continue };
            let is_gone = peer.gone.is_some();
            // What is left is last words, a goodbye, and the rest of a frame. It is not held back.
            let wrote = peer.write(&mut self.channels, usize::MAX, now);
            if peer.is_budgeted() {
                self.allowance.handle_sent(wrote);
            }
            let said = is_gone || !peer.has_unsent();
            if said && (is_gone || peer.keeps_what_was_written() || peer.drain(&mut self.scratch)) {
                let _ = peer.link().finish();
                *slot = None;
            }
        }
        let waiting = self.peers.iter().any(Option::is_some);
        if waiting && now < end {
            return Next::Sleep(end.min(now + TICK));
        }
        self.peers.iter_mut().for_each(|slot| *slot = None);
        Next::Stop
    }
}

impl Channels {
    /// Where the payload of a frame goes. `None`: nowhere, because its channel is closed here or
    /// fails now.
    fn open(&mut self, header: &Header, now: Duration) -> Option<Landing> {
        let id = header.channel;
        // The channel is closed at the end of the turn. What comes behind the frame that broke it must
        // not complete anything.
        if self.broken_by.contains(&(id, header.sender)) {
            return None;
        }
        let Some(Slot { channel, .. }) = self.open.get_mut(&id) else {
            // The session or group of this channel may be about to start here.
            return (!self.ended.contains(&id)).then_some(Landing::Later);
        };
        let landing = if header.epoch > channel.epoch() {
            Ok(Landing::Later)
        } else {
            channel.open(header, now)
        };
        match landing {
            Ok(landing) => {
                if !matches!(landing, Landing::Later) {
                    let bytes = Header::SIZE + header.length as usize;
                    channel.counters().count_received(bytes);
                }
                Some(landing)
            }
            Err(error) => {
                self.faults.push((id, error));
                self.broken_by.push((id, header.sender));
                None
            }
        }
    }

    /// Whether `node` may say anything on the channel, as far as is known: it may be opened later.
    fn admits(&self, id: ChannelId, node: NodeId) -> bool {
        self.open.get(&id).is_none_or(|slot| slot.members[node.index()])
    }

    /// Whether channel `id` is open here, or was. If not, it may still be opened.
    fn is_known(&self, id: ChannelId) -> bool {
        self.open.contains_key(&id) || self.ended.contains(&id)
    }

    fn combine(&mut self, id: ChannelId, from: NodeId, piece: &[u8]) {
        if let Some(slot) = self.open.get_mut(&id) {
            slot.channel.combine(from, piece);
        }
    }

    fn landed(&mut self, id: ChannelId, from: NodeId) {
        if let Some(slot) = self.open.get_mut(&id) {
            slot.channel.landed(from);
        }
    }

    /// A link has taken a whole frame of channel `id`.
    fn sent(
        &mut self,
        id: ChannelId,
        bytes: usize,
        layer: Option<u32>,
        receipt: Option<u64>,
        payload: Payload,
    ) {
        let Some(slot) = self.open.get_mut(&id) else { return };
        slot.channel.counters().count_sent(bytes, layer);
        if let Some(receipt) = receipt {
            self.let_go(id, receipt, payload);
        }
    }

    /// A message has left, or will not leave any more.
    fn let_go(&mut self, id: ChannelId, receipt: u64, payload: Payload) {
        if let Some(slot) = self.open.get_mut(&id) {
            slot.unsent -= 1;
            self.due |= slot.channel.sent(Sent { receipt, payload });
        }
    }

    fn goodbye(&mut self, id: ChannelId, from: NodeId) {
        if let Some(slot) = self.open.get_mut(&id) {
            slot.channel.handle_goodbye(from);
        }
    }

    fn aborted(&mut self, id: ChannelId, from: NodeId, speaker: u32, reason: String) {
        if let Some(slot) = self.open.get_mut(&id) {
            self.faults.push((id, slot.channel.aborted(from, speaker, reason)));
        }
    }

    /// Whether some channel needs frames from `node` now.
    fn await_from(&self, node: NodeId) -> bool {
        self.open.values().any(|slot| slot.channel.awaits(node))
    }
}

/// A frame that is about the connection or about a whole channel.
fn message(header: Header, payload: Payload) -> Message {
    let urgency = urgency(header.kind, LayerId(0));
    Message::new(header, payload, urgency, 0)
}
