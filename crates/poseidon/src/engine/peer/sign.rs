//! When a peer that stopped in the middle of a frame is told that this node is there.

use super::{Peer, State};
use std::time::Duration;

/// How long a peer may be silent in the middle of a frame before it is given a sign of life. What was lost
/// is sent again by then, where systems can be told to (ADR 0017).
const SIGN: Duration = Duration::from_millis(20);

impl Peer {
    /// When the next sign is due. The peer may wait for room that this end has long offered:
    /// acknowledgements that overtake each other can leave it with an old one, which says that there is
    /// none. TCP asks after 200 ms, then ever more rarely. Whatever this end sends says it anew.
    ///
    /// `None` if there is no need. Every further time it is after twice as long.
    pub(in crate::engine) fn sign_due(&self) -> Option<Duration> {
        let is_between = matches!(self.state, State::Header | State::Parked(_));
        if is_between || self.gone.is_some() || self.has_unsent() || !self.is_budgeted() {
            return None;
        }
        Some(self.heard.max(self.spoke) + SIGN.max(self.spoke.saturating_sub(self.heard)))
    }
}
