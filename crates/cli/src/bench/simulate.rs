//! `poseidon bench simulate`: what the simulator says of `bench exchange` in a virtual cluster.

use crate::bandwidth::Bandwidth;
use crate::lab::MOST_NODES;
use crate::plan::{duration, queue};
use crate::terminal::say;
use anyhow::ensure;
use poseidon::{
    ChunkSize, Cluster, Consistency, Encoding, Encodings, Layer, LayerKind, NodeId, Servers,
};
use poseidon_sim::outcome::Drops;
use poseidon_sim::setup::{Jitter, Stragglers};
use poseidon_sim::{
    LayerTime, Model, ModelLayer, Network, Overlap, Places, SchemeRule, Setup, simulate,
};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Duration;

/// Simulate 'poseidon bench exchange' on a cluster, to compare with a measurement.
///
/// Nothing is sent. The links are those of 'poseidon lab' and bench/vcluster.sh: --rate counts
/// Ethernet, IP and TCP headers. With --queue, a port of the switch drops what its queue cannot
/// hold, TCP sends it again, and nodes begin within about a millisecond of each other. Without
/// --queue nothing is ever dropped.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Nodes, each a worker and a server.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 8,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST_NODES)))]
    nodes: u16,

    /// Nodes of one host, which share its port and reach each other through memory, as with
    /// 'poseidon lab --ranks'. --nodes stays the number of all nodes; the last host may have fewer.
    /// What memory carries is that of nodes with a core each: nodes that share cores are slower.
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    ranks_per_host: u16,

    /// Of every host's port, each way: 1gbit, 200mbit.
    #[arg(
        long,
        short = 'r',
        value_name = "RATE",
        default_value = "1gbit",
        allow_hyphen_values = true
    )]
    rate: Bandwidth,

    /// From one node to another, one way, on top of the 30 microseconds a virtual cluster takes.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration, allow_hyphen_values = true)]
    delay: Duration,

    /// What the switch's port holds for a host before it drops: 256kb, 2mb (powers of 1024)
    /// [default: everything].
    #[arg(long, value_name = "SIZE", value_parser = queue)]
    queue: Option<u64>,

    /// Let every node send long bursts to every other by chance, as without a budget of ports and
    /// without a ring.
    #[arg(long, requires = "queue")]
    bursts: bool,

    /// Size of the model, such as 64KB or 100MB (powers of 1024).
    #[arg(long, value_name = "N", default_value = "100MB", value_parser = super::exchange::bytes)]
    bytes: usize,

    /// How numbers travel. The model has twice as many numbers of 'bf16' or 'f16'.
    #[arg(long, value_name = "f32|bf16|f16", default_value_t = Encoding::F32)]
    encoding: Encoding,

    /// Iterations to count, after three that are not.
    #[arg(long, value_name = "I", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,

    /// How long a worker computes before it sends the model [default: not at all].
    #[arg(long, value_name = "TIME", value_parser = duration, allow_hyphen_values = true)]
    compute: Option<Duration>,

    /// How the time of computing varies from step to step: 'none', 'lognormal:SPREAD' (the
    /// logarithm's standard deviation; the median stays), or 'tail:PROBABILITY:FACTOR', where a
    /// step now and then takes many times as long.
    #[arg(long, value_name = "JITTER", default_value_t, requires = "compute")]
    jitter: Jitter,

    /// A worker that always computes for so many times as long, such as 3:2.5. May be repeated.
    #[arg(long, value_name = "NODE:FACTOR", value_parser = slow, requires = "compute")]
    slow: Vec<(NodeId, f64)>,

    /// How far apart the workers may be: 'bsp' (not at all), 'ssp:S' (nobody is more than S steps
    /// ahead of anybody) or 'asp' (nobody waits for anybody).
    #[arg(long, value_name = "SYNC", default_value_t)]
    sync: Consistency,

    /// Where chance begins, where steps vary or ports have queues.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Print one JSON object and nothing else.
    #[arg(long)]
    json: bool,
}

/// What `--json` prints. The names are a contract with those who read it.
#[derive(Serialize)]
struct Simulated {
    workers: u16,
    ranks_per_host: u16,
    bytes: usize,
    encoding: Encoding,
    iters: u32,
    /// In bits per second.
    rate: f64,
    queue: Option<u64>,
    bursts: bool,
    /// In seconds.
    compute: f64,
    jitter: String,
    sync: Consistency,
    seconds: Seconds,
    /// Of all workers together.
    steps_per_second: f64,
    bytes_sent_per_node: u64,
    /// What leaves by the busiest host's port.
    bytes_sent_per_host: u64,
    drops: Drops,
}

#[derive(Serialize)]
struct Seconds {
    median: f64,
}

