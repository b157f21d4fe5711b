//! What is run: the model, its times and its links, made smaller and slower as asked.

use super::Args;
use crate::bandwidth::Bandwidth;
use crate::plan::file;
use anyhow::{Context, ensure};
use poseidon::{Cluster, LayerKind, Policy, Servers};
use poseidon_sim::profile::{Basis, Profile};
use poseidon_sim::{
    LayerTime, Model, ModelLayer, Network, Outcome, Overlap, SchemeRule, Setup, simulate,
};
use std::time::Duration;

/// What every node runs and what is simulated, all of it dilated.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) model: Model,
    /// By layer of the model.
    pub(super) times: Vec<LayerTime>,
    /// How those are known.
    pub(super) basis: Basis,
    pub(super) batch: usize,
    pub(super) overlap: Overlap,
    pub(super) steps: u32,
    pub(super) lanes: u16,
    pub(super) rate: Bandwidth,
    pub(super) delay: Duration,
    pub(super) dilate: f64,
}

impl Case {
    pub(super) fn new(args: &Args) -> anyhow::Result<Self> {
        let model = match file(&args.model, "json") {
            Some(path) => Model::read(path)?,
            None => Model::named(&args.model)?,
        };
        let profile = match file(&args.profile, "toml") {
            Some(path) => Profile::read(path)?,
            None => Profile::named(&args.profile)?,
        };
        let (times, basis) = profile.times(&model, args.batch)?;
        let slower = args.dilate / args.scale_model;
        let times = times.into_iter().map(|time| LayerTime {
            forward: time.forward * slower,
            backward: time.backward * slower,
        });
        let model = scaled(&model, args.scale_model);
        let fc = |layer: &&ModelLayer| matches!(layer.kind, LayerKind::Fc { .. });
        let tall = model.layers.iter().filter(fc).find(|layer| layer.rows != 1);
        let by_factors = args.scheme.iter().chain(&args.node).any(|scheme| *scheme != Policy::Ps);
        if let Some(layer) = tall.filter(|_| by_factors) {
            anyhow::bail!(
                "layer '{}' of {} sees {} rows per sample, and a session expects one: only --scheme ps can be \
                 measured",
                layer.name,
                model.name,
                layer.rows
            );
        }
        let rate = args.bandwidth.bits() / args.dilate;
        ensure!(
            rate >= LEAST_RATE,
            "{} slowed {} times is {rate:.0} bit/s: expected at least 1 Mbit/s",
            args.bandwidth,
            args.dilate
        );
        Ok(Self {
            model,
            times: times.collect(),
            basis,
            batch: args.batch,
            overlap: args.overlap,
            steps: args.steps,
            lanes: args.lanes,
            rate: Bandwidth::from_bytes(rate / 8.0),
            delay: args.latency.mul_f64(args.dilate),
            dilate: args.dilate,
        })
    }

    /// What a worker alone computes in a step, in seconds.
    pub(super) fn compute_seconds(&self) -> f64 {
        self.times.iter().map(|time| time.forward + time.backward).sum()
    }

    /// What the simulator says of `workers` workers that spend `rebuilding` seconds of a step on
    /// rebuilding gradients.
    pub(super) fn predict(
        &self,
        workers: u16,
        scheme: Policy,
        rebuilding: f64,
    ) -> anyhow::Result<Outcome> {
        let cluster = Cluster::new(workers, Servers::Colocated, self.lanes)?.in_a_ring();
        let mut network = Network::virtual_cluster(self.rate.bytes());
        network.latency += self.delay;
        let mut setup = Setup::new(&self.model, self.times.clone(), cluster, self.batch, network);
        setup.scheme = match scheme {
            Policy::Auto => SchemeRule::Auto,
            Policy::Ps => SchemeRule::Ps,
            Policy::Sfb => SchemeRule::Sfb,
        };
        setup.overlap = self.overlap;
        setup.iterations = self.steps as usize;
        let plan = setup.plan();
        let others = f64::from(workers) - 1.0;
        let rebuilt = (0..).zip(&self.model.layers).map(|(id, layer)| match layer.kind {
            LayerKind::Fc { m, n } if plan.factors(poseidon::LayerId(id)).is_some() => {
                2.0 * (m * n * self.batch) as f64 * others
            }
            _ => 0.0,
        });
        let flops: f64 = rebuilt.sum();
        setup.rebuild_rate = (flops > 0.0 && rebuilding > 0.0).then(|| flops / rebuilding);
        simulate(&setup).with_context(|| format!("cannot simulate {workers} nodes"))
    }
}

/// The model with 1/`factor` of the parameters. Its FLOPs are left alone: times are of the whole one.
fn scaled(model: &Model, factor: f64) -> Model {
    let side = |length: usize| ((length as f64 / factor.sqrt()).round() as usize).max(1);
    let layer = |layer: &ModelLayer| {
        let (kind, parameters) = match layer.kind {
            LayerKind::Fc { m, n } => {
                let bias = if layer.parameters > m * n { side(m) } else { 0 };
                let (m, n) = (side(m), side(n));
                (LayerKind::Fc { m, n }, m * n + bias)
            }
            kind if layer.parameters == 0 => (kind, 0),
            kind => (kind, ((layer.parameters as f64 / factor).round() as usize).max(1)),
        };
        ModelLayer { kind, parameters, ..layer.clone() }
    };
    Model { name: model.name.clone(), layers: model.layers.iter().map(layer).collect() }
}

/// In bit/s: a queue that lets through less holds a segment for seconds.
const LEAST_RATE: f64 = 1e6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scaled_model_has_the_same_layers_and_a_part_of_the_parameters() {
        let whole = Model::named("vgg19").unwrap();
        let small = scaled(&whole, 8.0);
        assert_eq!(small.layers.len(), whole.layers.len());
        let share = whole.parameters() as f64 / small.parameters() as f64;
        assert!((share - 8.0).abs() < 0.05, "{share}");
        for (small, whole) in small.layers.iter().zip(&whole.layers) {
            assert_eq!((&small.name, small.parameters == 0), (&whole.name, whole.parameters == 0));
            if let LayerKind::Fc { m, n } = small.kind {
                assert_eq!(small.parameters, m * n + m, "{}", small.name);
            }
        }
        assert_eq!(scaled(&whole, 1.0), whole);
    }
}
