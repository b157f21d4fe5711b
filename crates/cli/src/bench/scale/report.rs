//! What was measured beside what was predicted, for people and for programs.

use super::Args;
use super::case::Case;
use super::node::Seen;
use anyhow::ensure;
use poseidon::Policy;
use serde::Serialize;

/// All runs. Seconds are without dilation. The keys are a contract with those who read them.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    model: String,
    /// Of the model that was run.
    parameters: usize,
    profile: String,
    batch: usize,
    /// In bits per second.
    bandwidth: f64,
    overlap: String,
    dilate: f64,
    scale_model: f64,
    lanes: u16,
    steps: u32,
    /// What one worker alone computes in a step.
    compute_seconds: f64,
    pub(super) rows: Vec<Row>,
    #[serde(skip)]
    heading: String,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    nodes: u16,
    scheme: Policy,
    /// The median over nodes and steps.
    iteration_seconds: f64,
    predicted_iteration_seconds: f64,
    /// By how much of the prediction the measurement is longer.
    iteration_deviation: f64,
    /// Sent by a node in a step, on average, with frame headers, without those of TCP.
    bytes_per_node: f64,
    predicted_bytes_per_node: f64,
    /// The same for bytes, of the node for which it is largest.
    bytes_deviation: f64,
    speedup: f64,
    predicted_speedup: f64,
    /// The share of a step in which a node rebuilt gradients. Told to the simulator.
    rebuild_fraction: f64,
    /// The share of this machine's processors that all nodes together used.
    cpu_fraction: f64,
}

impl Row {
    pub(super) fn new(case: &Case, scheme: Policy, seen: &[Seen]) -> anyhow::Result<Self> {
        let count = case.steps as usize;
        ensure!(
            !seen.is_empty() && seen.iter().all(|n| n.steps.len() == count),
            "steps are missing"
        );
        let nodes = seen.len() as u16;
        // The first has nothing to wait for, and the last waits for everything.
        let mut steps: Vec<f64> =
            seen.iter().flat_map(|node| &node.steps[1..count - 1]).copied().collect();
        steps.sort_by(f64::total_cmp);
        let iteration = steps[steps.len() / 2];
        let mean = |value: fn(&Seen) -> f64| seen.iter().map(value).sum::<f64>() / f64::from(nodes);
        let rebuilding = mean(|node| node.rebuilding);
        let predicted = case.predict(nodes, scheme, rebuilding)?;
        let sent = seen.iter().map(|node| node.bytes_sent);
        let deviations = sent.zip(&predicted.bytes_sent).map(|(sent, &expected)| match expected {
            // A node that has nobody to send to.
            0 => sent,
            expected => deviation(sent, expected as f64),
        });
        let bytes_deviation = deviations.max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or(0.0);
        let total: u64 = predicted.bytes_sent.iter().sum();
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let cpu = mean(|node| node.cpu) * f64::from(nodes);
        Ok(Self {
            nodes,
            scheme,
            iteration_seconds: iteration / case.dilate,
            predicted_iteration_seconds: predicted.iteration_seconds / case.dilate,
            iteration_deviation: deviation(iteration, predicted.iteration_seconds),
            bytes_per_node: mean(|node| node.bytes_sent),
            predicted_bytes_per_node: total as f64 / f64::from(nodes),
            bytes_deviation,
            speedup: f64::from(nodes) * case.compute_seconds() / iteration,
            predicted_speedup: predicted.speedup,
            rebuild_fraction: rebuilding / iteration,
            cpu_fraction: cpu / iteration / cores as f64,
        })
    }
}

impl Report {
    pub(super) fn new(args: &Args, case: &Case) -> Self {
        let mut notes = String::new();
        if args.scale_model > 1.0 {
            notes += &format!(", 1/{} of the model and of its computing", args.scale_model);
        }
        if args.dilate > 1.0 {
            notes += &format!(", run {} times as slow ({})", args.dilate, case.rate);
        }
        let heading = format!(
            "{}, {:.1}M parameters, batch {}, {} ({}), links of {}{notes}",
            case.model.name,
            case.model.parameters() as f64 / 1e6,
            case.batch,
            args.profile,
            case.basis,
            args.bandwidth
        );
        Self {
            model: case.model.name.clone(),
            parameters: case.model.parameters(),
            profile: args.profile.clone(),
            batch: case.batch,
            bandwidth: args.bandwidth.bits(),
            overlap: case.overlap.to_string(),
            dilate: args.dilate,
            scale_model: args.scale_model,
            lanes: case.lanes,
            steps: case.steps,
            compute_seconds: case.compute_seconds() / case.dilate,
            rows: Vec::new(),
            heading,
        }
    }

