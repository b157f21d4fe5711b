//! A figure as a drawing that needs nothing around it: panels side by side, one legend below.
//!
//! Lines with dots are simulated, diamonds are the paper's, squares were measured.
//!
//! There is no background, and colours are neither light nor dark, so that a drawing fits a light page as
//! well as a dark one. Lines that lie on each other are told apart by their widths: the first is the widest.

use super::figure::{Figure, Ideal, Kind, Panel, Point, Series};
use crate::report::svg::{At, Axis, Escaped};
use std::fmt::Write;

pub(super) fn draw(figure: &Figure) -> String {
    let names = names(figure);
    let legend = Legend::new(figure, &names);
    let width = SIDE + figure.panels.len() as f64 * PANEL.0;
    let rows = legend.rows(width);
    let height = TOP + PANEL.1 + 14.0 + rows.len() as f64 * LINE + 10.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {h}\" width=\"{w}\" height=\"{h}\" \
         role=\"img\" font-family=\"system-ui, 'Segoe UI', Roboto, Arial, sans-serif\" font-size=\"12\" \
         fill=\"{INK}\">\n<title>{}</title>\n<desc>{}</desc>\n",
        Escaped(figure.title),
        Escaped(figure.about),
        w = At(width),
        h = At(height),
    );
    let every = figure.panels.iter().collect::<Vec<_>>();
    for (i, panel) in figure.panels.iter().enumerate() {
        let scale = if figure.same_scale { &every[..] } else { &every[i..=i] };
        let plot = Plot {
            x: x_axis(panel),
            y: y_axis(scale),
            left: SIDE + i as f64 * PANEL.0 + 50.0,
            top: TOP + 26.0,
        };
        plot.draw(&mut svg, panel, &names);
    }
    for (i, row) in rows.iter().enumerate() {
        let mut x = SIDE + 50.0;
        let y = TOP + PANEL.1 + 14.0 + i as f64 * LINE;
        for (swatch, text) in row {
            swatch.draw(&mut svg, x, y);
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{}\" dy=\".33em\">{}</text>",
                At(x + 28.0),
                At(y),
                Escaped(text)
            );
            x += entry_width(text);
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// A panel's axes and where they are on the sheet.
struct Plot {
    x: Axis,
    y: Axis,
    left: f64,
    top: f64,
}

impl Plot {
    fn draw(&self, svg: &mut String, panel: &Panel, names: &[&str]) {
        self.frame(svg, panel);
        match panel.kind {
            Kind::Bars => self.bars(svg, panel, names),
            Kind::Lines => {}
            Kind::LinesToIdeal(ideal) => {
                let last = xs(panel).last().copied().unwrap_or(1.0);
                let [from, to] = match ideal {
                    Ideal::Linear => [(0.0, 0.0), (last, last)],
                    Ideal::Level(y) => [(0.0, y), (last, y)],
                };
                let _ = writeln!(
                    svg,
                    "<path d=\"M{} {}L{} {}\" stroke=\"{GREY}\" stroke-width=\"1.5\" stroke-dasharray=\"5 4\"/>",
                    At(self.at_x(from.0)),
                    At(self.at_y(from.1)),
                    At(self.at_x(to.0)),
                    At(self.at_y(to.1)),
                );
            }
        }
        if panel.kind != Kind::Bars {
            for (position, series) in panel.series.iter().enumerate() {
                let above = panel.series.len() - 1 - position;
                self.line(svg, series, colour(names, series.name), above);
            }
        }
        // Above all lines: they are what the lines are to be compared with.
        for series in &panel.series {
            let colour = colour(names, series.name);
            for point in &series.points {
                let paper = point.paper.map(|value| (value, Swatch::Paper(colour)));
                let measured = point.measured.map(|value| (value, Swatch::Measured(colour)));
                for (value, swatch) in paper.into_iter().chain(measured) {
                    swatch.mark(svg, self.middle(panel, point.x), self.at_y(value));
                }
            }
        }
    }

    fn frame(&self, svg: &mut String, panel: &Panel) {
        let (left, top, right, bottom) =
            (self.left, self.top, self.left + PLOT.0, self.top + PLOT.1);
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" font-size=\"13\" font-weight=\"600\">{}</text>",
            At(left),
            At(top - 12.0),
            Escaped(&panel.title)
        );
        for (value, label) in y_labels(&self.y) {
            let y = At(self.at_y(value));
            let _ = writeln!(
                svg,
                "<path d=\"M{} {y}H{}\" stroke=\"{GREY}\" stroke-opacity=\".3\"/><text x=\"{}\" y=\"{y}\" dy=\".33em\" \
                 text-anchor=\"end\" fill=\"{MUTED}\">{label}</text>",
                At(left),
                At(right),
                At(left - 7.0),
            );
        }
        let _ = writeln!(
            svg,
            "<path d=\"M{} {}H{}\" stroke=\"{MUTED}\"/>",
            At(left),
            At(bottom),
            At(right)
        );
        let mut written = f64::INFINITY;
        // From the right, so that 32 is written and 1 and 2 beside each other are not.
        for value in xs(panel).into_iter().rev() {
            let x = self.middle(panel, value);
            let _ = write!(svg, "<path d=\"M{} {}v4\" stroke=\"{MUTED}\"/>", At(x), At(bottom));
            if written - x > 18.0 {
                written = x;
                let _ = writeln!(
                    svg,
                    "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"{MUTED}\">{value}</text>",
                    At(x),
                    At(bottom + 17.0),
                );
            }
        }
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"{MUTED}\">{}</text>\
             <text transform=\"translate({} {}) rotate(-90)\" text-anchor=\"middle\" fill=\"{MUTED}\">{}</text>",
            At((left + right) / 2.0),
            At(bottom + 34.0),
            panel.x.label,
            At(left - 42.0),
            At((top + bottom) / 2.0),
            panel.y.label,
        );
    }

    /// `above`: how many lines are drawn after this one, which may hide it. What was only measured is a thin
    /// line from square to square.
    fn line(&self, svg: &mut String, series: &Series, colour: &str, above: usize) {
        let at = |value: fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
            let place = |point: &Point| Some((self.at_x(point.x), self.at_y(value(point)?)));
            series.points.iter().filter_map(place).collect()
        };
        let simulated = at(|point| point.simulated);
        let (points, width) = match simulated.is_empty() {
            true => (at(|point| point.measured), 1.0),
            false => (simulated.clone(), 2.0 + WIDER * above as f64),
        };
        let mut path = String::new();
        for (i, (x, y)) in points.iter().enumerate() {
            let _ = write!(path, "{}{} {}", if i == 0 { 'M' } else { 'L' }, At(*x), At(*y));
        }
        if points.len() > 1 {
            let _ = writeln!(
                svg,
                "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{}\" \
                 stroke-linejoin=\"round\"/>",
                At(width)
            );
        }
        for (x, y) in simulated {
            let _ = writeln!(
                svg,
                "<circle cx=\"{}\" cy=\"{}\" r=\"{}\" fill=\"{colour}\"/>",
                At(x),
                At(y),
                At(DOT + WIDER / 2.0 * above as f64)
            );
        }
    }

    fn bars(&self, svg: &mut String, panel: &Panel, names: &[&str]) {
        let groups = xs(panel);
        let room = PLOT.0 / groups.len() as f64;
        let width = (room * 0.8 / panel.series.len() as f64).min(46.0);
        let floor = self.top + PLOT.1;
        for (i, series) in panel.series.iter().enumerate() {
            for point in &series.points {
                let Some(value) = point.simulated else { continue };
                let aside = (i as f64 - panel.series.len() as f64 / 2.0) * width;
                let (x, y) = (self.middle(panel, point.x) + aside, self.at_y(value));
                // Pale, so that what the paper says is seen on it.
                let colour = colour(names, series.name);
                let _ = writeln!(
                    svg,
                    "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{colour}\" \
                     fill-opacity=\".45\" stroke=\"{colour}\"/>\
                     <text x=\"{}\" y=\"{}\" text-anchor=\"middle\" font-size=\"10.5\">{}</text>",
                    At(x + 1.5),
                    At(y),
                    At(width - 3.0),
                    At(floor - y),
                    At(x + width / 2.0),
                    At(y - 4.0),
                    At((value * 10.0).round() / 10.0),
                );
            }
        }
    }

    /// The middle of what is at `x`: of a group of bars, or the place itself.
    fn middle(&self, panel: &Panel, x: f64) -> f64 {
        if panel.kind != Kind::Bars {
            return self.at_x(x);
        }
        let groups = xs(panel);
        let at = groups.iter().position(|group| *group == x).unwrap_or(0);
        self.left + PLOT.0 * (at as f64 + 0.5) / groups.len() as f64
    }

    fn at_x(&self, value: f64) -> f64 {
        self.left + self.x.share(value) * PLOT.0
    }

    fn at_y(&self, value: f64) -> f64 {
        self.top + (1.0 - self.y.share(value)) * PLOT.1
    }
}

