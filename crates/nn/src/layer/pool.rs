//! Max and average pooling with Caffe's geometry.

use crate::layer::{GROUP, group, group_mut};
use crate::spec::{PoolMethod, Shape};
use pulp::{Arch, NullaryFnOnce};
use std::ops::Range;

/// Window, step and padding, the same in both directions.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) kernel: usize,
    pub(crate) stride: usize,
    pub(crate) pad: usize,
}

impl Geometry {
    pub(crate) fn output(self, input: Shape) -> Shape {
        Shape::new(input.channels, self.count(input.height), self.count(input.width))
    }

    /// The number of windows along one direction is rounded up, so the last may be clipped; one
    /// that would begin behind the input is left out.
    fn count(self, size: usize) -> usize {
        let Self { kernel, stride, pad } = self;
        ((size + 2 * pad - kernel).div_ceil(stride) + 1).min((size + pad).div_ceil(stride))
    }

    fn windows(self, size: usize) -> Vec<Window> {
        let Self { kernel, stride, pad } = self;
        (0..self.count(size))
            .map(|i| i * stride)
            .map(|start| Window {
                inside: start.saturating_sub(pad)..(start + kernel - pad).min(size),
                counted: kernel.min(size + 2 * pad - start),
            })
            .collect()
    }
}

/// What a window covers of one direction.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Window {
    /// The part that lies in the input.
    inside: Range<usize>,
    /// The length that averages divide by: what lies in the input or its padding.
    counted: usize,
}

pub(crate) struct Pool {
    method: PoolMethod,
    input: Shape,
    output: Shape,
    rows: Vec<Window>,
    columns: Vec<Window>,
    /// Max only: which position of its window each output is from, counted row by row.
    chosen: Vec<u32>,
}

impl Pool {
    pub(crate) fn new(
        method: PoolMethod,
        geometry: Geometry,
        input: Shape,
        output: Shape,
        capacity: usize,
    ) -> Self {
        let chosen = match method {
            PoolMethod::Max => vec![0; capacity * output.len()],
            PoolMethod::Average => Vec::new(),
        };
        let (rows, columns) = (geometry.windows(input.height), geometry.windows(input.width));
        Self { method, input, output, rows, columns, chosen }
    }

    pub(crate) fn forward(&mut self, x: &[f32], y: &mut [f32]) {
        let images = x.len() / self.input.len();
        match self.method {
            PoolMethod::Max => {
                let mut chosen = std::mem::take(&mut self.chosen);
                self.walk(images, Max { x, y, chosen: &mut chosen });
                self.chosen = chosen;
            }
            PoolMethod::Average => self.walk(images, Average { x, y }),
        }
    }

    /// The input's gradient, `dx`, from the output's, `dy`.
    pub(crate) fn backward(&self, dy: &[f32], dx: &mut [f32]) {
        let images = dx.len() / self.input.len();
        match self.method {
            PoolMethod::Max => {
                self.walk(images, MaxGradient { dy, dx, chosen: &self.chosen });
            }
            PoolMethod::Average => self.walk(images, AverageGradient { dy, dx }),
        }
    }

    fn walk(&self, images: usize, pass: impl Pass) {
        Arch::new().dispatch(Walk { pool: self, images, pass });
    }
}

/// What is done with every window of every image.
trait Pass {
    /// Before an image's windows; `input` is the image among all inputs.
    #[inline(always)]
    fn begin(&mut self, _input: Range<usize>) {}

    /// N channels of a window.
    fn window<const N: usize>(&mut self, offsets: WindowOffsets);
}

/// Where N channels of one window lie in the input, and where their results lie in the output.
#[derive(Clone, Copy)]
struct WindowOffsets {
    /// Index of the first result in the output.
    output: usize,
    /// Index of the window's first value in the input.
    start: usize,
    rows: usize,
    columns: usize,
    /// The distance in the input from one row to the next, and from one column to the next.
    pitch: (usize, usize),
    /// The factor by which an average multiplies the window's sum.
    share: f32,
}

impl WindowOffsets {
    #[inline(always)]
    fn at(self, row: usize, column: usize) -> usize {
        self.start + row * self.pitch.0 + column * self.pitch.1
    }
}

struct Walk<'a, P> {
    pool: &'a Pool,
    images: usize,
    pass: P,
}

impl<P: Pass> NullaryFnOnce for Walk<'_, P> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { pool, images, mut pass } = self;
        let (input, output) = (pool.input, pool.output);
        let channels = input.channels;
        for image in 0..images {
            let start = image * input.len();
            pass.begin(start..start + input.len());
            for (y, row) in pool.rows.iter().enumerate() {
                for (x, column) in pool.columns.iter().enumerate() {
                    let first = row.inside.start * input.width + column.inside.start;
                    let offsets = |channel| WindowOffsets {
                        output: image * output.len() + (y * output.width + x) * channels + channel,
                        start: start + first * channels + channel,
                        rows: row.inside.len(),
                        columns: column.inside.len(),
                        pitch: (input.width * channels, channels),
                        share: 1.0 / (row.counted * column.counted) as f32,
                    };
                    let grouped = channels - channels % GROUP;
                    for channel in (0..grouped).step_by(GROUP) {
                        pass.window::<GROUP>(offsets(channel));
                    }
                    for channel in grouped..channels {
                        pass.window::<1>(offsets(channel));
                    }
                }
            }
        }
    }
}

