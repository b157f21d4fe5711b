//! PHub (Luo et al., 2018): a box with ten interfaces instead of servers on the workers, and what
//! servers carry if computing takes no time.
//!
//! Figure 3 is about the first, Figure 4 about the second. The text we have gives few numbers of them.

use super::figure::{Direction, Figure, Ideal, Kind, Panel, Point, Series};
use super::poseidon_2015::of_one_net;
use super::poseidon_2017::{shown, speedup};
use poseidon_core::{Cluster, LayerKind, Servers};
use poseidon_sim::profile::Profile;
use poseidon_sim::{LayerTime, Model, ModelLayer, Network, Outcome, SchemeRule, Setup};

/// Where the parameters are. A box is as ten servers with a link each.
const SHARDED: (&str, Servers) = ("servers on the workers", Servers::Colocated);
const BOX: (&str, Servers) = ("one server, ten links", Servers::Dedicated(10));

/// Figure 3: 8 workers at 10 Gbit/s.
pub(super) fn box_of_eight() -> anyhow::Result<Figure> {
    let profile = pascal()?;
    let mut panels = Vec::new();
    // Batches as the figure's caption has them.
    for (name, batch) in [
        ("alexnet", 32),
        ("vgg19", 32),
        ("googlenet", 32),
        ("inception-v3", 32),
        ("resnet50", 16),
        ("resnext50", 8),
    ] {
        let model = Model::named(name)?;
        let mut series = Vec::new();
        for (name, servers) in [SHARDED, BOX] {
            let setup = training(&model, &profile, batch, (8, servers), 10.0)?;
            series.push(Series { name, points: vec![Point::of(8.0, setup, speedup)] });
        }
        panels.push(Panel {
            title: shown(name),
            kind: Kind::Bars,
            x: Direction::linear("workers"),
            y: Direction::linear("speed-up"),
            series,
        });
    }
    Ok(Figure {
        id: "phub-fig3",
        title: "PHub, Figure 3: a box instead of sharded servers, 8 workers at 10 Gbit/s",
        about: "Speed-up over one worker. The paper shows how many times the box is as fast as MXNet's \
                sharded server, up to 3.8 times, and its text gives no other number. Here both have the \
                same software, so only links count: a worker's link carries 14 eighths of the model with \
                servers on the workers, and 8 eighths with a box. That is 1.75 times at most.",
        same_scale: true,
        panels,
    })
}

/// What the text estimates: "up to 120 workers training ResNet-50 with batch size of 32".
pub(super) fn workers_of_a_box() -> anyhow::Result<Figure> {
    let (profile, model) = (pascal()?, Model::named("resnet50")?);
    let mut series = Vec::new();
    for (name, servers) in [SHARDED, BOX] {
        let mut points = Vec::new();
        for workers in [8, 30, 60, 90, 120, 150] {
            let setup = training(&model, &profile, 32, (workers, servers), 56.0)?;
            points.push(Point::of(workers.into(), setup, speedup));
        }
        series.push(Series { name, points });
    }
    let panel = Panel {
        title: "ResNet-50, batches of 32, 56 Gbit/s".into(),
        kind: Kind::LinesToIdeal(Ideal::Linear),
        x: Direction::linear("workers"),
        y: Direction::linear("speed-up"),
        series,
    };
    Ok(Figure {
        id: "phub-120",
        title: "PHub: how many workers a box serves",
        about: "Speed-up over one worker with a GTX 1080 Ti. The paper estimates that one box serves up to \
                120 workers, by what its PCIe bus and memory carry. Here the box has ten links of 56 Gbit/s, \
                and nothing else limits it.",
        same_scale: true,
        panels: vec![panel],
    })
}

/// `model` by parameter servers, with everything overlapped that can be.
fn training(
    model: &Model,
    profile: &Profile,
    batch: usize,
    (workers, servers): (u16, Servers),
    gbit: f64,
) -> anyhow::Result<Setup> {
    let (times, _) = profile.times(model, batch)?;
    let network = Network::ethernet(gbit * 1e9 / 8.0);
    let cluster = Cluster::new(workers, servers, 1)?;
    let base = Setup::new(model, times, cluster, batch, network);
    Ok(Setup { scheme: SchemeRule::Ps, ..base })
}

/// The paper's GTX 1080 Ti with MXNet: 190 images of ResNet-50 in a second (Table 1). Other nets are
/// taken to run at the same rate.
fn pascal() -> anyhow::Result<Profile> {
    let resnet = Model::named("resnet50")?;
    Ok(of_one_net("gtx-1080-ti", "NVIDIA GTX 1080 Ti, MXNet", &resnet, (32, 190.0)))
}

