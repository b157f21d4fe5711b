//! What the turns of several jobs showed, beside each other.

use super::Bench;
use crate::bench::measurement::median;
use crate::bench::ratio::{Ratio, WANTED};
use crate::bench::size::Size;
use crate::bench::turns::Turn;

/// What a turn showed.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) turn: Turn,
    /// Bytes for one exchange, headers included, in the busiest direction of the busiest link that
    /// the part is about.
    pub(super) link: f64,
}

/// All rounds of one case.
#[derive(Clone, Debug)]
pub(super) struct Rounds {
    /// Iterations of every turn.
    pub(super) iters: u64,
    /// By way.
    pub(super) names: Vec<&'static str>,
    /// By round, by way.
    pub(super) seen: Vec<Vec<Seen>>,
}

/// The columns that [`Rounds::rows`] fills, after those that say which case it is. `base` is what
/// all ways are compared with, and `link` the link that the part is about.
pub(super) fn heading(case: &[&str], base: &str, link: &str) -> String {
    let columns = [
        "way".to_owned(),
        "seconds".to_owned(),
        format!("{base} / it"),
        String::new(),
        format!("MB on {link}"),
        "bound".to_owned(),
        "CPU, s".to_owned(),
    ];
    let names: Vec<_> = case.iter().map(|name| (*name).to_owned()).chain(columns).collect();
    format!("| {} |\n|{}\n", names.join(" | "), " --- |".repeat(names.len()))
}

/// What the columns mean.
pub(super) fn legend(bench: &Bench<'_>, base: &str, link: &str) -> String {
    let count = bench.args.rounds as usize;
    let confidence = Ratio::of(vec![1.0; count]).map_or(0.0, |ratio| ratio.confidence);
    let more = if confidence < WANTED { " For 95% it takes at least 6 rounds." } else { "" };
    format!(
        "All jobs are on all nodes and take turns: {count} rounds with a turn of each, begun by \
         each in turn. Seconds are of an exchange, of its slowest worker: the mean over a turn, \
         the median over turns. In brackets is the median's interval by order statistics, which \
         has the true median in it with {:.1}% probability.{more} *{base} / it* is how many \
         times as long the way *{base}* takes, in the same round: above 1 the other way is faster. \
         *MB on {link}* is what its busiest direction carried for one exchange, headers included \
         (MB are 10^6 bytes here, sizes are powers of 1024). *Bound* is the part of the speed that \
         the links allow this way. CPU seconds are of all workers together, for one exchange.\n",
        100.0 * confidence
    )
}

impl Rounds {
    /// How many times as long the way `base` takes as `way`.
    pub(super) fn ratio(&self, base: usize, way: usize) -> Option<Ratio> {
        let seconds = |seen: &Seen| seen.turn.seconds();
        Ratio::of(self.seen.iter().map(|of| seconds(&of[base]) / seconds(&of[way])).collect())
    }

    /// How many times as many bytes the busiest link carries by the way `base` as by `way`.
    pub(super) fn fewer_bytes(&self, base: usize, way: usize) -> Option<f64> {
        median(self.seen.iter().map(|of| of[base].link / of[way].link).collect())
    }

    /// The bytes of [`Seen::link`] by this way.
    pub(super) fn link(&self, way: usize) -> f64 {
        self.middle(way, |seen| seen.link)
    }

