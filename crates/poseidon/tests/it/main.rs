//! Tests of whole nodes. They are one program: as programs of their own, all would be linked with
//! the same crates. What needs a process to itself stands beside it: `cargo test` runs these in
//! one.

#[path = "../cluster/mod.rs"]
mod cluster;

mod bad_input;
mod budget;
mod changed;
mod checkpoints;
mod deaths;
mod descriptors;
mod device;
mod encodings;
mod encrypted;
mod endings;
mod engine;
mod exchange;
mod factors;
mod faults;
mod gather;
mod group;
mod hostile;
mod launchers;
mod live;
mod pauses;
mod replan;
mod replicas;
mod rule_state;
mod sibling;
mod staleness;
mod stragglers;
mod strangers;
mod trace;
