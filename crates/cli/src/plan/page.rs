//! The plan as a page: one file with everything in it, which asks nothing of the network.

use super::forecast::{Beyond, Forecast, Point};
use super::text::{basis, gain, links, machines, slower_than_one, times, useful};
use super::{Bandwidth, Question, bottleneck, fold};
use crate::report::curves::{Frame, frame, line, polyline};
use crate::report::page::{STYLE, TIPS, figure, plan};
use crate::report::svg::{self, At, Axis, Escaped};
use crate::report::{LayerReport, Span, Timeline, Track, What, bars, timeline, units};
use poseidon_core::Servers;
use poseidon_sim::Overlap;
use poseidon_sim::outcome::Rebuilt;
use std::fmt::Write;
use std::iter;

/// Everything on one page.
pub(super) fn page(question: &Question, forecast: &Forecast) -> String {
    let mut page = String::with_capacity(96 << 10);
    let model = Escaped(&question.model.name);
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src \
         'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>{model}: plan</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <header>\n<p class=\"eyebrow\">Poseidon plan: a prediction by simulation</p>\n\
         <h1>{model} on {}</h1>\n<p class=\"lead\">{}</p>\n</header>\n",
        Escaped(&machines(&forecast.setup.cluster)),
        Escaped(&summary(question, forecast)),
    );
    tiles(&mut page, forecast);
    if let Some(beyond) = &forecast.beyond {
        page.push_str("<h2>Scaling</h2>\n<div class=\"pair\">\n");
        by_workers(&mut page, forecast, &beyond.by_workers);
        by_bandwidth(&mut page, forecast, &beyond.by_bandwidth);
        page.push_str("</div>\n<h2>What would help</h2>\n");
        advice(&mut page, beyond);
    }

    page.push_str("<h2>Communication</h2>\n");
    figure(
        &mut page,
        "Bytes by layer",
        "What a node sends for each layer in one step, on average.",
    );
    let layers: Vec<LayerReport> =
        forecast.layers.iter().map(|layer| fold::row(&[layer])).collect();
    bars::layers(&mut page, &layers, |layer| bytes_as_ps(forecast, layer));
    page.push_str("</figure>\n<h2>One iteration</h2>\n");
    figure(
        &mut page,
        "Computing and communication by layer, in backward order",
        "One simulated step of worker 0, in milliseconds, from its first backward. The upper half of a \
         row is computing, the lower half the network; where they overlap, communication costs no time.",
    );
    timeline::draw(&mut page, &iteration(forecast));
    page.push_str("</figure>\n<h2>The plan</h2>\n");
    plan(&mut page, &layers);
    settings(&mut page, question, forecast);
    let _ = write!(
        page,
        "</main>\n<footer>\n<p>poseidon {}</p>\n</footer>\n<script>\n{TIPS}</script>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION"),
    );
    page
}

/// What comes out, for somebody who sees such a page for the first time.
fn summary(question: &Question, forecast: &Forecast) -> String {
    let outcome = &forecast.outcome;
    let mut text = format!(
        "{} has {} parameters. {}, connected by {} {}, are predicted to train it {} times as fast as \
         one alone. A step takes {}, of which workers wait {}. The bottleneck: {}.",
        question.model.name,
        units::count(question.model.parameters() as u64),
        machines(&forecast.setup.cluster),
        Bandwidth::from_bytes(forecast.setup.network.bandwidth),
        forecast.setup.network.name,
        times(outcome.speedup),
        units::duration(outcome.iteration_seconds),
        units::percent(outcome.stall_fraction),
        outcome.reason,
    );
    match forecast.beyond.as_ref().map(|beyond| beyond.enough) {
        Some(Some(enough)) => {
            let _ = write!(text, " The least bandwidth that keeps them 95 % busy is {enough}.");
        }
        Some(None) => {
            let why = forecast.beyond.as_ref().and_then(|beyond| beyond.never_enough.as_deref());
            let _ =
                write!(text, " No bandwidth keeps them 95 % busy: {}.", why.unwrap_or_default());
        }
        None => {}
    }
    if let Some(words) = slower_than_one(forecast) {
        text.insert_str(0, &format!("{words} "));
    }
    if let Some(beside) = &forecast.beside {
        let _ = write!(
            text,
            " No device was named: this page is for {}; on {} the same workers would train {} \
             samples per second, {} times as many as one.",
            question.profile.name,
            beside.profile,
            units::rate(beside.images_per_second),
            times(beside.speedup),
        );
    }
    if let Some(copies) = &forecast.copies {
        let _ = write!(text, " Copied: {}.", copies.words());
    }
    if let Some(racks) = &forecast.racks {
        let _ = write!(text, " Hosts in racks: {}; {}.", racks.words(), racks.reason);
    }
    if let Some(found) = forecast.found.as_ref().filter(|found| !found.changes.is_empty()) {
        let _ = write!(
            text,
            " A search found a plan whose steps are {} shorter than those by the formula: {}.",
            units::percent(1.0 - outcome.iteration_seconds / found.formula_seconds),
            found.changes.join(", ")
        );
    }
    text
}

