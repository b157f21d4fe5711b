//! Training on a virtual cluster, every contender in turn.

use super::contender::Contender;
use super::lab::Lab;
use super::targets;
use crate::bench::charts::{self, Bar, Bars, Panel, Series};
use crate::bench::cluster::Cluster;
use crate::bench::finding::Finding;
use crate::bench::measurement::median;
use crate::command::command;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// A net of `bench/peers/torch_nets.py`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Net {
    pub(super) name: &'static str,
    /// Samples of each node's step.
    batch: u64,
    about: &'static str,
}

pub(super) const VGG: Net = Net {
    name: "vgg",
    batch: 32,
    about: "VGG19's layers with both dimensions divided by sqrt(8), 18.0M parameters, batch 32. Computing is slept: \
        1/6 s forward and 1/3 s backward, split by operations; products are skipped but for those that rebuild gradients from factors, SGD is computed",
};

pub(super) const FC: Net = Net {
    name: "fc",
    batch: 32,
    about: "Linear layers of 3072, 4096, 4096, 2048 and 10, 37.8M parameters, batch 32; everything is computed, by nodes \
        that share this machine's cores",
};

pub(super) const TRANSFORMER: Net = Net {
    name: "transformer",
    batch: 4,
    about: "three blocks of width 256, 2.9M parameters, batch 4 of length 128: Linear layers see 512 rows, so factors \
        never pay; everything is computed, by nodes that share this machine's cores",
};

pub(super) const DEEP: Net = Net {
    name: "deep",
    batch: 8,
    about: "a hundred times a Linear layer of 64 x 64 and a LayerNorm, 0.4M parameters in 400 tensors, batch 8: \
        what a contender does for each of them shows; everything is computed, by nodes that share this machine's cores",
};

pub(super) const LAYERS: Net = Net {
    name: "convnext-layers",
    batch: 1,
    about: "the layers of ConvNeXt-Tiny, 28.6M parameters in 182 tensors, with nothing computed but SGD: \
        no layer goes by factors, so the bytes are DDP's, and what synchronising takes beyond them shows",
};

/// Where a contender ran. `alone` is measured in every setting too, so that it stands beside the others
/// at the same time of day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Case {
    pub(super) contender: Contender,
    pub(super) nodes: u64,
    pub(super) mbit: u64,
}

/// What one rank prints.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Rank {
    rank: u64,
    seconds: Vec<f64>,
    cpu_seconds_per_step: f64,
    sent_per_step: f64,
    received_per_step: f64,
    by_factors: u64,
    peak_rss_bytes: u64,
}

/// One run of one contender.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Run {
    #[serde(flatten)]
    pub(super) case: Case,
    pub(super) round: usize,
    /// Of a step on its slowest rank: the median over the steps.
    pub(super) seconds: f64,
    /// Of all ranks, per step.
    pub(super) cpu: f64,
    /// Per step, by the node that sent most.
    pub(super) sent: f64,
    /// Layers whose factors were sent.
    by_factors: u64,
    ranks: Vec<Rank>,
}

/// All runs of a net.
pub(super) struct Results {
    pub(super) net: Net,
    pub(super) contenders: Vec<Contender>,
    /// Nodes and rates, in the order of the tables.
    pub(super) settings: Vec<(u64, u64)>,
    pub(super) runs: Vec<Run>,
    failures: Vec<String>,
}

/// Measures `net` on clusters of so many nodes.
pub(super) fn run(lab: &Lab, net: Net, nodes: &[u64]) -> Result<Finding> {
    let each = |mbit: &u64| nodes.iter().map(|nodes| (*nodes, *mbit)).collect::<Vec<_>>();
    let settings: Vec<_> = lab.mbit.iter().flat_map(each).collect();
    let contenders = lab.contenders.clone();
    let mut results = Results { net, contenders, settings, runs: Vec::new(), failures: Vec::new() };
    for (nodes, mbit) in results.settings.clone() {
        let cluster = Cluster::up(nodes, mbit, None)?;
        for round in 1..=lab.rounds {
            // The order changes from round to round: what a slow minute of the machine costs falls on all.
            let mut order = results.contenders.clone();
            let count = order.len();
            order.rotate_left((round - 1) % count);
            for contender in order {
                let case = Case { contender, nodes, mbit };
                results.measure(lab, &cluster, case, round)?;
            }
        }
    }
    results.draw(lab)?;
    Ok(Finding { text: results.text(lab), verdicts: targets::verdicts(&results) })
}

