//! Where every chunk lives: a pure function of the cluster and the layers, the same on every node.

use crate::{ChunkKey, ChunkSize, Chunks, Cluster, LaneId, Layer, LayerId, NodeId};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

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
    /// Chunks of equal size, each on the shard that has the fewest bytes so far.
    #[default]
    Balanced,
    /// Whole layers in turn: what frameworks that shard by tensor do. A comparator
    /// (Poseidon 2017 §5.3), not a choice for real work.
    PerTensor,
}

/// Layer → chunks and chunk → shard, with a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Grows when the plan is replaced; nodes switch at an agreed clock.
    pub version: u32,
    layers: Vec<LayerPlan>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct LayerPlan {
    chunks: Chunks,
    shards: Vec<Shard>,
}

impl Plan {
    /// Places the chunks of `layers` on the servers of `cluster`.
    pub fn new(cluster: &Cluster, layers: &[Layer], size: ChunkSize, placement: Placement) -> Self {
        // Lanes vary fastest in the tie-break last: neighbouring chunks go to different nodes.
        let shards: Vec<Shard> = cluster
            .lane_ids()
            .flat_map(|lane| cluster.server_ids().map(move |node| Shard { node, lane }))
            .collect();
        let mut least_loaded: BinaryHeap<_> =
            (0..shards.len()).map(|shard| Reverse((0usize, 0usize, shard))).collect();
        let mut turn = 0;
        let layers = layers
            .iter()
            .map(|layer| {
                let chunks = match placement {
                    Placement::Balanced => Chunks::even(layer.len, size, shards.len()),
                    Placement::PerTensor => Chunks::whole(layer.len),
                };
                let place = |index| {
                    turn += 1;
                    if placement == Placement::PerTensor {
                        return shards[(turn - 1) % shards.len()];
                    }
                    let len = chunks.range(index).map_or(0, |r| r.len());
                    // There is a shard: a cluster has a server and a lane.
                    let Reverse((load, _, shard)) = least_loaded.pop().expect("no shards");
                    least_loaded.push(Reverse((load + len, turn, shard)));
                    shards[shard]
                };
                LayerPlan { shards: (0..chunks.count() as u32).map(place).collect(), chunks }
            })
            .collect();
        Self { version: 1, layers }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Servers;
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
            let plan = Plan::new(&cluster, &layers, ChunkSize::default(), Placement::Balanced);
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
        let plan = Plan::new(&cluster, &layers, ChunkSize::default(), Placement::PerTensor);
        assert_eq!(plan.all_chunks().count(), layers.len());
        let largest = *loads(&plan, &cluster).values().max().unwrap();
        assert!(largest > 143_667_240 / 2);
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
            let plan = Plan::new(&cluster, &layers, ChunkSize::default(), Placement::Balanced);
            let loads = loads(&plan, &cluster);
            prop_assert_eq!(loads.values().sum::<usize>(), lens.iter().sum::<usize>());
            let spread = loads.values().max().unwrap() - loads.values().min().unwrap();
            prop_assert!(spread * 4 <= ChunkSize::default().max);
        }
    }
}
