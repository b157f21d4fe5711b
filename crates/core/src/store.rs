//! The state machine of one shard: the chunks of one lane of one server node (Poseidon 2017 §4.1).
//!
//! A chunk collects one contribution from every worker, in pieces, as the network delivers them.
//! When the last contribution is in, the optimizer runs on the chunk while the chunk is still in
//! cache, and the result goes to every worker. Workers of one host send one contribution together:
//! one of them [collects](crate::tree) it. What a node collects for others is in its store too: such
//! a chunk has no parameters, and its sum goes on to the node above.
//!
//! The sum of a chunk lives in one of two places. If this node has a worker of its own and that
//! worker contributes first, the worker *lends* its gradient's memory, and the other contributions
//! are added to it in place: no copy in, no copy out. Otherwise the sum lives in a recycled buffer.
//! So a shard that keeps up touches the memory of a few chunks only, however large the model is.
//!
//! Sums and parameters are `f32` here, whatever the layer's [encodings](crate::encoding). A
//! contribution of another type is decoded while it is added, and its memory cannot be lent. A result
//! of another type is rounded once, when the chunk is complete. So is a sum that goes on to the node
//! above, which the next sum then takes as it is.
//!
//! Where the clocks of workers [may be apart](crate::consistency), a chunk collects several clocks at
//! once, and every worker is answered for itself: `loose` has that. Nothing is lent then, because a
//! worker is answered before the sum of its clock is complete.
//!
//! Where a job does not wait for its [slowest workers](crate::roll), contributions are kept apart until
//! it is known who counts: `dropping` has that.
//!
//! A simulation has no numbers: [`Store::ghost`] judges, counts and answers like any other store,
//! and all its sums are empty.

mod dropping;
mod held;
mod loose;
mod open_clock;
mod outcome;
mod pool;
mod state;
mod streams;

use crate::encoding::Block;
use crate::optim::{self, Optimizer, Reduction, State, Step};
use crate::wire::{Header, Kind, Marks, Terms};
use crate::{
    ChunkKey, Clock, Consistency, Encoding, Encodings, LayerId, NodeId, Plan, Route, Shard,
    Violation,
};
use dropping::Called;
use held::Held;
use loose::Owed;
use open_clock::{OpenClock, add_or_assign};
pub use outcome::{Completed, Kept, Outcome, Restored, Resumption, Stall, Way};
use pool::{Pool, unshared};
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use streams::Streams;

/// One shard of the KV store.
#[derive(Debug)]
pub struct Store {
    workers: usize,
    order: Order,
    consistency: Consistency,
    /// In the order of [`keys`](Self::keys).
    slots: Vec<Slot>,
    /// This shard's chunks, sorted. They are kept apart from the slots, because they are searched.
    keys: Vec<ChunkKey>,
    pool: Pool,
    /// What is to be kept and has not been taken.
    kept: Vec<Kept>,
    /// Answers to single workers that have not been taken.
    answers: Vec<Completed>,
    /// Who counts, where slow workers may be dropped.
    called: Called,
    /// When something came last.
    now: Duration,
}

/// In which order contributions are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// In the order in which they come. This is the fastest, and replicas still agree with each
    /// other bit by bit.
    #[default]
    Arrival,
    /// In the order of the workers' ranks, so a run is bit-identical to its repetition: host by host,
    /// and rack by rack where there are racks. It takes a buffer for every contribution that comes
    /// before its turn.
    Rank,
}

/// A contribution on its way into a chunk.
#[derive(Debug)]
pub struct Contribution {
    slot: SlotId,
    stream: usize,
    clock: Clock,
    terms: Terms,
    /// Its numbers, if they are not added to a sum while they come.
    own: Option<Arc<[f32]>>,
    /// Elements that have come.
    done: usize,
    len: usize,
    encoding: Encoding,
    lent: bool,
    /// It came too late: nothing of it is kept.
    late: bool,
}

type SlotId = u32;

