//! `cargo xtask bench weather`: an exchange over links that are long and lose packets, beside Gloo.
//!
//! Every node is a network namespace, and `poseidon lab` is the switch between them. A pair of runs,
//! ours and Gloo's, has the same seed, so the same of every node's packets are lost as far as both
//! send as many.

use super::contender::Contender;
use super::measurement::{Measurement, median};
use super::ratio::Verdict::Slower;
use super::ratio::{Ratio, WANTED};
use super::size::Size;
use super::targets::Verdict;
use super::{environment, record};
use crate::command::command;
use anyhow::{Context, Result, ensure};
use std::fmt;
use std::path::PathBuf;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Numbers of nodes
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    nodes: Vec<u16>,
    /// Sizes of the buffer
    #[arg(long, value_delimiter = ',', default_value = "1MB,10MB")]
    sizes: Vec<Size>,
    /// Packets lost, as `poseidon lab` takes it
    #[arg(long, value_delimiter = ',', default_value = "0%,0.1%,1%")]
    loss: Vec<String>,
    /// From one node to another, one way
    #[arg(long, default_value = "5ms")]
    delay: String,
    /// Of every node's link, each way
    #[arg(long, default_value = "200mbit")]
    rate: String,
    /// What a port of the switch holds
    #[arg(long, default_value = "2mb")]
    queue: String,
    /// Runs of each contender in every case, in turn
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(6..))]
    pairs: u64,
    /// Iterations per run
    #[arg(long, default_value_t = 3)]
    iters: u64,
    /// A poseidon command that is used as it is, for machines that cannot build it
    #[arg(long)]
    poseidon: Option<String>,
    /// A Python that has torch and numpy [default: one set up in bench/.env]
    #[arg(long)]
    python: Option<String>,
    /// Where the record goes [default: bench/runs/DATE-weather]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A run takes seconds; with much loss on few connections, a minute or two.
const LIMIT: &str = "300";
const CSV_HEADER: &str = "pair,contender,nodes,bytes,loss,delay,rate,queue,iters,median_s,p10_s,p90_s,\
    cpu_s_per_iter,packets,lost,overflowed,late";

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    let poseidon = match &args.poseidon {
        Some(poseidon) => poseidon.clone(),
        None => {
            environment::build_poseidon()?;
            environment::poseidon().display().to_string()
        }
    };
    let python = environment::prepare(&[Contender::Gloo], args.python.as_deref())?.python;
    let contenders = [
        ("poseidon", vec![poseidon.as_str(), "bench", "exchange", "--in-cluster", "--json"]),
        ("gloo", vec![python.as_str(), "bench/peers/gloo.py", "--in-cluster"]),
    ];
    let folder = record::create("weather", args.out.as_deref(), false)?;
    record::write(&folder, "machine.txt", &record::machine(&python))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;

    let mut runs = Vec::new();
    let mut csv = format!("{CSV_HEADER}\n");
    for pair in 1..=args.pairs {
        for case in args.cases() {
            let mut order = [0, 1];
            // Whoever is first gets the machine as the run before has left it.
            order.rotate_left((pair % 2) as usize);
            for (name, words) in order.map(|number| &contenders[number]) {
                let run = args.measure(&poseidon, words, &case, pair);
                let run = run.with_context(|| format!("pair {pair}, {name}, {case}"))?;
                println!(
                    "pair {pair:>2}  {case}  {name:<8} {:.3} s",
                    run.measurement.seconds.median
                );
                csv += &args.line(&run, name, &case, pair);
                runs.push((*name, case.clone(), pair, run));
            }
        }
        record::write(&folder, "raw.csv", &csv)?;
        record::write(&folder, "summary.md", &args.summary(&runs, pair))?;
    }
    println!("\n{}\nrecorded in {}", args.summary(&runs, args.pairs), folder.display());
    Ok(())
}

/// One point of the grid.
#[derive(Clone, Debug, PartialEq)]
struct Case {
    nodes: u16,
    size: Size,
    loss: String,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "P={}, {}, {} lost", self.nodes, self.size, self.loss)
    }
}

/// What rank 0 reported, and what the switch did.
struct Run {
    measurement: Measurement,
    packets: Packets,
}

