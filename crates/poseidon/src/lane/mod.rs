//! A lane: one thread of a node, with its own links, its own chunks and its own event loop.
//!
//! [`Lane`] is the lane without its thread: tests drive it over in-memory links in virtual time.
//! [`run`] is the thread: epoll, a mailbox, the clock.

pub(crate) mod board;
pub(crate) mod holdings;
pub(crate) mod outbox;
pub(crate) mod peer;

#[cfg(test)]
mod harness;

use crate::Error;
use crate::lane::board::{Board, Counters};
use crate::lane::holdings::Holdings;
use crate::lane::outbox::Payload;
use crate::lane::peer::{Fault, Peer};
use crate::memory::exchange::Exchange;
use crate::session::rule_state::{Piece, RuleState};
use poseidon_core::wire::{Header, Kind, MAX_ABORT};
use poseidon_core::{ChunkKey, Clock, Cluster, Layer, LayerId, NodeId, Violation};
use poseidon_link::Link;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::{Duration, Instant};

/// How long a lane waits before it takes something for broken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// A peer that has not been heard for this long is dead, and so is one that takes no bytes.
    pub(crate) silence: Duration,
    /// A chunk that has waited this long for a worker stops the job.
    pub(crate) stall: Duration,
}

/// What the session asks of a lane.
pub(crate) enum Command {
    /// A layer goes out.
    Send(Arc<Exchange>),
    /// A layer's factors go out: they are in their place.
    SendFactors { layer: LayerId, clock: Clock, rows: usize, rate: f32 },
    /// What is this lane waiting for, of this layer?
    Explain(LayerId, SyncSender<Vec<String>>),
    /// What does the update rule keep of this layer, of the chunks this lane holds?
    RuleState(LayerId, SyncSender<Vec<Piece>>),
    /// Put the update rule where it was. Answers whether that fits.
    RestoreRule(LayerId, Arc<RuleState>, SyncSender<bool>),
    /// Nothing more will be sent: say goodbye and serve until the others do.
    Finish,
    /// The program is unwinding: tell the others and stop.
    Abort(String),
}

pub(crate) struct Lane {
    me: NodeId,
    cluster: Cluster,
    layers: Arc<[Layer]>,
    holdings: Holdings,
    peers: Vec<Option<Peer>>,
    /// Shared by all links, so that it stays in cache: payloads are read here and added from here.
    scratch: Vec<f32>,
    board: Arc<Board>,
    counters: Arc<Counters>,
    limits: Limits,
    next_tick: Duration,
    /// The peer that is written to first, next time.
    turn: usize,
    finishing: bool,
    /// The job has failed; only goodbyes are still written, until then.
    dying: Option<Duration>,
}

/// What the thread should do after a turn.
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
const SCRATCH: usize = (128 << 10) / size_of::<f32>();
/// What a lane writes before it looks at what has come in.
const BURST: usize = 256 << 10;
const TICK: Duration = Duration::from_millis(500);
const HEARTBEAT: Duration = Duration::from_secs(2);
/// How long a failed lane goes on writing its reason to the others.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Everything a lane is made of.
pub(crate) struct Parts {
    pub(crate) me: NodeId,
    pub(crate) cluster: Cluster,
    pub(crate) layers: Arc<[Layer]>,
    pub(crate) holdings: Holdings,
    pub(crate) links: Vec<(NodeId, Box<dyn Link>)>,
    pub(crate) board: Arc<Board>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) limits: Limits,
}

impl Lane {
    pub(crate) fn new(parts: Parts, now: Duration) -> Self {
        let mut peers: Vec<Option<Peer>> = parts.cluster.node_ids().map(|_| None).collect();
        for (node, link) in parts.links {
            peers[node.index()] = Some(Peer::new(node, link, now));
        }
        Self {
            me: parts.me,
            cluster: parts.cluster,
            layers: parts.layers,
            holdings: parts.holdings,
            peers,
            scratch: vec![0.0; SCRATCH],
            board: parts.board,
            counters: parts.counters,
            limits: parts.limits,
            next_tick: now + TICK,
            // Everybody starts with somebody else, so that no node is flooded by all the others.
            turn: parts.me.index() + 1,
            finishing: false,
            dying: None,
        }
    }

