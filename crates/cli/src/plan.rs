//! `poseidon plan`: what a training job would do, before there is a cluster.

mod advice;
mod copies;
mod described;
mod device;
mod fold;
mod forecast;
mod links;
mod page;
mod question;
mod racks;
mod search;
mod text;

pub(crate) use forecast::simulate_all;
pub(crate) use question::{Question, duration, file, positive, queue};

use crate::bandwidth::Bandwidth;
use crate::report::write_whole;
use crate::terminal::say;
use copies::CopyUse;
use forecast::{Effort, Forecast, LayerForecast};
use links::LinkUse;
use poseidon_sim::{Bottleneck, Places, Profile, profile};
use question::Flags;
use racks::RackChoice;
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;

/// Predict how fast a model trains on a cluster, and what would make it faster.
///
/// Simulates the job, with the same code that would run it: which layer goes how and why, how long
/// an iteration takes, how much of it workers wait, what limits them, how much bandwidth would be
/// enough, and what would help most. Nothing is sent or computed.
///
/// Where hosts have several workers (--ranks-per-host) or stand in racks (--racks), it also says
/// what passes a host's port, its memory and a rack's link, and whether adding up inside racks
/// pays. Where the profile says how fast the device copies to and from its host's memory, or
/// --copy-speed does, it says what is copied and how much of an iteration waits for that.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = examples())]
pub(crate) struct Args {
    #[command(flatten)]
    flags: Flags,

    /// Look for a better plan than the per-layer formula, by simulating whole iterations.
    #[arg(long)]
    search: bool,

    /// Simulate the job's neighbours too where that takes minutes.
    #[arg(long)]
    thorough: bool,

    /// Write an HTML page to FILE.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

    /// Print JSON on standard output.
    #[arg(long)]
    json: bool,

    /// Print the model as JSON and stop: a beginning for one of your own.
    #[arg(long)]
    print_model: bool,
}

/// Predicts, and shows what was predicted.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.print_model {
        say(&args.flags.model_text()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let question = Question::new(&args.flags)?;
    for note in &question.notes {
        tracing::info!("{note}");
    }
    let effort = Effort { search: args.search, thorough: args.thorough };
    let forecast = Forecast::new(&question, effort)?;
    if let Some(path) = &args.report {
        write_whole(path, page::page(&question, &forecast).as_bytes())?;
    }
    let shown = match args.json {
        true => serde_json::to_string_pretty(&Answer::new(&question, &forecast))? + "\n",
        false => text::text(&question, &forecast, args.report.as_deref()),
    };
    say(&shown)?;
    Ok(ExitCode::SUCCESS)
}

/// What `--json` prints. The names are a contract with those who read it. Times are in seconds,
/// shares between 0 and 1, bandwidths in bits per second.
#[derive(Serialize)]
struct Answer<'a> {
    model: &'a str,
    parameters: usize,
    workers: usize,
    servers: String,
    batch: usize,
    bandwidth: f64,
    network: &'a str,
    profile: &'a str,
    profile_basis: String,
    scheme: String,
    overlap: String,
    iteration_seconds: f64,
    compute_seconds: f64,
    images_per_second: f64,
    speedup: f64,
    efficiency: f64,
    stall_fraction: f64,
    bottleneck: &'static str,
    bottleneck_reason: &'a str,
    /// `null` if no bandwidth suffices, or if it was not asked for.
    min_bandwidth_95: Option<f64>,
    bytes_sent_busiest_node: u64,
    hosts: usize,
    ranks_per_host: u16,
    /// The busiest port of a host.
    port: LinkUse,
    /// What the busiest node exchanges with others of its host. `null` if every node has a host of
    /// its own.
    memory: Option<LinkUse>,
    /// The busiest link between a rack and the others. `null` if there are no racks.
    rack_link: Option<LinkUse>,
    /// Whether sums are made inside racks. `null` if there are no racks.
    racks: Option<&'a RackChoice>,
    /// What is copied between a worker's device and its host. `null` if nothing is.
    copies: Option<CopyUse>,
    /// The same job on another device, where no --profile was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    beside: Option<&'a forecast::Beside>,
    /// Why no bandwidth suffices, where none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    never_enough: Option<&'a str>,
    layers: &'a [LayerForecast],
    advice: &'a [advice::Advice],
    by_workers: &'a [forecast::Point],
    by_bandwidth: &'a [forecast::Point],
    #[serde(skip_serializing_if = "Option::is_none")]
    search: Option<Searched<'a>>,
    notes: &'a [String],
}

#[derive(Serialize)]
struct Searched<'a> {
    formula_seconds: f64,
    iteration_seconds: f64,
    changes: &'a [String],
    simulations: usize,
}

