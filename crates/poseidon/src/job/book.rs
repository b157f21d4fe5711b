//! The information book: what every node knows about the job (Poseidon 2017 §4.1).

use poseidon_core::plan::{Placement, Rules};
use poseidon_core::store::Order;
use poseidon_core::{ChunkSize, Cluster, Epoch, JobId, Layer, NodeId, Optimizer, Plan, Policy};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of the book this build writes and reads.
pub const BOOK_VERSION: u16 = 1;

/// Cluster, addresses and model. The coordinator writes it once, when the last node has joined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Book {
    /// How it is written: [`BOOK_VERSION`].
    pub version: u16,
    /// The run of the job: every run of a job has another.
    pub identity: JobId,
    /// The edition of the cluster within the run, from 1.
    pub epoch: Epoch,
    /// Who does what.
    pub cluster: Cluster,
    /// Facts about every node, by id.
    pub nodes: Vec<NodeFacts>,
    /// What is trained.
    pub job: Job,
}

/// What a node says about itself when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// Its id.
    pub node: NodeId,
    /// Equal on nodes that can reach each other through a unix socket.
    pub host: String,
    /// Where it listens, as `address:port`.
    pub tcp: String,
    /// The name of its unix socket, if it has one.
    pub unix: Option<String>,
    /// The Poseidon it runs.
    pub version: String,
    /// Whether it can multiply on tiles, whose sums differ in their last bits from those of vectors.
    #[serde(default)]
    pub tiles: bool,
}

/// What is trained and how. The same on every worker, or the job does not start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// In forward order.
    pub layers: Vec<Layer>,
    /// What a shard does with a complete chunk.
    pub optimizer: Optimizer,
    /// How layers are cut.
    pub chunk: ChunkSize,
    /// How chunks are spread.
    #[serde(default)]
    pub placement: Placement,
    /// Whether contributions are added in rank order, which makes runs repeatable bit by bit.
    #[serde(default)]
    pub deterministic: bool,
    /// Which schemes the plan may choose from.
    #[serde(default)]
    pub scheme: Policy,
    /// Most samples a worker has in one step. Without it only layers that say their rows go by factors.
    #[serde(default)]
    pub batch: Option<usize>,
}

impl Book {
    /// The plan every node derives from the book.
    pub fn plan(&self) -> Plan {
        let Job { chunk, placement, scheme: policy, batch, .. } = self.job;
        Plan::new(&self.cluster, &self.job.layers, Rules { chunk, placement, policy, batch })
    }

    /// Whether gradients may be rebuilt on tiles: if one worker cannot, none does, so that all replicas stay equal.
    pub fn tiles(&self) -> bool {
        let is_worker = |node: &&NodeFacts| self.cluster.role(node.node).is_some_and(|r| r.worker);
        self.nodes.iter().filter(is_worker).all(|node| node.tiles)
    }

    /// Looks up a dotted path such as `job.layers.0.name` or `cluster.workers`. The empty path is
    /// the whole book. `None` if there is nothing there.
    pub fn query(&self, key: &str) -> Option<Value> {
        lookup(serde_json::to_value(self).ok()?, key)
    }
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

impl Job {
    /// In which order shards add contributions.
    pub fn order(&self) -> Order {
        if self.deterministic { Order::Rank } else { Order::Arrival }
    }

