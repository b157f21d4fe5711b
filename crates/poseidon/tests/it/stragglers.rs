//! Jobs that do not wait for their slowest workers.

use crate::cluster::{Layout, without_hanging};
use poseidon::session::{Builder, Turnout};
use poseidon::{ChunkSize, Clock, Consistency, Error, Layer, Optimizer, Policy, Servers, Session};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const LAYERS: [(&str, usize); 3] = [("first", 100), ("second", 7), ("third", 1000)];
/// Every so many clocks are taken together.
const TOGETHER: u64 = 10;
const CLOCKS: u64 = 4 * TOGETHER;
/// How many clocks the others are ahead of a slow worker before it sends.
const BEHIND: u64 = 3;

fn describe(builder: Builder, drops: u16, rule: &str) -> Builder {
    builder
        .layers(LAYERS.map(|(name, len)| Layer::new(name, len)))
        .chunk_size(ChunkSize { min: 16, max: 256 })
        .optimizer(rule.parse::<Optimizer>().unwrap())
        .learning_rate(1.0)
        .consistency(Consistency::DropSlowest(drops))
}

/// What a worker has seen: the value of all parameters by clock, and who counted.
type Seen = (BTreeMap<u64, f32>, Vec<Turnout>);

/// Trains until the last clock. A slow worker waits before it sends until another one is ahead.
fn train(session: &Session, slow: &[u16], ahead: &AtomicU64) -> Result<Seen, Error> {
    let layers: Vec<_> =
        LAYERS.iter().map(|(name, _)| session.layer(name)).collect::<Result<_, _>>()?;
    let mut values = Vec::new();
    for (layer, (_, len)) in layers.iter().zip(LAYERS) {
        session.broadcast(*layer, vec![0.0; len].into())?;
        values.push(session.receive(*layer)?.result);
    }
    let mut seen = BTreeMap::new();
    let rank = session.rank();
    let mut clock = Clock(0);
    while clock.0 < CLOCKS {
        let next = clock.next();
        if next.0.is_multiple_of(TOGETHER) {
            session.step_together()?;
        }
        // No further than the next clock that waits for this worker.
        let limit = next.0.next_multiple_of(TOGETHER) - 1;
        let wanted = if slow.contains(&rank) { (next.0 + BEHIND).min(limit) } else { 0 };
        while ahead.load(Ordering::SeqCst) < wanted {
            thread::sleep(Duration::from_millis(1));
        }
        // The layer nearest the output first.
        for (layer, values) in layers.iter().zip(values.drain(..)).rev() {
            let gradient = vec![-f32::from(1u16 << rank); values.len()];
            session.send_into(*layer, gradient.into(), values)?;
        }
        let mut clocks = Vec::new();
        for layer in &layers {
            let received = session.receive(*layer)?;
            let first = received.result[0];
            assert!(received.result.iter().all(|value| *value == first), "one step for all");
            assert_eq!(*seen.entry(received.clock.0).or_insert(first), first, "{}", received.clock);
            assert_eq!(session.clock(*layer)?, received.clock);
            clocks.push(received.clock);
            values.push(received.result);
        }
        assert!(clocks.iter().all(|c| *c == clocks[0]), "layers are apart: {clocks:?}");
        clock = clocks[0];
        ahead.fetch_max(clock.0, Ordering::SeqCst);
    }
    Ok((seen, session.turnout()))
}

fn check(layout: Layout, drops: u16, slow: &'static [u16], rule: &'static str) {
    let ahead = Arc::new(AtomicU64::new(0));
    let ends = layout.run(
        move |builder| describe(builder, drops, rule),
        move |session| train(session, slow, &ahead),
    );
    let ends: Vec<Seen> = ends.into_iter().map(|end| end.unwrap()).collect();
    let mut known = BTreeMap::new();
    for (seen, _) in &ends {
        for (clock, value) in seen {
            assert_eq!(known.entry(*clock).or_insert(*value), value, "{layout:?}: clock {clock}");
        }
        assert!(seen.contains_key(&CLOCKS));
    }
    let turnout = &ends[0].1;
    let together = CLOCKS / TOGETHER;
    for (rank, Turnout { counted, late }) in turnout.iter().enumerate() {
        let (is_slow, seen) = (slow.contains(&(rank as u16)), ends[rank].0.len() as u64);
        assert!((together..=CLOCKS).contains(counted), "{turnout:?}");
        // One answer for each contribution, whether it counts or not.
        assert_eq!(counted + late, seen, "{layout:?}, worker {rank}: {turnout:?}");
        assert!(!is_slow || (*late > 0 && seen < CLOCKS), "{layout:?}: {turnout:?}");
    }
    if rule == "sgd" {
        let total: u64 = turnout.iter().map(|of| of.counted).sum();
        let workers = turnout.len() as u64;
        assert!(total >= CLOCKS * (workers - u64::from(drops)), "{turnout:?}");
    }
}

