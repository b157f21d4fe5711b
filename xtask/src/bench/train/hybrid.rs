//! What hybrid communication and overlap are worth on links that are slow.

use super::formula::Setting;
use super::lab::{Lab, Run};
use super::report::Report;
use super::{Finding, Verdict};
use crate::bench::charts::{self, Bar, Bars};
use crate::bench::cluster::Cluster;
use crate::bench::measurement::median;
use anyhow::Result;

const ALEXNET: &str = "alexnet-small";
const QUICK: &str = "cifar10-quick";

/// Small, because the nodes share the cores of one machine and the network has to be the bottleneck; not
/// so small that there is nothing to overlap.
const ALEXNET_BATCH: u64 = 16;

/// On either side of where the formula's choice for CIFAR-10 quick's ip1 turns, 15 samples on 8 nodes.
const QUICK_BATCHES: [u64; 2] = [8, 25];

/// How many times faster than through servers a step has to be.
const SPEEDUP: f64 = 2.0;

/// By how much `auto` may be slower than `ps` where both are fast.
const SLOWER: f64 = 0.02;

/// A net and how it is synchronised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    model: &'static str,
    batch: u64,
    scheme: &'static str,
    overlap: &'static str,
}

/// A case and its run.
pub(super) struct InCluster {
    pub(super) case: Case,
    pub(super) report: Report,
}

/// Measures all cases in turn, and adds the runs to `runs`.
pub(super) fn run(lab: &Lab, runs: &mut Vec<InCluster>) -> Result<Finding> {
    measure(lab, "hybrid", lab.rounds, runs)?;
    let findings = Findings { runs, nodes: lab.nodes };
    charts::bars(&lab.recorded("hybrid.svg"), &findings.bars())?;
    let mut text = format!(
        "{} nodes with ports of {} Mbit/s each way, on {}; {} round(s) in which the \
         rows of a net alternate, those of {QUICK} twice. Seconds are \
         those of worker 0's median step, and of the rounds the median; hidden is the part of the communication during \
         which the worker computed.\n\n\
         | net | batch | scheme | overlap | step in s | times as fast as ps, full | hidden | sent per node and step |\n\
         | --- | ---: | --- | --- | ---: | ---: | ---: | ---: |\n",
        lab.nodes,
        lab.mbit,
        lab.images_are(),
        lab.rounds
    );
    for case in cases() {
        text += &findings.row(case);
    }
    text += "\n![seconds per step](hybrid.svg)\n\n";
    text += &findings.plans();
    Ok(Finding { text, verdicts: findings.verdicts() })
}

/// Runs all cases `rounds` times on a cluster of their own.
pub(super) fn measure(
    lab: &Lab,
    part: &str,
    rounds: usize,
    runs: &mut Vec<InCluster>,
) -> Result<()> {
    let cluster = Cluster::up(lab.nodes.into(), lab.mbit, None)?;
    let (alexnet, quick) = (lab.on_images(ALEXNET)?, lab.on_images(QUICK)?);
    for (round, case) in schedule(rounds) {
        let (task, steps) = match case.model {
            ALEXNET => (&alexnet, lab.steps(12, 4)),
            _ => (&quick, lab.steps(100, 10)),
        };
        let Case { batch, scheme, overlap, .. } = case;
        let words = format!(
            "--batch {batch} --scheme {scheme} --overlap {overlap} --steps {steps} --lr 0.001 --test never"
        );
        let report = lab.train_in(&cluster, task, &words)?;
        let (name, seconds) = (case.name(), report.step_seconds.median);
        println!("round {round}  {name:<36} {seconds:.3} s per step");
        lab.keep(part, &Run { case: &name, round, report: &report, losses: None })?;
        runs.push(InCluster { case, report });
    }
    Ok(())
}

/// Cases of a group alternate, and begin with another one each time: what a slow minute of the machine
/// costs falls on all of them.
fn schedule(rounds: usize) -> Vec<(usize, Case)> {
    let mut schedule = Vec::new();
    for round in 1..=rounds {
        for group in groups() {
            // Small differences between short runs take more of them to see.
            let repeats = if group[0].model == QUICK { 2 } else { 1 };
            let turns = (0..group.len() * repeats).map(|turn| turn + round - 1);
            schedule.extend(turns.map(|turn| (round, group[turn % group.len()])));
        }
    }
    schedule
}

/// Cases that are compared with each other.
fn groups() -> Vec<Vec<Case>> {
    let ways =
        [("auto", "full"), ("ps", "full"), ("ps", "backward"), ("ps", "none"), ("sfb", "full")];
    let group = |model, batch, ways: &[(&'static str, &'static str)]| {
        ways.iter().map(|&(scheme, overlap)| Case { model, batch, scheme, overlap }).collect()
    };
    let mut groups = vec![group(ALEXNET, ALEXNET_BATCH, &ways)];
    groups.extend(QUICK_BATCHES.map(|batch| group(QUICK, batch, &ways[..2])));
    groups
}

