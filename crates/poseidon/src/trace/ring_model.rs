//! The ring of records in every order that writers and a reader may run in, as far as loom tells
//! them apart.

mod ring_parts {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering, fence};
}

#[expect(clippy::duplicate_mod, reason = "the same code, with other atomics")]
#[path = "ring.rs"]
mod ring;

use loom::thread;
use ring::Ring;
use std::sync::Arc;

/// Two writers meet in the only slot, while somebody reads.
#[test]
fn a_reader_sees_whole_records_only() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let ring = Arc::new(Ring::new(1));
        let writers = [1, 2].map(|value| {
            let ring = ring.clone();
            // Two words are enough to tell half a record.
            thread::spawn(move || ring.push([value; 2]))
        });
        for record in ring.read() {
            assert_eq!(record[0], record[1], "half of one record and half of another");
        }
        let written: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        assert!(written.contains(&true), "nobody has written");
        let read = ring.read();
        assert_eq!(read.len(), 1);
        assert_eq!(read[0][0], read[0][1]);
    });
}