fn tiles(page: &mut String, forecast: &Forecast) {
    let outcome = &forecast.outcome;
    let workers = units::plural(forecast.setup.cluster.workers() as u64, "worker");
    let sent = outcome.bytes_sent.iter().copied().max().unwrap_or(0);
    let enough = match &forecast.beyond {
        Some(Beyond { enough: Some(bandwidth), .. }) => {
            let text = bandwidth.to_string();
            let (number, unit) = text.split_once(' ').unwrap_or((&text, ""));
            (number.to_owned(), format!("{unit} are the least that is enough"))
        }
        Some(_) => ("none".into(), "is enough".into()),
        None => ("not asked".into(), "see --thorough".into()),
    };
    let compute = format!("{} of it computing", units::duration(outcome.compute_seconds));
    let linear = format!("with {workers}; {} of linear", units::percent(forecast.efficiency()));
    let waiting = format!("of the time; limit: {}", bottleneck(outcome.bottleneck));
    let tiles = [
        ("Speed-up", times(outcome.speedup), linear.as_str()),
        ("Iteration", units::duration(outcome.iteration_seconds), &compute),
        ("Samples per second", units::rate(forecast.images_per_second()), "of all workers"),
        ("Waiting", units::percent(outcome.stall_fraction), &waiting),
        ("Sent per step", units::bytes(sent), "by the busiest node"),
        ("Bandwidth for 95 %", enough.0, &enough.1),
    ];
    page.push_str("<dl class=\"tiles\">\n");
    for (name, value, about) in tiles {
        let _ = writeln!(
            page,
            "<div><dt>{name}</dt><dd class=\"big\">{}</dd><dd class=\"small\">{}</dd></div>",
            Escaped(&value),
            Escaped(about)
        );
    }
    page.push_str("</dl>\n");
}

fn by_workers(page: &mut String, forecast: &Forecast, points: &[Point]) {
    figure(page, "Speed-up by workers", "Over one worker alone, with the same network.");
    let all = forecast.setup.cluster.workers() as f64;
    let x = Axis::linear(0.0, all);
    let most = points.iter().map(|point| point.speedup).fold(all, f64::max);
    let y = Axis::linear(0.0, most).rounded(5);
    let far = |a: f64, b: f64| (x.share(a) - x.share(b)).abs() > 0.06;
    let mut marks: Vec<(f64, String)> = Vec::new();
    // From the right: 16 is written, 1 and 2 beside 32 are not.
    for point in points.iter().rev() {
        if marks.iter().all(|(other, _)| far(point.x, *other)) {
            marks.push((point.x, format!("{:.0}", point.x)));
        }
    }
    let unit = "workers";
    curve(
        page,
        "workers",
        "Speed-up by workers",
        Curve { points, x, y, marks, unit, linear: Some(all) },
    );
    page.push_str("</figure>\n");
}

