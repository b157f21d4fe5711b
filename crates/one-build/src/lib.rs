//! Nothing but dependencies.
//!
//! Cargo builds a crate again for every set of features. The tests ask for other features of crates
//! below than the command does, and the Python module for others still: each had a build of its own
//! of nearly everything. With the feature `one-build` the command and the module ask for what the
//! tests ask for, and one build serves all. What users install is built without it.
