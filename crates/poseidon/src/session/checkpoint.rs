//! Checkpoints as a training program makes them.

use crate::memory::kept::KeptPiece;
use crate::node::checkpoint::{PartWriter, SLOWEST, Word, read_rule};
use crate::session::layers::share;
use crate::{Error, Session};
use poseidon_checkpoint::{
    Checkpoint, Keep, LayerFacts, Manifest, TensorFacts, commit, discard, has_manifest, prune,
};
use poseidon_core::{Clock, LayerId};
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// A checkpoint that is being made, on a thread beside the program.
#[derive(Debug)]
pub struct Saving {
    step: u64,
    description: SyncSender<Description>,
    thread: JoinHandle<Result<Saved, Error>>,
}

/// What the program adds to a checkpoint, once it has taken the step.
#[derive(Clone, Debug, Default)]
pub struct Description {
    /// What is the same for all workers, such as the settings of the program. Worker 0's counts.
    pub job: Value,
    /// What this worker needs to go on: its place in the data, its random numbers.
    pub rank: Value,
    /// By layer: how it is cut into tensors. Empty: each layer is one tensor. Worker 0's counts.
    pub tensors: Vec<Vec<TensorFacts>>,
}

/// A checkpoint that was made.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// The step that it is the state after.
    pub step: u64,
    /// Bytes of all nodes' parts.
    pub bytes: u64,
    /// From the step's end to the last node's word. The job went on meanwhile.
    pub took: Duration,
    /// Steps of older checkpoints that were deleted. Worker 0 deletes them and knows.
    pub deleted: Vec<u64>,
}

impl Session {
    /// Begins a checkpoint of the state after the next step, which is step `step` of the training.
    /// Every worker calls it alike, between two steps, and goes on. The nodes write what they hold while
    /// the program computes: nothing is copied before a later step would change it. The program
    /// [describes](Saving::describe) its own state when it has taken the step.
    ///
    /// Waits if the last checkpoint is still being written. It is for jobs whose update rules run on the
    /// shards: with a rule such as `mean` the program has the parameters, and saves them itself.
    pub fn begin_checkpoint(&self, step: u64, keep: Keep) -> Result<Saving, Error> {
        let failed = |why: String| Error::Checkpoint { step, why };
        let Some(storage) = self.places.to.clone() else {
            return Err(failed("the job was started without a place for checkpoints".into()));
        };
        for layer in self.layers.ids() {
            let rule = self.parts.book.job.rule(layer);
            if rule.is_stateless() {
                let layer = self.name(layer);
                return Err(failed(format!(
                    "layer '{layer}' has update rule '{rule}': the program has its parameters"
                )));
            }
        }
        let clock = self.next_step()?;
        let kept = self.await_last_checkpoint(step)?;
        let (node, board) = (self.node.clone(), self.parts.board.clone());
        let writer = PartWriter::new(node, board, self.parts.book.clone(), storage);
        let (description, described) = sync_channel(1);
        let (patience, rank) = (super::patience(self.timeout), self.rank());
        let work = Work { writer, step, clock, patience, rank, keep };
        let give_back = self.parts.kept.clone();
        let thread =
            std::thread::Builder::new().name("poseidon-checkpoint".into()).spawn(move || {
                let saved = work.run(&kept, &described);
                *lock(&give_back) = Some(kept);
                saved
            });
        let thread = thread.map_err(Error::io("starting a thread that writes a checkpoint"))?;
        self.keep(clock);
        Ok(Saving { step, description, thread })
    }

    /// Waits until the last checkpoint is written. All workers must begin the next one alike, so none
    /// of them may leave it out because its own storage is slow.
    fn await_last_checkpoint(&self, step: u64) -> Result<Receiver<KeptPiece>, Error> {
        let deadline = Instant::now() + SLOWEST;
        loop {
            if let Some(kept) = lock(&self.parts.kept).take() {
                return Ok(kept);
            }
            self.check_running()?;
            if Instant::now() > deadline {
                let why = format!("the last one has not been written for {SLOWEST:?}");
                return Err(Error::Checkpoint { step, why });
            }
            std::thread::sleep(GLANCE);
        }
    }

