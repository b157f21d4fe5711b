//! What a checkpoint costs: the steps around it.
//!
//! Checkpoints are so far apart that one is complete when half of the steps until the next have been
//! taken. So every checkpoint has a pair: the steps from it to the middle, and as many steps after
//! the middle. What the first half takes longer is what the checkpoint costs, whatever else the
//! machine does in the long run. Runs without checkpoints are cut into the same pairs: they show the noise.

use super::{LIMIT, Lab};
use crate::bench::cluster::{Cluster, SWITCH};
use crate::bench::environment;
use crate::bench::finding::Finding;
use crate::bench::targets::Verdict;
use crate::command::{command, end, output_within, succeed};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

/// What one node saw of a run.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Seen {
    /// Seconds of every step.
    steps: Vec<f64>,
    checkpoints: Vec<Made>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Made {
    /// The step in which it was begun. The first is 1.
    step: usize,
    /// Seconds that the training program waited in the call that begins it.
    begin: f64,
    /// Seconds until it was complete, beside the training.
    writing: f64,
}

/// Who trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    /// A session in Rust, whose shards step: `poseidon bench scale`.
    Session,
    /// PyTorch, whose workers step.
    Pytorch,
    /// PyTorch with `update="server"`.
    PytorchServer,
}

/// Where checkpoints go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Nowhere,
    Folder,
    S3,
}

impl Place {
    const ALL: [Self; 3] = [Self::Nowhere, Self::Folder, Self::S3];

    fn name(self) -> &'static str {
        match self {
            Self::Nowhere => "no checkpoints",
            Self::Folder => "a folder",
            Self::S3 => "a store that speaks S3",
        }
    }
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Session => "a session in Rust, the shards step",
            Self::Pytorch => "PyTorch, `psd.save(..., wait=False)`, the workers step",
            Self::PytorchServer => "PyTorch, `psd.save(..., wait=False)`, the shards step",
        }
    }
}

/// Measures `programs` one after the other.
pub(super) fn cost(lab: &Lab<'_>, programs: &[Program]) -> Result<Finding> {
    let (nodes, mbit, quick) = (lab.args.nodes, lab.args.mbit, lab.args.quick);
    let (rounds, pairs) = (lab.rounds(3), if quick { 2 } else { 5 });
    let (slower, every) = (f64::from(lab.args.slower), usize::from(lab.args.every));
    let cluster = Cluster::up(nodes.into(), (mbit as f64 / slower).round() as u64, None)?;
    let store = Store::start(lab, &cluster)?;
    let mut text = format!(
        "VGG19 with an eighth of its parameters on {nodes} nodes with ports of {mbit} Mbit/s, on a virtual \
         cluster of this machine. Computing is slept through, for half a second. Ports and computing \
         are {slower} times as slow, so that a node has as much of this machine's processors and disk in a \
         step as a machine that is {slower} times as fast would give it. Times are those that were measured. A checkpoint is begun after every {every} \
         steps. Each has a pair: the {} steps from its beginning on, and the {} steps after those, when \
         it is complete. The cost of a checkpoint is what the first take longer. The store is at the switch, \
         so nodes reach it through their ports. A checkpoint that is due before the last one is complete \
         waits for it in the call. All sides take turns, {rounds} rounds of {pairs} pairs.\n",
        every / 2,
        every / 2,
    );
    let mut verdicts = Vec::new();
    for &program in programs {
        let mut runs = Place::ALL.map(|_| Vec::new());
        for round in 0..rounds {
            for (place, runs) in Place::ALL.into_iter().zip(&mut runs) {
                println!("cost: {program:?}, {place:?}, round {} of {rounds}", round + 1);
                let seen = run(lab, &cluster, program, place, every * (pairs + 1))?;
                runs.push(seen);
            }
        }
        text += &format!(
            "\n**{}**\n\n| checkpoints to | pairs | median step, ms | the call, ms | complete after, s | \
             cost, ms: median (quartiles) | cost, % of a step |\n\
             | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
            program.name()
        );
        let (mut around, mut noise) = (String::new(), 0.0);
        for (place, runs) in Place::ALL.into_iter().zip(&runs) {
            let found = Found::new(runs, every)?;
            text += &found.row(place.name());
            around += &found.steps_around(place.name());
            match place {
                Place::Nowhere => noise = (found.cost.high - found.cost.low) / 2.0 / found.step,
                _ => verdicts.push(found.verdict(program, place, noise)),
            }
        }
        text += "\nMedian steps around the beginning of a checkpoint, in ms:\n\n| checkpoints to | before |";
        text += &(0..every / 2).map(|step| format!(" +{step} |")).collect::<String>();
        text += &format!("\n| --- |{}\n{around}", " ---: |".repeat(every / 2 + 1));
    }
    drop(store);
    Ok(Finding { text, verdicts })
}

