//! `cargo xtask bench racks`: exchanges between racks, and with a server of several interfaces.
//!
//! Nodes are network namespaces (`bench/vcluster.sh`). Each part compares ways to do the same
//! exchange. There is a job for each way. All jobs are on all nodes at the same time and take
//! turns: a round is a turn of each, and the one that begins changes with every round.
//!
//! * `tree`: nodes in racks with a slow link between them, with the racks named and without.
//! * `server`: a dedicated server with several interfaces, beside the same with one.
//! * `jobs`: jobs that take turns on one cluster.
//! * `rounds`: what their turns showed.
//! * `plan`: what `poseidon plan` says of the racks.

mod jobs;
mod plan;
mod rounds;
mod server;
mod tree;

use super::finding::{self, Finding};
use super::size::Size;
use super::{cluster, environment, record};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

/// What to measure.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Parts to run [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Nodes with a worker each; the racks share them equally
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=200))]
    nodes: u64,
    /// Part `racks`: number of racks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(2..))]
    racks: u64,
    /// Part `racks`: how many times more the ports of a rack carry than its link to the others
    #[arg(long, value_name = "X", value_delimiter = ',', default_value = "8,4,1")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    oversubscription: Vec<u64>,
    /// Part `racks`: which nodes are in which rack
    #[arg(long, value_enum, value_delimiter = ',', default_value = "runs,turns")]
    order: Vec<Order>,
    /// Part `box`: interfaces of the server, which is beside one of them
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..=40))]
    interfaces: u64,
    /// What a port carries each way, in Mbit/s: a node's, or that of an interface of the server
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    mbit: u64,
    /// What the queue of a port or a rack's link holds before packets are dropped, as tc writes it
    #[arg(long, default_value = "2mb")]
    queue: String,
    /// Sizes of the buffer (powers of 1024)
    #[arg(long, value_delimiter = ',', default_value = "10MB,100MB")]
    sizes: Vec<Size>,
    /// Rounds per case: a turn of each job; intervals of 95% take at least 6
    #[arg(long, visible_alias = "pairs", default_value_t = 6)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=500))]
    rounds: u64,
    /// Iterations of a turn, after one that is not counted [default: 0.4 s of the slowest job's, 20
    /// at most]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// A poseidon command to measure [default: built from this checkout]
    #[arg(long, value_name = "PATH")]
    poseidon: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-racks]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  Everything, recorded in bench/runs/DATE-racks; about 20 minutes:
    cargo xtask bench racks

  A look on a machine with two cores:
    cargo xtask bench racks --mbit 200 --sizes 10MB --rounds 2 --out target/look

  Where links between racks are not the limit:
    cargo xtask bench racks --only racks --order runs --oversubscription 1

  On a machine without cargo, from the repository's root:
    target/release/xtask bench racks --poseidon target/release/poseidon";

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Racks with a slow link between them, named and not named
    Racks,
    /// A dedicated server with several interfaces, beside one with one
    Box,
}

/// In which order nodes are in racks. Ranks are in the order of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Order {
    /// The first nodes in the first rack, and so on
    Runs,
    /// The first node in the first rack, the second in the second, and so on in turn
    Turns,
}

/// The file with a line for every turn, and its first line.
const RAW: &str = "raw.csv";
const RAW_HEADER: &str = "part,case,nodes,mbit,queue,bytes,round,turn,contender,iters,mean_s,\
    median_s,p10_s,p90_s,cpu_s_per_iter,lanes,most_link_bytes_per_iter,most_port_bytes_per_iter";

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    args.check()?;
    cluster::check()?;
    let poseidon = environment::poseidon_or_built(args.poseidon.as_deref())?;
    let folder = record::create("racks", args.out.as_deref(), false)?;
    record::write(&folder, "machine.txt", &record::machine(""))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    record::write(&folder, RAW, &format!("{RAW_HEADER}\n"))?;
    let bench = Bench { args, poseidon, folder };
    let here = format!("{}/", std::env::current_dir()?.display());
    let parts = Part::value_variants().iter().filter(|part| args.has(**part));
    let named = parts.map(|part| (part.name(), *part));
    let mut failures = 0;
    let title = "Racks, and a server of several interfaces";
    finding::measure(&bench.folder, title, named, &|text| text.replace(&here, ""), |part| {
        let Found { finding, failed } = match part {
            Part::Racks => tree::run(&bench)?,
            Part::Box => server::run(&bench)?,
        };
        failures += failed;
        Ok(finding)
    })?;
    match failures {
        0 => Ok(()),
        failures => bail!("{failures} cases failed"),
    }
}

