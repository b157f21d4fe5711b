//! A plan that is replaced in the middle of training: nobody can tell from the parameters.

use crate::cluster::{Layout, without_hanging};
use poseidon::session::Builder;
use poseidon::{
    Buffer, ChunkSize, Error, Factors, Layer, LayerId, LayerKind, Optimizer, Placement, Policy,
    Rules, Scheme, Servers, Session,
};

const M: usize = 24;
const N: usize = 40;
const BATCH: usize = 4;
const CONV: usize = 3000;
const STEPS: u64 = 9;
/// The plan is replaced after this step.
const HALF: u64 = 4;

/// Numbers whose sums depend on the order they are added in.
fn number(rank: u16, clock: u64, index: usize) -> f32 {
    let mixed = (index as u64 * 2_654_435_761 + clock * 97 + u64::from(rank) * 31) % 1009;
    (mixed as f32 - 504.0) * 10f32.powi(i32::from(rank) * 2 - 3)
}

fn factors(rank: u16, clock: u64) -> (Vec<f32>, Vec<f32>) {
    let numbers = |len, from| (0..len).map(move |i| number(rank, clock, from + i) / 100.0);
    (numbers(BATCH * M, 0).collect(), numbers(BATCH * N, 5000).collect())
}

fn gradient(rank: u16, clock: u64) -> Vec<f32> {
    let (u, v) = factors(rank, clock);
    let mut sum = vec![0.0; M * N + M];
    for (u, v) in u.chunks_exact(M).zip(v.chunks_exact(N)) {
        for i in 0..M {
            (0..N).for_each(|j| sum[i * N + j] += u[i] * v[j]);
            sum[M * N + i] += u[i];
        }
    }
    sum
}

fn describe(builder: Builder, optimizer: &Optimizer) -> Builder {
    let kind = LayerKind::Fc { m: M, n: N };
    builder
        .layer(Layer::new("conv", CONV))
        .layer(Layer { kind, ..Layer::new("fc", M * N + M) })
        .chunk_size(ChunkSize { min: 64, max: 400 })
        .scheme(Policy::Ps)
        .batch(BATCH)
        .optimizer(optimizer.clone())
        .learning_rate(0.01)
        .deterministic(true)
}

/// One step of both layers. The parameters are taken on, or the last gradients if there are none.
fn step(session: &Session, clock: u64, [conv, fc]: &mut [Buffer; 2]) -> Result<(), Error> {
    let rank = session.rank();
    let ids = [LayerId(0), LayerId(1)];
    let taken = std::mem::take(fc);
    if session.scheme(ids[1])? == Scheme::Sfb {
        let (u, v) = factors(rank, clock);
        session.send_factors(ids[1], &[Factors { u: &u, v: &v }], taken)?;
        session.rebuild(ids[1])?;
    } else {
        session.send_into(ids[1], gradient(rank, clock).into(), taken)?;
    }
    let gradient: Vec<f32> = (0..CONV).map(|i| number(rank, clock, i)).collect();
    session.send_into(ids[0], gradient.into(), std::mem::take(conv))?;
    *conv = session.receive(ids[0])?.result;
    *fc = session.receive(ids[1])?.result;
    Ok(())
}

/// Trains, with another plan after half of the steps. Returns every worker's parameters.
fn train(layout: Layout, optimizer: &Optimizer, rules: Option<Rules>) -> Vec<Vec<f32>> {
    let (optimizer, describing) = (optimizer.clone(), optimizer.clone());
    without_hanging(move || {
        let work = |mut session: Session| {
            let mut values = [CONV, M * N + M].map(|len| {
                Buffer::from((0..len).map(|i| (i % 17) as f32 / 17.0).collect::<Vec<_>>())
            });
            if !optimizer.is_stateless() {
                for (layer, values) in (0..).map(LayerId).zip(&mut values) {
                    session.broadcast(layer, std::mem::take(values))?;
                    *values = session.receive(layer)?.result;
                }
            }
            for clock in 1..=STEPS {
                step(&session, clock, &mut values)?;
                if let Some(rules) = rules.filter(|_| clock == HALF) {
                    let before = session.plan().clone();
                    session.replan(rules, |layer| &values[layer.index()])?;
                    assert_ne!(*session.plan(), before);
                    assert_eq!(session.plan().epoch, before.epoch.next());
                }
            }
            let parameters = values.iter().flat_map(|values| values.to_vec()).collect();
            session.finish()?;
            Ok(parameters)
        };
        let (_coordinator, config) = layout.coordinator();
        let describe = |builder| describe(builder, &describing);
        let results = layout.run_with(&config, describe, work);
        results.into_iter().map(Result::unwrap).collect()
    })
}

