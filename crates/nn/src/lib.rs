//! The built-in layer engine: a few layers with explicit per-layer backward, and data sets.
//!
//! * [`data`]: data sets, how they are sharded by rank, and where they come from.
//! * [`model`]: a net as a person writes it. [`net`]: the same net, ready to compute.
//! * [`train`]: a worker that trains a net together with others.
//! * [`loss`]: what a net is judged by. [`schedule`]: learning rates over time.

pub mod data;
pub mod loss;
pub mod model;
pub mod net;
pub mod schedule;
pub mod train;

mod layer;
mod spec;

pub use loss::Loss;
pub use model::{Filler, LayerSpec, Model, ModelError, PoolMethod, Shape};
pub use net::{Draw, Factors, Gradient, LayerInfo, LoadError, Net, Phase};
pub use schedule::{ParseScheduleError, Policy, Schedule};
