//! What a simulation costs: VGG19 by parameter server on more and more nodes.
//!
//! Run: cargo run -p poseidon-sim --example scale -- 4 8
//!
//! The arguments are numbers of nodes; without any, 64 to 1,024. For figures that mean something add `--release`.

#[path = "../tests/support/mod.rs"]
mod support;

use poseidon_core::{Cluster, Servers};
use poseidon_sim::{Network, SchemeRule, Setup, simulate};
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut nodes: Vec<u16> = Vec::new();
    for arg in std::env::args().skip(1) {
        nodes.push(arg.parse()?);
    }
    if nodes.is_empty() {
        nodes = vec![64, 128, 256, 512, 1024];
    }
    let model = support::vgg19(1000);
    println!(
        "{:>6} {:>12} {:>9} {:>12} {:>9}",
        "nodes", "events", "seconds", "events/s", "speed-up"
    );
    for nodes in nodes {
        let cluster = Cluster::new(nodes, Servers::Colocated, 1)?;
        let times = support::times(&model, 32.0 / 35.5);
        let network = Network::ethernet(5e9);
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
