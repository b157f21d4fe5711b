//! What an update rule remembers of a layer, outside its shards.

/// What an update rule remembers of a layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RuleState {
    /// Steps taken so far.
    pub steps: u64,
    /// The rule's vectors, each as long as the layer: momentum; or the means of the gradient and of
    /// its square. As many as [`Optimizer::state_vectors`](crate::Optimizer::state_vectors) says.
    pub vectors: Vec<Vec<f32>>,
    /// The parameters as the shards have them, if workers get them rounded: those of a layer whose
    /// results do not travel as `f32`. Empty otherwise.
    pub masters: Vec<f32>,
}