    fn of<'a>(&'a self, way: usize) -> impl Iterator<Item = &'a Seen> + 'a {
        self.seen.iter().map(move |round| &round[way])
    }

    fn middle(&self, way: usize, value: impl Fn(&Seen) -> f64) -> f64 {
        median(self.of(way).map(value).collect()).unwrap_or(f64::NAN)
    }

    /// A row for each way. `case` are the cells before. `bounds` has for each way the seconds that
    /// links allow no exchange to be shorter than.
    pub(super) fn rows(&self, case: &str, bounds: &[f64], base: usize) -> String {
        let row = |(way, name): (usize, &&str)| {
            let seconds = Ratio::of(self.of(way).map(|seen| seen.turn.seconds()).collect());
            let ratio = self.ratio(base, way).filter(|_| way != base);
            let verdict = ratio.map_or("", |ratio| ratio.verdict().word());
            format!(
                "| {case} | {name} | {} | {} | {verdict} | {:.2} | {:.0}% | {:.3} |\n",
                seconds.map_or("-".into(), |seconds| format!("{seconds:.4}")),
                ratio.map_or("-".into(), |ratio| ratio.to_string()),
                self.link(way) / 1e6,
                100.0 * bounds[way] / self.middle(way, |seen| seen.turn.seconds()),
                self.middle(way, |seen| seen.turn.cpu()),
            )
        };
        self.names.iter().enumerate().map(row).collect()
    }

    /// Lines for the terminal.
    pub(super) fn lines(&self, base: usize) -> String {
        let line = |(way, name): (usize, &&str)| {
            let ratio = self.ratio(base, way).filter(|_| way != base);
            let beside = ratio.map(|ratio| format!(", {} / it {ratio}", self.names[base]));
            format!(
                "\n  {name:<20} {:.4} s, {:.2} MB on the busiest link{}",
                self.middle(way, |seen| seen.turn.seconds()),
                self.link(way) / 1e6,
                beside.unwrap_or_default()
            )
        };
        let lines: String = self.names.iter().enumerate().map(line).collect();
        format!(", {} iterations:{lines}", self.iters)
    }

    /// Its lines of `raw.csv`. `part` and `case` have no commas.
    pub(super) fn csv(&self, bench: &Bench<'_>, part: &str, case: &str, size: Size) -> String {
        let args = bench.args;
        let mut text = String::new();
        for (round, seen) in self.seen.iter().enumerate() {
            for (way, Seen { turn, link }) in seen.iter().enumerate() {
                let count = seen.len();
                let place = (way + count - round % count) % count + 1;
                let (m, name) = (&turn.measurement, self.names[way].replace(',', ""));
                text += &format!(
                    "{part},{case},{},{},{},{},{},{place},{name},{},{:.6},{:.6},{:.6},{:.6},\
                     {:.6},{},{:.0},{:.0}\n",
                    args.nodes,
                    args.mbit,
                    args.queue,
                    size.0,
                    round + 1,
                    self.iters,
                    m.seconds.mean,
                    m.seconds.median,
                    m.seconds.p10,
                    m.seconds.p90,
                    m.cpu_seconds_per_iter,
                    m.lanes.unwrap_or(0),
                    link,
                    turn.most_wire,
                );
            }
        }
        text
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::bench::contender::{Case, Contender};
    use crate::bench::racks::tests::args;
    use crate::bench::summary::tests::run;
    use std::path::PathBuf;

    /// Six rounds in which the ways take so many ms and bytes.
    pub(in crate::bench::racks) fn rounds(ways: &[(&'static str, f64, f64)]) -> Rounds {
        let case = Case { workers: 8, size: Size::mb(10) };
        let seen = |&(_, ms, link): &(&str, f64, f64)| {
            let measurement = run(1, Contender::Gloo, case, ms).result.unwrap();
            Seen { turn: Turn { measurement, wire: 0.0, most_wire: 7.0 }, link }
        };
        let round = || ways.iter().map(seen).collect();
        let names = ways.iter().map(|(name, ..)| *name).collect();
        Rounds { iters: 3, names, seen: (0..6).map(|_| round()).collect() }
    }

    #[test]
    fn ways_have_a_row_each_and_are_compared_with_one() {
        let rounds = rounds(&[("named", 160.0, 1e7), ("flat", 320.0, 2e7)]);
        let text = rounds.rows("4 | 10MB", &[0.15, 0.30], 1);
        let named = "| 4 | 10MB | named | 0.1600 (0.1600 to 0.1600) | 2.00 (2.00 to 2.00) | \
                     faster | 10.00 | 94% |";
        let flat = "| 4 | 10MB | flat | 0.3200 (0.3200 to 0.3200) | - |  | 20.00 | 94% |";
        assert!(text.contains(named) && text.contains(flat), "{text}");
        assert_eq!(rounds.fewer_bytes(1, 0), Some(2.0));
        let heading = heading(&["oversubscription", "size"], "flat", "a rack's link");
        let columns = |line: &str| line.matches('|').count();
        assert!(heading.lines().chain(text.lines()).all(|line| columns(line) == 10), "{heading}");
    }

    #[test]
    fn the_place_of_a_turn_is_recorded() {
        let args = args(&[]);
        let bench = Bench { args: &args, poseidon: String::new(), folder: PathBuf::new() };
        let text = rounds(&[("named", 160.0, 1e7), ("flat", 320.0, 2e7)]).csv(
            &bench,
            "racks",
            "4 runs",
            Size::mb(10),
        );
        let lines: Vec<_> = text.lines().collect();
        assert!(
            lines[0].starts_with("racks,4 runs,8,1000,2mb,10485760,1,1,named,3,0.16"),
            "{text}"
        );
        assert!(lines[2].starts_with("racks,4 runs,8,1000,2mb,10485760,2,2,named,3,"), "{text}");
        assert!(lines[3].starts_with("racks,4 runs,8,1000,2mb,10485760,2,1,flat,3,"), "{text}");
        let columns = crate::bench::racks::RAW_HEADER.matches(',').count();
        assert!(lines.iter().all(|line| line.matches(',').count() == columns), "{text}");
    }
}
