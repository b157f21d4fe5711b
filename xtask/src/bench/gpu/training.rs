//! Training on a virtual cluster: the contenders take turns in the same processes.

use super::lab::Lab;
use super::table;
use crate::bench::charts::{self, Bar, Bars};
use crate::bench::cluster::Cluster;
use crate::bench::finding::Finding;
use crate::bench::measurement::median;
use crate::bench::torch::contender::Contender;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

const SCRIPT: &str = "torch_turns.py";

/// A line of `torch_turns.py`.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Line {
    /// A net is going to be trained.
    Net { net: String, precision: String, batch: u64, gradient_bytes: f64 },
    /// A contender has had its turn.
    Turn { net: String, precision: String, contender: Contender, round: u64, ranks: Vec<Rank> },
    /// A contender cannot take part, or no longer; nobody can if none is named.
    Failed { net: String, precision: String, contender: Option<Contender>, why: String },
    /// The trace is written.
    Traced { net: String, contender: Contender, seconds: f64 },
}

/// What one rank tells of a turn.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Rank {
    rank: u64,
    seconds: Vec<f64>,
    cpu_seconds_per_step: f64,
    sent_per_step: f64,
    received_per_step: f64,
    by_factors: u64,
    /// What the plan has this rank send in a step, if there is a plan.
    planned_bytes: Option<f64>,
}

/// A net on a cluster.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Case {
    pub(super) net: String,
    pub(super) precision: String,
    pub(super) nodes: u64,
    /// On every node.
    pub(super) ranks_per_node: u64,
    pub(super) mbit: u64,
    /// Samples of each rank's step.
    pub(super) batch: u64,
    /// Of all gradients of one rank.
    pub(super) gradient_bytes: f64,
}

/// One turn of one contender.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Turn {
    #[serde(flatten)]
    pub(super) case: Case,
    pub(super) contender: Contender,
    pub(super) round: u64,
    /// Of a step on its slowest rank: the median over the steps.
    pub(super) seconds: f64,
    /// Of all ranks, per step.
    pub(super) cpu: f64,
    /// Per step, by the rank that sent most.
    pub(super) sent: f64,
    /// Layers whose factors were sent.
    pub(super) by_factors: u64,
    /// Per step, by the rank that the plan has send most.
    pub(super) planned: Option<f64>,
    ranks: Vec<Rank>,
}

/// All turns.
#[derive(Default)]
pub(super) struct Results {
    pub(super) contenders: Vec<Contender>,
    /// In the order they were begun.
    pub(super) cases: Vec<Case>,
    pub(super) turns: Vec<Turn>,
    pub(super) failures: Vec<String>,
}

/// Measures all nets on clusters of all sizes and rates. `so_far` is called after each cluster.
pub(super) fn run(lab: &Lab, so_far: &mut dyn FnMut(Finding) -> Result<()>) -> Result<Finding> {
    let mut results = Results { contenders: lab.contenders.clone(), ..Results::default() };
    for &mbit in &lab.mbit {
        for &nodes in &lab.nodes {
            let cluster = Cluster::up(nodes, mbit, None)?;
            if let Err(error) = results.measure(lab, &cluster, nodes, mbit) {
                // Other clusters may do better.
                eprintln!("{nodes} nodes, {mbit} Mbit/s failed: {error:#}");
                let story = lab.without_folders(&format!("{error:#}"));
                let last = story.lines().last().unwrap_or_default();
                results.failures.push(format!("{nodes} nodes, {mbit} Mbit/s: {last}"));
            }
            so_far(table::finding(&results, lab))?;
        }
    }
    if results.turns.is_empty() {
        bail!("no turn ended well: {}", results.failures.join("; "));
    }
    charts::bars(&lab.recorded("training.svg"), &results.bars())?;
    Ok(table::finding(&results, lab))
}

/// Has a profiler look at one step of Poseidon.
pub(super) fn trace(lab: &Lab) -> Result<Finding> {
    let nets = lab.trained_nets();
    let net = nets.first().context("no net to trace")?;
    let (nodes, mbit) = (lab.nodes[0], lab.mbit[0]);
    let precision = lab.precisions[0].name();
    let contender = Contender::Poseidon.name();
    let name = format!("trace-{net}.json.gz");
    let path = lab.recorded(&name).display().to_string();
    let cluster = Cluster::up(nodes, mbit, None)?;
    let words =
        ["--nets", net, "--precisions", precision, "--contenders", contender, "--trace", &path];
    let mut text = None;
    lab.on_cluster(&cluster, SCRIPT, &words, |line| {
        match serde_json::from_str(line).with_context(|| line.to_owned())? {
            Line::Traced { net, contender, seconds } => {
                text = Some(format!(
                    "[{name}]({name}) is torch's profile of one step of {net}, {precision}, under {} on rank 0 of \
                     {nodes}, ports of {} Gbit/s. The step took {seconds:.3} s, with the profiler. Chrome's \
                     about:tracing and ui.perfetto.dev show it.\n",
                    contender.words(),
                    mbit as f64 / 1000.0,
                ));
            }
            Line::Failed { why, .. } => bail!("{why}"),
            Line::Net { .. } | Line::Turn { .. } => {}
        }
        Ok(())
    })?;
    let text = text.context("the script ended without a trace")?;
    Ok(Finding { text, verdicts: Vec::new() })
}

