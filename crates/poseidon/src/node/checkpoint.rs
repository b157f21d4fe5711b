//! Checkpoints on one node: what the node keeps becomes its part, and what a part has comes back.
//!
//! Workers ask for a checkpoint with the contributions of a step. When a chunk of that step is
//! complete, its shard hands its memory over without a copy; a worker hands over its share of the
//! layers that go by factors. A thread beside the lanes writes all of it. The nodes tell each other
//! through the coordinator how it went, and worker 0 writes the manifest: see
//! ADR 0022.

use crate::job::book::{Book, Job};
use crate::job::rounds::BESIDE;
use crate::lane::board::Board;
use crate::memory::kept::KeptPiece;
use crate::node::Node;
use crate::{Error, GatherError};
use poseidon_checkpoint::{
    Checkpoint, ExpectedLayer, PartFacts, Piece, Storage, What, has_manifest, open, write_part,
};
use poseidon_core::store::Restored;
use poseidon_core::{Clock, LayerId, NodeId, Plan};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Where a job's checkpoints go, and the one that it goes on from.
pub(crate) struct Places {
    pub(crate) to: Option<Arc<dyn Storage>>,
    pub(crate) from: Option<Arc<Checkpoint>>,
}

impl Places {
    /// Opens the places of `job`. The checkpoint must be of the same layers.
    pub(crate) fn open(job: &Job) -> Result<Self, Error> {
        let restore = |error| Error::Restore(Arc::new(error));
        let to = job.checkpoints.to.as_deref().map(open).transpose().map_err(restore)?;
        let Some(at) = &job.checkpoints.from else { return Ok(Self { to, from: None }) };
        let checkpoint = open(&at.place).and_then(|storage| Checkpoint::open(&storage, at.step));
        let checkpoint = checkpoint.map_err(restore)?;
        let rules: Vec<_> = job.rules().map(|rule| (rule.to_string(), rule)).collect();
        let expected = job.layers.iter().zip(&rules).map(|(layer, (text, rule))| ExpectedLayer {
            name: &layer.name,
            len: layer.len,
            rule: text,
            vectors: rule.state_vectors(),
        });
        checkpoint.check_layers(&expected.collect::<Vec<_>>()).map_err(restore)?;
        Ok(Self { to, from: Some(Arc::new(checkpoint)) })
    }
}

/// What `checkpoint` has of some elements of the layer called `name`.
pub(crate) fn read(
    checkpoint: &Checkpoint,
    name: &str,
    range: &Range<usize>,
) -> Result<Restored, Error> {
    let (steps, vectors) = read_rule(checkpoint, name, range)?;
    let parameters = checkpoint.read(name, &What::Parameters, range.clone());
    let parameters = parameters.map_err(|error| Error::Restore(Arc::new(error)))?.into();
    let vectors = vectors.into_iter().map(Arc::from).collect();
    Ok(Restored { steps, parameters, vectors })
}

/// The steps and the vectors of the update rule, of some elements of the layer called `name`.
pub(crate) fn read_rule(
    checkpoint: &Checkpoint,
    name: &str,
    range: &Range<usize>,
) -> Result<(u64, Vec<Vec<f32>>), Error> {
    let facts = checkpoint.manifest().layers.iter().find(|layer| layer.name == name);
    let (steps, vectors) = facts.map_or((0, 0), |facts| (facts.steps, facts.vectors));
    let read = |vector| checkpoint.read(name, &What::State(vector), range.clone());
    let vectors: Result<_, _> = (0..vectors).map(read).collect();
    Ok((steps, vectors.map_err(|error| Error::Restore(Arc::new(error)))?))
}

/// What a node says of its part to the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Word {
    /// The part, or why there is none.
    pub(crate) part: Result<PartFacts, String>,
    /// What this worker's program adds.
    pub(crate) program: Value,
}

/// Writes this node's part of checkpoints.
pub(crate) struct PartWriter {
    node: Arc<Node>,
    board: Arc<Board>,
    pub(crate) book: Arc<Book>,
    pub(crate) storage: Arc<dyn Storage>,
    /// How many pieces this node keeps.
    pieces: usize,
    /// The dedicated servers that keep some.
    servers: Vec<NodeId>,
}

impl PartWriter {
    pub(crate) fn new(
        node: Arc<Node>,
        board: Arc<Board>,
        book: Arc<Book>,
        storage: Arc<dyn Storage>,
    ) -> Self {
        let (plan, me) = (book.plan(), node.me);
        let is_worker = |node: NodeId| book.cluster.role(node).is_some_and(|role| role.worker);
        let held = |(key, at): &(poseidon_core::ChunkKey, poseidon_core::Shard)| {
            plan.factors(key.layer).is_none().then_some(at.node)
        };
        let holders: Vec<NodeId> = plan.all_chunks().filter_map(|chunk| held(&chunk)).collect();
        let shares = if is_worker(me) { layers_by_factors(&plan) } else { 0 };
        let pieces = holders.iter().filter(|holder| **holder == me).count() + shares;
        let servers: BTreeSet<_> =
            holders.into_iter().filter(|holder| !is_worker(*holder)).collect();
        Self { node, board, storage, pieces, servers: servers.into_iter().collect(), book }
    }

