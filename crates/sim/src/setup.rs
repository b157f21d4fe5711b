//! What is simulated.

use crate::Error;
use crate::network::Network;
use crate::profile::{CopySpeed, LayerTime};
use crate::zoo::Model;
use poseidon_core::plan::{Placement, Rules};
use poseidon_core::{ChunkSize, Cluster, Consistency, Layer, LayerId, NodeId, Overlap, Tree};
use rand::{Rng, RngExt};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use std::{fmt, str::FromStr};

/// A training job: what is trained, where, and how.
#[derive(Clone, Debug)]
pub struct Setup {
    /// In forward order. Those without parameters only take time.
    pub layers: Vec<Layer>,
    /// By layer: rows per sample that a fully connected layer sees.
    pub rows: Vec<usize>,
    /// By layer: how long a worker computes.
    pub times: Vec<LayerTime>,
    /// Workers, servers and lanes.
    pub cluster: Cluster,
    /// Samples per worker and step.
    pub batch: usize,
    /// How layers are synchronised.
    pub scheme: SchemeRule,
    /// Layers that follow another rule.
    pub overrides: Vec<(LayerId, SchemeRule)>,
    /// How much of the synchronisation runs beside computing.
    pub overlap: Overlap,
    /// How far apart the clocks of workers may be.
    pub consistency: Consistency,
    /// How layers are cut.
    pub chunk: ChunkSize,
    /// How chunks are spread.
    pub placement: Placement,
    /// What lies between nodes.
    pub network: Network,
    /// Whether links have a part of their port's budget as window (core's `port::window`), or send
    /// long bursts to peers by chance. It counts where ports have queues.
    pub windows: bool,
    /// What moving bytes costs a node.
    pub host: Host,
    /// Floating-point operations per second at which gradients are rebuilt from factors: by a second
    /// processor of each worker, beside its computing, or by the worker where that has not begun.
    /// `None` if that costs nothing. The share of the worker's own batch is part of its backward pass.
    pub rebuild_rate: Option<f64>,
    /// How fast each worker copies between its device and its host's memory. `None` if gradients are
    /// made in the host's memory. Workers of one host have a device each, and share no copy engine.
    pub copies: Option<CopySpeed>,
    /// Workers that are slower than their profile.
    pub stragglers: Stragglers,
    /// Nodes that fall silent.
    pub failures: Vec<Failure>,
    /// Steps of every worker. The first one is not counted in what is reported.
    pub iterations: usize,
    /// Where chance begins.
    pub seed: u64,
}

/// How a layer is synchronised, or who decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SchemeRule {
    /// As core's choice says: the way that moves the fewest bytes, where that is worth messages of their own.
    #[default]
    Auto,
    /// Parameter server.
    Ps,
    /// Factors from every worker to every other, where there are factors.
    Sfb,
    /// Factors to the one server that holds the whole layer, matrices back (Project Adam's way). A
    /// comparator: no session does it.
    Adam,
}

/// What moving bytes costs a node, on top of the network. Nothing by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Seconds of a node's lanes per byte sent.
    pub send: f64,
    /// Seconds of a node's lanes per byte received and added up.
    pub receive: f64,
    /// Seconds per frame, on either side.
    pub frame: f64,
}

/// Workers that are slower than their profile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stragglers {
    /// How a step's time varies from worker to worker and from step to step.
    pub jitter: Jitter,
    /// Workers that take this many times as long, always.
    pub slow: Vec<(NodeId, f64)>,
}

/// A distribution of factors on a step's computing time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Jitter {
    /// Always 1.
    #[default]
    None,
    /// Log-normal with median 1: the logarithm has this standard deviation.
    LogNormal(f64),
    /// Now and then a step takes much longer.
    Tail {
        /// How often, from 0 to 1.
        probability: f64,
        /// How many times as long.
        factor: f64,
    },
}

