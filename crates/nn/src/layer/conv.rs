//! Convolution, straight from the image.
//!
//! With the channels of a position side by side, a kernel's row covers one contiguous run of the
//! padded image. So the usual matrix of patches need not be written out: the [kernel]'s matrix
//! products read patches where they lie. The input's gradient is the convolution of the output's
//! gradient, spread out by the stride and padded, with the kernel turned by 180°. That multiplies
//! with zeros: stride² times the work, in layers above the first whose stride is not 1.

mod kernel;

use crate::layer::SLACK;
use crate::spec::{MOST_VALUES, Shape};
use kernel::{Convolve, Panels, Patches, WeightGradient};
use pulp::Arch;

/// Window, step and padding, the same in both directions.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) kernel: usize,
    pub(crate) stride: usize,
    pub(crate) pad: usize,
}

impl Geometry {
    pub(crate) fn output(self, input: Shape, outputs: usize) -> Shape {
        let size = |size| (size + 2 * self.pad - self.kernel) / self.stride + 1;
        Shape::new(outputs, size(input.height), size(input.width))
    }

    /// What forward reads: the input with zeros around it.
    pub(crate) fn padded_input(self, input: Shape) -> Shape {
        let size = |size| size + 2 * self.pad;
        Shape::new(input.channels, size(input.height), size(input.width))
    }

    /// What backward reads: the output's gradient with zeros around and between its positions.
    pub(crate) fn padded_output(self, input: Shape, outputs: usize) -> Shape {
        let size = |size| size + self.kernel - 1;
        Shape::new(outputs, size(input.height), size(input.width))
    }
}

pub(crate) struct Conv {
    geometry: Geometry,
    input: Shape,
    output: Shape,
    /// Images that are computed together.
    block: usize,
    forward: Pass,
    /// Made when it is first needed: the net's first layer does not.
    backward: Option<Pass>,
    /// The weights' gradient, `[row][column][input channel][output channel]`.
    gradient: Vec<f32>,
}

/// What one convolution needs: padded images, where patches begin in them, and the weights.
struct Pass {
    padded: Padded,
    origins: Vec<u32>,
    weights: Panels,
}

/// A block's images take this many values, so that they stay in a first-level cache while the
/// weights' gradient is summed. A single image may take more.
const BLOCK_VALUES: usize = 8 * 1024;

/// A block has at least this many positions: with fewer, sums are stored too often.
const BLOCK_POSITIONS: usize = 64;

impl Conv {
    pub(crate) fn new(input: Shape, output: Shape, geometry: Geometry) -> Self {
        let Geometry { kernel, stride, pad } = geometry;
        let padded =
            Shape { height: input.height + 2 * pad, width: input.width + 2 * pad, ..input };
        let positions = output.height * output.width;
        let largest = padded.len().max(geometry.padded_output(input, output.channels).len());
        let block = (BLOCK_VALUES / (padded.len() + output.len()))
            .max(BLOCK_POSITIONS.div_ceil(positions))
            .min(MOST_VALUES / largest);
        let depth = kernel * kernel * input.channels;
        let padded = Padded::new(input, padded, pad, 1, block);
        let forward = Pass {
            origins: padded.origins(output, stride, block),
            weights: Panels::new(depth, output.channels),
            padded,
        };
        let gradient = vec![0.0; depth * output.channels];
        Self { geometry, input, output, block, forward, backward: None, gradient }
    }

    pub(crate) fn forward(&mut self, x: &[f32], parameters: &[f32], y: &mut [f32]) {
        let (input, outputs) = (self.input, self.output.channels);
        let area = self.geometry.kernel.pow(2);
        let (weights, bias) = parameters.split_at(parameters.len() - outputs);
        let depth = area * input.channels;
        // A patch lies [row][column][channel], weights [channel][row][column].
        self.forward.weights.pack(|k, output| {
            weights[output * depth + k % input.channels * area + k / input.channels]
        });
        let blocks = x.chunks(self.block * input.len());
        for (x, y) in blocks.zip(y.chunks_mut(self.block * self.output.len())) {
            self.forward.convolve(self.geometry.kernel, x, bias, y);
        }
    }

