//! One iteration, layer by layer: what was computed when, and what the network did meanwhile.

use super::rows::{Bar, Chart, Row};
use super::svg::{self, Axis};
use super::{Span, Timeline, Track, What, units};
use std::collections::HashMap;

pub(crate) fn draw(page: &mut String, timeline: &Timeline) {
    draw_as(page, "timeline", timeline);
}

/// As [`draw`], on a page with several timelines: `id` is no other's.
pub(super) fn draw_as(page: &mut String, id: &str, timeline: &Timeline) {
    let whole =
        |span: &&Span| span.start.is_finite() && span.end.is_finite() && span.end >= span.start;
    let spans: Vec<&Span> = timeline.spans.iter().filter(whole).collect();
    if spans.is_empty() {
        page.push_str("<p class=\"none\">No iteration was recorded.</p>");
        return;
    }
    let begin = spans.iter().map(|span| span.start).fold(0.0, f64::min);
    let known = if timeline.seconds.is_finite() { timeline.seconds } else { 0.0 };
    let end = spans.iter().map(|span| span.end).fold(known, f64::max);
    let axis = Axis::linear(begin * 1e3, end * 1e3);

    let mut rows = vec![
        Row {
            name: "computing".into(),
            value: String::new(),
            summary: true,
            bars: computing_bars(&spans, (begin, end), axis),
        },
        Row {
            name: "network".into(),
            value: String::new(),
            summary: true,
            bars: united(&on(&spans, Track::Network), "network", axis),
        },
    ];
    let beside = on(&spans, Track::Beside);
    if !beside.is_empty() {
        rows.push(Row {
            name: "rebuilding".into(),
            value: String::new(),
            summary: true,
            bars: beside.iter().map(|span| single(span, axis)).collect(),
        });
    }
    for group in grouped(&spans) {
        let (name, bars) = match group.as_slice() {
            [layer] => {
                let bars = layer.spans.iter().map(|span| single(span, axis)).collect();
                (layer.name.to_owned(), bars)
            }
            layers => {
                let all: Vec<&Span> = layers.iter().flat_map(|l| l.spans.iter().copied()).collect();
                let name = format!("{} short layers", layers.len());
                let bars = united(&all, &name, axis);
                (name, bars)
            }
        };
        rows.push(Row { name, value: String::new(), summary: false, bars });
    }

    let mut entries: Vec<_> = LEGEND
        .iter()
        .filter(|(what, _)| spans.iter().any(|span| span.what == *what))
        .map(|&(what, meaning)| (class(what), meaning))
        .collect();
    if !gaps(&spans, (begin, end)).is_empty() {
        entries.push((BETWEEN, between(&spans)));
    }
    svg::legend(page, &entries);
    let total = |what| {
        let intervals = union(spans.iter().filter(|s| s.what == what).map(|s| (s.start, s.end)));
        intervals.iter().map(|(start, end)| end - start).sum::<f64>()
    };
    let description = format!(
        "Step {} of worker {} took {}; its network was busy for {}, and computing waited for {}.",
        timeline.step,
        timeline.rank,
        units::duration(end - begin),
        units::duration(total(What::Sync)),
        units::duration(total(What::Wait)),
    );
    let chart = Chart {
        id,
        title: "Timeline of one iteration",
        description,
        axis: Some(axis),
        unit: " ms",
        lanes: 2,
        height: 26.0,
        rows,
    };
    chart.draw(page);
}

/// What the worker computed and waited for, and what it did between that.
fn computing_bars(spans: &[&Span], whole: (f64, f64), axis: Axis) -> Vec<Bar> {
    let computing = on(spans, Track::Compute);
    let between = gaps(spans, whole).into_iter().map(|(start, end)| Bar {
        class: BETWEEN.into(),
        lane: 0,
        from: axis.share(start * 1e3),
        to: axis.share(end * 1e3),
        tip: format!(
            "{}, {} (from {:.2} to {:.2} ms)",
            between(spans),
            units::duration(end - start),
            start * 1e3,
            end * 1e3
        ),
    });
    computing.iter().map(|span| single(span, axis)).chain(between).collect()
}

/// What the program did when it neither computed a layer nor waited for one. If it does not say when it
/// computes, it did that, too.
fn between(spans: &[&Span]) -> &'static str {
    match spans.iter().any(|span| span.what.is_pass()) {
        true => "between layers: waiting for the step before, reading data, loss, updates",
        false => "the program's own: computing, reading data, loss, updates",
    }
}

/// When the worker neither computed a layer nor waited for one, if that took long enough to be seen.
fn gaps(spans: &[&Span], (begin, end): (f64, f64)) -> Vec<(f64, f64)> {
    let busy = union(on(spans, Track::Compute).iter().map(|span| (span.start, span.end)));
    let starts = std::iter::once(begin).chain(busy.iter().map(|(_, end)| *end));
    let ends = busy.iter().map(|(start, _)| *start).chain([end]);
    let seen = |(from, to): &(f64, f64)| to - from > (end - begin) * LEAST_GAP;
    starts.zip(ends).filter(seen).collect()
}

/// One layer and what happened to it.
struct Layer<'a> {
    name: &'a str,
    spans: Vec<&'a Span>,
}

impl Layer<'_> {
    /// When its backward pass began, if it had one: it orders the rows.
    fn backward(&self) -> f64 {
        let backward = self.spans.iter().filter(|span| span.what == What::Backward);
        backward.map(|span| span.start).fold(f64::INFINITY, f64::min)
    }

    fn busy(&self) -> f64 {
        self.spans.iter().map(|span| span.end - span.start).sum()
    }
}

