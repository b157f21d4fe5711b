use super::*;
use crate::cost::Setting;
use crate::{Encoding, Port, Rate, Servers};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

fn loads(plan: &Plan, cluster: &Cluster) -> HashMap<Shard, usize> {
    let mut loads = HashMap::new();
    for lane in cluster.lane_ids() {
        for node in cluster.server_ids() {
            loads.insert(Shard { node, lane }, 0);
        }
    }
    for (chunk, shard) in plan.all_chunks() {
        *loads.get_mut(&shard).expect("placed on a lane that does not exist") += plan.len(chunk);
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
            [Layer::new(format!("{n}.weight"), weights), Layer::new(format!("{n}.bias"), biases)]
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
    let plan =
        Plan::new(&cluster, &layers, Rules { placement: Placement::PerTensor, ..Rules::default() });
    assert_eq!(plan.all_chunks().count(), layers.len());
    let largest = *loads(&plan, &cluster).values().max().unwrap();
    assert!(largest > 143_667_240 / 2);
}

/// What a node sends is half of what Table 1 counts, which is both directions.
#[test]
fn bytes_sent_agree_with_table_1() {
    let fc = Layer { kind: LayerKind::Fc { m: 1024, n: 2048 }, ..Layer::new("fc", 1024 * 2048) };
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
    let port =
        |(number, mbit): (u16, &u64)| Port { number, rate: Rate::new(mbit * 1_000_000).unwrap() };
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

/// Small layers are cut where a shard's share of the bytes ends, whatever their widths.
#[test]
fn shards_have_equal_bytes_of_layers_of_different_encodings() {
    let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap();
    let small =
        |(n, encodings): (usize, Encodings)| Layer::new(format!("{n}"), 7001).encoded(encodings);
    let bf16 = Encodings::both(Encoding::Bf16);
    let halves =
        [bf16, Encodings::default(), bf16, bf16, Encodings::default(), Encodings::default()];
    let layers: Vec<Layer> = halves.into_iter().enumerate().map(small).collect();
    let plan = Plan::new(&cluster, &layers, Rules::default());
    let mut held = HashMap::new();
    for (chunk, shard) in plan.all_chunks() {
        *held.entry(shard).or_insert(0) += plan.payload(chunk, Kind::Update);
    }
    let most = held.values().max().unwrap();
    let least = held.values().min().unwrap();
    assert!(held.len() > 1 && most - least <= 8, "{held:?}");
}

/// A sum in half precision is rounded once, on its shard. Round the ring every host would round it. Results
/// are not rounded again.
#[test]
fn only_results_of_half_precision_go_round_the_ring() {
    let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap().in_a_ring();
    let up = Encodings { up: Encoding::Bf16, down: Encoding::F32 };
    let down = Encodings { up: Encoding::F32, down: Encoding::Bf16 };
    let kinds = [Encodings::default(), Encodings::both(Encoding::F16), up, down];
    let layers = kinds.map(|encodings| Layer::new("large", 1 << 20).encoded(encodings));
    let plan = Plan::new(&cluster, &layers, Rules::default());
    let rings = (0..4).map(|layer| {
        let routes = plan.layer_chunks(LayerId(layer)).map(|(chunk, _)| plan.route(chunk).unwrap());
        routes.map(|route| route.ring).collect::<HashSet<Ring>>()
    });
    let expected = [Ring::Everything, Ring::Results, Ring::Results, Ring::Everything];
    assert!(rings.eq(expected.map(|ring| HashSet::from([ring]))));
}
