//! Another plan in the middle of training: other chunks, other shards, another scheme for a layer.

use crate::collectives::{Request, Tensor, Terms};
use crate::lane::Command;
use crate::session::layers::{Layers, RebuildThread};
use crate::session::patience;
use crate::{Book, Error, Group, Session};
use poseidon_core::plan::Rules;
use poseidon_core::{ChannelId, Clock, Dtype, LayerId, ReduceOp};
use serde_json::json;
use std::ptr::NonNull;
use std::sync::Arc;

/// What a layer's update rule has when its plan is replaced.
struct LayerPosition {
    clock: Clock,
    initialised: bool,
    steps_before: u64,
    /// The rule's vectors, whole. None before the first step, and where the rule keeps none.
    vectors: Vec<Vec<f32>>,
    /// The parameters, whole, if workers have them rounded.
    masters: Vec<f32>,
}

impl Session {
    /// Replaces the plan by the one that `rules` make, in the next epoch. Every worker calls it with the
    /// same rules between two steps, when it has received every layer.
    ///
    /// Training goes on as if nothing had happened: clocks, parameters and what the update rule
    /// remembers move to where the new plan wants them. `parameters` gives a layer's current values, as
    /// the last [`receive`](Self::receive) gave them; it is asked only if the update rule has
    /// parameters.
    pub fn replan<'a>(
        &mut self,
        rules: Rules,
        parameters: impl Fn(LayerId) -> &'a [f32],
    ) -> Result<(), Error> {
        self.check_no_dedicated_server()?;
        self.check_bsp("another plan")?;
        if !rules.consistency.is_bsp() {
            let why = format!("a plan cannot be replaced by one with '{}'", rules.consistency);
            return Err(Error::Config(why));
        }
        for layer in self.layers.ids() {
            self.check_landed(layer, &*self.state(layer)?)?;
        }
        let epoch = self.parts.plan.epoch.next();
        let mut job = self.parts.book.job.clone();
        job.chunk = rules.chunk;
        job.placement = rules.placement;
        job.scheme = rules.policy;
        job.batch = rules.batch;
        let book = Arc::new(Book { epoch, job, ..Book::clone(&self.parts.book) });
        let mut values: Vec<&[f32]> = Vec::new();
        for layer in self.layers.ids() {
            let stateless = book.job.rule(layer).is_stateless();
            // The shards know better what workers have rounded.
            let asks = !stateless && !self.has_masters(layer);
            let of_layer = if asks { parameters(layer) } else { &[][..] };
            let (expected, got) = (book.job.layers[layer.index()].len, of_layer.len());
            if asks && got != expected {
                let (layer, what) = (self.name(layer), "values");
                return Err(Error::Length { layer, what, expected, got });
            }
            values.push(of_layer);
        }
        // When this returns, every worker has received everything of the old plan.
        self.agree_on(&book)?;
        self.follow(book, &values).inspect_err(|error| {
            // The others may follow the new plan already: without this worker it leads nowhere.
            self.parts.command_all(|| Command::Abort(error.to_string()));
        })
    }

    /// Moves everything to where the plan of `book` wants it, which every worker has agreed to.
    fn follow(&mut self, book: Arc<Book>, values: &[&[f32]]) -> Result<(), Error> {
        let positions = self.positions()?;
        let (states, matrices) = self.parts.prepare(&self.node, &book);
        for mut state in states {
            for (layer, position) in self.layers.ids().zip(&positions) {
                if position.initialised || position.clock > Clock(0) {
                    let at = (position.clock, position.steps_before);
                    let parameters = match &position.masters[..] {
                        [] => values[layer.index()],
                        masters => masters,
                    };
                    state.state.resume(layer, at, parameters, &position.vectors);
                }
            }
            self.parts.command(state.lane, Command::Replan(Box::new(state.state)));
        }
        self.node.observed.replan(self.parts.id, &book);
        if self.rank() == 0 && self.parts.id == ChannelId::FIRST {
            self.node.line.tell_plan(&book);
        }
        self.parts.replace(book, matrices);
        self.replace_layers(positions)
    }

    /// Waits until every worker has called `replan`. An error if the workers want different plans.
    fn agree_on(&self, book: &Book) -> Result<(), Error> {
        let epoch = book.epoch;
        let jobs = self.gather(&self.topic(), &json!(book.job))?;
        let own = &jobs[usize::from(self.rank())];
        match jobs.iter().position(|job| job != own) {
            None => Ok(()),
            Some(other) => Err(Error::Config(format!(
                "workers {} and {other} want different plans for epoch {epoch}",
                self.rank()
            ))),
        }
    }

    /// What the workers call the next plan. Sessions may be replanned at the same time: each has its own.
    fn topic(&self) -> String {
        format!("plan of epoch {} of channel {}", self.parts.plan.epoch.next(), self.parts.id)
    }

    /// What every layer's rule has, put together from all shards.
    fn positions(&self) -> Result<Vec<LayerPosition>, Error> {
        let mut group = None;
        let mut positions = Vec::new();
        for layer in self.layers.ids() {
            let held = self.rule_state(layer)?;
            let state = self.state(layer)?;
            let (clock, initialised) = (state.clock, state.initialised);
            let steps_before = state.steps_before;
            drop(state);
            let stepped = initialised || clock > Clock(0);
            let (mut vectors, mut masters) = match stepped {
                true => (held.vectors, held.masters),
                false => (Vec::new(), Vec::new()),
            };
            let is_empty = vectors.is_empty() && masters.is_empty();
            if !is_empty && group.is_none() && self.workers() > 1 {
                group = Some(self.group(&self.topic())?);
            }
            for vector in vectors.iter_mut().chain([&mut masters]) {
                if let Some(group) = group.as_ref().filter(|_| !vector.is_empty()) {
                    self.unite(group, vector)?;
                }
            }
            positions.push(LayerPosition { clock, initialised, steps_before, vectors, masters });
        }
        Ok(positions)
    }

    /// Before, every worker has some elements of `vector`, and zeros elsewhere. Afterwards every
    /// worker has all elements, bit by bit. A sum would lose the sign of a negative zero; a bitwise
    /// or does not.
    fn unite(&self, group: &Group, vector: &mut Vec<f32>) -> Result<(), Error> {
        let Some(start) = NonNull::new(vector.as_mut_ptr().cast()) else { return Ok(()) };
        // SAFETY: the vector is not touched until the operation is done, and if the operation fails it
        // is given up: the group has let go of it before it says so.
        let tensor = unsafe { Tensor::from_raw(start, vector.len(), Dtype::I32) };
        let terms = Terms { timeout: self.timeout, waits: true };
        let request = Request::AllReduce { tensor, op: ReduceOp::BitOr };
        let work = group.begin(request, terms, Box::new(()))?;
        // The operation has a deadline of its own.
        while !work.wait(self.timeout)? {}
        Ok(())
    }

    /// The layers go on with the new plan's matrices. The rule's vectors of layers by factors are
    /// kept here, not on a shard.
    fn replace_layers(&mut self, positions: Vec<LayerPosition>) -> Result<(), Error> {
        let threads = self.layers.threads();
        // The rebuild thread holds the old layers until it has stopped.
        self.rebuild_thread = None;
        let job = &self.parts.book.job;
        let (matrices, tiles) = (self.parts.matrices.clone(), self.parts.book.tiles());
        let rules = job.rules().cloned().collect();
        let keeping = (self.node.me, self.parts.keeper.clone());
        let layers = Layers::new(matrices, rules, threads, tiles, keeping);
        let layers = layers.recorded(self.parts.trace.clone());
        for (layer, position) in layers.ids().zip(positions) {
            let mut state = layers.state(layer).expect("as many layers as before");
            state.clock = position.clock;
            layers.note_sent(layer, position.clock);
            state.initialised = position.initialised;
            state.steps_before = position.steps_before;
            if layers.matrices(layer).is_some() {
                state.rebuilder.state = position.vectors;
            }
        }
        self.layers = Arc::new(layers);
        if self.parts.matrices.iter().any(Option::is_some) {
            let (layers, board) = (self.layers.clone(), self.parts.board.clone());
            self.rebuild_thread =
                Some(RebuildThread::start(layers, board, patience(self.timeout))?);
        }
        Ok(())
    }
}