impl Results {
    fn measure(&mut self, lab: &Lab, cluster: &Cluster, case: Case, round: usize) -> Result<()> {
        let Case { contender, nodes, mbit } = case;
        let (run, ranks) = match contender {
            Contender::Alone => (command(&["env"]), 1),
            _ => (cluster.on_every_node(), nodes * lab.ranks_per_node),
        };
        let steps = lab.steps.to_string();
        let words = ["--contender", contender.name(), "--net", self.net.name, "--steps", &steps];
        let name = format!("{nodes} nodes, {mbit} Mbit/s, {}", contender.name());
        let printed = lab.train(run, &words);
        match printed.and_then(|printed| Run::parse(&printed, case, round, ranks)) {
            Ok(run) => {
                println!("round {round}  {name:<40} {:.3} s, CPU {:.3} s", run.seconds, run.cpu);
                lab.keep(self.net.name, &run)?;
                self.runs.push(run);
            }
            // One contender that fails must not cost the others' results.
            Err(error) => {
                eprintln!("round {round}  {name} failed: {error:#}");
                let story = lab.without_folders(&format!("{error:#}"));
                let last = story.lines().last().unwrap_or_default();
                self.failures.push(format!("round {round}, {name}: {last}"));
            }
        }
        Ok(())
    }

    fn of(&self, case: Case) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(move |run| run.case == case)
    }

    /// The median over the rounds of something.
    pub(super) fn median(&self, case: Case, value: fn(&Run) -> f64) -> Option<f64> {
        median(self.of(case).map(value).collect())
    }

    /// The median over the rounds of one's value over the other's.
    pub(super) fn ratio(&self, one: Case, other: Case, value: fn(&Run) -> f64) -> Option<f64> {
        let pairs = self.of(one).filter_map(|run| {
            let beside = self.of(other).find(|beside| beside.round == run.round)?;
            Some(value(run) / value(beside))
        });
        median(pairs.collect())
    }

    fn text(&self, lab: &Lab) -> String {
        let Net { about, batch, .. } = self.net;
        let mut text = format!(
            "{about}. Every node has a port of the given rate each way and {} rank(s) of one thread. {} round(s) of {} steps in which \
             the contenders alternate; a step takes as long as on its slowest rank, a run is the median of its steps, \
             and of the rounds the median counts. CPU seconds are those of all nodes together; what is computed in the \
             same number of steps alone is taken off in the column after it. Bytes are those of the node that sent \
             most.\n\n\
             | Mbit/s | nodes | | seconds per step | times alone | speed beside DDP | samples/s in total | CPU s per step | \
             beyond computing | MB sent per node and step | layers by factors |\n\
             | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
            lab.ranks_per_node, lab.rounds, lab.steps
        );
        let shown = |value: Option<f64>, digits: usize, unit: &str| {
            value.map_or("-".to_owned(), |value| format!("{value:.digits$}{unit}"))
        };
        for case in self.cases() {
            let Case { contender, nodes, mbit } = case;
            let alone = Case { contender: Contender::Alone, ..case };
            let stock = Case { contender: Contender::Ddp, ..case };
            let (nodes, ranks) = match contender {
                Contender::Alone => (1, 1),
                _ => (nodes, nodes * lab.ranks_per_node),
            };
            let seconds = self.median(case, |run| run.seconds);
            let cpu = self.median(case, |run| run.cpu);
            let computing = self.median(alone, |run| run.cpu).map(|cpu| cpu * ranks as f64);
            text += &format!(
                "| {mbit} | {nodes} | {} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
                contender.words(),
                shown(seconds, 3, ""),
                shown(self.ratio(case, alone, |run| run.seconds), 2, "x"),
                shown(self.ratio(stock, case, |run| run.seconds), 2, "x"),
                shown(seconds.map(|seconds| (batch * ranks) as f64 / seconds), 1, ""),
                shown(cpu, 3, ""),
                shown(cpu.zip(computing).map(|(cpu, computing)| cpu - computing), 3, ""),
                shown(self.median(case, |run| run.sent / 1e6), 2, ""),
                shown(self.median(case, |run| run.by_factors as f64), 0, ""),
            );
        }
        text += &format!("\n![seconds per step]({}.svg)\n", self.net.name);
        if !self.failures.is_empty() {
            text += &format!("\nFailed runs:\n\n- {}\n", self.failures.join("\n- "));
        }
        text
    }

    fn cases(&self) -> Vec<Case> {
        let each = |(nodes, mbit): &(u64, u64)| {
            let case =
                |contender: &Contender| Case { contender: *contender, nodes: *nodes, mbit: *mbit };
            self.contenders.iter().map(case).collect::<Vec<_>>()
        };
        self.settings.iter().flat_map(each).collect()
    }

    fn draw(&self, lab: &Lab) -> Result<()> {
        let path = lab.recorded(&format!("{}.svg", self.net.name));
        if self.runs.is_empty() {
            bail!("no run of {} ended well", self.net.name);
        }
        let several = self.settings.iter().any(|(nodes, _)| *nodes != self.settings[0].0);
        if several {
            charts::lines(&path, &self.lines(lab))
        } else {
            charts::bars(&path, &self.bars())
        }
    }

    /// Time over nodes, a chart for each rate.
    fn lines(&self, lab: &Lab) -> Vec<Panel> {
        let series = |contender: Contender, mbit: u64| Series {
            label: contender.words().to_owned(),
            colour: contender.colour(),
            points: self
                .settings
                .iter()
                .filter(|setting| setting.1 == mbit)
                .filter_map(|&(nodes, mbit)| {
                    let case = Case { contender, nodes, mbit };
                    Some((nodes as f64, self.median(case, |run| run.seconds)?))
                })
                .collect(),
        };
        let panel = |mbit: &u64| Panel {
            title: format!("{}, {mbit} Mbit/s", self.net.name),
            x: "nodes".to_owned(),
            y: "seconds per step".to_owned(),
            logarithmic: false,
            series: self.contenders.iter().map(|one| series(*one, *mbit)).collect(),
        };
        lab.mbit.iter().map(panel).collect()
    }

    fn bars(&self) -> Vec<Bars> {
        let panel = |&(nodes, mbit): &(u64, u64)| {
            let bar = |contender: &Contender| {
                let case = Case { contender: *contender, nodes, mbit };
                let value = self.median(case, |run| run.seconds)?;
                Some(Bar { label: contender.label().to_owned(), colour: contender.colour(), value })
            };
            Bars {
                title: format!("{}, {nodes} nodes, {mbit} Mbit/s", self.net.name),
                y: "seconds per step".to_owned(),
                bars: self.contenders.iter().filter_map(bar).collect(),
            }
        };
        self.settings.iter().map(panel).collect()
    }
}