#[test]
fn a_slow_worker_is_dropped_and_goes_on_with_what_the_others_have() {
    without_hanging(|| {
        for rule in ["sgd", "sgd:momentum=0.9", "adamw"] {
            check(Layout::workers(4), 1, &[3], rule);
        }
    });
}

#[test]
fn the_worker_whose_node_calls_the_roll_may_be_the_slow_one() {
    without_hanging(|| check(Layout::workers(3), 1, &[0], "sgd"));
}

#[test]
fn dedicated_servers_and_hosts_change_nothing() {
    without_hanging(|| {
        check(Layout { servers: Servers::Dedicated(2), ..Layout::workers(3) }, 1, &[1], "sgd");
        check(Layout::hosts(&[2, 2]), 2, &[1, 2], "sgd");
        check(Layout { lanes: 2, ..Layout::workers(3) }, 2, &[1], "sgd");
    });
}

/// The mean is over those who count, at every clock.
#[test]
fn the_mean_is_over_those_who_count() {
    without_hanging(|| {
        let ahead = Arc::new(AtomicU64::new(0));
        let ends = Layout::workers(2).run(
            |builder| describe(builder, 1, "sgd"),
            move |session| train(session, &[1], &ahead),
        );
        let (seen, _) = ends.into_iter().next().unwrap().unwrap();
        // Worker 0 contributes 1, worker 1 contributes 2: alone 1 is added, together 1.5, and never
        // 0.5, which a mean over both would give without worker 1.
        let mut before = (0, 0.0);
        for (clock, value) in seen {
            if clock == before.0 + 1 {
                assert!([1.0, 1.5, 2.0].contains(&(value - before.1)), "{value} after {before:?}");
            }
            before = (clock, value);
        }
    });
}

#[test]
fn what_cannot_mean_anything_is_refused_in_words() {
    without_hanging(|| {
        let refused = |workers, describe: fn(Builder) -> Builder| {
            let ends = Layout::workers(workers).run(describe, |_| Ok(()));
            ends.into_iter().next().unwrap().unwrap_err().to_string()
        };
        let why = refused(1, |b| describe(b, 1, "sgd"));
        assert!(why.contains("drop-slowest:1") && why.contains("at least one must count"), "{why}");
        let why = refused(2, |b| describe(b, 1, "mean"));
        assert!(why.contains("'mean'") && why.contains("drop-slowest:1"), "{why}");
        let why = refused(2, |b| describe(b, 1, "sgd").deterministic(true));
        assert!(why.contains("deterministic"), "{why}");
        let why = refused(2, |b| describe(b, 1, "sgd").scheme(Policy::Sfb));
        assert!(why.contains("factors") && why.contains("'ps'"), "{why}");
    });
}

/// Workers that disagree about a step that waits for all are told so.
#[test]
fn all_or_none_take_a_step_together() {
    without_hanging(|| {
        let ends = Layout::workers(2).run(
            |builder| describe(builder, 1, "sgd"),
            |session| {
                for (name, len) in LAYERS {
                    let layer = session.layer(name)?;
                    session.broadcast(layer, vec![0.0; len].into())?;
                    session.receive(layer)?;
                }
                if session.rank() == 1 {
                    session.step_together()?;
                }
                for (name, len) in LAYERS {
                    session.send(session.layer(name)?, vec![0.0; len].into())?;
                }
                for (name, _) in LAYERS {
                    session.receive(session.layer(name)?)?;
                }
                Ok(())
            },
        );
        let words: Vec<String> =
            ends.into_iter().filter_map(Result::err).map(|e| e.to_string()).collect();
        assert!(words.iter().any(|why| why.contains("together with all others")), "{words:?}");
    });
}
