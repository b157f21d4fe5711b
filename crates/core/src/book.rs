//! The information book: what every node knows about the job (Poseidon 2017 §4.1).

use crate::optim::OptimizerError;
use crate::plan::{Placement, Rules};
use crate::store::Order;
use crate::{
    ChunkSize, Cluster, Consistency, Encoding, Epoch, JobId, LaneId, Layer, LayerId, LayerKind,
    NodeId, Optimizer, Plan, Policy,
};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// The version of the book this build writes and reads.
pub const BOOK_VERSION: u16 = 12;

/// Cluster, addresses and model. The coordinator writes it when the last node has joined.
///
/// A book that comes from another process is checked while it is read: see [`BookError`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Book {
    /// How it is written: [`BOOK_VERSION`].
    pub version: u16,
    /// Tells this job from every other one, also from one of the same name.
    pub identity: JobId,
    /// Which edition of the job's book this is.
    pub epoch: Epoch,
    /// Who does what.
    pub cluster: Cluster,
    /// Facts about every node, by id.
    pub nodes: Vec<NodeFacts>,
    /// What is trained.
    pub job: Job,
}

/// What a node says about itself when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// Its id.
    pub node: NodeId,
    /// Equal on nodes that can reach each other through a unix socket.
    pub host: String,
    /// The name of its rack, if somebody has named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    /// Where it listens, as `address:port`.
    pub tcp: String,
    /// Where it listens on other interfaces, if it has several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_tcp: Vec<String>,
    /// The name of its unix socket, if it has one.
    pub unix: Option<String>,
    /// The Poseidon it runs.
    pub version: String,
    /// Whether it can multiply on tiles, whose sums differ in their last bits from those of vectors.
    #[serde(default)]
    pub tiles: bool,
    /// How many bytes wait at most before they leave its interface, if the system tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<u64>,
}

impl NodeFacts {
    /// Number of interfaces that its lanes are spread over.
    pub fn interfaces(&self) -> usize {
        1 + self.other_tcp.len()
    }

    /// Where `lane` is called: lanes take the interfaces in turn.
    pub fn address(&self, lane: LaneId) -> &str {
        match lane.index() % self.interfaces() {
            0 => &self.tcp,
            other => &self.other_tcp[other - 1],
        }
    }
}

/// A book that cannot be of any job.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BookError {
    /// The first epoch is 1.
    #[error("epoch 0: the first one is 1")]
    Epoch,
    /// The job makes no sense.
    #[error(transparent)]
    Job(#[from] JobError),
    /// Facts are missing, or there are too many.
    #[error("facts of {got} nodes in a cluster of {expected}")]
    Nodes {
        /// Nodes of the cluster.
        expected: usize,
        /// Nodes with facts.
        got: usize,
    },
    /// Facts are not in the order of their nodes.
    #[error("facts of node {got} in the place of node {expected}")]
    Order {
        /// Whose place it is.
        expected: NodeId,
        /// Whose facts are there.
        got: NodeId,
    },
}

/// What is trained and how. The same on every worker, or the job does not start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// In forward order.
    pub layers: Vec<Layer>,
    /// What a shard does with a complete chunk of a layer that has no rule of its own.
    pub optimizer: Optimizer,
    /// How layers are cut.
    pub chunk: ChunkSize,
    /// How chunks are spread.
    #[serde(default)]
    pub placement: Placement,
    /// Whether contributions are added in rank order, which makes runs repeatable bit by bit.
    #[serde(default)]
    pub deterministic: bool,
    /// How far apart the clocks of workers may be.
    #[serde(default)]
    pub consistency: Consistency,
    /// Which schemes the plan may choose from.
    #[serde(default)]
    pub scheme: Policy,
    /// Most samples a worker has in one step. Without it only layers that say their rows go by factors.
    #[serde(default)]
    pub batch: Option<usize>,
    /// Where its state is written, and where it comes from.
    #[serde(default)]
    pub checkpoints: Checkpoints,
}

/// Where the state of a job is written, and where it comes from. Every node writes and reads its own
/// part, so every node must be able to reach both places.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoints {
    /// Where checkpoints go: a folder, or a prefix of an object store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The checkpoint that the job goes on from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<CheckpointAt>,
}

/// One checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointAt {
    /// Where it is.
    pub place: String,
    /// The step that it was made after.
    pub step: u64,
}

