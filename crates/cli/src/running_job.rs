//! How to reach a running job's coordinator.

use anyhow::bail;
use poseidon::coordinator::{query, query_live};
use poseidon::{Config, LiveJob};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// Where the coordinator is, and how long to wait for it.
#[derive(clap::Args, Debug)]
pub(crate) struct RunningJob {
    /// The coordinator's address [default: the environment's, or that of the job that runs on this
    /// machine].
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

/// A running job that can be asked.
#[derive(Clone)]
pub(crate) struct Coordinator {
    pub(crate) config: Config,
    pub(crate) patience: Duration,
}

impl RunningJob {
    /// The job, with the coordinator's address, and how long to wait. What is not given comes from the
    /// job's environment. Outside of one, it is the environment of a job's process on this machine.
    pub(crate) fn find(self) -> anyhow::Result<Coordinator> {
        let patience = Duration::from_secs(self.patience);
        let mut config = Config::from_env()?;
        config.cluster = self.cluster.clone().unwrap_or(config.cluster);
        config.coordinator = self.coordinator.clone().unwrap_or(config.coordinator);
        let is_named = self.cluster.is_some() || std::env::var_os(NAME).is_some();
        let is_told = std::env::var_os("POSEIDON_SECRET").is_some() || self.cluster.is_some();
        if config.coordinator.ends_with(":0") || !(is_told || Config::is_launched()) {
            // The job's own process knows its name and its secret.
            let asked = |job: &Config| {
                self.coordinator.as_ref().is_none_or(|address| job.coordinator == *address)
            };
            let mut here: Vec<Config> = jobs_here().into_iter().filter(asked).collect();
            // Two jobs that give one address as theirs: one of them is gone.
            here.truncate(if self.coordinator.is_some() { 1 } else { here.len() });
            if here.len() > 1 {
                let words = |job: &Config| {
                    format!("  {}  {}, {} workers", job.coordinator, job.cluster, job.workers)
                };
                let all: Vec<_> = here.iter().map(words).collect();
                bail!("several jobs run here; say which, with --coordinator:\n{}", all.join("\n"));
            }
            if let Some(config) = here.pop() {
                return Ok(Coordinator { config, patience });
            }
        }
        if config.coordinator.ends_with(":0") {
            bail!(
                "no job of yours runs on this machine: give --coordinator HOST:PORT and the job's \
                 POSEIDON_SECRET, or run inside a job's environment"
            );
        }
        if !(is_named || Config::is_launched()) {
            // It may have any of several names: the coordinator knows. If none of them is the job's, its
            // refusal of the usual name says what to do.
            let names = UNNAMED.map(|name| Config { cluster: name.into(), ..config.clone() });
            let answers = |config: &&Config| {
                let short = patience / 4;
                query(&config.coordinator, &config.credentials(), "epoch", short).is_ok()
            };
            let found = std::iter::once(&config).chain(&names).find(answers);
            config = found.unwrap_or(&names[0]).clone();
        }
        Ok(Coordinator { config, patience })
    }
}

impl Coordinator {
    /// What the coordinator has under `key`.
    pub(crate) fn ask(&self, key: &str) -> anyhow::Result<Option<Value>> {
        Ok(query(&self.config.coordinator, &self.config.credentials(), key, self.patience)?)
    }

    /// What the job does now.
    pub(crate) fn live(&self) -> anyhow::Result<LiveJob> {
        let Config { coordinator, .. } = &self.config;
        Ok(query_live(coordinator, &self.config.credentials(), self.patience)?)
    }
}

/// The jobs whose processes run on this machine, as the environments of these processes describe
/// them. The system shows only those of the same user.
fn jobs_here() -> Vec<Config> {
    let mut jobs: BTreeMap<(String, String), Config> = BTreeMap::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_process = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    for process in processes.filter(|entry| entry.file_name().to_str().is_some_and(is_process)) {
        // A process may end while it is looked at.
        let Ok(environment) = fs::read(process.path().join("environ")) else { continue };
        if let Some(config) = job_of(&environment) {
            jobs.insert((config.coordinator.clone(), config.cluster.clone()), config);
        }
    }
    jobs.into_values().collect()
}

/// The job that a process with this environment is part of.
fn job_of(environment: &[u8]) -> Option<Config> {
    let variables: BTreeMap<&str, &str> = environment
        .split(|byte| *byte == 0)
        .filter_map(|variable| std::str::from_utf8(variable).ok()?.split_once('='))
        .collect();
    let is_launched = LAUNCHED.iter().any(|name| variables.contains_key(name));
    if !is_launched || !variables.keys().any(|name| name.starts_with("POSEIDON_")) {
        return None;
    }
    let get = |name: &str| variables.get(name).map(|value| value.to_string());
    Config::from_variables(&get).ok().filter(|config| !config.coordinator.ends_with(":0"))
}

/// What a process of a job has in its environment, one of these, whoever has started it.
const LAUNCHED: [&str; 4] = ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "POSEIDON_SERVER"];

/// What a job is called by its environment.
const NAME: &str = "POSEIDON_CLUSTER";
/// What jobs are called that were given no name: those whose processes were started one by one, and
/// those of torchrun, whose jobs have the number 'none' if they are given no other.
const UNNAMED: [&str; 2] = ["torchrun", "none"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workers_environment_tells_of_its_job_and_others_tell_nothing() {
        let worker =
            b"RANK=1\0WORLD_SIZE=4\0LOCAL_RANK=1\0LOCAL_WORLD_SIZE=4\0MASTER_ADDR=127.0.0.1\0\
            MASTER_PORT=5001\0POSEIDON_COORDINATOR=127.0.0.1:5000\0POSEIDON_CLUSTER=launch-7\0\
            POSEIDON_SECRET=0123456789abcdef0123456789abcdef\0\xff=1\0";
        let job = job_of(worker).unwrap();
        assert_eq!(
            (&*job.coordinator, &*job.cluster, job.workers),
            ("127.0.0.1:5000", "launch-7", 4)
        );
        let without = |name: &[u8]| -> Vec<u8> {
            let parts = worker.split(|byte| *byte == 0).filter(|part| !part.starts_with(name));
            parts.collect::<Vec<_>>().join(&0)
        };
        assert!(job_of(&without(b"RANK=")).is_none());
        assert!(job_of(&without(b"POSEIDON_")).is_none());
        assert!(job_of(b"").is_none());
    }
}