/// A node that falls silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which.
    pub node: NodeId,
    /// Since the beginning.
    pub at: Duration,
}

impl Setup {
    /// `model` on `cluster` with everything else as a session does it by default. `times` has an
    /// entry for every layer.
    pub fn new(
        model: &Model,
        times: Vec<LayerTime>,
        cluster: Cluster,
        batch: usize,
        network: Network,
    ) -> Self {
        Self {
            layers: model.layers.iter().map(Layer::from).collect(),
            rows: model.layers.iter().map(|layer| layer.rows).collect(),
            times,
            cluster,
            batch,
            scheme: SchemeRule::Auto,
            overrides: Vec::new(),
            overlap: Overlap::Full,
            consistency: Consistency::Bsp,
            chunk: Rules::default().chunk,
            placement: Rules::default().placement,
            network,
            windows: true,
            host: Host::default(),
            rebuild_rate: None,
            copies: None,
            stragglers: Stragglers::default(),
            failures: Vec::new(),
            iterations: 4,
            seed: 0,
        }
    }

    /// Whether this can be simulated, and if not, why.
    pub fn check(&self) -> Result<(), Error> {
        let layers = self.layers.len();
        if layers == 0 {
            return Err(Error::NoLayers);
        }
        if self.consistency.drops() > 0 {
            return Err(Error::Dropping);
        }
        for (what, got) in [("times", self.times.len()), ("rows", self.rows.len())] {
            if got != layers {
                return Err(Error::Mismatch { what, layers, got });
            }
        }
        if let Some(&(layer, _)) = self.overrides.iter().find(|(l, _)| l.index() >= layers) {
            return Err(Error::NoSuchLayer { layer, layers });
        }
        let slow = self.stragglers.slow.iter().map(|(node, _)| *node);
        let named = self.failures.iter().map(|failure| failure.node).chain(slow);
        if self.follows(SchemeRule::Adam) && !Tree::new(&self.cluster).is_flat() {
            return Err(Error::AdamInHosts);
        }
        if let Some(node) = named.into_iter().find(|node| self.cluster.role(*node).is_none()) {
            return Err(Error::NoSuchNode { node, nodes: self.cluster.nodes() });
        }
        let racks = self.network.racks;
        let slow = self.stragglers.slow.iter().map(|(_, factor)| *factor);
        let positive = [
            ("the bandwidth", self.network.bandwidth),
            ("the network's efficiency", self.network.efficiency),
            ("what a node gets out of a link", self.network.ceiling.unwrap_or(1.0)),
            ("the queue of a port", self.network.queue.map_or(1.0, |queue| queue as f64)),
            ("the batch", self.batch as f64),
            ("the number of iterations", self.iterations as f64),
            ("the rate of rebuilding", self.rebuild_rate.unwrap_or(1.0)),
            ("the speed of copies to the host", self.copies.map_or(1.0, |c| c.to_host)),
            ("the speed of copies to the device", self.copies.map_or(1.0, |c| c.to_device)),
            ("the hosts of a rack", racks.map_or(1.0, |r| r.hosts_per_rack as f64)),
            ("the oversubscription of racks", racks.map_or(1.0, |r| r.oversubscription)),
            ("the rate of memory", self.network.memory.rate),
        ];
        let positive = positive.into_iter().chain(slow.map(|f| ("a straggler's factor", f)));
        for (what, got) in positive {
            if !(got.is_finite() && got > 0.0) {
                return Err(Error::Number { what, expected: "a number above 0", got });
            }
        }
        let (spread, probability, factor) = match self.stragglers.jitter {
            Jitter::None => (0.0, 0.0, 1.0),
            Jitter::LogNormal(spread) => (spread, 0.0, 1.0),
            Jitter::Tail { probability, factor } => (0.0, probability, factor),
        };
        let Host { send, receive, frame } = self.host;
        let costs = [
            ("the jitter", spread),
            ("the probability of a slow step", probability),
            ("the factor of a slow step", factor),
            ("a node's cost of sending", send),
            ("a node's cost of receiving", receive),
            ("a node's cost of a frame", frame),
        ];
        let times = self.times.iter().flat_map(|t| [t.forward, t.backward]);
        for (what, got) in costs.into_iter().chain(times.map(|t| ("a layer's time", t))) {
            if !(got.is_finite() && got >= 0.0) {
                return Err(Error::Number { what, expected: "a number of at least 0", got });
            }
        }
        // Whoever wants layers whole wants it so, and workers are there in any case.
        let whole = self.placement == Placement::PerTensor || self.follows(SchemeRule::Adam);
        if !whole && self.cluster.servers().extra() > 0 {
            self.check_servers()?;
        }
        Ok(())
    }

