//! PHub (Luo et al., 2018): what parameter servers carry if computing takes no time.
//!
//! Its Figure 4 is about that. The text we have gives no number of it, only what limits it: a server
//! with ten interfaces.

use super::figure::{Direction, Figure, Kind, Panel, Point, Series};
use poseidon_core::{Cluster, LayerKind, Servers};
use poseidon_sim::{LayerTime, Model, ModelLayer, Network, Outcome, SchemeRule, Setup};

/// Throughput by workers.
pub(super) fn throughput() -> anyhow::Result<Figure> {
    let resnet = Model::named("resnet50")?;
    let mut series = Vec::new();
    for (name, servers) in [
        ("servers on the workers", Servers::Colocated),
        ("one server, one link", Servers::Dedicated(1)),
        ("one server, ten links", Servers::Dedicated(10)),
    ] {
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