    /// The elements of `layer` that this worker has to [hand over](Session::keep_rebuilt): a checkpoint
    /// is being made of the step that was received last, and the program rebuilds the layer itself. It
    /// does so with [`gather_on_device`](Session::gather_on_device). Otherwise none.
    pub fn asked_to_keep(&self, layer: LayerId) -> Result<Option<Range<usize>>, Error> {
        let state = self.state(layer)?;
        let is_there = state.owed.is_some_and(|clock| clock <= state.clock);
        Ok(is_there.then(|| self.own_share(layer)))
    }

    /// Hands over what this worker [was asked to keep](Session::asked_to_keep) of a layer that the
    /// program rebuilds itself: those elements of the parameters, and of every vector that the update
    /// rule remembers, as they are after the step.
    pub fn keep_rebuilt(
        &self,
        layer: LayerId,
        parameters: Vec<f32>,
        vectors: Vec<Vec<f32>>,
    ) -> Result<(), Error> {
        let mut state = self.state(layer)?;
        let refuse = |why: String| Error::Config(format!("layer '{}': {why}", self.name(layer)));
        let Some(clock) = state.owed.filter(|clock| *clock <= state.clock) else {
            return Err(refuse("this worker was not asked to keep anything of it".into()));
        };
        let range = self.own_share(layer);
        let expected = self.parts.book.job.rule(layer).state_vectors();
        if vectors.len() != expected {
            let got = vectors.len();
            return Err(refuse(format!("its rule remembers {expected} vectors, got {got}")));
        }
        if let Some(wrong) = vectors.iter().chain([&parameters]).find(|v| v.len() != range.len()) {
            let (expected, got) = (range.len(), wrong.len());
            return Err(refuse(format!("expected {expected} elements to keep, got {got}")));
        }
        state.owed = None;
        let vectors = vectors.into_iter().map(Arc::from).collect();
        let steps = clock.0 + state.steps_before;
        let parameters = parameters.into();
        self.layers.keep(KeptPiece { layer, range, clock, steps, parameters, vectors });
        Ok(())
    }

    /// The elements that this worker keeps of a layer that all workers have.
    pub(super) fn own_share(&self, layer: LayerId) -> Range<usize> {
        let len = self.parts.book.job.layers[layer.index()].len;
        share(len, self.node.me, self.parts.book.cluster.workers())
    }

    /// The checkpoint that this job goes on from. The session has put the update rules where they
    /// were. The program gives the session the checkpoint's parameters as initial values, and takes
    /// up its own state.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.places.from.as_deref()
    }

    /// Puts layers that go by factors where the checkpoint left them. The shards of the others have
    /// done so.
    pub(super) fn restore_layers(&self) -> Result<(), Error> {
        let Some(checkpoint) = self.checkpoint() else { return Ok(()) };
        for layer in self.layers.ids() {
            let mut state = self.state(layer)?;
            let whole = 0..self.parts.book.job.layers[layer.index()].len;
            let by_factors = self.layers.matrices(layer).is_some();
            let range = if by_factors { whole } else { 0..0 };
            // The program brings the parameters.
            let (steps, vectors) = read_rule(checkpoint, &self.name(layer), &range)?;
            state.steps_before = steps;
            if by_factors {
                state.rebuilder.state = vectors;
            }
        }
        Ok(())
    }
}

