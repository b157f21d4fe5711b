//! The built-in layer engine: a few layers with explicit per-layer backward, and data sets.
//!
//! Empty for now. It may depend on `poseidon` and `poseidon-core`.
