//! The budget in every order that lanes and whoever changes it may run in, as far as loom tells them
//! apart.

mod atomics {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
}

#[allow(dead_code, unreachable_pub, reason = "the crate's own is used elsewhere")]
#[expect(clippy::duplicate_mod, reason = "the same code, with other atomics")]
#[path = "shared.rs"]
mod shared;

use crate::Rate;
use loom::thread;
use shared::{Allowance, Budget};
use std::sync::Arc;
use std::time::Duration;

const NOW: Duration = Duration::from_secs(1);

/// A step at the old rate takes more than a second. Whether the lane takes it before, after or while
/// the budget is changed, nobody waits for it.
#[test]
fn a_lane_that_takes_a_step_while_the_budget_changes_does_not_hold_up_the_others() {
    loom::model(|| {
        let budget = Arc::new(Budget::new(Rate::new(10_000), 1));
        let (its, changed) = (budget.clone(), budget.clone());
        let lane = thread::spawn(move || {
            let mut lane = Allowance::new(its);
            // Two steps: the second one has to wait for the first one's time.
            if let Ok(room) = lane.poll_room(NOW) {
                lane.handle_sent(room.min(1 << 20));
            }
            let _ = lane.poll_room(NOW);
            lane
        });
        let change = thread::spawn(move || changed.set_rate(Rate::new(8_000_000_000), NOW));
        let mut lane = lane.join().unwrap();
        change.join().unwrap();
        let mut other = Allowance::new(budget);
        for lane in [&mut lane, &mut other] {
            assert!(lane.poll_room(NOW).is_ok(), "a step of the old budget is in the way");
        }
    });
}

/// Lanes take steps one behind the other, whoever comes first.
#[test]
fn no_time_is_given_to_two_lanes() {
    loom::model(|| {
        // A step takes longer than sending may run ahead.
        let budget = Arc::new(Budget::new(Rate::new(100_000), 2));
        let steps = [0, 1].map(|_| {
            let budget = budget.clone();
            thread::spawn(move || Allowance::new(budget).poll_room(NOW))
        });
        let at_once = steps.map(|step| step.join().unwrap().is_ok());
        assert_ne!(at_once[0], at_once[1]);
    });
}