impl Results {
    fn measure(&mut self, lab: &Lab, cluster: &Cluster, nodes: u64, mbit: u64) -> Result<()> {
        let nets = lab.trained_nets().join(",");
        let join = |names: Vec<&str>| names.join(",");
        let precisions = join(lab.precisions.iter().map(|one| one.name()).collect());
        let contenders = join(lab.contenders.iter().map(|one| one.name()).collect());
        let [rounds, steps] = [lab.rounds, lab.turn_steps()].map(|count| count.to_string());
        let seconds = lab.turn_seconds.to_string();
        let words = [
            ["--nets", &nets],
            ["--precisions", &precisions],
            ["--contenders", &contenders],
            ["--rounds", &rounds],
            ["--steps", &steps],
            ["--turn-seconds", &seconds],
        ];
        lab.on_cluster(cluster, SCRIPT, words.as_flattened(), |line| {
            match self.take(line, nodes, lab.ranks_per_node, mbit) {
                Ok(Some(turn)) => lab.keep("training", turn)?,
                Ok(None) => {}
                // Time on the machine is dear: the turns that follow are worth having.
                Err(error) => {
                    eprintln!("{error:#}");
                    self.failures.push(format!("a line that says nothing: {error:#}"));
                }
            }
            Ok(())
        })
    }

    /// Takes in a line that the ranks have printed; a turn comes back.
    fn take(
        &mut self,
        line: &str,
        nodes: u64,
        ranks_per_node: u64,
        mbit: u64,
    ) -> Result<Option<&Turn>> {
        let line = serde_json::from_str(line).with_context(|| line.to_owned())?;
        match line {
            Line::Net { net, precision, batch, gradient_bytes } => {
                self.cases.push(Case {
                    net,
                    precision,
                    nodes,
                    ranks_per_node,
                    mbit,
                    batch,
                    gradient_bytes,
                });
            }
            Line::Turn { net, precision, contender, round, ranks } => {
                let is_this = |case: &&Case| {
                    (case.nodes, case.mbit) == (nodes, mbit)
                        && (&case.net, &case.precision) == (&net, &precision)
                };
                let case = self.cases.iter().find(is_this).context("a turn of an unknown net")?;
                let turn = Turn::of(case.clone(), contender, round, ranks)?;
                println!("{turn}");
                self.turns.push(turn);
                return Ok(self.turns.last());
            }
            Line::Failed { net, precision, contender, why } => {
                let who = contender.map_or("everybody", Contender::name);
                let at = format!("{net} {precision}, {nodes} nodes, {mbit} Mbit/s, {who}");
                eprintln!("{at} failed: {why}");
                self.failures.push(format!("{at}: {why}"));
            }
            Line::Traced { .. } => {}
        }
        Ok(None)
    }

    /// The turns of a contender, by round.
    pub(super) fn of(&self, case: &Case, contender: Contender) -> impl Iterator<Item = &Turn> {
        self.turns.iter().filter(move |turn| turn.contender == contender && turn.case == *case)
    }

    /// The median over the rounds of something.
    pub(super) fn median(
        &self,
        case: &Case,
        contender: Contender,
        value: fn(&Turn) -> f64,
    ) -> Option<f64> {
        median(self.of(case, contender).map(value).collect())
    }

    /// One's seconds by another's, in every round that both have.
    pub(super) fn ratios(&self, case: &Case, one: Contender, other: Contender) -> Vec<f64> {
        let beside = |turn: &Turn| {
            let beside = self.of(case, other).find(|beside| beside.round == turn.round)?;
            Some(turn.seconds / beside.seconds)
        };
        self.of(case, one).filter_map(beside).collect()
    }

    fn bars(&self) -> Vec<Bars> {
        let panel = |case: &Case| {
            let bar = |contender: &Contender| {
                let value = self.median(case, *contender, |turn| turn.seconds)?;
                Some(Bar { label: contender.label().to_owned(), colour: contender.colour(), value })
            };
            let Case { net, precision, mbit, .. } = case;
            let places = case.places();
            Bars {
                title: format!("{net} {precision}, P={places}, {} Gbit/s", *mbit as f64 / 1000.0),
                y: "seconds per step".to_owned(),
                bars: self.contenders.iter().filter_map(bar).collect(),
            }
        };
        self.cases.iter().map(panel).filter(|panel| !panel.bars.is_empty()).collect()
    }
}

