//! Poseidon makes data-parallel training scale on ordinary Ethernet.
//!
//! A training program holds a [`Session`]: it sends a layer's gradient the moment the layer's
//! backward pass ends, goes on computing, and receives the synchronised result when it needs it.
//!
//! ```no_run
//! use poseidon::{Buffer, Config, Layer, Optimizer, Session};
//!
//! # fn main() -> Result<(), poseidon::Error> {
//! let session = Session::builder(Config::from_env()?)   // torchrun, mpirun, srun, poseidon launch
//!     .layer(Layer::new("fc1", 1000))
//!     .optimizer(Optimizer::default())                  // mean over workers
//!     .start()?;
//! let fc1 = session.layer("fc1")?;
//! let mut gradient = Buffer::zeroed(1000);
//! for step in 0..10 {
//!     gradient.fill(step as f32);
//!     session.send(fc1, gradient)?;                     // returns at once
//!     gradient = session.receive(fc1)?.result;          // the mean, in the same memory
//! }
//! session.finish()
//! # }
//! ```
//!
//! The folders, from the top down; arrows between them point down only (`cargo xtask tidy`):
//!
//! * [`session`]: what a training program holds. [`serve`]: what a dedicated server runs.
//! * [`check`]: what a process does that looks at the network and trains nothing.
//! * `node`: one process of a job and its lanes.
//! * `lane`: a session's part on one thread of a node: its chunks, its shard.
//! * [`collectives`]: operations on tensors of any type, among the ranks of a group.
//! * `engine`: what carries the frames of both: links, queues, heartbeats, goodbyes, last words.
//! * `job`: how processes become a job: [`config`], [`coordinator`], rendezvous, the information book.
//! * `trace`: what a node notes of itself while it works.
//! * `memory`: memory lent to the lanes while a layer is in flight, and where factors meet.
//! * `error`: what can go wrong, in words.

pub mod check;
pub mod collectives;
pub mod session;

mod engine;
mod error;
mod job;
mod lane;
mod memory;
mod node;
mod server;
mod trace;

/// What the fuzz targets call: code that judges what other processes say.
#[cfg(feature = "fuzzing")]
pub mod fuzzing {
    pub use crate::collectives::fuzzed::{CHANNEL, COUNT, RANKS, route};
    pub use crate::job::fuzzed::control;
}

pub use collectives::Group;
pub use engine::traffic::Traffic;
pub use error::{Difference, Error, GatherError, OpenError, RendezvousError};
pub use job::book::{BOOK_VERSION, Book, Job, NodeFacts, PlacedChunk, PlannedLayer, PlannedPort};
pub use job::config::{self, Config};
pub use job::coordinator::{self, Coordinator};
pub use job::live::{self, LiveJob};
pub use job::metrics::CONTENT_TYPE as METRICS_CONTENT_TYPE;
pub use job::places::{PlacedHost, PlacedNode, PlacedRack, PlacedTree};
pub use memory::buffer::{self, Buffer};
pub use memory::factors::{Factors, HalfFactors};
pub use memory::on_device::OnDevice;
pub use memory::rule_state::RuleState;
pub use poseidon_checkpoint as checkpoint;
pub use poseidon_core::budget::Limit;
pub use poseidon_core::plan::{Placement, Rules};
pub use poseidon_core::store::Order;
pub use poseidon_core::{
    CheckpointAt, Checkpoints, ChunkSize, Clock, Cluster, Consistency, Dtype, Encoding, Encodings,
    Epoch, JobId, LaneId, Layer, LayerId, LayerKind, NodeId, Optimizer, Plan, Policy, Rate,
    ReduceOp, Reduction, Scheme, Servers,
};
pub use poseidon_device as device;
pub use poseidon_link::Secret;
pub use server::serve;
pub use session::Session;
pub use session::observed::Pass;
pub use session::others::Awaited;
