//! `cargo xtask bench links`: exchanges over rate-limited links, beside Gloo or another version.
//!
//! Every node is a network namespace whose port is limited both ways (`bench/vcluster.sh`). Both
//! contenders are on all nodes at the same time and take turns: a pair is a turn of each, and the one
//! that begins changes with every pair.
//!
//! * `grid`: the cases, and the rules by which some are left out.
//! * `summary`: what all cases show together.

pub(super) mod grid;
mod summary;

use super::cluster::{self, Cluster};
use super::size::Size;
use super::turns::{Ask, Contender, Load, Turn};
use super::{environment, record};
use anyhow::{Context, Result, bail};
use grid::{Case, Effort, Machine, Network, What};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use summary::{CSV_HEADER, Measured, Outcome, Pair, Peer, Summary};

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Numbers of nodes, each in a network namespace of its own
    #[arg(long, value_delimiter = ',', default_value = "8", value_parser = clap::value_parser!(u64).range(2..=250))]
    nodes: Vec<u64>,
    /// Rates of every node's port in Mbit/s, each way; 100000 is as good as no limit
    #[arg(long, value_delimiter = ',', default_value = "1000", value_parser = clap::value_parser!(u64).range(1..))]
    mbit: Vec<u64>,
    /// What the last node's port carries instead, in Mbit/s
    #[arg(long, value_name = "MBIT", value_parser = clap::value_parser!(u64).range(1..))]
    slow: Option<u64>,
    /// What the queue of a port holds, before packets are dropped
    #[arg(long, value_delimiter = ',', default_value = "2mb", value_parser = queue)]
    queues: Vec<Size>,
    /// Sizes of the buffer
    #[arg(long, value_delimiter = ',', default_value = "100MB")]
    sizes: Vec<Size>,
    /// What is exchanged; Gloo does an all_reduce of as many bytes in every case
    #[arg(long, value_enum, value_delimiter = ',', default_value = "push")]
    what: Vec<What>,
    /// Of factors: rows that each worker has, which is its batch
    #[arg(long, default_value_t = 32)]
    rows: u64,
    /// Busy threads per core, beside both contenders
    #[arg(long, value_delimiter = ',', default_value = "0")]
    busy: Vec<u64>,
    /// TCP's congestion control between nodes: all contenders', whatever they ask for themselves
    #[arg(long, default_value = "cubic")]
    congestion: String,
    /// Pairs of turns per case
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=500))]
    pairs: u64,
    /// Iterations of a turn, after one that is not counted [default: 0.4 s of them, 20 at most]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// Begin no case that would not be done after this many minutes, and say which
    #[arg(long)]
    minutes: Option<u64>,
    /// A poseidon command to measure [default: built from this checkout]
    #[arg(long)]
    poseidon: Option<String>,
    /// Another poseidon command, to measure beside it instead of Gloo: what a change costs or gains
    #[arg(long, value_name = "COMMAND")]
    beside: Option<String>,
    /// A Python that has torch, numpy and mpi4py [default: one set up in bench/.env]
    #[arg(long)]
    python: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-links]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A case takes longer than its bytes do: turns are begun, results checked, counters read.
const OVERHEAD: f64 = 2.0;

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    cluster::check()?;
    let poseidon = match &args.poseidon {
        Some(poseidon) => poseidon.clone(),
        None => {
            environment::build_poseidon()?;
            environment::poseidon().display().to_string()
        }
    };
    let python = match args.beside {
        // Nothing of Python's is needed.
        Some(_) => "python3".to_owned(),
        None => {
            let peers = [super::contender::Contender::Gloo];
            environment::prepare(&peers, args.python.as_deref())?.python
        }
    };
    let folder = record::create("links", args.out.as_deref(), false)?;
    record::write(&folder, "machine.txt", &record::machine(&python))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    let bench = Bench {
        args,
        poseidon,
        python,
        folder,
        effort: Effort { pairs: args.pairs as usize, iters: args.iters },
        deadline: args.minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes)),
    };
    let summary = bench.run(Machine::here()?)?;
    println!("\n{summary}\nrecorded in {}", bench.folder.display());
    match summary.failures() {
        0 => Ok(()),
        failures => bail!("{failures} cases failed"),
    }
}

/// A run of the benchmark.
struct Bench<'a> {
    args: &'a Args,
    poseidon: String,
    python: String,
    folder: PathBuf,
    effort: Effort,
    deadline: Option<Instant>,
}

/// The two contenders on one cluster. One that has failed is started again when it is needed.
struct Contenders<'a> {
    cluster: &'a Cluster,
    words: [Vec<String>; 2],
    running: [Option<Contender>; 2],
}

/// Their places in [`Contenders`].
const OURS: usize = 0;
const PEER: usize = 1;
/// Where another version meets: ours has the usual port.
const OTHER_PORT: &str = "MASTER_PORT=29700";
/// How either is told to exchange bf16.
const BF16: [&str; 2] = ["--encoding", "bf16"];

