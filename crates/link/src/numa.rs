//! Which cores are near a network interface.
//!
//! A machine with several processors has a memory at each of them: these are its NUMA nodes. An
//! interface is attached to one of the processors. What another one reads of it, or writes to it,
//! passes between the processors first (PHub §2).

use std::fs;
use std::path::Path;

/// A processor with its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub number: usize,
    /// Its cores.
    pub cores: Vec<usize>,
}

impl NumaNode {
    /// The node that `interface` is attached to. `None` where a machine has one node only, or does not
    /// say.
    pub fn of_interface(interface: &str) -> Option<Self> {
        find(Path::new("/sys"), interface)
    }
}

fn find(system: &Path, interface: &str) -> Option<NumaNode> {
    let device = system.join("class/net").join(interface).join("device");
    // It is -1 where nobody knows.
    let number = fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok()?;
    let nodes = system.join("devices/system/node");
    let is_node =
        |name: &str| name.strip_prefix("node").is_some_and(|n| n.parse::<usize>().is_ok());
    let entries = fs::read_dir(&nodes).ok()?.flatten();
    let count = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count();
    let list = fs::read_to_string(nodes.join(format!("node{number}/cpulist"))).ok()?;
    let cores = listed(list.trim())?;
    (count > 1 && !cores.is_empty()).then_some(NumaNode { number, cores })
}

/// The numbers of a list such as `0-3,8`.
fn listed(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in list.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with nodes of these cores, and an interface at `at`.
    fn machine(nodes: &[&str], at: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: String, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        };
        for (number, cores) in nodes.iter().enumerate() {
            write(format!("devices/system/node/node{number}/cpulist"), cores);
        }
        write("devices/system/node/online".into(), "0-1");
        write("class/net/eth0/device/numa_node".into(), at);
        folder
    }

    #[test]
    fn an_interface_is_near_the_cores_of_its_node() {
        let two = machine(&["0-3,8-11", "4-7,12"], "1");
        let near = NumaNode { number: 1, cores: vec![4, 5, 6, 7, 12] };
        assert_eq!(find(two.path(), "eth0"), Some(near));
        assert_eq!(find(two.path(), "eth1"), None, "a bridge has no device");
    }

    #[test]
    fn one_node_is_none_and_so_is_what_nobody_knows() {
        let machines = [
            machine(&["0-15"], "0"),
            machine(&["0-7", "8-15"], "-1"),
            machine(&["0-7", "8-15"], "2"),
            machine(&["0-7", ""], "1"),
            machine(&["0-7", "8-x"], "1"),
        ];
        for machine in machines {
            assert_eq!(find(machine.path(), "eth0"), None);
        }
    }
}