/// A job of which no plan can be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The update rule cannot work.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// A layer's own update rule cannot work.
    #[error("layer '{layer}': {why}")]
    LayerOptimizer {
        /// The layer.
        layer: String,
        /// What is wrong with its rule.
        why: OptimizerError,
    },
    /// No number fits into a chunk, or the smallest chunk is larger than the largest.
    #[error("chunks of {min} to {max} bytes: expected at least 4, and min <= max")]
    Chunk {
        /// The smallest share of a layer that is worth a frame, in bytes.
        min: usize,
        /// The largest chunk, in bytes.
        max: usize,
    },
    /// Clocks that are open need memory.
    #[error("'{0}': the largest staleness is {most}", most = Consistency::MOST)]
    TooStale(Consistency),
    /// Contributions that are added as they come are added in no order.
    #[error("'{0}' is not repeatable: a deterministic job needs 'bsp'")]
    Unordered(Consistency),
    /// Nobody would count.
    #[error(
        "'{consistency}' in a job whose number of workers is {workers}: at least one must count"
    )]
    NobodyCounts {
        /// What was asked for.
        consistency: Consistency,
        /// Workers of the job.
        workers: usize,
    },
    /// Lanes would have to agree on who counts.
    #[error(
        "'{consistency}' with {lanes} lanes: it needs one lane, so that all layers agree on who counts"
    )]
    Lanes {
        /// What was asked for.
        consistency: Consistency,
        /// Lanes of a node.
        lanes: u16,
    },
    /// Factors go from worker to worker, and nobody waits for those of a slow one.
    #[error("'{0}' cannot drop the factors of slow workers: use the scheme 'auto' or 'ps'")]
    Factors(Consistency),
    /// A rule that keeps no parameters can only answer with the mean of one clock.
    #[error(
        "layer '{layer}' has update rule '{rule}', which cannot mean anything with '{consistency}': the \
         shards must keep the parameters, for instance with 'sgd'"
    )]
    NoParameters {
        /// The layer.
        layer: String,
        /// Its update rule.
        rule: String,
        /// What was asked for.
        consistency: Consistency,
    },
    /// A step has no samples.
    #[error("a batch of 0 samples: expected at least 1")]
    NoBatch,
    /// Nobody could tell two layers apart.
    #[error("two layers are called '{name}'")]
    Twins {
        /// What both are called.
        name: String,
    },
    /// A layer that may go by factors has none.
    #[error("0 rows of layer '{layer}': expected at least 1")]
    NoRows {
        /// The layer.
        layer: String,
    },
    /// The parameters up to this layer do not fit into any memory.
    #[error("layer '{layer}' of {len} parameters: no memory holds that many")]
    TooLarge {
        /// The layer.
        layer: String,
        /// Its parameters.
        len: usize,
    },
    /// The plan has an entry for every chunk.
    #[error(
        "with layer '{layer}' there are more than {most} chunks: take larger ones, or fewer shards",
        most = Job::MOST_CHUNKS
    )]
    TooManyChunks {
        /// The layer.
        layer: String,
    },
    /// A fully connected layer does not have as many parameters as its shape says.
    #[error(
        "layer '{layer}' has {m} outputs and {n} inputs: expected at least 1 of each, and {} parameters, or {m} \
         more with a bias, got {len}", m.saturating_mul(*n)
    )]
    Shape {
        /// The layer.
        layer: String,
        /// Its outputs.
        m: usize,
        /// Its inputs.
        n: usize,
        /// Its parameters.
        len: usize,
    },
}

impl Book {
    /// The plan every node derives from the book: a function of the book and its epoch alone.
    pub fn plan(&self) -> Plan {
        let Job { chunk, placement, scheme: policy, batch, consistency, .. } = self.job;
        let rules = Rules { chunk, placement, policy, batch, consistency };
        Plan::new(&self.cluster, &self.job.layers, rules).in_epoch(self.epoch)
    }

    /// The cluster as the links of a process carry it: a job without layers has groups alone, and sessions
    /// that are opened beside them.
    pub fn cluster_of_links(&self) -> Cluster {
        match self.job.layers.is_empty() {
            true => self.cluster.clone().of_groups(),
            false => self.cluster.clone(),
        }
    }

