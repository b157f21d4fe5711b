//! Measures what the ports of several hosts carry, over the links of lane 0, before any engine has
//! them.
//!
//! One node of each host takes part. In every round it sends to the node that is some places before it,
//! and receives from the one as far behind, so that all ports are used both ways at once. Where hosts
//! are in several racks, every other round goes along the ring that a job may have: one stream passes
//! from each rack to another one. The other rounds stay inside racks, where only ports count.
//!
//! What is sent are trains of bytes, each twice as long as the one before, until one takes long enough
//! to be judged. The time of a train ends when its acknowledgement comes, so a node that is kept waiting
//! makes a port look slower, never faster. So trains of that length go on until the two fastest agree, and
//! the fastest counts: of a round's trains, and of all rounds.

use crate::Error;
use crate::job::book::Book;
use crate::job::line::ControlLine;
use crate::job::link_rate::ROUNDS;
use mio::{Events, Poll, Token};
use poseidon_core::wire::{Header, Kind};
use poseidon_core::{ChunkKey, Clock, Cluster, LayerId, NodeId, Rate, Servers, Tree};
use poseidon_link::{Link, TAG_SIZE, Tagging};
use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One lane's links, by the node at the other end.
pub(crate) type Links = Vec<(NodeId, Box<dyn Link>)>;

/// What it takes to measure.
pub(crate) struct Probe<'a> {
    pub(crate) me: NodeId,
    /// The draft of the book.
    pub(crate) book: &'a Book,
    /// The nodes that take part.
    pub(crate) probers: &'a [NodeId],
    pub(crate) line: &'a ControlLine,
    /// How long this node waits for the others in each round.
    pub(crate) patience: Duration,
}

impl Probe<'_> {
    /// Takes part in all rounds, if this node does. Returns the complete book.
    pub(crate) fn measure(&self, links: &mut Links) -> Result<Arc<Book>, Error> {
        let mut sent = None;
        if let Some(place) = self.probers.iter().position(|node| *node == self.me) {
            let racks = racks(&self.book.cluster, self.probers);
            for round in 0..ROUNDS {
                self.line.measured(round, sent, self.patience)?;
                sent = match partners(place, round, &racks) {
                    Some([to, from]) => self.round(self.probers[to], self.probers[from], links)?,
                    None => None,
                };
            }
        }
        let book = self.line.measured(ROUNDS, sent, self.patience)?;
        book.ok_or_else(|| Error::Config("the coordinator did not complete the book".into()))
    }

    /// One round. Returns to whom this node has sent, and how fast.
    fn round(
        &self,
        to: NodeId,
        from: NodeId,
        links: &mut Links,
    ) -> Result<Option<(NodeId, Rate)>, Error> {
        // Dedicated servers have no links to each other.
        let mut ends: Vec<End<'_>> = Vec::new();
        for (node, link) in links.iter_mut().filter(|(node, _)| *node == to || *node == from) {
            let train = (*node == to).then(|| Train::new(0, Instant::now()));
            ends.push(End::new((self.me, *node), &mut **link, train, *node == from));
        }
        let deadline = Instant::now() + self.patience;
        let mut poll = Poll::new().map_err(Error::io("measuring ports"))?;
        for (token, end) in ends.iter_mut().enumerate() {
            let registered = end.link.register(poll.registry(), Token(token));
            registered.map_err(self.trouble_with(end.node))?;
        }
        let mut events = Events::with_capacity(ends.len().max(1));
        loop {
            for end in &mut ends {
                end.advance(Instant::now()).map_err(self.trouble_with(end.node))?;
            }
            let Some(behind) = ends.iter().find(|end| !end.is_done()) else { break };
            if let Some(trouble) = self.line.trouble() {
                return Err(trouble);
            }
            if Instant::now() >= deadline {
                let nodes = vec![self.book.cluster.name(behind.node)];
                return Err(Error::Unmeasured { nodes, waited: self.patience });
            }
            match poll.poll(&mut events, Some(GLANCE)) {
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                polled => polled.map_err(Error::io("measuring ports"))?,
            }
            for event in &events {
                let end = &mut ends[event.token().0];
                end.link.handle_ready().map_err(self.trouble_with(end.node))?;
            }
        }
        Ok(ends.iter().find_map(|end| Some((end.node, end.rate?))))
    }

    fn trouble_with(&self, node: NodeId) -> impl FnOnce(std::io::Error) -> Error + use<> {
        Error::io(format!("measuring the link to {}", self.book.cluster.name(node)))
    }
}

