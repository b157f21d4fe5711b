//! Part `racks`: nodes in racks with a slow link between them.
//!
//! Four ways to do the same exchange:
//!
//! * `racks named`: every node is told its rack, as users do it. The job measures what passes between
//!   racks. If it is as much as a port carries, hosts are in a ring, rack after rack. Otherwise it is as
//!   the third way.
//! * `flat`: no rack is named. Hosts are in a ring in the order of their ranks, if the job measures
//!   equal ports; otherwise it is as the last way.
//! * `sums in racks`: as the first way, but nothing is measured. Sums are made in the racks first, and
//!   each chunk crosses a rack's link once each way.
//! * `flat, no ring`: every node is told a rack of its own, and nothing is measured. Each node sends
//!   straight to all others.

use super::jobs::{Stage, Way};
use super::plan::{self, Choice};
use super::rounds::{self, Rounds};
use super::{Bench, Found, Order, seconds_on_link};
use crate::bench::cluster::Beside;
use crate::bench::finding::Finding;
use crate::bench::ratio;
use crate::bench::size::Size;
use crate::bench::targets::Verdict;
use anyhow::Result;
use std::fmt;

/// The places of the ways.
const NAMED: usize = 0;
const FLAT: usize = 1;
const INSIDE: usize = 2;
const STRAIGHT: usize = 3;
const WAYS: usize = 4;

/// The part of "as many times fewer bytes as a rack has hosts" that is enough: acknowledgements
/// and barriers come on top of the bytes of both.
const ENOUGH: f64 = 0.9;
/// A gain that the plan may leave out. Medians of the same exchange differ by as much.
const WORTH: f64 = 1.03;

/// One point of the grid.
#[derive(Clone, Copy, Debug)]
struct Case {
    nodes: u64,
    racks: u64,
    mbit: u64,
    oversubscription: u64,
    order: Order,
    size: Size,
}

/// A case that was measured.
struct Measured {
    case: Case,
    rounds: Rounds,
    /// What the plan says, if it knows such racks.
    plan: Option<Choice>,
}

/// Measures all cases.
pub(super) fn run(bench: &Bench<'_>) -> Result<Found> {
    let args = bench.args;
    let (mut all, mut failed) = (Vec::new(), Vec::new());
    for &order in &args.order {
        for &oversubscription in &args.oversubscription {
            let (nodes, racks, mbit) = (args.nodes, args.racks, args.mbit);
            let of_size = |&size: &Size| Case { nodes, racks, mbit, oversubscription, order, size };
            let cases: Vec<_> = args.sizes.iter().map(of_size).collect();
            let Some(first) = cases.first() else { continue };
            let in_turn = order == Order::Turns;
            let beside = Beside::Racks { racks, core_mbit: first.core_mbit(), in_turn };
            let mut stage = Stage::up(bench, beside, ways(bench))?;
            for case in cases {
                match stage.measure(bench, case.size, case.slowest()) {
                    Ok(rounds) => {
                        println!("{case}{}", rounds.lines(FLAT));
                        bench.keep(&rounds.csv(bench, "racks", &case.cell(), case.size))?;
                        let plan = match order {
                            Order::Runs => Some(plan::ask(bench, case.size, oversubscription)?),
                            Order::Turns => None,
                        };
                        all.push(Measured { case, rounds, plan });
                    }
                    Err(error) => {
                        println!("{case}: FAILED: {error:#}");
                        failed.push(case.to_string());
                    }
                }
            }
        }
    }
    let mut text = introduction(bench) + "\n" + &table(&all) + "\n" + &plans(&all);
    for case in &failed {
        text += &format!("\nFailed: {case}\n");
    }
    let hosts = args.nodes / args.racks;
    let verdicts =
        vec![fewer_bytes(&all, hosts), faster(&all), never_slower(&all), plan_is_right(&all)];
    Ok(Found { finding: Finding { text, verdicts }, failed: failed.len() })
}

/// The four ways. A node is told its rack by a shell, because every node's differs. A job that is told
/// what ports carry measures nothing.
fn ways(bench: &Bench<'_>) -> Vec<Way> {
    let way = |name, rack: Option<&str>, measures: bool| {
        let mut words = Vec::new();
        if let Some(rack) = rack {
            let rate = format!("POSEIDON_LINK_RATE={}mbit ", bench.args.mbit);
            let rate = if measures { "" } else { &rate };
            let script = format!("{rate}POSEIDON_RACK=rack${rack} exec \"$@\"");
            words.extend(["sh", "-c", &script, "sh"].map(str::to_owned));
        }
        words.extend(bench.worker());
        Way { name, words, interfaces: None }
    };
    vec![
        way("racks named", Some("RACK"), true),
        way("flat", None, true),
        way("sums in racks", Some("RACK"), false),
        way("flat, no ring", Some("RANK"), false),
    ]
}

