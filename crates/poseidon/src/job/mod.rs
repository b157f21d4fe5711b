//! How processes become a job: who am I, where is everybody, what do all of them know.

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
