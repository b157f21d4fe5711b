//! Lines over steps or epochs, and bars side by side, as SVG.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

pub(crate) const BLUE: RGBColor = RGBColor(0, 90, 181);
pub(crate) const GREEN: RGBColor = RGBColor(0, 158, 115);
pub(crate) const ORANGE: RGBColor = RGBColor(213, 94, 0);
pub(crate) const GREY: RGBColor = RGBColor(120, 120, 120);

/// One chart of lines.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x: String,
    pub(crate) y: String,
    /// Whether the y axis is; values must then be positive.
    pub(crate) logarithmic: bool,
    pub(crate) series: Vec<Series>,
}

/// One line.
pub(crate) struct Series {
    pub(crate) label: String,
    pub(crate) colour: RGBColor,
    pub(crate) points: Vec<(f64, f64)>,
}

/// One chart of bars.
pub(crate) struct Bars {
    pub(crate) title: String,
    pub(crate) y: String,
    pub(crate) bars: Vec<Bar>,
}

/// One bar.
pub(crate) struct Bar {
    pub(crate) label: String,
    pub(crate) colour: RGBColor,
    pub(crate) value: f64,
}

/// Draws charts of lines beside each other.
pub(crate) fn lines(path: &Path, panels: &[Panel]) -> Result<()> {
    side_by_side(path, panels, draw_lines)
}

