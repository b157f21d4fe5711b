//! How a node's budget is changed while the node runs.

use super::Node;
use crate::Error;
use crate::collectives::Group;
use crate::engine::driver::Driver;
use poseidon_core::{Budget, Rate};
use std::sync::Arc;
use std::time::Instant;

/// A node's budget, and the lanes that have to be told of a change.
pub(super) struct NodeBudget {
    pub(super) budget: Arc<Budget>,
    /// When the lanes' clock began.
    pub(super) epoch: Instant,
    pub(super) lanes: Vec<Arc<Driver>>,
}

impl NodeBudget {
    /// Changes the budget from now on.
    pub(super) fn set(&self, rate: Option<Rate>) {
        self.budget.set_rate(rate, self.epoch.elapsed());
        // A lane that waits for the old budget looks again.
        self.lanes.iter().for_each(|lane| lane.wake());
        match rate {
            Some(rate) => tracing::info!(%rate, "this node has a new bandwidth budget"),
            None => tracing::info!("this node has no bandwidth budget any more"),
        }
    }
}

impl Node {
    pub(crate) fn set_bandwidth_budget(&self, rate: Option<Rate>) -> Result<(), Error> {
        self.lanes.iter().try_for_each(|lane| lane.check_owner())?;
        self.budget.set(rate);
        Ok(())
    }

    pub(crate) fn bandwidth_budget(&self) -> Option<Rate> {
        self.budget.budget.rate()
    }
}

impl Group {
    /// Changes what this process may send to other hosts, over all links that the group shares with
    /// other groups and sessions. `None` is no limit.
    pub fn set_bandwidth_budget(&self, rate: Option<Rate>) -> Result<(), Error> {
        self.linked_node()?.set_bandwidth_budget(rate)
    }

    /// What this process may send to other hosts. `None` is no limit.
    pub fn bandwidth_budget(&self) -> Result<Option<Rate>, Error> {
        Ok(self.linked_node()?.bandwidth_budget())
    }
}
