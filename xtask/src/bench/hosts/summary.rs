//! What all cases show, as tables and as lines of JSON.

use super::layout::Case;
use super::who::Who;
use crate::bench::measurement::median;
use crate::bench::ratio::{Ratio, Verdict, WANTED};
use crate::bench::size::Size;
use crate::bench::turns::Turn;
use serde_json::{Value, json};
use std::fmt;

/// All that was found out.
pub(crate) struct Summary {
    rounds: usize,
    queue: String,
    pub(crate) cases: Vec<Measured>,
    /// Who could not take part, and why.
    pub(crate) absent: Vec<(Who, String)>,
    /// What this machine cannot show, and why.
    pub(crate) left_out: Vec<(Case, String)>,
    pub(crate) not_reached: Vec<Case>,
}

/// A case that was measured.
pub(crate) struct Measured {
    pub(crate) case: Case,
    /// Iterations of every turn.
    pub(crate) iters: u64,
    /// By contender: its turns, one for each round, or why it failed.
    pub(crate) results: Vec<(Who, Result<Vec<Turn>, String>)>,
}

/// What a port may carry beyond what one rank per host sends: acknowledgements, barriers.
const PORT_SPARE: f64 = 1.1;
/// From this size on a port's bytes are judged: barriers weigh more in smaller exchanges.
const PORT_FROM: Size = Size::mb(1);
/// The part of the wire's bound that is aimed at, and the size from which on it is.
const AIM: f64 = 0.9;
const AIM_FROM: Size = Size::mb(10);

/// A line of `raw.jsonl`: one turn. `place` is its round and its place in the round.
pub(crate) fn line(case: &Case, who: Who, place: [usize; 2], iters: u64, turn: &Turn) -> Value {
    let seconds = &turn.measurement.seconds;
    json!({
        "hosts": case.layout.to_string(),
        "ranks": case.layout,
        "mbit": case.port,
        "bytes": case.size.0,
        "contender": who,
        "round": place[0] + 1,
        "turn": place[1] + 1,
        "iters": iters,
        "mean_s": seconds.mean,
        "median_s": seconds.median,
        "p10_s": seconds.p10,
        "p90_s": seconds.p90,
        "cpu_s_per_iter": turn.measurement.cpu_seconds_per_iter,
        "lanes": turn.measurement.lanes,
        "most_port_bytes_per_iter": turn.most_wire,
        "least_port_bytes_per_iter": turn.wire,
    })
}

impl Summary {
    pub(crate) fn new(rounds: usize, queue: &str) -> Self {
        let (cases, absent, left_out, not_reached) = Default::default();
        Self { rounds, queue: queue.to_owned(), cases, absent, left_out, not_reached }
    }

    /// How many times a contender failed in a case.
    pub(crate) fn failures(&self) -> usize {
        self.failed().count()
    }

    fn failed(&self) -> impl Iterator<Item = (&Case, Who, &String)> {
        self.cases.iter().flat_map(|measured| {
            let results = measured.results.iter();
            results.filter_map(|(who, result)| Some((&measured.case, *who, result.as_ref().err()?)))
        })
    }

    /// The cases in which `who` did not fail, with its turns.
    fn of(&self, who: Who) -> impl Iterator<Item = (&Measured, &[Turn])> {
        self.cases.iter().filter_map(move |measured| Some((measured, measured.turns(who)?)))
    }
}

impl Measured {
    /// The turns of `who`, unless it failed.
    fn turns(&self, who: Who) -> Option<&[Turn]> {
        let (_, result) = self.results.iter().find(|(other, _)| *other == who)?;
        result.as_deref().ok()
    }

    /// How many times as long Gloo takes as `who`.
    fn ratio(&self, who: Who) -> Option<Ratio> {
        let pairs = self.turns(Who::Gloo)?.iter().zip(self.turns(who)?);
        Ratio::of(pairs.map(|(gloo, ours)| gloo.seconds() / ours.seconds()).collect())
    }

    /// The part of the wire's bound that `turns` reach; `None` if nothing leaves a host.
    fn of_bound(&self, turns: &[Turn]) -> Option<f64> {
        let bound = self.case.port_seconds();
        let seconds = middle(turns, Turn::seconds)?;
        (bound > 0.0).then_some(bound / seconds)
    }

