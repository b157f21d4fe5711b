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
//! * [`session`]: what a training program holds. [`serve`]: what a dedicated server runs.
//! * [`group`]: collective operations on tensors of any type.
//! * [`config`]: who am I, where is everybody: the only reader of the environment.
//! * [`coordinator`]: rendezvous and the information book. `gather`: small facts of all workers.
//!   `control`: what is said on the connections for both.
//! * [`buffer`]: memory lent to the lanes while a layer is in flight. `factors`: where factors meet;
//!   `rebuild`: what becomes of them.
//! * `join`: how a process gets into a job. `node`, `lane`: one process and its threads. `holdings`: what a lane holds; `peer`, `outbox`: its
//!   links, and what it sends next.

pub mod buffer;
pub mod config;
pub mod coordinator;
pub mod group;
pub mod session;

mod board;
mod book;
mod control;
mod error;
mod exchange;
mod factors;
mod gather;
mod holdings;
mod join;
mod lane;
mod layers;
mod node;
mod outbox;
mod peer;
mod rebuild;
mod rule_state;
mod server;
mod sibling;

pub use book::{Book, Job, NodeFacts};
pub use buffer::Buffer;
pub use config::Config;
pub use coordinator::Coordinator;
pub use error::Error;
pub use factors::Factors;
pub use gather::GatherError;
pub use group::Group;
pub use node::Traffic;
pub use poseidon_core::plan::Placement;
pub use poseidon_core::store::Order;
pub use poseidon_core::{
    ChunkSize, Clock, Cluster, Dtype, Layer, LayerId, LayerKind, NodeId, Optimizer, Plan, Policy,
    ReduceOp, Reduction, Scheme, Servers,
};
pub use poseidon_link::Secret;
pub use rule_state::RuleState;
pub use server::serve;
pub use session::Session;
