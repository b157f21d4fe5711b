//! Chunks of jobs that do not wait for their slowest workers: see [`roll`](crate::roll).
//!
//! Until it is known who counts at a clock, contributions to it are kept apart. Afterwards they are
//! added to the sum as they come, and those that do not count are taken in and forgotten. A clock is
//! complete when everybody who counts has contributed, and when the late contributions of all who join
//! have come: then both get the result.

use super::open_clock::OpenClock;
use super::pool::unshared;
use super::{Completed, Contribution, Kept, Outcome, Slot, SlotId, Store, Way, shown};
use crate::roll::{Part, Roll};
use crate::wire::{Header, Marks};
use crate::{Clock, NodeId, Violation, optim};
use std::time::Duration;

/// Who counts, as far as it is known here.
#[derive(Debug, Default)]
pub(super) struct Called {
    /// The last clock that it is known of.
    roll: Option<Roll>,
    /// Who gets the result of that clock, beside those in its roll.
    joining: Vec<NodeId>,
}

impl Called {
    /// Who counts at `clock`, if it is known.
    fn at(&self, clock: Clock) -> Option<&Roll> {
        self.roll.as_ref().filter(|roll| roll.clock == clock)
    }
}

impl Store {
    /// It is known who counts at a clock, or that more workers go on with its result. Answers follow
    /// from [`poll_answer`](Store::poll_answer).
    pub fn handle_roll(&mut self, roll: Roll) -> Result<(), Violation> {
        let last = self.called.roll.as_ref().map_or(Clock(0), |roll| roll.clock);
        if roll.clock == last && roll.counted() == 0 {
            let joining: Vec<NodeId> = roll.those(Part::Joins).collect();
            self.called.joining.extend(&joining);
            for id in 0..self.slots.len() as SlotId {
                for &worker in &joining {
                    self.answer_if_joining(id, worker);
                }
            }
            return Ok(());
        }
        let behind = |slot: &&Slot| slot.collects && slot.clock != roll.clock;
        if roll.clock != last.next() {
            return Err(Violation::Clock { expected: last.next(), got: roll.clock });
        }
        if self.slots.iter().any(|slot| behind(&slot)) {
            return Err(Violation::EarlyRoll(roll.clock));
        }
        self.called = Called { roll: Some(roll), joining: Vec::new() };
        for id in 0..self.slots.len() as SlotId {
            let waiting = self.slots[id as usize].rounds.front_mut().map(|r| &mut r.waiting);
            for (stream, own) in waiting.map(std::mem::take).unwrap_or_default() {
                self.count_or_drop(id, stream, own);
            }
            self.complete_if_called(id);
        }
        Ok(())
    }

    /// Checks the header of a contribution that may be late.
    pub(super) fn admit_unless_late(
        &mut self,
        id: SlotId,
        stream: usize,
        header: &Header,
        now: Duration,
    ) -> Result<Contribution, Violation> {
        let slot = &mut self.slots[id as usize];
        let (clock, progress) = (header.clock, slot.progress[stream]);
        if clock > progress.next.min(slot.clock) {
            return Err(Violation::Clock { expected: progress.next.min(slot.clock), got: clock });
        }
        if clock < progress.next || progress.arriving || progress.late {
            return Err(Violation::Duplicate(clock));
        }
        let part = self.called.at(slot.clock).map(|roll| roll.part(slot.streams.nodes()[stream]));
        let late = clock < slot.clock || part.is_some_and(|part| part != Part::Counts);
        let counts = !late && (part.is_some() || header.marks.wait_for_all());
        self.now = now;
        let room = slot.room;
        if !late {
            if slot.rounds.is_empty() {
                slot.rounds.push_back(OpenClock::new(header, now, None));
            }
            let round = slot.round(clock);
            if round.terms.rate.to_bits() != header.value.to_bits() {
                return Err(Violation::Rate { expected: round.terms.rate, got: header.value });
            }
            round.terms.marks |= header.marks;
            if counts && round.sum.is_none() {
                round.sum = Some(self.pool.take(room));
            }
        }
        slot.progress[stream].arriving = true;
        Ok(Contribution {
            slot: id,
            stream,
            clock,
            terms: header.terms(),
            own: (!late && !counts).then(|| self.pool.take(slot.room)),
            done: 0,
            len: slot.room,
            encoding: slot.encodings.up,
            lent: false,
            late,
        })
    }

    /// A contribution is all there.
    pub(super) fn contributed_or_dropped(&mut self, contribution: Contribution) {
        let Contribution { slot: id, stream, clock, own, late, .. } = contribution;
        let slot = &mut self.slots[id as usize];
        match own {
            // It may have been in time when it began to come.
            own if late || clock < slot.clock => {
                own.into_iter().for_each(|own| self.pool.put(own));
                self.drop_late(id, stream);
            }
            Some(own) if self.called.at(clock).is_some() => self.count_or_drop(id, stream, own),
            Some(own) => {
                slot.round(clock).waiting.insert(stream, own);
            }
            None => slot.round(clock).finished += 1,
        }
        self.complete_if_called(id);
    }

