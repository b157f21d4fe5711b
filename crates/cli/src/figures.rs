//! `poseidon figures`: the papers' figures again, by simulation, beside what the papers say.

mod accuracy;
mod chart;
mod figure;
mod index;
mod phub;
mod poseidon_2015;
mod poseidon_2017;

use crate::plan::simulate_all;
use crate::report::write_whole;
use crate::terminal::{printable, say};
use anyhow::Context;
use figure::{Figure, Record};
use indicatif::{ProgressBar, ProgressStyle};
use poseidon_sim::Setup;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

/// Regenerate the figures of the papers by simulation.
///
/// For each figure a drawing (SVG) and its numbers (CSV); for all of them summary.json, with what the
/// paper says, what was simulated and what was measured, and index.html to look at. The same program
/// writes the same files.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = examples())]
pub(crate) struct Args {
    /// The folder to write to; it is made if need be.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Only these figures.
    #[arg(long, value_name = "FIGURE,…", value_delimiter = ',', value_parser = known())]
    only: Vec<String>,
}

/// Simulates and writes.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    let wanted = |id: &str| args.only.is_empty() || args.only.iter().any(|only| only == id);
    let mut figures = Vec::new();
    for (_, make) in FIGURES.iter().filter(|(id, _)| wanted(id)) {
        figures.push(make()?);
    }
    simulate(&mut figures)?;

    let mut records: Vec<Record<'_>> = Vec::new();
    for figure in &figures {
        write_whole(&args.out.join(format!("{}.csv", figure.id)), figure.csv().as_bytes())?;
        write_whole(&args.out.join(format!("{}.svg", figure.id)), chart::draw(figure).as_bytes())?;
        records.extend(figure.records());
    }
    let mut summary = serde_json::to_vec_pretty(&records)?;
    summary.push(b'\n');
    write_whole(&args.out.join("summary.json"), &summary)?;
    let index = write_whole(&args.out.join("index.html"), index::page(&figures).as_bytes())?;
    say(&format!("{} figures: {}\n", figures.len(), printable(&index.display().to_string())))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs what the figures are made of, all of it at once so that no core waits for a figure's end.
fn simulate(figures: &mut [Figure]) -> anyhow::Result<()> {
    let setups: Vec<Setup> =
        figures.iter().flat_map(Figure::points).filter_map(|point| point.setup()).collect();
    let bar = ProgressBar::new(setups.len() as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} simulations, {eta} left")?);
    let outcomes = simulate_all(&setups, || bar.inc(1))?;
    bar.finish_and_clear();
    let points = figures.iter_mut().flat_map(Figure::points_mut);
    for (point, outcome) in points.filter(|point| point.is_simulated()).zip(&outcomes) {
        point.conclude(outcome);
    }
    Ok(())
}

type Make = fn() -> anyhow::Result<Figure>;

/// In the order in which they are shown.
const FIGURES: [(&str, Make); 14] = [
    ("fig4", poseidon_2017::caffe),
    ("fig5", poseidon_2017::tensorflow),
    ("fig6", poseidon_2017::stalls),
    ("fig7", poseidon_2017::residual),
    ("fig8", poseidon_2017::bandwidth),
    ("fig9", poseidon_2017::traffic),
    ("fig10", accuracy::by_iteration),
    ("table1", poseidon_2017::costs),
    ("2015-fig5", poseidon_2015::parameters),
    ("2015-fig7", poseidon_2015::ablation),
    ("2015-table5", poseidon_2015::convergence),
    ("phub-fig3", phub::box_of_eight),
    ("phub-120", phub::workers_of_a_box),
    ("phub", phub::throughput),
];

fn known() -> clap::builder::PossibleValuesParser {
    FIGURES.map(|(id, _)| id).into()
}

fn examples() -> String {
    let ids = FIGURES.map(|(id, _)| id).join(", ");
    format!("Figures: {ids}\n\n{EXAMPLES}")
}

const EXAMPLES: &str = "\
Examples:
  All of them, in a minute or so:
    poseidon figures --out figures

  The bandwidth sweep alone:
    poseidon figures --out figures --only fig8";
