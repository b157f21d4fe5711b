//! `cargo xtask bench soak`: does a job that is watched need ever more memory.
//!
//! A real job trains a net of small layers. Its workers sleep where others compute, so that many of
//! them find room on one machine. Metrics of every node and the dashboard are read all the time, as
//! a monitoring system and a browser would. The memory of every process is sampled.

mod process;

use super::charts::{self, BLUE, GREEN, ORANGE, Panel, Series};
use super::targets::Verdict;
use super::{environment, record};
use crate::command::{command, drain, end, tail, target_dir, wait_until};
use anyhow::{Context, Result, anyhow, bail, ensure};
use process::{Memory, Process};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// What to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long the job is to run, about
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
    /// Workers, all on this machine
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=250))]
    nodes: u16,
    /// Seconds between two samples
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// The first of the ports that metrics are served at; the one before it is the dashboard's
    #[arg(long, default_value_t = 19401, value_parser = clap::value_parser!(u16).range(1024..=65000))]
    port: u16,
    /// A poseidon command to run [default: built from this checkout]
    #[arg(long, value_name = "PATH")]
    poseidon: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-soak]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Steps that the job is to take in a second.
const STEPS_PER_SECOND: u64 = 5;

/// Memory in the first minutes does not count: buffers are made when they are first needed. Short runs
/// leave out a sixth.
const WARM_UP: Duration = Duration::from_secs(600);

/// Nor does memory in the last seconds: the job makes its report.
const END: f64 = 60.0;

/// What a process may grow by in an hour, in KiB of memory of its own. A leak of 60 bytes a step would
/// be as much.
const MOST: f64 = 1024.0;

const MODEL: &str = include_str!("soak/small.toml");

/// All processes' memory at one moment.
struct Sample {
    seconds: f64,
    memory: BTreeMap<Process, Memory>,
    /// What was read from the metrics of all nodes and from the dashboard.
    scraped_bytes: usize,
}

/// Runs the job, samples it, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    let poseidon = environment::poseidon_or_built(args.poseidon.as_deref())?;
    let folder = record::create("soak", args.out.as_deref(), false)?;
    ensure!(!folder.join("summary.md").exists(), "{} has a record already", folder.display());
    record::write(&folder, "machine.txt", &record::machine(""))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    let scratch = target_dir().join("bench/soak-scratch");
    fs::create_dir_all(&scratch).with_context(|| format!("creating {}", scratch.display()))?;
    let model = scratch.join("small.toml");
    fs::write(&model, MODEL)?;

    let pause = format!("{}ms", 1000 / STEPS_PER_SECOND);
    let steps = args.minutes * 60 * STEPS_PER_SECOND;
    let mut job = command(&[&poseidon, "train", "--workers", &args.nodes.to_string()]);
    job.args(["--batch", "1", "--test", "never", "--compute", &pause])
        .args(["--steps", &steps.to_string(), "--dashboard", &format!(":{}", args.port - 1)])
        .arg("--model")
        .arg(&model)
        .arg("--report")
        .arg(scratch.join("report"))
        .env("POSEIDON_METRICS", args.port.to_string())
        .env("POSEIDON_LOG", "warn");
    let mut child = job
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {poseidon}"))?;
    let said = drain(child.stderr.take());
    let sampled = sample(args, &mut child, &folder);
    end(&mut child)?;
    let said = said.join().map_err(|_| anyhow!("reading standard error"))?;
    let samples = sampled.with_context(|| tail(&said))?;

    let (text, verdict) = summary(&samples, args)?;
    record::write(&folder, "summary.md", &text)?;
    plot(&samples, &folder.join("memory.svg"))?;
    println!("\n{text}\n{}: {}\nrecorded in {}", verdict.target, verdict.word(), folder.display());
    Ok(())
}