impl<'a> Answer<'a> {
    fn new(question: &'a Question, forecast: &'a Forecast) -> Self {
        let Forecast { setup, outcome, layers, racks, copies, beyond, found, .. } = forecast;
        let places = Places::of(&setup.cluster);
        let search = found.as_ref().map(|found| Searched {
            formula_seconds: found.formula_seconds,
            iteration_seconds: outcome.iteration_seconds,
            changes: &found.changes,
            simulations: found.simulations,
        });
        Self {
            model: &question.model.name,
            parameters: question.model.parameters(),
            workers: setup.cluster.workers(),
            servers: setup.cluster.servers().to_string(),
            batch: setup.batch,
            bandwidth: setup.network.bandwidth * 8.0,
            network: &setup.network.name,
            profile: &question.profile.name,
            profile_basis: question.basis.to_string(),
            scheme: setup.scheme.to_string(),
            overlap: setup.overlap.to_string(),
            iteration_seconds: outcome.iteration_seconds,
            compute_seconds: outcome.compute_seconds,
            images_per_second: forecast.images_per_second(),
            speedup: outcome.speedup,
            efficiency: forecast.efficiency(),
            stall_fraction: outcome.stall_fraction,
            bottleneck: bottleneck(outcome.bottleneck),
            bottleneck_reason: &outcome.reason,
            min_bandwidth_95: beyond.as_ref().and_then(|b| b.enough).map(Bandwidth::bits),
            bytes_sent_busiest_node: outcome.bytes_sent.iter().copied().max().unwrap_or(0),
            hosts: places.hosts(&setup.cluster),
            ranks_per_host: places.ranks_per_host,
            port: LinkUse::of_port(setup, outcome),
            memory: LinkUse::of_memory(setup, outcome),
            rack_link: LinkUse::of_rack(setup, outcome),
            racks: racks.as_ref(),
            copies: *copies,
            beside: forecast.beside.as_ref(),
            never_enough: beyond.as_ref().and_then(|b| b.never_enough.as_deref()),
            layers,
            advice: beyond.as_ref().map_or(&[], |b| &b.advice),
            by_workers: beyond.as_ref().map_or(&[], |b| &b.by_workers),
            by_bandwidth: beyond.as_ref().map_or(&[], |b| &b.by_bandwidth),
            search,
            notes: &question.notes,
        }
    }
}

fn bottleneck(bottleneck: Bottleneck) -> &'static str {
    match bottleneck {
        Bottleneck::Compute => "compute",
        Bottleneck::Egress(_) => "egress",
        Bottleneck::Ingress(_) => "ingress",
        Bottleneck::Rack(_) => "rack",
        Bottleneck::Memory(_) => "memory",
        Bottleneck::Copies(_) => "copies",
        Bottleneck::Latency => "latency",
        Bottleneck::Rebuild => "rebuild",
    }
}

fn examples() -> String {
    let models: Vec<_> = poseidon_sim::zoo::names().collect();
    let is_published =
        |name: &&str| Profile::named(name).is_ok_and(|profile| profile.scaled_from.is_some());
    let (published, measured): (Vec<_>, Vec<_>) = profile::names().partition(is_published);
    format!(
        "Models: {}\nProfiles: {}\nProfiles from published figures, not measured: {}\n\n{EXAMPLES}",
        models.join(", "),
        measured.join(", "),
        published.join(", ")
    )
}

const EXAMPLES: &str = "\
Examples:
  VGG19 on sixteen machines with 10GbE, each worker and server, with a page to pass on:
    poseidon plan --model vgg19 --workers 16 --bandwidth 10gbit --report plan.html

  64 GPUs, four to a machine, in four racks whose links are four times narrower than their ports:
    poseidon plan --workers 64 --ranks-per-host 4 --racks 4 --oversubscription 4

  Eight A100s, and the same with copies of 12 GB/s (from published figures: nothing was measured):
    poseidon plan --model resnet50 --workers 8 --bandwidth 25gbit --profile a100
    poseidon plan --model resnet50 --workers 8 --bandwidth 25gbit --profile a100 --copy-speed 12GB/s

  What the parameter server alone would need, on the network of the paper:
    poseidon plan --model vgg19 --workers 16 --scheme ps --network paper-2017

  A PyTorch model of your own, on this machine's speed:
    poseidon profile resnet50 --batch 16 --out mine.toml
    poseidon plan --torch mynets:make --input 3x224x224 --profile mine.toml --workers 4 --bandwidth 1gbit

  A model as a file:
    poseidon plan --model resnet50 --print-model > net.json
    poseidon plan --model net.json --json";
