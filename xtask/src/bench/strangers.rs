//! `cargo xtask bench strangers`: what strangers at the doors of a job cost it.
//!
//! Two or more workers of this machine exchange a buffer over TCP. Turns without strangers, with many
//! silent connections, and with a flood of malformed handshakes alternate within the same processes.
//! The strangers are threads of this process. They take CPU time that a stranger elsewhere would not
//! take, so the table also has the CPU time of the workers alone.

use super::measurement::{Measurement, median};
use super::ratio::{Ratio, WANTED};
use super::size::Size;
use super::turns::Contender;
use super::{environment, record};
use crate::command::{command, end, output_within};
use anyhow::{Context, Result, ensure};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Workers
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Size of the buffer
    #[arg(long, default_value = "16MB")]
    size: Size,
    /// Turns of each kind
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(6..))]
    rounds: u64,
    /// Seconds of a turn, about
    #[arg(long, default_value_t = 2.0)]
    turn_seconds: f64,
    /// Silent connections, shared by the doors of the workers and of the coordinator
    #[arg(long, default_value_t = 2000)]
    silent: usize,
    /// Mbit/s of malformed handshakes, all doors together
    #[arg(long, default_value_t = 100)]
    mbit: u64,
    /// A poseidon command that is used as it is, for machines that cannot build it
    #[arg(long)]
    poseidon: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-strangers]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Who is at the doors during a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Visit {
    Nobody,
    Silent,
    Flood,
}

/// What a turn showed.
struct Row {
    round: u64,
    visit: Visit,
    measurement: Measurement,
    /// Connections that strangers made, and bytes that they sent, in a second of the turn.
    connections: f64,
    bytes: f64,
}

const CSV_HEADER: &str = "round,strangers,workers,bytes,iters,mean_s,median_s,p10_s,p90_s,cpu_s_per_iter,\
    connections_per_s,mbit_per_s";
/// What strangers may cost: a tenth.
const ALLOWED: f64 = 1.1;
/// A turn that takes this long hangs.
const LIMIT: Duration = Duration::from_secs(120);
/// Files that this process opens besides those of silent strangers.
const SPARE_FILES: usize = 100;
/// How long strangers have to be at the doors before a turn counts.
const ARRIVAL: Duration = Duration::from_millis(300);

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    let poseidon = match &args.poseidon {
        Some(poseidon) => poseidon.clone(),
        None => {
            environment::build_poseidon()?;
            environment::poseidon().display().to_string()
        }
    };
    let files = open_files(&std::fs::read_to_string("/proc/self/limits")?);
    let need = args.silent + SPARE_FILES;
    ensure!(
        files.is_none_or(|files| files >= need),
        "strangers need {need} files: ulimit -n {need}"
    );
    let folder = record::create("strangers", args.out.as_deref(), false)?;
    record::write(&folder, "machine.txt", &record::machine(""))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;

    let mut job = Job::start(&poseidon, args.workers, args.size)?;
    let doors = job.doors(&poseidon)?;
    let first = job.first.ask(args.size.0, 5, LIMIT)?;
    let iters = (args.turn_seconds / first.seconds.mean).ceil().max(3.0) as u64;

    let mut rows = Vec::new();
    let mut csv = format!("{CSV_HEADER}\n");
    for round in 1..=args.rounds {
        let mut order = [Visit::Nobody, Visit::Silent, Visit::Flood];
        // Whoever is first gets the machine as the turn before has left it.
        order.rotate_left((round % 3) as usize);
        for visit in order {
            let strangers = Strangers::arrive(visit, args, &doors);
            thread::sleep(ARRIVAL);
            let (before, began) = (strangers.counts(), Instant::now());
            let measurement = job.first.ask(args.size.0, iters, LIMIT);
            let measurement = measurement.with_context(|| format!("round {round}, {visit:?}"))?;
            let (after, seconds) = (strangers.counts(), began.elapsed().as_secs_f64());
            let [connections, bytes] =
                [0, 1].map(|i| after[i].saturating_sub(before[i]) as f64 / seconds);
            let row = Row { round, visit, measurement, connections, bytes };
            println!(
                "round {round:>2}  {:<8} {:>9.3} ms, CPU {:>9.3} ms; {connections:.0} connections/s, {:.1} Mbit/s",
                visit.name(),
                row.measurement.seconds.mean * 1e3,
                row.measurement.cpu_seconds_per_iter * 1e3,
                bytes * 8e-6
            );
            csv += &row.csv();
            rows.push(row);
        }
        record::write(&folder, "raw.csv", &csv)?;
        record::write(&folder, "summary.md", &args.summary(&rows, iters))?;
    }
    println!("\n{}\nrecorded in {}", args.summary(&rows, iters), folder.display());
    Ok(())
}

