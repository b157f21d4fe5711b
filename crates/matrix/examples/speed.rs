//! How fast products are on each unit of this machine, in turns.
//!
//! Run: `cargo run --release -p poseidon-matrix --example speed [-- THREADS]`

use poseidon_matrix::{Matrix, Product, Unit};
use std::time::{Duration, Instant};

/// How factors lie, as a fully connected layer of a net has them.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Outputs from inputs and weights: x wᵀ.
    Forward,
    /// The inputs' gradient: u w.
    Backward,
    /// The weights' gradient, from the left and the right columns of one matrix: uᵀ v.
    Gradient,
}

/// Rows, inner dimension, columns.
const CASES: [(Way, [usize; 3]); 19] = [
    (Way::Gradient, [1448, 256, 8870]),
    (Way::Gradient, [1448, 128, 8870]),
    (Way::Gradient, [1448, 64, 8870]),
    (Way::Gradient, [1448, 32, 8870]),
    (Way::Gradient, [1448, 512, 8870]),
    (Way::Gradient, [512, 256, 8870]),
    (Way::Gradient, [4096, 256, 4096]),
    (Way::Gradient, [10, 256, 1024]),
    (Way::Gradient, [128, 64, 128]),
    (Way::Gradient, [64, 64, 64]),
    (Way::Gradient, [32, 32, 32]),
    (Way::Forward, [256, 4096, 4096]),
    (Way::Forward, [64, 4096, 4096]),
    (Way::Forward, [32, 4096, 4096]),
    (Way::Forward, [64, 1024, 64]),
    (Way::Backward, [256, 4096, 4096]),
    (Way::Backward, [64, 4096, 4096]),
    (Way::Backward, [32, 4096, 4096]),
    (Way::Backward, [64, 10, 1024]),
];

fn main() {
    let threads = std::env::args().nth(1).map_or(1, |n| n.parse().expect("a number of threads"));
    println!("GFLOP/s of the fastest of many runs, {threads} threads\n");
    println!("{:10}{:>18}{:>10}{:>10}", "", "shape", "vectors", "tiles");
    for (way, [rows, inner, columns]) in CASES {
        let speeds = measure(way, [rows, inner, columns], threads);
        let shape = format!("{rows}x{inner}x{columns}");
        print!("{:10}{shape:>18}", format!("{way:?}"));
        speeds.iter().for_each(|speed| print!("{speed:>10.0}"));
        println!("{:>8.2}", speeds[speeds.len() - 1] / speeds[0]);
    }
}

fn measure(way: Way, [rows, inner, columns]: [usize; 3], threads: usize) -> Vec<f64> {
    let numbers =
        |len| (0..len).map(|i| ((i * 7919) % 10007) as f32 / 5e3 - 1.0).collect::<Vec<_>>();
    let (left, right);
    let (a, b) = match way {
        Way::Forward => {
            (left, right) = (numbers(rows * inner), numbers(inner * columns));
            let weights = Matrix::row_major(&right, columns, inner);
            (Matrix::row_major(&left, rows, inner), weights.transposed())
        }
        Way::Backward => {
            (left, right) = (numbers(rows * inner), numbers(inner * columns));
            (Matrix::row_major(&left, rows, inner), Matrix::row_major(&right, inner, columns))
        }
        Way::Gradient => {
            left = numbers(inner * (rows + columns));
            let both = Matrix::row_major(&left, inner, rows + columns);
            (both.columns(0..rows).transposed(), both.columns(rows..rows + columns))
        }
    };
    let mut into = vec![0.0; rows * columns];
    let mut best = vec![Duration::MAX; Unit::available().len()];
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(600) {
        for (unit, best) in Unit::available().iter().zip(&mut best) {
            let begin = Instant::now();
            Product::new(a, b).threads(threads).on(*unit).write_to(&mut into);
            *best = begin.elapsed().min(*best);
        }
    }
    let flop = 2.0 * (rows * inner * columns) as f64;
    best.into_iter().map(|time| flop / time.as_secs_f64() / 1e9).collect()
}