    /// Whether gradients may be rebuilt on tiles: if one worker cannot, none does, so that all replicas stay equal.
    pub fn tiles(&self) -> bool {
        let is_worker = |node: &&NodeFacts| self.cluster.role(node.node).is_some_and(|r| r.worker);
        self.nodes.iter().filter(is_worker).all(|node| node.tiles)
    }
}

impl Job {
    /// Most chunks of a job. Of the usual size they are 4 TB.
    pub const MOST_CHUNKS: usize = 1 << 24;

    /// In which order shards add contributions.
    pub fn order(&self) -> Order {
        if self.deterministic { Order::Rank } else { Order::Arrival }
    }

    /// The hosts of `cluster` in a ring where this job allows it. Sums in rank order are made straight
    /// on the shards, and so are those of workers that do not wait for each other.
    pub fn arrange(&self, cluster: Cluster) -> Cluster {
        match self.deterministic || !self.consistency.is_bsp() {
            true => cluster,
            false => cluster.in_a_ring(),
        }
    }

    /// What a shard does with a complete chunk of `layer`.
    ///
    /// # Panics
    ///
    /// If the job has no such layer.
    pub fn rule(&self, layer: LayerId) -> &Optimizer {
        self.layers[layer.index()].optimizer.as_ref().unwrap_or(&self.optimizer)
    }

    /// The update rule of every layer, in forward order.
    pub fn rules(&self) -> impl Iterator<Item = &Optimizer> {
        self.layers.iter().map(|layer| layer.optimizer.as_ref().unwrap_or(&self.optimizer))
    }

    /// Whether a plan can be made of it and followed.
    pub fn validate(&self) -> Result<(), JobError> {
        self.optimizer.validate()?;
        let ChunkSize { min, max } = self.chunk;
        if max < size_of::<f32>() || min > max {
            return Err(JobError::Chunk { min, max });
        }
        if self.batch == Some(0) {
            return Err(JobError::NoBatch);
        }
        let consistency = self.consistency;
        if consistency.lead() > Consistency::MOST.into() {
            return Err(JobError::TooStale(consistency));
        }
        if self.deterministic && !consistency.is_bsp() {
            return Err(JobError::Unordered(consistency));
        }
        if consistency.drops() > 0 && self.scheme == Policy::Sfb {
            return Err(JobError::Factors(consistency));
        }
        let mut names = HashSet::new();
        let mut chunks: usize = 0;
        let mut room = isize::MAX as usize / size_of::<f32>();
        for layer in &self.layers {
            let name = || layer.name.clone();
            if !names.insert(&layer.name) {
                return Err(JobError::Twins { name: name() });
            }
            if let Some(rule) = &layer.optimizer {
                let why = |why| JobError::LayerOptimizer { layer: name(), why };
                rule.validate().map_err(why)?;
            }
            let rule = layer.optimizer.as_ref().unwrap_or(&self.optimizer);
            if rule.is_stateless() && !consistency.is_bsp() {
                let (layer, rule) = (name(), rule.to_string());
                return Err(JobError::NoParameters { layer, rule, consistency });
            }
            if layer.rows == Some(0) {
                return Err(JobError::NoRows { layer: name() });
            }
            let Some(left) = room.checked_sub(layer.len) else {
                return Err(JobError::TooLarge { layer: name(), len: layer.len });
            };
            room = left;
            let longest = max / size_of::<f32>();
            chunks = chunks.saturating_add(layer.len.div_ceil(longest));
            if chunks > Self::MOST_CHUNKS {
                return Err(JobError::TooManyChunks { layer: name() });
            }
            if let LayerKind::Fc { m, n } = layer.kind {
                let (weights, len) = (m.saturating_mul(n), layer.len);
                if weights == 0 || (len != weights && len != weights.saturating_add(m)) {
                    return Err(JobError::Shape { layer: name(), m, n, len });
                }
            }
        }
        Ok(())
    }

    /// Whether `cluster` can work on it.
    pub fn fits(&self, cluster: &Cluster) -> Result<(), JobError> {
        let (consistency, drops) = (self.consistency, self.consistency.drops());
        let (workers, lanes) = (cluster.workers(), cluster.lanes());
        match drops {
            0 => Ok(()),
            _ if usize::from(drops) >= workers => {
                Err(JobError::NobodyCounts { consistency, workers })
            }
            _ if lanes != 1 => Err(JobError::Lanes { consistency, lanes }),
            _ => Ok(()),
        }
    }

