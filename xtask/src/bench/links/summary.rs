//! What all cases show, as tables.

use super::grid::{Case, What};
use crate::bench::measurement::median;
use crate::bench::ratio::{Ratio, Verdict, WANTED};
use crate::bench::size::Size;
use crate::bench::turns::Turn;
use std::fmt;

/// Who is measured beside us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Gloo,
    /// Another version of Poseidon.
    Other,
}

impl Peer {
    /// In tables and files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gloo => "gloo",
            Self::Other => "other",
        }
    }

    /// In sentences.
    fn words(self) -> &'static str {
        match self {
            Self::Gloo => "Gloo",
            Self::Other => "the other Poseidon",
        }
    }
}

/// All that was found out.
pub(crate) struct Summary {
    peer: Peer,
    pairs: usize,
    congestion: String,
    rows: u64,
    pub(crate) cases: Vec<Measured>,
    /// In words: what, and why.
    pub(crate) left_out: Vec<(String, String)>,
    pub(crate) not_reached: Vec<Case>,
}

/// A case that was measured.
pub(crate) struct Measured {
    pub(crate) case: Case,
    /// What was seen, or why nothing was.
    pub(crate) outcome: Result<Outcome, String>,
}

/// All pairs of a case.
pub(crate) struct Outcome {
    /// Iterations of every turn.
    pub(crate) iters: u64,
    pub(crate) pairs: Vec<Pair>,
}

/// A turn of each contender, one after the other.
pub(crate) struct Pair {
    pub(crate) ours_first: bool,
    pub(crate) ours: Turn,
    pub(crate) peer: Turn,
}

/// First line of `raw.csv`.
pub(crate) const CSV_HEADER: &str = "nodes,mbit,slow_mbit,queue_bytes,congestion,bytes,what,busy,pair,turn,\
    contender,iters,mean_s,median_s,p10_s,p90_s,cpu_s_per_iter,least_wire_bytes_per_iter";

/// Part of the link that an exchange has to use, and the size from which on it has to.
const TARGET: f64 = 0.95;
const FROM: Size = Size::mb(10);

impl Summary {
    pub(crate) fn new(peer: Peer, pairs: usize, congestion: &str, rows: u64) -> Self {
        let (cases, left_out, not_reached) = (Vec::new(), Vec::new(), Vec::new());
        let congestion = congestion.to_owned();
        Self { peer, pairs, congestion, rows, cases, left_out, not_reached }
    }

    /// How many cases failed.
    pub(crate) fn failures(&self) -> usize {
        self.cases.iter().filter(|measured| measured.outcome.is_err()).count()
    }

    fn seen(&self) -> impl Iterator<Item = (&Case, &Outcome)> {
        self.cases
            .iter()
            .filter_map(|measured| Some((&measured.case, measured.outcome.as_ref().ok()?)))
    }
}

impl Measured {
    /// A line for the terminal.
    pub(crate) fn line(&self, peer: Peer) -> String {
        let Ok(outcome) = &self.outcome else { return format!("{}: failed", self.case) };
        let [ours, theirs] = outcome.medians(Turn::seconds);
        let ratio = outcome.ratio();
        format!(
            "{}: poseidon {ours:.4} s, {} {theirs:.4} s, {} {}",
            self.case,
            peer.name(),
            ratio,
            ratio.verdict().word()
        )
    }

    /// Its lines of `raw.csv`; failed cases have none.
    pub(crate) fn csv(&self, peer: Peer, congestion: &str) -> String {
        let Case { network, what, busy, size } = self.case;
        let Ok(outcome) = &self.outcome else { return String::new() };
        let mut text = String::new();
        for (number, pair) in outcome.pairs.iter().enumerate() {
            let turns = [
                ("poseidon", &pair.ours, !pair.ours_first),
                (peer.name(), &pair.peer, pair.ours_first),
            ];
            for (name, turn, second) in turns {
                let (m, turn_number) = (&turn.measurement, 1 + u8::from(second));
                text += &format!(
                    "{},{},{},{},{congestion},{},{},{busy},{},{turn_number},{name},{},{:.6},{:.6},{:.6},{:.6},{:.6},{:.0}\n",
                    network.nodes,
                    network.mbit,
                    network.slow.map_or(String::new(), |mbit| mbit.to_string()),
                    network.queue.0,
                    size.0,
                    what.name(),
                    number + 1,
                    outcome.iters,
                    m.seconds.mean,
                    m.seconds.median,
                    m.seconds.p10,
                    m.seconds.p90,
                    m.cpu_seconds_per_iter,
                    turn.wire
                );
            }
        }
        text
    }
}

impl Outcome {
    /// How many times as long the peer takes.
    fn ratio(&self) -> Ratio {
        let ratios = self.pairs.iter().map(|pair| pair.peer.seconds() / pair.ours.seconds());
        let nothing = f64::NAN;
        let unknown = Ratio { median: nothing, low: nothing, high: nothing, confidence: 0.0 };
        Ratio::of(ratios.collect()).unwrap_or(unknown)
    }