/// As the switch counts them at the end of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Packets {
    carried: u64,
    lost: u64,
    overflowed: u64,
    late: u64,
}

type Runs = [(&'static str, Case, u64, Run)];

impl Args {
    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &nodes in &self.nodes {
            for &size in &self.sizes {
                cases.extend(self.loss.iter().map(|loss| Case { nodes, size, loss: loss.clone() }));
            }
        }
        cases
    }

    fn measure(&self, poseidon: &str, words: &[&str], case: &Case, seed: u64) -> Result<Run> {
        let (nodes, seed) = (case.nodes.to_string(), seed.to_string());
        // The lab sees its nodes to their end when it is asked to end.
        let mut lab = command(&["timeout", LIMIT, poseidon, "lab", "-n", &nodes, "--seed", &seed]);
        lab.args(["--rate", &self.rate, "--delay", &self.delay, "--queue", &self.queue]);
        lab.args(["--loss", &case.loss, "--"]).args(words);
        lab.args(["--bytes", &case.size.0.to_string(), "--iters", &self.iters.to_string()]);
        let output = lab.output().context("starting poseidon lab")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "poseidon lab: {}: {}", output.status, said.trim());
        let measurement = Measurement::find(&String::from_utf8_lossy(&output.stdout))?;
        Ok(Run { measurement, packets: packets(&said)? })
    }

    fn line(&self, run: &Run, name: &str, case: &Case, pair: u64) -> String {
        let (m, packets) = (&run.measurement, &run.packets);
        format!(
            "{pair},{name},{},{},{},{},{},{},{},{:.6},{:.6},{:.6},{:.6},{},{},{},{}\n",
            case.nodes,
            m.bytes,
            case.loss,
            self.delay,
            self.rate,
            self.queue,
            m.iters,
            m.seconds.median,
            m.seconds.p10,
            m.seconds.p90,
            m.cpu_seconds_per_iter,
            packets.carried,
            packets.lost,
            packets.overflowed,
            packets.late
        )
    }

    fn summary(&self, runs: &Runs, pairs: u64) -> String {
        let mut text = format!(
            "# Weather\n\nSums of one buffer over links of {} with {} one way, port queues of {} and packets lost by \
             chance: medians of {pairs} run(s) of {} iterations. Runs of poseidon and Gloo alternate. Gloo / poseidon is how \
             many times as long Gloo takes: the median over pairs, in brackets the interval that has it with 95% confidence. Late are the packets that \
             the switch sent on more than 1 ms after their time, because this machine was busy.\n\n\
             | P | size | lost | poseidon, s | Gloo, s | Gloo / poseidon | queue full, ours / Gloo's | late, ours / Gloo's | \
             not slower than Gloo |\n| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n",
            self.rate, self.delay, self.queue, self.iters
        );
        for case in self.cases() {
            let of = |name: &str, value: &dyn Fn(&Run) -> f64| -> Vec<f64> {
                let runs = runs.iter().filter(|(who, of, ..)| *who == name && *of == case);
                runs.map(|(.., run)| value(run)).collect()
            };
            let middle = |name: &str, value: &dyn Fn(&Run) -> f64| median(of(name, value));
            let seconds = |run: &Run| run.measurement.seconds.median;
            let share = |count: fn(&Packets) -> u64| {
                let share = move |run: &Run| {
                    100.0 * count(&run.packets) as f64 / run.packets.carried.max(1) as f64
                };
                let of = |name| middle(name, &share).unwrap_or(f64::NAN);
                format!("{:.2}% / {:.2}%", of("poseidon"), of("gloo"))
            };
            let (ours, gloo) = (of("poseidon", &seconds), of("gloo", &seconds));
            let ratios = ours.iter().zip(&gloo).map(|(ours, gloo)| gloo / ours).collect();
            let verdict = verdict(&case, ratios);
            text += &format!(
                "| {} | {} | {} | {:.3} | {:.3} | {} | {} | {} | {} |\n",
                case.nodes,
                case.size,
                case.loss,
                median(ours).unwrap_or(f64::NAN),
                median(gloo).unwrap_or(f64::NAN),
                verdict.measured,
                share(|packets| packets.overflowed),
                share(|packets| packets.late),
                verdict.word()
            );
        }
        text
    }
}

