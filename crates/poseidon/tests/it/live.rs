//! What a coordinator tells of its job while the job runs.

use crate::cluster::{Layout, without_hanging};
use poseidon::coordinator::query;
use poseidon::live::{LiveLevel, LiveNodeState};
use poseidon::{Buffer, Config, Error, Layer, LayerId, LayerKind, LiveJob, Policy, Rules, Session};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

fn live(config: &Config) -> LiveJob {
    let value = query(&config.coordinator, &config.credentials(), "live", PATIENCE).unwrap();
    serde_json::from_value(value.unwrap()).unwrap()
}

/// Makes steps, as all workers have to, until somebody has seen what it waits for.
fn step_until(session: &Session, mut seen: impl FnMut() -> bool) -> Result<(), Error> {
    let end = Instant::now() + PATIENCE;
    let mut buffers = [Buffer::zeroed(500), Buffer::zeroed(30)];
    loop {
        for (layer, buffer) in [LayerId(0), LayerId(1)].into_iter().zip(&mut buffers) {
            session.send(layer, std::mem::take(buffer))?;
            *buffer = session.receive(layer)?.result;
        }
        // All workers stop together.
        let own = seen() || Instant::now() > end;
        if session.gather("seen", &own)?.iter().all(|seen| *seen) {
            return Ok(());
        }
    }
}

#[test]
fn every_node_is_told_of_and_so_is_another_plan_and_who_leaves() {
    without_hanging(|| {
        let layout = Layout::workers(2);
        let (_coordinator, config) = layout.coordinator();
        let describe = |builder: poseidon::session::Builder| {
            let fc = Layer { kind: LayerKind::Fc { m: 5, n: 5 }, ..Layer::new("fc", 30) };
            builder.layers([Layer::new("conv", 500), fc]).scheme(Policy::Ps).batch(2)
        };
        let results = layout.run_with(&config, describe, |mut session| {
            let first = session.rank() == 0;
            step_until(&session, || {
                if !first {
                    return true;
                }
                let job = live(&config);
                let [a, b] = &job.nodes[..] else { panic!("{job:?}") };
                let known = [a, b].iter().all(|n| n.steps > 0 && n.waiting.is_some());
                let bytes = a.sent + a.sent_inside > 0.0;
                known && bytes && !job.layers.is_empty() && !job.history.is_empty()
            })?;
            if first {
                let job = live(&config);
                assert_eq!((job.plan.epoch, job.plan.ps, job.plan.sfb), (1, 2, 0), "{job:?}");
                assert_eq!(job.concerns(), []);
                assert!(job.waiting.is_some_and(|share| (0.0..=1.0).contains(&share)), "{job:?}");
                let known = job.layers.iter().all(|l| ["conv", "fc"].contains(&&*l.layer));
                assert!(known, "{job:?}");
            }
            let rules = Rules { policy: Policy::Sfb, batch: Some(2), ..Rules::default() };
            session.replan(rules, |_| &[][..])?;
            // The plan is told in its own time.
            let end = Instant::now() + PATIENCE;
            while first && live(&config).plan.epoch < 2 {
                assert!(Instant::now() < end, "{:?}", live(&config));
                std::thread::sleep(Duration::from_millis(20));
            }
            if first {
                let ask = |key| query(&config.coordinator, &config.credentials(), key, PATIENCE);
                assert_eq!(ask("epoch")?.unwrap(), 2);
                assert_eq!(ask("plan.1.scheme")?.unwrap(), "sfb");
                assert_eq!(ask("live.plan.sfb")?.unwrap(), 1);
                assert_eq!(ask("live.nothing")?, None);
            }
            session.finish()
        });
        results.into_iter().for_each(|result| result.unwrap());
        let job = live(&config);
        assert!(job.nodes.iter().all(|node| node.state == LiveNodeState::Left), "{job:?}");
        let words: Vec<_> = job.events.iter().map(|event| &*event.words).collect();
        for part in ["the job has begun, with 2 nodes", "replaced, epoch 2", "worker 1 is done"] {
            assert!(words.iter().any(|words| words.contains(part)), "{part}: {words:?}");
        }
        assert!(job.events.iter().all(|event| event.level == LiveLevel::Note), "{words:?}");
    });
}