fn by_bandwidth(page: &mut String, forecast: &Forecast, points: &[Point]) {
    figure(page, "Speed-up by bandwidth", "With all workers, on a logarithmic scale.");
    let all = forecast.setup.cluster.workers() as f64;
    let logs: Vec<Point> = points.iter().map(|p| Point { x: p.x.log10(), ..*p }).collect();
    let lo = logs.first().map_or(0.0, |p| p.x);
    let hi = logs.last().map_or(2.0, |p| p.x);
    let x = Axis::linear(lo - 0.08, hi + 0.08);
    let most = points.iter().map(|point| point.speedup).fold(all, f64::max);
    let y = Axis::linear(0.0, most).rounded(5);
    let short = |gbit: f64| {
        let text = Bandwidth::gigabits(gbit).to_string();
        text.strip_suffix(" Gbit/s").map_or(text.clone(), str::to_owned)
    };
    let marks = points.iter().map(|p| (p.x.log10(), short(p.x))).collect();
    let title = "Speed-up by bandwidth";
    let unit = "Gbit/s";
    curve(page, "bandwidth", title, Curve { points: &logs, x, y, marks, unit, linear: None });
    page.push_str("</figure>\n");
}

struct Curve<'a> {
    points: &'a [Point],
    x: Axis,
    y: Axis,
    marks: Vec<(f64, String)>,
    unit: &'a str,
    /// Draws the diagonal up to here.
    linear: Option<f64>,
}

fn curve(page: &mut String, id: &str, title: &str, curve: Curve<'_>) {
    let Curve { points, x, y, marks, unit, linear } = curve;
    let ours: Vec<(f64, f64)> = points.iter().map(|p| (p.x, p.speedup)).collect();
    let ps: Vec<(f64, f64)> = points.iter().filter_map(|p| Some((p.x, p.speedup_ps?))).collect();
    let mut legend = vec![("line train", "this plan")];
    if !ps.is_empty() {
        legend.push(("line test", "parameter server alone"));
    }
    if linear.is_some() {
        legend.push(("line linear", "linear"));
    }
    svg::legend(page, &legend);
    let last = ours.last().map_or(0.0, |p| p.1);
    let description = format!("Ends at {last:.1}.");
    frame(page, Frame { id, title, description, x, y, marks: marks.clone(), unit });
    if let Some(end) = linear {
        line(page, "linear", &polyline(&[(0.0, 0.0), (end, end)], x, y));
    }
    for (class, name, points) in
        [("test", "parameter server alone", &ps), ("train", "this plan", &ours)]
    {
        line(page, class, &polyline(points, x, y));
        for &(at, speedup) in points {
            let label = marks.iter().find(|(mark, _)| *mark == at).map(|(_, label)| label.clone());
            let label = label.unwrap_or_else(|| format!("{at:.0}"));
            let _ = write!(
                page,
                "<circle class=\"{class}\" cx=\"{}%\" cy=\"{}%\" r=\"4\"><title>{} {unit}, {name}: \
                 {}</title></circle>",
                At(x.share(at) * 100.0),
                At(100.0 - y.share(speedup) * 100.0),
                Escaped(&label),
                times(speedup),
            );
        }
    }
    page.push_str("</svg></div>");
}

fn advice(page: &mut String, beyond: &Beyond) {
    page.push_str(
        "<p class=\"about\">The same job with one thing changed, simulated.</p>\n\
         <div class=\"card\"><table><thead><tr><th>change</th><th class=\"num\">speed</th>\
         <th class=\"num\">samples/s</th><th class=\"num\">iteration</th></tr></thead><tbody>\n",
    );
    for advice in useful(beyond) {
        let but =
            advice.but.map_or(String::new(), |but| format!(" <span class=\"why\">({but})</span>"));
        let _ = writeln!(
            page,
            "<tr><td>{}{but}</td><td class=\"num\">{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td></tr>",
            Escaped(&advice.change),
            gain(advice.gain),
            units::rate(advice.images_per_second),
            units::duration(advice.iteration_seconds),
        );
    }
    page.push_str("</tbody></table></div>\n");
}

