//! A node made by hand. It joins as `docs/wire.md` says, can take an honest part in a clock, and
//! otherwise says whatever a test wants it to.

use poseidon::config::Config;
use poseidon::{BOOK_VERSION, Book, Clock, Job, LayerId, NodeId};
use poseidon_core::wire::{Header, Kind, Purpose};
use poseidon_core::{ChannelId, ChunkKey, Epoch, LaneId, Plan, Shard};
use poseidon_link::{Address, Caller, Stream, TAG_SIZE, Tagged, connect};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

pub(crate) struct Fake {
    pub(crate) me: NodeId,
    pub(crate) book: Book,
    pub(crate) plan: Plan,
    /// To every node with a lower id, which is everybody: a fake is the last node. One lane.
    pub(crate) links: BTreeMap<NodeId, Stream>,
    /// To the coordinator: as long as it is open, the fake lives.
    pub(crate) control: Stream,
}

impl Fake {
    /// Joins through the coordinator and calls everybody. Workers bring the job they believe in.
    pub(crate) fn join(config: &Config, job: Option<&Job>) -> Self {
        let me = config.node();
        let joined = register(config, job, "elsewhere");
        let (book, control) = joined.expect("the coordinator lets the fake in");
        let mut fake = Self { me, plan: book.plan(), book, links: BTreeMap::new(), control };
        for node in fake.book.cluster.node_ids().filter(|&n| n < me) {
            let to = Address::Tcp(fake.book.nodes[node.index()].tcp.clone());
            let caller = lane(&fake.book, me, LaneId(0));
            let mut stream = connect(&to, caller, &config.credentials(), deadline()).unwrap();
            stream.set_deadline(Some(deadline()));
            fake.links.insert(node, stream);
        }
        fake
    }

    /// Writes `bytes` as one frame, with the right tags: a fake is a node of the job, whatever it
    /// says.
    pub(crate) fn write(&mut self, to: NodeId, bytes: &[u8]) {
        // The other end may have hung up already, which is what most tests are after.
        let _ = write_frame(self.links.get_mut(&to).expect("no link"), bytes);
    }

    /// The next frame from `node` that is not a heartbeat.
    pub(crate) fn read(&mut self, node: NodeId) -> (Header, Vec<u8>) {
        let link = self.links.get_mut(&node).expect("no link");
        loop {
            let (header, payload) = read_frame(link).expect("an honest node's frame");
            if header.kind != Kind::Heartbeat {
                return (header, payload);
            }
        }
    }

    /// The chunks `node` holds.
    pub(crate) fn chunks_of(&self, node: NodeId) -> Vec<ChunkKey> {
        let shard = Shard { node, lane: LaneId(0) };
        let chunks = self.plan.all_chunks();
        chunks.filter(|(_, s)| *s == shard).map(|(key, _)| key).collect()
    }

    /// A header that is about the whole session.
    pub(crate) fn bare(&self, kind: Kind, length: usize) -> Header {
        let (channel, epoch) = (ChannelId::FIRST, Epoch::FIRST);
        Header { channel, epoch, ..Header::bare(kind, self.me, length as u32) }
    }

    /// The header of this node's contribution to `chunk` at `clock`.
    pub(crate) fn push(&self, chunk: ChunkKey, clock: u64) -> Header {
        let bare = self.bare(Kind::Push, self.plan.payload(chunk, Kind::Push));
        Header { chunk, clock: Clock(clock), ..bare }
    }

    /// A frame of `header` with a payload of as many zeros as it says.
    pub(crate) fn frame(header: &Header) -> Vec<u8> {
        let mut frame = header.encode().to_vec();
        frame.resize(Header::SIZE + header.length as usize, 0);
        frame
    }

    /// Takes an honest part in one clock: as a worker contributes zeros, as a server answers with
    /// sums.
    pub(crate) fn take_part(&mut self, clock: u64) {
        self.contribute(clock);
        let sums = self.collect(clock);
        self.answer(clock, &sums);
    }

    /// Sends zeros for every chunk of other nodes, if this node is a worker.
    pub(crate) fn contribute(&mut self, clock: u64) {
        if !self.book.cluster.role(self.me).unwrap().worker {
            return;
        }
        for node in self.nodes() {
            for chunk in self.chunks_of(node) {
                let frame = Self::frame(&self.push(chunk, clock));
                self.write(node, &frame);
            }
        }
    }

    /// Reads everybody's contributions to this node's chunks, and the updates of everybody else's.
    pub(crate) fn collect(&mut self, clock: u64) -> BTreeMap<ChunkKey, Vec<f32>> {
        let mine = self.chunks_of(self.me);
        let mut sums: BTreeMap<_, _> =
            mine.iter().map(|&chunk| (chunk, vec![0.0; self.plan.len(chunk)])).collect();
        let me_works = self.book.cluster.role(self.me).unwrap().worker;
        for node in self.nodes() {
            let updates = if me_works { self.chunks_of(node).len() } else { 0 };
            for _ in 0..mine.len() + updates {
                let (header, payload) = self.read(node);
                assert_eq!((header.sender, header.clock), (node, Clock(clock)), "{header:?}");
                if header.kind == Kind::Push {
                    let sum = sums.get_mut(&header.chunk).expect("a push to another's chunk");
                    for (sum, bytes) in sum.iter_mut().zip(payload.as_chunks().0) {
                        *sum += f32::from_le_bytes(*bytes);
                    }
                }
            }
        }
        sums
    }