    /// A line of the table, with what stands above it if it is the first.
    pub(super) fn line(&self, row: &Row) -> String {
        let line = format!(
            "{:>5}  {:<6} {:>10} {:>10} {:>7} {:>10} {:>10} {:>7} {:>9} {:>9} {:>5}",
            row.nodes,
            row.scheme.to_string(),
            format!("{:.4} s", row.iteration_seconds),
            format!("{:.4} s", row.predicted_iteration_seconds),
            percent(row.iteration_deviation),
            megabytes(row.bytes_per_node),
            megabytes(row.predicted_bytes_per_node),
            percent(row.bytes_deviation),
            format!("{:.2}x", row.speedup),
            format!("{:.2}x", row.predicted_speedup),
            format!("{:.0}%", row.cpu_fraction * 100.0)
        );
        if !self.rows.is_empty() {
            return line;
        }
        let columns = format!(
            "{:>5}  {:<6} {:>10} {:>10} {:>7} {:>10} {:>10} {:>7} {:>9} {:>9} {:>5}",
            "nodes",
            "scheme",
            "iteration",
            "predicted",
            "off",
            "sent/node",
            "predicted",
            "off",
            "speed-up",
            "predicted",
            "CPU"
        );
        format!("{}\n\n{columns}\n{line}", self.heading)
    }

    /// What else there is to say.
    pub(super) fn closing(&self) -> String {
        let worst = |value: fn(&Row) -> f64| {
            self.rows.iter().map(value).map(f64::abs).fold(0.0, f64::max) * 100.0
        };
        let mut text = format!(
            "\nThe simulator is off by at most {:.1}% of an iteration (target: {:.0}%) and {:.2}% of a node's bytes \
             (target: {:.0}%).",
            worst(|row| row.iteration_deviation),
            ITERATION * 100.0,
            worst(|row| row.bytes_deviation),
            BYTES * 100.0
        );
        let busy = self.rows.iter().filter(|row| row.cpu_fraction > BUSY);
        let busy: Vec<_> = busy.map(|row| format!("{} ({})", row.nodes, row.scheme)).collect();
        if !busy.is_empty() {
            text += &format!(
                "\nThis machine's processors were busy with {} nodes: their times say as much of it as of the \
                 network. A larger --dilate helps.",
                busy.join(", ")
            );
        }
        text
    }
}

/// How much more `measured` is than `predicted`, as a share of it.
fn deviation(measured: f64, predicted: f64) -> f64 {
    measured / predicted - 1.0
}

fn percent(share: f64) -> String {
    format!("{:+.1}%", share * 100.0)
}

fn megabytes(bytes: f64) -> String {
    format!("{:.1} MB", bytes / 1e6)
}

/// How close a prediction is to come: of an iteration's time, and of a node's bytes.
const ITERATION: f64 = 0.10;
const BYTES: f64 = 0.02;
/// From here on nodes wait for processors now and then.
const BUSY: f64 = 0.6;

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn case(flags: &str) -> Case {
        let words = std::iter::once("scale").chain(flags.split_whitespace());
        Case::new(&Line::parse_from(words).args).unwrap()
    }

    #[test]
    fn the_first_and_last_step_do_not_count_and_dilation_is_taken_out() {
        let flags = "--model cifar10-quick --batch 100 --dilate 10 --steps 5 --bandwidth 1gbit";
        let case = case(flags);
        let predicted = case.predict(2, Policy::Ps, 0.0).unwrap();
        let (step, bytes) = (predicted.iteration_seconds, &predicted.bytes_sent);
        let seen = |node: usize| Seen {
            steps: vec![9.0 * step, 1.1 * step, 1.1 * step, 1.1 * step, 7.0 * step],
            bytes_sent: bytes[node] as f64 * if node == 1 { 0.99 } else { 1.0 },
            rebuilding: 0.0,
            cpu: 0.0,
            checkpoints: Vec::new(),
        };
        let row = Row::new(&case, Policy::Ps, &[seen(0), seen(1)]).unwrap();
        assert!((row.iteration_deviation - 0.1).abs() < 1e-9, "{row:?}");
        assert!((row.bytes_deviation + 0.01).abs() < 1e-9, "{row:?}");
        assert!((row.iteration_seconds * 10.0 - 1.1 * step).abs() < 1e-9, "{row:?}");
    }

    #[test]
    fn dilation_changes_no_prediction_but_by_latency() {
        let flags = "--model cifar10-quick --batch 100 --bandwidth 1gbit --steps 6";
        let real = case(flags).predict(4, Policy::Auto, 0.0).unwrap();
        let slow = case(&format!("{flags} --dilate 100")).predict(4, Policy::Auto, 0.0).unwrap();
        assert_eq!(real.bytes_sent, slow.bytes_sent);
        let ratio = slow.iteration_seconds / real.iteration_seconds;
        assert!((0.95..=1.0).contains(&(ratio / 100.0)), "{ratio}");
    }

    #[test]
    fn rebuilding_is_part_of_the_prediction() {
        let case = case("--scale-model 8 --dilate 50 --steps 4");
        let seconds =
            |rebuilding| case.predict(4, Policy::Auto, rebuilding).unwrap().iteration_seconds;
        let free = seconds(0.0);
        // A tenth of the computing is hidden by it, twice as much is not.
        let (hidden, paid) = (seconds(0.1 * free), seconds(2.0 * free));
        assert!(hidden < 1.05 * free && paid > 1.2 * free, "{free} {hidden} {paid}");
    }
}
