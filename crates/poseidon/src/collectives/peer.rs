//! A rank's end of the link to another: frames in, frames out.

use super::course::{Mode, Run};
use super::desk::{Desk, Landing};
use super::tensor::Region;
use crate::Error;
use poseidon_core::NodeId;
use poseidon_core::reduce::reduce;
use poseidon_core::wire::{Header, Kind, MAX_ABORT};
use poseidon_link::{Carrier, Link};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::time::Duration;

pub(super) struct Peer {
    pub(super) rank: usize,
    pub(super) link: Box<dyn Link>,
    /// Waiting to be sent, operations in the order they were begun.
    runs: VecDeque<Run>,
    /// On their way: written together, in order.
    batch: VecDeque<Frame>,
    /// Bytes of the batch's first frame that the link has taken.
    written: usize,
    head: [u8; Header::SIZE],
    have: usize,
    state: State,
    /// Frames nobody had asked for, that were in the way of one that somebody waits for.
    aside: VecDeque<(Header, Vec<u8>)>,
    /// As for a session's links: set by readiness events, cleared by a short read or write.
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) heard: Duration,
    pub(super) spoke: Duration,
    closed: bool,
    /// Nothing more comes from it, and why.
    pub(super) gone: Option<String>,
}

/// What the next bytes are.
enum State {
    Header,
    /// A frame nobody has asked for: it stays in the link.
    Parked(Header),
    Payload {
        landing: Landing,
        done: usize,
        /// Bytes of an element that the network cut in two.
        carry: [u8; 8],
        carried: usize,
    },
    Aside {
        header: Header,
        bytes: Vec<u8>,
        done: usize,
    },
    Abort {
        /// The rank whose words they are.
        speaker: usize,
        text: Vec<u8>,
        done: usize,
    },
}

struct Frame {
    header: [u8; Header::SIZE],
    payload: Payload,
    /// The operation this is the last frame of a run of.
    last_of: Option<u64>,
}

enum Payload {
    Region(Region),
    Text(Box<[u8]>),
}

/// As for a session's lane: enough that short frames share a system call.
const BATCH_BYTES: usize = 128 << 10;
const BATCH_FRAMES: usize = 16;
/// Bytes taken from one peer before the others get their turn.
const READ_BUDGET: usize = 512 << 10;

impl Peer {
    pub(super) fn new(rank: usize, link: Box<dyn Link>, now: Duration) -> Self {
        Self {
            rank,
            link,
            runs: VecDeque::new(),
            batch: VecDeque::new(),
            written: 0,
            head: [0; Header::SIZE],
            have: 0,
            state: State::Header,
            aside: VecDeque::new(),
            readable: true,
            writable: true,
            heard: now,
            spoke: now,
            closed: false,
            gone: None,
        }
    }

    /// The link is ready. Shared memory has one bell for both ways.
    pub(super) fn handle_ready(&mut self, readable: bool, writable: bool, closed: bool) {
        let both = self.link.carrier() == Carrier::Shared;
        if let Err(error) = self.link.handle_ready() {
            self.gone.get_or_insert(error.to_string());
        }
        self.closed |= closed;
        self.readable |= readable || both || closed;
        self.writable |= writable || both;
    }

    /// Queues a run: before those of operations begun later, so that an operation is not held up by
    /// its successors.
    pub(super) fn send(&mut self, run: Run) {
        let after = self.runs.iter().rposition(|other| other.ticket <= run.ticket);
        self.runs.insert(after.map_or(0, |position| position + 1), run);
    }

    /// Queues a frame that is about the connection, before everything that has not been begun.
    pub(super) fn say(&mut self, header: &Header, text: &[u8]) {
        let payload = Payload::Text(text.into());
        self.batch.push_back(Frame { header: header.encode(), payload, last_of: None });
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.batch.is_empty() || !self.runs.is_empty()
    }

    /// Whether it may be read: it is not when a frame waits that nobody has asked for.
    pub(super) fn may_read(&self) -> bool {
        self.readable && self.gone.is_none() && !self.is_parked()
    }

    pub(super) fn is_parked(&self) -> bool {
        matches!(self.state, State::Parked(_))
    }

    /// Forgets what the link has not begun to take.
    pub(super) fn drop_unsent(&mut self) {
        self.runs.clear();
        self.batch.truncate(usize::from(self.written > 0));
    }

