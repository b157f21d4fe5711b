//! A model, ready to compute: memory for a batch, and the layers one at a time.
//!
//! Parameters are not a net's own. They travel between backward and the next forward, so whoever
//! calls passes each layer's in, and takes each layer's gradient as soon as it is there:
//!
//! ```
//! use poseidon_nn::{Draw, Gradient, Model, Net, Phase};
//!
//! let model = Model::builtin("mlp").unwrap();
//! let mut net = Net::new(&model, 4)?;
//! let lens: Vec<usize> = net.layers().iter().map(|layer| layer.parameters).collect();
//! let mut parameters: Vec<Vec<f32>> = lens.iter().map(|&len| vec![0.0; len]).collect();
//! let mut gradients = parameters.clone();
//! for (layer, parameters) in parameters.iter_mut().enumerate() {
//!     net.fill(layer, 1, parameters);
//! }
//!
//! net.load(&[0.5; 2 * 28 * 28], &[3, 7], Draw { seed: 1, step: 0, first: 0, total: 2 })?;
//! for (layer, parameters) in parameters.iter().enumerate() {
//!     net.forward(layer, parameters, Phase::Train);
//! }
//! assert!(net.loss().mean() > 0.0);
//! for layer in (0..lens.len()).rev() {
//!     net.backward_through(layer, &parameters[layer], Gradient::Full(&mut gradients[layer]));
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub use crate::layer::Draw;

use crate::layer::{self, Layer, SLACK, relu};
use crate::loss::{Loss, softmax_cross_entropy};
use crate::model::{LayerSpec, Model, ModelError, Shape};
use crate::spec::MOST_VALUES;

/// A model with memory for a batch. One thread computes with it; several nets can run side by side.
pub struct Net {
    layers: Vec<LayerInfo>,
    stages: Vec<Stage>,
    /// `blobs[0]` is the input.
    blobs: Vec<Blob>,
    capacity: usize,
    input: Shape,
    classes: usize,
    labels: Vec<u32>,
    draw: Draw,
}

/// One layer of a [`Net`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerInfo {
    /// Name, unique in its net.
    pub name: String,
    /// Kind and size in words, such as "conv 5x5x32".
    pub kind: String,
    /// Shape of one sample's output.
    pub output: Shape,
    /// Number of parameters, 0 if it has none.
    pub parameters: usize,
    /// Outputs and inputs of an FC layer.
    pub fc: Option<(usize, usize)>,
    /// Whether it is a convolution.
    pub is_conv: bool,
    /// How its parameters are cut into tensors, one after the other: the dimensions of its weights and
    /// of its biases. Empty if it has none.
    pub tensors: Vec<(&'static str, Vec<usize>)>,
    /// Floating point operations of one image's forward pass. A multiply-add counts as two.
    pub flops: u64,
}

/// Whether dropout drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It does.
    Train,
    /// It does not.
    Test,
}

/// What [`Net::backward_through`] computes besides the gradient of the layer's input.
#[derive(Debug)]
pub enum Gradient<'a> {
    /// The parameters' gradient, weights then biases; what was there is overwritten.
    Full(&'a mut [f32]),
    /// Nothing: an FC layer's gradient is sent as [`Net::factors`].
    Factors,
    /// Nothing: the layer has no parameters, or they are not trained.
    None,
}

/// The factors of an FC layer's gradient: uᵀ v is the weights', the sum of u's rows the biases'.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors<'a> {
    /// `rows` x outputs: the gradient of the layer's output.
    pub u: &'a [f32],
    /// `rows` x inputs: the layer's input.
    pub v: &'a [f32],
    /// Samples in the batch.
    pub rows: usize,
}

