//! The board in every order that lanes and sleepers may run in, as far as loom tells them apart.
//!
//! `board.rs` is compiled here a second time, with loom's atomics and locks. A sleeper that nobody
//! wakes ends a model as a deadlock: no wait has a deadline here.

mod sync {
    pub(super) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
    pub(super) use loom::sync::{Condvar, Mutex};
}

#[allow(dead_code, reason = "what the models below do not use")]
#[expect(clippy::duplicate_mod, reason = "the same code, with other atomics")]
#[path = "board.rs"]
mod board;

use crate::Error;
use board::Board;
use loom::cell::UnsafeCell;
use loom::thread;
use poseidon_core::LayerId;
use std::rc::Rc;
use std::time::{Duration, Instant};

const LAYER: LayerId = LayerId(0);

/// Runs `body` in all orders with at most three switches that no thread asks for.
fn check(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(body);
}

fn never() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// The memory of a layer, a cell for each lane. Loom refuses an access that is not ordered after
/// the lane's.
struct Memory([UnsafeCell<u64>; 2]);

impl Memory {
    fn write(&self, lane: usize) {
        // SAFETY: loom ends the test if another thread uses the cell without being ordered.
        self.0[lane].with_mut(|cell| unsafe { *cell = 1 });
    }

    fn sum(&self) -> u64 {
        // SAFETY: as for `write`.
        self.0.iter().map(|cell| cell.with(|cell| unsafe { *cell })).sum()
    }
}

#[test]
fn who_waits_for_a_layer_is_woken_and_sees_what_all_lanes_wrote() {
    check(|| {
        let board = Rc::new(Board::new(1, 1));
        let memory = Rc::new(Memory([UnsafeCell::new(0), UnsafeCell::new(0)]));
        board.begin(LAYER, 2);
        let lanes = [0, 1].map(|lane| {
            let (board, memory) = (board.clone(), memory.clone());
            thread::spawn(move || {
                memory.write(lane);
                board.finish_part(LAYER);
            })
        });
        assert!(board.wait(LAYER, never()).unwrap());
        assert_eq!(memory.sum(), 2);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
}

#[test]
fn two_threads_that_wait_for_a_layer_are_both_woken() {
    check(|| {
        let board = Rc::new(Board::new(1, 1));
        board.begin(LAYER, 1);
        let beside = thread::spawn({
            let board = board.clone();
            move || assert!(board.wait_beside(LAYER, never()))
        });
        let lane = thread::spawn({
            let board = board.clone();
            move || board.finish_part(LAYER)
        });
        assert!(board.wait(LAYER, never()).unwrap());
        beside.join().unwrap();
        lane.join().unwrap();
    });
}

#[test]
fn a_failure_wakes_who_waits_for_a_layer_and_who_waits_for_the_end() {
    check(|| {
        let board = Rc::new(Board::new(1, 1));
        board.begin(LAYER, 1);
        board.open_lane();
        let lane = thread::spawn({
            let board = board.clone();
            move || {
                board.fail(Error::Config("the lane has failed".into()));
                board.close_lane();
            }
        });
        assert!(board.wait(LAYER, never()).is_err());
        assert!(board.wait_closed(|| Duration::from_secs(3600)));
        lane.join().unwrap();
    });
}
