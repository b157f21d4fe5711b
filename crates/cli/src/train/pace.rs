//! Workers that pretend to be slower than they are, for experiments with stragglers.

use super::settings::Age;
use crate::bench::simulate;
use anyhow::ensure;
use clap::Args;
use poseidon::NodeId;
use poseidon_sim::setup::Jitter;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Flags of `poseidon train`, with the meaning that they have for `poseidon bench simulate`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct PaceFlags {
    /// Let computing a step take at least so long, such as 50ms, as it would on a slower machine.
    #[arg(long, value_name = "TIME", help_heading = EXPERIMENTS)]
    compute: Option<Age>,

    /// How that time varies from step to step: 'none', 'lognormal:SPREAD' or
    /// 'tail:PROBABILITY:FACTOR', where a step now and then takes many times as long.
    #[arg(long, value_name = "JITTER", requires = "compute", help_heading = EXPERIMENTS)]
    jitter: Option<Jitter>,

    /// A worker that always takes so many times as long, such as 3:10. May be repeated.
    #[arg(long, value_name = "WORKER:FACTOR", requires = "compute", help_heading = EXPERIMENTS)]
    slow: Vec<Slow>,
}

/// No step takes longer, whatever is asked for: others give up.
const LONGEST: Duration = Duration::from_secs(3600);

const EXPERIMENTS: &str = "Experiments with slow workers";

/// How slow workers pretend to be.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Pretence {
    #[serde(skip_serializing_if = "Option::is_none")]
    compute: Option<Age>,
    #[serde(with = "super::settings::text")]
    jitter: Jitter,
    slow: Vec<Slow>,
}

/// A worker that takes longer than the others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Slow {
    worker: u16,
    factor: f64,
}

/// How long the steps of one worker take.
pub(super) struct Pace {
    /// In seconds, without jitter. None: as long as they take.
    step: Option<f64>,
    jitter: Jitter,
    chance: ChaCha8Rng,
}

impl Pretence {
    pub(super) fn is_none(&self) -> bool {
        self.compute.is_none()
    }

    pub(super) fn take(&mut self, flags: &PaceFlags) {
        self.compute = flags.compute.or(self.compute);
        self.jitter = flags.jitter.unwrap_or(self.jitter);
        if !flags.slow.is_empty() {
            self.slow.clone_from(&flags.slow);
        }
    }

    /// Whether it is about workers that there are.
    pub(super) fn check(&self, workers: u16) -> anyhow::Result<()> {
        for slow in &self.slow {
            ensure!(
                slow.worker < workers,
                "--slow {slow}: there is no worker {}, the last one is {}",
                slow.worker,
                workers - 1
            );
        }
        let asked = self.jitter != Jitter::None || !self.slow.is_empty();
        ensure!(!asked || self.compute.is_some(), "pretence: 'compute' says how long a step takes");
        Ok(())
    }

    /// The pace of worker `rank`. It is the same in every run with the same seed.
    pub(super) fn of(&self, rank: u16, seed: u64) -> Pace {
        let slow = self.slow.iter().filter(|slow| slow.worker == rank);
        let factor: f64 = slow.map(|slow| slow.factor).product();
        let step = self.compute.map(|Age(time)| time.as_secs_f64() * factor);
        let chance = ChaCha8Rng::seed_from_u64(seed ^ u64::from(rank) << 32);
        Pace { step, jitter: self.jitter, chance }
    }
}

impl Pace {
    /// How long the next step computes at least.
    pub(super) fn next_step(&mut self) -> Duration {
        let factor = self.jitter.draw(&mut self.chance);
        let seconds = self.step.map_or(0.0, |step| step * factor);
        Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST).min(LONGEST)
    }
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.worker, self.factor)
    }
}

impl FromStr for Slow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        simulate::slow(text).map(|(NodeId(worker), factor)| Self { worker, factor })
    }
}

impl From<Slow> for String {
    fn from(slow: Slow) -> Self {
        slow.to_string()
    }
}

impl TryFrom<String> for Slow {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pretence_reads_back_and_slows_its_worker_down() {
        let slow = vec!["1:10".parse().unwrap()];
        let compute = Some("50ms".parse().unwrap());
        let pretence = Pretence { compute, jitter: Jitter::LogNormal(0.5), slow };
        let text = toml::to_string(&pretence).unwrap();
        let read: Pretence = toml::from_str(&text).unwrap();
        assert_eq!(format!("{read:?}"), format!("{pretence:?}"), "{text}");
        let draw = |rank| read.of(rank, 7).next_step();
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(0), draw(2));
        let even = Pretence { jitter: Jitter::None, ..read.clone() };
        let steps = [0, 1].map(|rank| even.of(rank, 7).next_step());
        assert_eq!(steps, [Duration::from_millis(50), Duration::from_millis(500)]);
        assert!("1x".parse::<Slow>().unwrap_err().contains("3:2.5"));
    }
}
