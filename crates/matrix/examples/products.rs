//! How fast products are on each unit of this machine, in turns.
//!
//! Run: cargo run -p poseidon-matrix --example products -- 1 1
//!
//! The arguments are numbers of threads and of rounds, without any 1 and 5; for figures that mean
//! something add `--release`.

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
    let number =
        |at, other| std::env::args().nth(at).map_or(other, |n| n.parse().expect("a number"));
    let (threads, rounds) = (number(1, 1), number(2, 5));
    println!("GFLOP/s on {threads} threads: the fastest run, and the one in the middle\n");
    let units = Unit::available().iter().map(|unit| format!("{:>17}", format!("{unit:?}")));
    println!("{:10}{:>18}{}", "", "shape", units.collect::<String>());
    // A machine's other tenants come and go: every case is measured at several times.
    let mut times = vec![vec![Vec::new(); Unit::available().len()]; CASES.len()];
    for _ in 0..rounds {
        for ((way, shape), times) in CASES.iter().zip(&mut times) {
            measure(*way, *shape, threads, times);
        }
    }
    for ((way, [rows, inner, columns]), times) in CASES.iter().zip(&mut times) {
        print!("{:10}{:>18}", format!("{way:?}"), format!("{rows}x{inner}x{columns}"));
        let flop = 2.0 * (rows * inner * columns) as f64;
        for times in times {
            times.sort();
            let [best, middle] = [times[0], times[times.len() / 2]];
            let speed = |time: Duration| flop / time.as_secs_f64() / 1e9;
            print!("{:>11.0}{:>6.0}", speed(best), speed(middle));
        }
        println!();
    }
    println!(
        "\nMilliseconds for a step of gradient descent, weights in memory: the fastest, and the one in the middle\n"
    );
    for &unit in Unit::available() {
        let [whole, pieces] = steps(unit, threads, rounds).map(|mut times| {
            times.sort();
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            format!("{:.1} {:.1}", ms(times[0]), ms(times[times.len() / 2]))
        });
        println!(
            "{:10}  the gradient, then the step: {whole}   piece by piece: {pieces}",
            format!("{unit:?}")
        );
    }
}

/// Adds to each unit's times.
fn measure(way: Way, shape: [usize; 3], threads: usize, times: &mut [Vec<Duration>]) {
    let [rows, inner, columns] = shape;
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
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(200) {
        for (unit, times) in Unit::available().iter().zip(&mut *times) {
            let begin = Instant::now();
            Product::new(a, b).threads(threads).on(*unit).write_to(&mut into);
            times.push(begin.elapsed());
        }
    }
}

/// Steps by way of a gradient in memory, and piece by piece. Eight sets of weights have their turns, as eight workers of one
/// machine would, so that none is in the cache when its turn comes.
fn steps(unit: Unit, threads: usize, rounds: usize) -> [Vec<Duration>; 2] {
    const SHAPE: [usize; 3] = [1448, 256, 8870];
    let [rows, inner, columns] = SHAPE;
    let factors: Vec<f32> =
        (0..inner * (rows + columns)).map(|i| ((i * 7919) % 10007) as f32 / 5e3 - 1.0).collect();
    let factors = Matrix::row_major(&factors, inner, rows + columns);
    let (u, v) = (factors.columns(0..rows).transposed(), factors.columns(rows..rows + columns));
    let product = Product::new(u, v).threads(threads).on(unit);
    let descend = |gradient: &[f32], weights: &mut [f32]| {
        weights.iter_mut().zip(gradient).for_each(|(weight, x)| *weight -= 1e-6 * x);
    };
    let mut all = vec![vec![0.0; rows * columns]; 8];
    let mut gradient = vec![0.0; rows * columns];
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for weights in &mut all {
            let begin = Instant::now();
            product.write_to(&mut gradient);
            descend(&gradient, weights);
            times[0].push(begin.elapsed());
        }
        for weights in &mut all {
            let begin = Instant::now();
            product.update([weights], |gradient, [weights]| descend(gradient, weights));
            times[1].push(begin.elapsed());
        }
    }
    times
}
