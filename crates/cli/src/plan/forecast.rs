//! The answer: what simulations of the job and of its neighbours say.

use super::advice::{self, Advice};
use super::copies::CopyUse;
use super::racks::{self, RackChoice};
use super::search::{self, Found};
use super::{Bandwidth, Question};
use poseidon_core::{Cluster, LayerId, LayerKind, NodeId, Plan, Scheme, Servers};
use poseidon_sim::{
    Bottleneck, Error, Outcome, Places, SchemeRule, Setup, least_bandwidth, simulate,
};
use serde::Serialize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How much is simulated besides the job itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Look for a better plan.
    pub(crate) search: bool,
    /// Also where it takes minutes.
    pub(crate) thorough: bool,
}

/// What is predicted.
pub(crate) struct Forecast {
    /// The job; with sums inside racks if they pay, and after a search with what was found.
    pub(crate) setup: Setup,
    pub(crate) outcome: Outcome,
    pub(crate) layers: Vec<LayerForecast>,
    /// Whether sums are made inside racks, if there are racks.
    pub(crate) racks: Option<RackChoice>,
    /// What is copied between a worker's device and its host, if anything is.
    pub(crate) copies: Option<CopyUse>,
    pub(crate) found: Option<Found>,
    /// The job on another device, where nobody has said on which.
    pub(crate) beside: Option<Beside>,
    /// What follows from further simulations. `None` if there would have been too many.
    pub(crate) beyond: Option<Beyond>,
}

/// The same job on another device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Beside {
    pub(crate) profile: String,
    pub(crate) iteration_seconds: f64,
    pub(crate) compute_seconds: f64,
    pub(crate) images_per_second: f64,
    pub(crate) speedup: f64,
}

/// One layer of the plan.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LayerForecast {
    pub(crate) name: String,
    pub(crate) kind: &'static str,
    /// Outputs and inputs of a fully connected layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) shape: Option<[usize; 2]>,
    pub(crate) parameters: usize,
    pub(crate) scheme: &'static str,
    /// Sent per step, the mean over all nodes.
    pub(crate) bytes_per_node: u64,
    pub(crate) reason: String,
}

/// What the job's neighbours are like.
pub(crate) struct Beyond {
    /// The least bandwidth with which workers do 95 % of what they could. `None` if none suffices.
    pub(crate) enough: Option<Bandwidth>,
    /// Why none suffices, in words.
    pub(crate) never_enough: Option<String>,
    pub(crate) advice: Vec<Advice>,
    /// With fewer workers.
    pub(crate) by_workers: Vec<Point>,
    /// With other networks.
    pub(crate) by_bandwidth: Vec<Point>,
}

/// One point of a curve.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Point {
    /// Workers, or Gbit/s.
    pub(crate) x: f64,
    pub(crate) speedup: f64,
    /// With the parameter server for every layer, where that is not the plan anyway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) speedup_ps: Option<f64>,
}

impl Forecast {
    pub(crate) fn new(question: &Question, effort: Effort) -> Result<Self, Error> {
        let setup = question.setup.clone();
        let outcome = simulate(&setup)?;
        let (mut setup, mut outcome, racks) = racks::choose(setup, outcome)?;
        let mut found = None;
        if effort.search {
            let better = search::search(&setup, &outcome)?;
            (setup, outcome) = (better.setup.clone(), better.outcome.clone());
            found = Some(better);
        }
        let copies = CopyUse::new(&setup, &outcome)?;
        let beyond = match effort.thorough || outcome.events <= PATIENCE {
            true => Some(Beyond::new(question, &setup, &outcome)?),
            false => None,
        };
        let beside = match &question.beside {
            None => None,
            Some((profile, other)) => {
                // The job with the cluster that was chosen for it, racks and all.
                let other = Setup {
                    cluster: setup.cluster.clone(),
                    network: setup.network.clone(),
                    ..other.clone()
                };
                let outcome = simulate(&other)?;
                Some(Beside {
                    profile: profile.clone(),
                    iteration_seconds: outcome.iteration_seconds,
                    compute_seconds: outcome.compute_seconds,
                    images_per_second: images_per_second(&other, &outcome),
                    speedup: outcome.speedup,
                })
            }
        };
        let layers = layers(&setup);
        Ok(Self { layers, setup, outcome, racks, copies, found, beside, beyond })
    }

    /// The share of what the workers could do that they do.
    pub(crate) fn efficiency(&self) -> f64 {
        efficiency(&self.setup, &self.outcome)
    }

    pub(crate) fn images_per_second(&self) -> f64 {
        images_per_second(&self.setup, &self.outcome)
    }
}

