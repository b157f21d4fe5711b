//! Poseidon's pure core: no I/O, no threads, no clock, no environment.
//!
//! * [`layer`], [`cluster`]: what is trained, and on which nodes.
//! * [`port`], [`share`]: what a node's port carries, and how much its servers hold for that.
//! * [`budget`]: how fast a node may send. [`admission`]: how much of its own it has on the way.
//! * [`tree`]: hosts and racks, and how sums pass through them.
//! * [`book`]: what every node knows about the job: its layers, its nodes and their addresses, and an epoch.
//! * [`consistency`]: how far apart the clocks of workers may be.
//! * [`overlap`]: how much of synchronising may run beside computing.
//! * [`cost`], [`scheme`]: what it costs to synchronise a layer, and the cheapest exact way.
//! * [`chunk`], [`plan`]: how a layer is cut into chunks and where each chunk lives.
//! * [`wire`]: the bytes two nodes exchange (`docs/wire.md`); [`queue`]: in which order.
//! * [`syncer`], [`factors`]: the state machines of one layer on one lane of a worker, by scheme.
//! * [`encoding`]: which type a layer's numbers have on the wire.
//! * [`running_time`]: the time in which a process ran.
//! * [`printable`]: what others wrote, made safe to show.
//! * [`store`]: the state machine of one shard: accumulates, updates, answers.
//! * [`optim`]: what a shard does with a reduced gradient. [`reduce`]: what a collective does with
//!   tensors of any type.
//!
//! State machines take inputs through `handle_*` and give outputs as return values or through
//! `poll_*`. Time is an argument. Payloads are borrowed: core never copies a tensor it was not
//! asked to reduce.
#![forbid(unsafe_code)]

pub mod admission;
pub mod book;
pub mod budget;
pub mod chunk;
pub mod cluster;
pub mod consistency;
pub mod copies;
pub mod cost;
pub mod encoding;
pub mod factors;
pub mod layer;
pub mod optim;
pub mod overlap;
pub mod plan;
pub mod port;
pub mod printable;
pub mod queue;
pub mod reduce;
pub mod roll;
pub mod running_time;
pub mod scheme;
pub mod share;
pub mod store;
pub mod syncer;
pub mod tree;
pub mod windows;
pub mod wire;

mod byte_size;
mod ids;
mod job_id;
mod violation;

pub use admission::Admission;
pub use book::{Book, CheckpointAt, Checkpoints, Job, NodeFacts};
pub use budget::{Allowance, Budget};
pub use byte_size::ByteSize;
pub use chunk::{ChunkKey, ChunkSize, Chunks};
pub use cluster::{Cluster, Role, Servers};
pub use consistency::Consistency;
pub use encoding::{Encoding, Encodings};
pub use factors::Gather;
pub use ids::{ChannelId, Clock, Epoch, LaneId, LayerId, NodeId};
pub use job_id::{JobId, NotAJobId};
pub use layer::{Layer, LayerKind};
pub use optim::{Optimizer, Reduction};
pub use overlap::Overlap;
pub use plan::{Plan, Shard};
pub use port::{Port, Rate};
pub use queue::Queue;
pub use reduce::{Dtype, ReduceOp};
pub use scheme::{Policy, Scheme};
pub use store::Store;
pub use syncer::Syncer;
pub use tree::{Ring, Route, Tree};
pub use violation::Violation;
pub use windows::Windows;
