//! `cargo xtask bench scale`: the simulator beside real runs on virtual clusters.
//!
//! `poseidon bench scale` does both; here it is run once and judged.

use super::targets::Verdict;
use super::{environment, record};
use crate::command::output_within;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A model of the zoo
    #[arg(long, default_value = "vgg19")]
    model: String,
    /// Numbers of nodes
    #[arg(long, default_value = "2,4,8")]
    nodes: String,
    /// Of a node's link
    #[arg(long, default_value = "10gbit")]
    bandwidth: String,
    /// Times as slow: computing and links
    #[arg(long, default_value = "50")]
    dilate: String,
    /// Times as small: the model and its computing
    #[arg(long, default_value = "8")]
    scale_model: String,
    /// Schemes
    #[arg(long, default_value = "ps,auto")]
    scheme: String,
    /// Steps of a run
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(3..))]
    steps: u64,
    /// Use the command as it lies in target/release, for machines that cannot build it
    #[arg(long)]
    built: bool,
    /// Where the record goes [default: bench/runs/DATE-scale]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// How far the simulator may be off: of an iteration's time, and of a node's bytes.
const ITERATION: f64 = 0.10;
const BYTES: f64 = 0.02;

const LIMIT: Duration = Duration::from_secs(3600);

/// What `poseidon bench scale --json` prints, as far as it is used here.
#[derive(Deserialize)]
struct Report {
    model: String,
    parameters: u64,
    batch: u64,
    profile: String,
    overlap: String,
    lanes: u64,
    steps: u64,
    compute_seconds: f64,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    nodes: u64,
    scheme: String,
    iteration_seconds: f64,
    predicted_iteration_seconds: f64,
    iteration_deviation: f64,
    bytes_per_node: f64,
    predicted_bytes_per_node: f64,
    bytes_deviation: f64,
    speedup: f64,
    predicted_speedup: f64,
    rebuild_fraction: f64,
    cpu_fraction: f64,
}

/// Measures, and writes the record.
pub(crate) fn run(args: &Args) -> Result<()> {
    if !args.built {
        environment::build_poseidon()?;
    }
    let poseidon = environment::poseidon();
    ensure!(poseidon.is_file(), "{} is not there", poseidon.display());
    let folder = record::create("scale", args.out.as_deref(), false)?;
    record::write(&folder, "machine.txt", &record::machine(""))?;
    record::write(&folder, "command.txt", &format!("{}\n", record::command_line()))?;
    let mut scale = Command::new(poseidon);
    scale.args(["bench", "scale", "--json", "--model", &args.model, "--nodes", &args.nodes]);
    scale.args(["--bandwidth", &args.bandwidth, "--dilate", &args.dilate]);
    scale.args(["--scale-model", &args.scale_model, "--scheme", &args.scheme]);
    scale.args(["--steps", &args.steps.to_string()]);
    let text = output_within(&mut scale, LIMIT)?;
    record::write(&folder, "raw.json", &text)?;
    let report =
        serde_json::from_str(&text).context("reading what poseidon bench scale printed")?;
    let summary = args.summary(&report);
    record::write(&folder, "summary.md", &summary)?;
    println!("{summary}\nrecorded in {}", folder.display());
    Ok(())
}

impl Args {
    fn summary(&self, report: &Report) -> String {
        let mut text = format!(
            "# The simulator beside real runs\n\n\
             {} at 1/{} of its size ({:.1}M parameters), batch {}, computing as on {}, {} lane(s), overlap {}; links of {} \
             and computing both {} times as slow, times told without that. Every node is a process in a network namespace: \
             bytes, links and sums are real, computing is slept through ({:.4} s a step), and rebuilding gradients from \
             factors is real, with the time it took told to the simulator. Medians over {} steps of all nodes.\n\n\
             | nodes | scheme | iteration | predicted | off | sent per node | predicted | off | speed-up | predicted | \
             rebuilding | CPU |\n\
             | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
            report.model,
            self.scale_model,
            report.parameters as f64 / 1e6,
            report.batch,
            report.profile,
            report.lanes,
            report.overlap,
            self.bandwidth,
            self.dilate,
            report.compute_seconds,
            report.steps - 2
        );
        for row in &report.rows {
            text += &format!(
                "| {} | {} | {:.4} s | {:.4} s | {:+.1}% | {:.2} MB | {:.2} MB | {:+.2}% | {:.2}x | {:.2}x | {:.0}% | {:.0}% |\n",
                row.nodes,
                row.scheme,
                row.iteration_seconds,
                row.predicted_iteration_seconds,
                100.0 * row.iteration_deviation,
                row.bytes_per_node / 1e6,
                row.predicted_bytes_per_node / 1e6,
                100.0 * row.bytes_deviation,
                row.speedup,
                row.predicted_speedup,
                100.0 * row.rebuild_fraction,
                100.0 * row.cpu_fraction
            );
        }
        text += "\nThe byte deviation is that of the node for which it is largest; CPU is the share of this machine's \
                 processors that all nodes used.\n\n| target | measured | verdict |\n| --- | --- | --- |\n";
        for verdict in verdicts(report) {
            text +=
                &format!("| {} | {} | {} |\n", verdict.target, verdict.measured, verdict.word());
        }
        text
    }
}

fn verdicts(report: &Report) -> Vec<Verdict> {
    let verdict = |row: &Row, what: &str, off: f64, most: f64| Verdict {
        target: format!("P={}, {}: {what} within {:.0}%", row.nodes, row.scheme, 100.0 * most),
        measured: format!("{:+.2}%", 100.0 * off),
        met: Some(off.abs() <= most),
    };
    let of = |row: &Row| {
        let time = verdict(row, "iteration time", row.iteration_deviation, ITERATION);
        [time, verdict(row, "bytes per node", row.bytes_deviation, BYTES)]
    };
    report.rows.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    type Line = crate::bench::Line<Args>;

    #[test]
    fn the_summary_judges_every_row() {
        let text = r#"{"model":"vgg19","parameters":17958000,"batch":32,"profile":"titan-x","overlap":"full","lanes":1,
            "steps":10,"compute_seconds":0.1,"dilate":50.0,"rows":[{"nodes":8,"scheme":"ps","iteration_seconds":0.12,
            "predicted_iteration_seconds":0.1,"iteration_deviation":0.2,"bytes_per_node":1e6,
            "predicted_bytes_per_node":1e6,"bytes_deviation":-0.001,"speedup":6.0,"predicted_speedup":7.0,
            "rebuild_fraction":0.0,"cpu_fraction":0.3}]}"#;
        let text = Line::parse_from(["scale"]).args.summary(&serde_json::from_str(text).unwrap());
        assert!(text.contains("iteration time within 10% | +20.00% | **missed** |"), "{text}");
        assert!(text.contains("bytes per node within 2% | -0.10% | met |"), "{text}");
        assert!(text.contains("over 8 steps"), "{text}");
    }
}
