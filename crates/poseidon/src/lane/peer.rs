//! One lane's end of the link to another node: frames in, frames out.

use crate::lane::board::Counters;
use crate::lane::holdings::{Holdings, Landing};
use crate::lane::outbox::{Outbox, Payload};
use crate::memory::exchange::Lent;
use crate::memory::factors::Rows;
use poseidon_core::store::Contribution;
use poseidon_core::wire::{Header, Kind, MAX_ABORT};
use poseidon_core::{ChunkKey, Clock, NodeId, Violation};
use poseidon_link::{Carrier, Link};
use std::io::{self, IoSliceMut};
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(crate) struct Peer {
    node: NodeId,
    link: Box<dyn Link>,
    outbox: Outbox,
    head: [u8; Header::SIZE],
    have: usize,
    state: State,
    /// The link may have something to read, or room to write. Set by readiness events, cleared by
    /// a short read or write (the events are edge-triggered).
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// When bytes last came, and when the link last took some (or had nothing to take).
    pub(crate) heard: Duration,
    pub(crate) spoke: Duration,
    /// The link failed when it was woken; the next read says so.
    broken: Option<String>,
    /// It has said goodbye: nothing more comes.
    pub(crate) departed: bool,
    /// The other end has closed. That is reported once, perhaps together with its last bytes, so
    /// from then on a short read does not mean that there is nothing more to read.
    closed: bool,
}

/// What the next bytes are.
enum State {
    Header,
    Sum {
        sum: Contribution,
        lent: Option<Lent>,
        left: usize,
        /// Bytes of an `f32` that the network cut in two.
        carry: [u8; 4],
        carried: usize,
    },
    Result {
        lent: Lent,
        chunk: ChunkKey,
        done: usize,
    },
    Rows {
        rows: Rows,
        chunk: ChunkKey,
        clock: Clock,
        done: usize,
    },
    Abort {
        text: Vec<u8>,
        done: usize,
    },
}

/// Why a peer cannot be listened to any more.
pub(crate) enum Fault {
    /// The connection is gone.
    Lost(String),
    /// The bytes are not a frame, or not one that may come here.
    Garbage(String),
    /// The frame breaks a rule.
    Violation(Header, Violation),
    /// It told us that the job is over.
    Abort(String),
}

/// Bytes taken from one peer before the others get their turn.
const READ_BUDGET: usize = 512 << 10;
/// More than two sockets' buffers hold.
const DRAIN_READS: usize = 256;
impl Peer {
    pub(crate) fn new(node: NodeId, link: Box<dyn Link>, now: Duration) -> Self {
        Self {
            node,
            link,
            outbox: Outbox::default(),
            head: [0; Header::SIZE],
            have: 0,
            state: State::Header,
            readable: true,
            writable: true,
            heard: now,
            spoke: now,
            broken: None,
            departed: false,
            closed: false,
        }
    }

    /// The link is ready. Shared memory has one bell for both ways.
    pub(crate) fn handle_ready(&mut self, readable: bool, writable: bool) {
        let both = self.link.carrier() == Carrier::Shared;
        if let Err(error) = self.link.handle_ready() {
            self.broken = Some(error.to_string());
        }
        self.readable |= readable || both;
        self.writable |= writable || both;
    }

    /// The other end has closed: what it has sent is still there to be read.
    pub(crate) fn handle_closed(&mut self) {
        self.closed = true;
        self.readable = true;
    }

    pub(crate) fn node(&self) -> NodeId {
        self.node
    }

    pub(crate) fn link(&mut self) -> &mut dyn Link {
        &mut *self.link
    }

    pub(crate) fn send(&mut self, header: &Header, payload: Payload) {
        self.outbox.push(header, payload);
    }

    pub(crate) fn has_unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Forgets everything that is still to be written: nobody reads it.
    pub(crate) fn discard(&mut self, holdings: &mut Holdings) {
        self.outbox.discard(|payload| holdings.sent(payload));
    }

    /// Forgets what has not been begun.
    pub(crate) fn drop_unsent(&mut self) {
        self.outbox.drop_unsent();
    }

