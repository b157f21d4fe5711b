//! Charts of rows: a name, bars, perhaps a value. Names and values are text beside the drawing, so
//! that long ones are cut off by the browser and not by us.

use super::svg::{self, At, Axis, Escaped};
use std::fmt::Write;

pub(super) struct Chart<'a> {
    pub(super) id: &'a str,
    pub(super) title: &'a str,
    pub(super) description: String,
    /// Draws a grid, with labels above.
    pub(super) axis: Option<Axis>,
    /// Stands behind the first of those labels.
    pub(super) unit: &'a str,
    /// Bars of a row lie in this many lanes, one below the other.
    pub(super) lanes: usize,
    /// Pixels per row.
    pub(super) height: f64,
    pub(super) rows: Vec<Row>,
}

pub(super) struct Row {
    pub(super) name: String,
    /// Empty in all rows: no column for it.
    pub(super) value: String,
    /// Set off from the rows below.
    pub(super) summary: bool,
    pub(super) bars: Vec<Bar>,
}

/// A mark from one share of the width to another.
pub(super) struct Bar {
    pub(super) class: String,
    pub(super) lane: usize,
    pub(super) from: f64,
    pub(super) to: f64,
    pub(super) tip: String,
}

impl Chart<'_> {
    pub(super) fn draw(&self, page: &mut String) {
        let dense = if self.height < 20.0 { " dense" } else { "" };
        let _ = write!(page, "<div class=\"rows{dense}\" style=\"--row:{}px\">", At(self.height));
        self.column(page, "names", |row| &row.name);
        let box_class = if self.axis.is_some() { "plot scaled" } else { "plot" };
        let _ = write!(page, "<div class=\"{box_class}\">");
        let height = self.height * self.rows.len() as f64;
        svg::open(page, self.id, height, self.title, &self.description);
        page.push_str(HATCH);
        self.grid(page);
        for (i, row) in self.rows.iter().enumerate() {
            self.row(page, i as f64 * self.height, row);
        }
        page.push_str("</svg></div>");
        if self.rows.iter().any(|row| !row.value.is_empty()) {
            self.column(page, "values", |row| &row.value);
        }
        page.push_str("</div>");
    }

    fn column(&self, page: &mut String, class: &str, text: fn(&Row) -> &str) {
        let _ = write!(page, "<ul class=\"{class}\">");
        for row in &self.rows {
            let summary = if row.summary { " class=\"summary\"" } else { "" };
            let text = Escaped(text(row));
            let _ = write!(page, "<li{summary} title=\"{text}\"><bdi>{text}</bdi></li>");
        }
        page.push_str("</ul>");
    }

    fn grid(&self, page: &mut String) {
        page.push_str("<g class=\"grid\" aria-hidden=\"true\">");
        // Stripes lead the eye from a name to its bars, where these are far off.
        let striped = if self.axis.is_some() { self.rows.len() } else { 0 };
        for i in (0..striped).step_by(2) {
            let (y, height) = (At(i as f64 * self.height), At(self.height));
            let _ = write!(
                page,
                "<rect class=\"stripe\" y=\"{y}\" width=\"100%\" height=\"{height}\"/>"
            );
        }
        match &self.axis {
            None => page.push_str("<line x1=\"0\" x2=\"0\" y1=\"0\" y2=\"100%\"/>"),
            Some(axis) => {
                for (i, (value, label)) in axis.labels(AXIS_TICKS).into_iter().enumerate() {
                    let unit = if i == 0 { self.unit } else { "" };
                    let x = At(axis.share(value) * 100.0);
                    let _ = write!(
                        page,
                        "<line x1=\"{x}%\" x2=\"{x}%\" y1=\"0\" y2=\"100%\"/>\
                         <text x=\"{x}%\" y=\"-8\" text-anchor=\"middle\">{label}{unit}</text>",
                    );
                }
            }
        }
        let summaries = self.rows.iter().take_while(|row| row.summary).count();
        if summaries > 0 {
            let y = At(summaries as f64 * self.height);
            let _ = write!(page, "<line x1=\"0\" x2=\"100%\" y1=\"{y}\" y2=\"{y}\"/>");
        }
        page.push_str("</g>");
    }

    fn row(&self, page: &mut String, top: f64, row: &Row) {
        // A summary has one lane only, and all of the row for it.
        let lanes = if row.summary { 1 } else { self.lanes.max(1) };
        let margin = (self.height * 0.18).max(1.0);
        let height = (self.height - 2.0 * margin) / lanes as f64;
        for bar in &row.bars {
            let lane = bar.lane.min(lanes - 1) as f64;
            let _ = write!(
                page,
                "<rect class=\"{}\" x=\"{}%\" y=\"{}\" width=\"{}%\" height=\"{}\">\
                 <title>{}</title></rect>",
                bar.class,
                At(bar.from * 100.0),
                At(top + margin + lane * height),
                At(((bar.to - bar.from) * 100.0).max(THINNEST)),
                At(height - if lanes > 1 { 1.0 } else { 0.0 }),
                Escaped(&bar.tip),
            );
        }
    }
}

/// The pattern of waiting: told apart from the colours without any.
const HATCH: &str = "<defs><pattern id=\"hatch\" width=\"5\" height=\"5\" \
    patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"><rect class=\"hatch-ground\" \
    width=\"5\" height=\"5\"/><line class=\"hatch-line\" y2=\"5\"/></pattern></defs>";
const AXIS_TICKS: usize = 8;
/// Percent of the width: what has happened can be seen.
const THINNEST: f64 = 0.15;