impl Visit {
    fn name(self) -> &'static str {
        match self {
            Self::Nobody => "nobody",
            Self::Silent => "silent",
            Self::Flood => "flood",
        }
    }
}

impl Row {
    fn csv(&self) -> String {
        let (Self { round, visit, connections, .. }, m) = (self, &self.measurement);
        let q = m.seconds;
        format!(
            "{round},{},{},{},{},{:.6},{:.6},{:.6},{:.6},{:.6},{connections:.1},{:.3}\n",
            visit.name(),
            m.workers,
            m.bytes,
            m.iters,
            q.mean,
            q.median,
            q.p10,
            q.p90,
            m.cpu_seconds_per_iter,
            self.bytes * 8e-6
        )
    }
}

impl Args {
    fn summary(&self, rows: &[Row], iters: u64) -> String {
        let cores = thread::available_parallelism().map_or(0, |cores| cores.get());
        let mut text = format!(
            "# Strangers\n\n{} workers of one machine with {cores} cores exchange {} over TCP, {iters} iterations a \
             turn, while strangers without the secret are at the doors of the workers and of the coordinator: {} \
             silent connections, or malformed handshakes of up to {} Mbit/s. Turns alternate. A ratio is a turn's \
             mean time by that of the turn without strangers in the same round: the median, and in brackets the \
             interval that has it with 95% confidence. At most {ALLOWED} is wanted. The strangers run on the same \
             machine, and the time they take from the workers is in the seconds. The CPU time is of the workers \
             alone.\n\n\
             | strangers | seconds | CPU seconds | time, by nobody's | CPU, by nobody's | connections/s | Mbit/s | \
             at most a tenth |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n",
            self.workers, self.size, self.silent, self.mbit
        );
        for visit in [Visit::Nobody, Visit::Silent, Visit::Flood] {
            let of = |visit: Visit, value: &dyn Fn(&Row) -> f64| -> Vec<f64> {
                rows.iter().filter(|row| row.visit == visit).map(value).collect()
            };
            let middle = |value: &dyn Fn(&Row) -> f64| median(of(visit, value)).unwrap_or(f64::NAN);
            let ratio = |value: &dyn Fn(&Row) -> f64| {
                let pairs = of(visit, value).into_iter().zip(of(Visit::Nobody, value));
                Ratio::of(pairs.map(|(with, without)| with / without).collect())
            };
            let seconds = |row: &Row| row.measurement.seconds.mean;
            let cpu = |row: &Row| row.measurement.cpu_seconds_per_iter;
            let shown = |ratio: Option<Ratio>| match ratio {
                Some(ratio) if visit != Visit::Nobody => format!("{ratio:.3}"),
                _ => "-".to_owned(),
            };
            // Neither if the whole interval is on neither side.
            let met = ratio(&seconds)
                .filter(|ratio| visit != Visit::Nobody && ratio.confidence >= WANTED)
                .filter(|ratio| ratio.high <= ALLOWED || ratio.low > ALLOWED)
                .map(|ratio| ratio.high <= ALLOWED);
            let word = match met {
                Some(true) => "met",
                Some(false) => "**missed**",
                None if visit == Visit::Nobody => "",
                None => "unclear",
            };
            text += &format!(
                "| {} | {:.4} | {:.4} | {} | {} | {:.0} | {:.1} | {} |\n",
                visit.name(),
                middle(&seconds),
                middle(&cpu),
                shown(ratio(&seconds)),
                shown(ratio(&cpu)),
                middle(&|row| row.connections),
                middle(&|row| row.bytes * 8e-6),
                word
            );
        }
        text
    }
}

/// How many files this process may open, by the kernel's table of limits.
fn open_files(limits: &str) -> Option<usize> {
    let line = limits.lines().find(|line| line.starts_with("Max open files"))?;
    line.split_whitespace().nth(3)?.parse().ok()
}

