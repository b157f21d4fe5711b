//! The information book (which is core's), and questions to it as dotted paths.

pub use poseidon_core::book::{BOOK_VERSION, Book, Job, NodeFacts};

use poseidon_core::{ChunkKey, LaneId, Layer, LayerId, NodeId, Scheme, Shard};
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

/// What `book` has under a dotted path such as `job.layers.0.name` or `cluster.workers`. The empty
/// path is the whole book. `plan` and `chunks` follow from the book and are computed when they are
/// asked for. `None` if there is nothing there.
pub(crate) fn query(book: &Book, key: &str) -> Option<Value> {
    let (first, rest) = key.split_once('.').unwrap_or((key, ""));
    match first {
        "plan" => lookup(serde_json::to_value(planned(book)).ok()?, rest),
        "chunks" => lookup(serde_json::to_value(placed(book)).ok()?, rest),
        _ => lookup(serde_json::to_value(book).ok()?, key),
    }
}

/// The plan, layer by layer.
fn planned(book: &Book) -> Vec<PlannedLayer> {
    let (plan, cluster) = (book.plan(), &book.cluster);
    let layers = book.job.layers.iter().zip((0..).map(LayerId));
    let row = |(layer, id): (&Layer, LayerId)| {
        let choice = plan.choice(id)?;
        let sent = cluster.node_ids().map(|node| plan.bytes_sent(cluster, node, id)).sum::<usize>();
        Some(PlannedLayer {
            layer: layer.name.clone(),
            parameters: layer.len,
            scheme: choice.scheme,
            chunks: plan.layer_chunks(id).count(),
            bytes_per_node: sent / cluster.nodes(),
            reason: choice.reason.clone(),
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
mod tests {
    use super::*;
    use poseidon_core::plan::Placement;
    use poseidon_core::{ChunkSize, Cluster, Epoch, JobId, Optimizer, Policy, Servers};

    fn book() -> Book {
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
                scheme: Policy::Auto,
                batch: None,
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
        assert_eq!(query(&book, "chunks.0.lane"), Some(0.into()));
    }
}
