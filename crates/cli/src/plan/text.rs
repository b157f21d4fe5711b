//! The plan in the terminal.

use super::advice::Advice;
use super::forecast::{Beyond, Forecast, Point};
use super::links::LinkUse;
use super::{Bandwidth, Question, bottleneck, fold};
use crate::report::units;
use crate::terminal::{Paint, columns, printable, table, terminal_width};
use poseidon_core::{Cluster, Servers};
use poseidon_sim::Places;
use std::io;
use std::path::Path;

/// Everything, from what was asked to what would help.
pub(super) fn text(question: &Question, forecast: &Forecast, report: Option<&Path>) -> String {
    let paint = Paint { on: crate::wants_colour(&io::stdout()) };
    let width = terminal_width();
    let mut lines = Vec::new();
    lines.extend(slower_than_one(forecast).map(|words| paint.bold(&words)));
    lines.push(paint.bold(&printable(&headline(question, forecast))));
    lines.push(paint.dim(&printable(&basis(question))));
    lines.extend(side_by_side(question, forecast, paint));
    lines.push(String::new());
    let layers = forecast.layers.len();
    lines.extend(table::folded(&fold::folded(&forecast.layers), layers, width, paint));
    lines.push(String::new());
    lines.extend(facts(forecast).into_iter().map(|(name, value)| named(paint, name, &value)));
    match &forecast.beyond {
        Some(beyond) => {
            lines.extend(helps(beyond, paint));
            lines.extend(chart(beyond, forecast, paint, width));
        }
        None => lines.push(paint.dim(
            "\nOne simulation of this job takes seconds; --thorough also looks for enough bandwidth, and for \
             what would help.",
        )),
    }
    if let Some(path) = report {
        lines.push(String::new());
        lines.push(named(paint, "report", &paint.bold(&printable(&path.display().to_string()))));
    }
    lines.join("\n") + "\n"
}

/// What is trained on what, in one line.
pub(super) fn headline(question: &Question, forecast: &Forecast) -> String {
    let setup = &forecast.setup;
    format!(
        "{}, {} parameters, on {}, {} {}",
        question.model.name,
        units::count(question.model.parameters() as u64),
        machines(&setup.cluster),
        Bandwidth::from_bytes(setup.network.bandwidth),
        setup.network.name,
    )
}

/// What has to be said first, if it is so.
pub(super) fn slower_than_one(forecast: &Forecast) -> Option<String> {
    let speedup = forecast.outcome.speedup;
    // What rounds to as fast is not slower.
    (speedup > 0.0 && speedup < 0.95).then(|| {
        let workers = units::plural(forecast.setup.cluster.workers() as u64, "worker");
        format!("One worker alone is {} times as fast as these {workers}.", times(1.0 / speedup))
    })
}

/// The devices that were taken because nobody has named one.
fn side_by_side(question: &Question, forecast: &Forecast, paint: Paint) -> Vec<String> {
    let Some(beside) = &forecast.beside else { return Vec::new() };
    let row = |name: &str, times_of: [f64; 2], samples: f64, speedup: f64| {
        let [iteration, compute] = times_of.map(units::duration);
        [name.to_owned(), iteration, compute, times(speedup), units::rate(samples)]
    };
    let outcome = &forecast.outcome;
    let rows = [
        row(
            &question.profile.name,
            [outcome.iteration_seconds, outcome.compute_seconds],
            forecast.images_per_second(),
            outcome.speedup,
        ),
        row(
            &beside.profile,
            [beside.iteration_seconds, beside.compute_seconds],
            beside.images_per_second,
            beside.speedup,
        ),
    ];
    let header = ["device", "iteration", "computing", "speed-up", "samples/s"];
    let table = columns::table(header, [false, true, true, true, true], rows.into_iter());
    let mut lines =
        vec![String::new(), paint.bold("No --profile was given, so here are two devices:")];
    lines.extend(table.lines().map(String::from));
    lines.push(paint.dim(&format!(
        "All below is for {}, the GPU of the paper of 2017; --profile {} is one of today.",
        question.profile.name, beside.profile
    )));
    lines
}

/// How computing times are known.
pub(super) fn basis(question: &Question) -> String {
    format!(
        "{}; computing as profile {} says: {}",
        units::plural(question.setup.batch as u64, "sample") + " per worker and step",
        question.profile.name,
        question.basis
    )
}

