//! `cargo xtask bench trace`: what it costs a job to note what it does.
//!
//! An exchange without computing is the worst case: no job notes more in the same time. Three jobs
//! of the same exchange are on the same machine, one of which writes a trace. They take turns, so
//! whatever else the machine does falls on all alike. Where the system puts a job's threads and
//! memory stays with the job as long as it lives. So jobs are started anew again and again, and one
//! start is one value. The third job is a second one without a trace: what it differs from the
//! first one by is what the measurement cannot tell.
//!
//! Training is what people trace. There each value is a pair of runs. Runs differ by percents, for
//! other reasons. So what the records of one layer cost is measured apart: one worker exchanges with
//! itself, and the fastest tenth of its exchanges hardly varies. With that, and with a step's layers,
//! the part of a step is known that records take.

use super::measurement::median;
use super::ratio::{Ratio, WANTED};
use super::size::Size;
use super::turns::Contender;
use super::{environment, record};
use crate::command::{command, output_within, target_dir};
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde_json::Value;
use std::cell::Cell;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What to measure.
#[derive(clap::Args)]
#[command(after_help = ELSEWHERE)]
pub(crate) struct Args {
    /// Parts to run [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Workers of each job; while one job has its turn, the others sleep
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=64))]
    workers: u16,
    /// Bytes that are exchanged
    #[arg(long, value_delimiter = ',', default_value = "64KB,1MB,16MB")]
    sizes: Vec<Size>,
    /// How often the jobs that exchange are started
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(6..))]
    starts: u32,
    /// Rounds of turns of each size in a start
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Milliseconds that a turn takes, about
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(10..))]
    turn: u64,
    /// Pairs of runs of one worker alone
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(6..))]
    lone: u32,
    /// Pairs of training runs
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(6..))]
    trainings: u32,
    /// Steps of a training run
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(10..))]
    steps: u32,
    /// Samples per worker and step: few make short steps, in which more is noted
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Ports of this machine where the jobs meet: this one and 29 more are free
    #[arg(long, default_value_t = 29710, value_parser = clap::value_parser!(u16).range(1024..=65000))]
    port: u16,
    /// A poseidon command to measure [default: built from this checkout]
    #[arg(long, value_name = "PATH")]
    poseidon: Option<String>,
    /// Few starts, rounds and runs; a try, not a record
    #[arg(long)]
    quick: bool,
    /// Where the record goes [default: bench/runs/DATE-trace; with --quick target/bench]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Nothing but exchanges, the hardest case
    Exchange,
    /// One worker alone: what the records of one layer cost
    Layer,
    /// The small net of `poseidon train`
    Train,
}

const ELSEWHERE: &str = "\
Without cargo, on a machine that both binaries were carried to, from the checkout's root:
  target/release/xtask bench trace --poseidon target/release/poseidon";

/// What a traced job may take longer.
const TARGET: f64 = 1.01;

/// Exchanges of one worker alone, each of a few microseconds.
const LONE_EXCHANGES: u32 = 20_000;
/// The barrier after every exchange is a layer, too.
const LAYERS_AN_EXCHANGE: f64 = 2.0;

/// A turn that takes so long hangs, and so does a training run.
const LIMIT: Duration = Duration::from_secs(120);

/// Seconds of an exchange, and CPU seconds of all workers.
type Turn = (f64, f64);

/// A turn of each job.
#[derive(Clone, Copy, Debug)]
struct Round {
    off: Turn,
    on: Turn,
    /// Of the other job without a trace.
    again: Turn,
}

