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
//! A simulation has no numbers: [`Store::ghost`] judges, counts and answers like any other store,
//! and all its sums are empty.

mod streams;

use crate::optim::{self, Optimizer, Reduction, Step, state_of};
use crate::wire::{Header, Kind};
use crate::{ChunkKey, Clock, NodeId, Plan, Route, Shard, Violation};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use streams::{Fold, Streams};

/// One shard of the KV store.
#[derive(Debug)]
pub struct Store {
    workers: usize,
    optimizer: Optimizer,
    order: Order,
    /// In the order of [`keys`](Self::keys).
    slots: Vec<Slot>,
    /// This shard's chunks, sorted. They are kept apart from the slots, because they are searched.
    keys: Vec<ChunkKey>,
    /// Free buffers by length. The one used last is taken first: it is most likely in cache.
    free: BTreeMap<usize, Vec<Arc<[f32]>>>,
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
    done: usize,
    len: usize,
    lent: bool,
}

/// A chunk that has all contributions to a clock.
#[derive(Debug)]
pub struct Completed {
    /// The chunk.
    pub key: ChunkKey,
    /// The clock that is complete.
    pub clock: Clock,
    /// Where `result` goes.
    pub way: Way,
    /// Where the sum, the reduced gradient or the new parameters are.
    pub result: Outcome,
}

/// Where the outcome of a complete clock goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    /// Towards the chunk's server: it is a sum that this node has collected.
    Up {
        /// A push, or initial values.
        kind: Kind,
        /// The learning rate that the contributions came with.
        rate: f32,
    },
    /// To those who have contributed: it is the result.
    Down,
}

/// Where a result is.
#[derive(Debug)]
pub enum Outcome {
    /// In this buffer. It is handed back with [`Store::release`].
    Held(Arc<[f32]>),
    /// In the memory that this node's worker lent.
    Lent,
    /// There are no numbers: none of those collected from has initial values to give.
    Nothing,
}

/// Where a chunk's elements were left when their plan was replaced.
#[derive(Clone, Copy, Debug)]
pub struct Resumption<'a> {
    /// The last clock that is complete.
    pub clock: Clock,
    /// Steps the rule took before the job's first clock: its state came from a checkpoint.
    pub steps_before: u64,
    /// The parameters after that clock. Empty if the shards keep none.
    pub parameters: &'a [f32],
    /// The update rule's vectors after that clock. Empty before its first step.
    pub vectors: &'a [&'a [f32]],
}

/// A chunk that has waited too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The chunk.
    pub key: ChunkKey,
    /// The clock that the chunk is collecting.
    pub clock: Clock,
    /// The nodes whose contribution is not complete.
    pub missing: Vec<NodeId>,
    /// Whether all of them collect from others, and so know better who is missing.
    pub collected: bool,
    /// How long ago the first contribution to this clock began.
    pub waited: Duration,
}

type SlotId = u32;

/// One chunk of the shard.
#[derive(Debug)]
struct Slot {
    key: ChunkKey,
    /// Elements that a contribution must have.
    len: usize,
    /// Elements that memory is kept for: `len`, or none in a simulation.
    room: usize,
    /// False if the layer goes by factors: then only its initial values pass through the store.
    collects: bool,
    /// Another node has the parameters: the sum goes on to the node above.
    passes_on: bool,
    /// The clock that the chunk collects, or will collect next.
    clock: Clock,
    parameters: Option<Arc<[f32]>>,
    state: Vec<Vec<f32>>,
    /// Steps that the update rule took before this store existed, if its state came from a
    /// checkpoint.
    steps_before: u64,
    streams: Arc<Streams>,
    /// By stream: how much of the contribution to `clock` has come.
    contributors: Box<[ContributorState]>,
    /// `None` until the first contribution to `clock` begins.
    round: Option<OpenClock>,
}

/// What has come for the clock that a slot collects.
#[derive(Debug)]
struct OpenClock {
    kind: Kind,
    rate: f32,
    opened: Duration,
    /// `None` if the sum is in the memory that this node's worker lent, if there is nothing to add,
    /// and in the order of ranks until all is added.
    sum: Option<Arc<[f32]>>,
    /// The sum is in the memory that this node's worker lent.
    lent: bool,
    /// Elements of the sum that have a value. The pieces of a contribution come in order, so this is
    /// how far the fastest contribution has come. Pieces are added below it and assigned above it,
    /// so the buffer needs no clearing.
    filled: usize,
    finished: usize,
    /// With [`Order::Rank`]: contributions that wait for their turn, by stream.
    waiting: BTreeMap<usize, Arc<[f32]>>,
    /// With [`Order::Rank`]: sums that have been begun, and the next step of the streams' fold.
    stack: Vec<Arc<[f32]>>,
    turn: usize,
}

