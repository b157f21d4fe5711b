//! Chunks of workers whose clocks may be apart (Poseidon 2015 §3).
//!
//! Every contribution is answered for itself, as soon as the [consistency](crate::consistency) lets
//! its worker go on, with the parameters as they are then. A rule without state takes a step with
//! every contribution as it comes, so a worker always sees its own. A rule with state takes one
//! step with every complete clock, in the order of clocks, and keeps a sum for each clock until then.

use super::{Completed, Contribution, Kept, Outcome, Slot, Store, Way, shown};
use crate::optim::{State, Step};
use crate::wire::{Marks, Terms};
use crate::{Clock, Consistency};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Whom a chunk owes an answer, and what was asked of its clocks.
#[derive(Debug, Default)]
pub(super) struct Owed {
    /// One entry for each stream at most.
    waiting: Vec<Waiting>,
    /// What is asked of clocks that somebody may still have to hear of.
    asked: BTreeMap<Clock, Marks>,
    /// Whether a worker has asked all to stop.
    stop: Marks,
    /// Since when some worker has been ahead of another.
    since: Option<Duration>,
}

/// A worker that waits for an answer.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    stream: usize,
    /// The clock it has contributed to.
    clock: Clock,
    /// The last clock that must be complete before the answer.
    needs: Clock,
}

impl Slot {
    /// Whether the workers of this chunk may be at different clocks.
    pub(super) fn is_loose(&self, consistency: Consistency) -> bool {
        !consistency.is_bsp() && consistency.drops() == 0 && self.collects && !self.passes_on
    }

    /// Whether contributions are steps of their own.
    pub(super) fn steps_as_they_come(&self) -> bool {
        self.optimizer.state_vectors() == 0
    }

    /// How many clocks a worker may be ahead of the slowest one.
    pub(super) fn lead(&self, consistency: Consistency) -> u64 {
        match self.is_loose(consistency) {
            true if self.steps_as_they_come() => consistency.lead_without_memory(),
            true => consistency.lead(),
            false => 0,
        }
    }

    /// Whether this stream waits for an answer.
    pub(super) fn owes(&self, stream: usize) -> bool {
        self.owed.waiting.iter().any(|waiting| waiting.stream == stream)
    }

    /// Since when the chunk has waited for somebody.
    pub(super) fn waits_since(&self) -> Option<Duration> {
        let opened = self.rounds.front().map(|round| round.opened);
        self.owed.since.or(opened).or(self.held.map(|held| held.since))
    }
}

impl Store {
    /// A contribution is all there.
    pub(super) fn contributed_loosely(&mut self, contribution: Contribution) {
        let Contribution { slot: id, stream, clock, terms, own, .. } = contribution;
        let slot = &mut self.slots[id as usize];
        let lead = slot.lead(self.consistency);
        let together = terms.marks.wait_for_all();
        let needs = Consistency::needs(clock, if together { 0 } else { lead });
        slot.owed.waiting.push(Waiting { stream, clock, needs });
        if terms.marks != Marks::NONE {
            *slot.owed.asked.entry(clock).or_default() |= terms.marks;
        }
        if terms.marks.contains(Marks::STOP) {
            slot.owed.stop = Marks::STOP;
        }
        let before = slot.clock;
        if slot.steps_as_they_come() {
            // The workers' steps together are one step with all their contributions.
            let workers = self.workers as f32;
            let scale = slot.optimizer.reduction().scale(self.workers) * workers;
            let terms = Terms { rate: terms.rate / workers, ..terms };
            if let Some(own) = own {
                self.step(id, &own, scale, terms);
                self.pool.put(own);
            }
            let slot = &mut self.slots[id as usize];
            let next = slot.progress.iter().map(|progress| progress.next).min();
            while Some(slot.clock) < next {
                slot.clock = slot.clock.next();
                let complete = Clock(slot.clock.0 - 1);
                self.kept.extend(slot.kept(complete));
            }
        } else {
            slot.round(clock).finished += 1;
            self.close_rounds(id);
        }
        let (slot, now) = (&mut self.slots[id as usize], self.now);
        let is_ahead = slot.progress.iter().any(|progress| progress.next > slot.clock);
        let since = slot.owed.since.filter(|_| slot.clock == before).unwrap_or(now);
        slot.owed.since = is_ahead.then_some(since);
        self.answer(id);
    }

