//! How much of the synchronisation may run beside computing.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How much of the synchronisation may run beside computing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// None: all layers are sent after the backward pass and awaited before the next step.
    None,
    /// The backward pass: a layer is sent when its backward ends. All layers are awaited before the
    /// next step.
    Backward,
    /// The backward pass and the next forward pass: a layer is sent when its backward ends, and
    /// awaited when its next forward begins.
    #[default]
    Full,
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Backward => "backward",
            Self::Full => "full",
        })
    }
}

impl FromStr for Overlap {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "none" => Ok(Self::None),
            "backward" => Ok(Self::Backward),
            "full" => Ok(Self::Full),
            _ => Err(format!("expected 'none', 'backward' or 'full', got '{s}'")),
        }
    }
}
