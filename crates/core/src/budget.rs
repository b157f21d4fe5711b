//! How fast a node may send: the budget that its lanes share, and what one lane has of it.
//!
//! A lane takes a step of the budget before it writes. Every step has its place in time, behind all
//! steps that were taken before it, and the lane waits until its step's time has come. So lanes that
//! always have something to send take turns, and none of them starves. Nobody takes a lock.
//!
//! Bytes count as the wire carries them in full packets of 1500 bytes, with the headers of Ethernet,
//! IP and TCP. Acknowledgements and repeated packets are the kernel's, and do not count.

#[cfg(test)]
mod model;
mod shared;

use crate::Rate;
pub use shared::{Allowance, Budget};
use std::{fmt, str::FromStr};

/// What the budget is made of. Its model has loom's in their place.
mod atomics {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering};
}

/// A budget as people write it: a rate, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit(pub Option<Rate>);

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self(None)),
            rate => {
                let rate = rate.parse().map_err(|e| format!("expected 'none' or a rate: {e}"))?;
                Ok(Self(Some(rate)))
            }
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(rate) => rate.fmt(f),
            None => f.write_str("none"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::shared::{PACKET, PAYLOAD};
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;
    use std::time::Duration;

    const MS: Duration = Duration::from_millis(1);

    fn rate(mbit: u64) -> Option<Rate> {
        Rate::new(mbit * 1_000_000)
    }

    /// Bytes on the wire of a second at this rate.
    fn per_second(rate: Option<Rate>) -> f64 {
        rate.map_or(f64::INFINITY, |rate| rate.bits() as f64 / 8.0)
    }

    fn on_wire(bytes: usize) -> f64 {
        bytes as f64 * PACKET as f64 / PAYLOAD as f64
    }

    /// A lane of the simulated node, and when it looks again.
    struct Lane {
        allowance: Allowance,
        wake: Duration,
        sent: f64,
    }

    /// A node whose lanes always have something to send.
    struct Node {
        budget: Arc<Budget>,
        lanes: Vec<Lane>,
        now: Duration,
        /// What was sent, and when.
        sent: Vec<(Duration, f64)>,
    }

    impl Node {
        fn new(rate: Option<Rate>, lanes: usize) -> Self {
            let budget = Arc::new(Budget::new(rate, lanes));
            let lane = |_| Lane {
                allowance: Allowance::new(budget.clone()),
                wake: Duration::ZERO,
                sent: 0.0,
            };
            let lanes = (0..lanes).map(lane).collect();
            Self { budget, lanes, now: Duration::ZERO, sent: Vec::new() }
        }

        /// `draw` says how many bytes a link takes of those it is offered, and how much later than it
        /// wanted a lane wakes up.
        fn run(&mut self, until: Duration, mut draw: impl FnMut(usize) -> (usize, Duration)) {
            while self.now < until {
                for lane in self.lanes.iter_mut().filter(|lane| lane.wake <= self.now) {
                    let room = lane.allowance.poll_room(self.now);
                    let (taken, late) = draw(*room.as_ref().unwrap_or(&0));
                    match room {
                        Ok(_) => {
                            lane.allowance.handle_sent(taken);
                            lane.sent += on_wire(taken);
                            self.sent.push((self.now, on_wire(taken)));
                        }
                        Err(at) => lane.wake = at + late,
                    }
                }
                self.now = self.lanes.iter().map(|lane| lane.wake.max(self.now)).min().unwrap();
            }
        }

        /// The most and the least that was sent in any second from `from` on that is over.
        fn seconds(&self, from: Duration) -> (f64, f64) {
            let second = Duration::from_secs(1);
            let sent: Vec<_> = self.sent.iter().filter(|(at, _)| *at >= from).collect();
            let last = sent.last().unwrap().0;
            let (mut most, mut least) = (0f64, f64::INFINITY);
            let (mut end, mut sum) = (0, 0.0);
            for &(begin, bytes) in &sent {
                while end < sent.len() && sent[end].0 < *begin + second {
                    sum += sent[end].1;
                    end += 1;
                }
                if *begin + second > last {
                    break;
                }
                most = most.max(sum);
                // The second that begins just after this is the emptiest.
                least = least.min(sum - bytes);
                sum -= bytes;
            }
            (most, least)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn any_second_has_its_share_and_three_hundredths_more_at_most(
            mbit in prop::sample::select(vec![10u64, 100, 400, 2_500, 40_000]),
            lanes in 1usize..=8,
            dice in prop::collection::vec((1usize..300_000, 0u64..6_000), 1..50),
        ) {
            // A step is a packet at least, and each lane may have one.
            prop_assume!(mbit >= 100 || lanes == 1);
            let rate = rate(mbit);
            let mut node = Node::new(rate, lanes);
            let mut dice = dice.iter().cycle();
            node.run(Duration::from_secs(3), |room| {
                let (bytes, late) = dice.next().unwrap();
                ((*bytes).min(room), Duration::from_micros(*late))
            });
            let (most, least) = node.seconds(Duration::ZERO);
            let share = per_second(rate);
            prop_assert!(most <= 1.03 * share, "{most} of {share}");
            prop_assert!(least >= 0.97 * share, "{least} of {share}");
            // Nobody starves. A lane that is late again and again has a smaller part: while it
            // sleeps, others send.
            for lane in &node.lanes {
                let part = lane.sent / (3.0 * share) * lanes as f64;
                prop_assert!(part > 0.15, "a lane has {part} of what it should have");
            }
        }
    }

    #[test]
    fn a_change_takes_effect_at_once_also_for_a_lane_that_waits() {
        let all = |room| (room, Duration::ZERO);
        // The first packet at 10 kbit/s takes more than a second.
        let mut node = Node::new(Rate::new(10_000), 2);
        node.run(10 * MS, all);
        assert!(node.lanes.iter().all(|lane| lane.wake > Duration::from_secs(1)));
        node.now = 20 * MS;
        for changed in [rate(400), rate(200)] {
            node.budget.set_rate(changed, node.now);
            // Whoever changes the budget wakes the lanes.
            node.lanes.iter_mut().for_each(|lane| lane.wake = node.now);
            let before = node.now;
            node.run(node.now + Duration::from_secs(2), all);
            let (most, least) = node.seconds(before);
            let share = per_second(changed);
            assert!(least >= 0.97 * share && most <= 1.03 * share, "{least}, {most} of {share}");
            // The same rate again gives nothing more.
            let used = format!("{:?}", node.budget);
            node.budget.set_rate(changed, node.now);
            assert_eq!(format!("{:?}", node.budget), used);
        }
    }

    #[test]
    fn without_a_budget_there_is_always_room() {
        let budget = Arc::new(Budget::new(None, 1));
        let mut lane = Allowance::new(budget.clone());
        assert!(!lane.is_limited());
        for _ in 0..3 {
            assert_eq!(lane.poll_room(Duration::ZERO), Ok(usize::MAX));
            lane.handle_sent(1 << 30);
        }
        budget.set_rate(rate(8), MS);
        assert!(lane.is_limited());
        assert_eq!((budget.rate(), lane.poll_room(MS)), (rate(8), Ok(1912)));
        budget.set_rate(None, MS);
        assert_eq!((budget.rate(), lane.poll_room(MS)), (None, Ok(usize::MAX)));
        // What was sent meanwhile is not held against the lane.
        lane.handle_sent(1 << 30);
        budget.set_rate(rate(8), MS);
        assert_eq!(lane.poll_room(MS), Ok(1912));
    }

    /// It is counted all the same.
    #[test]
    fn what_cannot_wait_is_taken_from_what_comes_later() {
        let budget = Arc::new(Budget::new(rate(8), 1));
        let mut lane = Allowance::new(budget);
        while lane.poll_room(Duration::ZERO).is_ok_and(|room| {
            lane.handle_sent(room);
            true
        }) {}
        let at = lane.poll_room(Duration::ZERO).unwrap_err();
        // 8 Mbit/s are a byte in a microsecond: 100 packets take 151.4 ms.
        lane.handle_sent(100 * PAYLOAD as usize);
        let later = lane.poll_room(Duration::ZERO).unwrap_err();
        let waited = later - at;
        assert!((149 * MS..154 * MS).contains(&waited), "{waited:?}");
    }

    #[test]
    fn a_limit_is_a_rate_or_none() {
        assert_eq!("400mbit".parse(), Ok(Limit(rate(400))));
        assert_eq!("none".parse(), Ok(Limit(None)));
        for limit in [Limit(None), Limit(rate(2_500))] {
            assert_eq!(limit.to_string().parse(), Ok(limit));
        }
        let error = "fast".parse::<Limit>().unwrap_err();
        assert!(error.contains("'none'") && error.contains("10gbit"), "{error}");
    }
}
