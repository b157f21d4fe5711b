//! Poseidon 2017 (Zhang et al., USENIX ATC'17): Figures 4 to 9, and Table 1.
//!
//! Everything is simulated on the network and the device of the paper, as `docs/reproduction.md`
//! explains. The paper's numbers are those its text states; none is read off a curve.

use super::figure::{Direction, Figure, Ideal, Kind, Panel, Point, Series};
use poseidon_core::cost::Setting;
use poseidon_core::plan::Placement;
use poseidon_core::{Cluster, LayerKind, NodeId, Servers};
use poseidon_sim::{LayerTime, Model, Network, Outcome, Overlap, Profile, SchemeRule, Setup};

/// Figure 4.
pub(super) fn caffe() -> anyhow::Result<Figure> {
    // §5.1, single nodes: Caffe+PS has 213.3, 21.3 and 18.5 images/s of Caffe's 257, 35.5 and 34.6,
    // Poseidon 257, 35.5 and 34.2. §5.1 for 32 nodes.
    let stated = [
        ("googlenet", SEQUENTIAL, 1, 213.3 / 257.0),
        ("googlenet", HYBRID, 1, 1.0),
        ("vgg19", SEQUENTIAL, 1, 21.3 / 35.5),
        ("vgg19", HYBRID, 1, 1.0),
        ("vgg19-22k", SEQUENTIAL, 1, 18.5 / 34.6),
        ("vgg19-22k", HYBRID, 1, 34.2 / 34.6),
        ("vgg19-22k", WAIT_FREE, 32, 21.5),
        ("vgg19-22k", HYBRID, 32, 29.5),
    ];
    Ok(Figure {
        id: "fig4",
        title: "Poseidon 2017, Figure 4: speed-up with Caffe at 40GbE",
        about: "Throughput over that of one node. Sending layers while backward still runs is what \
                most of the speed-up comes from; factors add the rest where fully connected layers are \
                large.",
        same_scale: true,
        panels: scaling(
            &["googlenet", "vgg19", "vgg19-22k"],
            "titan-x",
            &[SEQUENTIAL, WAIT_FREE, HYBRID],
            &stated,
        )?,
    })
}

/// Figure 5.
pub(super) fn tensorflow() -> anyhow::Result<Figure> {
    // §5.1 for single nodes and for 22x to 30x, where the net is not named: only VGG19-22K is that
    // far from linear. 31.5x and TensorFlow's 20x are §1's and the abstract's; §5.1 has 10x for it.
    let stated = [
        ("inception-v3", TENSORS, 32, 20.0),
        ("inception-v3", HYBRID, 1, 1.0),
        ("inception-v3", HYBRID, 32, 31.5),
        ("vgg19", HYBRID, 1, 38.2 / 38.5),
        ("vgg19-22k", WAIT_FREE, 32, 22.0),
        ("vgg19-22k", HYBRID, 1, 34.5 / 34.8),
        ("vgg19-22k", HYBRID, 32, 30.0),
    ];
    Ok(Figure {
        id: "fig5",
        title: "Poseidon 2017, Figure 5: speed-up with TensorFlow at 40GbE",
        about: "The same with TensorFlow's speed. In place of TensorFlow's own way: every tensor whole \
                on one server, nothing overlapped.",
        same_scale: true,
        panels: scaling(
            &["inception-v3", "vgg19", "vgg19-22k"],
            "titan-x-tensorflow",
            &[TENSORS, WAIT_FREE, HYBRID],
            &stated,
        )?,
    })
}

/// Figure 6.
pub(super) fn stalls() -> anyhow::Result<Figure> {
    let mut panels = Vec::new();
    for model in ["inception-v3", "vgg19", "vgg19-22k"] {
        let mut series = Vec::new();
        for system in [TENSORS, WAIT_FREE, HYBRID] {
            let setup = system.setup(model, "titan-x-tensorflow", 8, 40.0)?;
            let point = Point::of(8.0, setup, |outcome| outcome.stall_fraction * 100.0);
            series.push(Series { name: system.name, points: vec![point] });
        }
        panels.push(Panel {
            title: shown(model),
            kind: Kind::Bars,
            x: Direction::linear("nodes"),
            y: Direction::linear("% of the time stalled"),
            series,
        });
    }
    Ok(Figure {
        id: "fig6",
        title: "Poseidon 2017, Figure 6: how long GPUs stall on 8 nodes at 40GbE",
        about: "The share of a step in which the GPU does not compute the net: it waits for parameters \
                or rebuilds gradients from factors. The paper draws this without giving numbers.",
        same_scale: true,
        panels,
    })
}

