//! What came of a simulation.

use crate::profile::CopySpeed;
use poseidon_core::{ChunkKey, Clock, NodeId};
use serde::Serialize;

/// What came of a simulation. Times are in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// A step in steady state: the median over the steps after the first.
    pub iteration_seconds: f64,
    /// What one worker alone computes in a step.
    pub compute_seconds: f64,
    /// The share of their time in which workers do not compute: they wait for the network, for copies,
    /// or for a gradient that is rebuilt beside them, or rebuild one themselves.
    pub stall_fraction: f64,
    /// Steps per second of all workers together: of each by its mean step, which is longer than the
    /// median where few steps are very long. Where workers may be apart, one that is ahead at the
    /// end counts as if it could go on like that, so such jobs need many steps.
    pub steps_per_second: f64,
    /// Samples per second over those of one worker alone, by the same steps.
    pub speedup: f64,
    /// By node: bytes to nodes of any host in one step, headers included.
    pub bytes_sent: Vec<u64>,
    /// By node: the same the other way.
    pub bytes_received: Vec<u64>,
    /// By host: what passed its port in one step.
    pub ports: Vec<Carried>,
    /// By node: what it exchanged with others of its host in one step, through memory. Empty if
    /// every node has a host of its own.
    pub memory: Vec<Carried>,
    /// By rack: what passed its link to the others in one step. Empty if the network has no racks.
    pub racks: Vec<Carried>,
    /// By worker: what was copied between its device and its host in one step. Empty if the job has
    /// no copies.
    pub copies: Vec<Copied>,
    /// What the switch's ports dropped, in all steps.
    pub drops: Drops,
    /// By layer: what happened to it on worker 0 in the last step.
    pub timeline: Vec<LayerTimeline>,
    /// By worker and step: when it computed.
    pub steps: Vec<Vec<StepTimes>>,
    /// What a faster cluster would need first. Of a job that stopped it says nothing.
    pub bottleneck: Bottleneck,
    /// Why it is that, for people.
    pub reason: String,
    /// Why the job stopped before its last step, if it did. Then the figures above are of the steps
    /// before, or 0.
    pub halt: Option<Halt>,
    /// Events that were simulated: what a simulation costs.
    pub events: u64,
}

/// Bytes that passed a link, headers included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Carried {
    /// Out of the host or the rack.
    pub sent: u64,
    /// Into it.
    pub received: u64,
}

impl Carried {
    /// The bytes of the direction that carries more.
    pub fn most(&self) -> u64 {
        self.sent.max(self.received)
    }
}

/// Bytes that were copied between a device and its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Copied {
    /// Gradients, or the worker's own rows of factors.
    pub to_host: u64,
    /// Results, or all workers' rows of factors.
    pub to_device: u64,
}

impl Copied {
    /// How long the copy engine is at work that is at work for longer.
    pub fn seconds(&self, speed: CopySpeed) -> f64 {
        (self.to_host as f64 / speed.to_host).max(self.to_device as f64 / speed.to_device)
    }
}

/// What was dropped because a port's queue was full. All of it was sent again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Drops {
    /// Segments of at most 16 KiB.
    pub segments: u64,
    /// Their bytes. They are among those sent, but not among those received.
    pub bytes: u64,
    /// How often a connection waited for its retransmission timer.
    pub timeouts: u64,
}

/// One layer on one worker in one step, in seconds since the step began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerTimeline {
    /// Its backward ended: the gradient is there.
    pub ready: f64,
    /// The last byte of it left.
    pub sent: f64,
    /// All that others send of it has come: the result, or their factors. If the worker has a device,
    /// it is copied there. May be in the next step's time, as what follows.
    pub landed: f64,
    /// How its gradient was rebuilt from factors, if it was.
    pub rebuilt: Option<Rebuilt>,
    /// The result is complete on the worker.
    pub applied: f64,
    /// How long the worker waited for it, rebuilding not counted.
    pub awaited: f64,
}

/// When a worker computed a step, in seconds since the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepTimes {
    /// The first layer's forward pass began: the parameters that it needs were there.
    pub started: f64,
    /// The last gradient was there, the first layer's. `None` if the job stopped before.
    pub computed: Option<f64>,
}

/// A gradient that was rebuilt from factors, until the result was complete.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rebuilt {
    /// When that began.
    pub start: f64,
    /// Whether it was beside the worker's computing, and not the worker that did it.
    pub beside: bool,
}

/// What keeps a step from being shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "what", content = "node")]
pub enum Bottleneck {
    /// The workers compute nearly all the time.
    Compute,
    /// What the host of this node sends, which is its first.
    Egress(NodeId),
    /// What the host of this node receives, which is its first.
    Ingress(NodeId),
    /// What passes the link between this rack and the others.
    Rack(u16),
    /// What this node exchanges with others of its host.
    Memory(NodeId),
    /// What is copied between this worker's device and its host.
    Copies(NodeId),
    /// Nobody's link is busy: frames are waited for one after the other.
    Latency,
    /// Gradients are rebuilt from factors, longer than there is computing beside it.
    Rebuild,
}

/// A job that cannot go on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Halt {
    /// When nothing moved any more, in seconds since the beginning.
    pub at: f64,
    /// The nodes that had fallen silent.
    pub failed: Vec<NodeId>,
    /// Who waits for whom, a few of them.
    pub waits: Vec<Wait>,
}

/// Somebody who waits in vain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Wait {
    /// Who waits.
    pub node: NodeId,
    /// For whom.
    pub awaits: NodeId,
    /// The layer's name.
    pub layer: String,
    /// The chunk of it.
    #[serde(skip)]
    pub chunk: ChunkKey,
    /// The step.
    pub clock: Clock,
}
