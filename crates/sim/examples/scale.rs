//! What a simulation costs: VGG19 by parameter server on more and more nodes.
//!
//! Run: cargo run -p poseidon-sim --example scale -- 4 8
//!
//! The arguments are numbers of nodes; without any, 64 to 1,024. `1024:4:8` is 1,024 nodes, 4 on a
//! host, 8 hosts in a rack, whose links are oversubscribed four times. For figures that mean
//! something add `--release`.

#[path = "../tests/support/mod.rs"]
mod support;

use poseidon_core::{Cluster, Servers};
use poseidon_sim::{Network, Places, Racks, SchemeRule, Setup, simulate};
use std::time::Instant;

/// Nodes, ranks per host, hosts per rack.
type Case = (u16, u16, Option<u16>);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut cases: Vec<Case> = Vec::new();
    for arg in std::env::args().skip(1) {
        let numbers: Vec<u16> = arg.split(':').map(str::parse).collect::<Result<_, _>>()?;
        let ranks = numbers.get(1).copied().unwrap_or(1);
        cases.push((numbers[0], ranks, numbers.get(2).copied()));
    }
    if cases.is_empty() {
        cases = [64, 128, 256, 512, 1024].map(|nodes| (nodes, 1, None)).to_vec();
    }
    let model = support::vgg19(1000);
    println!(
        "{:>6} {:>12} {:>9} {:>12} {:>9}",
        "nodes", "events", "seconds", "events/s", "speed-up"
    );
    for (nodes, ranks_per_host, hosts_per_rack) in cases {
        let places = Places { ranks_per_host, hosts_per_rack };
        let cluster = places.place(Cluster::new(nodes, Servers::Colocated, 1)?);
        let times = support::times(&model, 32.0 / 35.5);
        let mut network = Network::ethernet(5e9);
        network.racks = hosts_per_rack
            .map(|hosts| Racks { hosts_per_rack: hosts.into(), oversubscription: 4.0 });
        let setup = Setup {
            scheme: SchemeRule::Ps,
            iterations: 3,
            ..Setup::new(&model, times, cluster, 32, network)
        };
        let start = Instant::now();
        let outcome = simulate(&setup)?;
        let seconds = start.elapsed().as_secs_f64();
        let rate = outcome.events as f64 / seconds;
        println!(
            "{nodes:>6} {:>12} {seconds:>9.2} {rate:>12.0} {:>9.1}",
            outcome.events, outcome.speedup
        );
    }
    Ok(())
}