/// What stands for something, on a plot and in the legend.
#[derive(Clone, Copy)]
enum Swatch<'a> {
    Series(&'a str),
    Ideal,
    Simulated(&'a str),
    Paper(&'a str),
    Measured(&'a str),
}

impl Swatch<'_> {
    fn draw(self, svg: &mut String, x: f64, y: f64) {
        match self {
            Self::Series(colour) => {
                let (x, y) = (At(x), At(y - 5.0));
                let _ = write!(
                    svg,
                    "<rect x=\"{x}\" y=\"{y}\" width=\"20\" height=\"10\" rx=\"2\" fill=\"{colour}\"/>"
                );
            }
            Self::Ideal => {
                let (x, y) = (At(x), At(y));
                let _ = write!(
                    svg,
                    "<path d=\"M{x} {y}h20\" stroke=\"{GREY}\" stroke-width=\"1.5\" stroke-dasharray=\"5 4\"/>"
                );
            }
            Self::Simulated(colour) => {
                let _ = write!(
                    svg,
                    "<path d=\"M{} {}h20\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                    At(x),
                    At(y)
                );
                self.mark(svg, x + 10.0, y);
            }
            Self::Paper(_) | Self::Measured(_) => self.mark(svg, x + 10.0, y),
        }
    }

    fn mark(self, svg: &mut String, x: f64, y: f64) {
        let (x0, y0) = (At(x), At(y));
        let _ = match self {
            Self::Series(_) | Self::Ideal => Ok(()),
            Self::Simulated(colour) => {
                writeln!(svg, "<circle cx=\"{x0}\" cy=\"{y0}\" r=\"{DOT}\" fill=\"{colour}\"/>")
            }
            Self::Paper(colour) => writeln!(
                svg,
                "<path d=\"M{x0} {}l6 6l-6 6l-6 -6z\" fill=\"none\" stroke=\"{colour}\" \
                 stroke-width=\"2\"/>",
                At(y - 6.0)
            ),
            Self::Measured(colour) => writeln!(
                svg,
                "<rect x=\"{}\" y=\"{}\" width=\"9\" height=\"9\" fill=\"none\" stroke=\"{colour}\" \
                 stroke-width=\"2\"/>",
                At(x - 4.5),
                At(y - 4.5)
            ),
        };
    }
}

struct Legend<'a>(Vec<(Swatch<'a>, &'a str)>);

impl<'a> Legend<'a> {
    fn new(figure: &'a Figure, names: &[&'a str]) -> Self {
        let series = |name: &'a str| (Swatch::Series(colour(names, name)), name);
        let mut entries: Vec<_> = names.iter().copied().map(series).collect();
        let bars = figure.panels.iter().all(|panel| panel.kind == Kind::Bars);
        if figure.points().any(|point| point.simulated.is_some()) && !bars {
            entries.push((Swatch::Simulated(MUTED), "simulated"));
        }
        if figure.points().any(|point| point.paper.is_some()) {
            entries.push((Swatch::Paper(MUTED), "the paper"));
        }
        if figure.points().any(|point| point.measured.is_some()) {
            entries.push((Swatch::Measured(MUTED), "measured"));
        }
        if figure.panels.iter().any(|panel| matches!(panel.kind, Kind::LinesToIdeal(_))) {
            entries.push((Swatch::Ideal, "nothing to communicate"));
        }
        Self(entries)
    }

    /// As many entries in a row as fit.
    fn rows(&self, width: f64) -> Vec<Vec<(Swatch<'a>, &'a str)>> {
        let mut rows = vec![Vec::new()];
        let mut used = SIDE + 50.0;
        for &(swatch, text) in &self.0 {
            if used + entry_width(text) > width && used > SIDE + 50.0 {
                rows.push(Vec::new());
                used = SIDE + 50.0;
            }
            used += entry_width(text);
            rows.last_mut().expect("there is a first row").push((swatch, text));
        }
        rows
    }
}

/// Nobody knows the reader's font: half an em and a bit for every letter.
fn entry_width(text: &str) -> f64 {
    28.0 + text.chars().count() as f64 * 6.8 + 16.0
}

/// The names of all series, in order of appearance.
fn names(figure: &Figure) -> Vec<&str> {
    let mut names = Vec::new();
    for series in figure.panels.iter().flat_map(|panel| &panel.series) {
        if !names.contains(&series.name) {
            names.push(series.name);
        }
    }
    names
}

fn colour(names: &[&str], name: &str) -> &'static str {
    let at = names.iter().position(|other| *other == name).unwrap_or(0);
    COLOURS[at % COLOURS.len()]
}

