//! Workers at different clocks: what they see, in what order, and that all have the same in the end.

use crate::cluster::{Layout, without_hanging};
use poseidon::session::Builder;
use poseidon::{
    Buffer, ChunkSize, Clock, Consistency, Error, Factors, Layer, LayerKind, Optimizer, Policy,
    Servers, Session,
};
use std::time::Duration;

/// Numbers of the layer that goes by server: worker r counts its steps in those at r modulo the number
/// of workers.
const LEN: usize = 60;
const M: usize = 4;
const N: usize = 8;
const STEPS: u64 = 12;

fn describe(builder: Builder, consistency: Consistency, rule: &str) -> Builder {
    let kind = LayerKind::Fc { m: M, n: N };
    builder
        .layer(Layer::new("counts", LEN))
        .layer(Layer { kind, ..Layer::new("fc", M * N) })
        .chunk_size(ChunkSize { min: 16, max: 64 })
        .scheme(Policy::Sfb)
        .batch(1)
        .optimizer(rule.parse::<Optimizer>().unwrap())
        .learning_rate(1.0)
        .consistency(consistency)
}

/// How many steps of every worker `values` has. A step of one worker is -1 divided by their number.
fn seen(values: &[f32], workers: usize) -> Vec<u64> {
    (0..workers)
        .map(|rank| {
            let counts: Vec<u64> = (rank..values.len())
                .step_by(workers)
                .map(|i| (values[i] * workers as f32).round() as u64)
                .collect();
            *counts.iter().min().unwrap()
        })
        .collect()
}

/// What the factors of `rank` at `clock` become. With momentum only equal ones can be told apart from
/// what they become.
fn product(clock: u64, rank: u16, varies: bool) -> f32 {
    if varies { (1 + (clock * 7 + u64::from(rank) * 3) % 5) as f32 } else { 1.0 }
}

/// The weights after `clocks` clocks.
fn sum(clocks: u64, workers: u16, varies: bool) -> f32 {
    let clock = |clock| (0..workers).map(move |rank| product(clock, rank, varies)).sum::<f32>();
    (1..=clocks).map(clock).sum::<f32>() / f32::from(workers)
}

/// Trains `STEPS` steps. Workers of a higher rank are slower. Returns what it ends with.
fn train(
    session: &Session,
    consistency: Consistency,
    varies: bool,
) -> Result<(Vec<f32>, Vec<f32>), Error> {
    let (counts, fc) = (session.layer("counts")?, session.layer("fc")?);
    let (workers, rank) = (session.workers(), session.rank());
    session.broadcast(counts, vec![0.0; LEN].into())?;
    session.broadcast(fc, vec![0.0; M * N].into())?;
    session.receive(counts)?;
    let mut weights = session.receive(fc)?.result;
    let mut before = vec![0; workers];
    let gradient: Vec<f32> =
        (0..LEN).map(|i| if i % workers == usize::from(rank) { -1.0 } else { 0.0 }).collect();
    let v = vec![1.0; N];
    let mut values = Vec::new();
    let mut steps = 0;
    for clock in 1..=STEPS {
        std::thread::sleep(Duration::from_millis(u64::from(rank) * 3));
        if clock == STEPS {
            session.step_together()?;
        }
        let u = vec![-product(clock, rank, varies); M];
        session.send_factors(fc, &[Factors { u: &u, v: &v }], weights)?;
        session.send_into(counts, gradient.clone().into(), Buffer::zeroed(LEN))?;
        if clock % 2 == 0 {
            session.rebuild(fc)?;
        }
        let received = session.receive(counts)?;
        assert_eq!(received.clock, Clock(clock));
        let now = seen(&received.result, workers);
        let promised = clock.saturating_sub(consistency.lead_without_memory());
        for (worker, (now, before)) in now.iter().zip(&before).enumerate() {
            assert!(now >= before, "worker {rank} reads worker {worker}: {before}, then {now}");
            assert!(*now >= promised, "worker {rank} at {clock} has {now} of worker {worker}");
        }
        before = now;
        values = received.result.to_vec();
        weights = session.receive(fc)?.result;
        // All of some clocks, and nothing of any other.
        let sums: Vec<f32> = (0..=STEPS).map(|c| sum(c, workers as u16, varies)).collect();
        let taken = sums.iter().position(|sum| *sum == weights[0]);
        let taken = taken.unwrap_or_else(|| panic!("{} is no sum of {sums:?}", weights[0])) as u64;
        assert!(taken >= steps, "worker {rank} at {clock}: {taken} steps after {steps}");
        assert!(taken >= clock.saturating_sub(consistency.lead()), "{taken} steps at {clock}");
        assert!(weights.iter().all(|weight| *weight == weights[0]));
        steps = taken;
    }
    Ok((values, weights.to_vec()))
}

