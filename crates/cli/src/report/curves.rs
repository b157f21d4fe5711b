//! Loss by step and accuracy by epoch.

use super::svg::{self, At, Axis, Escaped};
use super::{CurvePoint, EpochReport, units};
use std::fmt::Write;

/// The loss of every step, thin, and its moving mean.
pub(super) fn loss(page: &mut String, curve: &[CurvePoint]) {
    let points: Vec<(f64, f64)> = curve.iter().map(|p| (p.step as f64, p.loss)).collect();
    let bands = bands(&points, BANDS);
    if bands.is_empty() {
        page.push_str("<p class=\"none\">No step with a finite loss was recorded.</p>");
        return;
    }
    let raw = thinned(&points, CURVE_POINTS);
    let smooth = smoothed(&bands);

    let extremes = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(lo, hi), v| (lo.min(v), hi.max(v)))
    };
    let (lo, hi) = extremes(&mut raw.iter().filter_map(|point| point.map(|p| p.1)));
    let (smooth_lo, smooth_hi) = extremes(&mut smooth.iter().map(|p| p.1));
    // Judged by the mean: single lucky batches do not bend the whole chart.
    let y = if lo > 0.0 && smooth_hi / smooth_lo > LOG_FROM {
        Axis::logarithmic(lo, hi)
    } else {
        Axis::linear(lo.min(0.0), hi).rounded(Y_TICKS)
    };
    let x = Axis::linear(0.0, points.last().map_or(0.0, |p| p.0));
    let (first, last) = (smooth.first().map_or(0.0, |p| p.1), smooth.last().map_or(0.0, |p| p.1));
    let description = format!(
        "Over {}, the training loss went from about {} to about {}.",
        units::plural(curve.len() as u64, "step"),
        units::loss(first),
        units::loss(last)
    );
    svg::legend(page, &[("line raw", "each step"), ("line smooth", "moving mean")]);
    let unit = if y.is_log() { "step; loss on a logarithmic scale" } else { "step" };
    frame(
        page,
        Frame {
            id: "loss",
            title: "Training loss by step",
            description,
            x,
            y,
            marks: whole(x),
            unit,
        },
    );
    let mut path = String::new();
    let mut pen_down = false;
    for point in raw {
        let Some((step, loss)) = point else {
            pen_down = false;
            continue;
        };
        let command = if pen_down { 'L' } else { 'M' };
        let _ =
            write!(path, "{command}{} {}", At(x.share(step) * 1e3), At(1e3 - y.share(loss) * 1e3));
        pen_down = true;
    }
    line(page, "raw", &path);
    line(page, "smooth", &polyline(&smooth, x, y));
    for band in self::bands(&points, HOVER_BANDS) {
        let (from, to) = (x.share(band.from) * 100.0, x.share(band.to) * 100.0);
        let steps = if band.from == band.to {
            format!("step {}", band.from)
        } else {
            format!("steps {} to {}", band.from, band.to)
        };
        let _ = write!(
            page,
            "<rect class=\"hit\" x=\"{}%\" width=\"{}%\" height=\"100%\"><title>{steps}: loss {} \
             ({} to {})</title></rect>",
            At(from),
            At((to - from).max(100.0 / HOVER_BANDS as f64)),
            units::loss(band.mean),
            units::loss(band.lo),
            units::loss(band.hi),
        );
    }
    page.push_str("</svg></div>");
    if let Some(point) = curve.iter().find(|point| !point.loss.is_finite()) {
        let _ = write!(
            page,
            "<p class=\"warn\">At step {} the loss was not a finite number: training diverged. A \
             smaller learning rate usually helps.</p>",
            point.step
        );
    }
}

