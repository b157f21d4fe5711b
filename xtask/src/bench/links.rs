//! `cargo xtask bench links`: how much of a rate-limited link an exchange uses.
//!
//! Every node is a network namespace whose port is limited both ways (`bench/vcluster.sh`).

use super::cluster::{self, Cluster};
use super::measurement::{Measurement, median};
use super::size::Size;
use super::{environment, record};
use crate::command::output_within;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::Duration;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Nodes, each in a network namespace of its own
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=250))]
    nodes: u64,
    /// Rate of every node's port in Mbit/s, each way
    #[arg(long, default_value_t = 1000)]
    mbit: u64,
    /// Size of the buffer
    #[arg(long, default_value = "100MB")]
    bytes: Size,
    /// TCP's congestion control between nodes: all contenders', whatever they ask for themselves
    #[arg(long, default_value = "cubic")]
    congestion: String,
    /// Iterations per run
    #[arg(long, default_value_t = 5)]
    iters: u64,
    /// How many times everything is repeated
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Measure without Gloo beside it
    #[arg(long)]
    alone: bool,
    /// A Python that has torch, numpy and mpi4py [default: one set up in bench/.env]
    #[arg(long)]
    python: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-links]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Part of the link an exchange has to use.
const TARGET: f64 = 0.94;

const LIMIT: Duration = Duration::from_secs(300);
const CSV_HEADER: &str = "round,contender,nodes,bytes,iters,mbit,congestion,median_s,p10_s,p90_s,\
    cpu_s_per_iter,least_wire_bytes_per_iter";

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    cluster::check()?;
    environment::build_poseidon()?;
    let mut contenders = vec![("poseidon", poseidon_words())];
    let mut python = String::new();
    if !args.alone {
        let peers = [super::contender::Contender::Gloo];
        python = environment::prepare(&peers, args.python.as_deref())?.python;
        let gloo = [&python, "bench/peers/gloo.py", "--in-cluster"];
        contenders.push(("gloo", gloo.map(str::to_owned).to_vec()));
    }
    let folder = record::create("links", args.out.as_deref(), false)?;
    record::write(&folder, "machine.txt", &record::machine(&python))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;

    let cluster = Cluster::up(args.nodes, args.mbit, Some(&args.congestion))?;
    let mut results = Vec::new();
    let mut csv = format!("{CSV_HEADER}\n");
    for round in 1..=args.rounds {
        for (name, words) in &contenders {
            let result = measure(&cluster, words, args)
                .with_context(|| format!("round {round}, {name} on {} nodes", args.nodes))?;
            println!(
                "round {round}  {name:<9} {:.3} s  payload {:.1}%  wire {:.1}%",
                result.measurement.seconds.median,
                100.0 * args.payload_use(&result),
                100.0 * args.wire_use(&result)
            );
            csv += &result.csv(round, name, args);
            results.push((*name, result));
        }
        record::write(&folder, "raw.csv", &csv)?;
    }
    let text = args.summary(&results);
    record::write(&folder, "summary.md", &text)?;
    println!("\n{text}\nrecorded in {}", folder.display());
    Ok(())
}

/// One run: what rank 0 reported, and what the ports counted.
struct Linked {
    measurement: Measurement,
    /// Bytes per iteration, headers included, in the direction of the port that carried fewest.
    wire: f64,
}

impl Linked {
    fn csv(&self, round: usize, name: &str, args: &Args) -> String {
        let m = &self.measurement;
        format!(
            "{round},{name},{},{},{},{},{},{:.6},{:.6},{:.6},{:.6},{:.0}\n",
            args.nodes,
            m.bytes,
            m.iters,
            args.mbit,
            args.congestion,
            m.seconds.median,
            m.seconds.p10,
            m.seconds.p90,
            m.cpu_seconds_per_iter,
            self.wire
        )
    }
}

impl Args {
    /// Bytes a node has to send in any exact exchange that shares the work evenly: all but its own
    /// part of the gradients, and its own part of the sum to everyone else.
    fn payload(&self) -> f64 {
        2.0 * self.bytes.0 as f64 * (self.nodes - 1) as f64 / self.nodes as f64
    }

    fn bytes_per_second(&self) -> f64 {
        self.mbit as f64 * 1e6 / 8.0
    }

    fn payload_use(&self, result: &Linked) -> f64 {
        self.payload() / result.measurement.seconds.median / self.bytes_per_second()
    }

    fn wire_use(&self, result: &Linked) -> f64 {
        result.wire / result.measurement.seconds.median / self.bytes_per_second()
    }