    /// Medians over the pairs: ours, the peer's.
    fn medians(&self, value: impl Fn(&Turn) -> f64) -> [f64; 2] {
        let of = |turns: Vec<f64>| median(turns).unwrap_or(f64::NAN);
        let ours = self.pairs.iter().map(|pair| value(&pair.ours)).collect();
        [of(ours), of(self.pairs.iter().map(|pair| value(&pair.peer)).collect())]
    }

    /// Parts of the link by wire bytes: ours, the peer's.
    fn link_use(&self, case: &Case) -> [f64; 2] {
        let rate = case.network.bytes_per_second();
        self.medians(|turn| turn.wire / turn.seconds() / rate)
    }
}

/// Whether a case is to use [`TARGET`] of the link. Rebuilding gradients from factors takes
/// processors, not links.
fn fills_link(case: &Case) -> bool {
    case.size >= FROM && case.what != What::Factors
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let confidence = self.seen().next().map_or(0.0, |(_, outcome)| outcome.ratio().confidence);
        writeln!(
            f,
            "# Links\n\n\
             Buffers exchanged by nodes whose ports have the given rate each way and a queue of the given size, TCP with {}. \
             Both contenders are on all nodes and take turns: {} pairs of turns, begun by either in turn. \
             Seconds are of an exchange, of its slowest node: the mean over a turn, the median over turns. \
             *{} / poseidon* is how many times as long {} takes: the median over pairs and, in brackets, its interval by \
             order statistics of the pairs' ratios, which has the true median in it with {:.1}% probability. A case is slower or \
             faster if the whole interval is on one side of 1.\n",
            self.congestion,
            self.pairs,
            self.peer.name(),
            self.peer.words(),
            100.0 * confidence
        )?;
        if confidence < WANTED {
            writeln!(f, "For {:.0}% it takes at least 6 pairs.\n", 100.0 * WANTED)?;
        }
        writeln!(
            f,
            "*Link* is the part of the rate that the port's bytes of an exchange make, with Ethernet, IP and TCP headers and \
             retransmissions, in the direction of the port that carried fewest; a port that has been idle lets 128 KB through at once, so small \
             exchanges may be above 100%. CPU seconds are of all nodes together, for one \
             exchange. *Busy* is busy threads per core beside both. By factors a worker has {} rows; Gloo sums the whole matrix \
             then. KB and MB are powers of 1024.\n",
            self.rows
        )?;
        let peer = self.peer.name();
        writeln!(
            f,
            "| nodes | Mbit/s | queue | size | what | busy | poseidon | {peer} | {peer} / poseidon | | link, poseidon | \
             link, {peer} | CPU, poseidon | CPU, {peer} |\n\
             | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |"
        )?;
        for (case, outcome) in self.seen() {
            let ratio = outcome.ratio();
            let [ours, theirs] = outcome.medians(Turn::seconds);
            let [our_link, their_link] = outcome.link_use(case);
            let [our_cpu, their_cpu] = outcome.medians(Turn::cpu);
            let low = fills_link(case) && our_link < TARGET;
            let our_link = format!("{:.1}%", 100.0 * our_link);
            writeln!(
                f,
                "| {} | {} | {} | {} | {} | {} | {ours:.4} s | {theirs:.4} s | {} | {} | {} | {:.1}% | {our_cpu:.4} s | {their_cpu:.4} s |",
                case.network.nodes,
                case.network.rates(),
                case.network.queue,
                case.size,
                case.what.name(),
                case.busy,
                ratio,
                ratio.verdict().word(),
                if low { format!("**{our_link}**") } else { our_link },
                100.0 * their_link
            )?;
        }
        self.targets(f)?;
        let failed = self.cases.iter().filter_map(|m| Some((&m.case, m.outcome.as_ref().err()?)));
        for (number, (case, why)) in failed.enumerate() {
            let heading = if number == 0 { "\n## Failed\n\n" } else { "" };
            writeln!(f, "{heading}- {case}: {}", why.lines().last().unwrap_or_default())?;
        }
        for (number, (what, why)) in self.left_out.iter().enumerate() {
            let heading = if number == 0 { "\n## Left out\n\n" } else { "" };
            writeln!(f, "{heading}- {what}: because {why}")?;
        }
        for (number, case) in self.not_reached.iter().enumerate() {
            let heading = if number == 0 { "\n## Not reached in the time given\n\n" } else { "" };
            writeln!(f, "{heading}- {case}")?;
        }
        Ok(())
    }
}

