//! What update rules remember, out of the shards and back into them: for checkpoints.

use crate::lane::Command;
use crate::memory::rule_state::RuleState;
use crate::{Error, Session};
use poseidon_core::{Encoding, LayerId, Role};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Instant;

impl Session {
    /// What this node holds of the update rule's state of `layer`. Elements that other nodes hold
    /// are 0 here: the sum over all workers is the whole state.
    ///
    /// The layer must not be in flight. Where the clocks of workers
    /// [may be apart](crate::session::Builder::consistency), its last step must be one that was
    /// [taken together](Session::step_together), and no worker goes on before all have asked.
    pub fn rule_state(&self, layer: LayerId) -> Result<RuleState, Error> {
        drop(self.state(layer)?);
        let job = &self.parts.book.job;
        let len = job.layers[layer.index()].len;
        let mut vectors = vec![vec![0.0; len]; job.rule(layer).state_vectors()];
        let mut masters = vec![0.0; if self.has_masters(layer) { len } else { 0 }];
        let mut into: Vec<&mut [f32]> = vectors.iter_mut().map(Vec::as_mut_slice).collect();
        if self.has_masters(layer) {
            into.push(&mut masters);
        }
        let steps = self.rule_state_into(layer, &mut into)?;
        Ok(RuleState { steps, vectors, masters })
    }

    /// As [`rule_state`](Self::rule_state), into memory of the caller's: a slice for each vector, and
    /// the masters if there are any. Elements that other nodes hold stay as they are. Returns the
    /// steps taken.
    pub fn rule_state_into(&self, layer: LayerId, into: &mut [&mut [f32]]) -> Result<u64, Error> {
        self.check_no_dedicated_server()?;
        let state = self.state(layer)?;
        self.check_landed(layer, &state)?;
        self.check_together(layer, state.clock)?;
        let job = &self.parts.book.job;
        let (len, vectors) = (job.layers[layer.index()].len, job.rule(layer).state_vectors());
        let expected = vectors + usize::from(self.has_masters(layer));
        if into.len() != expected || into.iter().any(|slice| slice.len() != len) {
            let got: Vec<usize> = into.iter().map(|slice| slice.len()).collect();
            let why = format!(
                "expected {expected} slices of {len} elements to put it into, got slices of {got:?}"
            );
            return Err(Error::RuleState { layer: self.name(layer), why });
        }
        if self.layers.matrices(layer).is_some() {
            // Every worker has the whole state. Each returns its share, so that the sum is right. A
            // program that rebuilds gradients itself has the state, and there is none here.
            let mine = self.own_share(layer);
            for (into, whole) in into.iter_mut().zip(&state.rebuilder.state) {
                into[mine.clone()].copy_from_slice(&whole[mine.clone()]);
            }
        } else {
            for piece in
                self.ask(layer, |reply| Command::RuleState(layer, reply))?.into_iter().flatten()
            {
                for (into, part) in into.iter_mut().zip(piece.vectors.iter().chain(&piece.masters))
                {
                    into[piece.range.clone()].copy_from_slice(part);
                }
            }
        }
        Ok(state.clock.0 + state.steps_before)
    }