impl Run {
    /// Puts together what the ranks printed, each on a line of its own.
    fn parse(printed: &str, case: Case, round: usize, expected: u64) -> Result<Self> {
        let mut ranks: Vec<Rank> = Vec::new();
        for line in printed.lines().filter(|line| line.starts_with('{')) {
            ranks.push(serde_json::from_str(line).with_context(|| line.to_owned())?);
        }
        ranks.sort_by_key(|rank| rank.rank);
        if !ranks.iter().map(|rank| rank.rank).eq(0..expected) {
            bail!("{} of {expected} ranks reported", ranks.len());
        }
        let steps = ranks.iter().map(|rank| rank.seconds.len()).min().unwrap_or(0);
        let slowest = |step: usize| ranks.iter().map(|rank| rank.seconds[step]).fold(0.0, f64::max);
        let seconds = median((0..steps).map(slowest).collect()).context("no step was timed")?;
        Ok(Self {
            case,
            round,
            seconds,
            cpu: ranks.iter().map(|rank| rank.cpu_seconds_per_step).sum(),
            sent: ranks.iter().map(|rank| rank.sent_per_step).fold(0.0, f64::max),
            by_factors: ranks.iter().map(|rank| rank.by_factors).max().unwrap_or(0),
            ranks,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const CASE: Case = Case { contender: Contender::Ddp, nodes: 2, mbit: 200 };

    fn line(rank: u64, seconds: [f64; 3]) -> String {
        format!(
            r#"{{"rank": {rank}, "seconds": {seconds:?}, "cpu_seconds_per_step": 0.25, "sent_per_step": {rank}e6,
               "received_per_step": 1, "by_factors": 3, "peak_rss_bytes": 5}}"#
        )
        .replace('\n', "")
    }

    /// Results of a net in which a contender's step takes as long as `seconds` says, in every round and setting.
    pub(in crate::bench::torch) fn results(
        net: Net,
        seconds: impl Fn(Contender) -> f64,
    ) -> Results {
        let contenders =
            vec![Contender::Alone, Contender::Ddp, Contender::DdpPoseidon, Contender::Poseidon];
        let settings = vec![(8, 1000), (8, 200)];
        let mut results = Results { net, contenders, settings, runs: vec![], failures: vec![] };
        for round in 1..=3 {
            for case in results.cases() {
                let seconds = seconds(case.contender);
                let (sent, cpu, ranks) = (1e6, seconds, vec![]);
                results.runs.push(Run { case, round, seconds, cpu, sent, by_factors: 0, ranks });
            }
        }
        results
    }

    #[test]
    fn a_step_takes_as_long_as_its_slowest_rank() {
        let printed =
            format!("noise\n{}\n{}\n", line(1, [0.1, 0.9, 0.3]), line(0, [0.2, 0.2, 0.2]));
        let run = Run::parse(&printed, CASE, 1, 2).unwrap();
        assert_eq!((run.seconds, run.cpu, run.sent), (0.3, 0.5, 1e6));
        assert_eq!(run.ranks[0].rank, 0);
    }

    #[test]
    fn a_missing_rank_is_noticed() {
        let error = Run::parse(&line(1, [0.1; 3]), CASE, 1, 2).unwrap_err();
        assert_eq!(error.to_string(), "1 of 2 ranks reported");
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let mut results = results(FC, |_| 1.0);
        // A slow minute in the second round hits both.
        for run in results.runs.iter_mut().filter(|run| run.round == 2) {
            run.seconds *= 7.0;
        }
        let case = Case { contender: Contender::Poseidon, nodes: 8, mbit: 200 };
        let stock = Case { contender: Contender::Ddp, ..case };
        assert_eq!(results.ratio(stock, case, |run| run.seconds), Some(1.0));
    }
}