/// Seconds that so many bytes of an exchange take on a link of `mbit` Mbit/s, with their headers.
fn seconds_on_link(bytes: f64, mbit: u64) -> f64 {
    bytes * cluster::HEADERS / (mbit as f64 * 1e6 / 8.0)
}

/// A run of the benchmark.
struct Bench<'a> {
    args: &'a Args,
    poseidon: String,
    folder: PathBuf,
}

/// What a part has found out, and in how many cases it failed.
struct Found {
    finding: Finding,
    failed: usize,
}

impl Args {
    fn check(&self) -> Result<()> {
        let (nodes, racks) = (self.nodes, self.racks);
        if self.has(Part::Racks) && (!nodes.is_multiple_of(racks) || nodes < 2 * racks) {
            bail!("{nodes} nodes: expected a multiple of {racks} racks, with 2 nodes each or more");
        }
        Ok(())
    }

    fn has(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

impl Bench<'_> {
    /// The words of a worker that is asked for one turn after the other.
    fn worker(&self) -> Vec<String> {
        let bytes: Vec<_> = self.args.sizes.iter().map(|size| size.0.to_string()).collect();
        let mut words = vec![self.poseidon.clone()];
        words.extend(["bench", "exchange", "--in-cluster", "--turns"].map(str::to_owned));
        words.extend(["--bytes".to_owned(), bytes.join(",")]);
        words
    }

    /// Adds lines to the record right away: an interrupted run keeps what it has measured.
    fn keep(&self, lines: &str) -> Result<()> {
        let path = self.folder.join(RAW);
        let mut file = OpenOptions::new().append(true).open(&path)?;
        file.write_all(lines.as_bytes()).with_context(|| format!("writing {}", path.display()))
    }
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Racks => "racks",
            Self::Box => "box",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    type Line = crate::bench::Line<Args>;

    pub(super) fn args(words: &[&str]) -> Args {
        Line::parse_from([&["racks"], words].concat()).args
    }

    #[test]
    fn flags_choose_a_part() {
        let all = args(&[]);
        assert!(all.has(Part::Racks) && all.has(Part::Box));
        assert_eq!((all.nodes, all.racks, all.interfaces, all.mbit), (8, 2, 4, 1000));
        assert_eq!((all.oversubscription, all.sizes.len()), (vec![8, 4, 1], 2));
        assert_eq!((all.order, all.rounds), (vec![Order::Runs, Order::Turns], 6));
        let some = args(&["--only", "box", "--sizes", "10MB"]);
        assert!(!some.has(Part::Racks) && some.has(Part::Box));
        assert_eq!(args(&["--pairs", "9"]).rounds, 9);
    }

    #[test]
    fn racks_have_equally_many_nodes_and_several() {
        assert!(args(&[]).check().is_ok());
        for nodes in ["7", "2"] {
            let error = args(&["--nodes", nodes]).check().unwrap_err().to_string();
            assert!(error.contains("expected a multiple of 2 racks"), "{error}");
            assert!(args(&["--nodes", nodes, "--only", "box"]).check().is_ok());
        }
    }

    #[test]
    fn one_start_has_all_sizes() {
        let args = args(&["--sizes", "1MB,10MB"]);
        let bench = Bench { args: &args, poseidon: "poseidon".into(), folder: PathBuf::new() };
        let words = "poseidon bench exchange --in-cluster --turns --bytes 1048576,10485760";
        assert_eq!(bench.worker().join(" "), words);
    }
}