/// Accuracy on the training images, as they were learned, and on the test images.
pub(super) fn accuracy(page: &mut String, epochs: &[EpochReport]) {
    let series = |of: fn(&EpochReport) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = epochs.iter().filter_map(|e| Some((e.epoch as f64, of(e)?)));
        points.filter(|p| p.1.is_finite()).collect()
    };
    let lines = [
        ("train", "training images", series(|e| Some(e.train_accuracy))),
        ("test", "test images", series(|e| e.test_accuracy)),
    ];
    let all = || lines.iter().flat_map(|line| &line.2);
    if all().next().is_none() {
        page.push_str(
            "<p class=\"none\">No epoch was finished, so there is no accuracy to show.</p>",
        );
        return;
    }
    let lowest = all().map(|p| p.1).fold(1.0, f64::min);
    let y = Axis::linear(lowest * 100.0, 100.0).rounded(Y_TICKS);
    let (first, last) =
        all().map(|p| p.0).fold((f64::INFINITY, 0.0f64), |(a, b), e| (a.min(e), b.max(e)));
    // Half an epoch of air, or the dots sit on the frame; and whole numbers on the axis.
    let x = Axis::linear(first - 0.5, last + 0.5);
    let mut description = String::from("Share of images classified correctly.");
    for (_, of, points) in &lines {
        if let Some(end) = points.last() {
            let _ =
                write!(description, " On {of}, {} after epoch {}.", units::percent(end.1), end.0);
        }
    }
    let named: Vec<_> = lines.iter().filter(|line| !line.2.is_empty()).collect();
    let entries: Vec<(String, &str)> =
        named.iter().map(|(class, of, _)| (format!("line {class}"), *of)).collect();
    let entries: Vec<(&str, &str)> =
        entries.iter().map(|(class, of)| (class.as_str(), *of)).collect();
    svg::legend(page, &entries);
    let title = "Accuracy by epoch, in percent";
    frame(page, Frame { id: "accuracy", title, description, x, y, marks: whole(x), unit: "epoch" });
    for (class, of, points) in &named {
        let scaled: Vec<_> = points.iter().map(|p| (p.0, p.1 * 100.0)).collect();
        let shown: Vec<_> = thinned(&scaled, CURVE_POINTS).into_iter().flatten().collect();
        line(page, class, &polyline(&shown, x, y));
        if scaled.len() > MARKED_EPOCHS {
            continue;
        }
        for &(epoch, percent) in &scaled {
            let _ = write!(
                page,
                "<circle class=\"{class}\" cx=\"{}%\" cy=\"{}%\" r=\"4\"><title>epoch {epoch}: {} of the \
                 {of}</title></circle>",
                At(x.share(epoch) * 100.0),
                At(100.0 - y.share(percent) * 100.0),
                units::percent(percent / 100.0),
            );
        }
    }
    page.push_str("</svg></div>");
}

/// The frame of a chart of lines.
pub(crate) struct Frame<'a> {
    pub(crate) id: &'a str,
    pub(crate) title: &'a str,
    pub(crate) description: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    /// Where on the x axis something is written, and what.
    pub(crate) marks: Vec<(f64, String)>,
    pub(crate) unit: &'a str,
}

/// Opens a chart with its grid and its labels. The labels hang outside of the drawing, in the
/// padding of its box.
pub(crate) fn frame(page: &mut String, frame: Frame<'_>) {
    page.push_str("<div class=\"plot xy\">");
    svg::open(page, frame.id, CURVE_HEIGHT, frame.title, &frame.description);
    page.push_str("<g class=\"grid\" aria-hidden=\"true\">");
    for (value, label) in frame.y.labels(Y_TICKS) {
        let y = At(100.0 - frame.y.share(value) * 100.0);
        let _ = write!(
            page,
            "<line x1=\"0\" x2=\"100%\" y1=\"{y}%\" y2=\"{y}%\"/>\
             <text x=\"-8\" y=\"{y}%\" dy=\".32em\" text-anchor=\"end\">{}</text>",
            Escaped(&label)
        );
    }
    for (value, label) in &frame.marks {
        let x = At(frame.x.share(*value) * 100.0);
        let _ = write!(
            page,
            "<text x=\"{x}%\" y=\"100%\" dy=\"18\" text-anchor=\"middle\">{}</text>",
            Escaped(label)
        );
    }
    let _ = write!(
        page,
        "<text class=\"unit\" x=\"100%\" y=\"100%\" dy=\"36\" text-anchor=\"end\">{}</text></g>",
        Escaped(frame.unit)
    );
}

/// Whole numbers along `axis`.
fn whole(axis: Axis) -> Vec<(f64, String)> {
    let labels = axis.labels(X_TICKS).into_iter().filter(|(value, _)| value.fract() == 0.0);
    let short = |label: String| label.split('.').next().unwrap_or_default().to_owned();
    labels.map(|(value, label)| (value, short(label))).collect()
}

/// A line stretches with the chart, its stroke does not.
pub(crate) fn line(page: &mut String, class: &str, path: &str) {
    let _ = write!(
        page,
        "<svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" width=\"100%\" height=\"100%\" \
         overflow=\"visible\"><path class=\"{class}\" vector-effect=\"non-scaling-stroke\" \
         d=\"{path}\"/></svg>"
    );
}

pub(crate) fn polyline(points: &[(f64, f64)], x: Axis, y: Axis) -> String {
    let mut path = String::new();
    for (i, &(px, py)) in points.iter().enumerate() {
        let command = if i == 0 { 'M' } else { 'L' };
        let _ = write!(path, "{command}{} {}", At(x.share(px) * 1e3), At(1e3 - y.share(py) * 1e3));
    }
    path
}