/// Whether ours is slower beyond what the interval leaves open.
fn verdict(case: &Case, ratios: Vec<f64>) -> Verdict {
    let target = format!("{case}: not slower than Gloo");
    let (measured, met) = match Ratio::of(ratios) {
        Some(ratio) if ratio.confidence >= WANTED => {
            (format!("{ratio:.3}"), Some(ratio.verdict() != Slower))
        }
        Some(ratio) => (format!("{:.3}", ratio.median), None),
        None => ("-".to_owned(), None),
    };
    Verdict { target, measured, met }
}

/// Reads the last line of `poseidon lab` about its switch.
fn packets(said: &str) -> Result<Packets> {
    let line = said.lines().rev().find_map(|line| line.split_once("the switch carried "));
    let (_, line) = line.with_context(|| format!("no word about the switch: {}", said.trim()))?;
    let numbers: Vec<u64> =
        line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    let [carried, lost, overflowed, _corrupted, late, _limit] = numbers[..] else {
        anyhow::bail!("expected six numbers about the switch, got `{line}`");
    };
    Ok(Packets { carried, lost, overflowed, late })
}

#[cfg(test)]
mod tests {
    use super::super::contender;
    use super::super::summary::tests::run;
    use super::*;
    use clap::Parser;

    type Line = crate::bench::Line<Args>;

    fn runs(case: &Case, ours: &[f64], gloo: &[f64]) -> Vec<(&'static str, Case, u64, Run)> {
        let of = |name: &'static str, ms: &[f64]| {
            let one = |(pair, ms): (u64, &f64)| {
                let workers = contender::Case { workers: 2, size: case.size };
                let measurement = run(1, Contender::PoseidonTcp, workers, *ms).result.unwrap();
                let packets = Packets { carried: 1000, lost: 10, overflowed: 5, late: 1 };
                (name, case.clone(), pair, Run { measurement, packets })
            };
            (1..).zip(ms).map(one).collect::<Vec<_>>()
        };
        let mut runs = of("poseidon", ours);
        runs.extend(of("gloo", gloo));
        runs
    }

    #[test]
    fn slower_is_what_the_whole_interval_says() {
        let args =
            Line::parse_from(["weather", "--nodes", "2", "--sizes", "1MB", "--loss", "1%"]).args;
        let case = &args.cases()[0];
        let gloo = [100.0; 10];
        let mut ours = [110.0; 10];
        let text = args.summary(&runs(case, &ours, &gloo), 10);
        assert!(text.contains("| 0.909 (0.909 to 0.909) |"), "{text}");
        assert!(text.contains("| **missed** |"), "{text}");
        assert!(text.contains("| 0.50% / 0.50% | 0.10% / 0.10% |"), "{text}");
        // Two of ten may be anything.
        ours[..2].fill(90.0);
        let text = args.summary(&runs(case, &ours, &gloo), 10);
        assert!(text.contains("| 0.909 (0.909 to 1.111) |"), "{text}");
        assert!(text.contains("| met |"), "{text}");
    }

    #[test]
    fn what_the_switch_says_is_read() {
        let said = "[0] listening\n INFO the switch carried 503 frames and lost 4; 3 found their queue \
            full, 0 were damaged, 2 came more than 1 ms late\n";
        let read = packets(said).unwrap();
        assert_eq!(read, Packets { carried: 503, lost: 4, overflowed: 3, late: 2 });
        assert!(packets("nothing").unwrap_err().to_string().contains("no word"));
    }

    #[test]
    fn a_line_of_the_record_has_a_value_for_every_column() {
        let args = Line::parse_from(["weather"]).args;
        let case = &args.cases()[0];
        let runs = runs(case, &[1.5], &[]);
        let line = args.line(&runs[0].3, "poseidon", case, 1);
        assert_eq!(line.split(',').count(), CSV_HEADER.split(',').count());
        assert!(line.starts_with("1,poseidon,2,1048576,0%,5ms,200mbit,2mb,1,0.001500,"), "{line}");
    }
}