    pub(crate) fn peers(&mut self) -> impl Iterator<Item = &mut Peer> {
        self.peers.iter_mut().flatten()
    }

    /// The link to `node` is ready.
    pub(crate) fn handle_ready(&mut self, node: NodeId, readable: bool, writable: bool) {
        if let Some(peer) = self.peers.get_mut(node.index()).and_then(Option::as_mut) {
            peer.handle_ready(readable, writable);
        }
    }

    /// Nothing more will come from `node` than what is there to be read.
    pub(crate) fn handle_closed(&mut self, node: NodeId) {
        if let Some(peer) = self.peers.get_mut(node.index()).and_then(Option::as_mut) {
            peer.handle_closed();
        }
    }

    pub(crate) fn handle_command(&mut self, command: Command, now: Duration) {
        match command {
            Command::Send(_) | Command::SendFactors { .. } if self.dying.is_some() => {}
            Command::Send(exchange) => {
                let peers = &mut self.peers;
                let sent = self.holdings.handle_send(exchange, now, |node, header, payload| {
                    post(peers, node, &header, payload);
                });
                if let Err((chunk, violation)) = sent {
                    self.die(self.own_fault(chunk, violation), now);
                }
            }
            Command::SendFactors { layer, clock, rows, rate } => {
                let peers = &mut self.peers;
                let step = (clock, rows, rate);
                let sent =
                    self.holdings.handle_send_factors(layer, step, |node, header, payload| {
                        post(peers, node, &header, payload);
                    });
                if let Err((chunk, violation)) = sent {
                    self.die(self.own_fault(chunk, violation), now);
                }
            }
            Command::Explain(layer, reply) => {
                let awaited = self.holdings.awaited().filter(|(chunk, _)| chunk.layer == layer);
                let words = awaited.map(|(chunk, node)| {
                    format!("chunk {} from {}", chunk.index, self.cluster.name(node))
                });
                // The asker has its own deadline and may have gone.
                let _ = reply.try_send(words.collect());
            }
            // Of these, too, the asker may have gone.
            Command::RuleState(layer, reply) => {
                let _ = reply.try_send(self.holdings.rule_state(layer));
            }
            Command::RestoreRule(layer, state, reply) => {
                let _ = reply.try_send(self.holdings.restore_rule(layer, &state));
            }
            Command::Finish => self.finish(),
            Command::Abort(_) if self.dying.is_some() => {}
            // The first reason is the one that counts: when another lane has failed, the program is
            // likely to give up because of it.
            Command::Abort(reason) => {
                let given_up = || Error::Aborted { node: self.cluster.name(self.me), reason };
                let error = self.board.failure().unwrap_or_else(given_up);
                self.die(error, now);
            }
        }
    }

    /// Does all that can be done now.
    pub(crate) fn turn(&mut self, now: Duration) -> Next {
        if self.dying.is_none()
            && let Err(error) = self.serve(now)
        {
            self.die(error, now);
        }
        if let Some(end) = self.dying {
            return self.speak_last_words(now, end);
        }
        if self.is_over() {
            return Next::Stop;
        }
        let busy = self.holdings.has_own_work()
            || self
                .peers
                .iter()
                .flatten()
                .any(|p| (p.readable && !p.departed) || (p.writable && p.has_unsent()));
        if busy { Next::Again } else { Next::Sleep(self.next_tick) }
    }

    fn serve(&mut self, now: Duration) -> Result<(), Error> {
        for node in 0..self.peers.len() {
            let Some(peer) = &mut self.peers[node] else { continue };
            if peer.readable && !peer.departed {
                let read = peer.read(&mut self.holdings, &mut self.scratch, &self.counters, now);
                read.map_err(|fault| self.explain(NodeId(node as u16), fault))?;
            }
        }
        let worked = self.holdings.work(now);
        worked.map_err(|(chunk, violation)| self.own_fault(chunk, violation))?;
        let peers = &mut self.peers;
        self.holdings.poll_completed(|node, header, payload| post(peers, node, &header, payload));
        self.write_burst(now)?;
        if now >= self.next_tick {
            self.next_tick = now + TICK.min(self.limits.silence / 4);
            self.tick(now)?;
        }
        Ok(())
    }

