//! Which local address a node listens on, and why that one.

use crate::NumaNode;
use crate::names::resolve;
use crate::secret::random_number;
use socket2::Socket;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Instant;

/// The address to listen on and to tell others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The address.
    pub ip: IpAddr,
    /// The interface that has the address, if it is known.
    pub interface: Option<String>,
    /// Why this address was chosen, for the log.
    pub reason: String,
}

/// Why no address could be chosen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// What was asked for is neither an address nor an interface.
    #[error(
        "`{wanted}` is neither an IP address nor an interface of this machine, which has: {known}"
    )]
    UnknownInterface {
        /// What was asked for.
        wanted: String,
        /// The interfaces there are.
        known: Interfaces,
    },
    /// Two of several names mean the same address.
    #[error("`{wanted}` names {ip} twice: lanes share interfaces, so each is named once")]
    Twice {
        /// What was asked for.
        wanted: String,
        /// The address that is named twice.
        ip: IpAddr,
    },
    /// The address is another machine's.
    #[error("{ip} is not an address of this machine, which has: {known}")]
    NotLocal {
        /// What was asked for.
        ip: IpAddr,
        /// The interfaces there are.
        known: Interfaces,
    },
    /// `0.0.0.0` and `::` can be listened on, but others cannot connect to them.
    #[error(
        "{ip} means every address, and others need one to connect to: name an interface instead, of {known}"
    )]
    Unspecified {
        /// What was asked for.
        ip: IpAddr,
        /// The interfaces there are.
        known: Interfaces,
    },
    /// The interface has only link-local addresses. Such an address means nothing without the name
    /// of the interface.
    #[error("interface {interface} has no address that other machines can connect to: {known}")]
    LinkLocalOnly {
        /// What was asked for.
        interface: String,
        /// The interfaces there are.
        known: Interfaces,
    },
    /// The coordinator's name could not be resolved.
    #[error("cannot resolve the coordinator's address {coordinator}: {source}")]
    Resolve {
        /// The coordinator's address as it was given.
        coordinator: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// There is no way to the coordinator.
    #[error(
        "this machine has no route to the coordinator at {coordinator}: {source}; it has: {known}"
    )]
    NoRoute {
        /// The coordinator's address as it was given.
        coordinator: String,
        /// What the system said.
        source: io::Error,
        /// The interfaces there are.
        known: Interfaces,
    },
    /// The system would not list its interfaces.
    #[error("cannot list this machine's network interfaces: {0}")]
    List(io::Error),
}

/// A machine's interfaces with their addresses, one entry per address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interfaces(Vec<(String, IpAddr)>);

/// Chooses the address to listen on. If `wanted` is an address or an interface, it is that address or
/// the interface's. Otherwise it is the address from which the system would talk to the coordinator
/// (`host:port`). Nothing is sent to it. If that is a name, it has to be resolved by `deadline`.
pub fn choose(
    wanted: Option<&str>,
    coordinator: &str,
    deadline: Instant,
) -> Result<Choice, AddressError> {
    let interfaces = Interfaces::list()?;
    let Some(wanted) = wanted else { return route(coordinator, deadline, interfaces) };
    if let Ok(ip) = wanted.parse() {
        return explicit(ip, interfaces);
    }
    // If the interface has addresses of both families, the coordinator's family is taken. If that
    // is not known, it is IPv4.
    let target = resolve(coordinator, deadline).ok().and_then(|targets| targets.first().copied());
    interfaces.pick(wanted, target.is_some_and(|target| target.is_ipv6()))
}

/// As [`choose`], where `wanted` may be several addresses or interfaces with commas between them. The
/// choices are in that order.
pub fn choose_each(
    wanted: Option<&str>,
    coordinator: &str,
    deadline: Instant,
) -> Result<Vec<Choice>, AddressError> {
    let Some(names) = wanted.filter(|wanted| wanted.contains(',')) else {
        return choose(wanted, coordinator, deadline).map(|choice| vec![choice]);
    };
    let mut choices: Vec<Choice> = Vec::new();
    for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let choice = choose(Some(name), coordinator, deadline)?;
        if choices.iter().any(|other| other.ip == choice.ip) {
            return Err(AddressError::Twice { wanted: names.to_owned(), ip: choice.ip });
        }
        choices.push(choice);
    }
    if choices.is_empty() {
        let (wanted, known) = (names.to_owned(), Interfaces::list()?);
        return Err(AddressError::UnknownInterface { wanted, known });
    }
    Ok(choices)
}

impl Choice {
    /// Keeps what `socket` sends to the interface. Where a machine has several interfaces in one
    /// network, the system would send everything through one of them, whatever the socket's address.
    pub(crate) fn keep(&self, socket: &Socket) {
        let Some(interface) = self.interface.as_deref().filter(|_| !self.ip.is_loopback()) else {
            return;
        };
        if let Err(error) = socket.bind_device(Some(interface.as_bytes())) {
            tracing::warn!(
                %interface, %error,
                "a connection cannot be kept to its interface: the system's routes decide"
            );
        }
    }

