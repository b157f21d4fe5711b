//! Fully connected: y = W x + b.

use crate::layer::transpose;
use crate::spec::Shape;
use poseidon_matrix::{Matrix, Product};

pub(crate) struct Fc {
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    input: Shape,
    /// Input and gradient in the order of the weights, if images lie otherwise.
    flat: Option<Flat>,
}

struct Flat {
    x: Vec<f32>,
    gradient: Vec<f32>,
}

impl Fc {
    pub(crate) fn new(outputs: usize, input: Shape, capacity: usize) -> Self {
        let inputs = input.len();
        let flat = (input.channels > 1 && input.height * input.width > 1).then(|| Flat {
            x: vec![0.0; capacity * inputs],
            gradient: vec![0.0; capacity * inputs],
        });
        Self { outputs, inputs, input, flat }
    }

    /// `x` is `rows` inputs, `y` as many outputs.
    pub(crate) fn forward(&mut self, rows: usize, x: &[f32], parameters: &[f32], y: &mut [f32]) {
        let (m, n) = (self.outputs, self.inputs);
        if let Some(flat) = &mut self.flat {
            let positions = self.input.height * self.input.width;
            for (from, to) in x.chunks_exact(n).zip(flat.x.chunks_exact_mut(n)) {
                transpose(from, positions, self.input.channels, to);
            }
        }
        let (weights, bias) = parameters.split_at(m * n);
        for y in y.chunks_exact_mut(m) {
            y.copy_from_slice(bias);
        }
        let weights = Matrix::row_major(weights, m, n).transposed();
        Product::new(Matrix::row_major(self.rows(rows, x), rows, n), weights).add_to(y);
    }

    /// The weights' gradient, then the biases', from the output's, `u`.
    pub(crate) fn gradient(&self, rows: usize, x: &[f32], u: &[f32], gradient: &mut [f32]) {
        let (m, n) = (self.outputs, self.inputs);
        let (weights, bias) = gradient.split_at_mut(m * n);
        let v = Matrix::row_major(self.rows(rows, x), rows, n);
        Product::new(Matrix::row_major(u, rows, m).transposed(), v).write_to(weights);
        bias.fill(0.0);
        for u in u.chunks_exact(m) {
            bias.iter_mut().zip(u).for_each(|(sum, u)| *sum += u);
        }
    }

    /// The input's gradient from the output's, `u`.
    pub(crate) fn backward(&mut self, rows: usize, u: &[f32], parameters: &[f32], dx: &mut [f32]) {
        let (m, n) = (self.outputs, self.inputs);
        let u = Matrix::row_major(u, rows, m);
        let weights = Matrix::row_major(&parameters[..m * n], m, n);
        let Some(flat) = &mut self.flat else {
            return Product::new(u, weights).write_to(dx);
        };
        let gradient = &mut flat.gradient[..rows * n];
        Product::new(u, weights).write_to(gradient);
        let positions = self.input.height * self.input.width;
        for (from, to) in gradient.chunks_exact(n).zip(dx.chunks_exact_mut(n)) {
            transpose(from, self.input.channels, positions, to);
        }
    }

    /// The input of the last forward pass as the weights see it; `x` is the input itself.
    pub(crate) fn rows<'a>(&'a self, rows: usize, x: &'a [f32]) -> &'a [f32] {
        let x = self.flat.as_ref().map_or(x, |flat| &flat.x);
        &x[..rows * self.inputs]
    }
}