    /// Writes to the peers in turn until a burst is out. Reading comes first and writing goes on
    /// next time: what is on its way between two nodes of one host then stays in the cache.
    fn write_burst(&mut self, now: Duration) -> Result<(), Error> {
        let nodes = self.peers.len();
        let mut left = BURST;
        let first = self.turn;
        for node in (0..nodes).map(|i| (first + i) % nodes) {
            let Some(peer) = &mut self.peers[node] else { continue };
            match peer.write(&mut self.holdings, &self.counters, now) {
                Ok(wrote) => left = left.saturating_sub(wrote),
                Err(fault) => self.hear_out(node, fault, now)?,
            }
            if left == 0 {
                self.turn = node + 1;
                break;
            }
        }
        Ok(())
    }

    /// The link to `node` takes no more. Before it closed, it may have said goodbye, or why.
    fn hear_out(&mut self, node: usize, fault: Fault, now: Duration) -> Result<(), Error> {
        let Some(peer) = &mut self.peers[node] else { return Ok(()) };
        peer.handle_closed();
        let mut heard = Ok(());
        while heard.is_ok() && peer.readable && !peer.departed {
            heard = peer.read(&mut self.holdings, &mut self.scratch, &self.counters, now);
        }
        if peer.departed {
            peer.discard(&mut self.holdings);
            return Ok(());
        }
        Err(self.explain(NodeId(node as u16), heard.err().unwrap_or(fault)))
    }

    /// What has to be looked at from time to time: silence, stalls, goodbyes.
    fn tick(&mut self, now: Duration) -> Result<(), Error> {
        if let Some(failure) = self.board.failure() {
            return Err(failure); // of another lane of this node
        }
        let silence = self.limits.silence;
        for node in 0..self.peers.len() {
            let Some(peer) = &mut self.peers[node] else { continue };
            if peer.departed {
                self.board.note_departed(NodeId(node as u16));
            }
            let unheard = now.saturating_sub(peer.heard);
            let unspoken = now.saturating_sub(peer.spoke);
            let how = if !peer.departed && unheard > silence {
                format!("not heard for {silence:?}, though the connection is open")
            } else if !peer.departed && peer.has_unsent() && unspoken > silence {
                format!("has not taken a byte for {silence:?}: it stopped reading")
            } else {
                // Nothing follows this node's goodbye; but after the peer's, it still listens.
                let idle = !self.finishing && !peer.has_unsent();
                if idle && unspoken > HEARTBEAT.min(silence / 4) {
                    peer.send(&Header::bare(Kind::Heartbeat, self.me, 0), Payload::None);
                }
                continue;
            };
            return Err(self.explain(NodeId(node as u16), Fault::Lost(how)));
        }
        self.check_stalls(now)
    }

    fn check_stalls(&self, now: Duration) -> Result<(), Error> {
        let departed = |n: NodeId| self.peers[n.index()].as_ref().is_some_and(|p| p.departed);
        if let Some((_, server)) = self.holdings.awaited().find(|(_, server)| departed(*server)) {
            let how = "it finished while others go on".into();
            return Err(self.explain(server, Fault::Lost(how)));
        }
        let Some(stall) = self.holdings.poll_stalled(now, Duration::ZERO) else { return Ok(()) };
        let gone = |n: &NodeId| departed(*n) || (*n == self.me && self.finishing);
        if let Some(&node) = stall.missing.iter().find(|n| gone(n)) {
            let (chunk, layer) = (stall.key.index, self.layer_name(stall.key.layer));
            return Err(Error::Lost {
                node: self.cluster.name(node),
                how: "it finished while others go on".into(),
                awaited: Some(format!("chunk {chunk} of layer '{layer}' at clock {}", stall.clock)),
            });
        }
        if stall.waited < self.limits.stall {
            return Ok(());
        }
        Err(Error::Stalled {
            layer: self.layer_name(stall.key.layer),
            chunk: stall.key.index,
            clock: stall.clock,
            missing: stall.missing.iter().map(|&n| self.cluster.name(n)).collect(),
            waited: stall.waited,
        })
    }