/// One chunk of the shard.
#[derive(Debug)]
struct Slot {
    key: ChunkKey,
    /// The update rule of its layer.
    optimizer: Optimizer,
    encodings: Encodings,
    /// Elements that a contribution must have.
    len: usize,
    /// Elements that memory is kept for: `len`, or none in a simulation.
    room: usize,
    /// False if the layer goes by factors: then only its initial values pass through the store.
    collects: bool,
    /// Another node has the parameters: the sum goes on to the node above.
    passes_on: bool,
    /// The first clock that is not complete.
    clock: Clock,
    parameters: Option<Arc<[f32]>>,
    state: Vec<Arc<[f32]>>,
    /// Steps that the update rule took before this store existed, if its state came from a
    /// checkpoint.
    steps_before: u64,
    streams: Arc<Streams>,
    /// By stream: how far it has come.
    progress: Box<[Progress]>,
    /// The clocks that contributions have begun to, from `clock` on. Where workers are at one clock,
    /// there is at most one.
    rounds: VecDeque<OpenClock>,
    /// Who waits for an answer, where workers may be apart.
    owed: Owed,
    /// What this node's worker [holds back](Store::holds_back).
    held: Option<Held>,
    /// What a checkpoint has of the chunk, until its initial values have come.
    restored: Option<Restored>,
}

/// How far a stream has come.
#[derive(Clone, Copy, Debug)]
struct Progress {
    /// The first clock that it has not contributed to.
    next: Clock,
    /// Its contribution to that clock is on its way in.
    arriving: bool,
    /// Its contribution came too late, and it waits for the result of a later clock.
    late: bool,
}

impl Progress {
    fn at(next: Clock) -> Self {
        Self { next, arriving: false, late: false }
    }
}

impl Contribution {
    /// Whether it is added to a sum in memory that this node's worker lent.
    pub fn is_lent(&self) -> bool {
        self.lent
    }

    /// Elements that have not come.
    pub fn missing(&self) -> usize {
        self.len - self.done
    }

    /// What its elements are.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }
}