/// Samples the job until it is over. What was sampled is on the disk at once.
fn sample(args: &Args, job: &mut Child, folder: &Path) -> Result<Vec<Sample>> {
    let mut csv = File::create(folder.join("memory.csv"))?;
    writeln!(csv, "seconds,process,rss_kib,anonymous_kib,shared_kib")?;
    let (start, period) = (Instant::now(), Duration::from_secs(args.every));
    let limit = start + Duration::from_secs(args.minutes * 60) * 2 + WARM_UP;
    let (mut samples, mut next) = (Vec::new(), start + period);
    // A page that somebody has left open: it hears of the job once a second.
    let mut page = None;
    loop {
        if let Some(status) = wait_until(job, next)? {
            ensure!(status.success(), "the job failed: {status}");
            return Ok(samples);
        }
        ensure!(Instant::now() < limit, "no end within {} s", (limit - start).as_secs());
        if page.is_none() {
            page = TcpStream::connect(("127.0.0.1", args.port - 1)).ok().map(leave_open);
        }
        let ports = (args.port - 1)..(args.port + args.nodes);
        let scraped: io::Result<Vec<usize>> = ports.map(scrape).collect();
        let scraped_bytes = scraped.map_or(0, |sizes| sizes.iter().sum());
        let (seconds, memory) = (start.elapsed().as_secs_f64(), process::family(job.id())?);
        for (process, memory) in &memory {
            let Memory { rss, anonymous, shared } = memory;
            writeln!(csv, "{seconds:.0},{process},{rss},{anonymous},{shared}")?;
        }
        let total: u64 = memory.values().map(|memory| memory.anonymous).sum();
        let count = memory.len();
        println!("{seconds:5.0} s: {count} processes, {total} KiB, {scraped_bytes} B scraped");
        samples.push(Sample { seconds, memory, scraped_bytes });
        next += period;
    }
}

/// Reads the metrics at a port of this machine, and says how many bytes they are.
fn scrape(port: u16) -> io::Result<usize> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let request =
        format!("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)
}

/// Reads the dashboard's news until they end.
fn leave_open(mut stream: TcpStream) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let request = "GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
        let _ = stream.write_all(request.as_bytes());
        let _ = io::copy(&mut stream, &mut io::sink());
    })
}

/// The table, and whether memory stays.
fn summary(samples: &[Sample], args: &Args) -> Result<(String, Verdict)> {
    // Processes that come and go at the ends of the job are not all there.
    let all = samples.iter().map(|sample| sample.memory.len()).max().unwrap_or(0);
    let mut whole = samples.iter().filter(|sample| sample.memory.len() == all);
    let Some(first) = whole.next() else {
        bail!("the job was over before the first sample");
    };
    let last = whole.next_back().unwrap_or(first);
    let warm_up = WARM_UP.as_secs_f64().min(last.seconds / 6.0);
    let counts = warm_up..=(last.seconds - END).max(warm_up);
    let warm: Vec<&Sample> =
        samples.iter().filter(|sample| counts.contains(&sample.seconds)).collect();
    let scraped = samples.iter().filter(|sample| sample.scraped_bytes > 0).count();
    let mut text = format!(
        "# Soak\n\nA job of {} workers on one machine ran for {:.0} minutes: {} steps of a net of small \
         layers, {} ms of sleep in place of computing in each step. It wrote a report at its end. \
         Metrics of every node were served. At {scraped} of {} samples they were all read, and the \
         dashboard's; a page of the dashboard was open all the time.\n\n\
         Memory in KiB, of every process. *Own* is memory that the process has made for itself \
         (`RssAnon`), *shared* is what links within the machine lie in (`RssShmem`), *resident* is \
         everything. Growth is a straight line through all samples after the first {:.0} \
         minutes, without the last one, in which the report is made.\n\n![Memory over time](memory.svg)\n\n\
         | process | own, first sample | own, after {:.0} min | own, last | growth of own per hour | \
         shared, last | growth of shared per hour | resident, last |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
        args.nodes,
        last.seconds / 60.0,
        args.minutes * 60 * STEPS_PER_SECOND,
        1000 / STEPS_PER_SECOND,
        samples.len(),
        warm_up / 60.0,
        warm_up / 60.0,
    );
    let mut most = (f64::NEG_INFINITY, Process::Launcher);
    for (process, memory) in &last.memory {
        let of = |value: fn(&Memory) -> u64| -> Vec<(f64, f64)> {
            let points = warm.iter().filter_map(|sample| {
                Some((sample.seconds / 3600.0, value(sample.memory.get(process)?) as f64))
            });
            points.collect()
        };
        let own = of(|memory| memory.anonymous);
        let (growth, shared) = (slope(&own), slope(&of(|memory| memory.shared)));
        if growth > most.0 {
            most = (growth, *process);
        }
        let started = first.memory.get(process).map_or(0, |memory| memory.anonymous);
        text += &format!(
            "| {process} | {started} | {:.0} | {} | {growth:+.0} | {} | {shared:+.0} | {} |\n",
            own.first().map_or(f64::NAN, |point| point.1),
            memory.anonymous,
            memory.shared,
            memory.rss,
        );
    }
    let verdict = Verdict {
        target: format!("no process grows by more than {MOST:.0} KiB of own memory an hour"),
        measured: format!("at most {:+.0} KiB ({})", most.0, most.1),
        met: Some(most.0 <= MOST),
    };
    let (target, measured) = (&verdict.target, &verdict.measured);
    text += &format!(
        "\n| target | measured | verdict |\n| --- | --- | --- |\n| {target} | {measured} | {} |\n",
        verdict.word()
    );
    Ok((text, verdict))
}