    /// The largest packet that the interface takes, where the system says.
    pub fn mtu(&self) -> Option<u32> {
        crate::window::interface_mtu(self.interface.as_deref()?)
    }

    /// How many bytes wait at most before they leave the interface, where the system says.
    pub fn queue(&self) -> Option<u64> {
        crate::queue::of_interface(self.interface.as_deref()?)
    }

    /// The NUMA node that the interface is attached to, on a machine with several.
    pub fn numa_node(&self) -> Option<NumaNode> {
        NumaNode::of_interface(self.interface.as_deref()?)
    }
}

/// Whether `ip` is an address of this machine: one that can be listened on.
pub fn is_local(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

/// Names this machine and its network namespace. Two processes get equal names exactly if they can
/// reach each other's abstract unix sockets. Where that cannot be told, the name is unique.
pub fn host_id() -> String {
    linux_host_id()
        .or_else(|_| random_number().map(|n| format!("alone-{n:032x}")))
        .unwrap_or_else(|_| format!("alone-{}", std::process::id()))
}

impl Interfaces {
    fn list() -> Result<Self, AddressError> {
        let found = if_addrs::get_if_addrs().map_err(AddressError::List)?;
        let entry = |interface: if_addrs::Interface| {
            let ip = interface.ip();
            (interface.name, ip)
        };
        Ok(Self(found.into_iter().map(entry).collect()))
    }

    fn pick(self, wanted: &str, prefer_ipv6: bool) -> Result<Choice, AddressError> {
        let addresses = self.0.iter().filter(|(name, _)| name == wanted).map(|(_, ip)| *ip);
        let usable = addresses.clone().filter(|ip| !is_link_local(*ip));
        // `min_by_key` takes the first among equals: the interface's primary address.
        match usable.min_by_key(|ip| ip.is_ipv6() != prefer_ipv6) {
            Some(ip) => Ok(Choice {
                ip,
                interface: Some(wanted.to_owned()),
                reason: format!("interface {wanted}, as asked"),
            }),
            None if addresses.count() > 0 => {
                Err(AddressError::LinkLocalOnly { interface: wanted.to_owned(), known: self })
            }
            None => Err(AddressError::UnknownInterface { wanted: wanted.to_owned(), known: self }),
        }
    }

    fn name_of(&self, ip: IpAddr) -> Option<String> {
        self.0.iter().find(|(_, other)| *other == ip).map(|(name, _)| name.clone())
    }
}

impl fmt::Display for Interfaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no interfaces with addresses");
        }
        for (i, (name, ip)) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{name} ({ip})")?;
        }
        Ok(())
    }
}

fn explicit(ip: IpAddr, known: Interfaces) -> Result<Choice, AddressError> {
    if ip.is_unspecified() {
        return Err(AddressError::Unspecified { ip, known });
    }
    // The address is not looked up in the list: 127.0.0.2 is this machine's, though no interface
    // shows it.
    if UdpSocket::bind((ip, 0)).is_err() {
        return Err(AddressError::NotLocal { ip, known });
    }
    Ok(Choice { ip, interface: known.name_of(ip), reason: "as asked".to_owned() })
}

fn route(coordinator: &str, deadline: Instant, known: Interfaces) -> Result<Choice, AddressError> {
    let targets = resolve(coordinator, deadline)
        .map_err(|source| AddressError::Resolve { coordinator: coordinator.to_owned(), source })?;
    let mut failure = io::ErrorKind::AddrNotAvailable.into();
    for target in targets {
        let ip = match local_address_towards(target) {
            Ok(ip) => ip,
            Err(e) => {
                failure = e;
                continue;
            }
        };
        let (ip, reason) = if ip.is_loopback() && is_real_name(coordinator) {
            // Many systems give their own host name a loopback address. In that case the
            // coordinator is on this machine, and the other nodes may be elsewhere.
            match local_address_towards(ANYWHERE).ok().filter(|ip| !ip.is_loopback()) {
                Some(ip) => {
                    let why = "this machine is the coordinator, and its default route uses it";
                    (ip, why.to_owned())
                }
                None => {
                    (ip, format!("{coordinator} is {target} here, and there is no other route"))
                }
            }
        } else {
            (ip, format!("on the route to the coordinator at {target}"))
        };
        return Ok(Choice { ip, interface: known.name_of(ip), reason });
    }
    Err(AddressError::NoRoute { coordinator: coordinator.to_owned(), source: failure, known })
}

