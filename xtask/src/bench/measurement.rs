//! What one run of one contender reports.

use anyhow::{Context, Result};
use serde::Deserialize;

/// The JSON object every contender prints.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Measurement {
    /// Ranks that took part.
    pub(crate) workers: usize,
    /// Size of the exchanged buffer.
    pub(crate) bytes: u64,
    /// Timed iterations.
    pub(crate) iters: usize,
    /// What carried the bytes.
    pub(crate) link: Option<String>,
    /// Chunk size in bytes.
    pub(crate) chunk: Option<u64>,
    /// Lanes per node.
    pub(crate) lanes: Option<u64>,
    /// Seconds per iteration of the slowest rank.
    pub(crate) seconds: Quantiles,
    /// CPU seconds of all ranks together, mean per iteration.
    pub(crate) cpu_seconds_per_iter: f64,
    /// Bytes a node sends per iteration.
    pub(crate) bytes_sent_per_node: Option<f64>,
    /// The largest resident size of any rank.
    pub(crate) peak_rss_bytes: Option<u64>,
}

/// The mean and quantiles over the iterations of a run.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Quantiles {
    /// The mean.
    pub(crate) mean: f64,
    pub(crate) median: f64,
    pub(crate) p10: f64,
    pub(crate) p90: f64,
}

impl Measurement {
    /// Finds the object in what a contender printed.
    pub(crate) fn find(printed: &str) -> Result<Self> {
        let start = printed.find('{').context("no JSON object was printed")?;
        let mut values = serde_json::Deserializer::from_str(&printed[start..]).into_iter();
        let measurement = values.next().context("no JSON object was printed")?;
        measurement.with_context(|| format!("unexpected output: {}", printed.trim()))
    }
}

/// The middle of some values; the mean of the two middle ones when their number is even.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_is_found_among_other_output() {
        let printed = r#"warming up
            {"workers": 2, "bytes": 4, "iters": 1, "link": "tcp", "chunk": null, "lanes": 1,
             "seconds": {"mean": 0.6, "median": 0.5, "p10": 0.25, "p90": 1.0}, "cpu_seconds_per_iter": 0.75,
             "bytes_sent_per_node": 4, "peak_rss_bytes": null}
            done"#;
        let found = Measurement::find(printed).unwrap();
        assert_eq!((found.workers, found.lanes, found.chunk), (2, Some(1), None));
        assert_eq!(found.seconds.median, 0.5);
    }

    #[test]
    fn output_without_the_object_is_an_error_that_shows_it() {
        assert!(Measurement::find("nothing").is_err());
        let error = Measurement::find(r#"{"workers": 2}"#).unwrap_err();
        assert!(error.to_string().contains(r#"{"workers": 2}"#), "{error}");
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
