//! Memory that is lent to the lanes, and the only `unsafe` around it.

pub mod buffer;

pub(crate) mod available;
pub(crate) mod exchange;
pub(crate) mod factors;
pub(crate) mod kept;
pub(crate) mod landings;
pub(crate) mod on_device;
pub(crate) mod region;
pub(crate) mod rule_state;
