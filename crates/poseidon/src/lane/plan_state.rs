//! What a plan makes on one lane of one node: the lane's shard, and a syncer, or a gather of
//! factors, for its chunks of every layer. It is one value, so that a plan can be replaced whole.
//!
//! It knows nothing of links: frames come in through `open`, `combine` and `landed`, and go out
//! through the closures given to `handle_send`, `handle_send_factors` and `poll_completed`.

mod attendance;
mod beginning;
mod carried;
mod gathering;
mod message;
mod noted;

use crate::engine::channel::{Landing, Sent};
use crate::engine::outbox::{Message, Payload};
use crate::lane::board::Board;
use crate::memory::exchange::{Exchange, Lent};
use crate::memory::factors::{FactorMatrices, Rows};
use attendance::Attendance;
pub(crate) use attendance::Breach;
use beginning::Beginning;
pub(crate) use carried::Piece;
use gathering::Gathering;
use message::{about, contribution, to_send};
use noted::Noted;
use poseidon_core::queue::urgency;
use poseidon_core::store::{Completed, Contribution, Outcome, Stall, Way};
use poseidon_core::syncer::Part;
use poseidon_core::wire::{Header, Kind};
use poseidon_core::{
    Admission, ChunkKey, Clock, Cluster, Epoch, Gather, LaneId, LayerId, NodeId, Plan, Route,
    Shard, Store, Syncer, Tree, Violation,
};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A plan's state on one lane of one node.
pub(crate) struct PlanState {
    pub(super) epoch: Epoch,
    me: Shard,
    tree: Tree,
    /// The nodes that have results and factors from this one, by the way these take.
    fan_outs: BTreeMap<Route, Arc<[NodeId]>>,
    store: Store,
    syncers: Vec<Syncer>,
    exchanges: Vec<Option<Arc<Exchange>>>,
    /// By layer: the lane's part in gathering its factors, if it goes by factors.
    gathers: Vec<Option<Gathering>>,
    /// Per layer: gradients and updates that links still read from the exchange's memory.
    unsent: Vec<usize>,
    /// Chunks of this node's worker for its own shard, where another worker has begun the sum. One is
    /// added in every turn: all at once they would push everything else out of the cache.
    own: VecDeque<ChunkKey>,
    completed: Vec<Completed>,
    /// Chunks that begin here: what this node has to send of them.
    beginning: Admission<Beginning>,
    /// What has come to this node and goes on to others.
    passing: Vec<Passing>,
    /// By node: the frame whose payload comes from it now, and where the payload goes.
    arriving: Vec<Option<(Header, Arriving)>>,
    board: Arc<Board>,
    /// Who counts, where slow workers may be dropped.
    attendance: Option<Attendance>,
    /// The results are too many bytes to be still in a cache when the program gets to them.
    results_are_large: bool,
    /// When layers came, left and were done. Tests may have none.
    noted: Option<Noted>,
}

/// Results of this many bytes or more go past the cache. With fewer bytes two workers of a host are
/// a tenth slower if results go past the cache; with more they are faster (ADR 0008).
const LARGE: usize = 32 << 20;

/// A payload that has come, and that other nodes have from this one.
struct Passing {
    /// As it came.
    header: Header,
    to: Arc<[NodeId]>,
    payload: Payload,
}

/// A payload that is on its way in.
#[derive(Debug)]
enum Arriving {
    /// Piece by piece into a sum, which may be in memory this node's worker lent.
    Sum { sum: Contribution, lent: Option<Lent> },
    /// Straight into the training program's memory.
    Result,
    /// Straight into the matrix where factors meet: rows of this worker.
    Rows(NodeId, Rows),
    /// A word of the roll call, with a byte for each worker if it is a roll.
    Attendance(Vec<u8>),
}

/// The receipt of a result that a shard holds. Other messages' receipts are their layers' numbers.
const HELD_RESULT: u64 = u64::MAX;