/// What was measured of a size: by start, the rounds.
struct Exchanges {
    size: Size,
    iters: u64,
    starts: Vec<Vec<Round>>,
}

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    let poseidon = environment::poseidon_or_built(args.poseidon.as_deref())?;
    let folder = record::create("trace", args.out.as_deref(), args.quick)?;
    ensure!(!folder.join("summary.md").exists(), "{} has a record already", folder.display());
    record::write(&folder, "machine.txt", &record::machine(""))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    let scratch = target_dir().join("bench/trace-scratch");
    if scratch.exists() {
        fs::remove_dir_all(&scratch).with_context(|| format!("emptying {}", scratch.display()))?;
    }
    let wanted = |part| args.only.is_empty() || args.only.contains(&part);
    let mut text = String::from("# Tracing\n");
    if wanted(Part::Exchange) {
        let measured = exchange(args, &poseidon, &folder, &scratch.join("exchange"))?;
        text += &summary(args.workers, &measured);
    }
    let mut cost = None;
    if wanted(Part::Layer) {
        cost = Ratio::of(layer(args, &poseidon, &folder, &scratch.join("layer"))?);
        text += &layer_summary(cost);
    }
    if wanted(Part::Train) {
        let trained = train(args, &poseidon, &folder, &scratch.join("train"))?;
        text += &training_summary(args, &trained, cost);
    }
    record::write(&folder, "summary.md", &text)?;
    println!("\n{text}\nrecorded in {}", folder.display());
    Ok(())
}

/// By size: what exchanges take.
fn exchange(args: &Args, poseidon: &str, folder: &Path, scratch: &Path) -> Result<Vec<Exchanges>> {
    let (starts, rounds) = if args.quick { (6, 2) } else { (args.starts, args.rounds) };
    let sized = |size: &Size| Exchanges { size: *size, iters: 0, starts: Vec::new() };
    let mut measured: Vec<_> = args.sizes.iter().map(sized).collect();
    let mut csv = File::create(folder.join("turns.csv"))?;
    writeln!(
        csv,
        "bytes,start,round,off_seconds,on_seconds,again_seconds,off_cpu_seconds,on_cpu_seconds,\
         again_cpu_seconds"
    )?;
    for start in 0..starts {
        let mut jobs = Vec::new();
        for (place, traced) in [(0, None), (1, Some(scratch)), (2, None)] {
            let port = args.port + 10 * place;
            jobs.push(Contender::start(&mut job(args, poseidon, port, traced))?);
        }
        for Exchanges { size, iters, starts } in &mut measured {
            // The first turn also brings memory and caches into their usual state.
            let mut first = Vec::new();
            for job in &mut jobs {
                first.push(job.ask(size.0, 20, LIMIT)?.seconds.median);
            }
            if *iters == 0 {
                *iters = ((args.turn as f64 / 1e3 / first[0]) as u64).clamp(10, 100_000);
            }
            let mut of_start = Vec::new();
            for number in 0..rounds {
                // Being first, and being after whom, falls on all jobs alike.
                let turns = number + start;
                let mut order = [0, 1, 2];
                order.rotate_left(turns as usize % 3);
                if turns / 3 % 2 == 1 {
                    order.reverse();
                }
                let mut round = [(0.0, 0.0); 3];
                for place in order {
                    let turn = jobs[place].ask(size.0, *iters, LIMIT)?;
                    round[place] = (turn.seconds.median, turn.cpu_seconds_per_iter);
                }
                let [off, on, again] = round;
                write!(
                    csv,
                    "{},{start},{number},{:.9},{:.9},{:.9},",
                    size.0, off.0, on.0, again.0
                )?;
                writeln!(csv, "{:.9},{:.9},{:.9}", off.1, on.1, again.1)?;
                of_start.push(Round { off, on, again });
            }
            starts.push(of_start);
        }
        println!("start {} of {starts}", start + 1);
    }
    check_traced(args.workers, scratch)?;
    Ok(measured)
}