    /// Takes a step with every clock that is complete.
    fn close_rounds(&mut self, id: u32) {
        loop {
            let slot = &mut self.slots[id as usize];
            let streams = slot.streams.len();
            let Some(mut round) = slot.rounds.pop_front_if(|round| round.finished == streams)
            else {
                return;
            };
            let scale = slot.optimizer.reduction().scale(self.workers);
            if let Some(sum) = round.sum.take() {
                self.step(id, &sum, scale, round.terms);
                self.pool.put(sum);
            }
            let slot = &mut self.slots[id as usize];
            let complete = slot.clock;
            slot.clock = complete.next();
            self.kept.extend(slot.kept(complete));
        }
    }

    pub(super) fn step(&mut self, id: u32, sum: &[f32], scale: f32, terms: Terms) {
        let (slot, pool) = (&mut self.slots[id as usize], &mut self.pool);
        // A simulation has none.
        let Some(parameters) = &mut slot.parameters else { return };
        let mut state = State::default();
        for (own, vector) in state.iter_mut().zip(&mut slot.state) {
            *own = pool.exclusive(vector);
        }
        slot.optimizer.step(Step {
            parameters: pool.exclusive(parameters),
            sum,
            scale,
            rate: terms.rate,
            clock: Clock(slot.clock.0 + slot.steps_before),
            state,
        });
    }

    /// Answers everybody who may go on.
    fn answer(&mut self, id: u32) {
        let (slot, pool) = (&mut self.slots[id as usize], &mut self.pool);
        let lead = slot.lead(self.consistency);
        let open = slot.clock;
        let mut result = None;
        let mut waiting = std::mem::take(&mut slot.owed.waiting);
        for Waiting { stream, clock, needs } in waiting.extract_if(.., |one| one.needs < open) {
            let parameters = slot.parameters.as_ref();
            let block = result.get_or_insert_with(|| {
                parameters.map(|parameters| shown(pool, slot.encodings.down, parameters))
            });
            let result = match block {
                Some(Outcome::Held(block)) => Outcome::Held(block.clone()),
                _ => Outcome::Nothing,
            };
            let marks = slot.owed.heard(clock, needs, lead);
            let way = Way::To(slot.streams.nodes()[stream]);
            self.answers.push(Completed { key: slot.key, clock, way, marks, result });
        }
        slot.owed.waiting = waiting;
        // With a lead that has no bound, `stop` has what everybody has to hear of.
        let behind = if lead == u64::MAX { 0 } else { lead };
        let oldest = open.0.saturating_sub(behind + 1);
        slot.owed.asked.retain(|clock, _| clock.0 >= oldest);
    }
}

impl Slot {
    /// What is to be kept of the chunk after `clock`, if a worker asked for it. All workers wait for each
    /// other at such a clock, so nothing of a later clock is in it.
    fn kept(&self, clock: Clock) -> Option<Kept> {
        let asked = self.owed.asked.get(&clock).is_some_and(|marks| marks.contains(Marks::KEEP));
        let parameters: Arc<[f32]> = self.parameters.clone().filter(|_| asked)?;
        let (steps, vectors) = (clock.0 + self.steps_before, self.state.clone());
        Some(Kept { key: self.key, clock, steps, parameters, vectors })
    }
}

impl Owed {
    /// The marks that a worker hears of with its answer at `clock`. All workers hear of a mark at the
    /// same clock of theirs: the first at which each of them is sure to be answered after the
    /// contribution with the mark has come. After a step that they take together they hear of all
    /// marks. Where there is no bound, everybody hears as soon as possible that all are to stop.
    fn heard(&self, clock: Clock, needs: Clock, lead: u64) -> Marks {
        let stop = if lead == u64::MAX { self.stop } else { Marks::NONE };
        if needs == clock {
            return self.asked.range(..=clock).fold(stop, |all, (_, marks)| all | *marks);
        }
        let at = clock.0.checked_sub(lead).and_then(|at| self.asked.get(&Clock(at)).copied());
        stop | at.unwrap_or_default()
    }
}
