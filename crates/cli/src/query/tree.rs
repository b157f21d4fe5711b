//! `poseidon query tree` for people: racks, hosts and nodes, indented.

use crate::terminal::printable;
use poseidon::{PlacedHost, PlacedNode, PlacedRack, PlacedTree};

/// What the tree means, then a line for every rack and host, and for the workers and servers of a
/// host.
pub(super) fn tree_text(tree: &PlacedTree) -> String {
    let mut text = format!("{}\n", printable(&tree.meaning));
    for PlacedRack { name, hosts } in &tree.racks {
        match name {
            Some(name) => text += &format!("rack {}\n", printable(name)),
            None => text += "rack without a name\n",
        }
        for host in hosts {
            text += &format!("  {}\n", host_line(host));
            for line in node_lines(&host.nodes) {
                text += &format!("    {line}\n");
            }
        }
    }
    text
}

/// "host 3f2a91cc-4026532911 at 10.77.0.1, port of 1 Gbit/s". Nodes that were told different rates
/// have ports of their own.
fn host_line(host: &PlacedHost) -> String {
    let address = |node: &PlacedNode| Some(node.tcp.rsplit_once(':')?.0.to_owned());
    let addresses = each_once(host.nodes.iter().filter_map(address));
    let rates = each_once(host.nodes.iter().filter_map(|node| Some(node.rate?.to_string())));
    let mut line = format!("host {}", short(&printable(&host.host)));
    if !addresses.is_empty() {
        line += &format!(" at {}", printable(&addresses.join(", ")));
    }
    match &rates[..] {
        [] => {}
        [rate] => line += &format!(", port of {rate}"),
        rates => line += &format!(", ports of {}", rates.join(", ")),
    }
    line
}

/// The workers of a host on one line, and each of its dedicated servers on a line.
fn node_lines(nodes: &[PlacedNode]) -> Vec<String> {
    let workers: Vec<_> = nodes.iter().filter(|node| node.worker).collect();
    let mut lines = Vec::new();
    if let Some(first) = workers.first() {
        let (noun, verb) =
            if workers.len() == 1 { ("worker", "is a server") } else { ("workers", "are servers") };
        // All workers are servers, or none is.
        let too = if first.server { format!(", which {verb} too") } else { String::new() };
        lines.push(format!("{noun} {}{too}", ranks(workers.iter().map(|node| node.node.0))));
    }
    lines.extend(nodes.iter().filter(|node| !node.worker).map(|node| printable(&node.name)));
    lines
}

/// "0 to 3, 8": runs of neighbours are told by their ends.
fn ranks(numbers: impl Iterator<Item = u16>) -> String {
    let mut runs: Vec<(u16, u16)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let words = runs.into_iter().map(|(first, last)| match last - first {
        0 => format!("{first}"),
        1 => format!("{first}, {last}"),
        _ => format!("{first} to {last}"),
    });
    words.collect::<Vec<_>>().join(", ")
}

/// The first and the last part of an identity such as `BOOT-ID-OF-A-KERNEL-NAMESPACE`: the kernel
/// and the namespace, which are enough to tell hosts apart by eye.
fn short(identity: &str) -> String {
    let cut = |part: &str| part.chars().take(SHORT).collect::<String>();
    match (identity.split_once('-'), identity.rsplit_once('-')) {
        (Some((first, _)), Some((_, last))) => format!("{}-{}", cut(first), cut(last)),
        _ => cut(identity),
    }
}

/// Characters of a part of an identity: all of a namespace's number.
const SHORT: usize = 10;

fn each_once(words: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = Vec::new();
    for word in words {
        if !seen.contains(&word) {
            seen.push(word);
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon::NodeId;

    const BOOT: &str = "3f2a91cc-1111-2222-3333-444455556666";

    fn node(number: u16, (worker, server): (bool, bool), rate: Option<&str>) -> PlacedNode {
        let name = if worker { format!("worker {number}") } else { "server 0 (node 5)".into() };
        PlacedNode {
            node: NodeId(number),
            name,
            worker,
            server,
            tcp: format!("10.0.0.1:{}", 40_000 + number),
            rate: rate.map(|rate| rate.parse().unwrap()),
        }
    }

    fn host(namespace: u32, nodes: Vec<PlacedNode>) -> PlacedHost {
        PlacedHost { host: format!("{BOOT}-{namespace}"), nodes }
    }

    #[test]
    fn a_tree_is_indented_and_names_everybody() {
        let both = (true, true);
        let gigabit = Some("1gbit");
        let many = [0, 1, 2, 4].map(|number| node(number, both, gigabit)).to_vec();
        let mixed = vec![node(3, both, gigabit), node(5, (false, true), Some("100mbit"))];
        let tree = PlacedTree {
            meaning: "5 workers on 2 hosts in 2 racks: sums leave a host once".into(),
            racks: vec![
                PlacedRack { name: Some("A\u{1b}".into()), hosts: vec![host(4_026_532_911, many)] },
                PlacedRack { name: None, hosts: vec![host(7, mixed)] },
            ],
        };
        let expected = "\
5 workers on 2 hosts in 2 racks: sums leave a host once
rack A\u{fffd}
  host 3f2a91cc-4026532911 at 10.0.0.1, port of 1 Gbit/s
    workers 0 to 2, 4, which are servers too
rack without a name
  host 3f2a91cc-7 at 10.0.0.1, ports of 1 Gbit/s, 100 Mbit/s
    worker 3, which is a server too
    server 0 (node 5)
";
        assert_eq!(tree_text(&tree), expected);
    }

    #[test]
    fn what_is_not_known_is_not_told() {
        let mut worker = node(0, (true, false), None);
        worker.tcp.clear();
        let alone = PlacedHost { host: "alone-0123456789abcdef".into(), nodes: vec![worker] };
        assert_eq!(host_line(&alone), "host alone-0123456789");
        assert_eq!(node_lines(&alone.nodes), ["worker 0"]);
    }
}
