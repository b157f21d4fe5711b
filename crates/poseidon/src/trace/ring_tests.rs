//! The ring of records, by threads of the system.

use super::WORDS;
use super::ring::Ring;

#[test]
fn the_last_records_stay_in_order() {
    let ring = Ring::new(8);
    assert!(ring.read().is_empty());
    (0..5).for_each(|i| ring.push([i; WORDS]));
    assert_eq!(ring.read(), (0..5).map(|i| [i; WORDS]).collect::<Vec<_>>());
    (5..1000).for_each(|i| ring.push([i; WORDS]));
    assert_eq!(ring.read(), (992..1000).map(|i| [i; WORDS]).collect::<Vec<_>>());
}

#[test]
fn a_reader_never_sees_half_a_record() {
    let ring = Ring::new(16);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let ring = &ring;
            scope.spawn(move || (0..20_000).for_each(|i| ring.push([i * 2 + thread; WORDS])));
        }
        for _ in 0..2_000 {
            for record in ring.read() {
                assert!(record.iter().all(|word| *word == record[0]), "{record:?}");
            }
        }
    });
}
