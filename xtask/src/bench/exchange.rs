//! `cargo xtask bench exchange`: one full exchange of a gradient, beside Gloo and Open MPI.

use super::contender::{Case, Contender, Programs};
use super::measurement::Measurement;
use super::size::Size;
use super::summary::{self, CSV_HEADER, Grid, Run};
use super::{environment, plot, record};
use crate::command::{command, output_within};
use anyhow::{Result, bail};
use clap::ValueEnum;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Numbers of processes
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    workers: Vec<usize>,
    /// Sizes of the buffer
    #[arg(long, value_delimiter = ',', default_value = "64KB,1MB,16MB,100MB")]
    sizes: Vec<Size>,
    /// Iterations per run [default: by size]
    #[arg(long)]
    iters: Option<usize>,
    /// How many times everything is repeated [default: 3, with --quick 1]
    #[arg(long)]
    rounds: Option<usize>,
    /// Few iterations, one round; a try, not a record
    #[arg(long)]
    quick: bool,
    /// Who takes part [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    contenders: Vec<Contender>,
    /// A Python that has torch, numpy and mpi4py [default: one set up in bench/.env]
    #[arg(long)]
    python: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-exchange; with --quick target/bench]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A run takes seconds, on a busy machine tens of them; one that takes minutes hangs.
const LIMIT: Duration = Duration::from_secs(240);

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut contenders = args.contenders.clone();
    if contenders.is_empty() {
        contenders = Contender::value_variants().to_vec();
    }
    let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 3 });
    let programs = environment::prepare(&contenders, args.python.as_deref())?;
    let folder = record::create("exchange", args.out.as_deref(), args.quick)?;
    record::write(&folder, "machine.txt", &record::machine(&programs.python))?;
    record::write(&folder, "command.txt", &commands(&contenders, &programs))?;

    let mut csv = File::create(folder.join("raw.csv"))?;
    writeln!(csv, "{CSV_HEADER}")?;
    let mut grid = Grid::default();
    let schedule = schedule(args, &contenders, rounds);
    let start = Instant::now();
    for (done, (round, case, contender)) in schedule.iter().copied().enumerate() {
        let iters = args.iters.unwrap_or_else(|| iterations(case.size, args.quick));
        let words = contender.words(case, iters, &programs);
        let result = output_within(&mut command(&words), LIMIT)
            .and_then(|printed| Measurement::find(&printed))
            .map_err(|error| format!("{error:#}"));
        let told = match &result {
            Ok(m) => format!(
                "{:>10.3} ms, CPU {:>10.3} ms",
                m.seconds.median * 1e3,
                m.cpu_seconds_per_iter * 1e3
            ),
            Err(why) => format!("FAILED: {why}"),
        };
        let (number, all) = (done + 1, schedule.len());
        let left = start.elapsed().mul_f64((all - number) as f64 / number as f64);
        println!(
            "[{number:>3}/{all}] round {round}  P={}  {:>6}  {:<14} {told}  ({} s left)",
            case.workers,
            case.size.to_string(),
            contender.name(),
            left.as_secs()
        );
        let run = Run { round, contender, case, result };
        // Line by line: an interrupted benchmark keeps what it has measured.
        if let Some(line) = run.csv() {
            writeln!(csv, "{line}")?;
        }
        grid.runs.push(run);
    }

    let text = summary::markdown(&grid, rounds);
    record::write(&folder, "summary.md", &text)?;
    plot::write(&grid, &folder.join("plot.svg"))?;
    println!("\n{text}\nrecorded in {}", folder.display());
    let failures = grid.failures().count();
    if failures > 0 {
        bail!("{failures} of {} runs failed", grid.runs.len());
    }
    Ok(())
}

/// Contenders alternate within a round, and begin with another one each time: a slow minute of the
/// machine then falls on all of them.
fn schedule(args: &Args, contenders: &[Contender], rounds: usize) -> Vec<(usize, Case, Contender)> {
    let mut schedule = Vec::new();
    let mut first = 0;
    for round in 1..=rounds {
        for &workers in &args.workers {
            for &size in &args.sizes {
                for turn in 0..contenders.len() {
                    let contender = contenders[(first + turn) % contenders.len()];
                    schedule.push((round, Case { workers, size }, contender));
                }
                first += 1;
            }
        }
    }
    schedule
}

/// Enough iterations for a stable median without waiting minutes for the large sizes.
fn iterations(size: Size, quick: bool) -> usize {
    let (budget, least, most) = if quick { (64 << 20, 3, 50) } else { (256 << 20, 7, 200) };
    usize::try_from(budget / size.0).unwrap_or(most).clamp(least, most)
}

/// The commands behind the record, one per contender, with the paths of a default checkout.
fn commands(contenders: &[Contender], programs: &Programs) -> String {
    let programs = Programs {
        poseidon: "target/release/poseidon".to_owned(),
        python: "bench/.env/bin/python".to_owned(),
        ..*programs
    };
    let case = Case { workers: 8, size: Size::mb(1) };
    let mut text = format!("{}\n\nwhich runs, for example:\n", record::command_line());
    for contender in contenders {
        text += &format!("{}\n", contender.words(case, 50, &programs).join(" "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    type Line = crate::bench::Line<Args>;

    #[test]
    fn every_contender_runs_every_case_once_per_round_and_none_is_always_first() {
        let args = Line::parse_from(["bench"]).args;
        let all = Contender::value_variants();
        let schedule = schedule(&args, all, 3);
        assert_eq!(schedule.len(), 3 * 3 * 4 * all.len());
        let firsts = schedule.iter().step_by(all.len()).filter(|(_, _, who)| *who == all[0]);
        assert!(firsts.count() <= 3 * 3 * 4 / all.len() + 1);
        let case = Case { workers: 4, size: Size::mb(16) };
        let gloo = schedule.iter().filter(|run| **run == (2, case, Contender::Gloo));
        assert_eq!(gloo.count(), 1);
    }

    #[test]
    fn large_sizes_get_fewer_iterations() {
        assert_eq!(iterations(Size::kb(64), false), 200);
        assert_eq!(iterations(Size::mb(16), false), 16);
        assert_eq!(iterations(Size::mb(100), false), 7);
        assert_eq!(iterations(Size::mb(100), true), 3);
    }
}