    /// Writes the next frames, as many as go together. Returns the bytes the link has taken.
    pub(crate) fn write(
        &mut self,
        holdings: &mut Holdings,
        counters: &Counters,
        now: Duration,
    ) -> Result<usize, Fault> {
        if !self.writable || self.outbox.is_empty() {
            return Ok(0);
        }
        let link = &mut self.link;
        let mut frames = 0;
        let wrote = self.outbox.write(
            |slices| link.write(slices),
            |frame| {
                frames += 1;
                counters.count_sent(&frame);
                holdings.sent(frame.payload);
            },
        );
        match wrote {
            Ok((bytes, all)) => {
                counters.bytes_sent.fetch_add(bytes as u64, Ordering::Relaxed);
                counters.frames_sent.fetch_add(frames, Ordering::Relaxed);
                self.spoke = now;
                self.writable = all;
                Ok(bytes)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.writable = false;
                Ok(0)
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(e) => Err(Fault::Lost(e.to_string())),
        }
    }

    /// Says that nothing more is written, and throws away what comes. True when the other end has
    /// closed too, or goes on and on.
    pub(crate) fn drain(&mut self, scratch: &mut [f32]) -> bool {
        if !self.departed {
            self.departed = true;
            // If that fails the connection is gone, and the next read says so.
            let _ = self.link.finish();
        }
        for _ in 0..DRAIN_READS {
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

    /// Reads until the link is empty or the budget is spent.
    pub(crate) fn read(
        &mut self,
        holdings: &mut Holdings,
        scratch: &mut [f32],
        counters: &Counters,
        now: Duration,
    ) -> Result<(), Fault> {
        if let Some(why) = &self.broken {
            return Err(Fault::Lost(why.clone()));
        }
        let mut budget = READ_BUDGET;
        while self.readable && !self.departed && budget > 0 {
            let (bytes, drained) = match self.read_once(holdings, scratch) {
                Ok(read) => read,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    break;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(Fault::Lost(e.to_string())),
            };
            if bytes == 0 {
                return Err(Fault::Lost("it closed the connection without a goodbye".into()));
            }
            counters.bytes_received.fetch_add(bytes as u64, Ordering::Relaxed);
            self.heard = now;
            self.readable = !drained || self.closed;
            budget = budget.saturating_sub(bytes);
            while self.advance(holdings, counters, now)? {}
        }
        Ok(())
    }

    /// One system call: the rest of this payload and, in the same breath, the next header.
    /// Returns the bytes read and whether that was less than there was room for.
    fn read_once(
        &mut self,
        holdings: &mut Holdings,
        scratch: &mut [f32],
    ) -> io::Result<(usize, bool)> {
        if let State::Sum { sum, lent, left, carried: 0, .. } = &mut self.state {
            // Where the bytes lie in memory already, they are added from there.
            let ready = self.link.peek()?;
            let whole = ready.len().min(*left) / size_of::<f32>() * size_of::<f32>();
            if let Ok(piece @ [_, ..]) = bytemuck::try_cast_slice(&ready[..whole]) {
                holdings.handle_piece(sum, lent, piece);
                self.link.consume(whole)?;
                *left -= whole;
                return Ok((whole, false));
            }
        }
        let head = &mut self.head;
        let have = self.have;
        // A result is looked at when the program gets there; all else at once, or soon.
        let lands = holdings.results_are_large && matches!(self.state, State::Result { .. });
        let mut read = |link: &mut dyn Link, payload: &mut [u8], last: bool| {
            let head = if last { &mut head[have..] } else { &mut [] };
            let room = payload.len() + head.len();
            let bufs = &mut [IoSliceMut::new(payload), IoSliceMut::new(head)];
            let n = if lands { link.land(bufs)? } else { link.read(bufs)? };
            Ok::<_, io::Error>((n.min(payload.len()), n - n.min(payload.len()), n < room))
        };
        let (payload, header, drained) = match &mut self.state {
            State::Header => read(&mut *self.link, &mut [], true)?,
            State::Sum { sum, lent, left, carry, carried } => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
                bytes[..*carried].copy_from_slice(&carry[..*carried]);
                let room = (bytes.len() - *carried).min(*left);
                let fresh = &mut bytes[*carried..*carried + room];
                let (payload, header, drained) = read(&mut *self.link, fresh, room == *left)?;
                *left -= payload;
                let have = *carried + payload;
                *carried = have % size_of::<f32>();
                carry[..*carried].copy_from_slice(&bytes[have - *carried..have]);
                holdings.handle_piece(sum, lent, &scratch[..have / size_of::<f32>()]);
                (payload, header, drained)
            }
            State::Result { lent, done, .. } => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(lent.result());
                let (payload, header, drained) = read(&mut *self.link, &mut bytes[*done..], true)?;
                *done += payload;
                (payload, header, drained)
            }
            State::Rows { rows, done, .. } => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(rows.room());
                let (payload, header, drained) = read(&mut *self.link, &mut bytes[*done..], true)?;
                *done += payload;
                (payload, header, drained)
            }
            State::Abort { text, done } => {
                let (payload, header, drained) = read(&mut *self.link, &mut text[*done..], true)?;
                *done += payload;
                (payload, header, drained)
            }
        };
        self.have += header;
        Ok((payload + header, drained))
    }