impl Beyond {
    fn new(question: &Question, setup: &Setup, outcome: &Outcome) -> Result<Self, Error> {
        let enough = least_bandwidth(setup, GOOD)?.map(Bandwidth::from_bytes);
        let never_enough = match enough {
            Some(_) => None,
            None => {
                let mut fastest = setup.clone();
                fastest.network.bandwidth = FASTEST.bytes();
                Some(why_never(&fastest, &simulate(&fastest)?))
            }
        };
        Ok(Self {
            enough,
            never_enough,
            advice: advice::advice(question, setup, outcome)?,
            by_workers: by_workers(setup)?,
            by_bandwidth: by_bandwidth(setup)?,
        })
    }
}

/// Why workers are not busy enough even on the fastest network.
fn why_never(setup: &Setup, outcome: &Outcome) -> String {
    let cause = match outcome.bottleneck {
        Bottleneck::Latency => format!(
            "what is left is waiting for messages, which take {} each way at any bandwidth",
            crate::report::units::duration(setup.network.latency.as_secs_f64())
        ),
        _ => outcome.reason.clone(),
    };
    let share = crate::report::units::percent(efficiency(setup, outcome));
    format!("with {FASTEST} they still reach {share}: {cause}")
}

pub(super) fn efficiency(setup: &Setup, outcome: &Outcome) -> f64 {
    outcome.speedup / setup.cluster.workers() as f64
}

pub(super) fn images_per_second(setup: &Setup, outcome: &Outcome) -> f64 {
    (setup.cluster.workers() * setup.batch) as f64 / outcome.iteration_seconds
}

