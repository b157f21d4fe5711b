//! Poseidon 2017, Figure 10: accuracy by iteration. Nothing of it is simulated: real workers have trained.

use super::figure::{Direction, Figure, Kind, Panel, Point, Series};

/// Figure 10, the exact curve.
pub(super) fn by_iteration() -> anyhow::Result<Figure> {
    // §5.3: 70% at iteration 1000; 50% after 3000 with one bit for each number.
    let stated = [(POSEIDON, 1000.0, 70.0), (ONE_BIT, 3000.0, 50.0)];
    let mut series = Vec::new();
    for (name, measured) in
        [(POSEIDON, Some(FOUR_WORKERS)), (ALONE, Some(ONE_WORKER)), (ONE_BIT, None)]
    {
        let mut points: Vec<Point> = Vec::new();
        for (epoch, accuracy) in (1..).zip(measured.into_iter().flatten()) {
            points.push(Point::at(STEPS * f64::from(epoch)).measured(Some(accuracy)));
        }
        for &(_, x, accuracy) in stated.iter().filter(|stated| stated.0 == name) {
            match points.iter_mut().find(|point| point.x == x) {
                Some(point) => point.paper = Some(accuracy),
                None => points.push(Point::at(x).paper(Some(accuracy))),
            }
        }
        series.push(Series { name, points });
    }
    Ok(Figure {
        id: "fig10",
        title: "Poseidon 2017, Figure 10: accuracy of CIFAR-10 quick by iteration",
        about: "Measured with real workers that train on all of CIFAR-10, 100 images in a step of all \
                workers together (bench/runs/2026-11-15-train-convergence-16-cores). The paper's batches, \
                learning rate and schedule are not stated, so iterations do not compare. Quantization to \
                one bit does not exist here yet: its diamond is the paper's.",
        same_scale: true,
        panels: vec![Panel {
            title: "CIFAR-10 quick".into(),
            kind: Kind::Lines,
            x: Direction::linear("iteration"),
            y: Direction::linear("% of the test images right"),
            series,
        }],
    })
}

const POSEIDON: &str = "Poseidon, 4 workers";
const ALONE: &str = "1 worker";
const ONE_BIT: &str = "1-bit quantization, 4 workers";

/// Iterations of an epoch.
const STEPS: f64 = 500.0;
/// By epoch: percent of the test images that were right, of the record that the figure names.
const FOUR_WORKERS: [f64; 6] = [52.38, 60.48, 66.76, 72.0, 73.98, 74.22];
const ONE_WORKER: [f64; 6] = [54.84, 61.28, 68.17, 72.5, 73.77, 74.08];
