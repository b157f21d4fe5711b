//! One end of the link to another node: frames in, frames out.

use super::Channels;
use super::channel::{Gone, Landing};
use super::outbox::{Message, Outbox, Payload};
use crate::memory::region::Region;
use poseidon_core::wire::{Header, Kind, MAX_ABORT};
use poseidon_core::{ChannelId, NodeId};
use poseidon_link::{Carrier, Link};
use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::time::Duration;

/// The node at the other end of one link, and the state of the link.
pub(crate) struct Peer {
    node: NodeId,
    link: Box<dyn Link>,
    outbox: Outbox,
    head: [u8; Header::SIZE],
    have: usize,
    state: State,
    /// Frames that nobody had asked for when they came, and that were in the way of other frames.
    aside: VecDeque<(Header, Vec<u8>)>,
    aside_bytes: usize,
    /// Some of them have a place, but a frame of the same channel is half there.
    postponed: bool,
    /// The link may have something to read, or room to write. Set by readiness events, cleared by
    /// a short read or write (the events are edge-triggered).
    readable: bool,
    writable: bool,
    /// When bytes last came, and when the link last took some bytes.
    pub(super) heard: Duration,
    pub(super) spoke: Duration,
    /// The other end has closed. The event queue reports that once, perhaps together with the last
    /// bytes. So from then on a short read does not mean that there is nothing more to read.
    closed: bool,
    /// Set when nothing more comes from the peer or goes to it: why.
    pub(super) gone: Option<Gone>,
    /// The channels have been told that the peer is gone.
    pub(super) reported: bool,
    /// Bytes read and written so far.
    pub(super) moved: u64,
}

/// What the next bytes are.
enum State {
    Header,
    /// A frame nobody has asked for: its payload stays in the link.
    Parked(Header),
    /// The payload goes straight to its place.
    Assign {
        channel: ChannelId,
        region: Region,
        past_cache: bool,
        done: usize,
    },
    /// The payload goes to the channel, piece by piece.
    Combine {
        channel: ChannelId,
        width: usize,
        left: usize,
        /// Bytes of an element that the network cut in two.
        carry: [u8; 8],
        carried: usize,
    },
    /// A frame nobody has asked for. Its payload is read aside, because a channel awaits what is
    /// behind it.
    Aside {
        header: Header,
        bytes: Vec<u8>,
        done: usize,
    },
    /// The payload of a frame of a channel that is closed here.
    Discard {
        left: usize,
    },
    Abort {
        header: Header,
        text: Vec<u8>,
        done: usize,
    },
}

/// Bytes taken from one peer before the others get their turn.
const READ_BUDGET: usize = 512 << 10;
/// Most bytes of frames that nobody has asked for, kept aside for one peer so that other frames can
/// pass. Beyond it the next such frame is parked, and the link waits until its channel asks for it.
const MOST_ASIDE: usize = 64 << 20;
/// More than two sockets' buffers hold.
const DRAIN_READS: usize = 256;

impl Peer {
    pub(super) fn new(node: NodeId, link: Box<dyn Link>, now: Duration) -> Self {
        Self {
            node,
            link,
            outbox: Outbox::default(),
            head: [0; Header::SIZE],
            have: 0,
            state: State::Header,
            aside: VecDeque::new(),
            aside_bytes: 0,
            postponed: false,
            readable: true,
            writable: true,
            heard: now,
            spoke: now,
            closed: false,
            gone: None,
            reported: false,
            moved: 0,
        }
    }

    pub(super) fn link(&mut self) -> &mut dyn Link {
        &mut *self.link
    }

    pub(super) fn node(&self) -> NodeId {
        self.node
    }

    /// The link is ready. A link through shared memory has one bell for both ways, so it may be
    /// ready for either. `closed`: the other end has closed; what it has sent is still there to be
    /// read.
    pub(super) fn handle_ready(&mut self, readable: bool, writable: bool, closed: bool) {
        let both = self.link.carrier() == Carrier::Shared;
        if let Err(error) = self.link.handle_ready() {
            self.broken(&error);
        }
        self.closed |= closed;
        self.readable |= readable || both || closed;
        self.writable |= writable || both;
    }

