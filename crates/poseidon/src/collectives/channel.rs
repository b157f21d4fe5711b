//! A group as a channel of one lane's engine: its operations there, and which of them a frame belongs
//! to.

use super::flow::{Mode, Stated};
use super::members::{Members, Ways};
use super::operation::{Key, Operation, PIECE, Start};
use super::request::{Request, Words, is_uneven};
use super::shared::{Command, HOME, Part, Shared, Taken};
use crate::Error;
use crate::engine::channel::{Channel, Gone, Landing, LastWords, Outgoing, Polled, Sent};
use crate::engine::outbox::{Message, Payload};
use crate::engine::traffic::LaneCounters;
use crate::memory::region::Region;
use poseidon_core::queue::urgency;
use poseidon_core::reduce::reduce;
use poseidon_core::wire::{Header, Kind, Place, Signature};
use poseidon_core::{ChannelId, Epoch, LayerId, NodeId};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// One rank of a group, on one lane.
pub(super) struct GroupChannel {
    id: ChannelId,
    /// Of the group's lanes.
    lane: usize,
    me: u16,
    /// By rank: the node that has it.
    ranks: Vec<NodeId>,
    /// The nodes of the other ranks.
    members: Vec<NodeId>,
    /// What ranks are called in errors.
    names: Vec<String>,
    /// Which ranks send to which.
    ways: Arc<Ways>,
    shared: Arc<Shared>,
    counters: LaneCounters,
    /// Operations under way, in the order they were begun.
    operations: VecDeque<Operation>,
    /// Operations begun so far.
    tickets: u64,
    /// The number after that of the last collective that has a part on this lane.
    sequence: u64,
    /// The collectives that were done last, and what they were.
    done: VecDeque<(u64, Signature)>,
    /// By rank: messages sent to it.
    messages: Vec<u64>,
    /// Messages that have become ready to be sent, each with its receiver's rank.
    outgoing: Vec<(usize, Message)>,
    /// By rank: the payload that comes from it now.
    arriving: Vec<Option<Arriving>>,
    /// By rank: the last frame from it that no operation has asked for. It may still wait.
    unasked: Vec<Option<Header>>,
    /// By rank: nothing more comes from it, and why.
    gone: Vec<Option<String>>,
    /// By rank: a message for this rank could not be delivered.
    undelivered: Vec<bool>,
    /// This rank has left the group: it begins nothing more.
    left: bool,
    closed: bool,
}

/// A payload that is on its way in.
#[derive(Clone, Copy, Debug)]
struct Arriving {
    ticket: u64,
    place: Place,
    region: Region,
    mode: Mode,
    /// Bytes of the region that have been combined.
    done: usize,
}

impl GroupChannel {
    pub(super) fn new(id: ChannelId, lane: usize, members: Members, shared: Arc<Shared>) -> Self {
        let Members { rank: me, nodes: ranks, names, ways } = members;
        let size = ranks.len();
        let own = ranks[usize::from(me)];
        Self {
            id,
            lane,
            me,
            members: ranks.iter().copied().filter(|&node| node != own).collect(),
            ranks,
            names,
            ways,
            shared,
            counters: LaneCounters::default(),
            operations: VecDeque::new(),
            tickets: 0,
            sequence: 0,
            done: VecDeque::new(),
            messages: vec![0; size],
            outgoing: Vec::new(),
            arriving: vec![None; size],
            unasked: vec![None; size],
            gone: vec![None; size],
            undelivered: vec![false; size],
            left: false,
            closed: false,
        }
    }