    /// Elements of `layer` of which [`rule_state`](Self::rule_state) returns this node's state, in
    /// order. Every element is one node's.
    pub fn held(&self, layer: LayerId) -> Result<Vec<Range<usize>>, Error> {
        self.check_no_dedicated_server()?;
        if self.layers.matrices(layer).is_some() {
            let mine = self.own_share(layer);
            return Ok(if mine.is_empty() { Vec::new() } else { vec![mine] });
        }
        let (plan, me) = (&self.parts.plan, self.node.me);
        let mine = plan.all_chunks().filter(|(key, at)| key.layer == layer && at.node == me);
        let chunks = plan.chunks(layer);
        let mut held: Vec<Range<usize>> = Vec::new();
        for range in mine.filter_map(|(key, _)| chunks.as_ref()?.range(key.index)) {
            match held.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => held.push(range),
            }
        }
        Ok(held)
    }

    /// Whether the shards have parameters of `layer` that workers get rounded.
    pub(crate) fn has_masters(&self, layer: LayerId) -> bool {
        let rounded = self.parts.plan.encodings(layer).down != Encoding::F32;
        rounded && !self.parts.book.job.rule(layer).is_stateless()
    }

    /// Puts the update rule of `layer` where it was when `rule` was taken, summed over all workers.
    ///
    /// Every worker calls it alike, after the layer's initial parameters are
    /// [received](Self::receive) and before its first step. Masters may be left out: then the initial
    /// parameters are the masters. Where the clocks of workers may be apart, no worker takes a step
    /// before all have called it.
    pub fn restore_rule(&self, layer: LayerId, rule: RuleState) -> Result<(), Error> {
        self.check_no_dedicated_server()?;
        let mut state = self.state(layer)?;
        self.check_landed(layer, &state)?;
        let job = &self.parts.book.job;
        let (len, expected) = (job.layers[layer.index()].len, job.rule(layer).state_vectors());
        let refuse = |why: String| Err(Error::RuleState { layer: self.name(layer), why });
        if rule.vectors.len() != expected {
            return refuse(format!(
                "update rule '{}' keeps {expected} vectors, got {}",
                job.rule(layer),
                rule.vectors.len()
            ));
        }
        if !rule.masters.is_empty() && !self.has_masters(layer) {
            return refuse("the layer's parameters are not rounded: it has no masters".into());
        }
        let masters = Some(&rule.masters).filter(|masters| !masters.is_empty());
        let mut vectors = rule.vectors.iter().chain(masters);
        if let Some(vector) = vectors.find(|vector| vector.len() != len) {
            return refuse(format!(
                "the layer has {len} parameters, got a vector of {}",
                vector.len()
            ));
        }
        if !state.initialised || state.clock.0 > 0 {
            return refuse(format!(
                "it is restored between the initial parameters and the first step, but clock {} was reached{}",
                state.clock,
                if state.initialised { "" } else { " and there are no initial parameters" }
            ));
        }
        state.steps_before = rule.steps;
        if self.layers.matrices(layer).is_some() {
            state.rebuilder.state = rule.vectors;
            return Ok(());
        }
        let rule = Arc::new(rule);
        let restore = |reply| Command::RestoreRule(layer, rule.clone(), reply);
        let fits = self.ask(layer, restore)?;
        if fits.contains(&false) {
            return refuse("a shard has no such chunk".into());
        }
        Ok(())
    }

    /// Every lane's answer to a question about `layer`.
    fn ask<T>(
        &self,
        layer: LayerId,
        command: impl Fn(SyncSender<T>) -> Command,
    ) -> Result<Vec<T>, Error> {
        let lanes = self.parts.lanes();
        let (reply, answers) = sync_channel(lanes);
        self.parts.command_all(|| command(reply.clone()));
        drop(reply);
        let deadline = Instant::now() + self.timeout;
        let left = || deadline.saturating_duration_since(Instant::now());
        let answers: Vec<T> = (0..lanes).map_while(|_| answers.recv_timeout(left()).ok()).collect();
        self.check_running()?;
        if answers.len() < lanes {
            let why =
                format!("{} of {lanes} lanes answered within {:?}", answers.len(), self.timeout);
            return Err(Error::RuleState { layer: self.name(layer), why });
        }
        Ok(answers)
    }

    pub(crate) fn check_no_dedicated_server(&self) -> Result<(), Error> {
        let cluster = &self.parts.book.cluster;
        let dedicated = |role: Role| role.server && !role.worker;
        match cluster.node_ids().find(|&node| cluster.role(node).is_some_and(dedicated)) {
            Some(node) => Err(Error::Config(format!(
                "{} holds shards: what a dedicated server holds cannot be saved, restored or moved to \
                 another plan yet",
                cluster.name(node)
            ))),
            None => Ok(()),
        }
    }
}