impl PlanState {
    pub(crate) fn new(
        me: Shard,
        cluster: &Cluster,
        plan: &Plan,
        store: Store,
        matrices: &[Option<Arc<FactorMatrices>>],
        board: Arc<Board>,
    ) -> Self {
        let layers = (0..plan.layers() as u32).map(LayerId);
        let gathering = |(layer, matrices): (LayerId, &Option<Arc<FactorMatrices>>)| {
            let matrices = matrices.clone()?;
            let gather = Gather::new(layer, &matrices.layout, me.node, me.lane);
            Some(Gathering { gather, matrices, in_flight: false })
        };
        let syncers: Vec<_> =
            layers.clone().map(|layer| Syncer::new(plan, me.node, layer, me.lane)).collect();
        let bytes = |syncer: &Syncer| {
            let values = syncer.parts().iter().map(|part| part.range.len()).sum();
            syncer.encodings().down.bytes(values)
        };
        let results: usize = syncers.iter().map(bytes).sum();
        let parts = syncers.iter().map(|syncer| syncer.parts().len()).sum();
        Self {
            attendance: Attendance::new(me.node, cluster, plan.consistency(), parts),
            results_are_large: results * usize::from(cluster.lanes()) >= LARGE,
            gathers: layers.zip(matrices).map(gathering).collect(),
            epoch: plan.epoch,
            me,
            arriving: cluster.node_ids().map(|_| None).collect(),
            tree: plan.tree().clone(),
            fan_outs: BTreeMap::new(),
            store,
            syncers,
            exchanges: vec![None; plan.layers()],
            unsent: vec![0; plan.layers()],
            own: VecDeque::new(),
            completed: Vec::new(),
            beginning: Admission::new(cluster, me.node),
            passing: Vec::new(),
            board,
            noted: None,
        }
    }

    /// The training program lends the elements `ready` of a layer; more of the same exchange may
    /// follow. Gives `send` a message for every chunk of them that neither lives on this node nor is
    /// collected here.
    pub(crate) fn handle_send(
        &mut self,
        exchange: Arc<Exchange>,
        ready: &Range<usize>,
        now: Duration,
        mut send: impl FnMut(NodeId, Message),
    ) -> Result<(), (ChunkKey, Violation)> {
        let layer = exchange.layer;
        let syncer = &mut self.syncers[layer.index()];
        let is_ready =
            |part: &&Part| ready.start <= part.range.start && part.range.end <= ready.end;
        if !syncer.parts().iter().any(|part| is_ready(&part)) {
            return Ok(()); // The lane may have finished its part of the exchange.
        }
        if self.exchanges[layer.index()].is_none() {
            syncer.handle_send(exchange.clock);
            self.noted.iter_mut().for_each(|noted| noted.begun(layer, exchange.clock));
        }
        if let Some(attendance) = self.attendance.as_mut().filter(|_| exchange.kind == Kind::Push) {
            // Which clock a worker is at must be true of all its layers.
            if self.exchanges.iter().flatten().any(|other| other.clock < exchange.clock) {
                let violation = Violation::Unanswered(exchange.clock);
                return Err((ChunkKey { layer, index: 0 }, violation));
            }
            let parts = syncer.parts().iter().filter(is_ready).count();
            let sent = attendance.handle_send(exchange.clock, exchange.terms.marks, parts);
            sent.map_err(|violation| (ChunkKey { layer, index: 0 }, violation))?;
        }
        self.exchanges[layer.index()] = Some(exchange.clone());
        let syncer = &self.syncers[layer.index()];
        for part in syncer.parts().iter().filter(is_ready) {
            if part.collects {
                self.own.push_back(part.key);
            } else if part.begins {
                let (kind, bytes) = (exchange.kind, syncer.encodings().up.bytes(part.range.len()));
                self.unsent[layer.index()] += 1;
                let own = Beginning::Own(part.key);
                self.beginning.handle_ready(urgency(kind, layer), bytes, own);
            } else if let Some(message) = self.own_contribution(part.key) {
                self.unsent[layer.index()] += 1;
                send(part.up, message);
            }
        }
        self.poll_beginning(now, &mut send);
        // A chunk that no other worker has contributed to is lent to the shard, which makes the sum
        // in it. Only the other chunks are work.
        for _ in 0..self.own.len() {
            let Some(chunk) = self.own.pop_front() else { break };
            let Some(mut lent) = self.lent(chunk) else { continue };
            let header = contribution(self.me.node, chunk, lent.range(), lent.exchange());
            let loan = self.store.handle_loan(&header, now).map_err(|words| (chunk, words))?;
            if let Some(loan) = loan {
                self.completed.extend(self.store.handle_contributed(loan, Some(lent.sum())));
            } else if !self.store.holds_back(&header, now) {
                self.own.push_back(chunk);
            }
        }
        Ok(())
    }