    /// Begins this lane's part of an operation, which has been checked.
    fn begin(&mut self, part: Part, now: Duration) {
        let Part { request, collective, timeout, completion } = part;
        self.tickets += 1;
        let (sequence, signature) = match (collective, &request) {
            (Some((sequence, signature)), _) => {
                self.sequence = sequence + 1;
                (sequence, Some(signature))
            }
            (None, Request::Send { to, .. }) => {
                let sent = &mut self.messages[usize::from(*to)];
                *sent += 1;
                (*sent, None)
            }
            (None, _) => (0, None),
        };
        let start = Start {
            ticket: self.tickets,
            sequence,
            signature,
            begun: now,
            deadline: now.saturating_add(timeout),
            completion,
        };
        let (outgoing, ways) = (&mut self.outgoing, &self.ways);
        let send = |rank, message| outgoing.push((rank, message));
        let operation = Operation::begin(request, start, ways, send);
        self.operations.push_back(operation);
    }

    fn leave(&mut self, out: &mut Outgoing<'_>) -> Result<(), Error> {
        if !self.operations.is_empty() {
            let reason = "it left the group while operations were under way".into();
            return Err(Error::Aborted { node: self.name(self.me.into()), reason });
        }
        self.left = true;
        for &node in &self.members {
            let bye = Header::bare(Kind::Bye, node, 0);
            let urgency = urgency(Kind::Bye, LayerId(0));
            // A rank that is gone need not be told.
            out.send(node, Message::new(bye, Payload::None, urgency, 0));
        }
        Ok(())
    }

    /// Hands the messages that became ready to the engine.
    fn post(&mut self, out: &mut Outgoing<'_>) {
        for (rank, message) in self.outgoing.drain(..) {
            if self.gone[rank].is_some() || !out.send(self.ranks[rank], message) {
                self.undelivered[rank] = true;
            }
        }
    }

    /// Reports operations that are complete. True if there were any.
    fn report_complete(&mut self) -> bool {
        let mut index = 0;
        let mut any = false;
        while let Some(operation) = self.operations.get_mut(index) {
            if !operation.is_complete() {
                index += 1;
                continue;
            }
            operation.conclude();
            let completion = operation.completion.clone();
            if let Key::Collective { sequence, signature } = operation.key {
                self.done.truncate(REMEMBERED - 1);
                self.done.push_front((sequence, signature));
            }
            // The operation, with its regions, is dropped before it is reported: with the report
            // the program takes its tensors back.
            self.operations.remove(index);
            self.shared.report(self.lane, &completion, Ok(()));
            any = true;
        }
        any
    }

    /// Fails if an operation awaits something from a rank that is gone, or if a message for such a
    /// rank was not delivered. Until then a rank may be gone without harm.
    fn check_gone(&self) -> Result<(), Error> {
        let me = usize::from(self.me);
        let alone = (0..self.gone.len()).all(|rank| rank == me || self.gone[rank].is_some());
        for (rank, how) in self.gone.iter().enumerate() {
            let Some(how) = how else { continue };
            // A receive from any rank may still get its message from another rank.
            let mut awaiting = self.operations.iter().filter(|o| o.awaits(rank));
            let awaiting = awaiting.find(|operation| alone || !operation.is_from_any());
            if awaiting.is_some() || self.undelivered[rank] {
                return Err(Error::Lost {
                    node: self.name(rank),
                    how: how.clone(),
                    awaited: awaiting.map(Operation::words),
                });
            }
        }
        Ok(())
    }

    fn check_overdue(&self, now: Duration) -> Result<(), Error> {
        let late = self.operations.iter().find(|operation| operation.deadline <= now);
        let Some(operation) = late else { return Ok(()) };
        let missing = (0..self.names.len()).filter(|&rank| operation.awaits(rank));
        let name = |rank: usize| {
            let mut name = self.name(rank);
            if operation.awaits_others_through(rank) {
                name += ", or a rank that sends through it";
            }
            if let Some(unasked) = &self.unasked[rank] {
                let words = unasked_words(unasked);
                name += &format!(" (it has sent {words}, which nothing here has asked for yet)");
            }
            name
        };
        Err(Error::Overdue {
            operation: operation.words(),
            waited: now.saturating_sub(operation.begun),
            missing: missing.map(name).collect(),
        })
    }