    fn summary(&self, results: &[(&str, Linked)]) -> String {
        let mut names: Vec<_> = results.iter().map(|(name, _)| *name).collect();
        names.dedup();
        names.truncate(if self.alone { 1 } else { 2 });
        let of = |name: &str, value: &dyn Fn(&Linked) -> f64| {
            let runs = results.iter().filter(|(who, _)| *who == name);
            median(runs.map(|(_, result)| value(result)).collect()).unwrap_or(f64::NAN)
        };
        let mut text = format!(
            "# Links\n\n{} of gradients exchanged by {} nodes with ports of {} Mbit/s each way, TCP with {}; medians over {} \
             round(s). A node has to send {:.1} MB in each exchange, which takes {:.3} s on a link without headers.\n\n\
             | | seconds | payload / link | wire bytes / link | CPU seconds, all nodes |\n\
             | --- | ---: | ---: | ---: | ---: |\n",
            self.bytes,
            self.nodes,
            self.mbit,
            self.congestion,
            self.rounds,
            self.payload() / f64::from(1 << 20),
            self.payload() / self.bytes_per_second()
        );
        for name in &names {
            text += &format!(
                "| {name} | {:.3} | {:.1}% | {:.1}% | {:.3} |\n",
                of(name, &|result| result.measurement.seconds.median),
                100.0 * of(name, &|result| self.payload_use(result)),
                100.0 * of(name, &|result| self.wire_use(result)),
                of(name, &|result| result.measurement.cpu_seconds_per_iter)
            );
        }
        let reached = of("poseidon", &|result| self.wire_use(result));
        let verdict = if reached >= TARGET { "met" } else { "**missed**" };
        text += &format!(
            "\nWire bytes are counted by the ports, with Ethernet, IP and TCP headers (4.4% at 1500 bytes a packet) and \
             retransmissions; the direction of the port that carried fewest counts.\n\nTarget: at least {:.0}% of the link by wire bytes: {:.1}%, {verdict}.\n",
            100.0 * TARGET,
            100.0 * reached
        );
        text
    }
}

fn poseidon_words() -> Vec<String> {
    let poseidon = environment::poseidon().display().to_string();
    [&poseidon, "bench", "exchange", "--in-cluster", "--json"].map(str::to_owned).to_vec()
}

/// Runs a contender twice: the bytes of a run with one iteration are taken off, so that rendezvous,
/// warm-up and barriers do not count as use of the link.
fn measure(cluster: &Cluster, words: &[String], args: &Args) -> Result<Linked> {
    let (_, without) = exchange(cluster, words, args, 1)?;
    let (measurement, with) = exchange(cluster, words, args, 1 + args.iters)?;
    let least = grown(&without, &with).min().unwrap_or(0);
    Ok(Linked { measurement, wire: least as f64 / args.iters as f64 })
}

/// One run, and the bytes every port carried in it.
fn exchange(
    cluster: &Cluster,
    words: &[String],
    args: &Args,
    iters: u64,
) -> Result<(Measurement, Vec<u64>)> {
    let before = cluster.carried()?;
    let mut all = cluster.on_every_node();
    all.args(words).args(["--bytes", &args.bytes.0.to_string(), "--iters", &iters.to_string()]);
    let measurement = Measurement::find(&output_within(&mut all, LIMIT)?)?;
    Ok((measurement, grown(&before, &cluster.carried()?).collect()))
}

fn grown(before: &[u64], after: &[u64]) -> impl Iterator<Item = u64> {
    before.iter().zip(after).map(|(before, after)| after.saturating_sub(*before))
}

#[cfg(test)]
mod tests {
    use super::super::contender::{Case, Contender};
    use super::super::summary::tests::run;
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn linked(ms: f64, wire: f64) -> Linked {
        let case = Case { workers: 8, size: Size(1_000_000) };
        let run = run(1, Contender::PoseidonTcp, case, ms);
        Linked { measurement: run.result.unwrap(), wire }
    }

    fn args() -> Args {
        Line::parse_from(["links", "--bytes", "1000000", "--mbit", "8", "--nodes", "4", "--alone"])
            .args
    }

    #[test]
    fn use_of_the_link_in_payload_and_on_the_wire() {
        // 4 nodes, 1 MB: each sends 1.5 MB; at 1 MB/s that is 1.5 s.
        let result = linked(2000.0, 1.6e6);
        assert_eq!(args().payload_use(&result), 0.75);
        assert_eq!(args().wire_use(&result), 0.8);
    }

    #[test]
    fn the_verdict_follows_the_wire() {
        let text = args().summary(&[("poseidon", linked(2000.0, 1.88e6))]);
        assert!(text.contains("94.0%, met"), "{text}");
        let text = args().summary(&[("poseidon", linked(2000.0, 1.86e6))]);
        assert!(text.contains("93.0%, **missed**"), "{text}");
    }

    #[test]
    fn bytes_of_a_run_are_what_the_counts_grew_by() {
        assert_eq!(grown(&[10, 20, 5, 7], &[13, 22, 9, 8]).collect::<Vec<_>>(), [3, 2, 4, 1]);
    }
}