/// All places on the x axis, ascending.
fn xs(panel: &Panel) -> Vec<f64> {
    let points = panel.series.iter().flat_map(|series| &series.points);
    let mut xs: Vec<f64> = points.map(|point| point.x).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    xs
}

fn x_axis(panel: &Panel) -> Axis {
    let xs = xs(panel);
    let (first, last) = (xs.first().copied().unwrap_or(1.0), xs.last().copied().unwrap_or(1.0));
    match panel.x.log {
        true => Axis::logarithmic(first / 1.15, last * 1.1),
        false => Axis::linear(0.0, last * 1.04),
    }
}

fn y_axis(panels: &[&Panel]) -> Axis {
    let points = panels.iter().flat_map(|panel| &panel.series).flat_map(|series| &series.points);
    let ideal = panels.iter().filter_map(|panel| match panel.kind {
        Kind::LinesToIdeal(Ideal::Linear) => xs(panel).last().copied(),
        Kind::LinesToIdeal(Ideal::Level(y)) => Some(y),
        _ => None,
    });
    let values: Vec<f64> = points.flat_map(Point::values).chain(ideal).collect();
    let most = values.iter().copied().fold(0.0, f64::max);
    match panels.iter().any(|panel| panel.y.log) {
        true => {
            let least = values.iter().copied().filter(|v| *v > 0.0).fold(most, f64::min);
            Axis::logarithmic(least / 1.3, most * 1.3)
        }
        false => Axis::linear(0.0, most * 1.04).rounded(TICKS),
    }
}