/// All cases.
pub(super) fn cases() -> Vec<Case> {
    groups().into_iter().flatten().collect()
}

impl Case {
    pub(super) fn name(&self) -> String {
        let Self { model, batch, scheme, overlap } = self;
        format!("{model}, batch {batch}, {scheme}, {overlap}")
    }
}

struct Findings<'a> {
    runs: &'a [InCluster],
    nodes: u16,
}

impl Findings<'_> {
    fn of(&self, case: Case) -> impl Iterator<Item = &Report> {
        self.runs.iter().filter(move |run| run.case == case).map(|run| &run.report)
    }

    fn seconds(&self, case: Case) -> Option<f64> {
        median(self.of(case).map(|report| report.step_seconds.median).collect())
    }

    /// How many times faster than `theirs` a step of `ours` is: the median of the rounds.
    fn speedup(&self, ours: Case, theirs: Case) -> Option<f64> {
        let rounds = self.of(ours).zip(self.of(theirs));
        median(
            rounds
                .map(|(ours, theirs)| theirs.step_seconds.median / ours.step_seconds.median)
                .collect(),
        )
    }

    /// Whether both send every layer the same way.
    fn same_plan(&self, one: Case, other: Case) -> bool {
        let schemes = |case| {
            let layers = self.of(case).next()?.layers.iter();
            Some(layers.map(|layer| layer.scheme.as_str()).collect::<Vec<_>>())
        };
        schemes(one).is_some() && schemes(one) == schemes(other)
    }

    fn row(&self, case: Case) -> String {
        let shown = |value: Option<f64>, digits: usize, unit: &str| {
            value.map_or("-".to_owned(), |value| format!("{value:.digits$}{unit}"))
        };
        let hidden = self.of(case).filter_map(|report| report.overlap_hidden_fraction);
        let hidden = median(hidden.map(|part| part * 100.0).collect());
        let sent = self.of(case).map(|report| {
            let sent: u64 = report.layers.iter().map(|layer| layer.bytes_sent_per_step).sum();
            sent as f64 / 1e6
        });
        format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} |\n",
            case.model,
            case.batch,
            case.scheme,
            case.overlap,
            shown(self.seconds(case), 3, ""),
            shown(self.speedup(case, Case { scheme: "ps", overlap: "full", ..case }), 2, "x"),
            shown(hidden, 0, "%"),
            shown(median(sent.collect()), 2, " MB"),
        )
    }

    /// What `auto` chose, and what the formula says.
    fn plans(&self) -> String {
        let mut text =
            "What auto chose; in brackets where the formula says otherwise:\n\n".to_owned();
        for case in cases().into_iter().filter(|case| case.scheme == "auto") {
            let Some(report) = self.of(case).next() else { continue };
            let setting = Setting::of(report);
            let layers = report.layers.iter().map(|layer| match setting.choice(layer) {
                choice if choice == layer.scheme => format!("{} {}", layer.name, layer.scheme),
                choice => format!("{} {} ({choice})", layer.name, layer.scheme),
            });
            let layers: Vec<_> = layers.collect();
            text += &format!("- {}, batch {}: {}\n", case.model, case.batch, layers.join(", "));
        }
        text
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let alexnet =
            |scheme, overlap| Case { model: ALEXNET, batch: ALEXNET_BATCH, scheme, overlap };
        let times = |target: String, ratio: Option<f64>, enough: &dyn Fn(f64) -> bool| Verdict {
            target,
            measured: ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}x")),
            met: ratio.map(enough),
        };
        let servers = alexnet("ps", "full");
        let nodes = self.nodes;
        let mut verdicts = vec![
            times(
                format!(
                    "{ALEXNET}, {nodes} nodes: a step with auto at least {SPEEDUP}x as fast as with ps, both overlapped"
                ),
                self.speedup(alexnet("auto", "full"), servers),
                &|ratio| ratio >= SPEEDUP,
            ),
            times(
                format!(
                    "{ALEXNET}, {nodes} nodes: a step with ps faster with overlap than without"
                ),
                self.speedup(servers, alexnet("ps", "none")),
                &|ratio| ratio > 1.0,
            ),
        ];
        for batch in QUICK_BATCHES {
            let case = |scheme| Case { model: QUICK, batch, scheme, overlap: "full" };
            let wrong: Option<usize> = self.of(case("auto")).map(wrong_choices).max();
            verdicts.push(Verdict {
                target: format!(
                    "{QUICK}, batch {batch}: auto chooses for every layer what the formula says"
                ),
                measured: wrong.map_or("-".to_owned(), |wrong| format!("{wrong} layers otherwise")),
                met: wrong.map(|wrong| wrong == 0),
            });
            let mut slower = times(
                format!(
                    "{QUICK}, batch {batch}: auto slower than ps by no more than {:.0}%",
                    SLOWER * 100.0
                ),
                self.speedup(case("auto"), case("ps")),
                &|ratio| ratio >= 1.0 / (1.0 + SLOWER),
            );
            // The ratio then says how well this machine can be measured.
            if self.same_plan(case("auto"), case("ps")) {
                slower.measured += ", with the same plan";
            }
            verdicts.push(slower);
        }
        verdicts
    }

    fn bars(&self) -> Vec<Bars> {
        let panel = |group: Vec<Case>| Bars {
            title: format!("{}, batch {}", group[0].model, group[0].batch),
            y: "seconds per step".to_owned(),
            bars: group
                .iter()
                .filter_map(|case| {
                    let colour = match case.scheme {
                        "auto" => charts::BLUE,
                        "sfb" => charts::GREEN,
                        _ => charts::ORANGE,
                    };
                    let label = format!("{} {}", case.scheme, case.overlap);
                    Some(Bar { label, colour, value: self.seconds(*case)? })
                })
                .collect(),
        };
        groups().into_iter().map(panel).collect()
    }
}