    /// Writes the next frames, as many as go together. Returns the bytes the link has taken.
    pub(super) fn write(&mut self, desk: &mut Desk, now: Duration) -> usize {
        if !self.writable || self.gone.is_some() {
            return 0;
        }
        if self.batch.is_empty() {
            self.fill_batch(NodeId(desk.me));
        }
        let mut slices = [IoSlice::new(&[]); 2 * BATCH_FRAMES];
        let (mut count, mut offered, mut skip) = (0, 0, self.written);
        'frames: for frame in &self.batch {
            for part in [&frame.header[..], frame.payload.bytes()] {
                let rest = &part[skip.min(part.len())..];
                skip -= part.len() - rest.len();
                if !rest.is_empty() {
                    if count == slices.len() {
                        break 'frames;
                    }
                    slices[count] = IoSlice::new(rest);
                    offered += rest.len();
                    count += 1;
                }
            }
        }
        if count == 0 {
            return 0;
        }
        match self.link.write(&slices[..count]) {
            Ok(taken) => {
                self.written += taken;
                self.spoke = now;
                self.writable = taken == offered;
                while let Some(first) = self.batch.front()
                    && self.written >= first.len()
                {
                    self.written -= first.len();
                    if let Some(ticket) = self.batch.pop_front().and_then(|frame| frame.last_of) {
                        desk.sent(ticket);
                    }
                }
                taken
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.writable = false;
                0
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
            Err(e) => {
                // It may have said why, before it closed: the next reads say so, or that it is gone.
                self.writable = false;
                self.closed = true;
                self.readable = true;
                if self.is_parked() {
                    self.gone.get_or_insert(e.to_string());
                }
                0
            }
        }
    }

    fn fill_batch(&mut self, me: NodeId) {
        let mut bytes = 0;
        while bytes < BATCH_BYTES && self.batch.len() < BATCH_FRAMES {
            let Some(run) = self.runs.front_mut() else { break };
            let (header, payload, last) = run.next(me);
            let last_of = last.then_some(run.ticket);
            bytes += Header::SIZE + payload.len;
            let payload = Payload::Region(payload);
            self.batch.push_back(Frame { header: header.encode(), payload, last_of });
            if last {
                self.runs.pop_front();
            }
        }
    }

