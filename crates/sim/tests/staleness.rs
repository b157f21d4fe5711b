//! Workers at different clocks (Poseidon 2015 §3): what holds of every simulated schedule.

use poseidon_core::{Cluster, Consistency, LayerId, LayerKind, NodeId, Servers};
use poseidon_sim::outcome::{Outcome, StepTimes};
use poseidon_sim::setup::Jitter;
use poseidon_sim::{
    Error, LayerTime, Model, ModelLayer, Network, Overlap, Places, SchemeRule, Setup, simulate,
};
use proptest::prelude::*;
use std::time::Duration;

const STEPS: usize = 12;

/// A net whose layers go by factors where `by_factors` says so, and by server elsewhere. A layer
/// computes for 10 ms. Its gradient passes a port in about 1 ms, its factors in less.
fn setup(workers: u16, servers: Servers, by_factors: &[bool]) -> Setup {
    let layer = |(number, by_factors): (usize, &bool)| ModelLayer {
        name: format!("layer{number}"),
        kind: if *by_factors { LayerKind::Fc { m: 256, n: 1024 } } else { LayerKind::Other },
        parameters: 256 * 1024,
        rows: 1,
        forward_flops: 1.0,
        backward_flops: 2.0,
    };
    let layers = by_factors.iter().enumerate().map(layer).collect();
    let model = Model { name: "random".into(), layers };
    let times = vec![LayerTime { forward: 0.003, backward: 0.007 }; by_factors.len()];
    let cluster = Cluster::new(workers, servers, 2).unwrap();
    let network = Network::ethernet(1e9);
    // Only fully connected layers have factors.
    let scheme = SchemeRule::Sfb;
    Setup { scheme, iterations: STEPS, ..Setup::new(&model, times, cluster, 4, network) }
}

/// All that may differ between schedules, but for the consistency.
fn setups() -> impl Strategy<Value = Setup> {
    let servers = prop_oneof![
        Just(Servers::Colocated),
        (1u16..=3).prop_map(Servers::Dedicated),
        (1u16..=2).prop_map(Servers::Mixed),
    ];
    let jitter = prop_oneof![
        Just(Jitter::None),
        (0.05..1.0).prop_map(Jitter::LogNormal),
        (0.01..0.5, 2.0..20.0)
            .prop_map(|(probability, factor)| Jitter::Tail { probability, factor }),
    ];
    let by_factors = prop::collection::vec(any::<bool>(), 1..=3);
    let overlap = prop_oneof![Just(Overlap::None), Just(Overlap::Backward), Just(Overlap::Full)];
    let slow = prop::collection::vec((0u16..6, 1.0..8.0), 0..=2);
    let rest =
        (overlap, slow, 1u16..=3, prop_oneof![Just(1e8), Just(1e9), Just(1e10)], any::<u64>());
    (2u16..=6, servers, by_factors, jitter, rest).prop_map(
        |(workers, servers, by_factors, jitter, (overlap, slow, ranks, bandwidth, seed))| {
            let mut setup = setup(workers, servers, &by_factors);
            let places = Places { ranks_per_host: ranks, hosts_per_rack: None };
            setup.cluster = places.place(setup.cluster);
            (setup.overlap, setup.seed, setup.network.bandwidth) = (overlap, seed, bandwidth);
            setup.stragglers.jitter = jitter;
            let slow = slow.into_iter().map(|(node, factor)| (NodeId(node % workers), factor));
            setup.stragglers.slow = slow.collect();
            setup
        },
    )
}

fn consistencies() -> impl Strategy<Value = Consistency> {
    prop_oneof![4 => (0u16..=4).prop_map(Consistency::Ssp), 1 => Just(Consistency::Asp)]
}

fn run(setup: &Setup) -> Outcome {
    let outcome = simulate(setup).unwrap();
    assert_eq!(outcome.halt, None);
    assert!(outcome.steps.iter().all(|steps| steps.len() == setup.iterations));
    outcome
}

fn computed(step: &StepTimes) -> f64 {
    step.computed.expect("the job did not stop")
}

/// How many steps of a worker were computed by `time`.
fn steps_by(steps: &[StepTimes], time: f64) -> usize {
    steps.iter().filter(|step| computed(step) <= time).count()
}

/// How many steps more than the slowest worker a worker had contributed, when it started a step, at
/// most.
fn largest_lead(outcome: &Outcome) -> usize {
    let slowest = |time| outcome.steps.iter().map(|steps| steps_by(steps, time)).min().unwrap();
    let starts = outcome.steps.iter().flat_map(|steps| steps.iter().enumerate());
    starts.map(|(before, step)| before - slowest(step.started).min(before)).max().unwrap()
}

/// The staleness that holds for the first layer: that of `setup`, or what memory allows. `None` if
/// nobody waits for anybody.
fn staleness(setup: &Setup) -> Option<usize> {
    let by_factors = setup.plan().factors(LayerId(0)).is_some();
    let lead = match by_factors {
        true => setup.consistency.lead(),
        false => setup.consistency.lead_without_memory(),
    };
    (lead != u64::MAX).then_some(lead as usize)
}

