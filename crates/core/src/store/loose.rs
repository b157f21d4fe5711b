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
    waiting: Vec<Waiting>,
    /// Clocks that something is asked of: few. With `Asp`, marks that stay are at their first clock.
    asked: BTreeMap<Clock, Marks>,
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
        !consistency.is_bsp() && self.collects && !self.passes_on
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

    /// Since when the chunk has waited for somebody.
    pub(super) fn waits_since(&self) -> Option<Duration> {
        self.owed.since.or_else(|| self.rounds.front().map(|round| round.opened))
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

    fn step(&mut self, id: u32, sum: &[f32], scale: f32, terms: Terms) {
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
        for Waiting { stream, clock, .. } in
            slot.owed.waiting.extract_if(.., |waiting| waiting.needs < open)
        {
            let parameters = slot.parameters.as_ref();
            let block = result.get_or_insert_with(|| {
                parameters.map(|parameters| shown(pool, slot.encodings.down, parameters))
            });
            let result = match block {
                Some(Outcome::Held(block)) => Outcome::Held(block.clone()),
                _ => Outcome::Nothing,
            };
            let marks = heard(&slot.owed.asked, clock, lead);
            let way = Way::To(slot.streams.nodes()[stream]);
            self.answers.push(Completed { key: slot.key, clock, way, marks, result });
        }
        // What somebody may still have to hear of stays.
        let (asp, oldest) = (lead == u64::MAX, open.0.saturating_sub(lead.saturating_add(1)));
        slot.owed.asked.retain(|clock, _| asp || clock.0 >= oldest);
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

/// The marks that a worker hears of with its answer at `clock`. All workers hear of a mark at the same
/// clock of theirs: the first at which each of them is sure to be answered after the contribution with
/// the mark has come. Where there is no such clock, everybody hears of it as soon as possible.
fn heard(asked: &BTreeMap<Clock, Marks>, clock: Clock, lead: u64) -> Marks {
    if lead == u64::MAX {
        return asked.values().fold(Marks::NONE, |all, marks| all | *marks);
    }
    clock.0.checked_sub(lead).and_then(|at| asked.get(&Clock(at)).copied()).unwrap_or_default()
}