/// The nodes that `me` hears while ports are measured, in a job that may have a ring through racks: its
/// neighbours in the ring of all hosts and in that of its rack. Their links have the least window of a ring.
pub(crate) fn heard_in_rings(cluster: &Cluster, probers: &[NodeId], me: NodeId) -> Vec<NodeId> {
    let racks = racks(cluster, probers);
    let Some(place) = probers.iter().position(|node| *node == me).filter(|_| differ(&racks)) else {
        return Vec::new();
    };
    let heard = (0..ROUNDS).filter_map(|round| partners(place, round, &racks));
    heard.map(|[_, from]| probers[from]).collect()
}

/// The racks of `probers`, where they count: servers that are on no worker are in no ring.
fn racks(cluster: &Cluster, probers: &[NodeId]) -> Vec<u16> {
    let tree = Tree::new(cluster);
    let is_colocated = cluster.servers() == Servers::Colocated;
    let rack = |node: &NodeId| if is_colocated { tree.rack(tree.host(*node)) } else { 0 };
    probers.iter().map(rack).collect()
}

fn differ(racks: &[u16]) -> bool {
    racks.iter().any(|rack| *rack != racks[0])
}

/// The places to which the node at `place` sends and from which it receives in a round, among nodes of
/// these racks. It sends backwards, as in a ring. `None` if it is alone in its rack, in a round of racks.
fn partners(place: usize, round: u8, racks: &[u16]) -> Option<[usize; 2]> {
    let in_racks = differ(racks) && round % 2 == 1;
    let takes_part = |at: &usize| !in_racks || racks[*at] == racks[place];
    let among: Vec<usize> = (0..racks.len()).filter(takes_part).collect();
    let (count, place) = (among.len(), among.iter().position(|at| *at == place)?);
    let shift = match differ(racks) {
        true => 1,
        false => 1 + usize::from(round) * (count - 1) / usize::from(ROUNDS),
    };
    let [to, from] = [place + count - shift, place + shift].map(|at| among[at % count]);
    (count > 1).then_some([to, from])
}

/// What a probe frame says, in its header's chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Word {
    /// More of this train follows.
    Piece = 0,
    /// The train ends with this frame.
    Last = 1,
    /// The train has come.
    Came = 2,
    /// There will be no train any more.
    Done = 3,
}

/// This node's end of a link that is measured.
struct End<'a> {
    me: NodeId,
    node: NodeId,
    link: &'a mut dyn Link,
    /// The train that is under way, if this node sends.
    train: Option<Train>,
    /// How long an empty train takes: the second one. The other node may begin the round later, so
    /// the first one says nothing.
    round_trip: Option<Duration>,
    /// Whether the first empty train has come.
    met: bool,
    /// What trains of the last length were judged to be, the fastest first.
    judged: Vec<Rate>,
    /// What was measured.
    rate: Option<Rate>,
    /// Whether trains of the other node come, or may.
    expects: bool,
    /// Frames that go before the train's next one: their heads.
    ahead: VecDeque<Word>,
    /// The rest of the frame that is being written: its head, bytes of its payload, and its foot.
    writing: Option<(Vec<u8>, usize, Vec<u8>)>,
    /// The header that is being read and its tag, or the tag of the payload.
    head: [u8; Header::SIZE + TAG_SIZE],
    head_read: usize,
    /// The payload that is still to come of the frame that is being read, and its word.
    reading: Option<(usize, Word)>,
    /// What the tag of that payload is, as far as it has come.
    tagging: Option<Tagging>,
}

/// Bytes on their way to the other node, until they are acknowledged.
struct Train {
    bytes: usize,
    /// Bytes that have not been given to a frame.
    left: usize,
    ended: bool,
    began: Instant,
}

impl Train {
    fn new(bytes: usize, now: Instant) -> Self {
        Self { bytes, left: bytes, ended: false, began: now }
    }
}