    /// Lines for the terminal: the case, and what each contender took.
    pub(crate) fn lines(&self) -> String {
        let line = |(who, result): &(Who, Result<Vec<Turn>, String>)| match result {
            Ok(turns) => {
                let seconds = middle(turns, Turn::seconds).unwrap_or(f64::NAN);
                let port = middle(turns, |turn| turn.most_wire).unwrap_or(f64::NAN) / 1e6;
                let beside = self.ratio(*who).filter(|_| who.is_ours());
                let beside = beside.map(|ratio| {
                    format!(", gloo takes {ratio} times as long: {}", ratio.verdict().word())
                });
                let beside = beside.unwrap_or_default();
                format!("\n  {:<20} {seconds:.4} s, {port:.2} MB on a port{beside}", who.name())
            }
            Err(why) => format!("\n  {:<20} FAILED: {why}", who.name()),
        };
        let lines: String = self.results.iter().map(line).collect();
        format!("{}, {} iterations:{lines}", self.case, self.iters)
    }

    /// Its rows of the table.
    fn rows(&self) -> String {
        let row = |(who, result): &(Who, Result<Vec<Turn>, String>)| {
            let Ok(turns) = result else { return String::new() };
            let seconds = Ratio::of(turns.iter().map(Turn::seconds).collect());
            let seconds = seconds.map_or("-".into(), |seconds| format!("{seconds:.4}"));
            let ratio = self.ratio(*who).filter(|_| *who != Who::Gloo);
            let verdict =
                ratio.filter(|_| who.is_ours()).map_or("", |ratio| ratio.verdict().word());
            let ratio = ratio.map_or("-".into(), |ratio| ratio.to_string());
            let port = middle(turns, |turn| turn.most_wire).unwrap_or(f64::NAN) / 1e6;
            let part = self.of_bound(turns);
            let part = part.map_or("-".into(), |part| format!("{:.1}%", 100.0 * part));
            format!(
                "| {} | {} | {} | {} | {seconds} | {ratio} | {verdict} | {port:.2} | {part} | {:.4} |\n",
                self.case.layout,
                self.case.port_words(),
                self.case.size,
                who.name(),
                middle(turns, Turn::cpu).unwrap_or(f64::NAN)
            )
        };
        self.results.iter().map(row).collect()
    }
}

fn middle(turns: &[Turn], value: impl Fn(&Turn) -> f64) -> Option<f64> {
    median(turns.iter().map(value).collect())
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let confidence = self.cases.iter().find_map(|measured| {
            let turns = measured.results.iter().find_map(|(_, result)| result.as_ref().ok())?;
            Some(Ratio::of(turns.iter().map(Turn::seconds).collect())?.confidence)
        });
        let confidence = confidence.unwrap_or(0.0);
        writeln!(
            f,
            "# Hosts\n\n\
             Buffers summed by the ranks of several hosts. *4x4* is 4 hosts with 4 ranks each, *3+1+4* is 3 hosts with 3, 1 and 4 \
             ranks. The ranks of a host share its port, which has the given rate each way and a queue of {}; TCP with cubic. \
             All contenders are on all hosts and take turns: {} rounds with a turn of each, begun by each in turn.\n\n\
             Seconds are of an exchange, of its slowest rank: the mean over a turn, the median over turns. In brackets is the \
             median's interval by order statistics, which has the true median in it with {:.1}% probability. *gloo / it* is how many \
             times as long Gloo takes as this contender, in the same round: above 1 the contender is faster. A case is slower or \
             faster if the whole interval is on one side of 1.\n\n\
             *MB on a port* is what the busiest direction of the busiest port carried for one exchange, headers and barriers \
             included (MB are 10^6 bytes here, sizes are powers of 1024). *Bound* is the part of the speed that a port allows: the \
             bytes that one rank per host sends, with headers, at the port's rate, by the seconds measured. CPU seconds are of all \
             ranks together, for one exchange.\n",
            self.queue,
            self.rounds,
            100.0 * confidence
        )?;
        if confidence < WANTED {
            writeln!(f, "For {:.0}% it takes at least 6 rounds.\n", 100.0 * WANTED)?;
        }
        for (who, why) in &self.absent {
            writeln!(f, "**{} takes no part: {why}.**\n", who.name())?;
        }
        write!(
            f,
            "| hosts | port | size | contender | seconds | gloo / it | | MB on a port | bound | CPU, s |\n\
             | --- | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: | ---: |\n"
        )?;
        self.cases.iter().try_for_each(|measured| f.write_str(&measured.rows()))?;
        writeln!(f, "\n## Targets\n\n| target | measured | verdict |\n| --- | --- | --- |")?;
        for who in [Who::Push, Who::AllReduce] {
            self.targets(f, who)?;
        }
        for (number, (case, who, why)) in self.failed().enumerate() {
            let heading = if number == 0 { "\n## Failed\n\n" } else { "" };
            let why = why.lines().last().unwrap_or_default();
            writeln!(f, "{heading}- {case}, {}: {why}", who.name())?;
        }
        for (number, (case, why)) in self.left_out.iter().enumerate() {
            let heading = if number == 0 { "\n## Left out\n\n" } else { "" };
            writeln!(f, "{heading}- {case}: because {why}")?;
        }
        for (number, case) in self.not_reached.iter().enumerate() {
            let heading = if number == 0 { "\n## Not reached in the time given\n\n" } else { "" };
            writeln!(f, "{heading}- {case}")?;
        }
        Ok(())
    }
}

