//! The information book (which is core's), and questions to it as dotted paths.

pub use poseidon_core::book::{BOOK_VERSION, Book, Job, NodeFacts};

use super::places::placed_tree;
use poseidon_core::share::shares;
use poseidon_core::{ChunkKey, Cluster, LaneId, Layer, LayerId, NodeId, Rate, Scheme, Shard};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A layer of the plan, as `plan` tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedLayer {
    /// Its name.
    pub layer: String,
    /// Number of `f32` parameters.
    pub parameters: usize,
    /// How it is synchronised.
    pub scheme: Scheme,
    /// Into how many chunks it is cut.
    pub chunks: usize,
    /// What a node sends for it in one step, without headers: the mean over all nodes.
    pub bytes_per_node: usize,
    /// Why it is synchronised this way, in words.
    pub reason: String,
}

/// A chunk of the plan, as `chunks` tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedChunk {
    /// Its layer's name.
    pub layer: String,
    /// Its position in the layer.
    pub chunk: u32,
    /// The first of its elements.
    pub start: usize,
    /// How many elements it has.
    pub len: usize,
    /// The server that has it.
    pub node: NodeId,
    /// The lane of that server.
    pub lane: LaneId,
}

/// A node's port, as `ports` tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedPort {
    /// The node, by name.
    pub node: String,
    /// The port's number. Nodes of one host share a port.
    pub port: u16,
    /// What the port carries each way, in bits per second.
    pub rate: Rate,
    /// How much of the parameters the node holds, in thousandths.
    pub shard: u32,
}

/// What `book` has under a dotted path such as `job.layers.0.name` or `cluster.workers`. The empty
/// path is the whole book. `plan`, `chunks`, `ports` and `tree` follow from the book and are
/// computed when they are asked for. `None` if there is nothing there.
pub(crate) fn query(book: &Book, key: &str) -> Option<Value> {
    let (first, rest) = key.split_once('.').unwrap_or((key, ""));
    match first {
        "plan" => lookup(serde_json::to_value(planned(book)).ok()?, rest),
        "chunks" => lookup(serde_json::to_value(placed(book)).ok()?, rest),
        "ports" => lookup(serde_json::to_value(ports(&book.cluster)).ok()?, rest),
        "tree" => lookup(serde_json::to_value(placed_tree(book)).ok()?, rest),
        _ => lookup(serde_json::to_value(book).ok()?, key),
    }
}

/// What ports carry and what their nodes hold, in words, if ports differ so much that not all
/// servers hold as much as each other.
pub(crate) fn tell_shares(cluster: &Cluster) -> Option<String> {
    let most = shares(cluster)?.first()?.1;
    let all = ports(cluster);
    let slow = |port: &&PlannedPort| {
        let known = cluster.node_ids().find(|&node| cluster.name(node) == port.node);
        let server = known.and_then(|node| cluster.role(node)).is_some_and(|role| role.server);
        server && port.shard < most
    };
    let percent = |shard: u32| format!("{:.1}%", f64::from(shard) / 10.0);
    let words = |port: &PlannedPort| {
        let PlannedPort { node, rate, shard, .. } = port;
        format!("{node} carries {rate} and holds {} of the parameters", percent(*shard))
    };
    let slow: Vec<_> = all.iter().filter(slow).collect();
    let mut told: Vec<_> = slow.iter().take(TOLD).map(|port| words(port)).collect();
    if slow.len() > TOLD {
        told.push(format!("{} more hold less than others", slow.len() - TOLD));
    }
    Some(format!("ports differ: {}; others hold {}", told.join("; "), percent(most)))
}

/// Slow ports that are told one by one.
const TOLD: usize = 4;

/// Every node's port, in the order of the nodes. Empty if nothing is known of ports.
fn ports(cluster: &Cluster) -> Vec<PlannedPort> {
    let servers = cluster.server_ids().count() as u32;
    let uneven = shares(cluster);
    let shard = |node: NodeId| match (&uneven, cluster.role(node)) {
        (Some(shares), _) => shares.iter().find(|(n, _)| *n == node).map_or(0, |(_, s)| *s),
        (None, Some(role)) if role.server => 1000 / servers,
        (None, _) => 0,
    };
    let all = cluster.node_ids().zip(cluster.ports());
    let row = |(node, port): (NodeId, &poseidon_core::Port)| PlannedPort {
        node: cluster.name(node),
        port: port.number,
        rate: port.rate,
        shard: shard(node),
    };
    all.map(row).collect()
}

/// The plan, layer by layer.
fn planned(book: &Book) -> Vec<PlannedLayer> {
    let (plan, cluster) = (book.plan(), &book.cluster);
    let by_port = shares(cluster).map_or("", |_| "; shards are sized by ports");
    let layers = book.job.layers.iter().zip((0..).map(LayerId));
    let row = |(layer, id): (&Layer, LayerId)| {
        let choice = plan.choice(id)?;
        let sent = cluster.node_ids().map(|node| plan.bytes_sent(node, id)).sum::<usize>();
        Some(PlannedLayer {
            layer: layer.name.clone(),
            parameters: layer.len,
            scheme: choice.scheme,
            chunks: plan.layer_chunks(id).count(),
            bytes_per_node: sent / cluster.nodes(),
            reason: format!("{}{by_port}", choice.reason),
        })
    };
    layers.filter_map(row).collect()
}