    /// Checks a frame that carries a chunk and says where its payload goes.
    pub(crate) fn open(&mut self, header: &Header, now: Duration) -> Result<Landing, Violation> {
        if header.epoch != self.epoch {
            return Err(Violation::Epoch { expected: self.epoch, got: header.epoch });
        }
        let (landing, arriving) = match header.kind {
            Kind::Push | Kind::Init => {
                let sum = self.store.handle_push(header, now)?;
                let lent = if sum.is_lent() { self.lent(header.chunk) } else { None };
                (Landing::Combine { width: sum.encoding().width() }, Arriving::Sum { sum, lent })
            }
            Kind::Update => {
                let layer = header.chunk.layer.index();
                let syncer = self.syncers.get_mut(layer).ok_or(Violation::UnknownChunk)?;
                syncer.handle_update(header)?;
                let part = syncer.part(header.chunk.index);
                let collects = part.is_some_and(|part| part.collects);
                let passes_on = part.is_some_and(|part| part.passes_on);
                let region = self.lent(header.chunk).ok_or(Violation::NotInFlight)?.result_region();
                // What others have from this node is read again soon. Contributions that it collects,
                // and this worker's, may be in the memory that the result goes to.
                if collects && !self.store.has_passed_on(header.chunk, header.clock) {
                    return Err(Violation::TooEarly(header.clock));
                }
                let past_cache = self.results_are_large && !passes_on;
                (Landing::Assign { region, past_cache }, Arriving::Result)
            }
            Kind::Factors => {
                let gathering = self.gathers.get_mut(header.chunk.layer.index());
                let gathering =
                    gathering.and_then(Option::as_mut).ok_or(Violation::UnknownChunk)?;
                let arrival = gathering.gather.handle_factors(header, &self.tree)?;
                let (matrices, worker) = (|| gathering.matrices.clone(), arrival.worker);
                // SAFETY: as judged, the rows are a chunk of this lane that nobody reads yet.
                let rows =
                    |range| unsafe { Rows::others(matrices(), worker, arrival.place, range) };
                if !arrival.blank.is_empty() {
                    rows(arrival.blank.clone()).room().fill(0);
                }
                let mut rows = rows(arrival.range.clone());
                let landing = Landing::Assign { region: rows.room_region(), past_cache: false };
                (landing, Arriving::Rows(worker, rows))
            }
            Kind::Ready | Kind::Late | Kind::Roll => {
                let attendance = self.attendance.as_ref().ok_or(Violation::WrongKind)?;
                attendance.judge(header)?;
                (Landing::Combine { width: 1 }, Arriving::Attendance(Vec::new()))
            }
            _ => return Err(Violation::WrongKind),
        };
        self.arriving[header.sender.index()] = Some((*header, arriving));
        Ok(landing)
    }