impl Summary {
    fn targets(&self, f: &mut fmt::Formatter<'_>, who: Who) -> fmt::Result {
        let name = who.name();
        let judged = |missed: usize| if missed == 0 { "met" } else { "**missed**" };
        let verdicts: Vec<_> =
            self.of(who).filter_map(|(measured, _)| Some(measured.ratio(who)?.verdict())).collect();
        let count = |verdict| verdicts.iter().filter(|seen| **seen == verdict).count();
        if !verdicts.is_empty() {
            let slower = count(Verdict::Slower);
            writeln!(
                f,
                "| {name}: not slower than Gloo anywhere | of {} cases {} faster, {} no difference, {slower} slower | {} |",
                verdicts.len(),
                count(Verdict::Faster),
                count(Verdict::Equal),
                judged(slower)
            )?;
        }
        let ports: Vec<_> = self
            .of(who)
            .filter(|(measured, _)| {
                measured.case.size >= PORT_FROM && measured.case.layout.hosts() > 1
            })
            .filter_map(|(measured, turns)| {
                let most = middle(turns, |turn| turn.most_wire)?;
                Some((&measured.case, most / measured.case.port_bytes()))
            })
            .collect();
        if let Some((worst, times)) = ports.iter().max_by(|a, b| a.1.total_cmp(&b.1)) {
            let above = ports.iter().filter(|(_, times)| *times > PORT_SPARE).count();
            writeln!(
                f,
                "| {name}: bytes on a port as with one rank per host, {:.0}% more at most, from {PORT_FROM} up | \
                 {above} of {} cases above; at worst {times:.2} times as many ({worst}) | {} |",
                100.0 * (PORT_SPARE - 1.0),
                ports.len(),
                judged(above)
            )?;
        }
        let bounds: Vec<_> = self
            .of(who)
            .filter(|(measured, _)| measured.case.size >= AIM_FROM)
            .filter_map(|(measured, turns)| Some((&measured.case, measured.of_bound(turns)?)))
            .collect();
        if let Some((worst, part)) = bounds.iter().min_by(|a, b| a.1.total_cmp(&b.1)) {
            let below = bounds.iter().filter(|(_, part)| *part < AIM).count();
            writeln!(
                f,
                "| {name}, aim: {:.0}% of the wire's bound from {AIM_FROM} up | {below} of {} cases below; \
                 at worst {:.1}% ({worst}) | {} |",
                100.0 * AIM,
                bounds.len(),
                100.0 * part,
                judged(below)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Mbit;
    use super::*;
    use crate::bench::contender::{Case as Run, Contender};
    use crate::bench::summary::tests::run;

    fn turn(ms: f64, most_wire: f64) -> Turn {
        let case = Run { workers: 4, size: Size::mb(10) };
        let measurement = run(1, Contender::Gloo, case, ms).result.unwrap();
        Turn { measurement, wire: most_wire / 2.0, most_wire }
    }

    fn case(hosts: &str) -> Case {
        Case { layout: hosts.parse().unwrap(), port: Mbit(1000), size: Size::mb(10) }
    }

    /// Ten rounds in which we take 140 ms and Gloo takes `gloo` ms.
    fn measured(hosts: &str, gloo: f64) -> Measured {
        let turns = |ms, wire| Ok((0..10).map(|_| turn(ms, wire)).collect());
        let results = vec![
            (Who::Push, turns(140.0, 16.5e6)),
            (Who::AllReduce, Err("long story\nno route".into())),
            (Who::Gloo, turns(gloo, 16.4e6)),
        ];
        Measured { case: case(hosts), iters: 3, results }
    }

    #[test]
    fn a_case_has_a_row_for_everybody_and_is_told_by_ratios_of_gloo_to_it() {
        let mut summary = Summary::new(10, "2mb");
        summary.cases.push(measured("4x4", 168.0));
        summary.absent.push((Who::Openmpi, "there is no mpirun on this machine".into()));
        summary.left_out.push((case("4x8"), "32 ranks are more".into()));
        summary.not_reached.push(case("2x8"));
        let text = summary.to_string();
        for words in [
            "| 4x4 | 1gbit | 10MB | poseidon | 0.1400 (0.1400 to 0.1400) | 1.20 (1.20 to 1.20) | faster | 16.50 | 94.0% |",
            "| 4x4 | 1gbit | 10MB | gloo | 0.1680 (0.1680 to 0.1680) | - |  | 16.40 | 78.3% |",
            "with 97.9% probability",
            "**openmpi takes no part: there is no mpirun on this machine.**",
            "| poseidon: not slower than Gloo anywhere | of 1 cases 1 faster, 0 no difference, 0 slower | met |",
            "| 0 of 1 cases above; at worst 1.00 times as many (4x4, 1gbit, 10MB) | met |",
            "| 0 of 1 cases below; at worst 94.0% (4x4, 1gbit, 10MB) | met |",
            "- 4x4, 1gbit, 10MB, poseidon, all_reduce: no route\n",
            "- 4x8, 1gbit, 10MB: because 32 ranks are more\n",
            "- 2x8, 1gbit, 10MB\n",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert_eq!(summary.failures(), 1);
    }

    #[test]
    fn what_is_missed_is_marked() {
        let mut summary = Summary::new(10, "2mb");
        // 10 MB between 2 hosts: a port needs 11.0 MB of 16.5, and 88 ms of 140.
        summary.cases.push(measured("2x8", 100.0));
        let text = summary.to_string();
        for words in [
            "0 faster, 0 no difference, 1 slower | **missed** |",
            "| 1 of 1 cases above; at worst 1.50 times as many (2x8, 1gbit, 10MB) | **missed** |",
            "| 1 of 1 cases below; at worst 62.6% (2x8, 1gbit, 10MB) | **missed** |",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn one_host_has_no_port_to_judge() {
        let mut summary = Summary::new(10, "2mb");
        summary.cases.push(measured("1x16", 168.0));
        let text = summary.to_string();
        assert!(text.contains("| 1x16 | - | 10MB | poseidon | 0.1400"), "{text}");
        assert!(!text.contains("bytes on a port as") && !text.contains("aim:"), "{text}");
    }

    #[test]
    fn a_turn_is_a_line_of_json() {
        let line = line(&case("3+1+4"), Who::AllReduce, [4, 1], 3, &turn(140.0, 16.5e6));
        assert_eq!((&line["hosts"], &line["ranks"]), (&json!("3+1+4"), &json!([3, 1, 4])));
        assert_eq!((&line["contender"], &line["round"]), (&json!("all_reduce"), &json!(5)));
        assert_eq!((&line["mbit"], &line["mean_s"]), (&json!(1000), &json!(0.14)));
    }
}
