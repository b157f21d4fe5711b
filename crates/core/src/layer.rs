//! What is trained: named layers in forward order.

use serde::{Deserialize, Serialize};

/// A named set of parameters that is synchronised as one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Unique within the job; what errors and plans call it.
    pub name: String,
    /// What the layer computes, which decides how it can be synchronised.
    pub kind: LayerKind,
    /// Number of `f32` parameters.
    pub len: usize,
    /// Most rows of factors a worker has of it in one step, if that is not the job's batch: a layer may
    /// see several rows a sample, or one in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<usize>,
}

impl Layer {
    /// A layer of `len` parameters about whose structure nothing is known.
    pub fn new(name: impl Into<String>, len: usize) -> Self {
        Self { name: name.into(), kind: LayerKind::Other, len, rows: None }
    }

    /// Size of the layer's parameters in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<f32>()
    }
}

/// The structure of a layer's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum LayerKind {
    /// Fully connected, `m` outputs by `n` inputs: its gradient is a sum of outer products.
    Fc {
        /// Outputs.
        m: usize,
        /// Inputs.
        n: usize,
    },
    /// Convolution: many uses of few parameters.
    Conv,
    /// Lookup table: a step touches few rows.
    Embedding,
    /// Anything else.
    Other,
}