/// A job of workers that wait for turns.
struct Job {
    /// Rank 0, which is asked.
    first: Contender,
    /// Declared after `first`, so that they end when that has said goodbye.
    others: Vec<Child>,
    coordinator: SocketAddr,
}

/// What every process of the job has in its environment. The secret protects nothing here, but the
/// strangers do not know it.
fn member(poseidon: &str, coordinator: SocketAddr, workers: usize) -> Command {
    let mut command = command(&[poseidon]);
    command.env("POSEIDON_SECRET", "the strangers do not know this");
    command.env("POSEIDON_COORDINATOR", coordinator.to_string());
    command.env("POSEIDON_CLUSTER", "strangers");
    command.env("WORLD_SIZE", workers.to_string());
    command.env("RANK", "0");
    command
}

impl Job {
    fn start(poseidon: &str, workers: usize, size: Size) -> Result<Self> {
        let coordinator = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let rank = |rank: usize| {
            let mut command = member(poseidon, coordinator, workers);
            command.args([
                "bench",
                "exchange",
                "--in-cluster",
                "--turns",
                "--json",
                "--link",
                "tcp",
            ]);
            command.args(["--bytes", &size.0.to_string()]);
            command.env("RANK", rank.to_string());
            command
        };
        let mut others = Vec::new();
        for number in 1..workers {
            let mut command = rank(number);
            others.push(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?);
        }
        let first = Contender::start(&mut rank(0));
        if first.is_err() {
            others.iter_mut().for_each(|child| drop(end(child)));
        }
        Ok(Self { first: first?, others, coordinator })
    }

    /// Where strangers can knock.
    fn doors(&self, poseidon: &str) -> Result<Vec<SocketAddr>> {
        let mut query = member(poseidon, self.coordinator, 1 + self.others.len());
        let nodes: serde_json::Value =
            serde_json::from_str(&output_within(query.args(["query", "nodes"]), LIMIT)?)?;
        let nodes = nodes.as_array().context("the book has no nodes")?;
        let mut doors = vec![self.coordinator];
        for node in nodes {
            doors.push(node["tcp"].as_str().context("a node without an address")?.parse()?);
        }
        ensure!(doors.len() == self.others.len() + 2, "{} doors", doors.len());
        Ok(doors)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // What has failed before this has been told.
        self.others.iter_mut().for_each(|child| drop(end(child)));
    }
}

/// Those at the doors, until this is dropped.
struct Strangers {
    is_over: Arc<AtomicBool>,
    /// Connections made, and bytes sent. Written by the threads.
    counts: Arc<[AtomicU64; 2]>,
    threads: Vec<JoinHandle<()>>,
}

impl Strangers {
    fn arrive(visit: Visit, args: &Args, doors: &[SocketAddr]) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let counts = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let per_door = args.silent / doors.len();
        let rate = (args.mbit * 125_000) as f64 / doors.len() as f64;
        let threads = doors.iter().filter(|_| visit != Visit::Nobody).map(|&door| {
            let stranger = Stranger { door, is_over: is_over.clone(), counts: counts.clone() };
            thread::spawn(move || match visit {
                Visit::Flood => stranger.flood(rate),
                _ => stranger.stay(per_door),
            })
        });
        let threads = threads.collect();
        Self { is_over, counts, threads }
    }

    fn counts(&self) -> [u64; 2] {
        [0, 1].map(|i: usize| self.counts[i].load(Ordering::Relaxed))
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic has been told on standard error.
            let _ = thread.join();
        }
    }
}

/// One thread at one door.
struct Stranger {
    door: SocketAddr,
    is_over: Arc<AtomicBool>,
    counts: Arc<[AtomicU64; 2]>,
}

/// How long a stranger waits for a door that does not open.
const KNOCKING: Duration = Duration::from_millis(200);
/// How often silent strangers look which of them were put out.
const GLANCE: Duration = Duration::from_millis(20);
/// What a connection of the flood sends, in turn: less than a handshake, and as much as fits.
const FLOODS: [usize; 4] = [16, 64, 4096, 65536];

impl Stranger {
    fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    fn knock(&self) -> Option<TcpStream> {
        let stream = TcpStream::connect_timeout(&self.door, KNOCKING).ok()?;
        stream.set_nonblocking(true).ok()?;
        self.counts[0].fetch_add(1, Ordering::Relaxed);
        Some(stream)
    }

