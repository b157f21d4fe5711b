//! Products on every unit of this machine, against exact ones and against each other.

use poseidon_matrix::{Matrix, Product, Unit};
use std::io::Write;

/// Sides around those of vectors, tiles and blocks.
const SIDES: [usize; 10] = [1, 15, 16, 17, 31, 32, 33, 64, 100, 257];

#[test]
fn whole_numbers_are_exact_in_every_shape_orientation_and_sum() {
    let mut numbers = Numbers(1);
    for unit in units() {
        for shape in shapes() {
            // Of eleven bits by four: two parts by one, then the other way round.
            for (left, right) in [(1000, 7), (7, 1000)] {
                let factors = Factors::new(
                    shape,
                    |len| numbers.integers(len, left),
                    |len| Numbers(2).integers(len, right),
                );
                check_exact(unit, &factors);
            }
        }
    }
}

/// Blocks of 256 along the inner dimension, of 512 columns, and of rows that fit 32 MiB.
#[test]
fn whole_numbers_are_exact_in_products_of_many_blocks() {
    for unit in units() {
        for shape in [(70, 600, 1100), (1100, 257, 70), (700, 8200, 40)] {
            let factors = Factors::new(
                shape,
                |len| Numbers(3).integers(len, 40),
                |len| Numbers(4).integers(len, 7),
            );
            check_exact(unit, &factors);
        }
    }
}

/// Each result is one number of the other factor, whatever its size: nothing of it is lost.
#[test]
fn a_matrix_of_ones_and_zeros_moves_numbers_bit_by_bit() {
    for unit in units() {
        for side in SIDES {
            let mut numbers = Numbers(5);
            let values: Vec<f32> = (0..side * side)
                .map(|_| numbers.mantissa() * 2_f32.powi(numbers.next(230) as i32 - 103))
                .collect();
            let mut places: Vec<usize> = (0..side).collect();
            (1..side).for_each(|i| places.swap(i, numbers.next(i as u64 + 1) as usize));
            let mut ones = vec![0.0; side * side];
            places.iter().enumerate().for_each(|(row, column)| ones[row * side + column] = 1.0);
            let (ones, matrix) =
                (Matrix::row_major(&ones, side, side), Matrix::row_major(&values, side, side));

            let mut moved = vec![f32::NAN; side * side];
            Product::new(ones, matrix).on(unit).write_to(&mut moved);
            for (row, from) in moved.chunks_exact(side).zip(&places) {
                assert_eq!(row, &values[from * side..][..side], "{unit:?}, rows of {side}");
            }
            Product::new(matrix, ones.transposed()).on(unit).write_to(&mut moved);
            for (row, from) in moved.chunks_exact(side).zip(values.chunks_exact(side)) {
                let expected: Vec<f32> = places.iter().map(|place| from[*place]).collect();
                assert_eq!(row, expected, "{unit:?}, columns of {side}");
            }
        }
    }
}

#[test]
fn errors_are_those_of_single_precision() {
    let units = units();
    let mut worst = [0.0_f64; 2];
    for shape in shapes() {
        let factors = Factors::new(shape, |len| Numbers(6).mixed(len), |len| Numbers(7).mixed(len));
        let (expected, magnitudes) =
            (factors.exact(|a, b| a * b), factors.exact(|a, b| (a * b).abs()));
        for &unit in &units {
            let mut result = vec![0.0; expected.len()];
            factors.product(0).on(unit).write_to(&mut result);
            for ((result, expected), magnitude) in result.iter().zip(&expected).zip(&magnitudes) {
                let error = (f64::from(*result) - expected).abs() / magnitude;
                worst[unit as usize] = worst[unit as usize].max(error);
            }
        }
    }
    let [vectors, tiles] = worst;
    assert!(vectors < 1.5e-6, "vectors: {vectors:e}");
    assert!(tiles < 1e-6 && tiles <= 2.0 * vectors, "tiles: {tiles:e}, vectors: {vectors:e}");
}

