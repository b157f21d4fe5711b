//! How to reach a running job's coordinator.

use anyhow::bail;
use poseidon::Config;
use std::time::Duration;

/// Where the coordinator is, and how long to wait for it.
#[derive(clap::Args, Debug)]
pub(crate) struct RunningJob {
    /// The coordinator's address.
    #[arg(long, value_name = "HOST:PORT")]
    coordinator: Option<String>,

    /// The job's name, where it is not the environment's.
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,

    /// Seconds to wait for an answer.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    patience: u64,
}

impl RunningJob {
    /// The job, with the coordinator's address, and how long to wait. What is not given comes from the
    /// job's environment.
    pub(crate) fn find(self) -> anyhow::Result<(Config, Duration)> {
        let mut config = Config::from_env()?;
        config.cluster = self.cluster.unwrap_or(config.cluster);
        config.coordinator = self.coordinator.unwrap_or(config.coordinator);
        if config.coordinator.ends_with(":0") {
            bail!(
                "no coordinator to ask: give --coordinator HOST:PORT, or run inside a job's environment"
            );
        }
        Ok((config, Duration::from_secs(self.patience)))
    }
}