/// One run. Returns what every node saw.
fn run(
    lab: &Lab<'_>,
    cluster: &Cluster,
    program: Program,
    place: Place,
    steps: usize,
) -> Result<Vec<Seen>> {
    let seen = lab.fresh("seen")?;
    let mut all = cluster.on_every_node();
    // Namespaces of one machine could share memory, which no cluster can.
    all.env("POSEIDON_LINK", "tcp").env("OMP_NUM_THREADS", "1").env("SEEN", &seen);
    all.envs(STORE);
    // Lines of several nodes must not mix.
    all.args(["sh", "-c", r#"exec "$@" >"$SEEN/$RANK""#, "sh"]);
    match program {
        Program::Session => {
            let dilate = (DILATE * f64::from(lab.args.slower)).to_string();
            all.arg(environment::poseidon()).args(VGG.split_whitespace());
            all.args(["--node", "auto", "--dilate", &dilate]);
        }
        Program::Pytorch | Program::PytorchServer => {
            let update = if program == Program::Pytorch { "worker" } else { "server" };
            all.args([lab.python()?, "bench/peers/torch_saving.py", "--update", update]);
            all.args(["--slower", &lab.args.slower.to_string()]);
        }
    }
    all.args(["--steps", &steps.to_string()]);
    let to = match place {
        Place::Nowhere => None,
        Place::Folder => Some(lab.fresh("saved")?.display().to_string()),
        Place::S3 => Some("s3://bucket/run".to_owned()),
    };
    if let Some(to) = to {
        // Nothing is there: a step that is complete is not written again.
        lab.fresh("store/bucket")?;
        all.args(["--checkpoint", &to, "--every", &lab.args.every.to_string()]);
    }
    output_within(&mut all, LIMIT)?;
    let mut found = Vec::new();
    for rank in 0..lab.args.nodes {
        let text = fs::read_to_string(seen.join(rank.to_string()))?;
        let one: Seen = serde_json::from_str(&text).context("reading what a node saw")?;
        ensure!(one.steps.len() == steps, "steps are missing");
        let program = format!("{program:?}");
        let line = serde_json::json!({
            "program": program, "place": format!("{place:?}"), "rank": rank, "seen": one,
        });
        lab.record(&line.to_string())?;
        found.push(one);
    }
    Ok(found)
}

/// What a checkpoint may cost, in steps.
const MOST: f64 = 0.05;

/// VGG19/8 as in `bench torch`.
const VGG: &str = "bench scale --model vgg19 --scale-model 8 --batch 32 --bandwidth 1000gbit";
/// By how much its computing has to be slower to take half a second.
const DILATE: f64 = 4.4;

/// How the store is reached.
const STORE: [(&str, &str); 4] = [
    ("AWS_ACCESS_KEY_ID", "key"),
    ("AWS_SECRET_ACCESS_KEY", "secret"),
    ("AWS_REGION", "us-east-1"),
    ("AWS_ENDPOINT_URL", "http://10.77.0.254:9000"),
];

/// A server that speaks S3, at the switch of a virtual cluster. It ends with its scope.
struct Store(Child);

impl Store {
    fn start(lab: &Lab<'_>, cluster: &Cluster) -> Result<Self> {
        let example = ["cargo", "build", "--release", "-p", "poseidon-checkpoint", "--example"];
        succeed(command(&example).arg("s3_server"))?;
        let mut serve = cluster.at_switch();
        serve.arg(environment::example("s3_server"));
        serve.arg(format!("{SWITCH}:9000")).arg(lab.fresh("store")?);
        let mut child = serve.stdout(Stdio::piped()).spawn().context("starting a store")?;
        let output = child.stdout.take().context("a store without output")?;
        let store = Self(child);
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line.contains("http://"), "the store did not start");
        Ok(store)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Err(error) = end(&mut self.0) {
            eprintln!("the store did not end: {error}");
        }
    }
}

/// What runs of one side show.
#[derive(Debug)]
struct Found {
    /// The median step, in seconds, like everything here.
    step: f64,
    pairs: usize,
    cost: Quartiles,
    /// If there were checkpoints.
    begin: Option<f64>,
    writing: Option<f64>,
    /// Median steps: the one before the beginning of a checkpoint, and those from it on.
    around: Vec<f64>,
}

#[derive(Clone, Copy, Debug)]
struct Quartiles {
    low: f64,
    median: f64,
    high: f64,
}

impl Found {
    /// Checkpoints were begun after every `every` steps.
    fn new(runs: &[Vec<Seen>], every: usize) -> Result<Self> {
        let (mut costs, mut steps) = (Vec::new(), Vec::new());
        let mut around = vec![Vec::new(); every / 2 + 1];
        for nodes in runs {
            let count = nodes.first().context("a run without nodes")?.steps.len();
            // Nodes wait for each other, so a step of the job is the mean of theirs. The last step waits
            // for everything and does not count.
            let of_job: Vec<f64> = (0..count - 1)
                .map(|step| {
                    nodes.iter().map(|node| node.steps[step]).sum::<f64>() / nodes.len() as f64
                })
                .collect();
            steps.extend_from_slice(&of_job[every..]);
            let mut begin = every - 1;
            while begin + every <= of_job.len() {
                let pair = &of_job[begin..begin + every];
                let (first, second) = pair.split_at(every / 2);
                costs.push(first.iter().sum::<f64>() - second.iter().sum::<f64>());
                for (offset, found) in around.iter_mut().enumerate() {
                    found.push(of_job[begin + offset - 1]);
                }
                begin += every;
            }
        }
        let made = || runs.iter().flatten().flat_map(|node| &node.checkpoints);
        let of_made = |read: fn(&Made) -> f64| {
            let values: Vec<f64> = made().map(read).collect();
            (!values.is_empty()).then(|| quartiles(values).median)
        };
        Ok(Self {
            step: quartiles(steps).median,
            pairs: costs.len(),
            cost: quartiles(costs),
            begin: of_made(|made| made.begin),
            writing: of_made(|made| made.writing),
            around: around.into_iter().map(|steps| quartiles(steps).median).collect(),
        })
    }

    /// `noise` is by how much, in steps, pairs differ that have no checkpoint.
    fn verdict(&self, program: Program, place: Place, noise: f64) -> Verdict {
        let share = self.cost.median / self.step;
        let mut measured = format!("{:.1}% of a step", 100.0 * share);
        let is_told = noise <= MOST;
        if !is_told {
            measured +=
                &format!(", and pairs without a checkpoint differ by {:.0}%", 100.0 * noise);
        }
        let target = format!("{program:?}, {}: at most 5% of a step", place.name());
        Verdict { target, measured, met: is_told.then_some(share <= MOST) }
    }

    fn row(&self, name: &str) -> String {
        let Quartiles { low, median, high } = self.cost;
        let shown = |value: Option<f64>, scale: f64, digits| {
            value.map_or("".into(), |value| format!("{:.*}", digits, scale * value))
        };
        format!(
            "| {name} | {} | {:.1} | {} | {} | {:.1} ({:.1} to {:.1}) | {:.1} ({:.1} to {:.1}) |\n",
            self.pairs,
            1e3 * self.step,
            shown(self.begin, 1e3, 1),
            shown(self.writing, 1.0, 2),
            1e3 * median,
            1e3 * low,
            1e3 * high,
            100.0 * median / self.step,
            100.0 * low / self.step,
            100.0 * high / self.step,
        )
    }

    fn steps_around(&self, name: &str) -> String {
        let steps = self.around.iter().map(|step| format!(" {:.1} |", 1e3 * step));
        format!("| {name} |{}\n", steps.collect::<String>())
    }
}

fn quartiles(mut values: Vec<f64>) -> Quartiles {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let place = share * values.len().saturating_sub(1) as f64;
        values.get(place.round() as usize).copied().unwrap_or(f64::NAN)
    };
    Quartiles { low: at(0.25), median: at(0.5), high: at(0.75) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: usize = 8;

    #[test]
    fn a_checkpoint_costs_what_the_steps_from_it_on_take_longer() {
        // Steps of 100 ms, and a checkpoint that costs 20 ms and then 10 ms.
        let mut steps = Vec::new();
        for step in 1..=3 * EVERY {
            let extra = match step % EVERY {
                _ if step < EVERY => 0.0,
                0 => 0.020,
                1 => 0.010,
                _ => 0.0,
            };
            steps.push(0.1 + extra);
        }
        let made = Made { step: EVERY, begin: 0.002, writing: 0.3 };
        let node = Seen { steps, checkpoints: vec![made] };
        let found = Found::new(&[vec![node.clone(), node]], EVERY).unwrap();
        assert_eq!(found.pairs, 2, "the last step is in no pair");
        assert!((found.cost.median - 0.03).abs() < 1e-9, "{found:?}");
        assert!((found.step - 0.1).abs() < 1e-9, "{found:?}");
        assert!((found.around[0] - 0.1).abs() < 1e-9 && (found.around[1] - 0.12).abs() < 1e-9);
        assert_eq!(found.begin, Some(0.002));
        let judged = |noise| found.verdict(Program::Session, Place::S3, noise).met;
        assert_eq!([judged(0.01), judged(0.2)], [Some(false), None], "noise hides what it costs");
    }

    #[test]
    fn quartiles_are_of_the_values() {
        let Quartiles { low, median, high } = quartiles((0..101).rev().map(f64::from).collect());
        assert_eq!([low, median, high], [25.0, 50.0, 75.0]);
    }
}