/// A job on this machine that meets at `port`, and notes what it does if there is a folder for
/// that. Rank 0 has this process's pipes.
fn job(args: &Args, poseidon: &str, port: u16, traced: Option<&Path>) -> Command {
    const SCRIPT: &str = "rank=$(($WORLD_SIZE - 1))\n\
        while [ $rank -gt 0 ]; do RANK=$rank \"$@\" < /dev/null > /dev/null & rank=$(($rank - 1)); done\n\
        RANK=0 \"$@\"; status=$?; wait; exit $status";
    let sizes: Vec<_> = args.sizes.iter().map(|size| size.0.to_string()).collect();
    let mut job = command(&["sh", "-c", SCRIPT, "sh", poseidon, "bench", "exchange"]);
    job.args(["--in-cluster", "--turns", "--bytes", &sizes.join(",")])
        .env("WORLD_SIZE", args.workers.to_string())
        .env("LOCAL_WORLD_SIZE", args.workers.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string());
    observe(&mut job, traced);
    job
}

/// Has a job note what it does, if there is a folder for that, and nothing else be seen of it.
fn observe(job: &mut Command, traced: Option<&Path>) {
    for name in ["TRACE", "REPORT", "METRICS", "TENSORBOARD", "DASHBOARD"] {
        job.env_remove(format!("POSEIDON_{name}"));
    }
    if let Some(folder) = traced {
        job.env("POSEIDON_TRACE", folder.join("trace.json"));
    }
}

fn check_traced(workers: u16, folder: &Path) -> Result<()> {
    let traced = fs::read_dir(folder).map_or(0, Iterator::count);
    if traced != usize::from(workers) {
        bail!("{traced} traces of {workers} workers: the traced job has not traced");
    }
    Ok(())
}

/// By pair of runs: the seconds that a trace adds to one layer of a worker that is alone.
fn layer(args: &Args, poseidon: &str, folder: &Path, scratch: &Path) -> Result<Vec<f64>> {
    let pairs = if args.quick { 6 } else { args.lone };
    let fastest_tenth = |traced: Option<&Path>| -> Result<f64> {
        let iters = LONE_EXCHANGES.to_string();
        let mut job = command(&[poseidon, "bench", "exchange", "--in-cluster", "--json"]);
        job.args(["--bytes", "64KB", "--lanes", "1", "--iters", &iters])
            .env("WORLD_SIZE", "1")
            .env("RANK", "0")
            .env("LOCAL_WORLD_SIZE", "1")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", args.port.to_string());
        observe(&mut job, traced);
        let line: Value = serde_json::from_str(&output_within(&mut job, LIMIT)?)?;
        line["seconds"]["p10"].as_f64().context("a result without its fastest tenth")
    };
    let mut csv = File::create(folder.join("layer.csv"))?;
    writeln!(csv, "pair,off_seconds,on_seconds")?;
    let mut added = Vec::new();
    for pair in 0..pairs {
        let (off, on) = in_turn(pair, || fastest_tenth(None), || fastest_tenth(Some(scratch)))?;
        writeln!(csv, "{pair},{off:.9},{on:.9}")?;
        added.push((on - off) / LAYERS_AN_EXCHANGE);
    }
    check_traced(1, scratch)?;
    println!("one worker alone: {pairs} pairs");
    Ok(added)
}

/// A pair of runs, without and with a trace. Every other pair is in the other order: being first falls
/// on both alike.
fn in_turn<T>(
    pair: u32,
    off: impl Fn() -> Result<T>,
    on: impl Fn() -> Result<T>,
) -> Result<(T, T)> {
    if pair.is_multiple_of(2) {
        let off = off()?;
        return Ok((off, on()?));
    }
    let on = on()?;
    Ok((off()?, on))
}

/// Training runs.
struct Trained {
    /// By pair: seconds of a step, without and with a trace.
    pairs: Vec<(f64, f64)>,
    /// Of the net.
    layers: usize,
}