/// Figure 7, its left half. The right one is the error by epochs, which takes training on ImageNet.
pub(super) fn residual() -> anyhow::Result<Figure> {
    // §5.1: "31x speedup in terms of throughput".
    let stated = [("resnet152", HYBRID, 32, 31.0)];
    Ok(Figure {
        id: "fig7",
        title: "Poseidon 2017, Figure 7a: speed-up of ResNet-152 at 40GbE",
        about: "A net of convolutions that computes for long: whatever overlaps is hidden. The paper gives \
                no speed of a single node, so the device computes at its rate for convolutions of other \
                nets.",
        same_scale: true,
        panels: scaling(
            &["resnet152"],
            "titan-x-tensorflow",
            &[TENSORS, WAIT_FREE, HYBRID],
            &stated,
        )?,
    })
}

/// Figure 8, by bandwidth.
pub(super) fn bandwidth() -> anyhow::Result<Figure> {
    // The abstract, §5.2 and §1.
    let stated =
        [("vgg19-22k", HYBRID, 15.5), ("vgg19", WAIT_FREE, 8.0), ("vgg19-22k", WAIT_FREE, 4.0)];
    let mut panels = Vec::new();
    for model in ["googlenet", "vgg19", "vgg19-22k"] {
        let mut series = Vec::new();
        for system in [SEQUENTIAL, WAIT_FREE, HYBRID] {
            let mut points = Vec::new();
            for gbit in [1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0] {
                let paper = stated.iter().find(|s| gbit == 10.0 && (s.0, s.1) == (model, system));
                let setup = system.setup(model, "titan-x", 16, gbit)?;
                points.push(Point::of(gbit, setup, speedup).paper(paper.map(|s| s.2)));
            }
            series.push(Series { name: system.name, points });
        }
        panels.push(Panel {
            title: shown(model),
            kind: Kind::LinesToIdeal(Ideal::Level(16.0)),
            x: Direction::log("GbE"),
            y: Direction::linear("speed-up"),
            series,
        });
    }
    Ok(Figure {
        id: "fig8",
        title: "Poseidon 2017, Figure 8: speed-up on 16 nodes by bandwidth",
        about: "What the paper plots for a few bandwidths against nodes, for 16 nodes against the \
                bandwidth. With factors VGG19 is near linear at 10GbE; the parameter server needs thrice \
                as much.",
        same_scale: true,
        panels,
    })
}

/// Figure 9.
pub(super) fn traffic() -> anyhow::Result<Figure> {
    let mut panels = Vec::new();
    for system in [ADAM, WAIT_FREE, HYBRID] {
        let mut points = Vec::new();
        for node in 0..8 {
            let setup = system.setup("vgg19", "titan-x-tensorflow", 8, 40.0)?;
            let gbits =
                move |outcome: &Outcome| both_ways(outcome, NodeId(node)) as f64 * 8.0 / 1e9;
            points.push(Point::of(f64::from(node), setup, gbits));
        }
        panels.push(Panel {
            title: system.name.into(),
            kind: Kind::Bars,
            x: Direction::linear("node"),
            y: Direction::linear("Gbit per step, both ways"),
            series: vec![Series { name: "VGG19", points }],
        });
    }
    Ok(Figure {
        id: "fig9",
        title: "Poseidon 2017, Figure 9: traffic of each of 8 nodes, VGG19",
        about: "Adam's way sends factors to the one server of a layer, which answers everybody with the \
                whole matrix: that node has many times the others' traffic. The paper gives no numbers.",
        same_scale: true,
        panels,
    })
}