    /// Sends everybody the results of this node's chunks.
    pub(crate) fn answer(&mut self, clock: u64, sums: &BTreeMap<ChunkKey, Vec<f32>>) {
        for node in self.nodes() {
            for (&chunk, sum) in sums {
                let header = Header { kind: Kind::Update, ..self.push(chunk, clock) };
                let mut frame = header.encode().to_vec();
                frame.extend(sum.iter().flat_map(|value| value.to_le_bytes()));
                self.write(node, &frame);
            }
        }
    }

    fn nodes(&self) -> Vec<NodeId> {
        self.links.keys().copied().collect()
    }
}

/// Who calls as `lane` of `node` in the job that has `book`.
pub(crate) fn lane(book: &Book, node: NodeId, lane: LaneId) -> Caller {
    let Book { identity, epoch, .. } = *book;
    Caller { purpose: Purpose::Lane, node, lane, identity, epoch }
}

/// Joins the job of `config` from `host`, at an address where nobody listens. Returns the book and
/// the control connection, by which the coordinator knows that the node lives. The error is the
/// coordinator's reason.
pub(crate) fn register(
    config: &Config,
    job: Option<&Job>,
    host: &str,
) -> Result<(Book, Stream), String> {
    let node = config.node();
    let mut stream = control(config, node);
    let join = json!({
        "type": "join",
        "facts": { "node": node, "host": host, "tcp": "127.0.0.1:9", "unix": null, "version": "0" },
        "workers": config.workers,
        "servers": config.servers.to_string(),
        "lanes": config.lanes,
        "book": BOOK_VERSION,
        "job": job,
    });
    let answer = ask(&mut stream, node, &join);
    match answer["type"].as_str() {
        Some("book") => Ok((serde_json::from_value(answer).unwrap(), stream)),
        Some("refused") => Err(answer["reason"].as_str().unwrap().into()),
        _ => panic!("expected a book, got {answer}"),
    }
}

/// A control connection to the coordinator.
pub(crate) fn control(config: &Config, node: NodeId) -> Stream {
    let caller = Caller::control(node);
    let to = Address::Tcp(config.coordinator.clone());
    let mut stream = connect(&to, caller, &config.credentials(), deadline()).unwrap();
    stream.set_deadline(Some(deadline()));
    stream
}

/// Says one thing on a control connection and hears one back.
pub(crate) fn ask(stream: &mut Stream, sender: NodeId, message: &Value) -> Value {
    let body = message.to_string();
    let header = Header::bare(Kind::Control, sender, body.len() as u32);
    write_frame(stream, &[&header.encode(), body.as_bytes()].concat()).unwrap();
    let (header, body) = read_frame(stream).unwrap();
    assert_eq!(header.kind, Kind::Control);
    serde_json::from_slice(&body).unwrap()
}

pub(crate) fn chunk(layer: u32, index: u32) -> ChunkKey {
    ChunkKey { layer: LayerId(layer), index }
}

/// Writes a header and what follows it, each with its tag unless the connection is encrypted.
pub(crate) fn write_frame(stream: &mut Stream, bytes: &[u8]) -> std::io::Result<()> {
    let (header, payload) = bytes.split_at(Header::SIZE);
    let Some(mut sealer) = stream.sealer().cloned() else { return stream.write_all(bytes) };
    let mut frame = [header, &sealer.seal(header)].concat();
    if !payload.is_empty() {
        frame.extend_from_slice(payload);
        frame.extend(sealer.seal(payload));
    }
    *stream.sealer().expect("as before") = sealer;
    stream.write_all(&frame)
}

pub(crate) fn read_frame(stream: &mut Stream) -> std::io::Result<(Header, Vec<u8>)> {
    let head = read_sealed(stream, Header::SIZE)?;
    let header = Header::decode(head[..].try_into().unwrap()).map_err(std::io::Error::other)?;
    let payload = match header.length {
        0 => Vec::new(),
        length => read_sealed(stream, length as usize)?,
    };
    Ok((header, payload))
}

/// Reads so many bytes, and their tag if they have one.
fn read_sealed(stream: &mut Stream, size: usize) -> std::io::Result<Vec<u8>> {
    let (mut bytes, mut tag) = (vec![0; size], [0; TAG_SIZE]);
    stream.read_exact(&mut bytes)?;
    if stream.opener().is_some() {
        stream.read_exact(&mut tag)?;
    }
    if let Some(opener) = stream.opener() {
        opener.open(&bytes, &tag).map_err(std::io::Error::other)?;
    }
    Ok(bytes)
}

/// Long enough to be reached only when something is broken.
fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}
