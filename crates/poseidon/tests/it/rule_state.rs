//! An update rule that is taken out of the shards and put back goes on as if nothing had happened.

use crate::cluster::Layout;
use poseidon::session::Builder;
use poseidon::{
    ChunkSize, Error, Factors, Layer, LayerKind, Optimizer, Policy, RuleState, Servers, Session,
};

const M: usize = 600;
const N: usize = 3;
const BATCH: usize = 2;
const LAYERS: [(&str, usize); 2] = [("conv", 500), ("fc", M * N + M)];
const RULES: [&str; 3] = ["sgd:momentum=0.5,weight-decay=0.25", "adam", "adamw:weight-decay=0.1"];

/// What a worker leaves behind: by layer, parameters and the rule's state.
type Left = Vec<(Vec<f32>, RuleState)>;

fn describe(rule: &'static str) -> impl Fn(Builder) -> Builder {
    let kind = LayerKind::Fc { m: M, n: N };
    move |builder| {
        builder
            .layer(Layer::new(LAYERS[0].0, LAYERS[0].1))
            .layer(Layer { kind, ..Layer::new(LAYERS[1].0, LAYERS[1].1) })
            .chunk_size(ChunkSize { min: 64, max: 400 })
            .scheme(Policy::Sfb)
            .batch(BATCH)
            .optimizer(rule.parse::<Optimizer>().unwrap())
            .learning_rate(0.125)
            .deterministic(true)
    }
}

fn number(rank: u16, i: usize, step: u64) -> f32 {
    ((usize::from(rank) * 5 + i * 3 + step as usize * 11) % 9) as f32 / 8.0 - 0.5
}

/// Steps `steps` from where `start` left off.
fn train(
    session: &Session,
    start: Option<&Left>,
    steps: std::ops::Range<u64>,
) -> Result<Left, Error> {
    let rank = session.rank();
    let mut values = Vec::new();
    for (index, (name, len)) in LAYERS.into_iter().enumerate() {
        let layer = session.layer(name)?;
        let initial = start.map_or_else(|| vec![1.0; len], |left| left[index].0.clone());
        session.broadcast(layer, initial.into())?;
        values.push(session.receive(layer)?.result);
        if let Some(left) = start {
            session.restore_rule(layer, left[index].1.clone())?;
        }
    }
    for step in steps {
        let fc = session.layer("fc")?;
        let row = |len: usize, seed| (0..len).map(|i| number(rank, i + seed, step)).collect();
        let (u, v): (Vec<f32>, Vec<f32>) = (row(BATCH * M, 1), row(BATCH * N, 2));
        session.send_factors(fc, &[Factors { u: &u, v: &v }], values.pop().unwrap())?;
        let conv = session.layer("conv")?;
        let gradient: Vec<f32> = row(500, 3);
        session.send_into(conv, gradient.into(), values.pop().unwrap())?;
        values = vec![session.receive(conv)?.result, session.receive(fc)?.result];
    }
    let mut left = Vec::new();
    for (values, (name, _)) in values.iter().zip(LAYERS) {
        left.push((values.to_vec(), session.rule_state(session.layer(name)?)?));
    }
    Ok(left)
}

/// The whole state, of what each worker left.
fn whole(parts: &[Left]) -> Left {
    let mut whole = parts[0].clone();
    for part in &parts[1..] {
        for ((_, whole), (_, part)) in whole.iter_mut().zip(part) {
            assert_eq!(whole.steps, part.steps);
            for (whole, part) in whole.vectors.iter_mut().zip(&part.vectors) {
                whole.iter_mut().zip(part).for_each(|(w, p)| *w += p);
            }
        }
    }
    whole
}

fn run(
    workers: u16,
    rule: &'static str,
    start: Option<&Left>,
    steps: std::ops::Range<u64>,
) -> Vec<Left> {
    let layout = Layout { lanes: 2, ..Layout::workers(workers) };
    let results = layout.run(describe(rule), |session| train(session, start, steps.clone()));
    results.into_iter().map(Result::unwrap).collect()
}

#[test]
fn restored_rules_take_the_steps_they_would_have_taken() {
    for rule in RULES {
        let through = whole(&run(3, rule, None, 0..6));
        let half = whole(&run(3, rule, None, 0..4));
        assert_eq!(half[0].1.steps, 4);
        assert!(half.iter().all(|(_, rule)| rule.vectors[0].iter().any(|v| *v != 0.0)), "{rule}");
        let resumed = whole(&run(3, rule, Some(&half), 4..6));
        assert!(through == resumed, "{rule}: a resumed run differs from one that went through");
    }
}

#[test]
fn state_that_does_not_fit_is_refused() {
    let state = |vectors: usize, len| RuleState {
        steps: 1,
        vectors: vec![vec![0.0; len]; vectors],
        masters: Vec::new(),
    };
    let results = Layout::workers(1).run(describe("adam"), move |session| {
        let layer = session.layer("conv")?;
        let early = session.restore_rule(layer, state(2, 500)).unwrap_err().to_string();
        assert!(early.contains("no initial parameters"), "{early}");
        session.broadcast(layer, vec![0.0; 500].into())?;
        let flying = session.rule_state(layer).unwrap_err().to_string();
        assert!(flying.contains("in flight"), "{flying}");
        session.receive(layer)?;
        let few = session.restore_rule(layer, state(1, 500)).unwrap_err().to_string();
        assert!(few.contains("keeps 2 vectors, got 1"), "{few}");
        let short = session.restore_rule(layer, state(2, 499)).unwrap_err().to_string();
        assert!(short.contains("has 500 parameters, got a vector of 499"), "{short}");
        session.restore_rule(layer, state(2, 500))?;
        assert_eq!(session.rule_state(layer)?, state(2, 500));
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn state_on_a_dedicated_server_is_out_of_reach() {
    let layout = Layout { servers: Servers::Dedicated(1), ..Layout::workers(2) };
    let results = layout.run(describe("adam"), |session| {
        let error = session.rule_state(session.layer("conv")?).unwrap_err().to_string();
        assert!(error.contains("server 0 (node 2) holds shards"), "{error}");
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}