/// Trains in pairs of runs, without and with a trace.
fn train(args: &Args, poseidon: &str, folder: &Path, scratch: &Path) -> Result<Trained> {
    let (pairs, steps) = if args.quick { (6, 50) } else { (args.trainings, args.steps) };
    let report = scratch.join("report");
    let (report, traces) = (report.display().to_string(), scratch.join("traces"));
    let layers = Cell::new(0);
    let step = |traced: Option<&Path>| -> Result<f64> {
        let (workers, steps) = (args.workers.to_string(), steps.to_string());
        let mut job = command(&[poseidon, "train", "--json", "--test", "never"]);
        job.args(["--workers", &workers, "--steps", &steps, "--batch", &args.batch.to_string()]);
        job.args(["--report", &report]);
        observe(&mut job, traced);
        let report: Value = serde_json::from_str(&output_within(&mut job, LIMIT)?)?;
        layers.set(report["layers"].as_array().map_or(0, Vec::len));
        report["step_seconds"]["median"].as_f64().context("a report without a step's seconds")
    };
    let mut csv = File::create(folder.join("trainings.csv"))?;
    writeln!(csv, "pair,off_step_seconds,on_step_seconds")?;
    // Files and the processor's clock are in their usual state after it.
    step(Some(&traces))?;
    check_traced(args.workers, &traces)?;
    let mut measured = Vec::new();
    for pair in 0..pairs {
        let (off, on) = in_turn(pair, || step(None), || step(Some(&traces)))?;
        writeln!(csv, "{pair},{off:.9},{on:.9}")?;
        measured.push((off, on));
    }
    println!("training: {pairs} pairs of {steps} steps");
    Ok(Trained { pairs: measured, layers: layers.get() })
}

fn summary(workers: u16, measured: &[Exchanges]) -> String {
    let mut text = format!(
        "\n## Nothing but exchanges\n\nThree jobs of {workers} workers on one machine sum a \
         buffer, without computing. One writes a trace. They take turns, in an order that \
         changes. All three are started anew again and again. A ratio is the traced job's by the \
         first one's without a trace: the median of a start's rounds, of that the median over the \
         starts, in brackets the interval that has it with 95% confidence. \"Off again\" is the \
         second job without a trace by the first one. Seconds are medians of a turn's exchanges, \
         CPU seconds are of all workers. The target is met if the whole interval is below \
         {TARGET}, and missed if it is above.\n\n\
         | size | starts | rounds | exchanges a turn | seconds, off | seconds, traced / off | \
         off again / off | CPU, traced / off | under 1% |\n\
         | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n"
    );
    for Exchanges { size, iters, starts } in measured {
        let over_starts = |of: fn(&Round) -> f64| {
            let of_start = |rounds: &Vec<Round>| median(rounds.iter().map(of).collect());
            Ratio::of(starts.iter().filter_map(of_start).collect())
        };
        let off = over_starts(|round| round.off.0);
        let seconds = over_starts(|round| round.on.0 / round.off.0);
        text += &format!(
            "| {size} | {} | {} | {iters} | {} | {} | {} | {} | {} |\n",
            starts.len(),
            starts.first().map_or(0, Vec::len),
            off.map_or("-".into(), |off| format!("{:.6}", off.median)),
            told(seconds),
            told(over_starts(|round| round.again.0 / round.off.0)),
            told(over_starts(|round| round.on.1 / round.off.1)),
            word(seconds)
        );
    }
    text
}

fn layer_summary(cost: Option<Ratio>) -> String {
    let shown = |cost: Ratio| {
        let ns =
            Ratio { median: cost.median * 1e9, low: cost.low * 1e9, high: cost.high * 1e9, ..cost };
        format!("{ns:.0} ns")
    };
    format!(
        "\n## One layer\n\nOne worker exchanges 64 KB with itself, {LONE_EXCHANGES} times in a run. \
         Runs are in pairs, as above. What a trace adds to the fastest tenth of the exchanges, for \
         each layer: {}. An exchange has {LAYERS_AN_EXCHANGE:.0} layers, because the barrier after \
         it is one.\n",
        cost.map_or("-".into(), shown)
    )
}