    fn finish(&mut self) {
        if !self.finishing {
            self.finishing = true;
            let bye = Header::bare(Kind::Bye, self.me, 0);
            self.peers.iter_mut().flatten().for_each(|p| p.send(&bye, Payload::None));
        }
    }

    /// Whether all goodbyes are said and heard. A dedicated server says its own after the last
    /// worker's.
    fn is_over(&mut self) -> bool {
        let all_departed = self.peers.iter().flatten().all(|p| p.departed);
        let serves_only = self.cluster.role(self.me).is_some_and(|r| !r.worker);
        if all_departed && serves_only {
            self.finish();
        }
        self.finishing && all_departed && !self.peers.iter().flatten().any(Peer::has_unsent)
    }

    /// Takes the job down: tells the session, then everybody else.
    fn die(&mut self, error: Error, now: Duration) {
        let mut reason = match &error {
            // The others put the name before it themselves.
            Error::Aborted { node, reason } if *node == self.cluster.name(self.me) => {
                reason.clone()
            }
            error => error.to_string(),
        };
        reason.truncate(reason.floor_char_boundary(MAX_ABORT));
        tracing::debug!(node = %self.me, %reason, "lane stops");
        self.board.fail(error);
        let header = Header::bare(Kind::Abort, self.me, reason.len() as u32);
        for peer in self.peers.iter_mut().flatten() {
            peer.drop_unsent();
            peer.send(&header, Payload::Text(reason.as_bytes().into()));
        }
        self.dying = Some(now + LAST_WORDS);
    }

    /// Writes the reason to everybody, then waits for them to close: a connection that is dropped
    /// with something unread in it may take with it what it has still to deliver.
    fn speak_last_words(&mut self, now: Duration, end: Duration) -> Next {
        for slot in &mut self.peers {
            let Some(peer) = slot else { continue };
            let said = peer.write(&mut self.holdings, &self.counters, now);
            if said.is_err() || (!peer.has_unsent() && peer.drain(&mut self.scratch)) {
                *slot = None;
            }
        }
        let waiting = self.peers.iter().any(Option::is_some);
        if waiting && now < end { Next::Sleep(end) } else { Next::Stop }
    }

    fn explain(&self, node: NodeId, fault: Fault) -> Error {
        let name = self.cluster.name(node);
        match fault {
            Fault::Lost(how) => {
                let mut awaited = self.holdings.awaited().filter(|(_, server)| *server == node);
                let first = awaited.next().map(|(chunk, _)| {
                    let clock: Clock = self.holdings.clock(chunk.layer);
                    let layer = self.layer_name(chunk.layer);
                    let more = match awaited.count() {
                        0 => String::new(),
                        n => format!(" and {n} more chunks"),
                    };
                    format!("chunk {} of layer '{layer}' at clock {clock}{more}", chunk.index)
                });
                // Not waiting for it as a server: then perhaps for its worker's contribution.
                let stalled = || {
                    let stall = self.holdings.poll_stalled(Duration::MAX, Duration::ZERO)?;
                    let layer = self.layer_name(stall.key.layer);
                    let words = (stall.key.index, layer, stall.clock);
                    stall.missing.contains(&node).then(|| {
                        format!(
                            "its part of chunk {} of layer '{}' at clock {}",
                            words.0, words.1, words.2
                        )
                    })
                };
                Error::Lost { node: name, how, awaited: first.or_else(stalled) }
            }
            Fault::Garbage(why) => Error::Garbage { node: name, why },
            Fault::Abort(reason) => Error::Aborted { node: name, reason },
            Fault::Violation(header, violation) => Error::Violation {
                node: name,
                layer: self.layer_name(header.chunk.layer),
                chunk: header.chunk.index,
                clock: header.clock,
                violation,
            },
        }
    }

