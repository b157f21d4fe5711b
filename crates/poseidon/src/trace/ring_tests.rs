//! The ring of records, by threads of the system.

use super::ring::Ring;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn the_last_records_stay_in_order() {
    let ring = Ring::<3>::new(8);
    assert!(ring.read().is_empty());
    assert!((0..5).all(|i| ring.push([i; 3])));
    assert_eq!(ring.read(), (0..5).map(|i| [i; 3]).collect::<Vec<_>>());
    assert!((5..1000).all(|i| ring.push([i; 3])));
    assert_eq!(ring.read(), (992..1000).map(|i| [i; 3]).collect::<Vec<_>>());
}

#[test]
fn a_reader_never_sees_half_a_record() {
    let ring = Ring::<5>::new(16);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers = [0, 1].map(|thread| {
            let ring = &ring;
            scope.spawn(move || (0..20_000).filter(|i| ring.push([i * 2 + thread; 5])).count())
        });
        let reader = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for record in ring.read() {
                    assert!(record.iter().all(|word| *word == record[0]), "{record:?}");
                }
            }
        });
        let written: usize = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
        over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        assert!(written >= 16);
    });
    assert_eq!(ring.read().len(), 16);
}