    /// Queues a message.
    pub(super) fn send(&mut self, message: Message) {
        self.outbox.push(message);
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Whether the link does not take what the other end would always read: a session awaits its
    /// frames at all times. A group's frames may have to wait there until its program begins the same
    /// operation, and operations have their own deadlines.
    pub(super) fn is_refused(&self) -> bool {
        !self.writable && self.outbox.next_is_about_a_layer()
    }

    /// Whether what is sent counts for the node's budget: it leaves the host, as far as is known.
    pub(super) fn is_budgeted(&self) -> bool {
        match self.link.carrier() {
            Carrier::Tcp | Carrier::Memory => true,
            Carrier::Unix | Carrier::Shared => false,
        }
    }

    pub(super) fn may_write(&self) -> bool {
        self.writable && self.gone.is_none() && !self.outbox.is_empty()
    }

    /// Whether the link may be read. It is not read while a frame is parked in it.
    pub(super) fn may_read(&self) -> bool {
        self.readable && self.gone.is_none() && !self.is_parked()
    }

    /// Whether a frame that nobody has asked for is parked in the link. What the peer says later is
    /// behind it.
    pub(super) fn is_parked(&self) -> bool {
        matches!(self.state, State::Parked(_))
    }

    /// Hands all that is still to be written to `gone`, because the peer is gone.
    pub(super) fn discard(&mut self, gone: impl FnMut(ChannelId, u64, Payload)) {
        self.outbox.discard(gone);
    }

    /// Lets go of all memory of `channel`, which is closed.
    pub(super) fn let_go(&mut self, channel: ChannelId) {
        self.outbox.let_go(channel);
        self.state = match std::mem::replace(&mut self.state, State::Header) {
            State::Assign { channel: of, region, done, .. } if of == channel => {
                State::Discard { left: region.len() - done }
            }
            State::Combine { channel: of, left, .. } if of == channel => State::Discard { left },
            State::Parked(header) if header.channel == channel => {
                State::Discard { left: header.length as usize }
            }
            State::Aside { header, done, .. } if header.channel == channel => {
                State::Discard { left: header.length as usize - done }
            }
            other => other,
        };
        self.aside.retain(|(header, _)| header.channel != channel);
        self.aside_bytes = self.aside.iter().map(|(_, b)| Header::SIZE + b.len()).sum();
    }

    /// Writes the next frames, as many as go together, and no more than `most` bytes unless they
    /// cannot wait. Returns the bytes the link has taken.
    pub(super) fn write(&mut self, channels: &mut Channels, most: usize, now: Duration) -> usize {
        if !self.may_write() {
            return 0;
        }
        let link = &mut self.link;
        let wrote = self.outbox.write(
            most,
            |slices| link.write(slices),
            |frame| {
                let bytes = frame.len();
                channels.sent(frame.channel, bytes, frame.layer, frame.receipt, frame.payload);
            },
        );
        match wrote {
            Ok((bytes, all)) => {
                // The budget may have let nothing out.
                if bytes > 0 {
                    self.spoke = now;
                }
                self.moved += bytes as u64;
                self.writable = all;
                bytes
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.writable = false;
                0
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
            Err(e) => {
                // The peer may have said why before it closed. The next reads find its words, or
                // find that the link has ended.
                self.writable = false;
                self.closed = true;
                self.readable = true;
                if self.is_parked() {
                    self.broken(&e);
                }
                0
            }
        }
    }

    /// Says that nothing more is written, and throws away what comes. True when the other end has
    /// closed too, or when it has sent more than sockets hold.
    pub(super) fn drain(&mut self, scratch: &mut [u64]) -> bool {
        // If `finish` fails the connection is gone, and the next read says so.
        let _ = self.link.finish();
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

    /// Whether what this end has written outlives this end.
    pub(super) fn keeps_what_was_written(&self) -> bool {
        self.link.carrier() == Carrier::Shared
    }

    /// Reads until the link is empty, a frame nobody has asked for stops it, or the budget is spent.
    pub(super) fn read(&mut self, channels: &mut Channels, scratch: &mut [u64], now: Duration) {
        let mut budget = READ_BUDGET;
        while self.may_read() && budget > 0 {
            let (bytes, drained) = match self.read_once(channels, scratch) {
                Ok(read) => read,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    return;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return self.broken(&e),
            };
            if bytes == 0 {
                let how = "it closed the connection without a goodbye";
                self.gone.get_or_insert(Gone::Lost(how.into()));
                return;
            }
            self.heard = now;
            self.moved += bytes as u64;
            self.readable = !drained || self.closed;
            budget = budget.saturating_sub(bytes);
            while self.advance(channels, scratch, now) {}
        }
    }

    /// Reads once: the rest of this payload and, in the same system call, the next header. Returns
    /// the bytes read and whether they were fewer than there was room for.
    fn read_once(
        &mut self,
        channels: &mut Channels,
        scratch: &mut [u64],
    ) -> io::Result<(usize, bool)> {
        if let State::Combine { channel, width, left, carried: 0, .. } = &mut self.state {
            // Where the bytes lie in memory already, they are combined from there.
            let ready = self.link.peek()?;
            let whole = ready.len().min(*left) / *width * *width;
            if whole > 0 && ready.as_ptr().addr() % *width == 0 {
                channels.combine(*channel, self.node, &ready[..whole]);
                self.link.consume(whole)?;
                *left -= whole;
                return Ok((whole, false));
            }
        }
        let (head, have, link) = (&mut self.head, self.have, &mut *self.link);
        let past_cache = matches!(self.state, State::Assign { past_cache: true, .. });
        let mut read = |payload: &mut [u8], last: bool| {
            let head = if last { &mut head[have..] } else { &mut [] };
            let room = payload.len() + head.len();
            let bufs = &mut [IoSliceMut::new(payload), IoSliceMut::new(head)];
            let n = if past_cache { link.land(bufs)? } else { link.read(bufs)? };
            Ok::<_, io::Error>((n.min(payload.len()), n - n.min(payload.len()), n < room))
        };
        let (payload, header, drained) = match &mut self.state {
            State::Header | State::Parked(_) => read(&mut [], true)?,
            State::Assign { region, done, .. } => {
                // SAFETY: the channel owns the region until this payload has landed, and the engine is
                // one thread at a time.
                let place = unsafe { region.bytes_mut() };
                let read = read(&mut place[*done..], true)?;
                *done += read.0;
                read
            }
            State::Combine { channel, width, left, carry, carried } => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
                bytes[..*carried].copy_from_slice(&carry[..*carried]);
                let room = (bytes.len() - *carried).min(*left);
                let read = read(&mut bytes[*carried..*carried + room], room == *left)?;
                *left -= read.0;
                let have = *carried + read.0;
                let whole = have - have % *width;
                *carried = have - whole;
                carry[..*carried].copy_from_slice(&bytes[whole..have]);
                channels.combine(*channel, self.node, &bytes[..whole]);
                read
            }
            State::Aside { bytes, done, .. } | State::Abort { text: bytes, done, .. } => {
                let read = read(&mut bytes[*done..], true)?;
                *done += read.0;
                read
            }
            State::Discard { left } => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
                let room = bytes.len().min(*left);
                let read = read(&mut bytes[..room], room == *left)?;
                *left -= read.0;
                read
            }
        };
        self.have += header;
        Ok((payload + header, drained))
    }

    /// Finishes a payload that is all there, or opens the next frame if its header is all there.
    /// True if there may be more to do without reading.
    fn advance(&mut self, channels: &mut Channels, scratch: &mut [u64], now: Duration) -> bool {
        let complete = match &self.state {
            State::Header => {
                if self.have < Header::SIZE || self.gone.is_some() {
                    return false;
                }
                self.have = 0;
                match Header::decode(&self.head) {
                    Ok(header) => self.open(header, channels, now),
                    Err(error) => self.garbage(error.to_string()),
                }
                return self.gone.is_none();
            }
            State::Parked(_) => false,
            State::Assign { region, done, .. } => *done == region.len(),
            State::Combine { left, .. } | State::Discard { left } => *left == 0,
            State::Aside { bytes, done, .. } | State::Abort { text: bytes, done, .. } => {
                *done == bytes.len()
            }
        };
        if complete {
            match std::mem::replace(&mut self.state, State::Header) {
                State::Assign { channel, .. } | State::Combine { channel, .. } => {
                    channels.landed(channel, self.node);
                    if std::mem::take(&mut self.postponed) {
                        self.replay(channels, scratch, now);
                    }
                }
                State::Aside { header, bytes, .. } => {
                    self.put_aside(header, bytes);
                    // The channel may have begun to want this frame while its payload came.
                    self.replay(channels, scratch, now);
                }
                State::Abort { header, text, .. } if channels.is_known(header.channel) => {
                    self.deliver_abort(&header, &text, channels);
                }
                State::Abort { header, text, .. } => self.put_aside(header, text),
                State::Header | State::Parked(_) | State::Discard { .. } => {}
            }
        }
        complete
    }

    fn open(&mut self, header: Header, channels: &mut Channels, now: Duration) {
        let (length, kind) = (header.length as usize, header.kind);
        if header.sender != self.node {
            let (me, it) = (self.node, header.sender);
            return self.garbage(format!("a frame of node {it} on the link of node {me}"));
        }
        if !channels.admits(header.channel, self.node) {
            return self.stranger(&header);
        }
        match kind {
            Kind::Heartbeat | Kind::Bye if length > 0 => {
                self.garbage(format!("a {kind:?} of {length} bytes, expected 0"));
            }
            Kind::Heartbeat => {}
            Kind::Bye if header.channel == ChannelId::LINK => {
                self.gone = Some(Gone::Left);
                // The other end waits until this end closes.
                let _ = self.link.finish();
            }
            Kind::Bye => {
                // A goodbye is told after the channel's frames that still wait.
                let waits = |(first, _): &(Header, Vec<u8>)| first.channel == header.channel;
                if channels.is_known(header.channel) && !self.aside.iter().any(waits) {
                    channels.goodbye(header.channel, self.node);
                } else {
                    self.put_aside(header, Vec::new());
                }
            }
            Kind::Abort if length > MAX_ABORT => {
                let most = MAX_ABORT;
                self.garbage(format!("an Abort of {length} bytes, at most {most}"));
            }
            Kind::Abort if header.channel == ChannelId::LINK => {
                self.garbage("an Abort of no session and no group".into());
            }
            Kind::Abort => self.state = State::Abort { header, text: vec![0; length], done: 0 },
            Kind::Control | Kind::Probe => self.garbage(format!("a {kind:?} frame on a lane")),
            _ if header.channel == ChannelId::LINK => {
                self.garbage(format!("a {kind:?} frame of no session and no group"));
            }
            Kind::Push
            | Kind::Update
            | Kind::Init
            | Kind::Factors
            | Kind::Collective
            | Kind::Message => {
                let channel = header.channel;
                self.state = match channels.open(&header, now) {
                    Some(Landing::Assign { region, past_cache }) => {
                        State::Assign { channel, region, past_cache, done: 0 }
                    }
                    Some(Landing::Combine { width }) => {
                        State::Combine { channel, width, left: length, carry: [0; 8], carried: 0 }
                    }
                    Some(Landing::Later)
                        if channels.await_from(self.node)
                            && self.aside_bytes + length <= MOST_ASIDE =>
                    {
                        State::Aside { header, bytes: vec![0; length], done: 0 }
                    }
                    Some(Landing::Later) => State::Parked(header),
                    None => State::Discard { left: length },
                };
            }
        }
    }

    /// A channel may have a place now for frames that had to wait. True if something has moved.
    pub(super) fn reconsider(
        &mut self,
        channels: &mut Channels,
        scratch: &mut [u64],
        now: Duration,
    ) -> bool {
        let mut moved = self.replay(channels, scratch, now);
        if let State::Parked(header) = self.state
            && self.gone.is_none()
        {
            self.state = State::Header;
            self.open(header, channels, now);
            moved |= !self.is_parked();
            while self.advance(channels, scratch, now) {}
        }
        moved
    }

    /// Gives the channels the frames that were put aside, as far as they want them now. True if
    /// they took any.
    fn replay(&mut self, channels: &mut Channels, scratch: &mut [u64], now: Duration) -> bool {
        // A channel takes one frame of a node at a time.
        let half_there = match &self.state {
            State::Assign { channel, .. } | State::Combine { channel, .. } => Some(*channel),
            _ => None,
        };
        let mut moved = false;
        let mut index = 0;
        while let Some((header, bytes)) = self.aside.get(index) {
            let header = *header;
            if !channels.admits(header.channel, self.node) {
                self.stranger(&header);
                return moved;
            }
            let landing = match header.kind {
                _ if half_there == Some(header.channel) => {
                    self.postponed = true;
                    Some(Landing::Later)
                }
                Kind::Bye | Kind::Abort => {
                    let before = self.aside.iter().take(index);
                    let first = before.clone().all(|(first, _)| first.channel != header.channel);
                    (!first || !channels.is_known(header.channel)).then_some(Landing::Later)
                }
                _ => channels.open(&header, now),
            };
            match landing {
                Some(Landing::Later) => {
                    index += 1;
                    continue;
                }
                None if header.kind == Kind::Bye => channels.goodbye(header.channel, self.node),
                None if header.kind == Kind::Abort => self.deliver_abort(&header, bytes, channels),
                None => {}
                Some(Landing::Assign { region, .. }) => {
                    // SAFETY: as for `State::Assign`.
                    unsafe { region.bytes_mut() }.copy_from_slice(bytes);
                    channels.landed(header.channel, self.node);
                }
                Some(Landing::Combine { width }) => {
                    // The kept bytes may lie at any address, but elements have to be aligned: they
                    // go through the scratch.
                    let aligned: &mut [u8] = bytemuck::cast_slice_mut(scratch);
                    for piece in bytes.chunks(aligned.len() / width * width) {
                        aligned[..piece.len()].copy_from_slice(piece);
                        channels.combine(header.channel, self.node, &aligned[..piece.len()]);
                    }
                    channels.landed(header.channel, self.node);
                }
            }
            moved = true;
            self.aside_bytes -= Header::SIZE + bytes.len();
            self.aside.remove(index);
        }
        moved
    }

    fn put_aside(&mut self, header: Header, bytes: Vec<u8>) {
        self.aside_bytes += Header::SIZE + bytes.len();
        self.aside.push_back((header, bytes));
        if self.aside_bytes > 2 * MOST_ASIDE {
            self.garbage(format!("{} frames that nobody has asked for", self.aside.len()));
        }
    }

    fn deliver_abort(&self, header: &Header, text: &[u8], channels: &mut Channels) {
        let reason = String::from_utf8_lossy(text).into_owned();
        channels.aborted(header.channel, self.node, header.chunk.index, reason);
    }

    pub(super) fn broken(&mut self, error: &io::Error) {
        self.gone.get_or_insert(Gone::Lost(error.to_string()));
    }

    /// It has sent a frame of a session or group that it is not in.
    fn stranger(&mut self, header: &Header) {
        let Header { kind, channel, .. } = header;
        self.garbage(format!("a {kind:?} frame of channel {channel}, which it is not in"));
    }

    fn garbage(&mut self, why: String) {
        self.gone.get_or_insert(Gone::Garbage(why));
    }
}