    /// Which operation a frame from `rank` belongs to, and where its payload goes. `None`: no
    /// operation that was begun here wants the frame yet.
    fn route(&mut self, rank: usize, header: &Header) -> Result<Option<Arriving>, Error> {
        match header.kind {
            Kind::Collective => self.route_collective(rank, header),
            _ => self.route_message(rank, header),
        }
    }

    fn route_collective(&self, rank: usize, header: &Header) -> Result<Option<Arriving>, Error> {
        let garbage = |why| Error::Garbage { node: self.name(rank), why };
        let Some((mut theirs, place)) = Signature::read(header) else {
            return Err(garbage("a collective of an unknown type or operation".into()));
        };
        let uneven = is_uneven(theirs.operation);
        let stated = uneven.then(|| Stated(std::mem::take(&mut theirs.count)));
        let mismatch = |mine: Signature, theirs: String| Error::Mismatch {
            sequence: place.sequence,
            mine: format!("{} on {}", Words(mine), self.name(self.me.into())),
            theirs: format!("{theirs} on {}", self.name(rank)),
        };
        let at = |o: &&Operation| matches!(o.key, Key::Collective { sequence, .. } if sequence == place.sequence);
        let Some(operation) = self.operations.iter().find(at) else {
            if place.sequence >= self.sequence {
                return Ok(None);
            }
            let done = self.done.iter().find(|(sequence, _)| *sequence == place.sequence);
            if let Some((_, mine)) = done.filter(|(_, mine)| *mine != theirs) {
                return Err(mismatch(*mine, Words(theirs).to_string()));
            }
            // Only large operations have a part on this lane. The home lane knows what it was here.
            if done.is_none() && self.lane != HOME {
                return Ok(None);
            }
            let words = format!("{} (collective {})", Words(theirs), place.sequence);
            return Err(garbage(format!("a piece of {words}, which is over here")));
        };
        let Key::Collective { signature, .. } = operation.key else { return Ok(None) };
        if signature != theirs {
            return Err(mismatch(signature, Words(theirs).to_string()));
        }
        let opened = operation.open(rank, place, header.length as usize, stated);
        let (region, mode) = opened.map_err(|why| {
            mismatch(signature, format!("{} with other lengths ({why})", Words(theirs)))
        })?;
        Ok(Some(Arriving { ticket: operation.ticket, place, region, mode, done: 0 }))
    }

    fn route_message(&mut self, rank: usize, header: &Header) -> Result<Option<Arriving>, Error> {
        let (place, tag) = (Place::read(header), header.chunk.layer.0);
        let sender = rank as u16;
        let mine = |operation: &&mut Operation| match operation.key {
            Key::Receive { bound: Some(bound), .. } => bound == (sender, place.sequence),
            Key::Receive { from, tag: wanted, bound: None, .. } => {
                place.piece == 0 && wanted == tag && from.is_none_or(|from| from == sender)
            }
            _ => false,
        };
        let Some(operation) = self.operations.iter_mut().find(mine) else { return Ok(None) };
        if place.piece == 0 {
            operation.bind(sender, place.sequence);
            operation.completion.set_source(sender);
        }
        let stated = Stated(header.value.to_bits());
        let opened = operation.open(rank, place, header.length as usize, Some(stated));
        let (region, mode) = opened.map_err(|why| {
            let receive = operation.words();
            let (node, receiver) = (self.names[rank].clone(), &self.names[usize::from(self.me)]);
            let (sent, why) = (stated.to_string(), format!("{why}, in {receive} on {receiver}"));
            Error::Message { node, tag, sent, why }
        })?;
        Ok(Some(Arriving { ticket: operation.ticket, place, region, mode, done: 0 }))
    }

    /// Nothing more happens here: what is under way fails.
    fn close(&mut self, error: Error) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        for operation in std::mem::take(&mut self.operations) {
            let completion = operation.completion.clone();
            drop(operation);
            self.shared.report(self.lane, &completion, Err(error.clone()));
        }
        self.shared.close(self.lane, error);
    }

    fn rank_of(&self, node: NodeId) -> Option<usize> {
        self.ranks.iter().position(|&other| other == node)
    }

    fn name(&self, rank: usize) -> String {
        self.names[rank].clone()
    }
}

