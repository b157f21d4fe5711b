//! `cargo xtask bench hosts`: exchanges of several ranks per host, beside Gloo and Open MPI.
//!
//! Every host is a network namespace whose port is limited both ways (`bench/vcluster.sh`). The
//! ranks of a host share its port. All contenders are on all hosts at the same time and take turns:
//! a round is a turn of each, and the one that begins changes with every round.
//!
//! * `layout`: the cases, and the rules by which some are left out.
//! * `who`: the contenders, and how they are started.
//! * `summary`: what all cases show together.

mod layout;
mod summary;
mod who;

use super::cluster::{self, Cluster};
use super::links::grid::{Effort, Machine};
use super::size::Size;
use super::turns::{Ask, Contender, Turn};
use super::{contender, environment, record};
use anyhow::{Context, Result, bail};
use layout::{Case, Layout, Mbit};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use summary::{Measured, Summary};
use who::{Programs, Who};

/// What to measure.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Hosts and ranks: 4x4 is 4 hosts with 4 ranks each, 3+1+4 is 3 hosts with 3, 1 and 4 ranks
    #[arg(long, value_delimiter = ',', default_value = "1x16,4x1,4x4,2x8,3+1+4")]
    hosts: Vec<Layout>,
    /// What a host's port carries each way; a single host is measured once, because it has no use
    /// for its port
    #[arg(long, value_delimiter = ',', default_value = "1gbit,10gbit")]
    rate: Vec<Mbit>,
    /// Sizes of the buffer (powers of 1024)
    #[arg(long, value_delimiter = ',', default_value = "64KB,1MB,10MB,100MB")]
    bytes: Vec<Size>,
    /// Who takes part
    #[arg(long, value_enum, value_delimiter = ',', default_value = "push,all_reduce,gloo,openmpi")]
    contenders: Vec<Who>,
    /// What the queue of a port holds before packets are dropped, as tc writes it
    #[arg(long, default_value = "2mb")]
    queue: String,
    /// Rounds per case: a turn of each contender; intervals of 95% take at least 6
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=500))]
    rounds: u64,
    /// Iterations of a turn, after one that is not counted [default: 0.4 s of the slowest
    /// contender's, 20 at most]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    iters: Option<u64>,
    /// Begin no case after this many minutes, and say which were not reached
    #[arg(long)]
    minutes: Option<u64>,
    /// A poseidon command to measure [default: built from this checkout]
    #[arg(long, value_name = "PATH")]
    poseidon: Option<String>,
    /// A Python that has torch and numpy, and mpi4py for Open MPI [default: one set up in
    /// bench/.env]
    #[arg(long, value_name = "PATH")]
    python: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-hosts]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  Everything, recorded in bench/runs/DATE-hosts:
    cargo xtask bench hosts

  One size on two layouts, for a look:
    cargo xtask bench hosts --hosts 4x4,2x8 --rate 1gbit --bytes 10MB --rounds 6 --out target/look

  Poseidon beside Gloo alone:
    cargo xtask bench hosts --contenders push,gloo

  On a machine without cargo, from the repository's root:
    target/debug/xtask bench hosts --poseidon target/release/poseidon --python env/bin/python";

/// Seconds of iterations in a turn: as short as tells one exchange from the next.
const TURN: f64 = 0.4;
const MOST_ITERATIONS: u64 = 20;

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    cluster::check()?;
    let poseidon = environment::poseidon_or_built(args.poseidon.as_deref())?;
    let peers = [contender::Contender::Gloo];
    let needed = if args.contenders.iter().all(|who| who.is_ours()) { &[][..] } else { &peers };
    let python = environment::prepare(needed, args.python.as_deref())?.python;
    let folder = record::create("hosts", args.out.as_deref(), false)?;
    record::write(&folder, "machine.txt", &record::machine(&python))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    record::write(&folder, RAW, "")?;
    let mut summary = Summary::new(args.rounds as usize, &args.queue);
    let mut contenders = args.contenders.clone();
    contenders.sort_unstable();
    contenders.dedup();
    contenders.retain(|who| match who.missing(&python) {
        None => true,
        Some(why) => {
            println!("{} takes no part: {why}", who.name());
            summary.absent.push((*who, why));
            false
        }
    });
    let mut bench = Bench {
        args,
        contenders,
        programs: Programs { poseidon, python },
        folder,
        deadline: args.minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes)),
    };
    bench.run(Machine::here()?, &mut summary)?;
    println!("\n{summary}\nrecorded in {}", bench.folder.display());
    match summary.failures() {
        0 => Ok(()),
        failures => bail!("{failures} contenders failed in a case"),
    }
}