    /// Keeps so many silent connections. Whoever is put out comes again.
    fn stay(&self, many: usize) {
        let mut inside: Vec<TcpStream> = Vec::new();
        while self.goes_on() {
            inside.retain_mut(|stream| {
                let word = stream.read(&mut [0; 256]);
                matches!(word, Err(error) if error.kind() == ErrorKind::WouldBlock)
            });
            while inside.len() < many && self.goes_on() {
                let Some(stream) = self.knock() else { break };
                inside.push(stream);
            }
            thread::sleep(GLANCE);
        }
    }

    /// Sends malformed handshakes, at most `rate` bytes a second, each by a connection of its own.
    fn flood(&self, rate: f64) {
        let (began, mut sent) = (Instant::now(), 0);
        for length in FLOODS.into_iter().cycle() {
            if !self.goes_on() {
                return;
            }
            let Some(mut stream) = self.knock() else { continue };
            // What the system does not take at once was not sent.
            let taken = stream.write(&vec![0xa5; length]).unwrap_or(0);
            self.counts[1].fetch_add(taken as u64, Ordering::Relaxed);
            sent += taken;
            let due = Duration::from_secs_f64(sent as f64 / rate);
            thread::sleep(due.saturating_sub(began.elapsed()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    type Line = crate::bench::Line<Args>;

    fn row(round: u64, visit: Visit, seconds: f64) -> Row {
        let measurement = format!(
            r#"{{"workers":2,"bytes":4,"iters":9,"link":null,"chunk":null,"lanes":null,
            "seconds":{{"mean":{seconds},"median":1,"p10":1,"p90":1}},"cpu_seconds_per_iter":1,
            "bytes_sent_per_node":null,"peak_rss_bytes":null}}"#
        );
        let measurement = Measurement::find(&measurement).unwrap();
        Row { round, visit, measurement, connections: 1000.0, bytes: 1.25e7 }
    }

    #[test]
    fn more_than_a_tenth_is_missed() {
        let args = Line::parse_from(["strangers"]).args;
        let rounds = (1..=8).flat_map(|round| {
            [(Visit::Nobody, 1.0), (Visit::Silent, 1.09), (Visit::Flood, 1.2)]
                .map(|(visit, seconds)| row(round, visit, seconds))
        });
        let text = args.summary(&rounds.collect::<Vec<_>>(), 5);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("| 1000 |")).collect();
        assert!(lines[1].starts_with("| silent") && lines[1].ends_with("| met |"), "{text}");
        assert!(lines[2].starts_with("| flood") && lines[2].ends_with("| **missed** |"), "{text}");
        assert!(lines[2].contains("| 1.200 (1.200 to 1.200) |"), "{text}");
    }

    #[test]
    fn the_limit_of_files_is_the_one_in_force() {
        let limits =
            "Limit    Soft Limit  Hard Limit  Units\nMax open files    1024    4096    files\n";
        assert_eq!(open_files(limits), Some(1024));
        assert_eq!(open_files("Max open files    unlimited   unlimited    files"), None);
    }

    #[test]
    fn a_line_of_the_record_has_a_value_for_every_column() {
        let line = row(3, Visit::Flood, 0.5).csv();
        assert_eq!(line.trim().split(',').count(), CSV_HEADER.split(',').count());
        assert!(line.starts_with("3,flood,2,4,9,0.500000,") && line.ends_with(",1000.0,100.000\n"));
    }

    #[test]
    fn strangers_that_are_put_out_come_again_and_floods_keep_their_rate() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let door = listener.local_addr().unwrap();
        let mut args = Line::parse_from(["strangers", "--silent", "1"]).args;
        let strangers = Strangers::arrive(Visit::Silent, &args, &[door]);
        // Each is put out at once.
        (0..3).for_each(|_| drop(listener.accept().unwrap()));
        drop(strangers);
        args.mbit = 1;
        let (strangers, began) = (Strangers::arrive(Visit::Flood, &args, &[door]), Instant::now());
        let mut heard = 0;
        while heard < 3 * FLOODS.iter().sum::<usize>() {
            let (mut stream, _) = listener.accept().unwrap();
            heard += stream.read_to_end(&mut Vec::new()).unwrap();
        }
        drop(strangers);
        assert!(heard as f64 <= 125_000.0 * began.elapsed().as_secs_f64() + 65536.0);
    }
}