/// A logarithmic axis is labelled at 1, 2 and 5, as people count money.
fn y_labels(axis: &Axis) -> Vec<(f64, String)> {
    if !axis.is_log() {
        return axis.labels(TICKS);
    }
    let all = (-3..7).flat_map(|power| [1.0, 2.0, 5.0].map(|times| times * 10f64.powi(power)));
    let within: Vec<f64> =
        all.filter(|value| axis.share(*value) > 0.0 && axis.share(*value) < 1.0).collect();
    let every = if within.len() > 9 { 3 } else { 1 };
    let decades = within
        .iter()
        .filter(|value| every == 1 || (value.log10() - value.log10().round()).abs() < 1e-9);
    decades.map(|value| (*value, At(*value).to_string())).collect()
}

const COLOURS: [&str; 7] =
    ["#e08600", "#2f86d2", "#00936b", "#a968b3", "#d05038", "#7a8591", "#4fa8e6"];
/// Greys that are read on white, and on the dark pages of browsers and of the book.
const INK: &str = "#6e7781";
const MUTED: &str = "#7a8591";
const GREY: &str = "#8b949e";
/// Of a simulated point, in pixels.
const DOT: f64 = 2.6;
/// How much wider a line is than the one that is drawn after it.
const WIDER: f64 = 2.0;
/// Space around, in pixels: at the left of all panels, and above them.
const SIDE: f64 = 10.0;
const TOP: f64 = 10.0;
/// A panel with its labels, and the plot in it.
const PANEL: (f64, f64) = (334.0, 296.0);
const PLOT: (f64, f64) = (266.0, 220.0);
/// Of the legend.
const LINE: f64 = 22.0;
const TICKS: usize = 5;