/// Throughput by workers.
pub(super) fn throughput() -> anyhow::Result<Figure> {
    let resnet = Model::named("resnet50")?;
    let mut series = Vec::new();
    for (name, servers) in [SHARDED, ("one server, one link", Servers::Dedicated(1)), BOX] {
        let mut points = Vec::new();
        for workers in [2, 4, 8, 16, 32, 64] {
            let setup = exchange(&resnet, workers, servers, Network::ethernet(56e9 / 8.0))?;
            points.push(carried(&resnet, workers, setup));
        }
        series.push(Series { name, points });
    }
    let simulated = Panel {
        title: "ResNet-50 at 56 Gbit/s".into(),
        kind: Kind::Lines,
        x: Direction::log("workers"),
        y: Direction::log(GIGABYTES),
        series,
    };

    let buffer = buffer(32 << 20);
    let mut series = Vec::new();
    for (name, mbit, seconds) in
        [("200 Mbit/s", 200.0, [1.401, 2.121, 2.536]), ("500 Mbit/s", 500.0, [0.561, 0.849, 1.024])]
    {
        let mut points = Vec::new();
        for (workers, seconds) in [2, 4, 8].into_iter().zip(seconds) {
            let network = Network::virtual_cluster(mbit * 1e6 / 8.0);
            let setup = exchange(&buffer, workers, Servers::Colocated, network)?;
            let measured = gigabytes(&buffer, workers) / seconds;
            points.push(carried(&buffer, workers, setup).measured(Some(measured)));
        }
        series.push(Series { name, points });
    }
    let limited = Panel {
        title: "32 MB, virtual cluster".into(),
        kind: Kind::Lines,
        x: Direction::linear("workers"),
        y: Direction::linear(GIGABYTES),
        series,
    };

    let point = |(workers, seconds): (u16, f64)| {
        let gigabytes = f64::from(workers) * f64::from(100 << 20) / 1e9;
        Point::at(workers.into()).measured(Some(gigabytes / seconds))
    };
    let series = |name, seconds: [f64; 4]| Series {
        name,
        points: [2, 4, 8, 16].into_iter().zip(seconds).map(point).collect(),
    };
    let loopback = Panel {
        title: "100 MB, one machine, 16 cores".into(),
        kind: Kind::Lines,
        x: Direction::linear("workers"),
        y: Direction::linear(GIGABYTES),
        series: vec![
            series("TCP", [0.016_093, 0.025_568, 0.054_596, 0.108_450]),
            series("shared memory", [0.012_087, 0.021_050, 0.047_474, 0.086_043]),
        ],
    };
    Ok(Figure {
        id: "phub",
        title: "PHub: throughput with infinitely fast compute",
        about: "Gradients that servers take in, add up and answer per second. Left, simulated: a server \
                with ten links, as PHub's, carries ten workers' worth; servers on the workers grow with \
                them, at half a link each. Middle and right, real processes, measured with 'poseidon bench \
                exchange'.",
        same_scale: false,
        panels: vec![simulated, limited, loopback],
    })
}

/// Only communication.
fn exchange(
    model: &Model,
    workers: u16,
    servers: Servers,
    network: Network,
) -> anyhow::Result<Setup> {
    let times = vec![LayerTime::default(); model.layers.len()];
    let base = Setup::new(model, times, Cluster::new(workers, servers, 1)?, 1, network);
    Ok(Setup { scheme: SchemeRule::Ps, ..base })
}

fn carried(model: &Model, workers: u16, setup: Setup) -> Point {
    let gigabytes = gigabytes(model, workers);
    let read = move |outcome: &Outcome| gigabytes / outcome.iteration_seconds;
    Point::of(workers.into(), setup, read)
}

/// What all workers contribute in one exchange.
fn gigabytes(model: &Model, workers: u16) -> f64 {
    model.parameters() as f64 * 4.0 * f64::from(workers) / 1e9
}

/// What `poseidon bench exchange` exchanges.
fn buffer(bytes: usize) -> Model {
    let layer = ModelLayer {
        name: "buffer".into(),
        kind: LayerKind::Other,
        parameters: bytes / size_of::<f32>(),
        rows: 1,
        forward_flops: 0.0,
        backward_flops: 0.0,
    };
    Model { name: "buffer".into(), layers: vec![layer] }
}

const GIGABYTES: &str = "GB of gradients per second";