    /// The first thing in which two workers' jobs differ, in words. `None` if they agree.
    pub(crate) fn difference(&self, mine: &str, other: &Self, theirs: &str) -> Option<String> {
        let layer = |l: &Layer| {
            let rows = l.rows.map_or_else(String::new, |rows| format!(", {rows} rows"));
            format!("'{}' of {} parameters ({:?}{rows})", l.name, l.len, l.kind)
        };
        for (position, pair) in self.layers.iter().zip(&other.layers).enumerate() {
            if pair.0 != pair.1 {
                let (a, b) = (layer(pair.0), layer(pair.1));
                return Some(format!("layer {position} is {a} on {mine} but {b} on {theirs}"));
            }
        }
        let differ = |what: &str, a: String, b: String| {
            (a != b).then(|| format!("{what} is {a} on {mine} but {b} on {theirs}"))
        };
        let count = |job: &Self| job.layers.len().to_string();
        differ("the number of layers", count(self), count(other))
            .or_else(|| {
                differ("the update rule", self.optimizer.to_string(), other.optimizer.to_string())
            })
            .or_else(|| {
                let chunk = |c: ChunkSize| format!("{} to {} bytes", c.min, c.max);
                differ("the chunk size", chunk(self.chunk), chunk(other.chunk))
            })
            .or_else(|| {
                let placement = |p| format!("{p:?}");
                differ("the placement", placement(self.placement), placement(other.placement))
            })
            .or_else(|| {
                let order = |d: bool| d.to_string();
                differ("deterministic", order(self.deterministic), order(other.deterministic))
            })
            .or_else(|| differ("the scheme", self.scheme.to_string(), other.scheme.to_string()))
            .or_else(|| {
                let batch = |b: Option<usize>| b.map_or("unknown".into(), |b| b.to_string());
                differ("the batch size", batch(self.batch), batch(other.batch))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::Servers;

    fn job() -> Job {
        Job {
            layers: vec![Layer::new("conv1", 10), Layer::new("fc", 20)],
            optimizer: Optimizer::default(),
            chunk: ChunkSize::default(),
            placement: Placement::Balanced,
            deterministic: false,
            scheme: Policy::Auto,
            batch: None,
        }
    }

    fn book(cluster: Cluster, nodes: Vec<NodeFacts>) -> Book {
        let (version, identity, epoch) = (BOOK_VERSION, JobId([0xab; 16]), Epoch(1));
        Book { version, identity, epoch, cluster, nodes, job: job() }
    }

    #[test]
    fn the_first_difference_is_named_with_both_sides() {
        let mut other = job();
        assert_eq!(job().difference("worker 0", &other, "worker 1"), None);
        other.optimizer = Optimizer::adam();
        let words = job().difference("worker 0", &other, "worker 1").unwrap();
        assert!(words.contains("update rule is mean on worker 0 but adam"), "{words}");
        other.layers[1].len = 21;
        let words = job().difference("worker 0", &other, "worker 1").unwrap();
        assert!(words.contains("'fc' of 20") && words.contains("'fc' of 21"), "{words}");
        other = job();
        other.layers.pop();
        let words = job().difference("worker 0", &other, "worker 1").unwrap();
        assert!(words.contains("number of layers is 2 on worker 0 but 1"), "{words}");
    }

    #[test]
    fn one_worker_without_tiles_is_enough_and_servers_do_not_count() {
        let cluster = Cluster::new(2, Servers::Dedicated(1), 1).unwrap();
        let node = |index, tiles| NodeFacts {
            node: NodeId(index),
            host: String::new(),
            tcp: String::new(),
            unix: None,
            version: String::new(),
            tiles,
        };
        let tiles = |[a, b, server]: [bool; 3]| {
            let nodes = vec![node(0, a), node(1, b), node(2, server)];
            book(cluster.clone(), nodes).tiles()
        };
        assert!(tiles([true, true, false]));
        assert!(!tiles([true, false, true]));
    }

    #[test]
    fn the_book_answers_dotted_questions() {
        let cluster = Cluster::new(2, Servers::Colocated, 1).unwrap();
        let book = book(cluster, Vec::new());
        assert_eq!(book.query("job.layers.1.name"), Some("fc".into()));
        assert_eq!(book.query("cluster.workers"), Some(2.into()));
        assert_eq!(book.query("identity"), Some("ab".repeat(16).into()));
        assert_eq!(book.query("epoch"), Some(1.into()));
        assert_eq!(book.query("job.layers.7"), None);
        assert_eq!(book.query("nobody.knows"), None);
        assert!(book.query("").unwrap().is_object());
    }
}
