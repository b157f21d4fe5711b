//! What is trained: named layers in forward order.

use crate::Optimizer;
use crate::encoding::{Encoding, Encodings};
use serde::{Deserialize, Serialize};

/// A named set of parameters that is synchronised as one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// Unique within the job; what errors and plans call it.
    pub name: String,
    /// What the layer computes, which decides how it can be synchronised.
    pub kind: LayerKind,
    /// Number of parameters.
    pub len: usize,
    /// Most rows of factors a worker has of it in one step, if that is not the job's batch: a layer may
    /// see several rows a sample, or one in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<usize>,
    /// The layer's own update rule, if it is not the job's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<Optimizer>,
    /// How contributions travel: gradients, or factors.
    #[serde(default, skip_serializing_if = "is_f32")]
    pub up: Encoding,
    /// How results and initial values travel. If the shards keep parameters, they keep them in
    /// `f32`, and workers get them rounded.
    #[serde(default, skip_serializing_if = "is_f32")]
    pub down: Encoding,
}

fn is_f32(encoding: &Encoding) -> bool {
    *encoding == Encoding::F32
}

impl Layer {
    /// A layer of `len` parameters about whose structure nothing is known.
    pub fn new(name: impl Into<String>, len: usize) -> Self {
        let Encodings { up, down } = Encodings::default();
        let (kind, rows, optimizer) = (LayerKind::Other, None, None);
        Self { name: name.into(), kind, len, rows, optimizer, up, down }
    }

    /// The same layer, whose numbers travel like this.
    pub fn encoded(self, Encodings { up, down }: Encodings) -> Self {
        Self { up, down, ..self }
    }

    /// How its numbers travel.
    pub fn encodings(&self) -> Encodings {
        Encodings { up: self.up, down: self.down }
    }

    /// Size in bytes of the layer's parameters as a result.
    pub fn bytes(&self) -> usize {
        self.down.bytes(self.len)
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
