//! Where every chunk lives: a pure function of the cluster and the layers, the same on every node.

use crate::chunk::elements;
use crate::factors::Layout;
use crate::scheme::{Choice, Policy, Scheme, choose};
use crate::share::shares;
use crate::wire::Kind;
use crate::{
    ChunkKey, ChunkSize, Chunks, Cluster, Consistency, Encoding, Encodings, Epoch, LaneId, Layer,
    LayerId, LayerKind, NodeId, Ring, Route, Tree,
};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// The part of the store that one lane of one server node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shard {
    /// The server node.
    pub node: NodeId,
    /// The lane; also the lane of every worker that talks to this shard.
    pub lane: LaneId,
}

/// How chunks are spread over shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Every shard gets the same number of bytes, layer by layer where layers are large. Where ports
    /// carry unequal rates, shards are in proportion to their servers' [`shares`].
    #[default]
    Balanced,
    /// Whole layers in turn: what frameworks that shard by tensor do. A comparator
    /// (Poseidon 2017 §5.3), not a choice for real work.
    PerTensor,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Balanced => "balanced",
            Self::PerTensor => "per-tensor",
        })
    }
}

impl FromStr for Placement {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "balanced" => Ok(Self::Balanced),
            "per-tensor" => Ok(Self::PerTensor),
            _ => Err(format!("expected 'balanced' or 'per-tensor', got '{s}'")),
        }
    }
}

/// What a plan follows besides the cluster and the layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// How layers are cut.
    pub chunk: ChunkSize,
    /// How chunks are spread.
    pub placement: Placement,
    /// Which schemes may be chosen.
    pub policy: Policy,
    /// Most samples a worker has in one step; `None` if no factors will be sent, but of layers that say
    /// their [`rows`](Layer::rows).
    pub batch: Option<usize>,
    /// How far apart the clocks of workers may be. If they may be apart at all, workers of one host
    /// contribute each for itself: a sum of the host would make them wait for each other.
    pub consistency: Consistency,
}

/// What is decided about one layer before its chunks are placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    /// How it is synchronised, and why.
    pub choice: Choice,
    /// How its chunks are spread.
    pub placement: Placement,
    /// Most rows of factors a worker has in one step; `None` if no factors will be sent.
    pub batch: Option<usize>,
}

/// Layer → scheme and chunks, and chunk → shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// That of the book it was made from.
    pub epoch: Epoch,
    tree: Tree,
    consistency: Consistency,
    layers: Vec<LayerPlan>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct LayerPlan {
    choice: Choice,
    encodings: Encodings,
    factors: Option<Layout>,
    chunks: Chunks,
    shards: Vec<Shard>,
    /// By chunk: its [turn](Route::turn). Empty if the tree is flat: then turns change nothing.
    turns: Vec<u32>,
    /// What of it goes round the ring of hosts. Nothing of small layers does: the way would be long for
    /// little.
    ring: Ring,
}

impl Plan {
    /// Chooses a scheme for each of `layers` and places their chunks on the servers of `cluster`, for
    /// a job's first epoch.
    pub fn new(cluster: &Cluster, layers: &[Layer], rules: Rules) -> Self {
        let Rules { chunk, placement, policy, batch, consistency } = rules;
        let apart = cluster.clone().apart();
        let cluster = if consistency.is_bsp() { cluster } else { &apart };
        let way = |layer: &Layer| {
            let batch = layer.rows.or(batch);
            let choice = match consistency.drops() {
                0 => choose(layer, cluster, batch, policy),
                _ => Choice { scheme: Scheme::Ps, reason: "slow workers may be dropped".into() },
            };
            Way { choice, placement, batch }
        };
        Self::along(cluster, layers, chunk, layers.iter().map(way)).with_consistency(consistency)
    }