/// The shortest time in which a contribution to the first layer can get to another worker.
fn shortest_way(setup: &Setup) -> Duration {
    let by_factors = setup.plan().factors(LayerId(0)).is_some();
    let hop = setup.network.latency.min(setup.network.memory.latency);
    match setup.cluster.servers() {
        // Dedicated servers have hosts of their own.
        Servers::Dedicated(_) if !by_factors => 2 * setup.network.latency,
        _ => hop,
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256, failure_persistence: None, ..Default::default()
    })]

    /// §3: a worker that reads at iteration t has all updates of all workers up to t - s - 1. They
    /// had the time to come. And so nobody starts a step more than s steps ahead of anybody, or
    /// ends it more than s + 1 ahead.
    #[test]
    fn whoever_starts_a_step_has_seen_all_but_the_last_few(
        setup in setups(), consistency in consistencies(),
    ) {
        let setup = Setup { consistency, ..setup };
        let outcome = run(&setup);
        let Some(staleness) = staleness(&setup) else { return Ok(()) };
        let way = shortest_way(&setup).as_secs_f64();
        for (worker, steps) in outcome.steps.iter().enumerate() {
            let others = outcome.steps.iter().enumerate().filter(|(other, _)| *other != worker);
            for (other, others_steps) in others {
                // `step` counts from 0.
                for (step, times) in steps.iter().enumerate() {
                    if let Some(seen) = step.checked_sub(staleness + 1) {
                        let there = computed(&others_steps[seen]) + way;
                        prop_assert!(
                            times.started > there - 1e-9,
                            "worker {worker} starts step {step} at {} without {seen} of {other}, \
                             which is there at {there} at best", times.started
                        );
                    }
                    let behind = steps_by(others_steps, computed(times));
                    // It has contributed `step + 1` times.
                    prop_assert!(step <= behind + staleness);
                }
            }
        }
        prop_assert!(largest_lead(&outcome) <= staleness);
    }

    /// With no staleness, everything happens when it happens in bulk synchronous execution.
    #[test]
    fn no_staleness_is_bulk_synchronous(setup in setups()) {
        let bsp = run(&Setup { consistency: Consistency::Bsp, ..setup.clone() });
        let ssp = run(&Setup { consistency: Consistency::Ssp(0), ..setup });
        prop_assert_eq!(format!("{:?}", bsp), format!("{:?}", ssp));
    }

    /// Fast workers end their last step no later if they may be further ahead of a slow one.
    #[test]
    fn more_staleness_is_never_slower_for_fast_workers(
        workers in 2u16..=6,
        servers in prop_oneof![Just(Servers::Colocated), (1u16..=3).prop_map(Servers::Dedicated)],
        by_factors in prop::collection::vec(any::<bool>(), 1..=3),
        slow in 0u16..6,
        factor in 1.5..8.0,
    ) {
        let mut setup = setup(workers, servers, &by_factors);
        let slow = NodeId(slow % workers);
        setup.stragglers.slow = vec![(slow, factor)];
        let mut last = f64::INFINITY;
        for staleness in 0..=4 {
            setup.consistency = Consistency::Ssp(staleness);
            let outcome = run(&setup);
            let fast = outcome.steps.iter().zip(setup.cluster.worker_ids());
            let fast = fast.filter(|(_, worker)| *worker != slow);
            let end = fast.map(|(steps, _)| computed(&steps[STEPS - 1])).fold(0.0, f64::max);
            prop_assert!(end <= last, "staleness {staleness}: {end} s after {last} s");
            last = end;
        }
    }
}

/// The bound is reached, for layers by server and by factors: a slow worker is left s steps behind
/// and no more. So it does not hold by chance.
#[test]
fn fast_workers_are_as_far_ahead_as_they_may_be() {
    for by_factors in [false, true] {
        for servers in [Servers::Colocated, Servers::Dedicated(1)] {
            let mut setup = setup(3, servers, &[by_factors]);
            setup.stragglers.slow = vec![(NodeId(1), 10.0)];
            for staleness in 0..=4 {
                setup.consistency = Consistency::Ssp(staleness);
                assert_eq!(largest_lead(&run(&setup)), usize::from(staleness), "{setup:?}");
            }
        }
    }
}

/// Nobody waits for anybody where a step takes no memory. By factors, a clock takes memory until
/// all have contributed to it.
#[test]
fn asynchronous_workers_wait_for_memory_only() {
    for (by_factors, lead) in [(false, 39), (true, usize::from(Consistency::MOST))] {
        let mut setup = setup(3, Servers::Colocated, &[by_factors]);
        setup.iterations = 40;
        setup.consistency = Consistency::Asp;
        setup.stragglers.slow = vec![(NodeId(1), 100.0)];
        assert_eq!(largest_lead(&run(&setup)), lead);
    }
}

/// Nobody calls the roll in a simulation, so dropping is refused and not simulated as something else.
#[test]
fn workers_that_are_dropped_are_refused() {
    let mut setup = setup(3, Servers::Colocated, &[false]);
    setup.consistency = Consistency::DropSlowest(1);
    assert_eq!(simulate(&setup).unwrap_err(), Error::Dropping);
}
