//! One end of the link to another node: frames in, frames out.

mod aside;
mod sign;

use super::Channels;
use super::channel::{Gone, Landing};
use super::outbox::{Message, Outbox, Payload};
use crate::memory::region::Region;
use poseidon_core::printable::printable;
use poseidon_core::wire::{Header, Kind, MAX_ABORT};
use poseidon_core::{ChannelId, NodeId};
use poseidon_link::{Carrier, Changed, Link, Opener, TAG_SIZE, Tagging};
use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::time::Duration;

/// The node at the other end of one link, and the state of the link.
pub(crate) struct Peer {
    node: NodeId,
    link: Box<dyn Link>,
    outbox: Outbox,
    /// The tag of the payload that is being read, the next header, and its tag.
    head: [u8; TAG_SIZE + Header::SIZE + TAG_SIZE],
    /// Where the next byte of `head` goes: after the first tag, if none is awaited.
    have: usize,
    state: State,
    /// Checks the frames' tags, on a link that has them.
    opener: Option<Opener>,
    /// The tag of the payload that is being read, as far as it has come.
    tagging: Option<Tagging>,
    /// The frame whose payload is being read.
    frame: Option<Header>,
    /// Frames that nobody had asked for when they came, and that were in the way of other frames.
    aside: VecDeque<(Header, Vec<u8>)>,
    aside_bytes: usize,
    /// Some of them have a place, but a frame of the same channel is half there.
    postponed: bool,
    /// The link may have something to read, or room to write. Set by readiness events, cleared by
    /// a short read or write (the events are edge-triggered).
    readable: bool,
    writable: bool,
    /// The last frame that the link has taken was about a layer. The link may hold some of it.
    took_layer: bool,
    /// Bytes that had come and could not be read yet, when the link was read last.
    incoming: usize,
    /// When bytes last came, and when the link last took some bytes.
    pub(super) heard: Duration,
    pub(super) spoke: Duration,
    /// The other end has closed. The event queue reports that once, perhaps together with the last
    /// bytes. So from then on a short read does not mean that there is nothing more to read.
    closed: bool,
    /// The link takes nothing any more: since when, and what it said. The peer may have said why
    /// before; it is heard out, for a while.
    pub(super) unwritable: Option<(Duration, String)>,
    /// Set when nothing more comes from the peer or goes to it: why.
    pub(super) gone: Option<Gone>,
    /// The channels have been told that the peer is gone.
    pub(super) reported: bool,
    /// Bytes that the link has taken so far, and given.
    pub(super) written: u64,
    pub(super) read: u64,
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
/// More than two sockets' buffers hold.
const DRAIN_READS: usize = 256;

impl Peer {
    pub(super) fn new(node: NodeId, mut link: Box<dyn Link>, now: Duration) -> Self {
        // From here on this peer counts them.
        let tags = link.tags().cloned();
        let (sealer, opener) = tags.map(|tags| (tags.sealer, tags.opener)).unzip();
        Self {
            node,
            link,
            outbox: Outbox::new(sealer),
            head: [0; TAG_SIZE + Header::SIZE + TAG_SIZE],
            have: TAG_SIZE,
            state: State::Header,
            opener,
            tagging: None,
            frame: None,
            aside: VecDeque::new(),
            aside_bytes: 0,
            postponed: false,
            readable: true,
            writable: true,
            took_layer: false,
            incoming: 0,
            heard: now,
            spoke: now,
            closed: false,
            unwritable: None,
            gone: None,
            reported: false,
            written: 0,
            read: 0,
        }
    }

    pub(super) fn link(&mut self) -> &mut dyn Link {
        &mut *self.link
    }

