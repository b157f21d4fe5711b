//! How often a job asks for memory. It goes on for weeks: small pieces of different ages that lie
//! between each other make its heap grow, though nothing is kept.

mod cluster;

use cluster::{Layout, without_hanging};
use poseidon::session::Builder;
use poseidon::{Layer, Session};
use std::alloc::{GlobalAlloc, Layout as Shape, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what all threads of this process ask for.
struct Counting;

static ASKED: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: the system's allocator does all of it. The counter asks for no memory.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller's promise is passed on.
    unsafe fn alloc(&self, shape: Shape) -> *mut u8 {
        ASKED.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller has promised.
        unsafe { System.alloc(shape) }
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn dealloc(&self, at: *mut u8, shape: Shape) {
        // SAFETY: as the caller has promised.
        unsafe { System.dealloc(at, shape) }
    }
}

/// The losses of all steps of an epoch are thousands of numbers. They pass through the coordinator as
/// text, and a worker makes what it asked for of them.
#[test]
fn a_gather_of_thousands_of_numbers_asks_for_memory_a_few_times() {
    const NUMBERS: u64 = 10_000;
    let before = Barrier::new(2);
    let asked = move |session: Session| {
        let losses: Vec<(f64, u64)> = (0..NUMBERS).map(|i| (i as f64 / 7.0, i)).collect();
        // What is made at the first time is there.
        session.gather("warm-up", &losses)?;
        before.wait();
        let asked = ASKED.load(Ordering::Relaxed);
        before.wait();
        let all = session.gather("epoch 1", &losses)?;
        before.wait();
        let asked = ASKED.load(Ordering::Relaxed) - asked;
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [NUMBERS as usize; 2]);
        session.finish()?;
        Ok(asked)
    };
    let describe = |builder: Builder| builder.layer(Layer::new("w", 10));
    let asked = without_hanging(move || {
        let (_coordinator, config) = Layout::workers(2).coordinator();
        Layout::workers(2).run_with(&config, describe, asked)
    });
    for asked in asked {
        let asked = asked.unwrap();
        assert!(asked < NUMBERS / 10, "two workers and the coordinator asked {asked} times");
    }
}