/// Simulates, and prints what came of it.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let layer = ModelLayer {
        name: "model".into(),
        kind: LayerKind::Other,
        parameters: args.bytes / args.encoding.width(),
        rows: 1,
        forward_flops: 0.0,
        backward_flops: 0.0,
    };
    let model = Model { name: "exchange".into(), layers: vec![layer] };
    let places = Places { ranks_per_host: args.ranks_per_host, hosts_per_rack: None };
    let cluster = Cluster::new(args.nodes, Servers::Colocated, 1)?;
    let placed = places.place(cluster.clone());
    // Where nodes send bursts by chance, everybody sends to everybody.
    let cluster = match args.bursts {
        true => cluster.with_hosts(placed.hosts().to_vec(), Vec::new())?,
        false => placed,
    };
    let mut network = Network::virtual_cluster(args.rate.bytes());
    network.latency += args.delay;
    network.queue = args.queue;
    // Where nothing drops, it does not matter whether nodes keep step.
    let (backward, jitter) = match (args.compute, args.queue) {
        (Some(compute), _) => (compute.as_secs_f64(), args.jitter),
        (None, Some(_)) => (START, Jitter::LogNormal(START_SPREAD)),
        (None, None) => (0.0, Jitter::None),
    };
    let stragglers = Stragglers { jitter, slow: args.slow.clone() };
    let mut setup = Setup {
        scheme: SchemeRule::Ps,
        overlap: Overlap::Backward,
        consistency: args.sync,
        chunk: ChunkSize::default(),
        windows: !args.bursts,
        stragglers,
        iterations: (WARM_UP + args.iters) as usize,
        seed: args.seed,
        ..Setup::new(&model, vec![LayerTime { forward: 0.0, backward }], cluster, 1, network)
    };
    let encoded = |layer: Layer| layer.encoded(Encodings::both(args.encoding));
    setup.layers = setup.layers.into_iter().map(encoded).collect();
    let outcome = simulate(&setup)?;
    ensure!(outcome.halt.is_none(), "the simulated exchange stopped: {}", outcome.reason);
    let simulated = Simulated {
        workers: args.nodes,
        ranks_per_host: args.ranks_per_host,
        bytes: args.bytes,
        encoding: args.encoding,
        iters: args.iters,
        rate: args.rate.bits(),
        queue: args.queue,
        bursts: args.bursts,
        compute: args.compute.unwrap_or_default().as_secs_f64(),
        jitter: args.jitter.to_string(),
        sync: args.sync,
        steps_per_second: outcome.steps_per_second,
        seconds: Seconds { median: outcome.iteration_seconds },
        bytes_sent_per_node: outcome.bytes_sent.iter().copied().max().unwrap_or(0),
        bytes_sent_per_host: outcome.ports.iter().map(|port| port.sent).max().unwrap_or(0),
        drops: outcome.drops,
    };
    if args.json {
        say(&(serde_json::to_string(&simulated)? + "\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let Drops { segments, bytes, timeouts } = simulated.drops;
    let (sent, left) = (simulated.bytes_sent_per_node, simulated.bytes_sent_per_host);
    say(&format!(
        "workers         {}\n\
         model           {:.3} MB\n\
         time            {:.3} ms median, simulated\n\
         steps           {:.3} per second, all workers together\n\
         sent per node   {:.3} MB per iteration\n\
         sent per host   {:.3} MB per iteration\n\
         dropped         {segments} segments, {:.3} MB, in all iterations; {timeouts} timers ran out\n",
        args.nodes,
        args.bytes as f64 / MB,
        outcome.iteration_seconds * 1e3,
        outcome.steps_per_second,
        sent as f64 / MB,
        left as f64 / MB,
        bytes as f64 / MB,
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// A node that always takes longer, and how many times as long.
pub(crate) fn slow(text: &str) -> Result<(NodeId, f64), String> {
    let read = |(node, factor): (&str, &str)| {
        let factor = factor.parse().ok().filter(|f: &f64| f.is_finite() && *f > 0.0)?;
        Some((NodeId(node.parse().ok()?), factor))
    };
    text.split_once(':').and_then(read).ok_or_else(|| {
        format!("expected a node and how many times as long it takes, such as 3:2.5, got '{text}'")
    })
}

/// As many as 'bench exchange' does.
const WARM_UP: u32 = 3;
/// Seconds after which a process begins an exchange, and how much that differs between processes. If
/// all began at once and went on at one pace, no two of them would ever meet at a port.
const START: f64 = 0.0005;
const START_SPREAD: f64 = 0.5;
const MB: f64 = (1 << 20) as f64;

const EXAMPLES: &str = "\
Examples:
  32 nodes at an ordinary switch, 10 MB:
    poseidon bench simulate --nodes 32 --rate 1gbit --queue 256kb --bytes 10MB

  Four hosts of four nodes each:
    poseidon bench simulate --nodes 16 --ranks-per-host 4 --rate 1gbit --bytes 10MB

  One worker of eight that takes twice as long, and the others up to four steps ahead of it:
    poseidon bench simulate --nodes 8 --bytes 10MB --compute 100ms --slow 3:2 --sync ssp:4

  32 nodes measured, on a machine that has the processors for it:
    poseidon lab -n 32 -r 1gbit --queue 256kb -- poseidon bench exchange --in-cluster --bytes 10MB";
