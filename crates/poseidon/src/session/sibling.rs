//! More sessions among the workers of a job, for another model or another update rule, and groups.

use crate::job::config::Member;
use crate::session::Builder;
use crate::{Config, Coordinator, Error, Group, Session};
use poseidon_core::Servers;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};

impl Session {
    /// Starts another session among the same workers. Every worker calls it with the same `name`,
    /// which no other session of the job has, and describes the same layers.
    ///
    /// Its parameters live on the workers: dedicated servers serve the first session only.
    pub fn sibling(
        &self,
        name: &str,
        describe: impl FnOnce(Builder) -> Builder,
    ) -> Result<Self, Error> {
        let (config, coordinator) = self.meeting_point(name)?;
        let mut session = describe(Self::builder(config)).start()?;
        session.beside = coordinator;
        Ok(session)
    }

    /// The same workers as a group. Every worker calls it with the same `name`, which no sibling and no
    /// other group of the job has.
    pub fn group(&self, name: &str) -> Result<Group, Error> {
        // The coordinator is needed until all have joined, which is when `start` returns.
        let (config, _coordinator) = self.meeting_point(name)?;
        let cluster = &self.book().cluster;
        Group::start(&config, cluster.worker_ids().map(|worker| cluster.name(worker)).collect())
    }

    /// Where the workers meet for something called `name`. Worker 0 has the coordinator.
    fn meeting_point(&self, name: &str) -> Result<(Config, Option<Coordinator>), Error> {
        let mut config = self.config.clone();
        config.cluster = format!("{}/{name}", config.cluster);
        config.servers = Servers::Colocated;
        config.serves_coordinator = false;
        let coordinator = match config.member {
            Member::Worker(0) => Some(self.coordinator_beside(&config)?),
            Member::Worker(_) | Member::Server(_) => None,
        };
        // Where the others reach the job's coordinator they reach this one, at another port.
        let port = coordinator.as_ref().map(|coordinator| coordinator.address().port());
        let topic = format!("session {name}");
        let ports = self.gather(&topic, &port.into())?;
        let port = ports.first().and_then(|port| port.as_u64()).unwrap_or_default();
        let host = self.config.coordinator.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host);
        config.coordinator = format!("{host}:{port}");
        Ok((config, coordinator))
    }

    fn coordinator_beside(&self, config: &Config) -> Result<Coordinator, Error> {
        let text = &self.config.coordinator;
        let resolved = text.to_socket_addrs().map_err(Error::io(format!("address {text}")))?;
        let ip = resolved
            .map(|address| address.ip())
            .find(|ip| ip.is_loopback() || poseidon_link::address::is_local(*ip));
        let ip = ip.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        Coordinator::bind(ip, 0, config.credentials(), config.connect_timeout)
    }
}
