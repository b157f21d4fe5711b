//! `cargo xtask bench trace`: what it costs a job to note what it does.
//!
//! Two jobs of the same exchange are on the same machine, one of which writes a trace. They take turns,
//! so whatever else the machine does falls on both alike. An exchange without computing is the worst
//! case: no job notes more in the same time.

use super::ratio::{Ratio, WANTED};
use super::size::Size;
use super::turns::Contender;
use super::{environment, record};
use crate::command::{command, target_dir};
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What to measure.
#[derive(clap::Args)]
#[command(after_help = ELSEWHERE)]
pub(crate) struct Args {
    /// Workers of each job; while one job has its turn, the other one sleeps
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=64))]
    workers: u16,
    /// Bytes that are exchanged
    #[arg(long, value_delimiter = ',', default_value = "64KB,1MB,16MB")]
    sizes: Vec<Size>,
    /// Pairs of turns of each size
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(6..))]
    pairs: u32,
    /// Milliseconds that a turn takes, about
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u64).range(10..))]
    turn: u64,
    /// Ports of this machine where the two jobs meet: this one and nineteen more are free
    #[arg(long, default_value_t = 29710, value_parser = clap::value_parser!(u16).range(1024..=65000))]
    port: u16,
    /// A poseidon command to measure [default: built from this checkout]
    #[arg(long, value_name = "PATH")]
    poseidon: Option<String>,
    /// Few pairs; a try, not a record
    #[arg(long)]
    quick: bool,
    /// Where the record goes [default: bench/runs/DATE-trace; with --quick target/bench]
    #[arg(long)]
    out: Option<PathBuf>,
}

const ELSEWHERE: &str = "\
Without cargo, on a machine that both binaries were carried to, from the checkout's root:
  target/release/xtask bench trace --poseidon target/release/poseidon";

/// What a traced exchange may take longer.
const TARGET: f64 = 1.01;

/// A turn that takes so long hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// Seconds of an exchange, and CPU seconds of all workers, in a turn without and with a trace.
#[derive(Clone, Copy, Debug)]
struct Pair {
    off: (f64, f64),
    on: (f64, f64),
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
    let pairs = if args.quick { 6 } else { args.pairs };

    let mut off = Contender::start(&mut job(args, &poseidon, args.port, None))?;
    let mut on = Contender::start(&mut job(args, &poseidon, args.port + 10, Some(&scratch)))?;
    let mut csv = File::create(folder.join("turns.csv"))?;
    writeln!(csv, "bytes,pair,off_seconds,on_seconds,off_cpu_seconds,on_cpu_seconds")?;
    let mut measured = Vec::new();
    for size in &args.sizes {
        // The first turn also brings memory and caches into their usual state.
        let first = off.ask(size.0, 20, LIMIT)?.seconds.median;
        on.ask(size.0, 20, LIMIT)?;
        let iters = ((args.turn as f64 / 1e3 / first) as u64).clamp(10, 100_000);
        let mut of_size = Vec::new();
        for number in 0..pairs {
            let turn = |contender: &mut Contender| -> Result<(f64, f64)> {
                let turn = contender.ask(size.0, iters, LIMIT)?;
                Ok((turn.seconds.median, turn.cpu_seconds_per_iter))
            };
            // Every other pair in the other order: being first falls on both alike.
            let pair = if number % 2 == 0 {
                let off = turn(&mut off)?;
                Pair { off, on: turn(&mut on)? }
            } else {
                let on = turn(&mut on)?;
                Pair { off: turn(&mut off)?, on }
            };
            let Pair { off: (off_s, off_cpu), on: (on_s, on_cpu) } = pair;
            writeln!(csv, "{},{number},{off_s:.9},{on_s:.9},{off_cpu:.9},{on_cpu:.9}", size.0)?;
            of_size.push(pair);
        }
        println!("{size}: {pairs} pairs of {iters} exchanges");
        measured.push((*size, iters, of_size));
    }
    drop((off, on));
    let traced = fs::read_dir(&scratch).map_or(0, Iterator::count);
    if traced != usize::from(args.workers) {
        bail!("{traced} traces of {} workers: the traced job has not traced", args.workers);
    }
    let text = summary(args.workers, &measured);
    record::write(&folder, "summary.md", &text)?;
    println!("\n{text}\nrecorded in {}", folder.display());
    Ok(())
}

/// A job on this machine that meets at `port`, and notes what it does if there is a folder for that. Rank
/// 0 has this process's pipes.
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
    for name in ["TRACE", "REPORT", "METRICS", "TENSORBOARD"] {
        job.env_remove(format!("POSEIDON_{name}"));
    }
    if let Some(folder) = traced {
        job.env("POSEIDON_TRACE", folder.join("trace.json"));
    }
    job
}

fn summary(workers: u16, measured: &[(Size, u64, Vec<Pair>)]) -> String {
    let mut text = format!(
        "# Tracing\n\nTwo jobs of {workers} workers on one machine sum a buffer, without computing. One \
         writes a trace. They take turns; every other pair of turns begins with the other job. A ratio is \
         the traced job's by the other one's: the median over the pairs, in brackets the interval that has \
         it with 95% confidence. Seconds are medians of a turn's exchanges, CPU seconds are of all workers. \
         The target is met if the whole interval is below {TARGET}, and missed if it is above.\n\n\
         | size | pairs | exchanges a turn | seconds, off | seconds, traced / off | CPU, traced / off | \
         under 1% |\n| ---: | ---: | ---: | ---: | ---: | ---: | --- |\n"
    );
    for (size, iters, pairs) in measured {
        let ratio = |of: fn(&(f64, f64)) -> f64| {
            Ratio::of(pairs.iter().map(|pair| of(&pair.on) / of(&pair.off)).collect())
        };
        let off = Ratio::of(pairs.iter().map(|pair| pair.off.0).collect());
        let told = |ratio: Option<Ratio>| ratio.map_or("-".into(), |ratio| format!("{ratio:.4}"));
        let seconds = ratio(|turn| turn.0);
        text += &format!(
            "| {size} | {} | {iters} | {} | {} | {} | {} |\n",
            pairs.len(),
            off.map_or("-".into(), |off| format!("{:.6}", off.median)),
            told(seconds),
            told(ratio(|turn| turn.1)),
            word(seconds)
        );
    }
    text
}

/// Whether a trace costs less than is allowed, as far as the interval tells.
fn word(ratio: Option<Ratio>) -> &'static str {
    match ratio.filter(|ratio| ratio.confidence >= WANTED) {
        Some(ratio) if ratio.high < TARGET => "met",
        Some(ratio) if ratio.low > TARGET => "**missed**",
        Some(_) => "the interval leaves it open",
        None => "too few pairs",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(ons: &[f64]) -> String {
        let pair = |on: &f64| Pair { off: (1.0, 4.0), on: (*on, 4.0) };
        summary(4, &[(Size::kb(64), 50, ons.iter().map(pair).collect())])
    }

    #[test]
    fn the_whole_interval_decides() {
        let cheap = told(&[1.001; 10]);
        assert!(cheap.contains("| 1.000000 | 1.0010 (1.0010 to 1.0010) | 1.0000"), "{cheap}");
        assert!(cheap.contains("| met |"), "{cheap}");
        assert!(told(&[1.02; 10]).contains("| **missed** |"));
        let mixed: Vec<_> = (0..10).map(|i| 0.99 + 0.005 * f64::from(i)).collect();
        assert!(told(&mixed).contains("| the interval leaves it open |"));
        assert!(told(&[1.0; 3]).contains("| too few pairs |"));
    }
}