/// At most `most` points with the same outline: of each stretch its lowest and its highest, and the
/// ends. `None` is a gap, where a value was not finite.
fn thinned(points: &[(f64, f64)], most: usize) -> Vec<Option<(f64, f64)>> {
    let finite = |&(x, y): &(f64, f64)| y.is_finite().then_some((x, y));
    if points.len() <= most {
        return points.iter().map(finite).collect();
    }
    let stretch = points.len().div_ceil((most / 2).saturating_sub(1).max(1));
    let mut kept = vec![finite(&points[0])];
    for stretch in points.chunks(stretch) {
        let by_value = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let valid = || stretch.iter().filter(|p| p.1.is_finite());
        match (valid().min_by(by_value), valid().max_by(by_value)) {
            (Some(lo), Some(hi)) if lo.0 == hi.0 => kept.push(Some(*lo)),
            (Some(lo), Some(hi)) if lo.0 < hi.0 => kept.extend([Some(*lo), Some(*hi)]),
            (Some(lo), Some(hi)) => kept.extend([Some(*hi), Some(*lo)]),
            _ => kept.push(None),
        }
    }
    kept.push(finite(&points[points.len() - 1]));
    kept
}

/// What a stretch of the curve amounts to.
struct Band {
    from: f64,
    to: f64,
    lo: f64,
    hi: f64,
    mean: f64,
}

/// Cuts the curve into at most `most` stretches of equal length and leaves out empty ones.
fn bands(points: &[(f64, f64)], most: usize) -> Vec<Band> {
    let stretches = points.chunks(points.len().div_ceil(most).max(1));
    let band = |stretch: &[(f64, f64)]| {
        let values: Vec<f64> = stretch.iter().map(|p| p.1).filter(|v| v.is_finite()).collect();
        let count = values.len() as f64;
        Some(Band {
            from: stretch.first()?.0,
            to: stretch.last()?.0,
            lo: values.iter().copied().reduce(f64::min)?,
            hi: values.iter().copied().reduce(f64::max)?,
            mean: values.iter().map(|v| v / count).sum(),
        })
    };
    stretches.filter_map(band).collect()
}

/// The mean over a twentieth of the curve around each stretch.
fn smoothed(bands: &[Band]) -> Vec<(f64, f64)> {
    let reach = bands.len() / 40;
    let mean = |i: usize| {
        let around = &bands[i.saturating_sub(reach)..bands.len().min(i + reach + 1)];
        around.iter().map(|b| b.mean / around.len() as f64).sum()
    };
    let middle = |band: &Band| (band.from + band.to) / 2.0;
    bands.iter().enumerate().map(|(i, band)| (middle(band), mean(i))).collect()
}

const CURVE_HEIGHT: f64 = 240.0;
/// More than a screen has columns for adds bytes and no ink.
const CURVE_POINTS: usize = 1000;
const BANDS: usize = 400;
/// Each is wide enough to be pointed at.
const HOVER_BANDS: usize = 100;
/// More dots than this run into each other.
const MARKED_EPOCHS: usize = 60;
const X_TICKS: usize = 6;
const Y_TICKS: usize = 5;
/// A loss that falls a hundredfold hides its second half at the bottom of a linear scale.
const LOG_FROM: f64 = 100.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thinned_curve_keeps_extremes_and_ends() {
        let mut points: Vec<_> = (0..100_000).map(|i| (f64::from(i), f64::from(i % 7))).collect();
        points[31_337].1 = 1e9;
        points[77_777].1 = -1e9;
        let thin = thinned(&points, 1000);
        assert!(thin.len() <= 1000, "{} points", thin.len());
        for i in [0, 31_337, 77_777, 99_999] {
            assert!(thin.contains(&Some(points[i])), "point {i} is gone");
        }
        assert!(thin.windows(2).all(|pair| pair[0].unwrap().0 <= pair[1].unwrap().0));
    }

    #[test]
    fn what_is_not_finite_is_a_gap() {
        let points = [(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)];
        assert_eq!(thinned(&points, 10), [Some(points[0]), None, Some(points[2])]);
        let many: Vec<_> = (0..5000).map(|i| (f64::from(i), f64::NAN)).collect();
        assert!(thinned(&many, 1000).iter().all(Option::is_none));
        assert!(bands(&many, 100).is_empty());
        assert_eq!(bands(&points, 1)[0].mean, 2.0);
    }

    #[test]
    fn smoothing_keeps_the_level_and_the_slope() {
        let points: Vec<_> = (0..4000).map(|i| (f64::from(i), f64::from(i % 2))).collect();
        let smooth = smoothed(&bands(&points, 400));
        assert_eq!(smooth.len(), 400);
        assert!(smooth.iter().all(|p| (p.1 - 0.5).abs() < 1e-9));
        let line: Vec<_> = (0..400).map(|i| (f64::from(i), f64::from(i))).collect();
        let smooth = smoothed(&bands(&line, 400));
        assert!(smooth[10..390].iter().all(|p| (p.0 - p.1).abs() < 1e-9));
        assert!(smooth.iter().all(|p| (p.0 - p.1).abs() < 5.1));
    }
}