/// The machines there have to be.
pub(super) fn machines(cluster: &Cluster) -> String {
    let workers = units::plural(cluster.workers() as u64, "worker");
    let ranks = usize::from(Places::of(cluster).ranks_per_host);
    let hosts = match ranks {
        1 => String::new(),
        _ => format!(" on {}", units::plural(cluster.workers().div_ceil(ranks) as u64, "host")),
    };
    match cluster.servers() {
        Servers::Colocated => format!("{workers} that are servers too{hosts}"),
        Servers::Dedicated(n) => {
            format!("{workers}{hosts} and {}", units::plural(n.into(), "server"))
        }
        Servers::Mixed(n) => {
            let servers = units::plural(n.into(), "server");
            format!("{workers} that are servers too{hosts} and {servers}")
        }
    }
}

fn facts(forecast: &Forecast) -> Vec<(&'static str, String)> {
    let Forecast { setup, outcome, beyond, found, .. } = forecast;
    let sent = outcome.bytes_sent.iter().copied().max().unwrap_or(0);
    let mut facts = vec![
        (
            "iteration",
            format!(
                "{}, of which {} computing",
                units::duration(outcome.iteration_seconds),
                units::duration(outcome.compute_seconds)
            ),
        ),
        (
            "speed-up",
            format!(
                "{} with {} ({}); {} samples/s",
                times(outcome.speedup),
                units::plural(setup.cluster.workers() as u64, "worker"),
                units::percent(forecast.efficiency()),
                units::rate(forecast.images_per_second())
            ),
        ),
        ("waiting", format!("{} of the time", units::percent(outcome.stall_fraction))),
        ("sent", format!("{} per step by the busiest node", units::bytes(sent))),
        (
            "bottleneck",
            format!("{}: {}", bottleneck(outcome.bottleneck), printable(&outcome.reason)),
        ),
    ];
    facts.extend(links(forecast));
    if let Some(beyond) = beyond {
        let enough = match beyond.enough {
            Some(bandwidth) => {
                let sold = bandwidth.as_sold().map_or(String::new(), |sold| format!(": {sold}"));
                format!("{bandwidth} is the least that keeps workers 95 % busy{sold}")
            }
            None => {
                let why = beyond.never_enough.as_deref().unwrap_or_default();
                format!("no bandwidth keeps workers 95 % busy: {}", printable(why))
            }
        };
        facts.push(("enough", enough));
    }
    if let Some(found) = found {
        let found = match found.changes.as_slice() {
            [] => format!("{} others simulated, none is better", found.simulations),
            changes => format!(
                "{} shorter than by the formula ({}): {}",
                units::percent(1.0 - outcome.iteration_seconds / found.formula_seconds),
                units::duration(found.formula_seconds),
                printable(&changes.join(", "))
            ),
        };
        facts.push(("search", found));
    }
    facts
}

/// What passes ports, memory and racks' links, where these are not simply what nodes send, and what
/// is copied.
pub(super) fn links(forecast: &Forecast) -> Vec<(&'static str, String)> {
    let Forecast { setup, outcome, racks, copies, .. } = forecast;
    let memory = LinkUse::of_memory(setup, outcome);
    let rack = LinkUse::of_rack(setup, outcome);
    let mut facts = Vec::new();
    if memory.is_some() || rack.is_some() {
        facts.push(("port", LinkUse::of_port(setup, outcome).words("a host")));
    }
    facts.extend(memory.map(|memory| ("memory", memory.words("a worker"))));
    facts.extend(rack.map(|rack| ("rack link", rack.words("a rack"))));
    facts.extend(copies.as_ref().map(|copies| ("copies", copies.words())));
    if let Some(racks) = racks {
        facts.extend([("racks", racks.words()), ("", racks.reason.clone())]);
    }
    facts
}

fn named(paint: Paint, name: &str, value: &str) -> String {
    format!("{}  {value}", paint.dim(&format!("{name:<10}")))
}

fn helps(beyond: &Beyond, paint: Paint) -> Vec<String> {
    let mut lines = vec![String::new(), paint.bold("What would help")];
    let good = useful(beyond);
    if good.is_empty() {
        lines.push("Nothing that was tried.".into());
    }
    let longest = good.iter().map(|a| a.change.chars().count()).max().unwrap_or(0);
    for advice in good {
        let but = advice.but.map_or(String::new(), |but| paint.dim(&format!("  ({but})")));
        lines.push(format!(
            "{:>9}  {:<longest$}  {} samples/s{but}",
            gain(advice.gain),
            advice.change,
            units::rate(advice.images_per_second)
        ));
    }
    lines
}