    /// Reads until the link is empty, a frame nobody has asked for stops it, or the budget is spent.
    pub(super) fn read(
        &mut self,
        desk: &mut Desk,
        scratch: &mut [u64],
        now: Duration,
    ) -> Result<(), Error> {
        let mut budget = READ_BUDGET;
        while self.may_read() && budget > 0 {
            let (bytes, drained) = match self.read_once(scratch) {
                Ok(read) => read,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    break;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    self.gone = Some(e.to_string());
                    break;
                }
            };
            if bytes == 0 {
                self.gone = Some("it closed the connection without a goodbye".into());
                break;
            }
            self.heard = now;
            self.readable = !drained || self.closed;
            budget = budget.saturating_sub(bytes);
            while self.advance(desk)? {}
        }
        Ok(())
    }

    /// One system call: the rest of this payload and, in the same breath, the next header. Returns the
    /// bytes read and whether that was less than there was room for.
    fn read_once(&mut self, scratch: &mut [u64]) -> io::Result<(usize, bool)> {
        if let State::Payload { landing, done, carried: 0, .. } = &mut self.state
            && let Mode::Reduce(dtype, op) = landing.mode
        {
            // Where the bytes lie in memory already, they are combined from there.
            let ready = self.link.peek()?;
            let left = landing.region.len - *done;
            let whole = ready.len().min(left) / dtype.size() * dtype.size();
            if whole > 0 && ready.as_ptr().addr() % dtype.size() == 0 {
                // SAFETY: as below.
                let region = unsafe { landing.region.bytes_mut() };
                reduce(dtype, op, &mut region[*done..*done + whole], &ready[..whole]);
                self.link.consume(whole)?;
                *done += whole;
                return Ok((whole, false));
            }
        }
        let (head, have, link) = (&mut self.head, self.have, &mut *self.link);
        let mut read = |payload: &mut [u8], last: bool| {
            let head = if last { &mut head[have..] } else { &mut [] };
            let room = payload.len() + head.len();
            let n = link.read(&mut [IoSliceMut::new(payload), IoSliceMut::new(head)])?;
            Ok::<_, io::Error>((n.min(payload.len()), n - n.min(payload.len()), n < room))
        };
        let (payload, header, drained) = match &mut self.state {
            State::Header | State::Parked(_) => read(&mut [], true)?,
            State::Payload { landing, done, carry, carried } => {
                // SAFETY: the operation owns the region until it is complete, which it is not before
                // this payload is; the engine is one thread at a time.
                let region = unsafe { landing.region.bytes_mut() };
                match landing.mode {
                    Mode::Assign => {
                        let read = read(&mut region[*done..], true)?;
                        *done += read.0;
                        read
                    }
                    Mode::Reduce(dtype, op) => {
                        let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
                        bytes[..*carried].copy_from_slice(&carry[..*carried]);
                        let left = region.len() - *done - *carried;
                        let room = (bytes.len() - *carried).min(left);
                        let read = read(&mut bytes[*carried..*carried + room], room == left)?;
                        let have = *carried + read.0;
                        let whole = have - have % dtype.size();
                        reduce(dtype, op, &mut region[*done..*done + whole], &bytes[..whole]);
                        *done += whole;
                        *carried = have - whole;
                        carry[..*carried].copy_from_slice(&bytes[whole..have]);
                        read
                    }
                }
            }
            State::Aside { bytes, done, .. } | State::Abort { text: bytes, done, .. } => {
                let read = read(&mut bytes[*done..], true)?;
                *done += read.0;
                read
            }
        };
        self.have += header;
        Ok((payload + header, drained))
    }

    /// Finishes a payload that is all there, opens the next frame if its header is. True if there may
    /// be more to do without reading.
    fn advance(&mut self, desk: &mut Desk) -> Result<bool, Error> {
        let complete = match &self.state {
            State::Header => {
                if self.have < Header::SIZE || self.gone.is_some() {
                    return Ok(false);
                }
                self.have = 0;
                let header =
                    Header::decode(&self.head).map_err(|e| self.garbage(desk, e.to_string()))?;
                self.open(header, desk)?;
                return Ok(true);
            }
            State::Parked(_) => false,
            State::Payload { landing, done, .. } => *done == landing.region.len,
            State::Aside { bytes, done, .. } | State::Abort { text: bytes, done, .. } => {
                *done == bytes.len()
            }
        };
        if complete {
            match std::mem::replace(&mut self.state, State::Header) {
                State::Payload { landing, .. } => desk.landed(self.rank, &landing),
                State::Aside { header, bytes, .. } => {
                    self.aside.push_back((header, bytes));
                    self.replay(desk)?;
                }
                State::Abort { speaker, text, .. } => {
                    let reason = String::from_utf8_lossy(&text).into_owned();
                    let node = desk.names.get(speaker).unwrap_or(&desk.names[self.rank]).clone();
                    return Err(Error::Aborted { node, reason });
                }
                State::Header | State::Parked(_) => {}
            }
        }
        Ok(complete)
    }

    fn open(&mut self, header: Header, desk: &mut Desk) -> Result<(), Error> {
        let (length, kind) = (header.length as usize, header.kind);
        if header.sender.index() != self.rank {
            let it = header.sender;
            return Err(self.garbage(desk, format!("a frame of rank {it} of the group")));
        }
        match kind {
            Kind::Collective | Kind::Message => {
                if length > super::course::PIECE {
                    return Err(self.garbage(desk, format!("a piece of {length} bytes")));
                }
                self.state = match desk.route(self.rank, &header)? {
                    Some(landing) => State::Payload { landing, done: 0, carry: [0; 8], carried: 0 },
                    None if desk.awaiting(self.rank).is_some() => {
                        State::Aside { header, bytes: vec![0; length], done: 0 }
                    }
                    None => State::Parked(header),
                };
            }
            Kind::Heartbeat | Kind::Bye if length > 0 => {
                return Err(self.garbage(desk, format!("a {kind:?} of {length} bytes, expected 0")));
            }
            Kind::Heartbeat => {}
            Kind::Bye => self.gone = Some("it has left the group".into()),
            Kind::Abort if length <= MAX_ABORT => {
                let speaker = header.chunk.index as usize;
                self.state = State::Abort { speaker, text: vec![0; length], done: 0 };
            }
            _ => {
                let why = format!("a {kind:?} frame of {length} bytes on a group's link");
                return Err(self.garbage(desk, why));
            }
        }
        Ok(())
    }

    /// An operation has begun: perhaps what waits is its.
    pub(super) fn reconsider(&mut self, desk: &mut Desk) -> Result<(), Error> {
        self.replay(desk)?;
        if let State::Parked(header) = self.state {
            self.state = State::Header;
            self.open(header, desk)?;
            while self.advance(desk)? {}
        }
        Ok(())
    }

    fn replay(&mut self, desk: &mut Desk) -> Result<(), Error> {
        let mut index = 0;
        while index < self.aside.len() {
            let header = self.aside[index].0;
            match desk.route(self.rank, &header)? {
                Some(landing) => {
                    if let Some((_, bytes)) = self.aside.remove(index) {
                        desk.land(self.rank, &landing, &bytes);
                    }
                }
                None => index += 1,
            }
        }
        Ok(())
    }

    /// Says that nothing more is written, and throws away what comes. True when the other end has
    /// closed too.
    pub(super) fn drain(&mut self, scratch: &mut [u64]) -> bool {
        if self.gone.is_none() {
            self.gone = Some("this rank has left the group".into());
        }
        // If that fails the connection is gone, and the next read says so.
        let _ = self.link.finish();
        for _ in 0..256 {
            match self.link.read(&mut [IoSliceMut::new(bytemuck::cast_slice_mut(scratch))]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return false,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return true,
            }
        }
        true
    }

    fn garbage(&self, desk: &Desk, why: String) -> Error {
        Error::Garbage { node: desk.names[self.rank].clone(), why }
    }
}

impl Frame {
    fn len(&self) -> usize {
        self.header.len() + self.payload.bytes().len()
    }
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: what is being sent is not written: an operation whose result goes to the same
            // place gets it only after the receiver has had all of this.
            Self::Region(region) => unsafe { region.bytes() },
            Self::Text(text) => text,
        }
    }
}
