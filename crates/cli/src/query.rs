//! `poseidon query`: asks a running job's coordinator.

mod tree;

use crate::report::units;
use crate::running_job::RunningJob;
use crate::terminal::columns::table;
use crate::terminal::{printable, say};
use anyhow::bail;
use poseidon::{PlacedChunk, PlannedLayer, PlannedPort};
use serde_json::Value;
use std::process::ExitCode;

/// Ask a running job's coordinator for the information book: nodes, addresses, layers, the plan.
///
/// KEY is a dotted path into the book (identity, epoch, cluster, nodes, job), or into what follows
/// from it: 'plan' is how each layer is synchronised and why, 'chunks' where each chunk lives,
/// 'ports' what the nodes' ports carry, 'tree' which nodes share a host and a rack, and what that
/// means for sums. These four are text for people, everything else and everything below them is
/// JSON. 'live' is what the job does right now, which 'poseidon top' shows.
///
/// Takes the coordinator's address and the secret from the job's environment (POSEIDON_COORDINATOR,
/// POSEIDON_SECRET, POSEIDON_CLUSTER), unless they are given. Outside of one, it finds the job that
/// you run on this machine.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// A dotted path such as job.layers.0.name, 'plan', 'chunks', 'ports' or 'tree'; without it,
    /// the whole book.
    #[arg(default_value = "")]
    key: String,

    /// Print 'plan', 'chunks', 'ports' and 'tree' as JSON, too.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    job: RunningJob,
}

