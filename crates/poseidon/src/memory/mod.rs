//! Memory that is lent to the lanes, and the only `unsafe` around it.

pub mod buffer;

pub(crate) mod available;
pub(crate) mod exchange;
pub(crate) mod factors;
pub(crate) mod kept;
pub(crate) mod landings;
#[cfg(test)]
mod landings_model;
#[cfg(test)]
mod landings_tests;
pub(crate) mod on_device;
pub(crate) mod region;
pub(crate) mod rule_state;

/// What landings are made of. Their model has loom's in their place.
mod atomics {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering};
}