impl Case {
    fn hosts_per_rack(&self) -> u64 {
        self.nodes / self.racks
    }

    /// What a rack's link carries each way, in Mbit/s.
    fn core_mbit(&self) -> u64 {
        (self.hosts_per_rack() * self.mbit / self.oversubscription).max(1)
    }

    /// By way: buffers that pass a rack's link each way.
    fn on_link(&self) -> [f64; WAYS] {
        let [hosts, racks, inside] =
            [self.nodes, self.racks, self.hosts_per_rack()].map(|count| count as f64);
        let ring = 2.0 * (hosts - 1.0) / hosts;
        // A ring in the order of runs leaves a rack once, one in turn leaves it from every host.
        let leaves = if self.order == Order::Runs { 1.0 } else { inside };
        let once = 2.0 * (racks - 1.0) / racks;
        let named = if 3 * self.core_mbit() < 2 * self.mbit { once } else { ring };
        [named, leaves * ring, once, inside * once]
    }

    /// Seconds that an exchange takes by the way that is slowest.
    fn slowest(&self) -> f64 {
        let most = self.on_link().into_iter().fold(0.0, f64::max);
        self.port_seconds().max(seconds_on_link(most * self.size.0 as f64, self.core_mbit()))
    }

    /// Seconds that the bytes of an exchange take on a node's port.
    fn port_seconds(&self) -> f64 {
        let times = 2.0 * (self.nodes - 1) as f64 / self.nodes as f64;
        seconds_on_link(times * self.size.0 as f64, self.mbit)
    }

    /// Which network it is, for a cell of `raw.csv`.
    fn cell(&self) -> String {
        format!("oversubscription {} in {}", self.oversubscription, self.order_words())
    }

    fn order_words(&self) -> &'static str {
        match self.order {
            Order::Runs => "runs",
            Order::Turns => "turns",
        }
    }
}

impl Measured {
    /// By way: seconds that no exchange is shorter than, by a node's port and by the bytes that a
    /// rack's link has carried.
    fn bounds(&self) -> [f64; WAYS] {
        let core = self.case.core_mbit() as f64 * 1e6 / 8.0;
        [NAMED, FLAT, INSIDE, STRAIGHT]
            .map(|way| self.case.port_seconds().max(self.rounds.link(way) / core))
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.cell(), self.size)
    }
}

fn introduction(bench: &Bench<'_>) -> String {
    let args = bench.args;
    let (mbit, hosts) = (args.mbit, args.nodes / args.racks);
    let link = "a rack's link";
    let on_link = |order| {
        let (nodes, racks, oversubscription, size) = (args.nodes, args.racks, 1, Size::mb(1));
        Case { nodes, racks, mbit, oversubscription, order, size }.on_link()
    };
    let [_, ring, once, straight] = on_link(Order::Runs);
    let in_turn = on_link(Order::Turns)[FLAT];
    format!(
        "{} nodes in {} racks, {hosts} in each. A node's port carries {mbit} Mbit/s each way. The \
         link of a rack to the others carries as much as the rack's ports together, divided by the \
         *oversubscription*. Queues hold {}. In *runs* the first {hosts} nodes are in the first \
         rack; in *turns* the racks take one node after the other.\n\n\
         *racks named* measures what passes between racks. Where it is as much as a port carries, \
         hosts are in a ring, rack after rack: {ring:.2} buffers pass a rack's link each way. \
         Elsewhere it is as *sums in racks*, where sums are made in the racks first: {once:.2} \
         buffers. *flat* names no racks, so hosts are in a ring in the order of their ranks: \
         {ring:.2} buffers in runs, {in_turn:.2} in turns. A job whose ports measure unequal has no \
         ring, and a slow link may look like slow ports. *flat, no ring* sends straight between \
         all nodes: {straight:.2} buffers.\n\n{}",
        args.nodes,
        args.racks,
        args.queue,
        rounds::legend(bench, "flat", link)
    )
}

fn table(all: &[Measured]) -> String {
    let columns = ["order", "oversubscription", "a rack's link, Mbit/s", "size"];
    let mut text = rounds::heading(&columns, "flat", "a rack's link");
    for measured in all {
        let case = &measured.case;
        let cells = format!(
            "{} | {} | {} | {}",
            case.order_words(),
            case.oversubscription,
            case.core_mbit(),
            case.size
        );
        text += &measured.rounds.rows(&cells, &measured.bounds(), FLAT);
    }
    text
}

