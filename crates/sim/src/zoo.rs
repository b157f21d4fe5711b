//! Models as data: what a layer holds and what it costs to compute.

use poseidon_core::{Layer, LayerKind};
use serde::{Deserialize, Serialize};

/// A model, layer by layer in forward order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// What people call it.
    pub name: String,
    /// In forward order.
    pub layers: Vec<ModelLayer>,
}

/// One layer of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelLayer {
    /// Unique within the model.
    pub name: String,
    /// What it computes, which decides how it can be synchronised.
    pub kind: LayerKind,
    /// Number of `f32` parameters, biases included. May be 0.
    pub parameters: usize,
    /// Rows per sample that a fully connected layer sees: 1 for images, the sequence length for
    /// transformers.
    pub rows: usize,
    /// Floating-point operations of the forward pass, per sample.
    pub forward_flops: f64,
    /// Floating-point operations of the backward pass, per sample.
    pub backward_flops: f64,
}

impl Model {
    /// Number of parameters in all.
    pub fn parameters(&self) -> usize {
        self.layers.iter().map(|layer| layer.parameters).sum()
    }
}

impl From<&ModelLayer> for Layer {
    fn from(layer: &ModelLayer) -> Self {
        Layer { kind: layer.kind, ..Layer::new(layer.name.clone(), layer.parameters) }
    }
}