impl Bench<'_> {
    fn run(&self, machine: Machine) -> Result<Summary> {
        let mut summary =
            Summary::new(self.peer(), self.effort.pairs, &self.args.congestion, self.args.rows);
        for &nodes in &self.args.nodes {
            for &mbit in &self.args.mbit {
                let mut sizes = Vec::new();
                for &size in &self.args.sizes {
                    // The rules do not look at the queue.
                    let (slow, queue) = (self.args.slow, self.args.queues[0]);
                    let network = Network { nodes, mbit, slow, queue };
                    match network.left_out(size, machine, self.effort) {
                        None => sizes.push(size),
                        Some(why) => {
                            let words = format!("{nodes} nodes, {mbit} Mbit/s, {size}");
                            println!("left out: {words}, because {why}");
                            summary.left_out.push((words, why));
                        }
                    }
                }
                for &queue in &self.args.queues {
                    let network = Network { nodes, mbit, slow: self.args.slow, queue };
                    self.network(network, &sizes, machine, &mut summary)?;
                }
            }
        }
        self.write(&summary)?;
        Ok(summary)
    }

    /// All cases on one cluster.
    fn network(
        &self,
        network: Network,
        sizes: &[Size],
        machine: Machine,
        summary: &mut Summary,
    ) -> Result<()> {
        let cases = |what: What| {
            let case = move |busy, &size| Case { network, what, busy, size };
            let busy = self.args.busy.iter();
            busy.flat_map(move |&busy| sizes.iter().map(move |size| case(busy, size)))
        };
        if sizes.is_empty()
            || !sizes.iter().any(|size| self.fits(network.seconds(*size, self.effort)))
        {
            let all = self.args.what.iter().flat_map(|&what| cases(what));
            summary.not_reached.extend(all);
            return Ok(());
        }
        let Network { nodes, mbit, slow, queue } = network;
        let (queue, congestion) = (format!("{}b", queue.0), &self.args.congestion);
        let cluster = match slow {
            None => Cluster::with_queue(nodes, mbit, Some(congestion), Some(&queue)),
            Some(slow) => Cluster::with_slow(nodes, mbit, slow, congestion, &queue),
        }?;
        let mut contenders = Contenders {
            cluster: &cluster,
            words: [Vec::new(), Vec::new()],
            running: [None, None],
        };
        for &what in &self.args.what {
            contenders.running[OURS] = None;
            contenders.words[OURS] = self.ours(&self.poseidon, what, sizes);
            let peer = match &self.args.beside {
                None => self.gloo(what, sizes),
                Some(other) => {
                    let mut words = vec!["env".to_owned(), OTHER_PORT.to_owned()];
                    words.extend(self.ours(other, what, sizes));
                    words
                }
            };
            if contenders.words[PEER] != peer {
                contenders.running[PEER] = None;
                contenders.words[PEER] = peer;
            }
            for case in cases(what) {
                let why = || network.too_many_products(case.size, self.args.rows, machine);
                if let Some(why) = (what == What::Factors).then(why).flatten() {
                    println!("left out: {case}, because {why}");
                    summary.left_out.push((case.to_string(), why));
                    continue;
                }
                if !self.fits(OVERHEAD * network.seconds(case.size, self.effort)) {
                    println!("not reached: {case}");
                    summary.not_reached.push(case);
                    continue;
                }
                let outcome = self.case(&mut contenders, &case);
                if let Err(error) = &outcome {
                    println!("{case}: FAILED: {error:#}");
                }
                let outcome = outcome.map_err(|error| format!("{error:#}"));
                let measured = Measured { case, outcome };
                println!("{}", measured.line(self.peer()));
                summary.cases.push(measured);
                // An interrupted run keeps what it has measured.
                self.write(summary)?;
            }
        }
        Ok(())
    }

    /// All pairs of one case.
    fn case(&self, contenders: &mut Contenders<'_>, case: &Case) -> Result<Outcome> {
        let iters = case.network.iterations(case.size, self.effort);
        // Both are started before anything is measured, and before the load.
        contenders.start()?;
        let _load = Load::start(&self.poseidon, case.busy)?;
        let mut pairs = Vec::new();
        for number in 0..self.effort.pairs {
            let ours_first = number % 2 == 0;
            let order = if ours_first { [OURS, PEER] } else { [PEER, OURS] };
            let mut turns = [None, None];
            for who in order {
                turns[who] = Some(contenders.turn(who, case, iters)?);
            }
            let [Some(ours), Some(peer)] = turns else { bail!("a turn is missing") };
            pairs.push(Pair { ours_first, ours, peer });
        }
        Ok(Outcome { iters, pairs })
    }

    fn ours(&self, poseidon: &str, what: What, sizes: &[Size]) -> Vec<String> {
        let mut words = vec![poseidon.to_owned()];
        words.extend(["bench", "exchange", "--in-cluster", "--turns"].map(str::to_owned));
        words.extend(["--bytes".to_owned(), list(sizes)]);
        match what {
            What::Push => {}
            What::Bf16 => words.extend(BF16.map(str::to_owned)),
            What::Factors => {
                let rows = self.args.rows.to_string();
                words.extend(["--scheme", "sfb", "--rows", &rows].map(str::to_owned));
            }
            What::AllReduce => words.extend(["--collective", "all_reduce"].map(str::to_owned)),
        }
        words
    }

    fn peer(&self) -> Peer {
        if self.args.beside.is_some() { Peer::Other } else { Peer::Gloo }
    }

    fn gloo(&self, what: What, sizes: &[Size]) -> Vec<String> {
        let mut words = vec![self.python.clone()];
        words.extend(["bench/peers/gloo.py", "--in-cluster", "--turns"].map(str::to_owned));
        words.extend(["--bytes".to_owned(), list(sizes)]);
        words.extend(BF16.map(str::to_owned).into_iter().filter(|_| what == What::Bf16));
        words
    }

    fn fits(&self, seconds: f64) -> bool {
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        self.deadline.is_none_or(|deadline| end <= deadline)
    }

    fn write(&self, summary: &Summary) -> Result<()> {
        let rows: String =
            summary.cases.iter().map(|case| case.csv(self.peer(), &self.args.congestion)).collect();
        record::write(&self.folder, "raw.csv", &format!("{CSV_HEADER}\n{rows}"))?;
        record::write(&self.folder, "summary.md", &summary.to_string())
    }
}

