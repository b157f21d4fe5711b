//! At which addresses the processes of a job on several hosts meet.

use super::host_list::Host;
use super::protocol::Greeting;
use poseidon_link::address;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How long the name of a host may take to be resolved. ssh has just resolved it.
pub(super) const LOOK_UP: Duration = Duration::from_secs(30);

/// An address, and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Meeting {
    pub(super) ip: IpAddr,
    pub(super) reason: String,
}

/// What a machine knows about its addresses.
pub(super) trait Routes {
    /// The address from which this machine talks to the machine of this name.
    fn towards(&self, name: &str) -> Option<IpAddr>;
    /// Whether it is an address of this machine.
    fn is_own(&self, ip: IpAddr) -> bool;
}

/// This machine.
pub(super) struct ThisMachine;

impl Routes for ThisMachine {
    fn towards(&self, name: &str) -> Option<IpAddr> {
        // Any port will do: nothing is sent.
        let port = 22;
        let target =
            if name.contains(':') { format!("[{name}]:{port}") } else { format!("{name}:{port}") };
        address::choose(None, &target, Instant::now() + LOOK_UP).ok().map(|choice| choice.ip)
    }

    fn is_own(&self, ip: IpAddr) -> bool {
        address::is_local(ip)
    }
}

/// Where the coordinator listens, on this machine, so that all hosts can reach it: where ssh has
/// reached a host from, or the address on the route to a host. Loopback only if all hosts are this
/// machine.
pub(super) fn coordinator(hosts: &[(&Host, &Greeting)], routes: &impl Routes) -> Option<Meeting> {
    let by_ssh = hosts.iter().filter_map(|(host, greeting)| {
        let ip = SshAddresses::read(greeting)?.launcher;
        // Behind a jump host or an address translation it is another machine's.
        let reason = format!("ssh reaches {} from there", host.name);
        routes.is_own(ip).then_some(Meeting { ip, reason })
    });
    let by_route = hosts.iter().filter_map(|(host, _)| {
        let ip = routes.towards(host.machine())?;
        Some(Meeting { ip, reason: format!("on the route to {}", host.name) })
    });
    let found: Vec<_> = by_ssh.chain(by_route).collect();
    let elsewhere = found.iter().find(|meeting| !meeting.ip.is_loopback());
    elsewhere.or(found.first()).cloned()
}

/// Where torch's own store listens: an address of the host of rank 0 that the others can reach.
pub(super) fn master(first: (&Host, &Greeting), coordinator: IpAddr) -> (String, u16) {
    let (host, greeting) = first;
    let by_ssh = SshAddresses::read(greeting).map(|addresses| addresses.host);
    let name = match by_ssh {
        // The host is this machine, as is the coordinator.
        Some(ip) if ip.is_loopback() => coordinator.to_string(),
        Some(ip) => ip.to_string(),
        None => host.machine().to_owned(),
    };
    (name, greeting.free_port)
}

/// Both ends of ssh's connection, as the host sees them.
struct SshAddresses {
    launcher: IpAddr,
    host: IpAddr,
}

impl SshAddresses {
    fn read(greeting: &Greeting) -> Option<Self> {
        let text = greeting.connection.as_deref()?;
        let words: Vec<_> = text.split(' ').collect();
        let [launcher, _, host, _] = words[..] else { return None };
        Some(Self { launcher: launcher.parse().ok()?, host: host.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::protocol::PROTOCOL;
    use std::collections::BTreeMap;

    struct Table(BTreeMap<&'static str, &'static str>);

    impl Routes for Table {
        fn towards(&self, name: &str) -> Option<IpAddr> {
            self.0.get(name).map(|ip| ip.parse().unwrap())
        }

        fn is_own(&self, ip: IpAddr) -> bool {
            self.0.values().any(|own| *own == ip.to_string())
        }
    }

    fn routes() -> Table {
        Table([("localhost", "127.0.0.1"), ("b", "10.0.0.1"), ("c", "10.1.0.1")].into())
    }

    fn host(name: &str, connection: Option<&str>) -> (Host, Greeting) {
        let greeting = Greeting {
            protocol: PROTOCOL,
            version: String::new(),
            program: String::new(),
            connection: connection.map(str::to_owned),
            free_port: 4000,
        };
        (Host { name: name.into(), ranks: 1 }, greeting)
    }

    fn chosen(hosts: &[(Host, Greeting)]) -> Option<(String, String)> {
        let hosts: Vec<_> = hosts.iter().map(|(host, greeting)| (host, greeting)).collect();
        coordinator(&hosts, &routes()).map(|meeting| (meeting.ip.to_string(), meeting.reason))
    }

    fn meeting(ip: &str, reason: &str) -> Option<(String, String)> {
        Some((ip.into(), reason.into()))
    }

    #[test]
    fn the_coordinator_is_where_ssh_came_from_or_on_the_route() {
        let b = || host("b", Some("10.1.0.1 5 10.1.0.2 22"));
        assert_eq!(chosen(&[b()]), meeting("10.1.0.1", "ssh reaches b from there"));
        // It came by a jump host.
        let jumped = host("b", Some("10.9.9.9 5 10.1.0.2 22"));
        assert_eq!(chosen(&[jumped]), meeting("10.0.0.1", "on the route to b"));
        assert_eq!(chosen(&[host("b", None)]), meeting("10.0.0.1", "on the route to b"));
        assert_eq!(chosen(&[host("me@b", None)]), meeting("10.0.0.1", "on the route to me@b"));
        assert_eq!(chosen(&[host("alias", None)]), None);
    }

    #[test]
    fn loopback_is_for_jobs_that_are_all_on_this_machine() {
        let here = || host("localhost", Some("127.0.0.1 5 127.0.0.1 22"));
        assert_eq!(chosen(&[here()]), meeting("127.0.0.1", "ssh reaches localhost from there"));
        assert_eq!(chosen(&[here(), host("b", None)]), meeting("10.0.0.1", "on the route to b"));
    }

    #[test]
    fn the_master_is_on_the_host_of_rank_0() {
        let at = |(host, greeting): (Host, Greeting)| {
            master((&host, &greeting), "10.0.0.1".parse().unwrap())
        };
        assert_eq!(at(host("b", Some("10.0.0.1 5 10.0.0.2 22"))), ("10.0.0.2".into(), 4000));
        assert_eq!(at(host("x", Some("127.0.0.1 5 127.0.0.1 22"))), ("10.0.0.1".into(), 4000));
        assert_eq!(at(host("me@b", None)), ("b".into(), 4000));
    }
}