    /// Finishes a payload that is all there, opens the next frame if its header is. True if there
    /// may be more to do without reading.
    fn advance(
        &mut self,
        holdings: &mut Holdings,
        counters: &Counters,
        now: Duration,
    ) -> Result<bool, Fault> {
        let complete = match &self.state {
            State::Header => {
                if self.have < Header::SIZE || self.departed {
                    return Ok(false);
                }
                self.have = 0;
                let header =
                    Header::decode(&self.head).map_err(|e| Fault::Garbage(e.to_string()))?;
                counters.frames_received.fetch_add(1, Ordering::Relaxed);
                self.open(&header, holdings, now)?;
                return Ok(true);
            }
            State::Sum { left, .. } => *left == 0,
            State::Result { lent, done, .. } => *done == lent.range.len() * size_of::<f32>(),
            State::Rows { rows, done, .. } => *done == rows.range.len() * size_of::<f32>(),
            State::Abort { text, done } => *done == text.len(),
        };
        if complete {
            match std::mem::replace(&mut self.state, State::Header) {
                State::Sum { sum, lent, .. } => holdings.handle_contributed(sum, lent),
                State::Result { lent, chunk, .. } => {
                    // Let go first: the session takes the memory back when the layer is done.
                    drop(lent);
                    holdings.handle_landed(chunk);
                }
                State::Rows { rows, chunk, clock, .. } => {
                    rows.land(self.node);
                    holdings.handle_gathered(self.node, chunk, clock);
                }
                State::Abort { text, .. } => {
                    return Err(Fault::Abort(String::from_utf8_lossy(&text).into_owned()));
                }
                State::Header => {}
            }
        }
        Ok(complete)
    }

    fn open(
        &mut self,
        header: &Header,
        holdings: &mut Holdings,
        now: Duration,
    ) -> Result<(), Fault> {
        if header.sender != self.node {
            let (me, it) = (self.node, header.sender);
            return Err(Fault::Garbage(format!("a frame of node {it} on the link of node {me}")));
        }
        let length = header.length as usize;
        match header.kind {
            Kind::Push | Kind::Init | Kind::Update | Kind::Factors => {
                let landing =
                    holdings.open(header, now).map_err(|v| Fault::Violation(*header, v))?;
                self.state = match landing {
                    Landing::Sum { sum, lent } => {
                        State::Sum { sum, lent, left: length, carry: [0; 4], carried: 0 }
                    }
                    Landing::Result(lent) => State::Result { lent, chunk: header.chunk, done: 0 },
                    Landing::Rows(rows) => {
                        let (chunk, clock) = (header.chunk, header.clock);
                        State::Rows { rows, chunk, clock, done: 0 }
                    }
                };
            }
            Kind::Heartbeat | Kind::Bye if length > 0 => {
                let kind = header.kind;
                return Err(Fault::Garbage(format!("a {kind:?} of {length} bytes, expected 0")));
            }
            Kind::Heartbeat => {}
            Kind::Bye => self.departed = true,
            Kind::Abort if length > MAX_ABORT => {
                let most = MAX_ABORT;
                return Err(Fault::Garbage(format!("an Abort of {length} bytes, at most {most}")));
            }
            Kind::Abort => self.state = State::Abort { text: vec![0; length], done: 0 },
            Kind::Control | Kind::Collective | Kind::Message => {
                let kind = header.kind;
                return Err(Fault::Garbage(format!("a {kind:?} frame on a lane")));
            }
        }
        Ok(())
    }
}