impl Store {
    /// The shard `shard` of `plan`, and what its lane collects for other shards. `rule` gives the
    /// update rule of a layer.
    pub fn new<'a>(
        plan: &Plan,
        shard: Shard,
        rule: impl Fn(LayerId) -> &'a Optimizer,
        order: Order,
    ) -> Self {
        let tree = plan.tree();
        let mut known: BTreeMap<Route, Arc<Streams>> = BTreeMap::new();
        let mut slots = Vec::new();
        for (key, at) in plan.all_chunks().filter(|(_, at)| at.lane == shard.lane) {
            let Some(route) = plan.route(key) else { continue };
            if !tree.collects(shard.node, route) {
                continue;
            }
            let streams = known
                .entry(route)
                .or_insert_with(|| Arc::new(Streams::new(&tree.sum(shard.node, route))));
            slots.push(Slot {
                key,
                optimizer: rule(key.layer).clone(),
                encodings: plan.encodings(key.layer),
                len: plan.len(key),
                room: plan.len(key),
                collects: plan.factors(key.layer).is_none(),
                passes_on: at != shard,
                clock: Clock(0),
                parameters: None,
                state: Vec::new(),
                steps_before: 0,
                progress: vec![Progress::at(Clock(0)); streams.len()].into(),
                streams: streams.clone(),
                rounds: VecDeque::new(),
                owed: Owed::default(),
                held: None,
                restored: None,
            });
        }
        let keys = slots.iter().map(|slot| slot.key).collect();
        let (workers, consistency, now) = (tree.workers(), plan.consistency(), Duration::ZERO);
        let (pool, kept, answers) = (Pool::default(), Vec::new(), Vec::new());
        let called = Called::default();
        Self { workers, order, consistency, slots, keys, pool, kept, answers, called, now }
    }

    /// The same shard without numbers, for simulations: contributions are judged by their headers
    /// and have no pieces, results are empty.
    pub fn ghost(plan: &Plan, shard: Shard) -> Self {
        let sum = Optimizer::Reduce(Reduction::Sum);
        let mut store = Self::new(plan, shard, |_| &sum, Order::Arrival);
        store.slots.iter_mut().for_each(|slot| slot.room = 0);
        store
    }

    /// The nodes that contribute to `chunk`, in order. Its result goes to them, unless it goes round a
    /// ring. None if the chunk is not here.
    pub fn contributors(&self, chunk: ChunkKey) -> &[NodeId] {
        self.slot(chunk).map_or(&[], |id| self.slots[id as usize].streams.nodes())
    }

    /// Whether the sum of `chunk` that this node collects for `clock` has gone on to the node above:
    /// only then may the result come back.
    pub fn has_passed_on(&self, chunk: ChunkKey, clock: Clock) -> bool {
        let slot = self.slot(chunk).map(|id| &self.slots[id as usize]);
        slot.is_ok_and(|slot| {
            slot.passes_on && slot.rounds.is_empty() && slot.clock == clock.next()
        })
    }

    /// A contribution is about to arrive, from the wire or from the worker on this node. Its header
    /// is checked before a byte of its payload is taken.
    pub fn handle_push(
        &mut self,
        header: &Header,
        now: Duration,
    ) -> Result<Contribution, Violation> {
        let id = self.slot(header.chunk)?;
        self.admit(id, header, now, false)
    }

    /// This node's worker offers its gradient's memory for the sum. The gradient in it counts as a
    /// complete contribution. `None` if another worker was first, or if the memory is not one of
    /// `f32`s: then this worker has to contribute like the others.
    pub fn handle_loan(
        &mut self,
        header: &Header,
        now: Duration,
    ) -> Result<Option<Contribution>, Violation> {
        let id = self.slot(header.chunk)?;
        let slot = &self.slots[id as usize];
        let first = slot.rounds.is_empty() && slot.encodings.up == Encoding::F32;
        // In rank order a sum begins with worker 0's contribution, not with this node's. And a worker
        // that is answered before its clock is complete needs its memory back.
        let lends = self.order == Order::Arrival && self.consistency.is_bsp();
        if !first || !lends || header.kind != Kind::Push {
            return Ok(None);
        }
        let mut loan = self.admit(id, header, now, true)?;
        loan.done = loan.len;
        Ok(Some(loan))
    }

    /// The next piece of a contribution: whole elements of its [encoding](Contribution::encoding),
    /// aligned for them. Pieces come in order, and each is as long as the network made it. `lent` is
    /// the chunk's lent memory, if [`Contribution::is_lent`].
    pub fn handle_piece(
        &mut self,
        contribution: &mut Contribution,
        piece: &[u8],
        lent: Option<&mut [f32]>,
    ) {
        let (start, encoding) = (contribution.done, contribution.encoding);
        contribution.done += piece.len() / encoding.width();
        if contribution.late {
            return;
        }
        if let Some(own) = &mut contribution.own {
            encoding.decode(piece, &mut unshared(own)[start..contribution.done]);
        } else {
            let slot = &mut self.slots[contribution.slot as usize];
            let round = slot.round(contribution.clock);
            let sum = round.sum.as_mut().map(unshared).or(lent);
            let sum = &mut sum.expect("a sum is here or lent")[start..contribution.done];
            add_or_assign(encoding, sum, round.filled.saturating_sub(start), piece);
            round.filled = round.filled.max(contribution.done);
        }
    }

    /// All pieces of a contribution are in. Returns the chunk if this contribution completes the
    /// chunk's clock. `lent` is the chunk's lent memory, if [`Contribution::is_lent`].
    pub fn handle_contributed(
        &mut self,
        contribution: Contribution,
        lent: Option<&mut [f32]>,
    ) -> Option<Completed> {
        debug_assert_eq!(contribution.done, contribution.len, "a piece is missing");
        let Contribution { slot: id, stream, clock, .. } = contribution;
        let slot = &mut self.slots[id as usize];
        slot.progress[stream] = Progress::at(clock.next());
        if self.consistency.drops() > 0 && clock != Clock(0) {
            self.contributed_or_dropped(contribution);
            return None;
        }
        if slot.is_loose(self.consistency) && clock != Clock(0) {
            self.contributed_loosely(contribution);
            return None;
        }
        let round = slot.rounds.front_mut().expect("a contribution keeps its round open");
        round.finished += 1;
        if let Some(own) = contribution.own {
            round.waiting.insert(stream, own);
        }
        if self.order == Order::Rank && round.kind == Kind::Push {
            let done = |stream: usize| slot.progress[stream].next > clock;
            round.fold(&slot.streams.fold, done).into_iter().for_each(|sum| self.pool.put(sum));
        }
        (round.finished == slot.streams.len()).then(|| self.complete(id, lent))
    }

    /// A link has sent a result, or it has been copied. The buffer returns to the pool when its last
    /// holder releases it.
    pub fn release(&mut self, result: Block) {
        self.pool.release(result);
    }

    /// Takes an answer to one worker, where workers may be apart. There may be some after a contribution.
    pub fn poll_answer(&mut self) -> Option<Completed> {
        self.answers.pop()
    }

    /// Takes what workers asked to keep and what has become complete since the last call.
    pub fn poll_kept(&mut self) -> Option<Kept> {
        self.kept.pop()
    }

    /// The chunk that has waited longest for a missing worker, if it has waited for `limit`.
    pub fn poll_stalled(&self, now: Duration, limit: Duration) -> Option<Stall> {
        let waits = self.slots.iter().filter_map(|slot| {
            let waited = now.saturating_sub(slot.waits_since()?);
            (waited >= limit).then_some((slot, waited))
        });
        // In a ring, chunks of one layer await the same node through others and straight. Who awaits
        // it straight knows that it is missing.
        let is_collected =
            |slot: &Slot| self.absent(slot).all(|stream| slot.streams.is_collected(stream));
        let (slot, waited) =
            waits.min_by_key(|(slot, waited)| (is_collected(slot), Reverse(*waited)))?;
        let missing = self.absent(slot).map(|stream| slot.streams.nodes()[stream]).collect();
        let clock = slot.held.map_or(slot.clock, |held| held.clock);
        let (key, collected) = (slot.key, is_collected(slot));
        Some(Stall { key, clock, missing, collected, waited })
    }

    /// The streams that `slot` waits for.
    fn absent<'s>(&'s self, slot: &'s Slot) -> impl Iterator<Item = usize> + 's {
        // What is held back waits for the others.
        let is_held = move |stream: usize| slot.held.is_some_and(|held| held.stream == stream);
        let streams = (0..slot.streams.len()).filter(move |stream| !is_held(*stream));
        // If there are none they wait for a result, but have not sent all of what was late.
        let any = streams.clone().any(|stream| self.awaits(slot, stream));
        streams.filter(move |stream| match any {
            true => self.awaits(slot, *stream),
            false => slot.progress[*stream].late,
        })
    }

    fn slot(&self, chunk: ChunkKey) -> Result<SlotId, Violation> {
        let at = self.keys.binary_search(&chunk).map_err(|_| Violation::UnknownChunk)?;
        Ok(at as SlotId)
    }

    /// Checks a contribution's header, and opens a round if the contribution is the first.
    fn admit(
        &mut self,
        id: SlotId,
        header: &Header,
        now: Duration,
        loan: bool,
    ) -> Result<Contribution, Violation> {
        let slot = &mut self.slots[id as usize];
        let Some(stream) = slot.streams.position(header.sender) else {
            return Err(Violation::NotAWorker(header.sender));
        };
        // Worker 0's initial values become everybody's. The other workers send an empty Init, which
        // says that they are ready.
        let carries = header.kind != Kind::Init || slot.streams.is_initial(stream);
        let encoding = slot.encodings.of(header.kind);
        let expected = if carries { encoding.bytes(slot.len) } else { 0 };
        if header.length as usize != expected {
            return Err(Violation::Length { expected, got: header.length as usize });
        }
        // A shard that keeps no parameters needs no initial ones.
        if header.kind == Kind::Push && slot.optimizer.is_stateless() && slot.is_untouched() {
            slot.begin_at(Clock(1));
        }
        match header.kind {
            Kind::Init if header.clock != Clock(0) => {
                return Err(Violation::Clock { expected: Clock(0), got: header.clock });
            }
            Kind::Push if !slot.collects => return Err(Violation::WrongKind),
            Kind::Push if slot.clock == Clock(0) => return Err(Violation::NotInitialised),
            Kind::Init | Kind::Push => {}
            _ => return Err(Violation::WrongKind),
        }
        if self.consistency.drops() > 0 && header.kind == Kind::Push {
            return self.admit_unless_late(id, stream, header, now);
        }
        let (clock, Progress { next, arriving, .. }) = (header.clock, slot.progress[stream]);
        let ahead = clock.0.checked_sub(slot.clock.0);
        let lead = slot.lead(self.consistency);
        let Some(ahead) = ahead.filter(|ahead| *ahead <= lead && clock <= next) else {
            let expected = Clock(next.0.min(slot.clock.0.saturating_add(lead)));
            return Err(Violation::Clock { expected, got: clock });
        };
        if clock < next || arriving {
            return Err(Violation::Duplicate(clock));
        }
        if slot.owes(stream) {
            return Err(Violation::Unanswered(clock));
        }
        self.now = now;
        let is_push = header.kind == Kind::Push;
        let as_it_comes = is_push && slot.is_loose(self.consistency) && slot.steps_as_they_come();
        let apart = as_it_comes || is_push && self.order == Order::Rank;
        match slot.rounds.get_mut(ahead as usize) {
            _ if as_it_comes => {}
            Some(round) if round.terms.rate.to_bits() != header.value.to_bits() => {
                return Err(Violation::Rate { expected: round.terms.rate, got: header.value });
            }
            Some(round) => round.terms.marks |= header.marks,
            None => {
                let sums = match header.kind {
                    Kind::Init => slot.streams.has_initial(),
                    _ => !loan && self.order == Order::Arrival,
                };
                let sum = sums.then(|| self.pool.take(slot.room));
                let filled = if loan { slot.room } else { 0 };
                let round = OpenClock { lent: loan, filled, ..OpenClock::new(header, now, sum) };
                slot.rounds.push_back(round);
            }
        }
        let lent = slot.rounds.front().is_some_and(|round| round.lent);
        slot.progress[stream].arriving = true;
        let (len, done) = (if carries { slot.room } else { 0 }, 0);
        let (own, terms) = (apart.then(|| self.pool.take(slot.room)), header.terms());
        let late = false;
        Ok(Contribution { slot: id, stream, clock, terms, own, done, len, encoding, lent, late })
    }

    fn complete(&mut self, id: SlotId, mut lent: Option<&mut [f32]>) -> Completed {
        let (slot, pool) = (&mut self.slots[id as usize], &mut self.pool);
        let down = slot.encodings.down;
        let mut round = slot.rounds.pop_front().expect("only an open round completes");
        let (clock, marks) = (slot.clock, round.terms.marks);
        slot.clock = clock.next();
        if self.order == Order::Rank && round.kind == Kind::Push {
            // A chunk without elements has no contribution on the stack.
            round.sum = Some(round.stack.pop().unwrap_or_else(|| pool.take(slot.room)));
        }
        if slot.passes_on {
            let way = Way::Up { kind: round.kind, rate: round.terms.rate };
            let encoding = slot.encodings.of(round.kind);
            let result = match round.sum {
                Some(sum) => Outcome::Held(pool.encode_whole(encoding, sum)),
                None if round.lent => Outcome::Lent,
                None => Outcome::Nothing,
            };
            return Completed { key: slot.key, clock, way, marks, result };
        }
        let scale = slot.optimizer.reduction().scale(self.workers);
        let result = if slot.optimizer.is_stateless() {
            if round.kind == Kind::Push && scale != 1.0 {
                let sum = round.sum.as_mut().map(unshared).or(lent.as_deref_mut());
                optim::scale(sum.expect("a sum is here or lent"), scale);
            }
            match round.sum {
                Some(sum) => Outcome::Held(pool.encode_whole(down, sum)),
                None if down == Encoding::F32 => Outcome::Lent,
                // In a simulation a loan has no memory.
                None => Outcome::Held(pool.encode(down, lent.as_deref().unwrap_or_default())),
            }
        } else if !slot.collects {
            let initial = round.sum.expect("initial values are never lent");
            Outcome::Held(pool.encode_whole(down, initial))
        } else if round.kind == Kind::Init {
            let initial = round.sum.expect("initial values are never lent");
            match slot.restored.take() {
                // Initial values may have been rounded on their way. These have not.
                Some(Restored { steps, parameters, vectors }) => {
                    (slot.steps_before, slot.state) = (steps, vectors);
                    pool.put(initial);
                    shown(pool, down, slot.parameters.insert(parameters))
                }
                None => {
                    slot.state = slot.fresh_state();
                    shown(pool, down, slot.parameters.insert(initial))
                }
            }
        } else {
            let parameters = slot.parameters.as_mut().expect("pushes are refused before init");
            // Every worker has the last result: otherwise it could not have contributed to this
            // clock. But a link may still hold a reference to that result, and so may a checkpoint
            // that is being written.
            let steps = clock.0 + slot.steps_before;
            let mut state = State::default();
            for (own, vector) in state.iter_mut().zip(&mut slot.state) {
                *own = pool.exclusive(vector);
            }
            slot.optimizer.step(Step {
                parameters: pool.exclusive(parameters),
                sum: round.sum.as_deref().or(lent.as_deref()).expect("a sum is here or lent"),
                scale,
                rate: round.terms.rate,
                clock: Clock(steps),
                state,
            });
            if marks.contains(Marks::KEEP) {
                let (parameters, vectors) = (parameters.clone(), slot.state.clone());
                self.kept.push(Kept { key: slot.key, clock, steps, parameters, vectors });
            }
            let result = shown(pool, down, parameters);
            round.sum.into_iter().for_each(|sum| pool.put(sum));
            result
        };
        Completed { key: slot.key, clock, way: Way::Down, marks, result }
    }
}