    /// The plan for choices made elsewhere: `ways` has one for each of `layers`.
    ///
    /// Layers that go by factors have chunks on shards too: their initial values come from there.
    pub fn along(
        cluster: &Cluster,
        layers: &[Layer],
        chunk: ChunkSize,
        ways: impl IntoIterator<Item = Way>,
    ) -> Self {
        let mut plans: Vec<LayerPlan> = Vec::with_capacity(layers.len());
        let mut placements = Vec::with_capacity(layers.len());
        let mut first_lane: u32 = 0;
        for (layer, Way { choice, placement, batch }) in layers.iter().zip(ways) {
            let factors = match (choice.scheme, layer.kind, batch) {
                (Scheme::Sfb, LayerKind::Fc { m, n }, Some(batch)) => {
                    let lane = (first_lane % u32::from(cluster.lanes())) as u16;
                    let layout = Layout::new((m, n), batch, cluster, chunk, lane);
                    let layout = layout.encoded(layer.up, chunk);
                    first_lane = first_lane.wrapping_add(layout.chunks());
                    Some(layout)
                }
                _ => None,
            };
            let (encodings, chunks) = (layer.encodings(), Chunks::whole(layer.len));
            let (shards, turns) = (Vec::new(), Vec::new());
            let ring = Ring::Nothing;
            plans.push(LayerPlan { choice, encodings, factors, chunks, shards, turns, ring });
            placements.push(placement);
        }
        // Each kind of traffic is balanced by itself: what goes by factors says nothing about the
        // load of a shard.
        for scheme in [Scheme::Ps, Scheme::Sfb] {
            let lens = layers.iter().map(|layer| layer.len);
            let those = plans.iter_mut().zip(lens).zip(&placements);
            let those = those.filter(|((plan, _), _)| plan.choice.scheme == scheme);
            let (even, whole): (Vec<_>, Vec<_>) =
                those.partition(|(_, placement)| **placement == Placement::Balanced);
            place_evenly(cluster, even.into_iter().map(|(layer, _)| layer).collect(), chunk);
            place_whole(cluster, whole.into_iter().map(|(layer, _)| layer).collect());
        }
        let tree = Tree::new(cluster);
        if !tree.is_flat() {
            take_turns(cluster, &mut plans);
        }
        let consistency = Consistency::Bsp;
        Self { epoch: Epoch::FIRST, tree, consistency, layers: plans }
    }

    /// The same plan, for workers whose clocks may be apart. If they may, it is a plan of a cluster whose
    /// nodes [have hosts of their own](Cluster::apart).
    pub fn with_consistency(mut self, consistency: Consistency) -> Self {
        self.consistency = consistency;
        for layout in self.layers.iter_mut().filter_map(|layer| layer.factors.as_mut()) {
            layout.lead = consistency.lead();
        }
        self
    }

    /// How far apart the clocks of workers may be.
    pub fn consistency(&self) -> Consistency {
        self.consistency
    }

    /// The same plan for a book of another epoch.
    pub fn in_epoch(self, epoch: Epoch) -> Self {
        Self { epoch, ..self }
    }

    /// How `layer` is synchronised and why. `None` if there is no such layer.
    pub fn choice(&self, layer: LayerId) -> Option<&Choice> {
        self.layers.get(layer.index()).map(|l| &l.choice)
    }

    /// Where the factors of `layer` lie, if it goes by factors.
    pub fn factors(&self, layer: LayerId) -> Option<&Layout> {
        self.layers.get(layer.index())?.factors.as_ref()
    }

    /// How the numbers of `layer` travel. As `f32` if there is no such layer.
    pub fn encodings(&self, layer: LayerId) -> Encodings {
        self.layers.get(layer.index()).map_or_else(Encodings::default, |l| l.encodings)
    }

    /// Bytes of the payload of a frame of this kind that carries all of `chunk`.
    pub fn payload(&self, chunk: ChunkKey, kind: Kind) -> usize {
        self.encodings(chunk.layer).of(kind).bytes(self.len(chunk))
    }