/// Why a batch cannot be loaded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// There are no samples, or more than the net has memory for.
    #[error("a batch of {got} samples: expected 1 to {capacity}")]
    Batch {
        /// The largest batch.
        capacity: usize,
        /// Number of labels.
        got: usize,
    },
    /// The images are not as many as the labels, or not of the model's shape.
    #[error("{got} values of images for {samples} labels: expected {samples} times {shape}")]
    Images {
        /// Number of labels.
        samples: usize,
        /// The model's input.
        shape: Shape,
        /// Number of values.
        got: usize,
    },
    /// A label is not a class.
    #[error(
        "sample {sample} has label {label}: expected less than {classes}, the number of classes"
    )]
    Label {
        /// Position in this batch.
        sample: usize,
        /// Its label.
        label: u32,
        /// Number of classes.
        classes: usize,
    },
    /// The mean would be over fewer samples than the batch has.
    #[error("the mean is over {total} samples: expected at least the batch's {samples}")]
    Total {
        /// [`Draw::total`].
        total: usize,
        /// Number of labels.
        samples: usize,
    },
}

struct Stage {
    layer: Layer,
    spec: LayerSpec,
    input: usize,
    /// The same as `input` if the layer works in place, otherwise greater.
    output: usize,
    /// Whether a layer below has parameters, and so needs the gradient of this one's input.
    needs_input_gradient: bool,
}

impl Net {
    /// A net for batches of up to `capacity` samples.
    pub fn new(model: &Model, capacity: usize) -> Result<Self, ModelError> {
        let shapes = model.shapes()?;
        let largest = shapes.iter().chain([&model.input]).map(|shape| shape.len()).max();
        let most = MOST_VALUES / largest.unwrap_or(1);
        if !(1..=most).contains(&capacity) {
            return Err(ModelError::Model {
                model: model.name.clone(),
                expected: format!("a batch of 1 to {most} samples"),
                got: capacity.to_string(),
            });
        }
        let mut blobs = vec![Blob::new(model.input, capacity)];
        let mut layers: Vec<LayerInfo> = Vec::with_capacity(shapes.len());
        let mut stages = Vec::with_capacity(shapes.len());
        let mut shape = model.input;
        for (spec, output) in model.layers.iter().zip(shapes) {
            let layer = Layer::new(spec, shape, output, capacity);
            let input = blobs.len() - 1;
            // The input stays as it was loaded.
            if !layer.in_place() || input == 0 {
                blobs.push(Blob::new(output, capacity));
            }
            stages.push(Stage {
                layer,
                spec: spec.clone(),
                input,
                output: blobs.len() - 1,
                needs_input_gradient: layers.iter().any(|below| below.parameters > 0),
            });
            layers.push(LayerInfo::new(spec, shape, output));
            shape = output;
        }
        let labels = Vec::with_capacity(capacity);
        let draw = Draw::default();
        let Model { input, classes, .. } = *model;
        Ok(Self { layers, stages, blobs, capacity, input, classes, labels, draw })
    }

    /// Every layer, in forward order.
    pub fn layers(&self) -> &[LayerInfo] {
        &self.layers
    }

    /// Writes what the layer's parameters start from: weights, outputs x inputs, then biases.
    ///
    /// # Panics
    /// If `parameters` has not the layer's length, or there is no such layer; so do the others.
    pub fn fill(&self, layer: usize, seed: u64, parameters: &mut [f32]) {
        self.check(layer, parameters.len());
        layer::fill(&self.stages[layer].spec, layer, seed, parameters);
    }

    /// Takes the next batch: images of channels x height x width values, and a label for each.
    pub fn load(&mut self, images: &[f32], labels: &[u32], draw: Draw) -> Result<(), LoadError> {
        let (samples, shape) = (labels.len(), self.input);
        if samples == 0 || samples > self.capacity {
            return Err(LoadError::Batch { capacity: self.capacity, got: samples });
        }
        if images.len() != samples * shape.len() {
            return Err(LoadError::Images { samples, shape, got: images.len() });
        }
        let classes = self.classes;
        if let Some(sample) = labels.iter().position(|&label| label as usize >= classes) {
            return Err(LoadError::Label { sample, label: labels[sample], classes });
        }
        if draw.total < samples {
            return Err(LoadError::Total { total: draw.total, samples });
        }
        self.labels.clear();
        self.labels.extend_from_slice(labels);
        self.draw = draw;
        let to = self.blobs[0].data.chunks_exact_mut(shape.len());
        for (from, to) in images.chunks_exact(shape.len()).zip(to) {
            layer::transpose(from, shape.channels, shape.height * shape.width, to);
        }
        Ok(())
    }

