//! Part `box`: a dedicated server with several interfaces, which PHub calls a PBox, beside one that
//! uses one of them.

use super::jobs::{Stage, Way};
use super::rounds::{self, Rounds};
use super::{Bench, Found, seconds_on_link};
use crate::bench::cluster::Beside;
use crate::bench::finding::Finding;
use crate::bench::size::Size;
use crate::bench::targets::Verdict;
use anyhow::Result;

/// The places of the ways.
const ALL: usize = 0;
const ONE: usize = 1;

/// The part of "as many times as fast as there are interfaces" that is aimed at: 3.5 with 4.
const AIM: f64 = 3.5 / 4.0;
/// The part of "as many times fewer bytes on an interface" that is enough.
const EVEN: f64 = 0.9;

/// Measures all sizes.
pub(super) fn run(bench: &Bench<'_>) -> Result<Found> {
    let args = bench.args;
    let interfaces = args.interfaces;
    let beside = Beside::Box { interfaces };
    let mut stage = Stage::up(bench, beside, ways(bench))?;
    let (mut all, mut failed) = (Vec::new(), Vec::new());
    for &size in &args.sizes {
        match stage.measure(bench, size, bounds(bench, size)[ONE]) {
            Ok(rounds) => {
                println!("{size}{}", rounds.lines(ONE));
                let case = format!("{interfaces} interfaces");
                bench.keep(&rounds.csv(bench, "box", &case, size))?;
                all.push((size, rounds));
            }
            Err(error) => {
                println!("{size}: FAILED: {error:#}");
                failed.push(size);
            }
        }
    }
    let link = "an interface";
    let mut text = format!(
        "{} workers and one dedicated server, whose machine has {interfaces} interfaces. Each of \
         them has a port of {} Mbit/s each way, as every worker has. Queues hold {}. The server \
         uses all interfaces or one (POSEIDON_ADDRESS).\n\n{}\n",
        args.nodes,
        args.mbit,
        args.queue,
        rounds::legend(bench, "one interface", link)
    );
    text += &rounds::heading(&["size"], "one interface", link);
    for (size, rounds) in &all {
        text += &rounds.rows(&size.to_string(), &bounds(bench, *size), ONE);
    }
    for size in &failed {
        text += &format!("\nFailed: {size}\n");
    }
    let verdicts = all.iter().flat_map(|(size, rounds)| judge(interfaces, *size, rounds));
    let finding = Finding { text, verdicts: verdicts.collect() };
    Ok(Found { finding, failed: failed.len() })
}

fn ways(bench: &Bench<'_>) -> Vec<Way> {
    let way = |name, count| {
        let names: Vec<_> = (0..count).map(|number| format!("eth{number}")).collect();
        Way { name, words: bench.worker(), interfaces: Some(names.join(",")) }
    };
    vec![way("all interfaces", bench.args.interfaces), way("one interface", 1)]
}

/// By way: seconds that no exchange is shorter than. The server's interfaces carry everybody's
/// buffer each way, and a worker's port carries its own.
fn bounds(bench: &Bench<'_>, size: Size) -> [f64; 2] {
    let (bytes, workers) = (size.0 as f64, bench.args.nodes as f64);
    let own = seconds_on_link(bytes, bench.args.mbit);
    [bench.args.interfaces, 1]
        .map(|count| own.max(seconds_on_link(workers * bytes / count as f64, bench.args.mbit)))
}

fn judge(interfaces: u64, size: Size, rounds: &Rounds) -> [Verdict; 2] {
    let count = interfaces as f64;
    let ratio = rounds.ratio(ONE, ALL);
    let aim = AIM * count;
    let fewer = rounds.fewer_bytes(ONE, ALL);
    [
        Verdict {
            target: format!(
                "{size}, aim: {interfaces} interfaces are {aim:.1} times as fast as one"
            ),
            measured: ratio.map_or("-".into(), |ratio| ratio.to_string()),
            met: ratio.map(|ratio| ratio.median >= aim),
        },
        Verdict {
            target: format!(
                "{size}: the busiest interface carries {interfaces} times fewer bytes, {:.0}% of \
                 that at least",
                100.0 * EVEN
            ),
            measured: fewer.map_or("-".into(), |fewer| format!("{fewer:.2} times fewer")),
            met: fewer.map(|fewer| fewer >= EVEN * count),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::rounds::tests::rounds;
    use super::super::tests::args;
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn a_server_uses_all_interfaces_or_the_first() {
        let args = args(&["--interfaces", "3"]);
        let bench = Bench { args: &args, poseidon: "poseidon".into(), folder: PathBuf::new() };
        let ways = ways(&bench);
        assert_eq!(ways[ALL].interfaces.as_deref(), Some("eth0,eth1,eth2"));
        assert_eq!(ways[ONE].interfaces.as_deref(), Some("eth0"));
        let [all, one] = bounds(&bench, Size::mb(10));
        assert!((one / all - 3.0).abs() < 1e-9);
    }

    #[test]
    fn workers_ports_are_a_bound_too() {
        let args = args(&["--nodes", "2"]);
        let bench = Bench { args: &args, poseidon: "poseidon".into(), folder: PathBuf::new() };
        let [all, one] = bounds(&bench, Size::mb(10));
        assert!((one / all - 2.0).abs() < 1e-9, "four interfaces for two workers");
    }

    #[test]
    fn speed_and_evenness_are_judged() {
        let met = |all_ms, busiest| {
            let ways = [("all interfaces", all_ms, busiest), ("one interface", 720.0, 8.8e7)];
            judge(4, Size::mb(10), &rounds(&ways)).map(|verdict| verdict.met)
        };
        assert_eq!(met(200.0, 2.2e7), [Some(true), Some(true)]);
        assert_eq!(met(240.0, 4.4e7), [Some(false), Some(false)]);
    }
}