    /// The bytes of payload that `node` sends per step for `layer`, to nodes of any host, when every
    /// batch is full.
    pub fn bytes_sent(&self, node: NodeId, layer: LayerId) -> usize {
        let Encodings { up, down } = self.encodings(layer);
        match self.factors(layer) {
            Some(layout) => {
                // Factors that are not this node's own pass through it only in a tree.
                let passes = |route: Route| {
                    !self.tree.is_flat() || route.ring.takes_results() || route.root == node
                };
                let ways = layout.routes().filter(|(route, _)| passes(*route));
                ways.map(|(route, len)| self.tree.receivers(node, route).len() * up.bytes(len))
                    .sum()
            }
            None => {
                let sent = |(chunk, _)| {
                    let (route, len) = (self.route(chunk)?, self.len(chunk));
                    let results = self.tree.receivers(node, route).len();
                    let sums = usize::from(self.tree.contributes(node, route));
                    Some(sums * up.bytes(len) + results * down.bytes(len))
                };
                self.layer_chunks(layer).filter_map(sent).sum()
            }
        }
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// How `layer` is cut. `None` if there is no such layer.
    pub fn chunks(&self, layer: LayerId) -> Option<&Chunks> {
        self.layers.get(layer.index()).map(|l| &l.chunks)
    }

    /// The shard that holds `chunk`. `None` if there is no such chunk.
    pub fn shard(&self, chunk: ChunkKey) -> Option<Shard> {
        self.layers.get(chunk.layer.index())?.shards.get(chunk.index as usize).copied()
    }

    /// The hosts and racks that sums pass through.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// The way of `chunk` to its shard and back. `None` if there is no such chunk.
    pub fn route(&self, chunk: ChunkKey) -> Option<Route> {
        let layer = self.layers.get(chunk.layer.index())?;
        let at = chunk.index as usize;
        let turn = layer.turns.get(at).copied().unwrap_or(0);
        Some(Route { root: layer.shards.get(at)?.node, turn, ring: layer.ring })
    }

    /// The chunks of `layer` and their shards, in order.
    pub fn layer_chunks(&self, layer: LayerId) -> impl Iterator<Item = (ChunkKey, Shard)> + '_ {
        let shards = self.layers.get(layer.index()).map_or(&[][..], |l| &l.shards);
        shards.iter().zip(0..).map(move |(&shard, index)| (ChunkKey { layer, index }, shard))
    }

    /// All chunks and their shards, in layer order.
    pub fn all_chunks(&self) -> impl Iterator<Item = (ChunkKey, Shard)> + '_ {
        (0..self.layers.len() as u32).flat_map(|layer| self.layer_chunks(LayerId(layer)))
    }

    /// Number of elements in `chunk`, 0 if there is no such chunk.
    pub fn len(&self, chunk: ChunkKey) -> usize {
        let range = self.chunks(chunk.layer).and_then(|c| c.range(chunk.index));
        range.map_or(0, |r| r.len())
    }
}

/// Numbers the chunks of every server, so that each host's collectors get equal parts of them.
fn take_turns(cluster: &Cluster, layers: &mut [LayerPlan]) {
    let mut next = vec![0; cluster.nodes()];
    for layer in layers {
        let mut turn = |shard: &Shard| {
            let next = &mut next[shard.node.index()];
            *next += 1;
            *next - 1
        };
        layer.turns = layer.shards.iter().map(&mut turn).collect();
    }
}

/// All shards. Nodes vary fastest: neighbours are on different nodes.
fn shards(cluster: &Cluster) -> Vec<Shard> {
    let lanes = cluster.lane_ids();
    lanes.flat_map(|lane| cluster.server_ids().map(move |node| Shard { node, lane })).collect()
}

/// Shards that hold parts of layers in proportion to their weights. Nodes vary fastest.
struct Weighted {
    shards: Vec<Shard>,
    /// By shard.
    weights: Vec<usize>,
    /// Bytes that each shard has of large layers.
    held: Vec<usize>,
    /// Bytes of large layers that have a shard.
    dealt: usize,
    /// The shard that the next large layer begins with, if all weights are equal.
    next: usize,
}

impl Weighted {
    fn new(cluster: &Cluster) -> Self {
        let (shards, weights): (Vec<_>, Vec<_>) = match shares(cluster) {
            None => shards(cluster).into_iter().map(|shard| (shard, 1)).unzip(),
            Some(shares) => {
                let on = |lane| shares.iter().map(move |&(node, share)| (node, lane, share));
                let all = cluster.lane_ids().flat_map(on);
                all.map(|(node, lane, share)| (Shard { node, lane }, share as usize)).unzip()
            }
        };
        let held = vec![0; shards.len()];
        Self { shards, weights, held, dealt: 0, next: 0 }
    }