/// Every chunk, in layer order.
fn placed(book: &Book) -> Vec<PlacedChunk> {
    let plan = book.plan();
    let row = |(key, shard): (ChunkKey, Shard)| {
        let elements = plan.chunks(key.layer)?.range(key.index)?;
        Some(PlacedChunk {
            layer: book.job.layers.get(key.layer.index())?.name.clone(),
            chunk: key.index,
            start: elements.start,
            len: elements.len(),
            node: shard.node,
            lane: shard.lane,
        })
    };
    plan.all_chunks().filter_map(row).collect()
}

/// Follows a dotted path into `value`.
pub(crate) fn lookup(value: Value, key: &str) -> Option<Value> {
    key.split('.').filter(|step| !step.is_empty()).try_fold(value, |mut value, step| {
        match &mut value {
            Value::Object(fields) => fields.remove(step),
            Value::Array(items) => {
                let index = step.parse::<usize>().ok()?;
                (index < items.len()).then(|| items.swap_remove(index))
            }
            _ => None,
        }
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use poseidon_core::plan::Placement;
    use poseidon_core::{ChunkSize, Epoch, JobId, Optimizer, Policy, Port, Servers};

    /// A book of two workers.
    pub(crate) fn book() -> Book {
        Book {
            version: BOOK_VERSION,
            identity: JobId([7; 16]),
            epoch: Epoch::FIRST,
            cluster: Cluster::new(2, Servers::Colocated, 1).unwrap(),
            nodes: Vec::new(),
            job: Job {
                layers: vec![Layer::new("conv1", 10), Layer::new("fc", 20)],
                optimizer: Optimizer::default(),
                chunk: ChunkSize::default(),
                placement: Placement::Balanced,
                deterministic: false,
                consistency: Default::default(),
                scheme: Policy::Auto,
                batch: None,
                checkpoints: crate::Checkpoints::default(),
            },
        }
    }

    #[test]
    fn the_book_answers_dotted_questions() {
        let book = book();
        assert_eq!(query(&book, "job.layers.1.name"), Some("fc".into()));
        assert_eq!(query(&book, "cluster.workers"), Some(2.into()));
        assert_eq!(query(&book, "identity"), Some("07".repeat(16).into()));
        assert_eq!(query(&book, "epoch"), Some(1.into()));
        assert_eq!(query(&book, "job.layers.7"), None);
        assert_eq!(query(&book, "nobody.knows"), None);
        assert!(query(&book, "").unwrap().is_object());
    }

    #[test]
    fn the_plan_and_its_chunks_can_be_asked_for_like_the_book() {
        let mut book = book();
        book.job.layers[0].len = 100_000;
        let plan: Vec<PlannedLayer> =
            serde_json::from_value(query(&book, "plan").unwrap()).unwrap();
        assert_eq!(plan.len(), 2);
        assert_eq!((&*plan[0].layer, plan[0].parameters, plan[0].chunks), ("conv1", 100_000, 2));
        // Each of two nodes sends half of the layer to the other, and half of the result.
        assert_eq!(plan[0].bytes_per_node, 100_000 * 4);
        assert_eq!(query(&book, "plan.1.scheme"), Some("ps".into()));
        assert_eq!(query(&book, "plan.1.reason"), Some("its gradient has no factors".into()));
        assert_eq!(query(&book, "plan.2"), None);

        let chunks: Vec<PlacedChunk> =
            serde_json::from_value(query(&book, "chunks").unwrap()).unwrap();
        let of_conv1: Vec<_> = chunks.iter().filter(|c| c.layer == "conv1").collect();
        assert_eq!(of_conv1.iter().map(|c| c.len).sum::<usize>(), 100_000);
        assert_eq!(of_conv1[1].start, of_conv1[0].len);
        assert_ne!(of_conv1[0].node, of_conv1[1].node);
        assert_eq!(query(&book, "chunks.2.layer"), Some("fc".into()));
        assert_eq!(query(&book, "ports"), Some(serde_json::json!([])));
        assert_eq!(query(&book, "chunks.0.lane"), Some(0.into()));
        assert_eq!(query(&book, "tree.racks.0.hosts.1.nodes.0.name"), Some("worker 1".into()));
        assert_eq!(query(&book, "tree.racks.1"), None);
    }

    #[test]
    fn ports_are_told_with_what_their_nodes_hold() {
        let port = |(mbit, number): (u64, u16)| Port {
            number,
            rate: Rate::new(mbit * 1_000_000).unwrap(),
        };
        let ports = [1000, 1000, 100, 1000].into_iter().zip(0..).map(port).collect();
        let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap().with_ports(ports).unwrap();
        let mut book = Book { cluster, ..book() };
        book.job.layers[0].len = 1_000_000;
        let ports: Vec<PlannedPort> =
            serde_json::from_value(query(&book, "ports").unwrap()).unwrap();
        assert_eq!(ports.iter().map(|port| port.shard).collect::<Vec<_>>(), [333, 333, 0, 333]);
        assert_eq!(query(&book, "ports.2.rate"), Some(100_000_000.into()));
        assert_eq!(query(&book, "cluster.ports.2.rate"), Some(100_000_000.into()));
        let reason = "its gradient has no factors; shards are sized by ports";
        assert_eq!(query(&book, "plan.0.reason"), Some(reason.into()));
        assert_eq!(
            tell_shares(&book.cluster).unwrap(),
            "ports differ: worker 2 carries 100 Mbit/s and holds 0.0% of the parameters; others hold 33.3%"
        );
    }
}
