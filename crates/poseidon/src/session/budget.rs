//! What this node may send, changed by its training program.

use crate::{Error, Session};
use poseidon_core::Rate;

impl Session {
    /// Changes what this node may send to other hosts, from now on. All sessions and groups on the
    /// same links share the budget. `None` is no limit. Other nodes keep theirs.
    pub fn set_bandwidth_budget(&self, rate: Option<Rate>) -> Result<(), Error> {
        self.node.set_bandwidth_budget(rate)
    }

    /// What this node may send to other hosts. `None` is no limit.
    pub fn bandwidth_budget(&self) -> Option<Rate> {
        self.node.bandwidth_budget()
    }
}