fn training_summary(args: &Args, trained: &Trained, cost: Option<Ratio>) -> String {
    let Trained { pairs, layers } = trained;
    let off = Ratio::of(pairs.iter().map(|(off, _)| *off).collect());
    let ratio = Ratio::of(pairs.iter().map(|(off, on)| on / off).collect());
    format!(
        "\n## Training\n\n`poseidon train` with {} workers on one machine, its default net and \
         batches of {}, runs in pairs, one with a trace and one without. Every other pair is in \
         the other order. The ratio is of the medians of worker 0's steps, the traced run's by \
         the other one's: the median over the pairs with its interval, as above.\n\n\
         | pairs | seconds a step, off | seconds, traced / off | under 1% |\n\
         | ---: | ---: | ---: | --- |\n| {} | {} | {} | {} |\n",
        args.workers,
        args.batch,
        pairs.len(),
        off.map_or("-".into(), |off| format!("{:.6}", off.median)),
        told(ratio),
        word(ratio)
    ) + &off.zip(cost).map_or(String::new(), |(off, cost)| of_a_step(*layers, cost, off.median))
}

/// Which part of a step the records of its layers take.
fn of_a_step(layers: usize, cost: Ratio, step: f64) -> String {
    let part = |cost: f64| 1.0 + layers as f64 * cost / step;
    let ratio = Ratio {
        median: part(cost.median),
        low: part(cost.low),
        high: part(cost.high),
        confidence: cost.confidence,
    };
    format!(
        "\nThe net has {layers} layers. If each costs what one layer costs above, a step takes {} \
         times as long. Under 1%: {}.\n",
        told(Some(ratio)),
        word(Some(ratio))
    )
}

fn told(ratio: Option<Ratio>) -> String {
    ratio.map_or("-".into(), |ratio| format!("{ratio:.4}"))
}

/// Whether a trace costs less than is allowed, as far as the interval tells.
fn word(ratio: Option<Ratio>) -> &'static str {
    match ratio.filter(|ratio| ratio.confidence >= WANTED) {
        Some(ratio) if ratio.high < TARGET => "met",
        Some(ratio) if ratio.low > TARGET => "**missed**",
        Some(_) => "the interval leaves it open",
        None => "too few values",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_starts(ons: &[f64]) -> String {
        let round = |on: f64| Round { off: (1.0, 4.0), on: (on, 4.0), again: (1.002, 4.0) };
        // One wild round of a start says nothing.
        let start = |on: &f64| vec![round(*on), round(*on), round(9.0)];
        let starts = ons.iter().map(start).collect();
        summary(4, &[Exchanges { size: Size::kb(64), iters: 50, starts }])
    }

    #[test]
    fn a_step_has_the_cost_of_its_layers() {
        let cost = |ns: f64| Ratio { median: ns / 1e9, low: 0.0, high: ns / 1e9, confidence: 0.96 };
        let cheap = of_a_step(10, cost(100.0), 1e-3);
        assert!(cheap.contains("1.0010 (1.0000 to 1.0010)"), "{cheap}");
        assert!(cheap.contains("Under 1%: met."), "{cheap}");
        assert!(of_a_step(200, cost(100.0), 1e-3).contains("leaves it open"));
    }

    #[test]
    fn the_whole_interval_over_the_starts_decides() {
        let cheap = of_starts(&[1.001; 10]);
        let row =
            "| 10 | 3 | 50 | 1.000000 | 1.0010 (1.0010 to 1.0010) | 1.0020 (1.0020 to 1.0020) |";
        assert!(cheap.contains(row), "{cheap}");
        assert!(cheap.contains("| met |"), "{cheap}");
        assert!(of_starts(&[1.02; 10]).contains("| **missed** |"));
        let mixed: Vec<_> = (0..10).map(|i| 0.99 + 0.005 * f64::from(i)).collect();
        assert!(of_starts(&mixed).contains("| the interval leaves it open |"));
        assert!(of_starts(&[1.0; 3]).contains("| too few values |"));
    }
}
