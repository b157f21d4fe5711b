//! The median of some values, such as ratios of a peer's time to ours, and how sure it is.
//!
//! All benchmarks that alternate tell ratios the same way: the peer's time by ours. Above 1 we are
//! faster.

use super::measurement::median;
use std::fmt;

/// A median with the interval it lies in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    /// The ends of the interval: two of the values themselves.
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// How probably the interval has the true median in it: at least [`WANTED`] where there are
    /// enough values for that.
    pub(crate) confidence: f64,
}

/// A peer's time beside ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The whole interval is above 1.
    Faster,
    /// 1 is in the interval.
    Equal,
    /// The whole interval is below 1.
    Slower,
}

/// What an interval is to have the true median with.
pub(crate) const WANTED: f64 = 0.95;

impl Ratio {
    /// By order statistics, which assume nothing of how the values are spread: the k-th smallest and
    /// the k-th largest value, with the largest k that is sure enough. With fewer than 6 values no k
    /// is; the interval is then from the smallest to the largest. `None` without values.
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let middle = median(values.clone())?;
        let sure = |k: &usize| confidence(values.len(), *k) >= WANTED;
        let k = (1..=values.len() / 2).rev().find(sure).unwrap_or(1);
        Some(Self {
            median: middle,
            low: values[k - 1],
            high: values[values.len() - k],
            confidence: confidence(values.len(), k),
        })
    }

    /// What a ratio of a peer's time to ours says of us.
    pub(crate) fn verdict(&self) -> Verdict {
        match self {
            ratio if ratio.high < 1.0 => Verdict::Slower,
            ratio if ratio.low > 1.0 => Verdict::Faster,
            _ => Verdict::Equal,
        }
    }
}

impl Verdict {
    /// In a word, as tables have it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Faster => "faster",
            Self::Equal => "no difference",
            Self::Slower => "**slower**",
        }
    }
}

/// "1.20 (1.10 to 1.30)", with two decimals unless more are asked for.
impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        let Self { median, low, high, .. } = self;
        write!(f, "{median:.digits$} ({low:.digits$} to {high:.digits$})")
    }
}

/// How probably a median lies between the k-th smallest and the k-th largest of `n` values: each
/// value is below the median as probably as above it, so at least k of them are on either side.
fn confidence(n: usize, k: usize) -> f64 {
    let mut term = 0.5_f64.powi(n as i32);
    let mut beyond = 0.0;
    for below in 0..k {
        beyond += term;
        term *= (n - below) as f64 / (below + 1) as f64;
    }
    1.0 - 2.0 * beyond
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tables of the sign test: n, k, confidence.
    #[test]
    fn intervals_are_those_of_the_tables() {
        for (n, low, high, sure) in [(6, 1, 6, 0.969), (10, 2, 9, 0.979), (20, 6, 15, 0.959)] {
            let ratio = Ratio::of((1..=n).map(f64::from).collect()).unwrap();
            assert_eq!((ratio.low, ratio.high), (f64::from(low), f64::from(high)));
            assert!((ratio.confidence - sure).abs() < 0.001, "{ratio:?}");
        }
    }

    #[test]
    fn few_values_give_their_range_and_say_how_little_that_is() {
        let ratio = Ratio::of(vec![3.0, 1.0, 2.0]).unwrap();
        let Ratio { median, low, high, confidence } = ratio;
        assert_eq!((median, low, high, confidence), (2.0, 1.0, 3.0, 0.75));
        assert_eq!(Ratio::of(vec![2.0]).unwrap().confidence, 0.0);
        assert_eq!(Ratio::of(Vec::new()), None);
    }

    #[test]
    fn a_verdict_takes_the_whole_interval() {
        let verdict = |low, high| Ratio { median: 1.0, low, high, confidence: 0.95 }.verdict();
        assert_eq!(verdict(1.01, 1.2), Verdict::Faster);
        assert_eq!(verdict(0.9, 1.01), Verdict::Equal);
        assert_eq!(verdict(0.9, 0.99), Verdict::Slower);
        let ratio = Ratio::of(vec![0.5, 1.25, 2.0]).unwrap();
        assert_eq!(format!("{ratio}, {ratio:.1}"), "1.25 (0.50 to 2.00), 1.2 (0.5 to 2.0)");
    }

    #[test]
    fn one_wild_value_does_not_move_the_interval() {
        let mut values: Vec<_> = (0..10).map(f64::from).collect();
        values[9] = 1e9;
        assert_eq!(Ratio::of(values).unwrap().high, 8.0);
    }
}
