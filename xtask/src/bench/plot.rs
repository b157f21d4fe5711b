//! The figure: seconds against bytes, one panel per number of workers.

use super::contender::{Case, Contender};
use super::size::Size;
use super::summary::Grid;
use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::Path;

const PANEL: (u32, u32) = (460, 420);

/// Draws the grid as SVG.
pub(crate) fn write(grid: &Grid, path: &Path) -> Result<()> {
    let mut workers: Vec<_> = grid.cases().iter().map(|case| case.workers).collect();
    workers.dedup();
    let ms: Vec<_> = points(grid).map(|(_, _, ms)| ms).collect();
    let sizes: Vec<_> = points(grid).map(|(_, case, _)| case.size.0 as f64).collect();
    if ms.is_empty() {
        return Ok(());
    }
    // Room above the lines for the legend.
    let axes = Axes { bytes: range(&sizes, 1.6, 1.6), ms: range(&ms, 1.6, 12.0) };

    let width = PANEL.0 * u32::try_from(workers.len())?;
    let area = SVGBackend::new(path, (width, PANEL.1)).into_drawing_area();
    // plotters' errors borrow the backend, which cannot leave this function.
    let drawing = |error: &dyn std::fmt::Display| anyhow!("{}: {error}", path.display());
    area.fill(&WHITE).map_err(|error| drawing(&error))?;
    for (panel, workers) in area.split_evenly((1, workers.len())).iter().zip(workers) {
        draw(grid, workers, &axes, panel).map_err(|error| drawing(&error))?;
    }
    area.present().map_err(|error| drawing(&error))
}

struct Axes {
    bytes: (f64, f64),
    ms: (f64, f64),
}

type Panel<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawError = DrawingAreaErrorKind<std::io::Error>;

fn draw(grid: &Grid, workers: usize, axes: &Axes, panel: &Panel<'_>) -> Result<(), DrawError> {
    let mut chart = ChartBuilder::on(panel)
        .caption(format!("P = {workers}"), ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(62)
        .build_cartesian_2d(
            (axes.bytes.0..axes.bytes.1).log_scale().base(4.0),
            (axes.ms.0..axes.ms.1).log_scale(),
        )?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_desc("buffer")
        .y_desc("milliseconds per exchange")
        .x_labels(8)
        .x_label_formatter(&|bytes| Size(*bytes as u64).to_string())
        .y_label_formatter(&|ms| format!("{ms}"))
        .label_style(("sans-serif", 12))
        .axis_desc_style(("sans-serif", 13))
        .draw()?;
    for contender in grid.contenders() {
        let style = colour(contender).stroke_width(if contender.is_poseidon() { 3 } else { 2 });
        let line: Vec<_> = points(grid)
            .filter(|(who, case, _)| *who == contender && case.workers == workers)
            .map(|(_, case, ms)| (case.size.0 as f64, ms))
            .collect();
        let dots = line.iter().map(|point| Circle::new(*point, 3, colour(contender).filled()));
        chart.draw_series(dots)?;
        chart
            .draw_series(LineSeries::new(line, style))?
            .label(contender.name())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.2))
        .label_font(("sans-serif", 13))
        .legend_area_size(26)
        .draw()
}

fn points(grid: &Grid) -> impl Iterator<Item = (Contender, Case, f64)> {
    let cases = grid.cases().into_iter();
    cases.flat_map(move |case| {
        let seconds = grid.contenders().into_iter().filter_map(move |who| {
            grid.seconds(who, case).map(|seconds| (who, case, seconds * 1e3))
        });
        seconds.collect::<Vec<_>>()
    })
}

fn range(values: &[f64], below: f64, above: f64) -> (f64, f64) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    (least / below, most * above)
}

/// Colours that stay apart for colour-blind readers; ours are the strong ones.
fn colour(contender: Contender) -> RGBColor {
    match contender {
        Contender::PoseidonTcp => RGBColor(0, 90, 181),
        Contender::PoseidonLocal => RGBColor(0, 158, 115),
        Contender::Gloo => RGBColor(213, 94, 0),
        Contender::OpenmpiTcp => RGBColor(204, 121, 167),
        Contender::OpenmpiShm => RGBColor(120, 120, 120),
    }
}

#[cfg(test)]
mod tests {
    use super::super::summary::tests::run;
    use super::*;

    #[test]
    fn the_figure_names_every_contender_panel_and_axis() {
        let mut grid = Grid::default();
        for workers in [2, 8] {
            for size in [Size::kb(64), Size::mb(1)] {
                let case = Case { workers, size };
                grid.runs.push(run(1, Contender::PoseidonTcp, case, 1.0));
                grid.runs.push(run(1, Contender::Gloo, case, 3.0));
            }
        }
        let path = std::env::temp_dir().join(format!("plot-{}.svg", std::process::id()));
        write(&grid, &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        for text in ["P = 2", "P = 8", "poseidon-tcp", "gloo", "64KB", "milliseconds", "buffer"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }
}
