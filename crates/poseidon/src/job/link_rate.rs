//! What a node knows and says of its port when the job begins, and how many lanes it may have.

use poseidon_core::{NodeId, Rate};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How it is known what a node's port carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkRate {
    /// Somebody has said so. The node does not share this rate with other nodes of its host.
    Given(Rate),
    /// It is measured when the job begins, if the job has several hosts and no node's rate is
    /// unknown.
    Measured,
    /// It is measured, but the node has a budget and sends no faster than this.
    AtMost(Rate),
    /// It is not known. The port counts as equal to the fastest one.
    #[default]
    Unknown,
}

impl LinkRate {
    /// What a node with this budget can make of its port.
    pub(crate) fn within(self, budget: Option<Rate>) -> Self {
        match (self, budget) {
            (Self::Given(rate), Some(budget)) => Self::Given(rate.min(budget)),
            (Self::AtMost(rate), Some(budget)) => Self::AtMost(rate.min(budget)),
            (Self::Measured, Some(budget)) => Self::AtMost(budget),
            // It counts as equal to others in any case.
            (Self::Unknown, Some(_)) | (_, None) => self,
        }
    }
}

/// A node is ready for a round, and has measured this in the one before.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) node: NodeId,
    /// Rounds that are over. 0: the links are open.
    pub(crate) round: u8,
    /// To which node it has sent in that round, and how fast.
    pub(crate) sent: Option<(NodeId, Rate)>,
    /// How long this node waits for the others, in milliseconds.
    pub(crate) patience_ms: u64,
}

/// The rounds of a measurement. A node that meets a slow partner in one round meets others in the
/// next ones, or the same again.
pub(crate) const ROUNDS: u8 = 4;

impl FromStr for LinkRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Measured),
            "unknown" => Ok(Self::Unknown),
            rate => Ok(Self::Given(
                rate.parse().map_err(|e| format!("expected 'auto', 'unknown' or a rate: {e}"))?,
            )),
        }
    }
}

impl fmt::Display for LinkRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given(rate) => rate.fmt(f),
            Self::Measured => f.write_str("auto"),
            Self::AtMost(rate) => write!(f, "auto, at most {rate}"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// The lanes of a process unless it is told a number, and whether that is only the most there may
/// be, because the speed of the ports decides.
///
/// Half the cores are for the lanes and half for computing, or a process's share of the cores where
/// several share a host; but two where there are two, because a lane can saturate a core. Between
/// hosts the wire needs fewer, and one is enough where the cores are needed otherwise.
pub(crate) fn default_lanes(cores: usize, processes: u16, processes_on_host: u16) -> (u16, bool) {
    let share = cores / usize::from(processes_on_host).max(2);
    let by_rate = processes_on_host < processes;
    let least = if by_rate { 1 } else { cores.min(2) };
    (share.clamp(least, 8) as u16, by_rate)
}

/// The most lanes between hosts whose ports nothing is known of: enough for 25GbE (ADR 0011).
pub(crate) const LANES_IN_DOUBT: u16 = 2;

/// The cores this process may keep busy: those its affinity allows, and on Linux no more than its
/// control group's quota, of either version and of every group above it. The standard library reads
/// both. It rounds a quota down, to at least one: what we want, because lanes that kept a core and
/// a half busy with two threads would have the whole process stopped for the rest of each period.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_follow_cores_within_a_host_and_the_ports_between_hosts() {
        let default = [
            (1, 1, 1),
            (2, 4, 4),
            (16, 1, 1),
            (16, 4, 4),
            (64, 1, 1),
            (2, 8, 1),
            (16, 8, 1),
            (64, 8, 4),
        ];
        let lanes: Vec<_> =
            default.iter().map(|&(cores, all, here)| default_lanes(cores, all, here)).collect();
        let (exactly, most) = (|lanes| (lanes, false), |lanes| (lanes, true));
        let expected = [1, 2, 8, 4, 8].map(exactly).into_iter().chain([1, 8, 8].map(most));
        assert_eq!(lanes, expected.collect::<Vec<_>>());
    }

    /// What the standard library makes of a container's quota, in cores: half a core, one, one and
    /// a half (all 1), two and a half (2), three (3).
    #[test]
    fn small_quotas_give_few_lanes() {
        let lanes =
            |cores| [(1, 1), (2, 2), (8, 1)].map(|(all, here)| default_lanes(cores, all, here).0);
        assert_eq!(lanes(1), [1, 1, 1]);
        assert_eq!(lanes(2), [2, 2, 1]);
        assert_eq!(lanes(3), [2, 2, 1]);
    }

    #[test]
    fn a_rate_is_given_measured_or_unknown() {
        assert_eq!("auto".parse(), Ok(LinkRate::Measured));
        assert_eq!("unknown".parse(), Ok(LinkRate::Unknown));
        let given: LinkRate = "100mbit".parse().unwrap();
        assert_eq!(given.to_string(), "100 Mbit/s");
        assert_eq!(given.to_string().parse(), Ok(given));
        let (wide, narrow) = (Rate::new(1_000_000_000), Rate::new(1_000_000).unwrap());
        assert_eq!(given.within(wide), given);
        assert_eq!(given.within(Some(narrow)), LinkRate::Given(narrow));
        assert_eq!(LinkRate::Measured.within(Some(narrow)), LinkRate::AtMost(narrow));
        assert_eq!(LinkRate::Measured.within(None), LinkRate::Measured);
        assert_eq!(LinkRate::Unknown.within(wide), LinkRate::Unknown);
        let error = "fast".parse::<LinkRate>().unwrap_err();
        assert!(error.contains("'auto'") && error.contains("10gbit"), "{error}");
    }
}