    /// The next piece of the contribution from `from` that `open` let in.
    pub(crate) fn combine(&mut self, from: NodeId, piece: &[u8]) {
        match &mut self.arriving[from.index()] {
            Some((_, Arriving::Sum { sum, lent })) => {
                let lent = lent.as_mut().map(Lent::sum);
                self.store.handle_piece(sum, piece, lent);
            }
            Some((_, Arriving::Attendance(bytes))) => bytes.extend_from_slice(piece),
            _ => {}
        }
    }

    /// The payload from `from` that `open` let in is all there.
    pub(crate) fn landed(&mut self, from: NodeId) {
        let Some((header, arriving)) = self.arriving[from.index()].take() else { return };
        let Header { chunk, clock, marks, .. } = header;
        match arriving {
            Arriving::Sum { sum, mut lent } => {
                let done = self.store.handle_contributed(sum, lent.as_mut().map(Lent::sum));
                self.completed.extend(done);
                if self.store.lets_go(chunk) {
                    self.own.push_back(chunk);
                }
            }
            Arriving::Result => {
                self.board.note_marks(marks, clock);
                let part = self.syncers[chunk.layer.index()].part(chunk.index);
                if let Some(route) = part.filter(|part| part.passes_on).map(|part| part.route)
                    && let Some(lent) = self.lent(chunk)
                {
                    self.pass_on(header, route, Payload::Region(lent.result_region()));
                }
                self.handle_landed(chunk);
            }
            Arriving::Attendance(bytes) => {
                if let Some(attendance) = &mut self.attendance {
                    attendance.handle_word(header, bytes);
                }
            }
            Arriving::Rows(worker, rows) => {
                // Everybody hears of a mark at one clock: when it is certain that its factors have come.
                let heard = Clock(clock.0 + rows.lead());
                self.board.note_marks(marks, heard);
                if let Some(gathering) = &self.gathers[chunk.layer.index()]
                    && let Some(route) = gathering.matrices.layout.route(chunk.index)
                {
                    self.pass_on(header, route, to_send(&rows));
                }
                rows.land(worker);
                if let Some(gathering) = &mut self.gathers[chunk.layer.index()]
                    && gathering.gather.handle_landed(chunk.index, clock)
                {
                    self.finish_if_gathered(chunk.layer);
                }
            }
        }
    }

    /// What came with `header` goes on to the nodes that have it from this one. The layer stays in
    /// flight until links have taken it.
    fn pass_on(&mut self, header: Header, route: Route, payload: Payload) {
        let to = fan_out(&mut self.fan_outs, &self.tree, self.me.node, route);
        self.unsent[header.chunk.layer.index()] += to.len();
        if !to.is_empty() {
            let header = Header { sender: self.me.node, ..header };
            self.passing.push(Passing { header, to, payload });
        }
    }

    /// A chunk's result is in place.
    fn handle_landed(&mut self, chunk: ChunkKey) {
        let exchange = self.exchanges[chunk.layer.index()].as_ref();
        if let Some(landings) = exchange.and_then(|exchange| exchange.landings.as_ref()) {
            landings.note(chunk.index);
        }
        self.note_back(chunk);
        if self.syncers[chunk.layer.index()].handle_landed(chunk.index) {
            self.finish_if_done(chunk.layer);
        }
    }

    /// Adds one of this node's own chunks to this node's shard. False if there was none.
    pub(crate) fn work(&mut self, now: Duration) -> Result<bool, (ChunkKey, Violation)> {
        let Some(chunk) = self.own.pop_front() else { return Ok(false) };
        self.contribute_own(chunk, now).map_err(|violation| (chunk, violation))?;
        Ok(true)
    }

    /// Gives `send` what has become complete: sums for the node above, results for those who have
    /// contributed. And what others have from this node.
    pub(crate) fn poll_completed(&mut self, now: Duration, mut send: impl FnMut(NodeId, Message)) {
        while let Some(completed) = self.completed.pop().or_else(|| self.store.poll_answer()) {
            match self.beginning_of(&completed) {
                Some((urgency, bytes)) => {
                    let sum = Beginning::Sum(Box::new(completed));
                    self.beginning.handle_ready(urgency, bytes, sum);
                }
                None => self.send_completed(completed, &mut send),
            }
        }
        for Passing { header, to, payload } in self.passing.drain(..) {
            for &node in &*to {
                send(node, about(header, payload.clone(), header.chunk.layer));
            }
        }
        self.poll_beginning(now, &mut send);
    }

