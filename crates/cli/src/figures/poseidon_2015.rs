//! Poseidon 2015 (Zhang et al., arXiv:1512.06216): Figures 5 and 7, and Table 5. Of Figure 8,
//! about staleness, docs/reproduction.md has a table that 'poseidon bench simulate' makes.

use super::figure::{Direction, Figure, Ideal, Kind, Panel, Point, Series};
use super::poseidon_2017::{HYBRID, SEQUENTIAL, System, WAIT_FREE, one_layer, shown, speedup};
use poseidon_core::cost::{Setting, total};
use poseidon_core::{Cluster, LayerKind, Servers};
use poseidon_sim::profile::{Profile, Rates, Throughput};
use poseidon_sim::{Model, Network, Outcome, SchemeRule};

/// Figure 5.
pub(super) fn parameters() -> anyhow::Result<Figure> {
    let by_nodes = [2, 4, 8, 16, 32].map(|workers| (f64::from(workers), workers, 256));
    let by_batch = [32, 64, 128, 256, 512, 1024].map(|batch| (batch as f64, 4, batch));
    Ok(Figure {
        id: "2015-fig5",
        title: "Poseidon 2015, Figure 5: parameters communicated between fc6 and fc7 of AlexNet",
        about: "All nodes together, in one step. The paper's are its formulas (§4.3), ours what simulated \
                nodes sent to each other and to one server. By factors the paper counts (P - 1)² messages \
                where P workers with P - 1 peers send P(P - 1).",
        same_scale: false,
        panels: vec![
            communicated("batches of 256", Direction::log("nodes"), &by_nodes)?,
            communicated("4 nodes", Direction::log("batch"), &by_batch)?,
        ],
    })
}

/// Figure 7.
pub(super) fn ablation() -> anyhow::Result<Figure> {
    // §5.2.1, and §5.2.2 for four nodes.
    let stated: [(System, u16, f64); 4] =
        [(SEQUENTIAL, 8, 2.2), (WAIT_FREE, 8, 4.0), (HYBRID, 8, 6.0), (HYBRID, 4, 3.0)];
    let profile = kepler(&Model::named("alexnet")?);
    let mut panels = Vec::new();
    for (name, batch) in [("alexnet", 256), ("googlenet", 32)] {
        let model = Model::named(name)?;
        let mut series = Vec::new();
        for system in [SEQUENTIAL, WAIT_FREE, HYBRID] {
            let mut points = Vec::new();
            for nodes in [1, 2, 4, 8] {
                let said =
                    stated.iter().find(|s| name == "alexnet" && (s.0, s.1) == (system, nodes));
                let setup = system.on(&model, &profile, nodes, batch, network())?;
                points.push(Point::of(nodes.into(), setup, speedup).paper(said.map(|s| s.2)));
            }
            series.push(Series { name: system.name, points });
        }
        panels.push(Panel {
            title: shown(name),
            kind: Kind::LinesToIdeal(Ideal::Linear),
            x: Direction::linear("nodes"),
            y: Direction::linear("speed-up"),
            series,
        });
    }
    Ok(Figure {
        id: "2015-fig7",
        title: "Poseidon 2015, Figure 7: what wait-free backpropagation and factors are worth",
        about: "Speed-up over one node without either, with the first, and with both. What a node of 2015 \
                got out of its 40GbE is fitted on one of the paper's points, AlexNet on 8 nodes with \
                wait-free backpropagation alone.",
        same_scale: true,
        panels,
    })
}

/// Table 5.
pub(super) fn convergence() -> anyhow::Result<Figure> {
    let profile = kepler(&Model::named("alexnet")?);
    let mut panels = Vec::new();
    for (name, batch, stated) in
        [("cifar10-quick", 50, 4.0), ("alexnet", 256, 4.5), ("googlenet", 32, 4.0)]
    {
        let setup = HYBRID.on(&Model::named(name)?, &profile, 8, batch, network())?;
        let point = Point::of(8.0, setup, speedup).paper(Some(stated));
        panels.push(Panel {
            title: shown(name),
            kind: Kind::Bars,
            x: Direction::linear("nodes"),
            y: Direction::linear("speed-up"),
            series: vec![Series { name: HYBRID.name, points: vec![point] }],
        });
    }
    Ok(Figure {
        id: "2015-table5",
        title: "Poseidon 2015, Table 5: speed-up on 8 nodes",
        about: "Bars are simulated speed-ups of throughput. The paper's are of the time to its accuracy, with \
                other solvers on 8 nodes than on one, so they say less than a speed-up of throughput. Its \
                accuracies take training on ImageNet and are left out.",
        same_scale: true,
        panels,
    })
}

fn communicated(title: &str, x: Direction, places: &[(f64, u16, usize)]) -> anyhow::Result<Panel> {
    type Strategy = (&'static str, SchemeRule, fn(&Setting) -> f64);
    let (m, n) = (4096, 4096);
    let strategies: [Strategy; 3] = [
        ("full matrices", SchemeRule::Ps, total::matrices),
        ("factors, from worker to worker", SchemeRule::Sfb, total::broadcast),
        ("factors to the server, matrices back", SchemeRule::Adam, total::adam),
    ];
    let mut series = Vec::new();
    for (name, scheme, formula) in strategies {
        let mut points = Vec::new();
        for &(x, workers, batch) in places {
            let cluster = Cluster::new(workers, Servers::Dedicated(1), 1)?;
            let setup = one_layer("alexnet", LayerKind::Fc { m, n }, cluster, batch, scheme)?;
            let setting = Setting { m, n, batch, workers: workers.into(), servers: 1 };
            let read = |outcome: &Outcome| outcome.bytes_sent.iter().sum::<u64>() as f64 / 4e6;
            points.push(Point::of(x, setup, read).paper(Some(formula(&setting) / 1e6)));
        }
        series.push(Series { name, points });
    }
    let y = Direction::log("M parameters per step");
    Ok(Panel { title: title.into(), kind: Kind::Lines, x, y, series })
}

/// The nearest to its Tesla K20C that the paper has a number for: 0.96 s for AlexNet on a K40
/// (Table 2). GoogLeNet is taken to run at the same rate.
fn kepler(alexnet: &Model) -> Profile {
    of_one_net("k40", "NVIDIA Tesla K40, Caffe", alexnet, (256, 256.0 / 0.96))
}

/// A device of which a paper gives the speed of one net: images per second, in batches. All layers of
/// all nets are taken to run at that rate.
pub(super) fn of_one_net(
    name: &str,
    device: &str,
    model: &Model,
    (batch, images_per_second): (usize, f64),
) -> Profile {
    let rate = model.flops() * images_per_second;
    Profile {
        name: name.into(),
        device: device.into(),
        scaled_from: None,
        published: None,
        copies: None,
        measured: Vec::new(),
        throughput: vec![Throughput { model: model.name.clone(), batch, images_per_second }],
        rates: Some(Rates { conv: rate, fc: rate, other: rate, fc_rows: 1 }),
    }
}

/// The 40GbE of 2015, of which a node got less than the one of 2017: slower processors added up the
/// gradients. Fitted on AlexNet with wait-free backpropagation on 8 nodes, 4x.
fn network() -> Network {
    Network {
        name: "paper-2015".into(),
        ceiling: Some(4.3e9 / 8.0),
        ..Network::paper_2017(40e9 / 8.0)
    }
}