    /// Whether there is a chunk for every server, those on workers included.
    pub fn check_servers(&self) -> Result<(), Error> {
        let chunks = self.plan().all_chunks().count();
        let servers = self.cluster.server_ids().count();
        if servers > chunks {
            return Err(Error::IdleServers { servers, chunks });
        }
        Ok(())
    }

    /// Whether any layer follows `rule`.
    fn follows(&self, rule: SchemeRule) -> bool {
        self.scheme == rule || self.overrides.iter().any(|(_, other)| *other == rule)
    }
}

impl Jitter {
    /// The factor of one step.
    pub fn draw(self, chance: &mut impl Rng) -> f64 {
        match self {
            Self::None => 1.0,
            Self::LogNormal(spread) => (spread * normal(chance)).exp(),
            Self::Tail { probability, factor } => {
                if chance.random::<f64>() < probability {
                    factor
                } else {
                    1.0
                }
            }
        }
    }
}

/// A standard normal number (Box and Muller's way).
fn normal(chance: &mut impl Rng) -> f64 {
    let radius = (-2.0 * (1.0 - chance.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * chance.random::<f64>()).cos()
}

impl fmt::Display for Jitter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::LogNormal(spread) => write!(f, "lognormal:{spread}"),
            Self::Tail { probability, factor } => write!(f, "tail:{probability}:{factor}"),
        }
    }
}

impl FromStr for Jitter {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0);
        let parts: Vec<&str> = s.split(':').collect();
        let jitter = match parts[..] {
            ["none"] => Some(Self::None),
            ["lognormal", spread] => number(spread).map(Self::LogNormal),
            ["tail", probability, factor] => number(probability)
                .filter(|probability| *probability <= 1.0)
                .zip(number(factor))
                .map(|(probability, factor)| Self::Tail { probability, factor }),
            _ => None,
        };
        jitter.ok_or_else(|| {
            format!(
                "expected 'none', 'lognormal:SPREAD' or 'tail:PROBABILITY:FACTOR', such as \
                 lognormal:0.3 or tail:0.05:10, got '{s}'"
            )
        })
    }
}

impl fmt::Display for SchemeRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Ps => "ps",
            Self::Sfb => "sfb",
            Self::Adam => "adam",
        })
    }
}

impl FromStr for SchemeRule {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "ps" => Ok(Self::Ps),
            "sfb" => Ok(Self::Sfb),
            "adam" => Ok(Self::Adam),
            _ => Err(format!("expected 'auto', 'ps', 'sfb' or 'adam', got '{s}'")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_as_text_reads_back() {
        let tail = Jitter::Tail { probability: 0.05, factor: 10.0 };
        for jitter in [Jitter::None, Jitter::LogNormal(0.3), tail] {
            assert_eq!(jitter.to_string().parse(), Ok(jitter));
        }
        for wrong in ["", "0.3", "lognormal", "lognormal:-1", "lognormal:NaN", "tail:2:3", "tail:1"]
        {
            assert!(wrong.parse::<Jitter>().unwrap_err().contains("lognormal:SPREAD"), "{wrong}");
        }
    }
}