/// The layers in backward order. Where there are too many for a row each, neighbours that were
/// over soon share one.
fn grouped<'a>(spans: &[&'a Span]) -> Vec<Vec<Layer<'a>>> {
    let mut layers: Vec<Layer<'a>> = Vec::new();
    let mut index = HashMap::new();
    for span in spans.iter().filter(|span| !span.layer.is_empty()) {
        let at = *index.entry(span.layer.as_str()).or_insert_with(|| {
            layers.push(Layer { name: &span.layer, spans: Vec::new() });
            layers.len() - 1
        });
        layers[at].spans.push(span);
    }
    layers.sort_by(|a, b| a.backward().total_cmp(&b.backward()));
    if layers.len() <= ROWS {
        return layers.into_iter().map(|layer| vec![layer]).collect();
    }
    let mut longest: Vec<usize> = (0..layers.len()).collect();
    longest.sort_by(|&a, &b| layers[b].busy().total_cmp(&layers[a].busy()));
    let mut own = vec![false; layers.len()];
    longest[..OWN_ROWS].iter().for_each(|&i| own[i] = true);
    let mut groups: Vec<Vec<Layer<'a>>> = Vec::new();
    let mut last_is_short = false;
    for (layer, own) in layers.into_iter().zip(own) {
        match groups.last_mut() {
            Some(group) if last_is_short && !own => group.push(layer),
            _ => groups.push(vec![layer]),
        }
        last_is_short = !own;
    }
    groups
}

fn on<'a>(spans: &[&'a Span], track: Track) -> Vec<&'a Span> {
    spans.iter().copied().filter(|span| span.track == track).collect()
}

fn single(span: &Span, axis: Axis) -> Bar {
    let bar = bar(&span.layer, span.what, (span.start, span.end), axis);
    Bar { lane: usize::from(span.track != Track::Compute), ..bar }
}

/// One bar for each stretch of time in which the same went on in any of `spans`.
fn united(spans: &[&Span], name: &str, axis: Axis) -> Vec<Bar> {
    let bars = LEGEND.iter().flat_map(|&(what, _)| {
        let same = spans.iter().filter(|span| span.what == what);
        let intervals = union(same.map(|span| (span.start, span.end)));
        intervals.into_iter().map(move |interval| bar(name, what, interval, axis))
    });
    bars.collect()
}

fn bar(name: &str, what: What, (start, end): (f64, f64), axis: Axis) -> Bar {
    let doing = match what {
        What::Forward => "forward",
        What::Backward => "backward",
        What::Rebuild => "gradient from factors",
        What::Wait => "computing waits",
        What::Sync => "synchronising",
    };
    let name = if name.is_empty() { String::new() } else { format!("{name}: ") };
    Bar {
        class: class(what).into(),
        lane: usize::from(what == What::Sync),
        from: axis.share(start * 1e3),
        to: axis.share(end * 1e3),
        tip: format!(
            "{name}{doing}, {} (from {:.2} to {:.2} ms)",
            units::duration(end - start),
            start * 1e3,
            end * 1e3
        ),
    }
}

/// The same times without overlaps.
fn union(intervals: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut intervals: Vec<_> = intervals.collect();
    intervals.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut united: Vec<(f64, f64)> = Vec::new();
    for (start, end) in intervals {
        match united.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => united.push((start, end)),
        }
    }
    united
}

fn class(what: What) -> &'static str {
    match what {
        What::Forward => "forward",
        What::Backward => "backward",
        What::Rebuild => "rebuild",
        What::Wait => "wait",
        What::Sync => "sync",
    }
}

const LEGEND: [(What, &str); 5] = [
    (What::Forward, "forward"),
    (What::Backward, "backward"),
    (What::Rebuild, "gradient from factors"),
    (What::Wait, "computing waits for the layer"),
    (What::Sync, "synchronising: sent until received"),
];
/// The class of what is none of the others.
const BETWEEN: &str = "other";
/// Shorter gaps cannot be seen.
const LEAST_GAP: f64 = 0.002;
/// About a screenful.
const ROWS: usize = 28;
/// With as many groups between them, it is two screenfuls at worst.
const OWN_ROWS: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn span(layer: &str, what: What, start: f64, end: f64) -> Span {
        let track = if what == What::Sync { Track::Network } else { Track::Compute };
        Span { track, layer: layer.into(), what, start, end }
    }

    #[test]
    fn rows_are_in_backward_order() {
        let spans = [
            span("first", What::Forward, 0.0, 1.0),
            span("last", What::Forward, 1.0, 2.0),
            span("last", What::Backward, 2.0, 3.0),
            span("first", What::Backward, 3.0, 4.0),
        ];
        let spans: Vec<_> = spans.iter().collect();
        let names: Vec<_> = grouped(&spans).iter().map(|group| group[0].name).collect();
        assert_eq!(names, ["last", "first"]);
    }

    #[test]
    fn a_hundred_layers_share_rows_and_none_is_lost() {
        let layer = |i: u32| {
            let start = f64::from(1000 - i);
            span(&format!("l{i}"), What::Backward, start, start + f64::from(i % 5))
        };
        let spans: Vec<_> = (0..120).map(layer).collect();
        let groups = grouped(&spans.iter().collect::<Vec<_>>());
        assert!(groups.len() <= 2 * OWN_ROWS + 1, "{} rows", groups.len());
        assert_eq!(groups.iter().map(Vec::len).sum::<usize>(), 120);
    }

    #[test]
    fn a_union_counts_no_time_twice() {
        let intervals = [(3.0, 4.0), (0.0, 2.0), (1.0, 1.5), (2.0, 2.5)];
        assert_eq!(union(intervals.into_iter()), [(0.0, 2.5), (3.0, 4.0)]);
    }
}