impl Summary {
    fn targets(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |verdict| {
            self.seen().filter(|(_, outcome)| outcome.ratio().verdict() == verdict).count()
        };
        let all = self.seen().count();
        let slower = count(Verdict::Slower);
        let judged = |met: bool| if met { "met" } else { "**missed**" };
        writeln!(
            f,
            "\n## Targets\n\n| target | measured | verdict |\n| --- | --- | --- |\n\
             | never slower than {} | of {all} cases {} faster, {} no difference, {slower} slower | {} |",
            self.peer.words(),
            count(Verdict::Faster),
            count(Verdict::Equal),
            judged(slower == 0)
        )?;
        let full: Vec<_> = self.seen().filter(|(case, _)| fills_link(case)).collect();
        let low = full.iter().filter(|(case, outcome)| outcome.link_use(case)[0] < TARGET).count();
        if !full.is_empty() {
            writeln!(
                f,
                "| {:.0}% of the link by wire bytes, from {FROM} up, not by factors | {low} of {} cases below | {} |",
                100.0 * TARGET,
                full.len(),
                judged(low == 0)
            )?;
        }
        let peer = self.peer.words();
        let cpu = |outcome: &Outcome| {
            let [ours, theirs] = outcome.medians(Turn::cpu);
            ours / theirs
        };
        let above = self.seen().filter(|(_, outcome)| cpu(outcome) > 1.0).count();
        let middle =
            median(self.seen().map(|(_, outcome)| cpu(outcome)).collect()).unwrap_or(f64::NAN);
        writeln!(
            f,
            "| aim: CPU not above that of {peer} | {above} of {all} cases above; median of all cases {middle:.2} times | {} |",
            judged(above == 0)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::grid::Network;
    use super::*;
    use crate::bench::contender::{Case as Run, Contender};
    use crate::bench::summary::tests::run;

    /// A turn whose exchanges took `ms` milliseconds of time and of CPU.
    fn turn(ms: f64, wire: f64) -> Turn {
        let case = Run { workers: 4, size: Size::mb(10) };
        let measurement = run(1, Contender::Gloo, case, ms).result.unwrap();
        Turn { measurement, wire, most_wire: wire }
    }

    fn case(size: Size) -> Case {
        let network = Network { nodes: 4, mbit: 8, slow: None, queue: Size::kb(256) };
        Case { network, what: What::Push, busy: 1, size }
    }

    /// Ten pairs in which Gloo takes from `from` times as long as we do, a hundredth more each time.
    fn measured(size: Size, from: f64) -> Measured {
        let pair = |number: usize| Pair {
            ours_first: number.is_multiple_of(2),
            ours: turn(1000.0, 960_000.0),
            peer: turn(1000.0 * (from + number as f64 / 100.0), 970_000.0),
        };
        Measured {
            case: case(size),
            outcome: Ok(Outcome { iters: 3, pairs: (0..10).map(pair).collect() }),
        }
    }

    #[test]
    fn a_case_is_slower_only_if_its_whole_interval_is() {
        let verdict = |from| measured(Size::mb(1), from).outcome.unwrap().ratio().verdict();
        assert_eq!(verdict(0.90), Verdict::Slower);
        assert_eq!(verdict(0.95), Verdict::Equal);
        assert_eq!(verdict(1.0), Verdict::Faster);
    }

    #[test]
    fn the_summary_has_every_case_and_marks_what_is_missed() {
        let mut summary = Summary::new(Peer::Gloo, 10, "cubic", 32);
        summary.cases.push(measured(Size::mb(10), 0.5));
        summary.cases.push(Measured {
            case: case(Size::mb(1)),
            outcome: Err("long story\nno route".into()),
        });
        summary.left_out.push(("32 nodes, 8 Mbit/s, 1MB".into(), "32 nodes are more".into()));
        summary.not_reached.push(case(Size::mb(100)));
        let text = summary.to_string();
        // 960,000 bytes in a second of a link that carries a million.
        let row = "| 4 | 8 | 256KB | 10MB | push | 1 | 1.0000 s | 0.5450 s | 0.55 (0.51 to 0.58) | **slower** | 96.0% |";
        assert!(text.contains(row), "{text}");
        for words in [
            "with 97.9% probability",
            "of 1 cases 0 faster, 0 no difference, 1 slower | **missed** |",
            "| 0 of 1 cases below | met |",
            "- 4 nodes, 8 Mbit/s, queue 256KB, 1MB, push, busy 1: no route\n",
            "- 32 nodes, 8 Mbit/s, 1MB: because 32 nodes are more\n",
            "- 4 nodes, 8 Mbit/s, queue 256KB, 100MB, push, busy 1\n",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert_eq!(summary.failures(), 1);
    }

    #[test]
    fn every_turn_has_a_line_with_a_value_for_every_column() {
        let text = measured(Size::mb(10), 1.0).csv(Peer::Gloo, "cubic");
        assert_eq!(text.lines().count(), 20);
        let columns = CSV_HEADER.split(',').count();
        assert!(text.lines().all(|line| line.split(',').count() == columns), "{text}");
        // Whoever was second in one pair is first in the next.
        let second: Vec<_> = text.lines().nth(2).unwrap().split(',').collect();
        assert_eq!(second[8..11], ["2", "2", "poseidon"]);
    }
}
