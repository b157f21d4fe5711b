//! What the workers of a training job tell each other, besides gradients.

use super::settings::Settings;
use crate::report::NodeReport;
use anyhow::bail;
use poseidon_nn::data::Statistics;
use poseidon_nn::train::Worker;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// At the start: what all must agree on, and what each knows of its data.
#[derive(Serialize, Deserialize)]
pub(super) struct StartFacts {
    /// Name and value, in the order in which differences are told.
    settings: Vec<(String, String)>,
    pub(super) samples: usize,
    looked_at: usize,
    mean: Vec<f64>,
    deviation: Vec<f64>,
}

/// At the end of an epoch.
#[derive(Serialize, Deserialize)]
pub(super) struct EpochFacts {
    /// Per step: sum of losses and number of samples.
    pub(super) losses: Vec<(f64, usize)>,
    pub(super) correct: usize,
    /// Samples that were right, and samples.
    pub(super) tested: Option<(usize, usize)>,
    /// After every step, if that was asked for.
    pub(super) digests: Vec<String>,
    /// Samples that counted since the beginning, where slow workers may be dropped.
    pub(super) counted: Option<u64>,
}

/// At the end.
#[derive(Serialize, Deserialize)]
pub(super) struct FinalFacts {
    pub(super) node: NodeReport,
    pub(super) layers: Vec<u64>,
    pub(super) digest: String,
    pub(super) hidden: f64,
}

impl StartFacts {
    pub(super) fn new(settings: &Settings, samples: usize, statistics: Statistics) -> Self {
        let shared = settings.shared_by_all();
        let settings = shared.into_iter().map(|(name, value)| (name.to_owned(), value));
        let Statistics { samples: looked_at, mean, deviation, .. } = statistics;
        Self { settings: settings.collect(), samples, looked_at, mean, deviation }
    }

    /// The first setting in which a worker differs from worker 0 is an error.
    pub(super) fn agree(workers: &[Self]) -> anyhow::Result<()> {
        let Some(first) = workers.first() else { return Ok(()) };
        for (rank, worker) in workers.iter().enumerate() {
            for ((name, theirs), (_, expected)) in worker.settings.iter().zip(&first.settings) {
                if theirs != expected {
                    bail!("{name} is {expected} on worker 0 but {theirs} on worker {rank}");
                }
            }
        }
        Ok(())
    }

    /// What the pixels of all workers together are like.
    pub(super) fn pool(workers: &[Self]) -> Statistics {
        let samples: usize = workers.iter().map(|worker| worker.looked_at).sum();
        let channels = workers.first().map_or(0, |worker| worker.mean.len());
        let moment = |channel: usize, of: fn(f64, f64) -> f64| {
            let weighted = workers.iter().map(|worker| {
                worker.looked_at as f64 * of(worker.mean[channel], worker.deviation[channel])
            });
            weighted.sum::<f64>() / samples.max(1) as f64
        };
        let mean: Vec<f64> = (0..channels).map(|c| moment(c, |mean, _| mean)).collect();
        let deviation = |channel: usize| {
            let square = moment(channel, |mean, deviation| mean * mean + deviation * deviation);
            (square - mean[channel] * mean[channel]).max(0.0).sqrt()
        };
        let deviation = (0..channels).map(deviation).collect();
        Statistics { samples, mean, deviation, histogram: Vec::new() }
    }
}

/// Every worker's `value`, in rank order.
pub(super) fn gather<T: Serialize + DeserializeOwned>(
    worker: &Worker,
    topic: &str,
    value: T,
) -> anyhow::Result<Vec<T>> {
    Ok(match worker.session() {
        Some(session) => session.gather(topic, &value)?,
        None => vec![value],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(seed: &str, looked_at: usize, mean: f64, deviation: f64) -> StartFacts {
        StartFacts {
            settings: vec![("the seed".into(), seed.into())],
            samples: 10,
            looked_at,
            mean: vec![mean],
            deviation: vec![deviation],
        }
    }

    #[test]
    fn the_first_difference_is_named() {
        let error = StartFacts::agree(&[facts("1", 1, 0.0, 0.0), facts("2", 1, 0.0, 0.0)]);
        assert_eq!(error.unwrap_err().to_string(), "the seed is 1 on worker 0 but 2 on worker 1");
    }

    /// 0, 2 and 8, 8, 12: mean 6, variance 96/5... by hand: squares 0+4+64+64+144 = 276, mean 30/5.
    #[test]
    fn pooled_statistics_are_those_of_all_samples() {
        let third = (8.0f64 + 8.0 + 12.0) / 3.0;
        let spread = ((2.0 * (8.0 - third).powi(2) + (12.0 - third).powi(2)) / 3.0).sqrt();
        let pooled = StartFacts::pool(&[facts("1", 2, 1.0, 1.0), facts("1", 3, third, spread)]);
        assert_eq!(pooled.samples, 5);
        assert!((pooled.mean[0] - 6.0).abs() < 1e-9);
        assert!((pooled.deviation[0] - (276.0f64 / 5.0 - 36.0).sqrt()).abs() < 1e-9);
    }
}
