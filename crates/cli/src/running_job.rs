//! How to reach a running job's coordinator.

use anyhow::bail;
use poseidon::Config;
use poseidon::coordinator::query;
use std::time::Duration;

/// Where the coordinator is, and how long to wait for it.
#[derive(clap::Args, Debug)]
pub(crate) struct RunningJob {
    /// The coordinator's address.
    #[arg(long, value_name = "HOST:PORT")]
    coordinator: Option<String>,

    /// The job's name, where it is not the environment's [default: outside of a job's environment, the
    /// names that jobs have which torchrun or people have started].
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,

    /// Seconds to wait for an answer.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    patience: u64,
}

impl RunningJob {
    /// The job, with the coordinator's address, and how long to wait. What is not given comes from the
    /// job's environment. Outside of one, the job may have any of several names: the coordinator knows.
    pub(crate) fn find(self) -> anyhow::Result<(Config, Duration)> {
        let mut config = Config::from_env()?;
        let is_known =
            self.cluster.is_some() || Config::is_launched() || std::env::var_os(NAME).is_some();
        config.cluster = self.cluster.unwrap_or(config.cluster);
        config.coordinator = self.coordinator.unwrap_or(config.coordinator);
        if config.coordinator.ends_with(":0") {
            bail!(
                "no coordinator to ask: give --coordinator HOST:PORT, or run inside a job's environment"
            );
        }
        let patience = Duration::from_secs(self.patience);
        if !is_known {
            let names = UNNAMED.map(|name| Config { cluster: name.into(), ..config.clone() });
            let answers = |config: &Config| {
                query(&config.coordinator, &config.credentials(), "epoch", patience).is_ok()
            };
            // If none of them is the job's, its refusal of the usual name says what to do.
            config = names.iter().find(|config| answers(config)).unwrap_or(&names[0]).clone();
        }
        Ok((config, patience))
    }
}

/// What a job is called by its environment.
const NAME: &str = "POSEIDON_CLUSTER";
/// What jobs are called that were given no name: those whose processes were started one by one, and
/// those of torchrun, whose jobs have the number 'none' if they are given no other.
const UNNAMED: [&str; 2] = ["torchrun", "none"];
