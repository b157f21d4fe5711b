//! Checkpoints of a training job: their format, and the places they are kept in.
//!
//! A checkpoint is the state of a job at one step. Every node writes its part with [`write_part`],
//! in parallel. When all parts are written, one node writes the manifest with [`commit`]. A
//! checkpoint without a manifest does not exist. Numbers are found by layer and element range, so a
//! job with another number of nodes can read them. The format is in `docs/checkpoints.md`.
//!
//! | module | what it does |
//! | --- | --- |
//! | `storage` | [`Storage`]: where objects are kept; a [`Directory`], or a store that speaks S3 |
//! | `place` | [`open`] finds the storage that a text names; names of objects |
//! | `piece` | [`Piece`]: numbers of one layer, and their name in a file |
//! | `manifest` | [`Manifest`]: what a checkpoint consists of |
//! | `part` | one node's file, written and read |
//! | `checkpoint` | [`Checkpoint`]: opens, reads, verifies and exports |
//! | `keep` | commits, lists and deletes checkpoints |
//! | `error` | what can go wrong, in words |
//!
//! ```
//! use poseidon_checkpoint::{Checkpoint, LayerFacts, Manifest, Piece, What, commit, open, write_part};
//! use std::time::SystemTime;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let place = folder.path().to_str().unwrap();
//! let storage = open(place)?;
//! let values = vec![1.0_f32, 2.0, 3.0];
//! let piece = Piece { layer: "fc".into(), what: What::Parameters, start: 0, values: &values[..] };
//! let part = write_part(&*storage, 200, 0, &[piece])?;
//! let layer = LayerFacts {
//!     name: "fc".into(),
//!     len: 3,
//!     rule: "sgd".into(),
//!     steps: 200,
//!     vectors: 0,
//!     tensors: Vec::new(),
//!     private: false,
//! };
//! commit(
//!     &*storage,
//!     &Manifest {
//!         step: 200,
//!         created: SystemTime::now(),
//!         poseidon: "0.1.0".into(),
//!         workers: 1,
//!         layers: vec![layer],
//!         parts: vec![part],
//!         program: serde_json::json!({ "seed": 1 }),
//!     },
//! )?;
//!
//! let latest = Checkpoint::latest(&storage)?.checkpoint.unwrap();
//! assert_eq!(latest.read("fc", &What::Parameters, 1..3)?, [2.0, 3.0]);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

// Numbers are written as they lie in memory, and files are little-endian.
#[cfg(target_endian = "big")]
compile_error!("checkpoints are written on little-endian machines only");

mod checkpoint;
mod error;
mod keep;
mod manifest;
mod part;
mod piece;
mod place;
mod storage;

pub use checkpoint::{Checkpoint, ExpectedLayer, Latest};
pub use error::{Difference, Error, Flaw, Result};
pub use keep::{Keep, State, Summary, commit, discard, list, prune};
pub use manifest::{LayerFacts, Manifest, PartFacts, TensorFacts};
pub use part::write_part;
pub use piece::{Numbers, Piece, Typed, What};
pub use place::{has_manifest, open};
pub use safetensors::Dtype;
#[cfg(feature = "s3")]
pub use storage::S3;
pub use storage::{Directory, Entry, Storage, StorageError};
