//! The simulator: core's own `Syncer` and `Store` in virtual time on a virtual network.
//!
//! Empty for now. It may depend on `poseidon-core` and on nothing else of this workspace.
