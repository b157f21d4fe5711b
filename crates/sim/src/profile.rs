//! How long a device takes to compute a layer.

use serde::{Deserialize, Serialize};

/// Seconds that one layer takes for one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerTime {
    /// Forward.
    pub forward: f64,
    /// Backward, the layer's own gradient included.
    pub backward: f64,
}
