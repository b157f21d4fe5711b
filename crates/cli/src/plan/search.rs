//! Looks for a better plan than the per-layer formula by simulating whole iterations.
//!
//! The formula counts bytes. It does not see that a layer whose backward comes early has the whole
//! pass to travel in, or that rebuilding from factors takes time.

use super::forecast::simulate_all;
use poseidon_core::{ChunkSize, LayerId, LayerKind, Scheme};
use poseidon_sim::{Error, Outcome, SchemeRule, Setup};

/// The best plan that was found.
pub(crate) struct Found {
    pub(crate) setup: Setup,
    pub(crate) outcome: Outcome,
    /// Of the plan by the formula.
    pub(crate) formula_seconds: f64,
    /// What is different, for people. Empty if the formula's plan is the best.
    pub(crate) changes: Vec<String>,
    pub(crate) simulations: usize,
}

/// Turns schemes of fully connected layers one at a time, the most useful first, until none helps;
/// then tries other sizes of chunks.
pub(super) fn search(setup: &Setup, outcome: &Outcome) -> Result<Found, Error> {
    let mut best = setup.clone();
    let mut seconds = outcome.iteration_seconds;
    let mut best_outcome = outcome.clone();
    let mut simulations = 0;
    for _ in 0..ROUNDS {
        let turned = turns(&best);
        let chunked = CHUNKS
            .iter()
            .filter(|&&max| max != best.chunk.max)
            .map(|&max| Setup { chunk: ChunkSize::at_most(max), ..best.clone() });
        let tries: Vec<Setup> = turned.into_iter().chain(chunked).collect();
        let outcomes = simulate_all(&tries, || {})?;
        simulations += tries.len();
        let better = tries.into_iter().zip(outcomes);
        let by_time = |a: &(Setup, Outcome), b: &(Setup, Outcome)| {
            a.1.iteration_seconds.total_cmp(&b.1.iteration_seconds)
        };
        let Some((next, outcome)) = better.min_by(by_time) else { break };
        if outcome.iteration_seconds >= seconds * (1.0 - WORTH) {
            break;
        }
        seconds = outcome.iteration_seconds;
        (best, best_outcome) = (next, outcome);
    }
    Ok(Found {
        changes: changes(setup, &best),
        setup: best,
        outcome: best_outcome,
        formula_seconds: outcome.iteration_seconds,
        simulations,
    })
}

/// `setup` with each fully connected layer in turn the other way. Only the largest: the small ones
/// change nothing.
fn turns(setup: &Setup) -> Vec<Setup> {
    let plan = setup.plan();
    let ids = (0..setup.layers.len() as u32).map(LayerId);
    let mut layers: Vec<LayerId> =
        ids.filter(|id| matches!(setup.layers[id.index()].kind, LayerKind::Fc { .. })).collect();
    layers.sort_by_key(|id| std::cmp::Reverse(setup.layers[id.index()].len));
    layers.truncate(TURNED);
    let turn = |id: LayerId| {
        let other = match plan.choice(id).map(|choice| choice.scheme) {
            Some(Scheme::Sfb) => SchemeRule::Ps,
            _ => SchemeRule::Sfb,
        };
        let mut setup = setup.clone();
        setup.overrides.retain(|(layer, _)| *layer != id);
        setup.overrides.push((id, other));
        setup
    };
    layers.into_iter().map(turn).collect()
}

fn changes(before: &Setup, after: &Setup) -> Vec<String> {
    let (old, new) = (before.plan(), after.plan());
    let mut changes = Vec::new();
    for (i, layer) in (0..).zip(&after.layers) {
        let scheme = |plan: &poseidon_core::Plan| plan.choice(LayerId(i)).map(|c| c.scheme);
        match (scheme(&old), scheme(&new)) {
            (a, Some(b)) if a != Some(b) => changes.push(format!("{} by {b}", layer.name)),
            _ => {}
        }
    }
    if before.chunk != after.chunk {
        changes.push(format!("chunks of {} KiB", after.chunk.max >> 10));
    }
    changes
}

/// A gain that is worth leaving the formula for.
const WORTH: f64 = 0.002;
const ROUNDS: usize = 12;
const TURNED: usize = 12;
const CHUNKS: [usize; 5] = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::{Cluster, Servers};
    use poseidon_sim::{Model, Network, Profile, simulate};

    /// Beginning with the wrong scheme everywhere, the search comes out where factors belong.
    #[test]
    fn a_bad_plan_is_mended() {
        let model = Model::named("vgg19").unwrap();
        let (times, _) = Profile::named("titan-x").unwrap().times(&model, 32).unwrap();
        let cluster = Cluster::new(8, Servers::Colocated, 1).unwrap();
        let network = Network::ethernet(1.25e8);
        let setup =
            Setup { scheme: SchemeRule::Ps, ..Setup::new(&model, times, cluster, 32, network) };
        let outcome = simulate(&setup).unwrap();
        let found = search(&setup, &outcome).unwrap();
        assert!(
            found.changes.iter().any(|change| change == "classifier.0 by sfb"),
            "{:?}",
            found.changes
        );
        let hybrid = simulate(&Setup { scheme: SchemeRule::Auto, ..setup }).unwrap();
        assert!(found.outcome.iteration_seconds <= hybrid.iteration_seconds * 1.01);
        assert!(found.formula_seconds > 2.0 * found.outcome.iteration_seconds);
    }
}