    /// The weights' gradient, then the biases'. `dy` goes on for [`SLACK`] values behind the
    /// gradient of `x`'s outputs.
    pub(crate) fn gradient(&mut self, x: &[f32], dy: &[f32], gradient: &mut [f32]) {
        let (input, output) = (self.input, self.output);
        self.gradient.fill(0.0);
        let (weights, bias) = gradient.split_at_mut(gradient.len() - output.channels);
        bias.fill(0.0);
        let positions = output.height * output.width;
        let Pass { padded, origins, .. } = &mut self.forward;
        for (block, x) in x.chunks(self.block * input.len()).enumerate() {
            let images = x.len() / input.len();
            padded.load(x);
            let dy = &dy[block * self.block * output.len()..][..images * output.len() + SLACK];
            Arch::new().dispatch(WeightGradient {
                patches: padded.patches(self.geometry.kernel, &origins[..images * positions]),
                dy,
                outputs: output.channels,
                weights: &mut self.gradient,
                bias,
            });
        }
        let area = self.geometry.kernel.pow(2);
        let depth = area * input.channels;
        for (k, sums) in self.gradient.chunks_exact(output.channels).enumerate() {
            let to = k % input.channels * area + k / input.channels;
            for (sum, weight) in sums.iter().zip(weights[to..].iter_mut().step_by(depth)) {
                *weight = *sum;
            }
        }
    }

    /// The input's gradient, `dx`, from the output's, `dy`.
    pub(crate) fn backward(&mut self, dy: &[f32], parameters: &[f32], dx: &mut [f32]) {
        let (input, output, kernel) = (self.input, self.output, self.geometry.kernel);
        let area = kernel.pow(2);
        let pass = self.backward.get_or_insert_with(|| {
            let shape = self.geometry.padded_output(input, output.channels);
            let margin = kernel - 1 - self.geometry.pad;
            let padded = Padded::new(output, shape, margin, self.geometry.stride, self.block);
            Pass {
                origins: padded.origins(input, 1, self.block),
                weights: Panels::new(area * output.channels, input.channels),
                padded,
            }
        });
        let depth = area * input.channels;
        pass.weights.pack(|k, channel| {
            let (output, turned) = (k % output.channels, area - 1 - k / output.channels);
            parameters[output * depth + channel * area + turned]
        });
        let blocks = dy.chunks(self.block * output.len());
        for (dy, dx) in blocks.zip(dx.chunks_mut(self.block * input.len())) {
            pass.convolve(kernel, dy, &[], dx);
        }
    }
}

impl Pass {
    /// One block of images, `x`; `bias` may be empty.
    fn convolve(&mut self, kernel: usize, x: &[f32], bias: &[f32], y: &mut [f32]) {
        self.padded.load(x);
        let origins = &self.origins[..y.len() / self.weights.outputs()];
        Arch::new().dispatch(Convolve {
            patches: self.padded.patches(kernel, origins),
            weights: &self.weights,
            bias,
            y,
        });
    }
}

/// Images with zeros around them and, for strided backward passes, between their positions.
struct Padded {
    image: Shape,
    padded: Shape,
    margin: usize,
    spread: usize,
    /// Only the images' positions are ever written.
    values: Vec<f32>,
}

impl Padded {
    fn new(image: Shape, padded: Shape, margin: usize, spread: usize, images: usize) -> Self {
        let values = vec![0.0; images * padded.len() + SLACK];
        Self { image, padded, margin, spread, values }
    }

    fn load(&mut self, images: &[f32]) {
        let Shape { channels, height, width } = self.image;
        let pitch = self.padded.width * channels;
        let to = self.values.chunks_exact_mut(self.padded.len());
        for (image, to) in images.chunks_exact(self.image.len()).zip(to) {
            for (y, row) in image.chunks_exact(width * channels).enumerate().take(height) {
                let start = (self.margin + y * self.spread) * pitch + self.margin * channels;
                let to = &mut to[start..];
                if self.spread == 1 {
                    to[..row.len()].copy_from_slice(row);
                    continue;
                }
                let places = to.chunks_mut(channels).step_by(self.spread);
                for (place, position) in places.zip(row.chunks_exact(channels)) {
                    place.copy_from_slice(position);
                }
            }
        }
    }

    /// Where the patch of each output position begins, for a block of `images`.
    fn origins(&self, output: Shape, stride: usize, images: usize) -> Vec<u32> {
        let Shape { channels, width, .. } = self.padded;
        let rows = (0..images).flat_map(|image| {
            let image = image * self.padded.len();
            (0..output.height).map(move |y| image + y * stride * width * channels)
        });
        let column = |x| x * stride * channels;
        rows.flat_map(|row| (0..output.width).map(move |x| (row + column(x)) as u32)).collect()
    }

    fn patches<'a>(&'a self, kernel: usize, origins: &'a [u32]) -> Patches<'a> {
        let Shape { channels, width, .. } = self.padded;
        Patches {
            values: &self.values,
            origins,
            rows: kernel,
            run: kernel * channels,
            pitch: width * channels,
        }
    }
}