    fn send_completed(&mut self, completed: Completed, send: &mut impl FnMut(NodeId, Message)) {
        let Completed { key, clock, way, marks, result } = completed;
        let layer = key.layer.index();
        let lent = self.lent(key);
        let length = match (&result, &lent) {
            (Outcome::Held(values), _) => values.bytes().len(),
            (Outcome::Lent, Some(lent)) => lent.gradient().len(),
            (Outcome::Lent, None) => unreachable!("a loan ends after its chunk is complete"),
            (Outcome::Nothing, _) => 0,
        };
        let (kind, value) = match way {
            Way::Up { kind, rate } => (kind, rate),
            Way::Down | Way::To(_) => (Kind::Update, 0.0),
        };
        let bare = Header::bare(kind, self.me.node, length as u32);
        let header = Header { chunk: key, clock, value, marks, ..bare };
        let part = self.syncers[layer].part(key.index);
        let up = part.map(|part| part.up);
        let round = part.filter(|p| way == Way::Down && p.route.ring.takes_results());
        let (fan_outs, me) = (&mut self.fan_outs, self.me.node);
        let round = round.map(|part| fan_out(fan_outs, &self.tree, me, part.route));
        let to = match (&way, &round) {
            (Way::Up { .. }, _) => up.as_slice(),
            (Way::Down, Some(round)) => round,
            (Way::Down, None) => self.store.contributors(key),
            (Way::To(worker), _) => std::slice::from_ref(worker),
        };
        for &node in to.iter().filter(|node| **node != self.me.node) {
            let message = match (&result, &lent) {
                (Outcome::Held(values), _) => {
                    let urgency = urgency(kind, key.layer);
                    Message::new(header, Payload::Shared(values.clone()), urgency, HELD_RESULT)
                }
                (Outcome::Lent, Some(lent)) => {
                    self.unsent[layer] += 1;
                    about(header, Payload::Region(lent.gradient_region()), key.layer)
                }
                (Outcome::Lent, None) => unreachable!("judged above"),
                (Outcome::Nothing, _) => {
                    Message::new(header, Payload::None, urgency(kind, key.layer), HELD_RESULT)
                }
            };
            send(node, message);
        }
        // On a dedicated server no layer is ever in flight.
        let to_me = way == Way::Down || way == Way::To(self.me.node);
        if let Some(lent) = lent.filter(|_| to_me) {
            self.board.note_marks(marks, clock);
            self.syncers[layer].handle_own(clock);
            lent.land(&result);
            self.handle_landed(key);
        }
        if let Outcome::Held(values) = result {
            self.store.release(values);
        }
    }

    /// A link has taken the whole of a message. True if others have to be told that this was the last one
    /// of a contribution.
    pub(crate) fn sent(&mut self, sent: Sent) -> bool {
        match sent {
            Sent { receipt: HELD_RESULT, payload: Payload::Shared(result) } => {
                self.store.release(result);
            }
            Sent { receipt: HELD_RESULT, .. } => {}
            Sent { receipt: layer, .. } => {
                let layer = LayerId(layer as u32);
                self.unsent[layer.index()] -= 1;
                self.note_out(layer);
                self.finish_if_done(layer);
                self.finish_if_gathered(layer);
                return self.attendance.is_some() && self.is_all_sent();
            }
        }
        false
    }

    /// A frame whose payload is on its way in.
    pub(crate) fn arriving(&self) -> Option<&Header> {
        self.arriving.iter().flatten().map(|(header, _)| header).next()
    }