/// How much of a contribution has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContributorState {
    Absent,
    Arriving,
    Done,
}

impl Contribution {
    /// Whether it is added to a sum in memory that this node's worker lent.
    pub fn is_lent(&self) -> bool {
        self.lent
    }
}

impl Store {
    /// The shard `shard` of `plan`, and what its lane collects for other shards.
    pub fn new(plan: &Plan, shard: Shard, optimizer: Optimizer, order: Order) -> Self {
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
                len: plan.len(key),
                room: plan.len(key),
                collects: plan.factors(key.layer).is_none(),
                passes_on: at != shard,
                clock: Clock(0),
                parameters: None,
                state: Vec::new(),
                steps_before: 0,
                contributors: vec![ContributorState::Absent; streams.len()].into(),
                streams: streams.clone(),
                round: None,
            });
        }
        let keys = slots.iter().map(|slot| slot.key).collect();
        Self { workers: tree.workers(), optimizer, order, slots, keys, free: BTreeMap::new() }
    }

    /// The same shard without numbers, for simulations: contributions are judged by their headers
    /// and have no pieces, results are empty.
    pub fn ghost(plan: &Plan, shard: Shard) -> Self {
        let sum = Optimizer::Reduce(Reduction::Sum);
        let mut store = Self::new(plan, shard, sum, Order::Arrival);
        store.slots.iter_mut().for_each(|slot| slot.room = 0);
        store
    }

    /// The nodes that contribute to `chunk`, in order: its result goes to them. None if the chunk is
    /// not here.
    pub fn contributors(&self, chunk: ChunkKey) -> &[NodeId] {
        self.slot(chunk).map_or(&[], |id| self.slots[id as usize].streams.nodes())
    }

    /// Whether the sum of `chunk` that this node collects for `clock` has gone on to the node above:
    /// only then may the result come back.
    pub fn has_passed_on(&self, chunk: ChunkKey, clock: Clock) -> bool {
        let slot = self.slot(chunk).map(|id| &self.slots[id as usize]);
        slot.is_ok_and(|slot| slot.passes_on && slot.round.is_none() && slot.clock == clock.next())
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
    /// complete contribution. `None` if another worker was first: then this worker has to
    /// contribute like the others.
    pub fn handle_loan(
        &mut self,
        header: &Header,
        now: Duration,
    ) -> Result<Option<Contribution>, Violation> {
        let id = self.slot(header.chunk)?;
        // In rank order a sum begins with worker 0's contribution, not with this node's.
        let first = self.slots[id as usize].round.is_none();
        if !first || self.order == Order::Rank || header.kind != Kind::Push {
            return Ok(None);
        }
        let mut loan = self.admit(id, header, now, true)?;
        loan.done = loan.len;
        Ok(Some(loan))
    }

    /// The next piece of a contribution. Pieces come in order, and each is as long as the network
    /// made it. `lent` is the chunk's lent memory, if [`Contribution::is_lent`].
    pub fn handle_piece(
        &mut self,
        contribution: &mut Contribution,
        piece: &[f32],
        lent: Option<&mut [f32]>,
    ) {
        let slot = &mut self.slots[contribution.slot as usize];
        let round = slot.round.as_mut().expect("a contribution keeps its round open");
        let start = contribution.done;
        contribution.done += piece.len();
        if self.order == Order::Rank && round.kind == Kind::Push {
            let free = &mut self.free;
            let own = round.waiting.entry(contribution.stream);
            let own = own.or_insert_with(|| buffer(free, slot.room));
            unshared(own)[start..contribution.done].copy_from_slice(piece);
        } else {
            let sum = round.sum.as_mut().map(unshared).or(lent);
            add_or_assign(sum.expect("a sum is here or lent"), &mut round.filled, start, piece);
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
        let slot = &mut self.slots[contribution.slot as usize];
        let round = slot.round.as_mut().expect("a contribution keeps its round open");
        slot.contributors[contribution.stream] = ContributorState::Done;
        round.finished += 1;
        if self.order == Order::Rank && round.kind == Kind::Push {
            let done = |stream: usize| slot.contributors[stream] == ContributorState::Done;
            let freed = round.fold(&slot.streams.fold, done);
            self.free.entry(slot.room).or_default().extend(freed);
        }
        (round.finished == slot.streams.len()).then(|| self.complete(contribution.slot, lent))
    }

    /// A link has sent a result, or it has been copied. The buffer returns to the pool when its last
    /// holder releases it.
    pub fn release(&mut self, result: Arc<[f32]>) {
        if Arc::strong_count(&result) == 1 {
            self.free.entry(result.len()).or_default().push(result);
        }
    }

    /// The chunk that has waited longest for a missing worker, if it has waited for `limit`.
    pub fn poll_stalled(&self, now: Duration, limit: Duration) -> Option<Stall> {
        let open = self.slots.iter().filter_map(|s| Some((s, s.round.as_ref()?)));
        let (slot, round) = open.min_by_key(|(_, round)| round.opened)?;
        let waited = now.saturating_sub(round.opened);
        if waited < limit {
            return None;
        }
        let absent = |stream: &usize| slot.contributors[*stream] != ContributorState::Done;
        let absent: Vec<usize> = (0..slot.streams.len()).filter(absent).collect();
        let missing = absent.iter().map(|stream| slot.streams.nodes()[*stream]).collect();
        let collected = absent.iter().all(|stream| slot.streams.is_collected(*stream));
        Some(Stall { key: slot.key, clock: slot.clock, missing, collected, waited })
    }

    /// The update rule's state vectors of a chunk. `None` before the chunk has its initial
    /// parameters, and for rules that keep no parameters.
    pub fn rule_state(&self, chunk: ChunkKey) -> Option<&[Vec<f32>]> {
        let slot = &self.slots[self.slot(chunk).ok()? as usize];
        slot.parameters.is_some().then_some(&slot.state)
    }

    /// Sets a chunk's update rule to its state after `steps` steps. False if this shard does not have
    /// the chunk, if the chunk has no initial parameters yet, or if the vectors differ in number or
    /// length from the rule's.
    pub fn restore_rule(&mut self, chunk: ChunkKey, steps: u64, vectors: &[&[f32]]) -> bool {
        let Ok(id) = self.slot(chunk) else { return false };
        let slot = &mut self.slots[id as usize];
        let fits = slot.state.len() == vectors.len()
            && slot.state.iter().zip(vectors).all(|(own, new)| own.len() == new.len());
        if slot.parameters.is_none() || !fits {
            return false;
        }
        slot.steps_before = steps;
        for (own, new) in slot.state.iter_mut().zip(vectors) {
            own.copy_from_slice(new);
        }
        true
    }

    /// Puts a chunk where its elements were left under another plan. False if the chunk is not here, or
    /// if something has come for it already.
    pub fn resume(&mut self, chunk: ChunkKey, from: &Resumption<'_>) -> bool {
        let Ok(id) = self.slot(chunk) else { return false };
        let slot = &mut self.slots[id as usize];
        if slot.round.is_some() || slot.clock != Clock(0) {
            return false;
        }
        slot.clock = from.clock.next();
        slot.steps_before = from.steps_before;
        if !self.optimizer.is_stateless() && slot.collects && !slot.passes_on {
            slot.parameters = Some(from.parameters.into());
            slot.state = match from.vectors {
                [] => vec![vec![0.0; slot.room]; self.optimizer.state_vectors()],
                vectors => vectors.iter().map(|vector| vector.to_vec()).collect(),
            };
        }
        true
    }

    /// Bytes of sums, parameters and optimizer state that this shard holds, with free buffers.
    pub fn bytes(&self) -> usize {
        let free: usize = self.free.iter().map(|(len, buffers)| len * buffers.len()).sum();
        let held = self.slots.iter().map(|s| {
            let sums =
                |r: &OpenClock| usize::from(r.sum.is_some()) + r.waiting.len() + r.stack.len();
            let round = s.round.as_ref().map_or(0, |r| s.room * sums(r));
            let parameters = s.parameters.as_ref().map_or(0, |p| p.len());
            round + parameters + s.state.iter().map(Vec::len).sum::<usize>()
        });
        (free + held.sum::<usize>()) * size_of::<f32>()
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
        let expected = if carries { slot.len * size_of::<f32>() } else { 0 };
        if header.length as usize != expected {
            return Err(Violation::Length { expected, got: header.length as usize });
        }
        // A shard that keeps no parameters needs no initial ones.
        let skips_init = header.kind == Kind::Push
            && self.optimizer.is_stateless()
            && slot.clock == Clock(0)
            && slot.round.is_none();
        if skips_init {
            slot.clock = Clock(1);
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
        if header.clock != slot.clock {
            return Err(Violation::Clock { expected: slot.clock, got: header.clock });
        }
        if slot.contributors[stream] != ContributorState::Absent {
            return Err(Violation::Duplicate(header.clock));
        }
        match &slot.round {
            Some(round) if round.rate.to_bits() != header.value.to_bits() => {
                return Err(Violation::Rate { expected: round.rate, got: header.value });
            }
            Some(_) => {}
            None => {
                let sums = match header.kind {
                    Kind::Init => slot.streams.has_initial(),
                    _ => !loan && self.order == Order::Arrival,
                };
                slot.round = Some(OpenClock {
                    kind: header.kind,
                    rate: header.value,
                    opened: now,
                    sum: sums.then(|| buffer(&mut self.free, slot.room)),
                    lent: loan,
                    filled: if loan { slot.room } else { 0 },
                    finished: 0,
                    waiting: BTreeMap::new(),
                    stack: Vec::new(),
                    turn: 0,
                });
            }
        }
        let lent = slot.round.as_ref().is_some_and(|round| round.lent);
        slot.contributors[stream] = ContributorState::Arriving;
        let len = if carries { slot.room } else { 0 };
        Ok(Contribution { slot: id, stream, done: 0, len, lent })
    }

    fn complete(&mut self, id: SlotId, lent: Option<&mut [f32]>) -> Completed {
        let slot = &mut self.slots[id as usize];
        let mut round = slot.round.take().expect("only an open round completes");
        let clock = slot.clock;
        slot.clock = clock.next();
        slot.contributors.fill(ContributorState::Absent);
        if self.order == Order::Rank && round.kind == Kind::Push {
            // A chunk without elements has no contribution on the stack.
            let sum = round.stack.pop().unwrap_or_else(|| buffer(&mut self.free, slot.room));
            round.sum = Some(sum);
        }
        if slot.passes_on {
            let way = Way::Up { kind: round.kind, rate: round.rate };
            let here = if round.lent { Outcome::Lent } else { Outcome::Nothing };
            return Completed {
                key: slot.key,
                clock,
                way,
                result: round.sum.map_or(here, Outcome::Held),
            };
        }
        let scale = self.optimizer.reduction().scale(self.workers);
        let result = if self.optimizer.is_stateless() {
            if round.kind == Kind::Push && scale != 1.0 {
                let sum = round.sum.as_mut().map(unshared).or(lent);
                optim::scale(sum.expect("a sum is here or lent"), scale);
            }
            round.sum.map_or(Outcome::Lent, Outcome::Held)
        } else if !slot.collects {
            Outcome::Held(round.sum.expect("initial values are never lent"))
        } else if round.kind == Kind::Init {
            slot.state = vec![vec![0.0; slot.room]; self.optimizer.state_vectors()];
            let initial = round.sum.expect("initial values are never lent");
            Outcome::Held(slot.parameters.insert(initial).clone())
        } else {
            let parameters = slot.parameters.as_mut().expect("pushes are refused before init");
            // Every worker has the last result: otherwise it could not have contributed to this
            // clock. But a link may still hold a reference to that result.
            if Arc::get_mut(parameters).is_none() {
                let mut copy = buffer(&mut self.free, slot.room);
                unshared(&mut copy).copy_from_slice(parameters);
                *parameters = copy;
            }
            self.optimizer.step(Step {
                parameters: unshared(parameters),
                sum: round.sum.as_deref().or(lent.as_deref()).expect("a sum is here or lent"),
                scale,
                rate: round.rate,
                clock: Clock(clock.0 + slot.steps_before),
                state: state_of(&mut slot.state),
            });
            self.free.entry(slot.room).or_default().extend(round.sum);
            Outcome::Held(parameters.clone())
        };
        Completed { key: slot.key, clock, way: Way::Down, result }
    }
}

impl OpenClock {
    /// Adds up what can be added now in the order of ranks. Returns buffers that are free again.
    fn fold(&mut self, steps: &[Fold], done: impl Fn(usize) -> bool) -> Vec<Arc<[f32]>> {
        let mut freed = Vec::new();
        while let Some(step) = steps.get(self.turn) {
            match *step {
                // A contribution without numbers has no buffer: that of a simulation.
                Fold::Take(stream) if done(stream) => {
                    self.stack.extend(self.waiting.remove(&stream))
                }
                Fold::Take(_) => break,
                Fold::Add => {
                    let added = self.stack.pop();
                    if let (Some(sum), Some(added)) = (self.stack.last_mut(), added) {
                        optim::add(unshared(sum), &added);
                        freed.push(added);
                    }
                }
            }
            self.turn += 1;
        }
        freed
    }
}

fn buffer(free: &mut BTreeMap<usize, Vec<Arc<[f32]>>>, len: usize) -> Arc<[f32]> {
    let recycled = free.get_mut(&len).and_then(Vec::pop);
    recycled.unwrap_or_else(|| std::iter::repeat_n(0.0, len).collect())
}

/// Write access to a buffer that nobody else holds: one from the pool, or a sum under way.
fn unshared(buffer: &mut Arc<[f32]>) -> &mut [f32] {
    Arc::get_mut(buffer).expect("sums are shared only once they are complete")
}

fn add_or_assign(sum: &mut [f32], filled: &mut usize, start: usize, piece: &[f32]) {
    let end = start + piece.len();
    let known = (*filled).clamp(start, end);
    let (add, assign) = piece.split_at(known - start);
    optim::add(&mut sum[start..known], add);
    sum[known..end].copy_from_slice(assign);
    *filled = (*filled).max(end);
}

#[cfg(test)]
mod tests;