struct Max<'a> {
    x: &'a [f32],
    y: &'a mut [f32],
    chosen: &'a mut [u32],
}

impl Pass for Max<'_> {
    #[inline(always)]
    fn window<const N: usize>(&mut self, offsets: WindowOffsets) {
        let (mut best, mut chosen) = ([f32::NEG_INFINITY; N], [0; N]);
        let mut position = 0;
        for row in 0..offsets.rows {
            for column in 0..offsets.columns {
                let x = group::<_, N>(self.x, offsets.at(row, column));
                for lane in 0..N {
                    // NaN wins, so that it is seen in the loss.
                    let take = x[lane] > best[lane] || x[lane].is_nan();
                    best[lane] = if take { x[lane] } else { best[lane] };
                    chosen[lane] = if take { position } else { chosen[lane] };
                }
                position += 1;
            }
        }
        *group_mut(self.y, offsets.output) = best;
        *group_mut(self.chosen, offsets.output) = chosen;
    }
}

struct MaxGradient<'a> {
    dy: &'a [f32],
    dx: &'a mut [f32],
    chosen: &'a [u32],
}

impl Pass for MaxGradient<'_> {
    #[inline(always)]
    fn begin(&mut self, input: Range<usize>) {
        self.dx[input].fill(0.0);
    }

    #[inline(always)]
    fn window<const N: usize>(&mut self, offsets: WindowOffsets) {
        let dy = *group::<_, N>(self.dy, offsets.output);
        let chosen = *group::<_, N>(self.chosen, offsets.output);
        let mut position = 0;
        for row in 0..offsets.rows {
            for column in 0..offsets.columns {
                let dx = group_mut::<_, N>(self.dx, offsets.at(row, column));
                for lane in 0..N {
                    dx[lane] += if chosen[lane] == position { dy[lane] } else { 0.0 };
                }
                position += 1;
            }
        }
    }
}

struct Average<'a> {
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Pass for Average<'_> {
    #[inline(always)]
    fn window<const N: usize>(&mut self, offsets: WindowOffsets) {
        let mut sum = [0.0; N];
        for row in 0..offsets.rows {
            for column in 0..offsets.columns {
                let x = group::<_, N>(self.x, offsets.at(row, column));
                for lane in 0..N {
                    sum[lane] += x[lane];
                }
            }
        }
        *group_mut(self.y, offsets.output) = sum.map(|sum| sum * offsets.share);
    }
}

struct AverageGradient<'a> {
    dy: &'a [f32],
    dx: &'a mut [f32],
}

impl Pass for AverageGradient<'_> {
    #[inline(always)]
    fn begin(&mut self, input: Range<usize>) {
        self.dx[input].fill(0.0);
    }

    #[inline(always)]
    fn window<const N: usize>(&mut self, offsets: WindowOffsets) {
        let share = group::<_, N>(self.dy, offsets.output).map(|dy| dy * offsets.share);
        for row in 0..offsets.rows {
            for column in 0..offsets.columns {
                let dx = group_mut::<_, N>(self.dx, offsets.at(row, column));
                for lane in 0..N {
                    dx[lane] += share[lane];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(kernel: usize, stride: usize, pad: usize) -> impl Fn(usize) -> usize {
        move |size| Geometry { kernel, stride, pad }.count(size)
    }

    /// Sizes that Caffe's prototxts state or its layer set-up computes.
    #[test]
    fn output_sizes_are_rounded_up() {
        assert_eq!([32, 16, 8].map(sizes(3, 2, 0)), [16, 8, 4]);
        assert_eq!([55, 27, 13].map(sizes(3, 2, 0)), [27, 13, 6]);
        assert_eq!([112, 56, 28].map(sizes(3, 2, 0)), [56, 28, 14]);
        // ceil((5 + 2 - 2) / 2) + 1 = 4, but the fourth would begin behind the input.
        assert_eq!(sizes(2, 2, 1)(5), 3);
        assert_eq!(sizes(1, 3, 0)(5), 2);
    }

    #[test]
    fn windows_are_clipped_to_the_input_and_counted_with_padding() {
        let windows = Geometry { kernel: 3, stride: 2, pad: 1 }.windows(4);
        assert_eq!(
            windows,
            [
                Window { inside: 0..2, counted: 3 },
                Window { inside: 1..4, counted: 3 },
                Window { inside: 3..4, counted: 2 },
            ]
        );
        let windows = Geometry { kernel: 3, stride: 2, pad: 0 }.windows(4);
        assert_eq!(
            windows,
            [Window { inside: 0..3, counted: 3 }, Window { inside: 2..4, counted: 2 }]
        );
    }

    #[test]
    fn nan_is_not_hidden() {
        let (input, geometry) = (Shape::new(2, 2, 2), Geometry { kernel: 2, stride: 2, pad: 0 });
        let output = geometry.output(input);
        let mut pool = Pool::new(PoolMethod::Max, geometry, input, output, 1);
        let mut y = [0.0; 2];
        pool.forward(&[1.0, 1.0, f32::NAN, 2.0, 3.0, 3.0, 0.0, 0.0], &mut y);
        assert!(y[0].is_nan());
        assert_eq!(y[1], 3.0);
    }
}
