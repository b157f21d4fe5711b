use poseidon_core::LaneId;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes and frames a node has exchanged with other nodes, headers included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes handed to links.
    pub bytes_sent: u64,
    /// Bytes taken from links.
    pub bytes_received: u64,
    /// Frames handed to links.
    pub frames_sent: u64,
    /// Frames taken from links.
    pub frames_received: u64,
}

impl Traffic {
    /// The sum of both.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            bytes_sent: self.bytes_sent + other.bytes_sent,
            bytes_received: self.bytes_received + other.bytes_received,
            frames_sent: self.frames_sent + other.frames_sent,
            frames_received: self.frames_received + other.frames_received,
        }
    }
}

/// What a channel has sent and received on all lanes. Read by anybody.
#[derive(Debug)]
pub(crate) struct Counters(Box<[LaneCounters]>);

/// The same on one lane. Written by the thread that drives the lane's engine, and by no other one, so
/// nothing is added atomically. No two lanes write to one line of the cache.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct LaneCounters {
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
    frames_sent: AtomicU64,
    frames_received: AtomicU64,
    /// Bytes sent, by layer: all frames that are about the layer, headers included.
    layers: Box<[Line]>,
}

/// Sixteen layers.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line([AtomicU64; 16]);

impl Counters {
    pub(crate) fn new(lanes: usize, layers: usize) -> Self {
        let lines = || (0..layers.div_ceil(16)).map(|_| Line::default()).collect();
        let lane = |_| LaneCounters { layers: lines(), ..LaneCounters::default() };
        Self((0..lanes).map(lane).collect())
    }

    pub(crate) fn of(&self, lane: LaneId) -> &LaneCounters {
        &self.0[lane.index()]
    }

    /// Bytes sent about the layer of this index.
    pub(crate) fn sent(&self, layer: usize) -> u64 {
        let cells = self.0.iter().filter_map(|lane| lane.layer(layer));
        cells.map(|sent| sent.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn traffic(&self) -> Traffic {
        self.0.iter().map(LaneCounters::traffic).fold(Traffic::default(), Traffic::plus)
    }
}

impl LaneCounters {
    /// A link has taken a whole frame of `bytes`, about `layer` if it is about one.
    pub(super) fn count_sent(&self, bytes: usize, layer: Option<u32>) {
        add(&self.bytes_sent, bytes as u64);
        add(&self.frames_sent, 1);
        if let Some(sent) = layer.and_then(|layer| self.layer(layer as usize)) {
            add(sent, bytes as u64);
        }
    }

    /// The header of a frame of `bytes` has come.
    pub(super) fn count_received(&self, bytes: usize) {
        add(&self.bytes_received, bytes as u64);
        add(&self.frames_received, 1);
    }

    fn layer(&self, layer: usize) -> Option<&AtomicU64> {
        self.layers.get(layer / 16)?.0.get(layer % 16)
    }

    fn traffic(&self) -> Traffic {
        Traffic {
            bytes_sent: self.bytes_sent.load(Ordering::Relaxed),
            bytes_received: self.bytes_received.load(Ordering::Relaxed),
            frames_sent: self.frames_sent.load(Ordering::Relaxed),
            frames_received: self.frames_received.load(Ordering::Relaxed),
        }
    }
}

/// Nobody else writes to `counter`.
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed) + more, Ordering::Relaxed);
}