// SAFETY: regions are of an operation's memory. It is kept until all is sent and has landed.
unsafe impl Channel for GroupChannel {
    fn id(&self) -> ChannelId {
        self.id
    }

    fn epoch(&self) -> Epoch {
        Epoch::FIRST
    }

    fn members(&self) -> &[NodeId] {
        &self.members
    }

    fn counters(&self) -> &LaneCounters {
        &self.counters
    }

    fn open(&mut self, header: &Header, _: Duration) -> Result<Landing, Error> {
        let (kind, length) = (header.kind, header.length as usize);
        let Some(rank) = self.rank_of(header.sender) else {
            let node = format!("node {}", header.sender);
            return Err(Error::Garbage { node, why: "a frame of a group it is not in".into() });
        };
        let known = kind == Kind::Collective || (kind == Kind::Message && self.lane == HOME);
        if !known || length > PIECE {
            let why = format!("a {kind:?} frame of {length} bytes for a group");
            return Err(Error::Garbage { node: self.name(rank), why });
        }
        let Some(arriving) = self.route(rank, header)? else {
            self.unasked[rank] = Some(*header);
            return Ok(Landing::Later);
        };
        let frame = |header: &Header| (header.kind, header.chunk, header.clock);
        self.unasked[rank] = self.unasked[rank].filter(|unasked| frame(unasked) != frame(header));
        self.arriving[rank] = Some(arriving);
        Ok(match arriving.mode {
            Mode::Assign => Landing::Assign { region: arriving.region, past_cache: false },
            Mode::Reduce(dtype, _) => Landing::Combine { width: dtype.size() },
        })
    }

    fn combine(&mut self, from: NodeId, piece: &[u8]) {
        let Some(rank) = self.rank_of(from) else { return };
        if let Some(Arriving { region, mode: Mode::Reduce(dtype, op), done, .. }) =
            &mut self.arriving[rank]
        {
            // SAFETY: the operation owns the region until it is complete, which it is not before this
            // payload is; the engine is one thread at a time.
            let into = unsafe { region.part(*done..*done + piece.len()).bytes_mut() };
            reduce(*dtype, *op, into, piece);
            *done += piece.len();
        }
    }

    fn landed(&mut self, from: NodeId) {
        let Some(rank) = self.rank_of(from) else { return };
        let Some(Arriving { ticket, place, .. }) = self.arriving[rank].take() else { return };
        let outgoing = &mut self.outgoing;
        if let Some(operation) = self.operations.iter_mut().find(|o| o.ticket == ticket) {
            operation.landed(rank, place, |to, run| outgoing.push((to, run)));
        }
    }

    fn sent(&mut self, sent: Sent) -> bool {
        let Some(operation) = self.operations.iter_mut().find(|o| o.ticket == sent.receipt) else {
            return false;
        };
        operation.sent();
        operation.is_complete()
    }

    fn handle_goodbye(&mut self, from: NodeId) {
        if let Some(rank) = self.rank_of(from) {
            self.gone[rank].get_or_insert("it has left the group".into());
        }
    }

    fn handle_gone(&mut self, node: NodeId, why: &Gone, undelivered: bool) -> Result<(), Error> {
        let Some(rank) = self.rank_of(node) else { return Ok(()) };
        self.undelivered[rank] |= undelivered;
        let how = match why {
            Gone::Left => "it has left the group".into(),
            Gone::Lost(how) => how.clone(),
            Gone::Garbage(why) => {
                return Err(Error::Garbage { node: self.name(rank), why: why.clone() });
            }
            Gone::Changed(header) => {
                let frame = match header.filter(|header| header.channel == self.id) {
                    Some(header) => {
                        let Place { sequence, piece, .. } = Place::read(&header);
                        format!("operation {sequence}, piece {piece}")
                    }
                    None => "its header".into(),
                };
                return Err(Error::Changed { node: self.name(rank), frame });
            }
        };
        self.gone[rank].get_or_insert(how);
        if undelivered { self.check_gone() } else { Ok(()) }
    }

