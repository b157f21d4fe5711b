//! Collective operations among the ranks of a group: what `torch.distributed` and MPI call them.
//!
//! A [`Group`] has a channel on every lane of its node. [`Group::begin`] starts an operation and
//! returns at once. [`Work::wait`] waits for its end, and does the work meanwhile if no other thread
//! does.
//!
//! * `request`: what may be asked of a group. `tensor`: memory lent for an operation. `work`: how
//!   an operation ended.
//! * `members`: which ranks send to which. `flow`: what an operation sends, awaits and passes on.
//! * `device`: operations on tensors of a device. `start_order`: in which order operations begin.
//! * `operation`: how far an operation is. `channel`: which operation a frame belongs to. `shared`:
//!   what a group's channels have in common, and which lanes an operation goes over.

mod channel;
mod device;
mod flow;
mod members;
mod operation;
mod request;
mod shared;
mod start_order;
mod tensor;
mod work;

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzed;
#[cfg(test)]
mod tests;

pub use device::DeviceTensor;
pub(crate) use members::Members;
pub use request::Request;
pub use tensor::Tensor;
pub use work::Work;

use crate::Error;
use crate::engine::driver::Driver;
use crate::trace::{GroupTrace, Recorder};
use channel::GroupChannel;
use poseidon_core::{ChannelId, NodeId};
use shared::{HOME, Shared};
use start_order::{Start, StartOrder};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use work::Completion;

/// The ranks that do collective operations together, as one of these ranks sees the group.
pub struct Group {
    rank: u16,
    /// By rank: the node that has it.
    ranks: Vec<NodeId>,
    shared: Arc<Shared>,
    /// Drives the home lane.
    driver: Arc<Driver>,
    start_order: Arc<StartOrder>,
    /// Where operations are noted, and how many were begun.
    trace: Arc<GroupTrace>,
    /// The owner of the links. The group holds it, so that the links stay open while the group
    /// lives.
    links: Option<Arc<dyn Any + Send + Sync>>,
}

/// How an operation is to be seen through.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// How long the operation may take. After that the group fails, and every rank is told who was
    /// missing.
    pub timeout: Duration,
    /// Whether the thread that begins the operation waits for it next. Then that thread does the
    /// work, and no other thread is woken.
    pub waits: bool,
}

impl Group {
    /// Opens a group on the links that `drivers` drive, those of its home lane first, and that live as
    /// long as `links`. What it does is noted by `recorder`.
    pub(crate) fn open(
        id: ChannelId,
        members: Members,
        drivers: Vec<Arc<Driver>>,
        recorder: Arc<Recorder>,
        links: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        let trace = Arc::new(GroupTrace::new(recorder, id.index() as u32));
        let (rank, ranks) = (members.rank, members.nodes.clone());
        let shared = Arc::new(Shared::new(ranks.len() as u16, drivers.len()));
        shared.driven_by(&drivers);
        for (lane, driver) in drivers.iter().enumerate() {
            let channel = GroupChannel::new(id, lane, members.clone(), shared.clone());
            driver.attach(Box::new(channel));
        }
        let driver = drivers[HOME].clone();
        let start_order = Arc::new(StartOrder::new(shared.clone(), drivers));
        Self { rank, ranks, shared, driver, start_order, trace, links: Some(links) }
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> u16 {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> u16 {
        self.ranks.len() as u16
    }

    /// By rank: the node that has it.
    pub(crate) fn nodes(&self) -> &[NodeId] {
        &self.ranks
    }

    /// What the links belong to.
    pub(crate) fn links(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.links.clone()
    }

    /// Begins an operation. `keep_alive` is what owns the operation's tensors, and is held until
    /// the operation is done. Returns at once, also while tensors of an earlier operation are
    /// leaving a device: the operation begins after that one.
    pub fn begin(
        &self,
        request: Request,
        terms: Terms,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Result<Work, Error> {
        self.driver.check_owner()?;
        request.check(self.rank, self.size())?;
        let noted = self.trace.begun(request.number().into());
        let completion = Arc::new(Completion::new(keep_alive).noted(noted));
        let start = Start { request, timeout: terms.timeout, completion: completion.clone() };
        let queued = self.start_order.begin(start, terms.waits);
        Ok(Work { completion, driver: self.driver.clone(), arrival: None, queued })
    }

    /// Waits until an operation that is [followed](Work::follow) is done and returns its name, once. None when the
    /// group has stopped. Any number of threads may wait here: each name goes to one of them.
    pub fn completed(&self) -> Option<u64> {
        self.shared.completed()
    }

    /// Leaves the group, without waiting. Operations that are under way fail, on every rank. A
    /// process that was forked from the one that made the group cannot leave the group: in such a
    /// process `leave` and [`abort`](Self::abort) do nothing.
    pub fn leave(&self) {
        if self.driver.check_owner().is_ok() {
            self.shared.leave();
            self.start_order.drivers.iter().for_each(|driver| driver.nudge(false));
        }
    }

    /// Stops the group and tells every rank why.
    pub fn abort(&self, reason: &str) {
        if self.driver.check_owner().is_ok() {
            self.shared.abort(reason.into());
            self.driver.nudge(false);
        }
    }

    /// Waits until the others can hear that this rank has left, and no longer than `patience`.
    pub fn wait_left(&self, patience: Duration) {
        if self.driver.check_owner().is_ok() {
            self.shared.wait_closed(patience);
        }
    }
}

/// What a kind of operations is called, by the number that frames have of it.
pub(crate) fn operation_name(number: u32) -> &'static str {
    request::name(u8::try_from(number).unwrap_or(0))
}

impl Drop for Group {
    fn drop(&mut self) {
        self.leave();
        if self.driver.check_owner().is_err() {
            // The lane's thread is in the process that made the group, and the sockets are that
            // process's too.
            std::mem::forget(self.links.take());
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group(rank {} of {})", self.rank, self.size())
    }
}
