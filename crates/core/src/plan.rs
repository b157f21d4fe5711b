//! Where every chunk lives: a pure function of the cluster and the layers, the same on every node.

use crate::chunk::elements;
use crate::factors::Layout;
use crate::scheme::{Choice, Policy, Scheme, choose};
use crate::share::shares;
use crate::{
    ChunkKey, ChunkSize, Chunks, Cluster, Epoch, LaneId, Layer, LayerId, LayerKind, NodeId, Route,
    Tree,
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
    layers: Vec<LayerPlan>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct LayerPlan {
    choice: Choice,
    factors: Option<Layout>,
    chunks: Chunks,
    shards: Vec<Shard>,
    /// By chunk: its [turn](Route::turn). Empty if the tree is flat: then turns change nothing.
    turns: Vec<u32>,
}

impl Plan {
    /// Chooses a scheme for each of `layers` and places their chunks on the servers of `cluster`, for
    /// a job's first epoch.
    pub fn new(cluster: &Cluster, layers: &[Layer], rules: Rules) -> Self {
        let Rules { chunk, placement, policy, batch } = rules;
        let way = |layer: &Layer| {
            let batch = layer.rows.or(batch);
            Way { choice: choose(layer, cluster, batch, policy), placement, batch }
        };
        Self::along(cluster, layers, chunk, layers.iter().map(way))
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
                    first_lane = first_lane.wrapping_add(layout.chunks());
                    Some(layout)
                }
                _ => None,
            };
            let chunks = Chunks::whole(layer.len);
            let (shards, turns) = (Vec::new(), Vec::new());
            plans.push(LayerPlan { choice, factors, chunks, shards, turns });
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
        Self { epoch: Epoch::FIRST, tree, layers: plans }
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

    /// Whether any layer goes by factors, from worker to worker.
    pub fn sends_factors(&self) -> bool {
        self.layers.iter().any(|l| l.factors.is_some())
    }

    /// The bytes of payload that `node` sends per step for `layer`, to nodes of any host, when every
    /// batch is full.
    pub fn bytes_sent(&self, node: NodeId, layer: LayerId) -> usize {
        let numbers: usize = match self.factors(layer) {
            Some(layout) => {
                // Factors that are not this node's own pass through it only in a tree.
                let passes = |route: Route| !self.tree.is_flat() || route.root == node;
                let ways = layout.routes().filter(|(route, _)| passes(*route));
                ways.map(|(route, len)| self.tree.children(node, route).len() * len).sum()
            }
            None => {
                let sent = |(chunk, _)| {
                    let route = self.route(chunk)?;
                    let results = self.tree.children(node, route).len();
                    let sums = usize::from(self.tree.contributes(node, route));
                    Some((sums + results) * self.len(chunk))
                };
                self.layer_chunks(layer).filter_map(sent).sum()
            }
        };
        numbers * size_of::<f32>()
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
        Some(Route { root: layer.shards.get(at)?.node, turn })
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
    /// Elements that each shard has of large layers.
    held: Vec<usize>,
    /// Elements of large layers that have a shard.
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

    /// The shards of a large layer's chunks.
    fn deal(&mut self, chunks: &Chunks) -> Vec<Shard> {
        let count = self.shards.len();
        if self.weights.iter().all(|weight| *weight == self.weights[0]) {
            // The last chunk may be short: begin with another shard each time.
            let first = self.next;
            self.next += chunks.count() + 1;
            return (0..chunks.count()).map(|i| self.shards[(first + i) % count]).collect();
        }
        let whole: usize = self.weights.iter().sum();
        let lens = (0..chunks.count() as u32).filter_map(|i| Some(chunks.range(i)?.len()));
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

/// Large layers are dealt out in equal chunks. Small ones are laid end to end, and the line is cut
/// into shares: as many as there are shards, or as are worth a frame.
fn place_evenly(cluster: &Cluster, layers: Vec<(&mut LayerPlan, usize)>, size: ChunkSize) {
    let mut weighted = Weighted::new(cluster);
    let mut small = Vec::new();
    for (plan, len) in layers {
        let Some(chunks) = Chunks::even(len, size, weighted.shards.len()) else {
            small.push((plan, len));
            continue;
        };
        plan.shards = weighted.deal(&chunks);
        plan.chunks = chunks;
    }
    let total: usize = small.iter().map(|(_, len)| len).sum();
    let Weighted { shards, weights, .. } = weighted;
    let nodes = shards.len() / usize::from(cluster.lanes());
    let worth = (total / elements(size.min)).clamp(1, shards.len());
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
    for (plan, len) in small {
        let end = start + len;
        let cuts = ends.iter().filter(|&&cut| cut > start && cut < total);
        plan.chunks = Chunks::cut(len, elements(size.max), cuts.map(|cut| cut - start));
        let starts = (0..plan.chunks.count() as u32).filter_map(|i| plan.chunks.range(i));
        let share = |position: usize| ends.partition_point(|&end| end <= position);
        plan.shards = starts.map(|range| shards[share(start + range.start)]).collect();
        start = end;
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
mod tests {
    use super::*;
    use crate::Servers;
    use crate::cost::Setting;
    use crate::{Port, Rate};
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn loads(plan: &Plan, cluster: &Cluster) -> HashMap<Shard, usize> {
        let mut loads = HashMap::new();
        for lane in cluster.lane_ids() {
            for node in cluster.server_ids() {
                loads.insert(Shard { node, lane }, 0);
            }
        }
        for (chunk, shard) in plan.all_chunks() {
            *loads.get_mut(&shard).expect("placed on a lane that does not exist") +=
                plan.len(chunk);
        }
        loads
    }

    /// Weights and biases of VGG19 (Poseidon 2017, Table 3: 143M parameters).
    fn vgg19() -> Vec<Layer> {
        let conv = [
            (3, 64),
            (64, 64),
            (64, 128),
            (128, 128),
            (128, 256),
            (256, 256),
            (256, 256),
            (256, 256),
            (256, 512),
            (512, 512),
            (512, 512),
            (512, 512),
            (512, 512),
            (512, 512),
            (512, 512),
            (512, 512),
        ];
        let fc = [(25088, 4096), (4096, 4096), (4096, 1000)];
        let sizes =
            conv.iter().map(|&(i, o)| (i * o * 9, o)).chain(fc.iter().map(|&(i, o)| (i * o, o)));
        sizes
            .enumerate()
            .flat_map(|(n, (weights, biases))| {
                [
                    Layer::new(format!("{n}.weight"), weights),
                    Layer::new(format!("{n}.bias"), biases),
                ]
            })
            .collect()
    }

    #[test]
    fn vgg19_on_eight_nodes_is_balanced_within_one_percent() {
        let layers = vgg19();
        let total: usize = layers.iter().map(|l| l.len).sum();
        assert_eq!(total, 143_667_240);
        for lanes in [1, 2, 4, 8] {
            let cluster = Cluster::new(8, Servers::Colocated, lanes).unwrap();
            let plan = Plan::new(&cluster, &layers, Rules::default());
            let loads = loads(&plan, &cluster);
            let mean = total as f64 / loads.len() as f64;
            let largest = *loads.values().max().unwrap() as f64;
            assert!(largest <= mean * 1.01, "{lanes} lanes: {largest} against a mean of {mean}");
        }
    }

    #[test]
    fn per_tensor_placement_puts_most_of_vgg19_on_one_node() {
        let layers = vgg19();
        let cluster = Cluster::new(8, Servers::Colocated, 1).unwrap();
        let plan = Plan::new(
            &cluster,
            &layers,
            Rules { placement: Placement::PerTensor, ..Rules::default() },
        );
        assert_eq!(plan.all_chunks().count(), layers.len());
        let largest = *loads(&plan, &cluster).values().max().unwrap();
        assert!(largest > 143_667_240 / 2);
    }

    /// What a node sends is half of what Table 1 counts, which is both directions.
    #[test]
    fn bytes_sent_agree_with_table_1() {
        let fc =
            Layer { kind: LayerKind::Fc { m: 1024, n: 2048 }, ..Layer::new("fc", 1024 * 2048) };
        for (servers, policy) in [
            (Servers::Colocated, Policy::Ps),
            (Servers::Colocated, Policy::Sfb),
            (Servers::Dedicated(2), Policy::Ps),
        ] {
            let cluster = Cluster::new(8, servers, 2).unwrap();
            let rules = Rules { batch: Some(32), policy, ..Rules::default() };
            let plan = Plan::new(&cluster, std::slice::from_ref(&fc), rules);
            let p2 = cluster.server_ids().count();
            let setting = Setting { m: 1024, n: 2048, batch: 32, workers: 8, servers: p2 };
            let sent = |node| plan.bytes_sent(NodeId(node), LayerId(0)) as f64;
            let (expected, at) = match (servers, policy) {
                (Servers::Dedicated(_), _) => (setting.ps_server(), 8),
                (_, Policy::Sfb) => (setting.sfb_worker(), 0),
                _ => (setting.ps_both(), 0),
            };
            assert_eq!(sent(at), expected / 2.0 * 4.0, "{servers} {policy}");
        }
    }

    #[test]
    fn a_layer_has_room_for_its_own_rows() {
        let kind = LayerKind::Fc { m: 1024, n: 2048 };
        let fc = |rows| Layer { kind, rows, ..Layer::new("fc", 1024 * 2048) };
        let layers = [fc(None), fc(Some(8)), fc(Some(100_000))];
        let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap();
        for batch in [None, Some(32)] {
            let plan = Plan::new(&cluster, &layers, Rules { batch, ..Rules::default() });
            let rooms = (0..3).map(|layer| plan.factors(LayerId(layer)).map(|l| l.batch));
            assert_eq!(rooms.collect::<Vec<_>>(), [batch, Some(8), None]);
        }
    }

    #[test]
    fn layers_by_factors_do_not_disturb_the_balance_of_the_others() {
        let fc = Layer { kind: LayerKind::Fc { m: 4096, n: 999 }, ..Layer::new("fc", 4096 * 1000) };
        let layers = [Layer::new("a", 300_000), fc, Layer::new("b", 500_000)];
        let cluster = Cluster::new(4, Servers::Colocated, 2).unwrap();
        let rules = Rules { batch: Some(8), ..Rules::default() };
        let plan = Plan::new(&cluster, &layers, rules);
        assert_eq!(plan.choice(LayerId(1)).unwrap().scheme, Scheme::Sfb);
        let sent = |node| {
            let layers = (0..3).map(LayerId);
            layers.map(|l| plan.bytes_sent(NodeId(node), l)).sum::<usize>() as f64
        };
        for node in 1..4 {
            assert!((sent(node) / sent(0) - 1.0).abs() < 0.02, "node {node}: {}", sent(node));
        }
    }

    /// CIFAR-10 quick has no layer that is large for 8 nodes, and every node sends as much as any other.
    #[test]
    fn small_layers_are_shared_out_too() {
        let lens = [2_432, 25_632, 51_264, 65_600, 650];
        let layers: Vec<_> = lens.iter().map(|&len| Layer::new("l", len)).collect();
        for (workers, lanes) in [(2, 1), (4, 2), (8, 1), (8, 2), (8, 3)] {
            let cluster = Cluster::new(workers, Servers::Colocated, lanes).unwrap();
            let plan = Plan::new(&cluster, &layers, Rules::default());
            let sent = |node| -> usize {
                let layers = (0..lens.len() as u32).map(LayerId);
                layers.map(|layer| plan.bytes_sent(NodeId(node), layer)).sum()
            };
            let sent: Vec<_> = (0..workers).map(sent).collect();
            let (least, most) = (sent.iter().min().unwrap(), sent.iter().max().unwrap());
            assert!(*most as f64 / *least as f64 <= 1.005, "{workers} x {lanes}: {sent:?}");
        }
    }

    #[test]
    fn placements_round_trip_through_text() {
        for placement in [Placement::Balanced, Placement::PerTensor] {
            assert_eq!(placement.to_string().parse(), Ok(placement));
            let text = serde_json::to_string(&placement).unwrap();
            assert_eq!(text, format!("\"{placement}\""));
        }
        assert!("pertensor".parse::<Placement>().unwrap_err().contains("'pertensor'"));
    }

    /// A cluster whose workers have ports of these rates, in Mbit/s.
    fn with_ports(lanes: u16, mbit: &[u64]) -> Cluster {
        let port = |(number, mbit): (u16, &u64)| Port {
            number,
            rate: Rate::new(mbit * 1_000_000).unwrap(),
        };
        let cluster = Cluster::new(mbit.len() as u16, Servers::Colocated, lanes).unwrap();
        cluster.with_ports((0..).zip(mbit).map(port).collect()).unwrap()
    }

    #[test]
    fn a_slow_port_has_no_shard_and_the_others_have_as_much_as_each_other() {
        let layers = vgg19();
        for lanes in [1, 3] {
            let plan =
                Plan::new(&with_ports(lanes, &[1000, 100, 1000, 1000]), &layers, Rules::default());
            let three = Cluster::new(3, Servers::Colocated, lanes).unwrap();
            let even = Plan::new(&three, &layers, Rules::default());
            let renamed = |shard: Shard| match shard.node {
                NodeId(0) => shard,
                NodeId(node) => Shard { node: NodeId(node + 1), ..shard },
            };
            let expected: Vec<_> = even.all_chunks().map(|(key, s)| (key, renamed(s))).collect();
            assert_eq!(plan.all_chunks().collect::<Vec<_>>(), expected);
        }
    }

    /// A frame to every node is not worth a few bytes.
    #[test]
    fn tiny_models_stay_together() {
        let cluster = Cluster::new(8, Servers::Colocated, 2).unwrap();
        let chunks = |len| {
            let plan = Plan::new(&cluster, &[Layer::new("l", len)], Rules::default());
            plan.all_chunks().count()
        };
        assert_eq!([1, 4 << 10, 16 << 10].map(chunks), [1, 1, 2]);
    }

    proptest! {
        #[test]
        fn every_chunk_has_a_shard_and_shards_differ_by_at_most_one_chunk(
            lens in proptest::collection::vec(0usize..400_000, 1..20),
            workers in 1u16..9, servers in 0u16..4, lanes in 1u16..4,
        ) {
            let servers = if servers == 0 { Servers::Colocated } else { Servers::Dedicated(servers) };
            let cluster = Cluster::new(workers, servers, lanes).unwrap();
            let layers: Vec<_> = lens.iter().map(|&len| Layer::new("l", len)).collect();
            let plan = Plan::new(&cluster, &layers, Rules::default());
            let loads = loads(&plan, &cluster);
            prop_assert_eq!(loads.values().sum::<usize>(), lens.iter().sum::<usize>());
            let spread = loads.values().max().unwrap() - loads.values().min().unwrap();
            // A short last chunk per large layer, and a share of the small ones.
            prop_assert!(spread * 4 <= ChunkSize::default().max);
        }

        #[test]
        fn equal_ports_change_nothing(
            lens in proptest::collection::vec(0usize..400_000, 1..20),
            workers in 1usize..9, lanes in 1u16..4,
        ) {
            let layers: Vec<_> = lens.iter().map(|&len| Layer::new("l", len)).collect();
            let equal = with_ports(lanes, &vec![700; workers]);
            let unknown = Cluster::new(workers as u16, Servers::Colocated, lanes).unwrap();
            let rules = Rules::default();
            prop_assert_eq!(
                Plan::new(&equal, &layers, rules), Plan::new(&unknown, &layers, rules)
            );
        }

        #[test]
        fn shards_are_as_large_as_their_shares(
            lens in proptest::collection::vec(0usize..2_000_000, 1..20),
            mbit in proptest::collection::vec(300u64..1000, 3..9), lanes in 1u16..4,
        ) {
            let cluster = with_ports(lanes, &mbit);
            let layers: Vec<_> = lens.iter().map(|&len| Layer::new("l", len)).collect();
            let plan = Plan::new(&cluster, &layers, Rules::default());
            let total: usize = lens.iter().sum();
            prop_assert_eq!(loads(&plan, &cluster).values().sum::<usize>(), total);
            let mut by_node = vec![0; mbit.len()];
            for (chunk, shard) in plan.all_chunks() {
                by_node[shard.node.index()] += plan.len(chunk);
            }
            let Some(shares) = shares(&cluster) else { return Ok(()) };
            let whole: u32 = shares.iter().map(|(_, share)| share).sum();
            let mut expected = vec![0.0; mbit.len()];
            for (node, share) in shares {
                expected[node.index()] = total as f64 * f64::from(share) / f64::from(whole);
            }
            // A chunk of every lane, and what small layers are not worth a frame for.
            let slack = (usize::from(lanes + 1) * ChunkSize::default().max / 4) as f64;
            for (got, expected) in by_node.into_iter().zip(expected) {
                prop_assert!((got as f64 - expected).abs() <= slack, "{got} for {expected}");
                prop_assert!(expected > 0.0 || got == 0);
            }
        }
    }
}