impl Contenders<'_> {
    fn start(&mut self) -> Result<()> {
        for (running, words) in self.running.iter_mut().zip(&self.words) {
            if running.is_none() {
                let started = Contender::start(self.cluster.on_every_node().args(words));
                *running =
                    Some(started.with_context(|| format!("starting `{}`", words.join(" ")))?);
            }
        }
        Ok(())
    }

    fn turn(&mut self, who: usize, case: &Case, iters: u64) -> Result<Turn> {
        let contender = self.running[who].as_mut().context("it was not started")?;
        let (size, port_seconds) = (case.size, case.network.port_seconds(case.size));
        let turn = contender.turn(self.cluster, Ask { size, iters, port_seconds });
        if turn.is_err() {
            self.running[who] = None;
        }
        turn.with_context(|| ["poseidon", "its peer"][who])
    }
}

fn list(sizes: &[Size]) -> String {
    sizes.iter().map(|size| size.0.to_string()).collect::<Vec<_>>().join(",")
}

/// A size in letters of either case: tc writes `256kb`.
fn queue(text: &str) -> Result<Size, String> {
    text.to_uppercase().parse()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    type Line = crate::bench::Line<Args>;

    fn bench<'a>(args: &'a Args, deadline: Option<Instant>) -> Bench<'a> {
        let effort = Effort { pairs: args.pairs as usize, iters: args.iters };
        let (poseidon, python) = ("poseidon".to_owned(), "python".to_owned());
        Bench { args, poseidon, python, folder: PathBuf::new(), effort, deadline }
    }

    #[test]
    fn one_start_has_all_sizes() {
        let args = Line::parse_from(["links", "--sizes", "1MB,10MB", "--rows", "16"]).args;
        let bench = bench(&args, None);
        let ours = |what| bench.ours("poseidon", what, &args.sizes).join(" ");
        let common = "poseidon bench exchange --in-cluster --turns --bytes 1048576,10485760";
        assert_eq!(ours(What::Push), common);
        assert_eq!(ours(What::Factors), format!("{common} --scheme sfb --rows 16"));
        assert_eq!(ours(What::AllReduce), format!("{common} --collective all_reduce"));
        let gloo = "python bench/peers/gloo.py --in-cluster --turns --bytes 1048576,10485760";
        assert_eq!(bench.gloo(What::Push, &args.sizes).join(" "), gloo);
        assert_eq!(ours(What::Bf16), format!("{common} --encoding bf16"));
        assert_eq!(
            bench.gloo(What::Bf16, &args.sizes).join(" "),
            format!("{gloo} --encoding bf16")
        );
    }

    #[test]
    fn cases_that_the_time_does_not_allow_are_not_reached() {
        let line = ["links", "--sizes", "100MB", "--what", "push,all_reduce", "--busy", "0,1"];
        let args = Line::parse_from(line).args;
        let mut summary = Summary::new(Peer::Gloo, 10, "cubic", 32);
        let network = Network { nodes: 8, mbit: 1000, slow: None, queue: Size::mb(2) };
        // No cluster is made for nothing.
        let machine = Machine { cores: 2, memory: 16 << 30 };
        let bench = bench(&args, Some(Instant::now()));
        bench.network(network, &args.sizes, machine, &mut summary).unwrap();
        assert_eq!((summary.cases.len(), summary.not_reached.len()), (0, 4));
    }

    #[test]
    fn queues_are_written_as_tc_writes_them() {
        assert_eq!(queue("256kb"), Ok(Size::kb(256)));
        assert_eq!(queue("2MB"), Ok(Size::mb(2)));
        assert!(queue("2 parsecs").is_err());
    }
}
