//! The grid of results, and its table.

use super::contender::{Case, Contender};
use super::measurement::{Measurement, median};
use super::targets;
use std::fmt::Write;

/// One run of one contender.
pub(crate) struct Run {
    pub(crate) round: usize,
    pub(crate) contender: Contender,
    pub(crate) case: Case,
    /// What it measured, or why it failed.
    pub(crate) result: Result<Measurement, String>,
}

/// All runs of a benchmark.
#[derive(Default)]
pub(crate) struct Grid {
    pub(crate) runs: Vec<Run>,
}

/// First line of `raw.csv`.
pub(crate) const CSV_HEADER: &str = "round,contender,workers,bytes,iters,link,chunk,lanes,\
    median_s,p10_s,p90_s,cpu_s_per_iter,bytes_sent_per_node,peak_rss_bytes";

impl Run {
    /// Its line of `raw.csv`; failed runs have none.
    pub(crate) fn csv(&self) -> Option<String> {
        let m = self.result.as_ref().ok()?;
        let or_empty = |value: Option<String>| value.unwrap_or_default();
        Some(format!(
            "{},{},{},{},{},{},{},{},{:.9},{:.9},{:.9},{:.9},{},{}",
            self.round,
            self.contender.name(),
            m.workers,
            m.bytes,
            m.iters,
            or_empty(m.link.clone()),
            or_empty(m.chunk.map(|chunk| chunk.to_string())),
            or_empty(m.lanes.map(|lanes| lanes.to_string())),
            m.seconds.median,
            m.seconds.p10,
            m.seconds.p90,
            m.cpu_seconds_per_iter,
            or_empty(m.bytes_sent_per_node.map(|bytes| bytes.to_string())),
            or_empty(m.peak_rss_bytes.map(|bytes| bytes.to_string())),
        ))
    }
}

impl Grid {
    /// Seconds per exchange: the median over rounds of the rounds' medians.
    pub(crate) fn seconds(&self, contender: Contender, case: Case) -> Option<f64> {
        median(self.measurements(contender, case).map(|m| m.seconds.median).collect())
    }

    /// CPU seconds per exchange, all ranks together: the median over rounds.
    pub(crate) fn cpu(&self, contender: Contender, case: Case) -> Option<f64> {
        median(self.measurements(contender, case).map(|m| m.cpu_seconds_per_iter).collect())
    }

    /// The largest memory any rank had in any round.
    pub(crate) fn peak_rss(&self, contender: Contender, case: Case) -> Option<u64> {
        self.measurements(contender, case).filter_map(|m| m.peak_rss_bytes).max()
    }

    /// How many times faster than `ours` a case is compared to `theirs`.
    pub(crate) fn speedup(&self, ours: Contender, theirs: Contender, case: Case) -> Option<f64> {
        Some(self.seconds(theirs, case)? / self.seconds(ours, case)?)
    }

    /// CPU of `ours` as a part of `theirs`.
    pub(crate) fn cpu_ratio(&self, ours: Contender, theirs: Contender, case: Case) -> Option<f64> {
        Some(self.cpu(ours, case)? / self.cpu(theirs, case)?)
    }

    /// The cases that were run, in order.
    pub(crate) fn cases(&self) -> Vec<Case> {
        let mut cases: Vec<_> = self.runs.iter().map(|run| run.case).collect();
        cases.sort_unstable();
        cases.dedup();
        cases
    }

    /// The contenders that took part, in order.
    pub(crate) fn contenders(&self) -> Vec<Contender> {
        let mut contenders: Vec<_> = self.runs.iter().map(|run| run.contender).collect();
        contenders.sort_unstable();
        contenders.dedup();
        contenders
    }

    /// Runs that measured nothing.
    pub(crate) fn failures(&self) -> impl Iterator<Item = (&Run, &str)> {
        self.runs.iter().filter_map(|run| Some((run, run.result.as_ref().err()?.as_str())))
    }

    fn measurements(&self, who: Contender, case: Case) -> impl Iterator<Item = &Measurement> {
        let runs = self.runs.iter().filter(move |run| run.contender == who && run.case == case);
        runs.filter_map(|run| run.result.as_ref().ok())
    }
}