    fn aborted(&self, from: NodeId, speaker: u32, reason: String) -> Error {
        let rank = self.rank_of(from).unwrap_or_default();
        let node = self.names.get(speaker as usize).unwrap_or(&self.names[rank]).clone();
        Error::Aborted { node, reason }
    }

    fn awaits(&self, node: NodeId) -> bool {
        let rank = self.rank_of(node);
        rank.is_some_and(|rank| self.operations.iter().any(|o| o.awaits(rank)))
    }

    fn needs_driver(&self) -> bool {
        !self.operations.is_empty() || self.left
    }

    fn is_awaited(&self) -> bool {
        !self.operations.is_empty()
    }

    fn poll(&mut self, now: Duration, out: &mut Outgoing<'_>) -> Result<Polled, Error> {
        let mut begun = false;
        loop {
            // The lock is not held while the channel works: others may begin more.
            match self.shared.take(self.lane) {
                Taken::Command(Command::Begin(part)) if !self.left => {
                    self.begin(part, now);
                    begun = true;
                }
                Taken::Command(Command::Begin(part)) => {
                    let error = has_left(self.name(self.me.into()));
                    self.shared.report(self.lane, &part.completion, Err(error));
                }
                Taken::Command(Command::Abort(reason)) => {
                    return Err(Error::Aborted { node: self.name(self.me.into()), reason });
                }
                Taken::Command(Command::Leave) if !self.left => self.leave(out)?,
                Taken::Command(Command::Leave) => {}
                Taken::Closed(error) if !self.left => return Err(error),
                Taken::Closed(_) | Taken::Nothing => break,
            }
        }
        self.post(out);
        let progressed = self.report_complete();
        // The frames of an operation that has just begun may be here already, from a rank that is
        // gone since. The operation is judged in the next poll, after these frames were offered to
        // it.
        if !begun && self.gone.iter().any(Option::is_some) {
            self.check_gone()?;
        }
        self.check_overdue(now)?;
        let wake = self.operations.iter().map(|operation| operation.deadline).min();
        let over = self.left && !out.has_unsent();
        Ok(Polled { busy: begun, commanded: begun, wake, reconsider: begun, progressed, over })
    }

    fn tick(&mut self, _: Duration) -> Result<(), Error> {
        Ok(())
    }

    fn fail(&mut self, error: Error) -> LastWords {
        // The words of another rank are passed on as that rank's, not as this rank's.
        let (speaker, reason) = match &error {
            Error::Aborted { node, reason } => {
                let speaker = self.names.iter().position(|name| name == node);
                (speaker.unwrap_or(self.me.into()), reason.clone())
            }
            other => (self.me.into(), other.to_string()),
        };
        self.report_complete();
        self.close(error);
        LastWords { reason, speaker: speaker as u32 }
    }
}

impl Drop for GroupChannel {
    fn drop(&mut self) {
        self.close(has_left(self.name(self.me.into())));
    }
}

/// How many collectives that are done are remembered. If another rank did something else under the
/// same number, the error says what it was here.
const REMEMBERED: usize = 64;

/// A frame of an operation that was not begun here, in words.
fn unasked_words(header: &Header) -> String {
    match (header.kind, Signature::read(header)) {
        (Kind::Message, _) => format!("a message with tag {}", header.chunk.layer.0),
        (_, Some((signature, place))) => {
            format!("a piece of {} (collective {})", Words(signature), place.sequence)
        }
        (_, None) => "a piece of an unknown operation".into(),
    }
}

fn has_left(node: String) -> Error {
    Error::Aborted { node, reason: "it has left the group".into() }
}