/// Prints the answer.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let coordinator = args.job.find()?;
    let ask = |key: &str| coordinator.ask(key);
    let Some(answer) = ask(&args.key)? else { bail!(what_there_is(&args.key, ask)?) };
    say(&match &*args.key {
        "plan" if !args.json => plan_table(&serde_json::from_value::<Vec<_>>(answer)?),
        "chunks" if !args.json => chunk_table(&serde_json::from_value::<Vec<_>>(answer)?),
        "ports" if !args.json => port_table(&serde_json::from_value::<Vec<_>>(answer)?),
        "tree" if !args.json => tree::tree_text(&serde_json::from_value(answer)?),
        _ => format!("{answer:#}\n").chars().map(escaped).collect(),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// JSON may have control characters of the terminal as they are, if they are not ASCII. They stand
/// only in strings, where JSON has another way to write them.
fn escaped(c: char) -> String {
    match c {
        '\n' => c.into(),
        _ if printable(c.encode_utf8(&mut [0; 4])).starts_with(c) => c.into(),
        _ => format!("\\u{:04x}", u32::from(c)),
    }
}

/// Why `key` has no answer: how far the path leads, and what goes on from there.
fn what_there_is(
    key: &str,
    ask: impl Fn(&str) -> anyhow::Result<Option<Value>>,
) -> anyhow::Result<String> {
    let mut known = key;
    let value = loop {
        known = known.rsplit_once('.').map_or("", |(before, _)| before);
        if let Some(value) = ask(known)? {
            break value;
        }
        if known.is_empty() {
            return Ok(format!("the coordinator has nothing under '{key}', and nothing else"));
        }
    };
    let there = match &value {
        Value::Object(fields) => {
            let mut keys: Vec<_> = fields.keys().map(|key| printable(key)).collect();
            // A book has a plan; a job that has not started has none.
            if known.is_empty() && fields.contains_key("job") {
                keys.extend(["plan", "chunks", "ports", "tree"].map(String::from));
            }
            format!("has {}", keys.join(", "))
        }
        Value::Array(items) if items.is_empty() => "is empty".into(),
        Value::Array(items) => format!("has 0 to {}", items.len() - 1),
        other => format!("is {other}, and has nothing below it"),
    };
    let place = if known.is_empty() { "the book".into() } else { format!("'{known}'") };
    Ok(format!("there is nothing under '{key}': {place} {there}"))
}

fn plan_table(layers: &[PlannedLayer]) -> String {
    let header = ["layer", "parameters", "scheme", "chunks", "sent per step", "why"];
    let row = |layer: &PlannedLayer| {
        [
            printable(&layer.layer),
            units::count(layer.parameters as u64),
            layer.scheme.to_string(),
            layer.chunks.to_string(),
            units::bytes(layer.bytes_per_node as u64),
            printable(&layer.reason),
        ]
    };
    let sum = |of: fn(&PlannedLayer) -> usize| layers.iter().map(of).sum::<usize>();
    let total = [
        units::plural(layers.len() as u64, "layer"),
        units::count(sum(|l| l.parameters) as u64),
        String::new(),
        sum(|l| l.chunks).to_string(),
        units::bytes(sum(|l| l.bytes_per_node) as u64),
        String::new(),
    ];
    let rows = layers.iter().map(row).chain([total]);
    table(header, [false, true, false, true, true, false], rows)
}

fn chunk_table(chunks: &[PlacedChunk]) -> String {
    let header = ["layer", "chunk", "elements", "node", "lane"];
    let row = |chunk: &PlacedChunk| {
        [
            printable(&chunk.layer),
            chunk.chunk.to_string(),
            format!("{}..{}", chunk.start, chunk.start + chunk.len),
            chunk.node.to_string(),
            chunk.lane.to_string(),
        ]
    };
    table(header, [false, true, true, true, true], chunks.iter().map(row))
}

fn port_table(ports: &[PlannedPort]) -> String {
    if ports.is_empty() {
        return "nothing is known of the nodes' ports, so they count as equal\n".into();
    }
    let header = ["node", "port", "carries", "holds"];
    let row = |port: &PlannedPort| {
        [
            printable(&port.node),
            port.port.to_string(),
            port.rate.to_string(),
            format!("{:.1} %", f64::from(port.shard) / 10.0),
        ]
    };
    table(header, [false, true, true, true], ports.iter().map(row))
}

const EXAMPLES: &str = "\
Examples:
  How is each layer of a running job synchronised, and why?
    poseidon query plan --coordinator node1:29501

  Which node and lane has which elements of which layer? How many chunks has node 3?
    poseidon query chunks
    poseidon query chunks --json | jq 'map(select(.node == 3)) | length'

  Which ranks share a host and its port? Which hosts are in which rack?
    poseidon query tree
    poseidon query tree --json | jq '.racks[].hosts | length'

  How many steps does it make in a second?
    poseidon query live | jq .steps_per_second

  One fact, for a script: the first layer's scheme, or where node 3 listens.
    poseidon query plan.0.scheme
    poseidon query nodes.3.tcp

  What does a worker's job look like, from inside it?
    poseidon launch -n 2 -- sh -c '[ $RANK = 1 ] || ./train & poseidon query cluster; wait'";

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon::{NodeId, Scheme};
    use serde_json::json;

    #[test]
    fn the_plan_is_a_table_that_lines_up() {
        let layer = |layer: &str, parameters, scheme, reason: &str| PlannedLayer {
            layer: layer.into(),
            parameters,
            scheme,
            chunks: 2,
            bytes_per_node: 6_000,
            reason: reason.into(),
        };
        let table = plan_table(&[
            layer("conv1", 800, Scheme::Ps, "its gradient has no factors"),
            layer("f\u{1b}c", 200_000, Scheme::Sfb, "as told"),
        ]);
        let expected = "\
layer     parameters  scheme  chunks  sent per step  why
conv1            800  ps           2        6.00 kB  its gradient has no factors
f\u{fffd}c           200.0K  sfb          2        6.00 kB  as told
2 layers      200.8K               4        12.0 kB
";
        assert_eq!(table, expected);
    }

    #[test]
    fn chunks_are_a_table_of_elements_and_shards() {
        let chunk = PlacedChunk {
            layer: "fc".into(),
            chunk: 3,
            start: 65536,
            len: 10,
            node: NodeId(1),
            lane: poseidon_core::LaneId(2),
        };
        let expected = "\
layer  chunk      elements  node  lane
fc         3  65536..65546     1     2
";
        assert_eq!(chunk_table(&[chunk]), expected);
    }

    #[test]
    fn ports_are_a_table_of_rates_and_shards() {
        let (node, rate) = ("worker 2".into(), "100mbit".parse().unwrap());
        let expected = "\
node      port     carries   holds
worker 2     1  100 Mbit/s  33.3 %
";
        assert_eq!(port_table(&[PlannedPort { node, port: 1, rate, shard: 333 }]), expected);
        assert!(port_table(&[]).contains("count as equal"));
    }

    #[test]
    fn a_wrong_key_hears_which_ones_there_are() {
        let book = json!({ "job": { "layers": [1, 2] }, "epoch": 1 });
        let ask = |key: &str| {
            Ok(match key {
                "" => Some(book.clone()),
                "job" => Some(book["job"].clone()),
                "job.layers" => Some(book["job"]["layers"].clone()),
                "epoch" => Some(1.into()),
                _ => None,
            })
        };
        let words = |key| what_there_is(key, ask).unwrap();
        assert_eq!(
            words("plam.0.scheme"),
            "there is nothing under 'plam.0.scheme': the book has epoch, job, plan, chunks, ports, tree"
        );
        assert_eq!(words("job.layer.0"), "there is nothing under 'job.layer.0': 'job' has layers");
        assert_eq!(
            words("job.layers.2"),
            "there is nothing under 'job.layers.2': 'job.layers' has 0 to 1"
        );
        assert!(words("epoch.x").ends_with("'epoch' is 1, and has nothing below it"));
        let early = what_there_is("plan", |key| {
            Ok(key.is_empty().then(|| json!({ "joined": [], "missing": ["worker 1"] })))
        });
        assert!(early.unwrap().ends_with("the book has joined, missing"));
    }
}
