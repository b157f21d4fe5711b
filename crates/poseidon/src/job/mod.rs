//! How processes become a job: which node a process is, where the other nodes are, and what all of
//! them know.
//!
//! * `config`: raw arguments and environment become a `Config`. `rendezvous`: joins the job and opens
//!   its links. `book`: questions to the information book.
//! * `control`: what is said on control connections. `line`: a node's end of its connection.
//! * `coordinator`: the other end. `joining`, `rounds`, `gather` and `open` decide for it, without
//!   sockets: who is in the job, what nodes post under one name, small facts, channels.

pub mod config;
pub mod coordinator;

pub(crate) mod book;
pub(crate) mod control;
pub(crate) mod gather;
pub(crate) mod line;
pub(crate) mod open;
pub(crate) mod rendezvous;

mod joining;
mod rounds;
