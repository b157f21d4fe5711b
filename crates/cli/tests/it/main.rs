//! Tests of the real command. They are one program: as programs of their own, all would be linked
//! with the same crates. `doctor` stands beside it: it measures, and no other test runs at the same
//! time.

mod bench;
mod budget;
mod checkpoint;
mod containers;
mod documents;
mod documents_fixture;
mod figures;
mod hosts;
mod hosts_fixture;
mod lab;
mod launch;
mod manual;
mod plan;
mod ports;
mod query;
#[path = "../../src/documented_commands/reader.rs"]
mod reader;
mod report;
mod resume;
mod simulate;
mod slurm;
mod sshd;
mod staleness;
mod stdout;
mod stragglers;
mod train;
mod train_bad_input;
mod train_fit;
mod trial;
mod watching;