/// The changes that are worth making.
pub(super) fn useful(beyond: &Beyond) -> Vec<&Advice> {
    beyond.advice.iter().filter(|advice| advice.gain >= WORTH).collect()
}

/// A speed-up: `15.4`, and `0.04` where one decimal would say nothing.
pub(super) fn times(speedup: f64) -> String {
    if speedup < 0.995 { format!("{speedup:.2}") } else { format!("{speedup:.1}") }
}

/// `+12.3 %`, `-4.0 %`.
pub(super) fn gain(gain: f64) -> String {
    // What rounds to nothing has no sign.
    if gain.abs() < 5e-4 { "±0 %".into() } else { format!("{:+.1} %", gain * 100.0) }
}

/// Speed-up by workers, as bars against what would be linear; for one worker, by bandwidth there is
/// nothing to show.
fn chart(beyond: &Beyond, forecast: &Forecast, paint: Paint, width: usize) -> Vec<String> {
    if forecast.setup.cluster.workers() < 2 {
        return Vec::new();
    }
    let by_workers = bars(&beyond.by_workers, |p| format!("{:.0}", p.x), |p| p.x, width);
    let all = forecast.setup.cluster.workers() as f64;
    let by_bandwidth =
        bars(&beyond.by_bandwidth, |p| Bandwidth::gigabits(p.x).to_string(), |_| all, width);
    let mut lines = vec![String::new(), paint.bold("Speed-up by workers")];
    lines.extend(by_workers);
    lines.extend([String::new(), paint.bold("Speed-up by bandwidth")]);
    lines.extend(by_bandwidth);
    if beyond.by_workers.iter().any(|p| p.speedup_ps.is_some()) {
        let key = "█ this plan  ┃ parameter server alone  · linear";
        lines.push(paint.dim(key));
    }
    lines
}

fn bars(
    points: &[Point],
    label: impl Fn(&Point) -> String,
    linear: impl Fn(&Point) -> f64,
    width: usize,
) -> Vec<String> {
    let labels: Vec<String> = points.iter().map(label).collect();
    let widest = labels.iter().map(|l| l.chars().count()).max().unwrap_or(0);
    let most = points.iter().map(|p| linear(p).max(p.speedup)).fold(1.0, f64::max);
    let room = width.saturating_sub(widest + VALUES).clamp(10, 50);
    let columns = |value: f64| value / most * room as f64;
    let line = |(point, label): (&Point, &String)| {
        let mut bar: Vec<char> = vec![' '; room];
        let to = columns(linear(point)).round() as usize;
        bar.iter_mut().take(to).for_each(|c| *c = '·');
        let length = columns(point.speedup);
        let whole = (length.floor() as usize).min(room);
        bar.iter_mut().take(whole).for_each(|c| *c = '█');
        let eighths = ((length - length.floor()) * 8.0) as usize;
        if eighths > 0 && whole < room {
            bar[whole] = EIGHTHS[eighths];
        }
        let ps = point.speedup_ps.map(|ps| (columns(ps) as usize).min(room - 1));
        // Where it would hide the end of the bar it says nothing new.
        if let Some(ps) = ps.filter(|&ps| ps + 1 < whole) {
            bar[ps] = '┃';
        }
        let bar: String = bar.into_iter().collect();
        let ps = point.speedup_ps.map_or(String::new(), |ps| format!("  ┃ {}", times(ps)));
        let share = units::percent(point.speedup / linear(point));
        let speedup = times(point.speedup);
        format!("{label:>widest$}  {bar} {speedup:>6} {share:>8}{ps}").trim_end().into()
    };
    points.iter().zip(&labels).map(line).collect()
}

/// Below half a percent it is noise.
const WORTH: f64 = 0.005;
const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
/// Columns that the numbers beside a bar take.
const VALUES: usize = 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_values() {
        let point = |x, speedup| Point { x, speedup, speedup_ps: None };
        let lines = bars(&[point(1.0, 1.0), point(10.0, 5.0)], |p| p.x.to_string(), |p| p.x, 200);
        let count = |line: &str, mark| line.chars().filter(|c| *c == mark).count();
        assert_eq!((count(&lines[0], '█'), count(&lines[0], '·')), (5, 0));
        assert_eq!((count(&lines[1], '█'), count(&lines[1], '·')), (25, 25));
        assert!(lines[1].ends_with("5.0   50.0 %"), "{}", lines[1]);
    }

    #[test]
    fn gains_have_a_sign() {
        assert_eq!([0.1234, -0.04, 0.0001].map(gain), ["+12.3 %", "-4.0 %", "±0 %"]);
    }
}