/// The local address of the route to `target`. Connecting a UDP socket looks up the route and sends
/// nothing.
fn local_address_towards(target: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match target {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

/// Whether `host:port` names a machine, as opposed to `localhost` or an address.
fn is_real_name(coordinator: &str) -> bool {
    let host = coordinator.rsplit_once(':').map_or(coordinator, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.parse::<IpAddr>().is_err() && host != "localhost"
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

#[cfg(target_os = "linux")]
fn linux_host_id() -> io::Result<String> {
    use std::os::unix::fs::MetadataExt;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = std::fs::metadata("/proc/self/ns/net")?;
    Ok(format!("{}-{}", boot.trim(), namespace.ino()))
}

#[cfg(not(target_os = "linux"))]
fn linux_host_id() -> io::Result<String> {
    Err(io::ErrorKind::Unsupported.into())
}

/// An address that is set aside for documentation (RFC 5737), so only the default route leads there.
const ANYWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn choose(wanted: Option<&str>, coordinator: &str) -> Result<Choice, AddressError> {
        super::choose(wanted, coordinator, Instant::now() + Duration::from_secs(60))
    }

    fn machine() -> Interfaces {
        let entry = |(name, ip): (&str, &str)| (name.to_owned(), ip.parse().unwrap());
        let entries = [
            ("lo", "127.0.0.1"),
            ("eth0", "fe80::1"),
            ("eth0", "2001:db8::2"),
            ("eth0", "10.0.0.2"),
            ("eth0", "10.0.0.3"),
            ("eth1", "fe80::2"),
        ];
        Interfaces(entries.map(entry).into())
    }

    #[test]
    fn an_interface_gives_its_first_address_of_the_coordinators_family() {
        let choice = machine().pick("eth0", false).unwrap();
        assert_eq!(choice.ip.to_string(), "10.0.0.2");
        assert_eq!(choice.interface.as_deref(), Some("eth0"));
        assert_eq!(machine().pick("eth0", true).unwrap().ip.to_string(), "2001:db8::2");
        assert_eq!(machine().pick("lo", true).unwrap().ip.to_string(), "127.0.0.1");
    }

    #[test]
    fn an_interface_without_a_usable_address_is_refused() {
        let error = machine().pick("eth1", true).unwrap_err();
        assert!(matches!(error, AddressError::LinkLocalOnly { .. }), "{error}");
    }

    #[test]
    fn an_unknown_interface_lists_those_there_are() {
        let error = choose(Some("nonesuch0"), "127.0.0.1:7000").unwrap_err();
        assert!(matches!(error, AddressError::UnknownInterface { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("`nonesuch0`"), "{text}");
        for (name, ip) in Interfaces::list().unwrap().0 {
            assert!(text.contains(&format!("{name} ({ip})")), "{text}");
        }
    }

    #[test]
    fn automatic_is_the_address_that_routes_to_the_coordinator() {
        let choice = choose(None, "127.0.0.1:7000").unwrap();
        assert_eq!(choice.ip, Ipv4Addr::LOCALHOST);
        assert!(choice.reason.contains("127.0.0.1:7000"), "{}", choice.reason);
        assert_eq!(choice.interface, Interfaces::list().unwrap().name_of(choice.ip));
        assert!(choice.interface.is_some());
    }

    #[test]
    fn every_interface_of_this_machine_can_be_asked_for_by_name_and_by_address() {
        for (name, ip) in Interfaces::list().unwrap().0 {
            if is_link_local(ip) {
                continue;
            }
            let by_name = choose(Some(&name), "127.0.0.1:7000").unwrap();
            assert_eq!(by_name.interface.as_ref(), Some(&name));
            let by_address = choose(Some(&ip.to_string()), "127.0.0.1:7000").unwrap();
            assert_eq!((by_address.ip, by_address.interface), (ip, Some(name)));
        }
    }

    #[test]
    fn addresses_nobody_could_connect_to_are_refused() {
        let error = choose(Some("0.0.0.0"), "127.0.0.1:7000").unwrap_err();
        assert!(matches!(error, AddressError::Unspecified { .. }), "{error}");
        // Set aside for documentation (RFC 5737), so nobody's.
        let error = choose(Some("198.51.100.7"), "127.0.0.1:7000").unwrap_err();
        assert!(matches!(error, AddressError::NotLocal { .. }), "{error}");
        let error = choose(None, "127.0.0.1").unwrap_err();
        assert!(matches!(error, AddressError::Resolve { .. }), "{error}");
    }

    #[test]
    fn names_are_told_from_addresses() {
        for address in ["10.0.0.1:1", "[::1]:1", "localhost:1"] {
            assert!(!is_real_name(address), "{address}");
        }
        assert!(is_real_name("node0:1"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_host_is_the_same_when_asked_twice() {
        assert_eq!(host_id(), host_id());
        assert!(!host_id().starts_with("alone"));
    }
}