/// The slope of the straight line that fits the points best.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let together: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    if spread > 0.0 { together / spread } else { 0.0 }
}

/// Own memory of the launcher, of worker 0, and the mean of all workers, over the minutes.
fn plot(samples: &[Sample], path: &Path) -> Result<()> {
    let line = |label: &str, colour, value: &dyn Fn(&Sample) -> Option<f64>| Series {
        label: label.to_owned(),
        colour,
        points: samples
            .iter()
            .filter_map(|s| Some((s.seconds / 60.0, value(s)? / 1024.0)))
            .collect(),
    };
    let one = |process| {
        move |sample: &Sample| sample.memory.get(&process).map(|memory| memory.anonymous as f64)
    };
    let workers = |sample: &Sample| -> Vec<f64> {
        let workers = sample.memory.iter().filter(|(process, _)| **process != Process::Launcher);
        workers.map(|(_, memory)| memory.anonymous as f64).collect()
    };
    let mean = |sample: &Sample| {
        let values = workers(sample);
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let panel = Panel {
        title: "Memory of a job's processes".to_owned(),
        x: "minutes".to_owned(),
        y: "own memory, MiB".to_owned(),
        logarithmic: false,
        series: vec![
            line("launcher with coordinator and dashboard", BLUE, &one(Process::Launcher)),
            line("worker 0", ORANGE, &one(Process::Worker(0))),
            line("mean of all workers", GREEN, &mean),
        ],
    };
    charts::lines(path, &[panel])
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    type Line = crate::bench::Line<Args>;

    /// A launcher that stays as it is, and a worker that grows by `kib` an hour after its start.
    fn samples(kib: f64) -> Vec<Sample> {
        let at = |minute: u32| {
            let grown = kib * f64::from(minute) / 60.0 + 5000.0 * f64::from(u8::from(minute > 2));
            let memory = |anonymous| Memory { rss: anonymous + 10, anonymous, shared: 7 };
            let launcher = (Process::Launcher, memory(3000));
            let worker =
                (Process::Worker(0), memory(1000 + grown as u64 + u64::from(minute == 60)));
            let memory = BTreeMap::from([launcher, worker]);
            Sample { seconds: f64::from(minute) * 60.0, memory, scraped_bytes: 1 }
        };
        (1..=60).map(at).collect()
    }

    #[test]
    fn growth_after_the_first_minutes_is_told_and_judged() {
        let args = Line::parse_from(["soak"]).args;
        let (text, verdict) = summary(&samples(0.0), &args).unwrap();
        assert_eq!(verdict.met, Some(true), "{text}");
        assert!(text.contains("| worker 0 | 1000 | 6000 | 6001 | +0 | 7 | +0 | 6011 |"), "{text}");
        let (text, verdict) = summary(&samples(6000.0), &args).unwrap();
        assert_eq!(verdict.met, Some(false), "{text}");
        assert!(verdict.measured.contains("(worker 0)"), "{}", verdict.measured);
        assert!(summary(&[], &args).is_err());
    }

    #[test]
    fn a_line_is_fitted() {
        assert_eq!(slope(&[(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]), 2.0);
        assert_eq!(slope(&[(1.0, 3.0)]), 0.0);
    }
}