fn assert_replicas_are_equal(replicas: &[Vec<f32>]) {
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for replica in replicas {
        assert_eq!(bits(replica), bits(&replicas[0]));
    }
}

fn ps() -> Rules {
    let chunk = ChunkSize { min: 64, max: 400 };
    Rules { chunk, policy: Policy::Ps, batch: Some(BATCH), ..Rules::default() }
}

fn optimizers() -> [Optimizer; 3] {
    ["mean", "sgd:momentum=0.9", "adam"].map(|text| text.parse().unwrap())
}

#[test]
fn other_chunks_and_other_shards_change_no_bit() {
    let others = [
        Rules { chunk: ChunkSize { min: 16, max: 1000 }, ..ps() },
        Rules { placement: Placement::PerTensor, ..ps() },
    ];
    for optimizer in optimizers() {
        for (lanes, hosts) in [(1, &[][..]), (2, &[]), (2, &[1, 2])] {
            let layout = Layout { lanes, hosts, ..Layout::workers(3) };
            let undisturbed = train(layout, &optimizer, None);
            assert_replicas_are_equal(&undisturbed);
            for rules in others {
                let replanned = train(layout, &optimizer, Some(rules));
                assert_replicas_are_equal(&replanned);
                assert_eq!(replanned[0], undisturbed[0], "{optimizer}, {lanes} lanes, {rules:?}");
            }
        }
    }
}

#[test]
fn a_layer_that_changes_to_factors_is_equal_within_rounding() {
    for (optimizer, hosts) in optimizers().into_iter().zip([&[2, 1][..], &[], &[1, 2]]) {
        let layout = Layout { lanes: 2, hosts, ..Layout::workers(3) };
        let undisturbed = train(layout, &optimizer, None);
        let replanned = train(layout, &optimizer, Some(Rules { policy: Policy::Sfb, ..ps() }));
        assert_replicas_are_equal(&replanned);
        let largest = undisturbed[0].iter().fold(0f32, |most, v| most.max(v.abs()));
        for (index, (a, b)) in replanned[0].iter().zip(&undisturbed[0]).enumerate() {
            assert!((a - b).abs() <= 1e-4 * largest, "{optimizer}: element {index}: {a} and {b}");
        }
        // The convolution stays with the shards: not a bit of it changes.
        assert_eq!(replanned[0][..CONV], undisturbed[0][..CONV]);
    }
}

#[test]
fn workers_that_want_different_plans_are_told() {
    let results = without_hanging(|| {
        let layout = Layout::workers(2);
        let (_coordinator, config) = layout.coordinator();
        let describe = |builder| describe(builder, &"mean".parse().unwrap());
        layout.run_with(&config, describe, |mut session| {
            let max = 400 + 4 * usize::from(session.rank());
            let rules = Rules { chunk: ChunkSize { min: 64, max }, ..ps() };
            let refused = session.replan(rules, |_| &[]).unwrap_err();
            // Nothing has changed: the session goes on with the plan it has.
            session.finish()?;
            Ok(refused.to_string())
        })
    });
    for words in results {
        let words = words.unwrap();
        assert!(words.contains("want different plans for epoch 2"), "{words}");
    }
}

#[test]
fn dedicated_servers_are_refused_in_words() {
    let results = without_hanging(|| {
        let layout = Layout { servers: Servers::Dedicated(1), ..Layout::workers(1) };
        let (_coordinator, config) = layout.coordinator();
        let describe = |builder| describe(builder, &"mean".parse().unwrap());
        layout.run_with(&config, describe, |mut session| {
            let refused = session.replan(ps(), |_| &[]).unwrap_err();
            session.finish()?;
            Ok(refused.to_string())
        })
    });
    for words in results {
        let words = words.unwrap();
        assert!(words.contains("server 0"), "{words}");
    }
}