/// What a layer that goes by factors would make a node send through the parameter server, where
/// every worker is also a server.
fn bytes_as_ps(forecast: &Forecast, layer: &LayerReport) -> Option<u64> {
    let cluster = &forecast.setup.cluster;
    let nodes = cluster.workers() as u64;
    let known = layer.scheme == "sfb" && cluster.servers() == Servers::Colocated;
    known.then(|| layer.parameters as u64 * 8 * (nodes - 1) / nodes)
}

/// A step of worker 0, backward first: what it sends, it needs in the next forward.
fn iteration(forecast: &Forecast) -> Timeline {
    let Forecast { setup, outcome, .. } = forecast;
    let mut spans = Vec::new();
    let mut add = |track, layer: &str, what, start: f64, end: f64| {
        if end > start {
            spans.push(Span { track, layer: layer.into(), what, start, end });
        }
    };
    // Seconds in the outcome count from the begin of the step, whose forward comes first.
    let backward: Vec<f64> = setup.times.iter().map(|time| time.backward).collect();
    let begin = outcome
        .timeline
        .iter()
        .zip(&backward)
        .map(|(seen, backward)| seen.ready - backward)
        .fold(f64::INFINITY, f64::min);
    let mut end = begin;
    for ((layer, seen), backward) in setup.layers.iter().zip(&outcome.timeline).zip(&backward) {
        let name = &layer.name;
        add(
            Track::Compute,
            name,
            What::Backward,
            seen.ready - backward - begin,
            seen.ready - begin,
        );
        if layer.len > 0 && seen.landed > seen.ready {
            add(Track::Network, name, What::Sync, seen.ready - begin, seen.landed - begin);
        }
        if let Some(Rebuilt { start, beside: true }) = seen.rebuilt {
            add(Track::Beside, name, What::Rebuild, start - begin, seen.applied - begin);
        }
        end = end.max(seen.ready);
    }
    // The next step's forward. Every layer waits for its own result, or all for all before it.
    let mut now = end - begin;
    let layers = || setup.layers.iter().zip(&outcome.timeline);
    let settling = layers().filter(|_| setup.overlap != Overlap::Full).zip(iter::repeat(0.0));
    let forward = layers().zip(setup.times.iter().map(|time| time.forward));
    for ((layer, seen), forward) in settling.chain(forward) {
        let waited = match seen.rebuilt {
            Some(Rebuilt { start, beside: false }) => start,
            _ => seen.applied,
        };
        for (what, end) in [(What::Wait, waited - begin), (What::Rebuild, seen.applied - begin)] {
            add(Track::Compute, &layer.name, what, now, end);
            now = now.max(end);
        }
        add(Track::Compute, &layer.name, What::Forward, now, now + forward);
        now += forward;
    }
    Timeline { step: setup.iterations as u64, rank: 0, seconds: now, spans }
}

fn settings(page: &mut String, question: &Question, forecast: &Forecast) {
    let setup = &forecast.setup;
    let network = &setup.network;
    let mut facts = vec![
        ("model", question.model.name.clone()),
        ("computing", basis(question)),
        ("device", question.profile.device.clone()),
        ("workers", setup.cluster.workers().to_string()),
        ("servers", setup.cluster.servers().to_string()),
        ("network", network.name.clone()),
        ("bandwidth", Bandwidth::from_bytes(network.bandwidth).to_string()),
        ("of which payloads get", units::percent(network.efficiency)),
        ("latency", units::duration(network.latency.as_secs_f64())),
        ("scheme", setup.scheme.to_string()),
        ("overlap", setup.overlap.to_string()),
        ("largest chunk", format!("{} KiB", setup.chunk.max >> 10)),
    ];
    facts.extend(links(forecast));
    page.push_str(
        "<details><summary>What was simulated</summary>\n<div class=\"card\"><table><tbody>\n",
    );
    for (name, value) in facts {
        let _ = writeln!(page, "<tr><td>{name}</td><td>{}</td></tr>", Escaped(&value));
    }
    page.push_str("</tbody></table></div></details>\n");
}