    /// It is known whether the numbers in `own` count.
    fn count_or_drop(&mut self, id: SlotId, stream: usize, own: std::sync::Arc<[f32]>) {
        let slot = &mut self.slots[id as usize];
        let (clock, room, worker) = (slot.clock, slot.room, slot.streams.nodes()[stream]);
        if self.called.at(clock).is_none_or(|roll| roll.part(worker) != Part::Counts) {
            self.pool.put(own);
            return self.drop_late(id, stream);
        }
        let round = slot.round(clock);
        round.finished += 1;
        match &mut round.sum {
            None => round.sum = Some(own),
            Some(sum) => {
                // What others have sent of theirs is in the first elements of the sum.
                let (sum, filled) = (unshared(sum), round.filled);
                optim::add(&mut sum[..filled], &own[..filled]);
                sum[filled..].copy_from_slice(&own[filled..]);
                self.pool.put(own);
            }
        }
        round.filled = room;
    }

    /// A contribution does not count: its worker waits for the result of a later clock.
    fn drop_late(&mut self, id: SlotId, stream: usize) {
        let slot = &mut self.slots[id as usize];
        slot.progress[stream].late = true;
        let worker = slot.streams.nodes()[stream];
        self.answer_if_joining(id, worker);
    }

    /// Takes the step of a chunk's clock if everything is there that it needs.
    fn complete_if_called(&mut self, id: SlotId) {
        let slot = &mut self.slots[id as usize];
        let clock = slot.clock;
        let Some(roll) = self.called.at(clock) else { return };
        let is_late = |worker: NodeId| {
            slot.streams.position(worker).is_none_or(|stream| slot.progress[stream].late)
        };
        let counted = roll.counted();
        let is_full = slot.rounds.front().is_some_and(|round| round.finished == counted);
        if !is_full || !roll.those(Part::Joins).all(is_late) {
            return;
        }
        let Some(mut round) = slot.rounds.pop_front() else { return };
        let answered: Vec<NodeId> =
            roll.those(Part::Counts).chain(roll.those(Part::Joins)).collect();
        // That all are to stop is the roll's to say: a contribution may say it on some shards and not on
        // others, and workers must hear it at the same clock.
        let marks = round.terms.marks.without(Marks::STOP) | roll.marks;
        // The mean is over those who count. A sum is one of all workers, who would have added as much.
        let share = self.workers as f32 / counted as f32;
        let scale = slot.optimizer.reduction().scale(self.workers) * share;
        if let Some(sum) = round.sum.take() {
            self.step(id, &sum, scale, round.terms);
            self.pool.put(sum);
        }
        let slot = &mut self.slots[id as usize];
        slot.clock = clock.next();
        if let Some(parameters) = slot.parameters.clone().filter(|_| marks.contains(Marks::KEEP)) {
            let (steps, vectors) = (clock.0 + slot.steps_before, slot.state.clone());
            self.kept.push(Kept { key: slot.key, clock, steps, parameters, vectors });
        }
        self.answer_all(id, &answered, marks);
    }

    /// Answers a worker that goes on with the result of the last clock, if its late contribution has come.
    fn answer_if_joining(&mut self, id: SlotId, worker: NodeId) {
        let slot = &self.slots[id as usize];
        let is_late = |stream: usize| slot.progress[stream].late;
        if !slot.streams.position(worker).is_some_and(is_late)
            || !self.called.joining.contains(&worker)
            || self.called.roll.as_ref().is_none_or(|roll| roll.clock.next() != slot.clock)
        {
            return;
        }
        let marks = self.called.roll.as_ref().map_or(Marks::NONE, |roll| roll.marks);
        self.answer_all(id, &[worker], marks);
    }

    /// Answers `workers` with the parameters as they are.
    fn answer_all(&mut self, id: SlotId, workers: &[NodeId], marks: Marks) {
        let (slot, pool) = (&mut self.slots[id as usize], &mut self.pool);
        let clock = Clock(slot.clock.0 - 1);
        let parameters = slot.parameters.as_ref();
        let result = parameters.map(|values| shown(pool, slot.encodings.down, values));
        for &worker in workers {
            let Some(stream) = slot.streams.position(worker) else { continue };
            slot.progress[stream] = super::Progress::at(slot.clock);
            let result = match &result {
                Some(Outcome::Held(block)) => Outcome::Held(block.clone()),
                _ => Outcome::Nothing,
            };
            let way = Way::To(worker);
            self.answers.push(Completed { key: slot.key, clock, way, marks, result });
        }
    }

    /// Whether `slot` waits for this stream.
    pub(super) fn awaits(&self, slot: &Slot, stream: usize) -> bool {
        let progress = slot.progress[stream];
        match self.called.at(slot.clock).map(|roll| roll.part(slot.streams.nodes()[stream])) {
            Some(Part::Absent) => false,
            Some(Part::Joins) => !progress.late,
            Some(Part::Counts) | None => progress.next <= slot.clock && !progress.late,
        }
    }
}
