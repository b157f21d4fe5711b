//! A figure as data: what is drawn, written as CSV and summed up is the same.

use poseidon_sim::{Outcome, Setup};
use serde::Serialize;
use std::fmt::Write;

/// One figure.
pub(super) struct Figure {
    /// The name of its files.
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    /// What it shows, in a sentence or two.
    pub(super) about: &'static str,
    /// Whether the panels are to be compared by eye.
    pub(super) same_scale: bool,
    pub(super) panels: Vec<Panel>,
}

/// One pair of axes.
pub(super) struct Panel {
    pub(super) title: String,
    pub(super) kind: Kind,
    pub(super) x: Direction,
    pub(super) y: Direction,
    pub(super) series: Vec<Series>,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Lines,
    /// Lines, and where they would be if nothing had to be communicated.
    LinesToIdeal(Ideal),
    Bars,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Ideal {
    /// y = x.
    Linear,
    /// The same everywhere.
    Level(f64),
}

#[derive(Clone, Copy, PartialEq)]
pub(super) struct Direction {
    pub(super) label: &'static str,
    pub(super) log: bool,
}

pub(super) struct Series {
    /// Unique in its panel; the same in all panels means the same colour.
    pub(super) name: &'static str,
    pub(super) points: Vec<Point>,
}

/// What is known at one place.
#[derive(Default)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) paper: Option<f64>,
    pub(super) simulated: Option<f64>,
    pub(super) measured: Option<f64>,
    job: Option<Job>,
}

struct Job {
    setup: Setup,
    read: Read,
}

/// What a figure shows of a simulation.
pub(super) type Read = Box<dyn Fn(&Outcome) -> f64>;

/// A line of `summary.json`. The names are a contract with those who read it.
#[derive(Serialize)]
pub(super) struct Record<'a> {
    figure: &'a str,
    series: String,
    x: f64,
    paper: Option<f64>,
    simulated: Option<f64>,
    measured: Option<f64>,
}

impl Figure {
    pub(super) fn records(&self) -> impl Iterator<Item = Record<'_>> {
        self.panels.iter().flat_map(move |panel| {
            panel.series.iter().flat_map(move |series| {
                series.points.iter().map(move |point| Record {
                    figure: self.id,
                    series: format!("{}, {}", panel.title, series.name),
                    x: point.x,
                    paper: point.paper,
                    simulated: point.simulated,
                    measured: point.measured,
                })
            })
        })
    }

    pub(super) fn csv(&self) -> String {
        let mut csv = String::from("series,x,paper,simulated,measured\n");
        for Record { series, x, paper, simulated, measured, .. } in self.records() {
            let cell = |value: Option<f64>| value.map_or(String::new(), |v| v.to_string());
            let _ = writeln!(
                csv,
                "\"{}\",{x},{},{},{}",
                series.replace('"', "\"\""),
                cell(paper),
                cell(simulated),
                cell(measured)
            );
        }
        csv
    }

    pub(super) fn points(&self) -> impl Iterator<Item = &Point> {
        self.panels.iter().flat_map(|panel| &panel.series).flat_map(|series| &series.points)
    }

    pub(super) fn points_mut(&mut self) -> impl Iterator<Item = &mut Point> {
        let series = self.panels.iter_mut().flat_map(|panel| &mut panel.series);
        series.flat_map(|series| &mut series.points)
    }
}

impl Point {
    /// A point that is not simulated.
    pub(super) fn at(x: f64) -> Self {
        Self { x, ..Self::default() }
    }

    /// A point that `read` takes from a simulation of `setup`.
    pub(super) fn of(x: f64, setup: Setup, read: impl Fn(&Outcome) -> f64 + 'static) -> Self {
        Self { job: Some(Job { setup, read: Box::new(read) }), ..Self::at(x) }
    }

    pub(super) fn paper(self, paper: Option<f64>) -> Self {
        Self { paper: paper.map(rounded), ..self }
    }

    pub(super) fn measured(self, measured: Option<f64>) -> Self {
        Self { measured: measured.map(rounded), ..self }
    }

    pub(super) fn is_simulated(&self) -> bool {
        self.job.is_some()
    }

    pub(super) fn setup(&self) -> Option<Setup> {
        self.job.as_ref().map(|job| job.setup.clone())
    }

    pub(super) fn conclude(&mut self, outcome: &Outcome) {
        self.simulated = self.job.as_ref().map(|job| rounded((job.read)(outcome)));
    }

    /// All that is known, for the axes.
    pub(super) fn values(&self) -> impl Iterator<Item = f64> {
        [self.paper, self.simulated, self.measured].into_iter().flatten()
    }
}

impl Direction {
    pub(super) const fn linear(label: &'static str) -> Self {
        Self { label, log: false }
    }

    pub(super) const fn log(label: &'static str) -> Self {
        Self { label, log: true }
    }
}

/// Files are for people too.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}
