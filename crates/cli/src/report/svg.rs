//! What the charts have in common: text that cannot break out, axes, a frame to draw in.
//!
//! Charts have no fixed width. Positions along a flexible direction are percentages and sizes of
//! text and strokes are pixels, so that a chart is as legible on a telephone as on a wall.

use std::fmt::{self, Display, Write};

/// Text as it may stand in an element or in a quoted attribute.
pub(crate) struct Escaped<'a>(pub(crate) &'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // No page may contain them, escaped or not.
                c if c.is_control() && c != '\n' && c != '\t' => f.write_char('\u{fffd}')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// A coordinate, short. What is not a number becomes the origin: callers leave those out, and a
/// page must not break over one that slipped through.
pub(crate) struct At(pub(crate) f64);

impl Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = if self.0.is_finite() { self.0 } else { 0.0 };
        let text = format!("{value:.2}");
        let text = text.trim_end_matches('0').trim_end_matches('.');
        f.write_str(if text == "-0" { "0" } else { text })
    }
}

/// The range of values along one direction of a chart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    lo: f64,
    hi: f64,
    log: bool,
}

impl Axis {
    pub(crate) fn linear(lo: f64, hi: f64) -> Self {
        Self { lo, hi: if hi > lo { hi } else { lo + lo.abs().max(1.0) }, log: false }
    }

    /// For positive values of very different sizes.
    pub(crate) fn logarithmic(lo: f64, hi: f64) -> Self {
        let lo = lo.max(f64::MIN_POSITIVE);
        Self { lo, hi: if hi > lo { hi } else { lo * 10.0 }, log: true }
    }

    /// Extends a linear axis so that it begins and ends at a tick.
    pub(crate) fn rounded(self, about: usize) -> Self {
        let step = step(self.lo, self.hi, about);
        let lo = (self.lo / step).floor() * step;
        let hi = (self.hi / step).ceil() * step;
        if lo.is_finite() && hi.is_finite() { Self { lo, hi, ..self } } else { self }
    }

    pub(crate) fn is_log(&self) -> bool {
        self.log
    }

    /// Where `value` lies, from 0 at the low end to 1 at the high one.
    pub(crate) fn share(&self, value: f64) -> f64 {
        let share = if self.log {
            (value.max(self.lo).ln() - self.lo.ln()) / (self.hi.ln() - self.lo.ln())
        } else {
            // Halves, so that the range of the largest numbers does not overflow.
            (value / 2.0 - self.lo / 2.0) / (self.hi / 2.0 - self.lo / 2.0)
        };
        if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) }
    }

    /// About `about` round values within the range, never more than thrice as many.
    pub(crate) fn ticks(&self, about: usize) -> Vec<f64> {
        if self.log {
            let (first, last) = (self.lo.log10().ceil() as i32, self.hi.log10().floor() as i32);
            let every = ((last - first) / about.max(1) as i32 + 1).max(1);
            let powers = (first..=last).step_by(every as usize).map(|p| 10f64.powi(p));
            return powers.collect();
        }
        let step = step(self.lo, self.hi, about);
        let first = (self.lo / step - 1e-9).ceil();
        (0..3 * about.max(1))
            .map(|i| (first + i as f64) * step)
            .take_while(|&tick| tick <= self.hi + step * 1e-9)
            .map(|tick| if tick.abs() < step * 1e-9 { 0.0 } else { tick })
            .collect()
    }

    /// The ticks with as many decimals as tell them apart.
    pub(crate) fn labels(&self, about: usize) -> Vec<(f64, String)> {
        let ticks = self.ticks(about);
        let step = ticks.windows(2).map(|pair| pair[1] - pair[0]).fold(f64::INFINITY, f64::min);
        let decimals = if step.is_finite() { (-step.log10().floor()).clamp(0.0, 9.0) } else { 0.0 };
        let decimals = decimals as usize;
        let label = |tick: f64| match tick.abs() {
            size if self.log || size >= 1e6 => format!("{tick:e}"),
            _ => format!("{tick:.decimals$}"),
        };
        ticks.into_iter().map(|tick| (tick, label(tick))).collect()
    }
}

/// One of 1, 2 and 5 times a power of ten.
fn step(lo: f64, hi: f64, about: usize) -> f64 {
    let rough = (hi / 2.0 - lo / 2.0) / about.max(1) as f64 * 2.0;
    let power = 10f64.powf(rough.log10().floor());
    let times = match rough / power {
        r if r < 1.5 => 1.0,
        r if r < 3.5 => 2.0,
        r if r < 7.5 => 5.0,
        _ => 10.0,
    };
    let step = times * power;
    if step.is_finite() && step > 0.0 { step } else { f64::MAX / 4.0 }
}

/// Opens the drawing of a chart: as wide as there is room, `height` pixels high.
pub(crate) fn open(page: &mut String, id: &str, height: f64, title: &str, description: &str) {
    let _ = write!(
        page,
        "<svg width=\"100%\" height=\"{}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\
         <title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>",
        At(height),
        Escaped(title),
        Escaped(description),
    );
}

/// A legend: the class of each mark, and what the mark means.
pub(crate) fn legend(page: &mut String, entries: &[(&str, &str)]) {
    page.push_str("<ul class=\"legend\">");
    for (class, meaning) in entries {
        let _ = write!(page, "<li><i class=\"{class}\"></i>{}</li>", Escaped(meaning));
    }
    page.push_str("</ul>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_break_out() {
        let text = "<script>alert('x' & \"y\")</script>\u{1b}[31m\0\n";
        let escaped = Escaped(text).to_string();
        assert_eq!(
            escaped,
            "&lt;script&gt;alert(&#39;x&#39; &amp; &quot;y&quot;)&lt;/script&gt;\u{fffd}[31m\u{fffd}\n"
        );
    }

    #[test]
    fn coordinates_are_short_and_always_numbers() {
        let text = [12.3456, 5.0, -0.001, f64::NAN, f64::INFINITY].map(|v| At(v).to_string());
        assert_eq!(text, ["12.35", "5", "0", "0", "0"]);
    }

    #[test]
    fn ticks_are_round_and_few() {
        let labels = |axis: Axis| -> Vec<String> {
            axis.labels(5).into_iter().map(|(_, label)| label).collect()
        };
        assert_eq!(labels(Axis::linear(0.0, 2.3)), ["0.0", "0.5", "1.0", "1.5", "2.0"]);
        assert_eq!(labels(Axis::linear(0.97, 0.99)), ["0.970", "0.975", "0.980", "0.985", "0.990"]);
        assert_eq!(
            labels(Axis::linear(0.0, 1407.0)),
            ["0", "200", "400", "600", "800", "1000", "1200", "1400"]
        );
        assert_eq!(labels(Axis::logarithmic(1e-3, 10.0)), ["1e-3", "1e-2", "1e-1", "1e0", "1e1"]);
    }

    #[test]
    fn degenerate_ranges_have_an_axis_too() {
        for (lo, hi) in [(0.0, 0.0), (1.0, 1.0), (-f64::MAX, f64::MAX), (0.0, 5e-324), (3.0, 2.0)] {
            for axis in
                [Axis::linear(lo, hi), Axis::linear(lo, hi).rounded(5), Axis::logarithmic(lo, hi)]
            {
                assert!(axis.ticks(5).len() <= 15, "{axis:?}");
                for value in [lo, hi, 0.0] {
                    assert!((0.0..=1.0).contains(&axis.share(value)), "{value} on {axis:?}");
                }
            }
        }
    }
}
