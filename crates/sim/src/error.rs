use poseidon_core::{LayerId, NodeId};

/// A setup that cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing to train.
    #[error("the model has no layers")]
    NoLayers,
    /// Every layer takes time and sees rows.
    #[error("{layers} layers, but {what} for {got}")]
    Mismatch {
        /// What there is too little or too much of.
        what: &'static str,
        /// Layers of the model.
        layers: usize,
        /// Entries that were given.
        got: usize,
    },
    /// A number that means nothing where it stands.
    #[error("{what} is {got}, expected {expected}")]
    Number {
        /// What it is.
        what: &'static str,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        got: f64,
    },
    /// An override for a layer that is not there.
    #[error("there is no layer {layer}: the model has {layers}")]
    NoSuchLayer {
        /// The layer.
        layer: LayerId,
        /// Layers of the model.
        layers: usize,
    },
    /// A straggler or a failure of a node that is not there.
    #[error("there is no node {node}: the cluster has {nodes}")]
    NoSuchNode {
        /// The node.
        node: NodeId,
        /// Nodes of the cluster.
        nodes: usize,
    },
    /// Nobody calls the roll in a simulation.
    #[error("workers that are dropped cannot be simulated: take 'bsp', 'ssp:S' or 'asp'")]
    Dropping,
    /// Factors of two workers cannot be added up to factors.
    #[error(
        "scheme 'adam' sends every worker's factors to one server, so nothing can be added up inside hosts \
         or racks; give every worker a host of its own, or take another scheme"
    )]
    AdamInHosts,
    /// Servers without a chunk are machines bought in vain.
    #[error(
        "{servers} servers for a model whose number of chunks is {chunks}: some would hold nothing; take \
         fewer servers or smaller chunks"
    )]
    IdleServers {
        /// Servers of the cluster.
        servers: usize,
        /// Chunks of the model.
        chunks: usize,
    },
    /// Frames carry at most 4 GiB.
    #[error(
        "layer '{layer}' would travel in one frame of {bytes} bytes, more than a frame can carry"
    )]
    FrameTooLong {
        /// The layer.
        layer: String,
        /// Bytes of its payload.
        bytes: usize,
    },
}