    /// Whether nothing of this node's is in flight: then the plan may be replaced.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.exchanges.iter().all(Option::is_none)
            && self.unsent.iter().all(|&unsent| unsent == 0)
            && self.own.is_empty()
            && self.completed.is_empty()
            && self.beginning.is_empty()
            && self.passing.is_empty()
    }

    pub(crate) fn lane(&self) -> LaneId {
        self.me.lane
    }

    pub(crate) fn has_own_work(&self) -> bool {
        !self.own.is_empty()
    }

    pub(crate) fn poll_stalled(&self, now: Duration, limit: Duration) -> Option<Stall> {
        self.store.poll_stalled(now, limit)
    }

    /// The chunks this node's worker awaits.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = Awaited> {
        let result = |part: &Part| Awaited { chunk: part.key, from: part.from, of: part.server() };
        let results = self.syncers.iter().flat_map(move |s| s.missing().map(result));
        let rows = self.gathers.iter().flatten().flat_map(move |gathering| {
            let layout = &gathering.matrices.layout;
            gathering.gather.missing().map(move |(chunk, worker)| {
                let from =
                    layout.route(chunk.index).and_then(|r| self.tree.source(self.me.node, r));
                Awaited { chunk, from: from.unwrap_or(worker), of: worker }
            })
        });
        results.chain(rows)
    }

    /// The clock `layer` is at on this lane.
    pub(crate) fn clock(&self, layer: LayerId) -> Clock {
        let gather = self.gathers.get(layer.index()).and_then(Option::as_ref);
        let gathered = gather.map_or(Clock(0), |g| g.gather.clock());
        gathered.max(self.syncers[layer.index()].clock())
    }

    fn contribute_own(&mut self, chunk: ChunkKey, now: Duration) -> Result<(), Violation> {
        let Some(lent) = self.lent(chunk) else { return Ok(()) };
        let header = contribution(self.me.node, chunk, lent.range(), lent.exchange());
        let mut sum = self.store.handle_push(&header, now)?;
        if header.length > 0 {
            self.store.handle_piece(&mut sum, lent.gradient(), None);
        }
        self.completed.extend(self.store.handle_contributed(sum, None));
        Ok(())
    }

    /// The memory of `chunk` while its layer is in flight.
    fn lent(&self, chunk: ChunkKey) -> Option<Lent> {
        let exchange = self.exchanges[chunk.layer.index()].clone()?;
        let range = self.syncers[chunk.layer.index()].part(chunk.index)?.range.clone();
        // SAFETY: the syncer's parts are the chunks of this lane. The exchange is here, so the layer
        // is not reported done, which waits for all links. A slice of a `Lent` lives for one call.
        Some(unsafe { Lent::new(exchange, range) })
    }

    /// The layer is done on this lane when all results are in place and no link reads its memory.
    fn finish_if_done(&mut self, layer: LayerId) {
        let done = self.syncers[layer.index()].is_synced() && self.unsent[layer.index()] == 0;
        if done && let Some(exchange) = self.exchanges[layer.index()].take() {
            // The lane lets go of the memory before it reports so: the session takes the memory
            // back at once.
            drop(exchange);
            self.board.note_answer(layer, self.syncers[layer.index()].answer());
            self.noted.iter_mut().for_each(|noted| noted.done(layer));
            self.board.finish_part(layer);
        }
    }
}

/// A chunk that a worker awaits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited {
    pub(crate) chunk: ChunkKey,
    /// The node that it comes from.
    pub(crate) from: NodeId,
    /// The node that it has begun at: the chunk's server, or the worker whose factors it has.
    pub(crate) of: NodeId,
}

/// The nodes that have from `me` what takes this way.
fn fan_out(
    known: &mut BTreeMap<Route, Arc<[NodeId]>>,
    tree: &Tree,
    me: NodeId,
    route: Route,
) -> Arc<[NodeId]> {
    known.entry(route).or_insert_with(|| tree.receivers(me, route).into()).clone()
}

#[cfg(test)]
mod tests;