/// What the plan says, beside what was measured.
fn plans(all: &[Measured]) -> String {
    let mut text =
        "`poseidon plan` of one layer that takes no time to compute. It knows racks whose \
        hosts are in runs.\n\n\
        | case | plan: sums in racks, s | plan: flat, s | the plan makes sums in racks | measured: \
        flat / sums in racks | why |\n| --- | --- | --- | --- | --- | --- |\n"
            .to_owned();
    for Measured { case, rounds, plan } in all {
        let Some(plan) = plan else { continue };
        let measured = rounds.ratio(FLAT, INSIDE);
        text += &format!(
            "| {case} | {:.4} | {:.4} | {} | {} | {} |\n",
            plan.iteration_seconds_inside,
            plan.iteration_seconds_flat,
            if plan.adds_up_inside { "yes" } else { "no" },
            measured.map_or("-".into(), |ratio| ratio.to_string()),
            plan.reason
        );
    }
    text
}

fn fewer_bytes(all: &[Measured], hosts: u64) -> Verdict {
    let times = |measured: &Measured| {
        let times = measured.rounds.fewer_bytes(STRAIGHT, INSIDE)?;
        Some((measured.case.to_string(), times))
    };
    let worst = all.iter().filter_map(times).min_by(|a, b| a.1.total_cmp(&b.1));
    let enough = ENOUGH * hosts as f64;
    Verdict {
        target: format!(
            "sums in racks: a rack's link carries {hosts} times fewer bytes than when all send \
             straight, {:.0}% of that at least",
            100.0 * ENOUGH
        ),
        measured: worst.as_ref().map_or("-".into(), |(case, times)| {
            format!("at worst {times:.2} times fewer ({case})")
        }),
        met: worst.map(|(_, times)| times >= enough),
    }
}

/// Where a rack's link allows much less by the ring than with named racks.
fn faster(all: &[Measured]) -> Verdict {
    let ratios: Vec<_> = all
        .iter()
        .filter(|measured| {
            let bounds = measured.bounds();
            bounds[FLAT] > WORTH * bounds[NAMED]
        })
        .filter_map(|measured| Some((measured.case, measured.rounds.ratio(FLAT, NAMED)?)))
        .collect();
    let worst = ratios.iter().min_by(|a, b| a.1.median.total_cmp(&b.1.median));
    let is_faster = |ratio: &ratio::Ratio| ratio.verdict() == ratio::Verdict::Faster;
    Verdict {
        target: "named racks are faster than flat where a rack's link limits flat".into(),
        measured: worst.map_or("-".into(), |(case, ratio)| {
            let faster = ratios.iter().filter(|(_, ratio)| is_faster(ratio)).count();
            format!("{faster} of {} cases faster; at worst {ratio} ({case})", ratios.len())
        }),
        met: worst.map(|_| ratios.iter().all(|(_, ratio)| is_faster(ratio))),
    }
}

/// What the job decides is as fast as what it could have decided.
fn never_slower(all: &[Measured]) -> Verdict {
    let slower = |measured: &Measured| {
        let slower = [FLAT, INSIDE, STRAIGHT].map(|way| {
            let ratio = measured.rounds.ratio(way, NAMED)?;
            (ratio.verdict() == ratio::Verdict::Slower).then_some((measured.case, way, ratio))
        });
        slower.into_iter().flatten().min_by(|a, b| a.2.median.total_cmp(&b.2.median))
    };
    let slower: Vec<_> = all.iter().filter_map(slower).collect();
    let worst = slower.iter().min_by(|a, b| a.2.median.total_cmp(&b.2.median));
    let count = all.len();
    Verdict {
        target: "named racks are slower than no other way".into(),
        measured: match worst {
            _ if all.is_empty() => "-".into(),
            None => format!("in all {count} cases"),
            Some((case, way, ratio)) => {
                let name = ["", "flat", "sums in racks", "flat, no ring"][*way];
                format!(
                    "{} of {count} cases slower; at worst {ratio} of {name} ({case})",
                    slower.len()
                )
            }
        },
        met: (!all.is_empty()).then_some(slower.is_empty()),
    }
}