    /// Computes the layer's output. Layers come in order, each once.
    pub fn forward(&mut self, layer: usize, parameters: &[f32], phase: Phase) {
        self.check(layer, parameters.len());
        let rows = self.labels.len();
        let stage = &mut self.stages[layer];
        let (below, above) = self.blobs.split_at_mut(stage.output);
        let y = above[0].data(rows);
        // Empty if the layer works in place: then its input is in `y`.
        let x = below.get_mut(stage.input).map_or(&[][..], |x| x.data(rows));
        match &mut stage.layer {
            Layer::Conv(conv) => conv.forward(x, parameters, y),
            Layer::Pool(pool) => pool.forward(x, y),
            Layer::Lrn(lrn) => lrn.forward(x, y),
            Layer::Fc(fc) => fc.forward(rows, x, parameters, y),
            Layer::Relu => {
                y[..x.len()].copy_from_slice(x);
                relu::forward(y);
            }
            Layer::Dropout(dropout) => {
                y[..x.len()].copy_from_slice(x);
                if phase == Phase::Train {
                    dropout.forward(layer, self.draw, y);
                }
            }
        }
    }

    /// The batch's loss: softmax cross-entropy of the last layer's output. Leaves the gradient
    /// with which backward begins.
    pub fn loss(&mut self) -> Loss {
        let rows = self.labels.len();
        // There is the input, at least.
        let top = self.blobs.last_mut().expect("no blobs");
        let (scores, gradient) = (&top.data[..rows * top.len], &mut top.gradient[..rows * top.len]);
        softmax_cross_entropy(scores, &self.labels, self.draw.total, gradient)
    }

    /// Computes the gradients of the layer's parameters and of its input, after forward in
    /// [`Phase::Train`] and [`Net::loss`]. Layers come in reverse order, each once, with the
    /// parameters that forward had. The input's gradient is skipped if no layer below has
    /// parameters.
    ///
    /// # Panics
    /// If a gradient has not the length of the parameters, or factors are asked of a layer that is
    /// not [fc](LayerInfo::fc).
    pub fn backward_through(&mut self, layer: usize, parameters: &[f32], gradient: Gradient<'_>) {
        self.check(layer, parameters.len());
        let gradient = match gradient {
            Gradient::Full(gradient) => {
                self.check(layer, gradient.len());
                Some(gradient)
            }
            Gradient::Factors => {
                let info = &self.layers[layer];
                assert!(info.fc.is_some(), "factors of layer '{}', {}", info.name, info.kind);
                None
            }
            Gradient::None => None,
        };
        let rows = self.labels.len();
        let stage = &mut self.stages[layer];
        let (below, above) = self.blobs.split_at_mut(stage.output);
        let y = &mut above[0];
        if let Some(gradient) = gradient {
            let x = below.get_mut(stage.input).map_or(&[][..], |x| x.data(rows));
            match &mut stage.layer {
                Layer::Conv(conv) => conv.gradient(x, &y.gradient, gradient),
                Layer::Fc(fc) => fc.gradient(rows, x, &y.gradient[..rows * y.len], gradient),
                _ => {}
            }
        }
        if !stage.needs_input_gradient {
            return;
        }
        let dy = &mut y.gradient[..rows * y.len];
        let (x, dx) = match below.get_mut(stage.input) {
            Some(x) => (&x.data[..rows * x.len], &mut x.gradient[..rows * x.len]),
            None => (&[][..], &mut [][..]),
        };
        match &mut stage.layer {
            Layer::Conv(conv) => conv.backward(dy, parameters, dx),
            Layer::Pool(pool) => pool.backward(dy, dx),
            Layer::Lrn(lrn) => lrn.backward(x, dy, dx),
            Layer::Fc(fc) => fc.backward(rows, dy, parameters, dx),
            Layer::Relu => relu::backward(&y.data, dy),
            Layer::Dropout(dropout) => dropout.backward(dy),
        }
    }

