//! What `bench exchange` measured, for people and for programs.

use super::worker::{Exchange, Turn};
use anyhow::ensure;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What one worker saw.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) seconds: Vec<f64>,
    pub(crate) cpu_seconds_per_iter: f64,
    /// Per iteration; `None` where it is not counted.
    pub(crate) bytes_sent: Option<f64>,
    pub(crate) peak_rss_bytes: u64,
    pub(crate) lanes: u16,
}

/// What the whole exchange cost. The keys are a contract with those who read them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Summary {
    workers: usize,
    what: &'static str,
    bytes: usize,
    iters: u32,
    busy: u16,
    link: String,
    chunk: usize,
    lanes: u16,
    optimizer: String,
    seconds: Seconds,
    cpu_seconds_per_iter: f64,
    /// Whose CPU time that is.
    cpu_of: CpuOf,
    bytes_sent_per_node: Option<u64>,
    peak_rss_bytes: u64,
}

/// Whose CPU time is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CpuOf {
    /// All nodes'.
    All,
    /// The workers' alone: no worker can see what dedicated servers on other hosts use.
    Workers,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Seconds {
    mean: f64,
    median: f64,
    p10: f64,
    p90: f64,
}

impl Summary {
    /// What the reports of all workers of one turn say together.
    pub(crate) fn new(
        reports: &[Report],
        turn: Turn,
        exchange: &Exchange,
        link: String,
        cpu_of: CpuOf,
    ) -> anyhow::Result<Self> {
        let iters = turn.iters as usize;
        ensure!(reports.iter().all(|r| r.seconds.len() == iters), "a worker left iterations out");
        // An iteration is over when the slowest worker has its result.
        let slowest = |i| reports.iter().map(|r| r.seconds[i]).fold(0.0, f64::max);
        let mut seconds: Vec<f64> = (0..iters).map(slowest).collect();
        seconds.sort_by(f64::total_cmp);
        let at = |share: f64| seconds[((iters - 1) as f64 * share).round() as usize];
        let mean = seconds.iter().sum::<f64>() / iters as f64;
        let sent = reports.iter().filter_map(|r| r.bytes_sent).reduce(f64::max);
        Ok(Self {
            workers: reports.len(),
            what: exchange.what.name(),
            bytes: turn.bytes,
            iters: turn.iters,
            busy: exchange.busy,
            link,
            chunk: exchange.chunk.max,
            lanes: reports.first().map_or(0, |r| r.lanes),
            optimizer: exchange.optimizer.to_string(),
            seconds: Seconds { mean, median: at(0.5), p10: at(0.1), p90: at(0.9) },
            cpu_seconds_per_iter: reports.iter().map(|r| r.cpu_seconds_per_iter).sum(),
            cpu_of,
            bytes_sent_per_node: sent.map(|bytes| bytes as u64),
            peak_rss_bytes: reports.iter().map(|r| r.peak_rss_bytes).max().unwrap_or(0),
        })
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MB: f64 = (1 << 20) as f64;
        let Seconds { median, p10, p90, .. } = self.seconds;
        let beside = match self.busy {
            0 => String::new(),
            busy => format!(", beside {busy} busy thread(s) per core"),
        };
        let cpu_of = match self.cpu_of {
            CpuOf::All => "CPU, all nodes",
            CpuOf::Workers => "CPU, workers",
        };
        let mut rows = vec![
            ("workers", format!("{}{beside}", self.workers)),
            (self.what, format!("{:.3} MB", self.bytes as f64 / MB)),
            ("update rule", self.optimizer.clone()),
            ("link, lanes", format!("{}, {}", self.link, self.lanes)),
            (
                "time",
                format!("{:.3} ms median ({:.3} to {:.3})", median * 1e3, p10 * 1e3, p90 * 1e3),
            ),
            (cpu_of, format!("{:.3} ms per iteration", self.cpu_seconds_per_iter * 1e3)),
        ];
        if let Some(sent) = self.bytes_sent_per_node {
            let rate = sent as f64 * 8e-9 / median;
            rows.push(("sent per node", format!("{:.3} MB per iteration", sent as f64 / MB)));
            rows.push(("wire rate", format!("{rate:.2} Gbit/s each way and node")));
        }
        rows.push(("peak memory", format!("{:.1} MB per node", self.peak_rss_bytes as f64 / MB)));
        let rows: Vec<_> =
            rows.into_iter().map(|(name, value)| format!("{name:<15} {value}")).collect();
        f.write_str(&rows.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::payload::What;
    use super::*;
    use poseidon::{ChunkSize, Optimizer, Reduction};

    fn report(seconds: &[f64], bytes_sent: Option<f64>) -> Report {
        let seconds = seconds.to_vec();
        Report { seconds, cpu_seconds_per_iter: 0.5, bytes_sent, peak_rss_bytes: 1 << 20, lanes: 2 }
    }

    fn summary(reports: &[Report], cpu_of: CpuOf) -> anyhow::Result<Summary> {
        let exchange = Exchange {
            what: What::AllReduce,
            sizes: vec![64],
            optimizer: Optimizer::Reduce(Reduction::Sum),
            chunk: ChunkSize::default(),
            busy: 1,
        };
        let turn = Turn { bytes: 64, iters: 3, warm_up: 1 };
        Summary::new(reports, turn, &exchange, "tcp".into(), cpu_of)
    }

    #[test]
    fn an_iteration_takes_as_long_as_its_slowest_worker() {
        let reports = [report(&[1.0, 5.0, 1.0], Some(10.0)), report(&[3.0, 1.0, 1.0], Some(20.0))];
        let summary = summary(&reports, CpuOf::All).unwrap();
        assert_eq!((summary.seconds.mean, summary.seconds.median), (3.0, 3.0));
        assert_eq!((summary.cpu_seconds_per_iter, summary.bytes_sent_per_node), (1.0, Some(20)));
        let text = summary.to_string();
        assert!(text.contains("workers         2, beside 1 busy thread(s) per core\n"), "{text}");
    }

    #[test]
    fn what_is_not_counted_is_not_told() {
        let text = summary(&[report(&[1.0; 3], None)], CpuOf::Workers).unwrap().to_string();
        assert!(!text.contains("sent per node") && text.contains("CPU, workers"), "{text}");
    }

    #[test]
    fn iterations_that_are_missing_are_noticed() {
        assert!(summary(&[report(&[1.0; 3], None), report(&[1.0; 2], None)], CpuOf::All).is_err());
    }
}