impl Case {
    /// How many ranks: `4`, or `2x4` for two nodes with four each.
    pub(super) fn places(&self) -> String {
        match self.ranks_per_node {
            1 => self.nodes.to_string(),
            ranks => format!("{}x{ranks}", self.nodes),
        }
    }
}

impl Turn {
    fn of(case: Case, contender: Contender, round: u64, ranks: Vec<Rank>) -> Result<Self> {
        let steps = ranks.iter().map(|rank| rank.seconds.len()).min().unwrap_or(0);
        let slowest = |step: usize| ranks.iter().map(|rank| rank.seconds[step]).fold(0.0, f64::max);
        let seconds = median((0..steps).map(slowest).collect()).context("no step was timed")?;
        Ok(Self {
            case,
            contender,
            round,
            seconds,
            cpu: ranks.iter().map(|rank| rank.cpu_seconds_per_step).sum(),
            sent: ranks.iter().map(|rank| rank.sent_per_step).fold(0.0, f64::max),
            by_factors: ranks.iter().map(|rank| rank.by_factors).max().unwrap_or(0),
            planned: ranks.iter().filter_map(|rank| rank.planned_bytes).reduce(f64::max),
            ranks,
        })
    }
}

impl std::fmt::Display for Turn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Case { net, precision, mbit, .. } = &self.case;
        let (who, steps) =
            (self.contender.name(), self.ranks.first().map_or(0, |r| r.seconds.len()));
        write!(
            f,
            "P={} {mbit} Mbit/s {net} {precision} round {} {who:<15} {:.4} s ({steps} steps), CPU {:.3} s, {:.1} MB",
            self.case.places(),
            self.round,
            self.seconds,
            self.cpu,
            self.sent / 1e6
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Results of one net on four ranks at 10 Gbit/s in which a contender's step takes as long as
    /// `seconds` says, in every round.
    pub(in crate::bench::gpu) fn results(
        gradient_bytes: f64,
        seconds: impl Fn(Contender) -> Option<f64>,
    ) -> Results {
        let case = Case {
            net: "vgg19".to_owned(),
            precision: "fp32".to_owned(),
            nodes: 4,
            ranks_per_node: 1,
            mbit: 10_000,
            batch: 32,
            gradient_bytes,
        };
        let contenders = vec![Contender::Apart, Contender::Ddp, Contender::Poseidon];
        let mut results = Results { contenders, cases: vec![case.clone()], ..Results::default() };
        for round in 1..=6 {
            for &contender in &results.contenders {
                let Some(seconds) = seconds(contender) else { continue };
                let planned_bytes = (contender == Contender::Poseidon).then_some(1e8);
                let rank = Rank {
                    rank: 0,
                    seconds: vec![seconds],
                    cpu_seconds_per_step: 1.0,
                    sent_per_step: 1e8,
                    received_per_step: 1e8,
                    by_factors: 3,
                    planned_bytes,
                };
                let turn = Turn::of(case.clone(), contender, round, vec![rank]).unwrap();
                results.turns.push(turn);
            }
        }
        results
    }

    const NET: &str = r#"{"kind": "net", "net": "tiny", "precision": "fp32", "batch": 8,
        "parameters": 10, "gradient_bytes": 40}"#;

    #[test]
    fn a_step_takes_as_long_as_its_slowest_rank() {
        let rank = |rank: u64, seconds: [f64; 3], planned: &str| {
            format!(
                r#"{{"rank": {rank}, "seconds": {seconds:?}, "cpu_seconds_per_step": 0.25, "sent_per_step": {rank}e6,
                   "received_per_step": 1, "by_factors": 3, "planned_bytes": {planned}}}"#
            )
        };
        let ranks = [rank(0, [0.1, 0.9, 0.3], "7"), rank(1, [0.2, 0.2, 0.2], "9")].join(",");
        let turn = format!(
            r#"{{"kind": "turn", "net": "tiny", "precision": "fp32", "contender": "poseidon", "round": 1,
               "ranks": [{ranks}]}}"#
        );
        let mut results = Results::default();
        assert!(results.take(NET, 2, 1, 1000).unwrap().is_none());
        let turn = results.take(&turn, 2, 1, 1000).unwrap().unwrap();
        assert_eq!((turn.seconds, turn.cpu, turn.sent), (0.3, 0.5, 1e6));
        assert_eq!((turn.planned, turn.case.mbit), (Some(9.0), 1000));
    }

    #[test]
    fn who_cannot_take_part_is_told() {
        let mut results = Results::default();
        let line = r#"{"net": "tiny", "precision": "bf16", "kind": "failed", "contender": "ddp-nccl",
            "why": "no GPU"}"#;
        assert!(results.take(line, 2, 1, 1000).unwrap().is_none());
        assert_eq!(results.failures, ["tiny bf16, 2 nodes, 1000 Mbit/s, ddp-nccl: no GPU"]);
        assert!(results.take("{}", 2, 1, 1000).is_err());
    }
}