    /// The factors of an FC layer's gradient, from [`Net::backward_through`] it until the next
    /// [`Net::load`].
    ///
    /// # Panics
    /// If the layer is not [fc](LayerInfo::fc).
    pub fn factors(&self, layer: usize) -> Factors<'_> {
        let stage = &self.stages[layer];
        let (x, y) = (&self.blobs[stage.input], &self.blobs[stage.output]);
        let rows = self.labels.len();
        let Layer::Fc(fc) = &stage.layer else {
            let info = &self.layers[layer];
            panic!("factors of layer '{}', {}", info.name, info.kind);
        };
        Factors { u: &y.gradient[..rows * y.len], v: fc.rows(rows, &x.data), rows }
    }

    /// The last layer's output, a row of scores for every sample.
    pub fn scores(&self) -> &[f32] {
        let top = self.blobs.last().expect("no blobs");
        &top.data[..self.labels.len() * top.len]
    }

    /// The first layer whose output has a number that is not finite.
    pub fn first_not_finite(&self) -> Option<&LayerInfo> {
        let finite = |blob: &Blob| {
            blob.data[..self.labels.len() * blob.len].iter().all(|value| value.is_finite())
        };
        let broken = self.stages.iter().position(|stage| !finite(&self.blobs[stage.output]));
        broken.map(|layer| &self.layers[layer])
    }

    fn check(&self, layer: usize, parameters: usize) {
        let LayerInfo { name, parameters: expected, .. } = &self.layers[layer];
        assert_eq!(*expected, parameters, "length of the parameters of layer '{name}'");
    }
}

impl LayerInfo {
    /// `spec` and the shapes must have passed [`Model::shapes`].
    fn new(spec: &LayerSpec, input: Shape, output: Shape) -> Self {
        let parameters = layer::parameters(spec, input).unwrap_or(0);
        let fc = match spec {
            LayerSpec::Fc { outputs, .. } => Some((*outputs, input.len())),
            _ => None,
        };
        let tensors = match *spec {
            LayerSpec::Conv { outputs, kernel, .. } => {
                let weight = vec![outputs, input.channels, kernel, kernel];
                vec![("weight", weight), ("bias", vec![outputs])]
            }
            LayerSpec::Fc { outputs, .. } => {
                vec![("weight", vec![outputs, input.len()]), ("bias", vec![outputs])]
            }
            _ => Vec::new(),
        };
        let (of_input, of_output) = (input.len() as u64, output.len() as u64);
        let flops = match *spec {
            LayerSpec::Conv { kernel, .. } => {
                of_output * (2 * (kernel * kernel * input.channels) as u64 + 1)
            }
            LayerSpec::Fc { .. } => of_output * (2 * of_input + 1),
            LayerSpec::Pool { kernel, .. } => of_output * (kernel * kernel) as u64,
            LayerSpec::Lrn { size, .. } => of_output * (size as u64 + 5),
            LayerSpec::Relu { .. } | LayerSpec::Dropout { .. } => of_output,
        };
        Self {
            name: spec.name().into(),
            kind: spec.to_string(),
            output,
            parameters,
            fc,
            is_conv: matches!(spec, LayerSpec::Conv { .. }),
            tensors,
            flops,
        }
    }
}

/// Values between layers, and their gradient.
struct Blob {
    /// Of one sample.
    len: usize,
    data: Vec<f32>,
    gradient: Vec<f32>,
}

impl Blob {
    fn new(shape: Shape, capacity: usize) -> Self {
        let values = vec![0.0; capacity * shape.len() + SLACK];
        Self { len: shape.len(), gradient: values.clone(), data: values }
    }

    fn data(&mut self, rows: usize) -> &mut [f32] {
        &mut self.data[..rows * self.len]
    }
}
