//! The information book (which is core's), and questions to it as dotted paths.

pub use poseidon_core::book::{BOOK_VERSION, Book, Job, NodeFacts};

use serde_json::Value;

/// What `book` has under a dotted path such as `job.layers.0.name` or `cluster.workers`. The empty
/// path is the whole book. `None` if there is nothing there.
pub(crate) fn query(book: &Book, key: &str) -> Option<Value> {
    lookup(serde_json::to_value(book).ok()?, key)
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
    use poseidon_core::{ChunkSize, Cluster, Epoch, JobId, Layer, Optimizer, Policy, Servers};

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
}