/// The text of `summary.md`.
pub(crate) fn markdown(grid: &Grid, rounds: usize) -> String {
    let mut text = format!(
        "# Exchange\n\nMilliseconds to sum one buffer over P processes of this machine: the slowest rank's time, \
         median over iterations, then over {rounds} round(s). KB and MB are powers of 1024.\n\n"
    );
    let contenders = grid.contenders();
    text += "| P | size |";
    contenders.iter().for_each(|contender| text += &format!(" {} |", contender.name()));
    text += " gloo / poseidon-tcp | openmpi-tcp / poseidon-tcp | openmpi-shm / poseidon-local | CPU poseidon-tcp / gloo |\n";
    text += &format!("|{}\n", " ---: |".repeat(contenders.len() + 6));
    use Contender::{Gloo, OpenmpiShm, OpenmpiTcp, PoseidonLocal, PoseidonTcp};
    for case in grid.cases() {
        text += &format!("| {} | {} |", case.workers, case.size);
        for contender in &contenders {
            let ms = grid.seconds(*contender, case).map(|seconds| format!("{:.3}", seconds * 1e3));
            text += &format!(" {} |", ms.as_deref().unwrap_or("-"));
        }
        let ratios = [
            grid.speedup(PoseidonTcp, Gloo, case),
            grid.speedup(PoseidonTcp, OpenmpiTcp, case),
            grid.speedup(PoseidonLocal, OpenmpiShm, case),
            grid.cpu_ratio(PoseidonTcp, Gloo, case),
        ];
        for ratio in ratios {
            text += &format!(" {} |", ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")));
        }
        text += "\n";
    }

    text += "\n## Targets\n\n| target | measured | verdict |\n| --- | --- | --- |\n";
    for verdict in targets::verdicts(grid) {
        text += &format!("| {} | {} | {} |\n", verdict.target, verdict.measured, verdict.word());
    }

    if grid.failures().next().is_some() {
        text += "\n## Failed runs\n\n";
        for (run, why) in grid.failures() {
            let Case { workers, size } = run.case;
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "- round {}, {}, P={workers}, {size}: {}",
                run.round,
                run.contender.name(),
                why.lines().last().unwrap_or_default()
            );
        }
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::measurement::Quantiles;
    use super::super::size::Size;
    use super::*;

    /// A run that took `ms` milliseconds of time and of CPU, with 100 MB of memory.
    pub(crate) fn run(round: usize, contender: Contender, case: Case, ms: f64) -> Run {
        let s = ms / 1e3;
        let result = Ok(Measurement {
            workers: case.workers,
            bytes: case.size.0,
            iters: 1,
            link: Some("tcp".to_owned()),
            chunk: None,
            lanes: None,
            seconds: Quantiles { mean: s, median: s, p10: s, p90: s },
            cpu_seconds_per_iter: s,
            bytes_sent_per_node: None,
            peak_rss_bytes: Some(100 << 20),
        });
        Run { round, contender, case, result }
    }

    #[test]
    fn rounds_are_joined_by_their_median() {
        let case = Case { workers: 2, size: Size::kb(64) };
        let mut grid = Grid::default();
        for (round, ms) in [(1, 9.0), (2, 1.0), (3, 2.0)] {
            grid.runs.push(run(round, Contender::PoseidonTcp, case, ms));
            grid.runs.push(run(round, Contender::Gloo, case, 4.0));
        }
        assert_eq!(grid.seconds(Contender::PoseidonTcp, case), Some(0.002));
        assert_eq!(grid.speedup(Contender::PoseidonTcp, Contender::Gloo, case), Some(2.0));
        let line = "| 2 | 64KB | 2.000 | 4.000 | 2.00 | - | - | 0.50 |\n";
        let text = markdown(&grid, 3);
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn failed_runs_are_told_and_have_no_csv() {
        let case = Case { workers: 8, size: Size::mb(1) };
        let result = Err("long story\nno route".to_owned());
        let failed = Run { round: 2, contender: Contender::Gloo, case, result };
        assert_eq!(failed.csv(), None);
        let text = markdown(&Grid { runs: vec![failed] }, 3);
        assert!(text.contains("- round 2, gloo, P=8, 1MB: no route\n"), "{text}");
    }

    #[test]
    fn csv_has_a_value_for_every_column() {
        let case = Case { workers: 2, size: Size::kb(64) };
        let line = run(1, Contender::Gloo, case, 1.5).csv().unwrap();
        assert_eq!(line.split(',').count(), CSV_HEADER.split(',').count());
        assert!(line.starts_with("1,gloo,2,65536,1,tcp,,,0.001500000,"), "{line}");
    }
}