/// Table 1.
pub(super) fn costs() -> anyhow::Result<Figure> {
    const SERVERS: u16 = 4;
    let (m, n, batch) = (4096, 25088, 32);
    let setting = |workers: u16, servers: u16| Setting {
        m,
        n,
        batch,
        workers: workers.into(),
        servers: servers.into(),
    };
    /// A cell of the table: what it is called, how it is simulated, at which node, and the formula.
    type Cell = (&'static str, SchemeRule, Who, fn(&Setting) -> f64);
    let both: [Cell; 3] = [
        ("parameter server", SchemeRule::Ps, Who::Busiest, Setting::ps_both),
        ("factors", SchemeRule::Sfb, Who::Busiest, Setting::sfb_worker),
        ("Adam, the layer's server", SchemeRule::Adam, Who::Busiest, Setting::adam_both),
    ];
    let apart: [Cell; 4] = [
        ("parameter server, a server", SchemeRule::Ps, Who::Busiest, Setting::ps_server),
        ("parameter server, a worker", SchemeRule::Ps, Who::Worker, Setting::ps_worker),
        ("Adam, the layer's server", SchemeRule::Adam, Who::Busiest, Setting::adam_server),
        ("Adam, a worker", SchemeRule::Adam, Who::Worker, Setting::adam_worker),
    ];
    let panel = |title: String, cells: &[Cell], dedicated: Option<u16>| -> anyhow::Result<Panel> {
        let mut series = Vec::new();
        for &(name, scheme, who, formula) in cells {
            let mut points = Vec::new();
            for workers in [4, 8, 16, 32] {
                let servers = dedicated.map_or(Servers::Colocated, Servers::Dedicated);
                let cluster = Cluster::new(workers, servers, 1)?;
                let setup = one_layer("vgg19", LayerKind::Fc { m, n }, cluster, batch, scheme)?;
                let read = move |outcome: &Outcome| who.traffic(outcome) as f64 / 4e6;
                let paper = formula(&setting(workers, dedicated.unwrap_or(workers))) / 1e6;
                points.push(Point::of(workers.into(), setup, read).paper(Some(paper)));
            }
            series.push(Series { name, points });
        }
        let (x, y) = (Direction::log("workers"), Direction::log("M parameters per node and step"));
        Ok(Panel { title, kind: Kind::Lines, x, y, series })
    };
    Ok(Figure {
        id: "table1",
        title: "Poseidon 2017, Table 1: what a fully connected layer costs a node",
        about: "VGG19's first fully connected layer (4096 x 25088) with batches of 32. The paper's are \
                its formulas, ours are the bytes that simulated nodes sent and received, headers and \
                biases included.",
        same_scale: true,
        panels: vec![
            panel("every node both worker and server".into(), &both, None)?,
            panel(format!("{SERVERS} servers apart"), &apart, Some(SERVERS))?,
        ],
    })
}

/// A model with only the layers of one kind and shape, and no computing: for counting bytes.
pub(super) fn one_layer(
    model: &str,
    kind: LayerKind,
    cluster: Cluster,
    batch: usize,
    scheme: SchemeRule,
) -> anyhow::Result<Setup> {
    let mut model = Model::named(model)?;
    model.layers.retain(|layer| layer.kind == kind);
    let times = vec![LayerTime::default(); model.layers.len()];
    let network = Network::ethernet(40e9 / 8.0);
    let base = Setup::new(&model, times, cluster, batch, network);
    Ok(Setup { scheme, iterations: 2, ..base })
}

/// A way of parallelising that the paper compares.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct System {
    pub(super) name: &'static str,
    scheme: SchemeRule,
    overlap: Overlap,
    placement: Placement,
}

impl System {
    fn setup(self, model: &str, engine: &str, nodes: u16, gbit: f64) -> anyhow::Result<Setup> {
        let model = Model::named(model)?;
        let batch = if model.name == "googlenet" { 128 } else { 32 }; // Table 3
        let network = Network::paper_2017(gbit * 1e9 / 8.0);
        self.on(&model, &Profile::named(engine)?, nodes, batch, network)
    }

