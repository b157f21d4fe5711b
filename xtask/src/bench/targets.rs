//! What the exchange has to reach, and whether it did.

use super::contender::Case;
use super::contender::Contender::{self, Gloo, OpenmpiShm, OpenmpiTcp, PoseidonLocal, PoseidonTcp};
use super::size::Size;
use super::summary::Grid;

/// A target and how it went.
pub(crate) struct Verdict {
    /// What was asked.
    pub(crate) target: String,
    /// What was measured, in words.
    pub(crate) measured: String,
    /// Whether that is enough; none when it was not measured.
    pub(crate) met: Option<bool>,
}

const SMALL: Size = Size::kb(64);
const MEDIUM: Size = Size::mb(16);
const LARGE: Size = Size::mb(100);

/// Worker counts the targets are stated for.
const WORKERS: [usize; 3] = [2, 4, 8];

/// What a node may use beyond the bytes that training itself needs.
const SPARE: Size = Size::mb(64);

impl Verdict {
    /// The verdict in a word.
    pub(crate) fn word(&self) -> &'static str {
        match self.met {
            Some(true) => "met",
            Some(false) => "**missed**",
            None => "not measured",
        }
    }

    fn new(target: String, value: Option<f64>, unit: &str, enough: impl Fn(f64) -> bool) -> Self {
        let measured = value.map_or("-".to_owned(), |value| format!("{value:.2}{unit}"));
        Self { target, measured, met: value.map(enough) }
    }
}

/// Every target with its verdict.
pub(crate) fn verdicts(grid: &Grid) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for workers in WORKERS {
        let large = Case { workers, size: LARGE };
        for peer in [Gloo, OpenmpiTcp] {
            let target = format!("{LARGE}, P={workers}, TCP: at least 2x {}", peer.name());
            let speedup = grid.speedup(PoseidonTcp, peer, large);
            verdicts.push(Verdict::new(target, speedup, "x", |x| x >= 2.0));
        }
        let target = format!("{LARGE}, P={workers}, TCP: CPU at most 60% of gloo's");
        let cpu = grid.cpu_ratio(PoseidonTcp, Gloo, large).map(|ratio| ratio * 100.0);
        verdicts.push(Verdict::new(target, cpu, "%", |percent| percent <= 60.0));

        let target = format!("{LARGE}, P={workers}, local link: at least 1.5x openmpi-shm");
        let speedup = grid.speedup(PoseidonLocal, OpenmpiShm, large);
        verdicts.push(Verdict::new(target, speedup, "x", |x| x >= 1.5));
    }

    let target = format!("{SMALL}, P=8, TCP: no slower than openmpi-tcp");
    let speedup = grid.speedup(PoseidonTcp, OpenmpiTcp, Case { workers: 8, size: SMALL });
    verdicts.push(Verdict::new(target, speedup, "x", |x| x >= 1.0));

    for ours in [PoseidonTcp, PoseidonLocal] {
        for workers in WORKERS {
            verdicts.push(growth(grid, ours, workers));
        }
    }
    for ours in [PoseidonTcp, PoseidonLocal] {
        for workers in WORKERS {
            verdicts.push(memory(grid, ours, workers));
        }
    }
    verdicts
}

/// Large buffers must not cost more per byte than ones that nearly fit the cache.
fn growth(grid: &Grid, ours: Contender, workers: usize) -> Verdict {
    let per_byte = |size: Size| Some(grid.seconds(ours, Case { workers, size })? / size.0 as f64);
    let ratio = per_byte(LARGE).zip(per_byte(MEDIUM)).map(|(large, medium)| large / medium);
    let target = format!(
        "{}, P={workers}: time per byte at {LARGE} within 15% of that at {MEDIUM}",
        ours.name()
    );
    Verdict::new(target, ratio.map(|ratio| (ratio - 1.0) * 100.0), "% more", |more| more <= 15.0)
}

/// The exchange has as many bytes of parameters as of gradients, and no optimizer state.
fn memory(grid: &Grid, ours: Contender, workers: usize) -> Verdict {
    let (parameters, gradients, state) = (LARGE.0, LARGE.0, 0);
    let limit = parameters + gradients + (parameters + state) / workers as u64 + SPARE.0;
    let mb = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let target = format!(
        "{}, P={workers}, {LARGE}: peak memory of a node at most parameters + gradients + (parameters + \
         optimizer state) / P + {SPARE} = {:.1} MB",
        ours.name(),
        mb(limit)
    );
    let peak = grid.peak_rss(ours, Case { workers, size: LARGE }).map(mb);
    Verdict::new(target, peak, " MB", |peak| peak <= mb(limit))
}

#[cfg(test)]
mod tests {
    use super::super::summary::tests::run;
    use super::*;

    fn grid(poseidon_ms: f64) -> Grid {
        let mut grid = Grid::default();
        for workers in WORKERS {
            for size in [SMALL, MEDIUM, LARGE] {
                let case = Case { workers, size };
                // Time in proportion to size, so that the growth target holds.
                let scale = size.0 as f64 / LARGE.0 as f64;
                for (contender, ms) in [
                    (PoseidonTcp, poseidon_ms),
                    (PoseidonLocal, poseidon_ms),
                    (Gloo, 100.0),
                    (OpenmpiTcp, 100.0),
                    (OpenmpiShm, 100.0),
                ] {
                    grid.runs.push(run(1, contender, case, ms * scale));
                }
            }
        }
        grid
    }

    fn missed(grid: &Grid) -> Vec<String> {
        let missed = verdicts(grid).into_iter().filter(|verdict| verdict.met == Some(false));
        missed.map(|verdict| verdict.target).collect()
    }

    #[test]
    fn twice_as_fast_meets_every_target() {
        let verdicts = verdicts(&grid(50.0));
        assert!(verdicts.iter().all(|verdict| verdict.met == Some(true)));
        assert_eq!(verdicts.len(), 3 * 4 + 1 + 3 * 2 + 3 * 2);
    }

    #[test]
    fn slower_misses_what_is_about_speed() {
        // 1.6x: still enough against shared memory, on 64 KB, on growth and on memory.
        assert_eq!(missed(&grid(62.5)).len(), 3 * 3);
        assert_eq!(missed(&grid(101.0)).len(), 3 * 4 + 1);
    }

    #[test]
    fn growth_and_memory_are_judged() {
        let mut grid = grid(50.0);
        for run in &mut grid.runs {
            let Ok(measurement) = &mut run.result else { continue };
            if run.case == (Case { workers: 4, size: LARGE }) && run.contender == PoseidonTcp {
                measurement.seconds.median *= 1.2;
                measurement.peak_rss_bytes = Some(LARGE.0 * 9 / 4 + SPARE.0 + 1);
            }
        }
        let missed = missed(&grid);
        assert!(missed.iter().any(|target| target.contains("within 15%")), "{missed:?}");
        assert!(missed.iter().any(|target| target.contains("peak memory")), "{missed:?}");
    }

    #[test]
    fn nothing_is_claimed_without_a_run() {
        assert!(verdicts(&Grid::default()).iter().all(|verdict| verdict.met.is_none()));
    }
}
