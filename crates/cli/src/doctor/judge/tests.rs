use super::super::Listens;
use super::super::facts::Facts;
use super::*;

fn node(number: u16, mtu: u32) -> NodeReport {
    let mut facts = Facts::here();
    facts.hostname = format!("gpu{number}");
    facts.open_files = [None, None];
    facts.memory_free_bytes = None;
    facts.receive_buffer = None;
    facts.secret_fault = None;
    facts.ports = Some([32_768, 60_999]);
    let listens = Listens {
        address: format!("10.0.0.{number}"),
        interface: Some("eth0".into()),
        why: "as asked".into(),
        mtu: Some(mtu),
    };
    let (name, host) = (format!("worker {number}"), format!("host {number}"));
    NodeReport { name, host, listens: vec![listens], facts, gpus: Vec::new() }
}

fn way(from: u16, to: u16, mbit: u64) -> Way {
    Way {
        from: NodeId(from),
        to: NodeId(to),
        same_host: false,
        failure: None,
        round_trip_us: Some(100.0),
        clock_ahead_us: (from > to).then_some(50.0),
        bits_per_second: Some(mbit * 1_000_000),
        packet: Some(1500),
        packet_expected: Some(1500),
        segments: Some(10_000),
        resent: Some(10),
    }
}

/// All ways of four nodes, each changed by `change`.
fn ways(change: impl Fn(&mut Way)) -> Vec<Way> {
    let pairs = (0..4).flat_map(|from| (0..4).map(move |to| (from, to)));
    let different = pairs.filter(|(from, to)| from != to);
    let mut ways: Vec<Way> = different.map(|(from, to)| way(from, to, 940)).collect();
    ways.iter_mut().for_each(change);
    ways
}

fn nodes() -> Vec<NodeReport> {
    (0..4).map(|number| node(number, 1500)).collect()
}

fn only(findings: &[Finding]) -> &Finding {
    assert_eq!(findings.len(), 1, "{findings:#?}");
    &findings[0]
}

#[test]
fn a_gpu_with_a_narrow_link_is_named_and_one_that_cannot_be_used() {
    let mut nodes = nodes();
    let gpu = |number, to_host| Gpu { number, to_host, to_device: Some(50e9), fault: None };
    for node in &mut nodes {
        node.gpus = vec![gpu(0, Some(52e9)), gpu(1, Some(48e9))];
    }
    assert_eq!(findings(&nodes, &ways(|_| ())), []);
    nodes[2].gpus[1].to_host = Some(6e9);
    let found = findings(&nodes, &ways(|_| ()));
    let words = &only(&found).what;
    assert_eq!(
        words,
        "GPU 1 of worker 2 copies 6.00 GB/s to the host, the median of all is 52.0 GB/s"
    );
    assert!(found[0].wrong && found[0].fix.contains("PCIe"), "{found:#?}");
    nodes[2].gpus[1] =
        Gpu { number: 1, to_host: None, to_device: None, fault: Some("out of memory".into()) };
    let found = findings(&nodes, &ways(|_| ()));
    assert!(!only(&found).wrong && found[0].what.contains("out of memory"), "{found:#?}");
}

#[test]
fn healthy_nodes_have_no_findings() {
    assert_eq!(findings(&nodes(), &ways(|_| ())), []);
    assert_eq!(findings(&nodes()[..1], &[]), []);
}

#[test]
fn an_interface_whose_mtu_is_not_the_others_is_named() {
    let mut nodes = nodes();
    nodes[2] = node(2, 1400);
    let found = findings(&nodes, &ways(|_| ()));
    let found = only(&found);
    assert!(found.wrong && found.topic == Topic::Mtu);
    assert!(found.what.contains("eth0 of worker 2 (gpu2) has an MTU of 1400"), "{}", found.what);
    assert!(found.fix.contains("ip link set dev eth0 mtu 1500"), "{}", found.fix);

    // The same of a second interface, which lanes take in turn with the first.
    let mut nodes: Vec<_> = (0..4).map(|number| node(number, 1500)).collect();
    for node in &mut nodes {
        let second = Listens { interface: Some("eth1".into()), ..node.listens[0].clone() };
        node.listens.push(second);
    }
    nodes[3].listens[1].mtu = Some(9000);
    let found = findings(&nodes, &ways(|_| ()));
    let found = only(&found);
    assert!(found.what.contains("eth1 of worker 3 (gpu3) has an MTU of 9000"), "{}", found.what);
}