    /// `model` this way, on nodes that are worker and server.
    pub(super) fn on(
        self,
        model: &Model,
        profile: &Profile,
        nodes: u16,
        batch: usize,
        network: Network,
    ) -> anyhow::Result<Setup> {
        let (times, _) = profile.times(model, batch)?;
        let cluster = Cluster::new(nodes, Servers::Colocated, 1)?;
        let Self { scheme, overlap, placement, .. } = self;
        let rebuild_rate = profile.rates.map(|rates| rates.fc);
        let base = Setup::new(model, times, cluster, batch, network);
        Ok(Setup { scheme, overlap, placement, rebuild_rate, ..base })
    }
}

/// Whose traffic.
#[derive(Clone, Copy)]
enum Who {
    Worker,
    Busiest,
}

impl Who {
    fn traffic(self, outcome: &Outcome) -> u64 {
        let nodes = (0..outcome.bytes_sent.len()).map(|node| NodeId(node as u16));
        match self {
            Self::Worker => both_ways(outcome, NodeId(0)),
            Self::Busiest => nodes.map(|node| both_ways(outcome, node)).max().unwrap_or(0),
        }
    }
}

/// What the paper states: model, system, nodes, speed-up.
type Stated = (&'static str, System, u16, f64);

fn scaling(
    models: &[&str],
    engine: &str,
    systems: &[System],
    stated: &[Stated],
) -> anyhow::Result<Vec<Panel>> {
    let mut panels = Vec::new();
    for &model in models {
        let mut series = Vec::new();
        for &system in systems {
            let mut points = Vec::new();
            for nodes in [1, 2, 4, 8, 16, 32] {
                let paper = stated.iter().find(|s| (s.0, s.1, s.2) == (model, system, nodes));
                let setup = system.setup(model, engine, nodes, 40.0)?;
                points.push(Point::of(nodes.into(), setup, speedup).paper(paper.map(|s| s.3)));
            }
            series.push(Series { name: system.name, points });
        }
        panels.push(Panel {
            title: shown(model),
            kind: Kind::LinesToIdeal(Ideal::Linear),
            x: Direction::linear("nodes"),
            y: Direction::linear("speed-up"),
            series,
        });
    }
    Ok(panels)
}

pub(super) fn speedup(outcome: &Outcome) -> f64 {
    outcome.speedup
}

fn both_ways(outcome: &Outcome, node: NodeId) -> u64 {
    let [sent, received] = [&outcome.bytes_sent, &outcome.bytes_received];
    sent[node.index()] + received[node.index()]
}

/// A model's name as the papers write it.
pub(super) fn shown(model: &str) -> String {
    match model {
        "alexnet" => "AlexNet".into(),
        "googlenet" => "GoogLeNet".into(),
        "cifar10-quick" => "CIFAR-10 quick".into(),
        "inception-v3" => "Inception-V3".into(),
        "resnet50" => "ResNet-50".into(),
        "resnet152" => "ResNet-152".into(),
        "resnext50" => "ResNeXt-50".into(),
        other => other.to_uppercase(),
    }
}

/// "Caffe+PS".
pub(super) const SEQUENTIAL: System = System {
    name: "parameter server, no overlap",
    scheme: SchemeRule::Ps,
    overlap: Overlap::None,
    placement: Placement::Balanced,
};
/// "Caffe+WFBP", "TF+WFBP": Algorithm 2 waits for all layers before the next step.
pub(super) const WAIT_FREE: System =
    System { name: "parameter server, wait-free", overlap: Overlap::Backward, ..SEQUENTIAL };
/// "Poseidon".
pub(super) const HYBRID: System =
    System { name: "hybrid, wait-free", scheme: SchemeRule::Auto, ..WAIT_FREE };
/// "TF": §5.1 says that a tensor is on one server and that nothing of the next fetch is overlapped.
const TENSORS: System =
    System { name: "whole tensors, no overlap", placement: Placement::PerTensor, ..SEQUENTIAL };
/// "Adam": factors to the server, matrices back.
const ADAM: System =
    System { name: "Adam's way, wait-free", scheme: SchemeRule::Adam, ..WAIT_FREE };
