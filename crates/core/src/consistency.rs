//! How far apart the clocks of workers may be (Poseidon 2015 §3, SSP).
//!
//! A worker contributes to clock t, gets an answer, and goes on to clock t + 1. What differs is when
//! the answer comes. With [`Bsp`](Consistency::Bsp) it comes when all workers have contributed to
//! t. With [`Ssp(s)`](Consistency::Ssp) it comes when all have contributed to t - s. So whoever
//! computes at clock t has seen all contributions up to clock t - s - 1, and no worker is more than s
//! clocks ahead of another. With [`Asp`](Consistency::Asp) it comes at once.
//!
//! With [`DropSlowest(b)`](Consistency::DropSlowest) workers are at one clock, but a clock does not wait
//! for its b slowest workers: [`roll`](crate::roll) has that.
//!
//! Workers can ask for an answer that waits for everybody, with the mark
//! [`TOGETHER`](crate::wire::Marks::TOGETHER): before a checkpoint, before parameters are compared
//! or tested, and at the end.

use crate::Clock;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How far apart the clocks of workers may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Consistency {
    /// Bulk synchronous: all workers take every step together.
    #[default]
    Bsp,
    /// Stale synchronous: nobody is more than so many clocks ahead of anybody. At most
    /// [`MOST`](Consistency::MOST).
    Ssp(u16),
    /// Asynchronous: nobody waits for anybody, as long as a clock that is not complete needs no
    /// memory of its own. Otherwise as `Ssp` with [`MOST`](Consistency::MOST).
    Asp,
    /// Bulk synchronous, but every clock goes on without so many workers at most, if these are late.
    DropSlowest(u16),
}

impl Consistency {
    /// The largest staleness. A rule with state needs memory for every clock that is not complete,
    /// and a layer by factors twice as much.
    pub const MOST: u16 = 16;

    /// How many clocks a worker may be ahead of the slowest one, where every clock that is not complete
    /// takes memory.
    pub fn lead(self) -> u64 {
        match self {
            Self::Bsp | Self::DropSlowest(_) => 0,
            Self::Ssp(staleness) => staleness.into(),
            Self::Asp => Self::MOST.into(),
        }
    }

    /// As [`lead`](Self::lead), where a clock takes no memory.
    pub fn lead_without_memory(self) -> u64 {
        if self == Self::Asp { u64::MAX } else { self.lead() }
    }

    /// Whether all workers take every step together.
    pub fn is_bsp(self) -> bool {
        matches!(self, Self::Bsp | Self::Ssp(0))
    }

    /// How many workers a clock may go on without.
    pub fn drops(self) -> u16 {
        if let Self::DropSlowest(workers) = self { workers } else { 0 }
    }

    /// The last clock whose contributions must all be in before a worker that has contributed to `own`
    /// is answered.
    pub fn needs(own: Clock, lead: u64) -> Clock {
        Clock(own.0.saturating_sub(lead))
    }
}

impl fmt::Display for Consistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bsp => f.write_str("bsp"),
            Self::Ssp(staleness) => write!(f, "ssp:{staleness}"),
            Self::Asp => f.write_str("asp"),
            Self::DropSlowest(workers) => write!(f, "drop-slowest:{workers}"),
        }
    }
}

impl FromStr for Consistency {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let most = Self::MOST;
        let staleness = |text: &str| text.parse().ok().filter(|staleness| *staleness <= most);
        let dropped = |text: &str| text.parse().ok().filter(|workers| *workers > 0);
        if let Some(workers) = s.strip_prefix("drop-slowest:").and_then(dropped) {
            return Ok(Self::DropSlowest(workers));
        }
        match (s, s.strip_prefix("ssp:").and_then(staleness)) {
            ("bsp", _) => Ok(Self::Bsp),
            ("asp", _) => Ok(Self::Asp),
            (_, Some(staleness)) => Ok(Self::Ssp(staleness)),
            _ => Err(format!(
                "expected 'bsp', 'asp', 'ssp:S' with S from 0 to {most}, or 'drop-slowest:B' with B of 1 \
                 or more, got '{s}'"
            )),
        }
    }
}

impl TryFrom<String> for Consistency {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Consistency> for String {
    fn from(consistency: Consistency) -> Self {
        consistency.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_form_reads_back_and_bounds_the_staleness() {
        let dropping = Consistency::DropSlowest(3);
        for consistency in [Consistency::Bsp, Consistency::Ssp(0), Consistency::Ssp(16), dropping] {
            assert_eq!(consistency.to_string().parse(), Ok(consistency));
        }
        assert_eq!("asp".parse(), Ok(Consistency::Asp));
        for wrong in ["", "ssp", "ssp:", "ssp:17", "ssp:-1", "SSP:1", "drop-slowest:0"] {
            assert!(wrong.parse::<Consistency>().unwrap_err().contains("ssp:S"), "{wrong}");
        }
    }
}
