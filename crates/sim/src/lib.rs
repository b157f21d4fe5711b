//! The simulator: core's own `Plan`, `Syncer`, `Gather` and `Store` in virtual time on a virtual network.
//!
//! * [`zoo`], [`profile`]: models as data, and how long a device takes for their layers.
//! * [`network`]: links, their bandwidth and latency.
//! * [`setup`]: a training job to simulate; [`outcome`]: what came of it.
//! * [`simulate`] does it; [`least_bandwidth`] does it until it knows what network a job needs.
//!
//! It depends on `poseidon-core` and on nothing else of this workspace, so what is simulated is what
//! ships.
#![forbid(unsafe_code)]

pub mod network;
pub mod outcome;
pub mod profile;
pub mod setup;
pub mod zoo;

mod calendar;
mod connection;
mod copies;
mod engine;
mod error;
mod fabric;
mod flat;
mod measure;
mod multicast;
mod node;
mod outbox;
mod peers;
mod places;
mod plan;
mod rebuild;
mod search;
mod switch;
mod worker;

pub use error::Error;
pub use measure::simulate;
pub use network::{Duplex, Memory, Network, Racks};
pub use outcome::{Bottleneck, Outcome};
pub use places::Places;
pub use poseidon_core::Overlap;
pub use profile::{CopySpeed, LayerTime, Profile, ProfileError};
pub use search::least_bandwidth;
pub use setup::{SchemeRule, Setup};
pub use zoo::{Model, ModelError, ModelLayer, read_text};
