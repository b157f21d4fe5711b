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

/// What a channel has sent and received. Written by the engines that carry it, read by anybody.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
    frames_sent: AtomicU64,
    frames_received: AtomicU64,
    /// Bytes sent, by layer: all frames that are about the layer, headers included.
    layers: Box<[AtomicU64]>,
}

impl Counters {
    pub(crate) fn new(layers: usize) -> Self {
        Self { layers: (0..layers).map(|_| AtomicU64::new(0)).collect(), ..Self::default() }
    }

    /// A link has taken a whole frame of `bytes`, about `layer` if it is about one.
    pub(super) fn count_sent(&self, bytes: usize, layer: Option<u32>) {
        self.bytes_sent.fetch_add(bytes as u64, Ordering::Relaxed);
        self.frames_sent.fetch_add(1, Ordering::Relaxed);
        if let Some(sent) = layer.and_then(|layer| self.layers.get(layer as usize)) {
            sent.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// The header of a frame of `bytes` has come.
    pub(super) fn count_received(&self, bytes: usize) {
        self.bytes_received.fetch_add(bytes as u64, Ordering::Relaxed);
        self.frames_received.fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes sent about the layer of this index.
    pub(crate) fn sent(&self, layer: usize) -> u64 {
        self.layers.get(layer).map_or(0, |sent| sent.load(Ordering::Relaxed))
    }

    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            bytes_sent: self.bytes_sent.load(Ordering::Relaxed),
            bytes_received: self.bytes_received.load(Ordering::Relaxed),
            frames_sent: self.frames_sent.load(Ordering::Relaxed),
            frames_received: self.frames_received.load(Ordering::Relaxed),
        }
    }
}