    /// The shards of a large layer's chunks, whose elements have `width` bytes.
    fn deal(&mut self, chunks: &Chunks, width: usize) -> Vec<Shard> {
        let count = self.shards.len();
        if self.weights.iter().all(|weight| *weight == self.weights[0]) {
            // The last chunk may be short: begin with another shard each time.
            let first = self.next;
            self.next += chunks.count() + 1;
            return (0..chunks.count()).map(|i| self.shards[(first + i) % count]).collect();
        }
        let whole: usize = self.weights.iter().sum();
        let lens = (0..chunks.count() as u32).filter_map(|i| Some(chunks.range(i)?.len() * width));
        let dealt = lens.map(|len| {
            self.dealt += len;
            // How far a shard is behind its part of all that is dealt.
            let lag = |i: &usize| {
                (self.weights[*i] * self.dealt) as i128 - (self.held[*i] * whole) as i128
            };
            let last = (0..count).rev().max_by_key(lag);
            let last = last.expect("a cluster has a server, and a server has a shard");
            self.held[last] += len;
            self.shards[last]
        });
        dealt.collect()
    }
}

/// Large layers are dealt out in equal chunks, and go round the ring of hosts if there is one. Small
/// ones are laid end to end, and the line is cut into shares: as many as there are shards, or as are
/// worth a frame.
fn place_evenly(cluster: &Cluster, layers: Vec<(&mut LayerPlan, usize)>, size: ChunkSize) {
    let mut weighted = Weighted::new(cluster);
    let mut small = Vec::new();
    for (plan, len) in layers {
        let width = plan.encodings.widest();
        let Some(chunks) = Chunks::even(len, width, size, weighted.shards.len()) else {
            small.push((plan, len, width));
            continue;
        };
        plan.shards = weighted.deal(&chunks, width);
        plan.chunks = chunks;
        plan.ring = match (cluster.is_ring(), plan.encodings.up) {
            (false, _) => Ring::Nothing,
            (true, Encoding::F32) => Ring::Everything,
            // A sum that is rounded at every hop would not be one that is rounded once (ADR 0019).
            (true, _) => Ring::Results,
        };
    }
    // In bytes: elements of layers that lie beside each other may have other widths.
    let total: usize = small.iter().map(|(_, len, width)| len * width).sum();
    let Weighted { shards, weights, .. } = weighted;
    let nodes = shards.len() / usize::from(cluster.lanes());
    let worth = (total / size.min.max(1)).clamp(1, shards.len());
    // Whole rounds over the nodes, so that none has more than its part.
    let shares = if worth > nodes { worth - worth % nodes } else { worth };
    let whole: usize = weights[..shares].iter().sum();
    let mut weight = 0;
    let mut ends: Vec<usize> = Vec::with_capacity(shares);
    for share in &weights[..shares] {
        weight += share;
        ends.push((weight * total).div_ceil(whole));
    }
    let mut start = 0;
    for (plan, len, width) in small {
        // A cut through a number comes after the number.
        let cuts = ends.iter().filter(|&&cut| cut > start && cut < total);
        let cuts = cuts.map(|cut| (cut - start).div_ceil(width));
        plan.chunks = Chunks::cut(len, elements(size.max, width), cuts);
        let starts = (0..plan.chunks.count() as u32).filter_map(|i| plan.chunks.range(i));
        let share = |position: usize| ends.partition_point(|&end| end <= position);
        plan.shards = starts.map(|range| shards[share(start + range.start * width)]).collect();
        start += len * width;
    }
}

/// Whole layers, each on the next shard.
fn place_whole(cluster: &Cluster, layers: Vec<(&mut LayerPlan, usize)>) {
    let mut turns = shards(cluster).into_iter().cycle();
    for (plan, len) in layers {
        plan.chunks = Chunks::whole(len);
        plan.shards = turns.by_ref().take(plan.chunks.count()).collect();
    }
}

#[cfg(test)]
mod tests;
