//! What `bench exchange` measured, for people and for programs.

use super::worker::Exchange;
use anyhow::ensure;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What one worker saw.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) seconds: Vec<f64>,
    pub(crate) cpu_seconds_per_iter: f64,
    pub(crate) bytes_sent: f64,
    pub(crate) peak_rss_bytes: u64,
    pub(crate) lanes: u16,
}

/// What the whole exchange cost. The keys are a contract with those who read them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Summary {
    workers: usize,
    bytes: usize,
    iters: u32,
    link: String,
    chunk: usize,
    lanes: u16,
    optimizer: String,
    seconds: Seconds,
    cpu_seconds_per_iter: f64,
    bytes_sent_per_node: u64,
    peak_rss_bytes: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Seconds {
    median: f64,
    p10: f64,
    p90: f64,
}

impl Summary {
    pub(crate) fn new(
        reports: &[Report],
        exchange: &Exchange,
        link: String,
    ) -> anyhow::Result<Self> {
        let iters = exchange.iters as usize;
        ensure!(reports.iter().all(|r| r.seconds.len() == iters), "a worker left iterations out");
        // An iteration is over when the slowest worker has its result.
        let slowest = |i| reports.iter().map(|r| r.seconds[i]).fold(0.0, f64::max);
        let mut seconds: Vec<f64> = (0..iters).map(slowest).collect();
        seconds.sort_by(f64::total_cmp);
        let at = |share: f64| seconds[((iters - 1) as f64 * share).round() as usize];
        let most_sent = reports.iter().map(|r| r.bytes_sent).fold(0.0, f64::max);
        Ok(Self {
            workers: reports.len(),
            bytes: exchange.bytes,
            iters: exchange.iters,
            link,
            chunk: exchange.chunk.max,
            lanes: reports.first().map_or(0, |r| r.lanes),
            optimizer: exchange.optimizer.to_string(),
            seconds: Seconds { median: at(0.5), p10: at(0.1), p90: at(0.9) },
            cpu_seconds_per_iter: reports.iter().map(|r| r.cpu_seconds_per_iter).sum(),
            bytes_sent_per_node: most_sent as u64,
            peak_rss_bytes: reports.iter().map(|r| r.peak_rss_bytes).max().unwrap_or(0),
        })
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MB: f64 = (1 << 20) as f64;
        let Seconds { median, p10, p90 } = self.seconds;
        let rows = [
            ("workers", self.workers.to_string()),
            ("model", format!("{:.3} MB", self.bytes as f64 / MB)),
            ("update rule", self.optimizer.clone()),
            ("link, lanes", format!("{}, {}", self.link, self.lanes)),
            (
                "time",
                format!("{:.3} ms median ({:.3} to {:.3})", median * 1e3, p10 * 1e3, p90 * 1e3),
            ),
            ("CPU, all nodes", format!("{:.3} ms per iteration", self.cpu_seconds_per_iter * 1e3)),
            (
                "sent per node",
                format!("{:.3} MB per iteration", self.bytes_sent_per_node as f64 / MB),
            ),
            (
                "wire rate",
                format!(
                    "{:.2} Gbit/s each way and node",
                    self.bytes_sent_per_node as f64 * 8e-9 / median
                ),
            ),
            ("peak memory", format!("{:.1} MB per node", self.peak_rss_bytes as f64 / MB)),
        ];
        let rows = rows.map(|(name, value)| format!("{name:<15} {value}"));
        f.write_str(&rows.join("\n"))
    }
}

/// Rows of `f32`s, for gathering reports by summing a table. Whole numbers are cut in two parts
/// that an `f32` holds exactly.
impl Report {
    const HALF: f64 = (1 << 20) as f64;

    pub(crate) fn width(iters: u32) -> usize {
        iters as usize + 5
    }

    pub(crate) fn to_row(&self) -> Vec<f32> {
        let halves = |x: f64| [(x / Self::HALF).floor() as f32, (x % Self::HALF).floor() as f32];
        let mut row: Vec<f32> = self.seconds.iter().map(|&s| s as f32).collect();
        row.push(self.cpu_seconds_per_iter as f32);
        row.extend(halves(self.bytes_sent));
        row.extend(halves(self.peak_rss_bytes as f64));
        row
    }

    pub(crate) fn from_row(row: &[f32], scale: f32, lanes: u16) -> Self {
        let values: Vec<f64> = row.iter().map(|&v| f64::from(v) * f64::from(scale)).collect();
        let (seconds, rest) = values.split_at(row.len() - 5);
        let whole = |halves: &[f64]| halves[0].round() * Self::HALF + halves[1].round();
        Self {
            seconds: seconds.to_vec(),
            cpu_seconds_per_iter: rest[0],
            bytes_sent: whole(&rest[1..3]),
            peak_rss_bytes: whole(&rest[3..5]) as u64,
            lanes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_survives_being_summed_in_a_table() {
        let report = Report {
            seconds: vec![0.5, 0.25],
            cpu_seconds_per_iter: 0.125,
            bytes_sent: 183_500_801.0,
            peak_rss_bytes: 12_345_678_848,
            lanes: 2,
        };
        let row = report.to_row();
        assert_eq!(row.len(), Report::width(2));
        let back = Report::from_row(&row, 1.0, 2);
        assert_eq!(back.seconds, report.seconds);
        assert_eq!(back.bytes_sent, report.bytes_sent);
        assert_eq!(back.peak_rss_bytes, report.peak_rss_bytes);
    }
}