#[test]
fn packets_that_the_network_drops_are_named_with_the_pair() {
    let found = findings(
        &nodes(),
        &ways(|way| {
            if (way.from, way.to) == (NodeId(1), NodeId(3)) {
                way.packet = Some(1450);
            }
        }),
    );
    let found = only(&found);
    assert!(found.what.contains("from worker 1 (gpu1) to worker 3 (gpu3)"), "{}", found.what);
    assert!(found.what.contains("1450") && found.topic == Topic::Mtu, "{}", found.what);
}

#[test]
fn a_pair_without_a_connection_is_named_with_the_port_and_what_to_open() {
    let mut ways = ways(|_| ());
    ways.retain(|way| (way.from.0, way.to.0) != (1, 3));
    let blocked = ways.iter_mut().find(|way| (way.from.0, way.to.0) == (3, 1)).unwrap();
    blocked.failure =
        Some(WayFailure::Unreached { address: "10.0.0.1:41234".into(), why: "no answer".into() });
    (blocked.bits_per_second, blocked.packet) = (None, None);
    let found = findings(&nodes(), &ways);
    let found = only(&found);
    let words = &found.what;
    assert!(words.contains("worker 3 (gpu3) cannot connect to worker 1 (gpu1)"), "{words}");
    assert!(words.contains("10.0.0.1:41234") && found.topic == Topic::Connection, "{words}");
    assert!(found.fix.contains("from 10.0.0.3 in to the ports 32768 to 60999"), "{}", found.fix);
}

#[test]
fn a_slow_pair_is_named_and_a_slow_port_once() {
    let pair = findings(
        &nodes(),
        &ways(|way| {
            if (way.from, way.to) == (NodeId(1), NodeId(3)) {
                way.bits_per_second = Some(94_000_000);
            }
        }),
    );
    let words = &only(&pair).what;
    assert!(words.contains("worker 1 (gpu1) sends to worker 3 (gpu3) with 94 Mbit/s"), "{words}");
    let port = findings(
        &nodes(),
        &ways(|way| {
            if way.from == NodeId(2) {
                way.bits_per_second = Some(94_000_000);
            }
        }),
    );
    let words = &only(&port).what;
    assert!(
        words.contains("worker 2 (gpu2) sends to all others with at most 94 Mbit/s"),
        "{words}"
    );
    assert!(words.contains("the median of all pairs is 940 Mbit/s"), "{words}");
}

#[test]
fn clocks_versions_and_losses_are_told() {
    let found = findings(
        &nodes(),
        &ways(|way| match (way.from.0, way.to.0) {
            // Worker 0's clock is ahead of worker 3's.
            (3, 0) => way.clock_ahead_us = Some(90e6),
            (1, 2) => way.resent = Some(900),
            _ => {}
        }),
    );
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(found[0].what.contains("the clock of worker 3 (gpu3) is"), "{}", found[0].what);
    assert!(found[0].what.contains("behind that of worker 0") && found[0].wrong);
    assert!(found[1].what.contains("9.0 %") && !found[1].wrong, "{}", found[1].what);
    let mut nodes = nodes();
    nodes[1].facts.version = "0.0.9".into();
    let found = findings(&nodes, &[]);
    assert!(only(&found).what.contains("worker 1 (gpu1) runs Poseidon 0.0.9"));
}

#[test]
fn a_stall_is_told_once_though_both_ends_saw_it() {
    let found = findings(
        &nodes(),
        &ways(|way| match (way.from.0, way.to.0) {
            (3, 1) => way.failure = Some(WayFailure::Stalled { bytes: 32_768 }),
            (1, 3) => way.failure = Some(WayFailure::Broken { why: "it hung up".into() }),
            _ => {}
        }),
    );
    let found = only(&found);
    assert!(found.what.contains("32.8 kB do not get through"), "{}", found.what);
}

#[test]
fn small_receive_buffers_matter_at_fast_ports() {
    let mut nodes = nodes();
    nodes[2].facts.receive_buffer = Some(212_992);
    assert_eq!(findings(&nodes, &ways(|_| ())), []);
    let fast = findings(&nodes, &ways(|way| way.bits_per_second = Some(9_400_000_000)));
    let finding = only(&fast);
    assert!(
        finding.what.starts_with("worker 2 may receive into 213 kB at most"),
        "{}",
        finding.what
    );
    assert_eq!((finding.topic, finding.wrong), (Topic::Limits, false));
    assert_eq!(finding.fix, "as root: 'sysctl -w net.core.rmem_max=4194304'");
}
