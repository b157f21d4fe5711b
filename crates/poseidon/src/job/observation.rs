//! What is written and served of a node for people who want to see what it does.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// What is written and served of a node for people who want to see what it does. Nothing by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// The file that a trace of the node is written to, at the end and when the job fails. Every node
    /// has a file of its own: `%r` in the name is replaced by `rank0`, or `server0` for a dedicated
    /// server; without it that is put before the name's ending.
    pub trace: Option<PathBuf>,
    /// The folder that gets the traces of all nodes, for `poseidon report`.
    pub report: Option<PathBuf>,
    /// Where metrics are served. Port 0: wherever there is room.
    pub metrics: Option<SocketAddr>,
    /// The folder that gets scalars of all workers, as TensorBoard reads them.
    pub tensorboard: Option<PathBuf>,
}

impl Observation {
    /// The files that the trace of `node`, such as `rank0`, goes to.
    pub(crate) fn files(&self, node: &str) -> Vec<PathBuf> {
        let in_folder = self.report.as_ref().map(|folder| folder.join(TRACE));
        self.trace.iter().chain(&in_folder).map(|path| node_file(path, node)).collect()
    }

    /// The same for a process group. A session of the same process may have the files themselves.
    pub(crate) fn of_group(self) -> Self {
        let inside = |folder: PathBuf| folder.join(GROUP);
        Self {
            trace: self.trace.as_deref().map(group_file),
            report: self.report.map(inside),
            tensorboard: self.tensorboard.map(inside),
            ..self
        }
    }

    /// Whether events have to be noted for it. Scalars are made of what is counted anyway.
    pub(crate) fn needs_events(&self) -> bool {
        self.trace.is_some() || self.report.is_some() || self.metrics.is_some()
    }
}

/// The name that traces have in the folder of a report, before the node's own is put into it.
pub const TRACE: &str = "trace.json";

/// What files and folders of process groups are called.
const GROUP: &str = "c10d";

/// The file of one node.
pub(crate) fn node_file(path: &Path, node: &str) -> PathBuf {
    let text = path.to_string_lossy();
    if text.contains("%r") {
        return text.replace("%r", node).into();
    }
    let Some(ending) = path.extension() else {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        return path.with_file_name(format!("{name}.{node}"));
    };
    path.with_extension(format!("{node}.{}", ending.to_string_lossy()))
}

/// The file of a process group, before a node's own name is put into it. A session of the same process
/// may write to the file itself.
fn group_file(path: &Path) -> PathBuf {
    match path.to_string_lossy() {
        text if text.contains("%r") => text.replace("%r", &format!("{GROUP}.%r")).into(),
        _ => node_file(path, GROUP),
    }
}

/// Where metrics are served, as people write it: `ADDRESS:PORT`, or a port of this machine only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MetricsAddress(pub(crate) SocketAddr);

impl MetricsAddress {
    /// The address for the `local`-th node of a host: nodes of one host take neighbouring ports.
    pub(crate) fn of_local(self, local: u16) -> Result<SocketAddr, String> {
        let Self(mut address) = self;
        if address.port() > 0 {
            let port = address.port().checked_add(local);
            let past = || format!("there is no port {local} after it for this node");
            address.set_port(port.ok_or_else(past)?);
        }
        Ok(address)
    }
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(port) = text.parse() {
            return Ok(Self(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)));
        }
        let expected = "expected an address and a port, such as 0.0.0.0:9400, or a port";
        text.parse().map(Self).map_err(|_| expected.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_has_a_file_of_its_own() {
        let file = |path: &str, node| node_file(Path::new(path), node);
        let (worker, server) = ("rank3", "server1");
        assert_eq!(file("/runs/trace.json", worker), Path::new("/runs/trace.rank3.json"));
        assert_eq!(file("trace.json", server), Path::new("trace.server1.json"));
        assert_eq!(file("a/trace", worker), Path::new("a/trace.rank3"));
        assert_eq!(file("a/%r/t.json", worker), Path::new("a/rank3/t.json"));
        let grouped = |path: &str| node_file(&group_file(Path::new(path)), worker);
        assert_eq!(grouped("/runs/t.json"), Path::new("/runs/t.c10d.rank3.json"));
        assert_eq!(grouped("a/%r.json"), Path::new("a/c10d.rank3.json"));
        let (trace, report) = (Some("t.json".into()), Some("out".into()));
        let both = Observation { trace, report, ..Observation::default() };
        let expected = [PathBuf::from("t.rank3.json"), PathBuf::from("out/trace.rank3.json")];
        assert_eq!(both.files(worker), expected);
    }

    #[test]
    fn nodes_of_a_host_take_neighbouring_ports() {
        let at = |text: &str, local| {
            text.parse::<MetricsAddress>().and_then(|address| address.of_local(local))
        };
        assert_eq!(at("0.0.0.0:9400", 0), Ok("0.0.0.0:9400".parse().unwrap()));
        assert_eq!(at("9400", 3), Ok("127.0.0.1:9403".parse().unwrap()));
        assert_eq!(at("[::1]:9400", 1), Ok("[::1]:9401".parse().unwrap()));
        assert_eq!(at("127.0.0.1:0", 3), Ok("127.0.0.1:0".parse().unwrap()));
        assert!(at("65535", 1).unwrap_err().contains("no port"));
        assert!(at("here", 0).unwrap_err().contains("0.0.0.0:9400"));
    }
}