impl Slot {
    /// Whether the update rule runs here, on parameters that are here.
    fn holds_parameters(&self) -> bool {
        !self.optimizer.is_stateless() && self.collects && !self.passes_on
    }

    /// Whether nothing has come for the chunk.
    fn is_untouched(&self) -> bool {
        self.clock == Clock(0) && self.rounds.is_empty()
    }

    /// The chunk goes on with `clock`.
    fn begin_at(&mut self, clock: Clock) {
        self.clock = clock;
        self.progress.fill(Progress::at(clock));
    }

    /// What has come for `clock`, which a contribution keeps open.
    fn round(&mut self, clock: Clock) -> &mut OpenClock {
        &mut self.rounds[(clock.0 - self.clock.0) as usize]
    }

    /// What the update rule has before its first step.
    fn fresh_state(&self) -> Vec<Arc<[f32]>> {
        let zeros = || std::iter::repeat_n(0.0, self.room).collect();
        (0..self.optimizer.state_vectors()).map(|_| zeros()).collect()
    }
}

/// The parameters of a chunk as workers get them.
fn shown(pool: &mut Pool, down: Encoding, parameters: &Arc<[f32]>) -> Outcome {
    Outcome::Held(match down {
        Encoding::F32 => Block::Whole(parameters.clone()),
        rounded => pool.encode(rounded, parameters),
    })
}

#[cfg(test)]
mod tests;