/// All terms of one sign: an error with a direction would add up.
#[test]
fn errors_have_no_direction() {
    let positive = |len| Numbers(8).mixed(len).into_iter().map(f32::abs).collect::<Vec<_>>();
    let factors = Factors::new((64, 1, 64), positive, |len| {
        Numbers(9).mixed(len).iter().map(|x| x.abs()).collect()
    });
    for unit in units() {
        let mut result = vec![0.0; 64 * 64];
        factors.product(0).on(unit).write_to(&mut result);
        let errors =
            result.iter().zip(factors.exact(|a, b| a * b)).map(|(x, y)| f64::from(*x) / y - 1.0);
        let mean = errors.sum::<f64>() / result.len() as f64;
        assert!(mean.abs() < 4e-9, "{unit:?}: {mean:e}");
    }
}

#[test]
fn the_number_of_threads_does_not_show() {
    let units: Vec<_> = units().into_iter().map(Some).chain([None]).collect();
    for shape in [(257, 300, 1100), (1100, 300, 257), (33, 40, 31), (40, 40, 40)] {
        let factors =
            Factors::new(shape, |len| Numbers(10).mixed(len), |len| Numbers(11).mixed(len));
        for &unit in &units {
            for orientation in 0..4 {
                let product = |threads| {
                    let product = factors.product(orientation).threads(threads);
                    let mut result = vec![1.0; shape.0 * shape.2];
                    unit.map_or(product, |unit| product.on(unit)).add_to(&mut result);
                    result.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let one = product(1);
                for threads in [0, 2, 3, 7] {
                    assert!(product(threads) == one, "{unit:?}, {shape:?}, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_shows_in_its_row_or_column_and_nowhere_else() {
    let bad = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0xffff_ffff),
        f32::from_bits(0x7fff_ffff),
    ];
    let (rows, inner, columns) = (40, 50, 70);
    for unit in units() {
        for bad in bad {
            let ones = vec![1.0_f32; inner * columns];
            let mut values = vec![1.0_f32; rows * inner];
            values[33 * inner + 41] = bad;
            let a = Matrix::row_major(&values, rows, inner);
            let b = Matrix::row_major(&ones, inner, columns);
            let mut result = vec![0.0; rows * columns];
            Product::new(a, b).on(unit).write_to(&mut result);
            for (row, values) in result.chunks_exact(columns).enumerate() {
                let fits = |x: &f32| if row == 33 { !x.is_finite() } else { *x == inner as f32 };
                assert!(values.iter().all(fits), "{unit:?}, {bad} on the left, row {row}");
            }
            let mut result = vec![0.0; rows * columns];
            Product::new(b.transposed(), a.transposed()).on(unit).write_to(&mut result);
            for (at, value) in result.iter().enumerate() {
                let fits =
                    if at % rows == 33 { !value.is_finite() } else { *value == inner as f32 };
                assert!(fits, "{unit:?}, {bad} on the right, element {at}");
            }
        }
    }
}

/// Shapes of one block and of many; every element meets its own place in each target, once.
#[test]
fn targets_are_changed_piece_by_piece() {
    let units: Vec<_> = units().into_iter().map(Some).chain([None]).collect();
    for shape in [(1, 1, 1), (33, 40, 31), (600, 33, 1100), (70, 600, 1100), (1100, 257, 70)] {
        let factors = Factors::new(
            shape,
            |len| Numbers(12).integers(len, 40),
            |len| Numbers(13).integers(len, 7),
        );
        let expected = factors.exact(|a, b| a * b);
        let places: Vec<f32> = (0..expected.len()).map(|i| i as f32).collect();
        for &unit in &units {
            for threads in [1, 3] {
                let product = factors.product(0).threads(threads);
                let product = unit.map_or(product, |unit| product.on(unit));
                let (mut sums, mut seen) = (places.clone(), vec![0.0; places.len()]);
                product.update([&mut sums, &mut [], &mut seen], |product, [sums, none, seen]| {
                    assert!(none.is_empty() && product.len() == sums.len());
                    sums.iter_mut().zip(product).for_each(|(sum, x)| *sum += x);
                    seen.iter_mut().for_each(|seen| *seen += 1.0);
                });
                assert!(seen.iter().all(|seen| *seen == 1.0), "{unit:?}, {shape:?}");
                for ((sum, place), expected) in sums.iter().zip(&places).zip(&expected) {
                    assert_eq!(sum - place, *expected as f32, "{unit:?}, {shape:?}, {place}");
                }
            }
        }
    }
}

/// A thread's memory is not in use while `change` runs: it may compute products of its own.
#[test]
fn products_within_products() {
    let ones = vec![1.0; 70 * 70];
    let ones = Matrix::row_major(&ones, 70, 70);
    for unit in units() {
        let mut sums = vec![0.0; 70 * 70];
        Product::new(ones, ones).on(unit).update([&mut sums], |outer, [sums]| {
            let mut inner = vec![0.0; 70 * 70];
            Product::new(ones, ones).on(unit).update([&mut inner], |x, [into]| {
                into.copy_from_slice(x);
            });
            sums.iter_mut().zip(outer).zip(inner).for_each(|((sum, x), y)| *sum = x + y);
        });
        assert!(sums.iter().all(|sum| *sum == 140.0), "{unit:?}");
    }
}

#[test]
#[should_panic(expected = "5 values for a matrix of 2 x 2")]
fn a_target_of_another_size_is_refused() {
    let matrix = Matrix::row_major(&[0.0; 4], 2, 2);
    Product::new(matrix, matrix).update([&mut [0.0; 4], &mut [0.0; 5]], |_, _| {});
}

#[test]
fn an_empty_sum_is_zero() {
    for unit in units() {
        let mut result = [7.0; 4];
        let product =
            Product::new(Matrix::row_major(&[], 2, 0), Matrix::row_major(&[], 0, 2)).on(unit);
        product.add_to(&mut result);
        assert_eq!(result, [7.0; 4]);
        product.write_to(&mut result);
        assert_eq!(result, [0.0; 4]);
        product.update([&mut result], |sum, [result]| {
            assert!(sum.iter().all(|sum| *sum == 0.0) && sum.len() == result.len());
        });
        Product::new(Matrix::row_major(&[], 0, 2), Matrix::row_major(&[1.0, 2.0], 2, 1))
            .on(unit)
            .write_to(&mut []);
    }
}

#[test]
#[should_panic(expected = "3 columns times 2 rows")]
fn factors_that_do_not_fit_each_other_are_refused() {
    let values = [0.0; 6];
    let _ = Product::new(Matrix::row_major(&values, 2, 3), Matrix::row_major(&values, 2, 3));
}

#[test]
#[should_panic(expected = "5 values for a matrix of 2 x 2")]
fn an_output_of_another_size_is_refused() {
    let matrix = Matrix::row_major(&[0.0; 4], 2, 2);
    Product::new(matrix, matrix).write_to(&mut [0.0; 5]);
}

/// Those of this machine; says past the test harness, which swallows what passing tests print, which one is not
/// tested.
fn units() -> Vec<Unit> {
    let units = Unit::available().to_vec();
    if !units.contains(&Unit::Tiles) {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        let needs = "a processor with AMX, Linux 5.16 or newer, and no POSEIDON_AMX=0";
        let _ = writeln!(std::io::stderr(), "SKIPPED {name}: tiles NOT TESTED, they need {needs}");
    }
    units
}

fn shapes() -> impl Iterator<Item = (usize, usize, usize)> {
    let two = |a| SIDES.into_iter().map(move |b| (a, b));
    SIDES.into_iter().flat_map(two).flat_map(|(a, b)| SIDES.into_iter().map(move |c| (a, b, c)))
}

/// Writes and adds, on factors that lie in memory in any way.
fn check_exact(unit: Unit, factors: &Factors) {
    let expected: Vec<f32> = factors.exact(|a, b| a * b).into_iter().map(|x| x as f32).collect();
    let more: Vec<f32> = expected.iter().map(|x| x + 3.0).collect();
    for orientation in 0..4 {
        let mut result = vec![f32::NAN; expected.len()];
        factors.product(orientation).on(unit).write_to(&mut result);
        assert!(result == expected, "{unit:?}, {:?} lying as {orientation}", factors.shape);
        result.fill(3.0);
        factors.product(orientation).on(unit).add_to(&mut result);
        assert!(result == more, "{unit:?}, added, {:?} lying as {orientation}", factors.shape);
    }
}

/// Two factors, each row-major and column-major, in memory with other numbers before, between and after.
struct Factors {
    shape: (usize, usize, usize),
    a: [Vec<f32>; 2],
    b: [Vec<f32>; 2],
}

/// What lies between the rows.
const MARGIN: usize = 3;

impl Factors {
    fn new(
        shape: (usize, usize, usize),
        a: impl FnOnce(usize) -> Vec<f32>,
        b: impl FnOnce(usize) -> Vec<f32>,
    ) -> Self {
        let (rows, inner, columns) = shape;
        let both = |values: &[f32], rows: usize, columns: usize| {
            let transposed: Vec<f32> =
                (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect();
            [with_margins(values, columns), with_margins(&transposed, rows)]
        };
        Self {
            shape,
            a: both(&a(rows * inner), rows, inner),
            b: both(&b(inner * columns), inner, columns),
        }
    }

    /// Bit 0 of `orientation` is about the left factor, bit 1 about the right one.
    fn product(&self, orientation: usize) -> Product<'_> {
        let (rows, inner, columns) = self.shape;
        Product::new(
            view(&self.a, rows, inner, orientation & 1 != 0),
            view(&self.b, inner, columns, orientation & 2 != 0),
        )
    }

    fn exact(&self, term: impl Fn(f64, f64) -> f64) -> Vec<f64> {
        let (rows, inner, columns) = self.shape;
        let (a, b) = (&self.a[0], &self.b[0]);
        let mut sums = vec![0.0; rows * columns];
        for (row, sums) in sums.chunks_exact_mut(columns).enumerate() {
            for k in 0..inner {
                let a = f64::from(a[row * (inner + 2 * MARGIN) + MARGIN + k]);
                let b = &b[k * (columns + 2 * MARGIN) + MARGIN..][..columns];
                sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += term(a, f64::from(*b)));
            }
        }
        sums
    }
}

fn with_margins(values: &[f32], columns: usize) -> Vec<f32> {
    let margin = [f32::NAN; MARGIN];
    values.chunks_exact(columns).flat_map(|row| [&margin, row, &margin].concat()).collect()
}

fn view(memory: &[Vec<f32>; 2], rows: usize, columns: usize, transposed: bool) -> Matrix<'_> {
    let [rows, columns] = if transposed { [columns, rows] } else { [rows, columns] };
    let wide = Matrix::row_major(&memory[usize::from(transposed)], rows, columns + 2 * MARGIN);
    let matrix = wide.columns(MARGIN..MARGIN + columns);
    if transposed { matrix.transposed() } else { matrix }
}

/// Numbers that look random and are the same each time.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % below
    }

    /// From 1 to 2, of either sign, with all its bits.
    fn mantissa(&mut self) -> f32 {
        let sign = (self.next(2) as u32) << 31;
        f32::from_bits(sign | 0x3f80_0000 | self.next(1 << 23) as u32)
    }

    fn integers(&mut self, len: usize, most: u64) -> Vec<f32> {
        (0..len).map(|_| self.next(2 * most + 1) as f32 - most as f32).collect()
    }

    /// From 2^-12 to 2^12, of either sign.
    fn mixed(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.mantissa() * 2_f32.powi(self.next(24) as i32 - 12)).collect()
    }
}