impl<'a> End<'a> {
    /// The end of `link` from the first of the two nodes to the other.
    fn new(
        (me, node): (NodeId, NodeId),
        link: &'a mut dyn Link,
        train: Option<Train>,
        expects: bool,
    ) -> Self {
        Self {
            me,
            node,
            link,
            train,
            round_trip: None,
            met: false,
            judged: Vec::new(),
            rate: None,
            expects,
            ahead: VecDeque::new(),
            writing: None,
            head: [0; Header::SIZE + TAG_SIZE],
            head_read: 0,
            reading: None,
            tagging: None,
        }
    }

    fn is_done(&self) -> bool {
        let written = self.ahead.is_empty() && self.writing.is_none() && self.link.unsent() == 0;
        !self.expects && self.train.is_none() && written
    }

    /// Reads and writes until neither is possible.
    fn advance(&mut self, now: Instant) -> std::io::Result<()> {
        loop {
            let read = self.read(now)?;
            let written = self.write()?;
            if !read && !written {
                return Ok(());
            }
        }
    }

    /// Whether anything came. Nothing follows what this round awaits: the other node goes on only
    /// when this one is done.
    fn read(&mut self, now: Instant) -> std::io::Result<bool> {
        if self.is_done() {
            return Ok(false);
        }
        let mut scrap = [0; PIECE];
        let count = match self.link.read(&mut [IoSliceMut::new(&mut scrap)]) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            read => read?,
        };
        let mut bytes = &scrap[..count];
        while !bytes.is_empty() {
            if let Some((left, word)) = self.reading
                && left > 0
            {
                let taken = left.min(bytes.len());
                if let Some(tagging) = &mut self.tagging {
                    tagging.update(&bytes[..taken]);
                }
                bytes = &bytes[taken..];
                self.reading = Some((left - taken, word));
                if left == taken && self.tagging.is_none() {
                    self.end_payload()?;
                }
                continue;
            }
            let tag = if self.link.tags().is_some() { TAG_SIZE } else { 0 };
            let size = if self.reading.is_some() { tag } else { Header::SIZE + tag };
            let taken = bytes.len().min(size - self.head_read);
            self.head[self.head_read..][..taken].copy_from_slice(&bytes[..taken]);
            self.head_read += taken;
            bytes = &bytes[taken..];
            if self.head_read == size {
                self.head_read = 0;
                match self.reading {
                    Some(_) => self.end_payload()?,
                    None => self.handle_head(now)?,
                }
            }
        }
        Ok(true)
    }

    /// A payload is all there, and so is its tag if it has one.
    fn end_payload(&mut self) -> std::io::Result<()> {
        if let (Some(tagging), Some(tag)) = (self.tagging.take(), self.head.first_chunk()) {
            tagging.verify(tag).map_err(|e| std::io::Error::new(ErrorKind::InvalidData, e))?;
        }
        if let Some((_, Word::Last)) = self.reading.take() {
            self.ahead.push_back(Word::Came);
        }
        Ok(())
    }

    fn handle_head(&mut self, now: Instant) -> std::io::Result<()> {
        let wrong = |why: String| std::io::Error::new(ErrorKind::InvalidData, why);
        let (head, tag) = self.head.split_first_chunk().expect("a header has room");
        if let (Some(tags), Some(tag)) = (self.link.tags(), tag.first_chunk()) {
            tags.opener.open(head, tag).map_err(|e| wrong(e.to_string()))?;
        }
        let header = Header::decode(head).map_err(|e| wrong(e.to_string()))?;
        let length = header.length as usize;
        let unexpected = || wrong(format!("expected a probe, got {header:?}"));
        if header.kind != Kind::Probe || header.sender != self.node || length > PIECE {
            return Err(unexpected());
        }
        match header.chunk.index {
            0 if self.expects && length > 0 => self.reading = Some((length, Word::Piece)),
            1 if self.expects && length > 0 => self.reading = Some((length, Word::Last)),
            1 if self.expects => self.ahead.push_back(Word::Came),
            2 if length == 0 => {
                let train = self.train.take().filter(|train| train.ended);
                self.judge(train.ok_or_else(unexpected)?, now);
            }
            3 if self.expects && length == 0 => self.expects = false,
            _ => return Err(unexpected()),
        }
        if self.reading.is_some() {
            self.tagging = self.link.tags().map(|tags| tags.opener.begin());
        }
        Ok(())
    }

    /// A train has come. Decides whether another one goes.
    fn judge(&mut self, train: Train, now: Instant) {
        let took = now.saturating_duration_since(train.began);
        let Some(round_trip) = self.round_trip else {
            self.round_trip = self.met.then_some(took);
            let bytes = if self.met { SHORTEST } else { 0 };
            self.met = true;
            self.train = Some(Train::new(bytes, now));
            return;
        };
        let enough = LONG_ENOUGH + (round_trip * ROUND_TRIPS).min(LONGEST_WAIT);
        if took < enough && train.bytes < LONGEST {
            // A train that was held up by chance was taken for long enough.
            self.judged.clear();
            self.train = Some(Train::new(train.bytes * 2, now));
            return;
        }
        let seconds = took.saturating_sub(round_trip).as_secs_f64();
        self.judged.push(Rate::of(train.bytes as u64, seconds));
        self.judged.sort_unstable_by(|a, b| b.cmp(a));
        if self.judged.len() < MOST_TRAINS && !agree(&self.judged) {
            self.train = Some(Train::new(train.bytes, now));
            return;
        }
        self.rate = self.judged.first().copied();
        self.ahead.push_back(Word::Done);
    }

    /// Whether anything was written.
    fn write(&mut self) -> std::io::Result<bool> {
        let held = self.link.unsent() > 0;
        match self.link.flush() {
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
            flushed => flushed?,
        }
        let Some((head, payload, foot)) = self.writing.take().or_else(|| self.next_frame()) else {
            return Ok(held);
        };
        let pieces = [IoSlice::new(&head), IoSlice::new(&SCRAP[..payload]), IoSlice::new(&foot)];
        let count = match self.link.write(&pieces) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => 0,
            written => written?,
        };
        let of_head = count.min(head.len());
        let of_payload = (count - of_head).min(payload);
        let of_foot = count - of_head - of_payload;
        if count < head.len() + payload + foot.len() {
            let (head, foot) = (head[of_head..].to_vec(), foot[of_foot..].to_vec());
            self.writing = Some((head, payload - of_payload, foot));
        }
        Ok(count > 0)
    }

    /// The next frame's head, the length of its payload, and its foot.
    fn next_frame(&mut self) -> Option<(Vec<u8>, usize, Vec<u8>)> {
        let (word, length) = match (self.ahead.pop_front(), &mut self.train) {
            (Some(word), _) => (word, 0),
            (None, Some(train)) if !train.ended => {
                let length = train.left.min(PIECE);
                train.left -= length;
                train.ended = train.left == 0;
                (if train.ended { Word::Last } else { Word::Piece }, length)
            }
            (None, _) => return None,
        };
        let header = Header {
            chunk: ChunkKey { layer: LayerId(0), index: word as u32 },
            clock: Clock(0),
            ..Header::bare(Kind::Probe, self.me, length as u32)
        };
        let (mut head, mut foot) = (header.encode().to_vec(), Vec::new());
        if let Some(tags) = self.link.tags() {
            head.extend(tags.sealer.seal(&header.encode()));
            if length > 0 {
                foot.extend(tags.sealer.seal(&SCRAP[..length]));
            }
        }
        Some((head, length, foot))
    }
}

/// Whether the two fastest of `judged` differ by a tenth at most.
fn agree(judged: &[Rate]) -> bool {
    judged.get(1).is_some_and(|second| second.bits() >= judged[0].bits() / 10 * 9)
}

/// Bytes of a frame at most. Acknowledgements go between two frames.
const PIECE: usize = 64 << 10;
static SCRAP: [u8; PIECE] = [0; PIECE];
/// The first train that is not empty. A switch may let as much pass at once, whatever its rate.
const SHORTEST: usize = 128 << 10;
/// No train is longer: 6.7 ms at 10 Gbit/s.
const LONGEST: usize = 8 << 20;
/// A train that takes this long, and this many round trips, is judged. At 1 Gbit/s it is of 1 MiB,
/// and all trains of a round together take 17 ms.
const LONG_ENOUGH: Duration = Duration::from_millis(5);
const ROUND_TRIPS: u32 = 10;
/// So many trains of one length are judged at most. They take about 70 ms at 1 Gbit/s.
const MOST_TRAINS: usize = 8;
/// However long a round trip is, so many of them are not awaited.
const LONGEST_WAIT: Duration = Duration::from_millis(100);
/// How often a wait looks for bad news.
const GLANCE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