    /// The first thing in which two workers' jobs differ, in words. `None` if they agree.
    pub fn difference(&self, mine: &str, other: &Self, theirs: &str) -> Option<String> {
        let layer = |l: &Layer| {
            let kind = match l.kind {
                LayerKind::Fc { m, n } => {
                    format!(", fully connected with {m} outputs and {n} inputs")
                }
                LayerKind::Conv => ", a convolution".into(),
                LayerKind::Embedding => ", an embedding".into(),
                LayerKind::Other => String::new(),
            };
            let rows =
                l.rows.map_or_else(String::new, |rows| format!(", by factors of {rows} rows"));
            let rule = l.optimizer.as_ref().map_or_else(String::new, |rule| format!(", {rule}"));
            let encodings = match (l.up, l.down) {
                (Encoding::F32, Encoding::F32) => String::new(),
                (up, down) => format!(", {up} up and {down} down"),
            };
            let more = format!("{kind}{rows}{encodings}{rule}");
            format!("'{}' of {} parameters{more}", l.name, l.len)
        };
        for (position, pair) in self.layers.iter().zip(&other.layers).enumerate() {
            if pair.0 != pair.1 {
                let (a, b) = (layer(pair.0), layer(pair.1));
                return Some(format!("layer {position} is {a} on {mine} but {b} on {theirs}"));
            }
        }
        let differ = |what: &str, a: String, b: String| {
            (a != b).then(|| format!("{what} is {a} on {mine} but {b} on {theirs}"))
        };
        let count = |job: &Self| job.layers.len().to_string();
        differ("the number of layers", count(self), count(other))
            .or_else(|| {
                differ("the update rule", self.optimizer.to_string(), other.optimizer.to_string())
            })
            .or_else(|| {
                let chunk = |c: ChunkSize| format!("{} to {} bytes", c.min, c.max);
                differ("the chunk size", chunk(self.chunk), chunk(other.chunk))
            })
            .or_else(|| {
                let placement = |p| format!("{p:?}");
                differ("the placement", placement(self.placement), placement(other.placement))
            })
            .or_else(|| {
                let order = |d: bool| d.to_string();
                differ("deterministic", order(self.deterministic), order(other.deterministic))
            })
            .or_else(|| {
                let sync = |job: &Self| job.consistency.to_string();
                differ("the consistency", sync(self), sync(other))
            })
            .or_else(|| differ("the scheme", self.scheme.to_string(), other.scheme.to_string()))
            .or_else(|| {
                let batch = |b: Option<usize>| b.map_or("unknown".into(), |b| b.to_string());
                differ("the batch size", batch(self.batch), batch(other.batch))
            })
            .or_else(|| {
                let place = |job: &Self| job.checkpoints.to.clone().unwrap_or("nowhere".into());
                differ("the place of checkpoints", place(self), place(other))
            })
            .or_else(|| {
                let from = |job: &Self| match &job.checkpoints.from {
                    Some(CheckpointAt { place, step }) => format!("step {step} of {place}"),
                    None => "none".into(),
                };
                differ("the checkpoint to go on from", from(self), from(other))
            })
    }
}

/// A book as it comes from another process.
#[derive(Deserialize)]
struct Unchecked {
    version: u16,
    identity: JobId,
    epoch: Epoch,
    cluster: Cluster,
    nodes: Vec<NodeFacts>,
    job: Job,
}

impl TryFrom<Unchecked> for Book {
    type Error = BookError;

    fn try_from(book: Unchecked) -> Result<Self, BookError> {
        let Unchecked { version, identity, epoch, cluster, nodes, job } = book;
        job.validate()?;
        job.fits(&cluster)?;
        if epoch < Epoch::FIRST {
            return Err(BookError::Epoch);
        }
        let (expected, got) = (cluster.nodes(), nodes.len());
        if expected != got {
            return Err(BookError::Nodes { expected, got });
        }
        for (expected, facts) in cluster.node_ids().zip(&nodes) {
            if facts.node != expected {
                return Err(BookError::Order { expected, got: facts.node });
            }
        }
        Ok(Self { version, identity, epoch, cluster, nodes, job })
    }
}

#[cfg(test)]
mod tests;