impl Saving {
    /// The step that it is to be the state after.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The program has taken the step: this is what it wants to find again. Called once.
    pub fn describe(&self, description: Description) {
        // If the thread has given up, the program learns of it when it waits.
        let _ = self.description.try_send(description);
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until the checkpoint is made, or has failed on some node. A failure concerns this
    /// checkpoint alone: the job can go on.
    pub fn wait(self) -> Result<Saved, Error> {
        let (step, why) = (self.step, "its thread panicked; its message says why".into());
        self.thread.join().unwrap_or(Err(Error::Checkpoint { step, why }))
    }
}

/// What the thread of a checkpoint knows.
struct Work {
    writer: PartWriter,
    step: u64,
    clock: Clock,
    patience: Duration,
    rank: u16,
    keep: Keep,
}

impl Work {
    fn run(
        &self,
        kept: &Receiver<KeptPiece>,
        described: &Receiver<Description>,
    ) -> Result<Saved, Error> {
        let Self { step, clock, .. } = *self;
        let failed = |why: String| Error::Checkpoint { step, why };
        let deadline = Instant::now() + self.patience;
        let kept = self.writer.collect(kept, clock, Vec::new(), deadline);
        let begun = Instant::now();
        let part = kept.and_then(|kept| self.writer.write(step, kept));
        let left = deadline.saturating_duration_since(Instant::now()).max(DESCRIBES);
        let missing = || "the program has not described its state".to_owned();
        let description = described.recv_timeout(left).map_err(|_| missing());
        let part = description.as_ref().map_err(String::clone).and(part);
        let Description { job, rank, tensors } = description.unwrap_or_default();
        let words = self.writer.agree(step, &Word { part, program: rank }).map_err(failed)?;
        let result = self.conclude(&words, job, tensors);
        let storage = &*self.writer.storage;
        if result.is_err() && self.rank == 0 && has_manifest(storage, step).is_ok_and(|has| !has) {
            // What is left of it never counts. It is deleted later if that fails now.
            let _ = discard(storage, step);
        }
        let (bytes, deleted) = result.map_err(failed)?;
        Ok(Saved { step, bytes, took: begun.elapsed(), deleted })
    }

    /// All nodes have spoken. Returns the bytes of the checkpoint, and which others were deleted.
    fn conclude(
        &self,
        words: &[Word],
        job: Value,
        tensors: Vec<Vec<TensorFacts>>,
    ) -> Result<(u64, Vec<u64>), String> {
        let speaker = |position| self.writer.speaker(position);
        let mut parts = Vec::new();
        for (position, word) in words.iter().enumerate() {
            match &word.part {
                Ok(part) => parts.push(part.clone()),
                Err(why) => return Err(format!("{}: {why}", speaker(position))),
            }
        }
        let bytes = parts.iter().map(|part| part.bytes).sum();
        if self.rank != 0 {
            return Ok((bytes, Vec::new()));
        }
        let book = &self.writer.book;
        let ranks: Vec<&Value> =
            words.iter().take(book.cluster.workers()).map(|word| &word.program).collect();
        let layers = book.job.layers.iter().enumerate().map(|(position, layer)| {
            let rule = book.job.rule(LayerId(position as u32));
            LayerFacts {
                name: layer.name.clone(),
                len: layer.len,
                rule: rule.to_string(),
                steps: self.step,
                vectors: rule.state_vectors(),
                tensors: tensors.get(position).cloned().unwrap_or_default(),
                private: false,
            }
        });
        let storage = &self.writer.storage;
        let manifest = Manifest {
            step: self.step,
            created: SystemTime::now(),
            poseidon: env!("CARGO_PKG_VERSION").into(),
            workers: book.cluster.workers(),
            layers: layers.collect(),
            parts,
            program: json!({ "job": job, "ranks": ranks }),
        };
        commit(&**storage, &manifest).map_err(|error| error.to_string())?;
        let deleted = prune(storage, &self.keep, SystemTime::now()).unwrap_or_else(|error| {
            tracing::warn!("old checkpoints were not deleted: {error}");
            Vec::new()
        });
        Ok((bytes, deleted))
    }
}

fn lock<T>(mutex: &Arc<Mutex<T>>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often a wait for the last checkpoint looks.
const GLANCE: Duration = Duration::from_millis(5);
/// How long the program may take at least to describe its state, once everything else is written.
const DESCRIBES: Duration = Duration::from_secs(60);