    /// Waits for everything this node keeps of `clock`, at most until `deadline`.
    pub(crate) fn collect(
        &self,
        kept: &Receiver<KeptPiece>,
        clock: Clock,
        mut pieces: Vec<KeptPiece>,
        deadline: Instant,
    ) -> Result<Vec<KeptPiece>, String> {
        while pieces.len() < self.pieces {
            match kept.recv_timeout(GLANCE) {
                Ok(piece) if piece.clock == clock => pieces.push(piece),
                Ok(_) => {} // of a checkpoint that was given up
                Err(RecvTimeoutError::Disconnected) => return Err("the session is over".into()),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(failure) = self.board.failure() {
                        return Err(failure.to_string());
                    }
                    if Instant::now() > deadline {
                        let (have, all) = (pieces.len(), self.pieces);
                        return Err(format!(
                            "{have} of {all} pieces of clock {clock} were kept in time"
                        ));
                    }
                }
            }
        }
        Ok(pieces)
    }

    /// Writes what this node has kept.
    pub(crate) fn write(&self, step: u64, kept: Vec<KeptPiece>) -> Result<PartFacts, String> {
        // No manifest comes before all nodes have told of their parts, so all of them see the same.
        if has_manifest(&*self.storage, step).map_err(|error| error.to_string())? {
            let place = self.storage.describe();
            return Err(format!("{place} has a checkpoint of this step already"));
        }
        if let Some(other) = kept.iter().find(|piece| piece.steps != step) {
            let layer = &self.book.job.layers[other.layer.index()].name;
            return Err(format!("layer '{layer}' has taken {} steps", other.steps));
        }
        let mut pieces = Vec::new();
        for KeptPiece { layer, range, parameters, vectors, .. } in kept {
            let vectors = vectors.into_iter().enumerate();
            let all = vectors.map(|(vector, values)| (What::State(vector), values));
            for (what, values) in std::iter::once((What::Parameters, parameters)).chain(all) {
                let layer = self.book.job.layers[layer.index()].name.clone();
                pieces.push(Piece { layer, what, start: range.start, values });
            }
        }
        // An empty layer, or a share of one that is smaller than the job, has no numbers.
        pieces.retain(|piece| !piece.values.is_empty());
        write_part(&*self.storage, step, self.node.me.0.into(), &pieces)
            .map_err(|error| error.to_string())
    }

    /// Tells the others of this node's part and hears of theirs: workers by rank, then servers.
    pub(crate) fn agree(&self, step: u64, word: &Word) -> Result<Vec<Word>, String> {
        let topic = format!("{BESIDE}checkpoint of step {step}");
        let watch = || self.board.state();
        let words = self.node.line.gather_with(&self.servers, &topic, word, SLOWEST, &watch);
        words.map_err(|why: GatherError| why.to_string())
    }

    /// The name of the node whose word is at `position`.
    pub(crate) fn speaker(&self, position: usize) -> String {
        let cluster = &self.book.cluster;
        let node = cluster.worker_ids().chain(self.servers.iter().copied()).nth(position);
        node.map_or_else(String::new, |node| cluster.name(node))
    }
}

/// A dedicated server's part in checkpoints: it writes whatever workers ask it to keep, until the
/// session is over.
pub(crate) fn keep_serving(writer: &PartWriter, kept: &Receiver<KeptPiece>) {
    loop {
        let first = match kept.recv_timeout(GLANCE) {
            Ok(first) => first,
            Err(RecvTimeoutError::Timeout) if !writer.board.is_closed() => continue,
            Err(_) => return,
        };
        let (clock, step) = (first.clock, first.steps);
        let deadline = Instant::now() + writer.node.config.timeout;
        let kept = writer.collect(kept, clock, vec![first], deadline);
        let part = kept.and_then(|kept| writer.write(step, kept));
        if let Err(why) = &part {
            tracing::warn!(
                "this server's part of the checkpoint of step {step} was not written: {why}"
            );
        }
        // Worker 0 tells how it ended.
        let _ = writer.agree(step, &Word { part, program: Value::Null });
    }
}

/// Layers that workers keep shares of.
fn layers_by_factors(plan: &Plan) -> usize {
    (0..plan.layers() as u32).filter(|layer| plan.factors(LayerId(*layer)).is_some()).count()
}

/// How often a wait looks whether the job has failed.
const GLANCE: Duration = Duration::from_millis(100);
/// How long the slowest node may take to write its part. The job goes on meanwhile.
pub(crate) const SLOWEST: Duration = Duration::from_secs(30 * 60);