/// Simulates all of `setups`, as many at a time as there are cores, and tells `done` after each.
pub(crate) fn simulate_all(
    setups: &[Setup],
    done: impl Fn() + Sync,
) -> Result<Vec<Outcome>, Error> {
    let next = AtomicUsize::new(0);
    let outcomes: Vec<Mutex<Option<Result<Outcome, Error>>>> =
        setups.iter().map(|_| Mutex::new(None)).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(setups.len());
    let work = || {
        while let Some((setup, slot)) = {
            let i = next.fetch_add(1, Ordering::Relaxed);
            setups.get(i).zip(outcomes.get(i))
        } {
            let outcome = simulate(setup);
            // Nobody else has this slot, and a panic inside would have ended the scope.
            *slot.lock().expect("a slot has one writer") = Some(outcome);
            done();
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    outcomes
        .into_iter()
        .map(|slot| slot.into_inner().expect("nobody holds it").expect("every slot was filled"))
        .collect()
}

fn by_workers(setup: &Setup) -> Result<Vec<Point>, Error> {
    let all = setup.cluster.workers();
    let doubled = std::iter::successors(Some(1usize), |n| Some(n * 2)).take_while(|&n| n < all);
    let others: Vec<usize> = doubled.chain([all]).collect();
    let setups = others.iter().filter_map(|&workers| {
        Some(Setup { cluster: resized(&setup.cluster, workers)?, ..setup.clone() })
    });
    let setups = setups.filter(|setup| setup.check().is_ok());
    points(setups.collect(), |setup| setup.cluster.workers() as f64)
}

/// `cluster` with `workers` workers on hosts of the same size, and with as many dedicated servers
/// for each as before.
fn resized(cluster: &Cluster, workers: usize) -> Option<Cluster> {
    let share =
        |extra: u16| (usize::from(extra) * workers).div_ceil(cluster.workers()).max(1) as u16;
    let servers = match cluster.servers() {
        Servers::Colocated => Servers::Colocated,
        Servers::Dedicated(extra) => Servers::Dedicated(share(extra)),
        Servers::Mixed(extra) => Servers::Mixed(share(extra)),
    };
    let resized = Cluster::new(u16::try_from(workers).ok()?, servers, cluster.lanes()).ok()?;
    Some(Places::of(cluster).place(resized))
}

fn by_bandwidth(setup: &Setup) -> Result<Vec<Point>, Error> {
    let own = setup.network.bandwidth;
    let mut bandwidths: Vec<f64> = SWEEP.iter().map(|gbit| gbit * 1e9 / 8.0).collect();
    if !bandwidths.iter().any(|b| (b / own - 1.0).abs() < 0.01) {
        bandwidths.push(own);
        bandwidths.sort_by(f64::total_cmp);
    }
    let setups = bandwidths.into_iter().map(|bandwidth| {
        let mut other = setup.clone();
        other.network.bandwidth = bandwidth;
        other
    });
    points(setups.collect(), |setup| setup.network.bandwidth * 8.0 / 1e9)
}

/// The points of `setups`, each with what the parameter server alone would give.
fn points(setups: Vec<Setup>, x: impl Fn(&Setup) -> f64) -> Result<Vec<Point>, Error> {
    let compared = setups.first().is_some_and(|setup| setup.scheme != SchemeRule::Ps)
        && setups.last().is_some_and(|setup| layers(setup).iter().any(|l| l.scheme != "ps"));
    let ps = setups.iter().filter(|_| compared).map(|setup| Setup {
        scheme: SchemeRule::Ps,
        overrides: Vec::new(),
        ..setup.clone()
    });
    let both: Vec<Setup> = setups.iter().cloned().chain(ps).collect();
    let outcomes = simulate_all(&both, || {})?;
    let (ours, ps) = outcomes.split_at(setups.len());
    let point = |(i, setup): (usize, &Setup)| Point {
        x: x(setup),
        speedup: ours[i].speedup,
        speedup_ps: ps.get(i).map(|outcome| outcome.speedup),
    };
    Ok(setups.iter().enumerate().map(point).collect())
}

/// How every layer goes, and what it makes a node send.
fn layers(setup: &Setup) -> Vec<LayerForecast> {
    let plan = setup.plan();
    let layer = |(i, layer): (u32, &poseidon_core::Layer)| {
        let id = LayerId(i);
        let adam = setup.adam_push(id);
        let (scheme, reason) = match plan.choice(id) {
            Some(choice) if adam.is_none() && choice.scheme == Scheme::Sfb => {
                ("sfb", choice.reason.clone())
            }
            Some(choice) if adam.is_some() => ("adam", choice.reason.clone()),
            Some(choice) => ("ps", choice.reason.clone()),
            None => ("ps", String::new()),
        };
        let found = setup.overrides.iter().any(|(overridden, _)| *overridden == id);
        let reason = if found { "the search found it faster so".into() } else { reason };
        let sent: u64 =
            setup.cluster.node_ids().map(|node| bytes_sent(setup, &plan, node, id)).sum();
        LayerForecast {
            name: layer.name.clone(),
            kind: kind(layer.kind),
            shape: match layer.kind {
                LayerKind::Fc { m, n } => Some([m, n]),
                _ => None,
            },
            parameters: layer.len,
            scheme,
            bytes_per_node: sent / setup.cluster.nodes() as u64,
            reason,
        }
    };
    (0..).zip(&setup.layers).map(layer).collect()
}

fn bytes_sent(setup: &Setup, plan: &Plan, node: NodeId, layer: LayerId) -> u64 {
    let Some(factors) = setup.adam_push(layer) else {
        return plan.bytes_sent(node, layer) as u64;
    };
    // Factors to the server that holds the layer; from there, the whole layer to everybody else.
    let worker = setup.cluster.role(node).is_some_and(|role| role.worker);
    let others = setup.cluster.workers() - usize::from(worker);
    let holds = plan.layer_chunks(layer).any(|(_, shard)| shard.node == node);
    let bytes = match (holds, worker) {
        (true, _) => others * setup.layers[layer.index()].bytes(),
        (false, true) => factors,
        (false, false) => 0,
    };
    bytes as u64
}

fn kind(kind: LayerKind) -> &'static str {
    match kind {
        LayerKind::Fc { .. } => "fc",
        LayerKind::Conv => "conv",
        LayerKind::Embedding => "embedding",
        _ => "other",
    }
}

/// The fastest network that is looked at.
const FASTEST: Bandwidth = Bandwidth::gigabits(10_000.0);
/// Beyond this efficiency, a faster network is hardly worth its price.
const GOOD: f64 = 0.95;
/// In Gbit/s.
const SWEEP: [f64; 7] = [1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 100.0];
/// Events of one simulation, above which dozens of them would take minutes: about two seconds' worth.
const PATIENCE: u64 = 6_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_sim::{Model, Network, Profile};

    fn setup(servers: Servers, rule: SchemeRule) -> Setup {
        let model = Model::named("vgg19").unwrap();
        let (times, _) = Profile::named("titan-x").unwrap().times(&model, 32).unwrap();
        let cluster = Cluster::new(8, servers, 1).unwrap();
        let network = Network::ethernet(1.25e9);
        Setup { scheme: rule, ..Setup::new(&model, times, cluster, 32, network) }
    }

    /// What layers are said to send is what the simulated nodes sent, headers aside.
    #[test]
    fn bytes_by_layer_add_up_to_those_on_the_wire() {
        for servers in [Servers::Colocated, Servers::Dedicated(3), Servers::Mixed(2)] {
            for rule in [SchemeRule::Auto, SchemeRule::Ps, SchemeRule::Adam] {
                let setup = setup(servers, rule);
                let said: u64 = layers(&setup).iter().map(|layer| layer.bytes_per_node).sum();
                let outcome = simulate(&setup).unwrap();
                let sent =
                    outcome.bytes_sent.iter().sum::<u64>() as f64 / setup.cluster.nodes() as f64;
                assert!(
                    (said as f64 / sent - 1.0).abs() < 0.01,
                    "{servers} {rule}: {said}, {sent}"
                );
            }
        }
    }

    #[test]
    fn a_smaller_cluster_keeps_its_proportions() {
        let cluster = Cluster::new(16, Servers::Dedicated(4), 2).unwrap();
        let servers = [1, 4, 6, 16].map(|n| resized(&cluster, n).unwrap().servers());
        assert_eq!(servers, [1, 1, 2, 4].map(Servers::Dedicated));
    }
}