    /// This node's own worker has broken a rule its shard holds it to.
    fn own_fault(&self, chunk: ChunkKey, violation: Violation) -> Error {
        Error::Violation {
            node: self.cluster.name(self.me),
            layer: self.layer_name(chunk.layer),
            chunk: chunk.index,
            clock: self.holdings.clock(chunk.layer),
            violation,
        }
    }

    fn layer_name(&self, layer: LayerId) -> String {
        let known = self.layers.get(layer.index());
        known.map_or_else(|| format!("#{layer}, which does not exist"), |l| l.name.clone())
    }
}

fn post(peers: &mut [Option<Peer>], node: NodeId, header: &Header, payload: Payload) {
    // Every worker has a link to every server, and to every worker it sends factors: `node` made
    // them, or did not start.
    peers[node.index()].as_mut().expect("no link").send(header, payload);
}

/// The token of a lane's mailbox; links have their node's id.
pub(crate) const MAILBOX: mio::Token = mio::Token(usize::MAX);

/// Runs `lane` until it stops: the body of its thread. `core` is where it stays, if it shares that
/// core with the same lane of other nodes on this host: what one of them sends, the next one to run
/// receives, from the cache it was written to.
pub(crate) fn run(
    mut lane: Lane,
    mut poll: mio::Poll,
    mailbox: &Receiver<Command>,
    epoch: Instant,
    core: Option<usize>,
) {
    if let Some(core) = core {
        stay_on(core);
    }
    let _witness = Witness { board: lane.board.clone(), node: lane.cluster.name(lane.me) };
    if let Err(why) = serve_events(&mut lane, &mut poll, mailbox, epoch, core.is_some()) {
        lane.board.fail(Error::Io { what: "waiting for links".into(), why: Arc::new(why) });
    }
}

/// Reports a panic, which nobody would hear of otherwise until a deadline passes.
struct Witness {
    board: Arc<Board>,
    node: String,
}

impl Drop for Witness {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.board.fail(Error::Panicked { node: self.node.clone() });
        }
    }
}

/// The cores this process may use.
pub(crate) fn cores() -> Vec<usize> {
    let allowed = sched_getaffinity(None);
    allowed.map_or_else(
        |_| Vec::new(),
        |set| (0..CpuSet::MAX_CPU).filter(|&c| set.is_set(c)).collect(),
    )
}

fn stay_on(core: usize) {
    let mut set = CpuSet::new();
    set.set(core);
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::debug!(core, %error, "a lane could not be kept on its core");
    }
}

fn serve_events(
    lane: &mut Lane,
    poll: &mut mio::Poll,
    mailbox: &Receiver<Command>,
    epoch: Instant,
    shares_core: bool,
) -> io::Result<()> {
    for peer in lane.peers() {
        let token = mio::Token(peer.node().index());
        peer.link().register(poll.registry(), token)?;
    }
    let mut events = mio::Events::with_capacity(256);
    let mut commanded = false;
    loop {
        loop {
            match mailbox.try_recv() {
                Ok(command) => {
                    lane.handle_command(command, epoch.elapsed());
                    commanded = true;
                }
                Err(TryRecvError::Empty) => break,
                // The session is gone without a word: nobody will ever send or receive again.
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        }
        let timeout = match lane.turn(epoch.elapsed()) {
            Next::Again => {
                // Those who were just written to read while it is in the cache. Not while the
                // training program computes: it would take the core, and keep it. But once after a
                // command: a program that wants to wait must first get to.
                if shares_core && (commanded || lane.board.is_awaited()) {
                    std::thread::yield_now();
                    commanded = false;
                }
                Duration::ZERO
            }
            Next::Sleep(until) => until.saturating_sub(epoch.elapsed()),
            Next::Stop => return Ok(()),
        };
        match poll.poll(&mut events, Some(timeout)) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        }
        for event in events.iter().filter(|e| e.token() != MAILBOX) {
            let node = NodeId(event.token().0 as u16);
            let readable = event.is_readable() || event.is_read_closed() || event.is_error();
            if event.is_read_closed() || event.is_error() {
                lane.handle_closed(node);
            }
            lane.handle_ready(node, readable, event.is_writable() || event.is_write_closed());
        }
    }
}
