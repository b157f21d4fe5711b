//! How processes become a job: which node a process is, where the other nodes are, and what all of
//! them know.
//!
//! * `config`: raw arguments and environment become a `Config`. `rendezvous`: joins the job and opens
//!   its links. `book`: questions to the information book. `places`: its tree of racks and hosts.
//! * `observation`: what is written and served for people who look on.
//! * `live`: what nodes tell of themselves while the job runs, and what follows from it. `metrics`: the
//!   same as Prometheus reads it.
//! * `link_rate`: what a node knows of its port. `probe`: measures what the ports of several hosts
//!   carry, over their links.
//! * `control`: what is said on control connections. `line`: a node's end of its connection.
//!   `patience`: waits that count only the time in which this process ran.
//! * `coordinator`: the other end. `joining`, `ports`, `rounds`, `gather` and `open` decide for
//!   it, without sockets: who is in the job, what ports carry, what nodes post under one name, small
//!   facts, channels.

pub mod config;
pub mod coordinator;

pub(crate) mod book;
pub(crate) mod control;
pub(crate) mod gather;
pub(crate) mod line;
pub(crate) mod link_rate;
pub mod live;
pub(crate) mod metrics;
pub(crate) mod observation;
pub(crate) mod open;
pub(crate) mod patience;
pub(crate) mod places;
pub(crate) mod rendezvous;

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzed;
mod joining;
mod ports;
mod probe;
pub(crate) mod rounds;
