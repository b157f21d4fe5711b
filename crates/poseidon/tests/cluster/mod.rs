//! A whole cluster in one process: every node its own threads, real sockets between them.
#![allow(dead_code, reason = "each test file uses a part of it")]

use poseidon::config::{Carriers, Config, Member, credentials};
use poseidon::session::Builder;
use poseidon::{Coordinator, Error, Secret, Servers, Session, serve};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// How a test cluster is laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) workers: u16,
    pub(crate) servers: Servers,
    pub(crate) lanes: u16,
    pub(crate) carrier: Carriers,
}

impl Layout {
    pub(crate) fn workers(workers: u16) -> Self {
        Self { workers, servers: Servers::Colocated, lanes: 1, carrier: Carriers::Auto }
    }

    /// The coordinator of such a cluster, and the configuration of its worker 0.
    pub(crate) fn coordinator(&self) -> (Coordinator, Config) {
        let secret = Secret::random().unwrap();
        let mut config = Config::alone(secret.clone());
        config.workers = self.workers;
        config.servers = self.servers;
        config.lanes = self.lanes;
        config.carrier = self.carrier;
        config.cluster = "test".into();
        config.serves_coordinator = false;
        // A machine that builds something else at the same time may take long to start a thread.
        config.connect_timeout = Duration::from_secs(60);
        let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let door = credentials("test", secret);
        let coordinator = Coordinator::bind(ip, 0, door, config.connect_timeout).unwrap();
        config.coordinator = coordinator.address().to_string();
        (coordinator, config)
    }

    /// Runs `describe` and `work` on every worker, and the dedicated servers beside them. Returns
    /// what each worker returned; the sessions are finished here.
    pub(crate) fn run<T: Send>(
        &self,
        describe: impl Fn(Builder) -> Builder + Sync,
        work: impl Fn(&Session) -> Result<T, Error> + Sync,
    ) -> Vec<Result<T, Error>> {
        let (_coordinator, config) = self.coordinator();
        self.run_with(&config, describe, |session| {
            let value = work(&session)?;
            session.finish()?;
            Ok(value)
        })
    }

    pub(crate) fn run_with<T: Send>(
        &self,
        config: &Config,
        describe: impl Fn(Builder) -> Builder + Sync,
        work: impl Fn(Session) -> Result<T, Error> + Sync,
    ) -> Vec<Result<T, Error>> {
        std::thread::scope(|scope| {
            for index in 0..self.servers.extra() {
                let mut config = config.clone();
                config.member = Member::Server(index);
                // Workers see what goes wrong; a server's own error is only the echo of it.
                scope.spawn(move || serve(&config));
            }
            let threads: Vec<_> = (0..self.workers)
                .map(|rank| {
                    let mut config = config.clone();
                    config.member = Member::Worker(rank);
                    let (describe, work) = (&describe, &work);
                    scope.spawn(move || work(describe(Session::builder(config)).start()?))
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }
}