/// The file with a line of JSON for every turn.
const RAW: &str = "raw.jsonl";

/// A run of the benchmark.
struct Bench<'a> {
    args: &'a Args,
    contenders: Vec<Who>,
    programs: Programs,
    folder: PathBuf,
    deadline: Option<Instant>,
}

/// A contender of one cluster. One that fails in a turn is started again when it is needed.
struct Player {
    who: Who,
    running: Option<Contender>,
    /// Why it cannot be started. Starting it again would take as long and fail again.
    out: Option<String>,
}

/// All that a contender needs to be started on a cluster.
struct Stage<'a> {
    cluster: Cluster,
    layout: &'a Layout,
    sizes: Vec<Size>,
}

impl Bench<'_> {
    fn run(&mut self, machine: Machine, summary: &mut Summary) -> Result<()> {
        for layout in &self.args.hosts {
            let rates = if layout.hosts() == 1 { &self.args.rate[..1] } else { &self.args.rate };
            for &port in rates {
                self.stage(layout, port, machine, summary)?;
            }
        }
        record::write(&self.folder, "summary.md", &summary.to_string())
    }

    /// All sizes on one cluster.
    fn stage(
        &mut self,
        layout: &Layout,
        port: Mbit,
        machine: Machine,
        summary: &mut Summary,
    ) -> Result<()> {
        let mut sizes = Vec::new();
        for case in self.cases(layout, port) {
            sizes.push(case.size);
            let left_out = layout.left_out(port, case.size, &sizes, machine, self.effort());
            if let Some(why) = left_out {
                sizes.pop();
                println!("left out: {case}, because {why}");
                summary.left_out.push((case, why));
            } else if self.is_late() {
                sizes.pop();
                summary.not_reached.push(case);
            }
        }
        if sizes.is_empty() {
            return Ok(());
        }
        let cluster = Cluster::with_queue(layout.hosts(), port.0, None, Some(&self.args.queue))?;
        let stage = Stage { cluster, layout, sizes };
        let player = |who: &Who| Player { who: *who, running: None, out: None };
        let mut players: Vec<_> = self.contenders.iter().map(player).collect();
        for player in &mut players {
            self.start(&stage, player);
        }
        // A peer that does not start is no failure of ours, and keeps nobody from measuring.
        players.retain(|player| match &player.out {
            Some(why) if player.who == Who::Openmpi => {
                println!("openmpi takes no part: {why}");
                let why = why.lines().last().unwrap_or_default();
                summary.absent.push((player.who, format!("it does not start: {why}")));
                self.contenders.retain(|who| *who != Who::Openmpi);
                false
            }
            _ => true,
        });
        for &size in &stage.sizes {
            let case = Case { layout: layout.clone(), port, size };
            if self.is_late() {
                println!("not reached: {case}");
                summary.not_reached.push(case);
                continue;
            }
            let measured = self.case(&stage, &mut players, case)?;
            println!("{}", measured.lines());
            summary.cases.push(measured);
            // An interrupted run keeps what it has measured.
            record::write(&self.folder, "summary.md", &summary.to_string())?;
        }
        Ok(())
    }

    /// All rounds of one case. Who fails is out of it, and the others go on.
    fn case(&self, stage: &Stage<'_>, players: &mut [Player], case: Case) -> Result<Measured> {
        let port_seconds = case.port_seconds();
        let ask = |iters| Ask { size: case.size, iters, port_seconds };
        let mut results: Vec<Result<Vec<Turn>, String>> = Vec::new();
        let mut slowest: f64 = 0.0;
        // A rehearsal says how long an exchange takes.
        for player in players.iter_mut() {
            let seen = self.turn(stage, player, ask(1));
            slowest = slowest.max(seen.as_ref().map_or(0.0, Turn::seconds));
            results.push(seen.map(|_| Vec::new()).map_err(|error| format!("{error:#}")));
        }
        let enough = (TURN / slowest).ceil() as u64;
        let iters = self.args.iters.unwrap_or(enough.clamp(1, MOST_ITERATIONS));
        for round in 0..self.args.rounds as usize {
            let count = players.len();
            let order = (0..count).map(|place| (round + place) % count);
            for (place, number) in order.enumerate() {
                let (player, result) = (&mut players[number], &mut results[number]);
                let Ok(turns) = result else { continue };
                match self.turn(stage, player, ask(iters)) {
                    Ok(turn) => {
                        let line = summary::line(&case, player.who, [round, place], iters, &turn);
                        self.keep(&line.to_string())?;
                        turns.push(turn);
                    }
                    Err(error) => *result = Err(format!("{error:#}")),
                }
            }
        }
        let results = players.iter().map(|player| player.who).zip(results).collect();
        Ok(Measured { case, iters, results })
    }

    fn start(&self, stage: &Stage<'_>, player: &mut Player) {
        let Stage { cluster, layout, sizes } = stage;
        if player.running.is_some() || player.out.is_some() {
            return;
        }
        let mut command = player.who.command(cluster, layout, sizes, &self.programs);
        match Contender::start(&mut command) {
            Ok(contender) => player.running = Some(contender),
            Err(error) => player.out = Some(format!("starting it: {error:#}")),
        }
    }

    fn turn(&self, stage: &Stage<'_>, player: &mut Player, ask: Ask) -> Result<Turn> {
        self.start(stage, player);
        let Some(contender) = &mut player.running else {
            bail!("{}", player.out.as_deref().unwrap_or_default())
        };
        let turn = contender.turn(&stage.cluster, ask);
        if turn.is_err() {
            player.running = None;
        }
        turn
    }

    fn cases<'c>(&'c self, layout: &'c Layout, port: Mbit) -> impl Iterator<Item = Case> + 'c {
        self.args.bytes.iter().map(move |&size| Case { layout: layout.clone(), port, size })
    }

    /// As the links benchmark counts it: in pairs of turns.
    fn effort(&self) -> Effort {
        let turns = self.args.rounds as usize * self.contenders.len();
        Effort { pairs: turns.div_ceil(2), iters: self.args.iters }
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Adds a line to the record right away.
    fn keep(&self, line: &str) -> Result<()> {
        let path = self.folder.join(RAW);
        let mut file = OpenOptions::new().append(true).open(&path)?;
        writeln!(file, "{line}").with_context(|| format!("writing {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    type Line = crate::bench::Line<Args>;

    #[test]
    fn flags_choose_a_part_of_the_grid() {
        let all = Line::parse_from(["hosts"]).args;
        assert_eq!((all.hosts.len(), all.rate.len(), all.bytes.len()), (5, 2, 4));
        assert_eq!(all.contenders, [Who::Push, Who::AllReduce, Who::Gloo, Who::Openmpi]);
        let words = ["hosts", "--hosts", "4x4,3+1+4", "--rate", "1gbit", "--bytes", "10MB"];
        let some = Line::parse_from(words).args;
        let hosts: Vec<_> = some.hosts.iter().map(Layout::to_string).collect();
        assert_eq!(hosts, ["4x4", "3+1+4"]);
        assert_eq!((&some.rate[..], &some.bytes[..]), (&[Mbit(1000)][..], &[Size::mb(10)][..]));
    }

    #[test]
    fn cases_that_the_time_does_not_allow_are_not_reached() {
        let args = Line::parse_from(["hosts", "--bytes", "64KB,10MB", "--rounds", "2"]).args;
        let mut bench = Bench {
            args: &args,
            contenders: vec![Who::Push, Who::Gloo],
            programs: Programs { poseidon: String::new(), python: String::new() },
            folder: PathBuf::new(),
            deadline: Some(Instant::now()),
        };
        let mut summary = Summary::new(2, "2mb");
        let machine = Machine { cores: 2, memory: 16 << 30 };
        // No cluster is made for nothing. What the machine cannot carry is left out all the same.
        let (layout, port) = ("4x4".parse().unwrap(), Mbit(10_000));
        bench.stage(&layout, port, machine, &mut summary).unwrap();
        assert_eq!((summary.left_out.len(), summary.not_reached.len()), (1, 1));
    }
}