    /// Segments that TCP has sent again.
    pub(super) fn resent(&self) -> u64 {
        self.link.delivery().map_or(0, |delivery| delivery.resent_in_all.into())
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

    /// Something may have come that nobody has reported.
    pub(super) fn look(&mut self) {
        self.readable = true;
    }

    /// Queues a message.
    pub(super) fn send(&mut self, message: Message) {
        self.outbox.push(message);
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.outbox.is_empty() || self.link.unsent() > 0
    }

    /// Whether the link does not take what the other end would always read: a session awaits its
    /// frames at all times. A group's frames may have to wait there until its program begins the same
    /// operation, and operations have their own deadlines.
    pub(super) fn is_refused(&self) -> bool {
        let held = self.took_layer && self.link.unsent() > 0;
        !self.writable && (held || self.outbox.next_is_about_a_layer())
    }

    /// Whether what is sent counts for the node's budget: it leaves the host, as far as is known.
    pub(super) fn is_budgeted(&self) -> bool {
        match self.link.carrier() {
            Carrier::Tcp | Carrier::Memory => true,
            Carrier::Unix | Carrier::Shared => false,
        }
    }

    pub(super) fn may_write(&self) -> bool {
        self.writable && self.gone.is_none() && self.has_unsent()
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
        let (link, took_layer) = (&mut self.link, &mut self.took_layer);
        let held = link.unsent();
        let flushed = if held > 0 { link.flush() } else { Ok(()) };
        if link.unsent() < held {
            self.spoke = now;
        }
        let write = |()| {
            self.outbox.write(
                most,
                |slices| link.write(slices),
                |frame| {
                    let bytes = frame.untagged_len();
                    *took_layer = frame.layer.is_some();
                    channels.sent(frame.channel, bytes, frame.layer, frame.receipt, frame.payload);
                },
            )
        };
        match flushed.and_then(write) {
            Ok((bytes, all)) => {
                // The budget may have let nothing out.
                if bytes > 0 {
                    self.spoke = now;
                }
                self.written += bytes as u64;
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
                self.unwritable.get_or_insert_with(|| (now, e.to_string()));
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
                    let before = std::mem::replace(&mut self.incoming, self.link.incoming());
                    self.heard = if self.incoming > before { now } else { self.heard };
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
            self.read += bytes as u64;
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
        if let State::Combine { channel, width, left, carried: 0, .. } = &mut self.state
            && self.tagging.is_none()
        {
            // Where the bytes lie in memory already, they are combined in short blocks.
            let (channel, node, bytes) =
                (*channel, self.node, bytemuck::cast_slice_mut(&mut *scratch));
            let combine = &mut |piece: &[u8]| channels.combine(channel, node, piece);
            let passed = self.link.pass(*left, *width, bytes, combine)?;
            if passed > 0 {
                *left -= passed;
                return Ok((passed, false));
            }
        }
        let end = self.head_end();
        let (head, have, link) = (&mut self.head[..end], self.have, &mut *self.link);
        let tagging = &mut self.tagging;
        let mut tag = |bytes: &[u8]| {
            if let Some(tagging) = tagging {
                tagging.update(bytes);
            }
        };
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
                // SAFETY: the channel has promised that the region is this payload's until it has
                // landed, and the engine is one thread at a time.
                let place = unsafe { region.bytes_mut() };
                let read = read(&mut place[*done..], true)?;
                tag(&place[*done..*done + read.0]);
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
                tag(&bytes[*carried..have]);
                let whole = have - have % *width;
                *carried = have - whole;
                carry[..*carried].copy_from_slice(&bytes[whole..have]);
                channels.combine(*channel, self.node, &bytes[..whole]);
                read
            }
            State::Aside { bytes, done, .. } | State::Abort { text: bytes, done, .. } => {
                let read = read(&mut bytes[*done..], true)?;
                tag(&bytes[*done..*done + read.0]);
                *done += read.0;
                read
            }
            State::Discard { left } => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
                let room = bytes.len().min(*left);
                let read = read(&mut bytes[..room], room == *left)?;
                tag(&bytes[..read.0]);
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
                if self.have < self.head_end() || self.gone.is_some() {
                    return false;
                }
                match self.take_header() {
                    Ok(header) => self.open(header, channels, now),
                    Err(why) => {
                        self.gone.get_or_insert(why);
                    }
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
        let complete = complete && (self.tagging.is_none() || self.have >= TAG_SIZE);
        if complete {
            // Nothing comes of a frame before its tag is right: what a sum got of it is worth nothing,
            // and the sum is not complete without it.
            if let Some(tagging) = self.tagging.take()
                && let Some(tag) = self.head.first_chunk()
                && tagging.verify(tag).is_err()
            {
                self.gone.get_or_insert(Gone::Changed(self.frame));
                return false;
            }
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

    /// Where the next header, and its tag if it has one, ends in `head`.
    fn head_end(&self) -> usize {
        let tag = if self.opener.is_some() { TAG_SIZE } else { 0 };
        TAG_SIZE + Header::SIZE + tag
    }

    /// The header that is all there. Nobody looks at it before its tag is right.
    fn take_header(&mut self) -> Result<Header, Gone> {
        let (header, tag) = self.head[TAG_SIZE..].split_at(Header::SIZE);
        self.have = TAG_SIZE;
        if let Some(opener) = &mut self.opener
            && let Some(tag) = tag.first_chunk()
        {
            opener.open(header, tag).map_err(|_| Gone::Changed(None))?;
        }
        let header = header.first_chunk().expect("it was split off");
        let header = Header::decode(header).map_err(|error| Gone::Garbage(error.to_string()))?;
        if header.length > 0
            && let Some(opener) = &mut self.opener
        {
            self.tagging = Some(opener.begin());
            self.have = 0;
        }
        self.frame = Some(header);
        Ok(header)
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
            | Kind::Ready
            | Kind::Late
            | Kind::Roll
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
                            && self.aside_bytes + length <= aside::MOST =>
                    {
                        State::Aside { header, bytes: vec![0; length], done: 0 }
                    }
                    Some(Landing::Later) => State::Parked(header),
                    None => State::Discard { left: length },
                };
            }
        }
    }

    fn deliver_abort(&self, header: &Header, text: &[u8], channels: &mut Channels) {
        let reason = printable(&String::from_utf8_lossy(text)).into_owned();
        channels.aborted(header.channel, self.node, header.chunk.index, reason);
    }

    pub(super) fn broken(&mut self, error: &io::Error) {
        self.gone.get_or_insert_with(|| match error.get_ref() {
            // An encrypted link does not know which frame it was, and shows nothing of it.
            Some(inner) if inner.is::<Changed>() => Gone::Changed(None),
            _ => Gone::Lost(error.to_string()),
        });
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
