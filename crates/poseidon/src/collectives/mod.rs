//! Collective operations among the ranks of a group: what `torch.distributed` and MPI call them.
//!
//! A [`Group`] has its own links, made as a session's are. [`Group::begin`] starts an operation and returns
//! at once; [`Work::wait`] sees it through.
//!
//! * `request`: what may be asked. `tensor`: memory lent for it. `work`: how it stands.
//! * `course`: what an operation sends and awaits. `desk`: which operation a frame belongs to.
//! * `peer`: one link. `engine`: all of them. `wheel`: who drives it.

mod course;
mod desk;
mod engine;
mod peer;
mod request;
mod tensor;
mod wheel;
mod work;

pub use request::Request;
pub use tensor::Tensor;
pub use work::Work;

use crate::job::book::Job;
use crate::job::config::{Config, Member};
use crate::job::rendezvous::{Joined, join};
use crate::{ChunkSize, Error, Optimizer, Placement, Policy};
use engine::Engine;
use poseidon_link::Serving;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wheel::{Command, Wheel};
use work::Progress;

/// The ranks that do collective operations together, as one of them sees it.
pub struct Group {
    rank: u16,
    size: u16,
    wheel: Arc<Wheel>,
    /// Turns strangers away for as long as the group lives.
    serving: Option<Serving>,
}

/// How an operation is to be seen through.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// How long it may take. After that the group fails, and every rank is told who was missing.
    pub timeout: Duration,
    /// Whether the thread that begins it waits for it next. Then that thread does the work, and no
    /// other is woken for it.
    pub waits: bool,
}

impl Group {
    /// Joins the group that `config` describes: workers only, all of which call this, with one lane. `names` is what
    /// the ranks are called in errors, such as `rank 3`; it has one for each.
    pub fn start(config: &Config, names: Vec<String>) -> Result<Self, Error> {
        let Member::Worker(rank) = config.member else {
            return Err(Error::Config("a group is among workers".into()));
        };
        let size = config.workers;
        if names.len() != usize::from(size) {
            let got = names.len();
            return Err(Error::Config(format!("{got} names for {size} ranks")));
        }
        let job = Job {
            layers: Vec::new(),
            optimizer: Optimizer::default(),
            chunk: ChunkSize::default(),
            placement: Placement::Balanced,
            deterministic: false,
            scheme: Policy::Auto,
            batch: None,
        };
        let config = Config { lanes: 1, ..config.clone() };
        let Joined { book, mut links, serving, .. } = join(&config, Some(job))?;
        let here = &book.nodes[usize::from(rank)].host;
        let neighbours = book.nodes.iter().filter(|node| node.host == *here).count();
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let epoch = Instant::now();
        let links = links.pop().unwrap_or_default();
        let engine = Engine::new(rank, names, links, config.silence, epoch.elapsed());
        let wheel = Arc::new(Wheel::new(engine, epoch, neighbours >= cores)?);
        let driver = wheel.clone();
        let thread = std::thread::Builder::new().name("poseidon-group".into());
        thread.spawn(move || driver.run()).map_err(Error::io("starting a group's thread"))?;
        Ok(Self { rank, size, wheel, serving: Some(serving) })
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> u16 {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Begins an operation. `keep_alive` is what owns its tensors, and is held until it is done.
    pub fn begin(
        &self,
        request: Request,
        terms: Terms,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Result<Work, Error> {
        self.wheel.check_owner()?;
        request.check(self.rank, self.size)?;
        let progress = Arc::new(Progress::new(keep_alive));
        let work = Work { progress: progress.clone(), wheel: self.wheel.clone() };
        let command = Command::Begin { request, timeout: terms.timeout, progress };
        self.wheel.command(command, terms.waits);
        Ok(work)
    }

    /// Waits until an operation that is [followed](Work::follow) is done and returns its name, once. None when the
    /// group has stopped. Any number of threads may wait here: each name goes to one of them.
    pub fn completed(&self) -> Option<u64> {
        self.wheel.completed()
    }

    /// Leaves the group, without waiting. Operations that are under way fail, on every rank. A process that was forked
    /// from the one that made the group cannot leave it: there, this and [`abort`](Self::abort) do nothing.
    pub fn leave(&self) {
        if self.wheel.check_owner().is_err() {
            return;
        }
        self.wheel.command(Command::Leave, false);
        self.wheel.kick();
    }

    /// Stops the group and tells every rank why.
    pub fn abort(&self, reason: &str) {
        if self.wheel.check_owner().is_err() {
            return;
        }
        self.wheel.command(Command::Abort(reason.into()), false);
        self.wheel.kick();
    }

    /// Waits until a group that was left has no connection open, and no longer than `patience`.
    pub fn wait_left(&self, patience: Duration) {
        if self.wheel.check_owner().is_ok() {
            self.wheel.wait_stopped(patience);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.leave();
        if self.wheel.check_owner().is_err() {
            // Its thread is in the process that made it, and its sockets are that process's too.
            std::mem::forget(self.serving.take());
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group(rank {} of {})", self.rank, self.size)
    }
}