fn plan_is_right(all: &[Measured]) -> Verdict {
    let judged: Vec<_> = all
        .iter()
        .filter_map(|measured| {
            let names = measured.plan.as_ref()?.adds_up_inside;
            let ratio = measured.rounds.ratio(FLAT, INSIDE)?;
            let faster = ratio.verdict() == ratio::Verdict::Faster;
            let right = if names { faster } else { !faster || ratio.median < WORTH };
            Some((measured.case, names, right))
        })
        .collect();
    let wrong: Vec<_> =
        judged.iter().filter(|judged| !judged.2).map(|judged| judged.0.to_string()).collect();
    let named = judged.iter().filter(|judged| judged.1).count();
    let mut words = format!("in racks in {named} of {} cases", judged.len());
    if !wrong.is_empty() {
        words += &format!("; wrong: {}", wrong.join("; "));
    }
    Verdict {
        target: "the plan makes sums in racks where that is faster, and not elsewhere".into(),
        measured: if judged.is_empty() { "-".into() } else { words },
        met: (!judged.is_empty()).then_some(wrong.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::rounds::tests::rounds;
    use super::super::tests::args;
    use super::*;
    use std::path::PathBuf;

    fn case(oversubscription: u64, order: Order) -> Case {
        let size = Size::mb(10);
        Case { nodes: 8, racks: 2, mbit: 1000, oversubscription, order, size }
    }

    fn measured(oversubscription: u64, flat_ms: f64, names: bool) -> Measured {
        let ways = [
            ("racks named", 159.0, 1.1e7),
            ("flat", flat_ms, 1.9e7),
            ("sums in racks", 160.0, 1.1e7),
            ("straight", 400.0, 4.4e7),
        ];
        let plan = Choice {
            adds_up_inside: names,
            iteration_seconds_inside: 0.16,
            iteration_seconds_flat: 0.3,
            reason: "because".into(),
        };
        Measured {
            case: case(oversubscription, Order::Runs),
            rounds: rounds(&ways),
            plan: Some(plan),
        }
    }

    #[test]
    fn a_racks_link_carries_a_buffer_with_sums_in_racks_and_one_for_every_host_without_a_ring() {
        assert_eq!(case(4, Order::Runs).on_link(), [1.75, 1.75, 1.0, 4.0]);
        assert_eq!(case(4, Order::Turns).on_link(), [1.75, 7.0, 1.0, 4.0]);
        assert_eq!(case(8, Order::Turns).on_link(), [1.0, 7.0, 1.0, 4.0]);
        let [core, narrow] = [1, 8].map(|times| case(times, Order::Runs).core_mbit());
        assert_eq!((core, narrow), (4000, 500));
        // Ten MB pass a port of 1 Gbit/s 1.75 times, and a link of 500 Mbit/s 4 times at most.
        assert!((case(8, Order::Runs).port_seconds() - 0.1535).abs() < 1e-3);
        assert!((case(8, Order::Runs).slowest() - 0.7017).abs() < 1e-3);
    }

    #[test]
    fn bounds_are_by_ports_and_by_what_racks_links_carried() {
        // 19 MB at 500 Mbit/s are 0.304 s, and 44 MB are 0.704 s.
        let bounds = measured(8, 320.0, true).bounds().map(|seconds| (1e3 * seconds) as u64);
        assert_eq!(bounds, [176, 304, 176, 704]);
        let wide = measured(1, 320.0, true).bounds();
        assert!(wide.iter().all(|bound| *bound == case(1, Order::Runs).port_seconds()), "{wide:?}");
    }

    #[test]
    fn every_node_is_told_its_rack_or_none() {
        let args = args(&["--sizes", "10MB"]);
        let bench = Bench { args: &args, poseidon: "poseidon".into(), folder: PathBuf::new() };
        let words: Vec<_> = ways(&bench).iter().map(|way| way.words.join(" ")).collect();
        let plain = "poseidon bench exchange --in-cluster --turns --bytes 10485760";
        assert_eq!(words[FLAT], plain);
        assert_eq!(words[NAMED], format!("sh -c POSEIDON_RACK=rack$RACK exec \"$@\" sh {plain}"));
        let given = "sh -c POSEIDON_LINK_RATE=1000mbit POSEIDON_RACK=rack";
        assert_eq!(words[INSIDE], format!("{given}$RACK exec \"$@\" sh {plain}"));
        assert_eq!(words[STRAIGHT], format!("{given}$RANK exec \"$@\" sh {plain}"));
    }

    #[test]
    fn bytes_speed_and_the_plan_are_judged() {
        let judge = |all: &[Measured], hosts| {
            [fewer_bytes(all, hosts), faster(all), never_slower(all), plan_is_right(all)]
        };
        let good = [measured(8, 300.0, true), measured(1, 159.0, false)];
        let verdicts = judge(&good, 4);
        assert!(verdicts.iter().all(|verdict| verdict.met == Some(true)));
        assert_eq!(verdicts[2].measured, "in all 2 cases");
        assert_eq!(verdicts[3].measured, "in racks in 1 of 2 cases");
        let verdicts = judge(&[measured(8, 140.0, true), measured(1, 300.0, false)], 5);
        assert!(verdicts.iter().all(|verdict| verdict.met == Some(false)));
        let slower = "1 of 2 cases slower; at worst 0.88";
        assert!(verdicts[2].measured.starts_with(slower), "{}", verdicts[2].measured);
        let wrong = "wrong: oversubscription 8 in runs, 10MB; oversubscription 1 in runs, 10MB";
        assert!(verdicts[3].measured.contains(wrong), "{}", verdicts[3].measured);
        assert!(judge(&[], 4).iter().all(|verdict| verdict.met.is_none()));
        assert!(
            plans(&good).contains("| oversubscription 8 in runs, 10MB | 0.1600 | 0.3000 | yes |")
        );
    }
}