fn check(layout: Layout, consistency: Consistency, rule: &'static str) {
    let varies = rule == "sgd";
    let ends = layout.run(
        move |builder| describe(builder, consistency, rule),
        move |session| train(session, consistency, varies),
    );
    let ends: Vec<_> = ends.into_iter().map(|end| end.unwrap()).collect();
    for (values, weights) in &ends {
        assert_eq!((values, weights), (&ends[0].0, &ends[0].1), "{layout:?}");
        assert_eq!(seen(values, ends.len()), vec![STEPS; ends.len()], "{layout:?} {rule}");
        assert_eq!(weights[0], sum(STEPS, ends.len() as u16, varies));
    }
}

/// With momentum and dampening alike, equal gradients are equal steps.
const RULES: [&str; 2] = ["sgd", "sgd:momentum=0.5,dampening=0.5"];

#[test]
fn readers_see_what_is_promised_and_all_end_alike() {
    without_hanging(|| {
        for rule in RULES {
            for consistency in [Consistency::Ssp(1), Consistency::Ssp(3), Consistency::Asp] {
                check(Layout::workers(4), consistency, rule);
            }
        }
    });
}

#[test]
fn lanes_dedicated_servers_and_hosts_change_nothing() {
    without_hanging(|| {
        let consistency = Consistency::Ssp(2);
        for rule in RULES {
            check(Layout { lanes: 2, ..Layout::workers(2) }, consistency, rule);
            check(
                Layout { servers: Servers::Dedicated(2), ..Layout::workers(2) },
                consistency,
                rule,
            );
            check(Layout::hosts(&[2, 2]), consistency, rule);
        }
    });
}

#[test]
fn what_cannot_mean_anything_is_refused_in_words() {
    without_hanging(|| {
        let refused = |describe: fn(Builder) -> Builder| {
            let ends = Layout::workers(1).run(describe, |_| Ok(()));
            ends.into_iter().next().unwrap().unwrap_err().to_string()
        };
        let why = refused(|b| describe(b, Consistency::Ssp(1), "mean"));
        assert!(
            why.contains("'counts'") && why.contains("'mean'") && why.contains("ssp:1"),
            "{why}"
        );
        let why = refused(|b| describe(b, Consistency::Asp, "sgd").deterministic(true));
        assert!(why.contains("'asp'") && why.contains("deterministic"), "{why}");
    });
}

/// A worker that leaves without having waited for the others is told so.
#[test]
fn the_last_step_must_be_taken_together() {
    without_hanging(|| {
        let ends = Layout::workers(2).run(
            |builder| describe(builder, Consistency::Ssp(1), "sgd"),
            |session| {
                let counts = session.layer("counts")?;
                session.broadcast(counts, vec![0.0; LEN].into())?;
                session.receive(counts)?;
                session.send(counts, vec![0.0; LEN].into())?;
                session.receive(counts)?;
                session.say_goodbye()
            },
        );
        for end in ends {
            let why = end.unwrap_err().to_string();
            assert!(why.contains("step_together") || why.contains("worker"), "{why}");
        }
    });
}

/// Between steps that are taken together, shards and workers are at clocks of their own.
#[test]
fn what_a_rule_has_is_known_after_a_step_that_is_taken_together() {
    without_hanging(|| {
        let ends = Layout::workers(2).run(
            |builder| describe(builder, Consistency::Ssp(1), "sgd:momentum=0.5"),
            |session| {
                let (counts, fc) = (session.layer("counts")?, session.layer("fc")?);
                session.broadcast(counts, vec![0.0; LEN].into())?;
                session.broadcast(fc, vec![0.0; M * N].into())?;
                session.receive(counts)?;
                let mut weights = session.receive(fc)?.result;
                let (u, v) = (vec![-1.0; M], vec![1.0; N]);
                for clock in 1..=2 {
                    if clock == 2 {
                        let why = session.rule_state(counts).unwrap_err().to_string();
                        assert!(why.contains("step_together") && why.contains("counts"), "{why}");
                        session.step_together()?;
                    }
                    session.send_factors(fc, &[Factors { u: &u, v: &v }], weights)?;
                    session.send(counts, vec![-1.0; LEN].into())?;
                    session.receive(counts)?;
                    weights = session.receive(fc)?.result;
                }
                Ok([session.rule_state(counts)?, session.rule_state(fc)?])
            },
        );
        let ends: Vec<_> = ends.into_iter().map(|end| end.unwrap()).collect();
        for layer in 0..2 {
            assert!(ends.iter().all(|end| end[layer].steps == 2));
            let vectors = ends.iter().map(|end| &end[layer].vectors[0]);
            let sum = vectors.fold(vec![0.0; ends[0][layer].vectors[0].len()], |sum, vector| {
                sum.iter().zip(vector).map(|(a, b)| a + b).collect()
            });
            assert!(sum.iter().all(|number| *number == -1.5), "{sum:?}");
        }
    });
}