/// Draws charts of bars beside each other.
pub(crate) fn bars(path: &Path, panels: &[Bars]) -> Result<()> {
    side_by_side(path, panels, draw_bars)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawError = DrawingAreaErrorKind<std::io::Error>;

const SIZE: (u32, u32) = (480, 420);

fn side_by_side<T>(
    path: &Path,
    panels: &[T],
    draw: fn(&T, &Area<'_>) -> Result<(), DrawError>,
) -> Result<()> {
    if panels.is_empty() {
        return Ok(());
    }
    let width = SIZE.0 * u32::try_from(panels.len())?;
    let area = SVGBackend::new(path, (width, SIZE.1)).into_drawing_area();
    // plotters' errors borrow the backend, which cannot leave this function.
    let drawing = |error: &dyn std::fmt::Display| anyhow!("{}: {error}", path.display());
    area.fill(&WHITE).map_err(|error| drawing(&error))?;
    for (part, panel) in area.split_evenly((1, panels.len())).iter().zip(panels) {
        draw(panel, part).map_err(|error| drawing(&error))?;
    }
    area.present().map_err(|error| drawing(&error))
}

fn draw_lines(panel: &Panel, area: &Area<'_>) -> Result<(), DrawError> {
    let height = |y: f64| if panel.logarithmic { y.log10() } else { y };
    let points = || panel.series.iter().flat_map(|series| &series.points);
    let (left, right) = range(points().map(|point| point.0));
    let (low, high) = range(points().map(|point| height(point.1)));
    let room = (high - low) * 0.08;
    // The legend goes where the lines are not.
    let ends =
        panel.series.first().and_then(|series| series.points.first().zip(series.points.last()));
    let corner = match ends {
        Some((first, last)) if first.1 > last.1 => SeriesLabelPosition::UpperRight,
        _ => SeriesLabelPosition::LowerRight,
    };
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(66)
        .build_cartesian_2d(left..right, low - room..high + room)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_desc(&panel.x)
        .y_desc(&panel.y)
        .x_labels(8)
        .y_labels(8)
        // Steps and epochs are whole.
        .x_label_formatter(&|x| if x.fract() == 0.0 { format!("{x:.0}") } else { String::new() })
        .y_label_formatter(&|y| match panel.logarithmic {
            true => format!("{:.0e}", 10f64.powf(*y)),
            false => number(*y),
        })
        .label_style(("sans-serif", 12))
        .axis_desc_style(("sans-serif", 13))
        .draw()?;
    for series in &panel.series {
        let style = series.colour.stroke_width(2);
        let line: Vec<_> = series.points.iter().map(|&(x, y)| (x, height(y))).collect();
        // Dots where there are few enough to tell them apart.
        if line.len() <= 50 {
            let dots = line.iter().map(|point| Circle::new(*point, 3, series.colour.filled()));
            chart.draw_series(dots)?;
        }
        chart
            .draw_series(LineSeries::new(line, style))?
            .label(&series.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(corner)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.2))
        .label_font(("sans-serif", 13))
        .legend_area_size(26)
        .draw()
}

fn draw_bars(panel: &Bars, area: &Area<'_>) -> Result<(), DrawError> {
    let most = panel.bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    let count = panel.bars.len() as f64;
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(66)
        .build_cartesian_2d(0.0..count.max(1.0), 0.0..most * 1.12)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .y_desc(&panel.y)
        .y_labels(8)
        .y_label_formatter(&|y| number(*y))
        .label_style(("sans-serif", 12))
        .axis_desc_style(("sans-serif", 13))
        .draw()?;
    let rectangles = panel.bars.iter().zip(0..).map(|(bar, at)| {
        let left = f64::from(at);
        Rectangle::new([(left + 0.15, 0.0), (left + 0.85, bar.value)], bar.colour.filled())
    });
    chart.draw_series(rectangles)?;
    let style = ("sans-serif", 12).into_text_style(area).pos(Pos::new(HPos::Center, VPos::Center));
    let middles = || panel.bars.iter().zip(0..).map(|(bar, at)| (bar, f64::from(at) + 0.5));
    let values = middles().map(|(bar, x)| {
        EmptyElement::at((x, bar.value)) + Text::new(number(bar.value), (0, -10), style.clone())
    });
    chart.draw_series(values)?;
    let labels = middles().map(|(bar, x)| {
        EmptyElement::at((x, 0.0)) + Text::new(bar.label.clone(), (0, 14), style.clone())
    });
    chart.draw_series(labels)?;
    Ok(())
}

/// With as many digits as it takes to tell one from another.
fn number(value: f64) -> String {
    match value.abs() {
        x if x >= 10.0 => format!("{value:.0}"),
        x if x >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// From the least to the most, never empty.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let fold = |(least, most): (f64, f64), value: f64| (least.min(value), most.max(value));
    match values.fold((f64::INFINITY, f64::NEG_INFINITY), fold) {
        (least, most) if least < most => (least, most),
        (least, _) if least.is_finite() => (least - 0.5, least + 0.5),
        _ => (0.0, 1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn<T>(name: &str, panels: &[T], draw: fn(&Path, &[T]) -> Result<()>) -> String {
        let path = std::env::temp_dir().join(format!("{name}-{}.svg", std::process::id()));
        draw(&path, panels).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        svg
    }

    #[test]
    fn lines_have_a_title_axes_and_a_legend() {
        let series = |label: &str, points: &[(f64, f64)]| Series {
            label: label.to_owned(),
            colour: BLUE,
            points: points.to_vec(),
        };
        let panel = Panel {
            title: "smooth".to_owned(),
            x: "step".to_owned(),
            y: "difference".to_owned(),
            logarithmic: true,
            series: vec![
                series("ps", &[(0.0, 1e-9), (1.0, 1e-5)]),
                series("lonely", &[(1.0, 1e-7)]),
            ],
        };
        let svg = drawn("lines", &[panel], lines);
        for text in ["smooth", "step", "difference", "ps", "lonely", "1e-7"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }

    #[test]
    fn bars_have_labels_and_values() {
        let bar = |label: &str, value| Bar { label: label.to_owned(), colour: GREEN, value };
        let panel = Bars {
            title: "alexnet".to_owned(),
            y: "seconds".to_owned(),
            bars: vec![bar("auto full", 0.587), bar("ps none", 2.53)],
        };
        let svg = drawn("bars", &[panel], bars);
        for text in ["alexnet", "seconds", "auto full", "ps none", "0.587", "2.53"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }

    #[test]
    fn ranges_are_never_empty() {
        assert_eq!(range([3.0, 1.0].into_iter()), (1.0, 3.0));
        assert_eq!(range([3.0].into_iter()), (2.5, 3.5));
        assert_eq!(range(std::iter::empty()), (0.0, 1.0));
    }
}
