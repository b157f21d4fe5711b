//! How a training program describes its job.

use crate::job::book::Job;
use crate::job::config::{Config, Member};
use crate::node::Node;
use crate::{Error, Session};
use poseidon_core::plan::Placement;
use poseidon_core::{ChannelId, Checkpoints, ChunkSize, Consistency, Layer, Optimizer, Policy};

/// Describes a job and starts it.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    config: Config,
    job: Job,
    rate: Option<f32>,
    rebuild_threads: usize,
}

impl Session {
    /// Begins to describe a job for the process that `config` describes.
    pub fn builder(config: Config) -> Builder {
        let job = Job {
            layers: Vec::new(),
            optimizer: Optimizer::default(),
            chunk: ChunkSize::default(),
            placement: Placement::default(),
            deterministic: false,
            consistency: Consistency::Bsp,
            scheme: Policy::default(),
            batch: None,
            checkpoints: Checkpoints::default(),
        };
        Builder { config, job, rate: None, rebuild_threads: 1 }
    }
}

impl Builder {
    /// Adds a layer. Layers are added in forward order.
    pub fn layer(mut self, layer: Layer) -> Self {
        self.job.layers.push(layer);
        self
    }

    /// Adds layers, in forward order.
    pub fn layers(mut self, layers: impl IntoIterator<Item = Layer>) -> Self {
        self.job.layers.extend(layers);
        self
    }

    /// What shards do with a complete chunk of a layer that has no rule of its own. Default: return
    /// the mean of the gradients.
    pub fn optimizer(mut self, optimizer: Optimizer) -> Self {
        self.job.optimizer = optimizer;
        self
    }

    /// The first step's learning rate. Needed by optimizers that update parameters.
    pub fn learning_rate(mut self, rate: f32) -> Self {
        self.rate = Some(rate);
        self
    }

    /// How layers are cut into chunks.
    pub fn chunk_size(mut self, size: ChunkSize) -> Self {
        self.job.chunk = size;
        self
    }

    /// How chunks are spread over shards.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.job.placement = placement;
        self
    }

    /// Adds contributions in rank order: runs are then bit-identical to their repetition.
    pub fn deterministic(mut self, deterministic: bool) -> Self {
        self.job.deterministic = deterministic;
        self
    }

    /// How far apart the clocks of workers may be. Default: all workers take every step together.
    /// Otherwise the shards must keep the parameters, and the last step must be
    /// [taken together](Session::step_together). Where slow workers may be
    /// [dropped](Consistency::DropSlowest), a worker that came too late goes on with the result of a later
    /// clock: [`Received::clock`](crate::session::Received::clock) says with which. A worker then receives all
    /// layers before it sends one again.
    pub fn consistency(mut self, consistency: Consistency) -> Self {
        self.job.consistency = consistency;
        self
    }

    /// Which schemes the plan may choose from.
    pub fn scheme(mut self, policy: Policy) -> Self {
        self.job.scheme = policy;
        self
    }

    /// The most samples this worker has in one step: with it, the plan can let fully connected layers
    /// go by factors. The program then asks for each layer's [`scheme`](Session::scheme).
    pub fn batch(mut self, batch: usize) -> Self {
        self.job.batch = Some(batch);
        self
    }

    /// Where this job's [checkpoints](Session::begin_checkpoint) go, and the one that it goes on from.
    pub fn checkpoints(mut self, checkpoints: Checkpoints) -> Self {
        self.job.checkpoints = checkpoints;
        self
    }

    /// How many threads may rebuild a gradient from factors together. Default: 1. The result does not
    /// depend on it.
    pub fn rebuild_threads(mut self, threads: usize) -> Self {
        self.rebuild_threads = threads.max(1);
        self
    }

    /// Finds the other nodes and opens links to them. Returns when the whole cluster is there.
    pub fn start(self) -> Result<Session, Error> {
        let mut config = self.config.clone();
        if let Member::Server(index) = config.member {
            return Err(Error::Config(format!(
                "this process is server {index}: a session is for workers, servers call serve"
            )));
        }
        let (job, rate, rebuild_threads) = self.check()?;
        if job.consistency.drops() > 0 {
            // One lane decides for all layers who counts.
            (config.lanes, config.lanes_by_rate) = (1, false);
        }
        let node = Node::start(&config, Some(job), None)?;
        let book = node.book.clone();
        Session::open(node, ChannelId::FIRST, book, rate, rebuild_threads)
    }

    /// Refuses what cannot be trained. Returns the job, the first learning rate, and how many threads
    /// rebuild gradients.
    pub(super) fn check(self) -> Result<(Job, f32, usize), Error> {
        let Self { job, rate, rebuild_threads, .. } = self;
        job.validate()?;
        let rate = match rate {
            Some(rate) if rate.is_finite() => rate,
            Some(rate) => {
                return Err(Error::Config(format!("learning rate {rate}: expected a number")));
            }
            None => match job.rules().chain([&job.optimizer]).find(|rule| !rule.is_stateless()) {
                None => 0.0,
                Some(rule) => {
                    let why = format!("update rule '{rule}' needs a learning rate");
                    return Err(Error::Config(why));
                }
            },
        };
        Ok((job, rate, rebuild_threads))
    }
}