fn wrong_choices(report: &Report) -> usize {
    let setting = Setting::of(report);
    report.layers.iter().filter(|layer| setting.choice(layer) != layer.scheme).count()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::report::Quantiles;
    use super::super::report::tests::report;
    use super::*;

    /// One round in which every step through servers took `ps` seconds and every other one second.
    pub(crate) fn round(ps: f64) -> Vec<InCluster> {
        let one = |case: Case| {
            let median = match (case.scheme, case.overlap) {
                ("ps", "none") => ps * 1.1,
                ("ps", _) => ps,
                _ => 1.0,
            };
            let step_seconds = Quantiles { median, p10: median, p90: median };
            let mut report = Report { workers: 8, batch: case.batch, step_seconds, ..report() };
            if case.scheme == "ps" || case.batch > 15 {
                report.layers[1].scheme = "ps".to_owned();
            }
            InCluster { case, report }
        };
        cases().into_iter().map(one).collect()
    }

    fn missed(runs: &[InCluster]) -> Vec<String> {
        let verdicts = Findings { runs, nodes: 8 }.verdicts();
        assert_eq!(verdicts.len(), 6);
        verdicts.into_iter().filter(|v| v.met == Some(false)).map(|v| v.target).collect()
    }

    #[test]
    fn compared_cases_run_equally_often_and_none_is_always_first() {
        let schedule = schedule(5);
        for group in groups() {
            let runs = |case: Case| schedule.iter().filter(|run| run.1 == case).count();
            assert!(group.iter().all(|case| runs(*case) == runs(group[0])));
        }
        let firsts = schedule.chunk_by(|one, other| one.0 == other.0).map(|round| round[0].1);
        assert_eq!(firsts.collect::<Vec<_>>(), groups()[0]);
    }

    #[test]
    fn speedups_decide() {
        assert_eq!(missed(&round(2.1)), [""; 0]);
        assert_eq!(missed(&round(1.9)).len(), 1);
        // Slower than servers by more than 2%.
        assert_eq!(missed(&round(0.97)).len(), 3);
        assert_eq!(missed(&round(0.99)).len(), 1);
    }

    #[test]
    fn a_choice_against_the_formula_is_told() {
        let mut runs = round(3.0);
        let auto = |run: &&mut InCluster| run.case.model == QUICK && run.case.scheme == "auto";
        let run = runs.iter_mut().find(auto).unwrap();
        run.report.layers[1].scheme = "ps".to_owned();
        assert_eq!(missed(&runs).len(), 1);
        let text = Findings { runs: &runs, nodes: 8 }.plans();
        assert!(text.contains("batch 8: conv1 ps, ip1 ps (sfb)"), "{text}");
    }

    #[test]
    fn equal_plans_are_told() {
        let runs = round(3.0);
        let verdicts = Findings { runs: &runs, nodes: 8 }.verdicts();
        let told: Vec<_> = verdicts.iter().filter(|v| v.measured.contains("same plan")).collect();
        assert_eq!(told.len(), 1);
        assert!(told[0].target.contains("batch 25"), "{}", told[0].target);
    }

    #[test]
    fn nothing_is_claimed_without_a_run() {
        assert!(Findings { runs: &[], nodes: 8 }.verdicts().iter().all(|v| v.met.is_none()));
    }
}
