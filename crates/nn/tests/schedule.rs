//! Learning rates, and the text they are written in.

use poseidon_nn::{ParseScheduleError, Policy, Schedule};
use proptest::prelude::*;

fn rates(text: &str, base: f32, steps: &[u64]) -> Vec<f32> {
    let schedule: Schedule = text.parse().unwrap();
    steps.iter().map(|&step| schedule.at(base, step)).collect()
}

fn assert_rates(text: &str, base: f32, expected: &[(u64, f32)]) {
    let steps: Vec<_> = expected.iter().map(|(step, _)| *step).collect();
    for ((step, expected), got) in expected.iter().zip(rates(text, base, &steps)) {
        assert!((got - expected).abs() <= 1e-6 * base, "{text} at {step}: {got}, not {expected}");
    }
}

#[test]
fn every_policy_at_its_turning_points() {
    assert_rates("fixed", 0.5, &[(0, 0.5), (1_000_000, 0.5)]);
    assert_rates(
        "step:size=100,gamma=0.1",
        0.5,
        &[(0, 0.5), (99, 0.5), (100, 0.05), (199, 0.05), (200, 0.005)],
    );
    assert_rates(
        "multistep:at=10/15,gamma=0.5",
        1.0,
        &[(0, 1.0), (9, 1.0), (10, 0.5), (14, 0.5), (15, 0.25), (1000, 0.25)],
    );
    assert_rates(
        "poly:power=2,steps=10",
        1.0,
        &[(0, 1.0), (5, 0.25), (9, 0.01), (10, 0.0), (11, 0.0)],
    );
    assert_rates("cosine:steps=100,floor=0.2", 1.0, &[(0, 1.0), (50, 0.6), (100, 0.2), (500, 0.2)]);
    assert_rates("cosine:steps=4", 1.0, &[(1, 0.853_553_4), (2, 0.5), (4, 0.0)]);
}

#[test]
fn warm_up_rises_linearly_to_the_curve() {
    let expected = [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (99, 1.0)];
    assert_rates("fixed:warmup=10", 1.0, &expected);
    assert_rates("step:size=5,gamma=0.5,warmup=10", 1.0, &[(4, 0.5), (5, 0.3), (9, 0.5)]);
    assert_rates("fixed:warmup=1", 1.0, &[(0, 1.0)]);
}

#[test]
fn what_is_wrong_with_a_text_is_said() {
    for (text, expected) in [
        ("linear", "unknown schedule 'linear': expected fixed, step, multistep, poly or cosine"),
        ("", "unknown schedule '': expected fixed, step, multistep, poly or cosine"),
        ("step:size=10", "schedule 'step' needs 'gamma='"),
        ("step:gamma=0.1", "schedule 'step' needs 'size='"),
        ("cosine", "schedule 'cosine' needs 'steps='"),
        ("step:size", "'size' in a schedule: expected key=value"),
        ("step:size=0,gamma=1", "'size=0' in a schedule: expected a whole number of at least 1"),
        ("step:size=-3,gamma=1", "'size=-3' in a schedule: expected a whole number of at least 1"),
        ("step:size=1,gamma=inf", "'gamma=inf' in a schedule: expected a number of at least 0"),
        ("step:size=1,gamma=NaN", "'gamma=NaN' in a schedule: expected a number of at least 0"),
        (
            "multistep:at=5/3,gamma=1",
            "'at=5/3' in a schedule: expected ascending steps with '/' between them",
        ),
        ("fixed:size=3", "'size' of schedule 'fixed' is unknown or given twice"),
        ("cosine:steps=3,steps=4", "'steps' of schedule 'cosine' is unknown or given twice"),
        ("fixed:warmup=x", "'warmup=x' in a schedule: expected a whole number"),
    ] {
        let error: ParseScheduleError = text.parse::<Schedule>().unwrap_err();
        assert_eq!(error.to_string(), expected, "{text}");
    }
}

fn policy() -> impl Strategy<Value = Policy> {
    let factor = 0f32..10.0;
    prop_oneof![
        Just(Policy::Fixed),
        (1u64.., factor.clone()).prop_map(|(size, gamma)| Policy::Step { size, gamma }),
        (proptest::collection::btree_set(0u64.., 1..5), factor.clone())
            .prop_map(|(at, gamma)| Policy::Multistep { at: at.into_iter().collect(), gamma }),
        (factor.clone(), 1u64..).prop_map(|(power, steps)| Policy::Poly { power, steps }),
        (1u64.., factor).prop_map(|(steps, floor)| Policy::Cosine { steps, floor }),
    ]
}

proptest! {
    #[test]
    fn text_round_trips(policy in policy(), warmup: u64) {
        let schedule = Schedule { policy, warmup };
        prop_assert_eq!(schedule.to_string().parse(), Ok(schedule));
    }

    #[test]
    fn rates_are_finite_and_not_negative(policy in policy(), warmup: u64, step: u64) {
        let mut schedule = Schedule { policy, warmup };
        if let Policy::Step { gamma, .. } | Policy::Multistep { gamma, .. } = &mut schedule.policy {
            *gamma = gamma.min(1.0);
        }
        let rate = schedule.at(0.1, step);
        prop_assert!(rate.is_finite() && rate >= 0.0, "{}", rate);
    }
}
